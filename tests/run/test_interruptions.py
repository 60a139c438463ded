"""What ends a run before its time: what is said, the exit code, what is whole, and going on."""

import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from flowrl.errors import NotFiniteError, UserError
from flowrl.iteration import update
from flowrl.losses.base import reduced
from flowrl.run import train
from flowrl.run.save import checkpoint
from flowrl.run.save.failures import Mistake, _stop, starting
from flowrl.run.watch.alarms import Alarms
from flowrl.session import atomic
from flowrl.session.atomic import held, sums
from flowrl.session.progress import Progress
from tests.support import runs
from tests.support.disks import mounted
from tests.support.iterations import iterate
from tests.support.runs import flowrl, lines
from tests.support.warm import Warm, agree, small

REWARD = """
import os
from pathlib import Path

calls = 0


def bright(samples):
    global calls
    calls += 1
    if calls == int(os.environ.get("RAISE_AT", 0)):
        raise KeyError("colour")
    if (kill := os.environ.get("KILL_AT")) is not None:
        deaths = Path(os.environ["DEATHS"])
        saved = Path(os.environ["RUN"]).glob("checkpoints/*")
        newest = max((p.name[-1] for p in saved if p.name.isdigit()), default="0")
        before = deaths.read_text()  # the newest checkpoint at each
        due = newest > (before or "0")[-1] if kill == "checkpoint" else calls == int(kill)
        if due and len(before) < int(os.environ["MOST"]):
            deaths.write_text(before + newest)
            os.kill(os.getpid(), 9)
    if calls == int(os.environ.get("FILL_AT", 0)):
        with open(os.environ["FILL"], "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                pass
    return samples.media.flatten(1).mean(1)
"""


