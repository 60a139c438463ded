"""Rows per call: apart by kind, lowered after an out-of-memory error, kept in checkpoints."""

import errno
import json
import math
from dataclasses import replace

import pytest
import torch

from flowrl.errors import UserError
from flowrl.estimate.memory import estimate
from flowrl.models.call_sizes import CallSizes, CallTooLarge, bounded_call
from flowrl.models.out_of_memory import out_of_memory
from flowrl.run import call_search
from flowrl.run.call_search import SHARE, later_bytes, rows_that_fit
from flowrl.run.evaluate.evaluate import evaluate_and_keep, evaluate_held_out
from flowrl.run.save import checkpoint
from flowrl.run.watch.alarms import Alarms
from flowrl.session.progress import Progress
from flowrl.session.smaller_calls import explained
from flowrl.settings.read import dump, override, run_from
from tests.support import process_runs, runs, text_runs, tiny_lm
from tests.support.iterations import iterate
from tests.support.process_runs import DDP, little_memory

APART = {"sampling": 4, "decoding": 2, "training": 1}


def opened(pipeline, folder, recipe=runs.NFT, **train):
    kept = runs.session(pipeline, folder, recipe, lr=1e-2, **train)
    kept.learner.policy.proofs(kept.prompts.texts[:2], kept.algorithm.steps)  # calls of its own
    return kept


def test_one_number_is_all_three_and_a_mapping_tells_them_apart(tmp_path):
    tree = runs.tree(tmp_path, tmp_path, runs.NFT)

    def rows(value):
        run = run_from({**tree, "train": {**tree["train"], "rows_per_call": value}}, "test")
        return run.train.call_sizes, run

    assert set(rows(3)[0].values()) == {3} and set(rows("auto")[0].values()) == {"auto"}
    by_kind, run = rows({"training": 2})
    assert by_kind == {"sampling": "auto", "decoding": "auto", "training": 2}
    again = override(run, ["--train.rows-per-call.decoding", "5"])
    assert again.train.call_sizes == by_kind | {"decoding": 5}
    assert override(run, ["--train.rows-per-call", "7"]).train.rows_per_call == 7
    assert dump(rows(3)[1])["train"]["rows_per_call"] == 3
    for wrong in (0, "many", {"training": 0}, {"trainig": 1}):
        with pytest.raises(UserError, match="rows_per_call"):
            rows(wrong)


@pytest.mark.slow
def test_calls_are_of_their_own_sizes(pipeline, tmp_path):
    kept = opened(pipeline, tmp_path, rows_per_call=APART)
    seen = dict.fromkeys(APART, 0)
    (denoiser,) = kept.learner.policy.denoisers
    decoder = kept.learner.policy.pipe.vae.decoder

    def note(_module, args, named=None):
        rows = len((named or {}).get("hidden_states", args[0] if args else ()))
        kind = "training" if torch.is_grad_enabled() else "sampling"
        seen[kind] = max(seen[kind], rows)

    denoiser.register_forward_pre_hook(note, with_kwargs=True)
    decoder.register_forward_pre_hook(
        lambda _m, args: seen.update(decoding=max(seen["decoding"], len(args[0])))
    )
    iterate(kept, Progress())
    assert seen == APART


@pytest.mark.slow
def test_a_call_that_is_too_large_is_halved_and_all_is_done_again(pipeline, tmp_path, capfd):
    kept, little = (opened(pipeline, tmp_path, rows_per_call=8) for _ in range(2))
    little_memory(little.learner.policy, 2)
    metrics = iterate(little, Progress()).metrics
    assert vars(little.learner.policy.sizes) == {"sampling": 2, "decoding": 8, "training": 2}
    assert "per call are now 4 in sampling, 8 in decoding, 8 in training" in capfd.readouterr().err
    kept.learner.policy.sizes.take({"sampling": 2, "decoding": 8, "training": 2})
    expected = iterate(kept, Progress()).metrics
    assert runs.same_weights(kept, little)
    assert metrics["loss"] == expected["loss"] and metrics["grad_norm"] == expected["grad_norm"]
    assert metrics["count/training"] == expected["count/training"]


