"""Configuration trees of groups, machines, and which rank sits where."""

import json
import os
from dataclasses import dataclass
from operator import index

from tessera._errors import MappingError
from tessera._groups import _seconds
from tessera._library import classes, ops
from tessera._mesh import handle_of


class ProcessGroupConfig:
    """A tree of process groups: leaves have sizes, a parent is the product of its children, and every leaf is an axis of a mesh.

    >>> def body(rank):
    ...     tree = ts.ProcessGroupConfig()                       # its root is "world"
    ...     tree.add_node("model_parallel", "world", size=2)
    ...     tree.add_node("data_parallel", "world")              # open: follows from the world
    ...     ts.create_process_groups(tree)                       # collective
    ...     total = ts.group("data_parallel").all_reduce(torch.ones(1))
    ...     return ts.Mesh.of("data_parallel").ranks             # the same groups, for sharded tensors
    >>> ts.run_threads(4, body)
    [[0, 2], [1, 3], [0, 2], [1, 3]]

    The first leaf has adjacent ranks, the last is farthest; `order` says otherwise.

    `orthogonal_group`: of a root that is a model inside a larger world, the name of the groups that hold the model's replicas. As many replicas are made as
    the world has room for:

    >>> tree = ts.ProcessGroupConfig("unet", orthogonal_group="data").add_node("domain", "unet", size=4)
    >>> tree.mesh(8)[0]
    {'data': 2, 'domain': 4}
    """

    def __init__(self, root="world", *, orthogonal_group="", scope=""):
        self._handle = classes.ProcessGroupConfig(root)
        if orthogonal_group:
            self._handle.set_orthogonal(root, orthogonal_group, scope)
        elif scope:
            raise ValueError("ProcessGroupConfig: scope is of an orthogonal group, but orthogonal_group is not given")

    @classmethod
    def _of(cls, handle):
        tree = cls.__new__(cls)
        tree._handle = handle
        return tree

    def add_node(self, name, parent, size=None, *, orthogonal_group="", scope="", order="", backend="", timeout=0):
        """Appends a node as the last child of `parent`, and returns the tree.

        `size`: of a leaf; None: follows from the world, for one leaf. `orthogonal_group`: the name of the groups orthogonal to this node's, within
        `scope` ("parent", "world", or an ancestor). `order`: which of the leaves below have adjacent ranks, "first-adjacent", "last-adjacent", or names
        joined by dashes, nearest first. `backend`, `timeout` (seconds): of its groups. Raises for a name that is there, a parent that is not, a size
        below 1.

        >>> tree = ts.ProcessGroupConfig().add_node("model", "world").add_node("tensor", "model", 2).add_node("pipe", "model", 4)
        >>> tree.node_names(), tree.leaf_groups(), tree.children("model"), tree.parent("tensor"), tree.size("model")
        (['world', 'model', 'tensor', 'pipe'], ['tensor', 'pipe'], ['tensor', 'pipe'], 'model', 8)
        >>> tree.closeness()
        ['tensor', 'pipe']
        """
        self._handle.add_node(name, parent, size, orthogonal_group, scope, order, backend, _seconds(timeout))
        return self

    def add_orthogonal(self, name, of, scope="", *, backend="", timeout=0):
        """Groups orthogonal to one node or several, none inside another.

        >>> tree = ts.ProcessGroupConfig().add_node("tensor", "world", 2).add_node("pipe", "world", 4).add_node("data", "world")
        >>> tree = tree.add_orthogonal("replicas", ["tensor", "pipe"])
        """
        self._handle.add_orthogonal(name, [of] if isinstance(of, str) else list(of), scope, backend, _seconds(timeout))
        return self

    def set_leaf_group_sizes(self, sizes, update_parents=True):
        """`{"model_parallel": 4}`. All or nothing: an unknown leaf, an inner node or a size below 1 raises and changes nothing.

        >>> tree = ts.ProcessGroupConfig().add_node("tensor", "world", 2).add_node("data", "world")
        >>> tree.set_leaf_group_sizes({"tensor": 4})
        >>> tree.size("tensor")
        4
        """
        self._handle.set_leaf_group_sizes(list(sizes), [index(n) for n in sizes.values()], update_parents)

    def set_orthogonal(self, name, orthogonal_group, scope=""):
        """As `orthogonal_group` and `scope` of `add_node`; an empty name takes them away.

        >>> tree = ts.ProcessGroupConfig().add_node("tensor", "world", 2).add_node("data", "world")
        >>> tree.set_orthogonal("tensor", "replicas")
        """
        self._handle.set_orthogonal(name, orthogonal_group, scope)

    def inside_world(self, replicas="data_parallel"):
        """The tree of a model inside a larger world: a root "world", below it this tree, and beside that an open leaf that counts the model's replicas.

        The leaf has the name of the groups that are orthogonal to the root, or `replicas` if there are none. `resolve`, `mesh` and `create_process_groups` do
        this by themselves for a root that names orthogonal groups. Raises for a root named "world", and for a leaf whose name a node has.

        >>> unet = ts.ProcessGroupConfig("unet").add_node("domain", "unet", 4)
        >>> unet.inside_world().leaf_groups()
        ['domain', 'data_parallel']
        """
        return ProcessGroupConfig._of(self._handle.inside_world(replicas))

    def set_order(self, name, order):
        """As `order` of `add_node`.

        >>> tree = ts.ProcessGroupConfig().add_node("a", "world", 2).add_node("b", "world", 2)
        >>> tree.set_order("world", "b-a"); tree.closeness()
        ['b', 'a']
        """
        self._handle.set_order(name, order)

    def node_names(self):
        """Parents before children, in tree order."""
        return list(self._handle.node_names())

    def leaf_groups(self, below=""):
        """In tree order; below one node, or all."""
        return list(self._handle.leaf_groups(below))

    def parent(self, name):
        """Empty for the root."""
        return self._handle.parent(name)

    def children(self, name):
        """In the order in which they were added."""
        return list(self._handle.children(name))

    def closeness(self):
        """All leaves, nearest (adjacent ranks) first."""
        return list(self._handle.closeness())

    def size(self, name):
        """The product of the leaves below; None while one of them is open."""
        return self._handle.size(name)

    def resolve(self, world_size):
        """The same tree with the open leaf set. Raises, with the sizes, where they do not make the world.

        >>> ts.ProcessGroupConfig().add_node("a", "world", 2).add_node("b", "world").resolve(6).size("b")
        3
        """
        return ProcessGroupConfig._of(self._handle.resolve(world_size))

    def mesh(self, ranks):
        """Axes, outermost first, and the rank table of this tree: over a number of ranks, or over these, in this order. Arithmetic alone.

        >>> ts.ProcessGroupConfig().add_node("a", "world", 2).add_node("b", "world").mesh(6)
        ({'b': 3, 'a': 2}, [0, 1, 2, 3, 4, 5])
        """
        names, sizes, table = self._handle.table(list(range(ranks)) if isinstance(ranks, int) else [index(r) for r in ranks])
        return dict(zip(names, sizes)), list(table)

    def __str__(self):
        return self._handle.text()

    def __repr__(self):
        return f"ProcessGroupConfig\n{self}"

    def __eq__(self, other):
        return isinstance(other, ProcessGroupConfig) and self._handle.same(other._handle)

    __hash__ = None


