#include "tessera/comm/backends/mpi/mpi_backend.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/arguments.h"
#include "tessera/comm/backends/mpi/mpi_meet.h"
#include "tessera/comm/group/detail/reduction.h"

namespace tessera::detail {

namespace {

using c10d::OpType;

/// What the ranks compare: `like` is a tensor that all ranks have alike, or, with counts, in which
/// they have those elements.
CallCard mpi_card(const at::Tensor& like, const std::vector<std::int64_t>& counts = {},
                  int root = -1) {
  CallCard card;
  card.dtype = like.scalar_type();
  card.root = root;
  card.elements = counts.empty() ? like.numel() : 1;
  card.sizes = counts;
  return card;
}

CallCard mpi_card(const at::Tensor& like, const c10d::ReduceOp& op,
                  const std::vector<std::int64_t>& counts = {}, int root = -1) {
  CallCard card = mpi_card(like, counts, root);
  // c10d counts the first five as ReduceOp::Kind does.
  card.op = op.op_ == c10d::ReduceOp::PREMUL_SUM ? static_cast<int>(ReduceOp::Kind::premultiplied)
            : op.op_ <= c10d::ReduceOp::MAX      ? static_cast<int>(op.op_)
                                                 : 16 + static_cast<int>(op.op_);
  return card;
}

/// The card of a call in which each rank has sizes of its own: the data is sent in messages, which
/// would be taken for those of another call if the ranks did not compare at least this.
CallCard own_card(const at::Tensor& like, int root = -1) {
  CallCard card = mpi_card(like, {}, root);
  card.elements = -1;
  return card;
}

/// The card of a call on several tensors: the elements of each.
CallCard mpi_card(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? CallCard{} : mpi_card(tensors.front(), numels(tensors));
}

CallCard mpi_card(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) {
  return tensors.empty() ? CallCard{} : mpi_card(tensors.front(), op, numels(tensors));
}

/// Copies what a rank sends to itself. Same number of elements and dtype.
void copy_here(const at::Tensor& output, const at::Tensor& input) {
  if (in_order(output) && in_order(input) && output.numel() > 0)
    std::memcpy(output.data_ptr(), input.data_ptr(), input.nbytes());
  else
    output.copy_(input.view(output.sizes()));
}

}  // namespace

MpiBackend::MpiBackend(std::shared_ptr<MpiComm> comm, const MpiBackendOptions& options)
    : OwnBackend(comm->rank(), comm->size(), options.timeout),
      comm_(std::move(comm)),
      max_count_(options.max_count),
      sent_(comm_->ranks().size()),
      received_(comm_->ranks().size()) {
  if (max_count_ < 1 || max_count_ > std::numeric_limits<int>::max())
    throw InvalidArgument(concat("max_count of an MPI group is ", max_count_, "; it must be 1 to ",
                                 std::numeric_limits<int>::max()));
  if (timeout_.count() <= 0)
    throw InvalidArgument(
        concat("the time limit of an MPI group is ", timeout_.count(), " ms; it must be positive"));
}

// While the reductions, which the moves of adopted calls use, are there.
MpiBackend::~MpiBackend() { comm_->close(); }

bool MpiBackend::reduces(c10::ScalarType dtype, ReduceOp::Kind op) const {
  return MpiReductions::supports(dtype, to_c10d(op));
}

MpiBackend::WorkPtr MpiBackend::run(const char* name, OpType type, CallLimit limit, Kind kind,
                                    CallCard card, const std::function<void(MpiCall&)>& add) {
  comm_->require_usable(name);
  const at::NoGradGuard no_grad;
  auto call = std::make_unique<MpiCall>();
  call->name = name;
  call->type = type;
  call->timeout = bounded_limit(limit.timeout.count() > 0 ? limit.timeout : timeout_);
  if (kind == Kind::collective) {
    sequence_.fetch_add(1, std::memory_order_relaxed);
    card.operation = name;
    call->hash = Hash().number(signature_).number(card.hash()).value();
    call->card = std::move(card);
  }
  // the signature belongs to this call alone
  signature_ = 0;
  try {
    // At level `serialized` a blocking call would hold the lock that the thread needs for which the
    // other ranks wait.
    if (kind == Kind::collective && limit.blocking &&
        comm_->library().level() != MpiThreadLevel::serialized) {
      call->blocking = call->at_once = true;
      add(*call);
      comm_->meet(*call);
      for (const auto& move : call->moves) move();
      call->moves.clear();
      call->phase.reset();
    } else {
      {
        const auto lock = comm_->library().serialize();
        add(*call);
      }
      if (kind == Kind::collective) comm_->begin(*call);
    }
  } catch (...) {
    call->phase.reset();
    if (call->pending()) {
      comm_->set_stuck();
      comm_->adopt(std::move(call));
    }
    throw;
  }
  auto work = c10::make_intrusive<MpiWork>(
      c10::intrusive_ptr<MpiBackend>::unsafe_reclaim_from_nonowning(this), comm_, std::move(call));
  if (limit.blocking) work->wait();
  return work;
}

MpiBackend::WorkPtr MpiBackend::run(const char* name, OwnCall how, CallCard card,
                                    const std::function<void(MpiCall&)>& add) {
  return run(name, how.type, how.limit, Kind::collective, std::move(card), [&](MpiCall& call) {
    add(call);
    if (how.finish) call.finish.push_back(std::move(how.finish));
    call.results = std::move(how.results);
  });
}

int MpiBackend::user_tag(int tag) const {
  if (tag < 0 || tag >= comm_->tags().users())
    throw InvalidArgument(concat("message tag ", tag, " is not in 0 to ", comm_->tags().users() - 1,
                                 ", which this MPI library allows"));
  return tag;
}

MpiBackend::WorkPtr MpiBackend::broadcast_one(const at::Tensor& tensor, int root, OwnCall how) {
  return run("broadcast", std::move(how), mpi_card(tensor, {}, root),
             [&](MpiCall& call) { add_broadcast(call, tensor, root); });
}

MpiBackend::WorkPtr MpiBackend::all_reduce_one(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                               OwnCall how) {
  return run("all_reduce", std::move(how), mpi_card(tensor, op),
             [&](MpiCall& call) { add_all_reduce(call, tensor, op); });
}

MpiBackend::WorkPtr MpiBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  for (const auto& tensor : tensors) require_cpu("all_reduce of several tensors", tensor);
  return run("all_reduce of several tensors", OpType::ALLREDUCE_COALESCED, limit_of(options),
             Kind::collective, mpi_card(tensors, options.reduceOp), [&](MpiCall& call) {
               call.at_once = false;
               for (const auto& tensor : tensors) add_all_reduce(call, tensor, options.reduceOp);
               call.results = tensors;
             });
}

