#include "tessera/data/loader.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <sstream>
#include <thread>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

constexpr const char* kStateHeader = "tessera-loader-1";

std::uint64_t fingerprint(const Order& order) { return Hash().text(order.describe()).value(); }

std::string write_state(const Order& order, const OrderCursor& cursor) {
  std::ostringstream out;
  out << kStateHeader << ' ' << fingerprint(order) << ' ' << cursor.step << ' ' << cursor.position.size();
  for (auto p : cursor.position) out << ' ' << p;
  out << ' ' << cursor.credit.size() << std::hexfloat;  // exact
  for (double c : cursor.credit) out << ' ' << c;
  return std::move(out).str();
}

OrderCursor read_state(const Order& order, const std::string& state) {
  std::istringstream in(state);
  std::string header;
  std::uint64_t saved = 0;
  OrderCursor cursor;
  auto count = [&] {
    std::size_t n = 0;
    in >> n;
    if (!in || n > state.size()) throw ConfigurationError("this is no state of a loader, or it was cut off");
    return n;
  };
  in >> header >> saved >> cursor.step;
  if (!in || header != kStateHeader) throw ConfigurationError("this is no state of a loader, or it was cut off");
  if (saved != fingerprint(order))
    throw ConfigurationError(
        concat("the state was saved by another order; this one is: ", order.describe(), ". Resume with the same samples, seed and batch schedule"));
  cursor.position.resize(count());
  for (auto& p : cursor.position) in >> p;
  cursor.credit.resize(count());
  for (double& c : cursor.credit) {
    std::string number;  // streams do not read hexadecimal floats back
    in >> number;
    c = std::strtod(number.c_str(), nullptr);
  }
  if (!in) throw ConfigurationError("this is no state of a loader, or it was cut off");
  return cursor;
}

// Rows of several datasets, in the order of `refs`.
std::vector<at::Tensor> read_rows(const std::vector<std::shared_ptr<const Dataset>>& datasets, const std::vector<SampleRef>& refs) {
  const bool single = std::all_of(refs.begin(), refs.end(), [&](const SampleRef& r) { return r.dataset == refs.front().dataset; });
  std::vector<at::Tensor> batch;
  for (int d = 0; d < static_cast<int>(datasets.size()); ++d) {
    std::vector<std::uint64_t> indices;
    std::vector<std::int64_t> rows;
    for (std::size_t i = 0; i < refs.size(); ++i)
      if (refs[i].dataset == d) {
        indices.push_back(refs[i].index);
        rows.push_back(static_cast<std::int64_t>(i));
      }
    if (indices.empty()) continue;
    auto part = datasets[d]->get_batch(indices);
    if (single) return part;
    if (batch.empty())
      for (const at::Tensor& t : part) {
        auto shape = t.sizes().vec();
        shape[0] = static_cast<std::int64_t>(refs.size());
        batch.push_back(at::empty(shape, t.options()));
      }
    if (part.size() != batch.size())
      throw InvalidArgument(concat("the samples of dataset ", d, " have ", part.size(), " tensors, those of others ", batch.size()));
    for (std::size_t t = 0; t < part.size(); ++t) batch[t].index_copy_(0, at::tensor(rows), part[t]);
  }
  return batch;
}

}  // namespace

StalledError::~StalledError() = default;

BatchMapping batch_mapping(const Mesh& mesh, const std::vector<std::string>& batch_axes) {
  std::vector<int> sizes, axes;
  for (const Axis& axis : mesh.axes()) sizes.push_back(axis.size);
  for (const std::string& name : batch_axes) axes.push_back(mesh.index(name));
  return BatchMapping(sizes, {mesh.ranks().begin(), mesh.ranks().end()}, axes);
}

