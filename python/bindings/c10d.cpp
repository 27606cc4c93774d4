// Makes the backend of init_process_group("tessera") known to torch.distributed when this library
// is loaded, by torch.ops.load_library alone: c10d's table of backends is Python's. Its functions
// are looked up in the process, so that this library needs none of Python's.

#include <dlfcn.h>

#include <initializer_list>

#include "c10d_source.h"

namespace tessera::python {

namespace {

struct Runner {
  int (*initialized)();
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
  return look_up(all.initialized, "Py_IsInitialized") && look_up(all.ensure, "PyGILState_Ensure") &&
         look_up(all.release, "PyGILState_Release") && look_up(all.compile, "Py_CompileString") &&
         look_up(all.dictionary, "PyDict_New") && look_up(all.set_item, "PyDict_SetItemString") &&
         look_up(all.builtins, "PyEval_GetBuiltins") && look_up(all.text, "PyUnicode_FromString") &&
         look_up(all.evaluate, "PyEval_EvalCode") && look_up(all.let_go, "Py_DecRef") &&
         look_up(all.say_error, "PyErr_WriteUnraisable") && all.initialized();
}

const bool ran = [] {
  // Of Python's headers: a file, not an expression.
  constexpr int kFileInput = 257;
  Runner python{};
  if (!find_runner(python)) return false;
  const int lock = python.ensure();
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
  python.release(lock);
  return done != nullptr;
}();

}  // namespace

}  // namespace tessera::python
