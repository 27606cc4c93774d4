"""Several programs in a few units: together.py OUT PREFIX UNITS a.cpp b.cpp ...

Each source is a whole program. Its headers stand first, its code in a namespace of its own, and OUT/main.cpp calls the main() of the name by which the
program was started: a link PREFIXa to the one executable. Every source that includes torch/torch.h costs the compiler 10 s for
libtorch's templates, whatever is in it.
"""

import pathlib
import re
import sys


def inside(source, name):
    """The headers of a program, and its code in a namespace, at the lines where it was."""
    headers, code = [], []
    for line in source.read_text().splitlines():
        if re.match(r"\s*#\s*include\b", line):
            headers.append(line)
            line = ""
        elif re.match(r"\s*#\s*(if|define)", line):
            sys.exit(f"{source}: '{line.strip()}' would hold for the programs beside it: leave this one out of tessera_programs()")
        code.append(line)
    starts = [at for at, line in enumerate(code) if line.startswith("int main(")]
    end = max(at for at, line in enumerate(code) if line.strip())
    if len(starts) != 1 or code[end] != "}":
        sys.exit(f"{source}: a program has one main(), at its end: put it there, or leave it out of tessera_programs()")
    code[end] = "return 0; }"  # only the real main() may end without
    body = "\n".join(code)
    return headers, f'namespace program_{name} {{\n#line 1 "{source}"\n{body}\n}}\n'


def main():
    out, prefix, units = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    sources = {prefix + pathlib.Path(path).stem: pathlib.Path(path) for path in sys.argv[4:]}
    out.mkdir(parents=True, exist_ok=True)
    for unit in range(units):
        headers, bodies = [], []
        for name, source in list(sources.items())[unit::units]:
            needs, body = inside(source, name)
            headers += [header for header in needs if header not in headers]
            bodies.append(body)
        (out / f"unit_{unit}.cpp").write_text("\n".join(headers) + "\n" + "".join(bodies))
    declared, known = "", ""
    for name, source in sources.items():
        arguments = re.search(r"^int main\((.*)\)", source.read_text(), re.MULTILINE).group(1)
        declared += f"namespace program_{name} {{ int main({arguments}); }}\n"
        call = f"program_{name}::main({'count, values' if arguments else ''})"
        known += f'  if (name == "{name}") return {call};\n'
    (out / "main.cpp").write_text(
        f"#include <cstdio>\n#include <string_view>\n{declared}int main(int count, char** values) {{\n"
        f"  std::string_view name(values[0]);\n  name.remove_prefix(name.rfind('/') + 1);\n{known}"
        '  std::fprintf(stderr, "%s: no program has this name\\n", values[0]);\n  return 2;\n}\n'
    )


main()
