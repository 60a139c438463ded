"""Modular pipelines: driven as their own calls, the same in both forms, trained and read again."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.estimate.sizes import rows_per_state
from flowrl.models.description import describe
from flowrl.models.diffusers.call.traits.checks import from_blocks
from flowrl.models.diffusers.lora.lora import LORA_FILE, writes_adapters
from flowrl.models.diffusers.modular import face
from flowrl.models.diffusers.modular.folder import ModularSource, guiders_of, skeleton
from flowrl.models.diffusers.modular.guiders import guider_passes
from flowrl.models.diffusers.modular.verdicts import (
    modular_classes,
    modular_verdicts,
    refuse_known_modular,
)
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.replay.own_call import record
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from flowrl.recipes import RECIPES
from flowrl.settings import PipelineSettings
from flowrl.settings.model.form import MODULAR_INDEX
from tests.support.advice import advice
from tests.support.driving import PROMPTS, STEPS, learn, noise
from tests.support.tiny_modular import MODULAR, MODULAR_CALLS, TWINS, twin
from tests.support.tiny_pipelines import NAMED
from tests.support.two_forms import Seen, classic_call, modular_call

torch.set_num_threads(1)
NEGATIVE = {"negative_prompt": ["bad"] * 2}
EMBEDDED = ("FLUX.1", "FLUX.2")  # without a guider
ALONE = ["anima", "flux3", "ltx25"]  # without a classic form


def built(name: str) -> Any:
    return twin(name) if name in TWINS else MODULAR[name]()


def driven(name: str, **more: Any) -> PipelinePolicy:
    pipe = built(name)
    takes = face.arguments_of(pipe.blocks)
    call = MODULAR_CALLS[name] if name in MODULAR_CALLS else NAMED[name].call
    call = {key: value for key, value in call.items() if key in takes}
    negative = {"negative_prompt": "bad"} if name == "SD3" else {}
    return PipelinePolicy(pipe, call={**call, **negative, **more})


@pytest.mark.quick_cases("FLUX.1", "anima")
@pytest.mark.parametrize("name", [*TWINS, *ALONE])
def test_a_modular_pipeline_is_driven_to_the_bit(name: str) -> None:
    made = driven(name)
    for guidance in (4.5, 1.0):
        proof = made.prove(PROMPTS, steps=STEPS, guidance=guidance, complete=guidance > 1)
        assert (proof.form, proof.way) == ("modular", "pinned")
        assert "(modular form" in str(proof)
        guided = name not in EMBEDDED and guidance > 1
        assert (proof.evaluations > 1) == (guided or name == "ltx25")
    assert proof.guider == {"ltx25": "LTX2Guidance"}.get(
        name, "" if name in EMBEDDED else "ClassifierFreeGuidance"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SDXL", "Wan 2.2", "Z-Image", *ALONE])
def test_whole_samples_are_the_modular_pipelines_own(name: str) -> None:
    made = driven(name)
    proof = made.prove(PROMPTS, steps=STEPS, guidance=4.5, complete=False, gradient=False)
    whole = prove_whole(made, [*PROMPTS, "two blue cat"], (), proof)
    assert whole.failure() is None
    assert whole.own is not None and whole.own.media < 5e-5


def both(name: str, scale: float | None) -> tuple[Seen, Seen]:
    """The call of each form, from the same parts, prompts and noise."""
    family, modular = NAMED[name], twin(name)
    classic: Any = family.build()
    if name == "FLUX.2":
        classic.system_message = modular.blocks.sub_blocks["text_encoder"].DEFAULT_SYSTEM_MESSAGE
    call = {key: value for key, value in family.call.items() if key != "negative_prompt"}
    taken = {key: value for key, value in call.items() if key in modular.blocks.input_names}
    if name in EMBEDDED:
        given = {} if scale is None else {"guidance_scale": scale}
        return classic_call(classic, call | given, STEPS), modular_call(
            modular, taken | given, STEPS, None
        )
    negative = NEGATIVE if name not in ("LTX-Video",) or scale != 1 else {}
    argument = "true_cfg_scale" if name == "Qwen-Image" else "guidance_scale"
    assert scale is not None
    # Z-Image adds scale (prompt - negative) to the prompt's prediction, other guiders scale - 1
    own = scale - 1 if name == "Z-Image" else scale
    first = classic_call(classic, call | negative | {argument: own}, STEPS)
    return first, modular_call(modular, taken | negative, STEPS, scale)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "drawn"), [("ltx25", True), ("anima", False)])
def test_a_decoder_that_draws_noise_decodes_samples_one_by_one(name: str, drawn: bool) -> None:
    """So a sample does not depend on its place in a batch: LTX-2.5's decoder is a diffusion
    model."""
    made = driven(name)
    proof = made.prove(PROMPTS, steps=STEPS, guidance=1.0, complete=False, gradient=False)
    assert proof.drawn is drawn and ("decoded one by one" in str(proof)) is drawn
    x, texts = noise(made), made.encode(PROMPTS)
    both = made.decode(x, texts, steps=STEPS, guidance=1.0)
    alone = made.decode(x[1:], texts.take([1]), steps=STEPS, guidance=1.0)
    assert torch.allclose(both[1:], alone, atol=1e-5)


def away(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = torch.broadcast_tensors(ours.double(), theirs.double())
    return float((ours - theirs).abs().max()) if ours.numel() else 0.0


def differences(first: Any, second: Any) -> float:
    """The largest difference of two arguments of a denoiser; 0 for those that are no numbers."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return away(first, second)
    if isinstance(first, list) and isinstance(second, list):
        assert len(first) == len(second)
        return max(map(differences, first, second), default=0.0)
    if isinstance(first, dict) and isinstance(second, dict):
        assert first.keys() <= second.keys() or second.keys() <= first.keys()
        names = first.keys() & second.keys()
        return max((differences(first[name], second[name]) for name in names), default=0.0)
    return 0.0


