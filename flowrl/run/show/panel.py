"""The live panel of a run: reward, held-out score, policy, time and memory."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil
import torch
from rich.box import ROUNDED
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flowrl.iteration.credit import failed_share
from flowrl.iteration.units import LAG
from flowrl.pages.curves import busy_seconds
from flowrl.session.record import clock

HEIGHT = 8  # lines, with the frame
MOST_REWARDS = 40  # of the last iterations, in the curve
_LABELS = 14  # columns of the frame and of the rows' labels
_MORE = " …"
_GIB = 2**30
_BARS = "▁▂▃▄▅▆▇█"
_PHASES = ("encode", "sample", "decode", "score", "ref", "update")


@dataclass(frozen=True)
class HeldOutScore:
    """Mean of a reward over held-out samples, with the base model's."""

    name: str
    value: float
    base: float | None  # None at the evaluation of the base itself
    best: float | None = None
    best_iteration: int | None = None


@dataclass(frozen=True)
class PanelFacts:
    """Numbers on the panel. Every change creates a new object, since another thread draws it."""

    name: str  # of the run
    recipe: str
    iterations: int
    done: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last iteration
    rewards: tuple[float, ...] = ()  # of the last iterations
    trend: str = " "
    held_out: tuple[HeldOutScore, ...] = ()
    on_policy: bool = False  # every row is trained on once, by the policy that sampled it
    elapsed: float = 0.0  # seconds of all iterations so far
    at: float = field(default_factory=time.monotonic)  # when `elapsed` was taken


def panel_lines(facts: PanelFacts, device: str, width: int, console: Console) -> list[str]:
    """Render the panel for a terminal of `width` columns."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    room = width - _LABELS
    rows = {
        "reward": _reward(facts, most=max(8, min(MOST_REWARDS, room // 3))),
        "held-out": _held_out(facts.held_out, room),
        "policy": _policy(facts),
        "time": _time(facts.metrics),
        "memory": Text(memory_in_use(device)),
        "progress": _progress(facts),
    }
    for label, text in rows.items():
        grid.add_row(label, _whole(text, room))
    title = f"{facts.name}  {facts.recipe}  iteration {facts.done} of {facts.iterations}"
    framed = Panel(
        grid, box=ROUNDED, title=Text(title), title_align="left", border_style="dim", width=width
    )
    with console.capture() as capture:
        console.print(framed)
    return capture.get().splitlines()


def _whole(text: Text, room: int) -> Text:
    """The first items of a row that fit as a whole, and a mark where others are left out."""
    if text.cell_len <= room:
        return text
    ends = [end.start() for end in re.finditer(r",? (?= )|, ", text.plain)]
    fitting = [end for end in ends if text[:end].cell_len + len(_MORE) <= room]
    return text[: fitting[-1]].append(_MORE, style="dim") if fitting else text


def curve(values: Sequence[float]) -> str:
    """Draw numbers as bars between their minimum and maximum."""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def memory_in_use(device: str) -> str:
    """Device memory that this process uses, or the process's own memory on a CPU."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        allocated, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        text = f"{allocated / _GIB:.1f} GiB of {total / _GIB:.1f} in use, at most {most / _GIB:.1f}"
        return f"{text}, reserved {torch.cuda.memory_reserved() / _GIB:.1f}"
    if device == "mps":
        return f"{torch.mps.driver_allocated_memory() / _GIB:.1f} GiB of the GPU in use"
    of_process, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
    return f"{of_process / _GIB:.1f} GiB in this process, of {total / _GIB:.1f} on this machine"


def without_reward(m: Mapping[str, float]) -> str:
    """An iteration without a mean reward: of given samples, with numbers of the update, or of
    samples to which no reward applies."""
    if "given/epochs" not in m:
        return "no reward applies to its samples"
    right = f", {100 * m['won']:.0f} % of pairs in order" if "won" in m else ""
    return f"given: loss {m['loss']:.4f}{right}, epochs {m['given/epochs']:.2f}"


