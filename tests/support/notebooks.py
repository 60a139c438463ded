"""Runs the code cells of a notebook in this process, without Jupyter."""

import ast
import json
from pathlib import Path
from typing import Any


def code_cells(path: Path) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def last_output(path: Path) -> Any:
    """Run all code cells in order; returns the value of the last expression of the last cell."""
    space: dict[str, Any] = {"__name__": "__main__"}
    value = None
    for number, cell in enumerate(code_cells(path), 1):
        body = ast.parse(cell).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        where = f"{path.name}, cell {number}"
        exec(compile(ast.Module(body, []), where, "exec"), space)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), space)
    return value
