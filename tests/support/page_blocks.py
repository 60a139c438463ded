"""The code blocks of README.md and of the pages in docs/."""

import functools
import re
import shlex
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import yaml

from flowrl.paths import PROJECT
from flowrl.settings.file.inherit import merged, read_tree

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
    "flowrl vote": "waits for people: tests/votes", "flowrl fit-reward": "needs votes of people",
    "flowrl launch": "needs a scheduler: tests/launching", "--resume auto": "tests/cli",
    "flowrl drill": "kills a run many times, for minutes: tests/drill",
    "path: taste": "a reward that is fitted to votes of people", "path: my_taste": "the same",
    "export runs/my_run-0001": "the run that such a reward has trained: tests/votes",
}  # fmt: skip
PLAN_REFUSES = {  # part of a command of `flowrl plan` -> what is missing, so that it exits with 1
    "plan papers/flow_grpo_sd35m_ocr": "the paper's prompts: configs/papers/README.md",
    "plan models/sd35_medium": "the paper's prompts, which the page says where to put",
}


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


@functools.cache
def of_page(page: Path) -> tuple[Block, ...]:
    text = page.read_text()
    return tuple(
        Block(page.name, text.count("\n", 0, found.start()) + 1, found[2], dedent(found[3]))
        for found in _FENCE.finditer(text)
    )


def write_files(page: str, folder: Path) -> None:
    """Write the Python files that a page shows, as its reader does."""
    for block in blocks("python"):
        if block.page == page and block.file is not None:
            file = folder / block.file
            before = file.read_text() if file.exists() else ""
            file.write_text(before + block.text)


@functools.cache
def run_files() -> dict[str, str]:
    """Run files that the pages show with a name and a base, by their names."""
    named = [(block.file, block.text) for block in blocks("yaml")]
    return {file: text for file, text in named if file and "base" in yaml.safe_load(text)}


def write_runs(folder: Path) -> None:
    """Write the run files of the pages, as their reader does."""
    for file, text in run_files().items():
        (folder / file).write_text(text)


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
        for setting in re.findall(r"--\S+", SMALL):  # a line may give it itself, but once
            line = re.sub(rf" {re.escape(setting)} \S+", "", line)
        return f"{line} {SMALL}"
    if "flowrl evaluate " in line and "--samples" not in line and "--suite" not in line:
        return f"{line} --samples 8 --per-prompt 2"
    line = re.sub(r"--rounds \d+", "--rounds 2", line).replace("--samples 1600", "--samples 64")
    return f"{line} --count 1" if "--optimise" in line else line


TEXT_PAGES = ("code_rewards.md", "data.md", "language.md", "text_server.md")
IMAGES: dict[str, Any] = {
    "recipe": {"name": "flow_grpo", "steps": 8, "group": 8},
    "model": {"pipeline": "flowrl/demo/shapes-sd3"},
    "prompts": {"train": "prompts.txt", "held_out": "held_out.txt"},
    "rewards": ["brightness"],
}
TEXTS: dict[str, Any] = {
    "recipe": {"name": "text_grpo", "length": 16},
    "model": {"language": "flowrl/demo/sums-lm"},
    "prompts": {"train": "prompts.jsonl", "held_out": "held_out.jsonl"},
    "rewards": ["exact_answer"],
}
SCORE = "\n\ndef score(samples):\n    return [0.0] * len(samples.prompts)\n"


def named_files(folder: Path) -> None:
    """Write the prompt files that the pages' settings name."""
    row = '{"prompt": "a red circle", "task": "text", "chosen": "a", "rejected": "b"}\n'
    for name in ("prompts", "held_out", "mine", "drawbench"):
        (folder / f"{name}.txt").write_text("a red circle\na blue square\n")
    for name in ("prompts", "held_out", "mine", "pairs", "images", "geneval"):
        (folder / f"{name}.jsonl").write_text(row)


def own_files(block: Block, folder: Path) -> None:
    """Write the Python files that the settings of a block name, from the same page."""
    (folder / "my_reward.py").write_text(block_of("own_rewards.md", "def warmth").text)
    if block.page != "own_rewards.md":
        write_files(block.page, folder)
    if block.page == "own_models.md":
        (folder / "mine.py").write_text(block_of(block.page, "class MyFlow").text + SCORE)


def block_of(page: str, opening: str) -> Block:
    """The Python block of a page that has a line with this opening."""
    found = [b for b in blocks("python") if b.page == page and opening in b.text]
    assert len(found) == 1, f"{page}: {opening}"
    return found[0]


def tree_of(block: Block, folder: Path) -> dict[str, Any]:
    """The block's settings over those of a small run; a section that it names counts alone."""
    file = folder / "block.yaml"
    file.write_text(block.text)
    if "base" in yaml.safe_load(block.text):
        return read_tree(file)[0]
    own = yaml.safe_load(block.text)
    small = TEXTS if block.page in TEXT_PAGES else IMAGES
    if "language" in own.get("model", {}):
        makes_images = "image" in own["model"]  # by their tokens
        small = {
            **TEXTS,
            "model": {},
            "rewards": ["brightness" if makes_images else "exact_answer"],
        }
    if "pipeline" in own.get("model", {}) or "own" in own.get("model", {}):
        small = {**small, "model": {}}
    if "given" in own:
        small = {key: value for key, value in small.items() if key != "prompts"}
    return merged({key: value for key, value in small.items() if key != "recipe"}, own) | {
        "recipe": own.get("recipe", small["recipe"])
    }


class Program(NamedTuple):
    """A program that a page's reader types, and what its working folder needs first."""

    name: str
    text: str


_STAND_INS = {  # what needs weights of the hub -> the same class with the demo's weights, and less
    '"stabilityai/stable-diffusion-3.5-medium"': 'flowrl.path("flowrl/demo/shapes-sd3")',
    '"pickscore"': '"brightness"',
    "iterations=30": "iterations=1",
    "lora=16": "lora=2",
    "steps=8, group=12": "steps=2, group=2",
}
NOT_ALONE = {
    "image_tokens.md": "loads weights of the hub",
    "coming_from.md": "wraps a function of the reader's verl project",
    "your_own_taste.md": "waits for votes of people",
}
_IN_ONE = ("api.md",)  # pages whose blocks are one program


def programs() -> list[Program]:
    """The Python blocks of all pages as programs, in an order in which they can run: each alone,
    or a page's together. They need the reader's files (`readers_files`) and, for those that read
    a run, the runs `runs/demo-0001` and `runs/demo_lora-0001`."""
    found: list[Program] = []
    for page in PAGES:
        if page.name in NOT_ALONE:
            continue
        of_this = [block for block in of_page(page) if block.language == "python"]
        if page.name in _IN_ONE:
            text = "\n".join(block.text for block in of_this)
            found.append(Program(page.name, _small(text)))
        else:
            found += [Program(str(block), _small(block.text)) for block in of_this]
    return found


def _small(text: str) -> str:
    for large, small in _STAND_INS.items():
        text = text.replace(large, small)
    return text


def readers_files(folder: Path) -> None:
    """Write the file that README.md's reader has from `flowrl new`, which its program imports."""
    reward = next(b for b in blocks("python") if b.page == "README.md")
    assert "def warmth" in reward.text
    (folder / "my_reward.py").write_text(reward.text)
