#include "surrogate.h"

#include <cmath>
#include <memory>
#include <optional>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/checkpoint/optimizer_state.h"
#include "tessera/comm/job/mpi_interop.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/train/logger.h"

namespace pillar {
namespace {

torch::nn::Sequential perceptron(std::int64_t in, std::int64_t width, std::int64_t out) {
  // Weights are drawn in this order: compilers differ in that of arguments.
  const torch::nn::Linear last(width, out), first(in, width);
  return torch::nn::Sequential(first, torch::nn::GELU(), last);
}

std::int64_t hash_of(const Cells& cells) {
  tessera::Hash hash;
  hash.bytes(cells.area.data(), cells.area.size() * sizeof(double));
  hash.bytes(cells.source.data(), cells.source.size() * sizeof(std::int64_t));
  return static_cast<std::int64_t>(hash.value());
}

// The edges whose targets a rank owns, and what is known of them and of its cells.
struct OwnFeatures {
  std::vector<std::int64_t> source, target;
  std::vector<double> edge, cell;

  OwnFeatures(const Cells& cells, const std::vector<std::int64_t>& owned) {
    std::unordered_map<std::int64_t, std::size_t> row;
    double area = 0;
    for (const double a : cells.area) area += a / static_cast<double>(cells.size());
    const double length = std::sqrt(area);
    for (const std::int64_t c : owned) {
      row.emplace(c, row.size());
      cell.insert(cell.end(), {cells.area[c] / area, 0, 0});
    }
    for (std::size_t e = 0; e < cells.target.size(); ++e) {
      if (!row.contains(cells.target[e])) continue;
      source.push_back(cells.source[e]);
      target.push_back(cells.target[e]);
      const auto &from = cells.centre[source.back()], &to = cells.centre[target.back()];
      const double across = (to[0] - from[0]) / length, down = (to[1] - from[1]) / length;
      edge.insert(edge.end(), {across, down, std::hypot(across, down)});
    }
    for (const Face& face : cells.faces) {
      if (face.right >= 0 || !row.contains(face.left)) continue;
      cell[3 * row[face.left] + 1] += face.normal[0] / length;
      cell[3 * row[face.left] + 2] += face.normal[1] / length;
    }
  }
};

at::Tensor rows_of_three(const std::vector<double>& numbers) {
  return torch::tensor(numbers, torch::kDouble).view({-1, 3});
}

}  // namespace

SolverMesh::SolverMesh(const Waves& solver, const Cells& all)
    : manager(tessera::DistributedManager::initialize({.mpi = tessera::mpi_world(solver.comm())})),
      mesh(manager.mesh({{"domain", manager.world_size()}})),
      cells(mesh, solver.owned()),
      hash(hash_of(all)) {
  const OwnFeatures own(all, solver.owned());
  edges = cells.edges(own.source, own.target);
  edge_features = tessera::from_local(rows_of_three(own.edge), mesh, {tessera::Shard(0)});
  cell_features = cells.shard(rows_of_three(own.cell));
}

at::Tensor SolverMesh::view(Waves& solver) const {
  const auto rows = static_cast<std::int64_t>(solver.owned().size());
  return cells.shard(at::from_blob(solver.state(), {rows, fields}, at::kDouble));
}

SurrogateImpl::SurrogateImpl(std::int64_t width, int layers)
    : cell_in_(perceptron(fields + 3, width, width)),
      edge_in_(perceptron(3, width, width)),
      out_(perceptron(width, width, fields)) {
  register_module("cell_in", cell_in_);
  register_module("edge_in", edge_in_);
  register_module("out", out_);
  for (int l = 0; l < layers; ++l) {
    edge_.push_back(
        register_module(tessera::concat("edge", l), perceptron(3 * width, width, width)));
    cell_.push_back(
        register_module(tessera::concat("cell", l), perceptron(2 * width, width, width)));
  }
  const torch::NoGradGuard no_grad;
  out_[2]->as<torch::nn::Linear>()->weight.mul_(0.1);
}

at::Tensor SurrogateImpl::forward(const at::Tensor& state, const SolverMesh& on) {
  const at::Tensor waves = state - torch::tensor({1.0, 0.0, 0.0}, state.scalar_type());
  const at::Tensor scale = waves.square().mean().sqrt();
  const at::Tensor source = on.edges[0], target = on.edges[1];
  at::Tensor h = cell_in_->forward(torch::cat({waves / scale, on.cell_features}, 1));
  at::Tensor e = edge_in_->forward(on.edge_features);
  for (std::size_t l = 0; l < cell_.size(); ++l) {
    e = e +
        edge_[l]->forward(torch::cat({e, h.index_select(0, source), h.index_select(0, target)}, 1));
    const at::Tensor sum = torch::zeros_like(h).index_add(0, target, e);
    h = h + cell_[l]->forward(torch::cat({h, sum}, 1));
  }
  return state + scale * out_->forward(h);
}

namespace {

// The solver, the network and its optimizer, in checkpoints of the folder, and the log beside them.
class Run {
 public:
  Run(const SolverMesh& on, const Training& training, Surrogate network,
      torch::optim::Optimizer& optimizer, at::Tensor state)
      : on_(on), network_(std::move(network)), optimizer_(optimizer), state_(std::move(state)) {
    if (training.folder.empty()) return;
    checkpoints_.emplace(on.manager, training.folder, tessera::CheckpointOptions{.keep_last = 2});
    if (const auto latest = checkpoints_->to_resume())
      load(tessera::CheckpointReader(on.manager.world(), training.folder, *latest));
    if (on.manager.rank() > 0) return;
    log_ = tessera::json_logger(training.folder + "/metrics.jsonl");
    log_->start(begin_);
  }
  /// The first window that is not done.
  std::int64_t begin() const { return begin_; }
  void log(std::int64_t window, double loss) {
    if (log_) log_->log({{"train/loss", loss}}, window, 0);
  }
  void save(std::int64_t done) {
    if (!checkpoints_) return;
    if (log_) log_->flush();
    // Rows are those of this partition: their numbers say which cells they are.
    tessera::CheckpointState all;
    all.add("network.", *network_).add("solver", state_).add("cells", numbers());
    all.set_integer("windows", done).set_integer("mesh", on_.hash);
    tessera::add_optimizer(all, "adam.", optimizer_, *network_);
    checkpoints_->save(tessera::concat("window-", done), all);
  }

