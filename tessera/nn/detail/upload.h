#pragma once
// Uploads: copies of shards from host memory to a device, started ahead of their use on a stream of
// their own, so that they run while the device computes.
//
// Memory that copies and gathers are made in belongs to that stream, and is used by the one that
// computes. What has been released is taken again by the next copies: these wait for all that the
// computing stream had to do when they were started, which is what used the memory, and run beside
// what it is given afterwards.

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>

namespace tessera::detail {

class Uploads {
 public:
  /// `device` is no CPU, and has an index.
  explicit Uploads(c10::Device device);

  /// The stream that is to be the current one while copies are started: memory is made on it, and
  /// collectives that take the copies are started on it.
  c10::Stream begin() const;
  /// What has been started on that stream.
  std::shared_ptr<c10::Event> end() const;
  /// A copy of `host` on the device, started.
  at::Tensor copy(const at::Tensor& host) const;
  /// The current stream waits for the copies, and so does this thread: host memory may be written
  /// to afterwards.
  void wait(const c10::Event& copies) const;

 private:
  c10::Stream current() const;

  const c10::Device device_;
  const c10::Stream stream_;
};

}  // namespace tessera::detail
