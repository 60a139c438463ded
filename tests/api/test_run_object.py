"""A run as one object: what it shows, what its callbacks ask for, and its sentences."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from safetensors import safe_open

import flowrl
from flowrl.api.adapters import RECORDS, lora_section
from flowrl.errors import UserError
from flowrl.paths import PROJECT
from flowrl.session.record import JsonlTracker
from tests.support.runs import lines, write
from tests.support.warm import small


@pytest.fixture(scope="module")
def asked(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> flowrl.Run:
    return asked_run(pipeline, tmp_path_factory.mktemp("asked"))


def asked_run(pipeline: Path, folder: Path) -> flowrl.Run:
    """A run of four iterations whose callback asks for an evaluation, a checkpoint and the end. Its
    file is `folder`/tiny.yaml."""
    settings = small(pipeline, folder)
    settings["evaluate"]["every"] = settings["checkpoint"]["every"] = 4
    seen: list[tuple[str, int]] = []

    def asks(event: flowrl.Event) -> None:
        seen.append((event.kind, event.iteration))
        if event.kind == "iteration":
            {1: event.evaluate, 2: event.save, 3: event.stop}[event.iteration]()

    run = flowrl.Run(write(settings, folder)).train(folder=folder / "run", callbacks=asks)
    assert seen == [
        ("evaluation", 0), ("checkpoint", 0), ("iteration", 1), ("evaluation", 1),
        ("iteration", 2), ("checkpoint", 2), ("iteration", 3), ("evaluation", 3), ("checkpoint", 3),
    ]  # fmt: skip
    return run


def test_callbacks_ask_between_two_iterations(asked: flowrl.Run) -> None:
    found = lines(asked.begun)
    evaluated = [line["iteration"] for line in found if "held_out/brightness" in line]
    assert [line["iteration"] for line in found] == [0, 1, 2, 3] and evaluated == [0, 1, 3]
    assert found[-1]["ended"] == 1.0 and asked.done and asked.weights is not None
    saved = sorted(path.name for path in (asked.begun / "checkpoints").iterdir())
    assert {"000002", "000003"} <= set(saved)


@pytest.mark.slow
def test_a_stopped_run_is_finished_for_a_job_and_goes_on_when_resumed(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "asked").mkdir()
    asked = asked_run(pipeline, folder)
    again = flowrl.Run(folder / "tiny.yaml").train(folder=asked.begun, resume="auto")
    assert "has finished" in capsys.readouterr().out and again.done
    assert len(flowrl.Run(asked.begun).resume().metrics) == 5
    settings = small(pipeline, tmp_path)
    settings["evaluate"]["every"] = settings["checkpoint"]["every"] = 4
    plain = flowrl.train(settings=settings, folder=tmp_path / "run")
    weights = [each.weights for each in (asked, plain)]
    both = [(folder or Path()) / "pytorch_lora_weights.safetensors" for folder in weights]
    assert both[0].read_bytes() == both[1].read_bytes()  # what was asked for changed no bit


def test_a_run_shows_what_it_is(asked: flowrl.Run, tmp_path: Path) -> None:
    assert repr(flowrl.Run("demo")).startswith("flowrl.Run('demo'): not begun")
    text, page = repr(asked), asked._repr_html_()
    assert "nft" in text and "brightness" in text and str(asked.begun) in text
    assert "held-out brightness" in page and "<table>" in page and "report.html" in page
    assert "no run in" in repr(flowrl.Run.at(tmp_path)) or "run's folder" in repr(
        flowrl.Run.at(tmp_path)
    )


def test_settings_from_python_lie_over_a_file(tmp_path: Path) -> None:
    run = flowrl.Run("demo", settings={"train": {"lr": 1e-3}, "recipe": {"group": 6}}, iterations=3)
    assert (run.settings.train.lr, run.settings.train.iterations) == (1e-3, 3)
    assert run.settings.recipe.group == 6  # type: ignore[attr-defined]
    words = flowrl.Run("demo", settings=["--train.lr", "1e-3"])
    assert words.settings.train.lr == 1e-3
    found = flowrl.Run("demo").plan(memory="1MiB")
    assert not found.fits and not found.accepted and "an iteration:" in str(found)


def test_a_line_that_is_logged_again_takes_the_place_of_the_last(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log({"a": 1.0, "long": 1e-9}, step=0)
    tracker.log({"a": 2.0, "long": 1e-9}, step=1)
    tracker.log({"a": 3.0}, step=1)
    tracker.log({"a": 4.0}, step=2)
    assert [line["a"] for line in lines(tmp_path)] == [1.0, 3.0, 4.0]


def test_an_adapter_of_peft_is_honoured_or_refused_by_its_fields() -> None:
    given = LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k"])
    plain = {"rank": 4, "alpha": 8, "targets": ["to_k", "to_q"], "dora": False}
    assert lora_section(given) == plain
    dora = LoraConfig(r=4, lora_alpha=8, use_dora=True, init_lora_weights="gaussian")
    assert lora_section(dora) == {"rank": 4, "alpha": 8, "targets": None, "dora": True}
    for field, value in {
        "lora_dropout": 0.1, "use_rslora": True, "bias": "all", "modules_to_save": ["norm"],
        "init_lora_weights": "pissa", "rank_pattern": {"a": 2}, "alpha_pattern": {"a": 2},
        "layers_to_transform": [1], "exclude_modules": ["a"], "lora_bias": True,
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=rf"{field}.*leave {field} out"):
            lora_section(LoraConfig(target_modules=["to_q"], **{field: value}))
    with pytest.raises(UserError, match="name the layers in a list"):
        lora_section(LoraConfig(target_modules="all-linear"))
    for field in fields(LoraConfig):  # also those of a newer peft
        if field.name in {*RECORDS, "r", "lora_alpha", "use_dora"}:
            continue
        for value in (True, 3, "x", {"x": 1}):
            changed = LoraConfig(target_modules=["to_q"])
            of_layers = field.name == "target_modules" and isinstance(value, dict)
            if getattr(changed, field.name) == value or of_layers:
                continue
            setattr(changed, field.name, value)
            with pytest.raises(UserError, match=field.name):
                lora_section(changed)


def test_dir_of_a_run_lists_what_the_page_documents() -> None:
    names = dir(flowrl.Run("demo"))
    page = (PROJECT / "docs/api.md").read_text(encoding="utf-8")
    assert not [name for name in names if name.startswith("_")]
    missing = [name for name in names if not re.search(rf"`(\w+\.)*{name}\b", page)]
    assert not missing, f"docs/api.md does not name {', '.join(missing)}"


@pytest.mark.slow
def test_an_adapter_of_peft_is_the_one_that_is_saved(pipeline: Path, tmp_path: Path) -> None:
    """Each field of the configuration but peft's own records, through training, the file and a
    resume."""
    given = LoraConfig(
        r=3, lora_alpha=5, target_modules=["to_q", "to_v"], use_dora=True,
        init_lora_weights="gaussian",
    )  # fmt: skip
    settings = small(pipeline, tmp_path)
    settings["model"].pop("lora", None)
    run = flowrl.train(settings=settings, lora=given, iterations=1, folder=tmp_path / "run")
    for iterations in (1, 2):
        with safe_open((run.weights or Path()) / "pytorch_lora_weights.safetensors", "pt") as file:
            saved = json.loads(file.metadata()["lora_adapter_metadata"])
        for field in fields(LoraConfig):
            wanted = getattr(given, field.name)
            wanted = sorted(wanted) if isinstance(wanted, set) else wanted
            if field.name not in RECORDS:
                assert saved[f"transformer.{field.name}"] == wanted, field.name
        if iterations == 1:
            run = flowrl.train(resume=run.begun, iterations=2)
            assert len(run.metrics) == 3


RUN: Any = flowrl.Run
BAD: dict[str, Any] = {
    "no such file": lambda f: RUN("nowhere.yaml").settings,
    "folder without a run": lambda f: RUN.open(f),
    "file that is no mapping": lambda f: RUN(_file(f, "[1, 2]")).settings,
    "file with an unknown key": lambda f: RUN(_file(f, "recipe: nft\nmodl: x")).settings,
    "long name": lambda f: RUN("x" * 5000).settings,
    "name with a zero": lambda f: RUN("a\0b").settings,
    "source of another type": lambda f: RUN(3).settings,
    "nothing": lambda f: RUN().settings,
    "unknown setting": lambda f: RUN("demo", settings={"train": {"lrr": 1}}).settings,
    "unknown section": lambda f: RUN("demo", settings={"trian": {}}).settings,
    "setting of another type": lambda f: RUN("demo", settings={"train": {"lr": "fast"}}).settings,
    "settings as a number": lambda f: RUN("demo", settings=3).settings,
    "settings as a text": lambda f: RUN("demo", settings="--train.lr 1").settings,
    "settings as numbers": lambda f: RUN("demo", settings=[1, 2]).settings,
    "words without a dash": lambda f: RUN("demo", settings=["train.lr", "1"]).settings,
    "unknown word": lambda f: RUN("demo", settings=["--train.lrr", "1"]).settings,
    "unknown recipe": lambda f: RUN("demo", recipe="nfft").settings,
    "recipe of another type": lambda f: RUN("demo", recipe=3).settings,
    "setting of a recipe": lambda f: flowrl.recipe("nft", stepz=3),
    "negative iterations": lambda f: RUN("demo", iterations=-1).settings,
    "iterations as a text": lambda f: RUN("demo", iterations="many").settings,
    "rate of zero": lambda f: RUN("demo", lr=0.0).settings,
    "seed as a text": lambda f: RUN("demo", seed="x").settings,
    "rank of zero": lambda f: RUN("demo", lora=0).settings,
    "adapter of another type": lambda f: RUN("demo", lora=object()).settings,
    "unknown adapter setting": lambda f: RUN("demo", lora={"rnk": 4}).settings,
    "prompts of another type": lambda f: RUN("demo", prompts=3).settings,
    "no prompts": lambda f: RUN("demo", prompts=[]).settings,
    "prompts as numbers": lambda f: RUN("demo", prompts=[1]).settings,
    "prompts that are nowhere": lambda f: RUN("demo", prompts="nowhere.txt").train(folder=f / "r"),
    "reward of another type": lambda f: RUN("demo", rewards=[3]).settings,
    "rewards as a number": lambda f: RUN("demo", rewards=3).settings,
    "unknown reward": lambda f: RUN("demo", rewards=["brightnes"]).train(folder=f / "r"),
    "reward's setting": lambda f: RUN("demo", rewards=[{"name": "shapes", "kid": 1}]).train(
        folder=f / "r"
    ),
    "given of another type": lambda f: RUN("demo", given=3).settings,
    "model of another type": lambda f: RUN("demo", model=3).settings,
    "tokenizer alone": lambda f: RUN("demo", model="a/b", tokenizer=object()).settings,
    "callback of another type": lambda f: RUN("demo").train(callbacks=3, folder=f / "r"),
    "resume of a path": lambda f: RUN("demo").train(resume="runs/x"),
    "resume without a folder": lambda f: RUN("demo").train(resume="auto"),
    "wait alone": lambda f: RUN("demo").train(wait=True),
    "restarts with objects": lambda f: RUN("demo", rewards=[len]).train(restarts=1),
    "sample before training": lambda f: RUN("demo").sample("a"),
    "evaluate before training": lambda f: RUN("demo").evaluate(),
    "export before training": lambda f: RUN("demo").export(),
    "best before training": lambda f: RUN("demo").best,
    "plan of a negative iteration": lambda f: RUN("demo").plan(iteration=-1),
    "plan of an unknown device": lambda f: RUN("demo").plan(devices="8xABC"),
    "memory without a unit": lambda f: RUN("demo").plan(memory="much"),
    "launch elsewhere": lambda f: RUN("demo").launch("moon"),
    "launch without a folder": lambda f: RUN("demo").launch("slurm"),
    "compare nothing": lambda f: flowrl.compare([]),
    "compare nowhere": lambda f: flowrl.compare([f / "a", f / "b"], out=f / "c.html"),
    "report nowhere": lambda f: RUN.at(f / "a").report(),
    "runs nowhere": lambda f: flowrl.list_runs(f),
    "score nothing": lambda f: flowrl.score(f, []),
    "score no number": lambda f: flowrl.score(f, ["shapes"], chunk="x"),
    "unknown suite": lambda f: flowrl.suites("nothing"),
    "unknown shell": lambda f: flowrl.completion_script("csh"),
    "two recipes": lambda f: flowrl.list_recipes(["nft", "awm"]),
    "unknown recipe's text": lambda f: flowrl.list_recipes("nfft"),
    "path of nothing": lambda f: flowrl.path("configs/nothing.yaml"),
    "new run, unknown recipe": lambda f: flowrl.new_run(f / "n", recipe="nfft"),
    "no repository": lambda f: flowrl.Run.from_pretrained("no repository at all"),
    "doctor's program": lambda f: flowrl.doctor(program="python"),
}  # fmt: skip


def _file(folder: Path, text: str) -> Path:
    (folder / "bad.yaml").write_text(text)
    return folder / "bad.yaml"


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        BAD[case](tmp_path)
    text = str(raised.value)
    assert text and "Traceback" not in text and len(text) < 1500
    assert not list(tmp_path.glob("r*"))  # nothing was begun


OWN = """
import torch


