"""help() of every public name is enough: each has a docstring, each function and class an example, and all examples run, on one rank."""

import contextlib
import doctest
import inspect
import os
import pathlib
import re
import tempfile

import pytest
import torch

import tessera as ts

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module")
def job():
    ts.init()
    yield
    ts.shutdown()


@pytest.fixture
def folder():
    """In memory where there is such a folder: checkpoints are synced."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as made, contextlib.chdir(made):
        yield


GIVEN = re.search(r"take for given:\n\n```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL).group(1)


def names():
    """What examples take for given, as docs/python.md says."""
    torch.manual_seed(0)
    ts.manual_seed(0)
    namespace = {}
    exec(GIVEN.replace("ts.init()\n", ""), namespace)
    return namespace


def members(thing):
    """Methods and properties of a class of the package that a user may call."""
    if not (inspect.isclass(thing) and thing.__module__.startswith("tessera")):
        return {}
    own = {name: value for name, value in vars(thing).items() if not name.startswith("_")}
    return {name: value for name, value in own.items() if callable(value) or isinstance(value, (property, classmethod, staticmethod))}


def documented(member):
    return inspect.getdoc(member.fget if isinstance(member, property) else getattr(member, "__func__", member)) or ""


def texts(name):
    thing = getattr(ts, name)
    return {name: documented(thing), **{f"{name}.{m}": documented(v) for m, v in members(thing).items()}}


def is_error(name):
    return inspect.isclass(getattr(ts, name)) and issubclass(getattr(ts, name), Exception)


@pytest.mark.parametrize("name", ts.__all__)
def test_the_docstrings_of(job, folder, name):
    parser, found = doctest.DocTestParser(), texts(name)
    for whose, text in found.items():
        assert text and not text.startswith(f"{whose}("), f"{whose} has no docstring"
    if not is_error(name):
        examples = "\n".join(example.source for text in found.values() for example in parser.get_examples(text))
        assert examples, f"{name} has no example"
        unused = [m for m in members(getattr(ts, name)) if f".{m}" not in examples]
        assert not unused, f"no example of {name} uses {unused}"

    if name == "init":
        ts.shutdown()
    report = []
    for whose, text in found.items():
        runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
        given = {"ts": ts} if name == "init" else names()
        runner.run(parser.get_doctest(text, given, whose, whose, 0), out=report.append)
    if name == "shutdown":
        ts.init()
    assert not report, "".join(report)


def test_the_pages_of_the_site_say_what_help_says(monkeypatch):
    """They are made without the library, of the sources."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    reference = pytest.importorskip("python_reference")
    pages = "\n".join(reference.pages().values())
    for name in ts.__all__:
        for whose, text in texts(name).items():
            assert f"# {whose}\n" in pages and text.partition("\n")[0] in pages, whose
