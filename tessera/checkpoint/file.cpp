#include "tessera/checkpoint/file.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/internal/json_text.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/detail/local_shards.h"
#include "tessera/checkpoint/detail/ranks.h"
#include "tessera/checkpoint/internal/torch_dtypes.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/group/internal/call_origin.h"
#include "tessera/files/internal/safetensors.h"
#include "tessera/files/operations.h"
#include "tessera/partition/transfer.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/parameter_source.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/internal/boxes.h"

namespace tessera {
namespace {

constexpr const char* kLayouts = "tessera.layouts";

// What ranks that do something else read of a call that one of them made alone.
const auto kSaving =
    std::make_shared<const detail::CallOrigin>("save(), which all ranks of its mesh call");
const auto kLoading =
    std::make_shared<const detail::CallOrigin>("load(), which all ranks of its mesh call");

// Everything on the first rank of the mesh.
Sharding on_first(const std::vector<std::int64_t>& shape) {
  return Sharding(shape, {1}, std::vector<DimSharding>(shape.size()));
}

// Shards between the mesh's ranks and its first one, which has the full tensor; ranks are mesh
// positions. In two halves: what can fail on one rank alone (memory above all) is done, and agreed
// on, before anything is sent; a rank that failed in between would leave the others waiting.
class Transfer {
 public:
  void prepare(const at::Tensor& part, const Box& part_box, const at::Tensor& whole,
               const Box& whole_box, const TransferPlan& plan, bool to_first) {
    const at::Tensor &source = to_first ? part : whole, &target = to_first ? whole : part;
    const Box &source_box = to_first ? part_box : whole_box,
              &target_box = to_first ? whole_box : part_box;
    const detail::LocalCallGuard guard;
    for (const Piece& p : plan.sends)
      messages_.push_back(
          {Message::Kind::send, detail::slice(source, source_box, p.box).contiguous(), p.rank});
    for (const Piece& p : plan.receives) {
      const at::Tensor to = detail::slice(target, target_box, p.box);
      arrivals_.emplace_back(to, at::empty(to.sizes(), to.options()));
      messages_.push_back({Message::Kind::receive, arrivals_.back().second, p.rank});
    }
    for (const Box& box : plan.copies)
      detail::slice(target, target_box, box).copy_(detail::slice(source, source_box, box));
  }
  void run(const detail::Ranks& ranks) {
    const detail::LocalCallGuard guard;
    if (!messages_.empty()) ranks.group.exchange(messages_, ranks.call);
    for (const auto& [to, buffer] : arrivals_) to.copy_(buffer);
  }

 private:
  std::vector<Message> messages_;
  std::vector<std::pair<at::Tensor, at::Tensor>> arrivals_;
};

NamedTensors state_of(const torch::nn::Module& module) {
  NamedTensors all;
  for (const auto& p : module.named_parameters()) all.emplace_back(p.key(), p.value());
  for (const auto& b : module.named_buffers()) all.emplace_back(b.key(), b.value());
  return all;
}

// One file or the files of a folder, open for reading on the first rank; headers known to all.
struct Reading {
  detail::Ranks ranks;
  detail::OriginScope scope{kLoading};
  // Those of other ranks are open nowhere.
  std::vector<SafetensorsFile> files;
  // Of all files, one after the other, and where each is.
  std::vector<SafetensorsTensor> tensors;
  std::vector<TorchLayout> layouts;
  std::vector<std::size_t> file_of;

  Reading(const DeviceMesh& mesh, const std::string& path) : ranks(detail::ranks_of_file(mesh)) {
    const auto said = ranks.first<std::string>("load", [&] {
      files = open_safetensors(path);
      std::string text;
      for (const SafetensorsFile& one : files) {
        std::string header(one.header.data - 8, '\0');
        one.file->read(header.data(), header.size(), 8);
        text += concat(one.header.data_bytes, ' ', header.size(), ' ', header);
        for (const SafetensorsTensor& t : one.header.tensors)
          need_torch_layout(t, one.file->path());
      }
      return text;
    });
    if (ranks.group.rank() != 0) parse(said, path);
    for (std::size_t f = 0; f < files.size(); ++f)
      for (const SafetensorsTensor& t : files[f].header.tensors) {
        tensors.push_back(t);
        layouts.push_back(need_torch_layout(t, path));
        file_of.push_back(f);
      }
  }

