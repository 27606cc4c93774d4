// The main() of test programs of a room in one executable (TOGETHER of tessera_test).
#include "programs.h"
#include "ranks.h"

int main(int argc, char** argv) {
  return tessera::test::run_ranks(argc, argv, TESSERA_TEST_PROGRAMS);
}
