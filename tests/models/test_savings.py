"""Less memory: the same numbers, and really less of what it is about."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.models import savings
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.session import optimizers
from flowrl.settings import Train
from flowrl.settings.read import check_run, run_from
from tests.support import runs
from tests.support.driving import PROMPTS, STEPS, noise, policy
from tests.support.iterations import collect
from tests.support.tiny_lm import gpt2, llama, tokenizer
from tests.support.tiny_pipelines import FAMILIES, NAMED


def counted(block: nn.Module) -> list[bool]:
    """Grows by an entry a forward pass of the block."""
    calls: list[bool] = []
    inner = block.forward

    def forward(*args: Any, **named: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return inner(*args, **named)

    block.forward = forward
    return calls


def gradients(made: PipelinePolicy) -> tuple[Tensor, list[Tensor], int]:
    """The velocity, the gradients of its square, and the numbers that backward kept for it."""
    velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=1.0)
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.numel()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        v = velocity(noise(made), torch.full((2,), made.schedule(STEPS).sigmas[1]), torch.arange(2))
    v.square().sum().backward()
    own = {p.untyped_storage().data_ptr() for p in made.pipe.transformer.parameters()}
    numbers = sum(count for place, count in kept.items() if place not in own)
    return v.detach(), [p.grad for p in made.trainable().values() if p.grad is not None], numbers


def first_block(denoiser: nn.Module) -> nn.Module:
    return next(m for m in denoiser.modules() if isinstance(m, nn.ModuleList))[0]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(
    "family", ["sd3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("flux", "wan 2.1"))]
)
def test_checkpointed_gradients_are_the_same_and_blocks_run_again(family: str, lora: bool) -> None:
    build, call = FAMILIES[family]
    seen = []
    for checkpointed in (False, True):
        made = PipelinePolicy(build(), call=call)
        made.add_lora(rank=2, alpha=4, targets=None, seed=0) if lora else made.train_all()
        if checkpointed:
            made.checkpoint_gradients()
        made.bind(made.encode(PROMPTS), steps=STEPS, guidance=1.0)  # the proof, uncounted
        calls = counted(first_block(made.pipe.transformer))
        seen.append((*gradients(made), calls))
        assert not any(module.training for module in made.pipe.transformer.modules())
    (v, plain, numbers, once), (same, again, fewer, twice) = seen
    assert torch.equal(v, same)
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert once == [True] and twice == [True, True]
    assert fewer < 0.7 * numbers


def test_a_unet_checkpoints_too_and_a_model_that_cannot_says_so() -> None:
    build, call = NAMED["SD1.5"].build, NAMED["SD1.5"].call
    made = PipelinePolicy(build(), call=call)
    made.train_all()
    made.checkpoint_gradients()
    velocity = made.bind(made.encode(PROMPTS), steps=STEPS, guidance=1.0)
    calls = counted(made.pipe.unet.down_blocks[0].resnets[0])
    sigma = torch.full((2,), made.schedule(STEPS).sigmas[1])
    velocity(noise(made), sigma, torch.arange(2)).sum().backward()
    assert len(calls) == 2
    made.pipe.unet._supports_gradient_checkpointing = False
    with pytest.raises(UserError, match=r"UNet2DConditionModel does not support it.*rows_per_call"):
        made.checkpoint_gradients()
    with pytest.raises(UserError, match="Linear does not support it"):
        savings.checkpoint_layers(nn.Linear(1, 1))


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_language_model_checkpoints_without_dropout_and_keeps_its_cache(
    build: Callable[[], Any],
) -> None:
    from flowrl.models.language.policy import CausalPolicy

    found = []
    for checkpointed in (False, True):
        model = build()
        made = CausalPolicy(model, tokenizer())
        layer = first_block(model)
        made.train_all()
        if checkpointed:
            made.checkpoint_gradients()
        calls = counted(layer.mlp)
        ids = torch.arange(1, 7)[None]
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        assert len(calls) == (2 if checkpointed else 1)
        found.append([p.grad for p in model.parameters()])
        assert not any(module.training for module in model.modules())
        widths: list[int] = []
        hook = layer.register_forward_pre_hook(
            lambda _, args, widths=widths: widths.append(args[0].shape[1])
        )
        model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        hook.remove()
        assert widths == [6, 1, 1]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_settings_reach_the_model_and_frozen_parts_rest(pipeline, tmp_path, monkeypatch) -> None:
    """Two iterations' worth of everything: the same samples as without."""
    plain = runs.session(pipeline, tmp_path, runs.FLOW_GRPO)
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO, gradient_checkpointing=True)
    tree["model"] |= {"offload": True, "vae": {"tiling": True, "slicing": True}}
    kept = runs.opened(tree, tmp_path)
    frozen = kept.learner.policy.frozen
    assert sorted(frozen.parts) == ["text_encoder", "text_encoder_2", "vae"]
    assert not any(hook.awake for _, hook in frozen.parts.values())
    vae, pipe = kept.learner.policy.pipe.vae, kept.learner.policy.pipe
    assert vae.use_tiling and vae.use_slicing and pipe.transformer.gradient_checkpointing
    awake: dict[str, set[str]] = {"transformer": set(), "vae": set(), "text_encoder": set()}
    for name, found in awake.items():
        getattr(pipe, name).register_forward_hook(noting(frozen, found))
    decoder = vae.decoder
    decoder.register_forward_hook(noting(frozen, awake["vae"]))
    moved: list[tuple[str, str]] = []
    for name, (module, _) in frozen.parts.items():
        real = module.to
        monkeypatch.setattr(
            module, "to", lambda to, n=name, real=real: (moved.append((n, str(to))), real(to))[1]
        )
    ours = collect(kept, 0)
    assert awake["transformer"] == set()  # nothing else is on the device while it is driven
    assert awake["vae"] == {"vae"} and "text_encoder" in awake["text_encoder"]
    assert moved[0] == ("text_encoder", "cpu") and len(moved) % 2 == 0  # there, and back to rest
    assert not any(hook.awake for _, hook in frozen.parts.values())
    torch.testing.assert_close(ours.samples.media, collect(plain, 0).samples.media)


