#include "tessera/data/detail/read_batch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <exception>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail {
namespace {

std::vector<at::Tensor> without_rows(std::vector<at::Tensor> batch) {
  for (at::Tensor& t : batch) t = t.narrow(0, 0, 0);
  return batch;
}

std::string described(const at::Tensor& t) {
  return t.defined() ? concat(t.scalar_type(), ' ', t.sizes(), " on ", t.device()) : "undefined";
}

}  // namespace

void require_alike(const Sample& sample, const Sample& first, const std::string& first_name) {
  if (sample.size() != first.size())
    throw InvalidArgument("it has ", sample.size(), " tensors, ", first_name, " has ",
                          first.size());
  for (std::size_t t = 0; t < sample.size(); ++t) {
    const std::string own = described(sample[t]), expected = described(first[t]);
    if (own == expected) continue;
    throw InvalidArgument("its tensor ", t, " is ", own, ", that of ", first_name, " is ", expected,
                          "; give samples of one shape, dtype and device, or override "
                          "get_batch");
  }
}

std::vector<at::Tensor> stacked(const std::vector<Sample>& samples) {
  std::vector<at::Tensor> batch;
  for (std::size_t t = 0; !samples.empty() && t < samples.front().size(); ++t)
    batch.push_back(at::stack(mapped(samples, [&](const Sample& s) { return s[t]; })));
  return batch;
}

void require_plain(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& t : tensors)
    if (is_sharded(t))
      throw InvalidArgument("a dataset has a sharded tensor, ", spec(t),
                            ", and each rank reads rows of its own: give plain tensors "
                            "(full_tensor), and shard what was read by shard_batch");
}

