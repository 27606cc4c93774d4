#include "tessera/checkpoint/checkpoint_reader.h"

#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/detail/local_shards.h"
#include "tessera/checkpoint/detail/ranks.h"
#include "tessera/checkpoint/detail/targets.h"
#include "tessera/checkpoint/internal/torch_dtypes.h"
#include "tessera/checkpoint/storage/detail/catalogue.h"
#include "tessera/checkpoint/storage/detail/saved_checkpoint.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/parameter_source.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {
namespace {

using detail::Want;

std::vector<std::vector<char>> scratch_of(int threads, std::size_t count) {
  return std::vector<std::vector<char>>(std::min(static_cast<std::size_t>(threads), count));
}

}  // namespace

struct CheckpointReader::Impl {
  Impl(const Group& over, const std::shared_ptr<CheckpointIO>& io, const std::string& name)
      : group(over) {
    agree::all(group, "load", [&] { check_place(io); });
    const auto text = within(kReadLimit).first<std::string>("load", [&] {
      return to_json(read_manifest(*io, name));
    });
    saved = std::make_unique<SavedCheckpoint>(io, name, parse_manifest(text, io->where(name)));
  }
  Impl(const Group& over, const std::string& path) : group(over) {
    within(kReadLimit).all("load", [&] {
      saved = std::make_unique<SavedCheckpoint>(path);
      for (const Entry& e : saved->manifest().entries) layout_of(e);
    });
  }

  detail::Ranks within(std::chrono::milliseconds limit) const {
    return {group, {limit, "checkpoint"}};
  }

  TorchLayout layout_of(const Entry& e) const {
    // F4 has been brought to libtorch's shape already.
    const TorchLayout layout =
        need_torch_layout({e.info.name, e.info.dtype, {2}, 0, 0}, saved->path());
    return {layout.dtype, e.info.shape};
  }

  const Entry& need(EntryKind kind, const std::string& name, const char* what) const {
    const Entry* found = saved->manifest().find(kind, name);
    if (found) return *found;
    std::vector<std::string> known;
    for (const Entry& e : saved->manifest().entries)
      if (e.info.kind == kind) known.push_back(printable(e.info.name));
    throw InvalidArgument("load: '", saved->path(), "' has no ", what, " '", name, "'; it has ",
                          list(known));
  }

  bool verifies(const LoadOptions& options) const {
    return options.verify && saved->has_checksums();
  }

  // Reads what this rank wants, verifies what any rank uses; errors are thrown on all. The wants of
  // the ranks differ. Undefined for those that are read straight into their targets.
  std::vector<at::Tensor> read_all(const std::vector<Want>& wants, const LoadOptions& options) {
    std::vector<at::Tensor> staged(wants.size());
    within(options.timeout).all_same("load", [&] {
      const int threads = detail::threads_of_rank(options.threads, group.size());
      // Where nothing is to change before all is verified, pieces that are verified by being read
      // once are read again into their targets, and need no memory beside them. The same on all
      // ranks.
      const bool straight = !options.all_or_nothing || verifies(options);
      const std::vector<bool> later =
          straight ? detail::read_straight(wants, options) : std::vector<bool>(wants.size(), false);
      for (std::size_t i = 0; i < wants.size(); ++i)
        if (!later[i]) staged[i] = detail::staging_for(wants[i]);
      auto scratch = scratch_of(threads, wants.size());
      detail::spread(threads, wants.size(), [&](std::size_t i, std::size_t worker) {
        const Want& want = wants[i];
        if (staged[i].defined())
          saved->read(*want.entry, want.box, staged[i].data_ptr(), options.max_over_read);
        else if (options.all_or_nothing)
          for (const auto& use : SavedCheckpoint::uses(*want.entry, want.box))
            saved->verify(*want.entry, use.record, scratch[worker]);
      });
      // What chooses the collective calls of a load.
      return concat("verify ", options.verify, ", all_or_nothing ", options.all_or_nothing);
    });
    if (verifies(options)) verify_used(wants, options.threads, within(options.timeout));
    return staged;
  }

