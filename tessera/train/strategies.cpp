#include "tessera/train/strategies.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "tessera/train/detail/all_modules.h"

namespace tessera {

namespace {

void move_modules(const NamedModules& modules, c10::Device device) {
  for (const NamedModule& m : modules) m.module->to(device);
}

}  // namespace

SingleDevice::SingleDevice(c10::Device device)
    : SingleDevice(DistributedManager::initialize({.launch = Launch{}, .device = device})) {}

SingleDevice::SingleDevice(DistributedManager manager) : ManagedStrategy(std::move(manager)) {
  if (size() != 1)
    throw InvalidArgument("the strategy 'single' in a job of ", size(),
                          " ranks: each would train alone; choose ddp, mesh or manual");
}

void SingleDevice::setup(const NamedModules& modules) {
  Strategy::setup(modules);
  move_modules(modules, root_device());
}

ManualStrategy::ManualStrategy(DistributedManager manager, ManualOptions options)
    : ManagedStrategy(std::move(manager)), options_(std::move(options)) {
  if (options_.sharing < 1 || size() % options_.sharing != 0)
    throw InvalidArgument("ManualOptions::sharing is ", options_.sharing, ", of ", size(),
                          " ranks: give a divisor");
}

Abilities ManualStrategy::abilities() const {
  return {.moves_modules = false,
          .saves_on_all_ranks = options_.saves_on_all_ranks,
          .owns_accumulation = static_cast<bool>(options_.reduce_gradients),
          .gradients = options_.gradients};
}

void ManualStrategy::place(MicroBatch& batch) {
  if (!options_.device) return;
  for (at::Tensor& t : batch.tensors) t = t.to(*options_.device, /*non_blocking=*/true);
  if (batch.mask.defined()) batch.mask = batch.mask.to(*options_.device, /*non_blocking=*/true);
}

void ManualStrategy::reduce_gradients() {
  if (options_.reduce_gradients)
    options_.reduce_gradients();
  else
    Strategy::reduce_gradients();
}

struct DDPStrategy::Wrapped {
  Wrapped(const NamedModules& modules, const Group& group,
          const DistributedDataParallelOptions& options)
      : ddp(std::make_shared<detail::AllModules>(modules), group, options) {}
  DistributedDataParallel<std::shared_ptr<detail::AllModules>> ddp;
};

DDPStrategy::DDPStrategy(DistributedManager manager, DistributedDataParallelOptions options)
    : ManagedStrategy(std::move(manager)), options_(std::move(options)) {}

DDPStrategy::~DDPStrategy() = default;

void DDPStrategy::setup(const NamedModules& modules) {
  Strategy::setup(modules);
  move_modules(modules, root_device());
  // Buffers are shared between steps: those of a step that is not whole are no state.
  DistributedDataParallelOptions options = options_;
  options.broadcast_buffers = false;
  wrapped_ = std::make_unique<Wrapped>(modules, world(), options);
}

void DDPStrategy::teardown() {
  wrapped_.reset();
  Strategy::teardown();
}

void DDPStrategy::before_forward(bool synchronised) {
  if (!wrapped_) throw InvalidArgument("the strategy 'ddp' was not set up, or has ended");
  if (synchronised) wrapped_->ddp();  // looks for what nothing reduces
}

// Of a forward that a loop of the user's own has made by itself, too.
void DDPStrategy::backward(const at::Tensor& loss) {
  before_forward(/*synchronised=*/true);
  ManagedStrategy::backward(loss);
}

void DDPStrategy::share_buffers() {
  if (options_.broadcast_buffers && wrapped_ && size() > 1) wrapped_->ddp.broadcast_buffers();
}

MeshStrategy::MeshStrategy(const DeviceMesh& mesh, Parallelise parallelise,
                           std::vector<Placement> batch)
    : ManagedStrategy(mesh.manager(), mesh.all()),
      mesh_(mesh),
      parallelise_(std::move(parallelise)),
      batch_(std::move(batch)) {
  const auto& axes = mesh_.mesh().axes();
  if (batch_.size() != axes.size())
    throw InvalidArgument("MeshStrategy: ", batch_.size(), " placements of a batch for ",
                          axes.size(), " axes of the mesh");
  sharing_ *= detail::ranks_sharing("MeshStrategy", batch_, mesh_.mesh());
}

MeshStrategy::MeshStrategy(const DeviceMesh& mesh, NamedPlacements patterns,
                           std::vector<Placement> batch)
    : MeshStrategy(mesh, Parallelise(), std::move(batch)) {
  patterns_ = std::move(patterns);
}

MeshStrategy::MeshStrategy(const DeviceMesh& mesh, Parallelise parallelise, BatchFields batch)
    : ManagedStrategy(mesh.manager(), mesh.all()),
      mesh_(mesh),
      parallelise_(std::move(parallelise)),
      fields_(std::move(batch)) {
  reads_for_others(mesh_, fields_->rows);  // throws for axes that do not fit
  int dealt = 1;
  for (const std::string& axis : fields_->rows) dealt *= mesh_.mesh().size(axis);
  sharing_ = size() / dealt;
}

MeshStrategy::MeshStrategy(const DeviceMesh& mesh, NamedPlacements patterns, BatchFields batch)
    : MeshStrategy(mesh, Parallelise(), std::move(batch)) {
  patterns_ = std::move(patterns);
}

void MeshStrategy::setup(const NamedModules& modules) {
  Strategy::setup(modules);
  const NamedModules fresh = detail::not_among(prepared_, modules);
  if (fresh.empty()) return;
  move_modules(fresh, root_device());
  if (parallelise_) {
    for (const NamedModule& m : fresh) parallelise_(m.name, *m.module, mesh_);
  } else {
    const auto all = std::make_shared<detail::AllModules>(fresh);
    distribute_module(*all, mesh_, patterns_);
  }
  for (const NamedModule& m : fresh) prepared_.emplace_back(m.module);
}

void MeshStrategy::place(MicroBatch& batch) {
  if (fields_) {
    const auto& [rows, fields, one_reads] = *fields_;
    if (!batch.tensors.empty() && std::ranges::all_of(batch.tensors, is_sharded)) return;
    Strategy::place(batch);
    TensorBatch sharded = one_reads ? scatter_rows(batch, mesh_, rows, fields)
                                    : shard_rows(batch, mesh_, rows, fields);
    batch.tensors = std::move(sharded.tensors);
    batch.names = std::move(sharded.names);
    batch.mask = std::move(sharded.mask);
    return;
  }
  const auto distribute = [&](at::Tensor& t) {
    if (!t.defined() || is_sharded(t)) return;
    std::vector<Placement> where;
    for (const Placement& p : batch_)
      where.push_back(p.is_shard() && p.dim >= t.dim() ? Placement(Replicate()) : p);
    t = from_local(t.to(root_device(), /*non_blocking=*/true), mesh_, where);
  };
  for (at::Tensor& t : batch.tensors) distribute(t);
  // A mask is there if any rank has one.
  if (any(batch.mask.defined())) {
    if (!batch.mask.defined()) batch.mask = at::ones({batch.rows}, at::kBool);
    distribute(batch.mask);
  }
}

}  // namespace tessera