def read_group_config(path):
    """A tree from a .json, .yaml or .yml file; the fields are those of `add_node`, nested under `children`. Raises ConfigFileError, with the line,
    for a file that is absent or no tree, and what `add_node` raises.

    >>> tree = ts.ProcessGroupConfig().add_node("a", "world", 2)
    >>> size = open("groups.yaml", "w").write(ts.format_group_config(tree))
    >>> ts.read_group_config("groups.yaml") == tree
    True
    """
    return ProcessGroupConfig._of(ops.group_config(os.fspath(path), "", True))


def parse_group_config(text, format="yaml"):
    """The same from a text; `format`: "yaml" or "json". Raises what `read_group_config` does.

    >>> ts.parse_group_config('{"name": "world", "children": [{"name": "data", "size": 4}]}', "json").size("world")
    4
    """
    return ProcessGroupConfig._of(ops.group_config(text, format, False))


def format_group_config(config, format="yaml"):
    """The tree as text; reading it back gives an equal one.

    >>> print(ts.format_group_config(ts.ProcessGroupConfig().add_node("data", "world", 4)))
    name: world
    children:
      - name: data
        size: 4
    """
    return ops.format_group_config(config._handle, format)


class Topology:
    """The machines: hosts with devices, one rank each, numbered host by host.

    >>> ts.Topology([8, 8, 4]).hosts                  # three hosts
    {'host0': 8, 'host1': 8, 'host2': 4}
    >>> ts.parse_topology("hosts: 16x8").slots        # YAML, with links, rails and switches where they are known
    128
    """

    def __init__(self, devices):
        self._handle = devices if not isinstance(devices, (list, tuple)) else classes.Topology([int(n) for n in devices])

    @staticmethod
    def uniform(hosts, devices):
        """`hosts` hosts with `devices` devices each, on one switch.

        >>> ts.Topology.uniform(2, 8).slots
        16
        """
        return Topology([devices] * hosts)

    @property
    def slots(self):
        """Places for ranks."""
        return self._handle.slots()

    @property
    def hosts(self):
        """Names and numbers of devices."""
        return {name: devices for name, devices in self._handle.hosts()}

    def __repr__(self):
        return f"Topology({self.hosts})"


