#pragma once
// GradientReducer::State: what the reducer's hooks share, and when buckets are reduced. reducer.cpp
// makes it.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/comm/group/shared_memory.h"
#include "tessera/gradient/detail/bucket_message.h"
#include "tessera/gradient/internal/coalesced.h"
#include "tessera/gradient/reducer.h"

namespace tessera {

struct GradientReducer::State : GradientSync, std::enable_shared_from_this<State> {
  // The place of a parameter in its bucket's flat tensor.
  struct Slot {
    std::size_t parameter;
    std::int64_t offset;
    at::Tensor like;
    at::Tensor part;  // a tensor over that place, once there is a flat tensor
  };

  struct Bucket {
    Group group;
    ReduceOp op;
    double factor = 1.0;  // of what is copied into the flat tensor
    // GradientAccess::uniform() of its parameters, which then say what is reduced over which
    // groups.
    bool uniform = false;
    std::vector<Slot> slots;
    std::vector<detail::BucketMessage> messages;
    std::int64_t bytes = 0;   // of the global tensors
    bool scatters = false;    // a message is reduce-scattered
    bool scattered = false;   // and that has been waited for
    std::int64_t numel = 0;   // without the flags
    SharedMemory memory;      // for `flat`, if the ranks share any
    at::Tensor flat;          // numel values, then one flag a slot: did this rank use it
    std::size_t missing = 0;  // slots whose gradient has not been accumulated in this backward
    bool started = false;
    Request request;
  };

  // What backward said of a parameter's gradient.
  struct Announcement {
    GradientForm form;
    std::vector<int> ranks;
    int backward;
  };

  // Over how many ranks the gradient of an averaged parameter is complete: 1 where it is each
  // rank's own.
  struct MeanForm {
    /// The number of ranks that the backward of the number `backward` announced.
    int announced = 1, backward = -1;
    /// That number for what has been accumulated last.
    int copies = 1;
    /// What has been accumulated since the last reduction differs in that.
    bool mixed = false;
  };

  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
    std::string name;
    Group group;
    ReduceOp op;
    std::shared_ptr<const GradientAccess> access;

    std::size_t bucket = 0;
    bool pending = false;  // accumulated since the last reduction
    bool came = false;     // of a sum: a gradient is on its way to the parameter
    bool fired = false;    // accumulated in this backward
    bool reduced = false;  // what .grad() holds, but for what is pending
    // If its gradients are weighted by hand: since they were reduced.
    std::vector<Announcement> announced = {};
    // If its gradients are averaged: from the first that is complete.
    std::optional<MeanForm> form = {};

    /// What has been reduced is not to be reduced again: the group's first rank contributes it.
    bool sums() const {
      return (op.kind == ReduceOp::Kind::sum || op.kind == ReduceOp::Kind::premultiplied) &&
             !(access && access->uniform());
    }
    bool first() const { return group.rank() == 0; }

    at::Tensor tensor() const {  // undefined once the parameter is gone
      auto impl = parameter.lock();
      return impl ? at::Tensor(std::move(impl)) : at::Tensor();
    }
  };

  std::vector<Entry> parameters;
  std::unordered_map<const c10::TensorImpl*, std::size_t> index;
  // Reducers that parameters had before: theirs is done first.
  std::vector<std::weak_ptr<State>> earlier;
  // Those of them that share ranks with a group of this one: all ranks of that have them, or none.
  struct Preceded {
    Group group;
    std::vector<std::weak_ptr<State>> by;
  };
  std::vector<Preceded> preceded;
  ReducerOptions options;
  std::vector<std::vector<std::size_t>> layout;
  std::vector<Bucket> buckets;
  // Not under the mutex: a NoSync may end while this thread or another one holds it.
  std::atomic<bool> sync = true;
  bool late = false;  // something uniform was accumulated after its bucket had started
  bool open = false;  // between the first hook of a backward and its end
  // Identifies the backward that is open.
  const void* backward = nullptr;
  std::size_t next = 0;              // the bucket that starts next, by its place in `order`
  std::vector<std::size_t> order;    // in which buckets start
  std::vector<std::size_t> arrival;  // in which they were complete in this backward
  bool learnt = false;               // `order` is what it will stay
  // Engine threads of several devices fire hooks at the same time.
  mutable std::mutex mutex;

  bool syncing() const override { return sync; }
  void set_syncing(bool on) override { sync = on; }
  void reduce() override {
    for (const auto& weak : earlier)
      if (const auto inner = weak.lock()) inner->reduce();
    const std::lock_guard lock(mutex);
    forget_order();
    finish();
  }
  std::optional<double> scale(const at::Tensor& parameter) const override;
  std::vector<int> ranks(const at::Tensor& parameter) const override;
  void receives(const at::Tensor& parameter, GradientForm form,
                const std::vector<int>& ranks) override;

  std::string find_earlier(const ReducedParameter& p, std::exception_ptr& refused);
  void require_earlier_alike();
  void make_buckets(const std::vector<ReducedParameter>& given,
                    const std::vector<BucketItem>& items);
  void add_hooks(const std::vector<ReducedParameter>& given);
  const GradientAccess& access(std::size_t i) const {
    static const GradientAccess plain;
    return parameters[i].access ? *parameters[i].access : plain;
  }

  at::Tensor accumulating(std::size_t i, const at::Tensor& gradient);
  void note_form(Entry& entry);
  void accumulated(std::size_t i);
  void forget_order();
  void begin();
  void abandon();
  void start(Bucket& bucket);
  void start_uniform(Bucket& bucket);
  void make_room_for(const Bucket& bucket);
  void complete(Bucket& bucket);
  void finish();
  void learn();
  void write_back(Bucket& bucket);
  void reset();
  void share_memory(const Group& group);
  void leave_shared_memory();
};

}  // namespace tessera