# The largest difference of what a step receives, at predictions of size 2. FLUX.1's blocks pass one
# time for all rows, so that its embedding is a product of another shape. SDXL's and Z-Image's
# classic calls put both halves of guidance into one batch, their blocks call the network twice.
ROUNDING = {("FLUX.1", None): 2e-6, ("SDXL", 4.5): 1e-4, ("Z-Image", 4.5): 1e-5}
# these blocks cannot encode without guidance: a negative prompt is then missing
UNGUIDED_FAILS = ("Wan 2.1", "Wan 2.2", "LTX-Video")


@pytest.mark.quick_cases("Qwen-Image", "FLUX.1")
@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_both_forms_call_the_network_alike(name: str, scale: float) -> None:
    if scale == 1.0 and name in UNGUIDED_FAILS:
        with pytest.raises((UnboundLocalError, ValueError)):
            both(name, scale)
        return
    given = None if name in EMBEDDED else scale
    classic, modular = both(name, given)
    assert len(classic.steps) == len(modular.steps) == STEPS
    bound = ROUNDING.get((name, given), 0.0)
    for ours, theirs in zip(classic.steps, modular.steps, strict=True):
        assert away(ours[1], theirs[1]) == 0  # the times
        assert max(away(ours[0], theirs[0]), away(ours[2], theirs[2])) <= bound
    assert away(classic.media, torch.as_tensor(modular.media)) <= bound
    if len(classic.calls) == len(modular.calls):  # else one of them joins the halves of guidance
        for one, other in zip(classic.calls, modular.calls, strict=True):
            names = one.keys() & other.keys() - {"encoder_hidden_states_mask"}
            assert max(differences(one[each], other[each]) for each in names) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["flow_grpo", "nft", "branch_grpo"])
