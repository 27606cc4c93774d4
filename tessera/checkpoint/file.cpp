#include "tessera/checkpoint/file.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <fcntl.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "tessera/base/text.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/partition/transfer.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/dispatch/no_dispatch.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

namespace {

using detail::StoredTensor;

constexpr CallOptions kCall{std::chrono::milliseconds(0), "file"};

at::Tensor slice(const at::Tensor& t, const Box& held, const Box& box) {
  at::Tensor part = t;
  for (std::size_t d = 0; d < box.size(); ++d)
    part = part.narrow(static_cast<std::int64_t>(d), box[d].begin - held[d].begin, box[d].size());
  return part;
}

// Everything on the first rank of the mesh.
Sharding on_first(const std::vector<std::int64_t>& shape) {
  return Sharding(shape, {1}, std::vector<DimSharding>(shape.size()));
}

Box whole_box(const std::vector<std::int64_t>& shape) {
  Box box;
  for (const auto n : shape) box.push_back({0, n});
  return box;
}

// Parts between the mesh's ranks and its first one, which has the whole; ranks are mesh positions.
void transfer(const Group& all, const at::Tensor& part, const Box& part_box,
              const at::Tensor& whole, const Box& whole_box, const TransferPlan& plan,
              bool to_first) {
  const at::Tensor &source = to_first ? part : whole, &target = to_first ? whole : part;
  const Box &source_box = to_first ? part_box : whole_box,
            &target_box = to_first ? whole_box : part_box;
  const detail::LocalCallGuard guard;
  std::vector<Message> messages;
  std::vector<std::pair<at::Tensor, at::Tensor>> arrivals;
  for (const Piece& p : plan.sends)
    messages.push_back(
        {Message::Kind::send, slice(source, source_box, p.box).contiguous(), p.rank});
  for (const Piece& p : plan.receives) {
    const at::Tensor to = slice(target, target_box, p.box),
                     buffer = at::empty(to.sizes(), to.options());
    arrivals.emplace_back(to, buffer);
    messages.push_back({Message::Kind::receive, buffer, p.rank});
  }
  if (!messages.empty()) all.exchange(messages, kCall);
  for (const Box& box : plan.copies)
    slice(target, target_box, box).copy_(slice(source, source_box, box));
  for (const auto& [to, buffer] : arrivals) to.copy_(buffer);
}

// The first rank's mistake, empty if there is none, thrown on all.
void agree(const Group& all, const std::string& mistake) {
  const std::string told = all.broadcast_bytes(mistake, 0, kCall);
  if (!told.empty()) throw Error(told);
}

class Writer {
 public:
  Writer(const std::string& path, bool first) : path_(path), temporary_(path + ".partial") {
    if (!first) return;
    file_ = std::fopen(temporary_.c_str(), "wb");
    if (!file_) fail("opened for writing");
  }
  ~Writer() {
    if (file_) std::fclose(file_);
    if (!mistake.empty() || !done_) std::remove(temporary_.c_str());
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  void write(const void* data, std::size_t size) {
    if (file_ && mistake.empty() && size > 0 && std::fwrite(data, 1, size, file_) != size)
      fail("written to");
  }
  void finish() {
    done_ = true;
    if (!file_) return;
    if (mistake.empty() && (std::fflush(file_) != 0 || ::fsync(::fileno(file_)) != 0))
      fail("written to");
    if (std::fclose(std::exchange(file_, nullptr)) != 0 && mistake.empty()) fail("written to");
    if (mistake.empty() && std::rename(temporary_.c_str(), path_.c_str()) != 0)
      fail("moved to its place");
  }
  std::string mistake;

 private:
  void fail(const char* what) {
    mistake = concat("save: ", temporary_, " cannot be ", what, ": ", std::strerror(errno));
  }
  const std::string path_, temporary_;
  std::FILE* file_ = nullptr;
  bool done_ = false;
};

at::Tensor without_partial(const at::Tensor& t) {
  auto placements = spec(t).placements();
  for (Placement& p : placements) {
    if (p.is_partial()) p = Replicate();
  }
  return redistribute(t, placements);
}

NamedTensors state_of(const torch::nn::Module& module) {
  NamedTensors all;
  for (const auto& p : module.named_parameters()) all.emplace_back(p.key(), p.value());
  for (const auto& b : module.named_buffers()) all.emplace_back(b.key(), b.value());
  return all;
}

// A file open for reading on the first rank; its header known to all.
struct Reading {
  std::ifstream file;
  std::uint64_t data_begin = 0;
  std::vector<StoredTensor> tensors;

