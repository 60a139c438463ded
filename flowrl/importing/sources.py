"""The input of an import: the library, its release, and the leaves of a file or a command."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from flowrl.errors import UserError
from flowrl.importing.leaves import MADE_ROWS, Leaves, Secret, Unresolved, flattened, guarded
from flowrl.importing.peer import Peer
from flowrl.importing.peers.flow_factory import FLOW_FACTORY
from flowrl.importing.peers.flow_grpo import FLOW_GRPO
from flowrl.importing.peers.simple_tuner import SIMPLE_TUNER
from flowrl.importing.peers.trl import TRAINER, TRL
from flowrl.importing.peers.verl import VERL
from flowrl.importing.readers.python_config import (
    config_functions,
    evaluated_config,
    source_text,
)
from flowrl.importing.readers.shell import OPEN, Script, read_shell, shown_word
from flowrl.importing.readers.trl_script import TrlScript
from flowrl.importing.readers.words import options, overrides, scalar
from flowrl.settings.file.strict_yaml import parse_yaml, read_yaml

IMPORTERS: Mapping[str, Peer] = {
    peer.name.lower().replace("-", "_"): peer
    for peer in (FLOW_GRPO, FLOW_FACTORY, TRL, VERL, SIMPLE_TUNER)
}
_SPELLINGS = {"simple_tuner": "simpletuner", "flowfactory": "flow_factory"}
_TRL_OTHERS = (
    "dpo", "kto", "sft", "reward", "gkd", "orpo", "cpo", "online_dpo", "nash_md", "xpo", "ppo",
    "vllm-serve", "prm",
)  # fmt: skip
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "uv", "nohup", "exec", "srun", "env", "poetry")
_LISTS = (
    "reward_funcs",
    "reward_weights",
    "lora_target_modules",
    "lora_modules_to_save",
    "report_to",
    "lora_target_parameters",
)


@dataclass
class PeerInput:
    """The input as leaves, with notes on how it was read.

    peer     the library
    version  the release whose defaults are taken
    leaves   names and values
    notes    sentences about the choice of library, release and command
    title    the input in a few words, without the arguments of a command
    """

    peer: Peer
    version: str
    leaves: Leaves
    notes: list[str] = field(default_factory=list)
    title: str = ""


def read_source(input_text: str, of: str | None) -> PeerInput:
    """Read a file, FILE.py:FUNCTION, or a command line. UserError, in one sentence, if nothing is
    known of it."""
    named, version = _named(of)
    leaves, peer_found, notes = _leaves(input_text, named)
    peer = named or peer_found or _recognised(leaves)
    if peer is None:
        raise UserError(
            f"{_short(input_text)}: no library is recognised: add --of, one of "
            f"{', '.join(p.name for p in IMPORTERS.values())}"
        )
    if peer_found is not None and peer is not peer_found:
        raise UserError(f"--of: {peer.name}, but {_short(input_text)} is of {peer_found.name}")
    release = _release(peer, version, notes)
    if named is None:
        notes.insert(0, f"read as {peer.name}'s")
    title = f"a command of {peer.name}" if re.search(r"\s", input_text.strip()) else input_text
    # a reader may have kept a piece of code or of a command as a leaf
    leaves = {name: guarded(name, value) for name, value in leaves.items()}
    return PeerInput(peer, release, leaves, notes, title)


def _named(of: str | None) -> tuple[Peer | None, str | None]:
    if of is None:
        return None, None
    name, _, version = of.partition("==")
    key = name.strip().lower().replace("-", "_")
    key = _SPELLINGS.get(key, key)
    if key not in IMPORTERS:
        raise UserError(
            f"--of: {name!r} is not one of {', '.join(p.name for p in IMPORTERS.values())}, "
            "such as trl==1.16.0"
        )
    return IMPORTERS[key], version.strip() or None


def _release(peer: Peer, version: str | None, notes: list[str]) -> str:
    """The known release that stands for a version: the newest that is not newer."""
    versions: Sequence[str] = peer.versions
    if version is None:
        notes.append(f"defaults of {peer.name} {versions[-1]}, the newest that flowrl knows")
        return versions[-1]
    if version in versions:
        return version
    if not re.fullmatch(r"\d+(\.\d+)*([a-z.+-]\w*)*", version):
        raise UserError(f"--of: {version!r} is not a version, such as {versions[-1]}")
    older = [release for release in versions if _numbers(release) <= _numbers(version)]
    release = older[-1] if older else versions[0]
    notes.append(
        f"defaults of {peer.name} {release}, which stands for "
        f"{version}: flowrl knows {', '.join(versions)}"
    )
    return release


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _leaves(input_text: str, named: Peer | None) -> tuple[Leaves, Peer | None, list[str]]:
    path, _, function = input_text.partition(".py:")
    if function and re.fullmatch(r"\w+", function):
        return _configuration(Path(f"{path}.py"), function)
    file = (
        Path(input_text).expanduser()
        if len(input_text) < 4096 and "\n" not in input_text
        else Path()
    )
    try:
        is_here = file.is_file() and input_text.strip() not in ("", ".")
    except OSError:
        is_here = False
    if not is_here:
        if re.search(r"\s", input_text.strip()):
            return _command(read_shell(input_text, "command"), Path.cwd())
        raise UserError(f"{_short(input_text)}: no such file; a command line goes into quotes")
    if file.suffix == ".py":
        if named is FLOW_GRPO or (named is None and "ConfigDict" in source_text(file)):
            names = config_functions(file)
            if not names:
                raise UserError(f"{file}: no configuration: it has no function without arguments")
            raise UserError(
                f"{file}: name one of its functions, such as {file}:{names[0]}; it has "
                f"{', '.join(names)}"
            )
        return _script(file, {}, [])
    if file.suffix in (".yaml", ".yml", ".json"):
        tree = read_yaml(file)
        if not isinstance(tree, Mapping):
            raise UserError(f"{file}: expected settings by name, not {type(tree).__name__}")
        leaves = (
            _plain_names(flattened(tree))
            if file.suffix == ".json" or "model_family" in tree
            else flattened(tree)
        )
        return _with_parts(leaves, file.parent), None, []
    return _command(read_shell(source_text(file), str(file)), file.parent, f"{file}: ")


def _plain_names(leaves: Leaves) -> Leaves:
    """Names without the dashes that SimpleTuner's config.json may have, and texts as the words of
    a command, which is what SimpleTuner makes of the file: "true" is true."""
    return {
        name.removeprefix("--").replace("-", "_"): (
            scalar(value)
            if isinstance(value, str) and not value.lstrip().startswith("{")
            else value
        )
        for name, value in leaves.items()
    }


def _with_parts(leaves: Leaves, folder: Path) -> Leaves:
    """With the files that a SimpleTuner configuration names, if they are here."""
    for name, prefix in (
        ("data_backend_config", "data"),
        ("distillation_config", "distillation_config"),
    ):
        value = leaves.get(name)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            del leaves[name]
            leaves |= flattened(parse_yaml(value, name), prefix)
        elif isinstance(value, str) and (path := _beside(value, folder)) is not None:
            read = flattened(read_yaml(path), prefix)
            leaves |= {k: v for k, v in read.items() if k not in leaves}
    return leaves


def _beside(name: str, folder: Path) -> Path | None:
    """A file that a script names: from its folder or one above it."""
    for base in (folder, *folder.resolve().parents):
        try:
            if (base / name).is_file():
                return base / name
        except OSError:
            return None
    return None


def _not_here(name: str) -> UserError:
    """The error of a command whose file is not here: an import of the file alone would lose the
    options of the command."""
    return UserError(
        f"{name}: the file is not here: write the path that it has on this machine into the command"
    )


def _configuration(file: Path, function: str) -> tuple[Leaves, Peer | None, list[str]]:
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    fields, failed = evaluated_config(file, function)
    notes = [f"{file.name}: an assertion of the file fails, {assertion}" for assertion in failed]
    return flattened(fields), FLOW_GRPO, notes


def _command(
    script: Script, folder: Path, place: str = ""
) -> tuple[Leaves, Peer | None, list[str]]:
    """The first command of a script that one of the libraries runs."""
    guarded_by = ""
    candidates = _programs(script.commands, folder)
    if not candidates:
        candidates = _programs(script.conditional, folder)
        guarded_by = "it is read as if a condition held that the script does not decide"
    if not candidates:
        raise UserError(place + _no_program(script))
    words, (kind, at) = candidates[0]
    notes = [guarded_by] if guarded_by else []
    if len(candidates) > 1:
        notes.append(f"{len(candidates)} commands train; the first one is read")
    launcher, _ = options([w for w in words[:at] if w not in ("launch", "run")])
    more: Leaves = {
        f"(launcher) {k}": v
        for k, v in launcher.items()
        if k not in ("python",) and not k.startswith("env")
    }
    secrets: Leaves = {
        f"(environment) {name}": Secret(name)
        for name in script.assigned
        if isinstance(guarded(name, script.assigned[name]), Secret)
    }
    leaves, peer, said = _of_program(kind, words, at, folder)
    return {**leaves, **more, **secrets}, peer, [*notes, *said]


def _programs(
    commands: Sequence[Sequence[str]], folder: Path
) -> list[tuple[Sequence[str], tuple[str, int]]]:
    """The commands that one of the libraries runs; those that may be its, if none surely is."""
    programs = [
        (words, program) for words in commands if (program := _program(words, folder)) is not None
    ]
    return [program for program in programs if program[1][0] != "script"] or programs


def _no_program(script: Script) -> str:
    """Why none of a script's commands is read."""
    for words in [*script.commands, *script.conditional]:
        for before, word in pairwise(words):
            named = word.removeprefix("trl.scripts.") if before == "-m" else word
            if (before.endswith("trl") or named != word) and named in _TRL_OTHERS:
                return (
                    f"trl {named} is no program that flowrl reads, which are trl grpo and trl rloo"
                    + ("; pairs are given data here: docs/given_data.md" if named == "dpo" else "")
                )
    return "the command runs no program of flow_grpo, Flow-Factory, TRL, VERL or SimpleTuner"


