// Data: sources, datasets (Python's own among them), orders, the loader and streams.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include "callbacks.h"
#include "handles.h"
#include "library.h"
#include "mesh.h"
#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/data/loader.h"
#include "tessera/data/orders.h"
#include "tessera/data/shard_batch.h"
#include "tessera/data/sources/hdf5_source.h"
#include "tessera/data/sources/netcdf_source.h"
#include "tessera/data/sources/safetensors_source.h"
#include "tessera/data/sources/source_dataset.h"
#include "tessera/data/sources/zarr_source.h"
#include "tessera/data/stream_loader.h"

namespace tessera::python {

namespace {

class PythonDataset final : public Dataset {
 public:
  PythonDataset(std::uint64_t size, PythonFunction batch) : size_(size), batch_(batch) {}
  std::uint64_t size() const override { return size_; }
  Sample get(std::uint64_t index) const override {
    Sample one = get_batch({&index, 1});
    for (at::Tensor& t : one) {
      if (t.dim() == 0 || t.size(0) != 1)
        throw InvalidArgument("a batch of one sample has a tensor of shape ", t.sizes(),
                              "; its dim 0 is 1");
      t = t.squeeze(0);
    }
    return one;
  }
  Tensors get_batch(std::span<const std::uint64_t> indices) const override {
    return ask(batch_, indices).value_or(Tensors{});
  }

 private:
  std::uint64_t size_;
  PythonFunction batch_;
};

class PythonStream final : public IterableDataset {
 public:
  explicit PythonStream(PythonFunction next) : next_(next) {}
  std::optional<Sample> next() override { return ask(next_, {}); }

 private:
  PythonFunction next_;
};

// Each shard that is opened has a number of its own, by which Python keeps its iterator; the sample
// that comes next is said too, so that one that Python let go is opened again where it was.
class PythonShards final : public StreamShards {
 public:
  PythonShards(std::uint64_t size, PythonFunction next) : size_(size), next_(next) {}
  std::uint64_t size() const override { return size_; }
  std::unique_ptr<IterableDataset> open(std::uint64_t shard, std::uint64_t from) const override {
    return std::make_unique<One>(next_, std::array<std::uint64_t, 3>{opened_++, shard, from});
  }

 private:
  struct One final : IterableDataset {
    One(PythonFunction next, std::array<std::uint64_t, 3> which) : next_(next), which(which) {}
    std::optional<Sample> next() override {
      auto sample = ask(next_, which);
      if (sample) ++which[2];
      return sample;
    }
    PythonFunction next_;
    std::array<std::uint64_t, 3> which;  // the opening, the shard, the sample
  };

