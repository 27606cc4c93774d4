#pragma once
// SafetensorsSource: the tensors of a file in the safetensors format
// (huggingface.co/docs/safetensors: eight bytes of header length, little-endian; a header in JSON;
// the tensors' bytes), memory-mapped and read by hyperslab.

#include <memory>

#include "tessera/data/sources/source.h"

namespace tessera {

/// Every tensor is a variable; its dims are named dim0, dim1, ... The file has no conventions for
/// missing values or scales, so that ReadOptions::decode and missing have nothing to do. Reads of
/// several threads overlap.
///
/// Where Tessera was built without nlohmann-json the constructor throws NotAvailable.
class SafetensorsSource : public Source {
 public:
  /// Throws FileError for a file that cannot be mapped, or whose header is damaged, names an
  /// unknown dtype, or points beyond the file.
  explicit SafetensorsSource(const std::string& path);
  ~SafetensorsSource() override;

  std::string name() const override;
  /// In the order of their bytes.
  std::vector<std::string> variables() const override;
  const VariableInfo& info(const std::string& variable) const override;
  /// The header's "__metadata__".
  const std::map<std::string, std::string>& metadata() const;

 protected:
  at::Tensor read_box(const VariableInfo& variable, const Hyperslab& slab,
                      const ReadOptions& options) const override;

 private:
  struct File;
  std::unique_ptr<File> file_;
};

}  // namespace tessera
