#include "tessera/checkpoint/checkpointer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <numeric>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/internal/json_text.h"
#include "tessera/base/internal/split.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/detail/folder.h"
#include "tessera/checkpoint/detail/local_shards.h"
#include "tessera/checkpoint/detail/ranks.h"
#include "tessera/checkpoint/storage/detail/catalogue.h"
#include "tessera/checkpoint/storage/detail/shard_file.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/group/internal/any_thread.h"
#include "tessera/comm/job/internal/tagged_group.h"
#include "tessera/files/internal/checksum.h"
#include "tessera/files/json.h"

namespace tessera {
namespace {

constexpr const char* kSave = "save";
constexpr const char* kLookUp = "checkpoints";
// Of errors of the writing threads.
constexpr auto kKinds = agree::kinds_of<>();

// What the ranks must have in common, a line each.
std::string options_text(const CheckpointOptions& options) {
  return concat("keep_last ", options.keep_last, "\nbusy ",
                options.busy == CheckpointOptions::Busy::wait ? "wait" : "refuse",
                "\ncheck_replicas ", options.check_replicas, "\ntimeout ", options.timeout.count(),
                " ms");
}

void check_given(const std::shared_ptr<CheckpointIO>& io, const CheckpointOptions& options) {
  check_place(io);
  if (!options.operations) throw InvalidArgument("CheckpointOptions::operations is null");
}

}  // namespace

struct Checkpointer::Impl {
  // What every rank tells the others before a save: hashes of what it holds, of what must be the
  // same on all ranks, and of its plain tensors.
  struct Greeting {
    std::uint64_t nonce, layout, agreed;
    PlainSums plain;
  };
  // One save from its plan to its commit.
  struct Job {
    std::string name, nonce;
    std::shared_ptr<const WritePlan> plan;
    std::vector<at::Tensor> kept;
    std::vector<const void*> data;
    std::uint64_t rate = 0;
    // What this rank's writing has come to: a failure (agree::failure_of), or the outcome, which
    // begins with a bracket.
    std::string failed, outcome;
    // First rank: until it is committed.
    detail::WriteHold hold;
    bool committed = false;
    std::exception_ptr failure;
  };

  Impl(const DistributedManager& manager, std::shared_ptr<CheckpointIO> io,
       const CheckpointOptions& given, std::vector<int> ranks)
      : folder(std::move(io), given), options(given) {
    if (ranks.empty()) ranks = numbers_below(manager.world_size());
    options.timeout = bounded_limit(options.timeout);
    program = {manager.group(ranks), {options.timeout, "checkpoint"}};
    // They choose the calls of the saves, and the group of the writing threads.
    agree::same(program.group, "the options of a Checkpointer", options_text(options));
    program.all(kLookUp, [&] { check_given(folder.shared_io(), options); });
    // A group of its own, so that the writing threads never meet the program's calls, nor those of
    // the Checkpointer of another folder. Ranks may spell a folder differently: the first decides.
    const auto tag = program.first<std::string>(kLookUp, [&] {
      folder.io().make("");
      return concat("checkpoints #", to_hex(Hash().text(folder.io().where("")).value()));
    });
    writers = {tagged_group(manager, ranks, {.timeout = options.timeout}, tag), program.call};
    in_background = any_thread_may_call(writers.group);
  }

  ~Impl() {
    if (thread.joinable()) thread.join();
  }

  // ---- before writing ----

  // What must be the same on all ranks that have it, one checksum a name: values, and plain tensors
  // if that was asked for. `plain`: the bytes of plain tensors, whose sums go into `mine`.
  std::map<std::string, std::uint64_t> sums_of(const CheckpointState& state,
                                               const std::vector<HeldShard>& held,
                                               const std::vector<at::Tensor>& plain,
                                               Greeting& mine) const {
    std::map<std::string, std::uint64_t> sums;
    for (const auto& [name, value] : state.values())
      sums["value '" + name + "'"] = Checksum().add(value).value();
    Hash full, shards;
    for (std::size_t i = 0; i < plain.size(); ++i) {
      if (!plain[i].defined()) continue;
      const std::string& name = state.tensors()[i].name;
      const auto sum = Checksum().add(plain[i].const_data_ptr(), plain[i].nbytes()).value();
      (is_full(held[i].info, held[i].box) ? full : shards).text(name).number(sum);
      if (options.check_replicas && !state.tensors()[i].shard) sums["tensor '" + name + "'"] = sum;
    }
    mine.plain = {full.value(), shards.value()};
    return sums;
  }

  // Names the replicated value that ranks disagree on. Ranks that do not have it do not count.
  void compare_replicas(const std::map<std::string, std::uint64_t>& mine) const {
    const std::string text = json_list(mine, [](const auto& one) {
      return concat('[', json_text(one.first), ",\"", to_hex(one.second), "\"]");
    });
    const auto all = program.group.all_gather_bytes(text, program.call);
    std::map<std::string, std::pair<std::string, std::size_t>> first;
    for (std::size_t r = 0; r < all.size(); ++r) {
      const Json json = Json::parse(all[r]);
      for (const Json& one : json.items()) {
        const std::string name = one.items()[0].string(), sum = one.items()[1].string();
        const auto [it, fresh] = first.emplace(name, std::pair(sum, r));
        if (!fresh && it->second.first != sum)
          throw InvalidArgument("save: the ranks disagree on ", name,
                                ", which is the same on all: rank ", r,
                                " has other contents than rank ", it->second.second,
                                "; give each rank's own as a shard by hand or by set_of_rank()");
      }
    }
  }

