#include "tessera/data/dataset.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>
#include <utility>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/data/detail/read_batch.h"
#include "tessera/data/shard_batch.h"
#include "tessera/partition/partition.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

namespace detail {

Sample augmented(const Sample& sample, const SampleRef& ref, const Augmentation& by,
                 const BatchNumber& batch) {
  Hash draws;
  draws.number(by.seed).number(batch.epoch).number(batch.step);
  draws.number(static_cast<std::uint64_t>(ref.dataset)).number(ref.index);
  Sample own;  // the dataset's memory is not the function's to write to
  for (const at::Tensor& t : sample) own.push_back(t.clone());
  Sample made = by.function(std::move(own), at::detail::createCPUGenerator(draws.value()));
  if (made.size() != sample.size() ||
      !std::ranges::all_of(made, [](const at::Tensor& t) { return t.defined(); }))
    throw InvalidArgument("the augmentation made ", made.size(), " tensors of a sample of ",
                          sample.size(), "; it returns as many, all of them defined");
  return made;
}

std::vector<at::Tensor> augmented_rows(const std::vector<at::Tensor>& rows,
                                       std::span<const SampleRef> refs, const Augmentation& by,
                                       const BatchNumber& batch) {
  std::vector<Sample> made;
  for (std::size_t i = 0; i < refs.size(); ++i) {
    of_sample(refs[i].index, [&] {
      Sample sample;
      for (const at::Tensor& t : rows) sample.push_back(t[static_cast<std::int64_t>(i)]);
      made.push_back(augmented(sample, refs[i], by, batch));
      require_alike(made.back(), made.front(), concat("augmented sample ", refs[0].index));
    });
  }
  return refs.empty() ? rows : stacked(made);
}

}  // namespace detail

namespace {

/// The sample of every row of the global batch, of which each rank knows its own.
std::vector<SampleRef> refs_of_all(const ShardedBatch& batch, const std::vector<SampleRef>& mine,
                                   const Group& group) {
  const auto said = agree::all<std::vector<std::uint64_t>>(group, "augment_batch", [&] {
    const ShardSpec& where = spec(batch.tensors.front());
    if (static_cast<std::int64_t>(mine.size()) != where.local_shape()[0])
      throw InvalidArgument("augment_batch: ", mine.size(), " samples for the ",
                            where.local_shape()[0],
                            " rows of this rank; give LoadedBatch::samples of the batch");
    std::vector<std::uint64_t> numbers{batch.epoch, batch.step,
                                       static_cast<std::uint64_t>(where.local_offset()[0])};
    for (const SampleRef& ref : mine) {
      numbers.push_back(static_cast<std::uint64_t>(ref.dataset));
      numbers.push_back(ref.index);
    }
    return numbers;
  });
  std::vector<SampleRef> all(static_cast<std::size_t>(batch.rows), SampleRef{-1, 0});
  for (const auto& numbers : said) {
    if (numbers[0] != said[0][0] || numbers[1] != said[0][1])
      throw InvalidArgument("augment_batch: the ranks' batches are of different steps");
    for (std::size_t i = 3, row = numbers[2]; i < numbers.size(); i += 2, ++row) {
      const SampleRef ref{static_cast<int>(numbers[i]), numbers[i + 1]};
      if (all.at(row).dataset >= 0 && all[row] != ref)
        throw InvalidArgument("augment_batch: ranks that share row ", row,
                              " of the batch give different samples of it");
      all[row] = ref;
    }
  }
  return all;
}

/// Dtype and shape of a sample's tensors: "6 3 8;4;".
std::string kinds_of_rows(const std::vector<at::Tensor>& rows) {
  std::string text;
  for (const at::Tensor& t : rows) {
    text += concat(static_cast<int>(t.scalar_type()));
    for (const std::int64_t size : t.sizes().slice(1)) text += concat(" ", size);
    text += ";";
  }
  return text;
}

/// Tensors without rows of these kinds.
std::vector<at::Tensor> rows_of_kinds(const std::string& kinds, const c10::Device& device) {
  std::vector<at::Tensor> none;
  TextReader each(kinds);
  for (std::string kind; std::getline(each, kind, ';');) {
    TextReader in(kind);
    int type = 0;
    in >> type;
    std::vector<std::int64_t> shape{0};
    for (std::int64_t size = 0; in >> size;) shape.push_back(size);
    none.push_back(at::empty(
        shape, at::TensorOptions().dtype(static_cast<at::ScalarType>(type)).device(device)));
  }
  return none;
}

std::string described_kinds(const std::string& kinds) {
  std::vector<std::string> all;
  for (const at::Tensor& t : rows_of_kinds(kinds, at::kMeta))
    all.push_back(concat(t.scalar_type(), " ", t.sizes().slice(1)));
  return list(all);
}

/// As `before` lies; shards keep their sizes where the dim has kept its own.
at::Tensor as_before(const at::Tensor& rows, const ShardSpec& before) {
  ShardSizes sizes;
  for (const auto& [dim, of] : before.sizes()) {
    if (dim >= rows.dim())
      throw InvalidArgument("augment_batch: dim ", dim,
                            " of a field is sharded, and the function made tensors of ", rows.dim(),
                            " dims of it, the batch's included");
    if (rows.size(dim) == before.shape()[static_cast<std::size_t>(dim)]) sizes[dim] = of;
  }
  return redistribute(rows, before.placements(), sizes);
}

}  // namespace

