#pragma once
// Classes that several files here hand to Python, and how groups, limits and reduce operations look
// there.

#include <torch/custom_class.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/mesh/groups/group_config.h"

namespace tessera::python {

struct PyGroup : torch::CustomClassHolder {
  explicit PyGroup(Group g) : group(std::move(g)) {}
  Group group;
};
using GroupPtr = c10::intrusive_ptr<PyGroup>;

/// "sum", "avg", "product", "min", "max", or "premultiplied" by `factor`. Throws InvalidArgument.
ReduceOp reduce_op(const std::string& name, double factor = 1);

/// Backend and time limit of a group; empty and 0: the manager's.
GroupOptions group_options(const std::string& backend, double seconds);

std::vector<int> to_ints(const std::vector<std::int64_t>& numbers);
std::vector<std::int64_t> from_ints(const std::vector<int>& numbers);

}  // namespace tessera::python
