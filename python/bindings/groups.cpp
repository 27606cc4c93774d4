// Groups of ranks, their collectives and gradients, and groups given by two numbers.

#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>

#include "handles.h"
#include "library.h"
#include "mesh.h"
#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/functional.h"
#include "tessera/comm/group/shared_memory.h"
#include "tessera/comm/job/parallel_groups.h"

namespace tessera::python {

ReduceOp reduce_op(const std::string& name, double factor) {
  for (const auto kind :
       {ReduceOp::Kind::sum, ReduceOp::Kind::avg, ReduceOp::Kind::product, ReduceOp::Kind::min,
        ReduceOp::Kind::max, ReduceOp::Kind::premultiplied}) {
    if (name != to_string(kind)) continue;
    if (factor != 1 && kind != ReduceOp::Kind::premultiplied)
      throw InvalidArgument("factor=", factor, " with '", name,
                            "', which takes none: 'premultiplied' does");
    return {kind, factor};
  }
  throw InvalidArgument("'", name,
                        "' is no reduce operation: sum, avg, product, min, max, premultiplied");
}

GroupOptions group_options(const std::string& backend, double seconds) {
  GroupOptions options;
  options.backend = backend;
  if (seconds > 0) options.timeout = bounded_limit(std::chrono::duration<double>(seconds));
  return options;
}

std::vector<int> to_ints(const Numbers& numbers) { return {numbers.begin(), numbers.end()}; }
Numbers from_ints(const std::vector<int>& numbers) { return {numbers.begin(), numbers.end()}; }

std::shared_ptr<DroppedElsewhere> DroppedElsewhere::here() {
  struct OfThread {
    const std::shared_ptr<DroppedElsewhere> all = std::make_shared<DroppedElsewhere>();
    ~OfThread() { all->close(); }
  };
  thread_local const OfThread mine;
  return mine.all;
}

bool DroppedElsewhere::add(std::function<bool()> done) {
  const std::lock_guard lock(mutex_);
  if (!closed_) started_.push_back(std::move(done));
  return !closed_;
}

void DroppedElsewhere::let_go(bool all) {
  std::vector<std::function<bool()>> taken;
  {
    const std::lock_guard lock(mutex_);
    taken.swap(started_);
  }
  if (!all) {
    std::erase_if(taken, [](const auto& done) { return done(); });
    const std::lock_guard lock(mutex_);
    std::move(taken.begin(), taken.end(), std::back_inserter(started_));
    taken.clear();
  }
}

void DroppedElsewhere::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  let_go(true);
}

namespace {

/// The arguments of any collective, in the order of Python's.
struct CollectiveCall {
  std::string name;
  // What is sent or reduced, and where the result of those calls goes that have another tensor.
  MaybeTensor tensor, output;
  int rank;
  ReduceOp op;
  Sizes sizes, input_sizes;
  CallOptions options;

