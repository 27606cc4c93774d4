"""A model says which process groups it needs, and the run how large they are; the loop knows neither. Beside one process.

    tessera run -n 4 -- python examples/python/13_model_groups.py         # any number of ranks

Half of the ranks shard a field's rows, and the two halves are replicas of the model.
"""

import torch
from torch import nn

import tessera as ts


class Smooth(nn.Module):
    @staticmethod
    def process_groups() -> ts.ProcessGroupConfig:
        """The root is the model itself: outside it are its replicas, as many as the world has room for."""
        tree = ts.ProcessGroupConfig("smooth", orthogonal_group="replicas")
        return tree.add_node("domain", "smooth")

    def __init__(self, mesh: ts.Mesh | None) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.mesh = mesh
        if mesh:
            ts.distribute_module(self.double(), mesh)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        """`sample`: the complete field, of which each rank keeps its rows."""
        x = ts.distribute_tensor(sample, self.mesh, [ts.Shard(2)]) if self.mesh else sample
        y: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return y


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    domain = ts.world_size() // 2 if ts.world_size() % 2 == 0 else 1
    ts.create_process_groups(Smooth, sizes={"domain": domain})
    replicas = ts.group("replicas")

    torch.manual_seed(0)
    net = Smooth(ts.Mesh.of("domain"))
    alone = Smooth(None).double()
    alone.load_state_dict({name: ts.full_tensor(t) for name, t in net.state_dict().items()})
    ddp = ts.DistributedDataParallel(net, replicas)
    optimizer, beside = torch.optim.SGD(net.parameters(), 0.2), torch.optim.SGD(alone.parameters(), 0.2)
    samples = torch.arange(60 * replicas.size, dtype=torch.float64).sin().view(-1, 1, 10, 6)

    losses = []
    for _ in range(20):
        for model, x, its in ((ddp, samples[replicas.rank :][:1], optimizer), (alone, samples, beside)):
            its.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            its.step()
            losses.append(replicas.all_reduce(torch.tensor([loss.item()], dtype=torch.float64), "avg").item())
        assert abs(losses[-2] - losses[-1]) < 1e-12
    assert losses[-1] < losses[0]
    if ts.rank() == 0:
        print(f"model_groups: domain {domain} x replicas {replicas.size}, loss {losses[0]:.4f} to {losses[-1]:.4f}, as on one process", flush=True)


main()
