"""The script that makes the editing pipeline trains what the pipeline's own call computes."""

import importlib
import random

import pytest
import torch
import yaml

from flowrl.demo import edit_world, world
from flowrl.media.pictures import to_image
from flowrl.paths import PROJECT
from rewards.perception.media import to_tensor
from tests.support import runs

torch.set_num_threads(1)
BASE = PROJECT / "flowrl" / "demo" / "shapes-sd3"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "scripts" / "demo_models"))
    return importlib.import_module("pretrain_edit")


def test_tokens_of_training_are_those_of_the_pipelines_own_call(script):
    """Source latents, places, words and the time reach the network as in a sample."""
    torch.manual_seed(0)
    pipe = script.make_pipeline(BASE)
    pair = edit_world.draw_pair("move the red circle to the right", random.Random(0))
    seen: list[dict] = []
    pipe.transformer.register_forward_pre_hook(
        lambda _, args, named: seen.append(named), with_kwargs=True
    )
    image = to_image(world.render([pair.source])[0])
    with torch.no_grad():
        pipe(image, pair.instruction, num_inference_steps=1, output_type="latent", **script.CALL)
        data = script.make_data(pipe, [pair])
        script.flow_loss(pipe, data._replace(others=data.instructions), [0])
    own, ours = seen
    assert own["hidden_states"].shape == ours["hidden_states"].shape == (1, 32, 16)
    again = pipe.vae.encode(to_tensor(image)[None] * 2 - 1).latents
    torch.testing.assert_close(own["hidden_states"][:, 16:], script.pack(pipe, again))
    # drawn colours were rounded to bytes in the image
    torch.testing.assert_close(
        own["hidden_states"][:, 16:], ours["hidden_states"][:, 16:], rtol=0, atol=0.1
    )
    assert own["img_ids"].tolist() == ours["img_ids"].tolist()
    for name in ("txt_ids", "encoder_hidden_states", "pooled_projections"):
        torch.testing.assert_close(own[name], ours[name])
    assert own["timestep"].item() == 1 and 0 < ours["timestep"].item() < 1
    ids = pipe.tokenizer_2(edit_world.all_instructions()).input_ids
    assert all(2 not in each and len(each) <= script.WORDS for each in ids)  # 2: unknown


@pytest.mark.slow
def test_pretraining_moves_all_parts_and_a_run_trains_the_result(script, tmp_path):
    """A few steps, then an iteration of the demo's configuration, cut down."""
    out = tmp_path / "edits-kontext"
    given = script.PretrainArguments(out, quick=True, threads=1)
    script.main(given)
    assert sum(f.stat().st_size for f in out.rglob("*") if f.is_file()) < 4e6
    tree = yaml.safe_load((PROJECT / "configs" / "demo_edit.yaml").read_text())
    tree["model"]["pipeline"] = str(out)
    tree["recipe"] |= {"group": 2, "levels_per_sample": 1, "steps": 3}
    tree["prompts"]["per_iteration"] = 4
    tree["train"]["iterations"] = 1
    tree["evaluate"] = {"every": 1, "steps": 2, "samples": 4}
    (tmp_path / "edits.yaml").write_text(yaml.safe_dump(tree))
    assert runs.flowrl("train", tmp_path / "edits.yaml", "--folder", tmp_path / "run") == 0