  void parse(std::string_view said, const std::string& path) {
    const auto number = [&] {
      const std::size_t end = said.find(' ');
      const std::uint64_t n = std::stoull(std::string(said.substr(0, end)));
      said.remove_prefix(end + 1);
      return n;
    };
    while (!said.empty()) {
      const std::uint64_t data = number(), bytes = number();
      files.push_back({nullptr, parse_safetensors_header(said.substr(0, bytes), data, path)});
      said.remove_prefix(bytes);
    }
  }

  // This rank's shard, on the CPU.
  at::Tensor read(std::size_t i, const ShardSpec& to) {
    const TorchLayout& t = layouts[i];
    at::Tensor mine, whole;
    Transfer transfer;
    const int me = ranks.group.rank();
    // Memory may run out on any rank, on the first one first.
    ranks.all("load", [&] {
      mine = at::empty(to.local_shape(), at::TensorOptions(t.dtype));
      if (me == 0) {
        whole = at::empty(t.shape, at::TensorOptions(t.dtype));
        const SafetensorsFile& one = files[file_of[i]];
        one.file->read(whole.data_ptr(), whole.nbytes(), one.header.data + tensors[i].begin);
      }
      transfer.prepare(mine, to.sharding().box(me), whole, whole_box(t.shape),
                       transfer_plan(on_first(t.shape), to.sharding(), me), false);
    });
    transfer.run(ranks);
    return mine;
  }

