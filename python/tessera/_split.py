"""A model in stages: by the names of its modules, as its forward calls them."""

import inspect
import operator
import traceback

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from tessera._errors import InvalidArgument
from tessera._library import ops

_SIZES = {torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default, len, int, float}
_ARITHMETIC = {"add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow"}


class Split(list):
    """The stages of a model, each a module, as `split` makes them: what `Pipeline` takes, with the connections between them.

    >>> parts = ts.split(net, at=["1"])
    >>> parts, list(parts[1].state_dict())
    (Split(2 stages of [144, 17] numbers, skips [], tied []), ['2.weight', '2.bias'])

    `parts[i] = ts.DistributedDataParallel(parts[i], group)` and the like put a wrapper in the place of a stage. `skips`: pairs of stages, of which the second
    takes a tensor of the first past those between; `tied`: by name, the parameters that several stages share, by stage.
    """

    def __init__(self, stages, skips=(), tied=None):
        super().__init__(stages)
        self.skips, self.tied = [*skips], dict(tied or {})

    def __repr__(self):
        counts = [sum(p.numel() for p in stage.parameters()) for stage in self]
        return f"Split({len(self)} stages of {counts} numbers, skips {self.skips}, tied {list(self.tied)})"


class _Tracer(fx.Tracer):
    """Follows the forward of the modules that have a cut inside, and of no other: these stay as they are, with their hooks, modes and random numbers.

    What `fx.Tracer.trace` patches it patches for all threads, of which each may be a rank that runs modules: here the modules of one model alone know.
    """

    def __init__(self, model):
        super().__init__()
        self.root, self.graph = model, fx.Graph()
        self.submodule_paths = {module: name for name, module in model.named_modules()}
        self.tensor_attrs = {
            t: f"{name}.{key}" if name else key for name, m in model.named_modules() for key, t in vars(m).items() if isinstance(t, torch.Tensor)
        }

    def calling(self, module, name, cuts):
        """What a call of the module does while the model is followed."""

        def call(*args, **kwargs):
            if not any(cut.startswith(f"{name}.") for cut in cuts):
                return self.create_proxy("call_module", name, args, kwargs)
            self.module_stack[name] = (name, type(module))
            try:
                return module._call_impl(*args, **kwargs)
            finally:
                self.module_stack.popitem()

        return call

    def follow(self, cuts, inputs):
        calls = {m: vars(m).get("_compiled_call_impl") for m in self.submodule_paths if m is not self.root}
        try:
            for module in calls:
                vars(module)["_compiled_call_impl"] = self.calling(module, self.submodule_paths[module], cuts)
            given = {name: self.create_proxy("placeholder", name, (), {}) for name in inputs}
            self.create_node("output", "output", (self.create_arg(self.root.forward(**given)),), {})
        finally:
            for module, before in calls.items():
                vars(module)["_compiled_call_impl"] = before
                if before is None:
                    del vars(module)["_compiled_call_impl"]
        return self.graph


def _inputs_of(model, inputs):
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if inputs is None:
        return [p.name for p in parameters if p.name in names and p.default is p.empty]
    wrong = [name for name in inputs if name not in names]
    if wrong:
        raise InvalidArgument(f"split: forward of {type(model).__name__} has no argument {wrong}; it has {names}")
    return list(inputs)


def _place(error):
    """The innermost line of the model's own code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/fx/" not in f.filename and f.filename != __file__]
    return f"{frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else "its forward"


def _follow(model, at, inputs):
    before = set(vars(model))
    try:
        graph = _Tracer(model).follow(at, inputs)
    except Exception as error:
        raise InvalidArgument(
            f"split: {type(model).__name__} cannot be followed at {_place(error)}: {error}. Cut it outside of the module that does this, or give split what "
            "torch.export.export makes of it"
        ) from error
    finally:
        made = set(vars(model)) - before
        for name in made:
            delattr(model, name)
    if made:
        raise InvalidArgument(f"split: the forward of {type(model).__name__} makes a tensor of no input, which would stay as it is now: register it as a buffer")
    return graph


def _traced(model, at, inputs):
    """The graph, which must be the same in training and evaluation: what the followed modules ask of `training` would be kept in it."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        graphs = [_follow(model.train(mode), at, inputs) for mode in (False, True)]
    finally:
        for module, mode in modes:
            module.training = mode
    if str(graphs[0]) != str(graphs[1]):
        raise InvalidArgument(
            f"split: the forward of {type(model).__name__} differs between training and evaluation outside of the modules that it calls: use modules there, such "
            "as nn.Dropout"
        )
    return graphs[0]


def _exported(program):
    """The graph of an ExportedProgram, with its results nested as the model's, and the module that has its tensors."""
    module = program.module(check_guards=False)
    output = next(n for n in module.graph.nodes if n.op == "output")
    flat = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    output.args = (pytree.tree_unflatten(list(flat), program.call_spec.out_spec),)
    return module, module.graph


