#pragma once
// The modules of a task as children of one, so that what takes a module takes them all, by names
// like "net.0.weight". The children stay the caller's.

#include "tessera/train/strategy.h"

namespace tessera::detail {

struct AllModules : torch::nn::Module {
  explicit AllModules(const NamedModules& modules) {
    check_modules(modules);
    for (const NamedModule& m : modules) register_module(m.name, m.module);
  }
  // For DistributedDataParallel, which does something before it.
  void forward() {}
};

}  // namespace tessera::detail
