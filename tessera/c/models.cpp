// Networks: TorchScript files, packages of AOTInductor, and those that C++ has registered.

#include "tessera/c/models.h"

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <map>
#include <unordered_set>

#include "tessera/base/internal/vector.h"
#include "tessera/c/detail/arrays.h"
#include "tessera/c/detail/call.h"
#include "tessera/c/detail/objects.h"
#include "tessera/c/detail/packages.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/nn/distribute_module.h"

namespace tessera {
namespace {

// By name. One for the process, since what registers a network knows no job.
struct Registry {
  std::mutex mutex;
  std::map<std::string, MakeCModel> makes;
  static Registry& of_process() {
    static Registry& registry = *new Registry;
    return registry;
  }
};

}  // namespace

void register_model(const std::string& name, MakeCModel make) {
  if (name.empty() || !make) throw InvalidArgument("a model needs a name and a function");
  Registry& registry = Registry::of_process();
  const std::lock_guard lock(registry.mutex);
  if (!registry.makes.emplace(name, std::move(make)).second)
    throw InvalidArgument("a model named '", name, "' is registered already");
}

namespace c {
namespace {

// A registered or a loaded network, before it is distributed.
struct Made {
  CModel model;
  std::function<void(bool)> train;
  /// What all ranks must have alike; the parameters of other networks are broadcast.
  std::string identity = {};
};

MakeCModel make_of(const std::string& name) {
  Registry& registry = Registry::of_process();
  const std::lock_guard lock(registry.mutex);
  const auto it = registry.makes.find(name);
  if (it != registry.makes.end()) return it->second;
  throw InvalidArgument("no model is named '", name, "'; registered are ",
                        list(keys_of(registry.makes)));
}

// The parameters and buffers of a script as a module of C++: the same tensors by the same names.
std::shared_ptr<torch::nn::Module> mirrored(const torch::jit::Module& script,
                                            std::unordered_set<c10::TensorImpl*>& seen) {
  auto module = std::make_shared<torch::nn::Module>("script");
  for (const auto& p : script.named_parameters(false))
    if (seen.insert(p.value.unsafeGetTensorImpl()).second)
      module->register_parameter(p.name, p.value, p.value.requires_grad());
  for (const auto& b : script.named_buffers(false))
    if (seen.insert(b.value.unsafeGetTensorImpl()).second) module->register_buffer(b.name, b.value);
  for (const auto& child : script.named_children())
    module->register_module(child.name, mirrored(child.value, seen));
  return module;
}

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  if (value.isTuple()) {
    std::vector<at::Tensor> tensors;
    for (const auto& element : value.toTupleRef().elements()) {
      if (!element.isTensor()) refuse("the script returns more than tensors: ", value.tagKind());
      tensors.push_back(element.toTensor());
    }
    return tensors;
  }
  refuse("the script returns a ", value.tagKind(),
         ": a tensor, or a tuple or list of them, is wanted");
}

Made load_script(const std::string& file) {
  try {
    auto script = std::make_shared<torch::jit::Module>(torch::jit::load(file, c10::kCPU));
    std::unordered_set<c10::TensorImpl*> seen;
    Made made;
    made.model.module = mirrored(*script, seen);
    made.model.forward = [script](const std::vector<at::Tensor>& inputs) {
      return tensors_of(script->forward({inputs.begin(), inputs.end()}));
    };
    made.train = [script](bool on) { script->train(on); };
    return made;
  } catch (const c10::Error& error) {
    throw FileError(file,
                    ": neither a TorchScript file nor a package of AOTInductor that can be read: ",
                    error.what_without_backtrace());
  }
}

Made load_file(const std::string& file, bool as_saved) {
  if (!is_package(file)) return load_script(file);
  if (!as_saved)
    throw InvalidArgument(file,
                          " is a compiled package: dtype is TESSERA_AS_SAVED, that of its code");
  Package package = load_package(file);
  return {{std::make_shared<torch::nn::Module>("package"), std::move(package.forward)},
          [](bool on) {
            if (on) refuse("a compiled package cannot be trained: load a TorchScript file");
          },
          std::move(package.identity)};
}

Made make_registered(const std::string& name, const std::string& options) {
  Made made;
  made.model = make_of(name)(options);
  if (!made.model.module || !made.model.forward)
    throw InvalidArgument("the function of model '", name, "' gives no module or forward");
  made.train = [module = made.model.module](bool on) { module->train(on); };
  return made;
}

void convert(torch::nn::Module& module, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  auto tensors = module.parameters();
  const auto buffers = module.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  for (const at::Tensor& t : tensors)
    if (t.is_floating_point()) t.set_data(t.to(dtype));
}

// An error of making it on one rank is thrown on all of the mesh.
std::shared_ptr<ModelObject> make_model(Call& call, tessera_mesh mesh, tessera_dtype dtype,
                                        const std::function<Made()>& make_it) {
  const DeviceMesh& on = call.use<MeshObject>(mesh, "mesh").mesh;
  const bool as_saved = static_cast<int>(dtype) == TESSERA_AS_SAVED;
  const at::ScalarType to = as_saved ? at::kDouble : dtype_of(dtype);
  if (!at::isFloatingType(to)) refuse("dtype: a network's is TESSERA_FLOAT32 or TESSERA_FLOAT64");
  Made made;
  agree::all_same(on.all(), "the model", [&] {
    made = make_it();
    if (!as_saved) convert(*made.model.module, to);
    return made.identity;
  });
  distribute_module(*made.model.module, on);
  if (made.identity.empty()) made.train(true);
  return std::make_shared<ModelObject>(call.job(), on, std::move(made.model),
                                       std::move(made.train));
}

void forward(Call& call, tessera_model handle, int inputs, const tessera_tensor* input, int outputs,
             tessera_tensor* output) {
  if (outputs < 1 || inputs < 0) refuse("inputs is ", inputs, ", outputs ", outputs);
  // Nothing is written before the model has said that there are so many.
  need(output, "output");
  const auto& model = call.use<ModelObject>(handle, "model").model;
  if (inputs > 0) need(input, "input");
  std::vector<at::Tensor> given;
  for (int i = 0; i < inputs; ++i)
    given.push_back(call.use<TensorObject>(input[i], "an input").value);
  const auto results = model.forward(given);
  if (static_cast<int>(results.size()) != outputs)
    refuse("the model gives ", results.size(), " tensors, outputs is ", outputs);
  for (int i = 0; i < outputs; ++i)
    call.give(&output[i], std::make_shared<TensorObject>(call.job(), results[i]));
}

}  // namespace

extern "C" {

tessera_result tessera_model_load(tessera_mesh mesh, const char* file, tessera_dtype dtype,
                                  tessera_model* model) {
  return make("tessera_model_load", Reach::all, model, "model", [&](Call& call) {
    const std::string path = need_text(file, "file");
    const bool as_saved = static_cast<int>(dtype) == TESSERA_AS_SAVED;
    return make_model(call, mesh, dtype, [&] { return load_file(path, as_saved); });
  });
}

tessera_result tessera_model_create(tessera_mesh mesh, const char* name, const char* options,
                                    tessera_dtype dtype, tessera_model* model) {
  return make("tessera_model_create", Reach::all, model, "model", [&](Call& call) {
    const std::string its = need_text(name, "name"), how = options ? options : "";
    return make_model(call, mesh, dtype, [&] { return make_registered(its, how); });
  });
}

tessera_result tessera_model_train(tessera_model model, int on) {
  return run("tessera_model_train", Reach::own,
             [&](Call& call) { call.use<ModelObject>(model, "model").train(on != 0); });
}

tessera_result tessera_model_size(tessera_model model, int64_t* parameters) {
  return run("tessera_model_size", Reach::own, [&](Call& call) {
    std::int64_t count = 0;
    for (const auto& p : call.use<ModelObject>(model, "model").model.module->parameters())
      count += p.numel();
    *need(parameters, "parameters") = count;
  });
}

tessera_result tessera_forward(tessera_model model, int inputs, const tessera_tensor* input,
                               int outputs, tessera_tensor* output) {
  return run("tessera_forward", Reach::all,
             [&](Call& call) { forward(call, model, inputs, input, outputs, output); });
}

tessera_result tessera_predict(tessera_model model, int inputs, const tessera_tensor* input,
                               int outputs, tessera_tensor* output) {
  return run("tessera_predict", Reach::all, [&](Call& call) {
    const at::NoGradGuard no_grad;
    forward(call, model, inputs, input, outputs, output);
  });
}
}

}  // namespace c

}  // namespace tessera
