// Gathering of units: what is sent together, what arrives, and what is freed.

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/group/internal/call_origin.h"
#include "tessera/nn/detail/gather_units.h"
#include "tessera/tensor/dispatch/internal/kernels.h"

namespace tessera::detail {

namespace {

at::Tensor interval(const at::Tensor& flat, std::int64_t begin, std::int64_t count) {
  return place_in(flat, begin, {count}, {1});
}

// Between flat tensors of one dtype and device.
void copy_interval(const at::Tensor& to, std::int64_t at, const at::Tensor& from,
                   std::int64_t begin, std::int64_t count) {
  if (count == 0) return;
  if (!to.is_cpu()) {
    interval(to, at, count).copy_(interval(from, begin, count));
    return;
  }
  const auto width = static_cast<std::int64_t>(to.element_size());
  std::memcpy(static_cast<char*>(to.mutable_data_ptr()) + at * width,
              static_cast<const char*>(from.const_data_ptr()) + begin * width,
              static_cast<std::size_t>(count * width));
}

}  // namespace

const at::Tensor& GatherUnits::sent_of(const Buffer& buffer) {
  return buffer.low.defined() ? buffer.low : buffer.shard;
}

// The end of what is to be started of the learnt order when the visit `at` begins.
std::size_t GatherUnits::ahead_of(std::size_t at) const {
  const auto& visits = order().visits;
  const std::size_t least = at + 1 + static_cast<std::size_t>(options_.ahead);
  std::size_t end = at + 1;
  std::int64_t bytes = 0;
  while (options_.ahead > 0 && end < visits.size()) {
    bytes += units_[visits[end].unit].bytes;
    if (end >= least && 2 * bytes > options_.coalesced_bytes) break;
    ++end;
  }
  return std::min(end, visits.size());
}

// Starts the unit that the learnt order uses at `at`, and with it those that follow and are small.
void GatherUnits::start_from(std::size_t at) {
  const auto& visits = order().visits;
  const std::size_t first = visits[at].unit;
  if (units_[first].state != Unit::State::sharded) return;
  const auto alone = [](const Unit& unit) {
    return unit.kept || !unit.alike || unit.buffers.empty();
  };
  std::vector<std::size_t> all{first};
  std::int64_t bytes = units_[first].bytes;
  for (std::size_t next = at + 1; options_.ahead > 0 && !alone(units_[first]) &&
                                  bytes < options_.coalesced_bytes && next < visits.size();
       ++next) {
    const std::size_t u = visits[next].unit;
    const Unit& unit = units_[u];
    if (unit.state != Unit::State::sharded || std::ranges::find(all, u) != all.end()) continue;
    const at::Tensor& like = sent_of(units_[first].buffers.front());
    bytes += unit.bytes;
    if (alone(unit) || bytes >= options_.coalesced_bytes ||
        sent_of(unit.buffers.front()).scalar_type() != like.scalar_type() ||
        sent_of(unit.buffers.front()).device() != like.device())
      break;
    all.push_back(u);
  }
  if (all.size() == 1) {
    start(first);
  } else {
    start_message(all);
  }
}

void GatherUnits::start_message(const std::vector<std::size_t>& all) {
  const Group ranks = context_->mesh.group(axes_);
  if (ranks.size() == 1) {
    for (const std::size_t u : all) start(u);
    return;
  }
  const LocalCallGuard guard;
  const OriginScope own;
  const c10::InferenceMode normal(false);
  const auto message = std::make_shared<Message>();
  message->units = all;
  try {
    Sizes sizes(ranks.size(), 0);
    std::int64_t numel = 0;
    for (const std::size_t u : all) {
      units_[u].state = Unit::State::started;
      units_[u].message = message;
      for (Buffer& buffer : units_[u].buffers) {
        if (buffer.low.defined()) at::Tensor(buffer.low).copy_(buffer.shard);
        for (std::size_t r = 0; r < sizes.size(); ++r) sizes[r] += buffer.sizes[r];
        numel += buffer.numel;
      }
    }
    const at::TensorOptions options = sent_of(units_[all.front()].buffers.front()).options();
    message->sent = at::empty({sizes[ranks.rank()]}, options);
    message->received = at::empty({numel}, options);
    std::int64_t at = 0;
    for (const std::size_t u : all) {
      for (const Buffer& buffer : units_[u].buffers) {
        const at::Tensor& shard = sent_of(buffer);
        copy_interval(message->sent, at, shard, 0, shard.numel());
        at += shard.numel();
      }
    }
    const std::string label = concat("gather of units '", units_[all.front()].name, "' to '",
                                     units_[all.back()].name, "'");
    message->request =
        ranks.started().all_gather(message->received, message->sent, sizes, {.name = label});
  } catch (...) {
    for (const std::size_t u : all) release(u);
    throw;
  }
}

// Gives each unit what has arrived of it; those that were released meanwhile are left out.
void GatherUnits::take_apart(Message& message) {
  const LocalCallGuard guard;
  const c10::InferenceMode normal(false);
  const at::Tensor all = at::empty(message.received.sizes(), message.received.options());
  const std::size_t ranks = units_[message.units.front()].buffers.front().sizes.size();
  std::int64_t from = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    std::int64_t begin = 0;
    for (const std::size_t u : message.units) {
      for (const Buffer& buffer : units_[u].buffers) {
        const auto own = buffer.sizes.begin() + static_cast<std::ptrdiff_t>(r);
        const std::int64_t before = c10::sum_integers(buffer.sizes.begin(), own);
        copy_interval(all, begin + before, message.received, from, buffer.sizes[r]);
        from += buffer.sizes[r];
        begin += buffer.numel;
      }
    }
  }
  std::int64_t begin = 0;
  for (const std::size_t u : message.units) {
    Unit& unit = units_[u];
    const bool waits = unit.message.get() == &message;
    for (Buffer& buffer : unit.buffers) {
      if (waits) buffer.full = interval(all, begin, buffer.numel);
      begin += buffer.numel;
    }
    if (waits) unit.state = Unit::State::gathered;
  }
}

