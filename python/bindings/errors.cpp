#include "errors.h"

#include <array>
#include <atomic>

#include "tessera/base/host_lock.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/comm/job/parallel_groups.h"
#include "tessera/comm/store/store.h"
#include "tessera/data/dataset.h"
#include "tessera/data/loader.h"
#include "tessera/data/sources/source.h"
#include "tessera/data/stream_loader.h"
#include "tessera/gradient/sync.h"
#include "tessera/mesh/errors.h"
#include "tessera/pipeline/pipeline.h"
#include "tessera/schedule/action.h"
#include "tessera/schedule/validate.h"
#include "tessera/tensor/errors.h"
#include "tessera/train/session.h"
#ifdef TESSERA_PYTHON_HAS_CONFIG
#include "tessera/config/errors.h"
#endif

struct _object;

// As torch/csrc/Exceptions.h declares it, which needs Python's headers: libtorch looks for it by
// its name. It leaves out the base std::exception, whose functions stand at the same places, so
// that what derives from it and from an error is one std::exception and not two.
namespace torch {
struct __attribute__((visibility("hidden"))) PyTorchError {
  PyTorchError() = default;
  PyTorchError(const PyTorchError&) = default;
  virtual ~PyTorchError() = default;
  virtual const char* what() const noexcept { return msg.c_str(); }
  virtual _object* python_type() = 0;
  std::string msg;
};
}  // namespace torch

namespace tessera::python {

namespace {

template <class E>
struct Raised final : E, torch::PyTorchError {
  Raised(const E& error, _object* type) : E(error), type_(type) { msg = error.what(); }
  const char* what() const noexcept override { return E::what(); }
  _object* python_type() override { return type_; }
  _object* type_;
};

template <class E>
void raise_if(const Error& error, _object* type) {
  if (const auto* own = dynamic_cast<const E*>(&error); own && type) throw Raised<E>(*own, type);
}

struct ErrorClass {
  const char* name;
  void (*raise)(const Error&, _object* type);
};

// What derives from another stands before it.
constexpr ErrorClass kClasses[] = {
#define TESSERA_ERROR(name) {#name, &raise_if<name>}

#ifdef TESSERA_PYTHON_HAS_CONFIG
    TESSERA_ERROR(ConfigFileError),
#endif
    TESSERA_ERROR(WorldSizeMismatch),  TESSERA_ERROR(UnsetSize),
    TESSERA_ERROR(RepeatedName),       TESSERA_ERROR(UnknownName),
    TESSERA_ERROR(GroupCycle),         TESSERA_ERROR(ViewMismatch),
    TESSERA_ERROR(OrthogonalityError), TESSERA_ERROR(GroupConfigError),
    TESSERA_ERROR(MappingError),       TESSERA_ERROR(ParallelismError),
    TESSERA_ERROR(ConfigurationError), TESSERA_ERROR(RangeError),
    TESSERA_ERROR(VariableError),      TESSERA_ERROR(ScheduleSyntaxError),
    TESSERA_ERROR(InvalidArgument),    TESSERA_ERROR(CheckpointDamaged),
    TESSERA_ERROR(FileError),          TESSERA_ERROR(NotAvailable),
    TESSERA_ERROR(RendezvousError),    TESSERA_ERROR(TimeoutError),
    TESSERA_ERROR(PeerFailedError),    TESSERA_ERROR(PeerLostError),
    TESSERA_ERROR(MismatchError),      TESSERA_ERROR(CommError),
    TESSERA_ERROR(NoRuleError),        TESSERA_ERROR(ImplicitRedistributionError),
    TESSERA_ERROR(ShardingError),      TESSERA_ERROR(RuleError),
    TESSERA_ERROR(GradientError),      TESSERA_ERROR(SampleError),
    TESSERA_ERROR(StalledError),       TESSERA_ERROR(UnevenDataError),
    TESSERA_ERROR(ScheduleError),      TESSERA_ERROR(PipelineError),
    TESSERA_ERROR(CheckpointBusy),     TESSERA_ERROR(CheckpointLocked),
    TESSERA_ERROR(NonFiniteGradient),  TESSERA_ERROR(Error),
#undef TESSERA_ERROR
};
constexpr std::size_t kCount = std::size(kClasses);

// Of the process' interpreter.
std::array<std::atomic<_object*>, kCount>& types() {
  static std::array<std::atomic<_object*>, kCount> all{};
  return all;
}

}  // namespace

void raise_by_class(const Error& error) {
  if (dynamic_cast<const torch::PyTorchError*>(&error)) return;  // it is one already
  for (std::size_t i = 0; i < kCount; ++i)
    kClasses[i].raise(error, types()[i].load(std::memory_order_acquire));
}

std::vector<std::string> error_names() {
  std::vector<std::string> names;
  for (const ErrorClass& each : kClasses) names.emplace_back(each.name);
  return names;
}

void set_error_classes(const std::vector<std::int64_t>& classes) {
  if (classes.size() != kCount)
    throw InvalidArgument(classes.size(), " classes for ", kCount, " errors");
  for (std::size_t i = 0; i < kCount; ++i)
    types()[i].store(reinterpret_cast<_object*>(classes[i]), std::memory_order_release);
}

}  // namespace tessera::python
