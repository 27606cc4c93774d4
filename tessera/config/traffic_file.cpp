#include "tessera/config/traffic_file.h"

#include <optional>

#include "tessera/config/detail/document.h"
#include "tessera/config/detail/fields.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

using detail::Fields;
using detail::Json;

double number(Fields& entry, const std::string& field, std::optional<double> otherwise) {
  const auto value = entry.real(field);
  if (!value && !otherwise) entry.fail(field, "is missing");
  return value.value_or(otherwise.value_or(0));
}

MeshTraffic read(const Json& document, const std::string& path) {
  Fields fields(document, path + ": ");
  const Json* mesh = fields.raw("mesh");
  const Json* traffic = fields.raw("traffic");
  if (!mesh) fields.fail("mesh", "is missing: names and sizes of the axes");
  if (!traffic || !traffic->is_array()) fields.fail("traffic", "must be a list");
  fields.finish();
  MeshTraffic all;
  Fields sizes(*mesh, fields.where("mesh"));
  for (const auto& [name, unused] : mesh->items()) {
    const auto size = sizes.integer(name, 1, kMostRanks);
    if (!size) sizes.fail(name, "has no size");
    all.axes.push_back({name, static_cast<int>(*size)});
  }
  fields.each("traffic", [&](Fields& entry) {
    all.traffic.push_back({entry.texts("axes").value_or(std::vector<std::string>{}),
                           collective_from(entry.required_text("collective")),
                           number(entry, "bytes", std::nullopt), number(entry, "calls", 1)});
  });
  check_traffic(Mesh(all.axes), all.traffic);
  return all;
}

}  // namespace

MeshTraffic parse_traffic(const std::string& text, FileFormat format, const std::string& source) {
  const Json document = detail::parse_document(text, format, source);
  try {
    return read(document, source);
  } catch (const GroupConfigError& error) {
    throw ConfigFileError(source, ": ", error.what());
  } catch (const InvalidArgument& error) {  // of the mesh
    throw ConfigFileError(source, ": ", error.what());
  }
}

MeshTraffic read_traffic(const std::string& path) {
  return parse_traffic(detail::read_text(path), detail::format_of(path), path);
}

std::string format_traffic(const MeshTraffic& traffic, FileFormat format) {
  check_traffic(Mesh(traffic.axes), traffic.traffic);
  Json out{{"mesh", Json::object()}, {"traffic", Json::array()}};
  for (const Axis& axis : traffic.axes) out["mesh"][axis.name] = axis.size;
  for (const Traffic& t : traffic.traffic)
    out["traffic"].push_back(Json{{"axes", t.axes},
                                  {"collective", to_string(t.collective)},
                                  {"bytes", t.bytes},
                                  {"calls", t.calls}});
  return detail::write_document(out, format);
}

void write_traffic(const MeshTraffic& traffic, const std::string& path) {
  detail::write_text(path, format_traffic(traffic, detail::format_of(path)));
}

}  // namespace tessera
