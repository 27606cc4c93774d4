#include "tessera/data/stream_loader.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/data/detail/loader_state.h"
#include "tessera/data/detail/read_batch.h"
#include "tessera/data/detail/workers.h"
#include "tessera/data/loader.h"  // StalledError
#include "tessera/partition/partition.h"

namespace tessera {

// What the loader and its workers share. The workers hold it too: one that hangs in a read is left
// behind, and what it uses must stay alive.
struct StreamLoader::Engine {
  // The samples of one step.
  struct Slot {
    std::uint64_t first = 0;  // position of its first sample
    std::uint64_t taken = 0;  // samples taken from the stream
    bool ended = false;       // the stream has no more
    bool done = false;
    bool moved = false;  // a lane of this rank went on to another shard, or has ended
    std::vector<ShardedStream::Place> places;  // of this rank's lanes, after it
    std::vector<Sample> samples;
    std::vector<at::Tensor> stacked;
    std::string failure;  // what the stream or the transform threw
    std::uint64_t failed_at = 0;
  };

  std::shared_ptr<IterableDataset> dataset;
  std::optional<ShardedStream> lanes;  // in place of the dataset
  Interval own;                        // this rank's lanes
  std::int64_t rows;
  StreamOptions options;

  std::mutex mutex;
  std::condition_variable work, ready, rested;
  // in the order of the stream; the front is delivered next
  std::deque<std::shared_ptr<Slot>> slots;
  std::uint64_t taken = 0;  // from the stream, by the thread that reads
  bool reading = false;     // a worker is reading from the stream
  // nothing is read before the first next(): restore() may come first
  bool begun = false;
  bool ended = false, stop = false;
  int running = 0;  // workers that have not ended

  // Reads the slot's samples from the stream. One thread at a time.
  void take(Slot& slot) {
    slot.failure = told([&] {
      if (lanes) return take_of_lanes(slot);
      while (slot.taken < static_cast<std::uint64_t>(rows)) {
        slot.failed_at = slot.first + slot.taken;
        auto sample = dataset->next();
        slot.ended = !sample;
        if (slot.ended) break;
        ++slot.taken;
        slot.samples.push_back(std::move(*sample));
      }
    });
  }

  void take_of_lanes(Slot& slot) {
    slot.ended = true;
    for (int lane = static_cast<int>(own.begin); lane < own.end; ++lane) {
      const ShardedStream::Place before = lanes->place(lane);
      for (std::int64_t i = 0; i < lanes->rows_of_lane(); ++i) {
        slot.failed_at = slot.first + slot.taken;
        auto sample = lanes->next(lane);
        if (!sample) break;
        ++slot.taken;
        slot.samples.push_back(std::move(*sample));
      }
      const ShardedStream::Place after = lanes->place(lane);
      slot.moved = slot.moved || after.turn != before.turn;
      slot.ended = slot.ended && lanes->dry(lane, after);
      slot.places.push_back(after);
    }
  }

  // Makes a batch of the slot's samples before the ranks agree, so that samples that cannot be
  // stacked are an error on all of them.
  void make(Slot& slot) const {
    if (!slot.failure.empty()) return;
    slot.failure = told([&] {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; options.transform && i < slot.samples.size(); ++i) {
        slot.failed_at = slot.first + i;
        slot.samples[i] = options.transform(std::move(slot.samples[i]));
      }
      for (std::size_t i = 1; i < slot.samples.size(); ++i) {
        slot.failed_at = slot.first + i;
        detail::require_alike(slot.samples[i], slot.samples.front(), "the first of the batch");
      }
      slot.failed_at = slot.first + slot.taken;
      if (!options.names.empty() && !slot.samples.empty() &&
          slot.samples.front().size() != options.names.size())
        throw InvalidArgument("samples of ", slot.samples.front().size(), " tensors and ",
                              options.names.size(), " names for them: ", list(options.names));
      slot.stacked = detail::stacked(slot.samples);
    });
  }