  // Into the targets: what read_all() has left, which is read now, and what it has staged.
  void fill(const std::vector<Want>& wants, std::vector<at::Tensor>& staged,
            const LoadOptions& options) {
    std::atomic<std::size_t> loaded{0};
    const auto half_loaded = [&](const std::exception& e) {
      return concat(e.what(),
                    "; some tensors hold values of the checkpoint now and others do not (",
                    loaded.load(), " of ", wants.size(),
                    " are loaded on this rank; other ranks may have loaded all of theirs): load "
                    "again before going on");
    };
    within(options.timeout).all("load", [&] {
      std::vector<std::pair<const Want*, void*>> left;
      for (std::size_t i = 0; i < wants.size(); ++i) {
        if (staged[i].defined()) continue;
        left.emplace_back(&wants[i], wants[i].into.mutable_data_ptr());
        // As an operator that writes would.
        wants[i].into.unsafeGetTensorImpl()->bump_version();
      }
      const int threads = detail::threads_of_rank(options.threads, group.size());
      try {
        detail::spread(threads, left.size(), [&](std::size_t i, std::size_t) {
          const auto& [want, memory] = left[i];
          saved->read(*want->entry, want->box, memory, options.max_over_read,
                      !options.all_or_nothing);
          ++loaded;
        });
        for (std::size_t i = 0; i < wants.size(); ++i) {
          if (!staged[i].defined()) continue;
          if (staged[i].numel() > 0) wants[i].into.copy_(staged[i]);
          staged[i].reset();
          ++loaded;
        }
      } catch (const FileError& e) {
        throw FileError(half_loaded(e));
      } catch (const std::exception& e) {
        throw Error(half_loaded(e));
      }
    });
  }