  std::shared_ptr<const WritePlan> plan_for(const std::vector<Greeting>& greetings,
                                            const std::string& description) {
    // Of contents it counts alone which ranks have the same.
    std::vector<std::uint64_t> key;
    std::vector<PlainSums> sums;
    for (const Greeting& g : greetings) {
      sums.push_back(g.plain);
      const auto first = [&](std::uint64_t PlainSums::* of) {
        return static_cast<std::uint64_t>(
            std::ranges::find_if(sums, [&](const PlainSums& s) { return s.*of == g.plain.*of; }) -
            sums.begin());
      };
      key.insert(key.end(), {g.layout, first(&PlainSums::full), first(&PlainSums::shards)});
    }
    if (cached_plan && key == cached_key) return cached_plan;
    std::vector<std::vector<HeldShard>> held;
    for (const std::string& text : program.group.all_gather_bytes(description, program.call))
      held.push_back(shards_from(text));
    try {
      cached_plan = std::make_shared<const WritePlan>(plan_writes(held, kSmallestPiece, sums));
    } catch (const InvalidArgument& e) {
      throw InvalidArgument("save: ", e.what());
    }
    cached_key = key;
    return cached_plan;
  }

  std::unique_ptr<Job> prepare(const std::string& name, const CheckpointState& state, bool copy) {
    const bool refuses = options.busy == CheckpointOptions::Busy::refuse;
    auto fresh = std::make_unique<Job>();
    fresh->name = name;
    std::vector<HeldShard> held;
    std::vector<at::Tensor> plain;
    std::string description;
    std::map<std::string, std::uint64_t> sums;
    const Group& group = program.group;
    const auto all = program.all<Greeting, CheckpointBusy, CheckpointLocked>(kSave, [&] {
      check_checkpoint_name(name);
      held = detail::describe(state, group.rank());
      description = describe_shards(held);
      if (group.size() > 1) plain = detail::plain_bytes(state);
      Greeting mine{from_hex(make_nonce()), Checksum().add(description).value(), 0, {}};
      sums = sums_of(state, held, plain, mine);
      Hash hash;
      hash.text(name);
      for (const auto& [key, sum] : sums) hash.text(key).number(sum);
      mine.agreed = hash.value();
      if (refuses && saving())
        throw CheckpointBusy(
            "the checkpoint before this one is still being written, and "
            "CheckpointOptions::busy says to refuse: save less often, or choose Busy::wait");
      // Where ranks talk over MPI, the save before this one still has it.
      if (group.rank() == 0) fresh->hold = job && job->hold ? job->hold : folder.hold_for_save();
      return mine;
    });
    if (refuses) finish();
    if (std::ranges::any_of(all, [&](const Greeting& g) { return g.agreed != all[0].agreed; })) {
      sums["the checkpoint's name"] = Checksum().add(name).value();
      compare_replicas(sums);
    }
    fresh->nonce = to_hex(all[0].nonce);
    fresh->plan = plan_for(all, description);
    // Where it fails the others are on their way to the commit, where they learn of it.
    fresh->failed = agree::failure_of(kKinds, [&] { collect(*fresh, state, held, plain, copy); });
    return fresh;
  }

