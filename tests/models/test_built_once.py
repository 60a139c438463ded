"""Models are built once: nobody writes their attributes from outside, by the syntax tree."""

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from flowrl.models.diffusers.call.traits.discovery import Origin, Traits
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.whole import proof_cache
from flowrl.models.diffusers.whole.proof_cache import CachedProof
from tests.support.tiny_pipelines import SQUARE, sd3

FLOWRL = Path(__file__).resolve().parents[2] / "flowrl"
LIBRARIES = {  # objects of torch, diffusers, transformers and peft, which have no methods for this
    "_disable_adapters", "_hf_peft_config_loaded", "_compiled_call_impl", "_parallel_config",
    "_progress_bar_config", "__class__", "__signature__", "allow_tf32", "cache_size_limit",
    "chat_template", "data", "forward", "from_pretrained", "generation_config", "grad",
    "is_supported", "layers", "name_or_path", "scheduler", "training", "use_slicing",
}  # fmt: skip
OWN: Mapping[str, str] = {
    "models/diffusers/call/drive/driver.py: self.control.pinned": "a call's settings, shared with "
    "copies of the scheduler that a pipeline makes",
    "models/diffusers/call/drive/driver.py: control.repeatable": "likewise",
    "models/diffusers/call/drive/scheduler_standin.py: control.repeatable": "likewise",
    "models/diffusers/modular/face.py: logger.disabled": "a logger of a library, put back after",
    "models/diffusers/modular/face.py: type(pipe).__call__": "a class that this function has made",
    "models/diffusers/modular/folder.py: spec.default_creation_method": "a record of a library: "
    "what its saved folders contain",
    "models/diffusers/modular/revisions.py: spec.pretrained_model_name_or_path": "likewise: where "
    "it loads from while the hub is silent, put back after",
    "models/diffusers/modular/revisions.py: component._diffusers_load_id": "the library's name of "
    "what it has loaded, as its own loader writes it",
    "models/diffusers/modular/revisions.py: spec.revision": "likewise: the commit that is loaded",
    "models/savings.py: functional.scaled_dot_product_attention": "torch's function, which chooses "
    "its kernels by no mask; other settings put it back",
    "models/savings.py: ctx.strides": "a record of autograd, from forward to backward",
    "models/diffusers/whole/whole_sample.py: bound.arguments": "a record of this file",
}
MODELS = (
    "diffusers/policy.py",
    "diffusers/sizes/by_size.py",
    "diffusers/call/loop/loop.py",
    "diffusers/call/drive/driver.py",
    "own/policy.py",
    "language/policy.py",
    "rewritten.py",
)
ROOMS = ("session", "iteration", "run", "cli", "api", "processes")


def targets(node: ast.AST) -> Iterator[ast.Attribute]:
    if isinstance(node, ast.Assign):
        parts: list[ast.expr] = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        parts = [node.target]
    else:
        return
    for part in parts:
        listed = part.elts if isinstance(part, ast.Tuple | ast.List) else [part]
        yield from (each for each in listed if isinstance(each, ast.Attribute))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def outside_writes(path: Path) -> Iterator[tuple[str, str]]:
    """Attributes that are written on anything but `self`, with their names."""
    for node in ast.walk(parsed(path)):
        for target in targets(node):
            if not (isinstance(target.value, ast.Name) and target.value.id == "self"):
                place = f"{path.relative_to(FLOWRL).as_posix()}: {ast.unparse(target)}"
                yield place, target.attr


def model_attributes() -> set[str]:
    """Names that the models and what they hold give to attributes."""
    found = set[str]()
    for name in MODELS:
        for kind in ast.walk(parsed(FLOWRL / "models" / name)):
            if not isinstance(kind, ast.ClassDef):
                continue
            for node in ast.walk(kind):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.add(node.target.id)
                for target in targets(node):
                    if isinstance(target.value, ast.Name) and target.value.id == "self":
                        found.add(target.attr)
            found |= {
                each.name
                for each in kind.body
                if isinstance(each, ast.FunctionDef) and each.decorator_list
            }
    return found


