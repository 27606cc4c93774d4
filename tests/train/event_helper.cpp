// Writes event files as two runs do: the first logs steps 10 to 30, the second goes on from 20.
#include <chrono>
#include <cstdio>
#include <thread>

#include "tessera/train/logger.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return 2;
  }
  for (const int start : {0, 20}) {
    // Readers take files in the order of the seconds in their names.
    if (start > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    const auto logger = tessera::tensorboard_logger(argv[1]);
    logger->start(start);
    for (int step = start + 10; step <= start + 30; step += 10)
      logger->log({{"train/loss", start + 1.0 / step}, {"val/loss", 2.5}}, step, 0);
    logger->flush();
  }
  return 0;
}
