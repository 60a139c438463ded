"""Likelihoods of samples under a policy, and the densities of denoising steps.

    Transition   density of the sampler's own noisy steps        GRPO and its variants
    Matching     minus the flow-matching error (an ELBO)         AWM, DiffusionNFT, Diffusion-DPO
                 (in flowrl/likelihoods/matching.py)
    Token        log-probabilities of tokens                     language models
                 (in flowrl/likelihoods/token.py)

A likelihood selects the rows to train on, evaluates them under a policy, and compares two
evaluations. It never sees a reward; a loss never sees a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.credit.choices import Choices, image_plans, samples_itself, text_plans
from flowrl.likelihoods.rows import (
    Evaluation,
    PointMask,
    PointValues,
    Rows,
    TransitionRows,
    equal_before,
    of_parts,
    once_per_state,
    parts_of_samples,
)
from samplers import Edges, Gaussian, Rollout, Velocity, mean_log_prob
from samplers.clock import Clocked
from samplers.host import filled_rows, on_host, sent, uploaded
from samplers.kernels import coefficients, mean_over, step
from samplers.layout import Layout

KlForm = Literal["exact", "published", "velocity", "mean"]
NEEDS_TOKEN = "a plan of text needs the Token likelihood"


@runtime_checkable
class Likelihood(Protocol):
    """Makes rows from rollouts, evaluates them, and compares two evaluations.

    A policy is a velocity `(x [b *d], sigma [b], prompt [b]) -> v [b *d]`, or a `TokenPolicy`.
    """

    @property
    def unit(self) -> int: ...  # consecutive rows that belong together: 2 for pairs

    @property
    def keep_mean(self) -> bool: ...  # whether the rollout must store its steps' means

    @property
    def text(self) -> bool: ...  # whether samples are completions of a language model

    def rows(self, rollout: Any, advantage: PointValues, mask: PointMask) -> Sequence[Rows]: ...

    def evaluate(self, policy: Any, rows: Any) -> Evaluation: ...

    def log_ratio(self, new: Evaluation, old: Evaluation, rows: Any) -> Float[Tensor, "b t"]: ...

    def kl(self, new: Evaluation, ref: Evaluation, rows: Any) -> Float[Tensor, "b t"]: ...


def mse(
    a: Float[Tensor, "b *d"] | None,
    b: Float[Tensor, "b *d"] | None,
    free: Bool[Tensor, "b *d"] | None = None,
    layout: Layout | None = None,
) -> Float[Tensor, "b t"]:
    """Mean squared difference over the latent dimensions, per row; over free entries if not all
    are, and of each part if the parts are entries of their own."""
    assert a is not None and b is not None, "this comparison needs means or velocities"
    return entries((a - b).square(), free, layout)


def entries(
    values: Float[Tensor, "b *d"], free: Bool[Tensor, "b *d"] | None, layout: Layout | None
) -> Float[Tensor, "b t"]:
    """Means as entries of a loss: one per row, or one per part of a row."""
    means = mean_over(values, free, layout)
    return means[:, None] if layout is None else means


def free_of(rollout: Rollout, prompt: Int[Tensor, " b"]) -> Bool[Tensor, "b *d"] | None:
    """The sampled entries of rows of these prompts; None for all."""
    return None if rollout.free is None else rollout.free[prompt]


def _step(policy: Velocity, rows: TransitionRows) -> Gaussian:
    """The distribution of the next state of each row."""
    v = policy(rows.x, rows.sigma, rows.prompt)
    return step(rows.kernel, rows.x, v, rows.sigma, rows.sigma_next)


def states_of(rollout: Rollout, edges: Edges) -> Int[Tensor, " b"] | None:
    """Number the distinct states of a step that has fewer states than transitions. The numbers come
    from comparing states, not from the plan alone, since replay may have replaced one of several
    siblings. On the CPU, where they are read."""
    before, after = rollout.plan.states[edges.step : edges.step + 2]
    if before == after:
        return None
    return on_host(equal_before(edges.x))


@dataclass(frozen=True)
class Transition:
    """Density of stored noisy steps: Flow-GRPO (arXiv:2505.05470).

        log p = mean over dims of log N(x_next; mean(x, v), q^2)

    q is the step's std, and squared differences are means over the latent's dims.

    ratio    the log-ratio, with l = log p_new - log p_old:
             density     l
             ratio_norm  q l + |mean - mean_old|^2 / 2q: GRPO-Guard (arXiv:2510.22319, eq. 8). It is
                         mean(noise * shift of the mean), of mean 0 and without the factor 1 / q of
                         l. The authors' code averages the second term over the micro-batch; here
                         each row has its own, as in verl-omni and Pref-GRPO
             cps         2 q^2 l, the difference of -|x_next - mean|^2: Flow-CPS's published score
                         (arXiv:2509.05952)
    kl_form  the divergence from another policy:
             exact       |mean - mean_ref|^2 / 2 q^2, the divergence of the two steps
             published   the same with g^2 = q^2 / h in place of q^2, as in Flow-GRPO's code:
                         smaller by h, for which its published beta is meant
             velocity    |v - v_ref|^2
             mean        |mean - mean_ref|^2, without 1 / 2 q^2: Flow-Factory's (x-based). The
                         weight for `exact` times 1 / 2 q^2 is the equivalent weight for this form,
                         so it differs per step
    means    keeps the means of the sampled steps, which some losses compare with
    parts    parts of a state that are entries of their own, each with its mean over its own dims,
             in the order of the advantages' columns. None: the mean over all dims is one entry
    """

    unit = 1
    text = False
    ratio: Literal["density", "ratio_norm", "cps"] = "density"
    kl_form: KlForm = "exact"
    means: bool = False
    parts: tuple[str, ...] = ()

    @property
    def keep_mean(self) -> bool:
        return self.means or self.ratio == "ratio_norm"

    def refuses(self, choices: Choices) -> str | None:
        """Refuses plans whose samples have no density under the policy."""
        if not samples_itself(choices):
            return (
                "steer: particles are not the policy's own samples, so they have no density to "
                "train on; use a recipe that learns from clean samples (awm, nft, dpo, rwr)"
            )
        if text_plans(choices):
            return NEEDS_TOKEN
        if not all(any(step.train for step in plan.steps) for plan in image_plans(choices)):
            return (
                "a Transition likelihood needs noisy, trained steps, but this plan is "
                "deterministic: use Chain, Window, Fork or Tree, or the Matching likelihood"
            )
        return None

    def rows(
        self, rollout: Rollout, advantage: PointValues, mask: PointMask
    ) -> list[TransitionRows]:
        """One `Rows` per trained step."""
        assert rollout.edges, "`refuses` excludes plans without trained steps"
        return [self._rows(rollout, edges, advantage, mask) for edges in rollout.edges]

    def _rows(
        self, rollout: Rollout, edges: Edges, advantage: Tensor, mask: Tensor
    ) -> TransitionRows:
        step, kernel, x = rollout.plan.steps[edges.step], rollout.plan.kernel, edges.x
        assert kernel is not None  # means that are needed and absent are those of an engine
        nodes, device, count = len(x), edges.logp.device, max(1, len(self.parts))
        # the leaves of a node agree, so its first one is enough
        credit, trained = (
            a.view(len(a), -1, count)[:, edges.step].reshape(nodes, -1, count)[:, 0]
            for a in (advantage, mask)
        )
        logp, layout = edges.logp[:, None], None
        if self.parts:
            layout = parts_of_samples(self.parts, rollout.layout)
            assert layout is not None and edges.by_part is not None, "the walk keeps it"
            credit, trained = (of_parts(a, self.parts, layout) for a in (credit, trained))
            logp = edges.by_part
        return TransitionRows(
            prompt=edges.prompt,
            advantage=sent(credit.to(edges.logp.dtype), device),
            mask=sent(trained, device),
            old=Evaluation(logp, edges.mean if self.keep_mean else None),
            x=x,
            x_next=edges.x_next,
            sigma=filled_rows(nodes, step.sigma, edges.logp.dtype, device),
            sigma_next=filled_rows(nodes, step.sigma_next, edges.logp.dtype, device),
            kernel=kernel,
            free=free_of(rollout, edges.prompt),
            state=states_of(rollout, edges),
            layout=layout,
        )

    def evaluate(self, policy: Velocity, rows: TransitionRows) -> Evaluation:
        g = Gaussian(*once_per_state(rows, partial(_step, policy)))
        logp = mean_log_prob(g, rows.x_next, rows.free, rows.layout)
        return Evaluation(logp if rows.layout is not None else logp[:, None], g.mean)

    def log_ratio(
        self, new: Evaluation, old: Evaluation, rows: TransitionRows
    ) -> Float[Tensor, "b t"]:
        ratio = new.logp - old.logp
        if self.ratio == "density":
            return ratio
        q, _ = step_scales(rows)
        if self.ratio == "cps":
            return 2 * q**2 * ratio
        drawn = rows.free
        if isinstance(rows.kernel, Clocked):  # means of parts at rest are the same
            moved = rows.kernel.drawn(rows.sigma)
            drawn = moved if drawn is None else moved & drawn
        return q * ratio + mse(new.out, old.out, drawn, rows.layout) / (2 * q)

    def kl(self, new: Evaluation, ref: Evaluation, rows: TransitionRows) -> Float[Tensor, "b t"]:
        """Squared distance of the two means, averaged over dimensions and scaled by `kl_form`: in
        nats per dimension for `exact`, |v - v_ref|^2 for `velocity`."""
        return step_distance(self.kl_form, new, ref, rows)


def step_distance(
    form: KlForm, new: Evaluation, ref: Evaluation, rows: TransitionRows
) -> Float[Tensor, "b t"]:
    """Squared distance of two steps' means, averaged over the sampled entries and scaled for a
    `kl_form`. Where parts are at levels of their own, each entry is scaled by its part's step."""
    if not isinstance(rows.kernel, Clocked):
        return scaled_by_step(form, mse(new.out, ref.out, rows.free, rows.layout), rows)
    assert new.out is not None and ref.out is not None, "this comparison needs means"
    scales, drawn = rows.kernel.scales(rows.sigma), rows.kernel.drawn(rows.sigma)
    squares = (new.out - ref.out).square()
    scaled = squares if form == "mean" else _divided(form, squares, *scales)
    free = drawn if rows.free is None else drawn & rows.free
    return entries(scaled, free, rows.layout)