namespace {

// Throws InvalidArgument for a sample that no dataset has: an order of the user's own may name
// any.
void check_samples(const BatchReader& reader, const std::vector<SampleRef>& refs) {
  const auto sizes = mapped(reader.datasets, [](const auto& dataset) { return dataset->size(); });
  for (const SampleRef& ref : refs) {
    if (ref.dataset < 0 || ref.dataset >= static_cast<int>(sizes.size()))
      throw InvalidArgument("the order names dataset ", ref.dataset, ", the loader has ",
                            sizes.size(), ": ", reader.order->describe());
    if (ref.index >= sizes[static_cast<std::size_t>(ref.dataset)])
      throw InvalidArgument("the order names sample ", ref.index, " of dataset ", ref.dataset,
                            ", which has ", sizes[static_cast<std::size_t>(ref.dataset)], ": ",
                            reader.order->describe());
  }
}

// Throws InvalidArgument for a packed batch whose rows do not fit together.
void check_packed(const BatchReader& reader, const OrderBatch& batch) {
  auto refuse = [&](const auto&... why) {
    throw InvalidArgument("a packed batch of the order does not fit together: ", why..., " (",
                          reader.order->describe(), ")");
  };
  if (batch.packed.size() != batch.size)
    refuse(batch.packed.size(), " rows for a batch of ", batch.size);
  if (batch.rows.empty()) refuse("it names no sample");
  for (const auto& row : batch.packed) {
    std::uint64_t taken = 0;
    for (const Packed& packed : row) {
      if (packed.position >= batch.rows.size())
        refuse("sample ", packed.position, " of ", batch.rows.size());
      if (packed.length > batch.capacity - taken)
        refuse("a row of more than its ", batch.capacity, " tokens");
      taken += packed.length;
    }
  }
  check_samples(reader, batch.rows);
}

// The sample, augmented.
Sample read_sample(const BatchReader& reader, const SampleRef& ref, const OrderBatch& batch) {
  return of_sample(ref.index, [&] {
    Sample sample = reader.datasets[static_cast<std::size_t>(ref.dataset)]->get(ref.index);
    const Augmentation& augment = reader.options.augment;
    return augment.function ? augmented(sample, ref, augment, {batch.epoch, batch.step}) : sample;
  });
}

std::vector<at::Tensor> read_from(const BatchReader& reader, int dataset,
                                  const std::vector<std::uint64_t>& indices) {
  const Dataset& from = *reader.datasets[static_cast<std::size_t>(dataset)];
  std::vector<at::Tensor> batch;
  try {
    batch = from.get_batch(indices);
  } catch (const SampleError&) {
    throw;
  } catch (...) {
    // To find the sample that failed, each is read by itself, and fails again.
    for (const std::uint64_t index : indices)
      of_sample(index, [&] { return from.get_batch({&index, 1}); });
    // None fails: the failure was temporary, or one of all together.
    of_sample(indices.front(), [&]() -> int { throw; });
  }
  for (const at::Tensor& t : batch)
    if (t.dim() == 0 || t.size(0) != static_cast<std::int64_t>(indices.size()))
      throw InvalidArgument("dataset ", dataset, " gave a tensor of shape ", t.sizes(),
                            " for a batch of ", indices.size(),
                            " samples; get_batch puts a dim of that length in front");
  require_plain(batch);
  return batch;
}

// Tensors without rows, if the dataset knows the shapes without reading; else an empty list.
std::vector<at::Tensor> known_shapes(const Dataset& dataset) {
  std::vector<at::Tensor> none;
  try {
    none = dataset.get_batch({});
  } catch (const std::exception&) {
    return {};  // a get_batch that does not support this: read one sample
  }
  for (const at::Tensor& t : none)
    if (t.dim() == 0 || t.size(0) != 0) return {};
  return none;
}

// Rows of several datasets, in the order of `refs`.
std::vector<at::Tensor> rows_of(const BatchReader& reader, const std::vector<SampleRef>& refs) {
  std::vector<at::Tensor> batch;
  std::vector<std::uint64_t> indices;
  std::vector<std::int64_t> places;
  for (int d = 0; d < static_cast<int>(reader.datasets.size()); ++d) {
    indices.clear();
    places.clear();
    for (std::size_t i = 0; i < refs.size(); ++i)
      if (refs[i].dataset == d) {
        indices.push_back(refs[i].index);
        places.push_back(static_cast<std::int64_t>(i));
      }
    if (indices.empty()) continue;
    auto part = read_from(reader, d, indices);
    if (indices.size() == refs.size()) return part;
    if (batch.empty())
      for (const at::Tensor& t : part) {
        auto shape = t.sizes().vec();
        shape[0] = static_cast<std::int64_t>(refs.size());
        batch.push_back(at::empty(shape, t.options()));
      }
    if (part.size() != batch.size())
      throw InvalidArgument("the samples of dataset ", d, " have ", part.size(),
                            " tensors, those of others ", batch.size());
    for (std::size_t t = 0; t < part.size(); ++t) {
      if (part[t].sizes().slice(1) != batch[t].sizes().slice(1) ||
          part[t].scalar_type() != batch[t].scalar_type() || part[t].device() != batch[t].device())
        throw InvalidArgument(
            "tensor ", t, " of dataset ", d, " has shape ", part[t].sizes().slice(1), " and dtype ",
            part[t].scalar_type(), " on ", part[t].device(), ", that of others ",
            batch[t].sizes().slice(1), " and ", batch[t].scalar_type(), " on ", batch[t].device(),
            "; a mixture needs samples of one shape, dtype and device");
      batch[t].index_copy_(0, at::tensor(places), part[t]);
    }
  }
  return batch;
}

// The tensors of a batch of these samples.
std::vector<at::Tensor> batch_of(const BatchReader& reader, const std::vector<SampleRef>& refs,
                                 const OrderBatch& batch) {
  const LoaderOptions& options = reader.options;
  if (options.collate) {
    std::vector<Sample> samples;
    for (const SampleRef& ref : refs) samples.push_back(read_sample(reader, ref, batch));
    return options.collate(samples);
  }
  if (!options.augment.function) return rows_of(reader, refs);
  return augmented_rows(rows_of(reader, refs), refs, options.augment, {batch.epoch, batch.step});
}

std::vector<at::Tensor> graph_of(const BatchReader& reader, const std::vector<SampleRef>& refs,
                                 const OrderBatch& batch, bool empty) {
  std::vector<Sample> samples;
  for (const SampleRef& ref : refs) {
    samples.push_back(read_sample(reader, ref, batch));
    of_sample(ref.index, [&] { require_graph(reader.names, samples.back(), samples.front()); });
  }
  return graph_batch(reader.names, samples, empty);
}

void read_packed(const BatchReader& reader, const OrderBatch& batch, LoadedBatch& out) {
  if (reader.options.collate || reader.options.graphs)
    throw InvalidArgument(
        "LoaderOptions::collate or graphs with a PackedOrder, which arranges its samples in rows "
        "itself; leave one of them out");
  const auto capacity = static_cast<std::int64_t>(batch.capacity);
  auto allocate = [&](const Sample& like) {
    for (const at::Tensor& t : like) {
      auto shape = t.sizes().vec();
      if (shape.empty())
        throw InvalidArgument(
            "packed samples are tensors with tokens along dim 0; this one has no dim");
      shape[0] = capacity;
      shape.insert(shape.begin(), out.rows);
      out.tensors.push_back(at::zeros(shape, t.options()));
    }
    out.tensors.push_back(at::zeros({out.rows, capacity}, at::kLong));
  };
  std::int64_t row = 0;
  for (const BatchSlice& slice : out.slices)
    for (auto i = slice.samples.begin; i < slice.samples.end; ++i, ++row) {
      std::int64_t at = 0, number = 0;
      for (const Packed& packed : batch.packed[static_cast<std::size_t>(i)]) {
        const SampleRef ref = batch.rows[packed.position];
        const Sample sample = read_sample(reader, ref, batch);
        if (out.tensors.empty()) allocate(sample);
        if (sample.size() + 1 != out.tensors.size())
          throw SampleError(concat("sample ", ref.index, " has ", sample.size(),
                                   " tensors, others ", out.tensors.size() - 1),
                            ref.index);
        const auto n = static_cast<std::int64_t>(packed.length);
        for (std::size_t t = 0; t < sample.size(); ++t) {
          if (sample[t].dim() == 0 || sample[t].size(0) != n)
            throw SampleError(
                concat("sample ", ref.index, " has a tensor of shape ", sample[t].sizes(),
                       ", the order was told ", packed.length, " tokens"),
                ref.index);
          if (const at::Tensor& all = out.tensors[t];
              sample[t].scalar_type() != all.scalar_type() || sample[t].device() != all.device())
            throw SampleError(
                concat("sample ", ref.index, " has a tensor ", described(sample[t]),
                       ", those of others are ", all.scalar_type(), " on ", all.device()),
                ref.index);
          out.tensors[t][row].narrow(0, at, n).copy_(sample[t]);
        }
        out.tensors.back()[row].narrow(0, at, n).fill_(++number);
        out.samples.push_back(ref);
        at += n;
      }
    }
  // This process reads no sample: tensors of the right shape all the same, since every rank runs
  // the same step.
  if (out.tensors.empty()) allocate(read_sample(reader, batch.rows.front(), batch));
}

void name_tensors(const std::vector<std::string>& names, LoadedBatch& out, bool packed) {
  if (names.empty()) return;
  out.names = names;
  if (packed && names.size() + 1 == out.tensors.size()) {
    out.names.emplace_back("segments");
    require_field_names(out.names);
  }
  if (out.names.size() != out.tensors.size())
    throw InvalidArgument("a batch of ", out.tensors.size(), " tensors and ", out.names.size(),
                          " names for them: ", list(out.names));
}

}  // namespace

