"""Adapters of somebody else: merged into the base, and as the start of training."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowrl.cli.model_card import loading_lines, merged_lines
from flowrl.errors import UserError
from flowrl.estimate.activations import kept_by_call
from flowrl.models.diffusers.lora.given_adapters import merge_adapters
from flowrl.models.diffusers.lora.lora import LORA_FILE, SECOND
from flowrl.models.diffusers.lora.lora_formats import read_adapter
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.session.learner import load_policy
from flowrl.settings import PipelineSettings
from flowrl.settings.checks.machine import check_model
from flowrl.settings.model.adapters import FrozenAdapter
from flowrl.settings.read import run_from
from tests.support import runs, text_runs, tiny_lm, tiny_pipelines_video
from tests.support.advice import advice

CPU = torch.device("cpu")
CALL = {"num_inference_steps": 2, "guidance_scale": 1.0, "height": 16, "width": 16}


def written(pipeline: Path, folder: Path, alpha: float = 8.0, seed: int = 3) -> Path:
    """An adapter of rank 4 that changes what the pipeline makes."""
    made = PipelinePolicy.load(str(pipeline), dtype=torch.float32, device="cpu", call={})
    made.add_lora(rank=4, alpha=alpha, targets=None, seed=seed)
    draws = torch.Generator().manual_seed(seed)
    for name, p in made.trainable().items():
        if ".lora_B." in name:
            p.data = 0.3 * torch.randn(p.shape, generator=draws)
    made.save(folder)
    return folder


def plain(pipeline: Path) -> Any:
    lacks = ("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor")
    return StableDiffusion3Pipeline.from_pretrained(pipeline, **dict.fromkeys(lacks))


def image(pipe: Any) -> torch.Tensor:
    return pipe(
        "a red ball", **CALL, generator=torch.Generator().manual_seed(0), output_type="pt"
    ).images


def loaded(pipeline: Path, tmp_path: Path, **model: Any) -> Any:
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    return load_policy(run_from(tree | {"model": tree["model"] | model}, "test"), CPU)


@pytest.mark.slow
def test_merged_adapters_are_diffusers_fused_ones_to_the_bit(
    pipeline: Path, tmp_path: Path
) -> None:
    first, second = (written(pipeline, tmp_path / str(seed), seed=seed) for seed in (1, 2))
    pipe = plain(pipeline)
    base = image(pipe)
    for folder, scale in ((first, 0.7), (second, 1.0)):
        pipe.load_lora_weights(folder)
        pipe.fuse_lora(lora_scale=scale)
        pipe.unload_lora_weights()
    file = str(second / "pytorch_lora_weights.safetensors")
    given = [{"path": str(first), "scale": 0.7}, file]
    made = loaded(pipeline, tmp_path, adapters=given, lora=None)
    assert not torch.equal(image(pipe), base)
    assert torch.equal(image(made.pipe), image(pipe))
    # new adapters on top add nothing yet, and are the only weights that train
    lora = loaded(pipeline, tmp_path, adapters=given, lora=4)
    assert torch.allclose(image(lora.pipe), image(pipe), atol=1e-6)
    assert all(".lora_" in name for name in lora.trainable())


@pytest.mark.slow
def test_a_cards_lines_load_what_stands_below_the_trained_adapter(
    pipeline: Path, tmp_path: Path
) -> None:
    """An adapter was trained on a base with others merged into it: without them it is another
    model."""
    given = [{"path": str(written(pipeline, tmp_path / "style", seed=1)), "scale": 0.7}]
    made = loaded(pipeline, tmp_path, adapters=given, lora=4)
    for p in made.trainable().values():
        p.data = p.data + 0.1
    made.save(tmp_path / "trained")
    settings = PipelineSettings.model_validate({"pipeline": str(pipeline), "adapters": given})
    lines = list(
        loading_lines(settings, str(pipeline), None, [LORA_FILE], str(tmp_path / "trained"))
    )
    names: dict[str, Any] = {"pipe": plain(pipeline)}
    exec("\n".join(line for line in lines if ".from_pretrained(" not in line), names)
    torch.testing.assert_close(image(names["pipe"]), image(made.pipe), atol=1e-5, rtol=1e-5)
    without = plain(pipeline)
    without.load_lora_weights(tmp_path / "trained")
    assert not torch.allclose(image(without), image(made.pipe), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["transformer", "transformer_2"])
def test_a_cards_lines_merge_into_the_expert_that_was_named(part: str, tmp_path: Path) -> None:
    def built() -> Any:
        torch.manual_seed(0)
        return tiny_pipelines_video.wan(2)

    call = {"num_frames": 5, "height": 16, "width": 16}
    made = PipelinePolicy(built(), call=call)
    made.add_lora(rank=2, alpha=4, targets=None, seed=0)
    for p in made.trainable().values():
        p.data = p.data + 0.1
    made.save(tmp_path)
    second = part == "transformer_2"
    adapter = FrozenAdapter(
        path=str(tmp_path / (SECOND if second else LORA_FILE)),
        scale=0.5,
        component="transformer_2" if second else None,
    )
    ours, theirs, base = built(), built(), built()
    merge_adapters(ours, [adapter])
    names = ["transformer", "transformer_2"]
    exec("\n".join(merged_lines(type(theirs), names, adapter, adapter.path)), {"pipe": theirs})
    for name in names:
        want, got, before = (getattr(pipe, name).state_dict() for pipe in (ours, theirs, base))
        assert all(torch.equal(got[key], value) for key, value in want.items())
        assert all(torch.equal(got[key], value) for key, value in before.items()) == (name != part)


@pytest.mark.slow
def test_training_begins_with_the_adapters_of_a_file(pipeline: Path, tmp_path: Path) -> None:
    folder = written(pipeline, tmp_path / "given")
    pipe = plain(pipeline)
    pipe.load_lora_weights(folder)
    made = loaded(pipeline, tmp_path, lora={"from": str(folder)})
    assert torch.equal(image(made.pipe), image(pipe))
    made.save(tmp_path / "again")
    files = [at / "pytorch_lora_weights.safetensors" for at in (folder, tmp_path / "again")]
    before, after = map(load_file, files)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in made.trainable().values())


@pytest.mark.slow
def test_a_run_goes_on_from_it_and_anchors_there(pipeline: Path, tmp_path: Path) -> None:
    """The first KL is 0: `ref` is the given adapter, not the base without it."""
    folder = written(pipeline, tmp_path / "given")
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    tree["model"]["lora"] = {"from": str(folder)}
    tree["recipe"]["kl"] = 0.04
    run = run_from(tree, "test")
    kept = runs.session_of(run, tmp_path)
    policies = kept.learner.policies
    with policies.using("ref"):
        start = image(kept.learner.policy.pipe)
    assert torch.equal(start, image(kept.learner.policy.pipe))
    base = plain(pipeline)
    assert not torch.equal(start, image(base))


def of_peft(pipeline: Path, folder: Path, **config: Any) -> Any:
    """A pipeline with an adapter merged by peft, which peft's `save_pretrained` wrote before."""
    pipe = plain(pipeline)
    targets = ["to_q", "to_v", "to_out.0"]
    own = LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": targets} | config)
    torch.manual_seed(0)
    model = get_peft_model(pipe.transformer, own)
    draws = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if ".lora_B." in name or "magnitude" in name:
            p.data = p.data + 0.3 * torch.randn(p.shape, generator=draws)
    model.save_pretrained(folder)
    pipe.transformer = model.merge_and_unload()
    return pipe


