"""Arguments of a run, from Python, as its settings."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowrl.api.adapters import lora_section
from flowrl.api.models import model_settings
from flowrl.api.parts import GivenPrompts, GivenRewards, SomeRewards, prompt_settings
from flowrl.errors import UserError, made_call, messages_name
from flowrl.paths import run_file, run_path
from flowrl.settings import RewardSpec, RunSettings
from flowrl.settings.file.inherit import read_tree
from flowrl.settings.read import (
    OpenedFolder,
    Overrides,
    dump,
    merge_settings,
    merged_settings,
    open_folder,
    override,
    run_from,
    run_over,
    settings_of_words,
    with_recipe_of,
)
from flowrl.settings.trust import Trust

REWARD_PLACES = ("rewards", "held_out_rewards")


@dataclass(frozen=True)
class Given:
    """Arguments that become settings; None and empty ones count as not given.

    file      a run file, or the name of one of flowrl's; the settings and arguments lie over it
    settings  a mapping of settings, or words of a command line, which mean the same; the other
              arguments lie over both
    """

    model: Any = None
    tokenizer: Any = None
    rewards: SomeRewards = ()
    held_out_rewards: SomeRewards = ()
    prompts: GivenPrompts | None = None
    held_out: GivenPrompts | None = None
    recipe: str | Mapping[str, Any] | None = None
    lora: Any = None
    train: Mapping[str, Any] = field(default_factory=dict)
    settings: Overrides | None = None
    samples: Mapping[str, Any] | None = None
    file: str | Path | None = None
    place: str = field(default_factory=made_call)  # the call with these arguments, for messages

    @property
    def name(self) -> str:
        """The source of the run, for messages."""
        return "arguments" if self.file is None else repr(str(self.file))

    @property
    def only_file(self) -> bool:
        """Whether a file and settings over it are all that is given."""
        sources = (self.model, self.tokenizer, self.prompts, self.held_out, self.recipe, self.lora)
        more = (self.rewards, self.held_out_rewards, self.train)
        none = all(value is None for value in (*sources, self.samples)) and not any(more)
        return self.file is not None and none

    @property
    def overrides(self) -> Overrides:
        """The settings that lie over those of the file."""
        return () if self.settings is None else self.settings

    def named_after(self, run: RunSettings) -> str:
        """The name of the run's folder in `runs`, without its number."""
        if self.file is None:
            return run.recipe.name  # type: ignore[attr-defined]
        return (run_path(str(self.file)) or Path(self.file)).stem

    @property
    def again(self) -> "Given":
        """The part of these arguments that a resume takes after a launcher has started them again:
        rewards that are objects, numbers, and words. The folder has the rest as it was begun."""
        words = None if isinstance(self.settings, Mapping) else self.settings
        return Given(
            place=self.place,
            rewards=self.rewards,
            held_out_rewards=self.held_out_rewards,
            train=self.train,
            settings=words,
        )

    @property
    def begun(self) -> "Given":
        """These arguments once their run has begun: the folder has what a resume cannot change, so
        that `resume` of the same object is no attempt to change it."""
        return replace(
            self,
            model=None, tokenizer=None, prompts=None, held_out=None, recipe=None, lora=None,
            samples=None,
        )  # fmt: skip

    def start(self, files: Path) -> tuple[RunSettings, dict[str, Any]]:
        """Settings of a new run, and rewards passed as objects. Writes into `files`."""
        with messages_name(self.place):
            return self._start(files)

    def _start(self, files: Path) -> tuple[RunSettings, dict[str, Any]]:
        tree, layer, under, source = self._tree()
        if self.recipe is not None:
            tree["recipe"] = _over_recipe(layer.get("recipe"), self.recipe)
        if "recipe" not in tree:
            if self.file is not None:
                example = "`recipe: {name: nft, steps: 8}`"
                raise UserError(f"{source}: recipe: missing; write one, such as {example}")
            raise UserError(
                f"{made_call()}: pass a recipe, such as recipe=flowrl.recipe('nft', steps=8)"
            )
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
                    f"{made_call()}: given must be a mapping such as {{'file': ...}}, not {kind}"
                )
            tree["given"] = _over(layer.get("given"), self.samples)
        self._lay_over(tree, layer)
        asked = (("train", self.prompts), ("held_out", self.held_out))
        for place, value in asked:
            if value is not None:
                column = _section(tree, "prompts").get("column", "prompt")
                tree["prompts"][place] = prompt_settings(value, files, place, column)
        objects = dict[str, Any]()
        for place in REWARD_PLACES:
            if value := getattr(self, place):
                read = GivenRewards.of(value, f"{made_call()}: {place}")
                tree[place] = list(read.specs)
                objects = read.joined(objects, f"{made_call()}: {place}")
        run = run_over(tree, self.place, under, source)
        # of a file alone a command line's words are applied as the command line applies them
        as_words = self.only_file and not isinstance(self.settings, Mapping)
        return override(run, self.overrides) if as_words else run, objects

    def _tree(self) -> tuple[dict[str, Any], Mapping[str, Any], Mapping[str, Any], str]:
        """Settings of the file with the given ones over them, as a tree of its own; the given ones;
        those of the file alone; and what errors name as its place."""
        tree, source = (
            ({}, self.place) if self.file is None else read_tree(run_file(str(self.file)))
        )
        settings = self.settings if isinstance(self.settings, Mapping) else {}
        words = settings if self.settings is None or settings else self.settings
        listed = isinstance(words, Mapping | list | tuple)
        if isinstance(words, Mapping) and not all(isinstance(word, str) for word in words):
            key = next(word for word in words if not isinstance(word, str))
            raise UserError(f"{made_call()}: settings: the key {key!r:.50} is not a text")
        if not listed or not all(isinstance(word, str) for word in words):
            raise UserError(
                f"{made_call()}: settings must be a mapping or a run's file, not "
                f"{type(self.settings).__name__}"
            )
        if not isinstance(tree, Mapping):
            run_from(tree, source)  # which says what is wrong with it
        if not isinstance(words, Mapping) and not self.only_file:
            settings = settings_of_words(words, self.recipe or tree.get("recipe"))
        if self.file is None or not settings:
            return copy.deepcopy({**tree, **settings}), settings, tree, source
        try:
            under_settings = with_recipe_of(tree, settings, source)
            return merged_settings(under_settings, settings), settings, tree, source
        except UserError as error:
            run_from(tree, source)  # which says it if it is the file's own
            raise UserError(f"{made_call()}: settings: {error}") from error

    def _lay_over(self, tree: dict[str, Any], layer: Mapping[str, Any]) -> None:
        if self.lora is not None:
            model = layer.get("model")
            settings = model.get("lora") if isinstance(model, Mapping) else None
            _section(tree, "model")["lora"] = _over_lora(settings, lora_section(self.lora))
        if self.train:
            _section(tree, "train").update(self.train)

    def resume(self, folder: Path, trust: Trust) -> tuple[OpenedFolder, dict[str, Any]]:
        """The folder of a resumed run with its settings, and rewards passed as objects."""
        with messages_name(self.place):
            return self._resume(folder, trust)

    def _resume(self, folder: Path, trust: Trust) -> tuple[OpenedFolder, dict[str, Any]]:
        for name in ("model", "tokenizer", "prompts", "held_out", "recipe", "lora", "samples"):
            if getattr(self, name) is not None:
                name = "given" if name == "samples" else name
                raise UserError(
                    f"{made_call()}: a resumed run already has its {name}: leave {name} out, or "
                    "start a new run"
                )
        opened = open_folder(folder, trust)
        tree, source = dump(opened.run), str(folder)
        if self.file is not None:
            read, source = read_tree(run_file(str(self.file)))
            merge_settings(
                tree, read if isinstance(read, Mapping) else dump(run_from(read, source))
            )
        under = copy.deepcopy(tree)
        if isinstance(self.settings, Mapping):
            merge_settings(tree, self.settings)
        self._lay_over(tree, {})
        objects = dict[str, Any]()
        for place in REWARD_PLACES:
            read = GivenRewards.of(getattr(self, place), f"{made_call()}: {place}")
            objects = read.joined(objects, f"{made_call()}: {place}")
            for spec in read.specs:
                _replace(tree, spec, folder)
        with opened.limited():
            run = run_over(tree, self.place, under, source)
        opened = opened.changed(run)
        words = () if isinstance(self.settings, Mapping) else self.overrides
        if words:
            opened = opened.overridden(words)
            opened = opened.overridden({"train": self.train}) if self.train else opened
        return opened, objects


