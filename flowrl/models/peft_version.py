"""Whether the installed transformers takes the installed peft. Imports neither of them.

transformers asks for a least version of peft when adapters are added to one of its models, and not
when it is installed, so that pip can install two that do not work together.
"""

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from flowrl.errors import UserError

_LEAST = re.compile(r"^MIN_PEFT_VERSION = \"([\d.]+)\"", re.MULTILINE)


def check_peft() -> None:
    """UserError, with the fix, for a peft that transformers refuses."""
    if (sentence := peft_misfit()) is not None:
        raise UserError(sentence)


def peft_misfit() -> str | None:
    """A sentence about a peft that is too old for transformers; None if it fits."""
    wanted, installed = _least_version(), version("peft")
    if wanted is None or Version(installed) >= Version(wanted):
        return None
    ours = version("transformers")
    return (
        f"transformers {ours} adds no adapters with peft {installed}, only with {wanted} or newer: "
        f"pip install 'peft>={wanted}', or, if pip finds none, pip install 'transformers<{ours}'"
    )


def _least_version() -> str | None:
    """The least version that transformers names in its source; None if it names none."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "integrations" / "peft.py"
    match = _LEAST.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    return None if match is None else match[1]
