"""Networks that are compiled for C and Fortran: what the record beside the code says, and what is refused (the code itself: tests/c/packages_test.c)."""

import json
import zipfile

import pytest
import torch
import torch._inductor
from torch.export import Dim

import tessera as ts


class Sum(torch.nn.Module):
    def forward(self, *inputs):
        return sum(x.sum() for x in inputs)


def exported(*examples, shapes=None, module=None):
    return torch.export.export(module or Sum(), examples, dynamic_shapes=shapes)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """Compiling takes many seconds, and is the C test's."""
    monkeypatch.setattr(torch._inductor, "aot_compile", lambda *arguments, **options: [])


def test_the_record_says_what_inputs_are(tmp_path):
    """Sizes by name where they vary, also for two inputs that share one; an order that is not the dims'; limits that the compiler has drawn closer."""
    h = Dim("h", max=40)
    examples = torch.zeros(9, 5, 3, dtype=torch.float64).permute(2, 0, 1), torch.zeros(9, 4), torch.zeros(2, 2, dtype=torch.int32).t()
    ts.save_package(exported(*examples, shapes=(({1: 2 * h + 1, 2: Dim("w", min=3)}, {0: 2 * h + 1}, None),)), tmp_path / "net.pt2")
    with zipfile.ZipFile(tmp_path / "net.pt2") as archive:
        record = json.loads(json.loads(archive.read("net/extra/tessera_inputs.json"))["record"])
    (name,) = {size[1] for one in record["inputs"] for size in one["sizes"] if isinstance(size, list) and size[0] == 2}
    other = record["inputs"][0]["sizes"][2][1]
    assert [one["dtype"] for one in record["inputs"]] == ["float64", "float32", "int32"]
    assert [one["order"] for one in record["inputs"]] == [[1, 2, 0], [0, 1], [1, 0]]
    assert [one["sizes"] for one in record["inputs"]] == [[3, [2, name, 1], [1, other, 0]], [[2, name, 1], 4], [2, 2]]
    assert record["ranges"][name][1] == 40 and record["ranges"][name][0] <= 2 and record["ranges"][other][0] == 3
    assert record["instructions"] in ("avx512", "avx2", "")


class Fours(torch.nn.Module):
    """Right for some sizes alone."""

    def forward(self, x):
        return x.reshape(-1, 4).sum(0)


class Times(torch.nn.Module):
    def forward(self, x, factor):
        return x * factor


@pytest.mark.parametrize(
    "text, make",
    [
        ("C and Fortran give float32", lambda: exported(torch.zeros(3, dtype=torch.bfloat16))),
        ("without gaps", lambda: exported(torch.zeros(3, 8)[:, ::2])),
        ("without gaps", lambda: exported(torch.zeros(3, 1).expand(3, 4))),
        ("by position", lambda: exported(torch.zeros(3), 2, module=Times())),
        ("was exported for sizes where", lambda: exported(torch.zeros(8), shapes=({0: Dim.AUTO},), module=Fours())),
    ],
)
def test_what_c_cannot_check_is_refused(text, make, tmp_path):
    with pytest.raises(ts.InvalidArgument, match=text):
        ts.save_package(make(), tmp_path / "net.pt2")
    assert not (tmp_path / "net.pt2").exists()