def read_topology(path):
    """From a .json, .yaml or .yml file. Raises ConfigFileError, with the line, for one that is absent or no description, MappingError for one without hosts.

    >>> size = open("machines.yaml", "w").write("hosts: 2x4")
    >>> ts.read_topology("machines.yaml").slots
    8
    """
    return Topology(ops.topology(os.fspath(path), "file"))


@dataclass(frozen=True)
class FoundTopology:
    """The machines of a running job, as its ranks found them (`find_topology`). `create_process_groups` and `mapping_gain` take it.

    >>> ts.FoundTopology(ts.parse_hosts("2x2"), (0, 1, 2, 3), ()).topology.slots
    4
    """

    topology: Topology
    """With a slot for each rank."""
    slot_of: tuple
    """The slot of each rank."""
    unknown: tuple
    """What could not be found, one sentence each; there the topology has its defaults."""


def find_topology(file=""):
    """The machines of this job: each rank says its host, the first of each host its inside as hwloc sees it, and rank 0 Slurm's switches.

    `file`: of `tessera bench topology`, which rank 0 reads in place of the last two. Returns a `FoundTopology`, the same on all ranks; collective over the world.
    Raises on every rank ConfigurationError for a file that cannot be read, MappingError for one that has another number of slots than the job has ranks.

    >>> found = ts.find_topology()
    >>> found.topology.slots, found.slot_of
    (1, (0,))
    """
    topology, slot_of, unknown = ops.find_topology(os.fspath(file))
    return FoundTopology(Topology(topology), tuple(slot_of), tuple(unknown))


def parse_topology(text, format="yaml"):
    """From a text; `format`: "yaml" or "json". Raises what `read_topology` does.

    >>> ts.parse_topology({"hosts": "2x4"}, "json").hosts
    {'host0': 4, 'host1': 4}
    """
    return Topology(ops.topology(text if isinstance(text, str) else json.dumps(text), format))


def parse_hosts(text):
    """"16x8" or "8,8,4": hosts and devices of each. Raises ConfigFileError for another text.

    >>> ts.parse_hosts("8,8,4").slots
    20
    """
    return Topology(ops.topology(text, "hosts"))


@dataclass(frozen=True)
class Traffic:
    """What one group family sends in a step: `Traffic("tensor", "all_reduce", 64e6, calls=96)`.

    `axes`: an axis, or several joined by dashes. `collective`: all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all or send. `bytes`: of
    the buffer that a call works on.

    >>> ts.Traffic("tensor", "all_reduce", 64e6, calls=96)
    Traffic(axes='tensor', collective='all_reduce', bytes=64000000.0, calls=96)
    """

    axes: str
    collective: str = "all_reduce"
    bytes: float = 0.0
    calls: float = 1.0