MpiBackend::WorkPtr MpiBackend::reduce_one(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                           int root, OwnCall how) {
  return run("reduce", std::move(how), mpi_card(tensor, op, {}, root),
             [&](MpiCall& call) { add_reduce(call, tensor, root, op); });
}

MpiBackend::WorkPtr MpiBackend::all_gather_counts(const at::Tensor& output, const at::Tensor& input,
                                                  Counts counts, OwnCall how) {
  return run("all_gather", std::move(how), mpi_card(input, counts),
             [&](MpiCall& call) { add_all_gather(call, output, input, counts); });
}

MpiBackend::WorkPtr MpiBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  if (outputs.size() != inputs.size())
    throw InvalidArgument(
        concat("all_gather of ", inputs.size(), " inputs into ", outputs.size(), " outputs"));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_cpu("all_gather", inputs[i]);
    require_cpu("all_gather", outputs[i]);
    require_same_type("all_gather", inputs[i], outputs[i]);
    require_numel("all_gather", "output", outputs[i], inputs[i].numel() * ranks());
  }
  return run("all_gather", inputs.size() == 1 ? OpType::ALLGATHER : OpType::ALLGATHER_COALESCED,
             limit_of(options), Kind::collective, mpi_card(inputs), [&](MpiCall& call) {
               call.at_once = call.at_once && inputs.size() == 1;
               for (std::size_t i = 0; i < inputs.size(); ++i)
                 add_all_gather(call, outputs[i], inputs[i], same_for_all(inputs[i].numel()));
               call.results = outputs;
             });
}

MpiBackend::WorkPtr MpiBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const at::Tensor input = only("gather", inputs);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of gather");
  Tensors out;
  if (rank() == root) {
    if (outputs.size() != 1 || static_cast<int>(outputs.front().size()) != ranks())
      throw InvalidArgument(concat("gather needs one list of ", ranks(), " outputs on its root"));
    out = outputs.front();
    for (const auto& t : out) {
      require_cpu("gather", t);
      require_same_type("gather", input, t);
    }
    require_numel("gather", "input", input, out[static_cast<std::size_t>(root)].numel());
  }
  // Messages: the other ranks do not know the sizes of the root's outputs.
  return run("gather", OpType::GATHER, limit_of(options), Kind::collective, own_card(input, root),
             [&](MpiCall& call) {
               call.results = out;
               after_meeting(call, [this, &call, input, out, root] {
                 if (rank() != root) return add_send(call, input, root, numbered(call, input));
                 for (int r = 0; r < ranks(); ++r) {
                   const auto& part = out[static_cast<std::size_t>(r)];
                   if (r != root) add_receive(call, part, r, numbered(call, part));
                 }
                 copy_here(out[static_cast<std::size_t>(root)], input);
               });
             });
}

