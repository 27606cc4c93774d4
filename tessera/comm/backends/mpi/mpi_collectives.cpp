// How each collective becomes MPI calls. Counts are elements; what exceeds the count of one MPI
// message is sent in several.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "tessera/base/text.h"
#include "tessera/comm/backends/mpi/mpi_backend.h"

namespace tessera::detail {

namespace {

// On one host, a reduction of 4 MiB and more runs up to twice as fast in pieces that stay in the
// cache (Open MPI 4.1, 2 ranks, 32 MiB: 9 ms against 19 ms).
constexpr std::int64_t kPieceBytes = 1 << 20;
constexpr std::int64_t kMaxPieces = 64;

// MPI wants an address that is neither null nor MPI_IN_PLACE, also if there is nothing to move.
char nothing[16];

void* address(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? tensor.data_ptr() : nothing;
}

bool shares_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() > 0 && b.numel() > 0 &&
         a.storage().data_ptr().get() == b.storage().data_ptr().get();
}

std::vector<int> narrow(const std::vector<std::int64_t>& counts) {
  return {counts.begin(), counts.end()};
}

std::vector<std::int64_t> offsets(const std::vector<std::int64_t>& counts) {
  std::vector<std::int64_t> result(counts.size(), 0);
  std::exclusive_scan(counts.begin(), counts.end(), result.begin(), std::int64_t{0});
  return result;
}

std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

bool all_equal(const std::vector<std::int64_t>& counts) {
  return std::all_of(counts.begin(), counts.end(),
                     [&](std::int64_t n) { return n == counts.front(); });
}

char* at_element(const at::Tensor& t, std::int64_t element) {
  return static_cast<char*>(address(t)) + element * static_cast<std::int64_t>(t.element_size());
}

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

void copy_bytes(const void* from, void* to, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void check(int code, const MpiCall& call) { check_mpi(code, call.name); }

/// The values of `tensor` as the reduction needs them: scaled, in its wire type. The tensor itself
/// if nothing has to change.
at::Tensor staged(const at::Tensor& tensor, const MpiReduction& plan) {
  at::Tensor t = tensor;
  if (plan.recipe.wide != t.scalar_type()) t = t.to(plan.recipe.wide);
  if (plan.recipe.scale) t = t.mul(plan.factor);
  return in_order(t) ? t : t.contiguous().resolve_conj().resolve_neg();
}

struct Blocks {
  int* counts;
  int* starts;
};

/// Counts and displacements as MPI reads them until the call ends.
Blocks blocks(MpiCall& call, const std::vector<std::int64_t>& counts,
              const std::vector<std::int64_t>& starts) {
  int* n = call.keep(narrow(counts));
  return {n, call.keep(narrow(starts))};
}

}  // namespace

at::Tensor MpiBackend::readable(MpiCall& call, const at::Tensor& tensor) const {
  const at::Tensor t = in_order(tensor) ? tensor : tensor.contiguous().resolve_conj().resolve_neg();
  call.tensors.push_back(t);
  call.bytes += static_cast<std::int64_t>(t.nbytes());
  return t;
}

at::Tensor MpiBackend::writable(MpiCall& call, const at::Tensor& tensor) const {
  if (in_order(tensor)) {
    call.tensors.push_back(tensor);
    return tensor;
  }
  const at::Tensor t =
      at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  call.tensors.push_back(t);
  call.finish.emplace_back([tensor, t] { tensor.copy_(t); });
  return t;
}

void MpiBackend::add_all_reduce(MpiCall& call, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const MpiReduction plan = reductions_.plan(tensor.scalar_type(), op);
  const at::Tensor t = staged(tensor, plan);
  call.tensors.push_back(t);
  call.bytes += static_cast<std::int64_t>(t.nbytes());
  const std::int64_t count = t.numel() * plan.recipe.width();
  std::int64_t piece = max_count_;
  if (comm_->one_host() && ranks() > 1 && static_cast<std::int64_t>(t.nbytes()) > 4 * kPieceBytes) {
    const std::int64_t wanted =
        kPieceBytes * plan.recipe.width() / static_cast<std::int64_t>(t.element_size());
    piece = std::min(piece, std::max(wanted, (count + kMaxPieces - 1) / kMaxPieces));
  }
  const std::int64_t item = static_cast<std::int64_t>(t.element_size()) / plan.recipe.width();
  const bool same = t.is_same(tensor);
  if (!same || plan.recipe.divide)
    call.finish.emplace_back([tensor, t, same, average = plan.recipe.divide, n = ranks()] {
      if (average) t.div_(n);
      if (!same) tensor.copy_(t);
    });
  after_meeting(call, [this, &call, begin = static_cast<char*>(address(t)), count, piece, item,
                       type = plan.type, op = plan.op] {
    std::int64_t done = 0;
    do {
      const int n = static_cast<int>(std::min(piece, count - done));
      char* data = begin + done * item;
      check(call.blocking
                ? MPI_Allreduce(MPI_IN_PLACE, data, n, type, op, comm_->handle())
                : MPI_Iallreduce(MPI_IN_PLACE, data, n, type, op, comm_->handle(), call.request()),
            call);
      done += n;
    } while (done < count);
  });
}

void MpiBackend::add_broadcast(MpiCall& call, const at::Tensor& tensor, int root) {
  const at::Tensor t = rank() == root ? readable(call, tensor) : writable(call, tensor);
  call.bytes = static_cast<std::int64_t>(t.nbytes());
  after_meeting(call, [this, &call, begin = static_cast<char*>(address(t)), count = t.numel(),
                       item = static_cast<std::int64_t>(t.element_size()), root] {
    const MPI_Datatype type = mpi_bytes_type(static_cast<std::size_t>(item));
    std::int64_t done = 0;
    do {
      const int n = static_cast<int>(std::min(max_count_, count - done));
      char* data = begin + done * item;
      check(call.blocking ? MPI_Bcast(data, n, type, root, comm_->handle())
                          : MPI_Ibcast(data, n, type, root, comm_->handle(), call.request()),
            call);
      done += n;
    } while (done < count);
  });
}

void MpiBackend::add_reduce(MpiCall& call, const at::Tensor& tensor, int root,
                            const c10d::ReduceOp& op) {
  const MpiReduction plan = reductions_.plan(tensor.scalar_type(), op);
  const bool is_root = rank() == root;
  const at::Tensor t = staged(tensor, plan);
  call.tensors.push_back(t);
  call.bytes += static_cast<std::int64_t>(t.nbytes());
  const std::int64_t count = t.numel() * plan.recipe.width();
  const std::int64_t item = static_cast<std::int64_t>(t.element_size()) / plan.recipe.width();
  const bool same = t.is_same(tensor);
  if (is_root && (!same || plan.recipe.divide))
    call.finish.emplace_back([tensor, t, same, average = plan.recipe.divide, n = ranks()] {
      if (average) t.div_(n);
      if (!same) tensor.copy_(t);
    });
  after_meeting(call, [this, &call, begin = static_cast<char*>(address(t)), count, item, is_root,
                       root, type = plan.type, op = plan.op] {
    std::int64_t done = 0;
    do {
      const int n = static_cast<int>(std::min(max_count_, count - done));
      char* data = begin + done * item;
      const void* from = is_root ? MPI_IN_PLACE : data;
      void* to = is_root ? data : nullptr;
      check(call.blocking
                ? MPI_Reduce(from, to, n, type, op, root, comm_->handle())
                : MPI_Ireduce(from, to, n, type, op, root, comm_->handle(), call.request()),
            call);
      done += n;
    } while (done < count);
  });
}

void MpiBackend::add_all_gather(MpiCall& call, const at::Tensor& output, const at::Tensor& input,
                                const Counts& counts) {
  const Counts starts = offsets(counts);
  const at::Tensor out = writable(call, output);
  const bool in_place = in_order(input) && shares_storage(out, input) &&
                        address(input) == at_element(out, starts[index(rank())]);
  const at::Tensor in = in_place || !shares_storage(out, input) ? readable(call, input)
                                                                : readable(call, input.clone());
  call.bytes = static_cast<std::int64_t>(out.nbytes());
  const MPI_Datatype type = mpi_bytes_type(out.element_size());
  const auto dtype = out.scalar_type();
  const auto item = static_cast<std::int64_t>(out.element_size());
  char *to = static_cast<char*>(address(out)), *mine = static_cast<char*>(address(in));
  if (!fits(sum_of(counts))) {
    after_meeting(call, [this, &call, counts, starts, to, mine, item, dtype, in_place] {
      for (int r = 0; r < ranks(); ++r) {
        char* const place = to + starts[index(r)] * item;
        if (r == rank()) {
          if (!in_place) copy_bytes(mine, place, counts[index(r)] * item);
          continue;
        }
        post_receive(call, place, counts[index(r)], dtype, r);
        post_send(call, mine, counts[index(rank())], dtype, r);
      }
    });
    return;
  }
  // Not copied to the output and sent from there: the peers would read memory that this core has
  // just written, at half the speed.
  const void* from = in_place ? MPI_IN_PLACE : mine;
  const int n = static_cast<int>(counts[index(rank())]);
  if (all_equal(counts)) {
    after_meeting(call, [this, &call, from, to, n, type] {
      check(call.blocking
                ? MPI_Allgather(from, n, type, to, n, type, comm_->handle())
                : MPI_Iallgather(from, n, type, to, n, type, comm_->handle(), call.request()),
            call);
    });
    return;
  }
  after_meeting(call, [this, &call, v = blocks(call, counts, starts), from, to, n, type] {
    check(call.blocking
              ? MPI_Allgatherv(from, n, type, to, v.counts, v.starts, type, comm_->handle())
              : MPI_Iallgatherv(from, n, type, to, v.counts, v.starts, type, comm_->handle(),
                                call.request()),
          call);
  });
}

void MpiBackend::add_reduce_scatter(MpiCall& call, const at::Tensor& output,
                                    const at::Tensor& input, const Counts& counts,
                                    const c10d::ReduceOp& op) {
  const MpiReduction plan = reductions_.plan(input.scalar_type(), op);
  const at::Tensor in = staged(input, plan);
  const bool direct =
      in_order(output) && plan.recipe.wide == output.scalar_type() && !shares_storage(output, in);
  const at::Tensor out =
      direct ? output
             : at::empty(output.sizes(), output.options()
                                             .dtype(plan.recipe.wide)
                                             .memory_format(at::MemoryFormat::Contiguous));
  call.tensors.insert(call.tensors.end(), {in, out});
  call.bytes += static_cast<std::int64_t>(in.nbytes());
  const std::int64_t item = static_cast<std::int64_t>(in.element_size()) / plan.recipe.width();
  Counts items = counts;
  for (auto& n : items) n *= plan.recipe.width();
  if (!direct || plan.recipe.divide)
    call.finish.emplace_back([output, out, direct, average = plan.recipe.divide, n = ranks()] {
      if (average) out.div_(n);
      if (!direct) output.copy_(out);
    });
  const MPI_Datatype type = plan.type;
  const MPI_Op reduce = plan.op;
  char *given = static_cast<char*>(address(in)), *result = static_cast<char*>(address(out));
  if (!fits(sum_of(items))) {
    after_meeting(call, [this, &call, items, starts = offsets(items), given, result, item, type,
                         reduce] {
      for (int r = 0; r < ranks(); ++r) {
        for (std::int64_t done = 0; done < items[index(r)]; done += max_count_) {
          const int n = static_cast<int>(std::min(max_count_, items[index(r)] - done));
          const char* from = given + (starts[index(r)] + done) * item;
          char* to = r == rank() ? result + done * item : nullptr;
          check(call.blocking
                    ? MPI_Reduce(from, to, n, type, reduce, r, comm_->handle())
                    : MPI_Ireduce(from, to, n, type, reduce, r, comm_->handle(), call.request()),
                call);
        }
      }
    });
  } else if (all_equal(items)) {
    after_meeting(
        call, [this, &call, n = static_cast<int>(items.front()), given, result, type, reduce] {
          check(call.blocking
                    ? MPI_Reduce_scatter_block(given, result, n, type, reduce, comm_->handle())
                    : MPI_Ireduce_scatter_block(given, result, n, type, reduce, comm_->handle(),
                                                call.request()),
                call);
        });
  } else {
    after_meeting(call, [this, &call, n = call.keep(narrow(items)), given, result, type, reduce] {
      check(call.blocking ? MPI_Reduce_scatter(given, result, n, type, reduce, comm_->handle())
                          : MPI_Ireduce_scatter(given, result, n, type, reduce, comm_->handle(),
                                                call.request()),
            call);
    });
  }
}

void MpiBackend::add_gather(MpiCall& call, const at::Tensor& output, const at::Tensor& input,
                            const Counts& counts, int root) {
  const bool is_root = rank() == root;
  const Counts starts = offsets(counts);
  const at::Tensor out = is_root ? writable(call, output) : at::Tensor();
  const at::Tensor in =
      is_root && shares_storage(out, input) ? readable(call, input.clone()) : readable(call, input);
  call.bytes = sum_of(counts) * static_cast<std::int64_t>(in.element_size());
  const MPI_Datatype type = mpi_bytes_type(in.element_size());
  const std::int64_t mine = counts[index(rank())];
  const auto dtype = in.scalar_type();
  const auto item = static_cast<std::int64_t>(in.element_size());
  char *from = static_cast<char*>(address(in)), *to = static_cast<char*>(address(out));
  if (!fits(sum_of(counts))) {
    after_meeting(call, [this, &call, counts, starts, from, to, mine, item, dtype, is_root, root] {
      if (!is_root) return post_send(call, from, mine, dtype, root);
      for (int r = 0; r < ranks(); ++r) {
        char* const place = to + starts[index(r)] * item;
        if (r == root)
          copy_bytes(from, place, mine * item);
        else
          post_receive(call, place, counts[index(r)], dtype, r);
      }
    });
    return;
  }
  const int n = static_cast<int>(mine);
  if (all_equal(counts)) {
    after_meeting(call, [this, &call, from, to, n, type, root] {
      check(call.blocking
                ? MPI_Gather(from, n, type, to, n, type, root, comm_->handle())
                : MPI_Igather(from, n, type, to, n, type, root, comm_->handle(), call.request()),
            call);
    });
    return;
  }
  after_meeting(call, [this, &call, v = blocks(call, counts, starts), from, to, n, type, root] {
    check(call.blocking
              ? MPI_Gatherv(from, n, type, to, v.counts, v.starts, type, root, comm_->handle())
              : MPI_Igatherv(from, n, type, to, v.counts, v.starts, type, root, comm_->handle(),
                             call.request()),
          call);
  });
}

void MpiBackend::add_scatter(MpiCall& call, const at::Tensor& output, const at::Tensor& input,
                             const Counts& counts, int root) {
  const bool is_root = rank() == root;
  const Counts starts = offsets(counts);
  const at::Tensor in = is_root ? readable(call, input) : at::Tensor();
  at::Tensor out;
  if (is_root && shares_storage(output, in)) {
    out = at::empty(output.sizes(), output.options().memory_format(at::MemoryFormat::Contiguous));
    call.tensors.push_back(out);
    call.finish.emplace_back([output, out] { output.copy_(out); });
  } else {
    out = writable(call, output);
  }
  call.bytes = sum_of(counts) * static_cast<std::int64_t>(out.element_size());
  const MPI_Datatype type = mpi_bytes_type(out.element_size());
  const std::int64_t mine = counts[index(rank())];
  const auto dtype = out.scalar_type();
  const auto item = static_cast<std::int64_t>(out.element_size());
  char *from = static_cast<char*>(address(in)), *to = static_cast<char*>(address(out));
  if (!fits(sum_of(counts))) {
    after_meeting(call, [this, &call, counts, starts, from, to, mine, item, dtype, is_root, root] {
      if (!is_root) return post_receive(call, to, mine, dtype, root);
      for (int r = 0; r < ranks(); ++r) {
        const char* place = from + starts[index(r)] * item;
        if (r == root)
          copy_bytes(place, to, mine * item);
        else
          post_send(call, place, counts[index(r)], dtype, r);
      }
    });
    return;
  }
  after_meeting(call, [this, &call, v = blocks(call, counts, starts), from, to,
                       n = static_cast<int>(mine), type, root] {
    check(call.blocking
              ? MPI_Scatterv(from, v.counts, v.starts, type, to, n, type, root, comm_->handle())
              : MPI_Iscatterv(from, v.counts, v.starts, type, to, n, type, root, comm_->handle(),
                              call.request()),
          call);
  });
}

// Made of messages: each rank knows its own counts alone, so no rank can tell whether all counts
// are equal, or fit, as MPI's collectives demand.
void MpiBackend::add_all_to_all(MpiCall& call, const at::Tensor& output, const at::Tensor& input,
                                const Counts& output_counts, const Counts& input_counts) {
  const std::int64_t mine = input_counts[index(rank())];
  if (mine != output_counts[index(rank())])
    throw InvalidArgument(concat(call.name, ": rank ", rank(), " sends ", mine,
                                 " elements to itself and expects ", output_counts[index(rank())]));
  const at::Tensor out = writable(call, output);
  const at::Tensor in =
      shares_storage(out, input) ? readable(call, input.clone()) : readable(call, input);
  const auto dtype = out.scalar_type();
  const auto item = static_cast<std::int64_t>(out.element_size());
  after_meeting(call, [this, &call, output_counts, input_counts, mine, dtype, item,
                       out_starts = offsets(output_counts), in_starts = offsets(input_counts),
                       from = static_cast<char*>(address(in)),
                       to = static_cast<char*>(address(out))] {
    for (int step = 1; step < ranks(); ++step) {
      const int peer = (rank() - step + ranks()) % ranks();
      post_receive(call, to + out_starts[index(peer)] * item, output_counts[index(peer)], dtype,
                   peer);
    }
    for (int step = 1; step < ranks(); ++step) {
      const int peer = (rank() + step) % ranks();
      post_send(call, from + in_starts[index(peer)] * item, input_counts[index(peer)], dtype, peer);
    }
    copy_bytes(from + in_starts[index(rank())] * item, to + out_starts[index(rank())] * item,
               mine * item);
  });
}

void MpiBackend::post_send(MpiCall& call, const void* data, std::int64_t count,
                           c10::ScalarType dtype, int to) {
  post_send(call, data, count, c10::elementSize(dtype), to, numbered(call, dtype, count));
}

void MpiBackend::post_receive(MpiCall& call, void* data, std::int64_t count, c10::ScalarType dtype,
                              int from) {
  post_receive(call, data, count, c10::elementSize(dtype), from, numbered(call, dtype, count));
}

void MpiBackend::post_send(MpiCall& call, const void* data, std::int64_t count,
                           std::size_t element_size, int to, const Route& route) {
  const MPI_Datatype type = mpi_bytes_type(element_size);
  const auto size = static_cast<std::int64_t>(element_size);
  std::int64_t done = 0;
  do {
    const int n = static_cast<int>(std::min(max_count_, count - done));
    check(MPI_Isend(static_cast<const char*>(data) + done * size, n, type, to, route.tag,
                    route.comm, call.request()),
          call);
    call.receives.resize(call.requests.size(), -1);
    done += n;
  } while (done < count);
}

void MpiBackend::post_receive(MpiCall& call, void* data, std::int64_t count,
                              std::size_t element_size, int from, const Route& route) {
  const MPI_Datatype type = mpi_bytes_type(element_size);
  const auto size = static_cast<std::int64_t>(element_size);
  call.expected.push_back({route.comm, from, route.tag, count * size, call.requests.size()});
  std::int64_t done = 0;
  do {
    const int n = static_cast<int>(std::min(max_count_, count - done));
    check(MPI_Irecv(static_cast<char*>(data) + done * size, n, type, from, route.tag, route.comm,
                    call.request()),
          call);
    call.receives.resize(call.requests.size(), -1);
    call.receives.back() = static_cast<std::int64_t>(n) * size;
    done += n;
  } while (done < count);
}

void MpiBackend::add_send(MpiCall& call, const at::Tensor& tensor, int to, const Route& route) {
  const at::Tensor t = readable(call, tensor);
  post_send(call, address(t), t.numel(), t.element_size(), to, route);
}

void MpiBackend::add_receive(MpiCall& call, const at::Tensor& tensor, int from,
                             const Route& route) {
  const at::Tensor t = writable(call, tensor);
  call.bytes += static_cast<std::int64_t>(t.nbytes());
  post_receive(call, address(t), t.numel(), t.element_size(), from, route);
}

}  // namespace tessera::detail
