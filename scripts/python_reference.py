"""The reference of the Python package as Markdown, of its docstrings and its stub: what help() says, without importing the package, which needs the library."""

import ast
import inspect
import pathlib
import re

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "python" / "tessera"


def _defined(body):
    return {node.name: node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not _is_setter(node)}


def _is_setter(node):
    return any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list)


def public_names():
    """Module -> the names that it gives to the package, in the order of their definitions."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    listed = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")
    modules = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("tessera."):
            names = {alias.name for alias in node.names} & set(listed)
            if names:
                modules.setdefault(node.module.partition(".")[2], set()).update(names)
    return modules


def documented(node, prefix=""):
    """Qualified name -> docstring, of a definition and of its public members."""
    found = {prefix + node.name: inspect.cleandoc(ast.get_docstring(node, clean=False) or "")}
    if isinstance(node, ast.ClassDef):
        for name, member in _defined(node.body).items():
            if not name.startswith("_"):
                found.update(documented(member, f"{prefix}{node.name}."))
    return found


def _markdown(text):
    """Examples, which end at an empty line, as blocks of code."""
    return re.sub(r"^>>> .*(?:\n.+)*", lambda example: f"```pycon\n{example.group()}\n```", text, flags=re.MULTILINE)


def _signature(stub, name):
    if isinstance(stub, ast.ClassDef):
        made = _defined(stub.body).get("__init__")
        return f"class {name}({_arguments(made)})" if made else f"class {name}"
    if any(isinstance(d, ast.Name) and d.id == "property" for d in stub.decorator_list):
        return f"{name}: {ast.unparse(stub.returns)}"
    return f"{name}({_arguments(stub)}) -> {ast.unparse(stub.returns)}"


def _arguments(stub):
    text = ast.unparse(stub.args)
    return re.sub(r"^(self|cls)(, )?", "", text)


def _in_lines(signature, width=92):
    """A line for each parameter where one line is wider than the page."""
    head, opened, rest = signature.partition("(")
    if len(signature) <= width or not opened:
        return signature
    lines, depth = [""], 1
    for at, c in enumerate(rest):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0:
            return "\n".join([head + "(", *(f"    {line.strip()}" for line in lines), rest[at:]])
        lines[-1] += c
        lines += [""] if depth == 1 and c == "," else []
    return signature


def page(module, names, stubs):
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    about = ast.get_docstring(tree)
    lines = [f"# {re.split(r'[:.?](?: |$)', about, maxsplit=1)[0]}", "", about, ""]
    for name, node in _defined(tree.body).items():
        if name not in names:
            continue
        members = _defined(stubs[name].body) if isinstance(stubs[name], ast.ClassDef) else {}
        for whose, text in documented(node).items():
            stub = stubs[name] if whose == name else members.get(whose.partition(".")[2])
            lines += [f"{'##' if whose == name else '###'} {whose}", ""]
            lines += ["```python", _in_lines(_signature(stub, whose)), "```", ""] if stub else []
            lines += [_markdown(text), ""]
    return "\n".join(lines)


def pages():
    """Module -> its page."""
    stubs = _defined(ast.parse((PACKAGE / "__init__.pyi").read_text()).body)
    return {module.lstrip("_"): page(module, names, stubs) for module, names in public_names().items()}