void GatherUnits::start(std::size_t u) {
  Unit& unit = units_[u];
  if (unit.state != Unit::State::sharded) return;
  const Group ranks = context_->mesh.group(unit.kept ? options_.kept_axes : axes_);
  const LocalCallGuard guard;
  const OriginScope own;
  const c10::InferenceMode normal(false);
  unit.state = Unit::State::started;
  try {
    c10::OptionalStreamGuard aside;
    if (uploads_) aside.reset_stream(uploads_->begin());
    for (Buffer& buffer : unit.buffers) {
      if (unit.kept) {
        buffer.full = at::empty({buffer.numel}, buffer.kept.options());
        buffer.request = ranks.started().all_gather(buffer.full, buffer.kept,
                                                    kept_sizes(buffer.numel), {.name = unit.label});
        continue;
      }
      if (buffer.low.defined()) at::Tensor(buffer.low).copy_(buffer.shard);
      const at::Tensor& shard = buffer.low.defined() ? buffer.low : buffer.shard;
      if (uploads_) buffer.sent = uploads_->copy(shard);
      const at::Tensor& sent = uploads_ ? buffer.sent : shard;
      if (ranks.size() == 1) {
        buffer.full = sent;
        continue;
      }
      buffer.full = at::empty({buffer.numel}, sent.options());
      buffer.request =
          ranks.started().all_gather(buffer.full, sent, buffer.sizes, {.name = unit.label});
    }
    if (uploads_) unit.copies = uploads_->end();
  } catch (...) {
    release(u);
    throw;
  }
}

void GatherUnits::wait(Unit& unit) {
  if (unit.state != Unit::State::started) return;
  if (const auto message = unit.message) {
    const auto mine = [&](std::size_t u) { return units_[u].message == message; };
    try {
      message->request.wait();
      take_apart(*message);
    } catch (...) {
      for (const std::size_t u : message->units) {
        if (mine(u)) release(u);
      }
      throw;
    }
    for (const std::size_t u : message->units) {
      if (mine(u)) units_[u].message.reset();
    }
    return;
  }
  try {
    for (Buffer& buffer : unit.buffers) {
      buffer.request.wait();
      buffer.sent.reset();
    }
    finish_copies(unit);
  } catch (...) {
    release(static_cast<std::size_t>(&unit - units_.data()));
    throw;
  }
  unit.state = Unit::State::gathered;
}

// A shard in host memory may be written to afterwards.
void GatherUnits::finish_copies(Unit& unit) {
  if (!unit.copies) return;
  const auto copies = std::exchange(unit.copies, nullptr);
  uploads_->wait(*copies);
}

// Of each rank of the smaller group: as even as elements go.
Sizes GatherUnits::kept_sizes(std::int64_t numel) const {
  const int ranks = context_->mesh.group(options_.kept_axes).size();
  const std::int64_t most = (numel + ranks - 1) / ranks;
  Sizes sizes;
  for (std::int64_t begin = 0; static_cast<int>(sizes.size()) < ranks; begin += sizes.back())
    sizes.push_back(std::min(most, numel - begin));
  return sizes;
}

// Frees what is gathered but for this rank's interval of it.
void GatherUnits::keep_near(std::size_t u) {
  Unit& unit = units_[u];
  if (unit.state == Unit::State::gathered && !unit.kept) {
    const LocalCallGuard guard;
    const c10::InferenceMode normal(false);
    const auto rank = static_cast<std::ptrdiff_t>(context_->mesh.group(options_.kept_axes).rank());
    for (Buffer& buffer : unit.buffers) {
      const Sizes sizes = kept_sizes(buffer.numel);
      const std::int64_t begin = c10::sum_integers(sizes.begin(), sizes.begin() + rank);
      buffer.kept = buffer.full.narrow(0, begin, sizes[rank]).clone();
    }
    unit.kept = true;
  }
  free_gathered(u);
}

void GatherUnits::free_gathered(std::size_t u) {
  Unit& unit = units_[u];
  if (unit.state == Unit::State::sharded) return;
  unit.state = Unit::State::sharded;
  unit.message.reset();  // the last one waits for what nobody has waited for
  for (Buffer& buffer : unit.buffers) {
    buffer.request = Request();  // waits if nobody has
    buffer.sent.reset();
    buffer.full.reset();
  }
  finish_copies(unit);
}

void GatherUnits::release(std::size_t u) {
  Unit& unit = units_[u];
  for (Buffer& buffer : unit.buffers) buffer.kept.reset();
  unit.kept = false;
  free_gathered(u);
}

}  // namespace tessera::detail
