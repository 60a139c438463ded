"""Whole runs on a tiny random pipeline: through the command line, as a user would."""

import signal
import subprocess
import sys

import pytest
import torch
import yaml

from flowrl.errors import UserError
from flowrl.iteration import ratio_check
from flowrl.iteration.open import open_stages
from flowrl.iteration.schedule import learning_rate
from flowrl.iteration.tally import Tally
from flowrl.run.evaluate.guard import raised_by_training
from flowrl.run.train import TrainingLoop
from flowrl.run.watch.alarms import Alarms
from flowrl.session.progress import Progress
from flowrl.session.session import open_accelerator, open_session
from flowrl.settings.read import run_from
from tests.support import runs
from tests.support.iterations import collect, iterate
from tests.support.runs import environment, flowrl, lines, session, weights, write

# network evaluations of 2 draws x 4 samples x 4 steps: in sampling, with gradients (2 levels; the 3
# noisy steps), and without (both ask the reference; NFT's sampling policy is still the trained one)
COUNTS = {"nft": (32, 16, 16), "flow_grpo": (32, 24, 24)}


@pytest.mark.parametrize(
    "recipe",
    [runs.NFT, pytest.param(runs.FLOW_GRPO, marks=pytest.mark.slow)],
    ids=["nft", "flow_grpo"],
)
def test_a_run_leaves_what_it_promises(pipeline, tmp_path, capsys, recipe):
    config = write(runs.tree(pipeline, tmp_path, recipe), tmp_path)
    folder = tmp_path / "run"
    assert flowrl("train", config, "--folder", folder, "--train.iterations", "4") == 0
    said = capsys.readouterr().out
    assert "equal the pipeline's own call to the bit" in said
    assert "self-check" in said
    assert "held-out brightness" in said
    assert [line["iteration"] for line in lines(folder)] == [0, 1, 2, 3, 4]
    wanted = {
        "reward",
        "reward_std",
        "flat_groups",
        "grad_norm",
        "kl",
        "seconds/sample",
        "seconds/score",
    }
    wanted |= {f"image/{n}" for n in ("brightness", "saturation", "edges", "entropy", "diversity")}
    assert wanted <= lines(folder)[1].keys()
    counts = [lines(folder)[1][f"count/{name}"] for name in ("sampling", "training", "frozen")]
    assert tuple(counts) == COUNTS[recipe["name"]]
    assert lines(folder)[1]["count/scored"] == 8
    for name in ("before", "000002", "after", "before_after"):
        assert (folder / "samples" / f"{name}.png").stat().st_size > 1000
    assert (
        run_from(yaml.safe_load((folder / "run.yaml").read_text()), "again").train.iterations == 4
    )
    assert len(list((folder / "checkpoints").iterdir())) == 2  # the newest two
    assert len(list((folder / "best").iterdir())) == 1
    assert (folder / "adapter" / "pytorch_lora_weights.safetensors").is_file()
    assert flowrl("sample", folder, "a red ball", "--count", "2", "--out", tmp_path / "out") == 0
    assert len(list((tmp_path / "out").glob("*.png"))) == 3
    assert flowrl("evaluate", folder, "--samples", "4", "--out", tmp_path / "scores.jsonl") == 0
    assert "brightness: 0." in capsys.readouterr().out
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) == 4


@pytest.mark.slow
def test_accelerate_launch_is_the_same_run(pipeline, tmp_path, warm):
    config = write(runs.tree(pipeline, tmp_path, runs.NFT), tmp_path)
    words = ["train", str(config), "--folder"]
    plain = warm.start(*words, tmp_path / "plain", out=tmp_path / "plain.txt")
    launch = ["-m", "accelerate.commands.launch", "--cpu", "-m", "flowrl"]
    command = [sys.executable, *launch, *words, str(tmp_path / "launched")]
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    assert warm.wait(plain) == 0
    first, second = weights(tmp_path / "plain"), weights(tmp_path / "launched")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_full_weights_are_trained_and_saved_as_a_pipeline(pipeline, tmp_path, capsys):
    tree = runs.tree(pipeline, tmp_path, runs.NFT, lr=1e-3)
    tree["model"]["lora"] = None
    folder = tmp_path / "run"
    assert flowrl("train", write(tree, tmp_path), "--folder", folder) == 0
    assert (folder / "pipeline" / "model_index.json").is_file()
    out = tmp_path / "out"
    assert flowrl("sample", folder, "a red ball", "--count", "1", "--out", out) == 0
    trained = (out / "000.png").read_bytes()
    words = ("sample", folder, "a red ball", "--count", "1", "--weights", "base")
    assert flowrl(*words, "--out", tmp_path / "base") == 0
    assert trained != (tmp_path / "base" / "000.png").read_bytes()


