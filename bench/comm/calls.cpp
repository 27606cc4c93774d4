#include "calls.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#ifdef TESSERA_BENCH_MPI
#include <mpi.h>
#endif

#include <utility>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::bench {
namespace {

using Tensors = std::vector<at::Tensor>;

class ThroughGroup : public Calls {
 public:
  ThroughGroup(Group group, Buffers b) : Calls(std::move(b)), group_(std::move(group)) {}
  void all_reduce() override { group_.all_reduce(b_.one); }
  void broadcast() override { group_.broadcast(b_.one, 0); }
  void reduce() override { group_.reduce(b_.one, 0); }
  void all_gather() override { group_.all_gather(b_.many, b_.one); }
  void reduce_scatter() override { group_.reduce_scatter(b_.one, b_.many); }
  void all_to_all() override { group_.all_to_all(b_.other, b_.many); }
  void gather() override { group_.gather(b_.many, b_.one, 0); }
  void scatter() override { group_.scatter(b_.one, b_.many, 0); }
  void send(int to) override { group_.send(b_.one, to); }
  void receive(int from) override { group_.receive(b_.one, from); }
  void barrier() override { group_.barrier(); }

 private:
  Group group_;
};

#ifdef TESSERA_BENCH_MPI
class BareMpi : public Calls {
 public:
  BareMpi(int rank, Buffers b)
      : Calls(std::move(b)),
        root_(rank == 0),
        n_(static_cast<int>(b_.one.numel())),
        one_(b_.one.data_ptr<float>()),
        many_(b_.many.data_ptr<float>()),
        other_(b_.other.data_ptr<float>()) {}
  void all_reduce() override { MPI_Allreduce(MPI_IN_PLACE, one_, n_, MPI_FLOAT, MPI_SUM, comm_); }
  void broadcast() override { MPI_Bcast(one_, n_, MPI_FLOAT, 0, comm_); }
  void reduce() override {
    MPI_Reduce(root_ ? MPI_IN_PLACE : one_, root_ ? one_ : nullptr, n_, MPI_FLOAT, MPI_SUM, 0,
               comm_);
  }
  void all_gather() override { MPI_Allgather(one_, n_, MPI_FLOAT, many_, n_, MPI_FLOAT, comm_); }
  void reduce_scatter() override {
    MPI_Reduce_scatter_block(many_, one_, n_, MPI_FLOAT, MPI_SUM, comm_);
  }
  void all_to_all() override { MPI_Alltoall(many_, n_, MPI_FLOAT, other_, n_, MPI_FLOAT, comm_); }
  void gather() override { MPI_Gather(one_, n_, MPI_FLOAT, many_, n_, MPI_FLOAT, 0, comm_); }
  void scatter() override { MPI_Scatter(many_, n_, MPI_FLOAT, one_, n_, MPI_FLOAT, 0, comm_); }
  void send(int to) override { MPI_Send(one_, n_, MPI_FLOAT, to, 0, comm_); }
  void receive(int from) override {
    MPI_Recv(one_, n_, MPI_FLOAT, from, 0, comm_, MPI_STATUS_IGNORE);
  }
  void barrier() override { MPI_Barrier(comm_); }

 private:
  MPI_Comm comm_ = MPI_COMM_WORLD;
  bool root_;
  int n_;
  float *one_, *many_, *other_;
};
#endif

class BareBackend : public Calls {
 public:
  BareBackend(c10::intrusive_ptr<c10d::Backend> backend, Buffers b)
      : Calls(std::move(b)),
        backend_(std::move(backend)),
        root_(backend_->getRank() == 0),
        one_{b_.one},
        parts_(b_.many.split(b_.one.numel())) {}
  void all_reduce() override { backend_->allreduce(one_, c10d::AllreduceOptions())->wait(); }
  void broadcast() override { backend_->broadcast(one_, c10d::BroadcastOptions())->wait(); }
  void reduce() override { backend_->reduce(one_, c10d::ReduceOptions())->wait(); }
  void all_gather() override {
    backend_->_allgather_base(b_.many, b_.one, c10d::AllgatherOptions())->wait();
  }
  void reduce_scatter() override {
    backend_->_reduce_scatter_base(b_.one, b_.many, c10d::ReduceScatterOptions())->wait();
  }
  void all_to_all() override {
    std::vector<std::int64_t> none;
    backend_->alltoall_base(b_.other, b_.many, none, none, c10d::AllToAllOptions())->wait();
  }
  void gather() override {
    std::vector<Tensors> out;
    if (root_) out.push_back(parts_);
    backend_->gather(out, one_, c10d::GatherOptions())->wait();
  }
  void scatter() override {
    std::vector<Tensors> in;
    if (root_) in.push_back(parts_);
    backend_->scatter(one_, in, c10d::ScatterOptions())->wait();
  }
  void send(int to) override { backend_->send(one_, to, 0)->wait(); }
  void receive(int from) override { backend_->recv(one_, from, 0)->wait(); }
  void barrier() override { backend_->barrier(c10d::BarrierOptions())->wait(); }

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
  bool root_;
  Tensors one_, parts_;
};

}  // namespace

Buffers make_buffers(int ranks, std::int64_t floats, c10::Device device) {
  const at::TensorOptions here(device);
  return {at::zeros({floats}, here), at::zeros({floats * ranks}, here),
          at::zeros({floats * ranks}, here)};
}

std::unique_ptr<Calls> group_calls(const Group& group, Buffers buffers) {
  return std::make_unique<ThroughGroup>(group, std::move(buffers));
}

std::unique_ptr<Calls> c10d_calls(const c10::intrusive_ptr<c10d::Backend>& backend,
                                  Buffers buffers) {
  return std::make_unique<BareBackend>(backend, std::move(buffers));
}

#ifdef TESSERA_BENCH_MPI
std::unique_ptr<Calls> mpi_calls(int rank, Buffers buffers) {
  return std::make_unique<BareMpi>(rank, std::move(buffers));
}
#else
std::unique_ptr<Calls> mpi_calls(int, Buffers) {
  throw NotAvailable("this build has no MPI; configure with -DTESSERA_MPI=ON");
}
#endif

}  // namespace tessera::bench