def noting(frozen: Any, found: set[str]) -> Callable[..., None]:
    return lambda *_: found.update(name for name, (_, h) in frozen.parts.items() if h.awake)


@pytest.mark.slow
def test_decoding_in_chunks_gives_the_same_media() -> None:
    whole, seen = policy(rows=None), []
    x0, prompt = noise(whole, 5), torch.tensor([0, 1, 1, 0, 1])
    for rows in (None, 1, 2):
        made = policy(rows=rows)
        made.schedule(STEPS)  # tries the loop out, decoder included
        calls = counted(made.pipe.vae.decoder)
        taken = made.encode(PROMPTS).take(prompt)
        media = made.decode(x0, taken, steps=STEPS, guidance=1.0)
        seen.append((media, len(calls)))
    assert [calls for _, calls in seen] == [1, 5, 3]
    for media, _ in seen[1:]:
        torch.testing.assert_close(media, seen[0][0], rtol=0, atol=1e-6)


def test_latents_are_kept_of_trained_steps_alone(pipeline, tmp_path) -> None:
    recipe = {"name": "mix_grpo", "steps": 6, "group": 4, "window": 2}
    kept = runs.session(pipeline, tmp_path, recipe)
    experience = collect(kept, 0)
    assert len(experience.rows) == 2  # of 6 steps
    storages = {
        t.untyped_storage().data_ptr() for rows in experience.rows for t in (rows.x, rows.x_next)
    }
    assert len(storages) == 3  # a state once, though it ends a step and begins the next


@pytest.fixture
def native() -> Iterator[None]:
    before = _AttentionBackendRegistry._active_backend
    yield
    _AttentionBackendRegistry.set_active_backend(before)


