#pragma once
// What the files here add to the library `tessera` of operators and classes.

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"

namespace tessera::python {

/// Lists of Python's.
using Names = std::vector<std::string>;
using Numbers = std::vector<std::int64_t>;
using Tensors = std::vector<at::Tensor>;

/// A value of the library that Python holds.
template <class T>
struct Held : torch::CustomClassHolder {
  explicit Held(T v) : value(std::move(v)) {}
  T value;
};

/// torch::class_, of which every function raises errors by their class.
template <class T>
class Class {
 public:
  explicit Class(torch::class_<T> c) : class_(std::move(c)) {}
  template <class... Arguments>
  Class& def(torch::detail::types<void, Arguments...>) {
    class_.def(torch::init(by_class([](Arguments... arguments) {
      return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
    })));
    return *this;
  }
  template <class F, class Arguments>
  Class& def(torch::InitLambda<F, Arguments> init) {
    class_.def(torch::init(by_class(std::move(init.f))));
    return *this;
  }
  template <class F>
  Class& def(const std::string& name, F f) {
    class_.def(name, by_class(std::move(f)));
    return *this;
  }

 private:
  torch::class_<T> class_;
};

/// torch::Library likewise.
class Library {
 public:
  explicit Library(torch::Library& library) : library_(library) {}
  template <class F>
  void def(const char* name, F f) {
    library_.def(name, by_class(std::move(f)));
  }
  template <class T>
  Class<T> class_(const std::string& name) {
    return Class<T>(library_.class_<T>(name));
  }

 private:
  torch::Library& library_;
};

void register_backend(Library& library);
void register_callbacks(Library& library);
void register_checkpoint(Library& library);
void register_data(Library& library);
void register_ghosts(Library& library);
void register_deferred(Library& library);
void register_groups(Library& library);
void register_mesh(Library& library);
void register_nn(Library& library);
void register_pipeline(Library& library);
void register_progress(Library& library);
void register_rules(Library& library);
void register_session(Library& library);
void register_schedules(Library& library);
void register_tensor(Library& library);
void register_trees(Library& library);

}  // namespace tessera::python
