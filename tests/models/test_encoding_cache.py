"""Kept encodings: the bits of a prompt depend on nothing but itself, and bytes are bounded."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from flowrl.models.diffusers.call.rows import encoding_cache
from flowrl.models.diffusers.call.rows.encoding_cache import EncodingCache, byte_count
from flowrl.models.diffusers.policy import PipelinePolicy, PipelineUse
from flowrl.run.save import checkpoint
from flowrl.run.watch.alarms import Alarms
from flowrl.session.progress import Progress
from flowrl.settings.read import run_from
from tests.support import runs
from tests.support.iterations import iterate
from tests.support.tiny_pipelines import FAMILIES, qwen_image

PROMPTS = ["a red ball", "a blue cube on the table beside a lamp", "two dogs"]
MOST = 2**30
CALL = FAMILIES["qwen"][1] | {"max_sequence_length": 64}


def driven(keep: EncodingCache | None):
    use = PipelineUse(encoding_cache=keep)
    return PipelinePolicy(qwen_image(), call=CALL, rows_per_call=8, use=use)


def equal(one, other) -> bool:
    pairs = zip(tree_leaves(one.values), tree_leaves(other.values), strict=True)
    same = [torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs]
    return all(same) and (one.plain is None or equal(one.plain, other.plain))


@pytest.mark.quick_cases("cpu")
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_prompt_has_the_same_bits_alone_cold_and_warm(where):
    kept = EncodingCache(where, MOST)
    made = driven(kept)
    calls, real = [], made.loop.encode
    made.loop.encode = lambda prompts, extras: calls.append(prompts) or real(prompts, extras)
    cold = made.encode(PROMPTS)
    warm = made.encode(PROMPTS)
    assert calls == [[prompt] for prompt in PROMPTS] and equal(cold, warm)
    assert cold.prompts == warm.prompts == tuple(PROMPTS)
    back = made.encode(PROMPTS[::-1])
    assert equal(back.take([2, 1, 0]), cold) and len(calls) == 3
    other = driven(EncodingCache(where, MOST)).encode([*PROMPTS[1:], PROMPTS[0]])
    assert equal(other.take([2, 0, 1]), cold)


@pytest.mark.slow
def test_bytes_are_bounded_and_files_end_with_the_run():
    sizes = [byte_count(driven(None).encode([prompt])) for prompt in PROMPTS]
    kept = EncodingCache("disk", max(sizes) + 1)
    made, folder = driven(kept), kept._folder
    for prompt in PROMPTS:
        made.encode([prompt])
        assert 0 < kept.bytes <= kept.most and len(list(folder.glob("*.pt"))) == len(kept._kept)
    assert len(kept._kept) < len(PROMPTS)
    del made, kept
    assert not Path(folder).exists()
    none = EncodingCache("cpu", 1)
    driven(none).encode(PROMPTS)
    assert none.bytes == 0 and not none._kept


def test_a_damaged_file_is_encoded_again_and_a_full_disk_is_an_error_with_the_file(monkeypatch):
    kept = EncodingCache("disk", MOST)
    made = driven(kept)
    cold, size = made.encode(PROMPTS), kept.bytes
    first, second, _ = sorted(kept._folder.glob("*.pt"))
    first.write_bytes(first.read_bytes()[:100])
    second.unlink()
    assert equal(made.encode(PROMPTS), cold) and kept.bytes == size
    assert equal(made.encode(PROMPTS), cold) and len(kept._kept) == 3

    def full(*_):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 768 vs 726")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"flowrl-encodings-.*\.pt cannot be written: is its disk"):
        made.encode(["another prompt"])


@pytest.mark.slow
def test_folders_of_killed_runs_are_removed_and_those_of_others_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(encoding_cache.tempfile, "tempdir", str(tmp_path))
    mine = EncodingCache("disk", MOST)
    code = (
        "import os, signal\n"
        "from flowrl.models.diffusers.call.rows.encoding_cache import EncodingCache\n"
        "kept = EncodingCache('disk', 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    given = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], env=given).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2 and mine._folder.exists()
    other = EncodingCache("disk", MOST)
    assert set(tmp_path.iterdir()) == {mine._folder, other._folder}


def test_a_prompts_own_negative_prompt_is_part_of_what_is_kept():
    made = driven(EncodingCache("cpu", MOST))
    rows = [{"negative_prompt": "blurry"}, {"negative_prompt": "a long list of what is unwanted"}]
    both = made.encode([PROMPTS[0]] * 2, rows)
    assert len(made.encoding_cache._kept) == 2
    assert equal(made.encode([PROMPTS[0]] * 2, rows[::-1]).take([1, 0]), both)


@pytest.mark.slow
def test_a_resumed_run_with_a_cold_cache_has_the_same_bits(pipeline, tmp_path):
    settings = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    settings["model"]["encodings"] = {"keep": "cpu"}

    def opened():
        return runs.session_of(run_from(settings, "test"), tmp_path)

    whole, first, again = opened(), opened(), opened()
    progress = Progress()
    for _ in range(3):
        iterate(whole, progress)
    assert whole.learner.policy.encoding_cache._kept
    progress = Progress()
    iterate(first, progress)
    checkpoint.save_checkpoint(first, progress, Alarms())
    progress = checkpoint.restore(again, tmp_path / "checkpoints" / "000001", Alarms())
    for _ in range(2):
        iterate(again, progress)
    assert runs.same_weights(whole, again)
