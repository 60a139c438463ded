"""The negative flow-matching error as a log-likelihood, for clean samples of any sampler."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.credit.choices import Choices, image_plans, text_plans
from flowrl.likelihoods.noise_levels import Times, Uniform
from flowrl.likelihoods.rows import (
    Evaluation,
    MatchingRows,
    PointMask,
    PointValues,
    equal_before,
    of_parts,
    once_per_state,
    parts_of_samples,
    unlike,
)
from flowrl.likelihoods.transition import NEEDS_TOKEN, free_of, mse
from flowrl.number_checks import check_number
from samplers import Rollout, Velocity
from samplers.host import on_host, picked, sent
from samplers.kernels import per_row
from samplers.layout import Layout
from samplers.noise import generator, keyed_noise
from samplers.number_ranges import ANY_NUMBER, AT_LEAST_1, POSITIVE
from samplers.untyped import integers

FLOOR = 1e-10  # keeps the gradient of small powers of the error finite


@dataclass(frozen=True)
class Weighting:
    """Weights of matching errors by noise level and error size: AWM (arXiv:2509.25050).

        w(e) = scale sigma^a (1 - sigma)^c ((e + 1e-10)^p - 1e-10^p) / p

    e is the mean squared error. AWM's five (a, c, p) are uniform (0, 0, 1), t (1, 0, 1),
    t2 (2, 0, 1), ghuber (1, 0, p) and huber, half of ghuber at p = 1/2. `epsilon` (0, 2, 1) is the
    error of a noise prediction in velocity space. Below 0, a favours low levels and c
    high ones.

    sigma_power  a, the power of sigma, any number
    clean_power  c, the power of 1 - sigma, any number
    error_power  p, the power of the error, above 0; below 1 small errors weigh more
    scale        factor of the weight, above 0
    """

    sigma_power: float = 0.0  # a
    clean_power: float = 0.0  # c
    error_power: float = 1.0  # p; below 1 small errors weigh more
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_number("Weighting's sigma_power", self.sigma_power, ANY_NUMBER)
        check_number("Weighting's clean_power", self.clean_power, ANY_NUMBER)
        check_number("Weighting's error_power", self.error_power, POSITIVE)
        check_number("Weighting's scale", self.scale, POSITIVE)

    def __call__(
        self, error: Float[Tensor, "b t"], sigma: Float[Tensor, " b"]
    ) -> Float[Tensor, "b t"]:
        p, s = self.error_power, sigma[:, None]
        shaped = error if p == 1 else ((error + FLOOR) ** p - FLOOR**p) / p
        return self.scale * s**self.sigma_power * (1 - s) ** self.clean_power * shaped


WeightingName = Literal["uniform", "t", "t2", "huber", "ghuber", "epsilon"]


def weighting(name: WeightingName, power: float = 0.25) -> Weighting:
    """The published weighting with that name; `power` is ghuber's p."""
    published = {
        "uniform": Weighting(),
        "t": Weighting(1.0),
        "t2": Weighting(2.0),
        "huber": Weighting(1.0, error_power=0.5, scale=0.5),
        "ghuber": Weighting(1.0, error_power=power),
        "epsilon": Weighting(clean_power=2.0),
    }
    return published[name]