@pytest.fixture(scope="module")
def config(pipeline, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    (folder / "own.py").write_text(REWARD)
    tree = small(pipeline, folder) | {"rewards": [{"name": f"{folder / 'own.py'}:bright"}]}
    return runs.write(tree, folder)


@pytest.fixture(scope="module")
def unbroken(warm: Warm, config: Path) -> Path:
    folder = config.parent / "unbroken"
    assert warm.run("train", config, "--folder", folder, out=config.parent / "said.txt") == 0
    return folder


def go_on(warm: Warm, folder: Path, unbroken: Path) -> str:
    """Resume to the end, which must be that of the unbroken run; gives what was said."""
    out = folder.parent / "resumed.txt"
    assert warm.run("train", "--resume", folder, "--trust", out=out) == 0, out.read_text()
    agree(folder, unbroken)
    return out.read_text()


def stopped(warm: Warm, config: Path, folder: Path, **env: str) -> str:
    """A run that stops itself: one sentence, exit code 3."""
    out = config.parent / f"{config.parent.name}-stopped.txt"
    out.unlink(missing_ok=True)
    assert warm.run("train", config, "--folder", folder, out=out, env=env) == 3, out.read_text()
    said = out.read_text()
    assert said.count("flowrl: ") == 1 and "Traceback" not in said
    sentence = said[said.index("flowrl: ") :]
    assert sentence.count("\n") == 1 and f"flowrl train --resume {folder}" in sentence
    return sentence


@pytest.mark.slow
def test_sigterm_saves_and_says_how_to_go_on(warm, config, unbroken, tmp_path):
    folder, out = tmp_path / "run", tmp_path / "said.txt"
    pid = warm.start("train", config, "--folder", folder, out=out)
    while not (folder / "metrics.jsonl").is_file() or len(lines(folder)) < 2:
        assert warm.poll(pid) is None, out.read_text()
    os.kill(pid, 15)
    assert warm.wait(pid) == 143
    done = lines(folder)[-1]["iteration"]
    assert 0 < done < 4 and f"flowrl train --resume {folder}" in out.read_text()
    assert (folder / "checkpoints" / f"{done:06d}" / "state.json").is_file()
    go_on(warm, folder, unbroken)


def restarted(
    warm: Warm, config: Path, folder: Path, restarts: int, **env: str
) -> tuple[int, str, int]:
    """A run with --restarts that kills itself: exit code, what was said, how often it died."""
    out, deaths = folder.parent / "said.txt", folder.parent / "deaths.txt"
    deaths.write_text("")
    words = ("train", config, "--restarts", str(restarts), "--folder", folder)
    code = warm.run(*words, out=out, env=env | {"DEATHS": str(deaths), "RUN": str(folder)})
    return code, out.read_text(), len(deaths.read_text())


def test_a_killed_training_resumes_by_itself_to_the_same_bits(warm, config, unbroken, tmp_path):
    folder = tmp_path / "run"
    code, said, died = restarted(warm, config, folder, 1, KILL_AT="checkpoint", MOST="2")
    assert (code, died) == (0, 2), said
    assert said.count("ended by SIGKILL; it resumes from checkpoint 00000") == 2
    assert said.count("(restart 1 of 1)") == 2  # counted from the newest checkpoint
    agree(folder, unbroken)


@pytest.mark.slow
def test_restarts_end_without_a_new_checkpoint(warm, config, tmp_path):
    code, said, died = restarted(warm, config, tmp_path / "run", 1, KILL_AT="9", MOST="9")
    assert (code, died) == (137, 2), said
    assert "begins again (restart 1 of 1)" in said
    assert "all of --restarts 1 are used before the first checkpoint" in said


@pytest.mark.slow
def test_a_mistake_and_a_signal_are_no_deaths(warm, config, tmp_path):
    folder, out = tmp_path / "run", tmp_path / "said.txt"
    words = ("train", config, "--restarts", "3", "--folder", folder)
    assert warm.run(*words, "--train.updates", "99", out=out) == 2
    assert "train.updates" in out.read_text() and "restart 1" not in out.read_text()
    pid = warm.start(*words, out=out)
    while not (folder / "checkpoints").is_dir():
        assert warm.poll(pid) is None, out.read_text()
    os.kill(pid, 15)
    assert warm.wait(pid) == 143, out.read_text()
    assert f"flowrl train --resume {folder}" in out.read_text()
    assert "restart 1" not in out.read_text()


@pytest.mark.slow
def test_a_launcher_restarts_its_own_processes(warm, config, unbroken, tmp_path):
    folder, out = tmp_path / "run", tmp_path / "said.txt"
    words, env = ("train", config, "--folder", folder), {"TORCHELASTIC_RUN_ID": "x"}
    assert warm.run(*words, "--restarts", "2", out=out, env=env) == 2
    assert "pass `--max_restarts 2` to the launcher" in out.read_text()
    assert not folder.exists()
    killed = {"KILL_AT": "checkpoint", "MOST": "1", "DEATHS": str(tmp_path / "deaths.txt")}
    killed["RUN"] = str(folder)
    (tmp_path / "deaths.txt").write_text("")
    assert warm.run(*words, out=out, env=killed) == -9
    assert warm.run(*words, out=out, env=env | {"TORCHELASTIC_RESTART_COUNT": "1"}) == 0
    agree(folder, unbroken)


def test_a_reward_that_raises_after_its_self_test(warm, config, unbroken, tmp_path):
    folder = tmp_path / "run"
    said = stopped(warm, config, folder, RAISE_AT="10")
    assert "the reward bright raised KeyError: 'colour' (own.py, 12)" in said
    newest = checkpoint.newest(folder)
    assert newest is not None and f"Checkpoint {newest.name} is intact" in said
    assert "raise KeyError" in (folder / "error.txt").read_text()
    go_on(warm, folder, unbroken)


@pytest.mark.parametrize(  # before a save, and before an evaluation
    "call", ["10", pytest.param("12", marks=pytest.mark.slow)]
)
def test_a_full_disk_stops_a_run_that_goes_on_when_there_is_room(
    warm, config, unbroken, tmp_path, call
):
    with mounted(tmp_path / "disk", "size=4m") as disk:
        folder = disk / "run"
        said = stopped(warm, config, folder, FILL_AT=call, FILL=str(disk / "filler"))
        assert "the disk is full" in said or "No space left on device" in said
        assert checkpoint.newest(folder) is not None
        assert not list((folder / "checkpoints").glob(".*.tmp"))
        (disk / "filler").unlink()
        go_on(warm, folder, unbroken)


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_is_skipped_counted_and_the_third_stops(
    pipeline, tmp_path, monkeypatch, capsys
):
    config, folder = runs.write(small(pipeline, tmp_path), tmp_path), tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(update, "reduced", lambda *given: reduced(*given) * float("nan"))
        assert flowrl("train", config, "--folder", folder) == 3
    said = capsys.readouterr().err
    assert "three consecutive optimizer steps" in said and "Checkpoint 000001" in said
    assert [line.get("skipped") for line in lines(folder)] == [None, 2]
    kept = runs.load_file(folder / "checkpoints" / "000001" / "policies.safetensors")
    assert all(bool(weight.isfinite().all()) for weight in kept.values())
    assert flowrl("train", "--resume", folder, "--trust") == 0
    assert [line["iteration"] for line in lines(folder)] == [0, 1, 2, 3, 4]
    assert [line.get("skipped") for line in lines(folder)] == [None, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("bad", "left"),
    [
        ("345", 2),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in (("123", 4), ("1245", 0), ("0167", 0))),
    ],
)
def test_three_in_a_row_are_optimizer_steps_whatever_iteration_they_are_of(
    pipeline, tmp_path, monkeypatch, bad, left
):
    """Eight steps in two iterations of four."""
    kept = runs.session(pipeline, tmp_path, runs.NFT | {"group": 8}, updates=4)
    norms = iter(math.nan if str(step) in bad else 1.0 for step in range(8))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(next(norms)))
    progress = Progress()
    with (
        pytest.raises(UserError, match="three consecutive optimizer steps")
        if left
        else nullcontext()
    ):
        for _ in range(2):
            iterate(kept, progress)
    assert len(list(norms)) == left