@pytest.mark.parametrize("name", ALONE)
def test_a_modular_pipeline_learns(name: str, recipe: str) -> None:
    settings: dict[str, dict[str, Any]] = {
        "flow_grpo": {"steps": 3, "group": 2},
        "nft": {"steps": 4, "group": 2, "levels_per_sample": 2, "kl": 0.0},
        "branch_grpo": {"steps": 4, "at": (0, 2), "roots": 1},
    }
    made = driven(name)
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    before = {key: value.detach().clone() for key, value in made.trainable().items()}
    assert learn(made, RECIPES[recipe](**settings[recipe])) < 1e-4  # ratio 1
    assert any(not value.equal(before[key]) for key, value in made.trainable().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SDXL", "Wan 2.2", *ALONE])
def test_plain_diffusers_reads_the_adapter(name: str, tmp_path: Path) -> None:
    made = driven(name)
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    for key, value in made.trainable().items():
        if ".lora_B." in key:
            torch.nn.init.normal_(value, std=0.2, generator=torch.Generator().manual_seed(1))
    made.save(tmp_path)
    plain = built(name)
    if writes_adapters(made.pipe, made.loop.driver.denoisers):
        plain.load_lora_weights(tmp_path, weight_name=LORA_FILE)
        if name == "Wan 2.2":
            second = "pytorch_lora_weights_2.safetensors"
            plain.load_lora_weights(tmp_path, weight_name=second, load_into_transformer_2=True)
    else:
        plain.transformer.load_lora_adapter(tmp_path, weight_name=LORA_FILE, prefix="transformer")
    images = [
        record(policy.loop, PROMPTS, (), STEPS, 4.5)[1].media
        for policy in (made, PipelinePolicy(plain, call=made.call), driven(name))
    ]
    assert torch.equal(images[0], images[1]) and not torch.equal(images[0], images[2])


def test_a_live_pipeline_is_left_as_it_is() -> None:
    pipe = twin("Wan 2.1")
    kind, blocks, before = type(pipe), pipe._blocks, set(vars(pipe))
    made = PipelinePolicy(pipe, call={"height": 16, "width": 16, "num_frames": 5})
    assert made.pipe is not pipe and made.pipe.transformer is pipe.transformer
    assert type(pipe) is kind and pipe._blocks is blocks and set(vars(pipe)) == before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved modular pipeline, which has no classic index."""
    place = tmp_path_factory.mktemp("modular") / "wan"
    twin("Wan 2.1").save_pretrained(str(place), overwrite_modular_index=True)
    return place


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    """A copy of a folder by links, with another index."""
    to.mkdir()
    for part in folder.iterdir():
        if part.is_dir():
            (to / part.name).symlink_to(part)
    index = json.loads((folder / "modular_model_index.json").read_text())
    change(index)
    (to / "modular_model_index.json").write_text(json.dumps(index))
    return str(to)


def test_a_folder_chooses_its_form(folder: Path, tmp_path: Path) -> None:
    """The index decides where only one is there; where both are, the classic form is driven unless
    the settings say otherwise."""
    assert PipelineSettings(pipeline=str(folder)).form == "modular"
    changed(folder, tmp_path / "both", lambda index: None)
    (tmp_path / "both" / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    assert PipelineSettings(pipeline=str(tmp_path / "both")).form == "classic"
    assert PipelineSettings(pipeline=str(tmp_path / "both"), form="modular").form == "modular"
    with pytest.raises(ValueError, match="guider belongs to modular pipelines"):
        PipelineSettings(pipeline=str(tmp_path / "both"), guider={"name": "ClassifierFreeGuidance"})


def test_a_skeleton_has_no_weights_and_names_its_guiders(folder: Path) -> None:
    bare = skeleton(str(folder))
    assert bare.transformer is None and bare.vae is None
    known = guiders_of(bare)
    assert known is not None and known["guider"]["name"] == "ClassifierFreeGuidance"
    assert known["guider"]["guidance_scale"] == 5.0  # of its blocks, not of the guider's class
    again = guiders_of(skeleton(str(folder), guider=known))
    assert again == known
    other = {"name": "AdaptiveProjectedGuidance", "guidance_scale": 3.0}
    replaced = guiders_of(skeleton(str(folder), guider=other))
    assert replaced is not None and replaced["guider"]["name"] == "AdaptiveProjectedGuidance"
    made = ModularSource(str(folder)).load(torch.float32)
    assert torch.equal(
        made.transformer.proj_out.weight, twin("Wan 2.1").transformer.proj_out.weight
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("vae"), r"has no vae \(AutoencoderKLWan\), which WanModularPip"),
        (
            lambda index: index["vae"][2].update(subfolder="vae_fp16"),
            r"has no folder .*vae_fp16 of its vae",
        ),
    ],
)
def test_what_is_missing_is_named_before_weights_load(
    change: Callable[[dict[str, Any]], Any], message: str, folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = changed(folder, tmp_path / "lacking", change)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were read")

    spec: Any = diffusers.modular_pipelines.modular_pipeline_utils.ComponentSpec
    monkeypatch.setattr(spec, "load", never)
    with pytest.raises(UserError, match=message):
        ModularSource(source).load(torch.float32)


@pytest.mark.parametrize("name", ["flux3", "anima"])
def test_settings_of_the_scheduler_are_in_a_saved_folder(name: str, tmp_path: Path) -> None:
    """FLUX.3's blocks make their scheduler from their own settings, and save none."""
    MODULAR[name]().save_pretrained(str(tmp_path / "pipe"), overwrite_modular_index=True)
    source, settings = ModularSource(str(tmp_path / "pipe")), {"shift": 2.0}
    assert source.load(torch.float32).scheduler.config.shift != 2.0
    pipe = from_blocks(source, torch.float32, scheduler=settings)
    pipe.save_pretrained(tmp_path / "again")
    again = ModularSource(str(tmp_path / "again")).load(torch.float32)
    assert again.scheduler.config.shift == pipe.scheduler.config.shift == 2.0


def test_every_exported_class_has_a_verdict() -> None:
    """A release with a name that no list has fails here: run the sweep, and read what it finds."""
    known = [name for found in modular_verdicts().values() for name in found]
    assert sorted(known) == modular_classes() and len(known) == len(set(known))
    with pytest.raises(
        UserError, match=r"HeliosPyramidModularPipeline: steps each chunk in stages"
    ):
        refuse_known_modular("HeliosPyramidModularPipeline")
    refuse_known_modular("AnimaModularPipeline")


BLOCKS = """
from diffusers.modular_pipelines.wan.modular_blocks_wan import WanBlocks

class Mine(WanBlocks):
    pass
"""


def test_blocks_that_a_folder_brings_need_a_right(folder: Path, tmp_path: Path) -> None:
    source = changed(folder, tmp_path / "own", lambda index: None)
    Path(source, "mine.py").write_text(BLOCKS)
    given = {"auto_map": {"ModularPipelineBlocks": "mine.Mine"}}
    Path(source, "modular_config.json").write_text(json.dumps(given))
    made = advice(
        "brings blocks of its own (auto_map in {}), which are code: read them, then set "
        "model.rights: [code]",
        lambda: skeleton(source),
        lambda: skeleton(source, ["code"]),
    )
    assert type(made._blocks).__name__ == "Mine"


APG, MIX = "AdaptiveProjectedGuidance", "AdaptiveProjectedMixGuidance"
LAYERS = {"skip_layer_config": [{"indices": [0], "fqn": "blocks"}]}  # of Wan's blocks
LATER = {"skip_layer_guidance_start": 0.5, "skip_layer_guidance_stop": 1.0}
MOMENTUM = {"adaptive_projected_guidance_momentum": -0.5}
# guiders of the release: their settings, how they are driven, and the passes of each of four steps
GUIDERS: list[tuple[str, dict[str, Any], str, list[int]]] = [
    ("ClassifierFreeGuidance", {}, "pinned", [2, 2, 2, 2]),
    ("ClassifierFreeGuidance", {"start": 0.5}, "forward", [1, 1, 2, 2]),
    ("ClassifierFreeGuidance", {"stop": 0.5}, "forward", [2, 2, 1, 1]),
    ("ClassifierFreeZeroStarGuidance", {"zero_init_steps": 0}, "pinned", [2, 2, 2, 2]),
    ("TangentialClassifierFreeGuidance", {}, "pinned", [2, 2, 2, 2]),
    ("SkipLayerGuidance", {**LAYERS, **LATER}, "forward", [2, 2, 2, 3]),
    (APG, {}, "pinned", [2, 2, 2, 2]),
    (MIX, {"adaptive_projected_guidance_start_step": 9}, "pinned", [2, 2, 2, 2]),
]


def with_guider(name: str, settings: Mapping[str, Any]) -> PipelinePolicy:
    wan = name == "SkipLayerGuidance"  # does not know the blocks of the other
    pipe = twin("Wan 2.1") if wan else MODULAR["anima"]()
    pipe.update_components(guider=getattr(diffusers, name)(**settings))
    call = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16}
    return PipelinePolicy(pipe, call=call if wan else MODULAR_CALLS["anima"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "way", "each"), GUIDERS)
