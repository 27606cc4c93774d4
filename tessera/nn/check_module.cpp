#include "tessera/nn/check_module.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/modules/dropout.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
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
  return refused.empty() && std::ranges::all_of(values, equal) &&
         std::ranges::all_of(gradients, equal);
}

std::string CheckReport::to_string(std::size_t most) const {
  TextStream text;
  text << (safe() ? "safe" : "NOT SAFE") << ": " << values.size() << " values and "
       << gradients.size() << " gradients compared with one process\n";
  const auto show = [&](const auto& all, const auto& line_of) {
    for (std::size_t i = 0; i < std::min(all.size(), most); ++i)
      text << "  " << line_of(all[i]) << "\n";
    if (all.size() > most)
      text << "  and " << all.size() - most << " more (to_string(" << all.size() << "))\n";
  };
  Checked differ;
  for (const auto* list_of : {&values, &gradients})
    std::ranges::copy_if(*list_of, std::back_inserter(differ),
                         [](const CheckedValue& v) { return !v.equal(); });
  std::ranges::stable_sort(differ, [](const CheckedValue& a, const CheckedValue& b) {
    return a.difference > b.difference;
  });
  show(differ, [](const CheckedValue& v) {
    return concat("differs: ", v.name, " by ", v.difference, " (tolerance ", v.tolerance, ")");
  });
  show(refused, [](const Refusal& r) { return concat("refused: ", r.why); });
  show(values, [](const CheckedValue& v) {
    return concat(v.name, " lies as ", v.placements ? list(*v.placements) : "a plain tensor");
  });
  double rounding = 0;
  for (const auto* list_of : {&values, &gradients})
    for (const CheckedValue& v : *list_of) rounding = std::max(rounding, v.rounding.value_or(0));
  if (rounding > 0)
    text << "  as on one process in float64; rounded differently in its own dtype, by up to "
         << rounding << "\n";
  text << "  this rank sends " << forward_bytes << " bytes in forward, " << backward_bytes
       << " in backward\n";
  return text.str();
}

namespace {

// A difference between ranks would read as one of the module.
void require_same(const torch::nn::Module& module, const Tensors& inputs, const Group& ranks) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (std::size_t i = 0; i < inputs.size(); ++i) all.emplace_back(concat("input ", i), inputs[i]);
  for (const auto& p : module.named_parameters())
    all.emplace_back(concat("parameter '", p.key(), "'"), p.value());
  for (const auto& b : module.named_buffers())
    all.emplace_back(concat("buffer '", b.key(), "'"), b.value());
  std::erase_if(all, [](const auto& named) {
    return !named.second.defined() || is_sharded(named.second) ||
           named.second.layout() != at::kStrided;
  });
  const auto hashes = agree::all<std::vector<std::uint64_t>>(
      ranks, "check_module",
      [&] {
        std::vector<std::uint64_t> mine;
        for (const auto& [name, t] : all) {
          Hash hash;
          hash.number(static_cast<std::uint64_t>(t.scalar_type()));
          for (const auto n : t.sizes()) hash.number(static_cast<std::uint64_t>(n));
          const at::Tensor bits = t.detach().cpu().resolve_conj().resolve_neg().contiguous();
          mine.push_back(hash.bytes(bits.const_data_ptr(), bits.nbytes()).value());
        }
        return mine;
      },
      {.name = "check_module"});
  for (std::size_t r = 1; r < hashes.size(); ++r) {
    if (hashes[r] == hashes[0]) continue;
    std::size_t at = 0;
    const std::size_t both = std::min(hashes[r].size(), hashes[0].size());
    while (at < both && hashes[r][at] == hashes[0][at]) ++at;
    throw MismatchError("check_module: ", at < all.size() ? all[at].first : "the module",
                        " differs between ranks ", ranks.ranks()[0], " and ", ranks.ranks()[r],
                        ": give all ranks the same module and inputs, drawn with one seed "
                        "(torch::manual_seed), or loaded from one file");
  }
}