  // Reads the samples of one more step; the lock is not held meanwhile.
  void read_next(std::unique_lock<std::mutex>& lock) {
    const auto slot = std::make_shared<Slot>();
    slot->first = taken;
    slots.push_back(slot);
    reading = true;
    lock.unlock();
    take(*slot);
    lock.lock();
    reading = false;
    taken += slot->taken;
    ended = ended || slot->ended;
    work.notify_one();
    rested.notify_all();
    lock.unlock();
    make(*slot);
    lock.lock();
    slot->done = true;
    ready.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [&] {
        return stop || (begun && !reading && !ended &&
                        slots.size() <= static_cast<std::size_t>(options.prefetch));
      });
      if (stop) break;
      read_next(lock);
    }
  }

  // The next step's samples; null if they do not arrive within the limit.
  std::shared_ptr<Slot> next() {
    std::unique_lock lock(mutex);
    if (options.workers == 0 && slots.empty() && !ended) read_next(lock);
    begun = true;
    work.notify_one();
    if (!ready.wait_until(lock, deadline_after(options.stall_limit),
                          [&] { return slots.empty() ? ended : slots.front()->done; }))
      return nullptr;
    return slots.empty() ? std::make_shared<Slot>() : slots.front();
  }

  // Removes the front, which has been delivered.
  void pop() {
    const std::lock_guard lock(mutex);
    if (slots.empty()) return;
    slots.pop_front();
    work.notify_one();
  }

  // What was read ahead is dropped; `again` puts the stream where it is to go on, while no thread
  // reads it, after `samples` of them.
  void go_back(std::uint64_t samples, const std::function<void()>& again) {
    std::unique_lock lock(mutex);
    begun = false;
    if (!rested.wait_until(lock, deadline_after(options.stall_limit), [&] { return !reading; }))
      throw StalledError("the stream has been read for ", options.stall_limit.count(),
                         " ms; it cannot be restored meanwhile");
    slots.clear();
    ended = false;
    taken = samples;
    again();
  }

  // This rank's lanes go to their places among those of all.
  void go_to(const std::vector<ShardedStream::Place>& places) {
    for (auto lane = own.begin; lane < own.end; ++lane)
      lanes->go_to(static_cast<int>(lane), places[static_cast<std::size_t>(lane)]);
  }

 private:
  template <class Body>
  static std::string told(const Body& body) {
    try {
      body();
      return {};
    } catch (const std::exception& e) {
      return *e.what() ? e.what() : "unknown";
    } catch (...) {
      return "an exception that is no std::exception";
    }
  }
};

StreamLoader::StreamLoader(std::shared_ptr<IterableDataset> dataset, std::int64_t rows, Group group,
                           StreamOptions options)
    : rows_(rows),
      group_(std::move(group)),
      uneven_(options.uneven),
      last_(options.example),
      engine_(std::make_shared<Engine>()) {
  if (!dataset || rows < 1)
    throw InvalidArgument("a stream loader with batches of ", rows,
                          " rows; it needs a dataset and at least 1 row");
  engine_->dataset = std::move(dataset);
  begin(std::move(options));
}

StreamLoader::StreamLoader(std::shared_ptr<const StreamShards> shards,
                           const ShardedStreamOptions& sharding, std::int64_t rows, Group group,
                           StreamOptions options)
    : rows_(0),
      group_(std::move(group)),
      uneven_(options.uneven),
      last_(options.example),
      engine_(std::make_shared<Engine>()) {
  const auto& lanes = engine_->lanes.emplace(std::move(shards), sharding, rows);
  if (lanes.lanes() < group_.size())
    throw InvalidArgument(lanes.lanes(), " lanes for ", group_.size(),
                          " ranks; each rank reads one at least");
  engine_->own = Partition::even(lanes.lanes(), group_.size()).interval(group_.rank());
  rows_ = engine_->own.size() * lanes.rows_of_lane();
  places_.resize(static_cast<std::size_t>(lanes.lanes()));
  begin(std::move(options));
}

void StreamLoader::begin(StreamOptions options) {
  if (options.workers < 0 || options.prefetch < 0 || options.stall_limit.count() <= 0)
    throw InvalidArgument("a stream loader with ", options.workers, " workers, ", options.prefetch,
                          " batches ahead and a limit of ", options.stall_limit.count(),
                          " ms; counts are at least 0, the limit above 0");
  require_field_names(options.names);
  if (!options.names.empty() && !options.example.empty() &&
      options.names.size() != options.example.size())
    throw InvalidArgument("an example of ", options.example.size(), " tensors and ",
                          options.names.size(), " names for them: ", list(options.names));
  engine_->rows = rows_;
  engine_->options = std::move(options);
  detail::start_workers(engine_, engine_->options.workers);
}

StreamLoader::~StreamLoader() { detail::stop_workers(*engine_, "StreamLoader"); }

bool StreamLoader::sharded() const { return engine_->lanes.has_value(); }

