// One process is a world of one: the calls are those of a real job.
#include <tessera/tessera.h>

#include <ATen/ops/ones.h>

#include <cstdio>

int main() {
  const auto manager = tessera::DistributedManager::initialize();
  const at::Tensor tensor = at::ones({3});
  manager.world().all_reduce(tensor, tessera::ReduceOp::sum);
  std::printf("Tessera %s with libtorch %s: rank %d of %d\n", TESSERA_VERSION,
              TESSERA_TORCH_VERSION, manager.rank(), manager.world_size());
  return tensor.sum().item<float>() == 3.0f ? 0 : 1;
}