MpiBackend::WorkPtr MpiBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  const at::Tensor output = only("scatter", outputs);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of scatter");
  Tensors in;
  if (rank() == root) {
    if (inputs.size() != 1 || static_cast<int>(inputs.front().size()) != ranks())
      throw InvalidArgument(concat("scatter needs one list of ", ranks(), " inputs on its root"));
    in = inputs.front();
    for (const auto& t : in) {
      require_cpu("scatter", t);
      require_same_type("scatter", t, output);
    }
    require_numel("scatter", "output", output, in[static_cast<std::size_t>(root)].numel());
  }
  return run("scatter", OpType::SCATTER, limit_of(options), Kind::collective,
             own_card(output, root), [&](MpiCall& call) {
               call.results = {output};
               after_meeting(call, [this, &call, output, in, root] {
                 if (rank() != root) return add_receive(call, output, root, numbered(call, output));
                 for (int r = 0; r < ranks(); ++r) {
                   const auto& part = in[static_cast<std::size_t>(r)];
                   if (r != root) add_send(call, part, r, numbered(call, part));
                 }
                 copy_here(output, in[static_cast<std::size_t>(root)]);
               });
             });
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter_counts(const at::Tensor& output,
                                                      const at::Tensor& input, Counts counts,
                                                      const c10d::ReduceOp& op, OwnCall how) {
  return run("reduce_scatter", std::move(how), mpi_card(input, op, counts),
             [&](MpiCall& call) { add_reduce_scatter(call, output, input, counts, op); });
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  if (outputs.size() != inputs.size())
    throw InvalidArgument(
        concat("reduce_scatter of ", inputs.size(), " inputs into ", outputs.size(), " outputs"));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_cpu("reduce_scatter", inputs[i]);
    require_cpu("reduce_scatter", outputs[i]);
    require_same_type("reduce_scatter", inputs[i], outputs[i]);
    require_numel("reduce_scatter", "input", inputs[i], outputs[i].numel() * ranks());
  }
  return run("reduce_scatter", OpType::REDUCE_SCATTER, limit_of(options), Kind::collective,
             mpi_card(outputs, options.reduceOp), [&](MpiCall& call) {
               call.at_once = call.at_once && inputs.size() == 1;
               for (std::size_t i = 0; i < inputs.size(); ++i)
                 add_reduce_scatter(call, outputs[i], inputs[i], same_for_all(outputs[i].numel()),
                                    options.reduceOp);
               call.results = outputs;
             });
}

MpiBackend::WorkPtr MpiBackend::gather_counts(const at::Tensor& output, const at::Tensor& input,
                                              Counts counts, int root, OwnCall how) {
  return run("gather", std::move(how), mpi_card(input, counts, root),
             [&](MpiCall& call) { add_gather(call, output, input, counts, root); });
}

MpiBackend::WorkPtr MpiBackend::scatter_counts(const at::Tensor& output, const at::Tensor& input,
                                               Counts counts, int root, OwnCall how) {
  return run("scatter", std::move(how), mpi_card(output, counts, root),
             [&](MpiCall& call) { add_scatter(call, output, input, counts, root); });
}

MpiBackend::WorkPtr MpiBackend::all_to_all_counts(const at::Tensor& output, Counts output_counts,
                                                  const at::Tensor& input, Counts input_counts,
                                                  OwnCall how) {
  return run("all_to_all", std::move(how), own_card(input), [&](MpiCall& call) {
    add_all_to_all(call, output, input, output_counts, input_counts);
  });
}

