// Precisions of the user's own: one that rounds at random, one that keeps parameters of twice the
// width, on any number of ranks as on one, saved and gone on with elsewhere.

#include "tessera/train/precision.h"

#include "cases.h"

namespace tessera::test {

using ::tessera::testing::thrown;

namespace {

// To multiples of 2^-8 of its power of two, up or down by chance: the mean is the value.
at::Tensor rounded(const at::Tensor& values, const at::Tensor& chance) {
  const at::Tensor unit = at::exp2(std::get<1>(at::frexp(values)).to(at::kDouble) - 8);
  return at::floor(values / unit + chance) * unit;
}

// Parameters have the eight bits of bfloat16. The draws follow from step and parameter alone, so
// that they are those of the whole tensor on all ranks, however it is sharded.
class StochasticRounding : public PrecisionPlugin {
 public:
  std::string name() const override { return "stochastic"; }
  void convert_modules(const NamedModules& modules, bool moves) override {
    EXPECT_TRUE(moves);
    const at::NoGradGuard no_grad;
    for (const NamedModule& m : modules)
      for (at::Tensor& p : m.module->parameters())
        p.set_data(rounded(p.to(at::kDouble), at::full({}, 0.5, at::kDouble)));
  }
  at::Tensor convert_input(const at::Tensor& tensor) const override {
    return tensor.to(at::kDouble);
  }
  std::shared_ptr<void> forward_scope(c10::Device device) const override {
    EXPECT_TRUE(device.is_cpu());
    ++forwards;
    return {nullptr, [this](void*) { ++scopes_over; }};
  }
  double loss_scale() const override { return 3; }
  void update(bool overflow) override {
    EXPECT_FALSE(overflow);
    ++steps;
  }
  double clip(Strategy& strategy, const std::vector<at::Tensor>& parameters,
              const ClipOptions& options) override {
    ++clipped;
    return PrecisionPlugin::clip(strategy, parameters, options);
  }
  void step(torch::optim::Optimizer& optimizer, const LossClosure& closure) override {
    PrecisionPlugin::step(optimizer, closure);
    const at::NoGradGuard no_grad;
    std::uint64_t number = 0;
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& p : group.params()) {
        at::Generator own =
            at::detail::createCPUGenerator(1000 * static_cast<std::uint64_t>(steps) + number++);
        at::Tensor chance = at::rand(p.sizes(), own, at::kDouble), here = p;
        if (is_sharded(p)) {
          here = to_local(p);
          for (std::int64_t d = 0; d < p.dim(); ++d)
            chance = chance.narrow(d, spec(p).local_offset()[d], spec(p).local_shape()[d]);
        }
        here.copy_(rounded(here, chance));
      }
    }
  }
  void add_state(CheckpointState& state, const std::string& prefix) override {
    state.set_integer(prefix + "rounding", steps);
  }
  void restore(const CheckpointState& state, const std::string& prefix) override {
    steps = state.get_integer(prefix + "rounding");
  }
  mutable int forwards = 0, scopes_over = 0;
  int clipped = 0;
  std::int64_t steps = 0;
};

// Computes in float32 and steps in float64: parameters of that width are kept beside.
class Masters : public PrecisionPlugin {
 public:
  std::string name() const override { return "masters"; }
  void convert_modules(const NamedModules& modules, bool) override { modules_ = modules; }
  void step(torch::optim::Optimizer& optimizer, const LossClosure& closure) override {
    const at::NoGradGuard no_grad;
    const auto& all = masters();
    for (const auto& [name, pair] : all) {
      const auto& [p, master] = pair;
      const at::Tensor gradient = p.grad();
      p.mutable_grad().reset();
      p.set_data(master);
      if (gradient.defined()) p.mutable_grad() = gradient.to(at::kDouble);
    }
    PrecisionPlugin::step(optimizer, closure);
    for (const auto& [name, pair] : all) {
      pair.first.mutable_grad().reset();
      pair.first.set_data(pair.second.to(at::kFloat));
    }
  }
  at::Tensor master(const std::string& name) { return masters().at(name).second; }
  void add_state(CheckpointState& state, const std::string& prefix) override {
    for (const auto& [name, pair] : masters())
      state.add(concat(prefix, "master.", name), pair.second);
  }