  std::uint64_t size_;
  PythonFunction next_;
  mutable std::uint64_t opened_ = 0;  // by one thread at a time
};

using PySource = Held<std::shared_ptr<const Source>>;
using SourcePtr = c10::intrusive_ptr<PySource>;

using PyDataset = Held<std::shared_ptr<const Dataset>>;
using DatasetPtr = c10::intrusive_ptr<PyDataset>;

using PyOrder = Held<std::shared_ptr<const Order>>;
using OrderPtr = c10::intrusive_ptr<PyOrder>;

/// (from step, batch size) each.
using ScheduleEntries = std::vector<std::tuple<std::int64_t, std::int64_t>>;
BatchSchedule schedule_of(const ScheduleEntries& entries) {
  std::vector<BatchSchedule::Entry> all;
  for (const auto& [from, size] : entries) {
    if (from < 0 || size < 0)
      throw InvalidArgument("a batch size of ", size, " from step ", from, " on");
    all.push_back({static_cast<std::uint64_t>(from), static_cast<std::uint64_t>(size)});
  }
  return BatchSchedule(std::move(all));
}

std::uint64_t natural(std::int64_t number, const char* what) {
  if (number < 0) throw InvalidArgument(what, " is ", number, ", below 0");
  return static_cast<std::uint64_t>(number);
}
std::vector<std::uint64_t> naturals(const Numbers& numbers, const char* what) {
  std::vector<std::uint64_t> all;
  for (const auto n : numbers) all.push_back(natural(n, what));
  return all;
}

LastBatch last_batch(const std::string& name) {
  if (name == "keep") return LastBatch::keep;
  if (name == "pad") return LastBatch::pad;
  if (name == "drop") return LastBatch::drop;
  throw InvalidArgument("the last batch is 'keep', 'pad' or 'drop', not '", name, "'");
}

UnevenData uneven_data(const std::string& name) {
  if (name == "error") return UnevenData::error;
  if (name == "drop") return UnevenData::drop;
  if (name == "pad") return UnevenData::pad;
  if (name == "weight_zero") return UnevenData::weight_zero;
  throw InvalidArgument("uneven data is 'error', 'drop', 'pad' or 'weight_zero', not '", name, "'");
}

std::optional<at::Tensor> if_defined(const at::Tensor& t) {
  return t.defined() ? std::optional(t) : std::nullopt;
}

/// step, epoch, rows, real, global rows, global real; tensors; mask; (dataset, index) of the
/// samples, flat; (coordinate, begin, end, slot) of the slices, flat; names of the tensors.
using BatchValues =
    std::tuple<Numbers, Tensors, std::optional<at::Tensor>, Numbers, Numbers, Names>;
BatchValues batch_values(const LoadedBatch& b) {
  Numbers samples, slices;
  for (const SampleRef& s : b.samples) {
    samples.push_back(s.dataset);
    samples.push_back(static_cast<std::int64_t>(s.index));
  }
  for (const BatchSlice& s : b.slices) {
    for (const std::int64_t n :
         {static_cast<std::int64_t>(s.coordinate), s.samples.begin, s.samples.end, s.slot})
      slices.push_back(n);
  }
  return {{static_cast<std::int64_t>(b.step), static_cast<std::int64_t>(b.epoch), b.rows, b.real,
           b.global_rows, b.global_real},
          b.tensors,
          if_defined(b.mask),
          samples,
          slices,
          b.names};
}

/// Of a loader's batch all six numbers and slices; of rows that no loader has dealt rows and real.
LoadedBatch batch_from(const Numbers& numbers, const Tensors& tensors,
                       const std::optional<at::Tensor>& mask, const Numbers& slices,
                       const Names& names) {
  LoadedBatch b;
  b.names = names;
  const bool dealt = numbers.size() > 2;
  b.rows = numbers.at(dealt ? 2 : 0);
  b.real = numbers.at(dealt ? 3 : 1);
  if (dealt) {
    b.step = natural(numbers[0], "step");
    b.epoch = natural(numbers[1], "epoch");
    b.global_rows = numbers.at(4);
    b.global_real = numbers.at(5);
  }
  b.tensors = tensors;
  b.mask = mask.value_or(at::Tensor());
  for (std::size_t i = 0; i + 3 < slices.size(); i += 4)
    b.slices.push_back(
        {static_cast<int>(slices[i]), {slices[i + 1], slices[i + 2]}, slices[i + 3]});
  return b;
}

/// The name of the field; axes and the dims that they shard; dims and the sizes of their shards;
/// whether each rank has read the whole.
using FieldShardings = std::vector<
    std::tuple<std::string, Names, Numbers, Numbers, std::vector<Numbers>, std::optional<bool>>>;
std::vector<FieldSharding> field_shardings(const FieldShardings& fields) {
  std::vector<FieldSharding> all;
  for (const auto& [name, axes, dims, sized, sizes, whole] : fields) {
    FieldSharding field{.field = name, .whole = whole};
    for (std::size_t i = 0; i < axes.size(); ++i)
      field.dims[axes[i]] = static_cast<int>(dims.at(i));
    for (std::size_t i = 0; i < sized.size(); ++i)
      field.sizes[static_cast<int>(sized[i])] = sizes.at(i);
    all.push_back(std::move(field));
  }
  return all;
}

/// step, epoch, rows, real; tensors; mask; names of the tensors.
using ShardedValues = std::tuple<Numbers, Tensors, std::optional<at::Tensor>, Names>;
ShardedValues sharded_values(const ShardedBatch& b) {
  return {{static_cast<std::int64_t>(b.step), static_cast<std::int64_t>(b.epoch), b.rows, b.real},
          b.tensors,
          if_defined(b.mask),
          b.names};
}

/// A function of Python's, which is given a sample and told the seed of its draws. 0: none.
Augmentation augmentation(std::int64_t function, std::int64_t seed) {
  if (function == 0) return {};
  const auto by = reinterpret_cast<PythonFunction>(function);  // NOLINT(performance-no-int-to-ptr)
  const auto call = [by](const Sample& sample, const at::Generator& draws) {
    const std::uint64_t number = draws.current_seed();
    return ask(by, {&number, 1}, sample).value_or(Sample());
  };
  return {.function = call, .seed = static_cast<std::uint64_t>(seed)};
}

std::vector<SampleRef> sample_refs(const Numbers& flat) {
  std::vector<SampleRef> refs;
  for (std::size_t i = 0; i + 1 < flat.size(); i += 2)
    refs.push_back({static_cast<int>(flat[i]), natural(flat[i + 1], "the index of a sample")});
  return refs;
}

struct PyLoader : torch::CustomClassHolder {
  PyLoader(const std::vector<DatasetPtr>& datasets, const OrderPtr& order, const MeshPtr& on,
           const Names& batch_axes, std::int64_t workers, std::int64_t prefetch, double stall_limit,
           bool pin_memory, const std::string& device, bool graphs, const Names& names,
           std::int64_t augment, std::int64_t seed, bool reads) {
    std::vector<std::shared_ptr<const Dataset>> all;
    for (const auto& d : datasets) all.push_back(d->value);
    LoaderOptions options;
    options.workers = static_cast<int>(workers);
    options.prefetch = static_cast<int>(prefetch);
    options.stall_limit = bounded_limit(std::chrono::duration<double>(stall_limit));
    options.pin_memory = pin_memory;
    if (!device.empty()) options.device = c10::Device(device);
    options.graphs = graphs;
    options.names = names;
    options.augment = augmentation(augment, seed);
    options.reads = reads;
    loader.emplace(std::move(all), order->value, batch_mapping(on->mesh.mesh(), batch_axes),
                   on->mesh.manager().rank(), std::move(options));
  }
  Loader& open() {
    if (!loader) throw InvalidArgument("the loader is closed");
    return *loader;
  }
  std::optional<Loader> loader;
};
using LoaderPtr = c10::intrusive_ptr<PyLoader>;

struct PyStreamLoader : torch::CustomClassHolder {
  PyStreamLoader(std::int64_t stream, std::int64_t rows, const GroupPtr& group,
                 const std::string& uneven, const Tensors& example, std::int64_t workers,
                 std::int64_t prefetch, double stall_limit, const Numbers& sharding) {
    StreamOptions options;
    options.uneven = uneven_data(uneven);
    options.example = example;
    options.workers = static_cast<int>(workers);
    options.prefetch = static_cast<int>(prefetch);
    options.stall_limit = bounded_limit(std::chrono::duration<double>(stall_limit));
    const auto function =
        reinterpret_cast<PythonFunction>(stream);  // NOLINT(performance-no-int-to-ptr)
    if (sharding.empty()) {
      loader.emplace(std::make_shared<PythonStream>(function), rows, group->group,
                     std::move(options));
      return;
    }
    // shards, lanes, shuffle, seed, epochs
    const auto shards = std::make_shared<PythonShards>(natural(sharding.at(0), "shards"), function);
    loader.emplace(
        shards,
        ShardedStreamOptions{sharding.at(1), sharding.at(2) != 0, natural(sharding.at(3), "seed"),
                             natural(sharding.at(4), "epochs")},
        rows, group->group, std::move(options));
  }
  StreamLoader& open() {
    if (!loader) throw InvalidArgument("the loader is closed");
    return *loader;
  }
  std::optional<StreamLoader> loader;
};
using StreamPtr = c10::intrusive_ptr<PyStreamLoader>;

SourcePtr open_source(const std::string& kind, const std::string& path) {
  if (kind == "netcdf") return c10::make_intrusive<PySource>(std::make_shared<NetcdfSource>(path));
  if (kind == "hdf5") return c10::make_intrusive<PySource>(std::make_shared<Hdf5Source>(path));
  if (kind == "safetensors")
    return c10::make_intrusive<PySource>(std::make_shared<SafetensorsSource>(path));
  if (kind == "zarr") return c10::make_intrusive<PySource>(std::make_shared<ZarrSource>(path));
  throw InvalidArgument("no kind of source '", kind, "': netcdf, hdf5, zarr, safetensors");
}

/// (variable, start, count, stride, decode) each.
using FieldTexts = std::vector<std::tuple<std::string, Numbers, Numbers, Numbers, bool>>;

void register_datasets(Library& library) {
  library.class_<PySource>("Source")
      .def("name", [](const SourcePtr& self) { return self->value->name(); })
      .def("variables", [](const SourcePtr& self) { return self->value->variables(); })
      .def("dims",
           [](const SourcePtr& self, const std::string& v) { return self->value->info(v).dims; })
      .def("shape",
           [](const SourcePtr& self, const std::string& v) { return self->value->info(v).shape; })
      .def("read", [](const SourcePtr& self, const std::string& variable, const Numbers& start,
                      const Numbers& count, const Numbers& stride, at::ScalarType dtype,
                      bool decode, double missing) {
        return self->value->read(variable, {start, count, stride}, {dtype, decode, missing});
      });
  library.class_<PyDataset>("Dataset")
      .def("size",
           [](const DatasetPtr& self) { return static_cast<std::int64_t>(self->value->size()); })
      .def("field_names", [](const DatasetPtr& self) { return self->value->field_names(); })
      .def("get", [](const DatasetPtr& self, std::int64_t index) {
        return self->value->get(natural(index, "the index of a sample"));
      });
  library.def("source", &open_source);
  library.def("tensor_dataset", [](const Tensors& tensors) {
    return c10::make_intrusive<PyDataset>(std::make_shared<TensorDataset>(tensors));
  });
  library.def("token_file_dataset", [](const std::string& path, at::ScalarType dtype,
                                       std::int64_t row, std::int64_t stride) {
    return c10::make_intrusive<PyDataset>(std::make_shared<TokenFileDataset>(
        path, dtype, natural(row, "row"), natural(stride, "stride")));
  });
  library.def("source_dataset", [](const SourcePtr& source, const FieldTexts& fields) {
    std::vector<SourceField> all;
    for (const auto& [variable, start, count, stride, decode] : fields) {
      SourceField field{variable, {start, count, stride}};
      field.read.decode = decode;
      all.push_back(std::move(field));
    }
    return c10::make_intrusive<PyDataset>(
        std::make_shared<SourceDataset>(source->value, std::move(all)));
  });
  library.def("python_dataset", [](std::int64_t size, std::int64_t reader) {
    const auto function =
        reinterpret_cast<PythonFunction>(reader);  // NOLINT(performance-no-int-to-ptr)
    return c10::make_intrusive<PyDataset>(
        std::make_shared<PythonDataset>(natural(size, "len() of the dataset"), function));
  });
}

void register_orders(Library& library) {
  library.class_<PyOrder>("Order").def(
      "describe", [](const OrderPtr& self) { return self->value->describe(); });
  library.def("fixed_order", [](std::int64_t samples, std::int64_t seed, bool shuffle,
                                const std::string& last, const ScheduleEntries& schedule) {
    const SampleOrderOptions options{natural(samples, "samples"), static_cast<std::uint64_t>(seed),
                                     shuffle, last_batch(last)};
    return c10::make_intrusive<PyOrder>(
        std::make_shared<FixedOrder>(options, schedule_of(schedule)));
  });
  library.def("weighted_order", [](const std::vector<double>& weights, std::int64_t seed,
                                   const ScheduleEntries& schedule, std::int64_t per_epoch) {
    return c10::make_intrusive<PyOrder>(std::make_shared<WeightedOrder>(
        weights, static_cast<std::uint64_t>(seed), schedule_of(schedule),
        natural(per_epoch, "samples_per_epoch")));
  });
  library.def(
      "mixture_order", [](const Names& names, const Numbers& samples,
                          const std::vector<std::tuple<std::int64_t, std::vector<double>>>& stages,
                          std::int64_t seed, bool shuffle, const ScheduleEntries& schedule) {
        std::vector<Mixture::Dataset> datasets;
        for (std::size_t i = 0; i < names.size(); ++i)
          datasets.push_back({names[i], natural(samples.at(i), "samples")});
        std::vector<Mixture::Stage> all;
        for (const auto& [from, weights] : stages)
          all.push_back({natural(from, "the first draw of a stage"), weights});
        return c10::make_intrusive<PyOrder>(std::make_shared<MixtureOrder>(
            Mixture(std::move(datasets), std::move(all), static_cast<std::uint64_t>(seed), shuffle),
            schedule_of(schedule)));
      });
  library.def("token_budget_order", [](const Numbers& lengths, std::int64_t tokens,
                                       std::int64_t max_samples, bool padded, std::int64_t seed,
                                       bool shuffle) {
    const TokenBudget budget{natural(tokens, "tokens"), natural(max_samples, "max_samples"),
                             padded};
    return c10::make_intrusive<PyOrder>(std::make_shared<TokenBudgetOrder>(
        naturals(lengths, "a length"), budget, static_cast<std::uint64_t>(seed), shuffle));
  });
  library.def("packed_order", [](const Numbers& lengths, std::int64_t rows, std::int64_t capacity,
                                 std::int64_t seed, bool shuffle) {
    return c10::make_intrusive<PyOrder>(std::make_shared<PackedOrder>(
        naturals(lengths, "a length"), natural(rows, "rows"), natural(capacity, "capacity"),
        static_cast<std::uint64_t>(seed), shuffle));
  });
}

}  // namespace

void register_data(Library& library) {
  register_datasets(library);
  register_orders(library);
  library.class_<PyLoader>("Loader")
      .def(torch::init<const std::vector<DatasetPtr>&, const OrderPtr&, const MeshPtr&,
                       const Names&, std::int64_t, std::int64_t, double, bool, const std::string&,
                       bool, const Names&, std::int64_t, std::int64_t, bool>())
      .def("next", [](const LoaderPtr& self) { return batch_values(self->open().next()); })
      .def("next_epoch",
           [](const LoaderPtr& self) {
             return static_cast<std::int64_t>(self->open().next_epoch());
           })
      .def("state", [](const LoaderPtr& self) { return self->open().state(); })
      .def("restore",
           [](const LoaderPtr& self, const std::string& state) { self->open().restore(state); })
      .def("seek", [](const LoaderPtr& self,
                      std::int64_t step) { self->open().seek(natural(step, "step")); })
      .def("require_agreement",
           [](const LoaderPtr& self, const GroupPtr& group) {
             self->open().require_agreement(group->group);
           })
      .def("close", [](const LoaderPtr& self) { self->loader.reset(); });
  library.def("shard_batch",
              [](const Numbers& numbers, const Tensors& tensors,
                 const std::optional<at::Tensor>& mask, const Numbers& slices, const Names& names,
                 const MeshPtr& mesh, const Names& axes, const FieldShardings& fields) {
                const LoadedBatch batch = batch_from(numbers, tensors, mask, slices, names);
                const auto on = field_shardings(fields);
                return sharded_values(numbers.size() > 2 ? shard_batch(batch, mesh->mesh, axes, on)
                                                         : shard_rows(batch, mesh->mesh, axes, on));
              });
  // Without numbers: this rank gives none.
  library.def("scatter_batch", [](const Numbers& numbers, const Tensors& tensors,
                                  const std::optional<at::Tensor>& mask, const Numbers& slices,
                                  const Names& names, const MeshPtr& mesh, const Names& axes,
                                  const FieldShardings& fields) {
    std::optional<LoadedBatch> batch;
    if (!numbers.empty()) batch = batch_from(numbers, tensors, mask, slices, names);
    const auto on = field_shardings(fields);
    return sharded_values(numbers.size() == 2 ? scatter_rows(*batch, mesh->mesh, axes, on)
                                              : scatter_batch(batch, mesh->mesh, axes, on));
  });
  library.def(
      "augment_batch", [](const Numbers& numbers, const Tensors& tensors, const Numbers& samples,
                          std::int64_t function, std::int64_t seed) {
        const ShardedBatch batch{.step = natural(numbers.at(0), "step"),
                                 .epoch = natural(numbers.at(1), "epoch"),
                                 .tensors = tensors,
                                 .rows = numbers.at(2),
                                 .real = numbers.at(3)};
        return augment_batch(batch, sample_refs(samples), augmentation(function, seed)).tensors;
      });
  library.def("reads_for_others", [](const MeshPtr& mesh, const Names& axes) {
    return reads_for_others(mesh->mesh, axes);
  });
  library.class_<PyStreamLoader>("StreamLoader")
      .def(torch::init<std::int64_t, std::int64_t, const GroupPtr&, const std::string&,
                       const Tensors&, std::int64_t, std::int64_t, double, const Numbers&>())
      .def("next",
           [](const StreamPtr& self) {
             // step, rows, real, global real; none of them at the end
             std::tuple<Numbers, Tensors, std::optional<at::Tensor>> values;
             if (auto b = self->open().next())
               values = {{static_cast<std::int64_t>(b->step), b->rows, b->real, b->global_real},
                         b->tensors,
                         if_defined(b->mask)};
             return values;
           })
      .def("state", [](const StreamPtr& self) { return self->open().state(); })
      .def("restore", [](const StreamPtr& self, const std::string& state,
                         bool replay) { self->open().restore(state, replay); })
      .def("close", [](const StreamPtr& self) { self->loader.reset(); });
}

}  // namespace tessera::python
