#pragma once
// NetcdfFile: an open netCDF file: its structure, and raw reads. All calls into the library are
// here, under one lock.

#include <c10/core/Scalar.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/data/sources/source.h"

namespace tessera::detail {

struct NetcdfVariable {
  VariableInfo info;
  int id = -1;
  /// The stored value of an element without a value: _FillValue, else the library's own, if it has
  /// one for the type.
  std::optional<at::Scalar> fill;
};

class NetcdfFile : Pinned {
 public:
  explicit NetcdfFile(const std::string& path);
  ~NetcdfFile();

  const std::string& path() const { return path_; }
  const std::vector<NetcdfVariable>& variables() const { return variables_; }
  const std::map<std::string, Attribute>& attributes() const { return attributes_; }
  const NetcdfVariable& variable(const std::string& name) const;
  /// The stored values of a complete, non-empty slab, in the variable's `stored` dtype.
  at::Tensor read(const NetcdfVariable& variable, const Hyperslab& slab) const;

 private:
  void check(int status, const std::string& what) const;
  std::map<std::string, Attribute> read_attributes(int variable, int count) const;
  void read_structure();

  std::string path_;
  int id_ = -1;
  std::vector<NetcdfVariable> variables_;
  std::map<std::string, Attribute> attributes_;
};

}  // namespace tessera::detail
