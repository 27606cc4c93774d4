// Ghosts of arrays that are divided by a table of owners.

#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <optional>
#include <span>
#include <tuple>

#include "handles.h"
#include "library.h"
#include "mesh.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/ops/ghosts/ghost_plan.h"

namespace tessera::python {

namespace {

using Numbers = std::vector<std::int64_t>;

/// Whole numbers on the host, of any dtype and strides, as ids.
class GivenIds {
 public:
  GivenIds(const at::Tensor& ids, const char* what) {
    if (ids.dim() != 1 || !at::isIntegralType(ids.scalar_type(), false))
      throw InvalidArgument(concat(what, " of dtype ", ids.scalar_type(), " and shape ",
                                   ids.sizes(), "; give a list of whole numbers"));
    ids_ = ids.to(at::kCPU, at::kLong).contiguous();
  }
  operator std::span<const std::int64_t>() const {
    return {ids_.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(ids_.numel())};
  }

 private:
  at::Tensor ids_;
};

at::Tensor as_tensor(const Numbers& numbers) { return at::tensor(numbers, at::kLong); }

struct PyGhostPlan : torch::CustomClassHolder {
  PyGhostPlan(const c10::intrusive_ptr<PyMesh>& over, const std::vector<std::string>& axes,
              const at::Tensor& owned, const at::Tensor& needed) {
    const DeviceMesh& mesh = over->mesh;
    const std::vector<int> indices = mesh.mesh().indices(axes);
    std::optional<GivenIds> own, ghosts;
    agree::all(mesh.group(indices), "GhostPlan", [&] {
      own.emplace(owned, "owned_ids");
      ghosts.emplace(needed, "needed_ids");
    });
    plan = GhostPlan(mesh, indices, *own, *ghosts);
  }
  GhostPlan plan;
};
using GhostPlanPtr = c10::intrusive_ptr<PyGhostPlan>;

std::vector<std::tuple<std::int64_t, std::int64_t>> peers_of(
    const std::vector<GhostRows::Peer>& peers) {
  std::vector<std::tuple<std::int64_t, std::int64_t>> all;
  for (const GhostRows::Peer& peer : peers) all.emplace_back(peer.rank, peer.rows);
  return all;
}

}  // namespace

void register_ghosts(Library& library) {
  library.class_<PyGhostPlan>("GhostPlan")
      .def(torch::init<const c10::intrusive_ptr<PyMesh>&, const std::vector<std::string>&,
                       const at::Tensor&, const at::Tensor&>())
      .def("owned", [](const GhostPlanPtr& self) { return self->plan.rows().owned; })
      .def("ghosts", [](const GhostPlanPtr& self) { return self->plan.rows().ghosts; })
      .def("sends", [](const GhostPlanPtr& self) { return peers_of(self->plan.rows().sends); })
      .def("receives",
           [](const GhostPlanPtr& self) { return peers_of(self->plan.rows().receives); })
      .def(
          "group",
          [](const GhostPlanPtr& self) { return c10::make_intrusive<PyGroup>(self->plan.group()); })
      .def("summary", [](const GhostPlanPtr& self) { return self->plan.summary(); });
  library.def("ghost_exchange", [](const GhostPlanPtr& plan, const at::Tensor& owned) {
    return ghost_exchange(plan->plan, owned);
  });
  library.def("start_ghost_exchange", [](const GhostPlanPtr& plan, const at::Tensor& owned) {
    return c10::make_intrusive<PyRequest>(start_ghost_exchange(plan->plan, owned));
  });
  library.def("ghost_reduce",
              [](const GhostPlanPtr& plan, const at::Tensor& rows, const std::string& op) {
                return ghost_reduce(plan->plan, rows, reduce_op(op));
              });
  library.def("start_ghost_reduce", [](const GhostPlanPtr& plan, const at::Tensor& rows,
                                       const std::string& op) {
    return c10::make_intrusive<PyRequest>(start_ghost_reduce(plan->plan, rows, reduce_op(op)));
  });
  library.def("ghosts_of", [](const at::Tensor& owned, const at::Tensor& ids) {
    return as_tensor(ghosts_of(GivenIds(owned, "owned_ids"), GivenIds(ids, "ids")));
  });
  library.def("local_rows",
              [](const at::Tensor& owned, const at::Tensor& ghosts, const at::Tensor& ids) {
                return as_tensor(local_rows(GivenIds(owned, "owned_ids"),
                                            GivenIds(ghosts, "needed_ids"), GivenIds(ids, "ids")));
              });
}

}  // namespace tessera::python
