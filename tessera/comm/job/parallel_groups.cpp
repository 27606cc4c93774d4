#include "tessera/comm/job/parallel_groups.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>
#include <optional>

#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/group/functional.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/order.h"

namespace tessera {
namespace {

/// Number of rows of each of `parts` slices of n rows: the first n mod parts have one more.
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

/// functional::all_gather with replicated cotangents, along any dim, started.
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
    *request = group.started().all_gather(all, rows, sizes, {.name = "gather"});
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
  if (!tensor.defined()) throw InvalidArgument(call, " was given an undefined tensor");
  if (dim < -tensor.dim() || dim >= tensor.dim())
    throw InvalidArgument(call, " along dim ", dim, " of a tensor with ", tensor.dim(),
                          " dims; give a dim from ", -tensor.dim(), " to ", tensor.dim() - 1);
  return dim < 0 ? dim + tensor.dim() : dim;
}

GroupInfo info_of(Group group) {
  GroupInfo info;
  info.global_ranks = group.ranks();
  info.rank = group.rank();
  info.world_size = group.size();
  info.group = std::move(group);
  return info;
}

void require_no_graph(const char* call, const at::Tensor& tensor, const char* instead) {
  if (tensor.defined() && tensor.requires_grad() && at::GradMode::is_enabled())
    throw InvalidArgument(call,
                          " was given a tensor that requires grad, and is not recorded "
                          "by autograd: its gradient would be wrong; ",
                          instead, ", or give tensor.detach()");
}

std::string words(const GroupOptions& options) {
  return concat("backend '", options.backend, "', limit ",
                options.timeout ? std::to_string(options.timeout->count()) : "of the manager");
}

DeviceMesh mesh_of(const DistributedManager& manager, const ParallelOptions& options) {
  std::optional<Mesh> mesh;
  try {
    mesh = parallel_mesh(manager.world_size(), options.model, options.pipeline);
  } catch (const GroupConfigError& error) {
    throw ParallelismError("model parallelism ", options.model, " and pipeline parallelism ",
                           options.pipeline, " on ", manager.world_size(),
                           " ranks: ", error.what());
  }
  agree::same(Group(manager.state()->meeting_place()), "model and pipeline parallelism",
              concat("model ", options.model, "\npipeline ", options.pipeline,
                     "\nmodel groups: ", words(options.model_group),
                     "\npipeline groups: ", words(options.pipeline_group),
                     "\ndata groups: ", words(options.data_group), "\n"));
  AxisGroupOptions given;
  for (const auto& [axis, of] : {std::pair("dp", &options.data_group),
                                 {"pp", &options.pipeline_group},
                                 {"mp", &options.model_group}})
    given[{mesh->index(axis)}] = *of;
  return DeviceMesh(*mesh, manager, std::move(given));
}

}  // namespace

void GroupInfo::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  require_no_graph("all_reduce", tensor, "use functional::all_reduce, which is");
  group.all_reduce(tensor, op, {.name = "all_reduce"});
}

Request GroupInfo::start_all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  require_no_graph("all_reduce", tensor, "use functional::all_reduce, which is");
  return group.started().all_reduce(tensor, op, {.name = "all_reduce"});
}

at::Tensor GroupInfo::split(const at::Tensor& tensor, std::int64_t dim) const {
  dim = checked_dim("split", tensor, dim);
  if (world_size == 1) return tensor;
  return functional::own_rows(group, tensor.movedim(dim, 0),
                              even_sizes(tensor.size(dim), world_size))
      .movedim(0, dim);
}

at::Tensor GroupInfo::all_gather(const at::Tensor& tensor, std::int64_t dim) const {
  return start_all_gather(tensor, dim).wait();
}

Pending<at::Tensor> GroupInfo::start_all_gather(const at::Tensor& tensor, std::int64_t dim) const {
  dim = checked_dim("all_gather", tensor, dim);
  if (world_size == 1) return Pending<at::Tensor>(tensor);
  Request request;
  const at::Tensor all = Gather::apply(tensor, group, dim, &request);
  return when_done(std::move(request), all);
}

at::Tensor GroupInfo::gather_to(int root, const at::Tensor& tensor, std::int64_t dim) const {
  return start_gather_to(root, tensor, dim).wait();
}

Pending<at::Tensor> GroupInfo::start_gather_to(int root, const at::Tensor& tensor,
                                               std::int64_t dim) const {
  dim = checked_dim("gather_to", tensor, dim);
  require_no_graph("gather_to", tensor, "use all_gather, which is");
  if (root < 0 || root >= world_size)
    throw InvalidArgument("gather_to rank ", root, " of a group of ", world_size,
                          " ranks; give 0 to ", world_size - 1);
  if (world_size == 1) return Pending<at::Tensor>(tensor);
  const Sizes sizes = all_sizes(group, tensor.size(dim));
  const at::Tensor rows = tensor.movedim(dim, 0).contiguous();
  at::Tensor all, gathered;
  if (rank == root) {
    auto shape = rows.sizes().vec();
    shape[0] = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
    all = at::empty(shape, rows.options());
    gathered = all.movedim(0, dim);
  }
  return when_done(group.started().gather(all, rows, root, sizes, {.name = "gather to one rank"}),
                   gathered);
}

ParallelGroups::ParallelGroups(const DistributedManager& manager, const ParallelOptions& options)
    : mesh(mesh_of(manager, options)),
      mp(info_of(mesh.group("mp"))),
      pp(info_of(mesh.group("pp"))),
      dp(info_of(mesh.group("dp"))),
      world(info_of(manager.world())) {}

std::string ParallelGroups::summary() const {
  const auto place = [](const char* name, const GroupInfo& info) {
    return concat(name, " ", info.rank, " of ", list(info.global_ranks));
  };
  return concat(world.world_size, " ranks: data ", dp.world_size, " x pipeline ", pp.world_size,
                " x model ", mp.world_size, "; rank ", world.rank, ": ", place("data", dp), ", ",
                place("pipeline", pp), ", ", place("model", mp));
}

}  // namespace tessera