@pytest.mark.slow
def test_evaluations_are_lowered_too_and_one_row_is_explained(pipeline, tmp_path):
    kept = opened(pipeline, tmp_path, rows_per_call=8)
    scores = evaluate_held_out(kept.learner, kept.held_out, kept.judges).metrics
    little_memory(kept.learner.policy, 4)
    evaluate_and_keep(kept, progress := Progress())
    assert kept.learner.policy.rows_per_call == 4
    assert progress.last["brightness"] == pytest.approx(scores["brightness"], abs=1e-5)
    little_memory(kept.learner.policy, 0)
    with pytest.raises(UserError, match="out of memory"), explained(kept.run):
        evaluate_and_keep(kept, Progress())


@pytest.mark.slow
def test_nothing_is_repeated_once_the_weights_have_changed(pipeline, tmp_path, monkeypatch):
    kept = opened(pipeline, tmp_path, rows_per_call=8, updates=2)
    step = kept.learner.optimizer.step

    def stepped(*words, **named):
        little_memory(kept.learner.policy, 2, graded=True)
        return step(*words, **named)

    monkeypatch.setattr(kept.learner.optimizer, "step", stepped)
    with pytest.raises(CallTooLarge, match="out of memory") as error:
        iterate(kept, Progress())
    assert not error.value.repeatable and kept.learner.policy.sizes.training == 8


@pytest.mark.slow
def test_checkpoints_hold_the_sizes_until_the_setting_changes(pipeline, tmp_path):
    kept = opened(pipeline, tmp_path, rows_per_call=8)
    kept.learner.policy.sizes.lower("training")
    checkpoint.save_checkpoint(kept, Progress(), Alarms())
    folder = tmp_path / "checkpoints" / "000000"
    again = opened(pipeline, tmp_path, rows_per_call=8)
    checkpoint.restore(again, folder, Alarms())
    assert vars(again.learner.policy.sizes) == {"sampling": 8, "decoding": 8, "training": 4}
    assert again.learner.evaluator.sizes.training == 4
    other = opened(pipeline, tmp_path, rows_per_call=16)
    checkpoint.restore(other, folder, Alarms())
    assert set(vars(other.learner.policy.sizes).values()) == {16}
    state = json.loads((folder / "state.json").read_text())
    state["call_sizes"]["train"]["sampling"] = 0
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="not a number of rows"):
        checkpoint.restore(again, folder, Alarms())


def test_what_is_an_out_of_memory_error_of_the_model():
    inside = torch.OutOfMemoryError("CUDA out of memory")
    inside.add_note("in reward 'clip'")
    assert not out_of_memory(inside) and not out_of_memory(RuntimeError("a wrong shape"))
    assert out_of_memory(MemoryError()) and out_of_memory(RuntimeError("out of memory"))
    for said in (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "NCCL Error 1: unhandled cuda error: Failed to CUDA calloc 6291456 bytes",
        "MPS backend out of memory (MPS allocated: 18.13 GiB, other allocations: 1.1 GiB)",
        "unable to mmap 4096 bytes from file <x>: Cannot allocate memory (12)",
    ):
        assert out_of_memory(RuntimeError(said)), said
    assert out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(CallTooLarge) as error, bounded_call("sampling"), bounded_call("decoding"):
        raise MemoryError
    assert error.value.kinds == {"decoding"} and not error.value.agreed
    sizes = CallSizes.same(3)
    assert sizes.lower("training") and not sizes.lower("training") and sizes.training == 1
    assert not CallSizes().lower("sampling")


@pytest.mark.parametrize(("each", "fixed", "free"), [(10, 5, 1000), (3, 100, 401), (900, 0, 1000)])
def test_a_search_keeps_its_margin(each, fixed, free):
    tried = []

    def peak(rows: int) -> int:
        tried.append(rows)
        if (need := fixed + each * rows) > free:
            raise CallTooLarge(frozenset({"sampling"}), "out of memory")
        return need

    rows = rows_that_fit(peak, free)
    assert rows == 1 or fixed + each * rows <= SHARE * free
    assert rows == 1 or fixed + each * rows * 2 > SHARE * free
    assert max(tried) == max(rows, 2) and math.log2(rows) % 1 == 0


