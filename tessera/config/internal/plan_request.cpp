#include "tessera/config/internal/plan_request.h"

#include <algorithm>
#include <climits>
#include <filesystem>

#include "tessera/base/internal/split.h"
#include "tessera/base/text.h"
#include "tessera/config/detail/document.h"
#include "tessera/config/detail/fields.h"
#include "tessera/config/errors.h"
#include "tessera/config/group_config_file.h"
#include "tessera/config/rank_file.h"
#include "tessera/config/topology_file.h"
#include "tessera/config/traffic_file.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

using detail::Fields;
using detail::Json;

/// "key=value,key=value" as pairs.
std::vector<std::pair<std::string, std::string>> pairs(const std::string& text,
                                                       const std::string& what) {
  std::vector<std::pair<std::string, std::string>> result;
  for (const auto& item : parse_names(text, what)) {
    const auto equals = item.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == item.size())
      throw ConfigFileError(what, " '", text, "': '", item, "' is not name=value");
    result.emplace_back(item.substr(0, equals), item.substr(equals + 1));
  }
  return result;
}

int parse_size(const std::string& text, const std::string& what) {
  if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos)
    throw ConfigFileError(what, ": '", text, "' is not a whole number from 0 to 999999999");
  return std::stoi(text);
}

FamilyTraffic parse_one(const std::string& family, const std::string& text,
                        const std::string& what) {
  FamilyTraffic traffic{family, Collective::all_reduce, 0, 1};
  const auto colon = text.find(':');
  if (colon == std::string::npos)
    throw ConfigFileError(what, ": '", text, "' of '", family,
                          "' is not collective:bytes, as in all_reduce:512MB");
  traffic.collective = collective_from(text.substr(0, colon));
  std::string amount = text.substr(colon + 1);
  if (const auto star = amount.find('*'); star != std::string::npos) {
    traffic.calls =
        detail::parse_bytes(amount.substr(star + 1), concat(what, ": calls of '", family, "'"));
    amount.resize(star);
  }
  traffic.bytes = detail::parse_bytes(amount, concat(what, ": '", family, "'"));
  return traffic;
}

std::vector<Axis> read_axes(Fields& fields, const std::string& field, const Json& value) {
  if (value.is_string()) return parse_axes(value.get<std::string>(), fields.where(field));
  if (!value.is_object())
    fields.fail(field, "must be a text such as \"data=8,model=4\" or names with sizes, but is ",
                detail::shown(value));
  Fields sizes(value, fields.where(field));
  std::vector<Axis> axes;
  for (const auto& [name, unused] : value.items()) {
    const auto size = sizes.integer(name, 1, INT_MAX);
    if (!size) sizes.fail(name, "has no size");
    axes.push_back({name, static_cast<int>(*size)});
  }
  return axes;
}

std::vector<std::string> read_names(Fields& fields, const std::string& field) {
  const Json* value = fields.raw(field);
  if (!value) return {};
  if (value->is_string()) return parse_names(value->get<std::string>(), fields.where(field));
  return *fields.texts(field);
}

}  // namespace

std::vector<std::string> parse_names(const std::string& text, const std::string& what) {
  std::vector<std::string> names = split(text, ',');
  if (std::ranges::find(names, "") != names.end())
    throw ConfigFileError(what, " '", text,
                          "' has an empty item; write names with single commas between");
  return names;
}

std::vector<Axis> parse_axes(const std::string& text, const std::string& what) {
  std::vector<Axis> axes;
  for (const auto& [name, size] : pairs(text, what)) {
    for (const Axis& known : axes)
      if (known.name == name)
        throw RepeatedName(what, " '", text, "': axis '", name, "' is duplicated");
    axes.push_back({name, parse_size(size, concat(what, ": size of '", name, "'"))});
  }
  return axes;
}

std::vector<FamilyTraffic> parse_traffic(const std::string& text, const std::string& what) {
  std::vector<FamilyTraffic> traffic;
  for (const auto& [family, value] : pairs(text, what))
    traffic.push_back(parse_one(family, value, what));
  return traffic;
}

