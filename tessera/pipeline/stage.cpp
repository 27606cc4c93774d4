#include "tessera/pipeline/stage.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/gradient/sync.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/distribute_module.h"

namespace tessera {

PipelineStage::~PipelineStage() = default;

std::vector<NamedTensor> PipelineStage::tensors() const {
  std::vector<NamedTensor> all;
  for (const auto& p : parameters()) all.push_back({concat("parameter ", all.size()), p, true});
  for (const auto& b : buffers()) all.push_back({concat("buffer ", all.size()), b, false});
  return all;
}

void PipelineStage::reduce() {
  for (const auto& sync : gradient_syncs(parameters())) {
    if (sync->syncing()) sync->reduce();
  }
}

namespace {

class ModuleStage final : public PipelineStage {
 public:
  ModuleStage(std::shared_ptr<torch::nn::Module> module, StageFunction forward,
              const StageOptions& options)
      : module_(std::move(module)), forward_(std::move(forward)), options_(options) {
    if (!module_ || !forward_)
      throw InvalidArgument("make_stage: a stage needs a module and what computes its forward");
    if (!options_.gather != !options_.release)
      throw InvalidArgument("make_stage: give both gather and release, or none");
  }
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) override {
    return forward_(inputs);
  }
  std::vector<at::Tensor> parameters() const override {
    return filtered(module_->parameters(), [](const at::Tensor& p) { return p.requires_grad(); });
  }
  std::vector<at::Tensor> buffers() const override { return module_->buffers(); }
  std::vector<NamedTensor> tensors() const override { return named_tensors(*module_); }
  bool recomputes() const override { return options_.recompute; }
  bool sharded() const override { return static_cast<bool>(options_.gather); }
  void gather() override { options_.gather(*module_); }
  void release() override { options_.release(*module_); }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  StageFunction forward_;
  StageOptions options_;
};

}  // namespace

void detail::require_one(std::size_t inputs) {
  if (inputs != 1)
    throw InvalidArgument("the stage's module takes one tensor and is given ", inputs,
                          "; give make_stage a function of the list, or the module a "
                          "forward that takes one");
}

std::shared_ptr<PipelineStage> make_stage(std::shared_ptr<torch::nn::Module> module,
                                          StageFunction forward, const StageOptions& options) {
  return std::make_shared<ModuleStage>(std::move(module), std::move(forward), options);
}

std::vector<torch::nn::Sequential> split_sequential(const torch::nn::Sequential& net,
                                                    const std::vector<int>& cuts) {
  const auto children = net->named_children();
  const int count = static_cast<int>(children.size());
  std::vector<int> ends = cuts;
  ends.push_back(count);
  std::vector<torch::nn::Sequential> stages;
  int begin = 0;
  for (const int end : ends) {
    if (end <= begin || end > count)
      throw InvalidArgument("cuts ", list(cuts), " of a Sequential with ", count,
                            " children: each must be above the one before, and below ", count);
    torch::nn::Sequential stage;
    for (auto child = net->begin() + begin; child != net->begin() + end; ++child)
      stage->push_back(children[static_cast<std::size_t>(child - net->begin())].key(), *child);
    stages.push_back(std::move(stage));
    begin = end;
  }
  return stages;
}

std::vector<torch::nn::Sequential> split_sequential(const torch::nn::Sequential& net,
                                                    const std::vector<std::string>& names) {
  const std::vector<std::string> children = net->named_children().keys();
  std::vector<int> cuts;
  for (const std::string& name : names) {
    const auto at = std::ranges::find(children, name);
    if (at == children.end())
      throw InvalidArgument("the Sequential has no child '", name, "'; there are ", list(children));
    cuts.push_back(static_cast<int>(at - children.begin()));
  }
  return split_sequential(net, cuts);
}

std::vector<int> balanced_cuts(const std::vector<double>& costs, int stages) {
  const int count = static_cast<int>(costs.size());
  if (stages < 1 || stages > count)
    throw InvalidArgument(stages, " stages of ", count, " children; give 1 to ", count);
  for (const double c : costs) {
    if (!std::isfinite(c) || c < 0)
      throw InvalidArgument("a cost of ", c, "; costs must be finite and at least 0");
  }
  // best[s][i]: the smallest largest sum of the first i children in s stages.
  std::vector<double> sum(static_cast<std::size_t>(count) + 1, 0.0);
  for (int i = 0; i < count; ++i) sum[i + 1] = sum[i] + costs[i];
  const double none = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> best(stages + 1, std::vector<double>(count + 1, none));
  std::vector<std::vector<int>> from(stages + 1, std::vector<int>(count + 1, 0));
  best[0][0] = 0;
  for (int s = 1; s <= stages; ++s) {
    for (int i = s; i <= count; ++i) {
      for (int j = s - 1; j < i; ++j) {
        const double largest = std::max(best[s - 1][j], sum[i] - sum[j]);
        // <=: the last stage as small as it can be
        if (largest <= best[s][i]) {
          best[s][i] = largest;
          from[s][i] = j;
        }
      }
    }
  }
  std::vector<int> cuts;
  for (int s = stages, i = count; s > 1; --s) {
    i = from[s][i];
    cuts.insert(cuts.begin(), i);
  }
  return cuts;
}

std::vector<double> parameter_costs(const torch::nn::Sequential& net) {
  std::vector<double> costs;
  for (const auto& child : net->children()) {
    double cost = 1;
    for (const at::Tensor& p : child->parameters()) cost += static_cast<double>(p.numel());
    costs.push_back(cost);
  }
  return costs;
}

}  // namespace tessera
