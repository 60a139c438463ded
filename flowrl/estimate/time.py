"""Estimate the seconds of an iteration on given devices from operations, peak FLOP/s and
utilisation.

    seconds = operations / (busy devices * peak of a device * utilisation)

A pass with gradients counts as 3 forward passes of all weights, and as 2 of adapters, whose frozen
weights need no gradients; checkpointing adds one. Generation of texts takes at least the time to
read all weights once per token from the device's memory. Not included: text encoders, rewards,
startup, communication, and kernel launches, which dominate for small models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flowrl.credit.values import REFERENCE
from flowrl.estimate import flops, sizes
from flowrl.estimate.by_size import at_size, size_shares
from flowrl.estimate.devices import DeviceGroup
from flowrl.estimate.flops import FlopCount, Kernels
from flowrl.estimate.memory import BYTES, rows_per_call
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.pathwise import Pathwise
from flowrl.models.description import Description, describe, unknown_because
from flowrl.settings import LanguageSettings, ModelSettings, PipelineSettings, RunSettings
from samplers import Plan, evaluations
from samplers.completions import TextPlan

LEFT_OUT = "text encoders, rewards, startup, communication, kernel launches"
LAUNCH = 8e-6  # seconds of a kernel's launch from Python, as an H200 has shown it
_UNITS = (("days", 86400.0), ("hours", 3600.0), ("min", 60.0))


@dataclass(frozen=True)
class IterationWork:
    """Evaluations of an iteration over all devices, of states or of whole texts.

    sampling  without gradients, to make the samples
    training  with gradients
    frozen    of other policies on the same inputs
    samples   to decode
    """

    sampling: float
    training: float
    frozen: float
    samples: int


def iteration_work(
    run: RunSettings, iteration: int = 0, levels: Sequence[float] | None = None
) -> IterationWork:
    """Count the evaluations of one iteration, as `count/...` in metrics.jsonl does for images.
    `levels` are the model's; without them `run.levels` is used, and E-GRPO may merge other steps.
    An upper bound for DGPO, whose samples of a group share one input at sigma 1."""
    algorithm, draws = run.algorithm(), run.drawn * run.rewritings
    levels = run.levels(algorithm.steps) if levels is None else levels
    plans = algorithm.planned(levels, iteration, run.train.seed)
    texts = [plan for plan in plans if isinstance(plan, TextPlan)]
    samples = draws * sum(plan.group for plan in plans)
    if texts:
        tokens = sum(plan.tokens for plan in texts) / sum(p.group * p.length for p in texts)
        sampling, rows = samples * tokens, float(samples)
    else:
        images = [plan for plan in plans if isinstance(plan, Plan)]
        sampling, rows = float(draws * evaluations(images)), _trained_inputs(run, images)
        samples += draws * sum(plan.predicted for plan in images)  # intermediate
    rows += _given_inputs(run)
    roles, likelihood = len(algorithm.loss.roles - {"old"}), algorithm.likelihood
    once = rows * _old_share(run) if "old" in algorithm.loss.roles else 0.0
    frozen = rows * (run.train.epochs * roles + (REFERENCE in algorithm.reads))
    if isinstance(likelihood, Pathwise):
        images = [plan for plan in plans if isinstance(plan, Plan)]
        frozen = float(draws * sum(likelihood.frozen(plan, roles) for plan in images))
        frozen *= run.train.epochs
    return IterationWork(sampling, rows * run.train.epochs, frozen + once, samples)


def _trained_inputs(run: RunSettings, plans: Sequence[Plan]) -> float:
    draws, likelihood, loss = (
        run.drawn * run.rewritings,
        run.algorithm().likelihood,
        run.algorithm().loss,
    )
    if isinstance(likelihood, Pathwise):
        return float(draws * sum(likelihood.graded(plan, len(loss.roles)) for plan in plans))
    if isinstance(likelihood, Matching):
        trained = sum(2 if likelihood.paired else plan.group for plan in plans)
        return float(draws * trained * likelihood.levels_per_sample)
    return float(draws * sum(plan.trained_states for plan in plans))


def _given_inputs(run: RunSettings) -> float:
    if run.given is None:
        return 0.0
    likelihood = run.algorithm().likelihood
    levels = likelihood.levels_per_sample if isinstance(likelihood, Matching) else 1
    count = run.prompts.per_iteration - run.drawn
    return float(count * levels * (2 if run.given.kind == "pairs" else 1))


def _old_share(run: RunSettings) -> float:
    """The share of inputs on which the sampling policy is evaluated again."""
    algorithm = run.algorithm()
    stored = not isinstance(algorithm.likelihood, Matching) and not run.recomputes_old
    if stored:
        return 0.0
    waits = algorithm.behaviour == "current" and run.train.epochs == 1
    first = 1 / run.train.updates if waits else 0.0
    return 1.0 - first


def flop_count(described: Description, m: ModelSettings, length: int) -> FlopCount | None:
    """Operations of a model's calls; None if they cannot be counted."""
    if isinstance(m, PipelineSettings):
        return flops.pipeline_flops(described, m, length)
    if isinstance(m, LanguageSettings) and m.image is not None:
        return flops.image_token_flops(described, m.image, length)
    return flops.text_flops(described, length, getattr(torch, m.dtype))


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of each phase of an iteration, and of an evaluation; None without held-out
    prompts."""

    phases: Mapping[str, float]
    evaluation: float | None
    count: FlopCount

    @property
    def total(self) -> float:
        return sum(self.phases.values())


def estimate_time(
    run: RunSettings, devices: DeviceGroup, utilisation: float, iteration: int = 0
) -> TimeEstimate | None:
    """Estimate the seconds of an iteration, on average over the sizes of its prompts; None if the
    model's operations are unknown. `count` is that of the first size."""
    m, described = run.trained_model, describe(run.model)
    length = run.algorithm().steps
    counts = [
        (share, flop_count(described, at_size(m, size.given), length))
        for share, size in size_shares(run)
        if described is not None
    ]
    counted = [(share, count) for share, count in counts if count is not None]
    if described is None or not counted or len(counted) < len(counts):
        return None
    count = counted[0][1]
    work = iteration_work(run, iteration)
    speed = devices.peak(m.dtype) * utilisation
    rate = speed * at_work(run.prompts.per_iteration, devices.number, m.sharers)
    passes = (3 if m.lora is None else 2) + int(run.train.gradient_checkpointing)
    state, trained = (sum(s * getattr(c, of) for s, c in counted) for of in ("state", "trained"))
    phases = {
        "sampling": work.sampling * state / rate,
        "training": (work.training * passes + work.frozen) * trained / rate,
    }
    if count.decode is not None:
        phases["decoding"] = work.samples * sum(s * (c.decode or 0.0) for s, c in counted) / rate
    if isinstance(m, LanguageSettings):
        phases["sampling"] = max(phases["sampling"], reading_weights(run, devices, work.samples))
    evaluation = None
    if run.prompts.held_out is not None:
        evaluation = _evaluation(run, described, speed, devices)
    return TimeEstimate(phases, evaluation, count)


