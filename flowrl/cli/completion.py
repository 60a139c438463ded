"""`flowrl completion SHELL`: a script that completes commands, options and runs.

At each Tab the script calls `flowrl completion words ...`, which answers from the schema, without
importing torch.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from flowrl.cli.command_table import COMMANDS, RECIPE_NAME
from flowrl.cli.help import command_options
from flowrl.cli.schema import read_schema
from flowrl.errors import UserError
from flowrl.paths import own_runs, run_path

BASH = """\
# flowrl's completion for bash; in ~/.bashrc: source <(flowrl completion bash)
_flowrl() {
    local IFS=$'\\n'
    COMPREPLY=($(flowrl completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    case "${COMPREPLY[*]}" in */*) compopt -o filenames ;; esac
}
complete -o default -F _flowrl flowrl
"""

ZSH = """\
#compdef flowrl
# flowrl's completion for zsh; in ~/.zshrc, after compinit: source <(flowrl completion zsh)
_flowrl() {
    local -a found
    found=(${(f)"$(flowrl completion words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( ! $#found )); then _files; return; fi
    compadd -S '' -- ${(M)found:#*/}
    compadd -- ${found:#*/}
}
compdef _flowrl flowrl
"""

FISH = """\
# flowrl's completion for fish; flowrl completion fish > ~/.config/fish/completions/flowrl.fish
function __flowrl_words
    set -l before (commandline -opc)
    flowrl completion words $before[2..-1] (commandline -ct | string collect --allow-empty)
end
complete -c flowrl -f -a '(__flowrl_words 2>/dev/null)'
"""

SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
_MOST = 2**16  # characters of a run's file: its recipe stands at the head
_RUN = re.compile(r"^recipe:\s*(?:\{?\s*name:\s*)?['\"]?(\w+)", re.MULTILINE)


def completion_command(arguments: Sequence[str]) -> int:
    """`completion SHELL`, or `completion words WORD ...`: print possible next words, one per
    line."""
    if arguments and arguments[0] == "words":
        last = arguments[-1] if len(arguments) > 1 else ""
        print("\n".join(word for word in candidates(arguments[1:]) if word.startswith(last)))
    elif len(arguments) == 1 and arguments[0] in SHELLS:
        print(SHELLS[arguments[0]], end="")
    else:
        raise UserError(f"completion: give a shell, one of {', '.join(SHELLS)}")
    return 0


def candidates(words: Sequence[str]) -> Iterator[str]:
    """Candidates for the last word after `flowrl`. Some candidates do not begin with this word."""
    if len(words) < 2:
        yield from (*COMMANDS, "--help", "--version")
        return
    name, *earlier, last = words
    if name not in COMMANDS:
        return
    options = command_options(name)
    before = earlier[-1] if earlier else ""
    option = options.get(before)
    if last.startswith("-"):
        yield from (*options, "--help")
        if f"--{RECIPE_NAME}" in options:
            yield from recipe_options(_recipe_of(earlier))
    elif before == f"--{RECIPE_NAME}" or (name, before) == ("new", "--recipe"):
        yield from read_schema()["recipes"]
    elif before == "--resume":
        yield from run_folders(last)
    elif before in _REWARDS:
        yield from read_schema()["rewards"]
    elif option is not None and not option["flag"]:
        yield from option["choices"] or files(last, "")
    elif name == "launch" and len(earlier) == 1:
        yield from run_files(last)
    elif before.startswith("--recipe.") or (earlier and name not in _SEVERAL):
        return
    else:
        yield from _FIRST.get(name, lambda _: iter(()))(last)


def recipe_options(recipe: str) -> Iterator[str]:
    """`--recipe.steps` and the other settings of a recipe; none for an unknown name."""
    settings = read_schema()["recipes"].get(recipe, {"settings": ()})
    yield from (f"--recipe.{name.replace('_', '-')}" for name, *_ in settings["settings"])


def _recipe_of(words: Sequence[str]) -> str:
    """The recipe named by a command line or by its run file; empty if there is none."""
    option = f"--{RECIPE_NAME}"
    if option in words[:-1]:
        return words[words.index(option) + 1]
    file = run_path(words[0]) if words and not words[0].startswith("-") else None
    if file is None:
        return ""
    with file.open(encoding="utf-8", errors="replace") as text:
        match = _RUN.search(text.read(_MOST))
    return match[1] if match else ""


def run_files(begin: str) -> Iterator[str]:
    """Runs of flowrl by name, and YAML files."""
    yield from (name for name, _ in own_runs())
    yield from files(begin, ".yaml")


def run_folders(begin: str) -> Iterator[str]:
    """Folders of runs, first those in `runs`, and folders on the path to others."""
    folders = list(files(begin, None))
    if not begin or "runs/".startswith(begin):
        folders = [*files("runs/", None), *folders]
    for name in dict.fromkeys(folders):
        yield name.rstrip("/") if (Path(name).expanduser() / "run.yaml").is_file() else name


def files(begin: str, suffix: str | None) -> Iterator[str]:
    """Paths that begin with the word: folders with a trailing slash, and files with a suffix
    (None: no files)."""
    folder = begin[: begin.rfind("/") + 1]
    try:
        entries = sorted(Path(folder or ".").expanduser().iterdir())
    except OSError:
        return  # no folder, or not ours to read: nothing to offer
    for path in entries:
        if path.name.startswith(".") and not begin[len(folder) :].startswith("."):
            continue
        if path.is_dir():
            yield f"{folder}{path.name}/"
        elif suffix is not None and path.name.endswith(suffix):
            yield f"{folder}{path.name}"


_REWARDS = ("--rewards", "--held-out-rewards", "--way-rewards", "--judges")
_SEVERAL = (
    "plan",
    "score",
    "compare",
    "runs",
)  # commands with more than one file, or with options between
_FIRST: dict[str, Callable[[str], Iterator[str]]] = {
    "train": run_files,
    "plan": run_files,
    "calibrate": run_files,
    "prove": run_files,
    "sample": run_folders,
    "evaluate": run_folders,
    "report": run_folders,
    "compare": run_folders,
    "runs": run_folders,
    "launch": lambda _: iter(read_schema()["commands"]["launch"]["words"][0]["choices"]),
    "recipes": lambda _: chain(read_schema()["recipes"], ("parts",), read_schema()["parts"]),
    "rewards": lambda _: iter(read_schema()["rewards"]),
    "serve-reward": lambda _: iter(read_schema()["rewards"]),
    "completion": lambda _: iter(SHELLS),
    "score": lambda begin: files(begin, None),
    "evaluate-rewards": lambda begin: files(begin, ""),
    "new": lambda begin: files(begin, None),
}