LoadedBatch BatchReader::read(const OrderBatch& batch) const {
  if (batch.real > batch.size || batch.size > static_cast<std::uint64_t>(INT64_MAX))
    throw InvalidArgument("the order gave a batch of ", batch.size, " rows, of which ", batch.real,
                          " are real: ", order->describe());
  LoadedBatch out;
  out.step = batch.step;
  out.epoch = batch.epoch;
  out.global_rows = static_cast<std::int64_t>(batch.size);
  out.global_real = static_cast<std::int64_t>(batch.real);
  out.slices = mapping.slices(process, out.global_rows);
  auto real_in = [&](const BatchSlice& slice) {
    return std::clamp<std::int64_t>(out.global_real - slice.samples.begin, 0, slice.samples.size());
  };
  for (const BatchSlice& slice : out.slices) {
    out.rows += slice.samples.size();
    out.real += real_in(slice);
  }
  if (!batch.packed.empty()) {
    check_packed(*this, batch);
    if (!options.reads) return out;
    read_packed(*this, batch, out);
    name_tensors(names, out, /*packed=*/true);
    return out;
  }
  out.samples.resize(static_cast<std::size_t>(out.rows));
  for (const BatchSlice& slice : out.slices)
    order->rows(batch, static_cast<std::uint64_t>(slice.samples.begin),
                std::span(out.samples)
                    .subspan(static_cast<std::size_t>(slice.slot),
                             static_cast<std::size_t>(slice.samples.size())));
  check_samples(*this, out.samples);
  if (!options.reads) {
    // Another rank does.
  } else if (!out.samples.empty()) {
    out.tensors = options.graphs ? graph_of(*this, out.samples, batch, false)
                                 : batch_of(*this, out.samples, batch);
  } else {
    // A process without rows still gets tensors of the right shape, with no row: every rank runs
    // the same step.
    std::vector<SampleRef> any(1);
    order->rows(batch, 0, any);
    check_samples(*this, any);
    if (options.graphs)
      out.tensors = graph_of(*this, any, batch, true);
    else if (!options.collate && !options.augment.function)
      out.tensors = known_shapes(*datasets[static_cast<std::size_t>(any[0].dataset)]);
    if (out.tensors.empty()) out.tensors = without_rows(batch_of(*this, any, batch));
  }
  if (options.reads) name_tensors(names, out, /*packed=*/false);
  if (out.real < out.rows) {
    out.mask = at::zeros({out.rows}, at::kBool);
    for (const BatchSlice& slice : out.slices)
      out.mask.narrow(0, slice.slot, real_in(slice)).fill_(true);
  }
  return out;
}

}  // namespace tessera::detail
