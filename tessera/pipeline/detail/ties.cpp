#include "tessera/pipeline/detail/pipeline_state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>

#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/parameter_source.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail {
namespace {

// What all that hold the parameter must have in common.
std::string description(const at::Tensor& t) {
  return is_sharded(t) ? concat(t.scalar_type(), ' ', spec(t))
                       : concat(t.scalar_type(), ' ', t.sizes());
}

// The gradient as the parameter lies: within no_sync() it may be a sum that is still to be reduced.
at::Tensor gradient_of(const at::Tensor& parameter) {
  at::Tensor grad = parameter.grad();
  if (!grad.defined()) return grad;
  if (is_sharded(parameter)) {
    if (!(spec(grad) == spec(parameter))) grad = redistribute(grad, spec(parameter));
    return local_values(grad);
  }
  return grad.layout() == at::kStrided ? grad : grad.to_dense();
}

std::string problem_of(const std::string& name, const std::vector<at::Tensor>& tensors) {
  if (name.find('\n') != std::string::npos || name.find('\t') != std::string::npos)
    return "the name of tied parameters holds a line break or a tab";
  if (tensors.empty()) return concat("tied parameter '", name, "': no tensor is given");
  for (const at::Tensor& t : tensors) {
    if (!t.defined() || !t.is_leaf() || !t.requires_grad() || t.layout() != at::kStrided ||
        (!is_sharded(t) && !t.has_storage()))
      return concat("tied parameter '", name, "' is no dense leaf that requires grad");
    if (description(t) != description(tensors[0]))
      return concat("tied parameter '", name, "' is ", description(tensors[0]), " and ",
                    description(t));
  }
  return "";
}

}  // namespace

TiedParameters::TiedParameters(const PipelinePlan& plan) {
  const Group group = plan.group();
  std::string mine, problem;
  for (const auto& [name, tensors] : plan.options.tied) {
    if (problem.empty()) problem = problem_of(name, tensors);
    if (problem.empty()) mine += concat(name, '\t', description(tensors[0]), '\n');
  }
  const auto all = group.all_gather_bytes(mine, {.name = "tied parameters"});
  // By name: what it is, and the positions that hold one.
  std::map<std::string, std::pair<std::string, std::vector<int>>> found;
  for (std::size_t r = 0; r < all.size(); ++r) {
    TextReader lines(all[r]);
    for (std::string line; std::getline(lines, line);) {
      const auto tab = line.find('\t');
      const std::string name = line.substr(0, tab), what = line.substr(tab + 1);
      auto& tie = found.try_emplace(name, what, std::vector<int>()).first->second;
      if (tie.first != what && problem.empty())
        problem = concat("tied parameter '", name, "' is ", tie.first, " on one rank and ", what,
                         " on rank ", group.ranks()[r],
                         ": all must have one shape and dtype, and be sharded alike (give it a "
                         "unit of its own, or shard it evenly)");
      tie.second.push_back(static_cast<int>(r));
    }
  }
  agree::all(plan.mesh.all(), "pipeline", [&] {
    if (!problem.empty()) throw InvalidArgument(problem);
  });
  const at::NoGradGuard no_grad;
  for (const auto& [name, tie] : found) {
    const auto given = plan.options.tied.find(name);
    if (given == plan.options.tied.end()) continue;
    Tie one{given->second, {}, tie.second.front() == plan.rank};
    for (const int position : tie.second) one.ranks.push_back(group.ranks()[position]);
    if (one.ranks.size() > 1)
      plan.mesh.manager().group(one.ranks).broadcast(local_values(one.mine[0]), 0,
                                                     {.name = "tied parameters"});
    for (std::size_t i = 1; i < one.mine.size(); ++i)
      local_values(one.mine[i]).copy_(local_values(one.mine[0]));
    for (const at::Tensor& t : one.mine) wrote_shard(t);
    ties_.push_back(std::move(one));
  }
}

void TiedParameters::begin() const {
  for (const at::Tensor& t : repeated()) t.mutable_grad().reset();
}

void TiedParameters::sum(const PipelinePlan& plan) const {
  const at::NoGradGuard no_grad;
  for (const Tie& tie : ties_) {
    // The values, and whether there are any.
    const at::Tensor p = local_values(tie.mine[0]);
    const at::Tensor flat = at::zeros({p.numel() + 1}, p.options());
    const at::Tensor values = flat.narrow(0, 0, p.numel()).view(p.sizes());
    const at::Tensor flag = flat.narrow(0, p.numel(), 1);
    for (std::size_t i = 0; i < tie.mine.size(); ++i) {
      const at::Tensor& one = tie.mine[i];
      bool again = false;
      for (std::size_t j = 0; j < i; ++j) again = again || one.is_same(tie.mine[j]);
      if (again || !one.grad().defined()) continue;
      values.add_(gradient_of(one));
      flag.fill_(1);
    }
    if (tie.ranks.size() > 1)
      plan.mesh.manager().group(tie.ranks).all_reduce(flat, ReduceOp::sum,
                                                      {.name = "tied gradients"});
    if (flag.item<double>() == 0) continue;
    for (const at::Tensor& one : tie.mine) {
      if (is_sharded(one))
        one.mutable_grad() = from_local(values.clone(), spec(one));
      else if (one.grad().defined() && one.grad().layout() == at::kStrided)
        one.mutable_grad().copy_(values);
      else
        one.mutable_grad() = values.clone();
    }
  }
}

std::vector<at::Tensor> TiedParameters::repeated() const {
  std::vector<at::Tensor> all;
  for (const Tie& tie : ties_) {
    for (std::size_t i = 0; i < tie.mine.size(); ++i) {
      const bool counted = tie.first && tie.mine[i].is_same(tie.mine[0]);
      if (!counted) all.push_back(tie.mine[i]);
    }
  }
  return all;
}

}  // namespace tessera::detail