  // Records that are used only in parts have not been verified by who read them.
  void verify_used(const std::vector<Want>& wants, int threads, const detail::Ranks& ranks) {
    const auto& entries = saved->manifest().entries;
    std::vector<std::size_t> first(entries.size() + 1, 0);
    for (std::size_t e = 0; e < entries.size(); ++e)
      first[e + 1] = first[e] + entries[e].records.size();
    // Of each record: 0 not used, 1 used, 2 read in full.
    std::string mine(first.back(), '\0');
    for (const Want& want : wants) {
      const auto e = static_cast<std::size_t>(want.entry - entries.data());
      for (const auto& use : SavedCheckpoint::uses(*want.entry, want.box)) {
        char& state = mine[first[e] + use.record];
        state = std::max(state, static_cast<char>(use.whole ? 2 : 1));
      }
    }
    std::string most = mine;
    for (const std::string& other : group.all_gather_bytes(mine, ranks.call))
      for (std::size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], other[i]);
    verify_records([&](std::size_t e, std::size_t r) { return most[first[e] + r] == 1; }, threads,
                   ranks);
  }

  // Each record that `chosen` says is verified by one rank, the bytes spread over all.
  void verify_records(const std::function<bool(std::size_t, std::size_t)>& chosen, int asked,
                      const detail::Ranks& ranks) {
    ranks.all("load", [&] {
      const auto& entries = saved->manifest().entries;
      std::vector<std::pair<std::size_t, std::size_t>> mine;
      for (std::size_t e = 0; e < entries.size(); ++e)
        for (std::size_t r = 0; r < entries[e].records.size(); ++r) {
          if (!chosen(e, r)) continue;
          const auto least = std::ranges::min_element(verified);
          *least += entries[e].records[r].bytes;
          if (least - verified.begin() == group.rank()) mine.emplace_back(e, r);
        }
      const int threads = detail::threads_of_rank(asked, group.size());
      auto scratch = scratch_of(threads, mine.size());
      detail::spread(threads, mine.size(), [&](std::size_t i, std::size_t worker) {
        saved->verify(entries[mine[i].first], mine[i].second, scratch[worker]);
      });
    });
  }

  std::string read_value(const Entry& e) const {
    std::string bytes(static_cast<std::size_t>(e.info.shape.at(0)), '\0');
    saved->read(e, whole_box(e.info.shape), bytes.data());
    return bytes;
  }

  // What does not fit between the state and the checkpoint, one sentence each.
  std::string misfits_of(const CheckpointState& state, const LoadOptions& options,
                         std::vector<Want>& wants) const {
    std::string wrong;
    std::set<std::string> known;
    for (const auto& t : state.tensors()) {
      known.insert(t.name);
      const Entry* e = saved->manifest().find(EntryKind::tensor, t.name);
      if (!e) {
        if (!options.allow_missing) wrong += concat(" '", t.name, "' is not in the checkpoint.");
        continue;
      }
      const at::Tensor into = detail::local_values(t.value);
      if (const std::string why = detail::write_fault(into); !why.empty()) {
        wrong += concat(" '", t.name, "' ", why, ": nothing can be loaded into it.");
        continue;
      }
      const HeldShard held = detail::describe(t);
      if (held.info.shape != e->info.shape)
        wrong += concat(" '", t.name, "' has shape ", list(held.info.shape), ", in the checkpoint ",
                        list(e->info.shape), '.');
      if (held.info.dtype != e->info.dtype && !options.convert)
        wrong += concat(" '", t.name, "' is ", held.info.dtype, ", in the checkpoint ",
                        e->info.dtype, " (LoadOptions::convert converts).");
      if (is_sharded(t.value) && spec(t.value).has_partial())
        wrong += concat(" '", t.name, "' is a partial value, into which nothing can be loaded.");
      wants.push_back({e, held.box, into, layout_of(*e).dtype});
    }
    if (!options.allow_extra)
      for (const Entry& e : saved->manifest().entries)
        if (e.info.kind == EntryKind::tensor && !known.contains(e.info.name))
          wrong += concat(" '", printable(e.info.name), "' is in the checkpoint alone.");
    return wrong;
  }

  Group group;
  std::unique_ptr<SavedCheckpoint> saved;
  // By rank, what it was given to verify: who reads tensor by tensor gives all of them a share.
  std::vector<std::uint64_t> verified = std::vector<std::uint64_t>(group.ranks().size(), 0);
};

CheckpointReader::CheckpointReader(const Group& group, const std::shared_ptr<CheckpointIO>& io,
                                   const std::string& name)
    : impl_(std::make_unique<Impl>(group, io, name)) {}
CheckpointReader::CheckpointReader(const Group& group, const std::string& path)
    : impl_(std::make_unique<Impl>(group, path)) {}
CheckpointReader::~CheckpointReader() = default;

std::optional<SavedTensor> CheckpointReader::find(const std::string& name) const {
  const Entry* e = impl_->saved->manifest().find(EntryKind::tensor, name);
  if (!e) return std::nullopt;
  const TorchLayout layout = impl_->layout_of(*e);
  SavedTensor t{name, layout.dtype, layout.shape, std::nullopt};
  if (e->info.layout.empty()) return t;
  try {
    t.layout = layout_from_json(Json::parse(e->info.layout));
  } catch (const InvalidArgument& error) {
    throw FileError("load: '", impl_->saved->path(), "': the layout of '", printable(name),
                    "' is damaged: ", printable(error.what(), 2000));
  }
  return t;
}

std::vector<SavedTensor> CheckpointReader::tensors() const {
  std::vector<SavedTensor> all;
  for (const Entry& e : impl_->saved->manifest().entries)
    if (e.info.kind == EntryKind::tensor) all.push_back(*find(e.info.name));
  return all;
}

const Group& CheckpointReader::group() const { return impl_->group; }

int CheckpointReader::saved_ranks() const { return impl_->saved->manifest().ranks; }

