#pragma once
// Names of the tensors of a sample and of a batch, nested by '/': what dictionaries within
// dictionaries are in Python.
//
//   const Fields sample{{"inputs/wind", wind}, {"inputs/heights", heights}, {"target", target}};
//   sample.at("inputs/wind")             // a tensor
//   sample.under("inputs").at("wind")    // the same one
//   sample.names()                       // inputs/wind, inputs/heights, target

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

/// Throws InvalidArgument unless the names can stand side by side: each is one or more parts with
/// '/' between them, parts are not empty, a name has at most 1024 bytes and no control character,
/// none is a duplicate, and none is both a tensor and a group of further ones ("a" beside "a/b").
void require_field_names(const std::vector<std::string>& names);

/// Tensors by name, in an order. A value: copies share the tensors.
class Fields {
 public:
  Fields() = default;
  /// Throws InvalidArgument for names that cannot stand side by side, and for another number of
  /// tensors.
  Fields(std::vector<std::string> names, std::vector<at::Tensor> tensors);
  Fields(std::initializer_list<std::pair<std::string, at::Tensor>> fields);

  const std::vector<std::string>& names() const { return names_; }
  /// The tensors, in the order of the names.
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  /// True if a tensor has that name.
  bool contains(std::string_view name) const;
  /// Throws InvalidArgument for a name that there is not; it says which there are.
  at::Tensor at(std::string_view name) const;
  /// The fields of a group, by the rest of their names. Throws InvalidArgument for one that there
  /// is not.
  Fields under(std::string_view group) const;
  /// Appends a field. Throws InvalidArgument for a name that cannot stand beside the others.
  void add(const std::string& name, at::Tensor tensor);
  /// Appends the fields of a group. Throws likewise.
  void add(const std::string& group, const Fields& members);

 private:
  std::vector<std::string> names_;
  std::vector<at::Tensor> tensors_;
};

namespace detail {

/// The tensor of that name. Throws InvalidArgument where there is none.
at::Tensor field_of(const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
                    std::string_view name);

/// True if the name is that of `field`, or of a group that holds it.
bool names_field(std::string_view name, std::string_view field);

}  // namespace detail

/// The tensors of a batch with what is known of its rows, from file to gradient.
struct TensorBatch {
  std::uint64_t step = 0, epoch = 0;
  /// Tensors with the rows in dim 0.
  std::vector<at::Tensor> tensors = {};
  /// The number of rows, and of those that count: the weight of their mean. Others are padding.
  std::int64_t rows = 0, real = 0;
  /// Bool [rows], true where a row counts; undefined if all do.
  at::Tensor mask = {};
  /// The names of `tensors`, nested by '/' (see Fields); empty: they have none.
  std::vector<std::string> names = {};
  /// The tensor of that name: field("inputs/wind"). Throws InvalidArgument where there is none.
  at::Tensor field(std::string_view name) const { return detail::field_of(names, tensors, name); }
  /// All of them; fields().under("inputs") are those of a group.
  Fields fields() const { return {names, tensors}; }
};

}  // namespace tessera
