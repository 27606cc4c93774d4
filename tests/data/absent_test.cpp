// Linked with the stubs of builds without netCDF and HDF5, whose definitions stand before those of
// the library.
#include <gtest/gtest.h>

#include <string>

#include "tessera/data/sources/hdf5_source.h"
#include "tessera/data/sources/netcdf_source.h"

template <class Source>
std::string refusal(const std::string& path) {
  try {
    Source source(path);
  } catch (const tessera::NotAvailable& error) {
    return error.what();
  }
  return "opened " + path;
}

TEST(Absent, EachSourceSaysHowToGetIt) {
  EXPECT_NE(refusal<tessera::Hdf5Source>("any.h5").find("libhdf5-dev"), std::string::npos);
  EXPECT_NE(refusal<tessera::NetcdfSource>("any.nc").find("libnetcdf-dev"), std::string::npos);
}
