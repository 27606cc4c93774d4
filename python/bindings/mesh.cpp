#include "mesh.h"
#include "handles.h"
#include "library.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <stdexcept>

#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/c10d_interop.h"
#include "tessera/comm/job/mesh_traffic.h"
#include "tessera/comm/job/threads.h"
#include "tessera/tensor/policy.h"

namespace tessera::python {

namespace {

// Python's functions have no handle to carry the manager. One a thread, since ranks may be threads.
std::optional<DistributedManager>& current() {
  thread_local std::optional<DistributedManager> here;
  return here;
}

ManagerOptions manager_options(const std::string& backend, double timeout) {
  ManagerOptions options;
  options.backend = backend;
  if (timeout > 0) options.timeout = bounded_limit(std::chrono::duration<double>(timeout));
  return options;
}

/// Ranks that are Python's own threads.
struct PyThreadRanks : torch::CustomClassHolder {
  PyThreadRanks(std::int64_t ranks, const std::string& backend, double timeout)
      : ranks(static_cast<int>(ranks), manager_options(backend, timeout)) {}
  void enter(std::int64_t rank) const { current() = ranks.enter(static_cast<int>(rank)); }
  void fail(std::int64_t rank, const std::string& what) const {
    ranks.fail(static_cast<int>(rank), what);
  }
  void leave(std::int64_t rank) const {
    DroppedElsewhere::here()->let_go(true);
    ranks.leave(static_cast<int>(rank));
    current().reset();
  }
  ThreadRanks ranks;
};

struct PyRefusals : torch::CustomClassHolder {
  void start() { scope.emplace(here()); }
  std::optional<RefusalScope> scope;
};

struct PyTrace : torch::CustomClassHolder {
  PyTrace() : trace(std::make_shared<CommTrace>()) {}
  void start() { set_trace(here(), trace); }
  void stop() const { set_trace(here(), nullptr); }
  std::shared_ptr<CommTrace> trace;
};

void init(const std::string& backend, double timeout, const std::string& between_hosts,
          const std::optional<c10::intrusive_ptr<c10d::ProcessGroup>>& group,
          const std::optional<std::int64_t>& communicator) {
  if (current().has_value())
    throw ConfigurationError("tessera.init: this rank is initialized already");
  auto options = manager_options(backend, timeout);
  options.between_hosts = between_hosts;
  if (timeout > 0) options.rendezvous_timeout = options.timeout;  // the wait for ranks to come too
  if (communicator) {
    options.mpi = MpiWorld::of_communicator(static_cast<int>(*communicator), options.timeout);
    if (options.backend.empty()) options.backend = "mpi";
    options.launch = options.mpi->launch_with_store(options.timeout);
  }
  current() =
      group ? manager_of({.group = *group}, options) : DistributedManager::initialize(options);
}

// `failed`: the program ends by an exception, which the other ranks must learn now, not at their
// time limit.
void shutdown(bool failed) {
  if (!current()) return;
  DroppedElsewhere::here()->let_go(true);
  if (!failed) {
    current().reset();
    return;
  }
  try {
    const DistributedManager last = here();
    current().reset();
    throw std::runtime_error("the program ends by an exception");
  } catch (const std::runtime_error&) {  // the manager has seen it pass
  }
}

/// The state of the generator behind torch.get_rng_state(), whose own call keeps the generator
/// locked while Python allocates: ranks that are threads can wait for it and for each other.
struct HostGenerator : torch::CustomClassHolder {
  static at::Tensor state() {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::scoped_lock lock(generator.mutex());
    return generator.get_state();
  }
};

std::string text(Policy policy) {
  return policy == Policy::allow ? "allow" : policy == Policy::warn ? "warn" : "error";
}

Policy policy(const std::string& name) {
  if (name == "allow") return Policy::allow;
  if (name == "warn") return Policy::warn;
  if (name == "error") return Policy::error;
  throw InvalidArgument("a policy is 'allow', 'warn' or 'error', not '", name, "'");
}

using TracePtr = c10::intrusive_ptr<PyTrace>;

}  // namespace

std::vector<Axis> mesh_axes(const Names& names, const Numbers& sizes) {
  if (names.size() != sizes.size())
    throw InvalidArgument("a mesh with ", names.size(), " names and ", sizes.size(), " sizes");
  std::vector<Axis> all;
  for (std::size_t i = 0; i < names.size(); ++i)
    all.push_back({names[i], static_cast<int>(sizes[i])});
  return all;
}

std::string joined_axes(const Names& axes) {
  std::string text;
  for (const std::string& axis : axes) text += (text.empty() ? "" : "-") + axis;
  return text;
}

PyMesh::PyMesh(const Names& names, const Numbers& sizes)
    : mesh(here().mesh(mesh_axes(names, sizes))) {}

DistributedManager here() {
  if (!current()) {
    throw ConfigurationError(
        "this thread is no rank yet: call tessera.init() first, or run the code with "
        "tessera.run_threads()");
  }
  return *current();
}

void register_mesh(Library& library) {
  library.class_<PyMesh>("Mesh")
      .def(torch::init<const Names&, const Numbers&>())
      .def("coordinate", [](const MeshPtr& self) { return from_ints(self->mesh.coordinate()); })
      .def("names", [](const MeshPtr& self) { return self->mesh.mesh().names(); })
      .def("sizes",
           [](const MeshPtr& self) {
             Numbers sizes;
             for (const Axis& axis : self->mesh.mesh().axes()) sizes.push_back(axis.size);
             return sizes;
           })
      .def("same",
           [](const MeshPtr& self, const MeshPtr& other) { return self->mesh == other->mesh; })
      .def("barrier", [](const MeshPtr& self) { self->mesh.all().barrier(); })
      .def("fail", [](const MeshPtr& self, const std::string& reason) {
        self->mesh.manager().fail_groups_within(self->mesh.mesh(), reason);
      });
  library.class_<HostGenerator>("HostGenerator")
      .def(torch::init<>())
      .def("state",
           [](const c10::intrusive_ptr<HostGenerator>&) { return HostGenerator::state(); });
  library.class_<PyThreadRanks>("ThreadRanks")
      .def(torch::init<std::int64_t, const std::string&, double>())
      .def("enter", [](const c10::intrusive_ptr<PyThreadRanks>& self,
                       std::int64_t rank) { self->enter(rank); })
      .def("fail", [](const c10::intrusive_ptr<PyThreadRanks>& self, std::int64_t rank,
                      const std::string& what) { self->fail(rank, what); })
      .def("leave", [](const c10::intrusive_ptr<PyThreadRanks>& self, std::int64_t rank) {
        self->leave(rank);
      });
  library.class_<PyRefusals>("Refusals")
      .def(torch::init<>())
      .def("start", [](const c10::intrusive_ptr<PyRefusals>& self) { self->start(); })
      .def("stop", [](const c10::intrusive_ptr<PyRefusals>& self) { self->scope.reset(); })
      .def("all", [](const c10::intrusive_ptr<PyRefusals>& self) {
        std::vector<std::tuple<std::string, std::string>> all;
        if (self->scope) {
          for (const Refusal& r : self->scope->refusals()) all.emplace_back(r.op, r.why);
        }
        return all;
      });
  library.class_<PyTrace>("CommTrace")
      .def(torch::init<>())
      .def("start", [](const TracePtr& self) { self->start(); })
      .def("stop", [](const TracePtr& self) { self->stop(); })
      .def("events",
           [](const TracePtr& self) {
             std::vector<std::tuple<std::string, std::string, std::int64_t>> all;
             for (const CommEvent& e : self->trace->events())
               all.emplace_back(e.operation, e.group, e.bytes);
             return all;
           })
      .def("table", [](const TracePtr& self) { return self->trace->table(); })
      .def("write_timeline", [](const TracePtr& self, const std::string& path) {
        self->trace->write_timeline(path, here().rank());
      });

  library.def("mean_traffic", [](const TracePtr& trace, const MeshPtr& mesh, double steps) {
    std::vector<std::tuple<std::string, std::string, double, double>> all;
    for (const Traffic& t : mean_traffic(*trace->trace, mesh->mesh, steps).moved.traffic)
      all.emplace_back(joined_axes(t.axes), to_string(t.collective), t.bytes, t.calls);
    return all;
  });
  library.def("init", &init);
  library.def("shutdown", &shutdown);
  library.def("initialized", [] { return current().has_value(); });
  library.def("rank", []() -> std::int64_t { return here().rank(); });
  library.def("world_size", []() -> std::int64_t { return here().world_size(); });
  library.def("local_rank", []() -> std::int64_t { return here().local_rank(); });
  library.def("manual_seed", [](std::int64_t seed) {
    tessera::manual_seed(here(), static_cast<std::uint64_t>(seed));
  });
  // The seed and the stream of the next draw; nothing where this thread is no rank.
  library.def("random_state", []() -> Numbers {
    if (!current().has_value()) return {};
    const RandomState state = tessera::random_state(here());
    return {static_cast<std::int64_t>(state.seed), static_cast<std::int64_t>(state.stream)};
  });
  library.def("set_random_state", [](std::int64_t seed, std::int64_t stream) {
    tessera::set_random_state(
        here(), {static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(stream)});
  });
  library.def("policies", []() -> Names {
    const Policies now = tessera::policies(here());
    return {text(now.redistribution), text(now.promotion), text(now.plain_values)};
  });
  library.def("set_policies", [](const std::string& redistribution, const std::string& promotion,
                                 const std::string& plain_values) {
    tessera::set_policies(here(), {.redistribution = policy(redistribution),
                                   .promotion = policy(promotion),
                                   .plain_values = policy(plain_values)});
  });
}

}  // namespace tessera::python