 private:
  using Pairs = std::map<std::string, std::pair<at::Tensor, at::Tensor>>;
  // Made when setup() is over.
  const Pairs& masters() {
    if (!masters_.empty()) return masters_;
    for (const NamedModule& m : modules_)
      for (const auto& item : m.module->named_parameters())
        masters_[concat(m.name, ".", item.key())] = {item.value(),
                                                     item.value().detach().to(at::kDouble)};
    return masters_;
  }
  NamedModules modules_;
  Pairs masters_;
};

// Four steps an epoch, of seven rows that the ranks share out unevenly.
std::shared_ptr<BatchSource> shared_out(int rank, int ranks) {
  return batches_of([=](std::uint64_t epoch, std::uint64_t index) -> std::optional<MicroBatch> {
    if (index >= 4) return std::nullopt;
    at::Generator own = at::detail::createCPUGenerator(90 + 4 * epoch + index);
    const at::Tensor x = at::randn({7, 3}, own, at::kFloat), y = at::randn({7, 2}, own, at::kFloat);
    const std::int64_t begin = 7 * rank * rank / (ranks * ranks);
    const std::int64_t end = 7 * (rank + 1) * (rank + 1) / (ranks * ranks);
    return make_batch({x.slice(0, begin, end), y.slice(0, begin, end)});
  });
}

struct Sgd : Regression {
  explicit Sgd(double rate) : rate(rate) { net->to(at::kFloat); }
  Optimizers optimizers() override {
    return {std::make_shared<torch::optim::SGD>(net->parameters(), rate)};
  }
  const double rate;
};

std::vector<at::Tensor> trained(const std::shared_ptr<Strategy>& strategy,
                                const PrecisionChoice& precision, double rate, int epochs,
                                const std::string& folder = {}) {
  Sgd task(rate);
  TrainerOptions options = with(strategy, 1);
  options.session.precision = precision;
  options.max_epochs = epochs;
  options.checkpoint.folder = folder;
  options.checkpoint.resume = !folder.empty();
  if (!folder.empty())
    options.callbacks = {std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{})};
  const int rank = strategy ? strategy->rank() : 0, ranks = strategy ? strategy->size() : 1;
  Trainer(options).fit(task, shared_out(rank, ranks));
  return task.values();
}

}  // namespace

TEST(Precision, OneOfTheUsersOwnTrainsAsOnOneProcess) {
  const auto plugin = std::make_shared<StochasticRounding>();
  const auto expected = trained(nullptr, plugin, 0.1, 2);
  EXPECT_EQ(plugin->steps, 8);
  EXPECT_EQ(plugin->forwards, 8);
  EXPECT_EQ(plugin->scopes_over, 8);
  EXPECT_EQ(plugin->clipped, 8);
  for (const at::Tensor& p : expected) {
    EXPECT_EQ(p.scalar_type(), at::kDouble);
    EXPECT_TRUE(p.equal(p.to(at::kBFloat16).to(at::kDouble)));
  }
  EXPECT_GT(difference(expected[0], trained(nullptr, Precision::float64, 0.1, 2)[0]), 1e-4);
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const Folder folder;
    const auto run = [&](int epochs, bool sharded, const std::string& to) {
      on_threads(ranks, [&](DistributedManager& manager) {
        std::shared_ptr<Strategy> strategy = std::make_shared<DDPStrategy>(manager);
        if (sharded)
          strategy = std::make_shared<MeshStrategy>(manager.mesh({{"data", ranks}}),
                                                    fully_sharded(), std::vector{Shard(0)});
        const auto got = trained(strategy, std::make_shared<StochasticRounding>(), 0.1, epochs, to);
        if (epochs == 2) expect_near(got, expected, concat(ranks, " ranks, sharded ", sharded));
      });
    };
    run(2, false, "");
    run(2, true, "");
    // Saved by one way of sharding and gone on with by the other, and by one process.
    run(1, true, folder / "run");
    run(2, false, folder / "run");
    run(1, false, folder / "alone");
    expect_near(trained(nullptr, std::make_shared<StochasticRounding>(), 0.1, 2, folder / "alone"),
                expected, concat("one process after ", ranks));
  }
}