def _modules_of(node):
    """Names of the modules in whose forward the node is, its own among them."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    names = [path[len("L['self'].") :] if path.startswith("L['self'].") else path for path in stack]
    return [*names, str(node.target)] if node.op == "call_module" else names


def _writes(node):
    """True for what the followed code writes in place."""
    name = getattr(node.target, "__name__", str(node.target))
    return (node.op == "call_method" or isinstance(node.target, torch._ops.OpOverload)) and name.split(".")[0].endswith("_") and not name.endswith("__")


def _stages_of(graph, at):
    """The stage of each node but parameters, which are in all stages that use them. A stage begins with the first node of the module that its cut names."""
    begun, stage_of = 0, {}
    for node in graph.nodes:
        if node.op in ("get_attr", "output"):
            continue
        within = _modules_of(node)
        found = [i for i, cut in enumerate(at) if i >= begun and any(name == cut or name.startswith(f"{cut}.") for name in within)]
        if found and found[0] > begun:
            raise InvalidArgument(f"split: '{at[found[0]]}' is called before '{at[begun]}': name the cuts in the order in which forward calls them")
        if found:
            begun += 1
        stage_of[node] = 0 if node.op == "placeholder" else begun
        # What is taken out of a tuple is taken where the tuple is made.
        if node.target is operator.getitem and isinstance(node.args[1], (int, str)) and all(u.target is operator.getitem for u in node.args[0].users):
            stage_of[node] = stage_of.get(node.args[0], begun)
        source = node.args[0] if node.args and _writes(node) else None
        if isinstance(source, fx.Node) and stage_of.get(source, begun) < begun and len(source.users) > 1:
            raise InvalidArgument(f"split: '{node.name}' writes to '{source.name}' of an earlier stage, which others use: cut elsewhere, or write to a copy")
    if begun < len(at):
        raise InvalidArgument(f"split: forward calls no module '{at[begun]}' behind the cuts before it")
    empty = set(range(len(at))).difference(s for node, s in stage_of.items() if node.op != "placeholder")
    if empty:
        raise InvalidArgument(f"split: nothing is computed before '{at[min(empty)]}', at which a stage begins")
    return stage_of


def _is_number(node, known):
    """True for sizes of tensors and what is computed of them, which crosses a cut as a tensor without dims."""
    if node not in known:
        name, of = getattr(node.target, "__name__", str(node.target)), node.all_input_nodes
        source = of[0] if of else None
        if node.target in _SIZES or (node.op == "call_method" and (name in ("dim", "numel") or (name == "size" and len(node.args) == 2))):
            known[node] = True
        elif node.target is operator.getitem and source is not None:
            known[node] = source.target is getattr and source.args[1] == "shape" or source.op == "call_method" and source.target == "size"
        else:
            known[node] = node.op == "call_function" and name in _ARITHMETIC and bool(of) and all(_is_number(n, known) for n in of)
    return known[node]


def _as_tensor(number, beside):
    return torch.tensor(number, device=beside.device if isinstance(beside, torch.Tensor) else None)


def _as_number(tensor):
    return tensor.item()


class _Crossings:
    """What each stage takes and gives: `taken[s]` and `given[s]` of nodes, first those of the stage beside it, then one for each skip."""

    def __init__(self, graph, stage_of, stages):
        self.skips, beside, far = [], [[] for _ in range(stages)], []
        output = next(n for n in graph.nodes if n.op == "output")
        for node, made in stage_of.items():
            users = {stages - 1 if user is output else stage_of[user] for user in node.users}
            # Each stage that uses it passes it on to the next one that does.
            here = made
            for there in sorted(s for s in users if s > made):
                if there == here + 1:
                    beside[there].append(node)
                else:
                    far.append(((here, there), node))
                here = there
        self.skips = [skip for skip, _ in far]
        self.taken = [beside[s] + [node for (_, to), node in far if to == s] for s in range(stages)]
        self.given = [(beside[s + 1] if s + 1 < stages else []) + [node for (of, _), node in far if of == s] for s in range(stages)]


def _modules(root, graph, stage_of, stages):
    crossings, numbers = _Crossings(graph, stage_of, stages), {}
    output, inputs = next(n for n in graph.nodes if n.op == "output"), [n for n in graph.nodes if n.op == "placeholder"]
    made = []
    for s in range(stages):
        own, copies = fx.Graph(), {}

        def copy_of(node, own=own, copies=copies):
            if node.op == "get_attr" and node not in copies:
                copies[node] = own.node_copy(node)
            return copies[node]

        for node in inputs if s == 0 else crossings.taken[s]:
            copies[node] = own.placeholder(node.name)
        for node in [] if s == 0 else crossings.taken[s]:
            if _is_number(node, numbers):
                copies[node] = own.call_function(_as_number, (copies[node],))
        for node in graph.nodes:
            if stage_of.get(node) == s and node.op != "placeholder":
                copies[node] = own.node_copy(node, copy_of)
        if s == stages - 1:
            own.output(fx.map_arg(output.args[0], copy_of))
        else:
            given, beside = crossings.given[s], next((copies[n] for n in crossings.given[s] if not _is_number(n, numbers)), None)
            own.output(tuple(own.call_function(_as_tensor, (copies[n], beside)) if _is_number(n, numbers) else copies[n] for n in given))
        own.lint()
        made.append(fx.GraphModule(root, own, f"Stage{s}"))
    return made, crossings.skips


def _as_registered(root, stages):
    """GraphModule makes a persistent buffer of every tensor that it takes: those stay persistent that were."""
    for stage in stages:
        for name in [n.target for n in stage.graph.nodes if n.op == "get_attr"]:
            path, _, own = name.rpartition(".")
            there = root.get_submodule(path)
            if own in stage.get_submodule(path)._buffers and (own not in there._buffers or own in there._non_persistent_buffers_set):
                stage.get_submodule(path)._non_persistent_buffers_set.add(own)


def _tied(model, stages):
    """By name, the parameters that several stages have, by stage. Raises for buffers, of which each stage would keep its own."""
    names, held = {id(p): n for n, p in model.named_parameters()}, {}
    for s, stage in enumerate(stages):
        kept = stage.state_dict(keep_vars=True)
        for name, tensor in [*stage.named_parameters(), *((n, b) for n, b in stage.named_buffers() if n in kept)]:
            held.setdefault(id(tensor), (names.get(id(tensor), name), {}))[1][s] = tensor
    shared = {name: by_stage for name, by_stage in held.values() if len(by_stage) > 1}
    for name, by_stage in shared.items():
        if not isinstance(next(iter(by_stage.values())), nn.Parameter):
            raise InvalidArgument(
                f"split: buffer '{name}' is used in stages {list(by_stage)}, each of which would keep one of its own: cut elsewhere, or register it with "
                "persistent=False if nothing changes it"
            )
    return {name: by_stage for name, by_stage in shared.items() if next(iter(by_stage.values())).requires_grad}


def _balanced(model, stages):
    """Names of children that begin stages of about equal numbers of parameters."""
    if not isinstance(model, nn.Sequential):
        raise InvalidArgument(f"split into {stages} stages is for an nn.Sequential; name the modules at which to cut a {type(model).__name__}: at=['layer2', ...]")
    names = list(model._modules)
    return [names[i] for i in ops.balanced_cuts([1.0 + sum(p.numel() for p in child.parameters()) for child in model], stages)]


def split(model, at, *, inputs=None):
    """Makes stages of a model: a new one begins where forward first calls each module that `at` names, in that order. Returns a `Split`, of modules.

    >>> class UNet(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.down, self.middle, self.up = nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(8, 1)
    ...     def forward(self, x):
    ...         fine = self.down(x)
    ...         return self.up(torch.cat([self.middle(fine), fine], 1))
    >>> ts.split(UNet(), at=["middle.1", "middle.2"])  # `fine` passes over the stage between
    Split(3 stages of [56, 0, 29] numbers, skips [(0, 2)], tied [])
    >>> len(ts.split(net, at=3))  # of an nn.Sequential: of about equal numbers of parameters
    3
    >>> exported = torch.export.export(net, (x,), dynamic_shapes=[{0: torch.export.Dim.DYNAMIC}])
    >>> len(ts.split(exported, at=["2"]))
    2

    The model, and the modules that have a cut inside, are followed by `torch.fx`; all others are called as they are, so that training and evaluation, hooks
    and random numbers are theirs. What forward does between modules (sums, views, sizes) is part of a stage. A tensor that stages behind the next one use,
    as in a U-Net, is a skip connection, which travels with the activations. Parameters stay the same objects under the names of the model: those of several
    stages are tied, and `Pipeline` sums their gradients. What the followed code decides by values of tensors cannot be followed: give the `ExportedProgram`
    of the model, which is taken as it was exported, in its mode, with the batch as a dynamic dim where micro-batches are uneven.

    `inputs`: names of forward's arguments that a step gives, in order; default those without a default value.

    Communicates nothing, and changes nothing of the model. Raises `InvalidArgument`, which names the module or the line: for a name that forward does not
    call, or out of order, for code that cannot be followed, and for a persistent buffer that two stages use. What crosses a cut is a tensor or a size: a step
    in which it is something else raises `PipelineError`.
    """
    program = isinstance(model, torch.export.ExportedProgram)
    if not program and not isinstance(model, nn.Module):
        raise InvalidArgument(f"split: {type(model).__name__} is neither a torch.nn.Module nor an ExportedProgram")
    at = _balanced(model, at) if isinstance(at, int) else [at] if isinstance(at, str) else list(at)
    if not program:
        for cut in at:
            if cut not in dict(model.named_modules(remove_duplicate=False)):
                raise InvalidArgument(f"split: there is no module '{cut}'; the model has {[name for name, _ in model.named_children()]} and what is below them")
    root, graph = _exported(model) if program else (model, _traced(model, at, _inputs_of(model, inputs)))
    stages, skips = _modules(root, graph, _stages_of(graph, at), len(at) + 1)
    _as_registered(root, stages)
    return Split(stages, skips, _tied(root, stages))
