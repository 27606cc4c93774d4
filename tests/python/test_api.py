"""What the package says of itself: names, stubs, and what notebooks show; docstrings are test_reference.py's."""

import ast
import asyncio
import contextlib
import dataclasses
import html.parser
import inspect
import io
import pathlib
import re

import torch

import tessera as ts

FOLDER = pathlib.Path(ts.__file__).parent


def public(thing):
    """Methods and properties of a class that a user may call."""
    return {name: member for name, member in vars(thing).items() if not name.startswith("_")}


def parameters_of(node):
    a = node.args
    names = [x.arg for x in a.posonlyargs + a.args + a.kwonlyargs] + [x.arg for x in (a.vararg, a.kwarg) if x]
    return [n for n in names if n not in ("self", "cls")]


def actual_parameters(function):
    function = getattr(function, "__func__", function)
    kinds = inspect.Parameter
    found = inspect.signature(function).parameters.values()
    plain = [p.name for p in found if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    return [n for n in plain + [p.name for p in found if p.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)] if n not in ("self", "cls")]


def defaults_of(node):
    """The parameters that may be left out, with their values where these are literals."""
    a = node.args
    plain = a.posonlyargs + a.args
    pairs = [*zip(plain[len(plain) - len(a.defaults) :], a.defaults), *((x, d) for x, d in zip(a.kwonlyargs, a.kw_defaults) if d)]
    found = {}
    for argument, default in pairs:
        try:
            found[argument.arg] = ast.literal_eval(default)
        except ValueError:
            found[argument.arg] = ...
    return found


def assert_same_parameters(node, function, name):
    assert parameters_of(node) == actual_parameters(function), name
    parameters = inspect.signature(getattr(function, "__func__", function)).parameters.values()
    actual = {p.name: p.default for p in parameters if p.default is not p.empty}
    stated = defaults_of(node)
    assert stated.keys() == actual.keys(), f"{name}: {stated} in the stub, {actual} in the code"
    wrong = {key: value for key, value in stated.items() if value is not ... and repr(value) != repr(actual[key])}
    assert not wrong, f"{name}: {wrong} in the stub, {actual} in the code"
    keywords = [x.arg for x in node.args.kwonlyargs]
    assert keywords == [p.name for p in parameters if p.kind == p.KEYWORD_ONLY], name


def test_stubs_are_those_of_the_code():
    assert (FOLDER / "py.typed").exists()
    tree = ast.parse((FOLDER / "__init__.pyi").read_text())
    stubs = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")}
    assert sorted(stubs) == sorted(ts.__all__)
    for name, node in stubs.items():
        thing = getattr(ts, name)
        assert isinstance(node, ast.ClassDef) == inspect.isclass(thing), name
        if isinstance(node, ast.FunctionDef):
            assert_same_parameters(node, thing, name)
            continue
        methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
        fields = {m.target.id for m in node.body if isinstance(m, ast.AnnAssign)}
        if "__init__" in methods:
            assert_same_parameters(methods["__init__"], thing.__init__, name)
        for member, value in public(thing).items():
            assert member in methods or member in fields, f"{name}.{member} is not in the stub"
            if member in methods and not isinstance(value, property):
                assert_same_parameters(methods[member], value, f"{name}.{member}")
        for member in methods:
            assert hasattr(thing, member), f"{name}.{member} is in the stub alone"
        if dataclasses.is_dataclass(thing):
            assert fields == {field.name for field in dataclasses.fields(thing)}, name


CELLS = [
    "import torch, tessera as ts",
    "def cell(rank):\n    mesh = ts.Mesh({'x': 2})\n    t = ts.from_local(torch.full((rank + 1,), float(rank)), mesh, [ts.Shard(0)])\n    print(f'rank {rank}: {t}')\n    return t.sum().item()",
    "totals = ts.run_threads(2, cell)",
    "def wrong(rank):\n    mesh = ts.Mesh({'x': 2})\n    if rank == 1:\n        raise ValueError('in one cell')\n    mesh.barrier()\n\ntry:\n    ts.run_threads(2, wrong)\nexcept ValueError as error:\n    said = str(error)",
    "again = ts.run_threads(2, cell)",
]


def test_a_notebook_of_ranks_as_threads():
    """As a kernel runs cells: one namespace, an event loop that is running, stdout replaced, a failed cell between good ones."""
    namespace = {"__name__": "__main__"}

    async def kernel():
        for cell in CELLS:
            exec(compile(cell, "<cell>", "exec"), namespace)

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        asyncio.run(kernel())
    assert namespace["totals"] == namespace["again"] == [2.0, 2.0] and namespace["said"] == "in one cell"
    assert printed.getvalue().count("rank 1: <ShardTensor") == 2


def test_what_a_notebook_shows():
    """Tables of ranks, pictures of shards, verdicts: well-formed, told by each rank alone."""

    class Shows(html.parser.HTMLParser):
        def __init__(self, text):
            super().__init__()
            self.open, self.words = [], []
            self.feed(text)
            assert not self.open, text

        def handle_starttag(self, tag, attributes):
            if tag != "br":
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

        def handle_data(self, data):
            self.words.append(data)

    def body(rank):
        mesh = ts.Mesh({"data": 2, "domain": 2})
        if rank != 3:
            mesh.barrier()
            return None
        t = ts.ones([5, 6], mesh, [ts.Shard(0), ts.Shard(1)])
        shown = [Shows(thing._repr_html_()).words for thing in (mesh, t, ts.ones([], mesh, [ts.Replicate()] * 2))]
        assert torch.ones(2)._repr_html_() is None
        mesh.barrier()
        return shown

    mesh, tensor, scalar = ts.run_threads(4, body)[3]
    assert mesh[1:] == ["data", "domain 0", "domain 1", "0", "0", "1", "1", "2", "3"]
    meshes = ts.run_threads(4, lambda rank: ts.Mesh({"data": 2, "domain": 2}, ranks=[3, 1, 0, 2]))  # shown by no rank: in a cell behind
    assert [re.findall("<b>(.)</b>", mesh._repr_html_()) for mesh in meshes] == [["0"], ["1"], ["2"], ["3"]]
    assert "ShardTensor" in tensor[0] and "0..2" in tensor and "ShardTensor" in scalar[0]
    report = ts.run_threads(1, lambda rank: ts.check(torch.nn.Linear(3, 2), torch.ones(4, 3), ts.Mesh({"data": 1})))[0]
    assert repr(report) == f"<Report: {str(report).splitlines()[0]}>"
    words = Shows(report._repr_html_()).words
    assert words[0].startswith("safe on Mesh(") and "gradient of weight" in words and words.count("yes") == 4
