// The interpreter's lock, which an operator on sharded tensors lets go while it waits for other
// ranks. Python's functions are looked up in the process, so that this library needs none of
// Python's.

#include <dlfcn.h>

#include "tessera/tensor/host_lock.h"

namespace tessera::python {

namespace {

struct Interpreter {
  int (*holds)();
  void* (*save)();
  void (*restore)(void*);
};

template <class F>
void find(F& function, const char* name) {
  function = reinterpret_cast<F>(::dlsym(RTLD_DEFAULT, name));
}

const Interpreter& interpreter() {
  static const Interpreter found = [] {
    Interpreter all;
    find(all.holds, "PyGILState_Check");
    find(all.save, "PyEval_SaveThread");
    find(all.restore, "PyEval_RestoreThread");
    return all;
  }();
  return found;
}

void* release() { return interpreter().holds() ? interpreter().save() : nullptr; }
void acquire(void* thread) { interpreter().restore(thread); }

constexpr HostLock kLock = {release, acquire};

const bool registered = [] {
  const Interpreter& found = interpreter();
  if (found.holds && found.save && found.restore) set_host_lock(&kLock);
  return true;
}();

}  // namespace

}  // namespace tessera::python
