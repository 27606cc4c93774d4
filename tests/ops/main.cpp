// The main() of the test programs of this folder in one executable (TOGETHER of tessera_test).
#include "fields.h"
#include "programs.h"

int main(int argc, char** argv) {
  return tessera::test::run_fields(argc, argv, TESSERA_TEST_PROGRAMS);
}