  at::Tensor given() const {
    if (!tensor) throw InvalidArgument(name, ": no tensor was given");
    return *tensor;
  }
  at::Tensor result() const { return output.value_or(at::Tensor()); }
};

template <class Result>
Result call(const Collectives<Result>& group, const CollectiveCall& c) {
  const at::Tensor input = c.tensor.value_or(at::Tensor());
  if (c.name == "broadcast") return group.broadcast(c.given(), c.rank, c.options);
  if (c.name == "all_reduce") return group.all_reduce(c.given(), c.op, c.options);
  if (c.name == "reduce") return group.reduce(c.given(), c.rank, c.op, c.options);
  if (c.name == "all_gather") return group.all_gather(c.result(), c.given(), c.sizes, c.options);
  if (c.name == "reduce_scatter")
    return group.reduce_scatter(c.result(), c.given(), c.op, c.sizes, c.options);
  if (c.name == "all_to_all")
    return group.all_to_all(c.result(), c.given(), c.sizes, c.input_sizes, c.options);
  if (c.name == "gather") return group.gather(c.result(), c.given(), c.rank, c.sizes, c.options);
  if (c.name == "scatter") return group.scatter(c.result(), input, c.rank, c.sizes, c.options);
  if (c.name == "send") return group.send(c.given(), c.rank, c.options);
  if (c.name == "receive") return group.receive(c.given(), c.rank, c.options);
  if (c.name == "barrier") return group.barrier(c.options);
  throw InvalidArgument("a group has no call '", c.name, "'");
}

template <class Answer>
Answer collective(const GroupPtr& self, const std::string& name, const MaybeTensor& tensor,
                  const MaybeTensor& output, std::int64_t rank, const std::string& op,
                  double factor, const Numbers& sizes, const Numbers& input_sizes, double timeout) {
  CollectiveCall c{name,  tensor,      output, static_cast<int>(rank), reduce_op(op, factor),
                   sizes, input_sizes, {}};
  if (timeout > 0) c.options.timeout = bounded_limit(std::chrono::duration<double>(timeout));
  if constexpr (std::is_void_v<Answer>) {
    DroppedElsewhere::here()->let_go(false);
    call<void>(self->group, c);
  } else {
    return c10::make_intrusive<PyRequest>(call<Request>(self->group.started(), c));
  }
}

/// Those that autograd sees.
at::Tensor differentiable(const std::string& name, const GroupPtr& on, const at::Tensor& x,
                          std::int64_t rank, const std::string& op, double factor,
                          const Numbers& sizes, const Numbers& input_sizes, bool replicated) {
  const Group& group = on->group;
  const auto how = replicated ? functional::Cotangent::replicated : functional::Cotangent::summed;
  const int at = static_cast<int>(rank);
  if (name == "all_reduce") return functional::all_reduce(group, x, reduce_op(op, factor), how);
  if (name == "all_gather") return functional::all_gather(group, x, sizes, how);
  if (name == "reduce_scatter")
    return functional::reduce_scatter(group, x, sizes, reduce_op(op, factor));
  if (name == "all_to_all") return functional::all_to_all(group, x, sizes, input_sizes);
  if (name == "broadcast") return functional::broadcast(group, x, at, how);
  if (name == "reduce") return functional::reduce(group, x, at, reduce_op(op, factor));
  if (name == "gather") return functional::gather(group, x, at, sizes);
  if (name == "scatter") return functional::scatter(group, x, at, sizes);
  if (name == "send") return functional::send(group, x, at);
  if (name == "receive") return functional::receive(group, x, at);
  if (name == "replicate") return functional::replicate(group, x);
  if (name == "own_rows") return functional::own_rows(group, x, sizes);
  throw InvalidArgument("there is no functional.", name);
}

using PyGroupInfo = Held<GroupInfo>;
using GroupInfoPtr = c10::intrusive_ptr<PyGroupInfo>;

struct PyParallelGroups : torch::CustomClassHolder {
  PyParallelGroups(std::int64_t model, std::int64_t pipeline, const Names& backends,
                   const std::vector<double>& limits)
      : groups(here(), options(model, pipeline, backends, limits)) {}
  static ParallelOptions options(std::int64_t model, std::int64_t pipeline, const Names& backends,
                                 const std::vector<double>& limits) {
    return {static_cast<int>(model), static_cast<int>(pipeline),
            group_options(backends.at(0), limits.at(0)),
            group_options(backends.at(1), limits.at(1)),
            group_options(backends.at(2), limits.at(2))};
  }
  const GroupInfo& info(const std::string& kind) const {
    return kind == "mp"   ? groups.mp
           : kind == "pp" ? groups.pp
           : kind == "dp" ? groups.dp
                          : groups.world;
  }
  ParallelGroups groups;
};
using ParallelPtr = c10::intrusive_ptr<PyParallelGroups>;

using PySharedMemory = Held<SharedMemory>;
using SharedMemoryPtr = c10::intrusive_ptr<PySharedMemory>;

void register_shared_memory(Library& library) {
  library.class_<PySharedMemory>("SharedMemory")
      .def("bytes", [](const SharedMemoryPtr& self) { return self->value.bytes(); })
      .def("used", [](const SharedMemoryPtr& self) { return self->value.used(); })
      .def("empty", [](const SharedMemoryPtr& self, const Numbers& shape, const at::Tensor& like) {
        return self->value.empty(shape, like.options());
      });
}

void register_group_class(Library& library) {
  library.class_<PyRequest>("Request")
      .def("done", [](const RequestPtr& self) { return self->done(); })
      .def("wait", [](const RequestPtr& self) { return self->wait(); });
  library.class_<PyGroup>("Group")
      .def("rank", [](const GroupPtr& self) -> std::int64_t { return self->group.rank(); })
      .def("size", [](const GroupPtr& self) -> std::int64_t { return self->group.size(); })
      .def("ranks", [](const GroupPtr& self) { return from_ints(self->group.ranks()); })
      .def("name", [](const GroupPtr& self) { return self->group.name(); })
      .def("backend", [](const GroupPtr& self) { return self->group.backend(); })
      .def("backend_reason", [](const GroupPtr& self) { return self->group.backend_reason(); })
      .def("timeout",
           [](const GroupPtr& self) {
             return std::chrono::duration<double>(self->group.timeout()).count();
           })
      .def("set_timeout",
           [](const GroupPtr& self, double seconds) {
             self->group.set_timeout(bounded_limit(std::chrono::duration<double>(seconds)));
           })
      .def("abort",
           [](const GroupPtr& self, const std::string& reason) { self->group.abort(reason); })
      .def("process_group", [](const GroupPtr& self) { return self->group.process_group(); })
      .def("same",
           [](const GroupPtr& self, const GroupPtr& other) { return self->group == other->group; })
      .def("shared_memory",
           [](const GroupPtr& self, std::int64_t bytes, double timeout) {
             CallOptions options;
             if (timeout > 0)
               options.timeout = bounded_limit(std::chrono::duration<double>(timeout));
             return c10::make_intrusive<PySharedMemory>(
                 SharedMemory::make(self->group, bytes, options));
           })
      .def("all_gather_text",
           [](const GroupPtr& self, const std::string& mine) {
             return self->group.all_gather_bytes(mine);
           })
      .def("broadcast_text",
           [](const GroupPtr& self, const std::string& text, std::int64_t root) {
             return self->group.broadcast_bytes(text, static_cast<int>(root));
           })
      .def("call", &collective<void>)
      .def("start", &collective<RequestPtr>);
}

void register_parallel_groups(Library& library) {
  library.class_<PyGroupInfo>("GroupInfo")
      .def("group",
           [](const GroupInfoPtr& self) { return c10::make_intrusive<PyGroup>(self->value.group); })
      .def("all_reduce",
           [](const GroupInfoPtr& self, const at::Tensor& tensor, const std::string& op,
              double factor) { self->value.all_reduce(tensor, reduce_op(op, factor)); })
      .def("start_all_reduce",
           [](const GroupInfoPtr& self, const at::Tensor& tensor, const std::string& op,
              double factor) {
             return c10::make_intrusive<PyRequest>(
                 self->value.start_all_reduce(tensor, reduce_op(op, factor)));
           })
      .def("split", [](const GroupInfoPtr& self, const at::Tensor& tensor,
                       std::int64_t dim) { return self->value.split(tensor, dim); })
      .def("all_gather", [](const GroupInfoPtr& self, const at::Tensor& tensor,
                            std::int64_t dim) { return self->value.all_gather(tensor, dim); })
      .def("start_all_gather",
           [](const GroupInfoPtr& self, const at::Tensor& tensor, std::int64_t dim) {
             return c10::make_intrusive<PyRequest>(self->value.start_all_gather(tensor, dim));
           })
      .def("gather_to",
           [](const GroupInfoPtr& self, std::int64_t root, const at::Tensor& tensor,
              std::int64_t dim) -> MaybeTensor {
             const at::Tensor all = self->value.gather_to(static_cast<int>(root), tensor, dim);
             return all.defined() ? MaybeTensor(all) : std::nullopt;
           })
      .def("start_gather_to", [](const GroupInfoPtr& self, std::int64_t root,
                                 const at::Tensor& tensor, std::int64_t dim) {
        return c10::make_intrusive<PyRequest>(
            self->value.start_gather_to(static_cast<int>(root), tensor, dim));
      });
  library.class_<PyParallelGroups>("ParallelGroups")
      .def(torch::init<std::int64_t, std::int64_t, const Names&, const std::vector<double>&>())
      .def("mesh",
           [](const ParallelPtr& self) { return c10::make_intrusive<PyMesh>(self->groups.mesh); })
      .def("info",
           [](const ParallelPtr& self, const std::string& kind) {
             return c10::make_intrusive<PyGroupInfo>(self->info(kind));
           })
      .def("summary", [](const ParallelPtr& self) { return self->groups.summary(); });
}

/// Another mesh over ranks of this one, of the same manager.
MeshPtr derived(const MeshPtr& self, const Mesh& mesh) {
  return c10::make_intrusive<PyMesh>(self->mesh.manager().mesh(mesh));
}

void register_mesh_groups(Library& library) {
  library.def("mesh_over", [](const Names& names, const Numbers& sizes, const Numbers& ranks) {
    return c10::make_intrusive<PyMesh>(here().mesh(Mesh(mesh_axes(names, sizes), to_ints(ranks))));
  });
  library.def("mesh_named", [](const std::string& name) {
    return c10::make_intrusive<PyMesh>(here().mesh(name));
  });
  library.def("add_mesh", [](const std::string& name, const MeshPtr& mesh) {
    here().add_mesh(name, mesh->mesh.mesh());
  });
  library.def("mesh_group", [](const MeshPtr& self, const Names& axes) {
    return c10::make_intrusive<PyGroup>(self->mesh.group(self->mesh.mesh().indices(axes)));
  });
  library.def("mesh_ranks",
              [](const MeshPtr& self) { return from_ints(self->mesh.mesh().ranks()); });
  library.def("mesh_contains_me", [](const MeshPtr& self) { return self->mesh.contains_me(); });
  library.def("mesh_text", [](const MeshPtr& self) { return self->mesh.mesh().to_string(); });
  library.def("mesh_groups", [](const MeshPtr& self, const Names& axes) {
    std::vector<Numbers> all;
    for (const auto& ranks : self->mesh.mesh().groups(axes).lists())
      all.push_back(from_ints(ranks));
    return all;
  });
  library.def("mesh_rank_at", [](const MeshPtr& self, const Numbers& at) -> std::int64_t {
    return self->mesh.mesh().rank_at(to_ints(at));
  });
  library.def("mesh_slice", [](const MeshPtr& self, const std::string& axis, std::int64_t begin,
                               std::optional<std::int64_t> end) {
    const Mesh& all = self->mesh.mesh();
    const int from = static_cast<int>(begin);
    return derived(self,
                   end ? all.slice(axis, from, static_cast<int>(*end)) : all.slice(axis, from));
  });
  library.def("mesh_submesh", [](const MeshPtr& self, const Names& axes) {
    return derived(self, self->mesh.mesh().submesh(axes, self->mesh.manager().rank()));
  });
  library.def("mesh_flatten", [](const MeshPtr& self, const Names& axes, const std::string& name) {
    return derived(self, self->mesh.mesh().flatten(axes, name));
  });
  library.def("mesh_view", [](const MeshPtr& self, const Names& names, const Numbers& sizes) {
    return derived(self, self->mesh.mesh().view(mesh_axes(names, sizes)));
  });
}

}  // namespace

void register_groups(Library& library) {
  register_shared_memory(library);
  register_group_class(library);
  register_parallel_groups(library);
  register_mesh_groups(library);
  library.def("world", [] { return c10::make_intrusive<PyGroup>(here().world()); });
  library.def("group_of", [](const Numbers& ranks, const std::string& backend, double timeout) {
    return c10::make_intrusive<PyGroup>(
        here().group(to_ints(ranks), group_options(backend, timeout)));
  });
  library.def("group_named", [](const std::string& family) {
    return c10::make_intrusive<PyGroup>(here().group(family));
  });
  library.def("group_names", [] { return here().group_names(); });
  library.def("group_size",
              [](const std::string& f) -> std::int64_t { return here().group_size(f); });
  library.def("group_rank",
              [](const std::string& f) -> std::int64_t { return here().group_rank(f); });
  library.def("set_check_level", [](const std::string& level) {
    here().set_check_level(
        level == "off"     ? CheckLevel::off
        : level == "local" ? CheckLevel::local
        : level == "collective"
            ? CheckLevel::collective
            : throw InvalidArgument("a check level is 'off', 'local' or 'collective', not '", level,
                                    "'"));
  });
  library.def("functional", &differentiable);
}

}  // namespace tessera::python
