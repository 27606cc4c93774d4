#include "tessera/comm/internal/part.h"

#include <filesystem>

#include "tessera/base/text.h"

namespace tessera::detail {

namespace {

std::filesystem::path folder_of_this_library() {
  Dl_info info{};
  std::error_code none;
  if (!dladdr(reinterpret_cast<const void*>(&load_part), &info) || !info.dli_fname) return {};
  return std::filesystem::absolute(info.dli_fname, none).parent_path();
}

// When it is loaded: the loader's name of it may be relative to the folder of that time.
const std::filesystem::path kFolder = folder_of_this_library();

}  // namespace

LoadedPart load_part(const char* file) {
  const std::filesystem::path beside = kFolder / file;
  std::error_code none;
  LoadedPart part;
  part.built = std::filesystem::exists(beside, none);
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