std::vector<at::Tensor> pad_collate(const std::vector<Sample>& samples, double fill) {
  if (samples.empty()) return {};
  std::vector<at::Tensor> batch;
  const at::Tensor lengths = at::zeros({static_cast<std::int64_t>(samples.size())}, at::kLong);
  for (std::size_t t = 0; t < samples.front().size(); ++t) {
    std::int64_t longest = 0;
    for (const Sample& s : samples) longest = std::max(longest, s[t].size(0));
    auto shape = samples.front()[t].sizes().vec();
    shape[0] = longest;
    shape.insert(shape.begin(), static_cast<std::int64_t>(samples.size()));
    batch.push_back(at::full(shape, fill, samples.front()[t].options()));
    for (std::size_t i = 0; i < samples.size(); ++i) {
      const std::int64_t n = samples[i][t].size(0);
      batch.back()[static_cast<std::int64_t>(i)].narrow(0, 0, n).copy_(samples[i][t]);
      if (t == 0) lengths[static_cast<std::int64_t>(i)] = n;
    }
  }
  batch.push_back(lengths);
  return batch;
}

struct Loader::Engine {
  // One batch under way.
  struct Slot {
    OrderCursor before;  // where the order stood
    OrderBatch batch;
    LoadedBatch loaded;
    std::exception_ptr failure;
    std::optional<c10::Event> copied;
    enum class State { queued, running, done, held } state = State::queued;  // held: failed, to be read again when it is asked for
  };

  std::vector<std::shared_ptr<const Dataset>> datasets;
  std::shared_ptr<const Order> order;
  BatchMapping mapping;
  int process;
  LoaderOptions options;

  std::mutex mutex;
  std::condition_variable work, ready;
  std::deque<std::shared_ptr<Slot>> slots;  // in order of steps; the front is delivered next
  OrderCursor head;                         // behind the last slot
  bool stop = false;
  std::vector<std::thread> threads;

  Engine(std::vector<std::shared_ptr<const Dataset>> datasets, std::shared_ptr<const Order> order, BatchMapping mapping, int process,
         LoaderOptions options)
      : datasets(std::move(datasets)), order(std::move(order)), mapping(std::move(mapping)), process(process), options(std::move(options)) {}

  ~Engine() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    work.notify_all();
    for (auto& thread : threads) thread.join();
  }

  // Keeps `count` batches planned; the mutex is held.
  void plan_up_to(std::size_t count) {
    const bool more = slots.size() < count;
    while (slots.size() < count) {
      auto slot = std::make_shared<Slot>();
      slot->before = head;
      slot->batch = order->next(head);
      slots.push_back(std::move(slot));
    }
    if (more) work.notify_all();
  }

  void load(Slot& slot) const;
  void to_device(Slot& slot) const;

  void load_into(Slot& slot) const {
    try {
      load(slot);
    } catch (...) {
      slot.failure = std::current_exception();
    }
  }

  void run() {
    for (;;) {
      std::shared_ptr<Slot> slot;
      {
        std::unique_lock lock(mutex);
        work.wait(lock,
                  [&] { return stop || std::any_of(slots.begin(), slots.end(), [](const auto& s) { return s->state == Slot::State::queued; }); });
        if (stop) return;
        slot = *std::find_if(slots.begin(), slots.end(), [](const auto& s) { return s->state == Slot::State::queued; });
        slot->state = Slot::State::running;
      }
      load_into(*slot);
      {
        const std::lock_guard lock(mutex);
        slot->state = Slot::State::done;
      }
      ready.notify_all();
    }
  }

  void reset(OrderCursor cursor) {
    const std::lock_guard lock(mutex);
    slots.clear();  // a worker that still reads one of them finishes for nobody
    head = std::move(cursor);
  }
};