MpiBackend::WorkPtr MpiBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  if (static_cast<int>(outputs.size()) != ranks() || static_cast<int>(inputs.size()) != ranks())
    throw InvalidArgument(concat("all_to_all needs ", ranks(), " inputs and outputs, and got ",
                                 inputs.size(), " and ", outputs.size()));
  for (const auto* tensors : {&outputs, &inputs})
    for (const auto& t : *tensors) require_cpu("all_to_all", t);
  const auto me = static_cast<std::size_t>(rank());
  require_numel("all_to_all", "input to this rank itself", inputs[me], outputs[me].numel());
  return run("all_to_all", OpType::ALLTOALL, limit_of(options), Kind::collective,
             own_card(inputs[me]), [&](MpiCall& call) {
               call.results = outputs;
               after_meeting(call, [this, &call, outputs, inputs, me] {
                 for (int r = 0; r < ranks(); ++r) {
                   const auto& part = outputs[static_cast<std::size_t>(r)];
                   if (r != rank()) add_receive(call, part, r, numbered(call, part));
                 }
                 for (int r = 0; r < ranks(); ++r) {
                   const auto& part = inputs[static_cast<std::size_t>(r)];
                   if (r != rank()) add_send(call, part, r, numbered(call, part));
                 }
                 copy_here(outputs[me], inputs[me]);
               });
             });
}

MpiBackend::WorkPtr MpiBackend::send(Tensors& tensors, int to, int tag) {
  const at::Tensor tensor = only("send", tensors);
  require_rank(to, "the receiver of send");
  return run("send", OpType::SEND, {}, Kind::messages, {}, [&](MpiCall& call) {
    call.peers = {comm_->ranks()[static_cast<std::size_t>(to)]};
    add_send(call, tensor, to, users(tag, tensor));
  });
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int from, int tag) {
  const at::Tensor tensor = only("receive", tensors);
  require_rank(from, "the sender of receive");
  return run("receive", OpType::RECV, {}, Kind::messages, {}, [&](MpiCall& call) {
    call.peers = {comm_->ranks()[static_cast<std::size_t>(from)]};
    add_receive(call, tensor, from, users(tag, tensor));
    call.results = {tensor};
  });
}

MpiBackend::WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor tensor = only("receive from any rank", tensors);
  if (!fits(tensor.numel()))
    throw InvalidArgument(concat("receive from any rank: ", tensor.numel(),
                                 " elements, and one MPI message holds ", max_count_,
                                 "; name the sender"));
  return run("receive from any rank", OpType::RECVANYSOURCE, {}, Kind::messages, {},
             [&](MpiCall& call) {
               add_receive(call, tensor, MPI_ANY_SOURCE, users(tag, tensor));
               call.results = {tensor};
             });
}

MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& options) {
  // A barrier is the meeting alone.
  return run("barrier", OpType::BARRIER, limit_of(options), Kind::collective, {}, [](MpiCall&) {});
}

MpiBackend::WorkPtr MpiBackend::exchange(const std::vector<Message>& messages, CallLimit limit) {
  for (const auto& message : messages) {
    require_cpu("exchange", message.tensor);
    require_rank(message.peer, "a peer of exchange");
  }
  return run("exchange", OpType::COALESCED, limit, Kind::messages, {}, [&](MpiCall& call) {
    const auto route = [this](const Message& m, std::vector<std::uint64_t>& counts) {
      const auto number = counts[static_cast<std::size_t>(m.peer)]++;
      return Route{comm_->gate(),
                   comm_->tags().numbered(false, number, m.tensor.scalar_type(), m.tensor.numel())};
    };
    for (const auto& message : messages) {
      call.peers.push_back(comm_->ranks()[static_cast<std::size_t>(message.peer)]);
      if (message.kind == Message::Kind::receive)
        add_receive(call, message.tensor, message.peer, route(message, received_));
    }
    for (const auto& message : messages)
      if (message.kind == Message::Kind::send)
        add_send(call, message.tensor, message.peer, route(message, sent_));
    std::sort(call.peers.begin(), call.peers.end());
    call.peers.erase(std::unique(call.peers.begin(), call.peers.end()), call.peers.end());
  });
}

c10::intrusive_ptr<c10d::Backend> make_mpi_backend(const MpiWorld& world,
                                                   const std::vector<int>& ranks,
                                                   const MpiBackendOptions& options,
                                                   const MpiAttempt& attempt) {
  auto comm = make_mpi_comm(world.context(), ranks, options, attempt);
  return c10::make_intrusive<MpiBackend>(std::move(comm), options);
}

}  // namespace tessera::detail

namespace tessera {

c10::intrusive_ptr<c10d::Backend> make_mpi_backend(const MpiWorld& world,
                                                   const std::vector<int>& ranks,
                                                   const MpiBackendOptions& options) {
  return detail::make_mpi_backend(world, ranks, options, {});
}

}  // namespace tessera
