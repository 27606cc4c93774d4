#include "tessera/schedule/action.h"

#include <algorithm>
#include <array>
#include <ostream>

#include "tessera/base/internal/name.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/schedule/detail/text.h"

namespace tessera {
namespace {

constexpr std::array<std::string_view, 11> kLetters = {"F",       "I",       "W",          "B",
                                                       "SEND_F",  "RECV_F",  "SEND_B",     "RECV_B",
                                                       "UNSHARD", "RESHARD", "REDUCE_GRAD"};

bool is_letter(char c) { return (c >= 'A' && c <= 'Z') || c == '_'; }

}  // namespace

std::string_view letters_of(ActionKind kind) { return kLetters.at(static_cast<std::size_t>(kind)); }

bool is_compute(ActionKind kind) { return kind <= ActionKind::backward; }

bool makes_input_gradient(ActionKind kind) {
  return kind == ActionKind::input_gradient || kind == ActionKind::backward;
}

bool makes_weight_gradient(ActionKind kind) {
  return kind == ActionKind::weight_gradient || kind == ActionKind::backward;
}

bool is_message(ActionKind kind) {
  return kind >= ActionKind::send_activation && kind <= ActionKind::receive_gradient;
}

bool has_micro_batch(ActionKind kind) { return kind <= ActionKind::receive_gradient; }

std::string to_string(const PipelineAction& action) {
  std::string text = std::to_string(action.stage);
  text += letters_of(action.kind);
  if (has_micro_batch(action.kind)) text += std::to_string(action.micro_batch);
  return text;
}

std::ostream& operator<<(std::ostream& out, const PipelineAction& action) {
  return out << to_string(action);
}

ScheduleSyntaxError::ScheduleSyntaxError(int line, int column, const std::string& what)
    : InvalidArgument(concat("line ", line, ", column ", column, ": ", what)),
      line_(line),
      column_(column) {}

int detail::read_number(std::string_view text, std::size_t& at, int largest, const char* what,
                        int line, int column) {
  const std::size_t begin = at;
  const auto fail = [&](std::size_t place, const std::string& why) -> int {
    throw ScheduleSyntaxError(line, column + static_cast<int>(place), why);
  };
  int value = 0;
  for (; at < text.size() && is_digit(text[at]); ++at) {
    value = value * 10 + (text[at] - '0');
    if (value > largest) return fail(begin, concat(what, " is above ", largest, ", the largest"));
  }
  if (at == begin)
    return fail(at, concat("expected ", what, ", a number, instead of ", found(text, at)));
  if (text[begin] == '0' && at - begin > 1)
    return fail(begin, concat(what, " has a zero before it: ", text.substr(begin, at - begin)));
  return value;
}

std::string detail::found(std::string_view text, std::size_t at) {
  if (at >= text.size()) return "the end";
  return concat('"', printable(text.substr(at, 16)), text.size() > at + 16 ? "...\"" : "\"");
}

PipelineAction parse_action(std::string_view text, int line, int column) {
  std::size_t at = 0;
  PipelineAction action;
  action.stage = detail::read_number(text, at, kLargestId, "a stage", line, column);
  std::size_t end = at;
  while (end < text.size() && is_letter(text[end])) ++end;
  const auto* const known = std::ranges::find(kLetters, text.substr(at, end - at));
  if (known == kLetters.end()) {
    throw ScheduleSyntaxError(
        line, column + static_cast<int>(at),
        concat("expected an action, one of F, I, W, B, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, "
               "RESHARD and REDUCE_GRAD, instead of ",
               detail::found(text, at)));
  }
  action.kind = static_cast<ActionKind>(known - kLetters.begin());
  at = end;
  if (has_micro_batch(action.kind))
    action.micro_batch = detail::read_number(text, at, kLargestId, "a micro-batch", line, column);
  if (at < text.size()) {
    throw ScheduleSyntaxError(line, column + static_cast<int>(at),
                              concat("expected the end of the action ", to_string(action),
                                     " instead of ", detail::found(text, at)));
  }
  return action;
}

}  // namespace tessera