ShardedBatch augment_batch(const ShardedBatch& batch, const std::vector<SampleRef>& samples,
                           const Augmentation& by) {
  if (!by.function) throw InvalidArgument("augment_batch: there is no function");
  if (batch.tensors.empty() || !std::ranges::all_of(batch.tensors, is_sharded))
    throw InvalidArgument(
        "augment_batch: the batch is not one of sharded tensors; call shard_batch()");
  for (const at::Tensor& t : batch.tensors)
    if (t.dim() == 0 || t.size(0) != batch.rows)
      throw InvalidArgument("augment_batch: a tensor of shape ", t.sizes(), " in a batch of ",
                            batch.rows, " rows");
  const at::NoGradGuard no_grad;
  const DeviceMesh mesh = spec(batch.tensors.front()).mesh();
  const auto refs = refs_of_all(batch, samples, mesh.all());
  // Rows are dealt to all ranks, so that each holds complete samples.
  const Partition rows = Partition::even(batch.rows, mesh.mesh().size());
  const Interval mine = rows.interval(mesh.mesh().position(mesh.manager().rank()));
  const std::vector<Placement> by_rows(static_cast<std::size_t>(mesh.mesh().dims()), Shard(0));
  std::vector<at::Tensor> made;
  for (const at::Tensor& t : batch.tensors)
    made.push_back(to_local(redistribute(t, by_rows, {{0, rows.sizes()}})));
  const auto kinds = agree::all<std::string>(mesh.all(), "augment_batch", [&] {
    made = detail::augmented_rows(made,
                                  std::span(refs).subspan(static_cast<std::size_t>(mine.begin),
                                                          static_cast<std::size_t>(mine.size())),
                                  by, {batch.epoch, batch.step});
    return mine.size() > 0 ? kinds_of_rows(made) : std::string();
  });
  const auto known = std::ranges::find_if(kinds, [](const auto& text) { return !text.empty(); });
  if (known == kinds.end()) return batch;  // no rank has a row
  for (const std::string& other : kinds)
    if (!other.empty() && other != *known)
      throw InvalidArgument(
          "augment_batch: the function makes samples of different shapes or dtypes: ",
          described_kinds(*known), " on one rank, ", described_kinds(other), " on another");
  if (mine.size() == 0) made = rows_of_kinds(*known, made.front().device());
  ShardedBatch augmented = batch;
  for (std::size_t i = 0; i < made.size(); ++i) {
    auto shape = made[i].sizes().vec();
    shape[0] = batch.rows;
    const at::Tensor dealt =
        from_local(made[i].contiguous(), ShardSpec(mesh, shape, by_rows, {{0, rows.sizes()}}));
    augmented.tensors[i] = as_before(dealt, spec(batch.tensors[i]));
  }
  return augmented;
}

}  // namespace tessera
