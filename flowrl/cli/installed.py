"""Whether the installed torchvision fits the installed torch. Imports neither of them.

PyPI's torchvision for Linux is built for CUDA. With a CPU build of torch it cannot be imported, and
neither can transformers, peft and diffusers, which import it whenever it is installed. It comes
with `flowrl[rewards]`, since open_clip requires it.
"""

import re
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.errors import UserError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def check_torchvision() -> None:
    """UserError, with the fix, for a torchvision that prevents importing transformers."""
    if (sentence := torchvision_misfit()) is not None:
        raise UserError(sentence)


def torchvision_misfit() -> str | None:
    """A sentence about a torchvision that does not match torch; None if it matches or is absent."""
    torch, vision = _version_file("torch"), _version_file("torchvision")
    if torch is None or vision is None:
        return None
    ours, theirs = _value(torch, "__version__"), _value(vision, "__version__")
    plain = theirs.partition("+")[0]
    on_cpu = not _value(torch, "cuda") and not _value(torch, "hip")
    if on_cpu and re.search(r"\+(cu|rocm)\d", theirs):
        reason = f"torchvision {theirs} is built for a GPU, but torch {ours} for the CPU"
        way = (
            f"pip install --force-reinstall --no-deps torchvision=={plain} --index-url {CPU_INDEX}"
        )
    elif (wanted := _wanted_torch()) is not None and not wanted.specifier.contains(
        ours.partition("+")[0], prereleases=True
    ):
        reason = (
            f"torchvision {theirs} needs torch {wanted.specifier}, but torch {ours} is installed"
        )
        way = "pip install the torchvision for that torch, from the index that torch came from"
    else:
        return None
    return (
        f"{reason}: with both, transformers and diffusers cannot be imported. Either {way}; or, if "
        "you do not use open_clip's rewards, pip uninstall torchvision (docs/installing.md)"
    )


def _version_file(package: str) -> str | None:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "version.py"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _value(text: str, name: str) -> str:
    """The string that a version file assigns to a name; empty for None."""
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def _wanted_torch() -> "Requirement | None":
    from packaging.requirements import Requirement

    try:
        lines = requires("torchvision") or []
    except PackageNotFoundError:
        return None
    return next((r for r in map(Requirement, lines) if r.name == "torch"), None)
