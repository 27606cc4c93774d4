#include "tessera/ops/spatial/detail/needed_boxes.h"

#include <cstring>

#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {

std::vector<std::vector<Box>> gather_boxes(const ShardSpec& spec, const std::vector<Box>& mine,
                                           const std::string& failure) {
  const std::size_t dims = mine.empty() ? 0 : mine[0].size();
  std::string bytes;
  if (failure.empty()) {
    bytes.resize(mine.size() * dims * sizeof(Interval));
    char* to = bytes.data();
    for (const Box& box : mine) {
      std::memcpy(to, box.data(), dims * sizeof(Interval));
      to += dims * sizeof(Interval);
    }
  }
  const Group all = context_of(spec)->mesh.all();
  // A leading byte says whether boxes or a failure follow.
  const auto gathered =
      all.all_gather_bytes((failure.empty() ? "b" : "f") + (failure.empty() ? bytes : failure),
                           {.name = "needed_boxes"});
  std::vector<std::vector<Box>> boxes;
  for (const std::string& text : gathered) {
    if (text[0] == 'f') throw InvalidArgument(text.substr(1));
    const char* from = text.data() + 1;
    auto& of_rank = boxes.emplace_back();
    for (std::size_t i = 0; i < mine.size(); ++i) {
      Box box(dims);
      std::memcpy(box.data(), from, dims * sizeof(Interval));
      from += dims * sizeof(Interval);
      of_rank.push_back(std::move(box));
    }
  }
  return boxes;
}

}  // namespace tessera::detail
