#include "tessera/mesh/parallelism.h"

#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"

namespace tessera {

Mesh parallel_mesh(int world_size, int model_parallelism, int pipeline_parallelism) {
  if (world_size < 1 || model_parallelism < 1 || pipeline_parallelism < 1)
    throw GroupConfigError(concat("world ", world_size, ", model parallelism ", model_parallelism,
                                  " and pipeline parallelism ", pipeline_parallelism,
                                  " must each be at least 1"));
  const long long product = static_cast<long long>(model_parallelism) * pipeline_parallelism;
  if (world_size % product != 0)
    throw WorldSizeMismatch(
        concat("a world of ", world_size, " ranks does not divide by model parallelism ",
               model_parallelism, " x pipeline parallelism ", pipeline_parallelism, " = ", product,
               "; ", world_size % product, " ranks would be left over"),
        world_size, product);
  return Mesh({{"dp", static_cast<int>(world_size / product)},
               {"pp", pipeline_parallelism},
               {"mp", model_parallelism}});
}

}  // namespace tessera
