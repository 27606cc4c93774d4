#include "tessera/checkpoint/checkpointer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/json_text.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/detail/local_shards.h"
#include "tessera/checkpoint/detail/together.h"
#include "tessera/checkpoint/storage/catalogue.h"
#include "tessera/checkpoint/storage/shard_file.h"
#include "tessera/files/checksum.h"
#include "tessera/files/json.h"

namespace tessera {

CheckpointBusy::~CheckpointBusy() = default;

namespace detail {

// What every rank tells the others before a save.
struct Greeting {
  std::string error, nonce;
  std::uint64_t layout = 0, replicas = 0;
  bool busy = false;
};

}  // namespace detail

namespace {

using detail::Greeting;

constexpr const char* kSave = "save";

std::string greeting_text(const Greeting& g) {
  return concat(to_hex(g.layout), to_hex(g.replicas), g.nonce, g.busy ? '1' : '0', g.error);
}

Greeting greeting_from(const std::string& text) {
  return {text.substr(49), text.substr(32, 16), from_hex(text.substr(0, 16)),
          from_hex(text.substr(16, 16)), text.at(48) == '1'};
}

// Makes a folder and those above it.
void make_folders(const std::string& path, FileOperations& operations) {
  if (path == "." || path == "/" || path.empty()) return;
  const std::string above = folder_of(path);
  try {
    if (operations.make_folder(path)) operations.sync_folder(above);
  } catch (const FileError&) {
    if (above == path) throw;
    make_folders(above, operations);
    if (operations.make_folder(path)) operations.sync_folder(above);
  }
}

}  // namespace

struct Checkpointer::Impl {
  // One save from its plan to its commit.
  struct Job {
    std::string name, nonce;
    std::shared_ptr<const WritePlan> plan;
    std::vector<at::Tensor> kept;
    std::vector<const void*> data;
    std::uint64_t rate = 0;
    // What this rank's writing has come to: an error's text, or the outcome.
    std::string error, outcome;
    bool committed = false;
    std::exception_ptr failure;
  };

  Impl(const DistributedManager& manager, std::string path, const CheckpointOptions& given,
       std::vector<int> ranks)
      : folder(std::move(path)), options(given) {
    if (folder.empty()) throw InvalidArgument("the folder of checkpoints has no name");
    while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
    if (ranks.empty()) {
      ranks.resize(static_cast<std::size_t>(manager.world_size()));
      std::iota(ranks.begin(), ranks.end(), 0);
    }
    group = manager.group(ranks);
    // A group of its own, so that the writing threads never meet the program's calls, nor those of
    // another Checkpointer: groups of one time limit are one group, hence the odd milliseconds.
    const auto odd = static_cast<std::int64_t>(Hash().text(folder).value() % 10007);
    writers = manager.group(ranks, {.timeout = options.timeout + std::chrono::milliseconds(odd)});
    in_background = group.size() == 1 || writers.backend() != "mpi";
    call = {options.timeout, "checkpoint"};
    detail::on_first_rank(
        group, "checkpoints",
        [&] {
          make_folders(folder, *options.operations);
          if (options.remove_incomplete) tessera::remove_incomplete(folder, *options.operations);
        },
        call);
  }

  ~Impl() {
    if (thread.joinable()) thread.join();
  }

  // ---- before writing ----

  // The bytes of plain replicated tensors and of values, one checksum a name.
  std::map<std::string, std::uint64_t> replica_sums(const CheckpointState& state) const {
    std::map<std::string, std::uint64_t> sums;
    for (const auto& [name, value] : state.values())
      sums["value '" + name + "'"] = Checksum().add(value).value();
    if (!options.check_replicas) return sums;
    for (const auto& t : state.tensors()) {
      const HeldShard held = detail::describe(t);
      if (t.shard || !held.info.layout.empty()) continue;
      const at::Tensor bytes = t.value.detach().resolve_conj().resolve_neg().cpu().contiguous();
      sums["tensor '" + t.name + "'"] =
          Checksum().add(bytes.const_data_ptr(), bytes.nbytes()).value();
    }
    return sums;
  }

