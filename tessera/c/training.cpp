// Losses, backward, optimizers and sessions.

#include <ATen/core/Tensor.h>
#include <ATen/ops/huber_loss.h>
#include <ATen/ops/l1_loss.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/smooth_l1_loss.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <map>

#include "tessera/c/detail/call.h"
#include "tessera/c/detail/objects.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/train/strategies.h"

namespace tessera::c {
namespace {

// "lr=0.001 momentum=0.9": names and numbers, each at most once, read in full.
class Options {
 public:
  explicit Options(const char* text) : text_(text ? text : "") {
    TextReader words(text_);
    for (std::string word; words >> word;) {
      const auto equals = word.find('=');
      double value = 0;
      TextReader number(equals == std::string::npos ? "" : word.substr(equals + 1));
      std::string rest;
      if (!(number >> value) || (number >> rest) ||
          !values_.emplace(word.substr(0, equals), value).second)
        refuse("options '", text_, "': '", word, "' is no name=number, or comes twice");
    }
  }
  double take(const std::string& name, double otherwise) {
    known_.push_back(name);
    const auto it = values_.find(name);
    if (it == values_.end()) return otherwise;
    const double value = it->second;
    values_.erase(it);
    return value;
  }
  // What nobody has taken is a mistake.
  void done() const {
    if (!values_.empty())
      refuse("options '", text_, "': no option is named '", values_.begin()->first, "'; there are ",
             list(known_));
  }

