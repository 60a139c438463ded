"""The last six of nineteen defects: see test_peer_defects.py."""

import inspect
import json

import pytest
import torch
from torch import Tensor

from flowrl.likelihoods.rows import Evaluation, TransitionRows
from flowrl.likelihoods.transition import Transition
from flowrl.recipes import RECIPES
from rewards import Samples, load
from rewards.catalogue.ocr import Ocr
from samplers import Chain, FlowSDE, Latents, roll
from samplers.noise import normal
from tests.support import runs, tiny_rewards
from tests.support.runs import flowrl, lines
from tests.support.tiny import gaussian_velocity
from tests.support.warm import agree, small


def test_14_rewards_of_pictures_take_films(tmp_path):
    rng = torch.Generator().manual_seed(1)
    films = [torch.rand(frames, 3, 20, 27, generator=rng) for frames in (5, 3)]
    prompts, group = ['the word "HELLO"', "a red ball"], torch.zeros(2, dtype=torch.long)
    listed = Samples(films, prompts, group)
    stacked = Samples(torch.stack([film[:3] for film in films]), prompts, group)
    folder = tiny_rewards.clip_folder(tmp_path / "clip")
    here = {"model": str(folder), "processor": str(folder), "device": "cpu"}
    for name, settings in (("pickscore", here), ("brightness", {})):
        reward = load(name, **settings)
        one, two = reward(listed), reward(stacked)
        assert one.shape == two.shape == (2,) and one[1] == pytest.approx(float(two[1]), rel=1e-5)
    half = load("pickscore", **here, dtype="bfloat16")(listed)
    whole = load("pickscore", **here)(listed)
    assert not torch.equal(half, whole) and torch.allclose(half, whole.to(half), rtol=0.05)
    for kind in ("graded", "published"):
        read = Ocr(lambda frame: ["HELLO"], kind, every=2)(listed)
        assert read[0] == (1 if kind == "graded" else 0) or read[0] == 1
        assert read[1].isnan()


def rank(number: int, port: int) -> dict[str, str]:
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    own = {"RANK": str(number), "LOCAL_RANK": str(number), "ACCELERATE_USE_CPU": "true"}
    return both | own | {"MASTER_PORT": str(port)}


@pytest.mark.slow
def test_15_evaluations_compare_in_groups_over_all_processes_and_of_any_checkpoint(
    warm, pipeline, tmp_path, capsys
):
    tree = small(pipeline, tmp_path)
    tree["held_out_rewards"] = [
        {"name": "brightness"},
        {"name": "win_rate", "judge": "brightness"},
    ]
    tree["evaluate"] |= {"samples": 8, "per_prompt": 2}
    tree["train"] |= {"iterations": 1, "self_test": "off"}
    config = runs.write(tree, tmp_path)
    alone, both, out = tmp_path / "alone", tmp_path / "both", tmp_path / "said.txt"
    assert warm.run("train", config, "--folder", alone, out=out) == 0, out.read_text()
    port = runs.free_port()
    pids = [
        warm.start("train", config, "--folder", both, out=out, env=rank(i, port)) for i in range(2)
    ]
    assert [warm.wait(pid) for pid in pids] == [0, 0], out.read_text()
    for one, two in zip(lines(alone), lines(both), strict=True):
        assert one["held_out/win_rate"] == 0.5
        for name in ("held_out/win_rate", "held_out/brightness", "held_out/image/diversity"):
            assert two[name] == pytest.approx(one[name], rel=1e-5)
    for iteration in (0, 1):
        scores = tmp_path / f"scores{iteration}.jsonl"
        place = alone / "checkpoints" / f"{iteration:06d}"
        assert flowrl("evaluate", alone, "--weights", place, "--out", scores) == 0
        found = [json.loads(line)["brightness"] for line in scores.read_text().splitlines()]
        wanted = lines(alone)[iteration]["held_out/brightness"]
        assert len(found) == 8 and sum(found) / 8 == pytest.approx(wanted, rel=1e-6)
        assert "win_rate: 0.5000" in capsys.readouterr().out