@pytest.mark.slow
def test_a_resumed_run_has_not_forgotten_the_steps_before_it(
    pipeline, tmp_path, monkeypatch, capsys
):
    """Two steps were bad when it was saved: the first one afterwards is the third."""
    folder = tmp_path / "run"
    monkeypatch.setattr(update, "reduced", lambda *given: reduced(*given) * float("nan"))
    assert flowrl("train", runs.write(small(pipeline, tmp_path), tmp_path), "--folder", folder) == 3
    seen: list[float] = []
    step = update.optimizer_step
    monkeypatch.setattr(update, "optimizer_step", lambda *given: seen.append(0.0) or step(*given))
    assert flowrl("train", "--resume", folder, "--trust") == 3
    assert len(seen) == 1
    assert "three consecutive optimizer steps" in capsys.readouterr().err


@pytest.mark.slow
def test_one_gradient_that_is_not_a_number_does_not_stop_a_run(pipeline, tmp_path, monkeypatch):
    seen = []

    def sometimes(*given):
        seen.append(reduced(*given))
        return seen[-1] * (float("nan") if len(seen) in (1, 2) else 1.0)

    monkeypatch.setattr(update, "reduced", sometimes)
    folder = tmp_path / "run"
    assert flowrl("train", runs.write(small(pipeline, tmp_path), tmp_path), "--folder", folder) == 0
    skipped = [line["skipped"] for line in lines(folder)[1:]]
    assert skipped[0] >= 1 and skipped[1:] == [0, 0, 0]


@pytest.mark.slow
def test_a_run_that_its_alarms_stop_has_the_line_of_its_last_checkpoint(
    pipeline, tmp_path, monkeypatch, capsys
):
    tree, folder = small(pipeline, tmp_path), tmp_path / "run"
    tree["train"]["alarms"] = "stop"
    with monkeypatch.context() as alarmed:
        alarmed.setattr(Alarms, "watch", lambda *_: ["the moon is full"])
        assert flowrl("train", runs.write(tree, tmp_path), "--folder", folder) == 3
    assert "the moon is full" in capsys.readouterr().err
    assert [line["iteration"] for line in lines(folder)] == [0, 1]
    assert flowrl("train", "--resume", folder, "--trust") == 0
    assert [line["iteration"] for line in lines(folder)] == [0, 1, 2, 3, 4]
    assert lines(folder)[1].keys() == lines(folder)[3].keys()