void Loader::Engine::load(Slot& slot) const {
  const at::NoGradGuard no_grad;
  const OrderBatch& batch = slot.batch;
  LoadedBatch& out = slot.loaded;
  out.step = batch.step;
  out.epoch = batch.epoch;
  out.global_rows = static_cast<std::int64_t>(batch.size);
  out.global_real = static_cast<std::int64_t>(batch.real);
  out.slices = mapping.slices(process, out.global_rows);
  std::vector<std::int64_t> local;  // rows of the global batch
  for (const BatchSlice& slice : out.slices)
    for (auto i = slice.samples.begin; i < slice.samples.end; ++i) local.push_back(i);
  out.rows = static_cast<std::int64_t>(local.size());
  out.real = std::count_if(local.begin(), local.end(), [&](std::int64_t i) { return i < out.global_real; });

  if (!batch.packed.empty()) {
    std::int64_t capacity = 0;
    std::vector<std::vector<Sample>> rows;
    for (std::int64_t i : local) {
      rows.emplace_back();
      std::int64_t used = 0;
      for (const Packed& packed : batch.packed[static_cast<std::size_t>(i)]) {
        const SampleRef ref = batch.rows[packed.position];
        out.samples.push_back(ref);
        const std::uint64_t one[] = {ref.index};
        rows.back().push_back({datasets[static_cast<std::size_t>(ref.dataset)]->get_batch(one)[0].squeeze(0)});
        const auto n = rows.back().back()[0].size(0);
        if (n != static_cast<std::int64_t>(packed.length))
          throw SampleError(concat("sample ", ref.index, " has ", n, " tokens, the order was told ", packed.length), ref.index);
        used += n;
      }
      capacity = std::max(capacity, used);
    }
    std::vector<at::Tensor> tokens, numbers;
    at::ScalarType dtype = at::kLong;
    for (const auto& row : rows)
      if (!row.empty()) dtype = row.front()[0].scalar_type();
    for (const auto& row : rows) {
      tokens.push_back(at::zeros({capacity}, dtype));
      numbers.push_back(at::zeros({capacity}, at::kLong));
      std::int64_t at = 0, number = 0;
      for (const Sample& sample : row) {
        const auto n = sample[0].size(0);
        tokens.back().narrow(0, at, n).copy_(sample[0]);
        numbers.back().narrow(0, at, n).fill_(++number);
        at += n;
      }
    }
    if (!rows.empty()) out.tensors = {at::stack(tokens), at::stack(numbers)};
  } else {
    for (std::int64_t i : local) out.samples.push_back(order->row(batch, static_cast<std::uint64_t>(i)));
    if (options.collate) {
      std::vector<Sample> samples;
      for (const SampleRef& ref : out.samples) {
        try {
          samples.push_back(datasets[static_cast<std::size_t>(ref.dataset)]->get(ref.index));
        } catch (const SampleError&) {
          throw;
        } catch (const std::exception& e) {
          throw SampleError(concat("sample ", ref.index, ": ", e.what()), ref.index);
        }
      }
      out.tensors = options.collate(samples);
    } else if (!out.samples.empty()) {
      out.tensors = read_rows(datasets, out.samples);
    } else {
      // A process without rows still has tensors of the right shape, with no row: every rank runs the same step.
      const SampleRef any = order->row(batch, 0);
      const std::uint64_t one[] = {any.index};
      for (const at::Tensor& t : datasets[static_cast<std::size_t>(any.dataset)]->get_batch(one)) out.tensors.push_back(t.narrow(0, 0, 0));
    }
    if (out.real < out.rows) {
      out.mask = at::zeros({out.rows}, at::kBool);
      for (std::int64_t r = 0; r < out.rows; ++r)
        if (local[static_cast<std::size_t>(r)] < out.global_real) out.mask[r] = true;
    }
  }
  to_device(slot);
}