def test_a_search_halves_what_grows_faster_than_its_first_rows():
    def peak(rows: int) -> int:
        if rows > 8:
            raise CallTooLarge(frozenset({"sampling"}), "out of memory")
        return rows

    assert rows_that_fit(peak, 100) == 8


@pytest.mark.slow
def test_two_processes_lower_together_and_stay_one_run(pipeline, tmp_path):
    settings = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO, lr=1e-3, rows_per_call=8)
    settings["model"]["dtype"], settings["prompts"]["per_iteration"] = "float64", 4
    job = process_runs.Job(settings=settings, iterations=2, most_rows=2)
    found = process_runs.together(DDP, {"little": job}, tmp_path / "two")["little"]
    told = process_runs.told(tmp_path / "two", "little")
    assert told["sizes"] == "2 in sampling, 8 in decoding, 2 in training"
    del job["most_rows"]
    alone = process_runs.alone(job, tmp_path / "one")
    assert process_runs.apart(alone, found) < 1e-10


def test_texts_have_sizes_too(tmp_path):
    model = tiny_lm.write(tmp_path / "model")
    kept = text_runs.session(model, tmp_path, text_runs.GRPO, rows_per_call={"sampling": 5})
    sizes = kept.learner.policy.sizes
    assert sizes.sampling == 5 and sizes.training == kept.learner.policy.automatic(6)
    assert replace(sizes) == sizes


def test_a_search_leaves_room_for_what_a_run_takes_later(pipeline, tmp_path, monkeypatch):
    kept = runs.session(pipeline, tmp_path, runs.FLOW_GRPO)
    trained = sum(p.numel() for p in kept.learner.policies.parameters.values())
    planned = estimate(kept.run)
    assert planned is not None and planned.parts["states"] > 0
    later = later_bytes(kept.run, 1)
    assert later == 3 * 4 * trained + planned.parts["states"]  # a gradient and two moments
    assert later_bytes(kept.run, 2) == 3 * 4 * trained + -(-planned.parts["states"] // 2)
    merging = override(kept.run, ["--model.lora.merge", "untrained"])
    merged = estimate(merging)
    assert merged is not None and merged.parts["merged weights"] > 0
    assert later_bytes(merging, 1) == later + merged.parts["merged weights"]
    given: list[int] = []
    monkeypatch.setattr(call_search, "rows_that_fit", lambda peak, free: given.append(free) or 4)
    monkeypatch.setattr(call_search, "_free", lambda: 10 * later)
    vars(kept.learner.parallel)["device"] = "cuda"
    call_search.search_sizes(kept)
    assert given and set(given) == {9 * later} and kept.learner.policy.sizes.training == 4


def test_texts_are_tried_at_the_longest_prompt_and_the_whole_length(tmp_path, monkeypatch):
    """Sampling and training have numbers of their own, as their memory does."""
    kept = text_runs.session(tiny_lm.write(tmp_path / "lm"), tmp_path, text_runs.GRPO)
    before = kept.learner.policy.sizes.decoding
    shapes: list[tuple[int, int]] = []
    kept.learner.policy.model.base_model.register_forward_pre_hook(
        lambda _m, _a, named: shapes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    asked: dict[int, int] = {}

    def fits(peak, free):
        peak(3)
        asked[len(asked)] = free
        return 4 * len(asked)

    monkeypatch.setattr(call_search, "rows_that_fit", fits)
    monkeypatch.setattr(call_search, "_peak", lambda call, rows: call(rows) or 1)
    monkeypatch.setattr(call_search, "_free", lambda: 10**9)
    vars(kept.learner.parallel)["device"] = "cuda"
    call_search.search_sizes(kept)
    longest = max(len(kept.learner.policy.encode(text)) for text in kept.prompts.texts)
    assert shapes == [(3, longest + 6), (3, longest + 5)]  # the last token predicts nothing
    sizes = kept.learner.policy.sizes
    assert (sizes.sampling, sizes.training, sizes.decoding) == (4, 8, before)
    assert all(p.grad is None for p in kept.learner.policies.parameters.values())
