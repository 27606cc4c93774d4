#pragma once
// FlopCounter: the floating-point operations of a model, from the shapes that its operators are
// called with.
//
//   FlopCounter counter;
//   loss = net->forward(x) ...;
//   loss.backward();
//   counter.total();  // this rank's share of forward and backward; the ranks' sum is that of one
//                     // process
//
// A product of [m, k] and [k, n] is 2 m k n, a multiplication and an addition for each of its
// summands. Matrix products, convolutions (2 x elements of the result x elements of the kernel that
// each is made of), attention (2 L S (E + Ev) for each head, whether it is causal or not) and
// einsum are counted, whatever they are called by; element-wise operators, norms and Fourier
// transforms are not: beside those they are few. Backward is counted with the forward that it
// belongs to: one more product for each operand that needs a gradient. What is computed a second
// time in backward does not count, as in the model FLOPs utilisation of A. Chowdhery et al., PaLM:
// Scaling Language Modeling with Pathways, 2022, appendix B; a forward that the program itself runs
// twice does.
//
// Of an operator on sharded tensors each rank of the mesh counts an equal share of the global one,
// whatever it computes itself.

#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <memory>

#include "tessera/base/pinned.h"

namespace tessera {

/// Counts the operators that are called on its thread while it lives. Each operator of the program
/// then costs about a microsecond more; of two that live on a thread the inner one counts.
class FlopCounter : Pinned {
 public:
  FlopCounter();
  ~FlopCounter();
  double total() const { return total_; }

 private:
  struct Call;
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call);
  static void end(const at::RecordFunction& call, at::ObserverContext* context);

  FlopCounter* const outer_;
  at::CallbackHandle handle_ = 0;
  double total_ = 0;
  /// Inside an operator that is counted as one, or in backward.
  int inside_ = 0;
};

/// FLOP a second that products of square matrices reach on a device: of the best of a few, in about
/// a tenth of a second. On a host that several ranks share, all of them call it at once.
double measure_peak_flop(c10::Device device, at::ScalarType dtype = at::kFloat);

}  // namespace tessera