def test_a_guider_is_driven_by_its_settings(
    name: str, settings: dict[str, Any], way: str, each: list[int]
) -> None:
    """Its scale is `guidance`; start and stop are counted step by step, before weights load too."""
    made = with_guider(name, settings)
    proof = made.prove(PROMPTS, steps=STEPS, guidance=4.5)
    assert (proof.way, proof.guider) == (way, name)
    assert proof.evaluations == sum(each) / STEPS
    assert guider_passes(made.pipe, 4.5, STEPS) == each
    assert guider_passes(made.pipe, made.scale("none"), STEPS) == [1] * STEPS
    assert "rows of several sigmas are grouped" in str(proof) or way == "pinned"


def test_a_component_that_the_index_lacks_is_added_to_it(folder: Path, tmp_path: Path) -> None:
    less = tmp_path / "less"
    changed(folder, less, lambda index: index.pop("vae"))

    def added() -> Any:
        (less / MODULAR_INDEX).write_text((folder / MODULAR_INDEX).read_text())
        return ModularSource(str(less)).load(torch.float32)

    for follow in (lambda: ModularSource(str(folder)).load(torch.float32), added):
        pipe = advice(
            "model.pipeline: {} has no {} ({}), which {} needs: add it to {}, or give a whole "
            "folder",
            lambda: ModularSource(str(less)).load(torch.float32),
            follow,
        )
        assert pipe.vae is not None


