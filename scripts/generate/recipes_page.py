"""Write docs/recipes.md from the recipes: docstring, the parts with their formulas, settings.

    python scripts/generate/recipes_page.py

`tests/recipes/test_recipes_page.py` fails until the page is what this writes.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flowrl.algorithm import Algorithm
from flowrl.cli.recipe_text import recipe_rows
from flowrl.credit.trackers import NoTracker
from flowrl.credit.values import node_values
from flowrl.recipes import RECIPES
from flowrl.recipes.evidence import SOURCE_KINDS, evidence_of
from flowrl.recipes.meanings import recipe_words
from flowrl.recipes.table import OWN_RECIPES
from samplers.completions import TextPlan

PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "docs" / "recipes.md"
HEAD = """# Recipes

<!-- Written by scripts/generate/recipes_page.py from the code: change the docstrings. -->

All methods with formulas, settings and sources; [choosing.md](choosing.md) says which to take.
`flowrl recipes NAME` prints the same text and settings, `flowrl recipes` and `flowrl recipes --all`
the table below. Defaults are published numbers;
`configs/papers` has whole configurations. The table of a recipe lists what it is made of at its
defaults, in the order in which it is applied; settings at a part's own default are left out. Its
settings follow, each with its type, default and meaning.

In the formulas a step goes from a state x at the noise level s (sigma) to x' at s' (sigma_next), of
length h = s - s'; v is the velocity, noise - x0 for the clean sample x0; q is the step's standard
deviation, A an advantage, r = p_new / p_old the ratio of a row, w a weight, and `role` the policy
that an anchor compares with.

Every recipe takes `plan`, `advantage` (one transform, or a list of them), `likelihood`, `loss` and
`tracker` in place of its own, as NAME, `{name: NAME, ...settings}` or `FILE.py:NAME`; `kernel` and
`solver` too, where they are listed. NAME is a part's class in snake case: `PassAtK` is pass_at_k. A
new part keeps the settings that both have in common; `{...settings}` without a name changes the
recipe's own part; what does not fit is refused. `node_values` in a table has no name of its own: it
always comes first, and the setting `fusion` of recipes of trees chooses how it joins leaves.
`recipe.name` takes a recipe of your own: see [extending.md](extending.md).

