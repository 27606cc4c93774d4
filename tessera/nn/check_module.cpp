#include "tessera/nn/check_module.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/modules/dropout.h>

#include <algorithm>
#include <limits>
#include <locale>
#include <sstream>

#include "tessera/base/text.h"
#include "tessera/comm/group/trace.h"
#include "tessera/comm/job/manager.h"
#include "tessera/tensor/policy.h"

namespace tessera {

namespace {

using Tensors = std::vector<at::Tensor>;

double usual_tolerance(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
    case at::kComplexDouble:
      return 1e-10;
    case at::kFloat:
    case at::kComplexFloat:
      return 1e-4;
    case at::kHalf:
      return 2e-2;
    case at::kBFloat16:
      return 1.2e-1;
    default:
      return 0;
  }
}

at::Tensor whole_value(const at::Tensor& t) {
  return is_sharded(t) ? full_tensor(t.detach()) : t.detach();
}

double largest_of(const at::Tensor& t) {
  if (!t.defined() || t.numel() == 0) return 0;
  const at::Tensor size = whole_value(t).abs().to(at::kDouble);
  return at::where(at::isfinite(size), size, at::zeros_like(size)).max().item<double>();
}

// `floor`: the least that a difference is measured by.
double relative_difference(const at::Tensor& got, const at::Tensor& expected, double floor) {
  constexpr double kDiffers = std::numeric_limits<double>::infinity();
  at::Tensor a = whole_value(got), b = whole_value(expected);
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return kDiffers;
  if (a.numel() == 0) return 0;
  if (a.is_complex()) {
    a = at::view_as_real(a.resolve_conj());
    b = at::view_as_real(b.resolve_conj());
  }
  a = a.to(at::kDouble);
  b = b.to(at::kDouble);
  if (!at::isnan(a).equal(at::isnan(b))) return kDiffers;
  const at::Tensor same = a.eq(b).logical_or(at::isnan(b));
  const double off = at::where(same, at::zeros_like(a), (a - b).abs()).max().item<double>();
  if (off == 0) return 0;
  return off / std::max({largest_of(b), floor, 1e-30});
}

CheckedValue compared(const std::string& name, const at::Tensor& got, const at::Tensor& expected,
                      const CheckOptions& options, double floor = 0) {
  if (got.defined() != expected.defined())
    return {concat(name, got.defined() ? " (not on one process)" : " (missing)"),
            std::numeric_limits<double>::infinity(), 0, std::nullopt};
  if (!got.defined()) return {name, 0, 0, std::nullopt};
  return {name, relative_difference(got, expected, floor),
          options.tolerance.value_or(usual_tolerance(expected.scalar_type())),
          is_sharded(got) ? std::optional(placements(got)) : std::nullopt};
}

// A number that every element of every output counts in, each with another weight.
at::Tensor weighted_loss(const Tensors& outputs) {
  at::Tensor loss;
  for (const at::Tensor& t : outputs) {
    if (!t.defined() || !t.requires_grad()) continue;
    const at::Tensor real = t.is_complex() ? at::view_as_real(t.resolve_conj()) : t;
    const at::Tensor term = (real * real.detach().cos()).sum();
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

bool has_gradient(const at::Tensor& t) {
  return at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type());
}

void switch_dropout_off(torch::nn::Module& module) {
  using namespace torch::nn;
  for (const auto& m : module.modules()) {
    if (m->as<Dropout>() || m->as<Dropout2d>() || m->as<Dropout3d>() || m->as<AlphaDropout>() ||
        m->as<FeatureAlphaDropout>())
      m->eval();
  }
}

std::vector<Placement> placements_of(const at::Tensor& input, std::size_t i, const DeviceMesh& mesh,
                                     const CheckOptions& options) {
  if (!options.placements.empty())
    return options.placements.size() == 1 ? options.placements[0] : options.placements[i];
  std::vector<Placement> first(mesh.mesh().axes().size());
  if (input.dim() > 0) first[0] = Shard(0);
  return first;
}

// The policy of moves is the program's own affair: here they are counted. A plain tensor that
// differs by rank is a fault of any program.
class AllowMoves {
 public:
  explicit AllowMoves(const DistributedManager& manager)
      : manager_(manager), before_(policies(manager)) {
    Policies allow = before_;
    allow.redistribution = Policy::allow;
    allow.plain_values = Policy::error;
    set_policies(manager_, allow);
  }
  ~AllowMoves() { set_policies(manager_, before_); }
  AllowMoves(const AllowMoves&) = delete;
  AllowMoves& operator=(const AllowMoves&) = delete;

 private:
  const DistributedManager manager_;
  const Policies before_;
};

std::int64_t bytes_of(const CommTraceScope& trace) {
  std::int64_t sum = 0;
  for (const CommEvent& e : trace->events()) sum += e.bytes;
  return sum;
}

using Checked = std::vector<CheckedValue>;

// What differs on one rank alone, a plain output or a value that ranks did not share, differs.
void share_differences(const std::vector<Checked*>& lists, const DeviceMesh& mesh) {
  std::vector<double*> all;
  for (Checked* values : lists)
    for (CheckedValue& v : *values) all.push_back(&v.difference);
  const Group ranks = mesh.all();
  if (ranks.size() == 1 || all.empty()) return;
  const at::Tensor shared = at::zeros({static_cast<std::int64_t>(all.size())}, at::kDouble);
  auto* at = shared.data_ptr<double>();
  for (std::size_t i = 0; i < all.size(); ++i) at[i] = *all[i];
  ranks.all_reduce(shared, ReduceOp::max, {.name = "check_module"});
  for (std::size_t i = 0; i < all.size(); ++i) *all[i] = at[i];
}

// Running statistics and the like, as forward has left them.
Checked compared_buffers(const torch::nn::Module& alone, const torch::nn::Module& spread,
                         const CheckOptions& options) {
  Checked buffers;
  const auto got = spread.named_buffers();
  for (const auto& b : alone.named_buffers())
    buffers.push_back(compared(concat("buffer ", b.key()), got[b.key()], b.value(), options));
  return buffers;
}

void compare_gradients(CheckReport& report, const Tensors& plain, const Tensors& sharded,
                       const torch::nn::Module& alone, const torch::nn::Module& spread,
                       const CheckOptions& options) {
  const auto expected = alone.named_parameters();
  // A gradient that is zero but for rounding (a bias before a batch norm) is measured by a
  // thousandth of the largest of all.
  double floor = 0;
  for (const at::Tensor& t : plain) floor = std::max(floor, 1e-3 * largest_of(t.grad()));
  for (const auto& p : expected) floor = std::max(floor, 1e-3 * largest_of(p.value().grad()));
  const auto add = [&](const std::string& name, const at::Tensor& a, const at::Tensor& b) {
    if (a.grad().defined() || b.grad().defined())
      report.gradients.push_back(compared(name, b.grad(), a.grad(), options, floor));
  };
  for (std::size_t i = 0; i < plain.size(); ++i)
    add(concat("gradient of input ", i), plain[i], sharded[i]);
  const auto got = spread.named_parameters();
  for (const auto& p : expected) add(concat("gradient of ", p.key()), p.value(), got[p.key()]);
}

}  // namespace

bool CheckReport::safe() const {
  const auto equal = [](const CheckedValue& v) { return v.equal(); };
  return refused.empty() && std::all_of(values.begin(), values.end(), equal) &&
         std::all_of(gradients.begin(), gradients.end(), equal);
}

std::string CheckReport::to_string() const {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << (safe() ? "safe" : "NOT SAFE") << ": " << values.size() << " values and "
       << gradients.size() << " gradients compared with one process\n";
  for (const auto* list_of : {&values, &gradients}) {
    for (const CheckedValue& v : *list_of) {
      if (!v.equal())
        text << "  differs: " << v.name << " by " << v.difference << " (tolerance " << v.tolerance
             << ")\n";
    }
  }
  for (const Refusal& r : refused) text << "  refused: " << r.why << "\n";
  for (const CheckedValue& v : values)
    text << "  " << v.name << " lies as " << (v.placements ? list(*v.placements) : "a plain tensor")
         << "\n";
  text << "  this rank sends " << forward_bytes << " bytes in forward, " << backward_bytes
       << " in backward\n";
  return text.str();
}

CheckReport check_module(const torch::nn::Module& module, const ModuleCall& call,
                         const Tensors& inputs, const DeviceMesh& mesh, const ModuleRule& rule,
                         const CheckOptions& options) {
  if (!call) throw InvalidArgument("check_module: there is no call to run the module by");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined())
      throw InvalidArgument(concat("check_module: input ", i, " is undefined"));
  }
  if (options.placements.size() > 1 && options.placements.size() != inputs.size())
    throw InvalidArgument(concat("check_module: ", options.placements.size(),
                                 " entries of placements for ", inputs.size(), " inputs"));
  const auto alone = module.clone(), spread = module.clone();
  switch_dropout_off(*alone);
  switch_dropout_off(*spread);
  distribute_module(*spread, mesh, rule);
  Tensors plain, sharded;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool gradient = options.gradients && has_gradient(inputs[i]);
    const at::Tensor value = inputs[i].detach();
    plain.push_back(value.clone().requires_grad_(gradient));
    sharded.push_back(distribute_tensor(value.clone(), mesh, placements_of(value, i, mesh, options))
                          .detach()
                          .requires_grad_(gradient));
  }
  CheckReport report;
  const Tensors expected = call(*alone, plain);
  const DistributedManager& manager = mesh.manager();
  const AllowMoves allow(manager);
  const RefusalScope refusals(manager);
  Tensors got;
  {
    const CommTraceScope trace(manager);
    got = call(*spread, sharded);
    report.forward_bytes = bytes_of(trace);
  }
  for (std::size_t i = 0; i < std::max(expected.size(), got.size()); ++i)
    report.values.push_back(compared(expected.size() == 1 ? "output" : concat("output ", i),
                                     i < got.size() ? got[i] : at::Tensor(),
                                     i < expected.size() ? expected[i] : at::Tensor(), options));
  const at::Tensor loss = options.gradients ? weighted_loss(expected) : at::Tensor();
  const at::Tensor sharded_loss = options.gradients ? weighted_loss(got) : at::Tensor();
  if (loss.defined()) loss.backward();
  if (sharded_loss.defined()) {
    const CommTraceScope trace(manager);
    sharded_loss.backward();
    report.backward_bytes = bytes_of(trace);
  }
  if (loss.defined() || sharded_loss.defined())
    compare_gradients(report, plain, sharded, *alone, *spread, options);
  Checked buffers = compared_buffers(*alone, *spread, options);
  share_differences({&report.values, &report.gradients, &buffers}, mesh);
  for (const CheckedValue& b : buffers) {
    if (!b.equal()) report.values.push_back(b);
  }
  report.refused = refusals.refusals();
  return report;
}

}  // namespace tessera
