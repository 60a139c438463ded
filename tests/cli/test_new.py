"""`flowrl new`: what it writes can be planned and trained as it stands."""

from pathlib import Path

import pytest

from flowrl.cli.new import New, write_new_run
from flowrl.errors import UserError
from flowrl.run.train import start
from flowrl.settings.read import check_run, override, read_run

QUICK = ["--train.iterations", "1", "--evaluate.samples", "4", "--prompts.per-iteration", "2"]
QUICK += ["--recipe.group", "4", "--evaluate.every", "1", "--checkpoint.every", "1"]


@pytest.mark.parametrize("text", [False, True])
def test_a_new_folder_trains_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bool
) -> None:
    write_new_run(New(tmp_path / "mine", text=text))
    monkeypatch.chdir(tmp_path / "mine")
    run = override(read_run(Path("run.yaml")), QUICK)
    check_run(run)
    result = start(run, "run", None)
    assert result.done and (result.folder / "metrics.jsonl").is_file()


def test_every_reward_of_the_example_scores(tmp_path: Path) -> None:
    import torch

    from rewards import Samples, load

    write_new_run(New(tmp_path / "mine"))
    media = torch.stack([torch.zeros(3, 8, 8), torch.rand(3, 8, 8)])
    samples = Samples(media, ["a"] * 2, torch.zeros(2, dtype=torch.long))
    sharp = load(f"{tmp_path}/mine/my_reward.py:sharpness", power=0.5)(samples)
    assert sharp[1] > sharp[0] == 0


def test_nothing_is_replaced_and_mistakes_are_sentences(tmp_path: Path) -> None:
    write_new_run(New(tmp_path))
    with pytest.raises(UserError, match="exists; name another folder"):
        write_new_run(New(tmp_path))
    with pytest.raises(UserError, match="no recipe 'grpo'"):
        write_new_run(New(tmp_path / "b", recipe="grpo"))
    with pytest.raises(UserError, match="is for texts: add --text"):
        write_new_run(New(tmp_path / "b", recipe="text_grpo"))
    assert not (tmp_path / "b").exists()
