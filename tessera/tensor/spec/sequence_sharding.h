#pragma once
// SequenceSharding: that the data between the sharded layers of a module are sharded too, along
// their sequence (sequence parallelism).

namespace tessera {

/// Of the weight of a linear layer or an embedding that is sharded over `axis`: the data before and
/// after the layer's block are sharded over the same axis, along `dim`. A linear layer whose rows
/// (output features) are sharded gathers its input over the axis, in backward again, and
/// reduce-scatters the input's gradient; one whose columns are, and a table whose rows are,
/// reduce-scatters its result, and gathers the result's gradient. The policy on redistribution does
/// not apply: the weight asks for it.
struct SequenceSharding {
  /// Of the mesh; -1: the data are not sharded.
  int axis = -1;
  /// Of the data, counted from the first.
  int dim = 0;

  explicit operator bool() const { return axis >= 0; }
  bool operator==(const SequenceSharding&) const = default;
};

}  // namespace tessera
