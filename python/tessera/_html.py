"""What a notebook shows: meshes as tables of ranks, sharded tensors as pictures of their shards, reports of `check` as tables. Nothing is communicated."""

import functools
import html
import itertools

from tessera._library import ops

# A larger mesh is told in a line: a table of it would fill the screen.
_LARGEST = 1024


def _table(head, rows):
    cells = ["<tr>" + "".join(f"<th>{html.escape(str(cell))}</th>" for cell in head) + "</tr>"]
    cells += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>{''.join(cells)}</table>"


def of_mesh(mesh):
    """Rows are coordinates of all axes but the last, columns those of the last; bold is the rank that made the mesh, whoever looks, outside of `run_threads` too."""
    title = f"<code>{html.escape(repr(mesh))}</code>"
    if len(mesh.ranks) > _LARGEST:
        return title
    *outer, (last, columns) = mesh.axes.items()
    mine = functools.reduce(lambda at, axis: at * axis[0] + axis[1], zip(mesh.axes.values(), mesh.coordinate), 0) if mesh.contains_me else -1
    cells = [f"<b>{rank}</b>" if at == mine else str(rank) for at, rank in enumerate(mesh.ranks)]
    rows = []
    for at, place in enumerate(itertools.product(*(range(size) for _, size in outer))):
        rows.append([*place, *cells[at * columns : (at + 1) * columns]])
    return title + _table([*(name for name, _ in outer), *(f"{last} {i}" for i in range(columns))], rows)


def of_tensor(tensor):
    """The line of `summary`, and the picture of `visualize_sharding_svg`."""
    return f"<code>{html.escape(ops.summary(tensor))}</code><br>{ops.visualize_sharding(tensor, True)}"


def of_report(report):
    """The verdict, then values and gradients, those that differ first, and what operators sent or refused."""
    verdict = html.escape(report.text(0).splitlines()[0])
    found = sorted(report.values + report.gradients, key=lambda one: (one.equal, -one.difference))
    values = [[html.escape(one.name), "yes" if one.equal else "<b>no</b>", f"{one.difference:.2g}", f"{one.tolerance:.0e}"] for one in found]
    sent = [[html.escape(moved.operator), moved.calls, moved.bytes] for moved in sorted(report.moved, key=lambda moved: -moved.bytes)]
    refused = [[html.escape(text) for text in (one.operator, one.where, one.why)] for one in report.refused]
    tables = [_table(["value", "equal", "off by", "tolerance"], values), _table(["operator", "calls", "bytes of this rank"], sent) if sent else ""]
    tables.append(_table(["refused", "at", "why"], refused) if refused else "")
    return f"<b>{verdict}</b>{''.join(tables)}{''.join(f'<p>{html.escape(note)}</p>' for note in report.notes)}"