void set_traffic(PlanRequest& request, const std::string& text, const std::string& what,
                 const std::string& folder) {
  if (!text.ends_with(".json") && !text.ends_with(".yaml") && !text.ends_with(".yml")) {
    request.traffic = parse_traffic(text, what);
    return;
  }
  const MeshTraffic step = read_traffic((std::filesystem::path(folder) / text).string());
  if (request.mesh.empty() && request.order.empty() && !request.tree) request.mesh = step.axes;
  request.traffic.clear();
  for (const Traffic& t : step.traffic)
    request.traffic.push_back({joined(t.axes, "-"), t.collective, t.bytes, t.calls});
}

std::vector<int> parse_ranks(const std::string& text, const std::string& what) {
  std::vector<int> ranks;
  for (const auto& item : parse_names(text, what)) ranks.push_back(parse_size(item, what));
  return ranks;
}

PlanRequest read_plan_request(const std::string& path) {
  const Json document =
      detail::parse_document(detail::read_text(path), detail::format_of(path), path);
  const auto folder = std::filesystem::path(path).parent_path();
  const auto beside = [&](const std::string& file) { return (folder / file).string(); };
  Fields fields(document, path + ": ");
  // A string names a file beside this one; anything else is what would be in it.
  const auto beside_or_here = [&](const char* key, const Json& given, auto read, auto parse) {
    return given.is_string() ? read(beside(given.get<std::string>()))
                             : parse(given.dump(), FileFormat::json, fields.where(key));
  };
  PlanRequest request;
  request.world = static_cast<int>(fields.integer("world", 1, INT_MAX).value_or(0));
  if (const Json* mesh = fields.raw("mesh")) request.mesh = read_axes(fields, "mesh", *mesh);
  request.order = fields.text("order").value_or("");
  if (const Json* sizes = fields.raw("sizes"))
    for (const Axis& axis : read_axes(fields, "sizes", *sizes))
      request.sizes[axis.name] = axis.size;
  if (const Json* tree = fields.raw("tree"))
    request.tree = beside_or_here("tree", *tree, read_group_config, parse_group_config);
  if (const Json* views = fields.raw("views")) {
    Fields by_name(*views, fields.where("views"));
    for (const auto& [name, axes] : views->items())
      request.views.emplace_back(name, read_axes(by_name, name, axes));
  }
  request.ranks = fields.integers("ranks").value_or(std::vector<int>{});
  request.groups = read_names(fields, "groups");
  request.hierarchical = read_names(fields, "hierarchical");
  if (const auto hosts = fields.text("hosts")) request.topology = parse_hosts(*hosts);
  if (const Json* topology = fields.raw("topology")) {
    if (request.topology) fields.fail("topology", "is given besides 'hosts'; give one of them");
    request.topology = beside_or_here("topology", *topology, read_topology, parse_topology);
  }
  if (const auto conf = fields.text("slurm_topology")) {
    if (!request.topology)
      fields.fail("slurm_topology", "needs 'hosts' or 'topology' with the hosts' names");
    request.topology = read_slurm_topology(beside(*conf), *request.topology);
  }
  if (const Json* traffic = fields.raw("traffic")) {
    if (traffic->is_string()) {
      set_traffic(request, traffic->get<std::string>(), fields.where("traffic"), folder.string());
    } else {
      Fields by_name(*traffic, fields.where("traffic"));
      for (const auto& [family, unused] : traffic->items())
        request.traffic.push_back(
            parse_one(family, by_name.required_text(family), by_name.where(family)));
    }
  }
  if (const Json* mapping = fields.raw("mapping")) {
    if (!mapping->is_string())
      request.mapping = fields.integers("mapping");
    else if (!request.topology)
      fields.fail("mapping", "is a rank file, which needs 'hosts' or 'topology'");
    else
      request.mapping = read_rank_file(beside(mapping->get<std::string>()), *request.topology);
  }
  request.optimise = fields.boolean("optimise").value_or(true);
  fields.finish();
  return request;
}

}  // namespace tessera
