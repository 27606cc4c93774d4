#include "tessera/pipeline/stage.h"

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/gradient/sync.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/distribute_module.h"

namespace tessera {

PipelineStage::~PipelineStage() = default;
std::vector<at::Tensor> PipelineStage::buffers() const { return {}; }
std::vector<NamedTensor> PipelineStage::tensors() const {
  std::vector<NamedTensor> all;
  for (const auto& p : parameters()) all.push_back({concat("parameter ", all.size()), p, true});
  for (const auto& b : buffers()) all.push_back({concat("buffer ", all.size()), b, false});
  return all;
}
bool PipelineStage::recomputes() const { return false; }
bool PipelineStage::sharded() const { return false; }
void PipelineStage::gather() {}
void PipelineStage::release() {}

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
    std::vector<at::Tensor> trained;
    for (const at::Tensor& p : module_->parameters()) {
      if (p.requires_grad()) trained.push_back(p);
    }
    return trained;
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

}  // namespace tessera