// Steps that are below the last bit of float32 add up.
TEST(Precision, MasterWeightsOfTheUsersOwnAreSaved) {
  constexpr double kRate = 1e-9;
  const at::Tensor start = trained(nullptr, Precision::as_is, kRate, 0)[2].to(at::kDouble);
  EXPECT_EQ(difference(trained(nullptr, Precision::as_is, kRate, 2)[2].to(at::kDouble), start), 0);
  const auto one = std::make_shared<Masters>();
  trained(nullptr, one, kRate, 2);
  const at::Tensor expected = one->master("net.2.weight");
  EXPECT_GT(difference(expected, start), kRate / 10);
  EXPECT_LT(difference(expected, start), 100 * kRate);
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const Folder folder;
    for (const int epochs : {1, 2})  // the second goes on, on other ranks
      on_threads(epochs == 1 ? ranks : 5 - ranks, [&](DistributedManager& manager) {
        const auto own = std::make_shared<Masters>();
        const auto got =
            trained(std::make_shared<DDPStrategy>(manager), own, kRate, epochs, folder / "run");
        EXPECT_EQ(got[0].scalar_type(), at::kFloat);
        if (epochs == 1) return;
        EXPECT_LT(difference(own->master("net.2.weight"), expected), 1e-5 * kRate)
            << ranks << " ranks";
      });
  }
  // A checkpoint without them is refused.
  const Folder without;
  trained(nullptr, Precision::as_is, kRate, 1, without / "run");
  const std::string said = thrown<InvalidArgument>(
      [&] { trained(nullptr, std::make_shared<Masters>(), kRate, 2, without / "run"); });
  EXPECT_NE(said.find("'train.master.net.0.bias' is not in the checkpoint"), std::string::npos)
      << said;
}

TEST(Precision, ServesOneSessionAndScalesByANumber) {
  struct Scaled : PrecisionPlugin {
    std::string name() const override { return "scaled"; }
    double loss_scale() const override { return scale; }
    double scale = 2;
  };
  const auto shared = std::make_shared<Scaled>();
  const auto session_of = [&] {
    return std::make_unique<Session>(std::make_shared<SingleDevice>(),
                                     NamedModules{{"net", torch::nn::Linear(2, 1).ptr()}},
                                     SessionOptions{.precision = shared});
  };
  auto first = session_of();
  const std::string said = thrown<InvalidArgument>([&] { session_of(); });
  EXPECT_NE(said.find("the precision 'scaled' is in use"), std::string::npos) << said;
  EXPECT_EQ(first->loss_scale(), 2);
  for (const double wrong : {0.0, -1.0, std::nan(""), double{INFINITY}}) {
    shared->scale = wrong;
    EXPECT_THROW(first->loss_scale(), InvalidArgument);
  }
  first.reset();
  shared->scale = 4;
  EXPECT_EQ(session_of()->loss_scale(), 4);
}

TEST(Precision, IsChosenByNameOrObject) {
  const auto mine = std::make_shared<StochasticRounding>();
  for (const auto& [chosen, name] : std::vector<std::pair<PrecisionChoice, std::string>>{
           {Precision::as_is, "as_is"},
           {Precision::float32, "float32"},
           {Precision::float64, "float64"},
           {Precision::bfloat16_mixed, "bfloat16_mixed"},
           {Precision::float16_mixed, "float16_mixed"},
           {mine, "stochastic"}}) {
    EXPECT_EQ(make_precision(chosen)->name(), name);
    EXPECT_EQ(to_string(chosen), name);
  }
  EXPECT_EQ(make_precision(mine), mine);
  const PrecisionChoice none = std::shared_ptr<PrecisionPlugin>();
  EXPECT_EQ(to_string(none), "none");
  EXPECT_NE(thrown<InvalidArgument>([&] { trained(nullptr, none, 0.1, 1); }).find("null pointer"),
            std::string::npos);
  // A name of ours would be read back as ours.
  struct Named : PrecisionPlugin {
    std::string name() const override { return "bfloat16_mixed"; }
  };
  EXPECT_THROW(make_precision(std::make_shared<Named>()), InvalidArgument);
  // Ranks that choose differently are told.
  on_threads(2, [&](DistributedManager& manager) {
    PrecisionChoice chosen = Precision::as_is;
    if (manager.rank() == 1) chosen = std::make_shared<Masters>();
    const std::string said = thrown<MismatchError>(
        [&] { trained(std::make_shared<DDPStrategy>(manager), chosen, 0.1, 1); });
    EXPECT_NE(said.find("precision masters"), std::string::npos) << said;
  });
}

}  // namespace tessera::test
