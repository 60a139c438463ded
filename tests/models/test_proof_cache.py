"""Proofs that are kept: what makes another one necessary, and entries that are damaged."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.whole import proof_cache as proof_cache
from flowrl.models.diffusers.whole.proof_cache import CachedProof
from tests.support.driving import PROMPTS, STEPS
from tests.support.tiny_pipelines import NAMED, SQUARE, sd3

torch.set_num_threads(1)
SETTINGS = {"steps": STEPS, "base": {"weights.safetensors": "1"}}


def policy(pipe: Any = None, call: Mapping[str, Any] = SQUARE) -> PipelinePolicy:
    made = PipelinePolicy(sd3() if pipe is None else pipe, call=call)
    return made.guided(4.5, 1.0)


def digest(made: PipelinePolicy, settings: Any = SETTINGS, prompts: Any = PROMPTS) -> str:
    return proof_cache.digest(made, settings, prompts, ())


def shifted() -> Any:
    return sd3(shift=2.0)


def half() -> Any:
    return sd3().to(torch.bfloat16)


@pytest.mark.slow
def test_the_same_start_has_the_same_digest_and_others_have_others() -> None:
    same = digest(policy())
    assert digest(policy()) == same
    others = {
        "configuration": digest(policy(shifted())),
        "dtype": digest(policy(half())),
        "call": digest(policy(call=SQUARE | {"negative_prompt": "bad"})),
        "settings": digest(policy(), SETTINGS | {"steps": 5}),
        "weights": digest(policy(), SETTINGS | {"base": {"weights.safetensors": "2"}}),
        "prompts": digest(policy(), prompts=["a dog", *PROMPTS[1:]]),
    }
    assert same not in others.values() and len({*others.values()}) == len(others)


@pytest.mark.parametrize("name", ["torch", "diffusers", "transformers", "peft"])
def test_another_version_is_another_digest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy()
    before, real = digest(made), proof_cache.metadata.version
    monkeypatch.setattr(
        proof_cache.metadata, "version", lambda each: "0.0" if each == name else real(each)
    )
    assert digest(made) != before


def test_flowrls_own_code_is_in_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy()
    before = digest(made)
    monkeypatch.setattr(proof_cache, "_own_code", lambda: "another")
    assert digest(made) != before


def own_class(file: Path, body: str) -> type:
    """A pipeline class from a source file of a user's own."""
    file.write_text(
        "from diffusers import StableDiffusion3Pipeline\n"
        f"class Mine(StableDiffusion3Pipeline):\n    {body}\n"
    )
    spec = importlib.util.spec_from_file_location("mine", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import sys

    sys.modules["mine"] = module
    return module.Mine


def test_the_source_of_an_own_pipeline_is_in_the_digest(tmp_path: Path) -> None:
    digests = []
    for body in ("pass", "own = 1"):
        pipe = sd3()
        pipe.__class__ = own_class(tmp_path / "mine.py", body)
        digests.append(digest(policy(pipe)))
    assert digests[0] != digests[1]


def test_a_kept_proof_brings_a_policy_where_a_made_one_would() -> None:
    first, second = policy(), policy()
    sentences = first.proofs(PROMPTS, STEPS)
    proof_cache.keep("d", CachedProof.of(first, sentences))
    kept = proof_cache.read("d")
    assert kept is not None and list(kept.sentences) == sentences
    kept.use(second)
    assert second.known_proofs == first.known_proofs
    x = torch.randn(2, *first.shape(STEPS), generator=torch.Generator().manual_seed(1))
    sigma, rows = torch.full((2,), first.schedule(STEPS).sigmas[1]), torch.arange(2)
    both = []
    for made in (first, second):
        calls: list[int] = []
        made.schedule(STEPS)  # visits its steps with stubs
        for denoiser in made.denoisers:
            denoiser.register_forward_hook(lambda *args: calls.append(1))  # noqa: B023
        velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=4.5)
        with torch.no_grad():
            both.append(velocity(x, sigma, rows))
        assert len(calls) == 1  # nothing is proven again
    assert torch.equal(*both)


def test_traits_that_only_the_proof_finds_are_kept() -> None:
    """Those of a loop that hands on the negative velocity, decodes to arrays, and takes one row."""
    family = NAMED["SD3"]
    first, second = (policy(family.build(), family.call) for _ in range(2))
    first.proofs(PROMPTS, STEPS)
    found = {"sign": -1, "form": "np", "single": True}
    first.loop.show(**found)
    CachedProof.of(first, ()).use(second)
    assert {name: getattr(second.loop.traits, name) for name in found} == found


def cut(text: str) -> str:
    return text[: len(text) // 2]


def other_number(text: str) -> str:
    return text.replace('"way": "pinned"', '"way": "forward"')


def other_form(text: str) -> str:
    return json.dumps([1, {"sum": text}])


def deep(text: str) -> str:
    return "[" * 100_000


def unknown_field(text: str) -> str:
    whole = json.loads(text)
    whole["proof"]["replays"][0]["later"] = 1
    return json.dumps({"sum": proof_cache._sum(whole["proof"]), "proof": whole["proof"]})


@pytest.fixture(scope="module")
def proofs() -> tuple[CachedProof, CachedProof]:
    """A policy's proof with its sentences, and one without."""
    made = policy()
    return CachedProof.of(made, made.proofs(PROMPTS, STEPS)), CachedProof.of(made, ())


@pytest.mark.parametrize("damage", [cut, other_number, other_form, deep, unknown_field, str.upper])
def test_a_damaged_entry_counts_as_none(
    proofs: tuple[CachedProof, CachedProof], damage: Callable[[str], str]
) -> None:
    whole, short = proofs
    proof_cache.keep("d", whole)
    file = proof_cache.folder() / "d.json"
    assert proof_cache.read("d") is not None
    file.write_text(damage(file.read_text()))
    assert proof_cache.read("d") is None
    file.write_bytes(b"\xff\xfe\x00")
    assert proof_cache.read("d") is None
    file.unlink()
    file.mkdir()
    assert proof_cache.read("d") is None
    proof_cache.keep("d", short)  # cannot be written, and is no error
    assert [path.name for path in proof_cache.folder().iterdir()] == ["d.json"]


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRL_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert proof_cache.folder() == Path("/one/proofs")
    monkeypatch.delenv("FLOWRL_CACHE")
    assert proof_cache.folder() == Path("/two/flowrl/proofs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert proof_cache.folder() == Path.home() / ".cache/flowrl/proofs"


def test_images_are_in_the_digest_by_their_content() -> None:
    family = NAMED["LTX-Video with an image"]
    from flowrl.models.diffusers.call.inputs import columns

    made = policy(family.build(), family.call)
    digests = set()
    for size in ((24, 20), (20, 24), (24, 20)):
        image = columns.placeholder_images(["image"], *size)["image"]
        meta = [{"prompt": text, "image": image} for text in PROMPTS]
        digests.add(proof_cache.digest(made, SETTINGS, PROMPTS, meta))
    assert len(digests) == 2


def test_a_proof_says_when_it_was_made() -> None:
    proof = replace(CachedProof.of(policy(), ()), made="2026-01-02 03:04")
    assert "2026-01-02 03:04" in proof.line and "--no-cache" in proof.line
