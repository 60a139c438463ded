"""Settings that exclude each other, and settings that belong to a name.

Files and options lie over each other in layers. A layer that names one of several exclusive
settings takes the others' place: `lora: {from: FILE}` over a base with `lora: {rank: 32}` trains
FILE's adapters. Two exclusive settings in one layer are a mistake, which validation refuses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.settings.model.kinds import MODEL_KINDS, own_settings_of
from flowrl.settings.model.model import ModelSettings


@dataclass(frozen=True)
class Alternative:
    """One of several alternatives.

    names    settings, any of which chooses it, as `model.lora.rank`
    has      further settings that only this side has: they go with it, and do not choose it
    without  values with which a name does not choose it, besides null and false
    """

    names: tuple[str, ...]
    has: tuple[str, ...] = ()
    without: tuple[Any, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        return (*self.names, *self.has)

    def chosen_by(self, layer: Mapping[str, Any]) -> bool:
        values = [_value(layer, name) for name in self.names]
        off = (None, False, *self.without)
        return any(not any(value is no or value == no for no in off) for value in values)


def _kind(kind: type[ModelSettings]) -> Alternative:
    settings = tuple(f"model.{name}" for name in own_settings_of(kind))
    return Alternative((f"model.{kind.KIND}",), settings)


_MERGE = Alternative(("model.lora.merge",), without=("none",))
_EXPERTS = Alternative(("model.offload_experts",))
_SHARED = Alternative(("model.context_parallel",), without=(1,))
_COMPILE = Alternative(("model.compile",))
_SERVER = Alternative(("model.server",))
_ENGINE = Alternative(("model.engine",))
_QUANTIZED = Alternative(("model.quantization",))
_GIVEN = Alternative(("given",))
EXCLUSIVE: tuple[tuple[Alternative, ...], ...] = (
    tuple(map(_kind, MODEL_KINDS)),
    (
        Alternative(("model.lora.from",)),
        Alternative(("model.lora.rank", "model.lora.alpha", "model.lora.targets")),
    ),
    (Alternative(("model.sigmas",)), Alternative(("model.scheduler",), without=({},))),
    (_EXPERTS, _COMPILE),
    (_EXPERTS, _SHARED),
    (_EXPERTS, _MERGE),
    (_SHARED, _COMPILE),
    (_SHARED, Alternative(("model.attention",), without=("native",))),
    (_QUANTIZED, Alternative(("model.adapters",))),
    (_QUANTIZED, _EXPERTS),
    (_QUANTIZED, _MERGE),
    (_QUANTIZED, Alternative(("model.gguf_file",))),
    (Alternative(("model.quantization.components",)), Alternative(("model.offload",))),
    (_SERVER, _MERGE),
    (_SERVER, Alternative(("workers.sampling",))),
    (_ENGINE, _MERGE),
    (_ENGINE, _SHARED),
    (Alternative(("model.engine.own",)), Alternative(("model.engine.url",))),
    (Alternative(("model.environment",)), Alternative(("model.steps",))),
    (_GIVEN, Alternative(("model.environment",))),
    (_GIVEN, Alternative(("model.steps",))),
    (Alternative(("given.media",)), Alternative(("given.layout", "given.label"))),
    (Alternative(("budget.replay",), without=(0,)), Alternative(("train.recompute_old",))),
)

# section: (the key whose value the others belong to, which others; () for all)
OF_NAMES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "model.own": ("name", ()),
    "model.engine.own": ("name", ()),
    "model.quantization": ("backend", ()),
    "model.environment": ("name", ("settings",)),
    "prompts.train": ("source", ()),
    "prompts.held_out": ("source", ()),
    "given": ("kind", ("media", "layout", "label")),
    **{f"recipe.{part}": ("name", ())
       for part in ("plan", "advantage", "likelihood", "loss", "tracker", "kernel", "solver",
                    "text", "image")},
}  # fmt: skip


def taken_over(under: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `under` that stay below a layer: those whose place it takes are left out.
    Both are spelled out."""
    lost = {
        setting
        for sides in EXCLUSIVE
        for chosen in sides
        if chosen.chosen_by(layer)
        for other in sides
        if other is not chosen and not other.chosen_by(layer)
        for setting in other.settings
        if setting not in chosen.settings
    }
    for section, (key, belongs) in OF_NAMES.items():
        old, new = _value(under, section), _value(layer, section)
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            continue
        if new.get(key) is not None and new[key] != old.get(key, new[key]):
            lost |= {f"{section}.{key}" for key in (belongs or old)}
    result = dict(under)
    for setting in lost:
        result = _without(result, setting.split("."))
    return result


def _value(tree: Any, setting: str) -> Any:
    for key in setting.split("."):
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(key)
    return tree


def _without(tree: Mapping[str, Any], path: list[str]) -> dict[str, Any]:
    first, *rest = path
    if not rest:
        return {key: value for key, value in tree.items() if key != first}
    inner = tree.get(first)
    return {**tree, first: _without(inner, rest)} if isinstance(inner, Mapping) else dict(tree)
