"""Which numbers each part takes: a bound that moves, or is no longer refused, shows here.

ranges.json has the numbers among the settings of each part that have a bound: those of PROBES that
the part takes, with its other settings as they are by default; it refuses the others by a sentence.
After a bound was changed on purpose, write the table again:

    python -m tests.laws.test_ranges
"""

import dataclasses
import json
import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from flowrl.credit.choices import AnyPlanner
from flowrl.likelihoods.pathwise import KnownNoise
from flowrl.settings.parts.names import (
    contributed_classes,
    part_classes,
    part_name,
    parts_named,
)
from samplers import steps_of
from tests.laws.test_laws import LEVELS, REQUIRED

TABLE = Path(__file__).with_name("ranges.json")
PROBES: dict[type, tuple[float, ...]] = {
    int: (-1, 0, 1, 2, 3),
    float: (-1.0, 0.0, 0.5, 1.0, 2.0),
}
OWN: dict[str, dict[str, Any]] = {  # parts of parts, and plans: settings without a default
    "feynman_kac": {"at": (1,)},
    "forking": {"top": 2, "branch": 2},
    "high_entropy": {"share": 0.2},
    "gate_share": {"auxiliary": ("reward",)},
    "information": {"column": "answer"},
    "looks": {"at": (1,)},
    "off_policy_mask": {"threshold": 0.5},
    "anchor": {"weight": 0.1},
    "pathwise": {"starts": KnownNoise()},
    "plan": {"steps": steps_of(LEVELS)},
    "prune": {"steps": (1,)},
    "refresh": {"every": 2},
    "shortcuts": {"rule": "lagrange"},
    "text_plan": {"length": 4, "nodes": (2,)},
    "thinning": {"at": (1,), "keep": (4,), "start": 6},
}


def parts() -> dict[str, Any]:
    """All parts by class name: what REQUIRED and default values make. Records are none."""
    made = dict[str, Any]()
    for kind in (*part_classes(), *contributed_classes()):
        settings = {**REQUIRED, **OWN}.get(part_name(kind), {})
        needed = {
            field.name
            for field in dataclasses.fields(kind)
            if field.init
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        }
        if needed <= settings.keys():
            made[kind.__name__] = kind(**settings)
    return made


def number_of(hint: Any) -> type | None:
    """float or int, where a setting is one, or may be."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((kind for kind in (float, int) if kind in kinds), None)


def taken(part: Any, name: str, probes: tuple[float, ...]) -> list[float]:
    """The probes that a setting takes: a planner when it plans, others when they are made."""
    planners, found = parts_named(AnyPlanner).values(), list[float]()
    for probe in probes:
        try:
            changed = dataclasses.replace(part, **{name: probe})
            if type(part) in planners:
                changed(LEVELS, 0, 0)
        except ValueError:  # UserError is one
            continue
        found.append(probe)
    return found


def numbers() -> Iterator[tuple[str, Any, str, type]]:
    """The settings of parts that are numbers: CLASS.SETTING, the part, the setting and its type."""
    for kind, part in sorted(parts().items()):
        hints = get_type_hints(type(part))
        for field in dataclasses.fields(part):
            number = number_of(hints[field.name])
            if field.init and number is not None:
                yield f"{kind}.{field.name}", part, field.name, number


def ranges() -> dict[str, list[float]]:
    """The probes that each setting with a bound takes, by class and setting."""
    found = {name: taken(part, field, PROBES[kind]) for name, part, field, kind in numbers()}
    return {name: probes for name, probes in found.items() if len(probes) < len(PROBES[int])}


def test_every_part_takes_the_numbers_of_the_table():
    assert ranges() == json.loads(TABLE.read_text())


def test_no_part_takes_a_number_that_is_not_finite():
    taking = {
        name: wrong
        for name, part, field, kind in numbers()
        if kind is float and (wrong := taken(part, field, (math.nan, math.inf, -math.inf)))
    }
    assert taking == {}


@pytest.mark.parametrize("name", OWN)
def test_every_part_of_a_part_is_looked_at(name):
    assert name in {part_name(type(part)) for part in parts().values()}


if __name__ == "__main__":
    lines = (f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in ranges().items())
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