CheckReport checked_once(const torch::nn::Module& module, const ModuleCall& call,
                         const Tensors& inputs, const DeviceMesh& mesh, const ModuleRule& rule,
                         const CheckOptions& options) {
  const auto alone = module.clone(), spread = module.clone();
  switch_dropout_off(*alone);
  switch_dropout_off(*spread);
  distribute_module(*spread, mesh, rule);
  Tensors plain, sharded;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor value = inputs[i].detach();
    const bool gradient = options.gradients && (value.is_floating_point() || value.is_complex());
    plain.push_back(value.clone().requires_grad_(gradient));
    sharded.push_back(distribute_tensor(value.clone(), mesh, placements_of(value, i, mesh, options))
                          .detach()
                          .requires_grad_(gradient));
  }
  CheckReport report;
  const Tensors expected = call(*alone, plain);
  const DistributedManager& manager = mesh.manager();
  // The policy of moves is the program's own affair: here they are counted. A plain tensor that
  // differs by rank is a fault of any program.
  const Policies before = policies(manager);
  Policies allow = before;
  allow.redistribution = Policy::allow;
  allow.plain_values = Policy::error;
  set_policies(manager, allow);
  const auto restore = c10::make_scope_exit([&] { set_policies(manager, before); });
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

bool rounds(const CheckedValue& v) {
  return !v.equal() && std::isfinite(v.difference) && v.tolerance > usual_tolerance(at::kDouble);
}

// Both sides of a rounded value may be off: it is wrong if it differs in float64 too, which rounds
// a billion times less. A module that does not run in float64 is judged as it is.
void judge_in_float64(CheckReport& report, const torch::nn::Module& module, const ModuleCall& call,
                      const Tensors& inputs, const DeviceMesh& mesh, const ModuleRule& rule,
                      const CheckOptions& options) {
  const auto wide_module = module.clone();
  wide_module->to(at::kDouble);
  Tensors wide;
  for (const at::Tensor& t : inputs)
    wide.push_back(at::isComplexType(t.scalar_type())    ? t.to(at::kComplexDouble)
                   : at::isFloatingType(t.scalar_type()) ? t.to(at::kDouble)
                                                         : t);
  try {
    const at::NoGradGuard no_grad;
    call(*wide_module->clone(), wide);
  } catch (const std::exception&) {  // on all ranks, which have the same module and inputs
    return;
  }
  const CheckReport reference = checked_once(*wide_module, call, wide, mesh, rule, options);
  const auto judge = [](Checked& values, const Checked& judges) {
    for (CheckedValue& v : values) {
      const auto found =
          std::ranges::find_if(judges, [&](const CheckedValue& j) { return j.name == v.name; });
      // Buffers that are equal are not listed.
      const bool known = found != judges.end();
      if (!rounds(v) || (known ? !found->equal() : !v.name.starts_with("buffer "))) continue;
      v.rounding = v.difference;
      v.difference = known ? found->difference : 0;
      v.tolerance = usual_tolerance(at::kDouble);
    }
  };
  judge(report.values, reference.values);
  judge(report.gradients, reference.gradients);
}

}  // namespace

CheckReport check_module(const torch::nn::Module& module, const ModuleCall& call,
                         const Tensors& inputs, const DeviceMesh& mesh, const ModuleRule& rule,
                         const CheckOptions& options) {
  if (!call) throw InvalidArgument("check_module: there is no call to run the module by");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) throw InvalidArgument("check_module: input ", i, " is undefined");
  }
  if (options.placements.size() > 1 && options.placements.size() != inputs.size())
    throw InvalidArgument("check_module: ", options.placements.size(),
                          " entries of placements for ", inputs.size(), " inputs");
  require_same(module, inputs, mesh.all());
  CheckReport report = checked_once(module, call, inputs, mesh, rule, options);
  // The differences are the same on all ranks.
  if (!options.tolerance &&
      (std::ranges::any_of(report.values, rounds) || std::ranges::any_of(report.gradients, rounds)))
    judge_in_float64(report, module, call, inputs, mesh, rule, options);
  return report;
}

}  // namespace tessera
