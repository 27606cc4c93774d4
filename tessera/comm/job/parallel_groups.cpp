#include "tessera/comm/job/parallel_groups.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>
#include <optional>

#include "tessera/base/text.h"
#include "tessera/comm/group/agreement.h"
#include "tessera/comm/group/functional.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/parallelism.h"

namespace tessera {

ParallelismError::~ParallelismError() = default;

namespace {

// Groups of this tag are their own, so that destroying them takes nothing from whoever asks the
// manager for the same ranks.
constexpr auto kTag = "parallelism";

struct Current {
  std::optional<DistributedManager> manager;
  std::optional<ParallelGroups> groups;  // after manager: destroyed before it
};

// The one place with a current manager: the calls of parallel_groups.h have no handle to carry it.
// A thread is a rank.
Current& current() {
  thread_local Current here;
  return here;
}

/// The rows of each part of n: the first n mod parts have one more.
Sizes even_sizes(std::int64_t n, int parts) {
  Sizes sizes;
  for (int part = 0; part < parts; ++part) sizes.push_back(n / parts + (part < n % parts));
  return sizes;
}

Sizes all_sizes(const Group& group, std::int64_t mine) {
  const auto options = at::TensorOptions().dtype(at::kLong);
  const at::Tensor all = at::empty({group.size()}, options);
  group.all_gather(all, at::full({1}, mine, options), {}, {.name = "sizes to gather"});
  return {all.data_ptr<std::int64_t>(), all.data_ptr<std::int64_t>() + group.size()};
}

/// functional::all_gather with replicated cotangents, along any dim, and as a request.
class Gather : public torch::autograd::Function<Gather> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& tensor,
                            const Group& group, std::int64_t dim, Request* request) {
    const Sizes sizes = all_sizes(group, tensor.size(dim));
    context->saved_data["dim"] = dim;
    context->saved_data["sizes"] = sizes;
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(group));
    const at::Tensor rows = tensor.movedim(dim, 0).contiguous();
    auto shape = rows.sizes().vec();
    shape[0] = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
    const at::Tensor all = at::empty(shape, rows.options());
    *request = group.start_all_gather(all, rows, sizes, {.name = "gather"});
    return all.movedim(0, dim);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto dim = context->saved_data["dim"].toInt();
    const auto group =
        c10::static_intrusive_pointer_cast<Holder>(context->saved_data["group"].toCapsule());
    const auto rows = functional::own_rows(group->group, gradients[0].movedim(dim, 0),
                                           context->saved_data["sizes"].toIntVector());
    return {rows.movedim(0, dim), at::Tensor(), at::Tensor(), at::Tensor()};
  }

 private:
  struct Holder : torch::CustomClassHolder {
    explicit Holder(Group g) : group(std::move(g)) {}
    Group group;
  };
};

std::int64_t checked_dim(const char* call, const at::Tensor& tensor, std::int64_t dim) {
  if (!tensor.defined()) throw InvalidArgument(concat(call, " was given an undefined tensor"));
  if (dim < -tensor.dim() || dim >= tensor.dim())
    throw InvalidArgument(concat(call, " along dim ", dim, " of a tensor with ", tensor.dim(),
                                 " dims; give a dim from ", -tensor.dim(), " to ",
                                 tensor.dim() - 1));
  return dim < 0 ? dim + tensor.dim() : dim;
}

GroupInfo info_of(const DistributedManager& manager, const std::vector<int>& ranks,
                  const std::string& backend) {
  GroupInfo info;
  info.group = Group(manager.state()->group(ranks, {backend, std::nullopt}, kTag));
  info.global_ranks = ranks;
  info.rank = info.group.rank();
  info.world_size = info.group.size();
  return info;
}

}  // namespace

Request GroupInfo::reduce(const at::Tensor& tensor, ReduceOp op, bool async) const {
  Request request = group.start_all_reduce(tensor, op, {.name = "reduce"});
  if (!async) request.wait();
  return request;
}

at::Tensor GroupInfo::split(const at::Tensor& tensor, std::int64_t dim) const {
  dim = checked_dim("split", tensor, dim);
  if (world_size == 1) return tensor;
  return functional::own_rows(group, tensor.movedim(dim, 0),
                              even_sizes(tensor.size(dim), world_size))
      .movedim(0, dim);
}

PendingTensor GroupInfo::gather(const at::Tensor& tensor, std::int64_t dim, bool async) const {
  dim = checked_dim("gather", tensor, dim);
  PendingTensor result;
  if (world_size == 1) {
    result.tensor = tensor;
    return result;
  }
  result.tensor = Gather::apply(tensor, group, dim, &result.request);
  if (!async) result.request.wait();
  return result;
}

DistributedManager current_manager() {
  auto& here = current();
  if (!here.manager) here.manager = DistributedManager::initialize();
  return *here.manager;
}

bool has_current_manager() { return current().manager.has_value(); }

void set_current_manager(const DistributedManager& manager) {
  auto& here = current();
  if (here.groups && !(manager == *here.manager))
    throw ParallelismError(
        "the current manager cannot be changed while parallelism is initialized on it; call "
        "reset_parallelism() first");
  here.manager = manager;
}

void clear_current_manager() {
  auto& here = current();
  if (here.groups)
    throw ParallelismError(
        "the current manager cannot be given up while parallelism is initialized on it; call "
        "reset_parallelism() first");
  here.manager.reset();
}

const ParallelGroups& init_parallelism(int model_parallelism, int pipeline_parallelism,
                                       const ParallelBackends& backends) {
  auto& here = current();
  if (here.groups)
    throw ParallelismError("parallelism is initialized already; call reset_parallelism() first");
  const DistributedManager manager = current_manager();
  const int rank = manager.rank();
  std::optional<Mesh> mesh;
  try {
    mesh = parallel_mesh(manager.world_size(), model_parallelism, pipeline_parallelism);
  } catch (const GroupConfigError& error) {
    throw ParallelismError(concat("init_parallelism(", model_parallelism, ", ",
                                  pipeline_parallelism, ") on ", manager.world_size(),
                                  " ranks: ", error.what()));
  }
  std::vector<int> everybody(static_cast<std::size_t>(manager.world_size()));
  for (int r = 0; r < manager.world_size(); ++r) everybody[r] = r;
  ParallelGroups groups;
  groups.world = info_of(manager, everybody, "");
  require_agreement(groups.world.group, "model and pipeline parallelism",
                    concat("model ", model_parallelism, "\npipeline ", pipeline_parallelism,
                           "\nbackends: model '", backends.model, "', pipeline '",
                           backends.pipeline, "', data '", backends.data, "'\n"));
  groups.mp = info_of(manager, mesh->group("mp", rank), backends.model);
  groups.pp = info_of(manager, mesh->group("pp", rank), backends.pipeline);
  groups.dp = info_of(manager, mesh->group("dp", rank), backends.data);
  here.groups = std::move(groups);
  return *here.groups;
}

bool parallelism_is_initialized() { return current().groups.has_value(); }

const ParallelGroups& parallelism() {
  if (!current().groups)
    throw ParallelismError(
        "parallelism is not initialized on this thread; call init_parallelism() first");
  return *current().groups;
}

void reset_parallelism() {
  auto& here = current();
  if (!here.groups) return;
  here.groups.reset();
  here.manager->state()->destroy(kTag);
}

}  // namespace tessera