def _program(words: Sequence[str], folder: Path) -> tuple[str, int] | None:
    """The kind of program, and the place of its name among the words. A `script` may be TRL's."""
    for i, word in enumerate(words):
        if OPEN in word:
            continue
        plain = word
        if plain == "verl.trainer.main_ppo" or plain.endswith("main_ppo.py"):
            return "verl", i
        if plain in ("ff-train", "flow_factory.cli", "flow_factory.train"):
            return "flow_factory", i
        if plain in ("grpo", "rloo") and i and words[i - 1].endswith("trl"):
            return plain, i
        if plain in ("trl.scripts.grpo", "trl.scripts.rloo"):
            return plain.rpartition(".")[2], i
        if plain == "simpletuner" and words[i + 1 : i + 2] == ["train"]:
            return "simple_tuner", i + 1
        if plain.endswith(".py") and not plain.startswith("-"):
            rest = " ".join(words[i:])
            if re.search(r"\.py:\w+", rest):
                return "flow_grpo", i
            if "--distillation_method" in rest:
                return "simple_tuner", i
            if any(re.search(rf"--{name}\b", rest) for name in (*TRL.places, "model_name_or_path")):
                return "trl", i
            return ("script", i) if _beside(plain, folder) is not None else None
    return None


def _of_program(
    kind: str, words: Sequence[str], at: int, folder: Path
) -> tuple[Leaves, Peer | None, list[str]]:
    rest = list(words[at + 1 :])
    if kind == "verl":
        return _hydra(rest, folder)
    if kind == "flow_factory":
        files = [w for w in rest if w.endswith((".yaml", ".yml"))]
        path = _beside(files[0], folder) if files else None
        if not files:
            raise UserError("ff-train: the command names no file: give one, ff-train FILE.yaml")
        if path is None:
            raise _not_here(files[0])
        more, words_left = options([w for w in rest if w != files[0]])
        return {**flattened(read_yaml(path)), **more}, FLOW_FACTORY, _nameless(words_left)
    if kind == "flow_grpo":
        return _flow_grpo_command(rest, folder)
    if kind == "simple_tuner":
        leaves, words_left = options(rest)
        return _with_parts(leaves, folder), SIMPLE_TUNER, _nameless(words_left)
    if kind in ("grpo", "rloo"):
        leaves, notes = _trl_arguments(rest, folder)
        return {TRAINER: kind.upper(), **leaves}, TRL, notes
    script = _beside(words[at], folder)
    if script is not None:
        return _script(script, *_trl_arguments(rest, folder))
    leaves, notes = _trl_arguments(rest, folder)
    notes.append(f"{words[at]}: the script is not here, so what it sets itself is unknown")
    rloo = "rloo" in words[at].lower()
    return {TRAINER: "RLOO" if rloo else "GRPO", **leaves}, TRL, notes


