"""Packages of AOTInductor for C and Fortran: a compiled network, and beside it what it was compiled for."""

import json
import os
import pathlib
import tempfile
import zlib

import torch

from tessera._errors import InvalidArgument

_DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.int32: "int32", torch.int64: "int64"}
_MOST = 1 << 62


def _expression(size):
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _size(which, size):
    """A size as the record has it: a number, or [times, name, plus]."""
    import sympy

    expression = sympy.sympify(_expression(size))
    if expression.is_Integer:
        return int(expression)
    names = sorted(expression.free_symbols, key=str)
    plus, one = (expression.subs(names[0], value) for value in (0, 1))
    times = one - plus
    if len(names) > 1 or sympy.expand(times * names[0] + plus - expression) != 0 or times < 1:
        raise InvalidArgument(f"{which} has the size {expression}: a size is fixed, one of its own or a multiple of one (2 * Dim('h') + 1)")
    return [int(times), str(names[0]), int(plus)]


def _input(name, fake, example):
    import sympy

    which = f"the input '{name}'"
    if example.dtype not in _DTYPES or example.device.type != "cpu":
        raise InvalidArgument(f"{which} is of {example.dtype} on {example.device}: C and Fortran give {', '.join(_DTYPES.values())} in the host's memory")
    order = sorted(range(fake.dim()), key=lambda d: (example.shape[d] > 1, -example.stride(d)))
    step = 1
    for d in reversed(order):
        if fake.shape[d] != 1 and sympy.expand(_expression(fake.stride(d)) - step) != 0:
            raise InvalidArgument(f"{which} has the shape {list(example.shape)} with strides {list(example.stride())}: export with an example without gaps (x.contiguous())")
        step = step * _expression(fake.shape[d])
    return {"name": name, "dtype": _DTYPES[example.dtype], "sizes": [_size(which, n) for n in fake.shape], "order": order}


def _ranges(program, environment):
    ranges = {}
    for name, held in environment.var_to_range.items() if environment else ():
        # What a user gave, and what the export has taken for granted: never 0 or 1.
        both = held & program.range_constraints.get(name, held)
        ranges[str(name)] = [max(0, int(both.lower)) if both.lower.is_Integer else 0, int(both.upper) if both.upper.is_Integer else _MOST]
    return ranges


def _require_ranges_say_all(environment):
    """Sizes for which an export holds are a mistake where ranges and multiples do not say the same."""
    import sympy
    from torch.utils._sympy.value_ranges import bound_sympy

    for guard in environment.guards if environment else ():
        condition = environment.replace(guard.expr)
        if isinstance(condition, sympy.core.relational.Relational):  # in factors, whose ranges are known: 3*h != 6*h*w - 3*h
            condition = type(condition)(sympy.factor(condition.lhs - condition.rhs), 0)
        if not bound_sympy(condition, environment.var_to_range).is_singleton():
            raise InvalidArgument(f"the network was exported for sizes where {condition}: give sizes for which that always holds "
                                  "(fixed ones, torch.export.Dim('h', min=2, max=64), 2 * torch.export.Dim('h'))")


def _without_libtorch(files, folder):
    """The compiled files, of which the library does not ask for libtorch.so: no program of C has loaded that one, which brings CUDA's too, but libtorch_cpu.so."""
    for file in files:
        if isinstance(file, str) and file.endswith(".so"):
            copy = pathlib.Path(folder, os.path.basename(file))
            copy.write_bytes(pathlib.Path(file).read_bytes().replace(b"\0libtorch.so\0", b"\0libc10.so\0\0\0", 1))
            file = str(copy)
        yield file


def save_package(program, path, options=None):
    """Compiles an exported network by AOTInductor into a package that `tessera_model_load` opens and `tessera_predict` runs, from C and Fortran.

    >>> rows = torch.export.Dim("rows", max=64)
    >>> program = torch.export.export(net, (x,), dynamic_shapes=({0: rows},))   # x lies in memory as the solver's arrays will
    >>> ts.save_package(program, "net.pt2")

    Compiled code looks at none of its inputs and would read a smaller one beyond its end, so beside it goes a record of dtypes, sizes with the ranges of
    those that vary, and order in memory, to which every call is compared; a package that torch itself has written has none, and is refused. `options`: of
    `torch._inductor.config`. Raises `InvalidArgument` for inputs that C does not give, sizes that are computed of several others, and networks that
    were exported for some sizes of their ranges alone. It needs a compiler of C++; the package is for CPUs like this one, and runs as the library's own code does:
    open those that you trust.
    """
    from torch._inductor import aot_compile, cpu_vec_isa
    from torch.export.pt2_archive._package import package_pt2

    path = os.fspath(path)
    if not path.endswith(".pt2"):
        raise InvalidArgument(f"'{path}': the name of a package ends in .pt2")
    held = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    examples, by_name = program.example_inputs
    names = program.graph_signature.user_inputs
    if by_name or len(names) != len(examples) or not all(isinstance(example, torch.Tensor) for example in examples):
        raise InvalidArgument(f"the network is exported with {len(examples)} inputs and {list(by_name)} by name: C gives tensors, by position")
    fakes = [held[name] for name in names]
    environment = next((n.node.shape_env for fake in fakes for n in fake.shape if isinstance(n, torch.SymInt)), None)
    _require_ranges_say_all(environment)
    record = {
        "instructions": next((name for name in ("avx512", "avx2") if name in str(cpu_vec_isa.pick_vec_isa()).lower()), ""),
        "inputs": [_input(*one) for one in zip(names, fakes, examples, strict=True)],
        "ranges": _ranges(program, environment),
    }
    files = aot_compile(program.module(check_guards=False), examples, options={**(options or {}), "aot_inductor.package": True})
    with tempfile.TemporaryDirectory() as folder:
        files = list(_without_libtorch(files, folder))
        record["sums"] = {os.path.basename(file): zlib.crc32(pathlib.Path(file).read_bytes()) for file in files if isinstance(file, str) and file}
        text = json.dumps(record)
        package_pt2(path, aoti_files=files, extra_files={"tessera_inputs.json": json.dumps({"record": text, "sum": zlib.crc32(text.encode())})})