void StreamLoader::stay(std::uint64_t taken) {
  if (!sharded()) return;
  taken_ = taken;
  ended_ = false;
  engine_->go_back(taken, [&] { engine_->go_to(places_); });
}

void StreamLoader::follow(std::vector<ShardedStream::Place> mine, bool moved) {
  const ShardedStream& lanes = *engine_->lanes;
  if (!moved) {
    for (int lane = 0; lane < lanes.lanes(); ++lane) {
      auto& place = places_[static_cast<std::size_t>(lane)];
      if (!lanes.dry(lane, place)) place.sample += static_cast<std::uint64_t>(lanes.rows_of_lane());
    }
    return;
  }
  if (mine.empty())  // a rank whose lanes have ended reads no more
    mine.assign(places_.begin() + engine_->own.begin, places_.begin() + engine_->own.end);
  const auto all = agree::all<std::vector<ShardedStream::Place>>(
      group_, "stream_loader", [&] { return mine; }, {.name = "stream_loader"});
  places_.clear();
  for (const auto& of : all) places_.insert(places_.end(), of.begin(), of.end());
}

namespace {

// What a rank says before a step, and what all of them have said.
struct Said {
  std::int64_t samples, batch;
  bool knows_shapes, failed, stalled, moved;
};
struct Heard {
  std::vector<int> empty, partial, shapeless, failed, stalled;  // global ranks
  std::int64_t total = 0;
  bool moved = false;
};

Heard hear(const Group& group, const Said& mine) {
  const auto all =
      agree::all<Said>(group, "stream_loader", [&] { return mine; }, {.name = "stream_loader"});
  Heard heard;
  for (int r = 0; r < group.size(); ++r) {
    const Said& of = all[r];
    const int rank = group.ranks()[r];
    heard.total += of.samples;
    if (of.samples == 0) heard.empty.push_back(rank);
    if (of.samples < of.batch) heard.partial.push_back(rank);
    if (!of.knows_shapes) heard.shapeless.push_back(rank);
    if (of.failed) heard.failed.push_back(rank);
    if (of.stalled) heard.stalled.push_back(rank);
    heard.moved = heard.moved || of.moved;
  }
  return heard;
}

// Why a step cannot be made of what the ranks have; empty: it can.
std::string uneven_fault(UnevenData how, const Heard& heard, const Group& group,
                         std::uint64_t step) {
  const bool mixed =
      !heard.partial.empty() && static_cast<int>(heard.partial.size()) < group.size();
  if (how == UnevenData::error && mixed)
    return concat("at step ", step, " ranks ", list(heard.partial), " of group '", group.name(),
                  "' have no full batch and others have; choose drop, pad or weight_zero, or give "
                  "every rank the same number of samples");
  if (how == UnevenData::error && !heard.empty.empty())
    return concat("at step ", step, " ranks ", list(heard.empty), " of group '", group.name(),
                  "' have no sample and others have a few; choose drop, pad or weight_zero");
  const bool pads = how == UnevenData::pad || how == UnevenData::weight_zero;
  if (pads && !heard.partial.empty() && !heard.shapeless.empty())
    return concat("the streams of ranks ", list(heard.shapeless),
                  " were empty from the start, so they do not know the shapes; give StreamLoader "
                  "an example sample");
  return {};
}

}  // namespace

