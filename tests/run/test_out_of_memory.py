"""Out of memory, a full disk or a moved folder, in every phase of every kind of run: the sentence
names the cause, and no error in explaining takes its place."""

import errno
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import flowrl
from flowrl.errors import NotFiniteError, Stopped, UserError, after
from flowrl.estimate import fit, memory
from flowrl.iteration.open import open_stages
from flowrl.models.call_sizes import CallTooLarge
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.paths import PROJECT, find
from flowrl.processes import parallel
from flowrl.processes.parallel import Parallel
from flowrl.run import start, train
from flowrl.run.save import checkpoint
from flowrl.run.save.failures import resumable
from flowrl.run.show.observer import Observer
from flowrl.run.workers.causes import error_of_worker
from flowrl.session import smaller_calls
from flowrl.session.progress import Progress
from flowrl.session.smaller_calls import explained
from flowrl.settings import RunSettings
from flowrl.settings.read import dump, override, read_run, run_from
from samplers import Ode
from tests.support import runs, text_runs, tiny_lm

MOST = "CUDA out of memory. Tried to allocate 2.00 GiB"


def no_memory(*_, **__):
    raise torch.OutOfMemoryError(MOST)


NAMED = ("demo", "demo_lora", "demo_video", "demo_joint", "text_demo")


def own_run(image: dict) -> RunSettings:
    """Of the flow of points of the examples."""
    points = find("examples/own/points.py")
    model, rewards = {"own": f"{points}:Points", "device": "cpu"}, [f"{points}:Closeness"]
    return run_from(image | {"model": model, "rewards": rewards}, "own")


@pytest.fixture(scope="module")
def kinds(pipeline, tmp_path_factory) -> dict[str, RunSettings]:
    """A run of each kind: images, video, texts, a joint one, with workers; with LoRA or without."""
    folder = tmp_path_factory.mktemp("kinds")
    language = folder / "lm"
    tiny_lm.write(language)
    text = text_runs.tree(language, folder, text_runs.GRPO)
    image = runs.tree(pipeline, folder, runs.NFT)
    adapted = text["model"] | {"lora": {"rank": 2}}
    found = {
        "text": run_from(text, "text"),
        "text with LoRA": run_from(text | {"model": adapted}, "text"),
        "images with LoRA": run_from(image, "images"),
        "own": own_run(image),
        "workers": run_from(image | {"workers": {"sampling": 2}}, "workers"),
    }
    return found | {name: read_run(find(f"configs/{name}.yaml")) for name in NAMED}


@pytest.mark.slow
def test_the_advice_of_every_kind_can_be_followed(kinds):
    for kind, run in kinds.items():
        changes = fit.advice(run)
        for change in changes:
            name, value = change.split(" (")[0].split(": ")
            assert override(run, [f"--{name.replace('_', '-')}", value]), (kind, change)
        with pytest.raises(UserError) as said, explained(run):
            no_memory()
        assert str(said.value).startswith("out of memory (CUDA out of memory)"), kind
        assert ": set " in str(said.value) and "leave it out" not in str(said.value)
        assert not getattr(said.value.__cause__, "__notes__", []), kind


@pytest.mark.parametrize(
    "kind",
    ["text with LoRA", "own"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("images with LoRA", "demo_video", "demo_joint")
    ],
)
def test_every_phase_of_every_kind_names_the_cause(kinds, kind, tmp_path):
    session = runs.session_of(kinds[kind], tmp_path)
    stages = open_stages(session, Progress())
    for phase in ("draw", "sample", "score", "credit", "rows", "update"):
        broken = replace(stages, **{phase: no_memory})
        with (
            pytest.raises(UserError) as said,
            resumable(tmp_path),
            explained(session.run, session.learner.policy),
        ):
            train.iterate(broken, Progress())
        assert str(said.value).startswith("out of memory (CUDA out of memory)"), phase
        assert "leave it out" not in str(said.value)


