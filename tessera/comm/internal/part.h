#pragma once
// Parts of the library that are libraries of their own, loaded when they are asked for: what they
// link may be absent.

#include <dlfcn.h>

#include <string>

namespace tessera::detail {

struct LoadedPart {
  /// Null where it did not load.
  void* library = nullptr;
  /// It is there, whether or not it loads.
  bool built = false;
  /// Why it did not load: "libtessera_x.so does not load: ..."; empty where it is not there at all.
  std::string problem;

  /// A function of it; null where it has none of that name.
  template <class Function>
  Function find(const char* name) const {
    return reinterpret_cast<Function>(library ? dlsym(library, name) : nullptr);
  }
};

/// Loads `file`, if it lies beside libtessera.so. A process keeps it.
LoadedPart load_part(const char* file);

}  // namespace tessera::detail
