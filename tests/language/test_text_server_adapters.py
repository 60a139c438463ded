"""A server's adapters over its own life and over a run's: restarts, lost answers, and what is left
of them at an end."""

import pytest
import torch

pytest.importorskip("httpx")

from flowrl.errors import UserError
from flowrl.models.language import served_adapters
from flowrl.session.progress import Progress
from rewards.serving.requests import Patience
from tests.support.completion_servers import PROMPTS, CompletionsServer, only, tree, wait_shortly
from tests.support.iterations import collect, iterate
from tests.support.runs import flowrl, opened, write


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    wait_shortly(monkeypatch, 3.0)


def words(server: CompletionsServer) -> list[str]:
    return [path.rpartition("/")[2].partition("_")[0] for path, _ in server.told]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sglang", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["vllm", "sglang"]
)
def test_a_server_that_was_started_anew_is_told_its_adapter_again(model, tmp_path, sglang):
    with CompletionsServer(model, sglang=sglang) as server:
        kept = opened(tree(server, tmp_path), tmp_path)
        progress = Progress()
        iterate(kept, progress)
        before = only(collect(kept, 5).rows)
        server.restart()  # between two calls of the same weights
        assert torch.equal(before.ids, only(collect(kept, 5).rows).ids)
        server.restart()  # between an iteration and the next, whose adapter is new
        assert iterate(kept, progress).metrics["mismatch_max"] < 1e-5
        assert list(server.loaded) == [path.name for path in (tmp_path / "served").iterdir()]
        if not sglang:  # which answers 400 as it does to a single one that is too long
            server.forgets = len(server.bodies) + 15 + 3  # in the middle of a call
            collect(kept, 5)
            assert torch.equal(before.prompt, only(collect(kept, 5).rows).prompt)
        names = [body["model"] for body in server.bodies]
    assert all(name.startswith("tiny:flowrl-") == sglang for name in names)
    assert {path.count("/") for path, _ in server.told} == {1 if sglang else 2}


@pytest.mark.slow
def test_a_server_without_the_model_is_not_told_adapters_for_ever(model, tmp_path):
    with CompletionsServer(model) as server:
        kept = opened(tree(server, tmp_path), tmp_path)
        collect(kept, 0)
        server.trouble = [404] * 60
        with pytest.raises(UserError, match="nothing at this address"):
            collect(kept, 0)
        assert words(server) == ["load"], "it has the adapter: that is not what is wrong"
        server.restart()
        with pytest.raises(UserError, match="nothing at this address"):
            collect(kept, 0)
        assert words(server)[:2] == ["load", "load"] and words(server).count("load") == 2
        server.trouble = []
        only(collect(kept, 0).rows)


@pytest.mark.slow
def test_a_load_with_a_lost_answer_is_found_and_a_failed_one_told_at_once(model, tmp_path):
    with CompletionsServer(model, ailing=[0]) as server:
        kept = opened(tree(server, tmp_path), tmp_path)
        collect(kept, 0)
        assert words(server) == ["load", "load"] and len(server.loaded) == 1
        server.told.clear()
        with torch.no_grad():
            next(iter(kept.learner.policy.trainable().values())).add_(0.1)
        server.ailing = [500] * 9
        with pytest.raises(UserError, match=r"rank 2 is greater.*--max-lora-rank"):
            collect(kept, 0)
        assert words(server) == ["load"], "the same adapter fails again"
        server.ailing = [503]
        collect(kept, 0)
        assert words(server)[1:3] == ["load", "load"] and len(server.loaded) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["badly", "unheard"])
def test_a_run_that_stops_takes_its_adapter_away_with_it(model, tmp_path, ends):
    with CompletionsServer(model) as server:
        settings = tree(server, tmp_path)
        settings["evaluate"] = {"every": 9, "samples": 3, "per_prompt": 1}
        if ends == "badly":
            late = "\n\ndef late(samples, seen=[]):\n    seen.append(1)\n    assert len(seen) < 2\n"
            late += "    return [float(len(text)) for text in samples.media]\n"
            with (tmp_path / "own.py").open("a") as file:
                file.write(late)
            settings["rewards"] = [{"name": f"{tmp_path / 'own.py'}:late"}]
            settings["train"]["self_test"] = "off"
        else:
            server.trouble = [200] * 30 + [503] * 99
        folder = tmp_path / "run"
        assert flowrl("train", write(settings, tmp_path), "--folder", folder) == 3
        assert server.bodies and "load" in words(server) and not server.loaded
        assert not list((folder / "served").iterdir())


@pytest.mark.slow
def test_what_a_killed_run_left_is_taken_away(model, tmp_path):
    with CompletionsServer(model) as server:
        kept = opened(tree(server, tmp_path), tmp_path)
        collect(kept, 0)
        (left,) = server.loaded
        (tmp_path / "served" / "flowrl-0-of-an-older-version").mkdir()
        settings = tree(server, tmp_path)
        settings["train"]["seed"] = 1  # other adapters
        again = opened(settings, tmp_path)
        collect(again, 0)
        (name,) = server.loaded
        assert name != left
        again.learner.policy.close()
        assert not server.loaded and not list((tmp_path / "served").iterdir())
        assert again.learner.policy.proofs(PROMPTS, 4), "it can be asked once more"
        assert len(server.loaded) == 1


def test_a_server_that_is_gone_keeps_no_run_from_ending(model, tmp_path, monkeypatch):
    monkeypatch.setattr(served_adapters, "HASTY", Patience(timeout=0.5, tries=1))
    with CompletionsServer(model) as server:
        kept = opened(tree(server, tmp_path), tmp_path)
        collect(kept, 0)
    kept.learner.policy.close()
    assert not list((tmp_path / "served").iterdir())