  Reading(const Group& all, const std::string& path) {
    std::string mistake, json;
    std::uint64_t data_bytes = 0;
    if (all.rank() == 0) {
      try {
        file.open(path, std::ios::binary | std::ios::ate);
        if (!file) throw InvalidArgument("it cannot be opened");
        const auto size = static_cast<std::uint64_t>(file.tellg());
        unsigned char length[8] = {};
        file.seekg(0);
        if (size < 8 || !file.read(reinterpret_cast<char*>(length), 8))
          throw InvalidArgument("it is too short for a safetensors file");
        std::uint64_t n = 0;
        for (int i = 0; i < 8; ++i) n |= std::uint64_t{length[i]} << 8 * i;
        if (n > size - 8 || n > (std::uint64_t{1} << 30))
          throw InvalidArgument(
              "its header is longer than the file: this is no safetensors file, or it is cut "
              "short");
        json.resize(n);
        if (!file.read(json.data(), static_cast<std::streamsize>(n)))
          throw InvalidArgument("its header cannot be read");
        data_begin = 8 + n;
        data_bytes = size - data_begin;
        detail::read_header(json, data_bytes);
      } catch (const Error& e) {
        mistake = concat("load: ", path, ": ", e.what());
      }
    }
    agree(all, mistake);
    json = all.broadcast_bytes(all.rank() == 0 ? concat(data_bytes, ' ', json) : std::string(), 0,
                               kCall);
    const auto space = json.find(' ');
    data_bytes = std::stoull(json.substr(0, space));
    tensors = detail::read_header(json.substr(space + 1), data_bytes);
  }

  // This rank's part, on the CPU.
  at::Tensor read(const Group& all, const StoredTensor& t, const ShardSpec& to,
                  const std::string& path) {
    const at::Tensor mine = at::empty(to.local_shape(), at::TensorOptions(t.dtype));
    at::Tensor whole;
    std::string mistake;
    if (all.rank() == 0) {
      whole = at::empty(t.shape, at::TensorOptions(t.dtype));
      file.clear();
      file.seekg(static_cast<std::streamoff>(data_begin + t.begin));
      if (t.end > t.begin && !file.read(static_cast<char*>(whole.data_ptr()),
                                        static_cast<std::streamsize>(t.end - t.begin)))
        mistake = concat("load: ", path, ": tensor '", t.name, "' cannot be read");
    }
    agree(all, mistake);
    const int me = all.rank();
    transfer(all, mine, to.sharding().box(me), whole, whole_box(t.shape),
             transfer_plan(on_first(t.shape), to.sharding(), me), false);
    return mine;
  }
};

void refuse_partial(const std::string& name, const ShardSpec& spec) {
  if (spec.has_partial())
    throw InvalidArgument(concat("load: '", name, "' cannot be loaded as a partial value: ", spec));
}

}  // namespace

void save(const NamedTensors& tensors, const DeviceMesh& mesh, const std::string& path) {
  const at::NoGradGuard no_grad;
  const Group all = mesh.all();
  std::vector<StoredTensor> stored;
  for (const auto& [name, t] : tensors) {
    if (!t.defined()) throw InvalidArgument(concat("save: '", name, "' is an undefined tensor"));
    if (is_sharded(t) && !(spec(t).mesh() == mesh))
      throw InvalidArgument(concat("save: '", name, "' lies on another mesh: ", spec(t)));
    stored.push_back({name, t.scalar_type(), t.sizes().vec(), 0, 0});
  }
  const std::string header = detail::write_header(stored);
  Writer writer(path, all.rank() == 0);
  agree(all, writer.mistake);
  writer.write(header.data(), header.size());
  for (const auto& [name, t] : tensors) {
    at::Tensor whole;
    if (!is_sharded(t)) {
      whole = t.detach().resolve_conj().resolve_neg().cpu().contiguous();
    } else {
      const at::Tensor value = without_partial(t.detach());
      const ShardSpec s = spec(value);
      const at::Tensor part = to_local(value).cpu();
      if (all.rank() == 0) whole = at::empty(s.shape(), part.options().memory_format(c10::nullopt));
      transfer(all, part, s.sharding().box(all.rank()), whole, whole_box(s.shape()),
               transfer_plan(s.sharding(), on_first(s.shape()), all.rank()), true);
    }
    if (all.rank() == 0) writer.write(whole.data_ptr(), whole.nbytes());
  }
  writer.finish();
  agree(all, writer.mistake);
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
  const Group all = mesh.all();
  Reading file(all, path);
  std::vector<ShardSpec> specs;
  for (const StoredTensor& t : file.tensors) {
    const auto placed = rule ? rule(t.name) : std::nullopt;
    specs.push_back(placed ? ShardSpec(mesh, t.shape, placed->placements, placed->sizes)
                           : ShardSpec::replicated(mesh, t.shape));
    refuse_partial(t.name, specs.back());
  }
  NamedTensors loaded;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const at::Tensor local = file.read(all, file.tensors[i], specs[i], path);
    loaded.emplace_back(file.tensors[i].name,
                        from_local(local.to(mesh.manager().device()), specs[i]));
  }
  return loaded;
}

