// Checkpoints of many ranks: the states that Python fills, the Checkpointer and its reader. Values
// are bytes, which Python's texts are not: they pass as tensors.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "callbacks.h"
#include "convert.h"
#include "handles.h"
#include "library.h"
#include "mesh.h"
#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/checkpoint/fill_deferred.h"
#include "tessera/comm/agree/agree.h"

namespace tessera::python {

namespace {

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
  throw InvalidArgument("busy is 'wait' or 'refuse', not '", name, "'");
}

// A place that functions of Python's look after (_checkpoint_io.py).
class PythonIO final : public CheckpointIO {
 public:
  PythonIO(PythonFunction function, std::string root)
      : function_(function), root_(std::move(root)) {}

  std::string where(const std::string& name) const override {
    return name.empty() ? root_ : concat(root_, '/', name);
  }
  Names list(const std::string& folder) override {
    const std::string text = bytes_of(need(Call::list, folder));
    Names names;
    for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
      end = text.find('\0', begin);
      names.push_back(text.substr(begin, end - begin));
    }
    return names;
  }
  std::optional<std::uint64_t> size(const std::string& name) override {
    const auto bytes = call(Call::size, name);
    return bytes ? std::optional<std::uint64_t>(bytes->item<std::int64_t>()) : std::nullopt;
  }
  std::shared_ptr<const ReadFile> open(const std::string& name) override {
    const auto bytes = size(name);
    if (!bytes) throw FileError("'", where(name), "' cannot be opened: it is not there");
    return std::make_shared<const ReadFile>(
        where(name), *bytes, [this, name](std::uint64_t offset, void* out, std::size_t count) {
          if (count == 0) return;
          const at::Tensor got = need(Call::read, name, {offset, count});
          if (got.nbytes() != count)
            throw FileError("'", where(name), "' ends at byte ", offset + got.nbytes());
          std::memcpy(out, got.const_data_ptr(), count);
        });
  }
  std::unique_ptr<CheckpointFile> create(const std::string& name) override {
    return std::make_unique<File>(*this, name, ++files_);
  }
  bool put(const std::string& name, std::string_view bytes, bool if_absent) override {
    const auto done = call(Call::put, name, {if_absent}, bytes);
    if (!done) throw NotAvailable("'", root_, "' has no puts that are refused");
    return done->item<bool>();
  }
  bool remove(const std::string& name) override { return need(Call::remove, name).item<bool>(); }
  void make(const std::string& folder) override { need(Call::make, folder); }

 private:
  enum class Call : unsigned char {
    list,
    size,
    read,
    create,
    write,
    commit,
    discard,
    put,
    remove,
    make
  };

  class File final : public CheckpointFile {
   public:
    File(PythonIO& io, std::string name, std::uint64_t number)
        : io_(io), name_(std::move(name)), number_(number) {
      io_.need(Call::create, name_, {number_});
    }
    ~File() override {
      if (committed_) return;
      try {
        io_.call(Call::discard, name_, {number_});
      } catch (const std::exception&) {
        // What stays behind has a name that no reader trusts.
      }
    }
    void write(const void* data, std::size_t bytes) override {
      io_.need(Call::write, name_, {number_},
               std::string_view(static_cast<const char*>(data), bytes));
    }
    void commit() override {
      io_.need(Call::commit, name_, {number_});
      committed_ = true;
    }

   private:
    PythonIO& io_;
    std::string name_;
    std::uint64_t number_;
    bool committed_ = false;
  };

  // Nothing where there is none.
  std::optional<at::Tensor> call(Call what, const std::string& name,
                                 std::vector<std::uint64_t> numbers = {},
                                 std::optional<std::string_view> data = std::nullopt) const {
    numbers.insert(numbers.begin(), static_cast<std::uint64_t>(what));
    Tensors given{tensor_of(name)};
    if (data) given.push_back(tensor_of(std::string(*data)));
    try {
      const auto answer = ask(function_, numbers, given);
      return answer ? std::optional(answer->at(0)) : std::nullopt;
    } catch (const std::exception& e) {
      throw FileError("'", where(name), "': ", e.what());
    }
  }
  at::Tensor need(Call what, const std::string& name, std::vector<std::uint64_t> numbers = {},
                  std::optional<std::string_view> data = std::nullopt) const {
    const auto answer = call(what, name, std::move(numbers), data);
    if (!answer) throw FileError("'", where(name), "': nothing was answered");
    return *answer;
  }