@pytest.mark.quick_cases("config1")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rank_pattern": {"to_q": 2}, "alpha_pattern": {"to_q": 7}},
        pytest.param({"use_rslora": True}, marks=pytest.mark.slow),
        pytest.param({"use_dora": True}, marks=pytest.mark.slow),
    ],
)
def test_adapters_in_pefts_own_format(pipeline: Path, tmp_path: Path, config: Any) -> None:
    """As other trainers save them: base_model.model.LAYER, beside adapter_config.json."""
    folder = tmp_path / "given"
    want = image(of_peft(pipeline, folder, **config))
    assert (image(plain(pipeline)) - want).abs().max() > 0.01
    for source in (folder, folder / "adapter_model.safetensors"):
        made = loaded(pipeline, tmp_path, adapters=[str(source)], lora=None)
        assert torch.allclose(image(made.pipe), want, atol=1e-5)
    evaluated = loaded(pipeline, tmp_path, lora=None)
    evaluated.load_weights(folder)  # as `evaluate --adapter` does
    assert torch.allclose(image(evaluated.pipe), want, atol=1e-5)
    made = loaded(pipeline, tmp_path, lora={"from": str(folder)})
    assert torch.allclose(image(made.pipe), want, atol=1e-5)
    made.save(tmp_path / "again")
    if "use_dora" in config:  # a magnitude per output: more than the product that others read
        again = loaded(pipeline, tmp_path, lora={"from": str(tmp_path / "again")})
        assert torch.allclose(image(again.pipe), want, atol=1e-5)
        return
    changes = read_adapter(tmp_path / "again" / "pytorch_lora_weights.safetensors")
    base = dict(plain(pipeline).transformer.named_parameters())
    merged = dict(of_peft(pipeline, folder, **config).transformer.named_parameters())
    for layer, own in changes.items():
        wanted = (merged[f"{layer}.weight"] - base[f"{layer}.weight"]).double()
        assert torch.allclose(own.change(), wanted, atol=1e-6), layer


