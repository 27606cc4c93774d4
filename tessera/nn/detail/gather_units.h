#pragma once
// GatherUnits: gathers the parameters of fully_shard() unit by unit, ahead of their use.
//
// How it works. An operator that needs a parameter gathered asks for it (ParameterSource). The
// first use of any parameter of a unit waits for the gather of the unit's flat buffer, of which
// gathered parameters are views. What is saved for backward is the shard, so that the buffer lives
// as long as this object and the operators at work hold it.
//
// The order in which units are used is recorded in each pass: a forward, or a backward. While a
// pass goes as the last one of its kind did, the gather of the next unit is started when a unit is
// first used, and a unit is released with its last use. Where it goes another way, units are
// gathered when they are used and released when another one is, and the order is learnt anew. All
// of that follows from the operators that the program calls on sharded tensors, which are the same
// on all ranks, and from nothing else.
//
// A failure. Where one rank failed alone and all have caught it, each stopped at a use of its own,
// and one may have learnt an order that others have not: what was gathered and learnt is dropped.
//
// Small units. Where the order is learnt, units that are small together are gathered in one
// message, which costs more by itself than what it carries. What has arrived is copied into one
// piece of memory, of which each unit's buffer is an interval.
//
// A smaller group. Where units stay sharded over some of the axes alone between forward and
// backward, the last use in forward leaves this rank's interval of the gathered buffer, cut evenly
// over the ranks of those axes, and the next gather is theirs. It goes with what was gathered:
// written to, released by hand, or at the end of backward.
//
// Mixed precision. A unit with a dtype to compute in keeps its shards in that dtype too, in a
// buffer of its own that is copied anew from the parameters whenever it is gathered; operators get
// tensors over that memory in place of the parameters, and it is that memory which is gathered.
//
// Autocast makes copies of parameters in another dtype. Such a copy is known as long as it lives
// (ParameterCopy), and taken from what its unit has gathered, if that still has its value and the
// same dtype, or the parameter's own, which is then cast.
//
// Offload. Where shards lie in host memory, the gather of a unit begins with a copy of this rank's
// shard to the device, on a stream of its own (Uploads). What is gathered lies on the device, also
// where nothing has to be gathered, since one rank has it all.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/nn/detail/upload.h"
#include "tessera/tensor/dispatch/internal/parameter_source.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {

class GatherUnits final : public ParameterSource, public std::enable_shared_from_this<GatherUnits> {
 public:
  struct Options {
    bool reshard_after_forward = true;
    /// Units gathered ahead of their use.
    int ahead = 1;
    /// Units of fewer bytes together are gathered in one message; half as many are
    /// started ahead of use whatever `ahead` says, unless it is 0.
    std::int64_t coalesced_bytes = 0;
    /// Axes over which units stay sharded between forward and backward, in mesh order; empty: all
    /// that shard them.
    std::vector<int> kept_axes = {};
    /// Shards lie in host memory, and units are gathered on this device.
    std::optional<c10::Device> device = {};
    /// Host memory is page-locked.
    bool pinned = false;
  };
  /// `axes`: over which parameters are sharded, in mesh order.
  GatherUnits(std::shared_ptr<MeshContext> context, std::vector<int> axes, Options options);

  std::size_t add_unit(std::string name, ParameterPrecision precision = {});
  /// A flat buffer of a unit: what this rank keeps of it, and how much every rank keeps.
  std::size_t add_buffer(std::size_t unit, at::Tensor shard, Sizes sizes);
  static constexpr std::size_t kNoBuffer = ~std::size_t{0};
  /// A parameter that begins at `offset` of a buffer, as `local` on this rank; kNoBuffer: one that
  /// belongs to the unit and is not gathered with it. `sharded_elsewhere`: the elements of the
  /// global tensor, if other axes shard it too, so that what is gathered is this rank's shard of it
  /// on those; else 0.
  void add_parameter(std::size_t unit, std::size_t buffer, std::int64_t offset,
                     const at::Tensor& local, std::int64_t sharded_elsewhere = 0);

  at::Tensor gathered(std::size_t index, const ShardMeta& meta, const ShardSpec& to) override;
  at::Tensor copied(std::size_t index, const Layout& from, const Layout& made,
                    at::Tensor local) override;
  /// The local under `to` of a copy of parameter `index`, or of a view of the copy, both by `meta`;
  /// `writes` is that of its unit when it was made. Undefined: it is gathered by itself.
  at::Tensor gathered_copy(std::size_t index, std::uint64_t writes, const ShardMeta& meta,
                           const ShardSpec& to);
  void written(std::size_t index) override;
  ParameterPrecision precision(std::size_t index) const override;
  at::Tensor computed(std::size_t index, const ShardMeta& meta) override;
  /// A gradient of one of the parameters was accumulated: a backward runs, though it may use none.
  void accumulated();

