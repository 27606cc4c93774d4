#include "tessera/data/sources/netcdf_source.h"

#include "tessera/data/sources/detail/cf_values.h"
#include "tessera/data/sources/detail/netcdf_file.h"

namespace tessera {

NetcdfSource::NetcdfSource(const std::string& path)
    : file_(std::make_unique<detail::NetcdfFile>(path)) {}
NetcdfSource::~NetcdfSource() = default;

std::string NetcdfSource::name() const { return file_->path(); }

std::vector<std::string> NetcdfSource::variables() const {
  std::vector<std::string> names;
  for (const auto& v : file_->variables()) names.push_back(v.info.name);
  return names;
}

const VariableInfo& NetcdfSource::info(const std::string& variable) const {
  return file_->variable(variable).info;
}

const std::map<std::string, Attribute>& NetcdfSource::attributes() const {
  return file_->attributes();
}

at::Tensor NetcdfSource::read_box(const VariableInfo& about, const Hyperslab& slab,
                                  const ReadOptions& options) const {
  const detail::NetcdfVariable& variable = file_->variable(about.name);
  const at::Tensor stored = file_->read(variable, slab);
  if (!options.decode) return stored.to(options.dtype);
  return detail::cf_values(stored, about, variable.fill, options, name());
}

}  // namespace tessera