  // Names the replicated value that ranks disagree on. Ranks that do not have it do not count.
  void compare_replicas(const std::map<std::string, std::uint64_t>& mine) const {
    std::string text = "[";
    for (const auto& [name, sum] : mine)
      text += concat(text.size() > 1 ? "," : "", '[', json_text(name), ",\"", to_hex(sum), "\"]");
    const auto all = group.all_gather_bytes(text + ']', call);
    std::map<std::string, std::pair<std::string, std::size_t>> first;
    for (std::size_t r = 0; r < all.size(); ++r) {
      const Json json = Json::parse(all[r]);
      for (const Json& one : json.items()) {
        const std::string name = one.items()[0].string(), sum = one.items()[1].string();
        const auto [it, fresh] = first.emplace(name, std::pair(sum, r));
        if (!fresh && it->second.first != sum)
          throw InvalidArgument(
              concat("save: the ranks disagree on ", name, ", which is the same on all: rank ", r,
                     " has other contents than rank ", it->second.second,
                     "; give each rank's own as a shard by hand or by set_of_rank()"));
      }
    }
  }

  // The greetings of all ranks; throws what is wrong with any of them.
  std::vector<Greeting> greet(const Greeting& mine) const {
    std::vector<Greeting> all;
    for (const std::string& text : group.all_gather_bytes(greeting_text(mine), call))
      all.push_back(greeting_from(text));
    for (std::size_t r = 0; r < all.size(); ++r)
      if (!all[r].error.empty())
        detail::throw_error(all[r].error,
                            all.size() > 1 ? concat("save: rank ", r, ": ") : "save: ");
    for (std::size_t r = 0; r < all.size(); ++r)
      if (all[r].busy)
        throw CheckpointBusy(concat("save: rank ", r,
                                    " is still writing the checkpoint before "
                                    "this one, and CheckpointOptions::busy says to refuse: save "
                                    "less often, or choose Busy::wait"));
    return all;
  }

  std::shared_ptr<const WritePlan> plan_for(const std::vector<Greeting>& greetings,
                                            const std::string& description) {
    std::vector<std::uint64_t> key;
    for (const Greeting& g : greetings) key.push_back(g.layout);
    if (cached_plan && key == cached_key) return cached_plan;
    std::vector<std::vector<HeldShard>> held;
    for (const std::string& text : group.all_gather_bytes(description, call))
      held.push_back(shards_from(text));
    try {
      cached_plan = std::make_shared<const WritePlan>(plan_writes(held));
    } catch (const InvalidArgument& e) {
      throw InvalidArgument(concat("save: ", e.what()));
    }
    cached_key = key;
    return cached_plan;
  }

  std::unique_ptr<Job> prepare(const std::string& name, const CheckpointState& state, bool copy) {
    Greeting mine;
    mine.nonce = make_nonce();
    mine.busy = options.busy == CheckpointOptions::Busy::refuse && saving();
    std::vector<HeldShard> held;
    std::string description;
    std::map<std::string, std::uint64_t> sums;
    try {
      check_checkpoint_name(name);
      held = detail::describe(state, group.rank());
      description = describe_shards(held);
      mine.layout = Checksum().add(description).value();
      sums = replica_sums(state);
      Hash hash;
      hash.text(name);
      for (const auto& [key, sum] : sums) hash.text(key).number(sum);
      mine.replicas = hash.value();
    } catch (...) {
      mine.error = detail::caught_error();
    }
    const std::vector<Greeting> all = greet(mine);
    if (options.busy == CheckpointOptions::Busy::refuse) finish();
    if (std::any_of(all.begin(), all.end(),
                    [&](const Greeting& g) { return g.replicas != all[0].replicas; })) {
      sums["the checkpoint's name"] = Checksum().add(name).value();
      compare_replicas(sums);
    }
    auto job = std::make_unique<Job>();
    job->name = name;
    job->nonce = all[0].nonce;
    job->plan = plan_for(all, description);
    try {
      collect(*job, state, held, copy);
    } catch (...) {
      // The others are on their way to the commit, where they learn of it.
      job->error = detail::caught_error();
    }
    return job;
  }