  /// True if memory of shards is page-locked.
  bool pins() const { return options_.pinned; }
  std::size_t unit_of(std::size_t index) const { return places_[index].unit; }
  /// Starts the gather of a unit and keeps it until let_go(). Collective over the sharded axes.
  void hold(std::size_t unit);
  void let_go(std::size_t unit);

 private:
  struct Buffer {
    at::Tensor shard;
    // The shard in the dtype to compute in; undefined: that is its own.
    at::Tensor low;
    // That of `low`, at least one element.
    at::Tensor memory;
    Sizes sizes;
    std::int64_t numel;
    at::Tensor full;  // undefined: not gathered
    Request request;
    // What is sent, on the device; undefined where shards lie there.
    at::Tensor sent = {};
    // Between forward and backward: an interval of `full`, as the smaller group keeps it.
    at::Tensor kept = {};
  };
  // The gather of several units, whose state is `started` until one of them is waited for.
  struct Message {
    std::vector<std::size_t> units;
    // This rank's shards of all of them, and those of all ranks, rank by rank.
    at::Tensor sent, received;
    Request request;
  };
  struct Unit {
    std::string name, label;
    ParameterPrecision precision;
    std::vector<Buffer> buffers;
    // In bytes, gathered.
    std::int64_t bytes = 0;
    // Whether its buffers have one dtype and device, in which they are gathered.
    bool alike = true;
    // While it is started with others.
    std::shared_ptr<Message> message = {};
    enum class State : unsigned char { sharded, started, gathered } state = State::sharded;
    bool held = false;
    // Every buffer has its `kept`.
    bool kept = false;
    // How often its parameters were written to.
    std::uint64_t writes = 0;
    // The copies to the device, until they have been waited for.
    std::shared_ptr<c10::Event> copies = {};
  };
  struct Place {
    std::size_t unit, buffer;
    std::int64_t offset;
    std::int64_t sharded_elsewhere = 0;
    // True if the place is that of a low-precision copy of a parameter.
    bool low = false;
    // The parameter's local in that dtype, if there is one, and where its own begins.
    at::Tensor computed = {};
    std::int64_t begin = 0;
  };
  struct Visit {
    std::size_t unit;
    int uses;
    bool operator==(const Visit&) const = default;
  };
  struct Order {
    std::vector<Visit> visits;
    bool learnt = false;
  };
  enum class Pass : unsigned char { none, forward, evaluation, backward };

  void catch_up();
  void visit(std::size_t index);
  bool starts_again(std::size_t index) const;
  bool repeats(std::size_t index);
  void begin(Pass pass);
  void end(bool learn);
  void left();
  void used();
  bool comes_again() const;
  bool stays_near() const;
  void add_low(std::size_t index, const at::Tensor& local);
  bool gathers(const Place& place, const ShardMeta& meta, const ShardSpec& to) const;
  at::Tensor take(std::size_t index, const Layout& layout, const ShardSpec& to);
  void start(std::size_t unit);
  std::size_t ahead_of(std::size_t at) const;
  void start_from(std::size_t at);
  void start_message(const std::vector<std::size_t>& units);
  static const at::Tensor& sent_of(const Buffer& buffer);
  void wait(Unit& unit);
  void take_apart(Message& message);
  void finish_copies(Unit& unit);
  Sizes kept_sizes(std::int64_t numel) const;
  void keep_near(std::size_t unit);
  void free_gathered(std::size_t unit);
  void release(std::size_t unit);
  Order& order() { return orders_[static_cast<int>(pass_)]; }
  const Order& order() const { return orders_[static_cast<int>(pass_)]; }

  const std::shared_ptr<MeshContext> context_;
  const std::vector<int> axes_;
  const Options options_;
  // Of the group that gathers, and how often it was made anew after a failure.
  const std::vector<int> ranks_;
  std::uint64_t failures_;
  std::vector<Unit> units_;
  std::vector<Place> places_;

  std::optional<Uploads> uploads_;

  // Engine threads of several devices use parameters at the same time.
  std::mutex mutex_;
  Pass pass_ = Pass::none;
  // The parameter that the pass began with, what was seen in it, and where that parameter was used
  // again after others, while the pass goes no learnt way.
  std::size_t first_ = 0;
  std::vector<Visit> seen_;
  std::vector<std::size_t> starts_;
  bool following_ = false;     // seen_ is how the learnt order begins
  const void* end_ = nullptr;  // of the backward that runs
  Order orders_[4];
};

/// A view of a flat buffer, without libtorch's operators, which cost more than the rest of what a
/// use of a gathered parameter does.
at::Tensor place_in(const at::Tensor& flat, std::int64_t offset, at::IntArrayRef sizes,
                    at::IntArrayRef strides);

}  // namespace tessera::detail
