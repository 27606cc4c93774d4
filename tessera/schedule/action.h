#pragma once
// What a rank of a pipeline does, one action at a time, as values that print and parse.
//
//   parse_action("2F0")         stage 2 runs micro-batch 0 forward
//   parse_action("1SEND_F3")    the output of stage 1 for micro-batch 3 leaves for stage 2
//   to_string(parse_action("0REDUCE_GRAD")) == "0REDUCE_GRAD"
//
// The letters are those of the tables that torch.distributed.pipelining writes, so that these can
// be read.

#include <iosfwd>
#include <string>
#include <string_view>

#include "tessera/base/error.h"

namespace tessera {

enum class ActionKind : unsigned char {
  /// F: the stage's output from its input.
  forward,
  /// I: the gradient of the stage's input alone, which the stage before waits for.
  input_gradient,
  /// W: the gradients of the stage's parameters, after I of the same micro-batch.
  weight_gradient,
  /// B: both at once.
  backward,
  /// SEND_F: the stage's output to the rank of the next stage.
  send_activation,
  /// RECV_F: the stage's input from the rank of the stage before.
  receive_activation,
  /// SEND_B: the gradient of the stage's input to the rank of the stage before.
  send_gradient,
  /// RECV_B: the gradient of the stage's output from the rank of the next stage.
  receive_gradient,
  /// UNSHARD: gathers the stage's fully sharded parameters.
  gather,
  /// RESHARD: frees the gathered parameters.
  release,
  /// REDUCE_GRAD: sums the stage's gradients over the ranks that share it, after its last backward.
  reduce_gradient,
};

/// The letters of a kind: "F", "SEND_F", "REDUCE_GRAD".
std::string_view letters_of(ActionKind kind);
/// F, I, W or B.
bool is_compute(ActionKind kind);
/// I or B: what the gradient of the stage's input comes from.
bool makes_input_gradient(ActionKind kind);
/// W or B: what ends the micro-batch on the stage.
bool makes_weight_gradient(ActionKind kind);
/// One of the sends or receives.
bool is_message(ActionKind kind);
/// Whether an action of the kind belongs to a micro-batch; else it is done for the stage as a
/// whole.
bool has_micro_batch(ActionKind kind);

/// One action of the rank that holds `stage`.
struct PipelineAction {
  ActionKind kind = ActionKind::forward;
  int stage = 0;
  /// -1 where the kind has none.
  int micro_batch = -1;
  bool operator==(const PipelineAction&) const = default;
};

/// "2F0", "1SEND_B3", "0UNSHARD".
std::string to_string(const PipelineAction& action);
std::ostream& operator<<(std::ostream& out, const PipelineAction& action);

/// Text that is no schedule: where it goes wrong and what was expected there. Lines and columns
/// count from 1; a column is a byte of its line.
class ScheduleSyntaxError : public InvalidArgument {
 public:
  ScheduleSyntaxError(int line, int column, const std::string& what);
  int line() const { return line_; }
  int column() const { return column_; }

 private:
  int line_, column_;
};

/// The largest stage and micro-batch that text may name.
inline constexpr int kLargestId = (1 << 20) - 1;

/// One action, and nothing before or behind it. Throws ScheduleSyntaxError for any other text, with
/// `line` and the column, which counts from `column`.
PipelineAction parse_action(std::string_view text, int line = 1, int column = 1);

}  // namespace tessera
