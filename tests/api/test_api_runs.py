"""The Python API's runs: the command line's bits, resumed by either, and a process left alone."""

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate.state
import diffusers.utils.logging
import huggingface_hub.utils
import numpy as np
import pytest
import torch
import transformers.utils.logging
from safetensors.torch import load_file
from torch.backends import cuda
from torch.nn import functional

import flowrl
import flowrl.api
from flowrl.api.untouched import untouched
from flowrl.errors import UserError
from flowrl.models import savings
from flowrl.run import train as training
from tests.support.runs import flowrl as command_line
from tests.support.runs import lines, write
from tests.support.warm import agree, small


@pytest.fixture(scope="module")
def unbroken(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """Settings of a run, and the folder where the command line has carried it out."""
    folder = tmp_path_factory.mktemp("unbroken")
    settings = small(pipeline, folder)
    assert command_line("train", write(settings, folder), "--folder", folder / "run") == 0
    return settings, folder / "run"


def test_import_flowrl_does_not_import_torch() -> None:
    code = (
        "import sys, flowrl; assert 'train' in dir(flowrl); "
        "print({'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
    light = {"__version__", "path"}  # which need no torch
    heavy = [name for name in flowrl.__all__ if name not in light]
    assert all(getattr(flowrl, name) is getattr(flowrl.api, name) for name in heavy)
    assert light < set(flowrl.__all__) and flowrl.__version__ == version("flowrl")
    with pytest.raises(AttributeError, match="tarin"):
        flowrl.tarin  # noqa: B018


def test_the_api_makes_the_same_bits(unbroken: tuple[dict, Path], tmp_path: Path) -> None:
    settings, folder = unbroken
    seen: list[flowrl.Event] = []
    run = flowrl.train(settings=settings, folder=tmp_path / "run", callbacks=[seen.append])
    agree(run.folder, folder)
    kinds = [(event.kind, event.iteration) for event in seen if event.iteration < 2]
    assert kinds == [
        ("evaluation", 0), ("checkpoint", 0), ("iteration", 1), ("checkpoint", 1),
    ]  # fmt: skip
    assert seen[1].folder == run.folder / "checkpoints" / "000000"
    after = [event.metrics for event in seen if event.iteration == 2]
    assert {**after[0], **after[1], "iteration": 2} == run.metrics[2]  # the line of the file
    assert run.done and run.weights == run.folder / "adapter"
    best = run.best
    assert best is not None
    assert best.score == max(line.get("held_out/brightness", -1) for line in run.metrics)


@pytest.mark.slow
def test_the_command_line_goes_on_with_the_apis_run(
    unbroken: tuple[dict, Path], tmp_path: Path
) -> None:
    settings, folder = unbroken

    def fails(event: flowrl.Event) -> None:
        if event.kind == "iteration" and event.iteration == 3:
            raise OSError("mine")  # from anywhere else this would be a full disk

    with pytest.raises(OSError, match=r"^mine") as raised:
        flowrl.train(settings=settings, folder=tmp_path / "run", callbacks=[fails])
    assert raised.traceback[-1].name == "fails"
    assert command_line("train", "--resume", tmp_path / "run") == 0
    agree(tmp_path / "run", folder)


@pytest.mark.slow
def test_the_api_goes_on_with_the_command_lines_run(
    unbroken: tuple[dict, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, folder = unbroken
    real = training.iterate

    def killed(stages, progress):
        if progress.iteration == 2:
            raise KeyboardInterrupt
        return real(stages, progress)

    with monkeypatch.context() as patch:
        patch.setattr(training, "iterate", killed)
        code = command_line("train", write(settings, tmp_path), "--folder", tmp_path / "run")
    assert code == 130
    assert flowrl.train(resume=tmp_path / "run").done
    agree(tmp_path / "run", folder)


@pytest.mark.slow
def test_control_c_saves_and_a_thread_needs_no_signals(
    unbroken: tuple[dict, Path], tmp_path: Path
) -> None:
    settings, folder = unbroken
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it

    def interrupts(event: flowrl.Event) -> None:
        if event.iteration == 1 and event.kind == "iteration":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        flowrl.train(settings=settings, folder=tmp_path / "run", callbacks=[interrupts])
    assert [line["iteration"] for line in lines(tmp_path / "run")] == [0, 1]
    runs: list[flowrl.TrainedRun] = []
    thread = threading.Thread(target=lambda: runs.append(flowrl.train(resume=tmp_path / "run")))
    thread.start()
    thread.join()
    agree(runs[0].folder, folder)


def state() -> dict[str, Any]:
    """All that a run must leave as it was."""
    loggers = [logging.root, *(logging.getLogger(n) for n in ("diffusers", "accelerate", "mine"))]
    return {
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[union-attr]
        "torch": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
        "environment": dict(os.environ),
        "logging": [(each.level, list(each.handlers), each.propagate) for each in loggers],
        "verbosity": [m.get_verbosity() for m in (diffusers.utils.logging, transformers.logging)],
        "bars": [
            diffusers.utils.logging.is_progress_bar_enabled(),
            transformers.utils.logging.is_progress_bar_enabled(),
            huggingface_hub.utils.are_progress_bars_disabled(),
        ],
        "accelerate": dict(accelerate.state.AcceleratorState._shared_state),
    }


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_a_run_leaves_the_process_as_it_was(
    unbroken: tuple[dict, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    settings, folder = unbroken
    settings = settings | {"train": settings["train"] | {"iterations": 1}}
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    flowrl.train  # imports what it imports  # noqa: B018
    logging.getLogger("mine").setLevel(17)
    logging.getLogger("accelerate").setLevel(logging.INFO)
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.enable_progress_bar()
    np.random.seed(5), torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)

    def careless(event: flowrl.Event) -> None:
        random.random(), np.random.rand(), torch.rand(2)
        os.environ["CARELESS"] = "1"
        assert ends == "well"

    before = state()
    try:
        with torch.no_grad():
            inside = state()
            if ends == "well":
                run = flowrl.train(settings=settings, folder=tmp_path / "run", callbacks=[careless])
                assert (
                    run.metrics[1]["reward"] == lines(folder)[1]["reward"]
                )  # float32 all the same
            else:
                with pytest.raises(AssertionError):
                    flowrl.train(settings=settings, folder=tmp_path / "r", callbacks=[careless])
            assert state() == inside
        assert state() == before
    finally:
        torch.set_default_dtype(torch.float32)
        if not bars:
            transformers.utils.logging.disable_progress_bar()


def test_the_state_of_random_is_put_back() -> None:
    before = random.getstate()
    with pytest.raises(KeyError), untouched():
        random.random()
        raise KeyError
    assert random.getstate() == before


def test_two_threads_at_once_are_refused_and_a_callback_is_not() -> None:
    def entered() -> bool:
        with untouched():
            return True

    with ThreadPoolExecutor(1) as pool:
        refused = pytest.raises(UserError, match="another thread of this process is training")
        with untouched(), untouched(), refused:
            pool.submit(entered).result()
        assert pool.submit(entered).result()


def test_a_run_computes_as_without_the_callers_contexts() -> None:
    """`torch.autocast` and the device of a `with` do not reach a run, and stay the caller's."""
    rows = torch.randn(4, 8)
    exact = torch.nn.functional.linear(rows, rows)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        with untouched():
            found = torch.nn.functional.linear(rows, rows)
            assert torch.zeros(1).device.type == "cpu"
        assert torch.equal(found, exact) and found.dtype == torch.float32
        assert torch.is_autocast_enabled("cpu") and torch.zeros(1).is_meta
    torch.set_float32_matmul_precision("medium")
    try:
        with untouched():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.zeros(1).device.type == "cpu"


def test_a_run_restores_the_attention_that_it_replaces() -> None:
    before, attends = functional.scaled_dot_product_attention, cuda.cudnn_sdp_enabled()
    with untouched():
        savings.cudnn_attention("unmasked")
        assert functional.scaled_dot_product_attention is savings.unmasked_with_cudnn
    assert functional.scaled_dot_product_attention is before
    assert cuda.cudnn_sdp_enabled() is attends


def test_a_setting_is_checked_by_the_same_reader(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean"):
        flowrl.recipe("nft", step=8)
    with pytest.raises(UserError, match="did you mean"):
        flowrl.train("a/b", recipe="nft", prompts=["x"], rewards=["brightness"],
                     settings={"train": {"itertions": 3}})  # fmt: skip
    with pytest.raises(UserError, match="leave recipe out"):
        flowrl.train(resume=tmp_path, recipe="nft")
    with pytest.raises(UserError, match="not a run's folder"):
        flowrl.train(resume=tmp_path)


@pytest.mark.slow
def test_the_demo_has_the_same_bits_and_either_goes_on(tmp_path: Path) -> None:
    """The demo for two iterations: by the command line, by the API, and half by each."""
    short = {"iterations": 2, "folder": tmp_path / "api"}
    run = flowrl.train(settings="configs/demo.yaml", **short)
    words = ("train", "configs/demo.yaml", "--train.iterations", "2", "--checkpoint.every", "1")
    assert command_line(*words, "--folder", tmp_path / "cli") == 0
    interrupted = [lambda event: event.kind == "checkpoint" and event.iteration == 1 and 1 / 0]
    settings = {"checkpoint": {"every": 1}}
    with pytest.raises(ZeroDivisionError):
        flowrl.train(
            "flowrl/demo/shapes-sd3",
            settings=_demo() | settings,
            iterations=2,
            folder=tmp_path / "half",
            callbacks=interrupted,
        )
    assert command_line("train", "--resume", tmp_path / "half") == 0
    wanted = load_file(run.folder / "pipeline/transformer/diffusion_pytorch_model.safetensors")
    for other in ("cli", "half"):
        path = tmp_path / other / "pipeline/transformer/diffusion_pytorch_model.safetensors"
        found = load_file(path)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        rows = [_plain(line) for line in lines(tmp_path / other)]
        assert rows == [_plain(line) for line in run.metrics]


def _demo() -> dict[str, Any]:
    import yaml

    return yaml.safe_load(Path("configs/demo.yaml").read_text())


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith("seconds")}


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda run: run.sample("a", count=0), "count must be a whole number from 1, not 0"),
        (lambda run: run.sample("a", steps=0), "steps must be a whole number from 1, not 0"),
        (lambda run: run.sample("a", count=1.5), "count must be a whole number, not 1.5"),
        (lambda run: run.evaluate(samples=0), "samples must be a whole number from 1, not 0"),
        (lambda run: run.evaluate(steps=True), "steps must be a whole number, not True"),
        (lambda run: run.sample([1]), "prompts: entry 1 must be a text, not 1"),
        (lambda run: run.sample(None), "prompts must be a text or a list, not None"),
    ],
)
def test_zeros_and_other_types_are_no_defaults(tmp_path: Path, call: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        call(flowrl.TrainedRun(tmp_path))