  PythonFunction function_;
  std::string root_;
  std::atomic<std::uint64_t> files_{0};
};

struct PyCheckpointIO : torch::CustomClassHolder {
  /// Without a function: a local folder.
  PyCheckpointIO(std::int64_t function, const std::string& root) {
    const auto call =
        reinterpret_cast<PythonFunction>(function);  // NOLINT(performance-no-int-to-ptr)
    if (call == nullptr)
      io = local_folder(root);
    else
      io = std::make_shared<PythonIO>(call, root);
  }
  std::shared_ptr<CheckpointIO> io;
};
using PlacePtr = c10::intrusive_ptr<PyCheckpointIO>;

struct PyCheckpointer : torch::CustomClassHolder {
  PyCheckpointer(const PlacePtr& place, const GroupPtr& group, std::int64_t keep_last,
                 const std::string& busy, std::int64_t background_rate, bool check_replicas,
                 bool remove_incomplete, double timeout) {
    // What one rank alone has wrong is told on all.
    CheckpointOptions options;
    agree::all(group->group, "checkpoints", [&] {
      if (keep_last < 0 || keep_last > INT32_MAX || background_rate < 0)
        throw InvalidArgument("a Checkpointer that keeps the last ", keep_last, " and writes ",
                              background_rate, " bytes a second");
      options.keep_last = static_cast<int>(keep_last);
      options.busy = busy_of(busy);
      options.background_rate = static_cast<std::uint64_t>(background_rate);
      options.check_replicas = check_replicas;
      options.remove_incomplete = remove_incomplete;
      options.timeout = limit_of(timeout);
    });
    checkpointer.emplace(here(), place->io, options, group->group.ranks());
  }
  Checkpointer& open() {
    if (!checkpointer) throw InvalidArgument("the Checkpointer is closed");
    return *checkpointer;
  }
  std::optional<Checkpointer> checkpointer;
};
using CheckpointerPtr = c10::intrusive_ptr<PyCheckpointer>;

struct PyCheckpointReader : torch::CustomClassHolder {
  /// Without a place: of a file.
  PyCheckpointReader(const GroupPtr& group, const std::optional<PlacePtr>& place,
                     const std::string& name) {
    if (place)
      reader.emplace(group->group, (*place)->io, name);
    else
      reader.emplace(group->group, name);
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

// Of pairs of names in the module and in the files; the reader lives as long as it is needed.
void fill(const Names& names, const Tensors& tensors, const ReaderPtr& self, const Names& from,
          const Names& to, bool allow_missing, bool allow_extra, bool convert) {
  NamedTensors all;
  for (std::size_t i = 0; i < names.size(); ++i) all.emplace_back(names[i], tensors.at(i));
  NameTable table;
  for (std::size_t i = 0; i < from.size(); ++i) table.emplace_back(from[i], to.at(i));
  LoadOptions options;
  options.allow_missing = allow_missing;
  options.allow_extra = allow_extra;
  options.convert = convert;
  fill_deferred(
      all,
      std::shared_ptr<const CheckpointReader>(&*self->reader, [self](const CheckpointReader*) {}),
      table, options);
}

void register_reader(Library& library) {
  library.class_<PyCheckpointReader>("CheckpointReader")
      .def(torch::init<const GroupPtr&, const std::optional<PlacePtr>&, const std::string&>())
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
             std::tuple<Numbers, Tensors> all;
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
             if (!saved) throw InvalidArgument("the checkpoint has no tensor '", name, "'");
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
  library.def("fill_deferred", &fill);
  // Its arguments are of the class above.
}

}  // namespace

void register_checkpoint(Library& library) {
  register_states(library);
  library.class_<PyCheckpointIO>("CheckpointIO")
      .def(torch::init<std::int64_t, const std::string&>());
  register_reader(library);
  library.class_<PyCheckpointer>("Checkpointer")
      .def(torch::init<const PlacePtr&, const GroupPtr&, std::int64_t, const std::string&,
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