std::vector<std::string> CheckpointReader::value_names() const {
  std::set<std::string> names;
  for (const Entry& e : impl_->saved->manifest().entries)
    if (e.info.kind == EntryKind::value) names.insert(e.info.name);
  return {names.begin(), names.end()};
}

std::vector<std::string> CheckpointReader::rank_value_names() const {
  std::set<std::string> names;
  for (const Entry& e : impl_->saved->manifest().entries)
    if (e.info.kind == EntryKind::rank_value) names.insert(e.info.name);
  return {names.begin(), names.end()};
}

void CheckpointReader::load(CheckpointState& state, const LoadOptions& options) const {
  const at::NoGradGuard no_grad;
  std::vector<Want> wants;
  impl_->within(options.timeout).all("load", [&] {
    const std::string wrong = impl_->misfits_of(state, options, wants);
    if (!wrong.empty())
      throw InvalidArgument("'", impl_->saved->path(), "' does not fit:", wrong,
                            " Build what was saved, or let LoadOptions leave the rest");
  });
  std::vector<at::Tensor> staged = impl_->read_all(wants, options);
  std::map<std::string, std::string> values, mine;
  impl_->within(options.timeout).all("load", [&] {
    for (const Entry& e : impl_->saved->manifest().entries) {
      if (e.info.kind == EntryKind::value) values[e.info.name] = impl_->read_value(e);
      if (e.info.kind == EntryKind::rank_value && e.info.rank == impl_->group.rank())
        mine[e.info.name] = impl_->read_value(e);
    }
  });
  // Before the first write: what was gathered of a parameter is stale if one fails, too.
  for (const auto& t : state.tensors()) detail::wrote_shard(t.value);
  impl_->fill(wants, staged, options);
  for (const auto& [name, bytes] : values) state.set(name, bytes);
  for (const auto& [name, bytes] : mine) state.set_of_rank(name, bytes);
}

at::Tensor CheckpointReader::read(const std::string& name, const ShardSpec& spec,
                                  const LoadOptions& options) const {
  const Entry& e = impl_->need(EntryKind::tensor, name, "tensor");
  if (e.info.shape != spec.shape())
    throw InvalidArgument("load: '", name, "' in '", impl_->saved->path(), "' has shape ",
                          list(e.info.shape), ", asked for is ", spec);
  if (spec.has_partial())
    throw InvalidArgument("load: '", name, "' cannot be read as a partial value: ", spec);
  Box box;
  for (std::size_t d = 0; d < spec.shape().size(); ++d)
    box.push_back({spec.local_offset()[d], spec.local_offset()[d] + spec.local_shape()[d]});
  const at::Tensor local = impl_->read_all({{&e, box, {}, impl_->layout_of(e).dtype}}, options)[0];
  return from_local(local.to(spec.mesh().manager().device()), spec);
}

std::vector<std::pair<std::string, at::Tensor>> CheckpointReader::read_as_saved(
    const DeviceMesh& mesh, std::vector<std::string>* misfits, const LoadOptions& options) const {
  std::vector<std::pair<std::string, ShardSpec>> specs;
  for (const SavedTensor& t : tensors()) {
    const std::string whose =
        concat("load: '", printable(t.name), "' of '", impl_->saved->path(), "'");
    specs.emplace_back(t.name, t.layout ? fit_layout(*t.layout, mesh, t.shape, misfits, whose)
                                        : ShardSpec::replicated(mesh, t.shape));
  }
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& [name, spec] : specs) all.emplace_back(name, read(name, spec, options));
  return all;
}

std::string CheckpointReader::value(const std::string& name) const {
  const Entry& e = impl_->need(EntryKind::value, name, "value");
  std::string bytes;
  impl_->within(kReadLimit).all("load", [&] { bytes = impl_->read_value(e); });
  return bytes;
}
std::int64_t CheckpointReader::integer(const std::string& name) const {
  return integer_from_bytes(value(name), name);
}
double CheckpointReader::real(const std::string& name) const {
  return real_from_bytes(value(name), name);
}

