"""vLLM itself serves a tiny model to a run. It is started where FLOWRL_VLLM names its executable:
FLOWRL_VLLM=/opt/vllm/bin/vllm pytest -m slow tests/language/test_vllm.py
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("httpx")

import httpx

from flowrl.session.progress import Progress
from flowrl.session.session import Session
from tests.support import text_runs, tiny_lm
from tests.support.completion_servers import GRPO, PROMPTS, only
from tests.support.iterations import collect, iterate
from tests.support.runs import flowrl, free_port, opened, write

VLLM = os.environ.get("FLOWRL_VLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VLLM is None, reason="FLOWRL_VLLM names no vllm executable"),
]
OPTIONS = (
    "--served-model-name tiny --enable-lora --max-lora-rank 8 --generation-config vllm "
    "--logprobs-mode processed_logprobs --dtype float32 --max-model-len 64 --enforce-eager"
)
START = 400.0  # seconds that vLLM may take to be there


@dataclass(frozen=True)
class Served:
    source: Path
    url: str

    def tree(self, folder: Path, **recipe: float) -> dict:
        made = text_runs.tree(self.source, folder, GRPO | recipe, lr=2e-2)
        made["model"]["lora"] = {"rank": 2, "alpha": 8}
        made["model"]["server"] = {"url": self.url, "model": "tiny"}
        return made

    def open(self, folder: Path, **recipe: float) -> Session:
        return opened(self.tree(folder, **recipe), folder)

    def names(self) -> list[str]:
        return [row["id"] for row in httpx.get(f"{self.url}/models").json()["data"]]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    assert VLLM is not None
    folder, port = tmp_path_factory.mktemp("vllm"), free_port()
    tiny_lm.llama(width=64).save_pretrained(folder)  # heads of 32, the least that it takes
    tiny_lm.tokenizer().save_pretrained(folder)
    words = [VLLM, "serve", str(folder), "--port", str(port), *OPTIONS.split()]
    own = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1"}
    own |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    log = folder / "vllm.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            words, env=os.environ | own, stdout=out, stderr=out, start_new_session=True
        )
    made = Served(folder, f"http://127.0.0.1:{port}/v1")
    try:
        wait(made, process, log)
        yield made
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait(made: Served, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        try:
            assert made.names() == ["tiny"]
            return
        except httpx.TransportError:
            time.sleep(1)
    pytest.fail(f"vLLM did not come up: {log.read_text()[-3000:]}")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_says_what_the_trainer_says_before_and_after_updates(served, tmp_path, temperature):
    kept = served.open(tmp_path, temperature=temperature)
    progress = Progress()
    assert "samples completions" in kept.learner.policy.proofs(PROMPTS, 4)[-1]
    far = [iterate(kept, progress).metrics["mismatch_max"] for _ in range(3)]
    assert max(far) < 1e-4, far
    first = only(collect(kept, 5).rows)
    own = kept.learner.policy.server
    (name,) = set(served.names()) - {"tiny"}
    own.adapters.admin.tell("/unload_lora_adapter", {"lora_name": name})
    assert torch.equal(first.ids, only(collect(kept, 5).rows).ids), "told again, the same seeds"
    kept.learner.policy.server = replace(own, adapters=None)
    assert iterate(kept, progress).metrics["mismatch_max"] > 1e-2, "the base is another model"
    own.close()
    assert served.names() == ["tiny"]


def test_a_run_leaves_no_adapter_and_can_go_on(served, tmp_path, capsys):
    settings = served.tree(tmp_path) | {"checkpoint": {"every": 1}}
    folder = tmp_path / "run"
    assert flowrl("train", write(settings, tmp_path), "--folder", folder) == 0
    assert "samples completions" in capsys.readouterr().out
    assert served.names() == ["tiny"]
    assert not list((folder / "served").iterdir())


@pytest.mark.parametrize("requests", ["row", "group"])
def test_all_weights_are_read_in_place_and_sent_again_where_they_are_lost(
    served, tmp_path, requests
):
    tree = served.tree(tmp_path)
    tree["model"]["lora"] = None
    tree["model"]["server"] |= {"sync": "weights", "requests": requests}
    kept, progress = opened(tree, tmp_path), Progress()
    far = [iterate(kept, progress).metrics["mismatch_max"] for _ in range(3)]
    assert max(far) < 1e-4, far
    first = only(collect(kept, 5).rows)
    own = kept.learner.policy.server
    how = {"method": "reload_weights", "kwargs": {"weights_path": str(served.source)}}
    own.adapters.admin.tell("/collective_rpc", how)  # what a server begins with
    own.adapters.admin.tell("/reset_prefix_cache", {})
    own.adapters.admin.tell("/update_weight_version", {"new_version": "default"})
    again = only(collect(kept, 5).rows)
    assert torch.equal(first.ids, again.ids), "read again, the same seeds"
    torch.testing.assert_close(first.sampled, again.sampled, atol=1e-4, rtol=0)
    kept.learner.policy.server = replace(own, adapters=None)
    iterate(kept, progress)
    assert iterate(kept, progress).metrics["mismatch_max"] > 1e-3, "they are not followed"