@dataclass(frozen=True)
class Matching:
    """The negative flow-matching error at newly drawn noise levels: AWM (arXiv:2509.25050).

        log p = -w(mean |v(x, sigma) - (noise - x0)|^2),  x = (1 - sigma) x0 + sigma noise

    levels_per_sample  number of noise levels per sample or pair, at least 1
    weight     w by noise level and error size: see `Weighting`
    paired     keeps each group's best and worst as consecutive rows, with the same noise and level:
               Diffusion-DPO (arXiv:2311.12908). A tie, and a pair of equal samples, is masked
    together   the group's size, at least 1, for losses that compare the samples of a group: their
               rows stay together. 1 for all other losses
    same_noise  gives these rows the same noise and level, so that only the samples differ: DGPO
               (arXiv:2510.08425)
    share      "batch": all samples share their levels, so that a minibatch has one sigma, which
               every pipeline can run in one call; "sample": each sample has its own levels
    kl_weight  of the divergence |v - v_ref|^2: 1, or AWM's `elbo`, 1 / 2s^2 with
               s = .7 sqrt(t / (1 - t)), t at most .99 in the denominator
    parts      parts of a state that are entries of their own: see `Transition`

    Noise and levels are keyed by (seed, iteration, draw, plan, leaf), so they depend neither on
    the batch nor on the number of processes. Differences are computed in float32 or better.

    times  how noise levels are drawn: a part, `uniform`, `logit_normal`, `discrete` or
           `permuted_grid`
    """

    keep_mean = False
    text = False
    levels_per_sample: int = 1
    times: Times = field(default_factory=Uniform)
    weight: Weighting = field(default_factory=Weighting)
    paired: bool = False
    share: Literal["batch", "sample"] = "batch"
    kl_weight: Literal["uniform", "elbo"] = "uniform"
    together: int = 1
    same_noise: bool = False
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_number("Matching's levels_per_sample", self.levels_per_sample, AT_LEAST_1)
        check_number("Matching's together", self.together, AT_LEAST_1)

    @property
    def unit(self) -> int:
        return 2 if self.paired else self.together

    def refuses(self, choices: Choices) -> str | None:
        """Refuses text plans. UserError if the plan has too few levels."""
        if text_plans(choices):
            return NEEDS_TOKEN
        if self.parts and (self.paired or self.together > 1):
            return "modalities: losses that compare samples of a group have one advantage for all"
        if self.paired and self.together > 1:
            return (
                "Matching keeps either pairs or groups together: set paired or together, not both"
            )
        for plan in image_plans(choices):
            if plan.group % self.together:
                return (
                    f"Matching keeps {self.together} rows together, which splits groups of "
                    f"{plan.group}: set together to the group's size"
                )
            self.times([step.sigma for step in plan.steps], self.levels_per_sample, generator(0))
        return None

    def rows(self, rollout: Rollout, advantage: PointValues, mask: PointMask) -> list[MatchingRows]:
        """One `Rows` per drawn noise level, each with all samples (or pairs)."""
        credit, trained, layout = self._credit(rollout, advantage, mask)
        keep, storage = torch.arange(len(credit)), rollout.storage
        if self.paired:
            keep, paired = self.pairs(credit[:, 0], trained[:, 0], rollout.plan.group)
            unequal = on_host(unlike(rollout.x0[sent(keep, rollout.x0.device)]))
            trained = (paired & unequal)[:, None]
        alike = 2 if self.paired else 1  # rows of a group with the same noise share a key
        levels = self._levels(rollout, keep[::alike]).repeat_interleave(alike, 0)
        device, dtype = rollout.x0.device, rollout.x0.dtype
        at = sent(keep, device)
        x0 = storage.rounded(rollout.x0[at])
        prompt = picked(rollout.prompt, at)
        stored_x0 = storage.put(x0)
        parts: list[MatchingRows] = []
        for draw, sigma in enumerate(levels.unbind(1)):
            sigma = sent(sigma.to(dtype), device)
            noise = storage.rounded(self._noise(rollout, keep, draw))
            s = per_row(sigma, x0)
            x = (1 - s) * x0 + s * noise
            # at sigma 1 a group with the same noise has one state
            alone = not self.same_noise or bool((on_host(sigma) < 1).all())
            parts.append(
                MatchingRows(
                    prompt=prompt,
                    advantage=sent(credit[keep].to(dtype), device),
                    mask=sent(trained, device),
                    old=None,
                    x=storage.put(x),
                    sigma=sigma,
                    x0=stored_x0,
                    noise=storage.put(noise),
                    free=free_of(rollout, prompt),
                    layout=layout,
                    state=None if alone else sent(on_host(equal_before(x)), device),
                )
            )
        return parts

    def _credit(
        self, rollout: Rollout, advantage: PointValues, mask: PointMask
    ) -> tuple[Float[Tensor, "n t"], Bool[Tensor, "n t"], Layout | None]:
        """Advantages and mask of clean samples: of one entry, or of each part."""
        layout, count = parts_of_samples(self.parts, rollout.layout), max(1, len(self.parts))
        values: list[Tensor] = [advantage, mask]
        last, trained = (a.cpu().view(len(a), -1, count)[:, -1] for a in values)
        if layout is not None:
            last, trained = (of_parts(a, self.parts, layout) for a in (last, trained))
        return last, trained, layout

    @staticmethod
    def pairs(
        credit: Tensor, mask: Tensor, group: int
    ) -> tuple[Int[Tensor, " b"], Bool[Tensor, " b"]]:
        """Best and worst sample of each group, one pair per group, with ties masked."""
        grouped = credit.view(-1, group)
        ends = torch.stack([grouped.argmax(1), grouped.argmin(1)], 1)
        keep = (ends + torch.arange(len(grouped))[:, None] * group).flatten()
        differ = (grouped.amax(1) > grouped.amin(1)).repeat_interleave(2)
        complete = mask[keep].view(-1, 2).all(1).repeat_interleave(2)
        return keep, differ & complete

    def _key(self, rollout: Rollout, sample: int) -> tuple[int | str, ...]:
        """The key of sample (or pair) number `sample` of this rollout, the same on every
        process."""
        draw = rollout.draws[sample // rollout.plan.group]
        leaf_index = sample % rollout.plan.group
        leaf = "pair" if self.paired else leaf_index - leaf_index % self.together * self.same_noise
        return (rollout.seed, rollout.iteration, draw, "matching", rollout.index, leaf)

    def _levels(self, rollout: Rollout, samples: Tensor) -> Float[Tensor, "m t"]:
        sigmas = tuple(step.sigma for step in rollout.plan.steps)
        if self.share == "batch":
            draw = generator(rollout.seed, rollout.iteration, "matching", rollout.index, "level")
            levels = self.times(sigmas, self.levels_per_sample, draw)
            return levels.expand(len(samples), -1)
        keys = [(*self._key(rollout, i), "level") for i in integers(samples)]
        return torch.stack(
            [self.times(sigmas, self.levels_per_sample, generator(*key)) for key in keys]
        )

    def _noise(self, rollout: Rollout, samples: Tensor, draw: int) -> Float[Tensor, "b *d"]:
        keys = [(*self._key(rollout, i), "noise", draw) for i in integers(samples)]
        x0 = rollout.x0
        return keyed_noise(
            rollout.noise, keys, tuple(x0.shape[1:]), x0.dtype, x0.device, rollout.layout
        )

    def evaluate(self, policy: Velocity, rows: MatchingRows) -> Evaluation:
        target = rows.noise - rows.x0
        (v,) = once_per_state(rows, lambda r: [policy(r.x, r.sigma, r.prompt)])
        v = v.to(target.dtype)
        error = mse(v, target, rows.free, rows.layout)
        return Evaluation(-self.weight(error, rows.sigma), v)

    def log_ratio(
        self, new: Evaluation, old: Evaluation, rows: MatchingRows
    ) -> Float[Tensor, "b t"]:
        return new.logp - old.logp

    def kl(self, new: Evaluation, ref: Evaluation, rows: MatchingRows) -> Float[Tensor, "b t"]:
        """|v - v_ref|^2, averaged over dimensions, times the weight of its noise level that
        `kl_weight` names."""
        distance = mse(new.out, ref.out, rows.free, rows.layout)
        if self.kl_weight == "uniform":
            return distance
        t = rows.sigma[:, None]
        return distance * (1 - t.clamp(max=0.99)) / (2 * 0.49 * t)
