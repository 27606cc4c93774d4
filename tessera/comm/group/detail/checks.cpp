#include "tessera/comm/group/detail/checks.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "tessera/base/hash.h"
#include "tessera/comm/backends/flat.h"
#include "tessera/comm/group/detail/call_card.h"
#include "tessera/comm/group/detail/hand_over.h"
#include "tessera/comm/group/detail/memory.h"

namespace tessera::detail {
namespace {

void check_size_list(const RequestState& call, const char* role, const Sizes& sizes) {
  if (static_cast<int>(sizes.size()) != call.group().size())
    refuse(call, role, " sizes ", list(sizes), " are ", sizes.size(),
           " numbers, but the group has ", call.group().size(), " ranks: give one per rank");
  for (const auto n : sizes)
    if (n < 0) refuse(call, role, " sizes ", list(sizes), " hold a negative number");
}

// Sums and products of sizes that wrap around would pass for those of small tensors.
void check_counts(const RequestState& call, const char* role, const Sizes& sizes,
                  const at::Tensor& like) {
  std::int64_t rows = 0, bytes = 0;
  bool fits = true;
  for (const auto n : sizes) fits = fits && !__builtin_add_overflow(rows, n, &rows);
  const auto row = row_numel(like) * static_cast<std::int64_t>(like.element_size());
  if (!fits || __builtin_mul_overflow(rows, row, &bytes))
    refuse(call, role, " sizes ", list(sizes), " are more rows than any tensor has");
}

// The current stream of the device; where libtorch does not say so, it refuses what cannot be
// captured itself.
bool is_captured(c10::Device device) {
  const auto captured = [](const auto& stream) {
    if constexpr (requires { stream.is_capturing(); }) return stream.is_capturing();
    return false;
  };
  return captured(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void check_place(const RequestState& call, const char* role, const at::Tensor& tensor) {
  if (call.group().size() == 1) return;
  const auto& endpoint = call.group().endpoint(tensor.device().type());
  if (endpoint.device.has_index() && tensor.device() != endpoint.device)
    refuse(call, role, " is ", show(tensor), ", but this rank's device is ", endpoint.device,
           ", and its connections are made for that one: move the tensor there");
  if (!tensor.is_cpu() && is_captured(tensor.device()))
    refuse(call, role, " is on ", tensor.device(),
           ", whose current stream is captured for a graph, and calls between ranks cannot be "
           "captured: they are numbered and limited in time. Capture what lies between them");
}

}  // namespace

void check_tensor(const RequestState& call, const char* role, const at::Tensor& tensor) {
  if (tensor.defined()) check_place(call, role, tensor);
  if (const auto why = why_unreadable(tensor); !why.empty()) refuse(call, role, " ", why);
}

void check_target(const RequestState& call, const char* role, const at::Tensor& tensor) {
  if (tensor.defined()) check_place(call, role, tensor);
  if (const auto why = why_unwritable(tensor); !why.empty()) refuse(call, role, " ", why);
}

void check_rank(const RequestState& call, const char* what, int rank) {
  if (rank < 0 || rank >= call.group().size())
    refuse(call, what, ' ', rank, " is not a rank of the group: ranks are 0 to ",
           call.group().size() - 1, " (positions in the group, not global ranks)");
}

void check_alike(const RequestState& call, const at::Tensor& output, const at::Tensor& input) {
  if (output.scalar_type() != input.scalar_type() || output.device() != input.device())
    refuse(call, "output is ", show(output), " but input is ", show(input),
           "; dtype and device must be the same");
}

void check_sizes(const RequestState& call, const at::Tensor& whole, const at::Tensor& part,
                 const Sizes& sizes) {
  if (sizes.empty()) {
    if (whole.defined() && part.defined() && whole.numel() != part.numel() * call.group().size())
      refuse(call, "the gathered tensor ", show(whole), " must have ", call.group().size(),
             " times the elements of this rank's ", show(part),
             "; give sizes if the ranks' sizes differ");
    if (whole.defined() && !part.defined() && whole.numel() % call.group().size() != 0)
      refuse(call, show(whole), " cannot be divided evenly among ", call.group().size(),
             " ranks; give sizes");
    return;
  }
  check_size_list(call, "the", sizes);
  if (part.defined()) check_counts(call, "the", sizes, part);
  if (whole.defined()) check_rows(call, "the gathered tensor", whole, sizes);
  if (!part.defined()) return;
  const auto rows = sizes[call.group().rank()];
  if (part.dim() < 1 || part.size(0) != rows)
    refuse(call, "this rank's tensor is ", show(part), ", but sizes ", list(sizes), " give it ",
           rows, " rows");
  if (whole.defined() && row_numel(whole) != row_numel(part))
    refuse(call, "the gathered tensor ", show(whole), " and this rank's ", show(part),
           " have rows of different size");
}

void check_rows(const RequestState& call, const char* role, const at::Tensor& tensor,
                const Sizes& sizes) {
  if (sizes.empty()) {
    if (tensor.numel() % call.group().size() != 0)
      refuse(call, role, " ", show(tensor), " cannot be divided evenly among ", call.group().size(),
             " ranks; give sizes");
    return;
  }
  check_size_list(call, role, sizes);
  check_counts(call, role, sizes, tensor);
  const auto sum = total_of(sizes);
  if (tensor.dim() < 1 || tensor.size(0) != sum)
    refuse(call, role, " is ", show(tensor), ", but sizes ", list(sizes), " add up to ", sum,
           " rows");
}

void check_overlap(const RequestState& call, const at::Tensor& output, const at::Tensor& input) {
  if (call.group().check_level() == CheckLevel::off || !output.defined()) return;
  if (shares_elements(output))
    refuse(call,
           "elements of the output share memory (an expanded tensor?): give a tensor of its own, "
           "for example output.contiguous()");
  if (input.defined() && share_elements(output, input))
    refuse(call, "output and input share memory; give tensors of their own");
}

void check_apart(const RequestState& call, const std::vector<Message>& messages) {
  if (call.group().check_level() == CheckLevel::off) return;
  for (std::size_t i = 0; i < messages.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) {
      const Message &a = messages[j], &b = messages[i];
      if (a.kind == Message::Kind::send && b.kind == Message::Kind::send) continue;
      if (!share_elements(a.tensor, b.tensor)) continue;
      auto role = [](const Message& m) {
        return concat(m.kind == Message::Kind::send ? "is sent to" : "is received from", " rank ",
                      m.peer);
      };
      refuse(call, "messages ", j, " (", role(a), ") and ", i, " (", role(b),
             ") share memory; what is received needs memory of its own");
    }
}

namespace {

constexpr std::int64_t kCardBytes = 256;

// What a rank sends to the others before a call: a hash of what is compared, and as much of the
// text as fits.
struct Card {
  std::uint64_t same = 0;     // hash of the text that must agree
  std::uint64_t problem = 0;  // 1: this rank refused its arguments
  char text[kCardBytes - 16] = {};
};
static_assert(sizeof(Card) == kCardBytes);

Card make_card(const std::string& same, const std::string& shown, const std::string& problem) {
  Card card;
  card.same = Hash().text(same).value();
  card.problem = problem.empty() ? 0 : 1;
  const std::string& text = problem.empty() ? shown : problem;
  constexpr std::size_t room = sizeof(card.text) - 1;
  if (text.size() <= room) {
    std::memcpy(card.text, text.data(), text.size());
  } else {
    std::memcpy(card.text, text.data(), room - 3);
    std::memcpy(card.text + room - 3, "...", 3);
  }
  return card;
}

at::Tensor exchange_rows(RequestState& call, const void* mine, std::int64_t bytes) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  const auto input = at::empty({bytes}, options);
  std::memcpy(input.mutable_data_ptr(), mine, bytes);
  const int n = call.group().size();
  TransportCall handed;
  handed.input = input;
  handed.output = at::empty({n * bytes}, options);
  handed.counts.assign(n, bytes);
  RequestState part(call.group(), call.operation(), {.timeout = call.left(), .name = call.name()},
                    true);
  part.begin_within(call);
  hand_over(part, endpoint_for(part, input), handed, &Transport::all_gather);
  part.wait();
  return handed.output;
}

}  // namespace

void checked(const RequestState& call, c10::function_ref<void()> check) {
  try {
    check();
  } catch (const c10::Error& error) {
    refuse(call, error.what_without_backtrace());
  }
}

void begin(RequestState& call, c10::function_ref<void()> check,
           c10::function_ref<Signature()> signature) {
  if (call.group().check_level() != CheckLevel::collective || call.group().size() == 1) {
    checked(call, check);
    call.begin_collective();
    return;
  }
  std::string problem;
  std::exception_ptr refused;
  Signature mine;
  try {
    checked(call, check);
    mine = signature();
  } catch (const InvalidArgument& e) {
    problem = e.what();
    refused = std::current_exception();
  } catch (const NotAvailable& e) {
    problem = e.what();
    refused = std::current_exception();
  }
  call.begin_collective();
  const std::string same =
      concat("call ", call.sequence(), ": ", call.describe(), mine.same, call.card().source.text());
  const Card card = make_card(same, same + mine.shown, problem);
  const auto output = exchange_rows(call, &card, sizeof(card));
  const auto* cards = static_cast<const Card*>(output.const_data_ptr());
  const int n = call.group().size();
  const bool all_refuse =
      std::all_of(cards, cards + n, [](const Card& c) { return c.problem != 0; });
  if (all_refuse) std::rethrow_exception(refused);
  // Two ranks that differ: this one and the first one unlike it, so that each rank sees its own
  // call; a rank of the majority sees one that is not.
  const Card& own = cards[call.group().rank()];
  auto unlike = [&](const Card& c) { return c.problem != own.problem || c.same != own.same; };
  const auto* other = std::find_if(cards, cards + n, unlike);
  if (other == cards + n) return;
  auto say = [&](const Card& c) {
    return RankCall{call.group().ranks()[&c - cards],
                    concat(c.problem ? "refused its arguments: " : "called ",
                           static_cast<const char*>(c.text))};
  };
  std::vector<int> like, rest;
  for (int r = 0; r < n; ++r) (unlike(cards[r]) ? rest : like).push_back(call.group().ranks()[r]);
  throw MismatchError(
      "group '", call.group().name(), "': ",
      mismatch_text({say(own), say(*other)}, MismatchAt::before_data,
                    concat(". Ranks like the former: ", list(like), ", others: ", list(rest))));
}

void compare_pairs(RequestState& call, const Sizes& output_counts, const Sizes& input_counts) {
  const int n = call.group().size();
  if (call.group().check_level() != CheckLevel::collective || n == 1) return;
  std::vector<std::int64_t> mine(output_counts);
  mine.insert(mine.end(), input_counts.begin(), input_counts.end());
  const auto all = exchange_rows(call, mine.data(),
                                 static_cast<std::int64_t>(mine.size() * sizeof(std::int64_t)));
  const auto* counts = static_cast<const std::int64_t*>(all.const_data_ptr());
  const auto& ranks = call.group().ranks();
  for (int to = 0; to < n; ++to)
    for (int from = 0; from < n; ++from) {
      const auto waits = counts[to * 2 * n + from], sends = counts[from * 2 * n + n + to];
      if (waits != sends)
        throw MismatchError("group '", call.group().name(), "', call ", call.sequence(), ": ",
                            call.describe(), ": rank ", ranks[from], " sends ", sends,
                            " elements to rank ", ranks[to], ", which waits for ", waits,
                            ". No data was moved; make the sizes agree");
    }
}

namespace {

// Tags of cards, and, from kData on, of data: all at most 32767, which is all that MPI promises.
constexpr int kSendersCard = 0x7e56, kReceiversCard = 0x7e57, kData = 1 << 14;
constexpr std::uint64_t kDataTags = 1 << 13;

const char* problem_words(const Card& card) {
  return card.problem ? " refused its arguments: " : " ";
}

}  // namespace

MessageCards::MessageCards(const RequestState& call, const std::vector<Message>& messages,
                           const std::string& problem)
    : group_(call.group()) {
  const auto n = static_cast<std::int64_t>(messages.size());
  const auto options = at::TensorOptions().dtype(at::kByte);
  mine_ = at::empty({n, kCardBytes}, options);
  theirs_ = at::empty({n, kCardBytes}, options);
  auto* cards = static_cast<std::uint8_t*>(mine_.mutable_data_ptr());
  for (const auto& m : messages) {
    const bool sends = m.kind == Message::Kind::send;
    peers_.push_back(m.peer);
    sent_.push_back(sends);
    numbers_.push_back(group_.next_message(m.peer, sends));
    const auto& t = m.tensor;
    const std::string kind = !problem.empty() ? std::string("a tensor")
                             : t.defined() ? concat(c10::toString(t.scalar_type()), t.sizes(),
                                                    " on ", c10::DeviceTypeName(t.device().type()))
                                           : show(t);
    const std::string same = concat("message ", numbers_.back(), ": ", kind,
                                    call.name().empty() ? "" : concat(" '", call.name(), "'"));
    const Card card = make_card(
        same, concat(sends ? "sends " : "receives ", same, " by ", call.operation()), problem);
    std::memcpy(cards + (peers_.size() - 1) * kCardBytes, &card, kCardBytes);
  }
  request_ = std::make_shared<RequestState>(
      group_, call.operation(), CallOptions{.timeout = call.left(), .name = call.name()}, true);
  request_->begin_within(call);
  const auto& endpoint = group_.endpoint(c10::DeviceType::CPU);
  request_->start([&](RequestState& request) {
    for (const auto kind : {Message::Kind::receive, Message::Kind::send})
      for (std::int64_t i = 0; i < n; ++i) {
        const bool sends = kind == Message::Kind::send;
        hand_messages(request, endpoint,
                      {{kind, (sends ? mine_ : theirs_).select(0, i), peers_[i]}},
                      sends == sent_[i] ? kSendersCard : kReceiversCard);
      }
  });
}

void MessageCards::compare() const {
  const auto *mine = static_cast<const Card*>(mine_.const_data_ptr()),
             *theirs = static_cast<const Card*>(theirs_.const_data_ptr());
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (!theirs[i].problem && mine[i].same == theirs[i].same) continue;
    const Card &sender = sent_[i] ? mine[i] : theirs[i], &receiver = sent_[i] ? theirs[i] : mine[i];
    const auto& ranks = group_.ranks();
    const int from = ranks[sent_[i] ? group_.rank() : peers_[i]],
              to = ranks[sent_[i] ? peers_[i] : group_.rank()];
    const std::string text =
        concat("group '", group_.name(), "': a message from rank ", from, " to rank ", to,
               " does not fit. Rank ", from, problem_words(sender), sender.text, "; rank ", to,
               problem_words(receiver), receiver.text,
               ". Make both ends of a message agree, and the order of messages between two ranks");
    if (std::ranges::any_of(peers_, [&](int peer) { return peer != peers_[i]; }))
      group_.watch().announce(text);
    throw MismatchError(text);
  }
}

int MessageCards::tag(std::size_t message) const {
  return kData + static_cast<int>(numbers_[message] % kDataTags);
}

}  // namespace tessera::detail
