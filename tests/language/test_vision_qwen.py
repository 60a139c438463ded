"""Qwen2.5-VL from its folder, with its whole processor, which needs torchvision: `make
test-open-clip` runs these tests."""

import pytest

pytest.importorskip("torchvision")

import torch

from flowrl.iteration import ratio_check
from flowrl.run.save import checkpoint
from flowrl.run.watch.alarms import Alarms
from flowrl.session.progress import Progress
from tests.support import runs, tiny_vlm
from tests.support.iterations import collect, iterate
from tests.support.runs import flowrl, same_weights, write


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import AutoProcessor

    folder = tmp_path_factory.mktemp("qwen")
    made, processor = tiny_vlm.qwen(folder)
    made.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    assert AutoProcessor.from_pretrained(folder).video_processor is not None
    return folder


def settings(model, folder, **train):
    found = tiny_vlm.tree(model, folder, **train)
    found["rewards"] = [{"name": f"{folder / 'own.py'}:share", "letter": " "}]
    return found


@pytest.mark.parametrize("rows", [64, 4])
def test_the_first_ratio_is_one(model, tmp_path, rows):
    kept = runs.opened(settings(model, tmp_path, rows_per_call=rows), tmp_path)
    experience = collect(kept, 0)
    floor = ratio_check.check_ratio(kept.learner, experience, kept.terminal)
    assert floor is not None and floor < 2e-5


def test_a_resumed_run_ends_with_the_same_bits(model, tmp_path):
    def opened(name: str):
        (tmp_path / name).mkdir()
        return runs.opened(settings(model, tmp_path / name, updates=2), tmp_path / name)

    whole, broken, again = opened("whole"), opened("broken"), opened("again")
    progress = Progress()
    for _ in range(3):
        iterate(whole, progress)
    progress = Progress()
    iterate(broken, progress)
    checkpoint.save_checkpoint(broken, progress, Alarms())
    progress = checkpoint.restore(again, tmp_path / "broken" / "checkpoints" / "000001", Alarms())
    for _ in range(2):
        iterate(again, progress)
    assert same_weights(whole, again)


def test_the_command_line_trains_adapters_of_the_language_part(model, tmp_path, capsys):
    tree = settings(model, tmp_path)
    tree["model"]["lora"] = {"rank": 2, "alpha": 8}
    assert flowrl("train", write(tree, tmp_path), "--folder", tmp_path / "run") == 0
    assert "prompts have images; training and sampling predict" in capsys.readouterr().out
    kept = runs.opened(tree, tmp_path)
    names = [name for name in kept.learner.policies.parameters if ".lora_" in name]
    assert names and not any("visual" in name for name in names)
    assert not torch.cuda.is_initialized()
