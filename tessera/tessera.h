#pragma once
// What users need, in one include.

#include "tessera/base/error.h"
#include "tessera/cluster/launch.h"
#include "tessera/comm/group.h"
#include "tessera/comm/manager.h"
#include "tessera/comm/trace.h"
#include "tessera/comm/types.h"
#include "tessera/gradient/mean_loss.h"
#include "tessera/gradient/reducer.h"
#include "tessera/layout/mesh.h"
#include "tessera/nn/distributed_data_parallel.h"
#include "tessera/tensor/distribute_module.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/version.h"