  std::map<std::string, SavedLayout> saved() const {
    std::map<std::string, SavedLayout> all;
    for (const SafetensorsFile& one : files) {
      const auto found = one.header.metadata.find(kLayouts);
      if (found == one.header.metadata.end()) continue;
      const Json json = Json::parse(found->second);  // what members() refers to
      for (const auto& [name, layout] : json.members()) all[name] = layout_from_json(layout);
    }
    return all;
  }
};

NamedTensors read_all(Reading& file, const std::vector<ShardSpec>& specs) {
  NamedTensors loaded;
  for (std::size_t i = 0; i < specs.size(); ++i)
    loaded.emplace_back(
        file.tensors[i].name,
        from_local(file.read(i, specs[i]).to(specs[i].mesh().manager().device()), specs[i]));
  return loaded;
}

void refuse_partial(const std::string& name, const ShardSpec& spec) {
  if (spec.has_partial())
    throw InvalidArgument("load: '", name, "' cannot be loaded as a partial value: ", spec);
}

// The header of a file of these tensors, which `stored` gets as the file has them.
std::string header_of(const NamedTensors& tensors, const DeviceMesh& mesh,
                      std::vector<SafetensorsTensor>& stored) {
  std::string layouts;
  for (const auto& [name, t] : tensors) {
    if (!t.defined()) throw InvalidArgument("save: '", name, "' is an undefined tensor");
    if (is_sharded(t) && !(spec(t).mesh() == mesh))
      throw InvalidArgument("save: '", name, "' lies on another mesh: ", spec(t));
    detail::need_dense(name, t);
    stored.push_back(safetensors_tensor(name, t.scalar_type(), t.sizes().vec()));
    if (is_sharded(t))
      layouts +=
          concat(layouts.empty() ? "" : ",", json_text(name), ':', to_json(saved_layout(spec(t))));
  }
  // Libraries of models refuse files that do not say which program's tensors they have.
  std::map<std::string, std::string> metadata{{"format", "pt"}};
  if (!layouts.empty()) metadata[kLayouts] = concat('{', layouts, '}');
  return write_safetensors_header(stored, metadata);
}

// The same, once all ranks have given the same tensors: they choose the transfers that follow.
std::string agreed_header(const detail::Ranks& ranks, const NamedTensors& tensors,
                          const DeviceMesh& mesh, std::vector<SafetensorsTensor>& stored) {
  std::string header, lines;
  ranks.all("save", [&] { header = header_of(tensors, mesh, stored); });
  for (const auto& [name, t] : tensors)
    lines += concat('\'', name, "' ", c10::toString(t.scalar_type()), ' ',
                    is_sharded(t) ? spec(t).to_string() : list(t.sizes()), '\n');
  agree::same(ranks.group, "the tensors to save", lines);
  return header;
}

}  // namespace

void save(const NamedTensors& tensors, const DeviceMesh& mesh, const std::string& path) {
  const at::NoGradGuard no_grad;
  const detail::OriginScope scope(kSaving);
  const detail::Ranks ranks = detail::ranks_of_file(mesh);
  const int me = ranks.group.rank();
  std::vector<SafetensorsTensor> stored;
  const std::string header = agreed_header(ranks, tensors, mesh, stored);
  std::unique_ptr<AtomicFile> file;
  // For the largest sharded tensor, once.
  at::Tensor memory;
  ranks.first("save", [&] {
    std::int64_t most = 0;
    for (const auto& [name, t] : tensors)
      if (is_sharded(t)) most = std::max<std::int64_t>(most, t.numel() * t.element_size());
    memory = at::empty({most}, at::kByte);
    file = std::make_unique<AtomicFile>(path);
    file->write(header);
  });
  std::exception_ptr failed;
  for (const std::size_t i : safetensors_data_order(stored)) {
    const at::Tensor& t = tensors[i].second;
    at::Tensor whole;
    if (is_sharded(t)) {
      const at::Tensor value = redistribute(t.detach(), detail::without_partial(spec(t)));
      const ShardSpec s = spec(value);
      Transfer transfer;
      ranks.all("save", [&] {
        const at::Tensor part = to_local(value).cpu();
        if (me == 0)
          whole = at::from_blob(memory.mutable_data_ptr(), s.shape(), part.scalar_type());
        transfer.prepare(part, s.sharding().box(me), whole, whole_box(s.shape()),
                         transfer_plan(s.sharding(), on_first(s.shape()), me), true);
      });
      transfer.run(ranks);
    }
    // The others learn of it at the end: they are in the transfers until then.
    if (me == 0 && !failed) {
      try {
        if (!is_sharded(t)) whole = t.detach().resolve_conj().resolve_neg().cpu().contiguous();
        file->write(whole.data_ptr(), whole.nbytes());
      } catch (const std::exception&) {
        failed = std::current_exception();
      }
    }
  }
  ranks.first("save", [&] {
    if (failed) std::rethrow_exception(failed);
    file->commit();
  });
}

void save(const at::Tensor& t, const std::string& path) {
  save({{"tensor", t}}, spec(t).mesh(), path);
}

void save(const torch::nn::Module& module, const DeviceMesh& mesh, const std::string& path) {
  save(state_of(module), mesh, path);
}

NamedTensors load(
    const DeviceMesh& mesh, const std::string& path,
    const std::function<std::optional<ParameterPlacement>(const std::string&)>& rule) {
  Reading file(mesh, path);
  std::vector<ShardSpec> specs;
  std::string lines;
  file.ranks.all("load", [&] {
    for (std::size_t i = 0; i < file.layouts.size(); ++i) {
      const std::string& name = file.tensors[i].name;
      const auto& shape = file.layouts[i].shape;
      const auto placed = rule ? rule(name) : std::nullopt;
      specs.push_back(placed ? ShardSpec(mesh, shape, placed->placements, placed->sizes)
                             : ShardSpec::replicated(mesh, shape));
      refuse_partial(name, specs.back());
      lines += concat('\'', name, "' ", specs.back(), '\n');
    }
  });
  agree::same(file.ranks.group, "the placements to load into", lines);
  return read_all(file, specs);
}

NamedTensors load_as_saved(const DeviceMesh& mesh, const std::string& path,
                           std::vector<std::string>* misfits) {
  Reading file(mesh, path);
  const auto saved = [&] {
    try {
      return file.saved();
    } catch (const InvalidArgument& e) {
      throw FileError("load: '", path,
                      "': the saved layouts are damaged: ", printable(e.what(), 2000));
    }
  }();
  std::vector<ShardSpec> specs;
  for (std::size_t i = 0; i < file.layouts.size(); ++i) {
    const std::string& name = file.tensors[i].name;
    const auto& shape = file.layouts[i].shape;
    const auto found = saved.find(name);
    specs.push_back(found == saved.end()
                        ? ShardSpec::replicated(mesh, shape)
                        : fit_layout(found->second, mesh, shape, misfits,
                                     concat("load: '", path, "': '", printable(name), "'")));
  }
  return read_all(file, specs);
}

at::Tensor load(const std::string& path, const ShardSpec& spec) {
  refuse_partial("tensor", spec);
  Reading file(spec.mesh(), path);
  if (file.layouts.size() != 1)
    throw InvalidArgument("load: ", path, " holds ", file.layouts.size(),
                          " tensors, where one is asked for");
  if (file.layouts[0].shape != spec.shape())
    throw InvalidArgument("load: ", path, " holds a tensor of shape ", list(file.layouts[0].shape),
                          ", asked for is ", spec);
  return from_local(file.read(0, spec).to(spec.mesh().manager().device()), spec);
}

void load(torch::nn::Module& module, const DeviceMesh& mesh, const std::string& path) {
  load_into(state_of(module), mesh, path);
}

namespace {

// A tensor to load into, and its index in the file.
struct Filled {
  std::size_t stored = 0;
  std::string name;
  at::Tensor tensor;