def at_work(draws: int, devices: int, members: int) -> float:
    """Average number of devices that work at the same time: draws are never split between groups
    of `members` devices, so some devices wait if draws do not divide evenly."""
    groups = max(1, devices // members)
    return min(members, devices) * draws / -(-draws // groups)


def reading_weights(run: RunSettings, devices: DeviceGroup, samples: int) -> float:
    """Seconds for reading all weights once per token of each batch of texts."""
    model = sizes.of(run.trained_model, run.algorithm().steps)
    assert model is not None
    per_device = -(-samples // devices.number)
    batches = -(-per_device // rows_per_call(run, model, "sampling"))
    read = model.trained * BYTES[run.model.dtype] / (devices.kind.bandwidth * 1e12)
    return batches * run.algorithm().steps * read


def _evaluation(
    run: RunSettings, described: Description, speed: float, devices: DeviceGroup
) -> float | None:
    e, m, steps = run.evaluate, run.trained_model, run.evaluation_steps
    if isinstance(m, PipelineSettings):
        guidance = m.guidance.model_copy(update={"sample": run.evaluation_guidance})
        m = m.model_copy(update={"guidance": guidance})
    per_sample = 0.0
    for share, size in size_shares(run, "held_out"):
        sized = at_size(m, {**run.evaluation_size, **size.given})
        count = flop_count(described, sized, steps)
        if count is None:
            return None
        states = 1 if isinstance(m, LanguageSettings) else steps
        per_sample += share * (states * count.state + (count.decode or 0.0))
    work = e.samples * per_sample
    seconds = work / speed / devices.number
    if not isinstance(m, LanguageSettings):
        return seconds
    share = run.evaluation_steps / run.algorithm().steps
    return max(seconds, share * reading_weights(run, devices, e.samples))


def time_report(
    run: RunSettings, devices: DeviceGroup, utilisation: float, iteration: int = 0
) -> str:
    """Text for `flowrl plan --devices`: seconds, with the included and excluded work."""
    estimated = estimate_time(run, devices, utilisation, iteration)
    if estimated is None:
        source = run.model.source
        reason = "its denoiser's inputs are unknown"
        if describe(run.model) is None:
            reason = unknown_because(run.model)
        return f"time: unknown, since the operations of {source} cannot be counted: {reason}"
    phases = ", ".join(f"{name} {duration(s)}" for name, s in estimated.phases.items())
    peak = devices.peak(run.model.dtype) / 1e12
    lines = [
        f"time: about {duration(estimated.total)} per iteration on {devices.number} x "
        f"{devices.name} at {utilisation:.0%} of {peak:.0f} TFLOP/s in {run.model.dtype} "
        f"({phases})"
    ]
    t, interval = run.train, run.evaluate.every
    whole = t.iterations * estimated.total
    if estimated.evaluation is not None:
        whole += estimated.evaluation * (t.iterations // interval + 2)
        lines.append(f"  an evaluation: about {duration(estimated.evaluation)}")
    lines.append(f"  all {t.iterations} iterations: about {duration(whole)}")
    lines.append(f"  {_counting(run, estimated.count)}")
    if estimated.count.kernels is not None:
        lines.append(f"  {_shares(run, devices, estimated.count, estimated.count.kernels)}")
    left = (
        LEFT_OUT
        if estimated.count.decode is not None or run.writes_texts
        else f"decoding, {LEFT_OUT}"
    )
    lines.append(f"  not included: {left}")
    return "\n".join(lines)


def _counting(run: RunSettings, count: FlopCount) -> str:
    subject = "a state"
    if isinstance(run.model, LanguageSettings):
        subject = "a whole text" if run.writes_texts else "all tokens of an image"
    how = "counted on the meta device" if count.counted else "from weights, tokens and attention"
    decode = "" if count.decode is None else f", {count.decode / 1e12:.3g} TFLOP to decode a sample"
    return f"{count.state / 1e12:.3g} TFLOP for {subject} of {count.network} ({how}){decode}"


def _shares(run: RunSettings, devices: DeviceGroup, count: FlopCount, kernels: Kernels) -> str:
    """The least that a row's pass through the network takes, by what its kernels do: a GPU that
    reaches these figures has nothing left that flowrl could save there."""
    moved = kernels.moved / (devices.kind.bandwidth * 1e12)
    return (
        f"a row of {count.network} without gradients and adapters, at the peak: "
        f"{duration(kernels.operations / devices.peak(run.model.dtype))} of products, "
        f"{duration(moved)} for what its other kernels read and write at "
        f"{devices.kind.bandwidth:g} TB/s (norms, activations: not flowrl's; `model.compile` "
        f"merges some); launching its {kernels.launched} kernels takes "
        f"{duration(kernels.launched * LAUNCH)} a call, of any number of rows"
    )


def duration(seconds: float) -> str:
    """Seconds as "0.4 s", "12 min", "3.2 hours" or "1.5 days"."""
    for name, unit in (*_UNITS, ("s", 1.0)):
        if seconds >= 2 * unit or unit == 1:
            number = seconds / unit
            return f"{number:.2g} {name}" if number < 99.5 else f"{number:.0f} {name}"
    raise AssertionError("the last unit takes all")
