// Slurm's lists: an odd first byte means counts of tasks.

#include "tessera/launch/internal/node_list.h"
#include "fuzz.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  return fuzz::parses([&] {
    const auto text = fuzz::text_of(data + 1, size - 1);
    if (data[0] % 2)
      expand_task_counts(text);
    else
      expand_node_list(text);
  });
}
