"""SD3.5-medium's size: an iteration by turns with a plain loop of exactly its calls, and with other
trainers of the method.

The plain loop is the floor of any program that makes the same calls: it repeats the recorded calls
of the denoiser, the encoders and the decoder, and the rewards, with nothing between them. The other
trainers (scripts/gpu/peers.py) run their own code in processes of their own on the same device, at
as many rows of the denoiser, without gradients and with. One that did not travel, or fails, costs
nothing but its line.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flowrl.cli.floor import Floor, Opened
from flowrl.errors import UserError
from flowrl.estimate.memory import estimate
from flowrl.estimate.time import iteration_work
from flowrl.session.session import Session
from scripts.gpu.full_size import forget, two_precisions
from scripts.gpu.lines import Line, spread
from scripts.gpu.peers import SOURCES, Job, Peer, command, packed, started, tiny_sd3
from scripts.gpu.subjects import SD35, opened
from scripts.gpu.trial import GIB, Trial

TURNS = 3
PEER_TURNS = 2  # of each, after one that warms up
PEER_LIMIT = 60.0  # seconds until a peer is ready, or a turn of it has ended
PATIENCE = 10.0  # times that limit, in a rehearsal
EQUAL = {"train": {"recompute_old": False}}  # the peers' ratios are of sampling's own densities
TINY = {"recipe": {"group": 8}}  # two calls of four rows, as the peers' two updates need
SMALLER = {"recipe": {"group": 4, "steps": 2}, "model": {"height": 256, "width": 256},
           "train": {"updates": 1}}  # fmt: skip


def measure(trial: Trial) -> None:
    smaller = [TINY] if trial.rehearse else []
    with opened(SD35, EQUAL, *smaller, rehearse=trial.rehearse) as session:
        kept = Opened(session)
        kept.turn()
        floor = Floor.of(kept)
        torch.cuda.reset_peak_memory_stats()
        kept.progress.iteration = 1
        kept.turn()
        peak = torch.cuda.max_memory_allocated() / GIB
        turns = 1 if trial.rehearse else TURNS
        iterations, plain = floor.by_turns(turns)
        ratios = [one / other for one, other in zip(iterations, plain, strict=True)]
        planned = estimate(session.run)
        found = {"iteration": spread(iterations), "plain loop": spread(plain)}
        trial.measured(
            "iteration", seconds=found["iteration"]["median"], GiB=peak, spread=found["iteration"],
            planned_GiB=None if planned is None else planned.total / GIB,
        )  # fmt: skip
        trial.measured(
            "plain loop", seconds=found["plain loop"]["median"], spread=found["plain loop"],
            ratio=spread(ratios)["median"], ratios=spread(ratios),
        )  # fmt: skip
        with TemporaryDirectory() as folder:
            job = job_of(session, Path(folder) if trial.rehearse else None)
            commands = {name: command(name, job) for name in packed()}
            beside_peers(trial, commands, floor)
        del floor
    forget()
    two_precisions(trial, SD35, SMALLER)


def job_of(session: Session, folder: Path | None) -> Job:
    """The same iteration for the peers. A rehearsal gives a folder: theirs is then a tiny pipeline
    of three encoders, on the CPU."""
    run, work = session.run, iteration_work(session.run)
    lora, recipe, model = run.model.lora, run.recipe, run.model
    rows, scale = run.train.call_sizes["sampling"], run.guidance.sample
    assert lora is not None and isinstance(rows, int), "the subject says both"
    assert isinstance(scale, float) and isinstance(model.height, int)
    alone: dict[str, Any] = {}
    if folder is not None:
        tiny_sd3().save_pretrained(folder)
        alone = {"model": str(folder), "device": "cpu", "mixed": "no"}
    steps = run.algorithm().steps
    return Job(
        rows=rows, calls=work.samples // rows, updates=run.train.optimizer_steps, steps=steps,
        trained=round(work.training / work.samples), side=model.height, guidance=scale,
        kl=recipe.kl, eta=recipe.eta, rank=lora.rank, alpha=round(lora.alpha), lr=run.train.lr,
        **alone,
    )  # fmt: skip


def beside_peers(trial: Trial, commands: Mapping[str, Sequence[str]], floor: Floor) -> None:
    """Measure iterations of flowrl and of each peer by turns; all processes begin at once."""
    limit = PEER_LIMIT * (PATIENCE if trial.rehearse else 1)
    turns = 1 if trial.rehearse else PEER_TURNS
    with ExitStack() as processes:
        peers = [processes.enter_context(started(*pair)) for pair in commands.items()]
        ready = [peer for peer in peers if warmed(trial, peer, limit)]
        seconds, figures = list[float](), {peer.name: list[Line]() for peer in ready}
        for _ in range(turns if ready else 0):
            floor.counts.clear()
            seconds.append(floor.iteration())
            for peer in [peer for peer in ready if len(figures[peer.name]) == len(seconds) - 1]:
                tried(trial, peer, lambda peer=peer: figures[peer.name].append(peer.turn(limit)))
    rows = (floor.rows(graded=False), floor.rows(graded=True))
    for name in SOURCES:
        if name not in commands:
            trial.lines.add(trial.stage, "tried", name, works=False, why="it did not travel")
        elif figures.get(name):
            report(trial, name, figures[name], seconds, rows)


def warmed(trial: Trial, peer: Peer, limit: float) -> bool:
    """Whether a peer has become ready and has done an iteration, which is not measured."""
    return tried(trial, peer, lambda: (peer.answer(limit), peer.turn(limit)))


def tried(trial: Trial, peer: Peer, attempt: Callable[[], Any]) -> bool:
    """Whether an attempt with a peer has worked; if not, its line says why."""
    try:
        attempt()
    except (UserError, ValueError) as error:
        trial.lines.add(trial.stage, "tried", peer.name, works=False, why=str(error)[:300])
        return False
    return True


def report(
    trial: Trial, name: str, figures: Sequence[Line], ours: Sequence[float], rows: tuple[int, int]
) -> None:
    """Write a peer's figures beside flowrl's of the same turns, and check that the denoiser had as
    many rows on both sides."""
    theirs = spread([turn["seconds"] for turn in figures])
    ratios = spread([one / turn["seconds"] for one, turn in zip(ours, figures, strict=False)])
    trial.measured(
        name, seconds=theirs["median"], spread=theirs, ratio=ratios["median"], ratios=ratios,
        GiB=max((turn["GiB"] for turn in figures if turn["GiB"] is not None), default=None),
        **{part: spread([turn[part] for turn in figures])["median"]
           for part in ("sampling", "update")},
    )  # fmt: skip
    counts = {(turn["rows"], turn["graded"]) for turn in figures}
    trial.check(
        f"{name}: rows of the denoiser", counts == {rows},
        flowrl=list(rows), peer=[list(pair) for pair in sorted(counts)],
    )  # fmt: skip
