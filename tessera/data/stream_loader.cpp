#include "tessera/data/stream_loader.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>

#include "tessera/base/deadline.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/data/detail/loader_state.h"
#include "tessera/data/detail/read_batch.h"
#include "tessera/data/detail/workers.h"
#include "tessera/data/loader.h"  // StalledError

namespace tessera {

UnevenDataError::~UnevenDataError() = default;

// What the loader and its workers share. The workers hold it too: one that hangs in a read is left
// behind, and what it uses must stay alive.
struct StreamLoader::Engine {
  // The samples of one step.
  struct Slot {
    std::uint64_t first = 0;  // position of its first sample
    std::uint64_t taken = 0;  // samples taken from the stream
    bool ended = false;       // the stream has no more
    bool done = false;
    std::vector<Sample> samples;
    std::vector<at::Tensor> stacked;
    std::string failure;  // what the stream or the transform threw
    std::uint64_t failed_at = 0;
  };

  std::shared_ptr<IterableDataset> dataset;
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
  void take(Slot& slot) const {
    slot.failure = told([&] {
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
        throw InvalidArgument(concat("samples of ", slot.samples.front().size(), " tensors and ",
                                     options.names.size(),
                                     " names for them: ", list(options.names)));
      for (std::size_t t = 0; !slot.samples.empty() && t < slot.samples.front().size(); ++t) {
        std::vector<at::Tensor> column;
        for (const Sample& s : slot.samples) column.push_back(s[t]);
        slot.stacked.push_back(at::stack(column));
      }
    });
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [&] {
        return stop || (begun && !reading && !ended &&
                        slots.size() <= static_cast<std::size_t>(options.prefetch));
      });
      if (stop) break;
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
  }

  // The next step's samples; null if they do not arrive within the limit.
  std::shared_ptr<Slot> next() {
    std::unique_lock lock(mutex);
    if (options.workers == 0 && slots.empty() && !ended) {
      const auto slot = std::make_shared<Slot>();
      slot->first = taken;
      take(*slot);
      make(*slot);
      taken += slot->taken;
      ended = slot->ended;
      slot->done = true;
      slots.push_back(slot);
    }
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

  // To be called while no thread reads; what was read ahead is dropped.
  void go_back(std::uint64_t samples) {
    std::unique_lock lock(mutex);
    begun = false;
    if (!rested.wait_until(lock, deadline_after(options.stall_limit), [&] { return !reading; }))
      throw StalledError(concat("the stream has been read for ", options.stall_limit.count(),
                                " ms; it cannot be restored meanwhile"));
    slots.clear();
    ended = false;
    for (taken = 0; taken < samples; ++taken)
      if (!dataset->next())
        throw ConfigurationError(concat("the stream ended after ", taken,
                                        " samples, the state was saved after ", samples));
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
    throw InvalidArgument(concat("a stream loader with batches of ", rows,
                                 " rows; it needs a dataset and at least 1 row"));
  if (options.workers < 0 || options.prefetch < 0 || options.stall_limit.count() <= 0)
    throw InvalidArgument(concat("a stream loader with ", options.workers, " workers, ",
                                 options.prefetch, " batches ahead and a limit of ",
                                 options.stall_limit.count(),
                                 " ms; counts are at least 0, the limit above 0"));
  require_field_names(options.names);
  if (!options.names.empty() && !options.example.empty() &&
      options.names.size() != options.example.size())
    throw InvalidArgument(concat("an example of ", options.example.size(), " tensors and ",
                                 options.names.size(), " names for them: ", list(options.names)));
  engine_->dataset = std::move(dataset);
  engine_->rows = rows;
  engine_->options = std::move(options);
  detail::start_workers(engine_, engine_->options.workers);
}

StreamLoader::~StreamLoader() { detail::stop_workers(*engine_, "StreamLoader"); }

std::optional<StreamBatch> StreamLoader::next() {
  const auto slot = ended_ ? std::make_shared<Engine::Slot>() : engine_->next();
  const std::string failure = slot ? slot->failure : std::string();
  // Everything that the ranks must agree on before the step.
  struct Said {
    std::int64_t samples, batch;
    bool knows_shapes, failed, stalled;
  };
  const auto n = slot ? static_cast<std::int64_t>(slot->samples.size()) : 0;
  const auto all = agree::all<Said>(
      group_, "stream_loader",
      [&] { return Said{n, rows_, n > 0 || !last_.empty(), !failure.empty(), !slot}; },
      {.name = "stream_loader"});
  std::vector<int> empty, partial, shapeless, failed, stalled;
  std::int64_t total = 0;
  for (int r = 0; r < group_.size(); ++r) {
    const Said& of = all[r];
    const int rank = group_.ranks()[r];
    total += of.samples;
    if (of.samples == 0) empty.push_back(rank);
    if (of.samples < of.batch) partial.push_back(rank);
    if (!of.knows_shapes) shapeless.push_back(rank);
    if (of.failed) failed.push_back(rank);
    if (of.stalled) stalled.push_back(rank);
  }
  // A rank that has its samples keeps them until the others have theirs.
  if (!stalled.empty())
    throw StalledError(
        concat("step ", step_, ": the streams of ranks ", list(stalled),
               " have not delivered within ", engine_->options.stall_limit.count(),
               " ms (this rank's limit); call next() again on every rank to wait longer"));
  engine_->pop();
  taken_ += slot->taken;
  ended_ = ended_ || slot->ended;
  if (!failed.empty())
    throw SampleError(concat("the streams of ranks ", list(failed), " failed at step ", step_,
                             failure.empty() ? ""
                                             : concat("; this rank's, at sample ", slot->failed_at,
                                                      ": ", failure)),
                      failure.empty() ? taken_ : slot->failed_at);
  if (total == 0) return std::nullopt;
  if (!partial.empty()) {
    if (uneven_ == UnevenData::error && static_cast<int>(partial.size()) < group_.size())
      throw UnevenDataError(concat("at step ", step_, " ranks ", list(partial), " of group '",
                                   group_.name(),
                                   "' have no full batch and others have; choose drop, pad or "
                                   "weight_zero, or give every rank the same number of samples"));
    if (uneven_ == UnevenData::error && static_cast<int>(empty.size()) > 0)
      throw UnevenDataError(
          concat("at step ", step_, " ranks ", list(empty), " of group '", group_.name(),
                 "' have no sample and others have a few; choose drop, pad or weight_zero"));
    if (uneven_ == UnevenData::drop) {
      ended_ = true;
      return std::nullopt;
    }
    if ((uneven_ == UnevenData::pad || uneven_ == UnevenData::weight_zero) && !shapeless.empty())
      throw UnevenDataError(concat("the streams of ranks ", list(shapeless),
                                   " were empty from the start, so they do not know the shapes; "
                                   "give StreamLoader an example sample"));
  }

  StreamBatch batch;
  batch.step = step_++;
  batch.real = n;
  batch.global_real = total;
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

std::string StreamLoader::state() const { return concat("tessera-stream-1 ", step_, ' ', taken_); }

void StreamLoader::restore(const std::string& state, bool replay) {
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
    throw NotAvailable(concat("a stream without positions cannot be resumed after ", taken,
                              " samples. Use a dataset with random access and Loader, or "
                              "restore(state, replay = true), which reads them again"));
  TORCH_WARN("StreamLoader: reading ", taken, " samples again to come back to step ", step,
             "; this is right only if the stream repeats itself");
  engine_->go_back(taken);
  step_ = step;
  taken_ = taken;
  ended_ = false;
}

}  // namespace tessera
