#include <algorithm>
#include <cstring>

#include "tessera/shm/detail/messages.h"

namespace tessera::shm::detail {
namespace {

/// From this size on a message is copied out of the sender's memory, if that is possible.
constexpr std::size_t kSingleCopyBytes = 131072;
/// No message is larger; a size above it means a damaged frame.
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 48;

}  // namespace

std::vector<int> Batch::missing(const Core& core) const {
  std::vector<int> ranks;
  for (const auto& send : sends)
    if (!send.complete) ranks.push_back(send.to);
  for (const auto& receive : receives) {
    if (receive.complete) continue;
    if (receive.from != kAnySource)
      ranks.push_back(receive.from);
    else if (core.size() == 2)
      ranks.push_back(1 - core.rank());
  }
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

void Messages::post(Batch& batch) {
  batches_.push_back(&batch);
  for (auto& receive : batch.receives)
    if (!take_kept(receive)) posted_.push_back(&receive);
  for (auto& send : batch.sends) {
    send.buffered = batch.buffered;
    peers_[send.to].outgoing.push_back(&send);
  }
}

void Messages::fail(const std::exception_ptr& error) {
  for (Batch* batch : batches_)
    if (!batch->error) batch->error = error;
  batches_.clear();
  posted_.clear();
  for (Peer& peer : peers_) {
    peer.outgoing.clear();
    peer.untaken.clear();
  }
}

bool Messages::advance() {
  if (batches_.empty()) return false;
  bool any = false;
  for (bool moved = true; moved;) {
    moved = false;
    for (int r = 0; r < core_.size(); ++r) {
      const Peer& peer = peers_[r];
      if (!peer.outgoing.empty() || !peer.untaken.empty()) moved = send(r) || moved;
      if (awaited(r)) moved = receive(r) || moved;
    }
    any = any || moved;
  }
  const auto complete = [](const auto& message) { return message.complete; };
  const auto done = std::erase_if(batches_, [&](Batch* batch) {
    return batch->complete = std::ranges::all_of(batch->sends, complete) &&
                             std::ranges::all_of(batch->receives, complete);
  });
  return any || done > 0;
}

// ---- sending ----

bool Messages::send(int to) {
  auto& queue = peers_[to].outgoing;
  std::uint64_t& next = peers_[to].next_frame;
  // Read only when it matters: each read takes the line away from the receiver.
  std::uint64_t& taken = peers_[to].taken;
  Channel& channel = core_.channel(core_.rank(), to);
  bool moved = false;
  while (!queue.empty()) {
    Outgoing& message = *queue.front();
    if (next >= taken + kFrames) taken = channel.taken.load(std::memory_order_acquire);
    if (next >= taken + kFrames) break;
    Frame& frame = channel.frames[next % kFrames];
    frame.tag = message.tag;
    frame.bytes = message.bytes;
    frame.address = 0;
    if (message.bytes >= kSingleCopyBytes && core_.single_copy() && to != core_.rank()) {
      frame.address = reinterpret_cast<std::uint64_t>(message.data);
      message.sent = message.bytes;
    } else {
      const std::size_t part = std::min(message.bytes - message.sent, core_.layout().frame_bytes());
      std::byte* place = message.bytes <= Frame::kPayload
                             ? frame.payload
                             : core_.frame_data(core_.rank(), to, next);
      core_.put(place, message.data + message.sent, part, Readers::one);
      message.sent += part;
    }
    core_.write(frame.mark, ++next);
    core_.ring();
    moved = true;
    if (message.sent < message.bytes) continue;
    message.frame = next;
    message.complete = message.buffered && frame.address == 0;
    if (!message.complete) peers_[to].untaken.push_back(&message);
    queue.pop_front();
  }
  return acknowledge(to) || moved;
}

bool Messages::acknowledge(int to) {
  auto& queue = peers_[to].untaken;
  std::uint64_t& taken = peers_[to].taken;
  bool moved = false;
  while (!queue.empty()) {
    if (taken < queue.front()->frame)
      taken = core_.channel(core_.rank(), to).taken.load(std::memory_order_acquire);
    if (taken < queue.front()->frame) break;
    queue.front()->complete = true;
    queue.pop_front();
    moved = true;
  }
  return moved;
}

// ---- receiving ----

bool Messages::awaited(int from) const {
  if (peers_[from].stream.target != nullptr) return true;
  return std::ranges::any_of(
      posted_, [&](const Incoming* r) { return r->from == from || r->from == kAnySource; });
}

void Messages::check_fit(const Incoming& receive, int from, std::uint64_t tag,
                         std::uint64_t bytes) const {
  if (bytes == receive.bytes && ((tag ^ receive.tag) & kTypeMask) == 0) return;
  throw MismatchError("shm group '", core_.options().name, "': rank ", from, " sends ", bytes,
                      " bytes to rank ", core_.rank(), ", which expects ", receive.bytes,
                      bytes == receive.bytes ? " of another element type" : "");
}

Incoming* Messages::match(int from, std::uint64_t tag) {
  for (auto at = posted_.begin(); at != posted_.end(); ++at) {
    Incoming* receive = *at;
    if ((receive->from != from && receive->from != kAnySource) || !same(receive->tag, tag))
      continue;
    posted_.erase(at);
    receive->from = from;
    return receive;
  }
  return nullptr;
}

bool Messages::take_kept(Incoming& receive) {
  for (auto at = kept_.begin(); at != kept_.end(); ++at) {
    if ((receive.from != kAnySource && receive.from != at->from) || !same(receive.tag, at->tag))
      continue;
    check_fit(receive, at->from, at->tag, at->bytes);
    if (!at->data.empty()) std::memcpy(receive.data, at->data.data(), at->data.size());
    receive.from = at->from;
    receive.complete = at->whole;
    // One that is still arriving is the next of its channel: it is received into its own memory,
    // and waited for.
    if (!at->whole) {
      Stream& stream = peers_[at->from].stream;
      stream.target = &receive;
      stream.keeping = false;
    }
    kept_bytes_ -= at->bytes;
    kept_.erase(at);
    return true;
  }
  return false;
}

void Messages::keep(int from, Stream& stream, std::uint64_t tag) {
  const std::uint64_t limit = core_.options().kept_bytes;
  if (stream.bytes > limit - kept_bytes_)
    throw MismatchError(
        "shm group '", core_.options().name, "': rank ", from, " sends ", stream.bytes,
        " bytes that rank ", core_.rank(), " does not await yet, which keeps ", kept_bytes_,
        " bytes of such messages already, of at most ", limit,
        " (Options::kept_bytes): receive messages in the order in which they are sent");
  kept_.push_back({from, tag, stream.bytes, {}, false});
  kept_bytes_ += stream.bytes;
  stream.kept = std::prev(kept_.end());
  stream.keeping = true;
}

bool Messages::take(int from, Stream& stream, const Frame& frame) {
  const bool begins = stream.got == 0 && stream.target == nullptr && !stream.keeping;
  if (begins) {
    stream.bytes = frame.bytes;
    if (stream.bytes > kMostBytes)
      throw MismatchError("shm group '", core_.options().name, "': the memory shared with rank ",
                          from, " is damaged");
    stream.target = match(from, frame.tag);
    if (stream.target != nullptr)
      check_fit(*stream.target, from, frame.tag, stream.bytes);
    else
      keep(from, stream, frame.tag);
  }
  const std::uint64_t rest = stream.bytes - stream.got;
  const bool direct = frame.address != 0 && stream.got == 0;
  const std::size_t part = static_cast<std::size_t>(
      direct ? rest : std::min<std::uint64_t>(rest, core_.layout().frame_bytes()));
  std::byte* to = nullptr;
  if (stream.target != nullptr) {
    to = stream.target->data + stream.got;
  } else {
    stream.kept->data.resize(static_cast<std::size_t>(stream.got) + part);
    to = stream.kept->data.data() + stream.got;
  }
  if (direct) {
    core_.copy_from(from, to, frame.address, part);
  } else if (part != 0) {
    if (stream.bytes <= Frame::kPayload)
      std::memcpy(to, frame.payload, part);
    else
      core_.take(to, core_.frame_data(from, core_.rank(), stream.next), part);
  }
  stream.got += part;
  return stream.got == stream.bytes;
}

bool Messages::receive(int from) {
  Stream& stream = peers_[from].stream;
  Channel& channel = core_.channel(from, core_.rank());
  bool moved = false;
  while (awaited(from)) {
    const Frame& frame = channel.frames[stream.next % kFrames];
    if (frame.mark.load(std::memory_order_acquire) != stream.next + 1) return moved;
    const bool whole = take(from, stream, frame);
    if (whole) {
      if (stream.target != nullptr)
        stream.target->complete = true;
      else
        stream.kept->whole = true;
      stream.target = nullptr;
      stream.keeping = false;
      stream.bytes = stream.got = 0;
    }
    ++stream.next;
    core_.write(channel.taken, stream.next);
    core_.ring();
    moved = true;
  }
  return moved;
}

}  // namespace tessera::shm::detail