class Flow(torch.nn.Module):
    state = (2,)

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def encode(self, prompts, rows):
        return torch.ones(len(prompts), 1)

    def forward(self, x, sigma, encoded):
        return self.net(torch.cat([x, sigma[:, None], encoded], -1))


def score(samples):
    return [float(x[0]) for x in samples.media]
"""


def test_an_object_resumes_the_run_that_it_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own model and prompts counted as an attempt to change the folder's. And a callback that
    raised left a lock whose process "has ended", which was this one."""
    (file := tmp_path / "own.py").write_text(OWN)
    run = flowrl.Run(
        model=f"{file}:Flow", rewards=[f"{file}:score"], prompts=["a", "b"], iterations=3,
        recipe=flowrl.recipe("flow_grpo", steps=2, group=2), lora=2,
        settings={"prompts": {"per_iteration": 1}},
    )  # fmt: skip

    def stop(event: flowrl.Event) -> None:
        if event.kind == "iteration":
            event.stop()

    def fail(event: flowrl.Event) -> None:
        if event.kind == "iteration":
            raise ArithmeticError("of the callback")

    run.train(folder=tmp_path / "run", callbacks=stop)
    assert [line["iteration"] for line in run.metrics] == [0, 1]
    with pytest.raises(ArithmeticError, match="of the callback"):
        run.resume(callbacks=fail)
    assert len(run.resume().metrics) == 4 and run.done
    assert "stale lock" not in capsys.readouterr().out
