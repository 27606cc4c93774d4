// The messages of a step: activations with their shapes, and gradients.

#include <ATen/ATen.h>

#include "tessera/pipeline/detail/step_run.h"

namespace tessera::detail {
namespace {

// Gradients in progress from this rank before it waits for the oldest. Schedules run with sends
// that wait for their receivers, so that no number can make the ranks wait for each other.
constexpr std::size_t kSending = 4;

}  // namespace

void StepRun::send_activation(int s, int k) {
  Flight& f = flight(s, k);
  const std::uint64_t signature = facts_.signatures[k];
  auto& known = plan_.known[s];
  const auto at = known.find(signature);
  const bool told = at != known.end() && !plan_.options.dynamic_shapes;
  if (told && at->second != f.outgoing_spec)
    throw InvalidArgument("stage ", s, " gives ", to_string(f.outgoing_spec), ", where it gave ",
                          to_string(at->second),
                          " before for inputs of the same shapes; the next stage waits for "
                          "that. If shapes depend on values: "
                          "PipelineOptions::dynamic_shapes");
  const int to = peer(s + 1);
  if (!told) {
    const std::vector<std::int64_t> numbers = encode(f.outgoing_spec);
    const at::Tensor length = at::tensor({static_cast<std::int64_t>(numbers.size())}, at::kLong);
    keep_sending(group_.started().send(length, to, {.name = "pipeline shapes"}));
    keep_sending(
        group_.started().send(at::tensor(numbers, at::kLong), to, {.name = "pipeline shapes"}));
    known[signature] = f.outgoing_spec;
  }
  std::vector<Message> messages;
  for (std::size_t i = 0; i < f.outgoing.size(); ++i)
    messages.push_back({Message::Kind::send, to_wire(f.outgoing[i].value, f.outgoing_spec[i]), to});
  f.outgoing.clear();
  if (messages.empty()) return;
  Request request = group_.started().exchange(messages, {.name = "pipeline activations"});
  if (facts_.training)
    f.sent = std::move(request);
  else
    keep_sending(std::move(request));
}

void StepRun::receive_activation(int s, int k) {
  Flight& f = flight(s, k);
  const std::uint64_t signature = facts_.signatures[k];
  auto& known = plan_.known[s - 1];
  const int from = peer(s - 1);
  if (!known.contains(signature) || plan_.options.dynamic_shapes) {
    const at::Tensor length = at::empty({1}, at::kLong);
    group_.receive(length, from, {.name = "pipeline shapes"});
    constexpr std::int64_t kMost = 1 << 24;
    const std::int64_t count = length.item<std::int64_t>();
    if (count < 1 || count > kMost)
      throw InvalidArgument("a description of ", count, " numbers; at most ", kMost);
    const at::Tensor body = at::empty({count}, at::kLong);
    group_.receive(body, from, {.name = "pipeline shapes"});
    const auto* data = body.const_data_ptr<std::int64_t>();
    known[signature] = decode({data, data + count});
  }
  f.incoming_spec = known.at(signature);
  std::vector<Message> messages;
  for (const TensorSpec& spec : f.incoming_spec) {
    at::Tensor wire;
    f.incoming.push_back({empty_for(spec, device_, wire), spec.wants,
                          spec.shards ? spec_of(*spec.shards, plan_.mesh) : ShardSpec()});
    messages.push_back({Message::Kind::receive, wire, from});
  }
  if (!messages.empty())
    f.arriving = group_.started().exchange(messages, {.name = "pipeline activations"});
}

void StepRun::send_gradient(int s, int k) {
  Flight& f = flight(s, k);
  std::vector<Message> messages;
  for (std::size_t i = 0; i < f.incoming_spec.size(); ++i) {
    const TensorSpec& spec = f.incoming_spec[i];
    if (!spec.wants) continue;
    at::Tensor wire;
    if (f.incoming_gradients[i].defined())
      wire = to_wire(f.incoming_gradients[i], spec);
    else
      empty_for(spec, device_, wire).zero_();
    messages.push_back({Message::Kind::send, wire, peer(s - 1)});
  }
  f.incoming_gradients.clear();
  if (!messages.empty())
    keep_sending(group_.started().exchange(messages, {.name = "pipeline gradients"}));
}

void StepRun::receive_gradient(int s, int k) {
  Flight& f = flight(s, k);
  std::vector<Message> messages;
  for (const TensorSpec& spec : f.outgoing_spec) {
    f.gradients.emplace_back();
    if (!spec.wants) continue;
    at::Tensor wire;
    f.gradients.back() = empty_for(spec, device_, wire);
    messages.push_back({Message::Kind::receive, wire, peer(s + 1)});
  }
  if (!messages.empty())
    f.arriving_gradient = group_.started().exchange(messages, {.name = "pipeline gradients"});
}

void StepRun::keep_sending(Request request) {
  sending_.push_back(std::move(request));
  while (sending_.size() > kSending) {
    sending_.front().wait();
    sending_.pop_front();
  }
}

}  // namespace tessera::detail
