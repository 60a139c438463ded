"""A run that cannot learn says so, after the first update whose data had any signal.

Four links lead from an iteration's data to the weights: rows whose samples differ, a loss that
depends on the policy for them, a gradient that reaches trained weights, and a step that moves them.
`LearningWatch` measures all four in the first update after a start, on what that computes anyway:
no further evaluation, and one further transfer from a GPU. Where the data is silent (flat groups,
unscored samples) the run goes on, and an alarm counts such iterations (flowrl/run/watch/alarms.py).
Where another link is broken, settings are the cause, and the run ends.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowrl.credit.trackers import NoTracker
from flowrl.errors import UserError
from flowrl.iteration.credit import failed_share
from flowrl.laws.transforms import can_teach
from flowrl.likelihoods.rows import Rows
from flowrl.likelihoods.token import Token
from flowrl.losses.base import Derived, Entries, Objective
from flowrl.losses.distillation import Distillation
from flowrl.losses.reward import RewardGradient
from flowrl.processes.sharding import local_shard
from flowrl.session.learner import Learner
from flowrl.session.record import Terminal
from flowrl.settings.sections.budget import BudgetSettings

SIGNAL = "signal"  # metric: the share of entries with an advantage other than 0
ADAM_EPSILON = 1e-8  # of torch's and bitsandbytes' AdamW
# of the learning rate: Adam's first step is the rate, unless its epsilon is larger than the
# gradient; below this share ten thousand steps are one
UNMOVED_SHARE = 1e-4
DETACHED = (
    "no trained weight takes part in what the loss evaluates; choose other layers in "
    "model.lora.targets, and leave torch.no_grad, detach and unused branches out of your own model"
)
SMALL_SCALE = 1e-3  # of an adapter's output: usual ones are near 1
MOST_NAMES = 3  # names of modules in a sentence
# a pair of low-rank matrices is one module: in the first step only B has a gradient
_HALF = re.compile(r"\.(lora|hada|lokr)_\w+(\..*)?$|\.[^.]+$")


def module_of(parameter: str) -> str:
    """The module of a trained parameter; one for both matrices of an adapter."""
    return _HALF.sub("", parameter)


def compares_samples(loss: Objective) -> bool:
    """Whether a loss learns from advantages: a reward's own gradient and a teacher need none."""
    return not isinstance(loss, RewardGradient | Distillation)


def signal_metric(loss: Objective, rows: Rows) -> Derived | None:
    """The mask of the entries with an advantage other than 0, read with the other metrics."""
    if not compares_samples(loss):
        return None
    return Derived(_not_zero, (rows.advantage.detach(),))


def _not_zero(advantage: Tensor) -> Tensor:
    return advantage.ne(0).double()


