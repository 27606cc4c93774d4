#pragma once
// Messages between a rank and its peers, prepared once: halos and ghosts are exchanged by them. One
// message goes to each peer, out of and into flat memory that is used again; the same memory serves
// the adjoint, in which what was received is sent back.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera::detail {

/// A part of a message. Consecutive pieces of one peer are one message.
struct PeerPiece {
  /// In the group.
  int peer;
  std::vector<std::int64_t> shape;
};

struct PeerBuffers {
  /// Flat, by peer.
  at::Tensor sent, received;
  /// Views of them, one per piece, of the piece's shape and then the row's.
  std::vector<at::Tensor> send_pieces, receive_pieces;
  std::vector<Message> messages, back;
  std::vector<std::int64_t> row;
};

class PeerExchange {
 public:
  PeerExchange(std::vector<PeerPiece> sends, std::vector<PeerPiece> receives)
      : sends_(std::move(sends)), receives_(std::move(receives)) {}

  /// Buffers that no transfer uses, of the dtype and the device of `like`. `row`: dims that each
  /// piece has behind its own.
  std::unique_ptr<PeerBuffers> take(const at::Tensor& like, at::IntArrayRef row = {});
  void give(std::unique_ptr<PeerBuffers> buffers);

 private:
  std::unique_ptr<PeerBuffers> make(const at::Tensor& like, at::IntArrayRef row) const;

  std::vector<PeerPiece> sends_, receives_;
  std::mutex mutex_;  // backward may run on another thread
  std::vector<std::unique_ptr<PeerBuffers>> idle_;
};

/// Buffers whose messages may be in progress. Destroying it waits, and gives them back.
struct PeerTransfer {
  std::shared_ptr<PeerExchange> exchange;
  std::unique_ptr<PeerBuffers> buffers;
  Request request;

  ~PeerTransfer() {
    request = {};  // waits
    if (buffers) exchange->give(std::move(buffers));
  }
};

}  // namespace tessera::detail
