#pragma once
// Loader: each process reads its shard of every global batch, ahead of time, in an order that does
// not depend on ranks, workers or devices.
//
//   auto order = std::make_shared<FixedOrder>(
//       SampleOrderOptions{.samples = data->size(), .seed = 1}, BatchSchedule(256));
//   Loader loader({data}, order, batch_mapping(mesh.mesh(), {"data"}), manager.rank(),
//                 {.workers = 2});
//   // rows of this process; batch.real of them count
//   for (auto& batch : loader.epoch()) { ... batch.tensors[0] or batch.field("image") ... }
//   // a short text, from which Loader::restore continues, on any number of ranks
//   std::string state = loader.state();

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/base/pinned.h"
#include "tessera/comm/group/group.h"
#include "tessera/data/dataset.h"
#include "tessera/data/fields.h"
#include "tessera/data/orders.h"
#include "tessera/mesh/mesh.h"
#include "tessera/sampling/batch_mapping.h"

namespace tessera {

/// Thrown if the source did not deliver a batch within the limit; calling next() again waits again.
class StalledError : public Error {
 public:
  using Error::Error;
};

/// The batch mapping of a mesh in which every rank is a process with one device. Throws
/// InvalidArgument for an unknown axis.
BatchMapping batch_mapping(const Mesh& mesh, const std::vector<std::string>& batch_axes);

struct LoaderOptions {
  /// Threads that read ahead; 0: next() reads in the caller's thread.
  int workers = 0;
  /// Number of batches read ahead of the one that is waited for; no more are begun (back-pressure).
  /// They are planned as workers take them, so that a large number costs nothing by itself.
  int prefetch = 2;
  /// The time without a batch after which next() throws StalledError, and the destructor abandons a
  /// worker that still reads: the datasets must own what they use.
  std::chrono::milliseconds stall_limit = kDefaultLimit;
  /// Read into page-locked host memory, for a device that copies from it. Throws NotAvailable
  /// without one.
  bool pin_memory = false;
  /// Copy batches to this device, ahead, on a side stream. Throws NotAvailable for a kind of device
  /// that libtorch or the machine lacks.
  std::optional<c10::Device> device = {};
  /// Changes each sample that has been read, in the threads that read: see Augmentation.
  Augmentation augment = {};
  /// False where another rank reads for this one (reads_for_others()): batches have their place and
  /// rows, but no tensors, and the datasets are asked for their sizes and names alone.
  bool reads = true;
  /// Makes a batch of samples that Dataset::get_batch cannot stack (other shapes). Called by
  /// workers at the same time, with at least one sample; each tensor it returns has the samples in
  /// dim 0. Not possible with a PackedOrder.
  std::function<std::vector<at::Tensor>(const std::vector<Sample>&)> collate = {};
  /// The samples are graphs of different sizes, and a batch is one graph of those of this process,
  /// without edges between. By names: "edges/index" is 2 x edges, int64, numbers of nodes from 0 in
  /// each sample, sources first; what else is under "edges" has a row for each edge, what is under
  /// "nodes" one for each node. These lie one behind the other in a batch, "edges/index" along
  /// dim 1 as numbers of the batch's nodes; other tensors are stacked, a row for each graph. At the
  /// end there is "nodes/graph", the row of each node's graph (int64). `rows`, `real` and `mask`
  /// count graphs. Not possible with `collate`, a PackedOrder or shard_batch(); see shard_graph()
  /// for graphs that ranks of a domain share.
  bool graphs = false;
  /// Names of a batch's tensors, instead of those that the datasets give: one for each tensor that
  /// `collate` makes, which have none otherwise. The same on every rank.
  std::vector<std::string> names = {};
};

/// Collates samples whose tensors differ in length along dim 0: each is filled up to the longest
/// with `fill`, and a tensor of lengths (int64, [rows]) is appended.
std::vector<at::Tensor> pad_collate(const std::vector<Sample>& samples, double fill = 0);

/// This process' shard of a global batch. With a PackedOrder: each tensor of the samples as [rows,
/// capacity, ...], filled up with zeros, and at the end one named "segments" with the number, from
/// 1, of the sample in its row that a token belongs to, 0 where there is none (int64, [rows,
/// capacity]). The names are those of the datasets or of LoaderOptions.
struct LoadedBatch : TensorBatch {
  /// The sample of each row; with a PackedOrder, each sample that this process reads.
  std::vector<SampleRef> samples;
  /// Which rows belong to which batch coordinate.
  std::vector<BatchSlice> slices;
  std::int64_t global_rows = 0, global_real = 0;
};

class Loader : Pinned {
 public:
  /// `datasets`: those that the order's samples refer to. `process`: as in the mapping. Throws
  /// InvalidArgument for options out of range, for datasets that have fewer samples than the order
  /// names, and for ones that name their tensors differently; NotAvailable (see LoaderOptions).
  Loader(std::vector<std::shared_ptr<const Dataset>> datasets, std::shared_ptr<const Order> order,
         BatchMapping mapping, int process, LoaderOptions options = {});
  ~Loader();

  /// Returns the next batch. Throws SampleError (what a dataset threw, with the sample's index) or
  /// StalledError; the position does not change then, and the next call tries the same batch.
  LoadedBatch next();
  /// The batches until the end of the epoch, as a range for one loop. In the middle of an epoch
  /// (after restore) it continues to that epoch's end.
  class EpochRange;
  EpochRange epoch();
  /// The epoch of the batch that next() will deliver.
  std::uint64_t next_epoch();

  /// The position of next() as text, whatever has been read ahead. The same text on every process;
  /// valid for any mapping of the same order.
  std::string state() const;
  /// Continues from a state. Throws ConfigurationError if it was saved by an order of another
  /// description.
  void restore(const std::string& state);
  /// Collective: throws MismatchError on every rank unless all have the same order, position, sizes
  /// of datasets and mapping. A rank that differs (a shorter file on its host, another seed) would
  /// train on other data, or wait for ever at the end of an epoch.
  void require_agreement(const Group& group) const;
  /// Continues at a step. Throws InvalidArgument for orders whose batch sizes are not known
  /// beforehand: those need a saved state.
  void seek(std::uint64_t step);

 private:
  struct Engine;

  std::shared_ptr<Engine> engine_;
};

class Loader::EpochRange {
 public:
  explicit EpochRange(Loader& loader) : loader_(loader) {}
  struct End {};
  class Iterator {
   public:
    explicit Iterator(Loader& loader) : loader_(loader), batch_(loader.next()) {}
    LoadedBatch& operator*() { return batch_; }
    LoadedBatch* operator->() { return &batch_; }
    Iterator& operator++();
    bool operator==(End) const { return done_; }

   private:
    Loader& loader_;
    LoadedBatch batch_;
    bool done_ = false;
  };
  Iterator begin() { return Iterator(loader_); }
  End end() { return {}; }

 private:
  Loader& loader_;
};

}  // namespace tessera
