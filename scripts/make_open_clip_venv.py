"""Make a second environment: that of the tests, with open_clip and torchvision.

`python scripts/make_open_clip_venv.py --base .venv --venv .venv-open-clip`; `make test-open-clip`
does it. Packages of `--base` are seen from it and stay as they are, so that all other tests run
without torchvision, which transformers and diffusers import wherever it is installed.

PyPI's torchvision is built for CUDA. Beside a CPU build of torch it does not import, since torch
does not know the operators of its library. Here those that torchvision asks for at its import are
declared in the installed copy, so that everything but these operators works (transforms, models,
open_clip). This is for tests: a user installs torchvision's CPU build (docs/installing.md).
"""

import argparse
import hashlib
import sys
import time
import venv
from pathlib import Path

from make_venv import PROJECT, run

MARK = "# declared for the tests of flowrl\n"
DECLARED = (
    MARK
    + """
for _name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=PROJECT / ".venv")
    parser.add_argument("--venv", type=Path, default=PROJECT / ".venv-open-clip")
    given = parser.parse_args()
    base, folder = given.base.absolute(), given.venv.absolute()
    inputs = [PROJECT / "constraints.txt", PROJECT / "pyproject.toml", Path(__file__)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    stamp = folder / "flowrl-stamp"
    if stamp.is_file() and stamp.read_text() == digest + str(base):
        return
    began = time.monotonic()
    venv.create(folder, with_pip=False, clear=True)
    packages, below = site_packages(folder), site_packages(base)
    (packages / "flowrl-base.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    pip = [str(base / "bin" / "python"), "-m", "pip", "--python", str(folder / "bin" / "python")]
    limits = ["-c", str(PROJECT / "constraints.txt")]
    run([*pip, "install", "-q", *limits, "flowrl[rewards]"])
    declare_operators(packages / "torchvision")
    stamp.write_text(digest + str(base))
    print(f"environment with open_clip ready in {time.monotonic() - began:.0f} s", flush=True)


def site_packages(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def declare_operators(torchvision: Path) -> None:
    """Let a CUDA build of torchvision import beside a CPU build of torch; others stay unchanged."""
    version, extension = torchvision / "version.py", torchvision / "extension.py"
    import torch  # only here: the installed build

    text = version.read_text()
    if torch.version.cuda is not None or torch.version.hip is not None or "+cu" not in text:
        return
    version.write_text(text.replace("+cu", "+cpu.without.cu"))
    extension.write_text(f"{extension.read_text()}\n\n{DECLARED}")


if __name__ == "__main__":
    main()