@dataclass(frozen=True)
class MeshTraffic:
    """What a step moves along the axes of a mesh: traced by `mean_traffic`, kept in a file by `write_traffic`.

    >>> ts.MeshTraffic({"data": 2, "tensor": 4}, (ts.Traffic("tensor", bytes=64e6, calls=96),)).mesh
    {'data': 2, 'tensor': 4}
    """

    mesh: dict
    """Names and sizes of the axes, outermost first."""
    traffic: tuple
    """A `Traffic` for each family of groups, collective and power of two of bytes."""

    def _texts(self):
        return list(self.mesh), [index(n) for n in self.mesh.values()], _traffic(self.traffic)


def mean_traffic(trace, mesh, steps=1):
    """What the calls of the ranks' `CommTrace`s move in a step along the axes of a mesh: the mean over all ranks, of `steps` steps each.

    Calls over groups that are none of the mesh's do not count. A message, or an exchange with neighbours, counts once, as send, for the pair of neighbours that it
    passes; no peer is known of it, so that a ring of p ranks, whose last sends to the first, counts p/(p-1) times. Collective over the mesh; every rank gets the
    same `MeshTraffic`. Raises InvalidArgument, on every rank, for a number of steps that is not finite and above 0.

    >>> def rank_program(rank):
    ...     mesh = ts.Mesh({"data": 2, "model": 2})
    ...     with ts.CommTrace() as trace:
    ...         mesh.group("data").all_reduce(torch.ones(1000))
    ...     return ts.mean_traffic(trace, mesh).traffic
    >>> ts.run_threads(4, rank_program)[0]
    (Traffic(axes='data', collective='all_reduce', bytes=4000.0, calls=1.0),)
    """
    texts = ops.mean_traffic(trace._handle, handle_of(mesh), float(steps))
    return MeshTraffic(dict(mesh.axes), tuple(Traffic(*one) for one in texts))


def read_traffic(path):
    """Traffic from a .json, .yaml or .yml file. Raises ConfigFileError for one that is absent or holds anything else, numbers that are negative or not finite included.

    >>> ts.write_traffic(ts.MeshTraffic({"data": 2}, (ts.Traffic("data", bytes=4e6),)), "traffic.yaml")
    >>> ts.read_traffic("traffic.yaml").traffic
    (Traffic(axes='data', collective='all_reduce', bytes=4000000.0, calls=1.0),)
    """
    names, sizes, texts = ops.read_traffic(os.fspath(path))
    return MeshTraffic(dict(zip(names, sizes)), tuple(Traffic(*one) for one in texts))


def write_traffic(traffic, path):
    """Writes a `MeshTraffic` for `read_traffic`, `tessera run --map` and `tessera plan --traffic`. Raises GroupConfigError for numbers that are negative or not finite.

    >>> ts.write_traffic(ts.MeshTraffic({"model": 4}, (ts.Traffic("model", bytes=1e6),)), "model.json")
    >>> ts.read_traffic("model.json").mesh
    {'model': 4}
    """
    ops.write_traffic(*traffic._texts(), os.fspath(path))


@dataclass(frozen=True)
class MappingGain:
    """What another mapping of a running job would gain, per step (`mapping_gain`). As text: three lines.

    >>> def rank_program(rank):
    ...     mesh, machines = ts.Mesh({"data": 2}), ts.FoundTopology(ts.parse_hosts("2x1"), (0, 1), ())
    ...     return ts.mapping_gain(mesh, machines, [ts.Traffic("data", bytes=1e6)])
    >>> gain = ts.run_threads(2, rank_program)[0]
    >>> gain.seconds == gain.mapped_seconds, gain.mapping.method
    (True, 'as it is')
    """

    mapping: "RankMapping"
    """The best that was found; where none beats what is there, what is there, and its method is "as it is"."""
    ranks: tuple
    """The rank to put at each position: `Mesh(axes, ranks=)`."""
    seconds: float
    mapped_seconds: float
    bytes: float
    """Between hosts."""
    mapped_bytes: float
    text: str

    def __str__(self):
        return self.text


