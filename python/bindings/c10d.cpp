// Makes the backend of init_process_group("tessera") known to torch.distributed when this library
// is loaded by torch.ops.load_library alone: c10d's table of backends is Python's. Its functions
// are looked up in the process, so that this library needs none of Python's.
//
// While a library is being opened its initialisers hold the dynamic linker's lock. Python code lets
// the interpreter's lock go from time to time, and a thread that then opens a library of its own
// (any import of an extension module) holds the one and waits for the other. So the main thread
// runs the code when dlopen has returned.

#include <dlfcn.h>
#include <unistd.h>

#include <initializer_list>

#include "c10d_source.h"

namespace tessera::python {

namespace {

struct Runner {
  int (*initialized)();
  int (*holds)();
  int (*later)(int (*)(void*), void*);
  void* (*modules)();
  void* (*item)(void*, const char*);
  int (*ensure)();
  void (*release)(int);
  void* (*compile)(const char*, const char*, int);
  void* (*dictionary)();
  int (*set_item)(void*, const char*, void*);
  void* (*builtins)();
  void* (*text)(const char*);
  void* (*evaluate)(void*, void*, void*);
  void (*let_go)(void*);
  void (*say_error)(void*);
};

template <class F>
bool look_up(F& function, const char* name) {
  function = reinterpret_cast<F>(::dlsym(RTLD_DEFAULT, name));
  return function != nullptr;
}

/// False where there is no interpreter.
bool find_runner(Runner& all) {
  return look_up(all.initialized, "Py_IsInitialized") && look_up(all.holds, "PyGILState_Check") &&
         look_up(all.later, "Py_AddPendingCall") &&
         look_up(all.modules, "PyImport_GetModuleDict") &&
         look_up(all.item, "PyDict_GetItemString") && look_up(all.ensure, "PyGILState_Ensure") &&
         look_up(all.release, "PyGILState_Release") && look_up(all.compile, "Py_CompileString") &&
         look_up(all.dictionary, "PyDict_New") && look_up(all.set_item, "PyDict_SetItemString") &&
         look_up(all.builtins, "PyEval_GetBuiltins") && look_up(all.text, "PyUnicode_FromString") &&
         look_up(all.evaluate, "PyEval_EvalCode") && look_up(all.let_go, "Py_DecRef") &&
         look_up(all.say_error, "PyErr_WriteUnraisable") && all.initialized();
}

/// Runs the source, with the interpreter's lock held. 0, as Py_AddPendingCall wants it: no error.
int run_source(void*) {
  // Of Python's headers: a file, not an expression.
  constexpr int kFileInput = 257;
  Runner python{};
  if (!find_runner(python)) return 0;
  void* const globals = python.dictionary();
  void* const name = python.text("tessera._c10d");
  void* code = nullptr;
  void* done = nullptr;
  if (globals && name && python.set_item(globals, "__builtins__", python.builtins()) == 0 &&
      python.set_item(globals, "__name__", name) == 0)
    code = python.compile(kC10dSource, "tessera/_c10d.py", kFileInput);
  if (code) done = python.evaluate(code, globals, globals);
  if (!done) python.say_error(nullptr);
  for (void* object : {done, code, name, globals})
    if (object) python.let_go(object);
  return 0;
}

const bool registered_with_c10d = [] {
  Runner python{};
  if (!find_runner(python)) return false;
  const bool holds = python.holds();
  // The package does it by itself.
  if (holds && python.item(python.modules(), "tessera._library")) return false;
  if ((getpid() == gettid() || !holds) && python.later(run_source, nullptr) == 0) return true;
  // In another thread nobody would run it before the caller goes on.
  const int lock = python.ensure();
  run_source(nullptr);
  python.release(lock);
  return true;
}();

}  // namespace

}  // namespace tessera::python
