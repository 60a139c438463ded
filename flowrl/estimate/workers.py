"""Lines of `flowrl plan` about workers: memory, data sent, and waiting times."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from flowrl.estimate import sizes
from flowrl.estimate.devices import DeviceGroup
from flowrl.estimate.memory import BYTES, MemoryEstimate, estimate, size, trained_weights
from flowrl.estimate.sizes import Sizes
from flowrl.estimate.time import duration, estimate_time
from flowrl.settings import RunSettings
from samplers import Plan

SHOWN_STATISTICS = 5  # of each image or video, on pages: float32
INDEX, LOGP, SCORE = 8, 4, 10  # bytes; a score is a float64, whether it is there, and applies
# its draw, its length, whether it ended and was replayed, and its statistics
TEXT = 2 * INDEX + 2 + 4 * 8


@dataclass(frozen=True)
class Traffic:
    """Bytes that an iteration sends between processes, as `workers/bytes/...` counts them.

    weights  of one version, from a training process to Ray's store; each node gets a copy
    samples  states, levels, densities and indices, from sampling workers to training
    media    from sampling workers to the replicas of rewards, without the letters of texts
    bound    whether samples are an upper bound, since texts may end early
    """

    weights: int
    samples: int
    media: int
    bound: bool = False


def traffic(run: RunSettings, iteration: int = 0) -> Traffic | None:
    """Bytes of an iteration; None if the model is not on this machine."""
    algorithm = run.algorithm()
    model = sizes.of(run.trained_model, algorithm.steps)
    if model is None:
        return None
    levels = run.levels(algorithm.steps)
    plans = algorithm.planned(levels, iteration, run.train.seed)
    count = trained_weights(run, model)
    wide = BYTES[run.model.dtype]
    if run.model.lora is not None:
        wide = 2 if run.model.half_adapters else 4
    if algorithm.behaviour != "current":  # averages are kept in float32 at least
        wide = max(wide, 4)
    replicas = len({*run.workers.rewards} & {spec.label for spec in run.rewards})
    draws, learner_rewards = run.drawn, len(run.rewards) - replicas
    samples = sum(plan.group for plan in plans)
    images = [plan for plan in plans if isinstance(plan, Plan)]
    if not images:
        per_draw = samples * (algorithm.steps * (INDEX + LOGP) + TEXT + SCORE * learner_rewards)
        return Traffic(wide * count, draws * per_draw, draws * samples * INDEX * replicas, True)
    per_draw = sum(_rollout_bytes(run, plan, model) for plan in images)
    per_draw += SCORE * samples * learner_rewards + 4 * SHOWN_STATISTICS * images[0].group
    media = (4 * model.media + INDEX) * samples * replicas
    return Traffic(wide * count, draws * per_draw, draws * media)


def _rollout_bytes(run: RunSettings, plan: Plan, model: Sizes) -> int:
    """Bytes of one draw under a plan: each distinct state once."""
    dtype = run.train.states.dtype
    stored = model.latent * (4 if dtype is None else BYTES[dtype])
    keeps_means, size = run.algorithm().likelihood.keep_mean, 0
    trained = [k for k, step in enumerate(plan.steps) if step.train]
    for before, k in pairwise([-2, *trained]):
        children = plan.states[k + 1]
        states = children * (2 if keeps_means else 1)
        states += 0 if before + 1 == k else plan.states[k]
        size += states * stored + children * (LOGP + INDEX)
    return size + plan.group * (4 * model.latent + INDEX)


def workers_report(
    run: RunSettings, devices: DeviceGroup | None, utilisation: float, iteration: int = 0
) -> Iterator[str]:
    """Lines of `flowrl plan` for a run with workers."""
    w = run.workers
    if not w.any:
        if w.lag and run.server is not None:
            yield f"workers: none; lag {w.lag}: the server samples while weights are updated"
        elif w.lag:
            yield f"workers: none; lag {w.lag} in one process, which samples and trains in turn"
        return
    held = estimate(run, iteration)
    replicas = [f"{how.replicas} of {label}" for label, how in w.rewards.items()]
    kinds = [f"{w.sampling} sample" if w.sampling else "the training processes sample"]
    kinds += [f"{', '.join(replicas)} score"] if replicas else []
    yield f"workers: {'; '.join(kinds)}; lag {w.lag}" + _units(run)
    if held is not None and w.sampling:
        used = (*run.rewards, *(run.judges if w.evaluate else ()))
        learner_rewards = dict.fromkeys(spec.label for spec in used if spec.label not in w.rewards)
        parts = _sampling_memory(run, held)
        yield (
            f"  a sampling worker holds the model, its encoders and decoder: about {size(parts)}"
            + (f", and the rewards {', '.join(learner_rewards)}" if learner_rewards else "")
        )
        yield (
            f"  a training process holds the same and the training state: about {size(held.total)}"
        )
    if w.evaluate and w.sampling:
        unit = "all prompts in one call" if w.unit is None else f"{w.unit} prompts per call"
        yield f"  they evaluate beside the next iteration, {unit}"
    sent = traffic(run, iteration)
    if sent is not None and w.sampling:
        most = "at most " if sent.bound else ""
        yield (
            f"  an iteration sends {_bytes(sent.weights)} of weights, {most}"
            f"{_bytes(sent.samples)} of samples, {_bytes(sent.media)} of media to replicas"
        )
    yield from _waiting(run, devices, utilisation, iteration)


def _units(run: RunSettings) -> str:
    unit, draws = run.workers.unit, run.drawn
    if unit is None:
        return f"; {draws} draws in one unit: set workers.unit to distribute them"
    return f"; {-(-draws // unit)} units of {unit} draws"


def _sampling_memory(run: RunSettings, held: MemoryEstimate) -> int:
    names = ("trained model", "merged weights", "adapters", "masters", "frozen parts")
    parts = sum(n for name, n in held.parts.items() if name in names)
    unit = run.workers.unit or run.drawn
    share = min(1.0, unit / max(1, run.drawn))
    return int(parts + held.phases.get("decoding", 0) + held.media * share)


def _waiting(
    run: RunSettings, devices: DeviceGroup | None, utilisation: float, iteration: int
) -> Iterator[str]:
    w = run.workers
    if not w.sampling or devices is None:
        return
    estimated = estimate_time(
        run, DeviceGroup(1, devices.name, devices.kind), utilisation, iteration
    )
    if estimated is None:
        return
    learners = max(1, devices.number - w.sampling)
    update = estimated.phases["training"] / learners
    sampling = (estimated.total - estimated.phases["training"]) / w.sampling
    whole, idle = waiting_shares(sampling, update, w.lag)
    yield (
        f"  {w.sampling} {devices.name} sample in {duration(sampling)}, {learners} train in "
        f"{duration(update)}: {duration(whole)} per iteration; sampling waits {idle[0]:.0%}, "
        f"training {idle[1]:.0%} of it (rewards and transfers not included)"
    )


def waiting_shares(sampling: float, update: float, lag: int) -> tuple[float, tuple[float, float]]:
    """Seconds of an iteration, and the shares of it that sampling and training wait. With a lag
    both run at the same time, and the longer one determines the duration."""
    whole = max(sampling, update) if lag else sampling + update
    return whole, (1 - sampling / whole, 1 - update / whole)


def _bytes(count: int) -> str:
    for name, unit in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} bytes"
