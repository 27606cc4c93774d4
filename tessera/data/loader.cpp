#include "tessera/data/loader.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/pad_sequence.h>
#include <ATen/ops/tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/data/detail/loader_state.h"
#include "tessera/data/detail/read_batch.h"
#include "tessera/data/detail/workers.h"

namespace tessera {

BatchMapping batch_mapping(const Mesh& mesh, const std::vector<std::string>& batch_axes) {
  return BatchMapping(
      mapped(mesh.axes(), &Axis::size), {mesh.ranks().begin(), mesh.ranks().end()},
      mapped(batch_axes, [&](const std::string& name) { return mesh.index(name); }));
}

std::vector<at::Tensor> pad_collate(const std::vector<Sample>& samples, double fill) {
  if (samples.empty()) return {};
  std::vector<at::Tensor> batch;
  const auto lengths = mapped(
      samples, [](const Sample& s) { return s.empty() ? std::int64_t{0} : s.front().size(0); });
  for (std::size_t t = 0; t < samples.front().size(); ++t) {
    const auto column = mapped(samples, [&](const Sample& s) { return s[t]; });
    batch.push_back(at::pad_sequence(column, /*batch_first=*/true, fill));
  }
  batch.push_back(at::tensor(lengths, at::kLong));
  return batch;
}

namespace {

/// Devices whose copies go on while the host goes on.
bool has_streams(const c10::Device& device) { return !device.is_cpu() && !device.is_meta(); }

/// The device, with an index where it has streams. Throws NotAvailable.
c10::Device present_device(c10::Device device) {
  if (!has_streams(device)) return device;
  if (!c10::impl::hasDeviceGuardImpl(device.type()))
    throw NotAvailable("LoaderOptions::device ", device.str(),
                       ": this libtorch has no such devices");
  const c10::impl::VirtualGuardImpl guard(device.type());
  const int count = guard.deviceCount();
  if (count == 0 || device.index() >= count)
    throw NotAvailable("LoaderOptions::device ", device.str(), ": there ",
                       count == 1 ? "is " : "are ", count == 0 ? "none" : concat(count),
                       " on this machine");
  // A device without an index is the caller's current one, not the workers'.
  return device.has_index() ? device : guard.getDevice();
}

/// What the tensors of a batch are called: by the options, else by the datasets, which agree.
std::vector<std::string> batch_names(const std::vector<std::shared_ptr<const Dataset>>& datasets,
                                     const LoaderOptions& options) {
  std::vector<std::string> names = options.names;
  std::size_t of = datasets.size();
  for (std::size_t d = 0; d < datasets.size() && options.names.empty() && !options.collate; ++d) {
    const std::vector<std::string> its = datasets[d]->field_names();
    if (its.empty()) continue;
    if (of < datasets.size() && its != names)
      throw InvalidArgument("dataset ", d, " has the fields ", list(its), ", dataset ", of, " has ",
                            list(names),
                            "; give the datasets of a mixture the same names in the same "
                            "order, or LoaderOptions::names");
    names = its;
    of = d;
  }
  require_field_names(names);
  return names;
}

/// Makes what is copied to the device usable on the caller's current stream.
void take(c10::Event& copied, c10::Device device, const LoadedBatch& batch) {
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  copied.block(current);
  for (const at::Tensor& t : batch.tensors) t.record_stream(current);
  if (batch.mask.defined()) batch.mask.record_stream(current);
}

}  // namespace

// What the loader and its workers share. The workers hold it too: one that hangs in a read is left
// behind, and what it uses must stay alive.
struct Loader::Engine {
  // One batch in progress.
  struct Slot {
    OrderCursor before;  // position of the order before it
    OrderBatch batch;
    LoadedBatch loaded;
    std::exception_ptr failure;
    std::optional<c10::Event> copied;  // it may still be in progress
    // held: failed, to be read again when it is asked for
    enum class State { queued, running, done, held } state = State::queued;
  };

  detail::BatchReader reader;
  LoaderOptions& options = reader.options;
  std::optional<c10::Stream> side;  // copies to the device go there

  std::mutex mutex;
  std::condition_variable work, ready, rested;
  std::deque<std::shared_ptr<Slot>> slots;  // in order of steps; the front is delivered next
  OrderCursor head;                         // position after the last slot
  // Number of batches that the workers plan, each when it is free; 0: none.
  std::size_t wanted = 0;
  // The order threw; when that batch is asked for, it may throw again.
  bool order_failed = false;
  bool stop = false;
  int running = 0;  // workers that have not ended

  explicit Engine(detail::BatchReader from) : reader(std::move(from)) {
    head = reader.order->start();
  }