at::Tensor load(const std::string& path, const ShardSpec& spec) {
  refuse_partial("tensor", spec);
  const Group all = spec.mesh().all();
  Reading file(all, path);
  if (file.tensors.size() != 1)
    throw InvalidArgument(
        concat("load: ", path, " holds ", file.tensors.size(), " tensors, where one is asked for"));
  if (file.tensors[0].shape != spec.shape())
    throw InvalidArgument(concat("load: ", path, " holds a tensor of shape ",
                                 list(file.tensors[0].shape), ", asked for is ", spec));
  return from_local(file.read(all, file.tensors[0], spec, path).to(spec.mesh().manager().device()),
                    spec);
}

void load(torch::nn::Module& module, const DeviceMesh& mesh, const std::string& path) {
  load_into(state_of(module), mesh, path);
}

void load_into(const NamedTensors& state, const DeviceMesh& mesh, const std::string& path) {
  const at::NoGradGuard no_grad;
  const Group all = mesh.all();
  Reading file(all, path);
  std::map<std::string, const StoredTensor*> stored;
  for (const StoredTensor& t : file.tensors) stored[t.name] = &t;
  std::string wrong;
  for (const auto& [name, t] : state) {
    const auto it = stored.find(name);
    if (it == stored.end()) {
      wrong += concat(" '", name, "' is not in the file.");
      continue;
    }
    if (it->second->shape != t.sizes().vec())
      wrong += concat(" '", name, "' has shape ", t.sizes(), ", in the file ",
                      list(it->second->shape), ".");
    if (is_sharded(t)) refuse_partial(name, spec(t));
    stored.erase(it);
  }
  for (const auto& [name, t] : stored) wrong += concat(" '", name, "' is in the file alone.");
  if (!wrong.empty()) throw InvalidArgument(concat("load: ", path, " does not fit:", wrong));
  for (const StoredTensor& t : file.tensors) stored[t.name] = &t;
  for (const auto& [name, t] : state) {
    const ShardSpec to = is_sharded(t) ? spec(t) : ShardSpec::replicated(mesh, t.sizes().vec());
    const at::Tensor local = file.read(all, *stored.at(name), to, path);
    (is_sharded(t) ? to_local(t) : t.detach()).copy_(local);
  }
}

}  // namespace tessera
