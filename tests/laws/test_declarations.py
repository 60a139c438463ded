"""What each part says of itself: a declaration that changes shows here.

declarations.json has for each part, as REQUIRED and default values make it, its attributes that are
no settings, such as `by_turn`, `homogeneous`, `roles` and `reads`, and the default values of its
settings, which the recipes of a user's run file take. After one was changed on purpose, write the
table again:

    python -m tests.laws.test_declarations
"""

import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrl.table import Column
from tests.laws.test_ranges import parts

TABLE = Path(__file__).with_name("declarations.json")


def written(value: Any) -> Any:
    """A number, a name, or several of them; None for what is no declaration."""
    if isinstance(value, Column):
        return value.name
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | frozenset):
        entries = [written(each) for each in value]
        if None not in entries:
            return sorted(entries) if isinstance(value, frozenset) else entries
    return None


def said(part: Any) -> Iterator[tuple[str, Any]]:
    """The declarations of a part, by name, and its default values as `name=`."""
    settings = {field.name for field in dataclasses.fields(part)}
    for field in dataclasses.fields(part):
        if field.init and written(field.default) is not None:
            yield f"{field.name}=", written(field.default)
    for name, kind in inspect.getmembers_static(type(part)):
        if name.startswith("_") or name in settings or inspect.isroutine(kind):
            continue
        value = written(getattr(part, name))
        if value is not None:
            yield name, value


def declarations() -> dict[str, dict[str, Any]]:
    found = {kind: dict(said(part)) for kind, part in sorted(parts().items())}
    return {kind: names for kind, names in found.items() if names}


def test_every_part_says_what_the_table_says():
    assert declarations() == json.loads(TABLE.read_text())


if __name__ == "__main__":
    lines = (f"  {json.dumps(kind)}: {json.dumps(each)}" for kind, each in declarations().items())
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
