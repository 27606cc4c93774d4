#pragma once
// SequenceSharding: that the data between the sharded layers of a module are sharded too, along
// their sequence (sequence parallelism).

namespace tessera {

/// Of the weight of a linear layer or an embedding that is sharded over `axis`: how the data before
/// and after the layer's block lie on the same axis. Operators compute with the shards of the
/// weight.
///
/// `dim` at least 0: sharded along `dim`. A linear layer whose rows (output features) are sharded
/// gathers its input over the axis, in backward again, and reduce-scatters the input's gradient;
/// one whose columns are, and a table whose rows are, reduce-scatters its result, and gathers the
/// result's gradient. The policy on redistribution does not apply: the weight asks for it.
///
/// `dim` -1: replicated. A linear layer whose columns are sharded has a Partial result, which is
/// all-reduced where it is used; what of its gradient is Partial over the axis is all-reduced once,
/// for all that use it.
struct SequenceSharding {
  /// Of the mesh; -1: the weight belongs to no plan, and nothing is said of the data.
  int axis = -1;
  /// Of the data, counted from the first; -1: they are replicated over the axis.
  int dim = 0;

  explicit operator bool() const { return axis >= 0; }
  bool operator==(const SequenceSharding&) const = default;
};

}  // namespace tessera
