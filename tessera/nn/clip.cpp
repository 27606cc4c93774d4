#include "tessera/nn/clip.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "tessera/base/internal/vector.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

namespace {

constexpr double kRoundOff = 1e-5;

/// A norm by its order: a root of a sum of powers, or the largest magnitude.
struct Norm {
  double type;
  bool largest() const { return std::isinf(type); }
  ReduceOp op() const { return largest() ? ReduceOp::max : ReduceOp::sum; }
  double add(double a, double b) const {
    if (!largest()) return a + b;
    // std::max drops a NaN in its second argument.
    return std::isnan(a) || std::isnan(b) ? std::nan("") : std::max(a, b);
  }
  double of(const at::Tensor& given) const {
    const at::Tensor local = given.is_sparse() ? given.coalesce()._values() : given;
    if (local.numel() == 0) return 0;
    const at::Tensor wide =
        at::abs(local.is_complex() ? local.to(at::kComplexDouble) : local.to(at::kDouble));
    const at::Tensor value = largest()   ? wide.max()
                             : type == 2 ? wide.square().sum()
                                         : wide.pow(type).sum();
    return value.item<double>();
  }
  double root(double sum) const {
    return largest() ? sum : type == 2 ? std::sqrt(sum) : std::pow(sum, 1 / type);
  }
};

/// A sum over this rank's elements, to be added over one group.
struct GroupSum {
  Group group;
  double sum = 0;
};

/// The parameters, each once: a tied one is given under each of its names. Throws InvalidArgument
/// if the arguments contradict.
std::vector<at::Tensor> checked(const std::vector<at::Tensor>& given, const ClipOptions& options,
                                const std::vector<OwnedShard>& by_hand) {
  if (!(options.max_norm > 0)) {
    throw InvalidArgument("clip_gradients: max_norm is ", options.max_norm,
                          ", but must be above 0");
  }
  if (!(options.norm_type >= 1)) {
    throw InvalidArgument("clip_gradients: norm_type is ", options.norm_type,
                          ", but must be at least 1");
  }
  std::vector<at::Tensor> parameters;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& p : given) {
    if (!p.defined()) throw InvalidArgument("clip_gradients: a parameter is undefined");
    if (seen.insert(p.unsafeGetTensorImpl()).second) parameters.push_back(p);
  }
  for (const OwnedShard& owned : by_hand) {
    const bool known = std::ranges::any_of(
        parameters, [&](const at::Tensor& p) { return p.is_same(owned.parameter); });
    if (!known || is_sharded(owned.parameter)) {
      throw InvalidArgument(
          "clip_gradients: a parameter sharded by hand is a plain tensor among the parameters "
          "given");
    }
  }
  return parameters;
}

/// What this rank's gradients add up to, by the group to add over.
struct Sums {
  const Norm norm;
  double replicated = 0;
  // In the order in which the parameters first name a group, which all ranks share. A parameter
  // takes part whether or not this rank has a gradient of it: the calls must be the same.
  std::vector<GroupSum> over{};

  void add(const at::Tensor& p, const std::vector<OwnedShard>& by_hand) {
    at::Tensor gradient = p.grad();
    std::optional<Group> group;  // none: the gradient is replicated
    const auto hand = std::ranges::find_if(
        by_hand, [&](const OwnedShard& owned) { return p.is_same(owned.parameter); });
    if (hand != by_hand.end()) {
      group = hand->group;
    } else if (is_sharded(p)) {
      // After backward a gradient has its parameter's placements.
      const ShardSpec where = spec(p);
      if (gradient.defined() && !(is_sharded(gradient) && spec(gradient) == where)) {
        throw ShardingError(
            "clip_gradients: the gradient of a parameter that lies as ", where, " lies as ",
            is_sharded(gradient) ? spec(gradient).to_string() : std::string("a plain tensor"),
            ": clip after the backward that reduces it, outside no_sync()");
      }
      if (gradient.defined()) gradient = to_local(gradient);
      const auto axes =
          numbers_below(where.mesh_dims(), [&](int a) { return where.placements()[a].is_shard(); });
      if (!axes.empty()) group = where.mesh().group(axes);
    }
    const double mine = gradient.defined() ? norm.of(gradient) : 0;
    if (!group) {
      replicated = norm.add(replicated, mine);
      return;
    }
    auto it = std::ranges::find_if(over, [&](const GroupSum& s) { return s.group == *group; });
    if (it == over.end()) it = over.insert(over.end(), GroupSum{*group, 0});
    it->sum = norm.add(it->sum, mine);
  }
};

/// The norm, which is one number for all, or an error on all: a rank that scales by another factor
/// drifts in silence.
double compared(double mine, const Group& group) {
  at::Tensor bounds = at::tensor({mine, -mine}, at::kDouble);
  if (std::isnan(mine)) bounds.fill_(std::numeric_limits<double>::infinity());
  if (group.size() > 1)
    group.all_reduce(bounds, ReduceOp::max, {.name = "gradient norm, compared"});
  const double largest = bounds[0].item<double>(), smallest = -bounds[1].item<double>();
  if (!std::isfinite(largest) || !std::isfinite(smallest)) {
    return std::numeric_limits<double>::infinity();
  }
  if (largest - smallest > kRoundOff * largest) {
    throw MismatchError(
        "clip_gradients: the norm is ", smallest, " on one rank of group '", group.name(), "' and ",
        largest, " on another (", mine,
        " here): declare parameters that are sharded by hand (by_hand), or look for replicas "
        "that have drifted apart");
  }
  return largest;
}

}  // namespace

double clip_gradients(const std::vector<at::Tensor>& given, const Group& group,
                      const ClipOptions& options, const std::vector<OwnedShard>& by_hand) {
  const std::vector<at::Tensor> parameters = checked(given, options, by_hand);
  const at::NoGradGuard no_grad;
  Sums sums{Norm{options.norm_type}};
  const Norm& norm = sums.norm;
  for (const at::Tensor& p : parameters) {
    if (std::ranges::none_of(options.elsewhere,
                             [&](const at::Tensor& other) { return p.is_same(other); }))
      sums.add(p, by_hand);
  }
  double sum = sums.replicated;
  const auto over = [&](const Group& ranks, double mine) {
    if (ranks.size() == 1) return mine;
    at::Tensor value = at::full({1}, mine, at::kDouble);
    ranks.all_reduce(value, norm.op(), {.name = "gradient norm"});
    return value.item<double>();
  };
  for (const GroupSum& s : sums.over) sum = norm.add(sum, over(s.group, s.sum));
  if (options.disjoint) sum = over(*options.disjoint, sum);
  const double largest = compared(norm.root(sum), group);
  if (std::isfinite(largest) && largest > options.max_norm) {
    const double factor = options.max_norm / largest;
    for (const at::Tensor& p : parameters) {
      if (p.grad().defined()) p.grad().mul_(factor);
    }
  }
  return largest;
}

}  // namespace tessera