std::map<int, std::string> CheckpointReader::values_of_ranks(const std::string& name) const {
  std::map<int, std::string> all;
  impl_->within(kReadLimit).all("load", [&] {
    for (const Entry& e : impl_->saved->manifest().entries)
      if (e.info.kind == EntryKind::rank_value && e.info.name == name)
        all[e.info.rank] = impl_->read_value(e);
    if (!all.empty()) return;
    std::vector<std::string> known;
    for (const std::string& other : rank_value_names()) known.push_back(printable(other));
    throw InvalidArgument("'", impl_->saved->path(), "' has no value of ranks '", name,
                          "'; it has ", list(known));
  });
  return all;
}

void CheckpointReader::verify(std::chrono::milliseconds timeout) const {
  if (impl_->saved->has_checksums())
    impl_->verify_records([](std::size_t, std::size_t) { return true; }, 0, impl_->within(timeout));
}

namespace {

// The file that export_file() writes: its header, and where each tensor comes from.
struct Export {
  std::vector<SafetensorsTensor> tensors;
  std::vector<const Entry*> from;
  std::string header;

  // What stands in the file before the ranks write their records.
  void begin(const std::shared_ptr<FileOperations>& operations, const std::string& path) const {
    OpenFile file(operations, path);
    std::uint64_t end = 0;
    for (const auto& t : tensors) end = std::max(end, t.end);
    file.resize(header.size() + end);
    file.write(header.data(), header.size(), 0);
    file.close();
  }

  // One record of the i-th tensor: its runs in the full tensor, which is contiguous in the file.
  void write(OpenFile& file, std::size_t i, const Record& record, const char* bytes) const {
    const EntryInfo& info = from[i]->info;
    each_run(record.box, whole_box(info.shape), element_bytes(info.dtype),
             [&](std::size_t at, std::size_t run) {
               file.write(bytes, run, header.size() + tensors[i].begin + at);
               bytes += run;
             });
  }
};

}  // namespace

void CheckpointReader::export_file(const std::string& path,
                                   const std::shared_ptr<FileOperations>& operations,
                                   std::chrono::milliseconds timeout) const {
  const detail::Ranks ranks = impl_->within(timeout);
  const Group& group = ranks.group;
  Export whole;
  const std::string temporary =
      group.broadcast_bytes(concat(path, ".tmp-", make_nonce()), 0, ranks.call);
  const auto write_mine = [&] {
    OpenFile file(operations, temporary, true);
    std::vector<std::uint64_t> loads(static_cast<std::size_t>(group.size()), 0);
    std::vector<char> bytes;
    for (std::size_t i = 0; i < whole.tensors.size(); ++i)
      for (const Record& record : whole.from[i]->records) {
        const auto least = std::ranges::min_element(loads);
        *least += record.bytes;
        if (least - loads.begin() != group.rank() || record.bytes == 0) continue;
        bytes.resize(record.bytes);
        impl_->saved->read(*whole.from[i], record.box, bytes.data());
        whole.write(file, i, record, bytes.data());
      }
    file.sync();
    file.close();
  };
  try {
    ranks.all("export", [&] {
      for (const Entry& e : impl_->saved->manifest().entries) {
        if (e.info.kind != EntryKind::tensor) continue;
        whole.tensors.push_back(
            safetensors_tensor(e.info.name, impl_->layout_of(e).dtype, e.info.shape));
        whole.from.push_back(&e);
      }
      whole.header = write_safetensors_header(whole.tensors);
      if (group.rank() == 0) whole.begin(operations, temporary);
    });
    ranks.all("export", write_mine);
    ranks.first("export", [&] { move_into_place(*operations, temporary, path); });
  } catch (...) {
    try {
      if (group.rank() == 0) operations->remove(temporary);
    } catch (const FileError&) {
      // What stays behind has a name that no reader trusts.
    }
    throw;
  }
}

std::uint64_t CheckpointReader::bytes_read() const { return impl_->saved->bytes_read(); }

}  // namespace tessera