@dataclass
class LearningWatch:
    """Measures an update, on the device: `facts` reads all numbers at once.

    taught  by chunk, the rows [b] that the loss has a gradient for
    signal  by chunk, the rows [b] whose samples differ
    in_loss by chunk, the rows [b] in the loss
    """

    parameters: list[str] = field(default_factory=list)  # that are trained
    names: list[str] = field(default_factory=list)  # those with a gradient, in the order of `steps`
    indices: list[Tensor] = field(default_factory=list)  # of their largest gradients
    largest: Tensor = field(default_factory=lambda: torch.zeros(0))  # these gradients
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))  # there, before a step
    in_loss: list[Tensor] = field(default_factory=list)
    taught: list[Tensor] = field(default_factory=list)
    signal: list[Tensor] = field(default_factory=list)
    steps: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # largest gradient, change

    def chunk(self, loss: Objective, rows: Rows, entries: Entries) -> None:
        """Watch the rows of a call, before its backward pass. UserError if no trained weight takes
        part in their evaluation."""
        in_loss = rows.mask.any(1)
        with_signal = (
            (rows.advantage.ne(0) & rows.mask).any(1) if compares_samples(loss) else in_loss
        )
        index = len(self.taught)
        self.signal.append(with_signal)
        self.in_loss.append(in_loss)
        self.taught.append(torch.zeros_like(in_loss))
        evaluated = [part for part in entries.new or () if part is not None and part.requires_grad]
        if entries.new is not None and not evaluated:
            raise UserError(f"the run cannot learn: {DETACHED}")
        for part in evaluated:
            part.register_hook(partial(self._seen, index))

    def _seen(self, index: int, gradient: Tensor) -> None:
        has_gradient = gradient.detach().flatten(1).ne(0).any(1)
        self.taught[index] = self.taught[index] | has_gradient.to(self.taught[index].device)

    @contextmanager
    def steps_of(self, learner: Learner) -> Iterator[None]:
        """Measure the optimizer steps inside."""
        before, after = partial(self._before, learner), partial(self._after, learner)
        hooks = (
            learner.optimizer.register_step_pre_hook(before),
            learner.optimizer.register_step_post_hook(after),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, learner: Learner, *_: Any) -> None:
        """Look up each parameter at the index of its largest gradient, since a copy of all weights
        would not fit."""
        gradients = {
            name: local_shard(p.grad) if isinstance(p.grad, DTensor) else p.grad
            for name, p in learner.policies.parameters.items()
            if p.grad is not None
        }
        gradients = {name: gradient for name, gradient in gradients.items() if gradient.numel()}
        self.parameters, self.names = list(learner.policies.parameters), list(gradients)
        self.indices = [gradient.abs().argmax()[None] for gradient in gradients.values()]
        self.largest = self._at(gradients).abs()
        self.weights = self._at(learner.policies.local(learner.policies.parameters))

    def _after(self, learner: Learner, *_: Any) -> None:
        """Compare with the weights before the step. Weight decay moves weights without a gradient,
        and does not count."""
        group = learner.optimizer.param_groups[0]
        decayed = self.weights * (1 - group["lr"] * group["weight_decay"])  # rounded as there
        weights = self._at(learner.policies.local(learner.policies.parameters))
        moves = torch.where(weights == self.weights, 0.0, (weights - decayed).abs())
        self.steps.append((self.largest.double(), moves.double()))

    @torch.no_grad()
    def _at(self, values: Mapping[str, Tensor]) -> Tensor:
        """One value of each parameter [p]."""
        parts = [
            values[name].detach().flatten().index_select(0, at)
            for name, at in zip(self.names, self.indices, strict=True)
        ]
        return torch.cat(parts) if parts else torch.zeros(0)

    def facts(self) -> "UpdateFacts":
        """All numbers of this process."""
        counts = [
            torch.stack([rows.sum() for rows in part]).sum().double()
            for part in (self.in_loss, self.signal, self.taught)
            if part
        ]
        steps = [torch.stack(part).amax(0) for part in zip(*self.steps, strict=True)]
        # a process without rows of its own takes the others' steps all the same
        measured = [torch.stack(counts), *steps] if counts else steps
        numbers = torch.cat(measured).tolist() if measured else []
        row_counts, step_numbers = (numbers[:3], numbers[3:]) if counts else ([0.0] * 3, numbers)
        in_loss, signal, taught = row_counts
        modules = {module_of(name): (0.0, 0.0) for name in self.parameters}
        gradients, moves = (
            step_numbers[: len(step_numbers) // 2],
            step_numbers[len(step_numbers) // 2 :],
        )
        for name, gradient, move in zip(self.names, gradients, moves, strict=True):
            module = module_of(name)
            before = modules[module]
            modules[module] = max(before[0], gradient), max(before[1], move)
        rows = sum(map(len, self.taught))
        return UpdateFacts(rows, int(in_loss), int(signal), int(taught), modules)


class UpdateFacts(NamedTuple):
    """Numbers of an update.

    rows     in its calls, and how many of them are in the loss, have a signal, and a gradient
    modules  largest gradient after clipping, and largest change of a weight, by module
    """

    rows: int
    in_loss: int
    signal: int
    taught: int
    modules: Mapping[str, tuple[float, float]]

    @classmethod
    def joined(cls, of_processes: list["UpdateFacts"]) -> "UpdateFacts":
        """Join the numbers of all processes: their rows are different, their weights the same, or
        shards."""
        modules = dict[str, tuple[float, float]]()
        for facts in of_processes:
            for name, (gradient, move) in facts.modules.items():
                before = modules.get(name, (0.0, 0.0))
                modules[name] = max(before[0], gradient), max(before[1], move)
        return cls(
            sum(facts.rows for facts in of_processes),
            sum(facts.in_loss for facts in of_processes),
            sum(facts.signal for facts in of_processes),
            sum(facts.taught for facts in of_processes),
            modules,
        )

    @property
    def reached(self) -> list[str]:
        return [name for name, (gradient, _) in self.modules.items() if gradient > 0]

    @property
    def steepest(self) -> float:
        return max((gradient for gradient, _ in self.modules.values()), default=0.0)

    @property
    def moved(self) -> float:
        return max((move for _, move in self.modules.values()), default=0.0)


@dataclass
class LearningCheck:
    """Judges the first update after a start whose data had any signal. `done`: it was."""

    done: bool = False

    def watch(self) -> LearningWatch | None:
        return None if self.done else LearningWatch()

    def judge(
        self,
        learner: Learner,
        watch: LearningWatch,
        metrics: Mapping[str, float],
        terminal: Terminal,
    ) -> None:
        """Say what the update did, or raise a UserError, on all processes, if settings keep the
        model from learning. `metrics` are the iteration's, with `lr`."""
        facts = UpdateFacts.joined(learner.parallel.every(watch.facts()))
        if not facts.modules:
            terminal.say(f"learning: {no_step(metrics)}; the next iteration is judged")
            return
        broken = next(broken_links(learner, facts, metrics), None)
        if broken is not None:
            prefix = f"{learner.name}: " if learner.name else ""
            raise UserError(f"{prefix}the run cannot learn: {broken}")
        if not facts.signal and not facts.taught:
            reason = silence(learner, facts, metrics)
            terminal.say(f"learning: {reason}; the next iteration is judged")
            return
        self.done = True
        terminal.say(f"learning: {healthy_update(learner, facts, metrics)}")


def healthy_update(learner: Learner, facts: UpdateFacts, metrics: Mapping[str, float]) -> str:
    """The sentence on a healthy update."""
    part = "adapters" if learner.run.model.lora is not None else "modules"
    reached, modules = len(facts.reached), len(facts.modules)
    line = (
        f"{facts.taught} of {facts.rows} rows have a gradient, which reaches {reached} of "
        f"{modules} {part}; weights moved by up to {facts.moved:.1e} "
        f"(learning rate {metrics['lr']:.1e})"
    )
    without = [name for name in facts.modules if name not in facts.reached]
    if not without:
        return line
    more = "" if len(without) <= MOST_NAMES else f" and {len(without) - MOST_NAMES} more"
    return f"{line}; none reaches {', '.join(without[:MOST_NAMES])}{more}"


def no_step(metrics: Mapping[str, float]) -> str:
    """Why an update took no step."""
    sentence = "no optimizer step was taken, since no gradient of this update is finite"
    if metrics.get("loss_scale", 0.0) > 1:
        return f"{sentence}; the loss scale of float16 is lowered"
    return (
        f"{sentence}; look for a setting that is far too small or too large, such as recipe.eta or "
        "recipe.beta, and for a division by 0 in parts of your own"
    )


def silence(learner: Learner, facts: UpdateFacts, metrics: Mapping[str, float]) -> str:
    """Why an iteration's data teaches nothing."""
    if not facts.in_loss:
        sentence = "the update had no rows in its loss"
        likelihood = learner.algorithm.likelihood
        if isinstance(likelihood, Token) and likelihood.cut == "mask":
            return (
                f"{sentence}, and recipe.cut: mask leaves out every completion that has not ended "
                f"within recipe.length ({learner.algorithm.steps} tokens); raise recipe.length, or "
                "set recipe.cut: train"
            )
        return sentence
    causes = [
        f"{share:.0%} {cause}"
        for share, cause in (
            (metrics.get("flat_groups", 0.0), "of the groups score all samples the same"),
            (failed_share(metrics), "of the samples have no score"),
            (metrics.get("abstained_share", 0.0), "of the samples have no reward that applies"),
        )
        if share > 0
    ]
    reasons = f" ({', '.join(causes)})" if causes else ""
    return f"no row of this update compares different samples{reasons}, so the data teaches nothing"


def broken_links(
    learner: Learner, facts: UpdateFacts, metrics: Mapping[str, float]
) -> Iterator[str]:
    """The settings that keep an update from learning, and their fix: none for a healthy run and
    for silent data."""
    if credit_is_zero(learner, facts, metrics):
        yield (
            f"every group's samples score differently, and the credit of all {facts.rows} rows is "
            "0; check the scales, bounds and weights in recipe.advantage"
        )
    if facts.signal and not facts.taught:
        yield broken_loss(learner, facts, metrics)
    if facts.taught and not facts.reached:
        yield broken_model(learner, facts)
    still = facts.moved <= UNMOVED_SHARE * metrics["lr"]
    carried = facts.steepest < UNMOVED_SHARE * ADAM_EPSILON  # a resumed Adam moves by its momentum
    if facts.reached and metrics["lr"] > 0 and (still or carried):
        yield broken_step(learner, facts, metrics)


def credit_is_zero(learner: Learner, facts: UpdateFacts, metrics: Mapping[str, float]) -> bool:
    """Whether the recipe itself turns scores that differ into advantages of 0. Texts are left out,
    whose credit may read successes, and so are trackers, which compare with earlier iterations.
    Credit that is 0 for these scores and not for others is the data's."""
    algorithm = learner.algorithm
    differ = metrics.get("flat_groups", 1.0) == metrics.get("unscored_share", 1.0) == 0
    all_rows = facts.in_loss == facts.rows > 0 and learner.run.budget == BudgetSettings()
    plain = (
        not algorithm.text and algorithm.tracker is NoTracker and compares_samples(algorithm.loss)
    )
    if not (differ and all_rows and plain) or facts.signal or facts.taught:
        return False
    return not can_teach(
        algorithm.advantage, algorithm.group, [s.label for s in learner.run.rewards]
    )


def broken_loss(learner: Learner, facts: UpdateFacts, metrics: Mapping[str, float]) -> str:
    """Rows differ, and the loss has no gradient for any of them."""
    loss, rows = learner.algorithm.loss, f"none of {facts.signal} rows has a gradient"
    if isinstance(loss, RewardGradient) and metrics.get("through/satisfied", 0.0) >= 1:
        return (
            f"{rows}: form hinge teaches only below recipe.bound {loss.bound:g}, and the samples "
            f"score {metrics['through/score']:.3g} on average already; set recipe.form: linear, or "
            "a bound above the scores"
        )
    for name, reason in SHARES.items():
        if metrics.get(name, 0.0) >= 1:
            return f"{rows}: {name} is 1, {reason}"
    if metrics.get("clipped_low", 0.0) + metrics.get("clipped_high", 0.0) >= 1:
        return (
            f"{rows}: the clip range stops all of them, so their ratios are outside of it before "
            "the first step; widen recipe.clip, or lower workers.lag and budget.replay"
        )
    for name, reason in ZEROS.items():
        if metrics.get(name) == 0:
            return f"{rows}: {name} is 0, {reason}"
    if isinstance(loss, Distillation) and metrics.get("kl_teacher") == 0:
        return (
            f"{rows}: kl_teacher is 0, so the teacher's weights equal the student's; name another "
            "file in `teachers`"
        )
    return (
        f"{rows}, although their samples differ: the loss {type(loss).__name__} does not depend on "
        "the policy for them; check its weights and bounds, and that your own loss detaches "
        "neither logp nor out of `new`"
    )


SHARES = {
    "outside": "so the trust region stops all steps; raise recipe.most",
    "mismatch_masked": (
        "so the correction of model.server drops all tokens: its server generates with other "
        "weights; restart it with the weights of this model"
    ),
    "behind_outside": "so workers.correction drops all rows; widen it, or lower workers.lag",
    "off_policy": "so all bad tokens are dropped as off policy; raise the loss's bound",
    "unscored_way": (
        "so no intermediate state has a score; fix intermediate_rewards, or leave them out"
    ),
}
ZEROS = {
    "mismatch_weight": (
        "so the correction of model.server leaves nothing; restart the server with the weights of "
        "this model"
    ),
    "gate": "so the loss weighs every token by 0; use the recipe's own temperatures",
    "phi": "so the loss weighs every text by 0; use the recipe's own settings",
    "weight": "so the loss weighs every group by 0; lower recipe.beta",
    "through/weight": "so the loss weighs every sample by 0; raise recipe.tau, or set it to null",
    "behind_weight": "so the loss weighs every row by 0; lower workers.lag",
}
"""Metrics with which a loss says that nothing is left, and the setting that is the cause."""


def broken_model(learner: Learner, facts: UpdateFacts) -> str:
    """The loss has a gradient, and no trained weight has one."""
    m = learner.run.model
    rows = f"{facts.taught} rows have a gradient, and it reaches none of "
    weights = "the trained weights" if m.lora is None else f"the {len(facts.modules)} adapters"
    if m.lora is not None and not any(
        bool(p.detach().count_nonzero()) for p in learner.policies.parameters.values()
    ):
        return (
            f"{rows}{weights}: both matrices of each are 0, so neither can leave 0; name another "
            "file in model.lora.from, or leave it out"
        )
    if m.dtype == "float16":
        return f"{rows}{weights}: it vanishes in float16; set model.dtype: bfloat16 or float32"
    names = ", ".join(list(facts.modules)[:MOST_NAMES])
    targets = "choose other layers in model.lora.targets, or " if m.lora is not None else ""
    return (
        f"{rows}{weights} ({names}): they take no part in what the loss evaluates, or their "
        f"outputs are detached or multiplied by 0; {targets}leave torch.no_grad, detach and frozen "
        "branches out of your own model"
    )


def broken_step(learner: Learner, facts: UpdateFacts, metrics: Mapping[str, float]) -> str:
    """Weights have a gradient, and the step does not move them."""
    t, norm = learner.run.train, metrics["grad_norm"]
    steepest = facts.steepest
    movement = f"weights moved by at most {facts.moved:.1e}"
    if facts.moved > UNMOVED_SHARE * metrics["lr"]:
        movement = "weights move by Adam's earlier gradients alone"
    if math.isfinite(norm) and norm > 0 and t.max_grad_norm < UNMOVED_SHARE * norm:
        return (
            f"{movement}: train.max_grad_norm {t.max_grad_norm:g} shrinks the gradient, of norm "
            f"{norm:.1e}, below Adam's epsilon; set it near 1"
        )
    if steepest < ADAM_EPSILON:
        lora = learner.run.model.lora
        if lora is not None and lora.alpha < SMALL_SCALE * lora.rank:
            scale = f"raise model.lora.alpha, {lora.alpha:g}, to about model.lora.rank"
        elif isinstance(learner.algorithm.loss, RewardGradient):
            scale = "raise recipe.scale"
        else:
            scale = (
                "raise what scales the loss: recipe.beta, bounds and scales in recipe.advantage, "
                "or the weights of the rewards"
            )
        return (
            f"{movement}: the largest gradient is {steepest:.1e}, far below Adam's epsilon of "
            f"1e-8; {scale}"
        )
    return (
        f"{movement} at a learning rate of {metrics['lr']:.1e}, which their precision rounds away; "
        "raise train.lr"
    )
