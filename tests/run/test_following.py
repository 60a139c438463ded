"""The panel, samples of training, histograms and trackers: what a person sees of a run."""

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from flowrl.iteration.histograms import BINS, Histogram, IterationValues, histogram_image
from flowrl.likelihoods.rows import Rows
from flowrl.run.show import footer, sample_pages, track
from flowrl.run.show.lines import Lines, on_policy
from flowrl.run.show.panel import HEIGHT, HeldOutScore, PanelFacts, panel_lines
from flowrl.session.record import Terminal
from flowrl.session.session import open_accelerator
from flowrl.settings import RunSettings
from flowrl.settings.read import run_from
from tests.support import runs, text_runs, tiny_lm
from tests.support.advice import advice
from tests.support.iterations import as_iteration, collect

METRICS = {
    "reward": 0.5, "reward_std": 0.25, "grad_norm": 1.0, "seconds": 2.0, "seconds/sample": 1.5,
    "ratio": 1.0, "ratio_min": 0.9, "ratio_max": 1.1, "clipped_low": 0.0, "clipped_high": 0.0,
    "kl": 0.01,
}  # fmt: skip


def on_a_terminal(end: Callable[[], object], columns: int = 100, lines: int = 24) -> str:
    """What a run writes to a terminal of its own. It calls `end` inside of its panel."""
    pid, file = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm"}
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        try:
            draws(end)
        except BaseException:
            traceback.print_exc()
        print("at the end", flush=True)
        os._exit(0)
    written = b""
    with suppress(OSError):  # the other side is closed
        while part := os.read(file, 65536):
            written += part
    os.waitpid(pid, 0)
    os.close(file)
    return written.decode()


def test_the_panel_says_who_waits_for_whom():
    """Ten seconds of an iteration: three for samples, one for scores, five for the update."""
    m = METRICS | {
        "seconds": 10.0, "seconds/waiting/sampling": 3.0, "seconds/waiting/scoring": 1.0,
        "seconds/sending": 0.2, "seconds/update": 5.0, "workers/seconds/sample": 12.0,
        "workers/seconds/decode": 3.0, "workers/seconds/replicas": 7.0, "workers/joined": 2.0,
        "workers/restarts": 1.0, "workers/lag": 2.0,
    }  # fmt: skip
    facts = PanelFacts("demo", "flow_grpo", 4, 1, m, (0.4, 0.5))
    shown = " ".join(panel_lines(facts, "cpu", 180, Console(force_terminal=False, width=180)))
    assert "training 30 % waits for samples, 10 % for scores, 2 % sends weights" in shown
    assert "50 % updates; 2 workers busy 75 %, 1 restarts" in shown
    assert "of samples at lag 2" in shown


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_panel_of_any_width_cuts_no_word(width: int) -> None:
    """What does not fit is left out as a whole, with a mark; the first items of a row stay."""
    names = ("shapes.strict", "imagereward", "hpsv3")
    rewards = {f"reward/{name}": 0.25 for name in names}
    phases = {f"seconds/{name}": 12.5 for name in ("encode", "decode", "score", "ref", "update")}
    held_out = tuple(HeldOutScore(name, 0.9, 0.75, 0.95, 12) for name in names)
    facts = PanelFacts(
        "demo", "flow_grpo", 40, 20, METRICS | rewards | phases, (0.4, 0.5) * 20, held_out=held_out
    )
    wide = panel_lines(facts, "cpu", 400, Console(force_terminal=False, width=400))
    lines = panel_lines(facts, "cpu", width, Console(force_terminal=False, width=width))
    assert len(lines) == HEIGHT and all(len(line) == width for line in lines)
    items = set(re.split(r",? {2,}|, ", "  ".join(line.strip("│ ") for line in wide[1:-1])))
    items |= {item.replace(" against the base", "") for item in items}
    for line in lines[1:-1]:
        shown = re.split(r",? {2,}|, ", line.strip("│ ").removesuffix(" …"))
        assert {item for item in shown if not set(item) & set("▁█━")} <= items, line
    assert "reward   0.500" in lines[1] and "shapes.strict 0.900 (+0.150" in lines[2]
    assert width < 140 or "hpsv3 0.900" in lines[2]


def draws(end: Callable[[], object]) -> None:
    terminal = Terminal(True)
    lines = Lines(terminal, 4)
    with lines.panel(PanelFacts("demo", "nft", 4), "cpu"):
        time.sleep(0.1)
        lines.iteration(1, METRICS, 2.0)
        terminal.warn("an alarm")
        os.write(1, b"from a library in C\n")
        time.sleep(0.2)
        print("after it was drawn", flush=True)
        end()


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("end", [int, interrupted, sys.exit, lambda: 1 / 0])
def test_the_panel_overwrites_nothing_and_gives_the_terminal_back(monkeypatch, end):
    monkeypatch.setattr(footer, "SECONDS", 0.02)
    written = on_a_terminal(end)
    top = 24 - HEIGHT + 1
    region, rest = written.index(f"\x1b[1;{top - 1}r"), written.rindex("\x1b[r")
    assert region < written.index("reward") < written.index("after it was drawn") < rest
    rows = [int(row) for row in re.findall(r"\x1b\[(\d+);1H", written)]
    assert rows and min(rows) == top and max(rows) == 24, "only rows below the region are drawn"
    assert written.count("\x1b7") == written.count("\x1b8"), "the cursor always returns"
    for text in ("warning: an alarm", "from a library in C", "   1/4  reward 0.500"):
        assert text in written
    assert "\x1b[1;" not in written[rest:] and "at the end" in written[rest:]
    if end is not int:
        assert written.index("Traceback") > rest, "the traceback has the whole terminal"


