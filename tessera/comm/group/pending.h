#pragma once
// Pending: the result of an operation that was started and may not have finished. A group's
// collectives, redistributions and the sums of halo gradients return one.
//
//   Pending<at::Tensor> columns = start_redistribute(rows, {Shard(1)});
//   ...work that does not write to rows...
//   use(columns.wait());

#include <exception>
#include <memory>
#include <type_traits>
#include <utility>

namespace tessera {

namespace detail {
/// The operation behind a Pending. Its destructor waits if finish() was not called, and drops
/// errors.
template <class T>
class Unfinished {
 public:
  virtual ~Unfinished() = default;
  virtual bool done() = 0;
  /// Waits and returns the value. Called until it has returned or thrown once.
  virtual T finish() = 0;
};
}  // namespace detail

/// A value that will be available later. What was given to the call that started it must not be
/// read or written before wait() has returned. Destroying a Pending without wait() waits, and drops
/// the value and errors.
template <class T>
class [[nodiscard]] Pending {
  struct Nothing {};
  using Value = std::conditional_t<std::is_void_v<T>, Nothing, T>;

 public:
  /// Already complete, with an empty value.
  Pending() = default;
  explicit Pending(std::shared_ptr<detail::Unfinished<T>> unfinished)
      : unfinished_(std::move(unfinished)) {}
  /// Already complete.
  template <class Given = Value>
    requires(!std::is_void_v<T> && std::is_same_v<std::remove_cvref_t<Given>, Value>)
  explicit Pending(Given&& value) : value_(std::forward<Given>(value)) {}
  Pending(Pending&&) noexcept = default;
  Pending& operator=(Pending&&) noexcept = default;

  /// True once wait() would not block (also if the operation failed: then wait() throws).
  bool done() const { return !unfinished_ || unfinished_->done(); }
  /// Blocks until the value is available and returns it; later calls return it again, or throw
  /// again, at once. Throws what the operation throws: TimeoutError, PeerLostError, CommError, ...
  /// For CUDA tensors: makes the current stream wait instead of the host.
  T wait() {
    if (error_) std::rethrow_exception(error_);
    if (unfinished_) {
      const auto last = std::move(unfinished_);
      try {
        if constexpr (std::is_void_v<T>) {
          last->finish();
        } else {
          value_ = last->finish();
        }
      } catch (...) {
        error_ = std::current_exception();
        throw;
      }
    }
    if constexpr (!std::is_void_v<T>) return value_;
  }

 private:
  std::shared_ptr<detail::Unfinished<T>> unfinished_;
  std::exception_ptr error_;
  [[no_unique_address]] Value value_{};
};

/// An operation in progress that has no value of its own.
using Request = Pending<void>;

/// A Pending of `value`, complete when `request` is.
template <class T>
Pending<T> when_done(Request request, T value) {
  struct WhenDone final : detail::Unfinished<T> {
    WhenDone(Request r, T v) : request(std::move(r)), value(std::move(v)) {}
    bool done() override { return request.done(); }
    T finish() override {
      request.wait();
      return std::move(value);
    }
    Request request;
    T value;
  };
  return Pending<T>(std::make_shared<WhenDone>(std::move(request), std::move(value)));
}

}  // namespace tessera
