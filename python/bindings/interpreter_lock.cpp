// The interpreter's lock, which an operator on sharded tensors lets go while it waits for other
// ranks. Python's functions are looked up in the process, so that this library needs none of
// Python's.

#include <dlfcn.h>

#include "errors.h"
#include "tessera/base/host_lock.h"

namespace tessera::python {

namespace {

struct Interpreter {
  int (*initialized)();
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
    find(all.initialized, "Py_IsInitialized");
    find(all.holds, "PyGILState_Check");
    find(all.save, "PyEval_SaveThread");
    find(all.restore, "PyEval_RestoreThread");
    return all;
  }();
  return found;
}

// While the interpreter ends, and afterwards, no other thread of it runs: its answers are no use.
void* release() {
  const Interpreter& python = interpreter();
  return python.initialized() && python.holds() ? python.save() : nullptr;
}
void acquire(void* thread) { interpreter().restore(thread); }

constexpr HostLock kLock = {release, acquire, raise_by_class};

const bool registered = [] {
  const Interpreter& found = interpreter();
  if (found.initialized && found.holds && found.save && found.restore) set_host_lock(&kLock);
  return true;
}();

}  // namespace

}  // namespace tessera::python
