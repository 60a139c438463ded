"""The kit for a machine with one GPU: what ends early costs only itself, pages are of its lines."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

from flowrl.errors import UserError
from flowrl.models.description import describe
from flowrl.models.diffusers.call.traits.checks import refuse_pipeline
from flowrl.paths import PROJECT
from scripts.gpu import lines as kept_lines
from scripts.gpu import pack, pages, peers, run, stage_beside, stages, subjects
from scripts.gpu.lines import Lines, read_lines, spread
from scripts.gpu.stages import START, Stage
from scripts.gpu.trial import Trial
from tests.support.pretended_cuda import compiled

LINE = (  # a stage's process without torch: two lines, with a fault between them
    "import sys, time, os, signal\n"
    "sys.path.insert(0, '.')\n"
    "from pathlib import Path\n"
    "from scripts.gpu.lines import Lines\n"
    "lines = Lines(Path(sys.argv[1]) / 'lines.jsonl', {'commit': 'c', 'differs': ''})\n"
    "lines.add(sys.argv[2], 'measured', 'first', figures={}, predicted={})\n"
    "fault = sys.argv[3]\n"
    "if fault == 'fail': raise RuntimeError('injected')\n"
    "if fault == 'hang': time.sleep(60)\n"
    "if fault == 'kill': os.kill(os.getpid(), signal.SIGKILL)\n"
    "lines.add(sys.argv[2], 'measured', 'last', figures={}, predicted={})\n"
)
FAULTS = {"fail": "failed", "hang": "timeout", "kill": "killed", "": "done"}


def light(out: Path, name: str, fault: str = "", needed: bool = False) -> Stage:
    words = ("-c", LINE, str(out), name, fault)
    return Stage(name, f"the stage {name}", most=0.7 if fault == "hang" else 20, needed=needed,
                 words=words)  # fmt: skip


def visit(out: Path, *those: Stage, **more) -> run.Visit:
    predicted = {stage.name: {"seconds": 0.1} for stage in those}
    return run.Visit(out, those, predicted, **more)


def kinds(out: Path, stage: str) -> list[str]:
    lines = read_lines([out / "lines.jsonl"])
    return [line.get("what") if line["kind"] == "measured" else line["kind"] for line in lines
            if line["stage"] == stage]  # fmt: skip


def test_a_fault_costs_only_its_own_stage(tmp_path):
    """One that fails, one that hangs and one that is killed leave their first lines, and all lines
    of the stages around them."""
    those = [light(tmp_path, fault or "well", fault) for fault in FAULTS]
    those.insert(0, light(tmp_path, "before"))
    made = visit(tmp_path, *those)
    assert made.run() == 1
    whole = ["predicted", "first", "last", "ended"]
    for fault, outcome in FAULTS.items():
        name = fault or "well"
        assert kinds(tmp_path, name) == (whole if not fault else ["predicted", "first", "ended"])
        (end,) = [x for x in made.lines.read() if x["stage"] == name and x["kind"] == "ended"]
        assert end["outcome"] == outcome
        assert ("injected" in end.get("why", "")) == (fault == "fail")
    assert kinds(tmp_path, "before") == whole
    assert made.left() == []  # what has ended is not begun again, however it ended
    again = visit(tmp_path, *those, again=["fail"])
    assert [stage.name for stage in again.left()] == ["fail"]


def test_a_second_call_does_what_the_first_was_cut_off_in(tmp_path):
    first, other = light(tmp_path, "first"), light(tmp_path, "other")
    lines = visit(tmp_path, first).lines
    lines.add("first", "ended", "", outcome="done", seconds=1.0)
    lines.add("other", "measured", "first", figures={}, predicted={})  # and no end
    lines.file.write_text(lines.file.read_text() + '{"stage": "other", "ki')  # as a kill leaves it
    known = tmp_path / "known.jsonl"
    lines.file.rename(known)
    left = visit(tmp_path, first, other, known=[known]).left()
    assert [stage.name for stage in left] == ["other"]
    elsewhere = [json.loads(line) for line in known.read_text().splitlines()[:1]]
    elsewhere[0]["commit"] = "another"
    known.write_text("\n".join(map(json.dumps, elsewhere)) + "\n")
    assert len(visit(tmp_path, first, other, known=[known]).left()) == 2  # of another commit


def test_no_stage_begins_that_would_not_end_and_a_needed_one_ends_the_visit(tmp_path, capsys):
    made = visit(tmp_path, light(tmp_path, "one"), seconds=0.05)
    assert made.run() == 1 and "left for another call" in capsys.readouterr().out
    assert kinds(tmp_path, "one") == []
    needed = light(tmp_path, "needed", "fail", needed=True)
    assert visit(tmp_path, needed, light(tmp_path, "two")).run() == 2
    assert kinds(tmp_path, "two") == []


def test_a_killed_visit_leaves_its_lines(tmp_path):
    code = (
        "import sys; from pathlib import Path; from scripts.gpu.run import Stage, Visit\n"
        "sleep = lambda n: ('-c', f'import time; time.sleep({n})')\n"
        "those = [Stage('one', '', 9, words=sleep(0)), Stage('slow', '', 60, words=sleep(60))]\n"
        "predicted = {stage.name: {'seconds': 1.0} for stage in those}\n"
        "Visit(Path(sys.argv[1]), those, predicted).run()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=PROJECT) as process:
        end = time.monotonic() + 60
        while "slow" not in {x["stage"] for x in read_lines([tmp_path / "lines.jsonl"])}:
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert kinds(tmp_path, "one")[-1] == "ended" and kinds(tmp_path, "slow") == ["predicted"]


def test_lines_refuse_what_is_no_line(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"stage": 1\n{"stage": "a", "kind": "b", "what": "c"}\n')
    with pytest.raises(UserError, match="line 1: not JSON"):
        read_lines([file])
    file.write_text('{"stage": "a"}\n')
    with pytest.raises(UserError, match="stage, kind and what"):
        read_lines([file])
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "least": 1.0, "most": 3.0, "number": 3}


def test_a_copy_without_git_knows_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_lines, "PROJECT", tmp_path)
    monkeypatch.setattr(kept_lines, "COMMIT", tmp_path / "commit.json")
    with pytest.raises(UserError, match="neither git nor that file"):
        kept_lines.tree_state()
    (tmp_path / "commit.json").write_text('{"commit": "c", "differs": "d"}')
    assert kept_lines.tree_state() == {"commit": "c", "differs": "d"}


PEER = (  # a trainer with an endless loop, as peers have
    "import sys, time\n"
    "sys.path.insert(0, '.')\n"
    "from scripts.gpu.peers import EnoughTurns, Turns\n"
    "turns, fault = Turns(sys.stdin, sys.stdout, 'cpu'), sys.argv[1]\n"
    "try:\n"
    "    for number in range(99):\n"
    "        turns.boundary()\n"
    "        if fault == 'ends' and number == 1: sys.exit('out of memory')\n"
    "        if fault == 'hangs': time.sleep(60)\n"
    "        if fault == 'prints': print('a word between the answers', flush=True)\n"
    "        turns.rows[False] += 80\n"
    "        turns.sampled()\n"
    "        turns.rows[True] += 31 if fault == 'fewer' else 32\n"
    "except EnoughTurns:\n"
    "    print('enough', file=sys.stderr)\n"
)


def peer_words(fault: str = "") -> list[str]:
    return [sys.executable, "-c", PEER, fault]


def test_a_peer_does_an_iteration_for_each_line():
    with peers.started("peer", peer_words()) as peer:
        assert peer.answer(60) == {"ready": True}
        for _ in range(2):
            turn = peer.turn(60)
            assert (turn["rows"], turn["graded"], turn["GiB"]) == (80, 32, None)
            assert 0 <= turn["sampling"] <= turn["seconds"]
            assert turn["seconds"] == pytest.approx(turn["sampling"] + turn["update"])
        peer.process.stdin.close()  # as when this program has ended: no further turn
        assert peer.process.wait(60) == 0
    with peers.started("peer", peer_words("hangs")) as peer:
        peer.answer(60)
        with pytest.raises(UserError, match="no answer within 0 s"):
            peer.turn(0.2)
    assert peer.process.wait(60) < 0  # killed with the block
    with peers.started("peer", peer_words()) as peer:  # and with the group of its stage
        assert os.getpgid(peer.process.pid) == os.getpgid(0)


def test_a_peer_that_fails_costs_only_its_line(tmp_path, monkeypatch):
    names = ("ends", "prints", "fewer", "equal", "absent")
    monkeypatch.setattr(stage_beside, "SOURCES", dict.fromkeys(names))
    commands = {name: peer_words(name) for name in names[:-1]}
    counts = {False: 80, True: 32}
    floor = SimpleNamespace(
        iteration=lambda: 1.0, counts=Counter(), rows=lambda graded: counts[graded]
    )
    trial = Trial("beside", tmp_path, {})
    stage_beside.beside_peers(trial, commands, floor)
    lines = trial.lines.read()
    why = {line["what"]: line["why"] for line in lines if line["kind"] == "tried"}
    assert set(why) == {"ends", "prints", "absent"}
    assert "has ended" in why["ends"] and why["absent"] == "it did not travel"
    measured = {line["what"]: line["figures"] for line in lines if line["kind"] == "measured"}
    assert set(measured) == {"fewer", "equal"}
    assert measured["equal"]["spread"]["number"] == stage_beside.PEER_TURNS
    assert measured["equal"]["ratio"] > 1  # flowrl's second over the peer's fraction of one
    assert trial.failed == ["fewer: rows of the denoiser"]


def test_a_peer_travels_once_its_trainer_has_done_an_iteration_here(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "PEERS", tmp_path / "peers")
    monkeypatch.setattr(peers, "PEERS", tmp_path / "peers")
    checkout = tmp_path / "checkout"
    for name in ("src/trainer.py", "src/data.bin", "LICENSE", "other.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(name)
    with pytest.raises(UserError, match="not a checkout"):
        pack.add_peer("flow_factory", tmp_path)
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "first")):
        kept_lines.git("-C", str(checkout), *words)
    with pytest.raises(UserError, match="is not known; choose from flow_grpo"):
        pack.add_peer("nothing", checkout)
    with pytest.raises(UserError, match="it has no config"):
        pack.add_peer("flow_grpo", checkout)
    pack.add_peer("flow_factory", checkout)
    folder = tmp_path / "peers" / "flow_factory"
    copied = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert copied == {"src/trainer.py", "LICENSE", "source.json"}
    there, commit = pack.machine(), json.loads((folder / "source.json").read_text())["commit"]

    def faults(**tried) -> list[str]:
        (folder / "tried.json").write_text(json.dumps(tried))
        return pack.peer_faults(there)

    (fault,) = pack.peer_faults(there)
    assert "has not been tried: python -m scripts.gpu.peers flow_factory --try" in fault
    same = {name: there.packages[name] for name in peers.SAME}
    assert faults(commit=commit, versions=same) == []
    assert "other sources" in faults(commit="other", versions=same)[0]
    assert "another accelerate" in faults(commit=commit, versions=same | {"accelerate": "0"})[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(peers.SOURCES))
def test_a_packed_peer_does_an_iteration_of_a_tiny_model(name):
    """Of its own trainer, where scripts/gpu/pack.py has put its sources."""
    needs = [need.replace("-", "_") for need in peers.SOURCES[name].needs]
    if name not in peers.packed() or not all(find_spec(need) for need in needs):
        pytest.skip(f"{name} is not packed, or lacks {needs}")
    result = peers.attempt(name)
    assert result["figures"]["graded"] == 2 * 8 * 2  # guided: eight samples of two trained steps
    assert result["figures"]["rows"] == 2 * (8 * 3 + 8 * 2)  # sampled, and those of the anchor


def test_every_stage_is_predicted_and_may_take_three_times_that():
    known = stages.predictions()
    for stage in stages.STAGES:
        assert (PROJECT / "scripts" / "gpu" / f"stage_{stage.name}.py").is_file()
        own = known[stage.name]
        assert own["seconds"] < stage.most
        assert stage.limit(own) == min(stage.most, START + 3 * own["seconds"])
    for call in (1, 2):  # what a call of ten minutes has room for
        seconds = [known[s.name]["seconds"] for s in run.chosen([], call)]
        assert sum(seconds) < run.CALL_SECONDS
    with pytest.raises(UserError, match="is not known"):
        run.chosen(["nothing"], 1)
    with pytest.raises(UserError, match="STAGE=fail"):
        run.faults(["flux=nothing"])


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as out:
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
        out.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(pack, "project_needs", lambda: [Requirement("mine>=2")])
    monkeypatch.setattr(pack, "packed", list)
    return pack.Machine("3.12.3", {"torch": "2.11.0", "rich": None})


@pytest.mark.parametrize(
    ("need", "found"),
    [
        ("torch>=2.6", "there"), ("torch>=2.12", "wrong"), ("rich", "there"),
        ("rich>=13", "unknown"), ("absent", "lacking"), ("mine>=2", "carried"),
        ("mine<2", "wrong"),
    ],
)  # fmt: skip
def test_a_need_is_met_by_a_wheel_or_by_what_is_there(machine, need, found):
    assert pack.verdict(Requirement(need), machine, {"mine": "2.1"}) == found


def test_needs_of_wheels_are_held_against_the_machine(machine, tmp_path, monkeypatch):
    wheel(tmp_path, "mine", "2.1", "torch>=2", "absent>=1", 'other; extra == "x"',
          'old; python_version < "3.12"')  # fmt: skip
    unmet = pack.unmet(tmp_path, machine)
    assert [(owner, str(need), found) for owner, need, found in unmet] == [
        ("mine", "absent>=1", "lacking")
    ]
    with monkeypatch.context() as peer:
        peer.setattr(pack, "packed", lambda: ["flow_grpo"])
        assert "ml-collections" in {str(need) for _, need, _ in pack.unmet(tmp_path, machine)}
    wheel(tmp_path, "absent", "0.5")
    assert [found for *_, found in pack.unmet(tmp_path, machine)] == ["wrong"]
    wheel(tmp_path, "absent", "0.6")
    with pytest.raises(UserError, match="two wheels of absent"):
        pack.unmet(tmp_path, machine)
    (tmp_path / "absent-0.6-py3-none-any.whl").unlink()
    (tmp_path / "broken-1-py3-none-any.whl").write_text("no zip")
    with pytest.raises(UserError, match="not a wheel"):
        pack.carried(tmp_path)


def test_the_tree_leaves_room_for_the_wheels():
    assert pack.sizes()["tree"] < pack.MOST - 16 * 2**20
    packed = json.loads(pack.SIZES.read_text())
    assert sum(packed.values()) < pack.MOST / 2**20 == pages.MOST
    assert packed.keys() == pack.sizes().keys()
    there = pack.machine()
    assert there.packages["torch"] == "2.11.0" and there.environment["python_version"] == "3.12"


def test_pages_are_those_of_the_lines():
    lines = read_lines([pages.KNOWN])
    for name in pages.PARTS:
        text = (PROJECT / name).read_text()
        assert pages.written(name, text, lines) == text, "run: python scripts/gpu/pages.py"


def test_a_visit_joins_the_pages_and_a_rehearsal_does_not(tmp_path, monkeypatch, capsys):
    about = {"card": "H300", "torch": "3.0", "cuda": "14", "cudnn": 1, "commit": "c" * 40,
             "differs": ""}  # fmt: skip
    visited = Lines(tmp_path / "lines.jsonl", {**about, "rehearsal": False})
    visited.add("flux", "predicted", "x", predicted={"seconds": 1.0})
    visited.add("flux", "measured", "iteration", predicted={"seconds": 31.0},
                figures={"seconds": 29.0, "GiB": 37.9, "spread": spread([28.0, 30.0])})  # fmt: skip
    visited.add("start", "measured", "copy", figures={"rate": 4.3e12}, predicted={})
    visited.add("start", "tried", "compile", works=False, why="no Triton | here")
    visited.add("wan", "checked", "gradients", passed=False, figures={"difference": 0.5})
    visited.add("attention", "measured", "default", predicted={}, figures={"setting": "unmasked"})
    outer = Lines(visited.file, {n: about[n] for n in ("torch", "commit", "differs")})
    outer.add("flux", "ended", "x", outcome="timeout", seconds=90.0, predicted={"seconds": 40.0},
              why='Traceback:\n  File "/a/machine/x.py", line 1\nValueError: no\n')  # fmt: skip
    known = tmp_path / "gpu.jsonl"
    earlier = pages.KNOWN.read_text().splitlines(keepends=True)
    known.write_text("".join(line for line in earlier if '"kind": "seen"' in line))
    monkeypatch.setattr(pages, "KNOWN", known)
    pages.add(visited.file)
    lines = read_lines([known])
    assert [line["why"] for line in lines if line["kind"] == "ended"] == ["ValueError: no"]
    assert "two GPUs" in pages.readme(lines) and "for 16 minutes" in pages.readme(lines)
    text = pages.section(lines)
    for row in (
        "| flux | iteration | 29 s (28 s to 30 s), 37.9 GiB | 31 s |",
        "| start | copy | 4.3 TB/s |  |",
        "| start | compile | does not work: no Triton / here |  |",
        "| wan | gradients | **failed**: difference 0.5 |  |",
        "| flux | the whole stage | timeout after 90 s | 40 s |",
        "What follows for `model.cudnn_attention`: `unmasked`.",
    ):
        assert row in text, row
    assert text.count("| flux | iteration") == 1 and text.count("One H300") == 1
    assert "stages of 2 minutes at cccccccccccc;" in text
    other = Lines(tmp_path / "two.jsonl", about | {"rehearsal": False})
    other.add("flux", "measured", "iteration", figures={}, predicted={})
    Lines(other.file, about | {"card": "H400"}).add(
        "wan", "measured", "x", figures={}, predicted={}
    )
    with pytest.raises(UserError, match="several devices"):
        pages.add(other.file)
    rehearsed = Lines(tmp_path / "rehearsed.jsonl", {**about, "rehearsal": True})
    rehearsed.add("flux", "measured", "iteration", figures={}, predicted={})
    assert pages.main(["--add", str(rehearsed.file)]) == 1
    assert "lines of a rehearsal" in capsys.readouterr().err
    with pytest.raises(UserError, match="lacks <!-- gpu"):
        pages.written("README.md", "nothing", lines)


@pytest.fixture(scope="module")
def _compiler():
    try:
        compiled.library()
    except compiled.NoCompiler as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
def test_the_whole_kit_is_rehearsed_and_faults_cost_only_their_stage(tmp_path):
    """On a pretended device at tiny sizes: FLUX is killed, Wan fails, compiling hangs."""
    names = [stage.name for stage in stages.STAGES]
    injected = {"flux": "kill", "wan": "fail", "compile": "hang"}
    predicted = {name: {"seconds": 0.1} for name in names}
    hangs = 120.0  # seconds until it is ended
    those = [Stage(s.name, s.about, hangs if s.name == "compile" else 600) for s in stages.STAGES]
    for stage in those:
        predicted[stage.name]["seconds"] = stage.most / 3
    made = run.Visit(tmp_path, those, predicted, seconds=3000, rehearse=True, injected=injected)
    assert made.run() == 1
    lines = made.lines.read()
    ends = {line["stage"]: line["outcome"] for line in lines if line["kind"] == "ended"}
    outcomes = {"kill": "killed", "fail": "failed", "hang": "timeout"}
    log = (tmp_path / "log.txt").read_text()[-4000:]
    assert ends == {name: outcomes.get(injected.get(name, ""), "done") for name in names}, log
    for name in names:
        own = [line for line in lines if line["stage"] == name]
        assert [line["kind"] for line in own[:2]] == ["predicted", "measured"], name
        assert all(line["rehearsal"] for line in own if line["kind"] in ("measured", "checked"))
    checks = [line for line in lines if line["kind"] == "checked"]
    assert checks and all(line["passed"] for line in checks), checks
    lacking = {line["what"] for line in lines if line["stage"] == "start"
               and line["kind"] == "tried" and not line["works"]}  # fmt: skip
    assert lacking == {
        "cuDNN attention with gradients", "compile", "CUDA graph", "memory statistics"
    }  # fmt: skip
    assert made.state["commit"] == lines[0]["commit"]
    by_formula = [line["figures"] for line in lines if line["kind"] == "measured"
                  and line["what"] in ("grid, plain", "layouts, plain")]  # fmt: skip
    assert [figures["wrong"] for figures in by_formula] == [0, 0]  # the reference is right


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
def test_stages_rehearse_to_their_ends(tmp_path):
    """Those in which the other test injects faults."""
    those = [
        Stage(s.name, s.about, 600.0) for s in stages.STAGES if s.name in ("flux", "wan", "compile")
    ]
    predicted = {stage.name: {"seconds": 200.0} for stage in those}
    made = run.Visit(tmp_path, those, predicted, seconds=3000, rehearse=True)
    assert made.run() == 0, (tmp_path / "log.txt").read_text()[-4000:]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"trace_flux.json.gz", "trace_wan.json.gz", "lines.jsonl", "log.txt"} <= names


@pytest.mark.parametrize("name", subjects.SUBJECTS)
def test_a_subject_of_published_size_can_be_put_together(name, tmp_path):
    """Its encoders fit its denoiser and its decoder, here on the meta device."""
    subject = subjects.SUBJECTS[name]
    run_settings = subjects.settings(subject, tmp_path)
    known = describe(run_settings.model)
    models = {part: known.component(part) for part in known.configs}
    pipe = known.kind(**models, **subject.encoders())
    refuse_pipeline(pipe)
    widths = {each.weight.shape[-1] for each in models["transformer"].modules()
              if isinstance(each, torch.nn.Linear)}  # fmt: skip
    assert pipe.text_encoder is not None and 4096 in widths  # of T5's states
    weights = sum(p.numel() for p in models["transformer"].parameters())
    assert weights > {"sd35": 2e9, "flux": 1e10, "wan": 1.3e10}[name]


THIN = {  # depth of each denoiser; all widths, the encoders and the decoder are the published ones
    "sd35": {"num_layers": 2, "dual_attention_layers": [0]},
    "flux": {"num_layers": 1, "num_single_layers": 1},
    "wan": {"num_layers": 1},
}


SHORT = {  # arguments of the pipeline's call
    "sd35": {"max_sequence_length": 32},
    "flux": {"max_sequence_length": 32},
    "wan": {"max_sequence_length": 32, "num_frames": 5},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", subjects.SUBJECTS)
def test_a_subject_of_published_width_does_its_first_update(name, monkeypatch):
    """The parts that stages put together work together: here on the CPU, with one block of each
    kind, and of small images."""
    real = subjects.describe

    def thin(model):
        known = real(model)
        denoiser = {**known.configs["transformer"], **THIN[name]}
        return replace(known, configs={**known.configs, "transformer": denoiser})

    monkeypatch.setattr(subjects, "describe", thin)
    monkeypatch.setattr(subjects, "DEVICE", "cpu")
    small = {
        "recipe": {"group": 2, "steps": 3},
        "train": {"rows_per_call": 1, "updates": 1},
        "model": {"height": 64, "width": 64, "dtype": "float32", "call": SHORT[name]},
    }
    with subjects.opened(subjects.SUBJECTS[name], small, rehearse=False) as session:
        found = subjects.first_update(session)
    assert found["grad_norm"] > 0 and all(map(math.isfinite, found.values()))


@pytest.mark.slow
def test_predictions_are_those_of_the_plan():
    command = [sys.executable, "scripts/gpu/predict.py", "--check"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
