// Checkpoints of many ranks: the states that Python fills, the Checkpointer and its reader. Values
// are bytes, which Python's texts are not: they pass as tensors.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include "convert.h"
#include "handles.h"
#include "library.h"
#include "mesh.h"
#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/comm/agree/agree.h"

namespace tessera::python {

namespace {

using MeshPtr = c10::intrusive_ptr<PyMesh>;
using Names = std::vector<std::string>;
using Tensors = std::vector<at::Tensor>;

std::string bytes_of(const at::Tensor& t) {
  if (t.scalar_type() != at::kByte || !t.device().is_cpu() || !t.is_contiguous())
    throw InvalidArgument("bytes are a contiguous uint8 tensor in memory of the host");
  std::string bytes(static_cast<std::size_t>(t.numel()), '\0');
  if (!bytes.empty()) std::memcpy(bytes.data(), t.const_data_ptr(), bytes.size());
  return bytes;
}

at::Tensor tensor_of(const std::string& bytes) {
  const at::Tensor t = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(t.mutable_data_ptr(), bytes.data(), bytes.size());
  return t;
}

std::chrono::milliseconds limit_of(double seconds) {
  return bounded_limit(std::chrono::duration<double>(seconds));
}

/// Names and bytes.
std::tuple<Names, Tensors> listed(const std::map<std::string, std::string>& values) {
  std::tuple<Names, Tensors> all;
  for (const auto& [name, bytes] : values) {
    std::get<0>(all).push_back(name);
    std::get<1>(all).push_back(tensor_of(bytes));
  }
  return all;
}

CheckpointOptions::Busy busy_of(const std::string& name) {
  if (name == "wait") return CheckpointOptions::Busy::wait;
  if (name == "refuse") return CheckpointOptions::Busy::refuse;
  throw InvalidArgument(concat("busy is 'wait' or 'refuse', not '", name, "'"));
}

struct PyCheckpointer : torch::CustomClassHolder {
  PyCheckpointer(const std::string& folder, const GroupPtr& group, std::int64_t keep_last,
                 const std::string& busy, std::int64_t background_rate, bool check_replicas,
                 bool remove_incomplete, double timeout) {
    // What one rank alone has wrong is told on all.
    CheckpointOptions options;
    agree::all(group->group, "checkpoints", [&] {
      if (keep_last < 0 || keep_last > INT32_MAX || background_rate < 0)
        throw InvalidArgument(concat("a Checkpointer that keeps the last ", keep_last,
                                     " and writes ", background_rate, " bytes a second"));
      options.keep_last = static_cast<int>(keep_last);
      options.busy = busy_of(busy);
      options.background_rate = static_cast<std::uint64_t>(background_rate);
      options.check_replicas = check_replicas;
      options.remove_incomplete = remove_incomplete;
      options.timeout = limit_of(timeout);
    });
    checkpointer.emplace(here(), folder, options, group->group.ranks());
  }
  Checkpointer& open() {
    if (!checkpointer) throw InvalidArgument("the Checkpointer is closed");
    return *checkpointer;
  }
  std::optional<Checkpointer> checkpointer;
};
using CheckpointerPtr = c10::intrusive_ptr<PyCheckpointer>;

struct PyCheckpointReader : torch::CustomClassHolder {
  PyCheckpointReader(const GroupPtr& group, const std::string& folder,
                     const std::optional<std::string>& name) {
    if (name)
      reader.emplace(group->group, folder, *name);
    else
      reader.emplace(group->group, folder);
  }
  std::optional<CheckpointReader> reader;
};
using ReaderPtr = c10::intrusive_ptr<PyCheckpointReader>;

/// Names; tensors without data, of the saved shapes and dtypes; layouts as JSON, empty for tensors
/// that were plain.
std::tuple<Names, Tensors, Names> described(const CheckpointReader& reader) {
  std::tuple<Names, Tensors, Names> all;
  auto& [names, tensors, layouts] = all;
  for (const SavedTensor& t : reader.tensors()) {
    names.push_back(t.name);
    tensors.push_back(at::empty(t.shape, at::TensorOptions(t.dtype).device(at::kMeta)));
    layouts.push_back(t.layout ? to_json(*t.layout) : "");
  }
  return all;
}

LoadOptions load_options(bool allow_missing, bool convert, bool all_or_nothing,
                         std::int64_t threads, double timeout) {
  LoadOptions options;
  // What is left over has been told in Python, which knows the names of all ranks.
  options.allow_extra = true;
  options.allow_missing = allow_missing;
  options.convert = convert;
  options.all_or_nothing = all_or_nothing;
  options.threads = static_cast<int>(threads);
  options.timeout = limit_of(timeout);
  return options;
}

void register_states(Library& library) {
  library.class_<PyCheckpointState>("CheckpointState")
      .def(torch::init<>())
      .def("add", [](const StatePtr& self, const std::string& name,
                     const at::Tensor& t) { self->state.add(name, t); })
      .def("set", [](const StatePtr& self, const std::string& name,
                     const at::Tensor& bytes) { self->state.set(name, bytes_of(bytes)); })
      .def("set_of_rank",
           [](const StatePtr& self, const std::string& name, const at::Tensor& bytes) {
             self->state.set_of_rank(name, bytes_of(bytes));
           });
  // What each rank says, in the order of the group; a problem of one rank is thrown on all.
  library.def("agree", [](const GroupPtr& group, const std::string& what,
                          const std::string& problem, const std::string& mine) {
    return agree::all<std::string>(group->group, what, [&] {
      if (!problem.empty()) throw InvalidArgument(problem);
      return mine;
    });
  });
}

void register_reader(Library& library) {
  library.class_<PyCheckpointReader>("CheckpointReader")
      .def(torch::init<const GroupPtr&, const std::string&, const std::optional<std::string>&>())
      .def("tensors", [](const ReaderPtr& self) { return described(*self->reader); })
      .def("saved_ranks",
           [](const ReaderPtr& self) -> std::int64_t { return self->reader->saved_ranks(); })
      .def("bytes_read",
           [](const ReaderPtr& self) {
             return static_cast<std::int64_t>(self->reader->bytes_read());
           })
      // Those of all ranks, and this rank's own.
      .def("values",
           [](const ReaderPtr& self, double timeout) {
             CheckpointState state;
             self->reader->load(state, load_options(true, false, true, 0, timeout));
             return std::tuple(listed(state.values()), listed(state.rank_values()));
           })
      .def("values_of_ranks",
           [](const ReaderPtr& self, const std::string& name) {
             std::tuple<std::vector<std::int64_t>, Tensors> all;
             for (const auto& [rank, bytes] : self->reader->values_of_ranks(name)) {
               std::get<0>(all).push_back(rank);
               std::get<1>(all).push_back(tensor_of(bytes));
             }
             return all;
           })
      .def("load",
           [](const ReaderPtr& self, const StatePtr& state, bool allow_missing, bool convert,
              bool all_or_nothing, std::int64_t threads, double timeout) {
             self->reader->load(state->state, load_options(allow_missing, convert, all_or_nothing,
                                                           threads, timeout));
           })
      .def("read",
           [](const ReaderPtr& self, const std::string& name, const MeshPtr& mesh,
              const Names& where, const SizesDict& parts) {
             const auto saved = self->reader->find(name);
             if (!saved) throw InvalidArgument(concat("the checkpoint has no tensor '", name, "'"));
             return self->reader->read(
                 name, ShardSpec(mesh->mesh, saved->shape, placements(where), sizes(parts)));
           })
      // Names, tensors, and what did not fit, a sentence each.
      .def("read_as_saved",
           [](const ReaderPtr& self, const MeshPtr& mesh, bool misfits) {
             std::tuple<Names, Tensors, Names> read;
             auto& [names, tensors, words] = read;
             for (auto& [name, tensor] :
                  self->reader->read_as_saved(mesh->mesh, misfits ? &words : nullptr)) {
               names.push_back(name);
               tensors.push_back(tensor);
             }
             return read;
           })
      .def("export_file",
           [](const ReaderPtr& self, const std::string& path) { self->reader->export_file(path); })
      .def("verify", [](const ReaderPtr& self) { self->reader->verify(); });
}

}  // namespace

void register_checkpoint(Library& library) {
  register_states(library);
  register_reader(library);
  library.class_<PyCheckpointer>("Checkpointer")
      .def(torch::init<const std::string&, const GroupPtr&, std::int64_t, const std::string&,
                       std::int64_t, bool, bool, double>())
      .def("folder", [](const CheckpointerPtr& self) { return self->open().folder(); })
      .def("save", [](const CheckpointerPtr& self, const std::string& name,
                      const StatePtr& state) { self->open().save(name, state->state); })
      .def("start_save", [](const CheckpointerPtr& self, const std::string& name,
                            const StatePtr& state) { self->open().start_save(name, state->state); })
      .def("wait", [](const CheckpointerPtr& self) { self->open().wait(); })
      .def("saving", [](const CheckpointerPtr& self) { return self->open().saving(); })
      .def("names",
           [](const CheckpointerPtr& self) {
             std::tuple<Names, Names> all;
             std::get<0>(all) = self->open().names(&std::get<1>(all));
             return all;
           })
      .def("to_resume", [](const CheckpointerPtr& self) { return self->open().to_resume(); })
      .def("remove",
           [](const CheckpointerPtr& self, const std::string& name) { self->open().remove(name); })
      .def("protect",
           [](const CheckpointerPtr& self, const Names& names) { self->open().protect(names); })
      .def("warnings", [](const CheckpointerPtr& self) { return self->open().warnings(); })
      .def("bytes_written",
           [](const CheckpointerPtr& self) {
             return static_cast<std::int64_t>(self->open().bytes_written());
           })
      .def("close", [](const CheckpointerPtr& self) { self->checkpointer.reset(); });
}

}  // namespace tessera::python