def _reward(facts: PanelFacts, most: int) -> Text:
    """`most`: how many of the last rewards are drawn."""
    m = facts.metrics
    if not m:
        return Text("the first iteration is running", style="dim")
    if "reward" not in m:
        return Text(without_reward(m))
    colour = {"+": "green", "-": "red"}.get(facts.trend, "")
    text = Text(f"{m['reward']:.3f} ").append(facts.trend, style=colour)
    text.append(f" {curve(facts.rewards[-most:])}", style="cyan")
    text.append(f"  spread {m['reward_std']:.2f}")
    rewards = {n.removeprefix("reward/"): v for n, v in m.items() if n.startswith("reward/")}
    if len(rewards) > 1:
        text.append("".join(f"  {name} {value:.3f}" for name, value in rewards.items()))
    outside = m.get("abstained_share", 0.0)
    if (failed := failed_share(m)) > 0:
        text.append(f"  unscored {100 * failed:.0f} %", style="yellow")
    if outside > 0:
        text.append(f"  without a reward {100 * outside:.0f} %", style="yellow")
    if m.get("alarms", 0.0) > 0:
        text.append("  alarm: see above", style="bold red")
    return text


def _held_out(scores: Sequence[HeldOutScore], room: int) -> Text:
    """Scores with their gains; on a narrow terminal without the words that all have in common."""
    long = _gains(scores, " against the base)")
    text = long if long.cell_len <= room else _gains(scores, ")")
    return text if scores else Text("no evaluation yet", style="dim")


def _gains(scores: Sequence[HeldOutScore], end: str) -> Text:
    text = Text()
    for score in scores:
        text.append(f"{score.name} {score.value:.3f}")
        if score.base is not None:
            gain = score.value - score.base
            text.append(f" ({gain:+.3f}", style="green" if gain > 0 else "red" if gain < 0 else "")
            text.append(end)
        if score.best is not None and score.best != score.value:
            text.append(f", best {score.best:.3f} after {score.best_iteration}")
        text.append("  ")
    text.rstrip()
    return text


def _policy(facts: PanelFacts) -> Text:
    m = facts.metrics
    parts = [f"KL {m['kl']:.2g}"] if "kl" in m else []
    if "kl_sample" in m:
        parts.append(f"KL in the reward {m['kl_sample']:.2g}")
    if "ratio" in m:
        parts.append(f"ratio {m['ratio']:.4f} ({m['ratio_min']:.3f} to {m['ratio_max']:.3f})")
    if "clipped_high" in m:
        clipped = m.get("clipped_low", 0.0) + m["clipped_high"]
        idle = facts.on_policy and clipped == 0
        share = f"clipped {100 * clipped:.1f} %"
        parts.append("on-policy: the clip never acts" if idle else share)
    if m.get(LAG, 0.0):
        parts.append(f"of samples at lag {m[LAG]:.0f}")
    if m:
        parts.append(f"gradient {m['grad_norm']:.2g}")
    return Text("  ".join(parts))


def _time(m: Mapping[str, float]) -> Text:
    if not m:
        return Text()
    if "workers/joined" in m:
        return Text(_with_workers(m))
    phases = [(name, m[f"seconds/{name}"]) for name in _PHASES if f"seconds/{name}" in m]
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases)
    return Text(f"{m['seconds']:.1f} s per iteration: {parts}")


def _with_workers(m: Mapping[str, float]) -> str:
    """Describe the waiting between trainer and workers, as shares of an iteration."""
    seconds = max(m["seconds"], 1e-9)
    waits = ", ".join(
        f"{100 * m.get(f'seconds/{name}', 0.0) / seconds:.0f} % {words}"
        for name, words in (
            ("waiting/sampling", "waits for samples"),
            ("waiting/scoring", "for scores"),
            ("sending", "sends weights"),
            ("update", "updates"),
        )
    )
    busy = busy_seconds(m) / seconds
    return (
        f"{m['seconds']:.1f} s: training {waits}; {m['workers/joined']:.0f} workers busy "
        f"{100 * busy:.0f} %, "
        f"{m['workers/restarts']:.0f} restarts"
    )


def _progress(facts: PanelFacts) -> Text:
    since = time.monotonic() - facts.at
    text = Text("━" * (share := round(24 * facts.done / facts.iterations)), style="cyan")
    text.append("━" * (24 - share), style="dim")
    text.append(f"  {clock(facts.elapsed + since)} so far", style="default")
    if facts.done:
        remaining = facts.elapsed / facts.done * (facts.iterations - facts.done)
        text.append(f", {clock(max(0.0, remaining - since))} left", style="default")
    return text
