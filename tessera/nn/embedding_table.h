#pragma once
// Tables of embeddings that no rank has whole, and optimizers that touch the rows that were used.
//
//   torch::nn::EmbeddingBag ads(EmbeddingBagOptions(1'000'000'000, 64).mode(torch::kSum)
//                                   .sparse(true));
//   distribute_module(*ads, mesh, {{"weight", {{Shard(0)}}}});    // rows; Shard(1): columns
//   RowwiseAdagrad optimizer(ads->parameters(), RowwiseAdagradOptions(0.05));
//   const auto [ids, offsets] = bags_from_local(my_ids, my_offsets, mesh);
//   loss(ads->forward(ids, offsets)).backward();                  // the rows of this rank's bags
//   optimizer.step();
//
// What moves. Of a table that is sharded along its rows each rank sends the distinct ids of its
// samples to their owners and gets those rows; backward sends the sum of each row's gradients to
// its owner. A row that is used twice moves once, that of a padding_idx in bags not at all. Of one
// that is sharded along columns all ranks of the axis get all ids, and columns of rows travel to
// the ranks that have the samples. Over other axes that shard samples the rows that were touched
// are gathered.
//
// The gradient of a layer with sparse = true is a ShardTensor whose locals are sparse: the rows of
// its own shard that were touched. to_local() gives that, to_dense() a dense ShardTensor.

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/tensor/shard_tensor.h"

namespace tessera {

struct TableBags {
  at::Tensor indices, offsets;
};
/// Makes of each rank's own bags those of all: `indices`, [n] of int or long, and `offsets`,
/// [bags], where each bag begins among them, as torch::nn::EmbeddingBag takes them, any number on
/// each rank. Both are sharded over all axes of the mesh, or those on which `placements` is
/// Shard(0); over the others the ranks give the same. Collective over the mesh. Throws
/// InvalidArgument for offsets that do not begin at 0, decrease or go beyond the indices, which the
/// other ranks are told, and on every rank for dtypes that differ.
TableBags bags_from_local(const at::Tensor& indices, const at::Tensor& offsets,
                          const DeviceMesh& mesh, std::vector<Placement> placements = {});

struct RowwiseAdagradOptions
    : public torch::optim::OptimizerCloneableOptions<RowwiseAdagradOptions> {
  RowwiseAdagradOptions(double rate = 1e-2) : lr_(rate) {}
  TORCH_ARG(double, lr);
  TORCH_ARG(double, initial_accumulator_value) = 0;
  TORCH_ARG(double, eps) = 1e-10;

 public:
  double get_lr() const override { return lr(); }
  void set_lr(const double rate) override { lr(rate); }
};

struct RowwiseAdagradParamState
    : public torch::optim::OptimizerCloneableParamState<RowwiseAdagradParamState> {
  /// [rows], where the rows lie; float32 of tables of half precision.
  TORCH_ARG(at::Tensor, sum);
};

/// Adagrad with one number for each row: the mean of the squares of its gradient's elements is
/// added to it (https://arxiv.org/abs/2104.05158, section 4.1.4). Rows that were not touched stay.
/// Of tables alone, sharded or plain: of others step() throws InvalidArgument.
class RowwiseAdagrad final : public torch::optim::Optimizer {
 public:
  /// Throws InvalidArgument for a negative learning rate, initial value or eps.
  explicit RowwiseAdagrad(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                          RowwiseAdagradOptions defaults = {});
  explicit RowwiseAdagrad(std::vector<at::Tensor> tables, RowwiseAdagradOptions defaults = {})
      : RowwiseAdagrad({torch::optim::OptimizerParamGroup(std::move(tables))}, defaults) {}
  /// Collective over the axes that shard columns. Throws InvalidArgument for a gradient that is
  /// dense, or does not lie as the table does.
  at::Tensor step(LossClosure closure = nullptr) override;
  /// Not these: they know nothing of shards. Throws NotAvailable; see add_optimizer().
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

struct SparseAdamOptions : public torch::optim::OptimizerCloneableOptions<SparseAdamOptions> {
  SparseAdamOptions(double rate = 1e-3) : lr_(rate) {}
  TORCH_ARG(double, lr);
  typedef std::tuple<double, double> betas_t;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;

 public:
  double get_lr() const override { return lr(); }
  void set_lr(const double rate) override { lr(rate); }
};

struct SparseAdamParamState
    : public torch::optim::OptimizerCloneableParamState<SparseAdamParamState> {
  TORCH_ARG(std::int64_t, step) = 0;
  /// [rows, columns], where those lie; float32 of tables of half precision.
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);
};

/// Adam that updates the rows and moments that were touched, as torch.optim.SparseAdam does. Of
/// tables alone, sharded or plain.
class SparseAdam final : public torch::optim::Optimizer {
 public:
  /// Throws InvalidArgument for a negative learning rate or eps, and betas outside of [0, 1).
  explicit SparseAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      SparseAdamOptions defaults = {});
  explicit SparseAdam(std::vector<at::Tensor> tables, SparseAdamOptions defaults = {})
      : SparseAdam({torch::optim::OptimizerParamGroup(std::move(tables))}, defaults) {}
  /// Communicates nothing. Throws InvalidArgument for a gradient that is dense, or does not lie as
  /// the table does.
  at::Tensor step(LossClosure closure = nullptr) override;
  /// Not these: they know nothing of shards. Throws NotAvailable; see add_optimizer().
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

namespace detail {
// What the optimizers keep of a table: a number for each row, or one for each element.
at::Tensor row_state(const at::Tensor& table, double value = 0);
at::Tensor element_state(const at::Tensor& table);
// One update each, in place, by the sparse gradient of the table.
void rowwise_adagrad(const at::Tensor& table, const at::Tensor& gradient, const at::Tensor& sum,
                     double rate, double eps);
void sparse_adam(const at::Tensor& table, const at::Tensor& gradient, const at::Tensor& exp_avg,
                 const at::Tensor& exp_avg_sq, std::int64_t step, double rate,
                 std::pair<double, double> betas, double eps);
}  // namespace detail

}  // namespace tessera
