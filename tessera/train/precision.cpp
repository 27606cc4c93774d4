#include "tessera/train/precision.h"

#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera {

namespace {

class Ours : public PrecisionPlugin {
 public:
  explicit Ours(Precision precision) : precision_(precision) {}
  std::string name() const override { return to_string(precision_); }

 private:
  const Precision precision_;
};

class Converting final : public Ours {
 public:
  Converting(Precision precision, at::ScalarType real) : Ours(precision), real_(real) {}

  void convert_modules(const NamedModules& modules, bool moves) override {
    const at::NoGradGuard no_grad;
    for (const NamedModule& m : modules) {
      for (const auto& item : m.module->named_parameters()) {
        const at::Tensor& p = item.value();
        const auto wanted = converted(p);
        if (wanted && !moves)
          throw InvalidArgument("precision ", name(), ", but '", m.name, ".", item.key(), "' is ",
                                p.scalar_type(),
                                ", and the strategy leaves modules as the user made them");
        if (wanted) p.set_data(p.to(*wanted));
      }
      if (!moves) continue;
      for (const at::Tensor& buffer : m.module->buffers())
        if (const auto wanted = converted(buffer)) buffer.set_data(buffer.to(*wanted));
    }
  }
  at::Tensor convert_input(const at::Tensor& tensor) const override {
    const auto wanted = converted(tensor);
    return wanted ? tensor.to(*wanted) : tensor;
  }

 private:
  // Absent where nothing is converted: integers, booleans, and what is of that width already. A
  // complex tensor keeps both of its parts.
  std::optional<at::ScalarType> converted(const at::Tensor& tensor) const {
    if (!tensor.defined()) return {};
    const at::ScalarType now = tensor.scalar_type();
    const at::ScalarType wanted = at::isComplexType(now) ? at::toComplexType(real_) : real_;
    if (now == wanted || !(at::isFloatingType(now) || at::isComplexType(now))) return {};
    return wanted;
  }

  const at::ScalarType real_;
};

class Mixed : public Ours {
 public:
  Mixed(Precision precision, at::ScalarType dtype) : Ours(precision), dtype_(dtype) {}
  // On this thread; what was set before comes back. The casts of parameters are made anew each
  // time, so that no two graphs share one.
  std::shared_ptr<void> forward_scope(c10::Device device) const override {
    namespace autocast = at::autocast;
    const c10::DeviceType type = device.type();
    auto as_before = c10::make_scope_exit([type, on = autocast::is_autocast_enabled(type),
                                           dtype = autocast::get_autocast_dtype(type)] {
      autocast::decrement_nesting();
      autocast::clear_cache();
      autocast::set_autocast_dtype(type, dtype);
      autocast::set_autocast_enabled(type, on);
    });
    autocast::set_autocast_enabled(type, true);
    autocast::set_autocast_dtype(type, dtype_);
    autocast::increment_nesting();
    return std::make_shared<decltype(as_before)>(std::move(as_before));
  }

 private:
  const at::ScalarType dtype_;
};

class ScaledMixed final : public Mixed {
 public:
  explicit ScaledMixed(const LossScalerOptions& options)
      : Mixed(Precision::float16_mixed, at::kHalf), scaler_(options) {}
  double loss_scale() const override { return scaler_.scale(); }
  bool skips_overflow() const override { return true; }
  void update(bool overflow) override { scaler_.update(overflow); }
  void add_state(CheckpointState& state, const std::string& prefix) override {
    state.set(prefix + "scaler", scaler_.state());
  }
  void restore(const CheckpointState& state, const std::string& prefix) override {
    if (state.has(prefix + "scaler")) scaler_.restore(state.get(prefix + "scaler"));
  }

 private:
  LossScaler scaler_;
};

}  // namespace

PrecisionPlugin::~PrecisionPlugin() = default;

constexpr const char* kPrecisionNames[] = {"as_is", "float32", "float64", "bfloat16_mixed",
                                           "float16_mixed"};

std::string to_string(Precision precision) {
  const auto i = static_cast<std::size_t>(precision);
  return i < std::size(kPrecisionNames) ? kPrecisionNames[i] : "?";
}

std::string to_string(const PrecisionChoice& choice) {
  if (const auto* ours = std::get_if<Precision>(&choice)) return to_string(*ours);
  const auto& own = std::get<std::shared_ptr<PrecisionPlugin>>(choice);
  return own ? own->name() : "none";
}

std::shared_ptr<PrecisionPlugin> make_precision(const PrecisionChoice& choice,
                                                const LossScalerOptions& scaler) {
  if (const auto* own = std::get_if<std::shared_ptr<PrecisionPlugin>>(&choice)) {
    if (!*own) throw InvalidArgument("SessionOptions::precision is a null pointer");
    if (std::find(std::begin(kPrecisionNames), std::end(kPrecisionNames), (*own)->name()) !=
        std::end(kPrecisionNames))
      throw InvalidArgument("a precision of one's own with the name '", (*own)->name(),
                            "', which is one of ours: a configuration file, and the ranks, "
                            "could not tell them apart; give it another");
    return *own;
  }
  switch (const Precision ours = std::get<Precision>(choice)) {
    case Precision::float32:
      return std::make_shared<Converting>(ours, at::kFloat);
    case Precision::float64:
      return std::make_shared<Converting>(ours, at::kDouble);
    case Precision::bfloat16_mixed:
      return std::make_shared<Mixed>(ours, at::kBFloat16);
    case Precision::float16_mixed:
      return std::make_shared<ScaledMixed>(scaler);
    case Precision::as_is:
      return std::make_shared<Ours>(ours);
  }
  throw InvalidArgument("SessionOptions::precision is none of Precision");
}

LossScaler::LossScaler(const LossScalerOptions& options)
    : options_(options), scale_(options.initial) {
  if (!(options.initial > 0) || !std::isfinite(options.initial) || !(options.growth >= 1) ||
      !(options.backoff > 0 && options.backoff < 1) || options.interval < 1 ||
      !(options.smallest > 0))
    throw InvalidArgument(
        "a loss scaler of ", options.initial, " that grows by ", options.growth, " after ",
        options.interval, " steps and shrinks by ", options.backoff, " down to ", options.smallest,
        ": scales are above 0, growth is at least 1, backoff between 0 and 1, interval above 0");
}

void LossScaler::update(bool overflow) {
  if (overflow) {
    scale_ *= options_.backoff;
    since_ = 0;
    if (scale_ < options_.smallest)
      throw Error("gradients overflow although the loss is scaled by ", scale_,
                  " only: the loss itself is not finite, or the model diverges");
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
    throw ConfigurationError("'", state.substr(0, 60), "' is no state of a loss scaler");
  scale_ = *scale;
  since_ = static_cast<std::int64_t>(*since);
}

}  // namespace tessera
