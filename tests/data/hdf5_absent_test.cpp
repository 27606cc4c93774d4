// Linked with the stub of a build without HDF5, whose definitions stand before those of the
// library.
#include <gtest/gtest.h>

#include <string>

#include "tessera/data/sources/hdf5_source.h"

TEST(Hdf5Absent, SaysHowToGetIt) {
  try {
    tessera::Hdf5Source source("any.h5");
    FAIL() << "opened a file without HDF5";
  } catch (const tessera::NotAvailable& error) {
    EXPECT_NE(std::string(error.what()).find("libhdf5-dev"), std::string::npos) << error.what();
  }
}
