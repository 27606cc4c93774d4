// Modules x {plain, replicated, fully sharded parameters} x memory orders x {float64, autocast}, on
// samples sharded unevenly over three ranks, one of which has none: outputs and gradients of one
// process, over several backwards and through double backward; and every optimizer's steps.

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "support.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::test::module_matrix_test {

namespace {

using Shape = std::vector<std::int64_t>;
using Forward = std::function<at::Tensor(const at::Tensor&)>;
struct Net {
  std::shared_ptr<torch::nn::Module> module;
  Forward forward;
};
struct Kind {
  std::string name;
  std::function<Net()> make;
  Shape shape;
  /// The dim of the samples.
  int samples = 0;
  bool embeds = false, second = true;
};

template <class Holder>
Net simple(Holder m) {
  return {m.ptr(), [m](const at::Tensor& x) mutable { return m->forward(x); }};
}
template <class Holder>
Net first_of_pair(Holder m) {
  return {m.ptr(), [m](const at::Tensor& x) mutable { return std::get<0>(m->forward(x)); }};
}

// Computed again in backward instead of kept, as activation checkpointing does: a backward inside a
// backward.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            Forward* f) {
    ctx->save_for_backward({x});
    ctx->saved_data["f"] = reinterpret_cast<std::int64_t>(f);
    const at::NoGradGuard no_grad;
    return (*f)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& g) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): a context keeps values, not pointers
    auto* f = reinterpret_cast<Forward*>(ctx->saved_data["f"].toInt());
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_(true);
    const at::AutoGradMode grad(true);
    const at::Tensor y = (*f)(x);
    torch::autograd::backward({y}, {g[0]});
    return {x.grad(), at::Tensor()};
  }
};

Net checkpointed(Net net) {
  auto f = std::make_shared<Forward>(net.forward);
  return {net.module, [f](const at::Tensor& x) { return Checkpoint::apply(x, f.get()); }};
}

std::vector<Kind> kinds() {
  namespace nn = torch::nn;
  std::vector<Kind> all;
  all.push_back({"Linear", [] { return simple(nn::Linear(4, 5)); }, {5, 3, 4}});
  all.push_back({"Conv1d",
                 [] { return simple(nn::Conv1d(nn::Conv1dOptions(3, 4, 3).padding(1))); },
                 {5, 3, 6}});
  all.push_back({"Conv2d",
                 [] { return simple(nn::Conv2d(nn::Conv2dOptions(3, 4, 3).stride(2))); },
                 {5, 3, 6, 5}});
  all.push_back({"Conv2d of groups",
                 [] { return simple(nn::Conv2d(nn::Conv2dOptions(4, 4, 3).groups(2).padding(1))); },
                 {5, 4, 4, 5}});
  all.push_back(
      {"ConvTranspose2d",
       [] { return simple(nn::ConvTranspose2d(nn::ConvTranspose2dOptions(3, 4, 3).stride(2))); },
       {5, 3, 3, 4}});
  all.push_back({"BatchNorm2d", [] { return simple(nn::BatchNorm2d(3)); }, {5, 3, 4, 3}});
  all.push_back(
      {"LayerNorm", [] { return simple(nn::LayerNorm(nn::LayerNormOptions({4}))); }, {5, 3, 4}});
  all.push_back({"GroupNorm", [] { return simple(nn::GroupNorm(2, 4)); }, {5, 4, 3, 3}});
  all.push_back(
      {"InstanceNorm2d",
       [] { return simple(nn::InstanceNorm2d(nn::InstanceNorm2dOptions(3).affine(true))); },
       {5, 3, 4, 3}});
  all.push_back({"LSTM",
                 [] {
                   return first_of_pair(
                       nn::LSTM(nn::LSTMOptions(4, 3).num_layers(2).batch_first(true)));
                 },
                 {5, 3, 4}});
  all.push_back({"LSTM of two directions",
                 [] { return first_of_pair(nn::LSTM(nn::LSTMOptions(4, 3).bidirectional(true))); },
                 {3, 5, 4},
                 1});
  all.push_back({"GRU", [] { return first_of_pair(nn::GRU(nn::GRUOptions(4, 3))); }, {3, 5, 4}, 1});
  all.push_back({"RNN", [] { return first_of_pair(nn::RNN(nn::RNNOptions(4, 3))); }, {3, 5, 4}, 1});
  all.push_back({"MultiheadAttention",
                 [] {
                   nn::MultiheadAttention m(8, 2);
                   return Net{m.ptr(), [m](const at::Tensor& x) mutable {
                                return std::get<0>(m->forward(x, x, x));
                              }};
                 },
                 {3, 5, 8},
                 1});
  all.push_back({"TransformerEncoderLayer",
                 [] {
                   return simple(nn::TransformerEncoderLayer(
                       nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0)));
                 },
                 {3, 5, 8},
                 1});
  all.push_back(
      {"Transformer",
       [] {
         nn::Transformer m(nn::TransformerOptions(8, 2, 1, 1).dim_feedforward(12).dropout(0));
         return Net{m.ptr(), [m](const at::Tensor& x) mutable { return m->forward(x, x * 0.5); }};
       },
       {3, 5, 8},
       1});
  all.push_back({"Embedding", [] { return simple(nn::Embedding(7, 4)); }, {5, 3}, 0, true, false});
  all.push_back({"Embedding, mean of rows",
                 [] {
                   nn::Embedding m(7, 4);
                   return Net{m.ptr(),
                              [m](const at::Tensor& x) mutable { return m->forward(x).mean(1); }};
                 },
                 {5, 3},
                 0,
                 true,
                 false});
  all.push_back({"checkpointed block",
                 [] {
                   nn::Sequential m(nn::Linear(4, 6), nn::Tanh(), nn::Linear(6, 4));
                   return checkpointed(
                       {m.ptr(), [m](const at::Tensor& x) mutable { return m->forward(x); }});
                 },
                 {5, 4},
                 0,
                 false,
                 false});
  all.push_back({"MLP with activations",
                 [] {
                   return simple(nn::Sequential(nn::Linear(4, 6), nn::GELU(), nn::Linear(6, 4),
                                                nn::SiLU(), nn::Softmax(-1)));
                 },
                 {5, 4}});
  return all;
}

