"""A server draws every turn of texts that an environment answers."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("httpx")

from flowrl.session.progress import Progress
from tests.support import environments
from tests.support.completion_servers import CompletionsServer, only, tree
from tests.support.iterations import collect, iterate
from tests.support.runs import opened


def settings(server: CompletionsServer, folder: Path, recipe: str) -> dict:
    made = tree(server, folder, environments.RECIPE | {"name": recipe})
    (folder / "guess.py").write_text(environments.GUESS)
    made["model"]["environment"] = {"name": f"{folder / 'guess.py'}:named", "turns": 3}
    return made


@pytest.mark.slow
def test_only_the_models_own_tokens_are_held_against_the_servers(model, tmp_path):
    with CompletionsServer(model) as server:
        kept = opened(settings(server, tmp_path, "text_gigpo"), tmp_path)
        progress = Progress()
        for _ in range(2):
            metrics = iterate(kept, progress).metrics
            assert metrics["mismatch_max"] < 1e-5
            assert metrics["ratio_max"] == metrics["ratio_min"] == 1.0
        assert metrics["text/turns"] > 1
        rows = only(collect(kept, 2).rows)
        assert (
            rows.from_environment is not None
            and rows.from_environment.any()
            and rows.sampled is not None
        )
        assert (
            rows.sampled[rows.from_environment].eq(0).all()
            and not rows.mask[rows.from_environment].any()
        )
        assert torch.equal(rows.ids, only(collect(kept, 2).rows).ids)


@pytest.mark.slow
def test_every_turn_has_a_seed_of_its_own(model, tmp_path):
    """A later turn that began with the first one's noise would not be drawn apart from it."""
    with CompletionsServer(model) as server:
        kept = opened(settings(server, tmp_path, "text_grpo"), tmp_path)
        rows = only(collect(kept, 0).rows)
        assert rows.from_environment is not None
        asked = [(body["seed"], tuple(body["prompt"])) for body in server.bodies]
        began = rows.from_environment[:, 1:] & ~rows.from_environment[:, :-1]
        assert len(asked) == len(rows.ids) + int(began.sum()), "a request a turn"
        assert len({seed for seed, _ in asked}) == len(asked)
