"""The code blocks of README.md and of the pages in docs/."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

from flowrl.paths import PROJECT

PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\w+\.(?:py|yaml))\b")  # a first line that names the reader's file
_COMMAND = re.compile(r"(?:accelerate launch .* -m )?flowrl |(?:accelerate|torchrun|python) ")
SMALL = "--train.iterations 1 --evaluate.every 1 --evaluate.samples 8 --track.images 2"
NOT_HERE = {  # part of a command -> why no test runs it as it stands
    "stabilityai/": "weights of the hub", "Qwen/": "weights of the hub",
    "openai/gsm8k": "data of the hub", "--push-to-hub": "the hub",
    "pickscore": "weights of the hub",
    "train models/flux1_dev": "weights of the hub",
    "doctor --device cuda": "a GPU: tests/cli/test_device_check.py",
    "train models/sd35_medium": "weights of the hub",
    "geneval": "a file of the network", "unigenbench": "its official files and a judge",
    "flowrl serve-reward": "goes on until it is stopped: tests/rewards/test_remote.py",
    "accelerate launch": "tests/processes", "torchrun": "tests/api/test_api_processes.py",
    "sglang": "a server: tests/language/test_vllm.py", "-m venv": "the first step of CI",
    "train run.yaml": "README.md's, in the folder of `flowrl new`: test_own_run",
    "plan run.yaml": "the same", "sample runs/run-0001": "the same", "flowrl new": "the same",
}  # fmt: skip


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name of the reader's file that the block is, from its first line."""
        named = _FILE.match(self.text)
        return named[1] if named else None


def blocks(*languages: str) -> list[Block]:
    """All blocks in these languages; "" is a block without one."""
    return [block for page in PAGES for block in of_page(page) if block.language in languages]


def of_page(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page.name, line, found[2], dedent(found[3]))


def write_files(page: str, folder: Path) -> None:
    """Write the Python files that a page shows, as its reader does."""
    for block in blocks("python"):
        if block.page == page and block.file is not None:
            file = folder / block.file
            before = file.read_text() if file.exists() else ""
            file.write_text(before + block.text)


def commands() -> list[tuple[str, str]]:
    """(page, line of a shell): the commands of all pages, without prompts and comments."""
    found = []
    for block in blocks("bash", ""):
        for line in block.text.replace("\\\n", " ").splitlines():
            if _COMMAND.match(line):
                found.append((block.page, shlex.join(shlex.split(line, comments=True))))
    return found


def smaller(line: str) -> str:
    """The command with fewer iterations and samples, and with the folders that its words mean."""
    model = "FOLDER" if "--model FOLDER" in line else ""
    line = line.replace("--model FOLDER", "--model flowrl/demo/shapes-sd3") if model else line
    line = line.replace(" RUN ", " runs/demo-0001 ").replace("'>'", ">").replace("'~/", "~/")
    if "flowrl train" in line and "--resume" not in line:
        return f"{line} {SMALL}"
    if "flowrl evaluate " in line and "--samples" not in line and "--suite" not in line:
        return f"{line} --samples 8 --per-prompt 2"
    line = re.sub(r"--rounds \d+", "--rounds 2", line).replace("--samples 1600", "--samples 64")
    return f"{line} --count 1" if "--optimise" in line else line
