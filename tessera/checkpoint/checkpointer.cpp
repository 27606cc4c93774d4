#include "tessera/checkpoint/checkpointer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <tuple>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/internal/json_text.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/detail/local_shards.h"
#include "tessera/checkpoint/detail/together.h"
#include "tessera/checkpoint/storage/detail/catalogue.h"
#include "tessera/checkpoint/storage/detail/shard_file.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/job/internal/tagged_group.h"
#include "tessera/files/internal/checksum.h"
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

// What the ranks must have in common, a line each.
std::string options_text(const CheckpointOptions& options) {
  return concat("keep_last ", options.keep_last, "\nbusy ",
                options.busy == CheckpointOptions::Busy::wait ? "wait" : "refuse",
                "\ncheck_replicas ", options.check_replicas, "\ntimeout ", options.timeout.count(),
                " ms");
}

void check_given(const std::string& folder, const CheckpointOptions& options) {
  if (folder.empty()) throw InvalidArgument("the folder of checkpoints has no name");
  if (!options.operations) throw InvalidArgument("CheckpointOptions::operations is null");
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
    while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
    if (ranks.empty()) {
      ranks.resize(static_cast<std::size_t>(manager.world_size()));
      std::iota(ranks.begin(), ranks.end(), 0);
    }
    group = manager.group(ranks);
    options.timeout = bounded_limit(options.timeout);
    // They choose the calls of the saves, and the group of the writing threads.
    agree::same(group, "the options of a Checkpointer", options_text(options));
    call = {options.timeout, "checkpoint"};
    detail::together(group, "checkpoints", [&] { check_given(folder, options); }, call);
    // A group of its own, so that the writing threads never meet the program's calls, nor those of
    // the Checkpointer of another folder. Ranks may spell a folder differently: the first decides.
    const std::string tag = group.broadcast_bytes(
        concat("checkpoints #", to_hex(Hash().text(folder).value())), 0, call);
    writers = tagged_group(manager, ranks, {.timeout = options.timeout}, tag);
    in_background = group.size() == 1 || writers.backend() != "mpi";
    detail::on_first_rank(
        group, "checkpoints",
        [&] {
          make_folders(folder, *options.operations);
          if (options.remove_incomplete)
            warn(tessera::remove_incomplete(folder, *options.operations));
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
    const std::uint64_t sequence = next_sequence();
    options.operations->sync_folder(folder);
    warn(commit_checkpoint(path, sequence, *job.plan, outcomes, job.nonce, options.operations));
  }

  // Higher than that of any checkpoint in the folder: the latest is the one with the highest.
  std::uint64_t next_sequence() {
    std::vector<std::string> unread;
    const std::uint64_t highest = highest_sequence(folder, unread);
    // Since one job saves here at a time, those that were there before can all be outnumbered by
    // what was known when all could be read.
    if (!unread.empty() && !known_sequence)
      throw FileError(concat("'", folder,
                             "' may hold later checkpoints than those that can be read, and the "
                             "new one must come after them: ",
                             unread.front(), "; make it readable, or move it out of the folder"));
    warn(unread);
    known_sequence = std::max(highest, known_sequence.value_or(0)) + 1;
    return *known_sequence;
  }

  // The new checkpoint stands: what fails here is no failure of its save.
  void retain() {
    if (options.keep_last <= 0) return;
    std::vector<CheckpointName> all;
    try {
      all = list_checkpoints(folder);
    } catch (const FileError& e) {
      warn({concat("no earlier checkpoint was removed: ", e.what())});
    }
    for (std::size_t i = 0; i + static_cast<std::size_t>(options.keep_last) < all.size(); ++i) {
      try {
        remove_checkpoint(folder, all[i].name, *options.operations);
      } catch (const FileError& e) {
        warn({concat("checkpoint '", all[i].name, "' was to be removed: ", e.what())});
      }
    }
  }

  void warn(const std::vector<std::string>& what) {
    const std::lock_guard lock(mutex);
    warned.insert(warned.end(), what.begin(), what.end());
  }

  void run_job() {
    try {
      write(*job);
      if (in_background) commit(*job, writers);
    } catch (...) {
      job->failure = std::current_exception();
    }
    writing = false;
  }

  void start(std::unique_ptr<Job> fresh) {
    job = std::move(fresh);
    writing = true;
    try {
      thread = std::thread([this] { run_job(); });
    } catch (const std::exception& e) {  // of the system, or no memory
      // The other ranks' threads wait for this one's file, so it is written here.
      warn({concat("checkpoint '", job->name,
                   "' was not saved in the background: no thread could be started: ", e.what())});
      run_job();
    }
  }

  // The end of what start() began; throws what it has come to, once.
  void finish() {
    if (!job) return;
    if (thread.joinable()) thread.join();
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
  // First rank: the highest that was ever in the folder; absent until all could be read once. Used
  // by one save at a time.
  std::optional<std::uint64_t> known_sequence;
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
  std::vector<std::string> found, wrong;
  detail::on_first_rank(
      impl_->group, "checkpoints",
      [&] {
        for (const CheckpointName& one : list_checkpoints(impl_->folder, &wrong))
          found.push_back(one.name);
      },
      impl_->call);
  // Paths may have any bytes.
  const auto both = detail::unpacked(impl_->group.broadcast_bytes(
      detail::packed({detail::packed(found), detail::packed(wrong)}), 0, impl_->call));
  if (problems)
    for (const std::string& what : detail::unpacked(both.at(1))) problems->push_back(what);
  return detail::unpacked(both.at(0));
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
