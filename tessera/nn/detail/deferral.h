#pragma once
// Deferral: tensors of the meta device become deferred ones, and their modules write to them.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tessera/nn/detail/tape.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::detail {

/// What defer() does, step by step, for modules of any language.
class Deferral {
 public:
  /// Leaves out what is not on the meta device, and what is deferred already. Errors as of defer(),
  /// with nothing changed. `host_too`: see DeferredScope.
  Deferral(const std::vector<NamedTensor>& tensors, bool host_too);

  /// Begins to record what one module does, if all `parameters` of its tree are of this deferral,
  /// or some of its `buffers` are and it has none. What another module has written to before is not
  /// touched: what is done to it goes to memory that nobody looks at, as the weight goes that a
  /// constructor draws and another one then takes the place of. `own`: of the module itself.
  bool begin(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers,
             const std::vector<at::Tensor>& own);
  void end();
  /// Leaves everything as it was.
  void undo();

 private:
  const std::shared_ptr<Tape> tape_;
  std::unordered_map<const void*, at::Tensor> taken_;
  std::unordered_set<const void*> written_;
  // While a module's doings are recorded.
  std::optional<Recording> recording_;
  std::vector<at::Tensor> own_;
  std::vector<std::pair<at::Tensor, std::size_t>> aside_;
};

}  // namespace tessera::detail
