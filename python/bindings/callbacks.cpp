#include "callbacks.h"

#include <torch/library.h>

#include <string>
#include <utility>

#include "library.h"
#include "tessera/base/error.h"
#include "tessera/comm/group/types.h"

namespace tessera::python {

namespace {

// Of the call that is made on this thread.
struct Exchange {
  const std::vector<at::Tensor>* given;
  std::vector<at::Tensor> delivered = {};
  std::string problem = {}, kind = {};
};
Exchange*& exchange() {
  thread_local Exchange* here = nullptr;
  return here;
}

// What other ranks caused is not to be told to them as this rank's own fault.
[[noreturn]] void refuse_with(const std::string& kind, const std::string& problem) {
  if (kind == "PeerFailedError") throw PeerFailedError(problem, {});
  if (kind == "PeerLostError") throw PeerLostError(problem, {});
  if (kind == "TimeoutError") throw TimeoutError(problem, {});
  if (kind == "MismatchError") throw MismatchError(problem);
  throw Error(problem);
}

}  // namespace

std::optional<std::vector<at::Tensor>> ask(PythonFunction function,
                                           std::span<const std::uint64_t> numbers,
                                           const std::vector<at::Tensor>& given) {
  Exchange mine{.given = &given};
  Exchange* const before = std::exchange(exchange(), &mine);
  const int answer = function(numbers.data(), numbers.size());
  exchange() = before;
  if (answer < 0) refuse_with(mine.kind, mine.problem);
  if (answer == 0) return std::nullopt;
  return std::move(mine.delivered);
}

void register_callbacks(Library& library) {
  library.def("taken", [] { return exchange() ? *exchange()->given : std::vector<at::Tensor>(); });
  library.def("deliver", [](const std::vector<at::Tensor>& tensors) {
    if (exchange()) exchange()->delivered = tensors;
  });
  // `kind`: the name of the library's class, where the error is one between ranks.
  library.def("refuse", [](const std::string& why, const std::string& kind) {
    if (!exchange()) return;
    exchange()->problem = why;
    exchange()->kind = kind;
  });
}

}  // namespace tessera::python