def test_weights_of_another_model_are_not_left_out_in_silence(
    pipeline: Path, tmp_path: Path
) -> None:
    folder = written(pipeline, tmp_path / "given")
    file = folder / "pytorch_lora_weights.safetensors"
    renamed = {name.replace("transformer.", "unet.", 1): w for name, w in load_file(file).items()}
    save_file(renamed, file)
    with pytest.raises(UserError, match=r"given has no adapter of this StableDiffusion3Pipeline's"):
        loaded(pipeline, tmp_path, lora=None).load_weights(folder)


def test_what_is_more_than_a_low_rank_update_is_refused(pipeline: Path, tmp_path: Path) -> None:
    for name, config in (("b", {"bias": "lora_only"}), ("m", {"modules_to_save": ["proj_out"]})):
        of_peft(pipeline, tmp_path / name, **config)
        for model in (
            {"adapters": [str(tmp_path / name)]},
            {"lora": {"from": str(tmp_path / name)}},
        ):
            with pytest.raises(UserError, match=r"is not a LoRA alone \(bias, modules_to_save"):
                loaded(pipeline, tmp_path, **model)


@pytest.mark.slow
def test_what_is_more_is_merged_into_the_model_that_a_run_names(
    pipeline: Path, tmp_path: Path
) -> None:
    merged = of_peft(pipeline, tmp_path / "more", bias="lora_only", modules_to_save=["proj_out"])
    folder = shutil.copytree(pipeline, tmp_path / "merged")
    merged.transformer.save_pretrained(folder / "transformer")
    made = advice(
        "is not a LoRA alone (bias, modules_to_save): merge it into the model's weights, and name "
        "that model",
        lambda: loaded(pipeline, tmp_path, adapters=[str(tmp_path / "more")], lora=None),
        lambda: loaded(Path(folder), tmp_path, lora=None),
    )
    assert torch.equal(image(made.pipe), image(merged))


def test_text_adapters_of_peft_begin_a_run(tmp_path: Path) -> None:
    source = tiny_lm.write(tmp_path / "lm")
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(source),
        LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, target_modules=["q_proj", "v_proj"]),
    )
    model.save_pretrained(tmp_path / "given")
    tree = text_runs.tree(source, tmp_path, {"name": "text_grpo", "group": 2, "length": 4})
    tree["model"]["lora"] = {"from": str(tmp_path / "given")}
    policy = load_policy(run_from(tree, "test"), CPU)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(policy.model(ids).logits, model(ids).logits)
    assert len(policy.trainable()) == sum(".lora_" in name for name, _ in model.named_parameters())