  // Plans the next batch; the mutex is held. If the order throws, nothing has changed.
  void plan() {
    auto slot = std::make_shared<Slot>();
    slot->before = head;
    OrderCursor after = head;
    slot->batch = reader.order->next(after);
    head = std::move(after);
    order_failed = false;
    slots.push_back(std::move(slot));
    work.notify_one();
  }

  bool may_plan() const { return slots.size() < wanted && !order_failed; }

  // As plan(), in a worker: what the order throws belongs to the batch that it could not make, and
  // is thrown again when that one is asked for.
  void plan_ahead() {
    try {
      plan();
    } catch (...) {
      order_failed = true;
    }
  }

  void want(std::size_t count) {
    wanted = count;
    if (may_plan()) work.notify_all();
  }

  void to_device(Slot& slot) const;

  void load_into(Slot& slot) const {
    try {
      const at::NoGradGuard no_grad;
      slot.loaded = reader.read(slot.batch);
      to_device(slot);
    } catch (...) {
      slot.failure = std::current_exception();
    }
  }

  void run() {
    std::unique_lock lock(mutex);
    auto queued = [](const auto& s) { return s->state == Slot::State::queued; };
    for (;;) {
      auto next = slots.end();
      work.wait(lock, [&] {
        next = std::ranges::find_if(slots, queued);
        return stop || next != slots.end() || may_plan();
      });
      if (stop) break;
      if (next == slots.end()) {
        plan_ahead();
        continue;
      }
      const std::shared_ptr<Slot> slot = *next;
      slot->state = Slot::State::running;
      lock.unlock();
      load_into(*slot);
      lock.lock();
      slot->state = Slot::State::done;
      ready.notify_all();
    }
  }

