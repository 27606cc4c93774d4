#pragma once
// Groups on the stand-in device, with the streams of NCCL: a call runs on a stream of its group,
// after what the caller's stream had to do before it; to wait makes the caller's current stream
// wait, not the host; and the call keeps its tensors until then, no longer.

#include "device.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/comm/job/manager.h"

namespace tessera::test::stand_in {

/// Lets all groups that the manager makes from now on serve the device, which becomes its own; but
/// for groups that ask for the backend `without`.
void serve(const DistributedManager& manager, c10::Device on, const std::string& without = "none");
/// run_threads(): rank r computes on device(r), for which its autograd has a thread of its own.
/// Within as_process(): the body on this rank, if there are so many ranks.
void on_devices(int ranks, const std::function<void(DistributedManager&)>& body);
/// Joins the job of a launcher, on its GPU or else on the stand-in device, and returns what `run`
/// does.
int as_process(const std::function<int()>& run);

}  // namespace tessera::test::stand_in