void Loader::Engine::to_device(Slot& slot) const {
  auto each = [&](auto move) {
    for (at::Tensor& t : slot.loaded.tensors) t = move(t);
    if (slot.loaded.mask.defined()) slot.loaded.mask = move(slot.loaded.mask);
  };
  if (options.pin_memory) each([](const at::Tensor& t) { return t.is_cpu() ? t.pin_memory() : t; });
  if (!options.device || options.device->is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(options.device->type());
  const c10::Stream side = guard.getStreamFromGlobalPool(*options.device);
  const c10::StreamGuard on_side(side);
  each([&](const at::Tensor& t) { return t.to(*options.device, /*non_blocking=*/true); });
  slot.copied.emplace(options.device->type());
  slot.copied->record(side);
}

Loader::Loader(std::vector<std::shared_ptr<const Dataset>> datasets, std::shared_ptr<const Order> order, BatchMapping mapping, int process,
               LoaderOptions options) {
  if (datasets.empty() || !order || std::any_of(datasets.begin(), datasets.end(), [](const auto& d) { return !d; }))
    throw InvalidArgument("a loader needs an order and at least one dataset");
  if (options.workers < 0 || options.prefetch < 0 || options.stall_limit.count() <= 0)
    throw InvalidArgument(concat("a loader with ", options.workers, " workers, ", options.prefetch, " batches ahead and a limit of ",
                                 options.stall_limit.count(), " ms; counts are at least 0, the limit above 0"));
  mapping.held_by(process);
  engine_ = std::make_unique<Engine>(std::move(datasets), std::move(order), std::move(mapping), process, std::move(options));
  engine_->head = engine_->order->start();
  for (int n = 0; n < engine_->options.workers; ++n) engine_->threads.emplace_back([engine = engine_.get()] { engine->run(); });
}

Loader::~Loader() = default;

LoadedBatch Loader::next() {
  Engine& w = *engine_;
  std::unique_lock lock(w.mutex);
  const auto ahead = w.options.workers == 0 ? 0 : static_cast<std::size_t>(w.options.prefetch);
  w.plan_up_to(ahead + 1);
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
  } else if (!w.ready.wait_for(lock, w.options.stall_limit, [&] { return slot->state == Engine::Slot::State::done; })) {
    const char* what = slot->state == Engine::Slot::State::running ? "is being read" : "waits for a worker";
    throw StalledError(concat("step ", slot->batch.step, " has not been delivered within ", w.options.stall_limit.count(), " ms: it ", what, " (",
                              w.options.workers, " workers). The source is too slow or hangs; call next() again to go on waiting"));
  }
  if (slot->failure) {
    // The batch stays in front, to be read again if the caller tries again.
    auto again = std::make_shared<Engine::Slot>();
    again->before = slot->before;
    again->batch = slot->batch;
    again->state = Engine::Slot::State::held;
    w.slots.front() = again;
    std::rethrow_exception(slot->failure);
  }
  w.slots.pop_front();
  w.plan_up_to(ahead);
  lock.unlock();
  if (slot->copied) {
    const c10::impl::VirtualGuardImpl guard(w.options.device->type());
    const c10::Stream current = guard.getStream(*w.options.device);
    slot->copied->block(current);
    for (const at::Tensor& t : slot->loaded.tensors) t.record_stream(current);
    if (slot->loaded.mask.defined()) slot->loaded.mask.record_stream(current);
  }
  return std::move(slot->loaded);
}

Loader::EpochRange Loader::epoch() { return EpochRange(*this); }

std::string Loader::state() const {
  Engine& w = *engine_;
  const std::lock_guard lock(w.mutex);
  return write_state(*w.order, w.slots.empty() ? w.head : w.slots.front()->before);
}

void Loader::restore(const std::string& state) { engine_->reset(read_state(*engine_->order, state)); }

void Loader::seek(std::uint64_t step) {
  OrderCursor cursor = engine_->order->start();
  if (!cursor.position.empty())
    throw InvalidArgument(
        concat("step ", step, " of this order cannot be found by its number (", engine_->order->describe(), "); restore a saved state"));
  cursor.step = step;
  engine_->reset(std::move(cursor));
}

std::uint64_t Loader::next_epoch() {
  const std::lock_guard lock(engine_->mutex);
  engine_->plan_up_to(1);
  return engine_->slots.front()->batch.epoch;
}

Loader::EpochRange::Iterator& Loader::EpochRange::Iterator::operator++() {
  done_ = loader_.next_epoch() != batch_.epoch;
  if (!done_) batch_ = loader_.next();
  return *this;
}

}  // namespace tessera
