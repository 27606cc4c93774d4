#include "tessera/ops/halo/detail/peer_exchange.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/accumulate.h>

#include <algorithm>

namespace tessera::detail {

std::unique_ptr<PeerBuffers> PeerExchange::take(const at::Tensor& like, at::IntArrayRef row) {
  {
    const std::lock_guard lock(mutex_);
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      if ((*it)->sent.scalar_type() != like.scalar_type() ||
          (*it)->sent.device() != like.device() || row != (*it)->row)
        continue;
      auto found = std::move(*it);
      idle_.erase(it);
      return found;
    }
  }
  return make(like, row);
}

void PeerExchange::give(std::unique_ptr<PeerBuffers> buffers) {
  const std::lock_guard lock(mutex_);
  if (idle_.size() < 8) idle_.push_back(std::move(buffers));
}

std::unique_ptr<PeerBuffers> PeerExchange::make(const at::Tensor& like, at::IntArrayRef row) const {
  // the buffers outlive this call and are written again in other modes
  const c10::InferenceMode off(false);
  auto buffers = std::make_unique<PeerBuffers>();
  buffers->row = row.vec();
  const auto options = like.options().requires_grad(false).memory_format(std::nullopt);
  const std::int64_t width = c10::multiply_integers(row);
  const auto lay_out = [&](const std::vector<PeerPiece>& pieces, at::Tensor& flat,
                           std::vector<at::Tensor>& views, Message::Kind kind) {
    std::int64_t total = 0;
    for (const PeerPiece& piece : pieces) total += c10::multiply_integers(piece.shape) * width;
    flat = at::empty({total}, options);
    std::int64_t at = 0;
    for (std::size_t i = 0; i < pieces.size();) {
      const std::int64_t first = at;
      const int peer = pieces[i].peer;
      for (; i < pieces.size() && pieces[i].peer == peer; ++i) {
        std::vector<std::int64_t> shape = pieces[i].shape;
        shape.insert(shape.end(), row.begin(), row.end());
        const std::int64_t n = c10::multiply_integers(shape);
        views.push_back(flat.narrow(0, at, n).view(shape));
        at += n;
      }
      const at::Tensor all = flat.narrow(0, first, at - first);
      const auto other = kind == Message::Kind::send ? Message::Kind::receive : Message::Kind::send;
      buffers->messages.push_back({kind, all, peer});
      buffers->back.push_back({other, all, peer});
    }
  };
  lay_out(sends_, buffers->sent, buffers->send_pieces, Message::Kind::send);
  lay_out(receives_, buffers->received, buffers->receive_pieces, Message::Kind::receive);
  // A message whose receiver is ready needs no intermediate memory, and with Gloo one transfer
  // less.
  for (auto* all : {&buffers->messages, &buffers->back})
    std::stable_partition(all->begin(), all->end(),
                          [](const Message& m) { return m.kind == Message::Kind::receive; });
  return buffers;
}

}  // namespace tessera::detail