@pytest.mark.slow
def test_a_process_that_dies_stops_the_others(warm, config, tmp_path):
    folder, outs = tmp_path / "run", [tmp_path / f"said{rank}.txt" for rank in range(2)]
    together = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    together |= {"MASTER_PORT": str(runs.free_port()), "ACCELERATE_USE_CPU": "true"}
    words = ("train", config, "--folder", folder, "--train.iterations", "200")
    pids = [
        warm.start(*words, out=out, env=together | {"RANK": str(i), "LOCAL_RANK": str(i)})
        for i, out in enumerate(outs)
    ]
    while not (folder / "checkpoints" / "000002").is_dir():
        assert [warm.poll(pid) for pid in pids] == [None, None], outs[0].read_text()
    os.kill(pids[1], 9)
    assert warm.wait(pids[1]) == -9
    assert warm.wait(pids[0]) == 3, outs[0].read_text()
    said = outs[0].read_text()
    assert said.count("another process of this run has ended") == 1 and "Traceback" not in said
    newest = checkpoint.newest(folder)
    assert newest is not None and int(newest.name) >= 2
    shorter = (folder / "run.yaml").read_text().replace("iterations: 200", "iterations: 4")
    done = int(newest.name)
    (folder / "run.yaml").write_text(shorter.replace("iterations: 4", f"iterations: {done + 2}"))
    assert warm.run("train", "--resume", folder, out=tmp_path / "resumed.txt") == 0
    resumed = (tmp_path / "resumed.txt").read_text()
    assert "processes: 1 now, 2 before" in resumed and "not to the bit" in resumed
    assert f"train.iterations 200 -> {done + 2}" in resumed
    assert [line["iteration"] for line in lines(folder)] == list(range(done + 3))


