#pragma once
// Options of runs in one process that log each step.

#include <memory>
#include <string>
#include <utility>

#include "support.h"

namespace tessera::test {

inline TrainerOptions plain(const std::string& folder = {}, bool as_io = false) {
  TrainerOptions options;
  options.session.signals = false;
  options.log_every_steps = 1;
  options.checkpoint.folder = as_io ? "" : folder;
  if (as_io) options.checkpoint.io = local_folder(folder);
  return options;
}

inline std::shared_ptr<CheckpointCallback> keeping(CheckpointCallbackOptions options) {
  return std::make_shared<CheckpointCallback>(std::move(options));
}

}  // namespace tessera::test