  // The bytes of what this rank writes.
  void collect(Job& job, const CheckpointState& state, const std::vector<HeldShard>& held,
               bool copy) {
    const std::vector<at::Tensor> bytes = detail::local_bytes(state);
    std::map<std::tuple<EntryKind, std::string, int>, std::size_t> place;
    for (std::size_t i = 0; i < held.size(); ++i)
      place[{held[i].info.kind, held[i].info.name, held[i].info.rank}] = i;
    std::vector<std::size_t> sizes;
    for (const AssignedBox& a : job.plan->ranks[static_cast<std::size_t>(group.rank())]) {
      const EntryInfo& info = job.plan->entries[a.entry];
      const std::size_t i = place.at({info.kind, info.name, info.rank});
      const std::size_t element = element_bytes(info.dtype);
      job.data.push_back(static_cast<const char*>(bytes[i].const_data_ptr()) +
                         detail::offset_in(held[i].box, a.box, element));
      sizes.push_back(static_cast<std::size_t>(volume(a.box)) * element);
    }
    if (!copy) {
      job.kept = bytes;
      return;
    }
    job.rate = options.background_rate;
    stage(job, sizes);
  }

  // Copies the job's pieces into the buffer that is kept for that.
  void stage(Job& job, const std::vector<std::size_t>& sizes) {
    const std::size_t total = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
    if (!buffer.defined() || static_cast<std::size_t>(buffer.numel()) < total)
      buffer = at::empty({static_cast<std::int64_t>(total)}, at::kByte);
    char* at = static_cast<char*>(buffer.mutable_data_ptr());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] > 0) std::memcpy(at, job.data[i], sizes[i]);
      job.data[i] = at;
      at += sizes[i];
    }
  }

  // ---- writing and committing ----

  void write(Job& job) {
    if (!job.error.empty()) return;
    try {
      const std::string path = concat(folder, '/', job.name);
      options.operations->make_folder(path);
      const ShardOutcome outcome =
          write_shard({path, job.nonce, group.rank(), group.size(), job.rate}, *job.plan, job.data,
                      options.operations);
      written = outcome.bytes;
      job.outcome = to_text(outcome);
    } catch (...) {
      job.error = detail::caught_error();
    }
    job.kept.clear();
  }

  // Collective over `over`: all ranks learn whether the checkpoint stands.
  void commit(Job& job, const Group& over) {
    const auto all =
        over.gather_bytes(job.error.empty() ? "O" + job.outcome : "X" + job.error, 0, call);
    detail::on_first_rank(
        over, kSave,
        [&] {
          const std::string path = concat(folder, '/', job.name);
          try {
            commit_outcomes(job, path, all);
          } catch (...) {
            discard_save(path, job.nonce, *options.operations);
            throw;
          }
          retain();
        },
        call);
    job.committed = true;
  }

  void commit_outcomes(const Job& job, const std::string& path,
                       const std::vector<std::string>& all) {
    std::vector<ShardOutcome> outcomes;
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r][0] == 'X')
        detail::throw_error(all[r].substr(1), all.size() > 1 ? concat("rank ", r, ": ") : "");
      outcomes.push_back(outcome_from(std::string_view(all[r]).substr(1)));
    }
    const auto before = list_checkpoints(folder);
    options.operations->sync_folder(folder);
    const auto left = commit_checkpoint(path, before.empty() ? 1 : before.back().sequence + 1,
                                        *job.plan, outcomes, job.nonce, options.operations);
    const std::lock_guard lock(mutex);
    warned.insert(warned.end(), left.begin(), left.end());
  }

  void retain() {
    if (options.keep_last <= 0) return;
    const auto all = list_checkpoints(folder);
    for (std::size_t i = 0; i + static_cast<std::size_t>(options.keep_last) < all.size(); ++i) {
      try {
        remove_checkpoint(folder, all[i].name, *options.operations);
      } catch (const FileError& e) {
        const std::lock_guard lock(mutex);
        warned.push_back(concat("checkpoint '", all[i].name, "' was to be removed: ", e.what()));
      }
    }
  }

  void start(std::unique_ptr<Job> fresh) {
    job = std::move(fresh);
    writing = true;
    thread = std::thread([this] {
      try {
        write(*job);
        if (in_background) commit(*job, writers);
      } catch (...) {
        job->failure = std::current_exception();
      }
      writing = false;
    });
  }

  // The end of what start() began; throws what it has come to, once.
  void finish() {
    if (!job) return;
    thread.join();
    const std::unique_ptr<Job> done = std::move(job);
    if (done->failure) std::rethrow_exception(done->failure);
    if (!done->committed) commit(*done, group);
  }

  bool saving() const { return writing; }

  std::string folder;
  CheckpointOptions options;
  Group group, writers;
  bool in_background = true;
  CallOptions call;
  std::vector<std::uint64_t> cached_key;
  std::shared_ptr<const WritePlan> cached_plan;
  at::Tensor buffer;
  std::unique_ptr<Job> job;
  std::thread thread;
  std::atomic<bool> writing{false};
  std::atomic<std::uint64_t> written{0};
  mutable std::mutex mutex;
  std::vector<std::string> warned;
};

