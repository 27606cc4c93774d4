#pragma once
// What every function of the C interface is made of: handles, the gate of a job, and errors that
// become a code and a sentence.
//
//   return run("tessera_copy", Reach::all, [&](Call& call) {
//     const at::Tensor& to = call.use<TensorObject>(to_handle, "to").value;
//     ...
//   });

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/pinned.h"
#include "tessera/base/text.h"
#include "tessera/c/tessera.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/comm/job/manager.h"

namespace tessera::c {

/// A mistake of the caller, seen before anything was sent.
class Misuse : public Error {
 public:
  template <class... Args>
  explicit Misuse(tessera_result result, const Args&... args)
      : Error(concat(args...)), result_(result) {}
  tessera_result result() const { return result_; }

 private:
  tessera_result result_;
};

/// Throws Misuse with TESSERA_ERROR_ARGUMENT.
template <class... Args>
[[noreturn]] void refuse(const Args&... args) {
  throw Misuse(TESSERA_ERROR_ARGUMENT, args...);
}

/// Throws Misuse for a pointer that is NULL.
template <class Pointer>
Pointer* need(Pointer* pointer, const char* name) {
  if (!pointer) refuse(name, " is NULL");
  return pointer;
}
std::string need_text(const char* text, const char* name);

enum class Kind : std::uint8_t { job = 1, mesh, group, tensor, model, optimizer, session, state };
const char* to_string(Kind kind);

/// One job, and who is in a call of it.
struct Job {
  std::optional<DistributedManager> manager;
  /// Beside the manager, so that it says nothing after the end.
  int rank = 0, size = 1;

  /// Throws Misuse while another thread is inside; the same one may come in again (a registered
  /// model that calls the interface).
  void enter();
  void leave();

 private:
  std::mutex mutex_;
  std::thread::id inside_;
  int depth_ = 0;
};
using JobPtr = std::shared_ptr<Job>;

/// What a handle stands for.
struct Object : Pinned {
  explicit Object(JobPtr of) : job(std::move(of)) {}
  virtual ~Object();
  JobPtr job;
};

struct JobObject : Object {
  static constexpr Kind kind = Kind::job;
  using Object::Object;
};

struct MeshObject : Object {
  static constexpr Kind kind = Kind::mesh;
  MeshObject(JobPtr of, DeviceMesh its) : Object(std::move(of)), mesh(std::move(its)) {}
  DeviceMesh mesh;
};

struct TensorObject : Object {
  static constexpr Kind kind = Kind::tensor;
  TensorObject(JobPtr of, at::Tensor its) : Object(std::move(of)), value(std::move(its)) {}
  at::Tensor value;
  /// Of a field: the caller's block with its ghost cells, and how many there are.
  at::Tensor block = {};
  std::vector<std::int64_t> before = {}, after = {};
  /// What tessera_local() has shown.
  at::Tensor local = {};
};

/// One call: what its handles stand for lives until it returns.
class Call : Pinned {
 public:
  ~Call();

  /// What a handle stands for. Enters the gate of its job. Throws Misuse for a handle that is not
  /// of this kind, and for one of another job than the first.
  template <class T>
  T& use(const void* handle, const char* name) {
    return static_cast<T&>(look_up(handle, name, T::kind));
  }
  /// The same whatever its kind is, to be kept beyond the call.
  std::shared_ptr<Object> share_any(const void* handle, const char* name, Kind& kind);
  /// A handle of a new object, in the job of the call.
  template <class T, class Handle>
  void give(Handle* handle, std::shared_ptr<T> object) {
    *handle = static_cast<Handle>(keep(std::move(object), T::kind));
  }
  const JobPtr& job() const { return job_; }
  const DistributedManager& manager() const { return *job_->manager; }
  void enter(const JobPtr& job);

 private:
  Object& look_up(const void* handle, const char* name, Kind kind);
  static void* keep(std::shared_ptr<Object> object, Kind kind);

  std::vector<std::shared_ptr<Object>> held_;
  JobPtr job_;
};

/// Whether other ranks wait in the same call: then a Misuse of this one is told to them.
enum class Reach : std::uint8_t { own, all };

/// Runs `body`, and makes a code and the thread's message of what it throws.
tessera_result run(const char* name, Reach reach, const std::function<void(Call&)>& body) noexcept;

/// Runs a body that makes an object, a shared_ptr, and puts a handle of it into `handle`. Fails
/// where that is NULL; where anything else fails, NULL is put there.
template <class Handle, class Body>
tessera_result make(const char* name, Reach reach, Handle* handle, const char* handle_name,
                    const Body& body) {
  return run(name, reach, [&](Call& call) {
    *need(handle, handle_name) = nullptr;
    call.give(handle, body(call));
  });
}

/// Frees everything of the job, newest first, and the job's own handle.
void release_job(Call& call, const void* handle);

}  // namespace tessera::c