std::optional<StreamBatch> StreamLoader::next() {
  if (sharded() && !compared_) {
    agree::same(group_, "what is read of the shards",
                concat(engine_->lanes->describe(), "\nuneven ", static_cast<int>(uneven_),
                       "\nnames ", list(engine_->options.names)));
    compared_ = true;
  }
  const std::uint64_t before = taken_;
  const auto slot = ended_ ? std::make_shared<Engine::Slot>() : engine_->next();
  const std::string failure = slot ? slot->failure : std::string();
  const auto n = slot ? static_cast<std::int64_t>(slot->samples.size()) : 0;
  const Heard heard = hear(
      group_, {n, rows_, n > 0 || !last_.empty(), !failure.empty(), !slot, slot && slot->moved});
  // A rank that has its samples keeps them until the others have theirs.
  if (!heard.stalled.empty())
    throw StalledError("step ", step_, ": the streams of ranks ", list(heard.stalled),
                       " have not delivered within ", engine_->options.stall_limit.count(),
                       " ms (this rank's limit); call next() again on every rank to wait longer");
  engine_->pop();
  taken_ += slot->taken;
  ended_ = ended_ || slot->ended;
  if (!heard.failed.empty()) {
    stay(before);
    throw SampleError(concat("the streams of ranks ", list(heard.failed), " failed at step ", step_,
                             failure.empty() ? ""
                                             : concat("; this rank's, at sample ", slot->failed_at,
                                                      ": ", failure)),
                      failure.empty() ? taken_ : slot->failed_at);
  }
  if (heard.total == 0) return std::nullopt;
  if (const auto fault = uneven_fault(uneven_, heard, group_, step_); !fault.empty()) {
    stay(before);
    throw UnevenDataError(fault);
  }
  if (uneven_ == UnevenData::drop && !heard.partial.empty()) {
    ended_ = true;
    return std::nullopt;
  }

  if (sharded()) follow(std::move(slot->places), heard.moved);
  StreamBatch batch;
  batch.step = step_++;
  batch.real = n;
  batch.global_real = heard.total;
  if (n > 0) last_ = slot->samples.back();
  const bool pad = uneven_ == UnevenData::pad && n < rows_;
  batch.rows = pad ? rows_ : n;
  for (std::size_t t = 0; t < last_.size(); ++t) {
    std::vector<at::Tensor> parts;
    if (n > 0) parts.push_back(slot->stacked[t]);
    for (std::int64_t i = n; i < batch.rows; ++i) parts.push_back(last_[t].unsqueeze(0));
    batch.tensors.push_back(parts.empty() ? last_[t].unsqueeze(0).narrow(0, 0, 0) : at::cat(parts));
  }
  if (pad) batch.mask = at::arange(batch.rows).lt(n);
  batch.names = engine_->options.names;
  return batch;
}

std::string StreamLoader::state() const {
  if (!sharded()) return concat("tessera-stream-1 ", step_, ' ', taken_);
  std::string text =
      concat("tessera-stream-2 ", Hash().text(engine_->lanes->describe()).value(), ' ', step_);
  for (const auto& place : places_) text += concat(' ', place.turn, ' ', place.sample);
  return concat(text, ' ', Hash().text(text).value());
}

// A text of state() of shards.
void StreamLoader::restore_places(const std::string& state) {
  const auto end = state.rfind(' ');
  const auto words = detail::words_of(state);
  if (words.empty() || words[0] != "tessera-stream-2" ||
      words.back() != std::to_string(Hash().text(state.substr(0, end)).value()) ||
      words.size() % 2 != 0)
    throw ConfigurationError(
        "this is no state of a loader of shards, or it was truncated or changed");
  const std::string here = engine_->lanes->describe();
  if (words[1] != std::to_string(Hash().text(here).value()) ||
      words.size() != 4 + 2 * places_.size())
    throw ConfigurationError(
        "the state is of other shards, lanes, rows, seed or epochs than this loader's (", here,
        "); they decide which samples come next, and stay the same");
  std::vector<std::uint64_t> numbers;
  for (std::size_t i = 2; i + 1 < words.size(); ++i)
    numbers.push_back(parse_number(words[i]).value_or(0));
  std::vector<ShardedStream::Place> places;
  for (std::size_t i = 1; i < numbers.size(); i += 2)
    places.push_back({numbers[i], numbers[i + 1]});
  engine_->go_back(0, [&] { engine_->go_to(places); });
  places_ = std::move(places);
  step_ = numbers[0];
  taken_ = 0;
  ended_ = false;
}

void StreamLoader::restore(const std::string& state, bool replay) {
  if (sharded()) return restore_places(state);
  const auto words = detail::words_of(state);
  std::optional<std::uint64_t> step_read, taken_read;
  if (words.size() == 3 && words[0] == "tessera-stream-1") {
    step_read = parse_number(words[1]);
    taken_read = parse_number(words[2]);
  }
  if (!step_read || !taken_read)
    throw ConfigurationError("this is no state of a stream loader, or it was truncated or changed");
  const std::uint64_t step = *step_read, taken = *taken_read;
  if (!replay)
    throw NotAvailable("a stream without positions cannot be resumed after ", taken,
                       " samples. Use a dataset with random access and Loader, or "
                       "restore(state, replay = true), which reads them again");
  TORCH_WARN("StreamLoader: reading ", taken, " samples again to come back to step ", step,
             "; this is right only if the stream repeats itself");
  engine_->go_back(taken, [&] {
    for (std::uint64_t i = 0; i < taken; ++i)
      if (!engine_->dataset->next())
        throw ConfigurationError("the stream ended after ", i,
                                 " samples, the state was saved after ", taken);
  });
  step_ = step;
  taken_ = taken;
  ended_ = false;
}

}  // namespace tessera
