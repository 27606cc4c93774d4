"""`torch.distributed.init_process_group("tessera")` on ranks of several hosts: two torchruns."""

import contextlib
import os
import pathlib
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest

import tessera
from test_processes import HERE


def free_port():
    """One that nobody listens on, below those that the system gives to sockets that ask for any: seconds pass until torchrun listens on it."""
    first = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = 10000 + secrets.randbelow(max(first - 10000, 1000))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def torchrun_on_nodes(ranks, address, *arguments, before=([], []), limit=200):
    """A torchrun for each of two nodes, with ranks[node] ranks; `before`: what stands before its command. Returns what both wrote."""
    port, nodes = free_port(), []
    try:
        for node in range(2):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", node, "--nproc-per-node", ranks[node]]
            command = [*before[node], *launcher, "--master-addr", address, "--master-port", port, HERE / "c10d_program.py", *arguments]
            nodes.append(subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        texts = [""] * 2

        def read(node):
            texts[node] = nodes[node].communicate()[0]

        readers = [threading.Thread(target=read, args=[node]) for node in range(2)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(limit)
        return [node.poll() for node in nodes], "".join(texts)
    finally:
        for node in nodes:  # torchrun ends its ranks when it is told to end
            if node.poll() is None:
                node.terminate()
                try:
                    node.wait(10)
                except subprocess.TimeoutExpired:
                    node.kill()


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1)])
def test_ranks_of_two_hosts_train_as_over_gloo(ranks):
    codes, text = torchrun_on_nodes(ranks, "127.0.0.1", "hosts", "as-hosts")
    assert codes == [0, 0], text
    assert len(re.findall(r"rank \d of \d: equal", text)) == sum(ranks)


@pytest.fixture
def two_spaces():
    """Two network namespaces joined by a virtual cable, with an address each."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the program ip (iproute2)")
    names = [f"tesserapy{os.getpid()}{side}" for side in "ab"]

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    try:
        made = all(ip("netns", "add", name) for name in names)
        made = made and ip("link", "add", "tspa", "netns", names[0], "type", "veth", "peer", "name", "tspb", "netns", names[1])
        for name, end, host in zip(names, ("tspa", "tspb"), (1, 2)):
            made = made and ip("-n", name, "link", "set", "lo", "up")
            made = made and ip("-n", name, "addr", "add", f"10.213.78.{host}/24", "dev", end)
            made = made and ip("-n", name, "link", "set", end, "up")
        if not made:
            pytest.skip("this kernel or container does not let root make network namespaces joined by veth")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def test_network_namespaces_find_each_others_addresses(two_spaces):
    before = [["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={end}"] for name, end in zip(two_spaces, ("tspa", "tspb"))]
    codes, text = torchrun_on_nodes((1, 2), "10.213.78.1", "hosts", before=before)
    assert codes == [0, 0], text
    assert len(re.findall(r"rank \d of 3: equal", text)) == 3


def test_the_store_s_own_host_finds_an_address_that_others_reach(monkeypatch):
    """Its name may mean the loopback there."""
    found, changed = {}, threading.Condition()

    class Store:
        host, port = "alpha", 29500

        def set(self, key, value):
            with changed:
                found[key] = value.encode()
                changed.notify_all()

        def wait(self, keys, limit):
            with changed:
                assert changed.wait_for(lambda: all(key in found for key in keys), limit.total_seconds())

        def get(self, key):
            return found[key]

    routes = [{"alpha": "127.0.1.1", "10.0.0.2": "10.0.0.1"}, {"alpha": "10.0.0.2"}]
    me = threading.local()
    monkeypatch.setattr(tessera._c10d, "_route", lambda host, port: routes[me.rank][host])
    addresses = [None, None]

    def run(rank):
        me.rank = rank
        options = SimpleNamespace(store=Store(), group_rank=rank, group_size=2, timeout=timedelta(seconds=30))
        addresses[rank] = tessera._c10d._address(options)

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert addresses == ["10.0.0.1", "10.0.0.2"]
