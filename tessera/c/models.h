#pragma once
// Networks of C++ for tessera_model_create() of tessera/c/tessera.h, by name.
//
//   tessera::register_model("unet", [](const std::string& options) {
//     UNet net(options == "wide" ? 64 : 16);
//     return tessera::CModel{net.ptr(), [net](const std::vector<at::Tensor>& x) mutable {
//                              return std::vector{net(x.at(0))};
//                            }};
//   });

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

/// A network as C and Fortran call it: any number of tensors in and out.
struct CModel {
  std::shared_ptr<torch::nn::Module> module;
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> forward;
};

/// Makes the network anew for each tessera_model_create(); it gets that call's options.
using MakeCModel = std::function<CModel(const std::string& options)>;

/// Names a network for all jobs of this process, before it is created. Throws InvalidArgument for a
/// name that is empty or taken, and for no function.
void register_model(const std::string& name, MakeCModel make);

}  // namespace tessera
