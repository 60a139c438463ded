"""Settings that a docstring describes, each on a line of its own that begins with the name and two
spaces:

    batch  samples per call of the model, at least 1;
           fewer need less memory

Further lines of a description are indented.
"""

import inspect
import re
from collections.abc import Collection

_LINE = re.compile(r"(\w+)  +(\S.*)")


def described_settings(docstring: str | None, names: Collection[str]) -> dict[str, str]:
    """The descriptions of those of `names` that a docstring has, each as one line. A description
    ends at a line that is not indented."""
    descriptions, name = dict[str, str](), ""
    for line in inspect.cleandoc(docstring or "").splitlines():
        begun = _LINE.fullmatch(line)
        if begun is not None and begun[1] in names:
            name = begun[1]
            descriptions[name] = " ".join(begun[2].split())
        elif name and line.startswith(" "):
            descriptions[name] += f" {' '.join(line.split())}"
        else:
            name = ""
    return descriptions


def without_settings(docstring: str | None, names: Collection[str]) -> str:
    """A docstring without the lines that describe settings of these names."""
    lines_kept, in_setting = list[str](), False
    for line in inspect.cleandoc(docstring or "").splitlines():
        begun = _LINE.fullmatch(line)
        in_setting = (begun is not None and begun[1] in names) or (
            in_setting and line.startswith(" ")
        )
        if not in_setting:
            lines_kept.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines_kept)).strip()
