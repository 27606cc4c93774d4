#pragma once
// Hoard: while it lives, this rank's thread keeps aliases of the sharded tensors that operators
// make, as a program does that logs, caches or has reference cycles. What a rank holds must not
// change what it calls.

#include <ATen/record_function.h>

#include <random>
#include <vector>

#include "support.h"

namespace tessera::test {

class Hoard {
 public:
  /// Rank 0 keeps everything until the end, rank 1 keeps some and lets go of it at random, the
  /// others (and rank -1) keep nothing.
  Hoard(int rank, std::uint64_t number) : engine_(number) {
    if (rank < 0 || rank > 1) return;
    forgets_ = rank == 1;
    current() = this;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&start, &end)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }
  ~Hoard() {
    if (current() != this) return;
    at::removeCallback(handle_);
    current() = nullptr;
  }
  Hoard(const Hoard&) = delete;
  Hoard& operator=(const Hoard&) = delete;

 private:
  static Hoard*& current() {
    static thread_local Hoard* hoard = nullptr;
    return hoard;
  }
  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction&) { return nullptr; }
  static void end(const at::RecordFunction& function, at::ObserverContext*) {
    if (Hoard* hoard = current()) {
      for (const c10::IValue& v : function.outputs()) hoard->keep(v);
    }
  }

  void keep(const c10::IValue& v) {
    if (v.isTensorList()) {
      for (const at::Tensor& t : v.toTensorVector()) keep(t);
    }
    if (!v.isTensor() || !is_sharded(v.toTensor())) return;
    if (forgets_) {
      if (engine_() % 8 == 0) kept_.clear();
      if (engine_() % 2 == 0) return;
    }
    // As detach() does, without a call of an operator.
    const at::Tensor& t = v.toTensor();
    auto* impl = t.unsafeGetTensorImpl();
    kept_.emplace_back(t.is_inference() ? t
                                        : at::Tensor(impl->shallow_copy_and_detach(
                                              impl->version_counter(), false)));
  }

  std::mt19937_64 engine_;
  bool forgets_ = false;
  at::CallbackHandle handle_ = 0;
  std::vector<at::Tensor> kept_;
};

}  // namespace tessera::test