def _nameless(words: Sequence[str]) -> list[str]:
    """Notes on the words of a command that name no leaf, so that no word is lost in silence."""
    return [f"{guarded('', word)!r}: a word without a name" for word in words if word]


def _flow_grpo_command(words: Sequence[str], folder: Path) -> tuple[Leaves, Peer | None, list[str]]:
    """The configuration that `--config FILE.py:FUNCTION` names, under `--config.NAME VALUE`, the
    options with which ml_collections replaces single values."""
    match = next(m for word in words if (m := re.search(r"([^\s=]+\.py):(\w+)", word)))
    path = _beside(match.group(1), folder)
    if path is None:
        raise _not_here(match.group(1))
    leaves, peer, notes = _configuration(path, match.group(2))
    arguments, rest = options(words)
    replaced = {
        name.removeprefix("config."): value
        for name, value in arguments.items()
        if str(value) != match.group(0)
    }
    left = [word for word in rest if word != match.group(0)]
    return {**leaves, **replaced}, peer, [*notes, *_nameless(left)]


def _trl_arguments(words: Sequence[str], folder: Path) -> tuple[Leaves, list[str]]:
    """TRL's arguments, over those of the file that `--config` names."""
    leaves, rest = options(words, _LISTS)
    notes = _nameless(rest)
    config = leaves.pop("config", None)
    if config is None:
        return leaves, notes
    path = _beside(str(config), folder)
    if path is None:
        leaves["config"] = Unresolved(f"{config}, which is not here")
        return leaves, notes
    return {**flattened(read_yaml(path)), **leaves}, notes