enum class Parameters { plain, replicated, sharded };
enum class Memory { contiguous, transposed, channels_last };

const char* name_of(Parameters p) {
  return p == Parameters::plain        ? "plain"
         : p == Parameters::replicated ? "replicated"
                                       : "fully sharded";
}
const char* name_of(Memory m) {
  return m == Memory::contiguous   ? "contiguous"
         : m == Memory::transposed ? "transposed"
                                   : "channels_last";
}

at::Tensor laid_out(const at::Tensor& x, Memory memory) {
  if (memory == Memory::transposed) return x.transpose(0, -1).contiguous().transpose(0, -1);
  return memory == Memory::channels_last && x.dim() == 4
             ? x.contiguous(at::MemoryFormat::ChannelsLast)
             : x;
}

void distribute(torch::nn::Module& module, const DeviceMesh& mesh, Parameters parameters) {
  if (parameters == Parameters::plain) return;
  if (parameters == Parameters::replicated) return distribute_module(module, mesh);
  // Uneven, with an empty shard.
  distribute_module(
      module, mesh,
      [](const std::string&, const at::Tensor& t) -> std::optional<ParameterPlacement> {
        if (t.dim() == 0 || !at::isFloatingType(t.scalar_type())) return std::nullopt;
        return ParameterPlacement{{Shard(0)}, {{0, {t.size(0) - 1, 0, 1}}}};
      });
}

