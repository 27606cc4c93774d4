"""The machines of a job, what its step moves, and what another mapping of its ranks would gain."""

import math
import pathlib
import subprocess
import sys

import pytest
import torch

import tessera as ts
from support import on_ranks

STEP = ts.MeshTraffic({"data": 2, "model": 2}, (ts.Traffic("data", "all_reduce", 64e6, 2.0), ts.Traffic("data-model", "broadcast", 8.0, 1.0)))


def test_ranks_find_their_machines():
    def body(rank):
        found = ts.find_topology()
        assert found.slot_of == (0, 1, 2) and found.topology.slots == 3 and len(found.topology.hosts) == 1
        assert any("defaults" in line for line in found.unknown), found.unknown
        return found.unknown

    said = on_ranks(3, body)
    assert said[0] == said[1] == said[2]


def test_a_file_of_rank_0_counts_and_a_wrong_one_is_told_on_every_rank(tmp_path):
    (tmp_path / "machines.yaml").write_text("hosts: 2x2")
    (tmp_path / "small.yaml").write_text("hosts: 1x2")

    def body(rank):
        found = ts.find_topology(tmp_path / ("machines.yaml" if rank == 0 else "absent.yaml"))
        assert found.topology.hosts == {"host0": 2, "host1": 2} and found.slot_of == (0, 1, 2, 3)
        assert "rank r is taken to run on slot r" in found.unknown[0]
        for name, kind in {"small.yaml": ts.MappingError, "absent.yaml": ts.ConfigurationError, "machines.txt": ts.ConfigurationError}.items():
            with pytest.raises(kind, match=name):
                ts.find_topology(tmp_path / name)
        return True

    assert all(on_ranks(4, body))


def test_groups_on_machines_whose_ranks_are_dealt_in_turn():
    machines = ts.FoundTopology(ts.parse_hosts("2x2"), (0, 2, 1, 3), ())
    traffic = [ts.Traffic("model", bytes=64e6)]

    def body(rank):
        tree = ts.ProcessGroupConfig().add_node("model", "world", 2).add_node("data", "world", 2)
        mapping = ts.create_process_groups(tree, topology=machines, traffic=traffic)
        assert mapping.seconds <= mapping.naive_seconds
        group = ts.group("model")
        assert sorted(group.ranks) == [rank % 2, rank % 2 + 2], group.ranks  # one host has 0 and 2
        return group.all_reduce(torch.tensor([2.0**rank])).item()

    assert on_ranks(4, body) == [5.0, 10.0, 5.0, 10.0]


def test_the_gain_of_a_traced_step(tmp_path):
    machines = ts.FoundTopology(ts.parse_hosts("2x2"), (0, 2, 1, 3), ())

    def body(rank):
        mesh = ts.Mesh({"data": 2, "model": 2})
        with ts.CommTrace() as trace:
            for _ in range(2):
                mesh.group("model").all_reduce(torch.ones(1000 + rank // 2))  # uneven: 4000 bytes of ranks 0 and 1, 4004 of the others
        moved = ts.mean_traffic(trace, mesh, steps=2)
        assert moved == ts.MeshTraffic({"data": 2, "model": 2}, (ts.Traffic("model", "all_reduce", 4002.0, 1.0),))
        gain = ts.mapping_gain(mesh, machines, moved)
        assert gain.ranks == (0, 2, 1, 3) and gain.mapped_seconds < gain.seconds and gain.bytes > gain.mapped_bytes == 0
        mapped = ts.Mesh({"data": 2, "model": 2}, ranks=gain.ranks)
        assert ts.mapping_gain(mapped, machines, moved.traffic).mapping.method == "as it is"
        for steps in (0, -1, math.nan, math.inf):
            with pytest.raises(ts.InvalidArgument, match="steps"):
                ts.mean_traffic(trace, mesh, steps if rank == 2 else 1)
        return str(gain)

    said = on_ranks(4, body)
    assert len(set(said)) == 1 and said[0].startswith("now: ") and "ranks:  [0, 2, 1, 3]" in said[0]


@pytest.mark.parametrize("name", ["step.json", "step.yaml"])
def test_traffic_in_a_file(tmp_path, name):
    ts.write_traffic(STEP, tmp_path / name)
    assert ts.read_traffic(tmp_path / name) == STEP
    best = ts.optimise_mapping(STEP.mesh, ts.parse_hosts("2x2"), ts.read_traffic(tmp_path / name))
    assert best.slot_of == (0, 2, 1, 3)


@pytest.mark.parametrize("number", [-1.0, math.nan, math.inf])
def test_numbers_that_are_none_are_refused(tmp_path, number):
    for wrong in (ts.Traffic("data", bytes=number), ts.Traffic("data", bytes=1.0, calls=number)):
        with pytest.raises(ts.GroupConfigError):
            ts.write_traffic(ts.MeshTraffic({"data": 2}, (wrong,)), tmp_path / "step.json")
        with pytest.raises(ts.GroupConfigError):
            ts.optimise_mapping({"data": 2}, ts.parse_hosts("2"), [wrong])
    assert not (tmp_path / "step.json").exists()
    (tmp_path / "step.json").write_text('{"mesh": {"data": 2}, "traffic": [{"axes": ["data"], "collective": "send", "bytes": 1e200, "calls": 1e200}]}')
    with pytest.raises(ts.ConfigFileError, match="finite"):
        ts.read_traffic(tmp_path / "step.json")


def test_the_launcher_maps_ranks_for_the_file(request, tmp_path):
    """Processes: the traced step of one job is the mapping of the next."""
    ts.write_traffic(STEP, tmp_path / "step.yaml")
    links = "links: [{between: [0, 1], class: near}, {between: [2, 3], class: near}]"
    classes = "[{name: far, latency: 1us, bandwidth: 1GB/s}, {name: near, latency: 1us, bandwidth: 100GB/s}]"
    (tmp_path / "host.yaml").write_text(f"hosts: [{{name: h, devices: 4, link: far, {links}}}]\ndevice_links: {classes}\n")
    (tmp_path / "ranks.py").write_text("import tessera as ts\nts.init()\nprint('local', ts.local_rank(), ts.find_topology().slot_of)\n")
    launcher = pathlib.Path(request.config.getoption("--launcher"))
    assert launcher.exists(), f"{launcher} is missing: build the target tessera_cli"
    program = [str(launcher), "run", "-n", "4", "--timeout", "100", "--output", "by-rank", "--bind", "none", "--map", str(tmp_path / "step.yaml")]
    run = subprocess.run([*program, "--topology", str(tmp_path / "host.yaml"), "--", sys.executable, str(tmp_path / "ranks.py")], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "ranks on slots [0, 2, 1, 3]" in run.stderr
    lines = [line for line in run.stdout.splitlines() if "local" in line]
    assert lines == [f"[{rank}] local {slot} (0, 2, 1, 3)" for rank, slot in enumerate((0, 2, 1, 3))]
