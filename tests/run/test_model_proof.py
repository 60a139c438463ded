"""The start of a run on several processes: the main one alone looks for a kept proof."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.models.diffusers.whole import proof_cache as proof_cache
from flowrl.run import model_proof
from flowrl.run.model_proof import StartProof, whole_prompts
from tests.support import runs

torch.set_num_threads(1)


def test_other_processes_use_what_the_main_one_has_found(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has no cache, or another, neither reads nor writes, and makes no proof."""
    session = runs.opened(runs.tree(pipeline, tmp_path, runs.FLOW_GRPO), tmp_path)
    first = StartProof(session, cache=True)
    first.prove()
    first.keep()
    found = StartProof(session, cache=True).kept
    assert found is not None and StartProof(session, cache=False).kept is None

    def received(box: list[Any]) -> None:
        box[0] = found

    def unread(digest: str) -> None:
        raise AssertionError("another process has read or written a proof")

    monkeypatch.setattr(model_proof, "broadcast_object_list", received)
    monkeypatch.setattr(proof_cache, "read", unread)
    monkeypatch.setattr(proof_cache, "keep", unread)
    monkeypatch.setattr(type(session.learner.policy), "proofs", unread)
    other = replace(
        session, learner=replace(session.learner, parallel=replace(session.parallel, rank=1))
    )
    proof = StartProof(other, cache=True)
    proof.prove()
    proof.keep()
    assert proof.kept is found


def test_a_digest_that_cannot_be_made_leaves_the_proof(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> str:
        raise OSError("no such file")

    session = runs.opened(runs.tree(pipeline, tmp_path, runs.FLOW_GRPO), tmp_path)
    monkeypatch.setattr(proof_cache, "digest", broken)
    proof = StartProof(session, cache=True)
    proof.prove()
    proof.keep()
    assert proof.sentences and not proof_cache.folder().exists()


def test_whole_samples_take_prompts_of_three_lengths() -> None:
    texts = ("aaaa", "a", "aaa", "aa")
    rows = texts, tuple({"prompt": text} for text in texts)
    chosen, meta = whole_prompts(rows)
    assert chosen == ("a", "aaa", "aaaa") and [row["prompt"] for row in meta] == [*chosen]
    assert whole_prompts((("one",), ()))[0] == ("one",)