def test_a_run_whose_checkpoints_are_gone_is_refused_and_loses_nothing(warm, unbroken, tmp_path):
    folder, out = tmp_path / "run", tmp_path / "said.txt"
    runs.copied_run(unbroken, folder)
    shutil.rmtree(folder / "checkpoints")
    before = sums(folder)
    assert warm.run("train", "--resume", folder, "--trust", out=out) == 2
    said = out.read_text()
    assert f"{folder} has no checkpoint, but metrics.jsonl records 4 iterations: if its" in said
    assert f"flowrl train {folder}/run.yaml" in said
    assert {**sums(folder), ".lock": before[".lock"]} == before
    (folder / "checkpoints").mkdir()
    with pytest.raises(UserError, match="no checkpoint, but metrics"):
        checkpoint.newest(folder)
    (folder / "checkpoints" / ".000000.tmp").mkdir()  # killed before the first one was complete
    assert checkpoint.newest(folder) is None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    found = bytearray(path.read_bytes())
    found[len(found) // 2] ^= 1
    path.write_bytes(found)


DAMAGES = {
    "policies.safetensors": (flip, "has another checksum"),
    "optimizer.pt": (cut, "bytes"),
    "state.json": (Path.unlink, "is missing"),
    "files.json": (cut, "is not readable"),
}


def test_a_damaged_checkpoint_is_passed_over(warm, unbroken, tmp_path):
    for name, (harm, words) in DAMAGES.items():
        folder, heard = tmp_path / name, []
        runs.copied_run(unbroken, folder)
        first, last = sorted((folder / "checkpoints").iterdir())
        harm(last / name)
        assert checkpoint.newest(folder, heard.append) == first
        assert len(heard) == 1 and words in heard[0] and str(last) in heard[0]
        harm(first / name)
        with pytest.raises(Mistake, match="no intact checkpoint") as refused, starting(folder):
            checkpoint.newest(folder, heard.append)
        assert "is intact" not in str(refused.value), "the message has the only way on"
    folder = tmp_path / "run"
    runs.copied_run(unbroken, folder)
    flip(folder / "checkpoints" / "000004" / "policies.safetensors")
    (folder / "checkpoints" / ".000005.tmp").mkdir()  # a half-written one
    said = go_on(warm, folder, unbroken)
    assert "000004 is damaged" in said and "resuming after iteration 3" in said
    found = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert found == ["000003", "000004", "damaged-000004"]
    assert atomic.damage(folder / "checkpoints" / "000004") is None


def test_one_process_at_a_time_trains_in_a_folder(unbroken, tmp_path, capsys):
    folder = tmp_path / "run"
    runs.copied_run(unbroken, folder)
    with held(folder) as before:
        assert before is None
        assert flowrl("train", "--resume", folder, "--trust") == 2
        said = capsys.readouterr().err
        assert f"is being trained by process {os.getpid()}" in said and said.count("\n") == 1
    (folder / ".lock").write_text("process 999999 on elsewhere")  # a killed process leaves it
    assert flowrl("train", "--resume", folder, "--trust") == 0
    assert "stale lock of process 999999 on elsewhere, which has ended" in capsys.readouterr().out
    with held(folder) as before:
        assert before is None


def test_folders_that_cannot_be_written_and_settings_that_cannot_be_read(
    config, unbroken, tmp_path, capsys
):
    (tmp_path / "file").write_text("")
    assert flowrl("train", config, "--folder", tmp_path / "file" / "run") == 2
    assert "run cannot be created" in capsys.readouterr().err
    folder = tmp_path / "run"
    runs.copied_run(unbroken, folder)
    for damaged in (b"recipe: {name: nft", b"\xff\xfe\x00", b"", b"recipe: {name: nft}\n"):
        (folder / "run.yaml").write_bytes(damaged)
        assert flowrl("train", "--resume", folder, "--trust") == 2
        said = capsys.readouterr().err
        assert "run.yaml" in said and said.count("\n") == 1


def test_a_disk_that_is_read_only(config, unbroken, tmp_path, capsys):
    with mounted(tmp_path / "disk", "size=9m") as disk:
        runs.copied_run(unbroken, disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert flowrl("train", config, "--folder", disk / "new") == 2
        assert flowrl("train", "--resume", disk / "run", "--trust") == 2
        said = capsys.readouterr().err
        assert said.count("ead-only") == 2 and said.count("\n") == 2


@pytest.mark.quick_cases("rew")
@pytest.mark.parametrize("torn", ['{"iteration": 4, "rew', '{"iteration": 4}\n{"itera'])
def test_a_torn_last_line_is_done_again(warm, unbroken, tmp_path, torn):
    folder = tmp_path / "run"
    runs.copied_run(unbroken, folder)
    shutil.rmtree(folder / "checkpoints" / "000004")
    whole_lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:4]
    (folder / "metrics.jsonl").write_text("".join(whole_lines) + torn)
    go_on(warm, folder, unbroken)


@pytest.mark.slow
def test_a_run_killed_between_its_first_line_and_its_first_checkpoint(
    pipeline, tmp_path, monkeypatch
):
    config, folder = runs.write(small(pipeline, tmp_path), tmp_path), tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(train.checkpoint, "save_checkpoint", lambda *_: sys.exit(9))
        assert flowrl("train", config, "--folder", folder) == 9
    assert [line["iteration"] for line in lines(folder)] == [0]
    assert flowrl("train", "--resume", folder, "--trust") == 0
    assert [line["iteration"] for line in lines(folder)] == [0, 1, 2, 3, 4]


def test_the_last_lines_of_a_collapsed_run_say_whose_weights_are_best(tmp_path) -> None:
    """Its loss is no longer finite: the last alarm, and the weights that are worth keeping."""
    (tmp_path / "run.yaml").write_text("recipe: {name: nft}\ntrain: {iterations: 9}\n")
    (tmp_path / "checkpoints" / "000002").mkdir(parents=True)
    broken = NotFiniteError("no finite gradient in three consecutive optimizer steps")
    assert "best weights" not in str(_stop(tmp_path, broken))
    (tmp_path / "best" / "000000").mkdir(parents=True)
    assert f"The best weights are untouched in {tmp_path / 'best'}. " in str(
        _stop(tmp_path, broken)
    )
    scores = {0: 0.75, 2: 0.0}
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"iteration": at, "held_out/redness": score, "alarms": at / 2}) + "\n"
            for at, score in scores.items()
        )
    )
    said = str(_stop(tmp_path, broken)).splitlines()
    assert said[0] == f"{broken}." and said[1] == "1 alarm."
    assert said[2] == (
        "The best weights are the base model's, with redness 0.750: "
        f"flowrl sample {tmp_path} PROMPT --weights best"
    )
    assert said[3].startswith(f"They are untouched in {tmp_path / 'best'}. Checkpoint 000002 is")
