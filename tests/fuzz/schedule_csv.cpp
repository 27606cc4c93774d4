#include "fuzz.h"
#include "tessera/schedule/schedule.h"
#include "tessera/schedule/validate.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return fuzz::parses([&] {
    const CsvLimits limits{std::size_t{1} << 16, std::size_t{1} << 12};
    const auto schedule = schedule_from_csv(fuzz::text_of(data, size), limits);
    fuzz::must(schedule_from_csv(to_csv(schedule), limits) == schedule,
               "what was written is read back");
    validate(schedule);
  });
}