def test_no_attribute_of_a_model_is_written_from_outside():
    inside = {
        place
        for path in (FLOWRL / "models").rglob("*.py")
        for place, name in outside_writes(path)
        if name not in LIBRARIES
    }
    assert inside == set(OWN), "give the class a method, or an argument of its constructor"
    assert {"guidance", "storage", "sizes", "server", "loop", "traits"} <= model_attributes()


ELSEWHERE = {"api/commands.py: given.prompts"}  # a command's arguments, which are no model


@pytest.mark.slow
def test_other_rooms_do_not_finish_models():
    names = model_attributes() - LIBRARIES
    found = {
        place
        for room in ROOMS
        for path in (FLOWRL / room).rglob("*.py")
        for place, name in outside_writes(path)
        if name in names
    }
    assert found == ELSEWHERE, "call a method of the model, or pass it to its constructor"


BUILT = {  # the models' classes, and the methods that their constructors call
    "diffusers/policy.py": ("PipelinePolicy", {"__init__", "_hold"}),
    "own/policy.py": ("OwnPolicy", {"__init__"}),
    "language/policy.py": ("CausalPolicy", {"__init__"}),
    "image_tokens/policy.py": ("ImageTokenPolicy", {"__init__"}),
    "rewritten.py": ("RewrittenPolicy", {"__init__"}),
}
SEEN_LATER = {
    "OwnPolicy.decode: self.form": "the form of the samples that a user's model returns, which "
    "only its first call shows",
}


def test_a_model_is_finished_by_its_constructor():
    """What a run's settings say about a model are arguments of the constructor: no method that a
    caller might forget, or call twice, sets them afterwards."""
    late = {
        f"{name}.{method.name}: {ast.unparse(target)}"
        for file, (name, constructing) in BUILT.items()
        for kind in ast.walk(parsed(FLOWRL / "models" / file))
        if isinstance(kind, ast.ClassDef) and kind.name == name
        for method in kind.body
        if isinstance(method, ast.FunctionDef) and method.name not in constructing
        for node in ast.walk(method)
        for target in targets(node)
        if isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    assert late == set(SEEN_LATER), "make it an argument of the constructor"


def test_models_are_not_copied_or_written_past_their_class():
    for path in (FLOWRL / "models").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "object.__setattr__" not in text, path
        copies = [
            ast.unparse(node)
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "copy.copy"
        ]
        # diffusers' pipelines, not models: a pipeline's own call must not see the driver's
        # scheduler, and a modular one gets another class
        assert copies in ([], ["copy.copy(self.policy.pipe)"], ["copy.copy(pipe)"]), path


def test_every_trait_says_how_it_is_known():
    assert {each.name for each in dataclasses.fields(Traits)} == {
        name for origin in Origin for name in Traits.of_origin(origin)
    }


OTHERS = {
    "name": "Another", "call": {"height": 24}, "shared": {"image": 1}, "kind": "epsilon",
    "guidance": "scale", "steps": 7, "guider": True, "levels": 0.5, "json": True,
    "single": True, "form": "np", "sign": -1, "later": torch.bfloat16,
}  # fmt: skip


def test_the_proofs_key_has_every_trait_of_the_key(monkeypatch: pytest.MonkeyPatch):
    made = PipelinePolicy(sd3(), call=SQUARE)
    before = proof_cache.digest(made, {}, ("a",), ())
    for name in Traits.of_origin(Origin.KEY):
        key = made.loop.traits.key
        assert name in key
        monkeypatch.setattr(Traits, "key", {**key, name: OTHERS[name]})
        assert proof_cache.digest(made, {}, ("a",), ()) != before, name
        monkeypatch.undo()


def test_a_kept_proof_has_every_trait_that_it_showed():
    first, second = (PipelinePolicy(sd3(), call=SQUARE) for _ in range(2))
    shown = {name: OTHERS[name] for name in Traits.of_origin(Origin.PROVEN)}
    assert set(shown) <= set(get_type_hints(Traits))
    first.loop.show(**shown)
    proof_cache.keep("every", CachedProof.of(first, ()))
    kept = proof_cache.read("every")
    assert kept is not None
    kept.use(second)
    assert {name: getattr(second.loop.traits, name) for name in shown} == shown
    assert second.loop.traits.encodings == {}, "one row per call is encoded otherwise"
    with pytest.raises(AssertionError, match="found by trials"):
        second.loop.show(kind="epsilon")
