#include "tessera/comm/backends/part.h"

#include <filesystem>

#include "tessera/base/text.h"

namespace tessera::detail {

LoadedPart load_part(const char* file) {
  Dl_info info{};
  std::filesystem::path beside;
  if (dladdr(reinterpret_cast<const void*>(&load_part), &info) && info.dli_fname)
    beside = std::filesystem::path(info.dli_fname).parent_path() / file;
  LoadedPart part;
  part.built = std::filesystem::exists(beside);
  if (!part.built) return part;
  // All its names now, not at their first call: one of another version is refused here. Its own
  // libraries' names are seen by what they load themselves.
  part.library = dlopen(beside.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!part.library) {
    const char* reason = dlerror();
    part.problem = concat(file, " does not load: ", reason ? reason : "unknown reason");
  }
  return part;
}

}  // namespace tessera::detail