@pytest.mark.parametrize(("columns", "lines"), [(40, 24), (100, HEIGHT + 4)])
def test_a_small_terminal_has_lines(columns, lines):
    written = on_a_terminal(int, columns, lines)
    assert "\x1b" not in written and "   1/4  reward 0.500" in written


def test_the_panel_shows_the_policy_and_the_gain():
    def shown(**changes):
        facts = PanelFacts("demo", "flow_grpo", 4, 1, METRICS, (0.4, 0.5), **changes)
        lines = panel_lines(facts, "cpu", 99, Console(force_terminal=False, width=99))
        assert len(lines) == HEIGHT and {len(line) for line in lines} == {99}
        return "\n".join(lines)

    score = HeldOutScore("clip", 0.75, 0.5, best=0.8, best_iteration=3)
    text = shown(held_out=(score,), on_policy=True)
    assert "clip 0.750 (+0.250 against the base), best 0.800 after 3" in text
    assert "on-policy: the clip never acts" in text and "▁█" in text and "sample 1.5" in text
    assert "clipped 0.0 %" in shown(on_policy=False)


def test_one_update_by_the_policy_that_samples_is_on_policy(pipeline, tmp_path):
    for recipe, train, want in (
        (runs.FLOW_GRPO, {}, True),
        (runs.FLOW_GRPO, {"updates": 2}, False),
        (runs.NFT, {}, False),
    ):
        run = run_from(runs.tree(pipeline, tmp_path, recipe, **train), "test")
        assert on_policy(run, run.algorithm()) is want


