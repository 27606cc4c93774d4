#include "convert.h"

#include <charconv>

#include "tessera/base/text.h"

namespace tessera::python {

Placement placement(const std::string& text) {
  if (text == "Replicate") return Replicate();
  if (text.starts_with("Shard(") && text.ends_with(")")) {
    int dim = 0;
    const char* end = text.data() + text.size() - 1;
    const auto [at, error] = std::from_chars(text.data() + 6, end, dim);
    if (error == std::errc() && at == end) return Shard(dim);
  }
  for (const auto kind : {ReduceOp::Kind::sum, ReduceOp::Kind::avg, ReduceOp::Kind::product,
                          ReduceOp::Kind::min, ReduceOp::Kind::max}) {
    if (text == to_string(Partial(kind))) return Partial(kind);
  }
  throw InvalidArgument("'", text,
                        "' is no placement: Replicate(), Shard(dim), or Partial(op) of sum, "
                        "avg, product, min or max");
}

std::vector<Placement> placements(const std::vector<std::string>& texts) {
  std::vector<Placement> all;
  for (const std::string& text : texts) all.push_back(placement(text));
  return all;
}

std::vector<std::string> texts(const std::vector<Placement>& placements) {
  std::vector<std::string> all;
  for (const Placement& p : placements) all.push_back(to_string(p));
  return all;
}

ShardSizes sizes(const SizesDict& sizes) {
  ShardSizes all;
  for (const auto& entry : sizes) all[static_cast<int>(entry.key())] = entry.value();
  return all;
}

SizesDict sizes(const ShardSizes& sizes) {
  SizesDict all;
  for (const auto& [dim, list] : sizes) all.insert(dim, list);
  return all;
}

}  // namespace tessera::python
