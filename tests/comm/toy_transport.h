#pragma once
// A transport in a hundred lines: ranks leave what they send at a store of c10d's, and wait there
// for what they get. A new transport is a class like this one, and a line in make_group_state().

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/comm/backends/flat.h"
#include "tessera/comm/backends/transport.h"
#include "tessera/comm/group/detail/reduction.h"

namespace tessera::test {

class ToyTransport final : public detail::Transport {
 public:
  using Call = detail::TransportCall;
  using Tensors = std::vector<at::Tensor>;

  ToyTransport(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : Transport(rank, size, std::chrono::minutes(1)), store_(std::move(store)) {
    for (auto& counts : messages_) counts.resize(static_cast<std::size_t>(size));
  }
  const char* name() const override { return "toy"; }
  detail::Abilities abilities() override {
    detail::Abilities can;
    can.reduces = [](c10::ScalarType, ReduceOp::Kind op) {
      return op != ReduceOp::Kind::premultiplied;
    };
    can.moves = detail::moves_every_dtype;
    return can;
  }

  void broadcast(Call& call) override {
    if (rank_ == call.root) deal(Tensors(ranks(), call.output), {});
    if (rank_ != call.root) deal({}, only(call.root, call.output));
  }
  void all_reduce(Call& call) override { reduce_here(call.output, gathered(call.output), call.op); }
  void reduce(Call& call) override {
    const bool is_root = rank_ == call.root;
    Tensors parts;
    for (int r = 0; is_root && r < size_; ++r) parts.push_back(at::empty_like(call.output));
    deal(only(call.root, call.output), parts);
    if (is_root) reduce_here(call.output, parts, call.op);
  }
  void all_gather(Call& call) override {
    deal(Tensors(ranks(), call.input), detail::split_flat(call.output, call.counts));
  }
  void reduce_scatter(Call& call) override {
    Tensors parts;
    for (int r = 0; r < size_; ++r) parts.push_back(at::empty_like(call.output));
    deal(detail::split_flat(call.input, call.counts), parts);
    if (call.output.numel() > 0) reduce_here(call.output, parts, call.op);
  }
  void gather(Call& call) override {
    deal(only(call.root, call.input),
         rank_ == call.root ? detail::split_flat(call.output, call.counts) : Tensors{});
  }
  void scatter(Call& call) override {
    deal(rank_ == call.root ? detail::split_flat(call.input, call.counts) : Tensors{},
         only(call.root, call.output));
  }
  void all_to_all(Call& call) override {
    deal(detail::split_flat(call.input, call.input_counts),
         detail::split_flat(call.output, call.counts));
  }
  void exchange(Call& call) override {
    for (const auto kind : {Message::Kind::send, Message::Kind::receive})
      for (const auto& m : call.messages) {
        if (m.kind != kind) continue;
        const bool sends = kind == Message::Kind::send;
        const auto number = messages_[sends ? 1 : 0][static_cast<std::size_t>(m.peer)]++;
        const std::string key =
            concat("message ", number, ' ', sends ? rank_ : m.peer, "->", sends ? m.peer : rank_);
        sends ? put(key, m.tensor) : take(key, m.tensor);
      }
  }
  void barrier(Call&) override { gathered(at::zeros({1})); }
  void abort() override {}

 private:
  std::size_t ranks() const { return static_cast<std::size_t>(size_); }
  Tensors only(int rank, const at::Tensor& tensor) const {
    Tensors result(ranks());
    result[static_cast<std::size_t>(rank)] = tensor;
    return result;
  }
  Tensors gathered(const at::Tensor& mine) {
    Tensors parts;
    for (int r = 0; r < size_; ++r) parts.push_back(at::empty_like(mine));
    deal(Tensors(ranks(), mine), parts);
    return parts;
  }
  /// Leaves to[r] for rank r and takes from[r] from it; undefined tensors do not travel.
  void deal(const Tensors& to, const Tensors& from) {
    const auto number = calls_++;
    for (std::size_t r = 0; r < to.size(); ++r)
      if (to[r].defined()) put(concat("call ", number, ' ', rank_, "->", r), to[r]);
    for (std::size_t r = 0; r < from.size(); ++r)
      if (from[r].defined()) take(concat("call ", number, ' ', r, "->", rank_), from[r]);
  }
  static void reduce_here(const at::Tensor& output, Tensors parts, ReduceOp op) {
    for (auto& part : parts) part = part.view({-1});
    detail::reduce_in_order(output.view({-1}), parts, op.kind);
  }
  void put(const std::string& key, const at::Tensor& tensor) {
    const auto* data = static_cast<const std::uint8_t*>(tensor.const_data_ptr());
    store_->set(key, std::vector<std::uint8_t>(data, data + tensor.nbytes()));
  }
  void take(const std::string& key, const at::Tensor& tensor) {
    const auto bytes = store_->get(key);
    store_->deleteKey(key);
    TORCH_CHECK(bytes.size() == tensor.nbytes(), "toy: a rank called something else");
    if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  std::uint64_t calls_ = 0;
  /// Numbers of messages per peer: received, sent.
  std::vector<std::uint64_t> messages_[2];
};

}  // namespace tessera::test
