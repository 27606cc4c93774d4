"""The code of docs/tutorials/02_python.md, as it stands there."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "tutorials" / "02_python.md"


def test_the_code_of_the_page(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {"__name__": "tutorial"})
    assert "with the model cut in two" in capsys.readouterr().out
