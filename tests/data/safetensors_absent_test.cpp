// Linked with the stub of a build without nlohmann-json, whose definitions stand before those of
// the library.
#include <gtest/gtest.h>

#include <string>

#include "tessera/data/sources/safetensors_source.h"

TEST(SafetensorsAbsent, SaysHowToGetIt) {
  try {
    tessera::SafetensorsSource source("any.safetensors");
    FAIL() << "opened a file without nlohmann-json";
  } catch (const tessera::NotAvailable& error) {
    EXPECT_NE(std::string(error.what()).find("nlohmann-json3-dev"), std::string::npos)
        << error.what();
  }
}