def _over(settings: Any, argument: Mapping[str, Any]) -> dict[str, Any]:
    """An argument's section over the same section of the settings."""
    return {**settings, **argument} if isinstance(settings, Mapping) else dict(argument)


def _over_recipe(settings: Any, recipe: Any) -> Any:
    """The argument's recipe with the settings that are given of the same one."""
    section = {"name": recipe} if isinstance(recipe, str) else recipe
    if not isinstance(settings, Mapping) or not isinstance(section, Mapping):
        return recipe
    if settings.get("name", section.get("name")) != section.get("name"):
        return recipe
    return _over(settings, section)


def _over_lora(settings: Any, lora: Any) -> Any:
    """The argument's adapters with the settings that are given of them; False has none."""
    if not isinstance(settings, Mapping) or lora is None or lora is False:
        return lora
    if isinstance(lora, Mapping):
        return _over(settings, lora)
    return dict(settings) if lora is True else {**settings, "rank": lora}


def _replace(tree: dict[str, Any], spec: dict[str, Any], folder: Path) -> None:
    """Replace the rewards with this reward's label. UserError if the run has none with it."""
    label = RewardSpec.model_validate(spec).label
    labels = [reward["label"] for place in REWARD_PLACES for reward in tree[place]]
    if label not in labels:
        raise UserError(
            f"{made_call()}: {folder} has no reward {label!r}; it has {', '.join(labels)}. Change "
            "its rewards in run.yaml, or with settings={'rewards': [...]}"
        )
    changed = {key: spec[key] for key in ("name", "weight") if key in spec}
    for place in REWARD_PLACES:
        tree[place] = [e | changed if e["label"] == label else e for e in tree[place]]


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of the tree, created if missing."""
    value = tree.setdefault(name, {})
    if not isinstance(value, dict):
        raise UserError(
            f"{made_call()}: settings: {name} must be a mapping, not {type(value).__name__}"
        )
    return value
