#include "tessera/ops/indexing/detail/table_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/embedding_bag.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail {
namespace {

// Which bags this rank makes of which indices.
struct BagCut {
  // Where this rank's bags begin among all indices.
  Sizes begins;
  // Bags and indices of all ranks.
  ShardSpec bags, indices;
};

// A tensor of one dim of these sizes over the axes that shard it.
ShardSpec cut_as(const ShardSpec& like, const std::vector<Placement>& placements,
                 const Sizes& sizes) {
  const bool is_cut =
      std::ranges::any_of(placements, [](const Placement& p) { return p.is_shard(); });
  return {like.mesh(),
          {c10::sum_integers(sizes)},
          placements,
          is_cut ? ShardSizes{{0, sizes}} : ShardSizes{}};
}

[[noreturn]] void wrong_offsets(const std::string& what) {
  throw InvalidArgument("embedding_bag: ", what,
                        ": offsets begin at 0, do not decrease, and are at most the number "
                        "of indices");
}

// Of offsets that are whole here: a bag is made where the first of its indices lies.
BagCut cut_where_indices_lie(const Sizes& offsets, bool include_last, const ShardSpec& indices) {
  const std::int64_t count = indices.shape()[0];
  if (offsets.empty() && include_last)
    throw InvalidArgument("embedding_bag: include_last_offset without offsets");
  if (!std::ranges::is_sorted(offsets)) wrong_offsets("offsets decrease");
  if (!offsets.empty() && offsets.front() != 0)
    wrong_offsets(concat("offsets[0] is ", offsets.front()));
  if (!offsets.empty() && offsets.back() > count)
    wrong_offsets(concat("offsets[-1] is ", offsets.back(), " of ", count, " indices"));
  const auto last = offsets.end() - (include_last ? 1 : 0);
  const std::int64_t end = offsets.empty() ? 0 : include_last ? offsets.back() : count;
  const DimSharding& dim = indices.dim(0);
  const int parts = dim.axes.empty() ? 1 : dim.partition.parts();
  Sizes bags, lengths;
  auto at = offsets.begin();
  std::int64_t begin = 0;
  BagCut cut;
  const int me = dim.axes.empty() ? 0 : context_of(indices)->mesh.group(dim.axes).rank();
  for (int r = 0; r < parts; ++r) {
    const auto next =
        r + 1 == parts ? last : std::lower_bound(at, last, dim.partition.begin(r + 1));
    if (r == me) cut.begins = Sizes(at, next);
    const std::int64_t stop = next == last ? end : *next;
    bags.push_back(next - at);
    lengths.push_back(stop - begin);
    begin = stop;
    at = next;
  }
  cut.bags = cut_as(indices, indices.placements(), bags);
  cut.indices = cut_as(indices, indices.placements(), lengths);
  return cut;
}

// Of offsets of which each rank has some: it makes those bags. Collective over the ranks that do.
BagCut cut_where_offsets_lie(const at::Tensor& offsets, bool include_last, std::int64_t count) {
  const ShardSpec& spec = meta_of(offsets)->spec();
  BagCut cut;
  cut.begins = host_numbers(meta_of(offsets)->local);
  const bool ordered = std::ranges::is_sorted(cut.begins);
  const Group ranks = context_of(spec)->mesh.group(spec.dim(0).axes);
  const std::int64_t none = -1;
  const at::Tensor ends =
      tensor_of({cut.begins.empty() ? none : cut.begins.front(),
                 cut.begins.empty() ? none : cut.begins.back(), std::int64_t{ordered}},
                meta_of(offsets)->local);
  const at::Tensor all = at::empty({3 * ranks.size()}, ends.options());
  ranks.all_gather(all, ends, {}, {.name = "offsets of bags"});
  const Sizes of_all = host_numbers(all);
  Sizes bags = spec.dim(0).partition.sizes(), lengths(bags.size(), 0);
  std::int64_t end = include_last ? none : count, before = 0;
  for (std::size_t r = 0; r < bags.size(); ++r) {
    if (bags[r] == 0) continue;
    const std::int64_t first = of_all[3 * r], last = of_all[3 * r + 1];
    if (before == 0 && first != 0 &&
        std::all_of(bags.begin(), bags.begin() + r, [](auto n) { return n == 0; }))
      wrong_offsets(concat("offsets[0] is ", first));
    if (of_all[3 * r + 2] == 0 || first < before) wrong_offsets("offsets decrease");
    if (last > count) wrong_offsets(concat("an offset is ", last, " of ", count, " indices"));
    before = last;
  }
  if (include_last) {
    std::size_t r = bags.size();
    while (r > 0 && bags[r - 1] == 0) --r;
    if (r == 0) throw InvalidArgument("embedding_bag: include_last_offset without offsets");
    end = of_all[3 * r - 2];
    --bags[r - 1];
    if (static_cast<int>(r) - 1 == ranks.rank()) cut.begins.pop_back();
  }
  if (std::ranges::all_of(bags, [](auto n) { return n == 0; })) end = 0;
  for (std::size_t r = bags.size(); r-- > 0;) {
    if (bags[r] == 0) continue;
    lengths[r] = end - of_all[3 * r];
    end = of_all[3 * r];
  }
  cut.bags = cut_as(spec, spec.placements(), bags);
  cut.indices = cut_as(spec, spec.placements(), lengths);
  return cut;
}

// This rank's bags.
struct Bags {
  at::Tensor made, bag_of, size;
};

Bags local_bags(const at::Tensor& table, const at::Tensor& given, const at::Tensor& weights,
                const BagCut& cut, const BagOptions& options) {
  at::Tensor ids = given, samples = weights, begins, bag_of, size;
  {
    const at::NoGradGuard no_grad;
    const auto longs = at::TensorOptions(at::kLong).device(given.device());
    const std::int64_t first = cut.indices.local_offset()[0];
    begins = tensor_of(cut.begins, given) - first;
    bag_of = at::bucketize(at::arange(ids.numel(), longs), begins, false, true) - 1;
    if (options.table.padding >= 0) {
      // What counts for nothing is not asked for.
      const at::Tensor keep = given.ne(options.table.padding);
      const at::Tensor before = at::cat({at::zeros({1}, longs), at::cumsum(keep, 0)}).to(at::kLong);
      begins = before.index_select(0, begins);
      const at::Tensor places = keep.nonzero().squeeze(1);
      ids = given.index_select(0, places);
      if (weights.defined()) samples = places;
    }
    size = at::cat({begins, tensor_of({ids.numel()}, given)}).diff();
  }
  if (weights.defined() && options.table.padding >= 0) samples = weights.index_select(0, samples);
  const TableRows found = table_rows(table, ids, cut.indices.placements(), options.table);
  const std::int64_t columns = found.rows.size(1);
  at::Tensor made;
  if (begins.numel() == 0 || ids.numel() == 0) {
    // Its backward is a call of all ranks.
    made = at::zeros({begins.numel(), columns}, found.rows.options()) + found.rows.sum(0);
    if (samples.defined()) made = made + samples.sum();
  } else {
    made = std::get<0>(at::embedding_bag(
        found.rows, found.place, begins, false, options.mode, false,
        samples.defined() ? std::optional<at::Tensor>(samples) : std::nullopt, false));
  }
  return {made, bag_of, size};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> bags_of_table(
    const at::Tensor& table, const at::Tensor& indices, const at::Tensor& offsets,
    const at::Tensor& weights, const BagOptions& options) {
  TORCH_CHECK(!options.table.sparse || !options.table.by_frequency,
              "embedding_bag: scale_grad_by_freq is not there for sparse gradients");
  const ShardSpec rows = meta_of(table)->spec();
  const bool by_offsets = meta_of(offsets) && spec(offsets).is_sharded(0);
  const auto wanted = without_partial(by_offsets ? spec(offsets) : spec(indices)).placements();
  const auto beside = beside_columns(rows, wanted);
  const auto& context = context_of(rows);
  const std::int64_t count = indices.size(0);
  BagCut cut;
  {
    const at::NoGradGuard no_grad;
    const at::Tensor near = by_offsets         ? redistribute(offsets, beside)
                            : meta_of(offsets) ? full_tensor(offsets)
                                               : offsets;
    if (by_offsets && spec(near).is_sharded(0)) {
      cut = cut_where_offsets_lie(near, options.include_last, count);
    } else {
      cut = cut_where_indices_lie(host_numbers(by_offsets ? to_local(near) : near),
                                  options.include_last,
                                  without_partial(spec(indices)).with_placements(beside));
    }
  }
  // Each rank of an axis that shards columns computes with its own.
  auto of_columns = cut.indices.placements();
  for (std::size_t a = 0; a < of_columns.size(); ++a)
    if (rows.placements()[a].is_shard(1)) of_columns[a] = Partial();
  const auto here = [&](const at::Tensor& t) {
    if (!t.defined()) return t;
    const std::int64_t used = cut.indices.shape()[0];
    return to_local(redistribute(used < count ? t.narrow(0, 0, used) : t, cut.indices), of_columns);
  };
  const at::Tensor ids = here(indices).to(at::kLong), samples = here(weights);
  Bags local;
  try {
    local = local_bags(table, ids, samples, cut, options);
  } catch (...) {
    rethrow_to_all("aten::embedding_bag", *context);
  }
  const ShardSpec made = lookup_spec(cut.bags, rows, with_columns(rows, beside, 1));
  at::Tensor result = from_local(local.made, made);
  if (auto out = with_columns(rows, wanted, 1); out != made.placements())
    result = redistribute(result, out);
  const auto type = offsets.scalar_type();
  const at::Tensor size = from_local(local.size.to(type), cut.bags);
  return {result, from_local(local.bag_of.to(type), cut.indices), size, at::zeros_like(size)};
}

}  // namespace tessera::detail
