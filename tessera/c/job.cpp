// Jobs, meshes, groups and their collectives.

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <cmath>
#include <iterator>

#include "tessera/base/deadline.h"
#include "tessera/c/detail/arrays.h"
#include "tessera/c/detail/call.h"
#include "tessera/launch/launch.h"

namespace tessera::c {
namespace {

struct GroupObject : Object {
  static constexpr Kind kind = Kind::group;
  // Asked for anew each time: after a failure of one rank the manager has made another.
  GroupObject(JobPtr of, std::vector<int> its) : Object(std::move(of)), ranks(std::move(its)) {}
  Group group() const { return job->manager->group(ranks); }
  std::vector<int> ranks;
};

std::chrono::milliseconds limit_of(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9)
    refuse("timeout is ", seconds, ": give seconds, or 0 for five minutes");
  if (seconds == 0) return kDefaultLimit;
  return std::chrono::milliseconds(std::max<std::int64_t>(1, std::llround(seconds * 1e3)));
}

std::shared_ptr<JobObject> begin(Call& call, const ManagerOptions& options) {
  auto job = std::make_shared<Job>();
  job->manager = DistributedManager::initialize(options);
  job->rank = job->manager->rank();
  job->size = job->manager->world_size();
  call.enter(job);
  return std::make_shared<JobObject>(job);
}

ManagerOptions options_of(const char* backend, double timeout) {
  ManagerOptions options;
  options.backend = backend ? backend : "";
  options.timeout = options.rendezvous_timeout = limit_of(timeout);
  options.device = c10::Device(c10::kCPU);
  return options;
}

ReduceOp op_of(tessera_op op) {
  using Reduce = ReduceOp::Kind;
  // In the order of tessera_op.
  static constexpr Reduce kOps[] = {Reduce::sum, Reduce::min, Reduce::max, Reduce::avg};
  const auto number = static_cast<std::size_t>(op);
  if (number >= std::size(kOps)) refuse("op is ", static_cast<int>(op), ", which is no tessera_op");
  return {kOps[number]};
}

// A collective on arrays of the caller. What this rank's arguments alone make wrong is a Misuse, so
// that the others are told.
tessera_result on_group(const char* name, tessera_group handle,
                        const std::function<void(const Group&)>& body) {
  return run(name, Reach::all, [&](Call& call) {
    auto& object = call.use<GroupObject>(handle, "group");
    try {
      body(object.group());
    } catch (const InvalidArgument& error) {
      refuse(error.what());
    }
  });
}

}  // namespace

