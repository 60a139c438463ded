"""Count the lines of code of methods: a recipe's function and the parts that it alone has.

    python scripts/benchmarks/method_lines.py

Docstrings, comments, blank lines and imports do not count, and neither does what several methods
share: looks on the way, the step of gradient methods, the loading of teachers.
"""

import ast
import io
import tokenize
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
RECIPES, LOSSES = "flowrl/recipes", "flowrl/losses"
FEEDBACK, WAY, THROUGH = (f"{RECIPES}/{n}.py" for n in ("feedback", "on_the_way", "through"))
CREDIT, PATHS = "flowrl/credit/intermediate.py", "flowrl/likelihoods/pathwise.py"
PLACES, TAILS = "samplers/placements.py", "samplers/tails.py"
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}

# method: the file of each part, and its names there; no names: the whole file
METHODS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "flow_dppo": [
        (FEEDBACK, ("flow_dppo",)), (f"{LOSSES}/divergence.py", ("TrustRegion",)),
        (PLACES, ("Scattered",)),
    ],
    "dgpo": [(FEEDBACK, ("dgpo",)), (f"{LOSSES}/preference.py", ("GroupPreference",))],
    "crd": [(FEEDBACK, ("crd",)), (f"{LOSSES}/preference.py", ("CentredReward",))],
    "fdfo": [
        (FEEDBACK, ("fdfo",)), (f"{LOSSES}/divergence.py", ("Quadratic",)),
        ("flowrl/likelihoods/directional.py", ()), ("samplers/kernels.py", ("Churn",)),
    ],
    "flash_grpo": [(FEEDBACK, ("flash_grpo",)), ("flowrl/credit/steps.py", ("EvenGradients",))],
    "e_grpo": [(FEEDBACK, ("e_grpo",)), (PLACES, ("Merged",))],
    "g2rpo": [(FEEDBACK, ("g2rpo",)), (PLACES, ("Granular",))],
    "euphonium": [(FEEDBACK, ("euphonium",)), ("samplers/drift.py", ()), (PLACES, ("Guided",))],
    "dense_grpo": [
        (WAY, ("dense_grpo",)), (CREDIT, ("StepGain",)), ("samplers/table_sde.py", ()),
    ],
    "turning_point": [(WAY, ("turning_point",)), (CREDIT, ("TurningPoint",))],
    "vgpo": [(WAY, ("vgpo",)), (CREDIT, ("Discounted", "AbsoluteValue"))],
    "pro_grpo": [
        (WAY, ("pro_grpo",)), ("samplers/looking.py", ("Thinned",)),
        ("samplers/looks.py", ("Thinning", "extremes")), ("samplers/thinning.py", ()),
    ],
    "potential_tree": [(WAY, ("potential_tree",)), (CREDIT, ("Potential",))],
    "refl": [(THROUGH, ("refl",)), (TAILS, ("OneOfSteps",)), (PATHS, ("Kept",))],
    "draft": [(THROUGH, ("draft",)), (TAILS, ("LastSteps",))],
    "draft_lv": [(THROUGH, ("draft_lv",)), (PATHS, ("Renoised",))],
    "srpo": [(THROUGH, ("srpo",)), (PATHS, ("KnownNoise",))],
    "opd": [(f"{RECIPES}/distillation.py", ()), (f"{LOSSES}/distillation.py", ())],
}  # fmt: skip


def code_lines(source: str, names: tuple[str, ...]) -> int:
    """The lines of code of the definitions with these names, or of all definitions."""
    tree = ast.parse(source)
    filled = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            filled |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            filled -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    kept, found = set[int](), set[str]()
    for node in tree.body:
        named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if not named or (names and node.name not in names):
            continue
        found.add(node.name)
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        kept |= {*range(first, (node.end_lineno or first) + 1)}
    assert not names or found == set(names), f"{set(names) - found} are not there"
    return len(filled & kept)


def main() -> None:
    counts = {
        method: sum(code_lines((PROJECT / file).read_text(), names) for file, names in parts)
        for method, parts in METHODS.items()
    }
    for method, count in counts.items():
        print(f"{method:16}{count:4}")
    print(f"{'mean':16}{sum(counts.values()) / len(counts):6.1f}")


if __name__ == "__main__":
    main()