def test_a_guider_is_one_for_all_or_one_for_each_component(folder: Path) -> None:
    guider = {"name": "ClassifierFreeGuidance", "start": 0.5}
    for wrong in ({"guidance": guider}, {"guider": "ClassifierFreeGuidance"}):
        for right in (guider, {"guider": guider}):
            pipe = advice(
                "model.guider: give {name: CLASS, ...settings}, or such for each of",
                partial(skeleton, str(folder), guider=wrong),
                partial(skeleton, str(folder), guider=right),
            )
            assert pipe.guider.config.start == 0.5


def test_a_plan_counts_the_passes_of_each_step(folder: Path) -> None:
    """Before any weights load: of a folder, and of a model of the table."""
    mine = PipelineSettings(pipeline=str(folder), guider={"guider": {"start": 0.5}})
    table = PipelineSettings(pipeline="Lightricks/LTX-2.5-Diffusers", form="modular")
    found, public = describe(mine), describe(table)
    assert found is not None and public is not None
    assert rows_per_state(found, 4.5, STEPS) == [1, 1, 2, 2]
    assert rows_per_state(found, "none", STEPS) == [1] * STEPS
    assert rows_per_state(public, 3.0, 2) == [4, 4]  # perturbed and isolated passes too
    assert rows_per_state(public, "none", 2) == [1, 1]


@pytest.mark.quick_cases("AdaptiveProjectedGuidance")
@pytest.mark.parametrize(
    ("name", "settings", "message", "out"),
    [
        (APG, MOMENTUM, rf"averages over earlier steps .* model.guider: \{{name: {APG}, adaptive",
         {"adaptive_projected_guidance_momentum": None}),
        (MIX, {"adaptive_projected_guidance_start_step": 2}, r"averages over earlier steps",
         {"adaptive_projected_guidance_momentum": None}),
        ("ClassifierFreeZeroStarGuidance", {}, r"first steps zero .*zero_init_steps: 0",
         {"zero_init_steps": 0}),
    ],
    ids=[APG, MIX, "ClassifierFreeZeroStarGuidance"],
)  # fmt: skip
def test_a_guider_without_a_density_is_refused_with_the_way_out(
    name: str, settings: dict[str, Any], message: str, out: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=message):
        with_guider(name, settings).prove(PROMPTS, steps=STEPS, guidance=4.5)
    with_guider(name, {**settings, **out}).prove(PROMPTS, steps=STEPS, guidance=4.5)


def test_settings_of_the_blocks_own_guider_are_laid_over_it(folder: Path) -> None:
    known = guiders_of(skeleton(str(folder), guider={"guider": {"stop": 0.5}}))
    assert known is not None and (known["guider"]["stop"], known["guider"]["start"]) == (0.5, 0.0)
    assert known["guider"]["guidance_scale"] == 5.0  # of its blocks


@pytest.mark.parametrize(
    ("guider", "message"),
    [
        ({"name": "NoSuchGuidance"}, "has no guider 'NoSuchGuidance'"),
        (
            {"name": "ClassifierFreeGuidance", "strength": 2},
            "ClassifierFreeGuidance has no setting .strength.",
        ),
        ({"guider_9": {"name": "ClassifierFreeGuidance"}}, "for each of guider, not guider_9"),
    ],
)
def test_a_guider_is_checked(guider: Mapping[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        skeleton(str(folder), guider=guider)
