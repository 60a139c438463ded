"""`flowrl doctor RUN`: what a run's folder asks for, right by right, and whether it is granted."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from flowrl.bounded_files import bounded_bytes
from flowrl.errors import UserError
from flowrl.settings.file.strict_yaml import MOST_FILE
from flowrl.settings.read import rights_of
from flowrl.settings.trust import Need
from rewards.rights import MEANINGS, Right


def print_rights(folder: Path) -> int:
    """Print the rights of a run's folder, with the lines of run.yaml that ask for them. Imports
    nothing that it names. Exit code 1 if a right that is asked for is not granted."""
    needs, lacking = rights_of(folder)
    lines = _Lines.of(folder / "run.yaml")
    for right in Right:
        of_right = [need for need in needs if need.right == right]
        print(f"{right}: to {MEANINGS[right]}" + ("" if of_right else ": not asked for"))
        for need in of_right:
            line = lines.find(need)
            at = "its defaults" if line is None else f"line {line}"
            state = "not granted" if need in lacking else "granted"
            print(f"  {state}: {need.at}: {need.value!r:.200} ({need.what}), {at}")
    if lacking:
        rights = ",".join(right for right in Right if any(n.right == right for n in lacking))
        print(f"to grant what is missing, add --trust={rights} to the command that needs it")
    return 1 if lacking else 0


class _Lines:
    """Lines of a YAML file by the texts in them."""

    def __init__(self, texts: dict[str, list[tuple[str, int]]]) -> None:
        self.texts = texts

    @classmethod
    def of(cls, file: Path) -> "_Lines":
        try:
            text = bounded_bytes(file, MOST_FILE).decode("utf-8-sig")
            root = yaml.compose(text, yaml.SafeLoader)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"{file} cannot be read: {error}") from error
        lines: dict[str, list[tuple[str, int]]] = {}
        for section, text, line in _scalars(root, ""):
            lines.setdefault(text, []).append((section, line))
        return cls(lines)

    def find(self, need: Need) -> int | None:
        """The line with the value, in the section that asks for it if there are several."""
        places = self.texts.get(need.value, [])
        within = [line for section, line in places if need.at.startswith(section)]
        return next(iter(within or [line for _, line in places]), None)


def _scalars(node: yaml.Node | None, section: str) -> Iterator[tuple[str, str, int]]:
    """(section, text, line) of all keys and values."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(key, section)
            yield from _scalars(value, section or str(key.value))
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(item, section)
    elif isinstance(node, yaml.ScalarNode):
        yield section, str(node.value), node.start_mark.line + 1