def test_mistakes_are_one_sentence_and_exit_code_2(pipeline, tmp_path, capsys):
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    config = write(tree, tmp_path)
    (tmp_path / "there").mkdir()
    slips = {
        ("train", config, "--train.lrr", "1"): "did you mean --train.lr?",
        ("train", config, "--folder", tmp_path / "there"): "exists",
        ("train", tmp_path / "no.yaml"): "no such file",
        ("train",): "give a run file",
        ("train", "--resume", tmp_path / "there"): "is not a run",
        ("trian", config): "did you mean 'train'",
        ("sample", tmp_path / "there", "a red ball"): "is not a run",
        ("train", config, "--prompts.train", "missing.txt"): "no such file",
    }
    for words, message in slips.items():
        assert flowrl(*words) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.startswith("flowrl: ")
        assert said.count("\n") == 1
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(runs.NFT), pytest.param(runs.FLOW_GRPO, marks=pytest.mark.slow)],
    ids=["nft", "flow_grpo"],
)
def test_a_killed_run_ends_with_the_same_bits(pipeline, tmp_path, warm, recipe):
    tree = runs.tree(pipeline, tmp_path, recipe, updates=2)
    tree["train"]["iterations"] = 6
    config = write(tree, tmp_path)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    unbroken = warm.start("train", config, "--folder", whole, out=tmp_path / "whole.txt")
    pid = warm.start("train", config, "--folder", broken, out=tmp_path / "broken.txt")
    moments = [
        lambda: (broken / "run.yaml").is_file(),  # before there is any checkpoint
        lambda: (
            (broken / "checkpoints" / ".000002.tmp").exists()  # inside a save, if seen in time
            or (broken / "checkpoints" / "000002").exists()
        ),
        lambda: (broken / "checkpoints" / "000004").exists(),
    ]
    for ready in moments:
        warm.signal_when(pid, ready, signal.SIGKILL)
        pid = warm.start("train", "--resume", broken, out=tmp_path / "broken.txt")
    assert warm.wait(pid) == 0, (tmp_path / "broken.txt").read_text()
    assert warm.wait(unbroken) == 0, (tmp_path / "whole.txt").read_text()
    first, second = weights(whole), weights(broken)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [line["iteration"] for line in lines(broken)] == list(range(7))
    timeless = [
        [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines(f)]
        for f in (whole, broken)
    ]
    assert timeless[0] == timeless[1]


def test_ctrl_c_saves_and_says_how_to_go_on(pipeline, tmp_path, warm):
    tree = runs.tree(pipeline, tmp_path, runs.NFT)
    tree["train"]["iterations"], tree["checkpoint"]["every"] = 1000, 1000
    folder = tmp_path / "run"
    out = tmp_path / "said.txt"
    pid = warm.start("train", write(tree, tmp_path), "--folder", folder, out=out)
    warm.signal_when(
        pid,
        lambda: (folder / "metrics.jsonl").is_file() and len(lines(folder)) > 2,
        signal.SIGINT,
    )
    said = out.read_text()
    assert warm.poll(pid) == 130
    assert f"flowrl train --resume {folder}" in said
    done = lines(folder)[-1]["iteration"]
    assert (folder / "checkpoints" / f"{done:06d}" / "state.json").is_file()


def test_the_first_ratio_is_one_and_the_noise_floor_is_told(pipeline, tmp_path, capsys):
    kept = session(pipeline, tmp_path, runs.FLOW_GRPO, rows_per_call=3)
    experience = collect(kept, 0)
    floor = ratio_check.check_ratio(kept.learner, experience, kept.terminal)
    assert floor is not None
    assert floor < 1e-6
    assert "clip range 0.2" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "outcome"), [(1e-5, None), (3e-4, "warning"), (1e-2, "error")])
