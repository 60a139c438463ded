"""The script that makes the video demo's pipeline: every part learns, a broken call goes on."""

import importlib
import random

import pytest
import torch

from flowrl.demo import moving_world
from flowrl.paths import PROJECT

torch.set_num_threads(1)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "scripts"))
    return importlib.import_module("pretrain_video")


def test_pretraining_moves_all_parts(script, tmp_path):
    torch.manual_seed(0)
    pipe = script.make_pipeline()
    work = script.Work.quick()
    weights = [p for part in script.flow_parts(pipe) for p in part.parameters()]
    before = [p.detach().clone() for p in weights]
    prompts = moving_world.moving_prompts_of("train")[: work.videos]
    saved = script.Saved(tmp_path / "unfinished", "quick")
    script.train_flow(pipe, torch.randn(len(prompts), 8, 3, 4, 4), prompts, work, saved)
    moved = sum(not torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    assert moved > 0.5 * len(weights)
    assert all(p.isfinite().all() for p in weights)


def test_sharpening_moves_the_decoder_alone(script):
    torch.manual_seed(0)
    work = script.Work.quick()
    films = script.paint_many(moving_world.moving_prompts_of("train")[:4], random.Random(0))
    vae = script.make_pipeline().vae
    script.leave_halved(vae)
    before = {name: p.clone() for name, p in vae.named_parameters()}
    script.sharpen_decoder(vae, films, work)
    moved = {n for n, p in vae.named_parameters() if not torch.equal(before[n], p)}
    assert moved and all(n.startswith(("decoder.", "post_quant_conv.")) for n in moved)
    assert all(torch.equal(p, p.half().float()) for p in vae.parameters())


def test_the_initial_code_of_a_motion_depends_on_its_own_object(script):
    """With T5's own initial values the code of "right" moves by 0.02 to 0.07 of its length."""
    torch.manual_seed(0)
    pipe = script.make_pipeline()
    prompts = [
        "a red circle moving right and a blue square moving left",
        "a blue circle moving right and a red square moving left",
        "a blue square moving left and a red circle moving right",
    ]
    with torch.no_grad():
        text, _ = pipe.encode_prompt(
            prompts, do_classifier_free_guidance=False, max_sequence_length=12
        )
    right, other_colour, same_object = text[0, 4], text[1, 4], text[2, 10]
    assert (right - other_colour).norm() > 0.3 * right.norm()
    assert (right - same_object).norm() < 0.3 * right.norm()


@pytest.mark.slow
def test_pretraining_goes_on_where_it_was_interrupted(script, tmp_path, monkeypatch):
    """Killed in the fourth step of five, saved after two: the weights are those of one call."""
    monkeypatch.setattr(importlib.import_module("pretraining"), "SAVED_EVERY", 2)
    prompts = moving_world.moving_prompts_of("train")[:4]
    latents = torch.randn(4, 8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    work = script.Work(flow_steps=5, flow_batch=2)

    def trained(kills_at: int | None, name: str):
        torch.manual_seed(0)
        random.seed(0)
        pipe, loss, calls = script.make_pipeline(), flow_loss, iter(range(1, 9))

        def flaky(*given):
            if next(calls) == kills_at:
                raise KeyboardInterrupt
            return loss(*given)

        monkeypatch.setattr(script, "flow_loss", flaky)
        script.train_flow(pipe, latents, prompts, work, script.Saved(tmp_path / name, ""))
        return [p.detach().clone() for part in script.flow_parts(pipe) for p in part.parameters()]

    flow_loss = script.flow_loss
    whole = trained(None, "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(4, "broken")
    assert (tmp_path / "broken").is_file()
    rest = trained(None, "broken")
    assert all(torch.equal(a, b) for a, b in zip(whole, rest, strict=True))
    assert not list(tmp_path.iterdir())  # nothing is left of what was unfinished
