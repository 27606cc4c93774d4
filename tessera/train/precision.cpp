#include "tessera/train/precision.h"

#include <ATen/autocast_mode.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera {

std::string to_string(Precision precision) {
  switch (precision) {
    case Precision::as_is:
      return "as_is";
    case Precision::float32:
      return "float32";
    case Precision::float64:
      return "float64";
    case Precision::bfloat16_mixed:
      return "bfloat16_mixed";
    case Precision::float16_mixed:
      return "float16_mixed";
  }
  return "?";
}

AutocastScope::AutocastScope(Precision precision, c10::Device device) : device_(device.type()) {
  if (precision != Precision::bfloat16_mixed && precision != Precision::float16_mixed) return;
  on_ = true;
  before_ = at::autocast::is_autocast_enabled(device_);
  dtype_before_ = at::autocast::get_autocast_dtype(device_);
  at::autocast::set_autocast_enabled(device_, true);
  at::autocast::set_autocast_dtype(
      device_, precision == Precision::bfloat16_mixed ? at::kBFloat16 : at::kHalf);
  at::autocast::increment_nesting();
}

AutocastScope::~AutocastScope() {
  if (!on_) return;
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_enabled(device_, before_);
}

LossScaler::LossScaler(const LossScalerOptions& options)
    : options_(options), scale_(options.initial) {
  if (!(options.initial > 0) || !std::isfinite(options.initial) || !(options.growth >= 1) ||
      !(options.backoff > 0 && options.backoff < 1) || options.interval < 1 ||
      !(options.smallest > 0))
    throw InvalidArgument(concat(
        "a loss scaler of ", options.initial, " that grows by ", options.growth, " after ",
        options.interval, " steps and shrinks by ", options.backoff, " down to ", options.smallest,
        ": scales are above 0, growth is at least 1, backoff between 0 and 1, interval above 0"));
}

void LossScaler::update(bool overflow) {
  if (overflow) {
    scale_ *= options_.backoff;
    since_ = 0;
    if (scale_ < options_.smallest)
      throw Error(concat("gradients overflow although the loss is scaled by ", scale_,
                         " only: the loss itself is not finite, or the model diverges"));
  } else if (++since_ >= options_.interval) {
    scale_ *= options_.growth;
    since_ = 0;
  }
}

std::string LossScaler::state() const { return concat(std::hexfloat, scale_, " ", since_); }

void LossScaler::restore(const std::string& state) {
  const auto space = state.find(' ');
  const auto scale = parse_hex_real(state.substr(0, space));
  const auto since =
      space == std::string::npos ? std::nullopt : parse_number(state.substr(space + 1));
  if (!scale || !(*scale > 0) || !since)
    throw ConfigurationError(concat("'", state.substr(0, 60), "' is no state of a loss scaler"));
  scale_ = *scale;
  since_ = static_cast<std::int64_t>(*since);
}

}  // namespace tessera