Checkpointer::Checkpointer(const DistributedManager& manager, const std::string& folder,
                           const CheckpointOptions& options, const std::vector<int>& ranks)
    : impl_(std::make_unique<Impl>(manager, folder, options, ranks)) {}
Checkpointer::~Checkpointer() = default;

const std::string& Checkpointer::folder() const { return impl_->folder; }

void Checkpointer::save(const std::string& name, const CheckpointState& state) {
  if (impl_->options.busy == CheckpointOptions::Busy::wait) impl_->finish();
  const auto job = impl_->prepare(name, state, false);
  impl_->write(*job);
  impl_->commit(*job, impl_->group);
}

void Checkpointer::start_save(const std::string& name, const CheckpointState& state) {
  if (impl_->options.busy == CheckpointOptions::Busy::wait) impl_->finish();
  impl_->start(impl_->prepare(name, state, true));
}

void Checkpointer::wait() { impl_->finish(); }
bool Checkpointer::saving() const { return impl_->saving(); }

std::vector<std::string> Checkpointer::names(std::vector<std::string>* problems) const {
  std::string text;
  detail::on_first_rank(
      impl_->group, "checkpoints",
      [&] {
        std::vector<std::string> wrong;
        for (const CheckpointName& one : list_checkpoints(impl_->folder, &wrong))
          text += (text.empty() ? "[[" : ",") + json_text(one.name);
        text += text.empty() ? "[[],[" : "],[";
        for (std::size_t i = 0; i < wrong.size(); ++i)
          text += (i > 0 ? "," : "") + json_text(wrong[i]);
        text += "]]";
      },
      impl_->call);
  const Json json = Json::parse(impl_->group.broadcast_bytes(text, 0, impl_->call));
  std::vector<std::string> all;
  for (const Json& name : json.items().at(0).items()) all.push_back(name.string());
  if (problems)
    for (const Json& what : json.items().at(1).items()) problems->push_back(what.string());
  return all;
}

std::optional<std::string> Checkpointer::latest(std::vector<std::string>* problems) const {
  const auto all = names(problems);
  return all.empty() ? std::nullopt : std::optional(all.back());
}

void Checkpointer::remove(const std::string& name) {
  impl_->finish();
  detail::on_first_rank(
      impl_->group, "remove",
      [&] { remove_checkpoint(impl_->folder, name, *impl_->options.operations); }, impl_->call);
}

std::vector<std::string> Checkpointer::warnings() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->warned;
}

std::uint64_t Checkpointer::bytes_written() const { return impl_->written; }

}  // namespace tessera