 private:
  std::string text_;
  std::map<std::string, double> values_;
  std::vector<std::string> known_;
};

template <class Optimizer, class Kind>
std::shared_ptr<torch::optim::Optimizer> adam(const std::vector<at::Tensor>& parameters,
                                              Options& given, double decay) {
  Kind options(given.take("lr", 1e-3));
  options.betas({given.take("beta1", 0.9), given.take("beta2", 0.999)});
  options.eps(given.take("eps", 1e-8));
  options.weight_decay(given.take("weight_decay", decay));
  given.done();
  return std::make_shared<Optimizer>(parameters, options);
}

std::shared_ptr<torch::optim::Optimizer> make_optimizer(const std::string& kind,
                                                        const std::vector<at::Tensor>& parameters,
                                                        Options given) {
  if (kind == "adam")
    return adam<torch::optim::Adam, torch::optim::AdamOptions>(parameters, given, 0);
  if (kind == "adamw")
    return adam<torch::optim::AdamW, torch::optim::AdamWOptions>(parameters, given, 1e-2);
  if (kind != "sgd") refuse("kind is '", kind, "': give adam, adamw or sgd");
  torch::optim::SGDOptions options(given.take("lr", 1e-3));
  options.momentum(given.take("momentum", 0)).dampening(given.take("dampening", 0));
  options.weight_decay(given.take("weight_decay", 0)).nesterov(given.take("nesterov", 0) != 0);
  given.done();
  return std::make_shared<torch::optim::SGD>(parameters, options);
}

SessionOptions session_options(Options given) {
  SessionOptions options;
  options.clip.max_norm = given.take("clip_norm", options.clip.max_norm);
  options.clip_value = given.take("clip_value", options.clip_value);
  options.measure_norm = given.take("measure_norm", 0) != 0;
  options.signals = given.take("signals", 0) != 0;
  if (given.take("skip_non_finite", 0) != 0) options.non_finite = NonFinite::skip;
  given.done();
  return options;
}

at::Tensor loss_of(const std::string& kind, const at::Tensor& output, const at::Tensor& target) {
  if (output.sizes() != target.sizes())
    refuse("output has the shape ", output.sizes(), ", target ", target.sizes(),
           ": they are the same");
  if (kind == "mse") return at::mse_loss(output, target);
  if (kind == "l1") return at::l1_loss(output, target);
  if (kind == "huber") return at::huber_loss(output, target);
  if (kind == "smooth_l1") return at::smooth_l1_loss(output, target);
  refuse("kind is '", kind, "': give mse, l1, huber or smooth_l1");
}

}  // namespace

extern "C" {

tessera_result tessera_loss(const char* kind, tessera_tensor output, tessera_tensor target,
                            tessera_tensor* loss) {
  return make("tessera_loss", Reach::all, loss, "loss", [&](Call& call) {
    const at::Tensor& given = call.use<TensorObject>(output, "output").value;
    const at::Tensor& wanted = call.use<TensorObject>(target, "target").value;
    return std::make_shared<TensorObject>(call.job(),
                                          loss_of(need_text(kind, "kind"), given, wanted));
  });
}

tessera_result tessera_backward(tessera_tensor tensor, tessera_tensor gradient) {
  return run("tessera_backward", Reach::all, [&](Call& call) {
    const at::Tensor& its = call.use<TensorObject>(tensor, "tensor").value;
    const at::Tensor given =
        gradient ? call.use<TensorObject>(gradient, "gradient").value : at::Tensor();
    if (!its.requires_grad())
      refuse("nothing that needs a gradient leads to the tensor: it comes of tessera_forward()");
    if (!given.defined() && its.numel() != 1)
      refuse("the tensor has the shape ", its.sizes(), ": without a gradient it is of one element");
    if (given.defined() && given.sizes() != its.sizes())
      refuse("the gradient has the shape ", given.sizes(), ", the tensor ", its.sizes());
    its.backward(given);
  });
}

tessera_result tessera_optimizer_create(tessera_model model, const char* kind, const char* options,
                                        tessera_optimizer* optimizer) {
  return make("tessera_optimizer_create", Reach::own, optimizer, "optimizer", [&](Call& call) {
    const auto& of = call.use<ModelObject>(model, "model");
    const auto parameters = of.model.module->parameters();
    if (parameters.empty())
      refuse("the model has no parameters: a compiled package, for one, cannot be trained");
    auto made = make_optimizer(need_text(kind, "kind"), parameters, Options(options));
    return std::make_shared<OptimizerObject>(call.job(), of.model.module, of.mesh, std::move(made));
  });
}

tessera_result tessera_optimizer_zero(tessera_optimizer optimizer) {
  return run("tessera_optimizer_zero", Reach::own, [&](Call& call) {
    call.use<OptimizerObject>(optimizer, "optimizer").optimizer->zero_grad();
  });
}

tessera_result tessera_optimizer_step(tessera_optimizer optimizer) {
  return run("tessera_optimizer_step", Reach::own, [&](Call& call) {
    call.use<OptimizerObject>(optimizer, "optimizer").optimizer->step();
  });
}

tessera_result tessera_session_create(tessera_optimizer optimizer, const char* options,
                                      tessera_session* session) {
  return make("tessera_session_create", Reach::all, session, "session", [&](Call& call) {
    const auto& of = call.use<OptimizerObject>(optimizer, "optimizer");
    if (of.mesh.mesh().size() != call.job()->size)
      refuse("the model's mesh has ", of.mesh.mesh().size(), " ranks, the job ", call.job()->size,
             ": a session is of all ranks; use tessera_backward() and tessera_optimizer_step()");
    auto object = std::make_shared<SessionObject>(call.job());
    const auto strategy =
        std::make_shared<ManualStrategy>(call.manager(), ManualOptions{.shared_loss = true});
    object->session = std::make_unique<Session>(strategy, NamedModules{{"net", of.module}},
                                                session_options(Options(options)));
    object->session->add(of.optimizer);
    return object;
  });
}

tessera_result tessera_session_backward(tessera_session session, tessera_tensor loss, double weight,
                                        int last) {
  return run("tessera_session_backward", Reach::all, [&](Call& call) {
    Session& its = *call.use<SessionObject>(session, "session").session;
    const at::Tensor& value = call.use<TensorObject>(loss, "loss").value;
    if (value.dim() != 0 || !value.requires_grad())
      refuse("loss has the shape ", value.sizes(),
             ": it is what tessera_loss() gives of tessera_forward()'s result");
    its.backward(value, weight, last != 0);
  });
}

tessera_result tessera_session_step(tessera_session session, tessera_step* step) {
  return run("tessera_session_step", Reach::all, [&](Call& call) {
    Session& its = *call.use<SessionObject>(session, "session").session;
    const StepResult done = its.step();
    if (step)
      *step = {done.loss, done.weight, done.norm, done.stepped ? 1 : 0,
               done.stop != Stop::none ? 1 : 0};
  });
}

tessera_result tessera_session_stop(tessera_session session) {
  return run("tessera_session_stop", Reach::own, [&](Call& call) {
    call.use<SessionObject>(session, "session").session->request_stop(Stop::requested);
  });
}

tessera_result tessera_session_steps(tessera_session session, int64_t* steps) {
  return run("tessera_session_steps", Reach::own, [&](Call& call) {
    const auto count = call.use<SessionObject>(session, "session").session->steps();
    *need(steps, "steps") = count;
  });
}
}

}  // namespace tessera::c
