#pragma once
// SourceDataset: samples from a source (netCDF, HDF5, safetensors, ...), each a hyperslab, so that
// a rank that holds a shard of every sample reads that shard and nothing else.
//
//   auto file = std::make_shared<NetcdfSource>("winds.nc");  // UWND(TIME=132, FNOCY=73, FNOCX=144)
//   // this rank's rows of every map
//   auto rows = Partition::even(73, domain_size).interval(domain_rank);
//   const std::int64_t n = rows.size();
//   SourceDataset months(file, {{"UWND", {.start = {0, rows.begin}, .count = {132, n}}},
//                               {"VWND", {.start = {0, rows.begin}, .count = {132, n}}}});
//   months.get(5)  -> two tensors [rows, 144] of month 5

#include <memory>

#include "tessera/data/dataset.h"
#include "tessera/data/sources/source.h"

namespace tessera {

/// One tensor of a sample. Dim 0 of the slab counts the samples: sample i is index start[0] + i *
/// stride[0] of the variable; the other dims are read for each sample.
struct SourceField {
  std::string variable;
  /// What is read; empty: all of the variable.
  Hyperslab slab = {};
  ReadOptions read = {};
  /// The field's name in samples and batches; empty: the variable's.
  std::string name = {};
};

class SourceDataset : public Dataset {
 public:
  /// Throws VariableError, RangeError (see Source::read), and InvalidArgument for an empty list of
  /// fields, a variable without dims, fields that differ in count[0], or names that cannot stand
  /// side by side (see Fields).
  SourceDataset(std::shared_ptr<const Source> source, std::vector<SourceField> fields);
  std::uint64_t size() const override { return size_; }
  Sample get(std::uint64_t index) const override;
  /// Runs of consecutive indices are read at once.
  std::vector<at::Tensor> get_batch(std::span<const std::uint64_t> indices) const override;
  /// Empty where no field was given a name and the variables' cannot stand side by side: one that
  /// is read twice, for example.
  std::vector<std::string> field_names() const override { return names_; }

 private:
  std::shared_ptr<const Source> source_;
  std::vector<SourceField> fields_;  // with complete slabs
  std::vector<std::string> names_;
  std::uint64_t size_ = 0;
};

}  // namespace tessera