  ShardSpec layout(const DeviceMesh& mesh) const {
    return is_sharded(tensor) ? spec(tensor) : ShardSpec::replicated(mesh, tensor.sizes().vec());
  }
  // What is written to.
  at::Tensor local() const { return is_sharded(tensor) ? to_local(tensor) : tensor.detach(); }
};

// The tensors of `state` in the order of the file. Throws InvalidArgument if they do not fit it.
std::vector<Filled> matched(const NamedTensors& state, const DeviceMesh& mesh, const Reading& file,
                            const std::string& path) {
  std::map<std::string, std::size_t> stored;
  for (std::size_t i = 0; i < file.layouts.size(); ++i) stored[file.tensors[i].name] = i;
  std::string wrong;
  auto left_over = stored;
  std::vector<Filled> all;
  for (const auto& [name, t] : state) {
    if (!t.defined()) throw InvalidArgument("load: '", name, "' is an undefined tensor");
    const auto it = stored.find(name);
    if (it == stored.end()) {
      wrong += concat(" '", name, "' is not in the file.");
      continue;
    }
    const auto& shape = file.layouts[it->second].shape;
    if (shape != t.sizes().vec())
      wrong += concat(" '", name, "' has shape ", t.sizes(), ", in the file ", list(shape), ".");
    if (is_sharded(t)) {
      refuse_partial(name, spec(t));
      if (!(spec(t).mesh() == mesh))
        throw InvalidArgument("load: '", name, "' lies on another mesh: ", spec(t));
    }
    left_over.erase(name);
    all.push_back({it->second, name, t});
  }
  for (const auto& [name, i] : left_over)
    wrong += concat(" '", printable(name), "' is in the file alone.");
  if (!wrong.empty()) throw InvalidArgument("load: ", path, " does not fit:", wrong);
  std::ranges::stable_sort(all,
                           [](const Filled& a, const Filled& b) { return a.stored < b.stored; });
  return all;
}

// How the tensors lie, in one line: the same on all ranks, or they would not read the same.
std::string layouts_of(const std::vector<Filled>& all, const DeviceMesh& mesh) {
  std::string text;
  for (const Filled& f : all) text += concat(" '", f.name, "' ", f.layout(mesh), ";");
  return concat("tensors #", std::hex, Hash().text(text).value(), ':', printable(text, 2000));
}

// `read`, in the target's dtype and on its device. Throws if the target cannot be written to.
at::Tensor ready_for(const Filled& filled, const at::Tensor& read) {
  const at::Tensor target = filled.local();
  if (target.is_inference() && !c10::InferenceMode::is_enabled())
    throw InvalidArgument("load: '", filled.name,
                          "' was made in inference mode and cannot be written to outside");
  if (at::has_internal_overlap(target) == at::MemOverlap::Yes)
    throw InvalidArgument("load: several elements of '", filled.name,
                          "' share memory; load into a tensor with memory of its own");
  return read.to(target.options());
}

}  // namespace

void load_into(const NamedTensors& state, const DeviceMesh& mesh, const std::string& path) {
  const at::NoGradGuard no_grad;
  Reading file(mesh, path);
  std::vector<Filled> filled;
  file.ranks.all_same("load", [&] {
    filled = matched(state, mesh, file, path);
    return layouts_of(filled, mesh);
  });
  // Everything is read, and what may fail on one rank has been done, before anything is changed.
  std::vector<at::Tensor> values;
  for (const Filled& f : filled) values.push_back(file.read(f.stored, f.layout(mesh)));
  file.ranks.all("load", [&] {
    for (std::size_t i = 0; i < filled.size(); ++i) values[i] = ready_for(filled[i], values[i]);
  });
  for (std::size_t i = 0; i < filled.size(); ++i) {
    filled[i].local().copy_(values[i]);
    detail::wrote_shard(filled[i].tensor);
  }
}

}  // namespace tessera
