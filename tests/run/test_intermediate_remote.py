"""Scores on the way by a reward behind HTTP, and by a judge that may abstain."""

import pytest
import torch

pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from flowrl.session.progress import Progress
from rewards.catalogue.brightness import Brightness
from rewards.serving.server import Served
from tests.support import runs
from tests.support.iterations import collect, iterate
from tests.support.servers import ChatServer, serving

LEVELS = [1.0, 0.75, 0.5, 0.25]


def settings(pipeline, folder, recipe, **more):
    tree = runs.tree(pipeline, folder, {"steps": 4, **recipe}, self_test="off", lr=1e-3)
    tree["model"]["sigmas"], tree["evaluate"]["steps"] = LEVELS, 4
    return tree | more


@pytest.mark.slow
def test_a_remote_reward_scores_states_as_the_local_one_does(pipeline, tmp_path):
    """The same run twice; images travel as 8 bits, so scores agree to half a step."""
    recipe = {"name": "dense_grpo", "group": 4, "completion": 2}
    near = collect(runs.opened(settings(pipeline, tmp_path, recipe), tmp_path), 0)
    with serving(Served.of("brightness", {}, Brightness())) as url:
        remote = [{"name": "remote", "url": url, "batch": 8, "label": "brightness"}]
        kept = runs.opened(settings(pipeline, tmp_path, recipe, rewards=remote), tmp_path)
        far = collect(kept, 0)
        metrics = iterate(kept, Progress()).metrics
    assert far.scores.intermediate is not None and near.scores.intermediate is not None
    assert torch.equal(far.scores.intermediate.scored, near.scores.intermediate.scored)
    assert far.scores.intermediate.scored[:, :3].all() and far.metrics["unscored_way"] == 0
    apart = (far.scores.intermediate.values - near.scores.intermediate.values).abs().max()
    assert apart < 0.5 / 255 and near.scores.intermediate.values[:, :3].std() > apart
    assert metrics["grad_norm"] > 0 and metrics["count/scored"] == near.metrics["count/scored"]


@pytest.mark.slow
def test_a_judge_on_the_way_may_abstain(pipeline, tmp_path):
    """A chat model scores clean images on the way; one that it finds unclear has no score, and the
    samples themselves are scored by another reward."""
    seen: list[float] = []

    def answer(words: str, pictures: list[torch.Tensor]) -> str:
        seen.append(float(pictures[0].mean()))
        return "It is not clear yet." if len(seen) % 3 == 0 else f"Score: {len(seen) % 5 + 1}"

    recipe = {"name": "potential_tree", "at": [0, 1]}
    with ChatServer(answer) as server:
        judge = {"name": "judge", "url": server.url, "model": "tiny", "kind": "score"}
        judge |= {"tries": 1, "at_once": 1}
        kept = runs.opened(
            settings(pipeline, tmp_path, recipe, intermediate_rewards=[judge]), tmp_path
        )
        metrics = iterate(kept, Progress()).metrics
    (plan,) = kept.algorithm.plan((*LEVELS, 0.0), 0, 0)
    assert len(set(server.tries)) == 2 * plan.predicted == 12
    assert 0 < metrics["unscored_way"] < 1 and metrics["unscored"] == 0
    assert metrics["grad_norm"] > 0
