// How each collective becomes MPI calls. Counts are elements; what exceeds the count of one MPI
// message is sent in several.

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/comm/backends/flat.h"
#include "tessera/comm/backends/mpi/mpi_transport.h"

namespace tessera::detail {
namespace {

// On one host, a reduction of 4 MiB and more runs up to twice as fast in pieces that stay in the
// cache (Open MPI 4.1, 2 ranks, 32 MiB: 9 ms against 19 ms).
constexpr std::int64_t kPieceBytes = 1 << 20;
constexpr std::int64_t kMaxPieces = 64;

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

std::int64_t item_of(const at::Tensor& t) { return static_cast<std::int64_t>(t.element_size()); }

char* begin_of(const at::Tensor& t) { return static_cast<char*>(mpi_address(t)); }

void check(int code, const MpiCall& call) { check_mpi(code, call.name); }

/// Makes a call of MPI: the one that blocks, or the one that is started.
template <class Blocking, class Started, class... Arguments>
void issue(MpiCall& call, Blocking blocking, Started started, Arguments... arguments) {
  check(call.blocking ? blocking(arguments...) : started(arguments..., call.request()), call);
}

/// What the ranks compare: `like` is a tensor that all ranks have alike, or, with counts, in which
/// they have those elements.
CallCard mpi_card(const at::Tensor& like, const TransportCall& given,
                  const TransportCall::Counts& counts = {}) {
  CallCard card;
  card.dtype = like.scalar_type();
  card.root = given.root;
  card.elements = counts.empty() ? like.numel() : 1;
  card.sizes = counts;
  return card;
}

/// As above, of a reduction.
CallCard mpi_reduce_card(const at::Tensor& like, const TransportCall& given,
                         const TransportCall::Counts& counts = {}) {
  CallCard card = mpi_card(like, given, counts);
  card.op = given.bits == Bits::none ? static_cast<int>(given.op.kind)
                                     : 16 + static_cast<int>(given.bits);
  return card;
}

struct Blocks {
  int* counts;
  int* starts;
};

/// Counts and displacements as MPI reads them until the call ends.
Blocks blocks(MpiCall& call, const std::vector<std::int64_t>& counts,
              const std::vector<std::int64_t>& starts) {
  int* n = call.keep({counts.begin(), counts.end()});
  return {n, call.keep({starts.begin(), starts.end()})};
}

}  // namespace

void* mpi_address(const at::Tensor& tensor) {
  static char nothing[16];
  return tensor.defined() && tensor.numel() > 0 ? tensor.data_ptr() : nothing;
}

template <class Move>
void MpiTransport::in_pieces(MpiCall& call, char* begin, std::int64_t count, std::int64_t item,
                             std::int64_t piece, const Move& move) {
  after_meeting(call, [&call, begin, count, item, piece, move] {
    std::int64_t done = 0;
    do {
      const int n = static_cast<int>(std::min(piece, count - done));
      move(begin + done * item, n);
      done += n;
    } while (done < count);
  });
}

void MpiTransport::reduce_to(const char* name, TransportCall& given, int root) {
  const at::Tensor& t = given.output;
  const MpiReduction plan = reductions_.plan(t.scalar_type(), given.op.kind, given.bits);
  run(name, given, mpi_reduce_card(t, given), [&](MpiCall& call) {
    call.bytes = static_cast<std::int64_t>(t.nbytes());
    std::int64_t piece = max_count_;
    if (root < 0 && comm_->one_host() && size_ > 1 && call.bytes > 4 * kPieceBytes)
      piece = std::min(
          piece, std::max(kPieceBytes / item_of(t), (t.numel() + kMaxPieces - 1) / kMaxPieces));
    in_pieces(call, begin_of(t), t.numel(), item_of(t), piece,
              [this, &call, root, type = plan.type, op = plan.op](char* data, int n) {
                const auto comm = comm_->handle();
                const bool in_place = root < 0 || rank_ == root;
                const void* from = in_place ? MPI_IN_PLACE : data;
                void* to = in_place ? data : nullptr;
                if (root < 0)
                  issue(call, MPI_Allreduce, MPI_Iallreduce, from, to, n, type, op, comm);
                else
                  issue(call, MPI_Reduce, MPI_Ireduce, from, to, n, type, op, root, comm);
              });
  });
}

void MpiTransport::all_reduce(TransportCall& given) { reduce_to("all_reduce", given, -1); }

void MpiTransport::reduce(TransportCall& given) { reduce_to("reduce", given, given.root); }

void MpiTransport::broadcast(TransportCall& given) {
  const at::Tensor& t = given.output;
  run("broadcast", given, mpi_card(t, given), [&](MpiCall& call) {
    call.bytes = static_cast<std::int64_t>(t.nbytes());
    in_pieces(call, begin_of(t), t.numel(), item_of(t), max_count_,
              [this, &call, root = given.root, type = mpi_bytes_type(t.element_size())](char* data,
                                                                                        int n) {
                issue(call, MPI_Bcast, MPI_Ibcast, data, n, type, root, comm_->handle());
              });
  });
}

void MpiTransport::all_gather(TransportCall& given) {
  const at::Tensor &out = given.output, &in = given.input;
  const Counts &counts = given.counts, starts = begins_of(counts);
  const auto item = item_of(out);
  char *to = begin_of(out), *mine = begin_of(in);
  const bool in_place = mine == to + starts[me()] * item;
  run("all_gather", given, mpi_card(in, given, counts), [&](MpiCall& call) {
    call.bytes = static_cast<std::int64_t>(out.nbytes());
    const MPI_Datatype type = mpi_bytes_type(out.element_size());
    if (!fits(total_of(counts))) {
      after_meeting(
          call, [this, &call, counts, starts, to, mine, item, in_place, dtype = out.scalar_type()] {
            for (int r = 0; r < size_; ++r) {
              char* const place = to + starts[index(r)] * item;
              if (r == rank_) {
                if (!in_place)
                  std::memcpy(place, mine, static_cast<std::size_t>(counts[index(r)] * item));
                continue;
              }
              post(call, Message::Kind::receive, place, counts[index(r)], dtype, r);
              post(call, Message::Kind::send, mine, counts[me()], dtype, r);
            }
          });
      return;
    }
    // Not copied to the output and sent from there: the peers would read memory that this core has
    // just written, at half the speed.
    const void* from = in_place ? MPI_IN_PLACE : mine;
    const int n = static_cast<int>(counts[me()]);
    if (all_equal(counts)) {
      after_meeting(call, [this, &call, from, to, n, type] {
        issue(call, MPI_Allgather, MPI_Iallgather, from, n, type, to, n, type, comm_->handle());
      });
      return;
    }
    after_meeting(call, [this, &call, v = blocks(call, counts, starts), from, to, n, type] {
      issue(call, MPI_Allgatherv, MPI_Iallgatherv, from, n, type, to, v.counts, v.starts, type,
            comm_->handle());
    });
  });
}

void MpiTransport::reduce_scatter(TransportCall& given) {
  const at::Tensor &out = given.output, &in = given.input;
  const Counts& counts = given.counts;
  const MpiReduction plan = reductions_.plan(in.scalar_type(), given.op.kind, given.bits);
  const MPI_Datatype type = plan.type;
  const MPI_Op op = plan.op;
  char *from = begin_of(in), *to = begin_of(out);
  run("reduce_scatter", given, mpi_reduce_card(in, given, counts), [&](MpiCall& call) {
    call.bytes = static_cast<std::int64_t>(in.nbytes());
    if (!fits(total_of(counts))) {
      after_meeting(call, [this, &call, counts, starts = begins_of(counts), from, to,
                           item = item_of(in), type, op] {
        for (int r = 0; r < size_; ++r) {
          for (std::int64_t done = 0; done < counts[index(r)]; done += max_count_) {
            const int n = static_cast<int>(std::min(max_count_, counts[index(r)] - done));
            const char* data = from + (starts[index(r)] + done) * item;
            char* result = r == rank_ ? to + done * item : nullptr;
            issue(call, MPI_Reduce, MPI_Ireduce, data, result, n, type, op, r, comm_->handle());
          }
        }
      });
    } else if (all_equal(counts)) {
      after_meeting(call, [this, &call, n = static_cast<int>(counts.front()), from, to, type, op] {
        issue(call, MPI_Reduce_scatter_block, MPI_Ireduce_scatter_block, from, to, n, type, op,
              comm_->handle());
      });
    } else {
      after_meeting(
          call, [this, &call, n = call.keep({counts.begin(), counts.end()}), from, to, type, op] {
            issue(call, MPI_Reduce_scatter, MPI_Ireduce_scatter, from, to, n, type, op,
                  comm_->handle());
          });
    }
  });
}

void MpiTransport::gather(TransportCall& given) { rooted(given, true); }

void MpiTransport::scatter(TransportCall& given) { rooted(given, false); }

void MpiTransport::rooted(TransportCall& given, bool gathers) {
  const Counts &counts = given.counts, starts = begins_of(counts);
  const at::Tensor& part = gathers ? given.input : given.output;
  const int root = given.root;
  const auto item = item_of(part);
  char *from = begin_of(given.input), *to = begin_of(given.output);
  run(gathers ? "gather" : "scatter", given, mpi_card(part, given, counts), [&](MpiCall& call) {
    call.bytes = total_of(counts) * item;
    if (!fits(total_of(counts))) {
      after_meeting(call, [this, &call, counts, starts, from, to, item, root, gathers,
                           dtype = part.scalar_type()] {
        const auto of_part = gathers ? Message::Kind::send : Message::Kind::receive,
                   of_whole = gathers ? Message::Kind::receive : Message::Kind::send;
        if (rank_ != root)
          return post(call, of_part, gathers ? from : to, counts[me()], dtype, root);
        for (int r = 0; r < size_; ++r) {
          const auto count = counts[index(r)];
          char* const place = (gathers ? to : from) + starts[index(r)] * item;
          if (r == root)
            std::memcpy(gathers ? place : to, gathers ? from : place,
                        static_cast<std::size_t>(count * item));
          else
            post(call, of_whole, place, count, dtype, r);
        }
      });
      return;
    }
    const MPI_Datatype type = mpi_bytes_type(static_cast<std::size_t>(item));
    const int n = static_cast<int>(counts[me()]);
    if (gathers && all_equal(counts)) {
      after_meeting(call, [this, &call, from, to, n, type, root] {
        issue(call, MPI_Gather, MPI_Igather, from, n, type, to, n, type, root, comm_->handle());
      });
      return;
    }
    after_meeting(
        call, [this, &call, v = blocks(call, counts, starts), from, to, n, type, root, gathers] {
          if (gathers)
            issue(call, MPI_Gatherv, MPI_Igatherv, from, n, type, to, v.counts, v.starts, type,
                  root, comm_->handle());
          else
            issue(call, MPI_Scatterv, MPI_Iscatterv, from, v.counts, v.starts, type, to, n, type,
                  root, comm_->handle());
        });
  });
}

// Made of messages: each rank knows its own counts alone, so no rank can tell whether all counts
// are equal, or fit, as MPI's collectives demand.
void MpiTransport::all_to_all(TransportCall& given) {
  const Counts &out = given.counts, &in = given.input_counts;
  if (in[me()] != out[me()])
    throw InvalidArgument("all_to_all: rank ", rank_, " sends ", in[me()],
                          " elements to itself and expects ", out[me()]);
  // The messages would be taken for those of another call if the ranks did not compare at least
  // this.
  CallCard card = mpi_card(given.input, given);
  card.elements = -1;
  // Lists of any sizes are gathered and scattered as this.
  const char* name = given.type == c10d::OpType::GATHER    ? "gather"
                     : given.type == c10d::OpType::SCATTER ? "scatter"
                                                           : "all_to_all";
  run(name, given, std::move(card), [&](MpiCall& call) {
    call.bytes = static_cast<std::int64_t>(given.input.nbytes());
    after_meeting(call,
                  [this, &call, out, in, out_starts = begins_of(out), in_starts = begins_of(in),
                   item = item_of(given.output), dtype = given.output.scalar_type(),
                   from = begin_of(given.input), to = begin_of(given.output)] {
                    for (int step = 1; step < size_; ++step) {
                      const auto peer = index((rank_ - step + size_) % size_);
                      post(call, Message::Kind::receive, to + out_starts[peer] * item, out[peer],
                           dtype, static_cast<int>(peer));
                    }
                    for (int step = 1; step < size_; ++step) {
                      const auto peer = index((rank_ + step) % size_);
                      post(call, Message::Kind::send, from + in_starts[peer] * item, in[peer],
                           dtype, static_cast<int>(peer));
                    }
                    std::memcpy(to + out_starts[me()] * item, from + in_starts[me()] * item,
                                static_cast<std::size_t>(in[me()] * item));
                  });
  });
}

void MpiTransport::post(MpiCall& call, Message::Kind kind, void* data, std::int64_t count,
                        c10::ScalarType dtype, int peer) {
  post(call, kind, data, count, c10::elementSize(dtype), peer,
       {comm_->gate(), comm_->tags().numbered(true, call.number, dtype, count)});
}

void MpiTransport::post(MpiCall& call, Message::Kind kind, void* data, std::int64_t count,
                        std::size_t element_size, int peer, const Route& route) {
  const bool sends = kind == Message::Kind::send;
  const MPI_Datatype type = mpi_bytes_type(element_size);
  const auto size = static_cast<std::int64_t>(element_size);
  if (!sends)
    call.expected.push_back({route.comm, peer, route.tag, count * size, call.requests.size()});
  std::int64_t done = 0;
  do {
    const int n = static_cast<int>(std::min(max_count_, count - done));
    char* const place = static_cast<char*>(data) + done * size;
    MPI_Request* const request = call.request();
    check(sends ? MPI_Isend(place, n, type, peer, route.tag, route.comm, request)
                : MPI_Irecv(place, n, type, peer, route.tag, route.comm, request),
          call);
    call.receives.resize(call.requests.size(), -1);
    if (!sends) call.receives.back() = static_cast<std::int64_t>(n) * size;
    done += n;
  } while (done < count);
}

}  // namespace tessera::detail
