#pragma once
// Values of any type that TorchScript has, sent between ranks: numbers, texts, tensors, and lists,
// tuples and dictionaries of them, nested.
//
//   c10::Dict<std::string, double> best;   // found on rank 2
//   const auto told = broadcast_value(group, best, 2).toGenericDict();
//   for (const c10::IValue& v : all_gather_values(group, std::make_tuple(rank, loss))) ...

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera {

/// `value` of group rank `root` on every rank; what the others give does not matter. Collective, as
/// are the others: an error of any rank is thrown on all. Throws InvalidArgument for a value that
/// holds a tensor which is not plain CPU memory (sharded, sparse, on a device), or what TorchScript
/// cannot write; and as Group's calls do.
c10::IValue broadcast_value(const Group& group, const c10::IValue& value, int root,
                            const CallOptions& options = {});
/// Every rank's value, in group order. The types may differ.
std::vector<c10::IValue> all_gather_values(const Group& group, const c10::IValue& mine,
                                           const CallOptions& options = {});
/// The same on `root`; empty elsewhere.
std::vector<c10::IValue> gather_values(const Group& group, const c10::IValue& mine, int root,
                                       const CallOptions& options = {});

/// A value as bytes that torch.load() reads too, and back; for calls that take bytes, as those of
/// trainers' strategies. `value_of_bytes` throws Error for bytes that are none.
std::string value_bytes(const c10::IValue& value);
c10::IValue value_of_bytes(const std::string& bytes);

}  // namespace tessera
