"""Run the notebooks of examples/ and write their outputs into them: what a reader sees before the
first run, made by the cells as they stand.

    python scripts/generate/notebooks.py            all of them, minutes on two cores
    python scripts/generate/notebooks.py image      one

A cell's output is what it prints and the value of its last expression: as HTML where the value has
one, as an image, and as text. The notebook records a digest of its code, by
which a test knows outputs of another code.
"""

import ast
import base64
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.paths import PROJECT

EXAMPLES = PROJECT / "examples"
MOST_LINES = 40  # of what a cell prints; more are cut in the middle
RECORD = "flowrl_code"  # the notebook's metadata with the digest


def code_digest(cells: Iterable[dict[str, Any]]) -> str:
    """A digest of the code cells."""
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return hashlib.blake2b(json.dumps(code).encode(), digest_size=8).hexdigest()


def run_notebook(path: Path) -> None:
    """Run all code cells in order, in an empty folder, and write their outputs."""
    book = json.loads(path.read_text(encoding="utf-8"))
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate((c for c in book["cells"] if c["cell_type"] == "code"), 1):
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        where, printed, value = f"{path.name}, cell {number}", io.StringIO(), None
        with redirect_stdout(printed):
            exec(compile(ast.Module(body, []), where, "exec"), space)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), where, "eval"), space)
        cell["execution_count"] = number
        cell["outputs"] = [*_stream(printed.getvalue()), *_result(value, number)]
    book["metadata"][RECORD] = code_digest(book["cells"])
    text = json.dumps(book, indent=1, ensure_ascii=False).replace(f"{PROJECT}/", "")
    path.write_text(text.replace(f"{Path.cwd()}/", "") + "\n", encoding="utf-8")


def _stream(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines(keepends=True)
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"({len(lines) - 2 * half} lines more)\n", *lines[-half:]]
    return [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []


def _result(value: Any, number: int) -> list[dict[str, Any]]:
    if value is None:
        return []
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.save(file, "PNG", optimize=True)
        size = f"{value.width}x{value.height}"
        data = {"text/plain": [f"<an image of {size} pixels>"]}
        data["image/png"] = base64.b64encode(file.getvalue()).decode()
    elif callable(page := vars(type(value)).get("_repr_html_")):
        data["text/html"] = page(value).splitlines(keepends=True)
    return [
        {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}
    ]


def main(names: Sequence[str]) -> None:
    for name in names or sorted(path.stem for path in EXAMPLES.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            for part in ("flowrl", "configs"):  # run files name flowrl's own so
                (place / part).symlink_to(PROJECT / part)
            os.chdir(place)
            run_notebook(EXAMPLES / f"{name}.ipynb")
            os.chdir(PROJECT)
        print(f"{name}: written", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