 private:
  at::Tensor numbers() const {
    return on_.cells.shard(torch::tensor(on_.cells.ids(), torch::kLong));
  }

  void load(const tessera::CheckpointReader& saved) {
    tessera::CheckpointState all;
    saved.load(all.add("network.", *network_), {.allow_extra = true});
    if (all.get_integer("mesh") != on_.hash)
      throw tessera::Error("the checkpoint is of another mesh: give that mesh, or another folder");
    tessera::load_optimizer(saved, "adam.", optimizer_, *network_);
    begin_ = all.get_integer("windows");
    // Each rank reads some rows of the partition that was, which becomes a table of owners; then
    // rows go to those that own the cells now, straight into the solver's memory.
    const std::int64_t rows = on_.cells.size();
    const at::Tensor ids = tessera::to_local(
        saved.read("cells", tessera::ShardSpec(on_.mesh, {rows}, {tessera::Shard(0)})));
    const tessera::OwnedRows then(on_.mesh, std::span(ids.const_data_ptr<std::int64_t>(),
                                                      static_cast<std::size_t>(ids.numel())));
    const at::Tensor was =
        saved.read("solver", tessera::ShardSpec(on_.mesh, {rows, fields}, {tessera::Shard(0)}));
    const auto where = then.numbers(on_.cells.ids());
    state_.copy_(was.index_select(0, on_.cells.shard(torch::tensor(where, torch::kLong))));
  }

  const SolverMesh& on_;
  Surrogate network_;
  torch::optim::Optimizer& optimizer_;
  at::Tensor state_;
  std::optional<tessera::Checkpointer> checkpoints_;
  std::shared_ptr<tessera::Logger> log_;
  std::int64_t begin_ = 0;
};

}  // namespace

Score train_online(Waves& solver, const SolverMesh& on, const Training& training,
                   std::int64_t judged, const std::function<void(std::int64_t, double)>& watch) {
  Score score;
  torch::manual_seed(1);  // the same weights on every rank
  Surrogate network;
  network->to(at::kDouble);
  tessera::distribute_module(*network, on.mesh);
  torch::optim::Adam optimizer(network->parameters(),
                               torch::optim::AdamOptions(training.learning_rate));
  const at::Tensor state = on.view(solver);  // the solver's memory, now and later
  const auto advance = [&] {
    for (std::int64_t i = 0; i < training.steps_a_window; ++i) solver.step();
  };
  Run run(on, training, network, optimizer, state);
  score.mass_before = solver.mass();
  for (std::int64_t w = run.begin(); w < training.windows; ++w) {
    const at::Tensor before = state.clone();  // the solver is about to overwrite it
    advance();
    double loss_of_window = 0;
    for (std::int64_t u = 0; u < training.updates; ++u) {
      optimizer.zero_grad();
      // What the solver changed is the measure: states hardly differ from window to window.
      const at::Tensor loss =
          torch::mse_loss(network(before, on), state) / torch::mse_loss(before, state);
      loss.backward();
      optimizer.step();
      loss_of_window = loss.item<double>();
      score.losses.push_back(loss_of_window);
    }
    run.log(w + 1, loss_of_window);
    if ((w + 1) % training.save_every == 0 || w + 1 == training.windows) run.save(w + 1);
    if (watch) watch(w, loss_of_window);
  }

  const auto forecast = [&](const at::Tensor& before) { return network(before, on); };
  online::judge(score, state, judged, forecast, advance);
  score.mass_after = solver.mass();
  return score;
}

}  // namespace pillar