extern "C" {

tessera_result tessera_start(const char* backend, double timeout, tessera_job* job) {
  return make("tessera_start", Reach::own, job, "job",
              [&](Call& call) { return begin(call, options_of(backend, timeout)); });
}

tessera_result tessera_start_fortran(int communicator, const char* backend, double timeout,
                                     tessera_job* job) {
  return make("tessera_start_mpi", Reach::own, job, "job", [&](Call& call) {
    ManagerOptions options = options_of(backend, timeout);
    options.mpi = MpiWorld::of_communicator(communicator, options.timeout);
    if (options.backend.empty()) options.backend = "mpi";
    options.launch = options.mpi->launch_with_store(options.timeout);
    return begin(call, options);
  });
}

tessera_result tessera_end(tessera_job job) {
  return run("tessera_end", Reach::own, [&](Call& call) { release_job(call, job); });
}

tessera_result tessera_rank(tessera_job job, int* rank, int* size) {
  return run("tessera_rank", Reach::own, [&](Call& call) {
    const auto& its = *call.use<JobObject>(job, "job").job;
    if (rank) *rank = its.rank;
    if (size) *size = its.size;
  });
}

tessera_result tessera_set_threads(int threads) {
  return run("tessera_set_threads", Reach::own, [&](Call&) {
    if (threads < 1 || threads > 4096) refuse("threads is ", threads, ": give 1 to 4096");
    at::set_num_threads(threads);
  });
}

tessera_result tessera_seed(uint64_t seed) {
  return run("tessera_seed", Reach::own, [&](Call&) { at::manual_seed(seed); });
}

tessera_result tessera_mesh_create(tessera_job job, int axes, const char* const* names,
                                   const int* sizes, const int* ranks, tessera_mesh* mesh) {
  return make("tessera_mesh_create", Reach::own, mesh, "mesh", [&](Call& call) {
    const auto& its = *call.use<JobObject>(job, "job").job;
    if (axes < 1 || axes > 16) refuse("axes is ", axes, ": a mesh has 1 to 16");
    std::vector<Axis> named;
    for (int a = 0; a < axes; ++a)
      named.push_back({need_text(need(names, "names")[a], "a name"), need(sizes, "sizes")[a]});
    if (!ranks) return std::make_shared<MeshObject>(call.job(), call.manager().mesh(named));
    std::int64_t count = 1;
    for (const auto& axis : named) {
      if (axis.size < 1)
        refuse("axis '", axis.name, "' has size ", axis.size,
               ": with ranks "
               "all sizes are given, and at least 1");
      count *= axis.size;
      if (count > its.size) refuse("the mesh has at least ", count, " ranks, the job ", its.size);
    }
    const Mesh of(named, {ranks, ranks + count});
    return std::make_shared<MeshObject>(call.job(), call.manager().mesh(of));
  });
}

tessera_result tessera_mesh_coordinate(tessera_mesh mesh, int* coordinate) {
  return run("tessera_mesh_coordinate", Reach::own, [&](Call& call) {
    const auto at = call.use<MeshObject>(mesh, "mesh").mesh.coordinate();
    std::ranges::copy(at, need(coordinate, "coordinate"));
  });
}

tessera_result tessera_mesh_group(tessera_mesh mesh, int axis, tessera_group* group) {
  return make("tessera_mesh_group", Reach::own, group, "group", [&](Call& call) {
    const auto& of = call.use<MeshObject>(mesh, "mesh").mesh.mesh();
    if (axis < 0 || axis >= of.dims())
      refuse("axis is ", axis, ", the mesh has ", of.dims(), ": counted from 0");
    const std::vector<int> along{axis};
    return std::make_shared<GroupObject>(call.job(), of.group(along, call.manager().rank()));
  });
}

tessera_result tessera_group_create(tessera_job job, int count, const int* ranks,
                                    tessera_group* group) {
  return make("tessera_group_create", Reach::own, group, "group", [&](Call& call) {
    const int most = call.use<JobObject>(job, "job").job->size;
    // What is wrong is found before memory is read that nobody gave.
    if (count < 1 || count > most)
      refuse("count is ", count, ": a group has 1 to ", most, " ranks, those of the job");
    std::vector<int> all{need(ranks, "ranks"), ranks + count};
    auto object = std::make_shared<GroupObject>(call.job(), std::move(all));
    object->group();  // says now what is wrong with the list
    return object;
  });
}

tessera_result tessera_group_rank(tessera_group group, int* rank, int* size) {
  return run("tessera_group_rank", Reach::own, [&](Call& call) {
    const auto& ranks = call.use<GroupObject>(group, "group").ranks;
    const auto at = std::ranges::find(ranks, call.manager().rank());
    if (rank) *rank = static_cast<int>(at - ranks.begin());
    if (size) *size = static_cast<int>(ranks.size());
  });
}

tessera_result tessera_all_reduce(tessera_group group, const tessera_array* array, tessera_op op) {
  return on_group("tessera_all_reduce", group,
                  [&](const Group& g) { g.all_reduce(tensor_over(array, "array"), op_of(op)); });
}

tessera_result tessera_broadcast(tessera_group group, const tessera_array* array, int root) {
  return on_group("tessera_broadcast", group,
                  [&](const Group& g) { g.broadcast(tensor_over(array, "array"), root); });
}

tessera_result tessera_all_gather(tessera_group group, const tessera_array* mine,
                                  const tessera_array* all) {
  return on_group("tessera_all_gather", group, [&](const Group& g) {
    const at::Tensor in = tensor_over(mine, "mine"), out = tensor_over(all, "all");
    if (in.dim() < 1 || out.dim() != in.dim() || out.scalar_type() != in.scalar_type())
      refuse("mine has ", in.dim(), " dims and all ", out.dim(),
             ": both have the same, at least one, and the same dtype");
    const std::int64_t rows = in.size(0);
    Sizes sizes(static_cast<std::size_t>(g.size()));
    const auto said = g.all_gather_bytes(
        std::string(reinterpret_cast<const char*>(&rows), sizeof rows), {.name = "rows"});
    for (std::size_t r = 0; r < said.size(); ++r)
      std::copy_n(said[r].data(), sizeof rows, reinterpret_cast<char*>(&sizes[r]));
    g.all_gather(out, in, sizes);
  });
}

tessera_result tessera_barrier(tessera_group group) {
  return on_group("tessera_barrier", group, [](const Group& g) { g.barrier(); });
}
}

}  // namespace tessera::c
