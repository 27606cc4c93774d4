#pragma once
// Deferred construction: a model that fits on no rank is made on no rank.
//
//   auto net = tessera::deferred([] { return Gpt(options); });   // no parameter has memory
//   tessera::fully_shard(*net, mesh);                            // each rank fills its shards
//
// Operators of the constructor, initialisation included, are recorded instead of computed. Whatever
// places the module (distribute_module(), fully_shard(), tensor_parallel()) then runs, parameter by
// parameter, what was recorded of it, on a tensor that is sharded from the start. So a rank never
// holds more than its shards and what one parameter's initialisation needs beside it, and every
// kind of initialisation that libtorch's operators can express is covered, whoever wrote it. (The
// recording is an idea of torchdistx, https://pytorch.org/torchdistx.)
//
// Random numbers come from the stream of sharded tensors (manual_seed()), which does not depend on
// placements: values equal, bit for bit, those of the same program on one rank.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/pinned.h"

namespace tessera {

class DeviceMesh;
class ShardSpec;
struct NamedTensor;

namespace detail {
class Recording;
/// Messages name what is deferred in the module.
void name_deferred(const torch::nn::Module& module);
}  // namespace detail

/// Defers the values of tensors that are made while it lives, by this thread, on the default
/// device. They are on the meta device, and what is done with them is recorded. Tensors made on a
/// device that the program names get their values at once, as does what is read from memory
/// (torch::tensor({...})). Scopes may nest: the inner one has a recording of its own.
///
/// While it lives, whatever would read values that are not there (item(), a copy to plain memory)
/// throws NotAvailable with the operator's name; so do random operators with a generator of their
/// own, and those that make their result by themselves (randperm). Never write through data_ptr()
/// of a deferred tensor.
class DeferredScope : Pinned {
 public:
  DeferredScope();
  ~DeferredScope();

 protected:
  /// `host_too`: tensors that are made on the CPU by name are deferred as well. Python names the
  /// default device in each call.
  explicit DeferredScope(bool host_too);

 private:
  std::unique_ptr<detail::Recording> recording_;
};

/// What `make` returns, with the values of its parameters and buffers deferred.
template <class Make>
auto deferred(Make&& make) {
  const DeferredScope scope;
  if constexpr (requires { detail::name_deferred(*make()); }) {
    auto made = std::forward<Make>(make)();
    detail::name_deferred(*made);
    return made;
  } else {
    return std::forward<Make>(make)();
  }
}

/// Initialises a layer of libtorch's own by its reset_parameters(), and leaves other modules.
void reset_parameters(torch::nn::Module& module);
/// Defers the parameters and buffers of a module that are on the meta device. `initialise` is
/// called for each module all of whose parameters are such ones, those of its children included,
/// children first as constructors run, and is recorded as a constructor is: it writes to the
/// module's own parameters and buffers. A parameter that two modules share has what the first one
/// wrote. What nothing has written to must get its values from elsewhere (fill_deferred(),
/// set_source(), copy_) before it is placed, which otherwise names it. Defer a model before it is
/// split into stages, so that all have one recording. Not collective; all ranks do the same. Throws
/// InvalidArgument where nothing is on the meta device, for tensors that share memory, and inside a
/// DeferredScope; by an exception the module is as it was.
void defer(torch::nn::Module& module,
           const std::function<void(torch::nn::Module&)>& initialise = reset_parameters);
/// The same for the tensors of a module that is not C++'s own, as TorchScript's, which nothing
/// initialises.
void defer(const std::vector<NamedTensor>& tensors);

/// The parameters and buffers of a module, under each of their full names.
std::vector<NamedTensor> named_tensors(const torch::nn::Module& module);

/// True if the tensor was made in a DeferredScope, or is of defer(), and has no values yet.
bool is_deferred(const at::Tensor& tensor);
/// Throws InvalidArgument for the first parameter or buffer that has no values, by its name and
/// with what to do: for what computes, sends or saves. `may_be_deferred`: only for those that are
/// on the meta device and not deferred, which nothing can place.
void require_values(const std::string& who, const std::vector<NamedTensor>& tensors,
                    bool may_be_deferred = false);

/// Gives the value of a deferred tensor: its shards as `spec` says, on `device`, a tensor of that
/// spec and of the deferred tensor's dtype; for null the whole of it, as a plain tensor. Called
/// when the tensor is placed, by all ranks of the spec's mesh at once, or by materialize(). What it
/// throws leaves everything deferred; collective calls of its own must then throw on all ranks.
using DeferredSource = std::function<at::Tensor(const ShardSpec* spec, c10::Device device)>;
/// Says that a deferred tensor gets its values from `source` rather than from what was recorded of
/// it, which is neither computed nor drawn. What is done to the tensor afterwards is recorded on
/// top of that. `what` names the values ("weight of step-100"): ranks that place a module compare
/// it. fill_deferred() (tessera/checkpoint/fill_deferred.h) takes a whole module from files. Throws
/// InvalidArgument for a tensor that is not deferred.
void set_source(const at::Tensor& deferred, const std::string& what, DeferredSource source);

/// Gives the deferred parameters and buffers of a module their values, each whole, on this process:
/// what the constructor would have done, with the same random numbers of libtorch's default
/// generator if nothing else draws in between and all that was recorded belongs to this module. For
/// modules that nothing places (DistributedDataParallel, one process). Not collective, unless a
/// source that was set is. Where a source was set, what nothing needs is not drawn. Throws
/// NotAvailable as DeferredScope, and InvalidArgument inside one.
void materialize(torch::nn::Module& module, c10::Device device = c10::kCPU);
/// The same for the tensors of a module that is not C++'s own; what is not deferred stays as it is.
void materialize(const std::vector<at::Tensor>& tensors, c10::Device device = c10::kCPU);
/// Gives deferred tensors their values, each whole, on this process, with the random numbers of
/// sharded tensors: those that fully_shard() and the others would give them. For modules that a
/// rank has alone, as the stages of a pipeline (whose constructor does it): ranks may give other
/// tensors, or none, and their random numbers go on alike. Collective over `mesh`; what is wrong on
/// one rank is thrown on all, where everything stays deferred and random numbers are as before. A
/// reader that fills them is of this rank alone. Throws InvalidArgument for a tensor on the meta
/// device that is not deferred, MismatchError where ranks have other seeds.
void materialize(const std::vector<NamedTensor>& tensors, const DeviceMesh& mesh);

}  // namespace tessera
