#pragma once
// Source: named arrays somewhere (a file, memory), read by hyperslab, so that a rank reads its own
// part and nothing else.
//
//   NetcdfSource source("winds.nc");  // UWND(TIME=132, FNOCY=73, FNOCX=144)
//   at::Tensor one = source.read("UWND", {.start = {5}, .count = {1}}); // month 5, all latitudes
//     and longitudes: [1, 73, 144]
//   at::Tensor rows = source.read("UWND", {.start = {0, 10}, .count = {132, 20}, .stride = {1,
//     2}});   // rows 10, 12, ... 48: [132, 20, 144]

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "tessera/data/errors.h"

namespace tessera {

/// A regular box of an array, one number per dimension: indices start, start + stride, ... (count
/// of them). A list that is shorter than the array's dimensions leaves the last ones whole; all
/// lists that are given must be of one length, except `stride`, which may be empty (all ones).
struct Hyperslab {
  std::vector<std::int64_t> start = {};
  /// 0 is legal: the result is empty.
  std::vector<std::int64_t> count = {};
  /// >= 1.
  std::vector<std::int64_t> stride = {};
};

/// An attribute: text, or one or more numbers.
using Attribute = std::variant<std::string, std::vector<double>>;

struct VariableInfo {
  std::string name;
  /// Names, outermost first.
  std::vector<std::string> dims;
  std::vector<std::int64_t> shape;
  /// How values lie in the source, before scale and offset.
  at::ScalarType stored;
  std::map<std::string, Attribute> attributes;
};

struct ReadOptions {
  at::ScalarType dtype = at::kFloat;
  /// Value = stored * scale_factor + add_offset, and missing values recognised, as the source's
  /// conventions say; false: the stored numbers as they are.
  bool decode = true;
  /// What a missing value becomes. An integer dtype cannot hold NaN: reading a missing value into
  /// one throws, unless this is a number that it can hold.
  double missing = std::numeric_limits<double>::quiet_NaN();
};

/// Random access to named arrays. A source may be shared by threads: every member may be called
/// from several at once (whether the reads overlap in time is the source's affair, and said there).
class Source {
 public:
  virtual ~Source();
  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  /// For messages: a path.
  virtual std::string name() const = 0;
  /// In the source's order.
  virtual std::vector<std::string> variables() const = 0;
  /// Throws VariableError with the known names.
  virtual const VariableInfo& info(const std::string& variable) const = 0;

  /// The box as a new contiguous CPU tensor of shape `count` (followed by the dimensions left
  /// whole). Throws VariableError, RangeError, FileError; InvalidArgument for lists of different
  /// lengths.
  at::Tensor read(const std::string& variable, const Hyperslab& slab = {},
                  const ReadOptions& options = {}) const;

  /// One attribute as a number or as text. Throws VariableError if it is absent or of the other
  /// kind.
  double number(const std::string& variable, const std::string& attribute) const;
  std::string text(const std::string& variable, const std::string& attribute) const;

 protected:
  /// `slab` is checked and complete: three lists as long as the variable's shape, nothing empty.
  virtual at::Tensor read_box(const VariableInfo& variable, const Hyperslab& slab,
                              const ReadOptions& options) const = 0;
};

/// The slab with every list as long as `shape`, and checked against it. `variable` is for messages.
///
///   complete_slab({{2}, {3}, {}}, {10, 4}, {"t", "x"}, "u") -> start {2, 0}, count {3, 4}, stride
///     {1, 1}
Hyperslab complete_slab(const Hyperslab& slab, const std::vector<std::int64_t>& shape,
                        const std::vector<std::string>& dims, const std::string& variable);

}  // namespace tessera
