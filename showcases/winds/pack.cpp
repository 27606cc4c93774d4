// Makes data/monthly_navy_winds.nc, the file that the example ships, from the original: winds_pack
// monthly_navy_winds.cdf data/monthly_navy_winds.nc
//
// The winds become 16-bit integers of 0.01 m/s (the rounding has an RMS of 0.003 m/s; no figure of
// the example's table changes in its two decimals), one month a chunk, shuffled and deflated.
// Coordinates, units and names stay.
#include <netcdf.h>
#include <torch/torch.h>

#include <cstdint>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/data/sources/netcdf_source.h"

namespace {

constexpr double resolution = 0.01;  // m/s
constexpr std::int16_t fill = -32768;

void ok(int status, const std::string& what) {
  if (status != NC_NOERR)
    throw tessera::FileError(tessera::concat(what, ": ", nc_strerror(status)));
}

void put_text(int file, int variable, const std::string& name, const std::string& text) {
  ok(nc_put_att_text(file, variable, name.c_str(), text.size(), text.data()), name);
}

void pack(const std::string& from, const std::string& to) {
  const tessera::NetcdfSource source(from);
  const auto& winds = source.info("UWND");
  int file = -1;
  ok(nc_create(to.c_str(), NC_NETCDF4 | NC_CLASSIC_MODEL | NC_CLOBBER, &file), to);
  std::vector<int> dims(winds.dims.size()), variables;
  for (std::size_t d = 0; d < dims.size(); ++d) {
    const auto& name = winds.dims[d];
    int variable = 0;
    ok(nc_def_dim(file, name.c_str(), static_cast<std::size_t>(winds.shape[d]), &dims[d]), name);
    ok(nc_def_var(file, name.c_str(), NC_DOUBLE, 1, &dims[d], &variable), name);
    for (const auto& [attribute, value] : source.info(name).attributes)
      if (const auto* text = std::get_if<std::string>(&value))
        put_text(file, variable, attribute, *text);
    variables.push_back(variable);
  }
  for (const char* name : {"UWND", "VWND"}) {
    int variable = 0;
    ok(nc_def_var(file, name, NC_SHORT, static_cast<int>(dims.size()), dims.data(), &variable),
       name);
    const std::size_t chunk[] = {1, static_cast<std::size_t>(winds.shape[1]),
                                 static_cast<std::size_t>(winds.shape[2])};
    ok(nc_def_var_chunking(file, variable, NC_CHUNKED, chunk), name);
    ok(nc_def_var_deflate(file, variable, /*shuffle=*/1, /*deflate=*/1, /*level=*/9), name);
    ok(nc_put_att_short(file, variable, "_FillValue", NC_SHORT, 1, &fill), name);
    ok(nc_put_att_double(file, variable, "scale_factor", NC_DOUBLE, 1, &resolution), name);
    put_text(file, variable, "long_name", source.text(name, "long_name"));
    put_text(file, variable, "units", source.text(name, "units"));
    variables.push_back(variable);
  }
  put_text(file, NC_GLOBAL, "title", "US Navy monthly surface winds, 1982-1992");
  put_text(file, NC_GLOBAL, "source",
           "monthly_navy_winds.cdf of the Debian package ferret-datasets (NOAA PMEL)");
  put_text(file, NC_GLOBAL, "history",
           "winds rounded to 0.01 m/s, packed as 16-bit integers and compressed by winds_pack of "
           "Tessera");
  ok(nc_enddef(file), to);

  for (std::size_t d = 0; d < dims.size(); ++d) {
    const at::Tensor values = source.read(winds.dims[d], {}, {.dtype = at::kDouble});
    ok(nc_put_var_double(file, variables[d], values.const_data_ptr<double>()), winds.dims[d]);
  }
  for (std::size_t v = 0; v < 2; ++v) {
    const std::string name = v == 0 ? "UWND" : "VWND";
    const at::Tensor values = source.read(name, {}, {.dtype = at::kDouble});
    const at::Tensor steps =
        at::where(values.isnan(), at::full_like(values, fill), (values / resolution).round());
    if ((steps.abs() > -fill).any().item<bool>())
      throw tessera::InvalidArgument(
          tessera::concat(name, " does not fit into 16 bits of ", resolution, " m/s"));
    const at::Tensor packed = steps.to(at::kShort).contiguous();
    std::cout
        << name << ": " << values.isnan().sum().item<std::int64_t>() << " missing of "
        << values.numel() << ", largest rounding "
        << (values - packed.to(at::kDouble) * resolution).abs().nan_to_num().max().item<double>()
        << " m/s\n";
    ok(nc_put_var_short(file, variables[dims.size() + v], packed.const_data_ptr<std::int16_t>()),
       name);
  }
  ok(nc_close(file), to);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: winds_pack monthly_navy_winds.cdf packed.nc\n";
    return 2;
  }
  try {
    pack(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::cerr << "winds_pack: " << error.what() << '\n';
    return 1;
  }
}
