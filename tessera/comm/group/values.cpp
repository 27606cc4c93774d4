#include "tessera/comm/group/values.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include "tessera/base/error.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"

namespace tessera {
namespace {

void require_root(const Group& group, const char* call, int root) {
  if (root < 0 || root >= group.size())
    throw InvalidArgument(call, ": root ", root, " in a group of ", group.size(),
                          " ranks; it is a group rank, 0 to the size - 1");
}

std::vector<c10::IValue> values_of(const std::vector<std::string>& texts) {
  return mapped(texts, value_of_bytes);
}

}  // namespace

std::string value_bytes(const c10::IValue& value) {
  value.visit([](const c10::IValue& part) {
    if (!part.isTensor() || !part.toTensor().defined()) return false;
    const at::Tensor& t = part.toTensor();
    if (!t.is_cpu() || t.layout() != at::kStrided || !t.has_storage())
      throw InvalidArgument("a value to be sent holds a tensor of shape ", list(t.sizes()), " on ",
                            t.device(),
                            ", which is not plain memory of the CPU; "
                            "give its local part, or a copy on the CPU");
    return false;
  });
  try {
    const std::vector<char> bytes = torch::jit::pickle_save(value);
    return {bytes.begin(), bytes.end()};
  } catch (const c10::Error& error) {
    throw InvalidArgument("a value of type ", value.tagKind(),
                          " cannot be sent: ", error.what_without_backtrace());
  }
}

c10::IValue value_of_bytes(const std::string& bytes) {
  try {
    return torch::jit::pickle_load({bytes.begin(), bytes.end()});
  } catch (const c10::Error& error) {
    throw Error(bytes.size(), " bytes are no value: ", error.what_without_backtrace());
  }
}

c10::IValue broadcast_value(const Group& group, const c10::IValue& value, int root,
                            const CallOptions& options) {
  require_root(group, "broadcast_value", root);
  const auto texts = agree::all<std::string>(
      group, "broadcast_value",
      [&] { return group.rank() == root ? value_bytes(value) : std::string(); }, options);
  return value_of_bytes(texts[root]);
}

std::vector<c10::IValue> all_gather_values(const Group& group, const c10::IValue& mine,
                                           const CallOptions& options) {
  return values_of(agree::all<std::string>(
      group, "all_gather_values", [&] { return value_bytes(mine); }, options));
}

std::vector<c10::IValue> gather_values(const Group& group, const c10::IValue& mine, int root,
                                       const CallOptions& options) {
  require_root(group, "gather_values", root);
  std::string bytes;
  agree::all(group, "gather_values", [&] { bytes = value_bytes(mine); }, options);
  return values_of(group.gather_bytes(bytes, root, options));
}

}  // namespace tessera