@pytest.mark.slow
@pytest.mark.usefixtures("native")
def test_attention_backends_by_diffusers_names() -> None:
    build, call = FAMILIES["wan 2.1"]
    made = PipelinePolicy(build(), call=call)
    savings.attention(made.denoisers, "_native_math")
    processor = made.pipe.transformer.blocks[0].attn1.processor
    assert processor._attention_backend == AttentionBackendName._NATIVE_MATH
    made.train_all()
    v, grads, _ = gradients(made)
    plain = PipelinePolicy(build(), call=call)
    plain.train_all()
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
    want, wanted, _ = gradients(plain)
    torch.testing.assert_close(v, want)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for name, message in (
        ("flsh", "model.attention: flsh: .*must be one of"),
        ("flash", "model.attention: flash: "),  # not installed here
        ("sage", "sage has no backward pass"),
    ):
        with pytest.raises(UserError, match=message):
            savings.attention(made.denoisers, name)
    unet = NAMED["SD1.5"].build().unet
    with pytest.raises(UserError, match="attention of UNet2DConditionModel is not dispatched"):
        savings.attention([unet], "native")


@pytest.mark.slow
def test_compiled_blocks_say_the_same_and_follow_the_weights() -> None:
    """With the graphs run as they are; the compiler itself is in test_compile.py."""
    made, plain = policy(), policy()
    for one in (made, plain):
        one.add_lora(rank=2, alpha=4, targets=None, seed=0)
    savings.compile_blocks(made.denoisers, backend="eager")
    same(made, plain)
    for one in (made, plain):
        for name, p in one.trainable().items():
            if ".lora_B." in name:
                p.data = torch.full_like(p, 0.1)  # as `Policies.using` puts weights in
    same(made, plain)

    class Single(nn.Linear):
        _repeated_blocks = None

    with pytest.raises(UserError, match="Single has no repeated blocks"):
        savings.compile_blocks([Single(1, 1)])


def same(made: PipelinePolicy, plain: PipelinePolicy) -> None:
    for one in (made, plain):
        for p in one.trainable().values():
            p.grad = None
    (v, grads, _), (want, wanted, _) = gradients(made), gradients(plain)
    torch.testing.assert_close(v, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_what_is_for_pictures_is_refused_for_texts_and_missing_parts_are_named() -> None:
    for name, value in (("offload", True), ("compile", True)):
        with pytest.raises(UserError, match=f"{name} is a setting of pipeline models"):
            run_from(
                {
                    "recipe": {"name": "text_grpo"},
                    "model": {"language": "a/b", name: value},
                    "prompts": {"train": "x.txt"},
                    "rewards": [{"name": "exact_answer"}],
                },
                "test",
            )
    bare = SimpleNamespace(vae=None)
    with pytest.raises(UserError, match=r"model.vae.tiling: SimpleNamespace does not support it"):
        savings.decoder(bare, tiling=True, slicing=False)


def test_eight_bit_adam_is_bitsandbytes_or_a_sentence(pipeline, tmp_path, monkeypatch) -> None:
    t = Train(optimizer="adamw8bit", lr=0.5, betas=(0.1, 0.2), weight_decay=0.3)
    monkeypatch.setattr("flowrl.settings.checks.machine.find_spec", lambda name: None)
    tree = runs.tree(Path(pipeline), tmp_path, runs.NFT, optimizer="adamw8bit")
    with pytest.raises(UserError, match=r"adamw8bit needs bitsandbytes.*pip install"):
        check_run(run_from(tree, "test"))
    monkeypatch.setattr("flowrl.settings.checks.machine.find_spec", lambda name: object())
    stand_in = ModuleType("bitsandbytes.optim")
    eight = type("AdamW8bit", (torch.optim.AdamW,), {})
    vars(stand_in)["AdamW8bit"] = eight
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", stand_in)
    weight = nn.Parameter(torch.zeros(1))
    built = optimizers.build(t, [weight])
    assert type(built) is eight and built.param_groups[0]["params"] == [weight]
    want = {"lr": 0.5, "betas": (0.1, 0.2), "weight_decay": 0.3}
    assert {name: built.param_groups[0][name] for name in want} == want
