#include "tessera/pipeline/detail/ties.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>

#include "tessera/base/text.h"

namespace tessera::detail {
namespace {

std::string problem_of(const std::string& name, const std::vector<at::Tensor>& tensors) {
  if (name.find('\n') != std::string::npos || name.find('\t') != std::string::npos)
    return "the name of tied parameters holds a line break or a tab";
  if (tensors.empty()) return concat("tied parameter '", name, "': no tensor is given");
  for (const at::Tensor& t : tensors) {
    if (!t.defined() || !t.is_leaf() || !t.requires_grad() || t.layout() != at::kStrided ||
        !t.has_storage())
      return concat("tied parameter '", name, "' is no dense leaf that requires grad");
    if (t.sizes() != tensors[0].sizes() || t.scalar_type() != tensors[0].scalar_type())
      return concat("tied parameter '", name, "' has tensors of shapes ", tensors[0].sizes(),
                    " and ", t.sizes(), ", or of different dtypes");
  }
  return "";
}

}  // namespace

TiedParameters::TiedParameters(const PipelinePlan& plan) {
  const Group group = plan.group();
  std::string mine, problem;
  for (const auto& [name, tensors] : plan.options.tied) {
    if (problem.empty()) problem = problem_of(name, tensors);
    if (problem.empty())
      mine += concat(name, '\t', tensors[0].scalar_type(), ' ', tensors[0].sizes(), '\n');
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
                         " on rank ", group.ranks()[r]);
      tie.second.push_back(static_cast<int>(r));
    }
  }
  throw_together(plan.mesh.all(), problem);
  const at::NoGradGuard no_grad;
  for (const auto& [name, tie] : found) {
    const auto given = plan.options.tied.find(name);
    if (given == plan.options.tied.end()) continue;
    Tie one{name, given->second, {}, tie.second.front() == plan.rank};
    for (const int position : tie.second) one.ranks.push_back(group.ranks()[position]);
    if (one.ranks.size() > 1)
      plan.mesh.manager().group(one.ranks).broadcast(one.mine[0].detach(), 0,
                                                     {.name = "tied parameters"});
    for (std::size_t i = 1; i < one.mine.size(); ++i) one.mine[i].copy_(one.mine[0]);
    ties_.push_back(std::move(one));
  }
}

void TiedParameters::begin() const {
  for (const Tie& tie : ties_) {
    for (std::size_t i = tie.first ? 1 : 0; i < tie.mine.size(); ++i) {
      if (!tie.mine[i].is_same(tie.mine[0]) || !tie.first) tie.mine[i].mutable_grad().reset();
    }
  }
}

void TiedParameters::sum(const PipelinePlan& plan) const {
  const at::NoGradGuard no_grad;
  for (const Tie& tie : ties_) {
    // The values, and whether there are any.
    const at::Tensor& p = tie.mine[0];
    const at::Tensor flat = at::zeros({p.numel() + 1}, p.options());
    const at::Tensor values = flat.narrow(0, 0, p.numel()).view(p.sizes());
    const at::Tensor flag = flat.narrow(0, p.numel(), 1);
    for (std::size_t i = 0; i < tie.mine.size(); ++i) {
      const at::Tensor& one = tie.mine[i];
      bool again = false;
      for (std::size_t j = 0; j < i; ++j) again = again || one.is_same(tie.mine[j]);
      if (again || !one.grad().defined()) continue;
      values.add_(one.grad().layout() == at::kStrided ? one.grad() : one.grad().to_dense());
      flag.fill_(1);
    }
    if (tie.ranks.size() > 1)
      plan.mesh.manager().group(tie.ranks).all_reduce(flat, ReduceOp::sum,
                                                      {.name = "tied gradients"});
    if (flag.item<double>() == 0) continue;
    for (const at::Tensor& one : tie.mine) {
      if (one.grad().defined() && one.grad().layout() == at::kStrided)
        one.mutable_grad().copy_(values);
      else
        one.mutable_grad() = values.clone();
    }
  }
}

}  // namespace tessera::detail
