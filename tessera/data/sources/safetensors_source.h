#pragma once
// SafetensorsSource: the tensors of a file in the safetensors format, read by hyperslab.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/data/sources/source.h"

namespace tessera {

/// Every tensor is a variable, in the order of their bytes; its dims are named dim0, dim1, ...
/// Those of dtypes that libtorch does not have (F6_E2M3, F6_E3M2) are left out: info() and read()
/// throw an error that says so. The format has no conventions for missing values or scales, so that
/// ReadOptions::decode and missing have no effect. Only what a hyperslab needs is read, or little
/// more; reads of several threads overlap.
class SafetensorsSource : public detail::ListedSource {
 public:
  /// Throws FileError for a path that is not a regular file or cannot be opened, and for what
  /// read_safetensors_header() refuses.
  explicit SafetensorsSource(const std::string& path);
  ~SafetensorsSource() override;

  const VariableInfo& info(const std::string& variable) const override;
  /// The entry "__metadata__" of the header.
  const std::map<std::string, std::string>& metadata() const;

 protected:
  /// Throws FileError if the file has been truncated since it was opened.
  at::Tensor read_box(const VariableInfo& variable, const Hyperslab& slab,
                      const ReadOptions& options) const override;

 private:
  struct File;
  std::unique_ptr<File> file_;
};

}  // namespace tessera
