// The main function of programs with hostile suites.

#include <cstdlib>

#include "hostile.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  auto& run = tessera::testing::hostile_run();
  run.program = argv[0];
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("--seed=")) {
      run.seed = std::strtoll(word.c_str() + 7, nullptr, 10);
    } else if (word.starts_with("--seconds=")) {
      run.seconds = std::strtod(word.c_str() + 10, nullptr);
    } else {
      std::cerr << "what is " << word << "? --seed=N, --seconds=S and gtest's options are known\n";
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
