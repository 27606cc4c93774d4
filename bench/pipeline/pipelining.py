# pipelining.py FILE: seconds of a step of torch.distributed.pipelining on two ranks, appended to FILE as "schedule seconds"; the network and sizes of
# pipeline.cpp.
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

LAYERS, WIDTH, ROWS, MICRO_BATCHES, STEPS = 8, 512, 64, 8, 21


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(LAYERS)]
    x = torch.randn(ROWS * MICRO_BATCHES, WIDTH)
    y = torch.randn(ROWS * MICRO_BATCHES, WIDTH)

    def stages(chunks):
        count = ranks * chunks
        size = LAYERS // count
        return [
            PipelineStage(torch.nn.Sequential(*layers[s * size : (s + 1) * size]), s, count, torch.device("cpu"))
            for s in range(rank, count, ranks)
        ]

    cases = {
        "GPipe": lambda: ScheduleGPipe(stages(1)[0], MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss),
        "1F1B": lambda: Schedule1F1B(stages(1)[0], MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss),
        "interleaved zero bubble": lambda: ScheduleInterleavedZeroBubble(
            stages(2), MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss
        ),
    }
    for name, make in cases.items():
        schedule = make()
        last = rank == ranks - 1
        times = []
        for step in range(STEPS + 3):
            dist.barrier()
            begin = time.perf_counter()
            arguments = (x,) if rank == 0 else ()
            schedule.step(*arguments, **({"target": y} if last else {}))
            dist.barrier()
            if step >= 3:
                times.append(time.perf_counter() - begin)
        if rank == 0:
            with open(sys.argv[1], "a") as out:
                for t in times:
                    out.write(f"{name}\t{t}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
