#pragma once
// What models, optimizers and sessions are behind their handles.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/c/detail/call.h"
#include "tessera/c/models.h"
#include "tessera/train/session.h"

namespace tessera::c {

struct ModelObject : Object {
  static constexpr Kind kind = Kind::model;
  ModelObject(JobPtr of, DeviceMesh on, CModel its, std::function<void(bool)> to_train)
      : Object(std::move(of)),
        mesh(std::move(on)),
        model(std::move(its)),
        train(std::move(to_train)) {}
  DeviceMesh mesh;
  CModel model;
  std::function<void(bool)> train;
};

struct OptimizerObject : Object {
  static constexpr Kind kind = Kind::optimizer;
  OptimizerObject(JobPtr of, std::shared_ptr<torch::nn::Module> its, DeviceMesh on,
                  std::shared_ptr<torch::optim::Optimizer> steps)
      : Object(std::move(of)),
        module(std::move(its)),
        mesh(std::move(on)),
        optimizer(std::move(steps)) {}
  std::shared_ptr<torch::nn::Module> module;
  DeviceMesh mesh;
  std::shared_ptr<torch::optim::Optimizer> optimizer;
};

struct SessionObject : Object {
  static constexpr Kind kind = Kind::session;
  using Object::Object;
  std::unique_ptr<Session> session;
};

}  // namespace tessera::c