def mapping_gain(mesh, machines, traffic):
    """Compares where the ranks of a mesh are on the machines of `find_topology` with the best mapping for this traffic: a `MappingGain`.

    `mesh`: over all ranks. `traffic`: a list of `Traffic`, or a `MeshTraffic`. Arithmetic alone. Raises MappingError for a mesh over a part of the ranks.

    >>> def rank_program(rank):
    ...     mesh, machines = ts.Mesh({"data": 2, "model": 2}), ts.FoundTopology(ts.parse_hosts("2x2"), (0, 1, 2, 3), ())
    ...     return ts.mapping_gain(mesh, machines, [ts.Traffic("data", bytes=64e6)])
    >>> gain = ts.run_threads(4, rank_program)[0]
    >>> gain.ranks, gain.bytes, gain.mapped_bytes             # both of "data" on one host
    ((0, 2, 1, 3), 256000000.0, 0.0)
    """
    mapping, numbers, ranks, text = ops.mapping_gain(handle_of(mesh), machines.topology._handle, list(machines.slot_of), _traffic(traffic))
    return MappingGain(_mapping(mapping), tuple(ranks), *numbers, text)


@dataclass(frozen=True)
class RankMapping:
    """Which rank sits on which slot of a topology, and what that costs.

    >>> best = ts.optimise_mapping({"tensor": 2, "data": 2}, ts.parse_hosts("2x2"), [ts.Traffic("tensor", bytes=64e6)])
    >>> best.slot_of, best.seconds < best.naive_seconds, best.exact
    ((0, 2, 1, 3), True, True)
    """

    slot_of: tuple
    """By row-major position of the mesh."""
    seconds: float
    """Of the stated traffic, per step."""
    naive_seconds: float
    """Position p on slot p."""
    lower_bound: float
    """No mapping costs less."""
    exact: bool
    """All mappings were tried."""
    method: str


def _traffic(traffic):
    traffic = traffic.traffic if isinstance(traffic, MeshTraffic) else traffic
    return [(t.axes, t.collective, float(t.bytes), float(t.calls)) for t in traffic]


def _mapping(values):
    slot_of, *others = values
    return RankMapping(tuple(slot_of), *others)


def optimise_mapping(axes, topology, traffic, *, exact_limit=50000, effort=1.0, seed=1):
    """The best mapping of a mesh that was found for this traffic; it never costs more than the naive one. Arithmetic alone, the same on all ranks.

    `axes`: as of `Mesh`, outermost first. Up to `exact_limit` mappings all are tried. Raises MappingError for more ranks than slots, UnknownName for traffic
    along axes that the mesh does not have.

    >>> traffic = [ts.Traffic("tensor", "all_reduce", 64e6, calls=96), ts.Traffic("data", "all_reduce", 1e9)]
    >>> ts.optimise_mapping({"data": 4, "tensor": 4}, ts.parse_hosts("4x4"), traffic).slot_of[:4]
    (0, 1, 2, 3)
    """
    return _mapping(ops.map_ranks(topology._handle, list(axes), list(axes.values()), _traffic(traffic), exact_limit, float(effort), seed, None))


def given_mapping(axes, topology, traffic, slot_of):
    """A mapping of the user's own, and what it costs. Raises for slots out of range or taken twice.

    >>> traffic = [ts.Traffic("tensor", bytes=64e6)]
    >>> mine = ts.given_mapping({"data": 2, "tensor": 2}, ts.parse_hosts("2x2"), traffic, [0, 2, 1, 3])
    >>> mine.seconds > mine.naive_seconds                # tensor groups lie across the hosts
    True
    """
    return _mapping(ops.map_ranks(topology._handle, list(axes), list(axes.values()), _traffic(traffic), 0, 1.0, 1, [index(s) for s in slot_of]))


def mapped_mesh(axes, mapping):
    """The mesh to run where the launcher starts rank r on slot r: each coordinate has the rank whose slot the mapping gives it.
    Raises InvalidArgument for a mapping of another number of ranks.

    >>> best = ts.optimise_mapping({"tensor": 1}, ts.parse_hosts("1x1"), [])
    >>> ts.mapped_mesh({"tensor": 1}, best).axes
    {'tensor': 1}
    """
    from tessera._api import Mesh

    return Mesh(axes, ops.mapped_mesh(list(axes), list(axes.values()), list(mapping.slot_of)))


def _slots(topology, slot_of):
    slots = [index(s) for s in slot_of]
    wrong = [s for s in slots if not 0 <= s < topology.slots or slots.count(s) > 1]
    if wrong:
        raise MappingError(f"slot {wrong[0]} in {slots}: the topology has slots 0 to {topology.slots - 1}, and each is taken once")
    return slots


