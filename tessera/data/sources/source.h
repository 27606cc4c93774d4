#pragma once
// Source: named arrays in a file or in memory, read by hyperslab, so that a rank reads its own
// shard and nothing else.
//
//   NetcdfSource source("winds.nc");  // UWND(TIME=132, FNOCY=73, FNOCX=144)
//   // month 5, all latitudes and longitudes: [1, 73, 144]
//   at::Tensor one = source.read("UWND", {.start = {5}, .count = {1}});
//   // rows 10, 12, ... 48: [132, 20, 144]
//   at::Tensor rows =
//       source.read("UWND", {.start = {0, 10}, .count = {132, 20}, .stride = {1, 2}});

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/pinned.h"

namespace tessera {

/// Thrown for a variable or attribute that the source does not have, or whose type cannot be read
/// as requested; the message lists the known names.
class VariableError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// Thrown for a hyperslab that reaches beyond the variable; the message names the dimension, what
/// was asked and its size.
class RangeError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// A regular box of an array, one number per dimension: indices start, start + stride, ... (count
/// of them). Lists that are shorter than the array's dimensions take the last ones completely; all
/// lists that are given must be of one length, except `stride`, which may be empty (all ones).
struct Hyperslab {
  std::vector<std::int64_t> start = {};
  /// 0 is legal: the result is empty.
  std::vector<std::int64_t> count = {};
  /// The steps between indices, at least 1.
  std::vector<std::int64_t> stride = {};
};

/// An attribute: text, or one or more numbers.
using Attribute = std::variant<std::string, std::vector<double>>;

struct VariableInfo {
  std::string name;
  /// Names of the dims, outermost first.
  std::vector<std::string> dims;
  std::vector<std::int64_t> shape;
  /// Dtype of the values in the source, before scale and offset.
  at::ScalarType stored;
  std::map<std::string, Attribute> attributes;
};

struct ReadOptions {
  at::ScalarType dtype = at::kFloat;
  /// True: value = stored * scale_factor + add_offset, and missing values are recognised, by the
  /// source's conventions; false: the stored numbers.
  bool decode = true;
  /// The value read for a missing one. An integer dtype cannot hold NaN: reading a missing value
  /// into one throws, unless this is a number that it can hold.
  double missing = std::numeric_limits<double>::quiet_NaN();
};

/// Named arrays that are read by hyperslab. A source may be shared by threads: every member may be
/// called from several at once (each source says whether the reads overlap in time).
class Source : Pinned {
 public:
  virtual ~Source();

  /// Name for messages: a path.
  virtual std::string name() const = 0;
  /// Names of the variables, in the source's order.
  virtual std::vector<std::string> variables() const = 0;
  /// Describes a variable. Throws VariableError with the known names.
  virtual const VariableInfo& info(const std::string& variable) const = 0;

  /// Reads a box as a new contiguous CPU tensor of shape `count` (followed by the dimensions taken
  /// completely). Throws VariableError, RangeError, FileError; InvalidArgument for lists of
  /// different lengths.
  at::Tensor read(const std::string& variable, const Hyperslab& slab = {},
                  const ReadOptions& options = {}) const;

  /// One attribute as a number or as text. Throws VariableError if it is absent or of the other
  /// kind.
  double number(const std::string& variable, const std::string& attribute) const;
  std::string text(const std::string& variable, const std::string& attribute) const;

 protected:
  /// Reads a non-empty slab that is checked and complete: three lists as long as the variable's
  /// shape.
  virtual at::Tensor read_box(const VariableInfo& variable, const Hyperslab& slab,
                              const ReadOptions& options) const = 0;
};

/// The slab with every list as long as `shape`, checked against it. `variable` is for messages.
///
///   complete_slab({{2}, {3}, {}}, {10, 4}, {"t", "x"}, "u") -> start {2, 0}, count {3, 4}, stride
///     {1, 1}
Hyperslab complete_slab(const Hyperslab& slab, const std::vector<std::int64_t>& shape,
                        const std::vector<std::string>& dims, const std::string& variable);

namespace detail {

/// A source that knows all of its variables once it is open.
class ListedSource : public Source {
 public:
  std::string name() const override { return path_; }
  std::vector<std::string> variables() const override;
  const VariableInfo& info(const std::string& variable) const override {
    return variables_[place(variable)];
  }

 protected:
  /// Messages call a variable `what`.
  ListedSource(std::string path, const char* what) : path_(std::move(path)), what_(what) {}
  void add(VariableInfo variable);
  /// How many were added before the one of this name. Throws VariableError.
  std::size_t place(const std::string& variable) const;

  const std::string path_;

 private:
  const char* const what_;
  std::vector<VariableInfo> variables_;
  std::map<std::string, std::size_t> places_;
};

}  // namespace detail

}  // namespace tessera