@pytest.fixture(scope="module")
def unfit(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An adapter that fits and files that do not, by name."""
    folder = tmp_path_factory.mktemp("unfit")
    weights = load_file(written(pipeline, folder / "given") / "pytorch_lora_weights.safetensors")
    first = next(name for name in weights if "lora_A" in name)
    pair = first.removesuffix("lora_A.weight")
    other = {"lora_A": "lora_down", "lora_B": "lora_up"}
    sides = (f"transformer.nothing.lora_{side}.weight" for side in "AB")
    files = {
        "stranger": {name.replace("attn", "other"): w for name, w in weights.items()},
        "part": weights | {name: torch.zeros(4, 4) for name in sides},
        "nan": weights | {first: weights[first] * torch.nan},
        "half": {f"x.{name}" if "lora_A" in name else name: w for name, w in weights.items()},
        "renamed": {f"x.{k}" if k.startswith(pair) else k: w for k, w in weights.items()},
        "peft": {
            name.replace("transformer.", "base_model.model.", 1): w for name, w in weights.items()
        },
        "kohya": {
            f"lora_unet_{name.replace(side, other[side])}": w
            for name, w in weights.items()
            for side in other
            if side in name
        },
    }
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    paths = {name.upper(): str(folder / f"{name}.safetensors") for name in files}
    return paths | {"GIVEN": str(folder / "given")}


@pytest.mark.slow
def test_a_damaged_adapter_is_downloaded_again(
    pipeline: Path, tmp_path: Path, unfit: dict[str, str]
) -> None:
    file = tmp_path / "style.safetensors"

    def begun(source: str) -> Any:
        shutil.copyfile(source, file)
        return loaded(pipeline, tmp_path, adapters=[str(file)], lora=None)

    whole = f"{unfit['GIVEN']}/pytorch_lora_weights.safetensors"
    advice("{} lacks {}: download it again", lambda: begun(unfit["HALF"]), lambda: begun(whole))
    advice(
        "{} has NaN or infinity in {}: download it again",
        lambda: begun(unfit["NAN"]),
        lambda: begun(whole),
    )


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"lora": {"from": "nowhere"}}, "model.lora.from: there is no file or folder nowhere"),
        ({"adapters": ["no.safetensors"]}, "model.adapters, 1: there is no file or folder no.saf"),
        ({"lora": {"from": "GIVEN", "rank": 4}}, "leave these settings out"),
        ({"adapters": ["STRANGER"]}, r"model.adapters, 1: .*(made for another model|cannot load)"),
        ({"lora": {"from": "PART"}}, "model.lora.from: of the .* made for another model"),
        ({"lora": {"from": "HALF"}}, r"^model.lora.from: \S+half.safetensors lacks .*lora_A"),
        ({"adapters": ["HALF"]}, r"^model.adapters, 1: \S+half.safetensors lacks .*lora_A"),
        ({"adapters": ["RENAMED"]}, r"of the \d+ tensors of .*, \d+ belong to layers"),
        ({"adapters": ["KOHYA"]}, r"its keys are kohya's or ComfyUI's, .* in diffusers' format"),
        ({"adapters": ["PEFT"]}, r"its keys are peft's: .* that has its adapter_config.json too"),
        ({"lora": {"from": "NAN"}}, r"from: .*nan.safetensors has NaN or infinity in .*\.lora_A"),
        ({"adapters": ["NAN"]}, r"adapters, 1: .*nan.safetensors has NaN or infinity in "),
        ({"adapters": [{"path": "GIVEN", "component": "transformer_2"}]}, "has no transformer_2"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_before_the_run(
    pipeline: Path, tmp_path: Path, unfit: dict[str, str], model: dict[str, Any], sentence: str
) -> None:
    text = repr(model)
    for name, file in unfit.items():
        text = text.replace(f"'{name}'", repr(file))
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    tree["model"] |= eval(text)
    with pytest.raises(UserError, match=sentence):
        run = run_from(tree, "test")
        check_model(run.model)
        runs.session_of(run, tmp_path)


def with_text_adapters(pipeline: Path, folder: Path) -> Path:
    """An adapter of the transformer and of a text encoder, as DreamBooth's trainers write them."""
    pipe = plain(pipeline)
    layers = {}
    torch.manual_seed(0)
    for name, target in (("transformer", "to_q"), ("text_encoder", "q_proj")):
        module = getattr(pipe, name)
        module.add_adapter(
            LoraConfig(r=2, lora_alpha=2, init_lora_weights=False, target_modules=[target])
        )
        layers[f"{name}_lora_layers"] = get_peft_model_state_dict(module, adapter_name="default")
    pipe.save_lora_weights(folder, **layers)
    return folder


@pytest.mark.slow
def test_adapters_of_a_text_encoder_are_merged_below_new_ones(
    pipeline: Path, tmp_path: Path
) -> None:
    folder = with_text_adapters(pipeline, tmp_path / "given")
    made = advice(
        "{}: {} also has adapters of {}, which a run does not train: put it into model.adapters, "
        "and train new adapters",
        lambda: loaded(pipeline, tmp_path, lora={"from": str(folder)}),
        lambda: loaded(pipeline, tmp_path, adapters=[str(folder)], lora={"rank": 2}),
    )
    pipe = plain(pipeline)
    pipe.load_lora_weights(folder)
    torch.testing.assert_close(image(made.pipe), image(pipe), atol=1e-5, rtol=1e-5)
    assert all(name.startswith("transformer.") for name in made.trainable())


def test_an_adapter_in_eight_bits_is_merged(pipeline: Path, tmp_path: Path) -> None:
    file = written(pipeline, tmp_path / "given") / "pytorch_lora_weights.safetensors"
    weights = {name: w.to(torch.float8_e4m3fn) for name, w in load_file(file).items()}
    save_file(weights, tmp_path / "eight.safetensors")
    save_file({name: w.float() for name, w in weights.items()}, tmp_path / "whole.safetensors")
    merged = []
    for name in ("eight", "whole"):
        pipe = plain(pipeline)
        merge_adapters(pipe, [FrozenAdapter(path=str(tmp_path / f"{name}.safetensors"))])
        merged.append(pipe.transformer.state_dict())
    assert all(torch.equal(w, merged[1][name]) for name, w in merged[0].items())


def of_another_form(form: str, layer: str) -> dict[str, torch.Tensor]:
    """The tensors of one layer [16 16] as LyCORIS and peft write other forms than low-rank ones."""
    flat, draws = layer.replace(".", "_"), torch.Generator().manual_seed(2)
    shapes = {
        "LoKr": {f"lycoris_{flat}.lokr_w1": (4, 4), f"lycoris_{flat}.lokr_w2": (4, 4)},
        "LoHa": {f"lycoris_{flat}.hada_{n}_{x}": (16, 2)[:: 1 if x == "a" else -1]
                 for n in ("w1", "w2") for x in "ab"},
        "OFT": {f"lycoris_{flat}.oft_blocks": (4, 4, 4)},
        "IA3": {f"base_model.model.{layer}.ia3_l": (16, 1)},
    }  # fmt: skip
    return {name: torch.randn(shape, generator=draws) for name, shape in shapes[form].items()}


@pytest.mark.quick_cases("LoKr")
@pytest.mark.parametrize("form", ["LoKr", "LoHa", "OFT", "IA3"])
def test_other_forms_than_low_rank_ones_are_refused(
    pipeline: Path, tmp_path: Path, form: str
) -> None:
    file = tmp_path / "x.safetensors"
    save_file(of_another_form(form, "transformer_blocks.0.attn.to_q"), file)
    for model in ({"adapters": [str(file)]}, {"lora": {"from": str(file)}}):
        with pytest.raises(UserError, match=r"model\.(adapters, 1|lora\.from): "):
            loaded(pipeline, tmp_path, **model)


def test_an_alpha_beside_diffusers_names_is_refused_where_it_would_be_ignored(
    pipeline: Path, tmp_path: Path
) -> None:
    """Some trainers write it: left out, the adapter would be several times too strong."""
    file = written(pipeline, tmp_path / "given") / "pytorch_lora_weights.safetensors"
    weights = load_file(file)
    scaled = {
        name.replace("lora_A.weight", "alpha"): torch.tensor(2.0)
        for name in weights
        if name.endswith("lora_A.weight")
    }
    save_file(weights | scaled, tmp_path / "x.safetensors")
    for model in ({"adapters": [str(tmp_path / "x.safetensors")]},
                  {"lora": {"from": str(tmp_path / "x.safetensors")}}):  # fmt: skip
        with pytest.raises(UserError, match=r"model\.(adapters, 1|lora\.from): .*x\.safetensors"):
            loaded(pipeline, tmp_path, **model)


def test_a_plan_makes_no_adapters_on_the_cpu(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts what a call keeps, for which a rank of thousands would need the real memory."""
    made: list[str] = []
    real = torch.nn.Linear.reset_parameters

    def seen(layer: torch.nn.Linear) -> None:  # peft moves a new layer to its base's device later
        real(layer)
        if 77 in (layer.in_features, layer.out_features):
            made.append(layer.weight.device.type)

    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", seen)
    tree = {"pipeline": str(pipeline), "lora": {"rank": 77}}
    assert kept_by_call(PipelineSettings.model_validate(tree)) is not None
    assert made and set(made) == {"meta"}


def test_the_start_does_not_print_a_rank_that_the_file_does_not_have(
    pipeline: Path, tmp_path: Path
) -> None:
    """`model.lora.rank` is the default beside `from`, and says nothing about the file's."""
    folder = written(pipeline, tmp_path / "given")
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    tree["model"]["lora"] = {"from": str(folder)}
    shown = str(runs.session_of(run_from(tree, "test"), tmp_path).learner)
    assert f"trained: the adapters of {folder}, " in shown and "rank" not in shown