def test_a_noise_floor_above_the_clip_is_a_warning_and_far_above_an_error(
    pipeline, tmp_path, capsys, shift, outcome
):
    kept = session(pipeline, tmp_path, runs.FLOW_GRPO | {"clip": 1e-4})
    experience = collect(kept, 0)
    old = experience.rows[0].old
    assert old is not None
    old.logp.add_(shift)  # as if sampling had used other arithmetic
    if outcome == "error":
        with pytest.raises(UserError, match="recompute_old"):
            ratio_check.check_ratio(kept.learner, experience, kept.terminal)
        return
    ratio_check.check_ratio(kept.learner, experience, kept.terminal)
    assert ("recompute_old" in capsys.readouterr().err) == (outcome == "warning")


def test_recomputed_old_densities_make_the_first_ratio_exactly_one(pipeline, tmp_path):
    kept = session(pipeline, tmp_path, runs.FLOW_GRPO, recompute_old=True)
    metrics = iterate(kept, Progress()).metrics
    assert metrics["ratio_max"] == metrics["ratio_min"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [runs.NFT, runs.FLOW_GRPO], ids=["nft", "flow_grpo"])
def test_another_chunk_size_gives_the_same_weights(pipeline, tmp_path, recipe):
    def trained(rows: int) -> list[torch.Tensor]:
        kept = session(pipeline, tmp_path, recipe, rows_per_call=rows, updates=2, lr=1e-3)
        progress = Progress()
        for _ in range(2):
            iterate(kept, progress)
        return [p.detach().clone() for p in kept.learner.policies.parameters.values()]

    for a, b in zip(trained(64), trained(3), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_skips_the_step_and_three_stop_the_run(pipeline, tmp_path):
    kept = session(pipeline, tmp_path, runs.NFT)
    before = [p.detach().clone() for p in kept.learner.policies.parameters.values()]
    name, parameter = next(iter(kept.learner.policies.parameters.items()))
    hook = parameter.register_hook(lambda grad: grad * float("nan"))
    progress = Progress()
    for _ in range(2):
        assert iterate(kept, progress).metrics["skipped"] == 1
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, kept.learner.policies.parameters.values(), strict=True)
    )
    with pytest.raises(UserError, match="no finite gradient in three consecutive optimizer steps"):
        iterate(kept, progress)
    hook.remove()
    assert name


def test_unscored_groups_follow_on_failure(pipeline, tmp_path):
    """The shapes reward cannot read these prompts, so it scores none of them."""
    tree = runs.tree(pipeline, tmp_path, runs.NFT)
    tree["rewards"] = [{"name": "shapes"}]
    run = run_from(tree, "test")
    kept = open_session(run, tmp_path, open_accelerator(run, tmp_path))
    with pytest.raises(UserError, match=r"reward shapes scored nothing.*skip_group"):
        collect(kept, 0)


def test_alarms_name_signs_and_say_what_to_change(pipeline, tmp_path, capsys):
    kept = session(pipeline, tmp_path, runs.NFT, alarms="stop")
    alarms, progress = Alarms(), Progress()
    good = {"reward": 0.8, "reward_std": 0.2, "skipped": 0.0, "image/diversity": 0.3}
    loop = TrainingLoop(kept, progress, alarms, open_stages(kept, progress))

    def guard(metrics: dict[str, float]) -> None:
        loop.alarm(raised_by_training(kept, alarms, metrics, 1), metrics)

    for _ in range(8):
        guard(dict(good))
    with pytest.raises(UserError, match=r"reward fell from 0.800.*train.lr.*best"):
        for _ in range(8):
            guard(good | {"reward": 0.3})


def test_the_learning_rate_is_a_function_of_the_iteration(pipeline, tmp_path):
    tree = runs.tree(pipeline, tmp_path, runs.NFT, lr=1.0)
    tree["train"] |= {"iterations": 10, "schedule": {"name": "linear", "warmup": 3}}
    rates = [learning_rate(run_from(tree, "test"), i) for i in range(10)]
    assert rates[:3] == pytest.approx([0.25, 0.5 * 0.9, 0.75 * 0.8])
    assert rates[9] == pytest.approx(0.1)


def test_a_tally_is_the_mean_over_unmasked_entries_with_extremes():
    tally = Tally()
    tally.add("ratio", torch.tensor([[1.0], [3.0]]), torch.tensor([[True], [True]]))
    tally.add("ratio", torch.tensor([[5.0], [90.0]]), torch.tensor([[True], [False]]))
    assert tally.means() == {"ratio": 3.0, "ratio_max": 5.0, "ratio_min": 1.0}
