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

Abilities MpiBackend::abilities() {
  Abilities result = own_abilities([](c10::ScalarType dtype, ReduceOp::Kind op) {
    return MpiReductions::supports(dtype, to_c10d(op));
  });
  result.ends_collectives = result.ends_messages = true;
  result.any_thread = false;
  return result;
}

MpiBackend::WorkPtr MpiBackend::run(const char* name, OpType type, CallLimit limit, Kind kind,
                                    CallCard card, const std::function<void(MpiCall&)>& add) {
  comm_->require_usable(name);
  const at::NoGradGuard no_grad;
  auto call = std::make_unique<MpiCall>();
  call->name = name;
  call->type = type;
  call->timeout = limit_of_call(limit);
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

MpiBackend::WorkPtr MpiBackend::run(const char* name, OwnCall& how, CallCard card,
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

MpiBackend::WorkPtr MpiBackend::broadcast_one(OwnCall how) {
  return run("broadcast", how, mpi_card(how.output, {}, how.root),
             [&](MpiCall& call) { add_broadcast(call, how.output, how.root); });
}

MpiBackend::WorkPtr MpiBackend::all_reduce_one(OwnCall how) {
  return run("all_reduce", how, mpi_card(how.output, how.op),
             [&](MpiCall& call) { add_all_reduce(call, how.output, how.op); });
}

MpiBackend::WorkPtr MpiBackend::all_reduce_each(OwnCall how) {
  return run("all_reduce of several tensors", how, mpi_card(how.results, how.op),
             [&](MpiCall& call) {
               call.at_once = false;
               for (const auto& tensor : how.results) add_all_reduce(call, tensor, how.op);
             });
}

MpiBackend::WorkPtr MpiBackend::reduce_one(OwnCall how) {
  return run("reduce", how, mpi_card(how.output, how.op, {}, how.root),
             [&](MpiCall& call) { add_reduce(call, how.output, how.root, how.op); });
}

MpiBackend::WorkPtr MpiBackend::all_gather_counts(OwnCall how) {
  return run("all_gather", how, mpi_card(how.input, how.counts),
             [&](MpiCall& call) { add_all_gather(call, how.output, how.input, how.counts); });
}

MpiBackend::WorkPtr MpiBackend::all_gather_each(const Tensors& inputs, OwnCall how) {
  return run("all_gather", how, mpi_card(inputs), [&](MpiCall& call) {
    call.at_once = call.at_once && inputs.size() == 1;
    for (std::size_t i = 0; i < inputs.size(); ++i)
      add_all_gather(call, how.results[i], inputs[i], same_for_all(inputs[i].numel()));
  });
}

MpiBackend::WorkPtr MpiBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const at::Tensor input = only("gather", inputs);
  const int root = required_rank(options.rootRank, "the root of gather");
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
  const int root = required_rank(options.rootRank, "the root of scatter");
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

MpiBackend::WorkPtr MpiBackend::reduce_scatter_counts(OwnCall how) {
  return run("reduce_scatter", how, mpi_card(how.input, how.op, how.counts), [&](MpiCall& call) {
    add_reduce_scatter(call, how.output, how.input, how.counts, how.op);
  });
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter_each(const Tensors& inputs, OwnCall how) {
  return run("reduce_scatter", how, mpi_card(how.results, how.op), [&](MpiCall& call) {
    call.at_once = call.at_once && inputs.size() == 1;
    for (std::size_t i = 0; i < inputs.size(); ++i)
      add_reduce_scatter(call, how.results[i], inputs[i], same_for_all(how.results[i].numel()),
                         how.op);
  });
}

MpiBackend::WorkPtr MpiBackend::gather_counts(OwnCall how) {
  return run("gather", how, mpi_card(how.input, how.counts, how.root),
             [&](MpiCall& call) { add_gather(call, how.output, how.input, how.counts, how.root); });
}

MpiBackend::WorkPtr MpiBackend::scatter_counts(OwnCall how) {
  return run("scatter", how, mpi_card(how.output, how.counts, how.root), [&](MpiCall& call) {
    add_scatter(call, how.output, how.input, how.counts, how.root);
  });
}

MpiBackend::WorkPtr MpiBackend::all_to_all_counts(OwnCall how) {
  return run("all_to_all", how, own_card(how.input), [&](MpiCall& call) {
    add_all_to_all(call, how.output, how.input, how.counts, how.input_counts);
  });
}

MpiBackend::WorkPtr MpiBackend::all_to_all_each(const Tensors& inputs, OwnCall how) {
  const auto me = static_cast<std::size_t>(rank());
  const Tensors outputs = how.results;
  return run("all_to_all", how, own_card(inputs[me]), [&](MpiCall& call) {
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
  required_rank(to, "the receiver of send");
  return run("send", OpType::SEND, {}, Kind::messages, {}, [&](MpiCall& call) {
    call.peers = {comm_->ranks()[static_cast<std::size_t>(to)]};
    add_send(call, tensor, to, users(tag, tensor));
  });
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int from, int tag) {
  const at::Tensor tensor = only("receive", tensors);
  required_rank(from, "the sender of receive");
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
    required_rank(message.peer, "a peer of exchange");
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
