#pragma once
// BatchReader: reads this process' shard of a global batch from the datasets, into host memory, in
// the caller's thread; and what an Augmentation makes of a sample, and of the rows of a batch.

#include <exception>
#include <span>

#include "tessera/base/text.h"
#include "tessera/data/loader.h"

namespace tessera::detail {

struct BatchReader {
  std::vector<std::shared_ptr<const Dataset>> datasets;
  std::shared_ptr<const Order> order;
  BatchMapping mapping;
  int process;
  LoaderOptions options = {};
  /// The names of the tensors of a batch, of graphs with that of what is added, of a packed one
  /// without; empty: they have none.
  std::vector<std::string> names = {};

  /// Throws SampleError with the index of the sample that could not be read; InvalidArgument for
  /// samples that cannot be stacked to a batch, or have another number of tensors than there are
  /// names.
  LoadedBatch read(const OrderBatch& batch) const;
};

/// The batch that a sample is read for.
struct BatchNumber {
  std::uint64_t epoch = 0, step = 0;
};

/// Throws what the function throws, and InvalidArgument unless it returns as many tensors.
Sample augmented(const Sample& sample, const SampleRef& ref, const Augmentation& by,
                 const BatchNumber& batch);
/// Row i is of `refs[i]`. Throws SampleError with the index of the sample, also for one whose
/// tensors cannot be stacked with the first one's.
std::vector<at::Tensor> augmented_rows(const std::vector<at::Tensor>& rows,
                                       std::span<const SampleRef> refs, const Augmentation& by,
                                       const BatchNumber& batch);

/// What `read` throws becomes a SampleError of this sample.
template <class Read>
auto of_sample(std::uint64_t index, const Read& read) {
  try {
    return read();
  } catch (const SampleError&) {
    throw;
  } catch (const std::exception& e) {
    std::throw_with_nested(SampleError(concat("sample ", index, ": ", e.what()), index));
  } catch (...) {
    std::throw_with_nested(
        SampleError(concat("sample ", index, ": an exception that is no std::exception"), index));
  }
}

/// Throws InvalidArgument unless a sample can stand in one batch with the first one, `first_name`:
/// as many tensors, each of the same shape and dtype and on the same device.
void require_alike(const Sample& sample, const Sample& first, const std::string& first_name);
/// The tensors of samples that are alike, with the samples in dim 0; of no sample there is none.
std::vector<at::Tensor> stacked(const std::vector<Sample>& samples);
/// Throws InvalidArgument for sharded tensors: a call on one is made by all ranks.
void require_plain(const std::vector<at::Tensor>& tensors);

// Graphs of different sizes as one: the batches of LoaderOptions::graphs.

/// Throws InvalidArgument unless these are names of graphs: "edges/index" and one under "nodes".
void require_graph_names(const std::vector<std::string>& names);
/// Throws InvalidArgument unless the sample is a graph whose fields have these names, and can stand
/// in one batch with the first one.
void require_graph(const std::vector<std::string>& names, const Sample& sample,
                   const Sample& first);
/// One graph of samples that have been checked, with the row of each node's graph behind. `empty`:
/// without any, in the shapes of these.
std::vector<at::Tensor> graph_batch(const std::vector<std::string>& names,
                                    const std::vector<Sample>& samples, bool empty);

}  // namespace tessera::detail
