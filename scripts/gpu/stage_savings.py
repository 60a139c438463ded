"""Settings that save time, each beside what it replaces, at SD3.5-medium's size.

Rows per call: the number that the search picks, half of it and twice; merged adapters; and the
network's call captured as a CUDA graph, which flowrl does not do.
"""

import torch

from flowrl.models.call_sizes import CallKind, CallTooLarge
from flowrl.run.call_search import search_sizes
from flowrl.session.session import Session
from scripts.benchmarks.network_alone import network_alone
from scripts.gpu.full_size import forget
from scripts.gpu.lines import spread
from scripts.gpu.subjects import SD35, opened
from scripts.gpu.trial import Trial

MERGED = {"model": {"lora": {"merge": "evaluation"}}, "train": {"rows_per_call": "auto"}}
MOST_ROWS = 32  # more take seconds a call, and the GPU is full
KINDS: tuple[CallKind, ...] = ("sampling", "training")


def measure(trial: Trial) -> None:
    with opened(SD35, MERGED, rehearse=trial.rehearse) as session:
        merged_adapters(trial, session)
        rows_per_call(trial, session)
        graph(trial, session)  # last, since a capture that fails may leave the device unusable


def rows_per_call(trial: Trial, session: Session) -> None:
    """Seconds of calls at the number of rows that the search picks, at half of it and at twice."""
    sizes = session.learner.policy.sizes
    seconds = trial.wall(lambda: search_sizes(session))
    picked = {kind: sizes.rows(kind, 1) for kind in KINDS}
    trial.measured("rows per call, search", seconds=seconds, **picked)
    for kind, rows in picked.items():
        most = min(rows, 2 if trial.rehearse else MOST_ROWS)
        for number in sorted({max(1, most // 2), most, 2 * most}):
            what = f"{number} rows per call of {kind}"
            try:
                call = network_alone(session, number)[KINDS.index(kind)]
                found = trial.seconds(call, repeats=3, warm=1)
                trial.measured(what, seconds=spread(found)["median"], spread=spread(found),
                               each=spread(found)["median"] / number)  # fmt: skip
            except (torch.OutOfMemoryError, CallTooLarge):
                trial.measured(what, fits=False)
            forget()


def merged_adapters(trial: Trial, session: Session) -> None:
    """The network's call with its adapters, and with adapters merged into its weights."""
    rows = 1 if trial.rehearse else 4
    frozen, _ = network_alone(session, rows)
    separate = trial.timed("adapters beside the weights", frozen, rows=rows)
    merging = session.learner.merging

    def placed() -> None:
        with merging.merged():
            pass

    trial.measured("merging itself", seconds=trial.wall(placed))
    with merging.merged():
        together = trial.timed("adapters merged", frozen, rows=rows)
    trial.measured("merged beside not", ratio=together / separate)


def graph(trial: Trial, session: Session) -> None:
    """The network's call as it is, and replayed from a CUDA graph, if the device can."""
    frozen, _ = network_alone(session, 1)
    plain = trial.timed("network of one row", frozen)

    def attempt() -> str:
        made = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                frozen()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(made):
            frozen()
        replayed = trial.timed("network of one row, a CUDA graph", made.replay)
        return f"{replayed / plain:.2f} of the plain call"

    trial.tried("network in a CUDA graph", attempt)