STAGES = ("draw", "sample", "score", "credit", "rows", "update")
PLACES: dict[str, tuple[object, str]] = {
    "the proof": (train, "prove_pipeline"),
    "the search of sizes": (train, "search_sizes"),
    "an evaluation": (train, "evaluate_and_keep"),
    "the copy of a checkpoint": (checkpoint, "take_state"),
    "the writing of a checkpoint": (checkpoint.SavedState, "_fill"),
    "the export": (checkpoint, "export_last"),
    "the settings": (train, "keep_settings"),
}
MOMENTS = ("on_start", "on_iteration", "on_evaluation", "on_record")  # of observers
PHASES = (*STAGES, *PLACES, *MOMENTS)
CAUSES: dict[str, tuple[BaseException, str]] = {
    "memory": (torch.OutOfMemoryError(MOST), "CUDA out of memory"),
    "disk": (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
}


def break_phase(phase: str, error: BaseException, patch: pytest.MonkeyPatch) -> None:
    """Let a phase of the loop raise this error."""

    def fails(*_, **__):
        raise error

    if phase in PLACES:
        patch.setattr(*PLACES[phase], fails)
    elif phase in STAGES:
        opened = train.open_stages
        patch.setattr(
            train, "open_stages", lambda *given: replace(opened(*given), **{phase: fails})
        )
    else:
        broken = type("Broken", (Observer,), {phase: fails})
        patch.setattr(train, "open_observers", lambda *_: [broken()])


SMALL = ("--train.iterations=1", "--evaluate.samples=4", "--evaluate.every=1",
         "--checkpoint.every=1", "--prompts.per-iteration=2")  # fmt: skip
LOOP_KINDS = ("text", "text with LoRA", "images with LoRA", "own", "demo_video", "demo_joint")


@pytest.mark.slow
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("kind", LOOP_KINDS)
def test_the_loop_names_the_cause_in_every_phase_of_every_kind(kinds, kind, cause, tmp_path):
    run, (error, said) = override(kinds[kind], SMALL), CAUSES[cause]
    wrong: dict[str, str] = {}
    for phase in PHASES:
        folder = tmp_path / phase
        folder.mkdir()
        (folder / "run.yaml").write_text(yaml.safe_dump(dump(run)))
        session = runs.session_of(run, folder)
        with pytest.MonkeyPatch.context() as patch:
            break_phase(phase, error, patch)
            try:
                train.train_session(session)
                wrong[phase] = "nothing was raised"
            except UserError as found:
                if not re.search(said, str(found)) or "leave it out" in str(found):
                    wrong[phase] = str(found)
            except Exception as found:
                wrong[phase] = repr(found)
    assert not wrong


@pytest.mark.parametrize("starts", ["start", "resume"])
def test_the_opening_of_a_run_names_the_cause(starts, kinds, tmp_path, monkeypatch):
    """Before its loop: the models are loaded there, which needs most of the memory."""
    monkeypatch.setattr(start, "open_session", no_memory)
    run, folder = kinds["own"], tmp_path / "run"
    if starts == "start":
        with pytest.raises(UserError, match=r"^out of memory \(CUDA out of memory\)"):
            start.start(run, "own", folder)
        assert not folder.exists()
        return
    monkeypatch.setattr(start.start_record, "changes", lambda *_: [])
    monkeypatch.setattr(start.checkpoint, "newest", lambda *_: begun(folder) / "checkpoints/000002")
    monkeypatch.setattr(start, "_finished", lambda *_: False)
    folder.mkdir()
    with pytest.raises(Stopped, match=r"^out of memory .*Checkpoint 000002 is intact"):
        start.resume(run, folder)


COMMANDS = {
    "evaluate": (
        *("evaluate", "--model", "PIPELINE"),
        *("--rewards", "brightness", "--prompts", "PROMPTS"),
    ),
    "sample": ("sample", "--model", "PIPELINE", "a red ball"),
    "prove": ("prove", "RUN"),
    "calibrate": ("calibrate", "RUN"),
    "vote": ("vote", "RUN"),
}  # fmt: skip
LOADING = {"load_models", "load_policy", "open_session"}  # functions that open a run's models
TRAINING = {"device_check", "floor"}  # which say themselves what failed


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_sample_name_the_cause(command, pipeline, tmp_path, monkeypatch, capsys):
    for name in LOADING:
        for module in ("given_model", "prove", "vote"):
            monkeypatch.setattr(f"flowrl.cli.{module}.{name}", no_memory, raising=False)
    monkeypatch.setattr("flowrl.session.session.open_session", no_memory)
    recipe = {"name": "dense_grpo", "steps": 4, "group": 4}
    config = runs.write(runs.tree(pipeline, tmp_path, recipe), tmp_path)
    names = {"PIPELINE": pipeline, "RUN": config, "PROMPTS": tmp_path / "prompts.jsonl"}
    monkeypatch.chdir(tmp_path)
    assert runs.flowrl(*(names.get(word, word) for word in COMMANDS[command])) == 2
    said = capsys.readouterr().err
    assert "flowrl: out of memory (CUDA out of memory): set train.rows_per_call lower" in said
    assert "gradient_checkpointing" not in said, "nothing is trained"


CALLS = {
    "flowrl.sample": lambda model, run: flowrl.sample(str(model), "a", plan=Ode(), steps=2),
    "flowrl.steer": lambda model, run: flowrl.steer(str(model), "a", ["brightness"], steps=2),
    "flowrl.Run.sample": lambda model, run: flowrl.Run.of_model(model).sample("a", steps=2),
    "flowrl.Run.evaluate": lambda model, run: flowrl.Run.of_model(model).evaluate(
        ["a"], rewards=["brightness"], samples=1, steps=2
    ),
    "flowrl.Run.prove": lambda model, run: flowrl.Run(run).prove(no_cache=True),
    "flowrl.Run.calibrate": lambda model, run: flowrl.Run(run).calibrate(rounds=1),
}
GIVEN_LESS = {
    "flowrl.sample": "give fewer prompts, or a smaller height and width in call",
    "flowrl.steer": "give fewer prompts, or a smaller height and width in call",
    "flowrl.Run.sample": "or a smaller height and width, or give fewer prompts",
    "flowrl.Run.evaluate": "or a smaller height and width, or give fewer samples",
}


# a proof and a calibration open sessions, whose phases are tried above
@pytest.mark.parametrize(
    ("call", "phase"),
    [(call, "load") for call in CALLS] + [(call, "encode") for call in GIVEN_LESS],
)
def test_calls_that_sample_name_themselves_and_the_cause(
    call, phase, pipeline, tmp_path, monkeypatch
):
    """Each with what it could be given less of."""
    monkeypatch.setattr(PipelinePolicy, phase, no_memory)
    recipe = {"name": "dense_grpo", "steps": 4, "group": 4}
    config = runs.write(runs.tree(pipeline, tmp_path, recipe), tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as said:
        CALLS[call](pipeline, config)
    assert str(said.value).startswith(f"{call}: out of memory (CUDA out of memory): ")
    assert str(said.value).endswith(GIVEN_LESS.get(call, "or a smaller height and width"))
    assert "gradient_checkpointing" not in str(said.value), "nothing is trained"


def test_every_command_that_opens_a_model_is_tried():
    """`export` opens one only to merge."""
    found = {
        path.stem
        for path in (PROJECT / "flowrl/cli").glob("*.py")
        if LOADING & set(re.findall(r"\w+", path.read_text()))
    }
    assert found - TRAINING == {"given_model", "prove", "calibrate", "vote", "export"}


@pytest.mark.parametrize("broken", ["advice", "estimate", "override"])
def test_an_error_in_explaining_is_a_note_and_the_cause_is_named(kinds, monkeypatch, broken):
    def fails(*_, **__):
        raise UserError("offload_experts is a setting of pipeline models: leave it out")

    place = {"advice": fit, "estimate": memory, "override": smaller_calls}[broken]
    monkeypatch.setattr(place, broken, fails)

    for run in kinds.values():
        policy = None
        if broken == "override":
            policy = type("Policy", (), {"sizes": type("Sizes", (), {})()})()
            policy.sizes.training = 4
        cause = r"out of memory .*rows_per_call"
        with pytest.raises(UserError, match=cause) as said, explained(run, policy):
            no_memory()
        assert "offload_experts is a setting" in said.value.__cause__.__notes__[0]


def test_what_runs_after_an_error_never_takes_its_place():
    first = ValueError("first")
    assert after(first, lambda: 3, 0) == 3 and not hasattr(first, "__notes__")
    assert after(first, lambda: {}["lost"], 0) == 0
    assert first.__notes__ == ["while this error was handled: KeyError: 'lost'"]
    with pytest.raises(KeyboardInterrupt):
        after(first, lambda: (_ for _ in ()).throw(KeyboardInterrupt), 0)


def test_a_process_that_runs_out_of_memory_as_another_ends_says_so(monkeypatch):
    def lost(_):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(parallel, "gather_object", lost)
    both = Parallel(2, 0, "cpu", {})
    with pytest.raises(torch.OutOfMemoryError) as error, both.together():
        no_memory()
    assert "Connection closed by peer" in error.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Connection closed"), both.together():
        pass


def too_large() -> CallTooLarge:
    error = CallTooLarge(frozenset({"sampling"}), MOST)
    error.repeatable = False
    return error


OF_WORKERS: dict[str, tuple[Exception, type[Exception], str]] = {
    "a call": (too_large(), CallTooLarge, "^CUDA out of memory"),
    "a device": (torch.OutOfMemoryError(MOST), torch.OutOfMemoryError, "^in a worker: CUDA out of"),
    "the machine": (MemoryError(), torch.OutOfMemoryError, "^in a worker: MemoryError$"),
    "a process": (OSError(errno.ENOMEM, "Cannot allocate memory"), torch.OutOfMemoryError, "alloc"),
    "settings": (UserError("set workers.limit"), UserError, "^set workers.limit$"),
    "not finite": (NotFiniteError("a sample is NaN"), NotFiniteError, "^a sample is NaN$"),
    "a full disk": (
        OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), UserError,
        "^workers: on a worker's machine, /tmp/x: no space left on device: make room",
    ),
    "a fault": (KeyError("name"), RuntimeError, "^in a worker: its traceback$"),
}  # fmt: skip


@pytest.mark.parametrize("cause", OF_WORKERS)
def test_an_error_of_a_worker_is_the_training_process_s(cause, kinds):
    """After its way between processes. An out-of-memory of one is told as any other."""
    sent, kind, said = OF_WORKERS[cause]
    received = pickle.loads(pickle.dumps(sent))
    assert vars(received) == vars(sent)
    error = error_of_worker(received, "its traceback")
    assert type(error) is kind and re.search(said, str(error))
    if kind in (CallTooLarge, torch.OutOfMemoryError):
        with (
            pytest.raises(UserError, match=r"^out of memory \(.*\).*: set "),
            explained(kinds["workers"]),
        ):
            raise error
    notes = [] if error is received or cause == "a fault" else ["its traceback"]
    assert getattr(error, "__notes__", []) == notes


def test_an_error_that_could_not_be_sent_is_told_in_the_worker_s_words():
    error = error_of_worker(None, "its traceback")
    assert type(error) is RuntimeError and str(error) == "in a worker: its traceback"


def begun(folder: Path) -> Path:
    (folder / "checkpoints" / "000002").mkdir(parents=True)
    (folder / "run.yaml").write_text("")
    return folder


def test_a_folder_that_was_moved_in_mid_run_is_no_beginner_s(tmp_path):
    folder = begun(tmp_path / "run")
    with pytest.raises(Stopped) as said, resumable(folder):
        folder.rename(tmp_path / "other")
        (folder / "metrics.jsonl").open("a")
    assert "Nothing was trained yet" not in str(said.value)
    assert "moved, renamed or removed" in str(said.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_named_though_the_folder_cannot_be_read(tmp_path, monkeypatch, number):
    folder = begun(tmp_path / "run")
    disk = OSError(number, "the disk's own words")
    said = r"the disk's own words.*Checkpoint 000002 is intact"
    with pytest.raises(Stopped, match=said), resumable(folder):
        raise disk

    def unreadable(*_):
        raise PermissionError("the folder cannot be listed")

    monkeypatch.setattr("flowrl.run.save.failures.numbered_folders", unreadable)
    with pytest.raises(OSError, match="the disk's own words") as said, resumable(folder):
        raise disk
    assert "cannot be listed" in said.value.__notes__[-1]
    shutil.rmtree(folder)
