"""All weights on a server, read from files in place; processes that share what it holds; requests
of whole groups."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("httpx")

from flowrl.errors import UserError
from flowrl.models.language import served_adapters
from flowrl.models.language.served_adapters import checksum
from flowrl.run.save.checkpoint import Progress
from flowrl.settings.read import run_from
from tests.support import tiny_lm
from tests.support.completion_servers import CompletionsServer, only, tree, wait_shortly, weighty
from tests.support.iterations import collect, iterate
from tests.support.runs import opened


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    wait_shortly(monkeypatch, 3.0)


def loads(server: CompletionsServer) -> int:
    return sum(path == "/collective_rpc" for path, _ in server.told)


@pytest.mark.slow
def test_sampled_log_probabilities_are_the_learners_after_each_update(model, tmp_path):
    with CompletionsServer(model) as server:
        kept = opened(weighty(server, tmp_path), tmp_path)
        progress = Progress()
        far = [iterate(kept, progress).metrics["mismatch_max"] for _ in range(3)]
        assert max(far) < 1e-5, far
        assert loads(server) == 3
        again = only(collect(kept, 5).rows)
        assert loads(server) == 4 and torch.equal(again.ids, only(collect(kept, 5).rows).ids)
        assert loads(server) == 4, "the same weights are sent once"
        words = [path for path, _ in server.told[-3:]]
        assert words == ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
        (left,) = (tmp_path / "served").iterdir()
        assert left.name == server.version
        kept.learner.policy.close()
        assert not (tmp_path / "served").exists()
        stale = replace(kept.learner.policy.server, adapters=None)
        kept.learner.policy.server = stale
        iterate(kept, progress)
        assert iterate(kept, progress).metrics["mismatch_max"] > 1e-3, "without them it is another"


@pytest.mark.slow
@pytest.mark.parametrize(
    "middle",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["between", "in the middle"],
)
def test_a_server_that_comes_back_gets_the_weights_again(model, tmp_path, middle):
    with CompletionsServer(model) as server:
        kept = opened(weighty(server, tmp_path), tmp_path)
        iterate(kept, Progress())
        before = only(collect(kept, 5).rows)
        if middle:
            server.forgets = len(server.bodies) + 3
        else:
            server.restart()
        told = loads(server)
        after = only(collect(kept, 5).rows)
        assert torch.equal(before.ids, after.ids) and loads(server) == told + 1
        torch.testing.assert_close(before.sampled, after.sampled, atol=1e-6, rtol=0)


def test_a_server_without_the_paths_is_named(model, tmp_path, monkeypatch):
    with CompletionsServer(model) as server:
        monkeypatch.setattr("tests.support.completion_servers.RELOADING", ())
        kept = opened(weighty(server, tmp_path), tmp_path)
        with pytest.raises(UserError, match="VLLM_SERVER_DEV_MODE=1"):
            collect(kept, 0)


@pytest.mark.quick_cases("lora")
@pytest.mark.parametrize("sync", ["lora", "weights"])
def test_other_processes_wait_for_the_main_one_and_load_only_what_is_lost(
    model, tmp_path, monkeypatch, sync
):
    with CompletionsServer(model) as server:
        settings = tree(server, tmp_path) if sync == "lora" else weighty(server, tmp_path)
        kept = opened(settings, tmp_path)
        iterate(kept, Progress())
        first = kept.learner.policy.server.adapters
        first.current()
        told = len(server.told)
        blank = {"_digest": b""} if sync == "lora" else {"_stamp": []}
        second = replace(first, main=False, loaded=None, **blank)
        assert second.current() == first.current() and len(server.told) == told
        server.restart()  # which only the second process sees
        monkeypatch.setattr(served_adapters, "HEAD_START", 0.2)
        assert second.lost() and second.current() == first.current()
        assert len(server.told) > told and not second.lost()
        second.close()
        assert (tmp_path / "served").exists(), "the main process cleans up"


@pytest.mark.slow
def test_a_group_is_one_request(model, tmp_path):
    with CompletionsServer(model) as server:
        one = opened(tree(server, tmp_path), tmp_path)
        collect(one, 0)
        assert len(server.bodies) == 12 and {body["n"] for body in server.bodies} == {1}
        server.bodies.clear()
        kept = opened(tree(server, tmp_path, requests="group"), tmp_path)
        progress = Progress()
        assert iterate(kept, progress).metrics["mismatch_max"] < 1e-5
        assert [body["n"] for body in server.bodies] == [4, 4, 4]
        rows = only(collect(kept, 1).rows)
        assert len({tuple(ids) for ids in rows.ids[:4].tolist()}) > 1, "its completions differ"


def test_the_checksum_sees_values_and_places():
    first, other = tiny_lm.llama(), tiny_lm.llama()
    assert checksum(first) == checksum(other)
    weight = next(other.parameters())
    with torch.no_grad():
        weight[2, 0], weight[2, 1] = weight[2, 1].clone(), weight[2, 0].clone()
    assert checksum(first) != checksum(other)
    with torch.no_grad():
        weight[2, 0], weight[2, 1] = weight[2, 1].clone(), weight[2, 0].clone()
        weight[3, 3] *= 1 + 2e-7
    assert checksum(first) != checksum(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "sglang"}, "sync: weights is a protocol of vLLM"),
        ({"lora": {"rank": 2}}, "adapters are trained: set server.sync: lora"),
    ],
)
def test_what_cannot_be_sent_is_refused(model, tmp_path, change, message):
    with CompletionsServer(model) as server:
        made = weighty(server, tmp_path)
    if "lora" in change:
        made["model"]["lora"] = change["lora"]
    else:
        made["model"]["server"] |= change
    with pytest.raises(UserError, match=message):
        run_from(made, "test")
