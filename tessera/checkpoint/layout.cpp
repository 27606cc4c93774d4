#include "tessera/checkpoint/file.h"

#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/internal/json_text.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"

namespace tessera {

SavedLayout saved_layout(const ShardSpec& spec) {
  SavedLayout layout{spec.mesh().mesh().axes(), spec.placements(), spec.sizes()};
  for (Placement& p : layout.placements)
    if (p.is_partial()) p = Replicate();
  return layout;
}

std::string to_json(const SavedLayout& layout) {
  const std::string axes = json_list(layout.axes, [](const Axis& axis) {
    return concat('[', json_text(axis.name), ',', axis.size, ']');
  });
  const std::string placements = json_list(
      layout.placements, [](const Placement& p) { return p.is_shard() ? concat(p.dim) : "null"; });
  std::string sizes;
  for (const auto& [dim, parts] : layout.sizes)
    sizes += concat(sizes.empty() ? "" : ",", '"', dim, "\":", json_list(parts));
  return concat("{\"axes\":", axes, ",\"placements\":", placements, ",\"sizes\":{", sizes, "}}");
}

SavedLayout layout_from_json(const Json& json) {
  SavedLayout layout;
  for (const Json& axis : json.at("axes").items()) {
    const auto& pair = axis.items();
    if (pair.size() != 2 || pair[1].number() == 0 || pair[1].number() > 1u << 30)
      throw InvalidArgument("an axis of a layout is its name and its size");
    layout.axes.push_back({pair[0].string(), static_cast<int>(pair[1].number())});
  }
  for (const Json& placement : json.at("placements").items()) {
    if (!placement.is(Json::Kind::null) && placement.number() >= 64)
      throw InvalidArgument("a placement of a layout is a dim below 64, or null");
    layout.placements.push_back(
        placement.is(Json::Kind::null) ? Replicate() : Shard(static_cast<int>(placement.number())));
  }
  if (layout.placements.size() != layout.axes.size())
    throw InvalidArgument("a layout has one placement for each axis");
  for (const auto& [name, list] : json.at("sizes").members()) {
    int dim = 0;
    while (dim < 64 && std::to_string(dim) != name) ++dim;
    if (dim == 64) throw InvalidArgument("the sizes of a layout are given for dims below 64");
    for (const Json& size : list.items()) layout.sizes[dim].push_back(size.index());
  }
  return layout;
}

ShardSpec fit_layout(const SavedLayout& layout, const DeviceMesh& mesh,
                     const std::vector<std::int64_t>& shape, std::vector<std::string>* misfits,
                     const std::string& whose) {
  const auto tell = [&](const std::string& misfit) {
    const std::string what = whose.empty() ? misfit : concat(whose, ": ", printable(misfit, 2000));
    if (!misfits) throw InvalidArgument(what);
    misfits->push_back(what);
  };
  const Mesh& to = mesh.mesh();
  std::vector<Placement> placements(to.axes().size());
  // Dims whose axes are the same, in the same order and of the same sizes: they keep their sizes.
  std::map<int, std::vector<Axis>> before, now;
  for (std::size_t a = 0; a < layout.axes.size(); ++a) {
    const Axis& axis = layout.axes[a];
    const Placement& p = layout.placements[a];
    if (!p.is_shard()) continue;
    if (p.dim >= static_cast<int>(shape.size())) {
      tell(concat("axis '", axis.name, "' sharded dim ", p.dim, ", the tensor has ", shape.size(),
                  " dims"));
      continue;
    }
    before[p.dim].push_back(axis);
    if (!to.has_axis(axis.name)) {
      // A single rank shards nothing: that it is gone is no loss.
      if (axis.size > 1)
        tell(concat("axis '", axis.name, "' of ", axis.size, " ranks, which sharded dim ", p.dim,
                    ", is not in the mesh ", list(to.names())));
      continue;
    }
    placements[to.index(axis.name)] = p;
  }
  for (std::size_t a = 0; a < placements.size(); ++a)
    if (placements[a].is_shard()) now[placements[a].dim].push_back(to.axes()[a]);
  ShardSizes sizes;
  for (const auto& [dim, parts] : layout.sizes) {
    if (!now.contains(dim)) continue;
    const std::int64_t total = std::accumulate(parts.begin(), parts.end(), std::int64_t{0});
    if (now[dim] == before[dim] && total == shape[dim]) {
      sizes[dim] = parts;
    } else {
      tell(concat("dim ", dim, " was sharded as ", list(parts), ", which does not fit ", shape[dim],
                  " indices over the mesh's axes: its shards "
                  "are even"));
    }
  }
  return ShardSpec(mesh, shape, placements, sizes);
}

}  // namespace tessera
