// Collectives that move data without computing, and messages.

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/flat.h"
#include "tessera/comm/group/detail/checks.h"
#include "tessera/comm/group/detail/collectives.h"
#include "tessera/comm/group/detail/hand_over.h"
#include "tessera/comm/group/detail/memory.h"

namespace tessera::detail {
namespace {

using Guard = at::AutoDispatchBelowADInplaceOrView;

// Elements on the wire of each rank's tensor.
Sizes wire_counts(RequestState& call, const at::Tensor& part, const Sizes& sizes) {
  const auto width = wire_width(call, part);
  return sizes.empty() ? Sizes(call.group().size(), part.numel() * width)
                       : times(sizes, row_numel(part) * width);
}

std::string kind_of(const at::Tensor& t) {
  return concat(", ", c10::toString(t.scalar_type()), " on ",
                c10::DeviceTypeName(t.device().type()));
}

// What ranks must agree on: with sizes, the size of a row and the sizes; without, the shape of this
// rank's tensor.
std::string parts_text(const at::Tensor& part, const Sizes& sizes) {
  if (sizes.empty()) return concat(kind_of(part), ", shape ", part.sizes());
  const auto dims = part.sizes();
  return concat(kind_of(part), ", rows ", dims.slice(std::min<std::size_t>(1, dims.size())),
                ", sizes ", list(sizes, 1 << 20));
}

std::int64_t bytes_of(const at::Tensor& t) {
  return t.defined() ? static_cast<std::int64_t>(t.nbytes()) : 0;
}

bool nothing(const Sizes& sizes, const at::Tensor& part) {
  return sizes.empty() ? part.numel() == 0 : total_of(sizes) * row_numel(part) == 0;
}

void copy_here(const at::Tensor& output, const at::Tensor& input) {
  output.copy_(input.reshape(output.sizes()));
}

}  // namespace

void launch_broadcast(RequestState& call, const at::Tensor& given, int root) {
  const bool is_root = call.group().rank() == root;
  begin(
      call,
      [&] {
        (is_root ? check_tensor : check_target)(call, "the tensor", given);
        check_rank(call, "root", root);
        check_overlap(call, given, {});
      },
      [&] { return Signature{concat(kind_of(given), ' ', given.sizes(), ", root ", root), {}}; });
  const at::Tensor tensor = in_memory(given);
  call.set_card(card_of(tensor, root));
  call.count_bytes(is_root ? bytes_of(tensor) : 0);
  if (call.group().size() == 1 || tensor.numel() == 0) return;
  const Guard guard;
  TransportCall handed;
  handed.output = is_root ? wire_input(call, tensor) : wire_output(call, tensor);
  handed.root = root;
  hand_over(call, endpoint_for(call, tensor), handed, &Transport::broadcast);
}

void launch_all_to_all(RequestState& call, const at::Tensor& output, const at::Tensor& given,
                       const Sizes& output_sizes, const Sizes& input_sizes) {
  begin(
      call,
      [&] {
        check_target(call, "the output", output);
        check_tensor(call, "the input", given);
        check_alike(call, output, given);
        check_rows(call, "the output", output, output_sizes);
        check_rows(call, "the input", given, input_sizes);
        if (output_sizes.empty() != input_sizes.empty())
          refuse(call, "sizes of only one side were given; give both, or neither");
        if (!output_sizes.empty() && row_numel(output) != row_numel(given))
          refuse(call, "the output ", show(output), " and the input ", show(given),
                 " have rows of different size");
        if (output_sizes.empty() && output.numel() != given.numel())
          refuse(call, "the output ", show(output), " and the input ", show(given),
                 " must have the same number of elements; give sizes if the ranks' sizes differ");
        const auto me = static_cast<std::size_t>(call.group().rank());
        if (!output_sizes.empty() && output_sizes[me] != input_sizes[me])
          refuse(call, "this rank sends ", input_sizes[me], " rows to itself, but waits for ",
                 output_sizes[me]);
        check_overlap(call, output, given);
      },
      [&] {
        if (input_sizes.empty())
          return Signature{concat(kind_of(given), ", even, ", given.numel(), " elements"), {}};
        const auto dims = given.sizes();
        return Signature{concat(kind_of(given), ", rows ", dims.slice(1)),
                         concat(", out ", list(output_sizes), ", in ", list(input_sizes))};
      });
  const at::Tensor input = in_memory(given);
  auto card = card_of(input, -1);
  if (!input_sizes.empty()) card.elements = -1;  // each rank has its own
  call.set_card(std::move(card));
  call.count_bytes(bytes_of(input));
  const int n = call.group().size();
  const Sizes out_rows =
      output_sizes.empty() ? Sizes(n, output.numel() / n) : times(output_sizes, row_numel(output));
  const Sizes in_rows =
      input_sizes.empty() ? Sizes(n, input.numel() / n) : times(input_sizes, row_numel(input));
  compare_pairs(call, out_rows, in_rows);
  if (input_sizes.empty() && input.numel() == 0) return;
  const Guard guard;
  if (n == 1) return copy_here(output, input);
  const auto width = wire_width(call, input);
  TransportCall handed;
  handed.input = wire_input(call, input);
  handed.output = wire_output(call, output);
  handed.counts = times(out_rows, width);
  handed.input_counts = times(in_rows, width);
  handed.agreed = input_sizes.empty();
  hand_over(call, endpoint_for(call, input), handed, &Transport::all_to_all);
}

void launch_parts(RequestState& call, const at::Tensor& whole_given, const at::Tensor& part_given,
                  std::optional<int> root, const Sizes& sizes, bool gathers) {
  const bool has_whole = !root || call.group().rank() == *root;
  begin(
      call,
      [&] {
        if (root) check_rank(call, "root", *root);
        const at::Tensor whole = has_whole ? whole_given : at::Tensor();
        const at::Tensor &output = gathers ? whole : part_given,
                         &input = gathers ? part_given : whole;
        if (has_whole || !gathers) check_target(call, "the output", output);
        if (has_whole || gathers) check_tensor(call, "the input", input);
        if (has_whole) check_alike(call, output, input);
        check_sizes(call, whole, part_given, sizes);
        check_overlap(call, output, input);
      },
      [&] {
        const auto parts = parts_text(part_given, sizes);
        return Signature{root ? concat(parts, ", root ", *root) : parts, {}};
      });
  const at::Tensor part = in_memory(part_given),
                   whole = has_whole ? in_memory(whole_given) : at::Tensor();
  const at::Tensor &output = gathers ? whole : part, &input = gathers ? part : whole;
  call.set_card(card_of(part, root.value_or(-1), sizes));
  call.count_bytes(bytes_of(input));
  if (nothing(sizes, part)) return;
  const Guard guard;
  if (call.group().size() == 1) return copy_here(output, input);
  TransportCall handed;
  if (output.defined()) handed.output = wire_output(call, output);
  if (input.defined()) handed.input = wire_input(call, input);
  handed.counts = wire_counts(call, part, sizes);
  handed.root = root.value_or(-1);
  hand_over(call, endpoint_for(call, part), handed,
            !root     ? &Transport::all_gather
            : gathers ? &Transport::gather
                      : &Transport::scatter);
}

namespace {

void check_messages(const RequestState& call, const std::vector<Message>& messages) {
  std::vector<const Message*> sent, received;  // to and from this rank itself
  for (const auto& m : messages) {
    m.kind == Message::Kind::send ? check_tensor(call, "a sent tensor", m.tensor)
                                  : check_target(call, "a received tensor", m.tensor);
    check_rank(call, "peer", m.peer);
    if (m.tensor.device().type() != messages.front().tensor.device().type())
      refuse(call, "messages of one call must be on devices of one type, but there are ",
             messages.front().tensor.device(), " and ", m.tensor.device());
    if (m.kind == Message::Kind::receive) check_overlap(call, m.tensor, {});
    if (m.peer == call.group().rank())
      (m.kind == Message::Kind::send ? sent : received).push_back(&m);
  }
  if (sent.size() != received.size())
    refuse(call, "this rank sends ", sent.size(), " messages to itself but receives ",
           received.size(), "; both must be in the same call");
  for (std::size_t i = 0; i < sent.size(); ++i) {
    const auto &a = sent[i]->tensor, &b = received[i]->tensor;
    check_alike(call, b, a);
    if (a.numel() != b.numel())
      refuse(call, "message ", i, " of this rank to itself is ", show(a), ", received as ",
             show(b));
  }
  check_apart(call, messages);
}

std::vector<Message> to_others(const RequestState& call, const std::vector<Message>& messages) {
  return filtered(messages, [&](const Message& m) {
    return m.peer >= 0 && m.peer < call.group().size() && m.peer != call.group().rank();
  });
}

// Sends this rank's cards all the same, since the peers wait for them: they say why there is no
// message.
void tell_refusal(RequestState& call, const std::vector<Message>& messages,
                  const std::string& problem) {
  const auto others = to_others(call, messages);
  if (others.empty()) return;
  try {
    MessageCards(call, others, problem).request()->wait();
  } catch (const CommError&) {  // the caller is to see the refusal itself
  }
}

// `travelling` holds the messages as they are sent. With CheckLevel::collective the ends of each
// message first agree, and then the data is sent, with a tag of its own, since calls that agree
// later may be sent earlier. Messages of devices have no tags: they are sent in the order in which
// the calls were made, when one of them is waited for.
void exchange_compared(RequestState& call, const std::vector<Message>& messages,
                       std::vector<Message> travelling) {
  const auto device = travelling.front().tensor.device();
  // a copy: the call may outlive the group's endpoints
  const auto endpoint = call.group().endpoint(device.type());
  const auto cards = std::make_shared<MessageCards>(call, messages);
  std::optional<c10::Stream> stream;
  if (!device.is_cpu()) stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  call.agree_first(cards->request(), [=, &call, travelling = std::move(travelling)] {
    cards->compare();
    const Guard guard;
    if (!stream) {
      for (std::size_t i = 0; i < travelling.size(); ++i)
        if (travelling[i].tensor.numel() > 0)
          hand_messages(call, endpoint, {travelling[i]}, cards->tag(i));
      return;
    }
    const c10::OptionalStreamGuard on(stream);
    auto full = travelling;
    std::erase_if(full, [](const Message& m) { return m.tensor.numel() == 0; });
    if (!full.empty()) exchange_flat(call, full);
  });
  if (stream)
    call.queue();
  else if (!call.blocking())
    call.go_on(endpoint);
}

}  // namespace

void launch_exchange(RequestState& call, const std::vector<Message>& messages) {
  const int me = call.group().rank();
  const bool compared =
      call.group().check_level() == CheckLevel::collective && call.group().size() > 1;
  try {
    checked(call, [&] { check_messages(call, messages); });
  } catch (const Error& e) {
    if (compared) tell_refusal(call, messages, e.what());
    throw;
  }
  call.begin_message();
  const Guard guard;
  std::vector<Message> travelling;
  std::vector<const at::Tensor*> sent, received;
  travelling.reserve(messages.size());
  for (const auto& m : messages) {
    const bool sends = m.kind == Message::Kind::send;
    if (m.peer == me) (sends ? sent : received).push_back(&m.tensor);
    // both ends know that there is nothing to move
    if (m.peer == me || (m.tensor.numel() == 0 && !compared)) continue;
    call.count_bytes(bytes_of(m.tensor));
    travelling.push_back(
        {m.kind, sends ? wire_input(call, in_memory(m.tensor)) : wire_output(call, m.tensor),
         m.peer});
  }
  for (std::size_t i = 0; i < sent.size(); ++i) copy_here(*received[i], in_memory(*sent[i]));
  if (travelling.empty()) return;
  compared ? exchange_compared(call, to_others(call, messages), std::move(travelling))
           : exchange_flat(call, travelling);
}

void launch_barrier(RequestState& call) {
  begin(call, [] {}, [] { return Signature{}; });
  call.set_card({});
  if (call.group().size() == 1) return;
  const auto device = call.group().has_endpoint(c10::DeviceType::CPU) ? c10::DeviceType::CPU
                                                                      : c10::DeviceType::CUDA;
  TransportCall handed;
  hand_over(call, call.group().endpoint(device), handed, &Transport::barrier);
}

}  // namespace tessera::detail
