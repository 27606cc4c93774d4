#pragma once
// Tape: what a program did to tensors that have no values, and how one of them gets its own.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/nn/deferred.h"
#include "tessera/tensor/policy.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// One recording. Values are numbered: each tensor that an operator made is one, and what is
/// written to in place stays the same one. Views share the memory of their base, and so its number
/// in `memory`.
class Tape : public std::enable_shared_from_this<Tape> {
 public:
  /// The key that operators are recorded under while a scope lives. Registered on first use; throws
  /// NotAvailable if another library has a fallback for it.
  static constexpr auto kKey = c10::DispatchKey::DeferredInit;
  static void ensure_registered();

  explicit Tape(bool host_too) : host_too_(host_too) {}

  static void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack);
  /// Runs an operator on the meta device and records it, or just runs it if it neither takes values
  /// of this tape nor, in its scope, makes any.
  void call(const c10::OperatorHandle& op, torch::jit::Stack* stack);

  /// A value like that of a tensor, which is what `source` gives. `what` stands for it in hash().
  std::size_t give(std::size_t value, const std::string& what, DeferredSource source);
  /// A new value like `meta`, of which nothing says yet what it is: what is written to all of it
  /// does.
  std::size_t blank(const at::Tensor& meta, const std::string& name);
  /// What messages call a value, which otherwise has no name.
  void name(std::size_t value, const std::string& name);
  /// Of what a value is made of, the name of what nothing has said; "" where all is known.
  std::string unsaid(std::size_t value) const;
  /// The value of a tensor, sharded as `spec` says. Collective over its mesh if what was recorded
  /// moves data. Draws are numbered as if all that was recorded ran at the first call.
  at::Tensor placed(std::size_t value, const ShardSpec& spec, c10::Device device);
  /// placed() has been called, and its random numbers are counted from there; begin_anew() takes
  /// that back, where what was placed is thrown away.
  bool begun() const;
  void begin_anew();
  /// The values of tensors on this process alone, in the order of the recording. The first call
  /// draws all that the recording draws.
  std::vector<at::Tensor> plain(const std::vector<std::size_t>& values, c10::Device device);
  /// A number that stands for what was recorded of a value: equal on ranks that did the same.
  std::uint64_t hash(std::size_t value) const;

 private:
  struct Value {
    std::size_t memory = 0;
    std::vector<std::int64_t> shape;
    at::ScalarType dtype = at::kFloat;
    std::string name = {};
  };
  /// A tensor among the arguments: of a list its element, else -1.
  struct Use {
    std::size_t argument = 0;
    int element = -1;
    std::size_t value = 0;
  };
  struct Step {
    c10::OperatorHandle op;
    /// Deferred tensors are left out: the tape would keep what keeps the tape.
    std::vector<c10::IValue> arguments;
    std::vector<Use> uses;
    /// The argument that names a device, where there is one.
    std::optional<std::size_t> device;
    /// By result; in a list one after the other.
    std::vector<std::size_t> results;
    /// Of what it writes to, and of its results.
    std::vector<std::size_t> touched;
    /// The how-manieth random step it is.
    std::optional<std::uint64_t> draw;
    /// What gives its result in place of the operator, and its name.
    DeferredSource source = {};
    std::string what = {};
    /// It makes memory alone.
    bool blank = false;
  };
  using Values = std::unordered_map<std::size_t, at::Tensor>;

  bool makes_deferred(const Step& step) const;
  void take_arguments(Step& step, const torch::jit::Stack& stack, std::size_t first);
  void take_results(Step& step, const torch::jit::Stack& stack, std::size_t first,
                    const std::vector<at::Tensor>& inputs);
  std::size_t add_value(const at::Tensor& tensor, const std::vector<at::Tensor>& inputs);
  std::size_t add_made(Value value, const std::string& what, DeferredSource source);
  std::string described(const Step& step) const;
  void require_no_graph(const Step& step, const torch::jit::Stack& stack, std::size_t first) const;
  std::int64_t count(std::size_t value) const;
  std::vector<const Step*> steps_of(const std::vector<std::size_t>& values,
                                    bool draws = false) const;
  void run(const Step& step, Values& values, c10::Device device) const;
  at::Tensor created(const Step& step, const ShardSpec& spec, c10::Device device) const;

  const bool host_too_;
  mutable std::mutex mutex_;  // guards what is below
  std::vector<Value> values_;
  std::vector<Step> steps_;
  std::size_t memories_ = 0;
  /// Values were given from elsewhere: what nobody needs is not drawn.
  bool given_ = false;
  std::uint64_t draws_ = 0;
  bool drawn_ = false;
  /// Of the first placed() value.
  std::optional<RandomState> start_;
};

/// On a deferred tensor's implementation.
struct Recorded : c10::BackendMeta {
  Recorded(std::shared_ptr<Tape> tape_, std::size_t value_)
      : tape(std::move(tape_)), value(value_) {}
  const std::shared_ptr<Tape> tape;
  const std::size_t value;
};
/// Null for tensors with values, and for those on the meta device that no scope recorded.
const Recorded* recorded(const at::TensorBase& tensor);
/// Makes a tensor of the meta device stand for a value of `tape`, or for nothing again.
void mark(const at::Tensor& meta, std::shared_ptr<Tape> tape, std::size_t value);
void unmark(const at::Tensor& meta);
/// Throws InvalidArgument where nothing has said what a deferred tensor is.
void require_said(const std::string& who, const Recorded& deferred);
/// Gives a deferred tensor the value `made`, for every handle to it.
void fill_in(const at::Tensor& deferred, const at::Tensor& made);
/// Makes a tape the recording of this thread's innermost scope while it lives.
class Recording : Pinned {
 public:
  explicit Recording(std::shared_ptr<Tape> tape);
  ~Recording();

 private:
  const std::shared_ptr<Tape> tape_;
  Tape* const before_;
  const c10::impl::IncludeDispatchKeyGuard include_{Tape::kKey};
};
/// Throws InvalidArgument inside a DeferredScope of this thread, in which nothing has values.
void require_no_scope(const std::string& who);

}  // namespace tessera::detail
