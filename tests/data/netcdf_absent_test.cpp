// Linked with the stub of a build without netCDF, whose definitions stand before those of the
// library.
#include <gtest/gtest.h>

#include <string>

#include "tessera/data/sources/netcdf_source.h"

TEST(NetcdfAbsent, SaysHowToGetIt) {
  try {
    tessera::NetcdfSource source("any.nc");
    FAIL() << "opened a file without netCDF";
  } catch (const tessera::NotAvailable& error) {
    EXPECT_NE(std::string(error.what()).find("libnetcdf-dev"), std::string::npos) << error.what();
  }
}