def _script(file: Path, leaves: Leaves, notes: list[str]) -> tuple[Leaves, Peer | None, list[str]]:
    """A script of TRL: its own values, under the arguments of the command or of its docstring."""
    script = TrlScript(file)
    if script.trainer not in ("GRPO", "RLOO"):
        which = "it makes no trainer" if script.trainer is None else f"its is {script.trainer}"
        raise UserError(f"{file}: of TRL, GRPOTrainer and RLOOTrainer are read, and {which}")
    if not leaves and script.command:
        words = read_shell(script.command, str(file)).commands
        at = (
            next(
                (i for i, w in enumerate(words[0]) if w.endswith(".py") or w in ("grpo", "rloo")),
                None,
            )
            if words
            else None
        )
        if at is not None:
            leaves, more = _trl_arguments(words[0][at + 1 :], file.parent)
            notes = [*notes, *more, "the command in the script's docstring is read"]
    arguments = {name: leaves[name] for name in leaves if name in script.arguments}
    if script.arguments:
        notes = [*notes, f"{file.name}: its own arguments have their defaults, unless given"]
        leaves = {
            **{name: value for name, value in leaves.items() if name not in arguments},
            **_unread(file, arguments),
        }
        script = TrlScript(file, arguments)
    values = {TRAINER: script.trainer, **script.leaves, **leaves}
    if "dataset_name" in values:
        values.pop(MADE_ROWS, None)
    return values, TRL, notes


def _unread(file: Path, arguments: Leaves) -> Leaves:
    """The script's own arguments that a command gives, and no value that is read depends on."""
    read = TrlScript(file, arguments).leaves
    return {
        f"args.{name}": arguments[name]
        for name in arguments
        if TrlScript(file, {**arguments, name: Unresolved(f"--{name}")}).leaves == read
    }


def _hydra(words: Sequence[str], folder: Path) -> tuple[Leaves, Peer | None, list[str]]:
    leaves, rest = overrides(words)
    named, words_left = options(rest)
    notes = _nameless(words_left)
    config, at = named.pop("config_name", None), named.pop("config_path", "")
    leaves |= named
    if config is not None:
        place = shown_word(str(at))
        path = next(
            (
                p
                for name in (f"{place}/{config}.yaml", f"config/{config}.yaml", f"{config}.yaml")
                if (p := _beside(name.lstrip("/"), folder)) is not None
            ),
            None,
        )
        if path is not None:
            tree = read_yaml(path)
            read = flattened({k: v for k, v in tree.items() if k not in ("defaults", "hydra")})
            leaves = {**read, **leaves}
            notes.append(f"{path.name} is read below the overrides")
        elif config not in (
            "ppo_trainer",
            "ppo_megatron_trainer",
            "ppo_trainer.yaml",
            "ppo_megatron_trainer.yaml",
        ):
            leaves["(config_name)"] = Unresolved(f"{config}, which is not here")
    return leaves, VERL, notes


def _recognised(leaves: Leaves) -> Peer | None:
    scores = {peer: sum(place in leaves for place in peer.places) for peer in IMPORTERS.values()}
    if any(name.startswith(("actor_rollout_ref.", "algorithm.adv")) for name in leaves):
        return VERL
    best = max(scores, key=lambda peer: scores[peer])
    return best if scores[best] else None