  void reset(OrderCursor cursor) {
    const std::lock_guard lock(mutex);
    slots.clear();  // a worker that still reads one of them drops its result
    head = std::move(cursor);
    wanted = 0;
    order_failed = false;
  }
};

void Loader::Engine::to_device(Slot& slot) const {
  auto each = [&](auto move) {
    for (at::Tensor& t : slot.loaded.tensors) t = move(t);
    if (slot.loaded.mask.defined()) slot.loaded.mask = move(slot.loaded.mask);
  };
  if (options.pin_memory) each([](const at::Tensor& t) { return t.is_cpu() ? t.pin_memory() : t; });
  if (!options.device || options.device->is_cpu()) return;
  // The guard makes the stream current, so that what is allocated for the copies belongs to it;
  // libtorch keeps pinned memory until its copy is done.
  std::optional<c10::StreamGuard> on_side;
  if (side) on_side.emplace(*side);
  each([&](const at::Tensor& t) { return t.to(*options.device, /*non_blocking=*/true); });
  if (!side) return;
  slot.copied.emplace(options.device->type());
  slot.copied->record(*side);
}

Loader::Loader(std::vector<std::shared_ptr<const Dataset>> datasets,
               std::shared_ptr<const Order> order, BatchMapping mapping, int process,
               LoaderOptions options) {
  if (datasets.empty() || !order || std::ranges::any_of(datasets, [](const auto& d) { return !d; }))
    throw InvalidArgument("a loader needs an order and at least one dataset");
  if (options.workers < 0 || options.prefetch < 0 || options.stall_limit.count() <= 0)
    throw InvalidArgument("a loader with ", options.workers, " workers, ", options.prefetch,
                          " batches ahead and a limit of ", options.stall_limit.count(),
                          " ms; counts are at least 0, the limit above 0");
  mapping.held_by(process);
  if (const auto needed = order->samples_needed(); !needed.empty()) {
    if (needed.size() != datasets.size())
      throw InvalidArgument("an order over ", needed.size(), " datasets for a loader of ",
                            datasets.size(), ": ", order->describe());
    for (std::size_t d = 0; d < needed.size(); ++d)
      if (datasets[d]->size() < needed[d])
        throw InvalidArgument("dataset ", d, " has ", datasets[d]->size(),
                              " samples, the order names ", needed[d], ": ", order->describe());
  }
  auto names = batch_names(datasets, options);
  if (options.graphs) {
    if (options.collate)
      throw InvalidArgument("LoaderOptions::graphs beside `collate`; give one of them");
    detail::require_graph_names(names);
    names.emplace_back("nodes/graph");
    require_field_names(names);
  }
  engine_ = std::make_shared<Engine>(detail::BatchReader{.datasets = std::move(datasets),
                                                         .order = std::move(order),
                                                         .mapping = std::move(mapping),
                                                         .process = process,
                                                         .options = std::move(options),
                                                         .names = std::move(names)});
  Engine& w = *engine_;
  if (w.options.pin_memory) {
    try {
      at::empty({1}).pin_memory();
    } catch (const c10::Error& e) {
      throw NotAvailable("LoaderOptions::pin_memory: memory cannot be page-locked here: ",
                         e.what_without_backtrace());
    }
  }
  if (w.options.device) {
    const c10::Device device = present_device(*w.options.device);
    w.options.device = device;
    if (has_streams(device))
      w.side = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  }
  detail::start_workers(engine_, w.options.workers);
}

Loader::~Loader() { detail::stop_workers(*engine_, "Loader"); }

LoadedBatch Loader::next() {
  Engine& w = *engine_;
  std::unique_lock lock(w.mutex);
  const auto ahead = w.options.workers == 0 ? 0 : static_cast<std::size_t>(w.options.prefetch);
  if (w.slots.empty()) w.plan();
  if (ahead > 0) w.want(ahead + 1);
  const auto slot = w.slots.front();
  if (slot->state == Engine::Slot::State::held) {
    slot->state = Engine::Slot::State::queued;
    w.work.notify_one();
  }
  if (w.options.workers == 0) {
    slot->state = Engine::Slot::State::running;
    lock.unlock();
    w.load_into(*slot);
    lock.lock();
    slot->state = Engine::Slot::State::done;
  } else if (!w.ready.wait_until(lock, deadline_after(w.options.stall_limit),
                                 [&] { return slot->state == Engine::Slot::State::done; })) {
    const char* what =
        slot->state == Engine::Slot::State::running ? "is being read" : "waits for a worker";
    throw StalledError(
        "step ", slot->batch.step, " has not been delivered within ", w.options.stall_limit.count(),
        " ms: it ", what, " (", w.options.workers,
        " workers). The source is too slow or hangs; call next() again to wait longer");
  }
  if (slot->failure) {
    // The batch stays in front, and is read again if the caller tries again.
    auto again = std::make_shared<Engine::Slot>();
    again->before = slot->before;
    again->batch = slot->batch;
    again->state = Engine::Slot::State::held;
    w.slots.front() = again;
    std::rethrow_exception(slot->failure);
  }
  w.slots.pop_front();
  if (ahead > 0) w.want(ahead);
  lock.unlock();
  if (slot->copied) take(*slot->copied, *w.options.device, slot->loaded);
  return std::move(slot->loaded);
}

Loader::EpochRange Loader::epoch() { return EpochRange(*this); }

std::string Loader::state() const {
  Engine& w = *engine_;
  const std::lock_guard lock(w.mutex);
  return detail::write_state(*w.reader.order, w.slots.empty() ? w.head : w.slots.front()->before);
}

void Loader::restore(const std::string& state) {
  engine_->reset(detail::read_state(*engine_->reader.order, state));
}

void Loader::seek(std::uint64_t step) {
  OrderCursor cursor = engine_->reader.order->start();
  if (!cursor.position.empty())
    throw InvalidArgument("step ", step, " of this order cannot be found by its number (",
                          engine_->reader.order->describe(), "); restore a saved state");
  cursor.step = step;
  engine_->reset(std::move(cursor));
}

void Loader::require_agreement(const Group& group) const {
  const detail::BatchReader& r = engine_->reader;
  std::string text = concat("order: ", r.order->describe(), "\nposition: ", state(),
                            "\nbatch coordinates: ", r.mapping.coordinates(), "\n");
  for (std::size_t d = 0; d < r.datasets.size(); ++d)
    text += concat("dataset ", d, ": ", r.datasets[d]->size(), " samples\n");
  text += concat("names of its tensors: ", list(r.names, r.names.size()), "\n");
  Hash held;
  for (const int process : r.mapping.processes()) {
    held.number(static_cast<std::uint64_t>(process));
    for (const int c : r.mapping.held_by(process)) held.number(static_cast<std::uint64_t>(c));
  }
  agree::same(group, "what the loader reads", concat(text, "who reads what: ", held.value(), "\n"));
}

std::uint64_t Loader::next_epoch() {
  const std::lock_guard lock(engine_->mutex);
  if (engine_->slots.empty()) engine_->plan();
  return engine_->slots.front()->batch.epoch;
}

Loader::EpochRange::Iterator& Loader::EpochRange::Iterator::operator++() {
  done_ = loader_.next_epoch() != batch_.epoch;
  batch_ = {};  // its memory is reused for the next one
  if (!done_) batch_ = loader_.next();
  return *this;
}

}  // namespace tessera