def scaled_by_step(
    form: KlForm, distance: Float[Tensor, "b t"], rows: TransitionRows
) -> Float[Tensor, "b t"]:
    """Squared distances of means, scaled for a `kl_form` by the rows' steps. The factors are
    computed on the host and applied in one multiplication."""
    if form == "mean":
        return distance
    step_coefficients = None
    if distance.device.type != "cpu":
        step_coefficients = coefficients(rows.kernel, rows.sigma, rows.sigma_next)
    if step_coefficients is None:
        fall = (rows.sigma - rows.sigma_next)[:, None]
        return _divided(form, distance, *step_scales(rows), fall)
    _, slope, std = step_coefficients[..., None]
    fall = (on_host(rows.sigma).double() - on_host(rows.sigma_next).double())[:, None]
    factor = _divided(form, torch.ones_like(std), std, slope, fall)
    return distance * uploaded(factor.to(distance.dtype), distance.device)


def _divided(form: KlForm, distance: Tensor, q: Tensor, slope: Tensor, fall: Tensor) -> Tensor:
    if form == "velocity":
        return distance / slope**2
    if form == "published":
        return distance * fall / (2 * q**2)
    return distance / (2 * q**2)


def step_scales(rows: TransitionRows) -> tuple[Float[Tensor, "b 1"], Float[Tensor, "b 1"]]:
    """Std of the step, and d mean / d v.

    The slope is read off at x = 0 and v = 1, which is right for a kernel that is affine in x and
    v. `kl_form: velocity` alone reads it, and `check_affine` refuses that for other kernels.
    """
    if rows.sigma.device.type != "cpu":
        step_coefficients = coefficients(rows.kernel, rows.sigma, rows.sigma_next)
        if step_coefficients is not None:
            _, slope, std = sent(step_coefficients.to(rows.sigma.dtype), rows.sigma.device)[
                ..., None
            ]
            return std, slope
    zero = torch.zeros_like(rows.sigma)[:, None]
    mean, std = rows.kernel(zero, torch.ones_like(zero), rows.sigma, rows.sigma_next)
    return std[:, None], mean


def step_divergence(new: Evaluation, old: Evaluation, rows: Rows) -> Float[Tensor, "b t"]:
    """|mean - mean_old|^2 / 2 q^2 in nats per dimension: the divergence of two steps with equal
    std."""
    assert isinstance(rows, TransitionRows), "only denoising steps have means"
    return step_distance("exact", new, old, rows)