def test_16_divergences_in_all_published_forms():
    kernel, rng = FlowSDE(0.7), torch.Generator().manual_seed(1)
    x, one, two = (torch.randn(3, 5, generator=rng, dtype=torch.float64) for _ in range(3))
    sigma, below = (torch.full((3,), s, dtype=torch.float64) for s in (0.8, 0.6))
    (a, q), (b, _) = (kernel(x, v, sigma, below) for v in (one, two))
    none = torch.zeros(3, 1, dtype=torch.float64)
    rows = TransitionRows(
        prompt=torch.arange(3), advantage=none, mask=none == 0, old=None, x=x, x_next=x,
        sigma=sigma, sigma_next=below, kernel=kernel,
    )  # fmt: skip
    g2 = 0.7**2 * 0.8 / (1 - 0.8)  # Flow-GRPO's noise, squared: q^2 = g^2 h
    torch.testing.assert_close(q.double() ** 2, torch.full_like(sigma, g2 * 0.2), rtol=1e-6, atol=0)
    apart = (a - b).square().mean(1, keepdim=True)
    wanted = {"mean": apart, "published": apart / (2 * g2), "exact": apart / (2 * g2 * 0.2)}
    for form, want in wanted.items():
        got = Transition(kl_form=form).kl(Evaluation(none, a), Evaluation(none, b), rows)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_17_two_runs_that_start_at_once_both_end(warm, pipeline, tmp_path):
    tree = small(pipeline, tmp_path)
    tree["train"]["iterations"] = 1
    config, outs = runs.write(tree, tmp_path), [tmp_path / f"said{i}.txt" for i in range(2)]
    cold = {"HF_HOME": str(tmp_path / "cold")}
    pids = [warm.start("train", config, out=out, cwd=tmp_path, env=cold) for out in outs]
    assert [warm.wait(pid) for pid in pids] == [0, 0], [out.read_text() for out in outs]
    first, second = sorted((tmp_path / "runs").iterdir())
    assert (first.name, second.name) == ("tiny-0001", "tiny-0002")
    agree(first, second)


def test_18_a_samples_noise_is_its_own():
    """Neither batch, nor the size of its group, nor its process, nor a global seed change it."""

    def rolled(group: int, draws: tuple[int, ...]) -> Tensor:
        torch.manual_seed(group)
        plans = Chain(FlowSDE(0.7), group)([1.0, 0.7, 0.4, 0.0], 3, 0)
        (rollout,) = roll(plans, gaussian_velocity, Latents((4,)), draws, seed=0, iteration=3)
        return rollout.x0.view(len(draws), group, 4)

    whole = rolled(4, (5, 6, 7))
    torch.testing.assert_close(rolled(4, (6,))[0], whole[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(rolled(4, (7, 5))[0], whole[2], rtol=0, atol=1e-6)
    torch.testing.assert_close(rolled(2, (5, 6, 7)), whole[:, :2], rtol=0, atol=1e-6)
    keys = [(0, 3, 5, "root", g) for g in range(3)]
    assert torch.equal(normal(keys, (4,))[1:], normal(keys[1:], (4,)))


# baselines that are memories, a greedy sample or a teacher, and not the group
ALONE = {"opd", "refl", "draft", "draft_lv", "srpo", "text_stream", "text_riskpo", "text_remax"}
ALONE |= {"text_a_star_po", "leap_align", "flow_bp", "flow_bp_lagrange"}


def test_19_a_group_has_at_least_two_samples(pipeline, tmp_path, capsys):
    for name, recipe in RECIPES.items():
        takes = inspect.signature(recipe).parameters.keys()
        if name in ALONE:
            continue
        assert recipe().group >= 2
        if "group" in takes:
            with pytest.raises(ValueError, match=r"at least 2|group"):
                recipe(group=1)
        else:
            try:
                assert recipe(**dict.fromkeys({"roots", "branch"} & takes, 1)).group >= 2, name
            except ValueError as refused:
                assert "least 2" in str(refused) or "branch" in str(refused)
    config = runs.write(small(pipeline, tmp_path), tmp_path)
    assert flowrl("train", config, "--folder", tmp_path / "run", "--recipe.group", "1") == 2
    assert "at least 2" in capsys.readouterr().err
