"""Training from Python: `flowrl.train` and `flowrl.recipe`."""

import copy
import inspect
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flowrl.api.models import model_settings
from flowrl.api.parts import GivenPrompts, GivenReward, GivenRewards, prompt_settings
from flowrl.api.trained import TrainedRun
from flowrl.api.untouched import untouched
from flowrl.errors import UserError
from flowrl.paths import find
from flowrl.run import start as starting
from flowrl.run.watch.start_check import check_start
from flowrl.session.live import Callback, Live
from flowrl.settings import RewardSpec, RunSettings
from flowrl.settings.file.inherit import read_tree
from flowrl.settings.read import OpenedFolder, dump, open_folder, run_from
from flowrl.settings.trust import Trust

PLACE = "flowrl.train"
REWARD_PLACES = ("rewards", "held_out_rewards")


def recipe(name: str, **settings: Any) -> dict[str, Any]:
    """A recipe with its settings, for `train(recipe=...)`. `flowrl recipes NAME` lists the
    settings.

    UserError, with a suggestion, for an unknown name, setting or value.
    """
    given = {"name": name, **settings}
    rest: dict[str, Any] = {"model": {"pipeline": "-"}, "prompts": {"train": "-"}}
    rest["rewards"] = "length"
    routes = settings.get("modalities")
    if isinstance(routes, Mapping):  # its rewards are those of the run that it will be part of
        named = {str(name): None for names in routes.values() for name in names}
        rest["rewards"] = [{"name": "length", "label": name} for name in named]
    run_from({"recipe": given, **rest}, "flowrl.recipe")
    return given


@dataclass(frozen=True)
class Given:
    """Arguments of `train` that become settings; None and empty ones count as not given."""

    model: Any
    tokenizer: Any
    rewards: Sequence[GivenReward]
    held_out_rewards: Sequence[GivenReward]
    prompts: GivenPrompts | None
    held_out: GivenPrompts | None
    recipe: str | Mapping[str, Any] | None
    lora: int | Mapping[str, Any] | bool | None
    train: Mapping[str, Any]
    settings: Mapping[str, Any] | str | Path | None
    samples: Mapping[str, Any] | None = None

    def start(self, files: Path) -> tuple[RunSettings, dict[str, Any]]:
        """Settings of a new run, and rewards passed as objects. Writes into `files`."""
        tree = _tree(self.settings)
        if self.recipe is not None:
            tree["recipe"] = self.recipe
        if "recipe" not in tree:
            raise UserError(f"{PLACE}: pass a recipe, such as recipe=flowrl.recipe('nft', steps=8)")
        if self.model is not None:
            named = model_settings(self.model, self.tokenizer, tree["recipe"], files)
            chosen = _section(tree, "model")
            for key in {"pipeline", "language", "own", "weights"} & set(chosen):
                del chosen[key]
            tree["model"] = named | chosen
        if self.samples is not None:
            if not isinstance(self.samples, Mapping):
                kind = type(self.samples).__name__
                raise UserError(
                    f"{PLACE}: given must be a mapping such as {{'file': ...}}, not {kind}"
                )
            tree["given"] = dict(self.samples)
        self._lay_over(tree)
        column = _section(tree, "prompts").get("column", "prompt")
        for place, given in (("train", self.prompts), ("held_out", self.held_out)):
            if given is not None:
                tree["prompts"][place] = prompt_settings(given, files, place, column)
        objects = dict[str, Any]()
        for place in REWARD_PLACES:
            if given := getattr(self, place):
                read = GivenRewards.of(given, place)
                tree[place] = list(read.specs)
                objects = read.joined(objects, place)
        return run_from(tree, PLACE), objects

    def _lay_over(self, tree: dict[str, Any]) -> None:
        if self.lora is not None:
            _section(tree, "model")["lora"] = self.lora
        _section(tree, "train").update(self.train)

    def resume(self, folder: Path, trust: Trust) -> tuple[OpenedFolder, dict[str, Any]]:
        """The folder of a resumed run with its settings, and rewards passed as objects."""
        for name in ("model", "tokenizer", "prompts", "held_out", "recipe", "lora", "samples"):
            if getattr(self, name) is not None:
                name = "given" if name == "samples" else name
                raise UserError(
                    f"{PLACE}: a resumed run already has its {name}: leave {name} out, or start "
                    "a new run"
                )
        opened = open_folder(folder, trust)
        tree = dump(opened.run)
        _merge(tree, _tree(self.settings))
        self._lay_over(tree)
        objects = dict[str, Any]()
        for place in REWARD_PLACES:
            read = GivenRewards.of(getattr(self, place), place)
            objects = read.joined(objects, place)
            for spec in read.specs:
                _replace(tree, spec, folder)
        with opened.limited():
            run = run_from(tree, PLACE)
        return opened.changed(run), objects


def _replace(tree: dict[str, Any], spec: dict[str, Any], folder: Path) -> None:
    """Replace the rewards with this reward's label. UserError if the run has none with it."""
    label = RewardSpec.model_validate(spec).label
    known = [each["label"] for place in REWARD_PLACES for each in tree[place]]
    if label not in known:
        raise UserError(
            f"{PLACE}: {folder} has no reward {label!r}; it has {', '.join(known)}. Change its "
            "rewards in run.yaml, or with settings={'rewards': [...]}"
        )
    changed = {key: spec[key] for key in ("name", "weight") if key in spec}
    for place in REWARD_PLACES:
        tree[place] = [e | changed if e["label"] == label else e for e in tree[place]]


