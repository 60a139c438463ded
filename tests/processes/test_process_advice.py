"""What is said of settings that several processes cannot carry out, and that its advice works: the
start that follows it goes on to load the weights."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.processes.listening import bound_socket
from flowrl.processes.sharding import Sharding
from flowrl.run.watch.start_check import check_shares
from flowrl.session import learner
from flowrl.session.learner import Learner
from flowrl.settings.read import run_from
from tests.models.test_engine import own as own_engine
from tests.run.test_joint import tree as joint_tree
from tests.support import runs, text_runs, tiny_pipelines
from tests.support.advice import advice

SERVER = {"url": "http://localhost:1/v1", "model": "tiny"}


class Loads(Exception):
    """The weights begin to load."""


@pytest.fixture
def start(monkeypatch, tmp_path) -> Callable[..., None]:
    """Starts one of two processes until its weights would load, under FSDP2 unless `how` is None.
    The start that is refused has not come so far."""

    def load(*_: Any) -> None:
        raise Loads

    def begin(tree: dict[str, Any], how: Sharding | None = Sharding(), processes: int = 2) -> None:
        monkeypatch.setattr(learner, "sharding", lambda _: how)
        accelerator: Any = SimpleNamespace(num_processes=processes, device=torch.device("cpu"))
        with pytest.raises(Loads):
            Learner.open(run_from(tree, "test"), tmp_path, accelerator)

    monkeypatch.setattr(learner, "load_policy", load)
    return begin


def images(pipeline: Path, folder: Path, **model: Any) -> dict[str, Any]:
    made = runs.tree(pipeline, folder, runs.FLOW_GRPO)
    return made | {"model": made["model"] | model}


def texts(folder: Path, **server: Any) -> dict[str, Any]:
    made = text_runs.tree(Path("lm"), folder, text_runs.GRPO)
    return made | {"model": made["model"] | {"lora": {"rank": 2}, "server": SERVER | server}}


def test_what_fsdp2_cannot_shard_is_left_out(start, pipeline, tmp_path):
    joint = joint_tree()
    advice(
        "recipe joint: sharding the weights of two models is not supported: leave FSDP2 out",
        lambda: start(joint),
        lambda: start(joint, how=None),
    )
    plain = images(pipeline, tmp_path)
    advice(
        "FSDP2: the loss scale of float16 networks is not synchronized over shards; set "
        "model.dtype: bfloat16",
        lambda: start(images(pipeline, tmp_path, dtype="float16")),
        lambda: start(images(pipeline, tmp_path, dtype="bfloat16")),
    )
    advice(
        "FSDP2: model.offload_experts cannot move sharded weights: leave it out",
        lambda: start(images(pipeline, tmp_path, offload_experts=True)),
        lambda: start(plain),
    )
    advice(
        "model.lora.merge: {} needs whole weights, and FSDP2 shards them: leave it out",
        lambda: start(images(pipeline, tmp_path, lora={"merge": "evaluation"})),
        lambda: start(images(pipeline, tmp_path, lora={})),
    )
    quantized = images(pipeline, tmp_path, quantization={"backend": "quanto", "bits": 8})
    engine = images(pipeline, tmp_path, engine=own_engine(pipeline))
    for tree, how in ((plain, Sharding()), (quantized, None)):
        advice(
            "model.quantization: FSDP2 shards weights of floating point: leave one of the two out",
            lambda: start(quantized),
            lambda tree=tree, how=how: start(tree, how),
        )
    for tree, how in ((plain, Sharding()), (engine, None)):
        advice(
            "model.engine: it gets whole weights, and FSDP2 shards them: leave one of the two out",
            lambda: start(engine),
            lambda tree=tree, how=how: start(tree, how),
        )
    seeing = text_runs.tree(Path("lm"), tmp_path, text_runs.GRPO)
    seeing["model"]["lora"] = {"rank": 2, "vision": True}
    whole = seeing | {"model": seeing["model"] | {"lora": None}}
    blind = seeing | {"model": seeing["model"] | {"lora": {"rank": 2}}}
    for tree, how in ((blind, Sharding()), (whole, Sharding()), (seeing, None)):
        advice(
            "model.lora.vision: FSDP2 shards adapters only of the part that every call uses: adapt "
            "the language part alone, train all weights (model.lora: null), or launch with "
            "configs/accelerate/ddp.yaml",
            lambda: start(seeing),
            lambda tree=tree, how=how: start(tree, how),
        )
    for tree, how in ((texts(tmp_path), None), (texts(tmp_path, sync="none"), Sharding())):
        advice(
            "model.server.sync: lora needs whole weights, but FSDP2 shards them; use DDP, or set "
            "model.server.sync: none",
            lambda: start(texts(tmp_path)),
            lambda tree=tree, how=how: start(tree, how),
        )


def test_what_is_said_of_shared_calls_makes_them_possible(start, tmp_path):
    flux = tmp_path / "flux"
    tiny_pipelines.flux().save_pretrained(flux)
    two, three, whole = (images(flux, tmp_path, context_parallel=n) for n in (2, 3, 1))
    for tree, processes in ((two, 4), (whole, 3)):
        advice(
            "{}: {} needs a multiple of {} processes, but this run has {}: start more with "
            "accelerate launch or torchrun, or remove the setting",
            lambda: start(two, None, 3),
            lambda tree=tree, processes=processes: start(tree, None, processes),
        )
    advice(
        "attention heads, which {} processes cannot share evenly: set a divisor of the number of "
        "heads",
        lambda: start(three, None, 6),
        lambda: start(two, None, 6),
    )


def test_training_processes_have_the_workers_that_they_need(pipeline, tmp_path):
    def shares(tree: dict[str, Any], processes: int, **workers: Any) -> None:
        check_shares(run_from(tree | {"workers": workers}, "test"), processes)

    plain = images(pipeline, tmp_path)
    for sampling in (3, 6):
        advice(
            "workers.sampling: {} for {} training processes, each of which needs its own workers; "
            "set it to {} or a multiple",
            lambda: shares(plain, 3, sampling=2),
            lambda sampling=sampling: shares(plain, 3, sampling=sampling),
        )
    for lag, processes in ((1, 1), (0, 2)):
        advice(
            "workers.lag: {} training processes share the server's weights, which change while "
            "the others' samples are drawn; train in one process, or set workers.lag: 0",
            lambda: shares(texts(tmp_path), 2, lag=1),
            lambda lag=lag, processes=processes: shares(texts(tmp_path), processes, lag=lag),
        )
    two = images(pipeline, tmp_path, context_parallel=2)
    for tree, sampling in ((plain, 2), (two, 0)):
        advice(
            "workers.sampling: workers do not split calls; set model.context_parallel: 1, or "
            "workers.sampling: 0",
            lambda: shares(two, 2, sampling=2),
            lambda tree=tree, sampling=sampling: shares(tree, 2, sampling=sampling),
        )


def test_another_port_or_host_is_listened_on():
    with bound_socket("vote", "127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        for host, other in (("127.0.0.1", 0), ("127.0.0.2", port)):
            bound = advice(
                "{}: cannot listen on {}:{} ({}): set another --port or --host",
                lambda: bound_socket("vote", "127.0.0.1", port),
                lambda host=host, other=other: bound_socket("vote", host, other),
            )
            bound.close()
    advice(
        "{}: cannot listen on {}:{} ({}): set another --port or --host",
        lambda: bound_socket("vote", "203.0.113.1", 0),  # an address of documents, not of machines
        lambda: bound_socket("vote", "127.0.0.1", 0).close(),
    )