struct Cast {
  explicit Cast(bool on) : on_(on) {
    if (on_) at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  ~Cast() {
    if (!on_) return;
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  bool on_;
};

struct Result {
  std::vector<at::Tensor> values;
  std::vector<std::string> names;
  void add(const std::string& name, const at::Tensor& t) {
    names.push_back(name);
    values.push_back(t);
  }
};

// Two backwards that accumulate, then a penalty on the gradient if there are second derivatives.
Result train(Net& net, const at::Tensor& x, const at::Tensor& weight, bool cast, bool second) {
  Result r;
  for (int i = 0; i < 2; ++i) {
    at::Tensor y;
    {
      const Cast on(cast);
      y = net.forward(x);
    }
    (y.to(weight.scalar_type()) * weight).sum().backward();
    if (i == 0) r.add("output", y);
  }
  r.add("gradient of the input", x.grad());
  for (const auto& p : net.module->named_parameters())
    r.add("gradient of " + p.key(),
          p.value().grad().defined() ? p.value().grad().clone() : at::Tensor());
  for (const auto& b : net.module->named_buffers()) r.add("buffer " + b.key(), b.value());
  if (!second) return r;
  net.module->zero_grad();
  const at::Tensor g =
      torch::autograd::grad({(net.forward(x) * weight).square().sum()}, {x}, {}, true, true)[0];
  g.square().sum().backward();
  for (const auto& p : net.module->named_parameters())
    r.add("second derivative of " + p.key(), p.value().grad());
  return r;
}

void compare(const Kind& kind, Parameters parameters, Memory memory, bool cast,
             const DeviceMesh& mesh) {
  SCOPED_TRACE(concat(kind.name, ", parameters ", name_of(parameters), ", ", name_of(memory),
                      cast ? ", autocast" : ""));
  const auto type = cast ? at::kFloat : at::kDouble;
  seed(11);
  const at::Tensor value = laid_out(
      kind.embeds ? randint(7, kind.shape) : randn(kind.shape, at::kDouble).to(type), memory);
  const bool second = kind.second && !cast;
  Net expected_net = kind.make(), net = kind.make();
  for (Net* n : {&expected_net, &net}) {
    n->module->to(type);
    fill(*n->module, 5);
  }
  const auto as_input = [&](const at::Tensor& t) {
    return kind.embeds ? t : t.detach().requires_grad_(true);
  };
  at::Tensor out;
  {
    const at::NoGradGuard no_grad;
    out = expected_net.forward(value);
    expected_net = kind.make();
    expected_net.module->to(type);
    fill(*expected_net.module, 5);
  }
  seed(12);
  const at::Tensor weight = randn(out.sizes(), at::kDouble).to(type);
  const Result expected = train(expected_net, as_input(value.clone()), weight, cast, second);
  distribute(*net.module, mesh, parameters);
  const ShardSpec spec(mesh, kind.shape, {Shard(kind.samples)}, {{kind.samples, {3, 0, 2}}});
  const Result got =
      train(net, as_input(distribute_tensor(value.clone(), spec)), weight, cast, second);
  ASSERT_EQ(got.names, expected.names);
  for (std::size_t i = 0; i < got.values.size(); ++i) {
    ASSERT_EQ(got.values[i].defined(), expected.values[i].defined()) << got.names[i];
    if (got.values[i].defined()) {
      EXPECT_LT(difference(got.values[i], expected.values[i]), cast ? 6e-2 : 1e-10) << got.names[i];
    }
  }
}

// What plain libtorch makes of a module under autocast; nothing if it can.
std::string refusal_under_autocast(const Kind& kind) {
  Net net = kind.make();
  const Cast on(true);
  try {
    net.forward(kind.embeds ? at::zeros(kind.shape, at::kLong) : at::zeros(kind.shape));
    return "";
  } catch (const std::exception& e) {
    return std::string(e.what()).substr(0, std::string(e.what()).find('\n'));
  }
}

// Returns the number of combinations.
int compare_all(const std::vector<Kind>& all) {
  int combinations = 0;
  on_threads(3, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"data", 3}});
    for (const Kind& kind : all) {
      for (const auto parameters :
           {Parameters::plain, Parameters::replicated, Parameters::sharded}) {
        for (const auto memory : {Memory::contiguous, Memory::transposed, Memory::channels_last}) {
          if (memory == Memory::channels_last && kind.shape.size() != 4) continue;
          for (const bool cast : {false, true}) {
            compare(kind, parameters, memory, cast, mesh);
            combinations += manager.rank() == 0;
          }
        }
      }
    }
  });
  return combinations;
}

