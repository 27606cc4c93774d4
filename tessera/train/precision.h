#pragma once
// Precision: in which dtypes a task computes, and the scale of a loss in float16.

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

namespace tessera {

enum class Precision : unsigned char {
  /// Nothing is converted.
  as_is,
  /// Parameters, buffers and batches are converted.
  float32,
  float64,
  /// Parameters stay as they are; forward runs under libtorch's autocast.
  bfloat16_mixed,
  /// The same, and the loss is scaled so that small gradients do not vanish.
  float16_mixed
};
std::string to_string(Precision precision);

/// Autocast of a mixed precision while it lives, on this thread; what was set before comes back.
class AutocastScope {
 public:
  /// Does nothing for a precision that is not mixed.
  AutocastScope(Precision precision, c10::Device device);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  bool on_ = false, before_ = false;
  c10::DeviceType device_;
  c10::ScalarType dtype_before_ = c10::ScalarType::Undefined;
};

struct LossScalerOptions {
  double initial = 65536;
  /// After `interval` steps in a row without an overflow.
  double growth = 2;
  /// At an overflow.
  double backoff = 0.5;
  int interval = 2000;
  /// Below this an overflow is not one of float16: an error.
  double smallest = 1.0 / 16384;
};

/// The factor on a loss. Grows until a gradient overflows, and shrinks then; the step with the
/// overflow is left out. Every rank learns the same and keeps the same factor.
class LossScaler {
 public:
  /// Throws InvalidArgument for options out of range.
  explicit LossScaler(const LossScalerOptions& options = {});
  double scale() const { return scale_; }
  /// `overflow`: agreed on by all ranks. Throws Error (on every rank) below the smallest scale.
  void update(bool overflow);
  std::string state() const;
  /// Throws ConfigurationError for another text.
  void restore(const std::string& state);

 private:
  LossScalerOptions options_;
  double scale_;
  std::int64_t since_ = 0;
};

}  // namespace tessera