def _tree(settings: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Settings as a tree: a copy of the given mapping, or from a run file."""
    if isinstance(settings, str | Path):
        tree, _ = read_tree(find(str(settings)))
        settings = tree if isinstance(tree, Mapping) else {}
    if settings is not None and not isinstance(settings, Mapping):
        raise UserError(
            f"{PLACE}: settings must be a mapping or a run's file, not {type(settings).__name__}"
        )
    return copy.deepcopy(dict(settings or {}))


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of the tree, created if missing."""
    value = tree.setdefault(name, {})
    if not isinstance(value, dict):
        raise UserError(f"{PLACE}: settings: {name} must be a mapping, not {type(value).__name__}")
    return value


def _merge(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), dict):
            _merge(tree[name], value)
        else:
            tree[name] = value


def train(  # noqa: PLR0913 one call has all of a run
    model: Any = None,
    *,
    rewards: Sequence[GivenReward] = (),
    prompts: GivenPrompts | None = None,
    held_out: GivenPrompts | None = None,
    held_out_rewards: Sequence[GivenReward] = (),
    recipe: str | Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    lora: int | Mapping[str, Any] | bool | None = None,
    iterations: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    tokenizer: Any = None,
    settings: Mapping[str, Any] | str | Path | None = None,
    callbacks: Sequence[Callback] | Callback = (),
    folder: str | Path | None = None,
    resume: str | Path | None = None,
    trust: Trust = False,
) -> TrainedRun:
    """Train a model with rewards, or resume a run. Returns the finished run.

    model             a diffusers pipeline or a transformers language model, its folder, or a hub
                      name; or your own model (docs/own_models.md): its class, "FILE.py:NAME",
                      {"own": ..., "weights": FILE}, or a module of a class without arguments. A
                      live model is read and never changed: a copy is trained
    rewards           names, {"name": ..., "weight": ..., settings}, or callables: a function of
                      (samples), (images, prompts, metadata) or (prompts, completions), or a loaded
                      reward; their weighted sum is maximized
    prompts           a list of texts or rows, a datasets.Dataset, a file, a hub name, or
                      {"source": ...} with the settings of a data set
    held_out          prompts of evaluations, in the same forms; none: no evaluations
    held_out_rewards  rewards of evaluations; none: the training rewards
    given             samples to train on, {"file": ..., "kind": "pairs", ...}: if all samples are
                      given, no prompts are needed, and rewards score only evaluations
    recipe            a name, or `flowrl.recipe(name, ...)`
    lora              rank of the adapters, True for the default rank, 16, or all of their settings;
                      False trains all weights; None: as in `settings`
    tokenizer         the tokenizer of a live language model
    settings          all other settings, {"train": {"updates": 2}, ...}, or a run's file. The
                      arguments above take precedence
    callbacks         called after each iteration, evaluation and checkpoint: see `Callback`
    folder            the new run's folder; by default the next free one in `runs`
    resume            the folder of a run to resume; it takes rewards that no file can name,
                      iterations, lr, settings and callbacks
    trust             grant a resumed folder that was not started here all that it asks for, or the
                      rights that are named, such as "code,network": see SECURITY.md

    UserError, in one sentence, for settings that cannot work, before any weights load; Stopped for
    a run that ended early and can be resumed. Ctrl-C ends a run after its iteration, saves, and
    raises KeyboardInterrupt; a second Ctrl-C raises it at once. The run can be resumed in both
    cases. The state of the process is restored: see `flowrl.api.untouched`.
    """
    callbacks = checked_callbacks(callbacks)
    numbers = {"iterations": iterations, "lr": lr, "seed": seed}
    arguments = Given(
        model, tokenizer, rewards, held_out_rewards, prompts, held_out, recipe, lora,
        {key: value for key, value in numbers.items() if value is not None}, settings, given,
    )  # fmt: skip
    with untouched(), TemporaryDirectory() as temporary:
        if resume is None:
            files = Path(temporary).resolve()
            run, objects = _read(arguments, files)
            live = Live(objects, callbacks, files)
            name = Path(settings).stem if isinstance(settings, str | Path) else run.recipe.name  # type: ignore[attr-defined]
            result = starting.start(run, name, None if folder is None else Path(folder), live=live)
        else:
            if folder is not None:
                raise UserError(f"{PLACE}: a resumed run already has a folder: leave `folder` out")
            opened, objects = arguments.resume(Path(resume), trust)
            run, live = opened.run, Live(objects, callbacks)
            with opened.limited():
                check_start(run, objects)
                result = starting.resume(run, Path(resume), live=live)
    if result.signal is not None:
        if result.main:
            print(f"saved; resume with: flowrl.train(resume={str(result.folder)!r})")
        signal.raise_signal(result.signal)  # the caller's own handler decides what it does
    return TrainedRun(result.folder, Live(objects))


def checked_callbacks(given: Sequence[Callback] | Callback) -> tuple[Callback, ...]:
    """The callbacks as a tuple. UserError for anything that a run cannot call and wait for."""
    found = (given,) if callable(given) else tuple(given)
    for each in found:
        if not callable(each) or inspect.iscoroutinefunction(each):
            what = "is asynchronous" if callable(each) else "cannot be called"
            raise UserError(
                f"{PLACE}: callbacks must be functions of an event, and {each!r:.80} {what}"
            )
    return found


def _read(given: Given, files: Path) -> tuple[RunSettings, dict[str, Any]]:
    """A new run's settings, checked. Errors name files without the temporary folder."""
    try:
        run, objects = given.start(files)
        check_start(run, objects)
    except UserError as error:
        raise UserError(str(error).replace(f"{files}/", "")) from error
    return run, objects