class WithoutOneDnn {
 public:
  WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(false); }
  ~WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(before_); }
  WithoutOneDnn(const WithoutOneDnn&) = delete;
  WithoutOneDnn& operator=(const WithoutOneDnn&) = delete;

 private:
  bool before_ = at::globalContext().userEnabledMkldnn();
};

}  // namespace

// Under autocast libtorch hands every LSTM to oneDNN, which has none in bfloat16 for processors
// without AVX-512: there plain libtorch throws, and sharded tensors are compared with its own
// kernels. The switch is the process', so that no ranks run while it changes.
TEST(ModuleMatrix, GivesWhatOneProcessGives) {
  std::vector<Kind> possible, without_one_dnn;
  for (Kind& kind : kinds()) {
    const std::string why = refusal_under_autocast(kind);
    if (!why.empty()) std::cout << kind.name << " under autocast: libtorch says '" << why << "'\n";
    (why.empty() ? possible : without_one_dnn).push_back(std::move(kind));
  }
  int combinations = compare_all(possible);
  if (!without_one_dnn.empty()) {
    const WithoutOneDnn off;
    for (const Kind& kind : without_one_dnn) EXPECT_EQ(refusal_under_autocast(kind), "");
    combinations += compare_all(without_one_dnn);
  }
  std::cout << combinations << " combinations of " << possible.size() + without_one_dnn.size()
            << " modules\n";
  EXPECT_GE(combinations, 200);
}

TEST(ModuleMatrix, EveryOptimizerTakesTheStepsOfOneProcess) {
  using Make =
      std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>;
  namespace optim = torch::optim;
  const std::vector<std::pair<std::string, Make>> optimizers = {
      {"SGD",
       [](auto& p) {
         return std::make_unique<optim::SGD>(
             p, optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01));
       }},
      {"Adam",
       [](auto& p) {
         return std::make_unique<optim::Adam>(p, optim::AdamOptions(0.01).amsgrad(true));
       }},
      {"AdamW",
       [](auto& p) { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions(0.01)); }},
      {"Adagrad",
       [](auto& p) { return std::make_unique<optim::Adagrad>(p, optim::AdagradOptions(0.05)); }},
      {"RMSprop",
       [](auto& p) {
         return std::make_unique<optim::RMSprop>(
             p, optim::RMSpropOptions(0.01).centered(true).momentum(0.5));
       }},
      {"LBFGS", [](auto& p) {
         return std::make_unique<optim::LBFGS>(p, optim::LBFGSOptions(0.5).max_iter(4));
       }}};
  on_threads(3, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"data", 3}});
    for (const auto& [name, make] : optimizers) {
      const auto losses = [&, &make = make](std::optional<Parameters> parameters) {
        torch::nn::Sequential net(torch::nn::Linear(4, 6), torch::nn::Tanh(),
                                  torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})),
                                  torch::nn::Linear(6, 3));
        net->to(at::kDouble);
        fill(*net, 3);
        at::Tensor x = randn({5, 4}, at::kDouble), y = randn({5, 3}, at::kDouble);
        if (parameters) {
          distribute(*net, mesh, *parameters);
          x = distribute_tensor(x, mesh, {Shard(0)}, {{0, {3, 0, 2}}});
          y = distribute_tensor(y, mesh, {Shard(0)}, {{0, {3, 0, 2}}});
        }
        const auto optimizer = make(net->parameters());
        std::vector<double> all;
        for (int i = 0; i < 5; ++i) {
          const at::Tensor loss = optimizer->step([&] {
            optimizer->zero_grad();
            at::Tensor l = torch::mse_loss(net->forward(x), y);
            l.backward();
            torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
            return l;
          });
          all.push_back(whole(loss).item<double>());
        }
        return all;
      };
      const auto expected = losses(std::nullopt);
      for (const auto parameters :
           {Parameters::plain, Parameters::replicated, Parameters::sharded}) {
        const auto got = losses(parameters);
        for (std::size_t i = 0; i < got.size(); ++i)
          EXPECT_NEAR(got[i], expected[i], 1e-9 * std::abs(expected[i]))
              << name << ", parameters " << name_of(parameters) << ", step " << i;
      }
    }
  });
}

}  // namespace tessera::test::module_matrix_test