def test_histograms_count_what_is_in_the_loss_on_all_processes():
    torch.manual_seed(0)
    values, mask = torch.randn(2, 6, 3), torch.rand(2, 6, 3) < 0.7
    values[1] *= 3  # so that the other process has the extremes
    mine, other = IterationValues(), IterationValues()
    for part, each, some in zip((mine, other), values, mask, strict=True):
        part.add(Rows(torch.zeros(6, dtype=torch.long), each, some, None), {"ratio": each.exp()})
    kept = values[mask].double().numpy()
    theirs = values[1][mask[1]].double().numpy()
    counts, edges = np.histogram(kept, BINS)
    name = "histogram/advantage"
    answers = iter(
        [
            {name: (theirs.min(), theirs.max())},
            {name: Histogram(np.histogram(theirs, edges)[0], edges, len(theirs), 1.0, 2.0)},
        ]
    )
    del mine.parts["histogram/log_ratio"]
    found = mine.histograms(lambda own: [own, next(answers)])[name]
    assert (found.counts == counts).all() and np.allclose(found.edges, edges)
    assert found.number == mask.sum() == len(kept)
    alone = other.histograms(lambda own: [own])
    assert alone["histogram/log_ratio"].total == pytest.approx(theirs.sum(), abs=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_lm.write(tmp_path_factory.mktemp("following") / "lm")


def test_an_image_of_histograms_has_a_bar_per_bin_that_holds_values():
    counts = np.zeros(BINS, dtype=np.int64)
    counts[[0, 10]] = 4, 8
    flat = Histogram(np.ones(BINS, dtype=np.int64), np.linspace(0, 1, BINS + 1), 64, 32.0, 20.0)
    peaks = Histogram(counts, np.linspace(-1, 1, BINS + 1), 12, 0.0, 1.0)
    image = histogram_image({"histogram/advantage": peaks, "histogram/log_ratio": flat})
    blue = (np.asarray(image) == (70, 130, 180)).all(-1)
    above, below = np.split(blue, 2)
    tall = above.sum(0).reshape(BINS, -1)[:, 3]
    assert list(np.flatnonzero(tall)) == [0, 10] and tall[10] == 2 * tall[0] - 1 == 73
    assert (below.sum(0).reshape(BINS, -1)[:, 3] == 73).all()
    assert np.asarray(image)[:14].min() < 64  # the line of text


def test_samples_of_training_are_written_once_and_bounded(model, tmp_path, monkeypatch):
    settings = text_runs.tree(model, tmp_path, text_runs.GRPO)
    settings["track"] = {"training": 4}
    session = runs.opened(settings, tmp_path)
    experience = collect(session, 0)
    folder = tmp_path / "samples" / "training"

    def table():
        lines = (folder / sample_pages.TABLE).read_text().splitlines()
        return [json.loads(line) for line in lines]

    def save(iteration):
        sample_pages.save_training_samples(session, as_iteration(experience, iteration))
        return [line["iteration"] for line in table()[::4]]

    assert [save(i) for i in (1, 2, 3)][-1] == [1, 2, 3]
    (folder / sample_pages.TABLE).open("a").write('{"iteration": 4, "torn')
    assert save(2) == [1, 2], "a resumed run replaces what it does again"
    for place, line in enumerate(table()[:4]):
        i = place * 18 // 4
        assert line["text"] == experience.samples.media[i]
        assert line["reward"] == pytest.approx(float(experience.scores.values[i, 0]))
        assert set(line["rewards"]) == set(experience.scores.names)
        (rows,) = experience.rows
        assert line["advantage"] == pytest.approx(float(rows.advantage[i][rows.mask[i]].mean()))
    monkeypatch.setattr(sample_pages, "KEPT_ITERATIONS", 2)
    assert save(3) == [2, 3] and save(4) == [3, 4]
    assert {p.stem for p in folder.glob("*.html")} == {"000003", "000004"}


def test_nothing_is_written_without_the_setting(model, tmp_path):
    session = text_runs.session(model, tmp_path, text_runs.GRPO)
    sample_pages.save_training_samples(session, as_iteration(collect(session, 0), 1))
    assert not (tmp_path / "samples").exists()


def test_a_tracker_that_does_not_start_is_one_sentence(model, tmp_path, monkeypatch):
    settings = text_runs.tree(model, tmp_path, text_runs.GRPO)
    without = run_from(settings, "test")
    run = run_from(settings | {"track": {"with": ["wandb"]}}, "test")
    accelerator = open_accelerator(without, tmp_path)
    real = accelerator.init_trackers

    def start(tracking: RunSettings, logged_in: bool) -> None:
        def init(*words, **named):
            if tracking.track.trackers and not logged_in:
                raise ConnectionError("no API key")
            real(*words, **named)

        monkeypatch.setattr(accelerator, "init_trackers", init)
        track.open_trackers(tracking, tmp_path, accelerator, 0)

    for follow in (lambda: start(run, True), lambda: start(without, False)):
        advice(
            "track.with: {} did not start ({}); log in to the service, use it offline "
            "(WANDB_MODE=offline), or leave it out",
            lambda: start(run, False),
            follow,
        )


def test_trackers_go_on_with_their_runs(model, tmp_path, monkeypatch):
    """The ids of a run's trackers are kept, and the first iteration that is done again."""
    settings = text_runs.tree(model, tmp_path, text_runs.GRPO)
    settings["track"] = {"project": "p", "tags": ["x"]}
    run, started = run_from(settings, "test"), []
    for first in (0, 3):
        accelerator = open_accelerator(run, tmp_path)

        def init(project, init_kwargs, accelerator=accelerator):
            started.append((project, init_kwargs))
            held = SimpleNamespace(id=init_kwargs["wandb"]["id"])
            accelerator.trackers = [SimpleNamespace(name="wandb", run=held)]

        monkeypatch.setattr(accelerator, "init_trackers", init)
        track.open_trackers(run, tmp_path, accelerator, first)
    (project, new), (_, again) = started
    assert project == "p" and new["wandb"]["tags"] == ["x"]
    assert new["wandb"]["name"] == tmp_path.name and new["wandb"]["dir"] == str(tmp_path)
    assert again["wandb"]["id"] == new["wandb"]["id"] != ""
    assert (new["tensorboard"], again["tensorboard"]) == ({"purge_step": 0}, {"purge_step": 3})
    assert new["wandb"]["config"]["recipe"]["name"] == "text_grpo"


def test_tensorboard_has_it_all(pipeline, tmp_path, capsys):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO, iterations=1)
    settings |= {"track": {"with": ["tensorboard"], "training": 2, "images": 2, "project": "tb"}}
    folder = tmp_path / "run"
    assert runs.flowrl("train", runs.write(settings, tmp_path), "--folder", folder) == 0
    assert runs.flowrl("train", "--resume", folder, "--train.iterations", "2") == 0
    written = reader.EventAccumulator(str(folder / "tb"))
    written.Reload()
    assert [event.step for event in written.Scalars("reward/brightness")] == [1, 2]
    assert {"samples/held_out", "samples/training"} <= set(written.Tags()["images"])
    levels = [n for n in written.Tags()["histograms"] if n.startswith("histogram/advantage/noise_")]
    assert len(levels) == 3, "of four steps the last one has no noise"
    assert "settings/text_summary" in written.Tags()["tensors"]


def test_lines_are_those_of_before(capsys):
    Lines(Terminal(True), 4).iteration(1, METRICS, 2.0)
    assert capsys.readouterr().out == (
        "   1/4  reward 0.500   (spread 0.25)  ratio 1.0000 clipped 0%  kl 0.01  grad 1  "
        "2.0 s, 0:02 so far, 0:06 left\n"
    )
