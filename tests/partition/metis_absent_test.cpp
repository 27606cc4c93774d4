// Linked with what builds without METIS get, whose definition stands before that of the library.
#include <gtest/gtest.h>

#include <string>

#include "tessera/base/error.h"
#include "tessera/partition/partitioners.h"

TEST(MetisAbsent, SaysHowToGetIt) {
  try {
    tessera::partition_by_metis(2, {}, {}, 2);
    FAIL() << "divided";
  } catch (const tessera::NotAvailable& error) {
    EXPECT_NE(std::string(error.what()).find("libmetis-dev"), std::string::npos);
  }
}