The tables say what recipes rest on. *Parts*: plan, advantage, likelihood and loss; the
policy that samples is the recipe's own choice, and has no setting. *Gain here*: in
a held-out score of a small world, with its 95 % interval over seeds, as
[results/methods.md](results/methods.md) measured it, or in a short run of one seed. *On a GPU*: an
iteration on one had the CPU's reward, loss and gradient norm
([figures](results/speed.md#on-a-gpu)). *Contributed* recipes are files of
[flowrl/contrib](../flowrl/contrib) with the parts that only they have. They work like the others.

"""


def page() -> str:
    sections = "".join(section(name) for name in RECIPES)
    return f"{HEAD}{evidence_tables()}{sections}"


def evidence_tables() -> str:
    """All recipes by what they rest on, a table for each."""
    tables = list[str]()
    for kind, about in SOURCE_KINDS.items():
        names = [name for name in RECIPES if evidence_of(RECIPES[name]).sources.kind == kind]
        head = "| recipe | parts | gain here | on a GPU | contributed |\n|---|---|---|---|---|"
        rows = "\n".join(map(evidence_row, names))
        tables.append(f"**{about[0].upper()}{about[1:]}**\n\n{head}\n{rows}\n")
    return "\n".join(tables)


def evidence_row(name: str) -> str:
    found, contributed = evidence_of(RECIPES[name]), name not in OWN_RECIPES
    return (
        f"| [{name}](recipes.md#{name}) | {parts_in_brief(RECIPES[name]())} | {found.learned} "
        f"| {'yes' if found.on_gpu else ''} | {'yes' if contributed else ''} |"
    )


def parts_in_brief(algorithm: Algorithm) -> str:
    """Names of the parts: plan, transforms, likelihood and loss."""
    credit = " + ".join(type(each).__name__ for each in algorithm.advantage.transforms)
    parts = [innermost(algorithm.plan), credit]
    return ", ".join([*parts, *(type(p).__name__ for p in (algorithm.likelihood, algorithm.loss))])


def innermost(plan: Any) -> str:
    """A planner's name, with those of the planners that it wraps."""
    name = type(plan).__name__
    return f"{name} of {innermost(plan.otherwise)}" if "otherwise" in vars(plan) else name


def section(name: str) -> str:
    rows = "".join(
        f"| `{row.name}` | {row.kind} | `{row.default}` | {in_a_cell(row.meaning)} |\n"
        for row in recipe_rows(name)
    )
    words = recipe_words(RECIPES[name])
    settings = f"| setting | type | default | meaning |\n|---|---|---|---|\n{rows}"
    return f"\n## {name}\n\n```text\n{words}\n```\n\n{parts_table(RECIPES[name]())}\n{settings}"


def in_a_cell(text: str) -> str:
    """A plain text as Markdown in a table: its marks are marks, except within backticks."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*_<\[\]#])", r"\\\1", parts[i])
    return "`".join(parts).replace("|", "\\|")


def parts_table(algorithm: Algorithm) -> str:
    rows = "".join(
        f"| {choice} | `{written(part)}` | {formula(part)} | {link(part)} |\n"
        for choice, part in chosen_parts(algorithm)
    )
    return f"| choice | part | formula, or what it does | source |\n|---|---|---|---|\n{rows}"


def chosen_parts(algorithm: Algorithm) -> Iterator[tuple[str, Any]]:
    """(choice, part), a part inside another directly after it."""
    choices: list[tuple[str, Any]] = [("plan", algorithm.plan)]
    if grows_trees(algorithm):
        choices.append(
            ("advantage", functools.partial(node_values, fusion=algorithm.advantage.fusion))
        )
    choices += [("advantage", transform) for transform in algorithm.advantage.transforms]
    choices += [("likelihood", algorithm.likelihood), ("loss", algorithm.loss)]
    choices += [("average", average) for average in algorithm.averages]
    if algorithm.tracker is not NoTracker:
        choices.append(("tracker", algorithm.tracker))
    for choice, part in choices:
        yield choice, part
        yield from inner_parts(choice, part)
    if algorithm.behaviour != "current":
        yield "behaviour", algorithm.behaviour


def grows_trees(algorithm: Algorithm) -> bool:
    """Whether a node may have several leaves, so that credit begins with the nodes' values."""
    return any(
        len(set(plan.columns.nodes)) > 1
        or (isinstance(plan, TextPlan) and plan.forking is not None)
        for plan in algorithm.plans
    )


def inner_parts(choice: str, part: Any) -> Iterator[tuple[str, Any]]:
    """The parts inside a part, each directly before those inside it."""
    if not dataclasses.is_dataclass(part):
        return
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(each) and not isinstance(each, type):
                yield f"{choice}: {field.name.rstrip('s')}", each
                yield from inner_parts(choice, each)


def class_of(part: Any) -> type | Callable[..., Any]:
    return part.func if isinstance(part, functools.partial) else type(part)


def written(part: Any) -> str:
    """A part as one writes it: its settings that differ from its defaults."""
    if isinstance(part, str):
        return part
    if isinstance(part, functools.partial):
        words = [repr(value) for value in part.args]
        words += [f"{name}={value!r}" for name, value in part.keywords.items()]
        return f"{part.func.__name__}({', '.join(words)})"
    words = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value) or value == default(field) or nested(value):
            continue
        words.append(f"{field.name}={value!r}")
    return f"{type(part).__name__}({', '.join(words)})"


def default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def nested(value: Any) -> bool:
    """Whether these are parts, which have rows of their own."""
    return isinstance(value, tuple) and any(dataclasses.is_dataclass(each) for each in value)


def formula(part: Any) -> str:
    """The part's first sentence, and its formula: a `Formula:` line or the indented block."""
    if isinstance(part, str):
        return "the average that samples; the trained policy follows it"
    text = inspect.cleandoc(class_of(part).__doc__ or "")
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[\w`)])\. (?=[A-Z`])", paragraph, maxsplit=1)[0].rstrip(".:")
    marked = re.search(r"^Formula: (.+?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    block = re.search(r"\n\n((?:    .+\n?)+)(?:\n|\Z)", text)
    if marked is not None:
        words = " ".join(marked.group(1).replace("`", "").split())
        return f"`{words}`".replace("|", "\\|")
    if block is not None:
        words = " ".join(block.group(1).replace("`", "").split())
        return f"{sentence}: `{words}`".replace("|", "\\|")
    return sentence.replace("|", "\\|")


def link(part: Any) -> str:
    if isinstance(part, str):
        return ""
    kind = inspect.unwrap(class_of(part))  # tests check shapes through wrappers
    path = Path(inspect.getsourcefile(kind) or "").resolve().relative_to(PROJECT).as_posix()
    return f"[{path}](../{path})"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