def open_mpi_rank_file(topology, slot_of):
    """The text of a file for `mpirun --rankfile`. Raises MappingError for slots that the topology does not have, or that are taken twice.

    >>> print(ts.open_mpi_rank_file(ts.parse_hosts("2x1"), [1, 0]))
    rank 0=host1 slot=0
    rank 1=host0 slot=0
    """
    return ops.launcher_file("open_mpi", topology._handle, _slots(topology, slot_of))


def slurm_host_file(topology, slot_of):
    """The text of a file for SLURM_HOSTFILE and `srun --distribution=arbitrary`. Raises as `open_mpi_rank_file`.

    >>> print(ts.slurm_host_file(ts.parse_hosts("2x1"), [1, 0]))
    host1
    host0
    """
    return ops.launcher_file("slurm", topology._handle, _slots(topology, slot_of))


def process_groups_of(model, *arguments, sizes=None):
    """The tree of groups that a model says it needs: what its static method `process_groups(*arguments)` returns, with these `sizes` of its leaves.

    >>> class UNet(nn.Module):
    ...     @staticmethod
    ...     def process_groups():
    ...         return ts.ProcessGroupConfig("unet", orthogonal_group="data").add_node("domain", "unet")
    ...
    ...     def forward(self, x):
    ...         x = ts.distribute_tensor(x, ts.Mesh.of("domain"), [ts.Shard(2)])
    >>> ts.create_process_groups(UNet, sizes={"domain": ts.world_size()})
    >>> ts.process_groups_of(UNet, sizes={"domain": 4}).size("unet")
    4

    `model`: the class, or a module of it. Raises TypeError for a model that says nothing, and for one that returns something else.
    """
    says = getattr(model, "process_groups", None)
    what = getattr(model, "__name__", type(model).__name__)
    if not callable(says):
        raise TypeError(f"{what} does not say which process groups it needs: give it a static method process_groups() that returns a ProcessGroupConfig")
    config = says(*arguments)
    if not isinstance(config, ProcessGroupConfig):
        raise TypeError(f"{what}.process_groups() returned a {type(config).__name__}; it is to return a ProcessGroupConfig")
    return _with_sizes(config, sizes)


def _with_sizes(config, sizes):
    if not sizes:
        return config
    config = ProcessGroupConfig._of(config._handle.copy())
    config.set_leaf_group_sizes(sizes)
    return config


def create_process_groups(config, *, sizes=None, ranks=None, topology=None, traffic=(), eager=False):
    """Makes the families of a tree known by name: `group(name)` is this rank's group, `Mesh.of(name)` the same ranks as a mesh.

    `config`: a tree, or a model that says which it needs (`process_groups_of`). `sizes`: of its leaves, in place of those that it has. `ranks`: who sits on the i-th coordinate of the tree's mesh. `topology` (or a `FoundTopology`), with the
    `traffic` of a step: chosen for these machines; returns the `RankMapping`, else None. Groups are made on first use, or now if `eager`. Collective over the world: where ranks bring different trees every rank
    raises, with the first line that differs.

    >>> tree = ts.ProcessGroupConfig().add_node("tensor", "world", 1).add_node("data", "world")
    >>> ts.create_process_groups(tree)
    >>> ts.Mesh.of("world").axes
    {'data': 1, 'tensor': 1}
    """
    config = _with_sizes(config, sizes) if isinstance(config, ProcessGroupConfig) else process_groups_of(config, sizes=sizes)
    if topology is None:
        if traffic:
            raise ValueError("create_process_groups: traffic without the topology that it is to be mapped to")
        ops.create_groups(config._handle, None if ranks is None else [index(r) for r in ranks], eager)
        return None
    if ranks is not None:
        raise ValueError("create_process_groups: either ranks, or a topology that chooses them")
    slot_of = None
    if isinstance(topology, FoundTopology):
        topology, slot_of = topology.topology, list(topology.slot_of)
    return _mapping(ops.create_groups_on(config._handle, topology._handle, slot_of, _traffic(traffic), eager))