  // The bytes of what this rank writes.
  void collect(Job& job, const CheckpointState& state, const std::vector<HeldShard>& held,
               const std::vector<at::Tensor>& plain, bool copy) {
    const std::vector<at::Tensor> bytes = detail::local_bytes(state, plain);
    std::map<std::tuple<EntryKind, std::string, int>, std::size_t> place;
    for (std::size_t i = 0; i < held.size(); ++i)
      place[{held[i].info.kind, held[i].info.name, held[i].info.rank}] = i;
    std::vector<std::size_t> sizes;
    for (const AssignedBox& a : job.plan->ranks[program.group.rank()]) {
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
    if (!job.failed.empty()) return;
    job.failed = agree::failure_of(kKinds, [&] {
      const Group& group = program.group;
      folder.io().make(job.name);
      const ShardOutcome outcome =
          write_shard(folder.io(), {job.name, job.nonce, group.rank(), group.size(), job.rate},
                      *job.plan, job.data);
      written = outcome.bytes;
      job.outcome = to_text(outcome);
    });
    job.kept.clear();
  }

  // Collective over `over`: all ranks learn whether the checkpoint stands.
  void commit(Job& job, const detail::Ranks& over) {
    auto hold = std::exchange(job.hold, {});
    const auto all =
        over.group.gather_bytes(job.failed.empty() ? job.outcome : job.failed, 0, over.call);
    over.first<void, CheckpointLocked>(kSave, [&] {
      // Until all is done here, and no longer when the others hear of it.
      const auto held = std::exchange(hold, {});
      Commit save{job.name, job.nonce, 0, held.lock != nullptr};
      try {
        commit_outcomes(job, save, held, all);
      } catch (...) {
        if (!save.may_stand) discard_save(folder.io(), job.name, job.nonce);
        throw;
      }
      folder.retain();
    });
    job.committed = true;
    ++saves;
  }

  void commit_outcomes(const Job& job, Commit& save, const detail::WriteHold& held,
                       const std::vector<std::string>& all) {
    std::vector<ShardOutcome> outcomes;
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (!all[r].starts_with('['))
        agree::raise(kKinds, all[r],
                     all.size() > 1 ? concat("rank ", program.group.ranks()[r], ": ") : "");
      outcomes.push_back(outcome_from(all[r]));
    }
    save.sequence = folder.next_sequence(held);
    folder.io().sync("");
    folder.confirm(held);
    folder.warn(commit_checkpoint(folder.io(), save, *job.plan, outcomes));
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
      folder.warn(
          {concat("checkpoint '", job->name,
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
    if (!done->committed) commit(*done, program);
  }

  bool saving() const { return writing; }

  detail::CheckpointFolder folder;
  CheckpointOptions options;
  // The calls of the program, and those of the writing threads.
  detail::Ranks program, writers;
  bool in_background = true;
  std::vector<std::uint64_t> cached_key;
  std::shared_ptr<const WritePlan> cached_plan;
  at::Tensor buffer;
  std::unique_ptr<Job> job;
  std::thread thread;
  std::atomic<bool> writing{false};
  std::atomic<std::uint64_t> written{0}, saves{0};
};

Checkpointer::Checkpointer(const DistributedManager& manager, const std::string& folder,
                           const CheckpointOptions& options, const std::vector<int>& ranks)
    : Checkpointer(manager, local_folder(folder, options.operations), options, ranks) {}
Checkpointer::Checkpointer(const DistributedManager& manager, std::shared_ptr<CheckpointIO> io,
                           const CheckpointOptions& options, const std::vector<int>& ranks)
    : impl_(std::make_unique<Impl>(manager, std::move(io), options, ranks)) {}
Checkpointer::~Checkpointer() = default;

std::string Checkpointer::folder() const { return io()->where(""); }
const std::shared_ptr<CheckpointIO>& Checkpointer::io() const { return impl_->folder.shared_io(); }

void Checkpointer::save(const std::string& name, const CheckpointState& state) {
  if (impl_->options.busy == CheckpointOptions::Busy::wait) impl_->finish();
  const auto job = impl_->prepare(name, state, false);
  impl_->write(*job);
  impl_->commit(*job, impl_->program);
}

void Checkpointer::start_save(const std::string& name, const CheckpointState& state) {
  if (impl_->options.busy == CheckpointOptions::Busy::wait) impl_->finish();
  impl_->start(impl_->prepare(name, state, true));
}

void Checkpointer::wait() { impl_->finish(); }
bool Checkpointer::saving() const { return impl_->saving(); }

std::vector<std::string> Checkpointer::names(std::vector<std::string>* problems) const {
  // Names, paths and messages have no zero bytes; an empty text stands between both lists.
  const auto told = impl_->program.first<std::string>(kLookUp, [&] {
    std::string text;
    std::vector<DamagedCheckpoint> damaged;
    for (const CheckpointName& one : list_checkpoints(impl_->folder.io(), &damaged))
      text += one.name + '\0';
    text += '\0';
    for (const DamagedCheckpoint& one : damaged) text += one.damage + '\0';
    return text;
  });
  std::vector<std::string> found, wrong;
  auto* into = &found;
  for (const std::string& one : split(told, '\0'))
    if (one.empty())
      into = &wrong;
    else
      into->push_back(one);
  if (problems) problems->insert(problems->end(), wrong.begin(), wrong.end());
  return found;
}

std::optional<std::string> Checkpointer::latest(std::vector<std::string>* problems) const {
  const auto all = names(problems);
  return all.empty() ? std::nullopt : std::optional(all.back());
}

std::optional<std::string> Checkpointer::to_resume() const {
  auto name = impl_->program.first<std::string, CheckpointDamaged>(
      kLookUp, [&] { return impl_->folder.to_resume(); });
  return name.empty() ? std::nullopt : std::optional(std::move(name));
}

void Checkpointer::remove(const std::string& name) {
  impl_->finish();
  impl_->program.first<void, CheckpointLocked>("remove", [&] {
    const auto held = impl_->folder.hold();
    remove_checkpoint(impl_->folder.io(), name);
  });
}

void Checkpointer::protect(const std::vector<std::string>& names) { impl_->folder.protect(names); }

std::vector<std::string> Checkpointer::warnings() const { return impl_->folder.warnings(); }

std::uint64_t Checkpointer::bytes_written() const { return impl_->written; }
std::uint64_t Checkpointer::saves() const { return impl_->saves; }

}  // namespace tessera
