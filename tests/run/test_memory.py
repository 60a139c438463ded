"""What `flowrl plan` says of memory is near what is measured, and running out of it is told."""

import re
import struct
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from diffusers import (
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    WanTransformer3DModel,
)
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config

from flowrl.errors import UserError
from flowrl.estimate import fit, memory, sizes
from flowrl.estimate.activations import kept_by_call
from flowrl.iteration import update
from flowrl.models.call_sizes import CallSizes
from flowrl.paths import PROJECT
from flowrl.run.save.checkpoint import newest
from flowrl.run.watch.start_check import unchecked
from flowrl.session.learner import load_policy
from flowrl.session.progress import Progress
from flowrl.session.smaller_calls import explained
from flowrl.settings import RunSettings
from flowrl.settings.read import override, run_from
from tests.support import runs, text_runs
from tests.support.hub.cache import cache
from tests.support.iterations import iterate
from tests.support.runs import flowrl, lines, write
from tests.support.tiny_pipelines import NAMED

FULL_REWARD = """import torch


def full(samples):
    if torch.is_tensor(samples.media) and samples.media.std() > 0 and len(samples.prompts) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    return [0.0] * len(samples.prompts)
"""

WIDER: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "SD3": (
        SD3Transformer2DModel,
        {"sample_size": 32, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 3,
         "attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": 32,
         "caption_projection_dim": 128, "pooled_projection_dim": 32, "pos_embed_max_size": 32},
        {"height": 64, "width": 64},
    ),
    "FLUX.1": (
        FluxTransformer2DModel,
        {"patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 2,
         "attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": 16,
         "pooled_projection_dim": 16, "axes_dims_rope": (8, 12, 12), "guidance_embeds": True},
        {"height": 64, "width": 64},
    ),
    "Wan 2.1": (
        WanTransformer3DModel,
        {"patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 32,
         "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 512,
         "num_layers": 3, "rope_max_seq_len": 64},
        {"height": 64, "width": 64, "num_frames": 5},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pipelines with transformers wide enough that blocks outweigh the rest."""
    made = {}
    for name, (kind, settings, _) in WIDER.items():
        torch.manual_seed(0)
        pipe = NAMED[name].build()
        made[name] = tmp_path_factory.mktemp("wide")
        type(pipe)(**{**pipe.components, "transformer": kind(**settings)}).save_pretrained(
            made[name]
        )
    return made


def run(folder: Path, family: str, tmp: Path, **model: Any) -> RunSettings:
    tree = runs.tree(folder, tmp, runs.FLOW_GRPO, rows_per_call=2)
    tree["train"]["gradient_checkpointing"] = model.pop("checkpointed", False)
    size = dict(WIDER[family][2])
    call = {"max_sequence_length": 16} | {k: size.pop(k) for k in ("num_frames",) if k in size}
    tree["model"] |= {**size, "call": call, **model}
    return run_from(tree, "test")


def saved(policy: Any, rows: int) -> int:
    """Bytes that backward of one call keeps, beside weights."""
    batch = policy.open(["a red ball"], [{}], 4)
    kept: dict[int, Tensor] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value
        return value

    x = torch.randn(rows, *policy.shape(4))
    sigma = torch.full((rows,), policy.schedule(4).sigmas[1])
    call, prompt = batch.policy, torch.zeros(rows, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        call(x, sigma, prompt)
    own = {
        p.untyped_storage().data_ptr()
        for module in policy.pipe.components.values()
        if isinstance(module, nn.Module)
        for p in module.parameters()
    }
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in own)


@pytest.mark.slow
@pytest.mark.parametrize("family", WIDER)
@pytest.mark.parametrize(
    "lora",
    [pytest.param(None, marks=pytest.mark.slow), {"rank": 8, "alpha": 16}],
    ids=["full", "lora"],
)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_activations_are_counted_to_within_a_tenth(
    folders: dict[str, Path], tmp_path: Path, family: str, lora: dict | None, dtype: str
) -> None:
    given = run(folders[family], family, tmp_path, lora=lora, dtype=dtype)
    found = memory.estimate(given)
    assert found is not None
    policy = load_policy(given, torch.device("cpu"))
    assert found.phases["training"] == pytest.approx(saved(policy, 2), rel=0.1)
    again = run(folders[family], family, tmp_path, lora=lora, dtype=dtype, checkpointed=True)
    fewer, block = memory.estimate(again), found.phases["training"] / 4
    assert fewer is not None and fewer.phases["training"] < 0.5 * found.phases["training"]
    policy.checkpoint_gradients()
    inputs = saved(policy, 2)
    assert inputs + 0.5 * block < fewer.phases["training"] < inputs + 2 * block
    counted = kept_by_call(given.model)
    assert counted is not None
    rows = found.phases["training"] / counted.whole
    # what stays while no block runs again is at least what autograd keeps of a checkpointed call
    assert 0.99 * inputs < fewer.phases["training"] - rows * counted.block < 1.25 * inputs


FORMS = ("a file", "a folder", "the hub's cache", "a .bin file", "a .pt file", "a folder with .bin",
         "kohya's names", "kohya's names in a .pt file")  # fmt: skip


def in_form(at: Path, form: str) -> Path:
    """The adapter of a folder in another form."""
    file = at / "pytorch_lora_weights.safetensors"
    tensors = load_file(file)
    if "kohya" in form:
        tensors = {kohya(name): weight for name, weight in tensors.items()}
    if ".pt" in form or ".bin" in form:
        file.unlink()
        file = file.with_suffix(".pt" if ".pt" in form else ".bin")
        torch.save(tensors, file)
    else:
        save_file(tensors, file)
    return at if "folder" in form else file


def kohya(name: str) -> str:
    layer, _, half = name.removeprefix("transformer.").partition(".lora_")
    matrix = {"A": "down", "B": "up"}[half[0]]
    return f"lora_unet_{layer.replace('.', '_')}.lora_{matrix}.weight"


@pytest.mark.parametrize("place", FORMS)
def test_adapters_that_a_run_starts_from_are_counted_as_they_are(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Of another rank and of other layers than those that a run makes by default."""
    targets, rank = ("attn.to_q", "attn.to_v"), 48
    denoiser: Any = SD3Transformer2DModel.from_pretrained(folders["SD3"] / "transformer")
    denoiser.add_adapter(LoraConfig(r=rank, target_modules=list(targets)))
    at = tmp_path / "start"
    StableDiffusion3Pipeline.save_lora_weights(at, get_peft_model_state_dict(denoiser))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    if place == "the hub's cache":
        cache(at, tmp_path / "cache", "owner/name")
    started = {"from": "owner/name" if "hub" in place else str(in_form(at, place))}
    made = {"rank": rank, "alpha": 48, "targets": list(targets)}
    estimates = [
        memory.estimate(run(folders["SD3"], "SD3", tmp_path, lora=lora, dtype="bfloat16"))
        for lora in (started, made, {"rank": 16})
    ]
    assert estimates[0] == estimates[1] != estimates[2]
    trained = sum(p.numel() for n, p in denoiser.named_parameters() if ".lora_" in n)
    assert estimates[0] is not None and estimates[0].parts["gradients"] == 4 * trained
    start = run(folders["SD3"], "SD3", tmp_path, lora=started, dtype="bfloat16")
    assert not [said for said in unchecked(start) if "model.lora.from" in said]


UNCOUNTED = {
    "comfyui": ("diffusion_model.joint_blocks.0.x_block.attn.qkv.lora_A.weight",
                r"names layers as another tool does \(diffusion_model\.joint_blocks\.0.*of rank 8"),
    "processors": ("transformer.blocks.0.attn1.processor.to_q_lora.down.weight",
                   "names no adapters as diffusers, peft and kohya do"),
    "the hub": ("", "owner/absent is not on this machine"),
}  # fmt: skip


@pytest.mark.parametrize("form", UNCOUNTED)
def test_adapters_whose_layers_are_not_known_are_named_as_unchecked(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    key, sentence = UNCOUNTED[form]
    source = "owner/absent"
    if key:
        source = str(tmp_path / "given.safetensors")
        save_file({key: torch.ones(8, 32)}, source)
    given = run(folders["SD3"], "SD3", tmp_path, lora={"from": source}, dtype="bfloat16")
    (said,) = [line for line in unchecked(given) if line.startswith("model.lora.from: ")]
    assert re.search(sentence, said) and "are counted as of new adapters" in said


@pytest.mark.slow
def test_weights_gradients_and_optimizer_are_counted(pipeline, tmp_path) -> None:
    small = {"rank": 4, "alpha": 8}
    for lora, dtype in ((None, "bfloat16"), (small, "float32"), (small, "float64")):
        tree = runs.tree(pipeline, tmp_path, runs.NFT)
        tree["model"] |= {"lora": lora, "dtype": dtype}
        tree["evaluate"]["average"] = 0.9
        kept = runs.opened(tree, tmp_path)
        iterate(kept, Progress())
        found = memory.estimate(kept.run)
        assert found is not None and not found.unknown
        states = list(kept.learner.optimizer.state.values())
        moments = sum(s[n].nbytes for s in states for n in ("exp_avg", "exp_avg_sq"))
        pipe, policies = kept.learner.policy.pipe, kept.learner.policies
        frozen = [pipe.text_encoder, pipe.text_encoder_2, pipe.vae]
        trained = sum(p.numel() for p in policies.parameters.values())
        wide = {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]
        fine = max(wide, 4)
        assert found.parts["frozen parts"] == sum(
            p.numel() * wide for m in frozen for p in m.parameters()
        )
        assert found.parts["gradients"] == fine * trained
        assert found.parts["optimizer"] == pytest.approx(moments, rel=0.02)  # some never move
        assert found.parts["averages and initial weights"] == sum(
            t.nbytes for weights in policies._weights.values() for t in weights.values()
        )
        assert found.parts["masters" if lora is None else "adapters"] == fine * trained
        assert found.parts["merged weights"] == 0


def test_merged_weights_are_counted(pipeline, tmp_path) -> None:
    tree = runs.tree(pipeline, tmp_path, runs.NFT)
    tree["model"] |= {"lora": {"rank": 4, "alpha": 8, "merge": "untrained"}, "dtype": "bfloat16"}
    kept = runs.opened(tree, tmp_path)
    merging, found = kept.learner.merging, memory.estimate(kept.run)
    with merging.merged():
        held = [layer.get_base_layer().weight.nbytes for layer in merging.layers]
    assert found is not None and found.parts["merged weights"] == sum(held) > 0


@pytest.mark.slow
def test_the_plan_says_what_fits_and_what_to_change(folders, tmp_path, capsys) -> None:
    given = run(folders["SD3"], "SD3", tmp_path, lora=None)
    found = memory.estimate(given)
    assert found is not None
    assert "fits in 1.0 GiB (--memory)" in fit.memory_report(given, fit.limit("1GiB"))
    small = f"{found.total / 2**20 * 0.8:.1f}MiB"
    said = fit.memory_report(given, fit.limit(small))
    assert "does not fit in" in said
    assert "train.gradient_checkpointing: true (saves about" in said
    changes = fit.advice(given, 0)
    names = [change.split(":")[0] for change in changes]
    assert names[0] == "train.gradient_checkpointing" and "train.optimizer" in names
    assert {"train.rows_per_call", "model.dtype"} <= set(names)
    for wrong in ("24", "24 Gib", "much"):
        with pytest.raises(UserError, match=r"--memory: .* is not a size"):
            fit.limit(wrong)
    config = write(runs.tree(folders["SD3"], tmp_path, runs.FLOW_GRPO), tmp_path)
    assert flowrl("plan", config, "--memory", "8GiB") == 0
    assert "memory: about" in capsys.readouterr().out


def test_what_is_not_here_is_said_to_be_unknown(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tree = runs.tree(Path("nobody/nothing"), tmp_path, runs.NFT)
    said = fit.memory_report(run_from(tree, "test"), fit.limit("24GiB"))
    assert said.startswith("memory: unknown, since nobody/nothing is not on this machine")
    assert fit.advice(run_from(tree, "test")) == []


def test_a_gguf_file_is_planned_by_its_metadata_or_the_reason_is_said(tmp_path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF, but damaged")
    tree = text_runs.tree(tmp_path, tmp_path, text_runs.GRPO)
    tree["model"] |= {"gguf_file": "small.gguf", "lora": {"rank": 2}}
    damaged = run_from(tree, "test")
    said = fit.memory_report(damaged, fit.limit("24GiB"))
    assert "small.gguf cannot be read as GGUF" in said or "pip install 'flowrl[gguf]'" in said
    assert said.startswith("memory: unknown, since") and fit.fits(damaged, fit.limit("1MiB"))
    numbers = {"block_count": 2, "context_length": 64, "embedding_length": 32, "vocab_size": 50}
    numbers |= {"feed_forward_length": 48, "attention.head_count": 4, "attention.head_count_kv": 2}
    fields = [(f"llama.{name}", struct.pack("<II", 4, n)) for name, n in numbers.items()]
    fields += [("general.architecture", struct.pack("<IQ", 8, 5) + b"llama")]
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields))  # version, tensors, fields
    body = [struct.pack("<Q", len(name)) + name.encode() + value for name, value in fields]
    (tmp_path / "whole.gguf").write_bytes(b"".join([head, *body]))
    tree["model"] |= {"gguf_file": "whole.gguf"}
    whole = run_from(tree, "test")
    if "pip install" in fit.memory_report(whole, fit.limit(None)):
        pytest.skip("this transformers needs the package gguf")
    found = sizes.of(whole.model, 8)
    attention, feed_forward = 32 * 32 * 2 + 32 * 16 * 2, 3 * 32 * 48
    assert found is not None and found.blocks == 2
    assert found.trained == 2 * (attention + feed_forward + 64) + 32 + 50 * 32  # tied


def test_a_call_is_no_larger_than_the_texts_of_a_step(tmp_path) -> None:
    """The 186 rows of an automatic call would be counted otherwise: an iteration has 8 texts."""
    folder = PROJECT / "flowrl" / "demo" / "sums-lm"
    tree = text_runs.tree(folder, tmp_path, text_runs.GRPO)
    tree["prompts"]["per_iteration"], tree["recipe"]["group"] = 2, 4
    phases = []
    for updates, rows in ((1, "auto"), (1, 8), (2, "auto"), (2, 4)):
        tree["train"] |= {"updates": updates, "rows_per_call": rows}
        found = memory.estimate(run_from(tree, "test"))
        assert found is not None
        phases.append(found.phases["training"])
    assert phases[0] == phases[1] and phases[2] == phases[3] == phases[0] // 2


def test_a_call_is_no_larger_than_the_samples_of_a_step(folders, tmp_path) -> None:
    """The rows of calls that an iteration cannot fill are not counted, nor advised to be fewer."""
    tree = runs.tree(folders["SD3"], tmp_path, runs.FLOW_GRPO)
    tree["prompts"] |= {"per_iteration": 3, "held_out": None}
    tree["recipe"]["group"] = 4
    found = {}
    for updates, rows in ((1, 100), (1, 12), (2, 100), (2, 6), (1, 6)):
        tree["train"] |= {"updates": updates, "rows_per_call": rows}
        given = run_from(tree, "test")
        made = memory.estimate(given)
        assert made is not None
        found[updates, rows] = made.phases["training"], made.phases["decoding"]
    assert found[1, 100] == found[1, 12] and found[1, 6][0] == found[2, 6][0] == found[2, 100][0]
    assert found[1, 12] == pytest.approx([2 * part for part in found[1, 6]])
    tree["evaluate"]["samples"], tree["prompts"]["held_out"] = 50, tree["prompts"]["train"]
    tree["train"] |= {"updates": 1, "rows_per_call": 100}
    made = memory.estimate(run_from(tree, "test"))  # evaluations decode more samples
    assert made is not None and 12 * made.phases["decoding"] == 50 * found[1, 12][1]


@pytest.mark.slow
def test_advice_is_from_the_sizes_that_calls_have_by_now(folders, tmp_path) -> None:
    given = run(folders["SD3"], "SD3", tmp_path)
    kept = override(given, ["--prompts.per_iteration", "8", "--train.rows-per-call", "16"])

    class Lowered:
        sizes = CallSizes.same(1)

    for policy, advised in ((None, True), (Lowered(), False)):
        with pytest.raises(UserError) as refused, explained(kept, policy):
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert ("train.rows_per_call" in str(refused.value)) is advised


def test_several_devices_shard_what_does_not_fit(folders, tmp_path) -> None:
    given = run(folders["SD3"], "SD3", tmp_path, lora=None)
    found = memory.estimate(given)
    assert found is not None
    shards = found.sharded(4)
    held = sum(b for n, b in found.parts.items() if n not in ("frozen parts", "states", "media"))
    cut = held * (1 - found.outside) + found.parts["states"] + found.parts["media"]
    freed = sum(found.parts.values()) - sum(shards.parts.values())
    assert freed == pytest.approx(cut * 3 / 4, abs=len(found.parts))
    assert shards.phases["training"] == found.phases["training"] + found.gathered
    between = fit.MemoryLimit((found.total + shards.total) // 2, "H100", 4)
    assert "sharded over 4 processes" in fit.memory_report(given, between)
    assert fit.fits(given, between)
    alone = fit.MemoryLimit(between.most, "H100", 1)
    assert not fit.fits(given, alone)
    half = override(given, ["--model.dtype", "float16"])  # which a start under FSDP2 refuses
    small = memory.estimate(half)
    assert small is not None
    limit = fit.MemoryLimit((small.total + small.sharded(4).total) // 2, "H100", 4)
    assert not fit.fits(half, limit) and "sharded" not in fit.memory_report(half, limit)


@pytest.mark.parametrize("lora", [None, {"rank": 8}], ids=["all", "lora"])
def test_embeddings_and_the_head_are_sharded_and_gathered_for_a_call(tmp_path, lora) -> None:
    """A model of 7.6 billion weights with 1.1 in its embeddings and head, which are not tied."""
    layers = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    width = {"hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064}
    Qwen2Config(**layers, **width, tie_word_embeddings=False).save_pretrained(tmp_path / "qwen")
    tree = text_runs.tree(tmp_path / "qwen", tmp_path, text_runs.GRPO)
    tree["model"] |= {"lora": lora, "dtype": "bfloat16"}
    found = memory.estimate(run_from(tree, "test"))
    assert found is not None and found.outside == 0
    shards = found.sharded(8)
    assert 8 * sum(shards.parts.values()) == pytest.approx(sum(found.parts.values()), rel=0.01)
    gradients = 2 * 1.09e9 if lora is None else 0
    held = 2 * (1.09e9 + 2 * (7.62e9 - 1.09e9) / 28) + gradients
    assert found.gathered == pytest.approx(held, rel=0.01)
    assert shards.phases["training"] == found.phases["training"] + found.gathered
    whole = found.parts["trained model"] + found.parts.get("adapters", 0)
    assert shards.phases["sampling"] == pytest.approx(whole * 7 / 8, rel=1e-6)
    tree["model"]["server"] = {"url": "http://127.0.0.1:1/v1", "model": "m", "sync": "none"}
    tree["prompts"]["held_out"] = None
    keeping = memory.estimate(run_from(tree, "test"))
    assert keeping is not None and "sampling" not in keeping.sharded(8).phases


def test_decoded_media_are_on_the_device_until_they_were_scored(folders, tmp_path) -> None:
    tree = runs.tree(folders["Wan 2.1"], tmp_path, runs.FLOW_GRPO)
    tree["prompts"] |= {"per_iteration": 3, "held_out": None}
    tree["model"] |= {"height": 64, "width": 64, "device": "auto"}
    tree["model"]["call"] = {"num_frames": 5, "max_sequence_length": 16}
    videos = 3 * runs.FLOW_GRPO["group"] * 5 * 3 * 64 * 64 * 4
    found = memory.estimate(run_from(tree, "test"))
    assert found is not None and found.media == found.resting == videos
    assert found.total >= sum(found.parts.values()) + found.phases["decoding"] + videos
    assert found.sharded(4).media == videos // 4
    tree["model"]["device"] = "cpu"
    there = memory.estimate(run_from(tree, "test"))
    assert there is not None and there.parts["media"] == videos and there.media == 0


def test_tokens_of_texts_count_where_they_pass_through_blocks(folders, tmp_path) -> None:
    found = {}
    for length in (16, 272):  # 256 tokens of an image beside them
        given = run(folders["FLUX.1"], "FLUX.1", tmp_path)
        given = override(given, ["--model.call", f"{{max_sequence_length: {length}}}"])
        made = memory.estimate(given)
        assert made is not None
        found[length] = made.phases["training"]
    assert found[272] / found[16] == pytest.approx((256 + 272) / (256 + 16), rel=0.01)


def test_a_component_without_readable_weights_is_named(folders, tmp_path) -> None:
    import shutil

    folder = tmp_path / "bare"
    shutil.copytree(folders["SD3"], folder)
    for path in (folder / "text_encoder").glob("*.safetensors"):
        path.unlink()
    (folder / "text_encoder/config.json").unlink()  # which would tell its size
    found = memory.estimate(run(folder, "SD3", tmp_path))
    assert found is not None
    assert found.unknown == ("weights of text_encoder",)
    assert "not counted: weights of text_encoder" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
        pytest.param(
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            marks=pytest.mark.slow,
        ),
        pytest.param(MemoryError(), marks=pytest.mark.slow),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_running_out_of_memory_is_a_sentence_and_the_run_goes_on(
    pipeline, tmp_path, capsys, monkeypatch, error
) -> None:
    config = write(runs.tree(pipeline, tmp_path, runs.NFT), tmp_path)
    folder, real, calls = tmp_path / "run", update.update, []

    def full(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return real(*given, **named)

    monkeypatch.setattr(update, "update", full)
    code = flowrl("train", config, "--folder", folder)
    said = capsys.readouterr().err
    assert code == 3
    assert "out of memory (" in said and "the run needs about" in said
    assert "train.gradient_checkpointing: true (saves about" in said
    assert "flowrl train --resume" in said and "Traceback" not in said
    kept = newest(folder)
    assert kept is not None and kept.name == "000001"
    monkeypatch.setattr(update, "update", real)
    assert flowrl("train", "--resume", folder) == 0
    assert [line["iteration"] for line in lines(folder)] == [0, 1, 2, 3]


def test_other_errors_are_not_taken_for_it(pipeline, tmp_path) -> None:
    given = run_from(runs.tree(pipeline, tmp_path, runs.NFT), "test")
    with pytest.raises(RuntimeError, match="shapes"), explained(given):
        raise RuntimeError("shapes do not fit")


@pytest.mark.slow
def test_a_reward_without_memory_is_named(pipeline, tmp_path, capsys) -> None:
    (tmp_path / "mine.py").write_text(FULL_REWARD)
    tree = runs.tree(pipeline, tmp_path, runs.NFT, self_test="off")
    tree["rewards"] = [{"name": f"{tmp_path / 'mine.py'}:full", "label": "mine"}]
    assert flowrl("train", write(tree, tmp_path), "--folder", tmp_path / "run") == 3
    said = capsys.readouterr().err
    assert "the reward mine raised OutOfMemoryError: CUDA out of memory" in said
    assert "(mine.py, 6)" in said and "rows_per_call" not in said


def test_the_text_model_is_counted_too() -> None:
    from flowrl.paths import find

    tree = {
        "recipe": {"name": "text_grpo", "length": 8},
        "model": {"language": str(find("flowrl/demo/sums-lm")), "lora": None},
        "prompts": {"train": "x.txt"},
        "rewards": [{"name": "exact_answer"}],
    }
    found = memory.estimate(run_from(tree, "test"))
    assert found is not None and found.parts["trained model"] > 1e5
    assert found.phases["training"] > 0
    assert sizes.of(run_from(tree, "test").model, 8).tokens == sizes.PROMPT + 8


@pytest.mark.parametrize("window", [None, 16])
def test_keys_and_values_of_sampling_are_those_of_the_cache(window: int | None) -> None:
    """Their count for a row is the size of transformers' own cache after as many tokens."""
    more = {} if window is None else {"use_sliding_window": True, "sliding_window": window}
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_window_layers=2, **more,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = 40
    with torch.no_grad():
        cache = model(input_ids=torch.zeros(1, tokens, dtype=torch.long)).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    counted = sizes.cached_numbers(config, tokens)
    # a layer with a window keeps one token fewer than it, since the next one joins them
    lacking = 0 if window is None else 2 * 2 * 8 * 2
    assert counted - held == lacking
