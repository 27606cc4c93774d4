#pragma once
// Worker threads of an engine that they share with its owner: one that hangs in a read is left
// behind, and what it uses stays alive.
//
// An engine has mutex, work, rested (notified when a worker ends), stop, running,
// options.stall_limit, and run(), in which a worker stays until `stop`.

#include <c10/util/Exception.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"

namespace tessera::detail {

/// The engine that this thread works for.
inline const void*& worker_of() {
  thread_local const void* engine = nullptr;
  return engine;
}

template <class Engine>
void start_workers(const std::shared_ptr<Engine>& engine, int workers) {
  try {
    for (int n = 0; n < workers; ++n) {
      std::thread([engine] {
        worker_of() = engine.get();
        engine->run();
        const std::lock_guard lock(engine->mutex);
        --engine->running;
        engine->rested.notify_all();
      }).detach();
      const std::lock_guard lock(engine->mutex);
      ++engine->running;
    }
  } catch (const std::system_error& e) {
    {
      const std::lock_guard lock(engine->mutex);
      engine->stop = true;
    }
    engine->work.notify_all();
    throw Error("the system does not give ", workers, " worker threads: ", e.what(), "; use fewer");
  }
}

template <class Engine>
void stop_workers(Engine& engine, const char* owner) {
  // The read of a sample may drop the owner: an interpreter's collector runs on any thread.
  const int here = worker_of() == &engine ? 1 : 0;
  std::unique_lock lock(engine.mutex);
  engine.stop = true;
  engine.work.notify_all();
  if (engine.rested.wait_until(lock, deadline_after(engine.options.stall_limit),
                               [&] { return engine.running <= here; }))
    return;
  const int left = engine.running - here;
  lock.unlock();
  TORCH_WARN(owner, ": ", left, " worker(s) have been reading for more than ",
             engine.options.stall_limit.count(),
             " ms and are left behind; they end when their read ends");
}

}  // namespace tessera::detail
