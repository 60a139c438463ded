"""The update step of gradient methods: from a reward, through the decoder, into the network.

The clean sample of each row is rebuilt with gradients (`flowrl.likelihoods.pathwise`). Samples are
decoded and scored with gradients, a few at a time, and only the gradient of the score is kept, so
that the decoder's and the rewards' activations are never in memory together with the network's.
Only here does a reward have a gradient; likelihoods never see a reward, and losses never call a
model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import UserError
from flowrl.iteration.records import Credited, Sampled, Scored, TrainingRows, Updated
from flowrl.iteration.stages import MakeRows, Stages, Update
from flowrl.iteration.update import ChunkEntries, UpdateStage
from flowrl.likelihoods.pathwise import PathRows, Pathwise, velocities_of
from flowrl.likelihoods.rows import Evaluation, Rows
from flowrl.losses.base import Entries
from flowrl.losses.reward import RewardGradient
from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.diffusers.call.results.decoder import sound_of
from flowrl.models.diffusers.sizes.mixed_batch import MixedBatch
from flowrl.session.learner import Learner
from flowrl.session.record import Terminal
from flowrl.session.session import Session
from flowrl.settings import PipelineSettings
from flowrl.table import Column
from rewards import Reward, Samples, Scores
from rewards.checks.differentiable import DifferentiableScore, differentiable_score
from rewards.checks.gradient_test import Agreement, differentiable_scores
from samplers import Rollout, Velocity
from samplers.host import on_host, picked, sent, uploaded
from samplers.untyped import integers

CHECKED = 32  # samples of the first iteration whose two scores are compared
NO_GRADIENT = (
    "its decoded samples have no gradient with respect to the latents, so reward gradients cannot "
    "pass through it: use a "
    "recipe that compares scores, such as nft or flow_grpo"
)


@dataclass(frozen=True)
class RewardPath:
    """The differentiable path from clean latents to a score, for the prompts of one batch.

    weights  of the rewards [r]
    size     number of samples that are decoded with gradients at a time
    """

    batch: MediaBatch | MixedBatch
    texts: Sequence[str]
    meta: Sequence[Mapping[str, Any]]
    rewards: Mapping[str, DifferentiableScore]
    weights: Float[Tensor, " r"]
    size: int
    decoded: list[int] = field(default_factory=lambda: [0])  # samples, with gradients

    @classmethod
    def of(cls, session: Session, batch: Any, rows: Sequence[int], iteration: int) -> "RewardPath":
        """The path for a batch of these prompts (`rows`), for gradient methods."""
        return cls._open(session, batch, rows, session.rewards, session.weights(iteration))

    @classmethod
    def guiding(
        cls, session: Session, batch: Any, rows: Sequence[int], iteration: int
    ) -> "RewardPath":
        """The path to the intermediate rewards whose gradient guides a plan's steps."""
        weights = session.intermediate_weights(iteration)
        return cls._open(session, batch, rows, session.intermediate_rewards, weights)

    @classmethod
    def _open(
        cls,
        session: Session,
        batch: Any,
        rows: Sequence[int],
        rewards: Mapping[str, Reward],
        weights: Tensor,
    ) -> "RewardPath":
        assert isinstance(batch, MediaBatch | MixedBatch)
        texts, meta = session.prompts.take(rows)
        m = session.run.model
        slicing = isinstance(m, PipelineSettings) and m.vae.slicing
        return cls(
            batch,
            texts,
            meta,
            differentiable_rewards(rewards),
            weights,
            1 if slicing else session.learner.policy.sizes.rows("decoding", len(texts)),
        )

    def samples(self, media: Tensor, prompt: Tensor, word: str = "") -> Samples:
        """Samples of these prompts, with a word before the prompt if given."""
        at = integers(on_host(prompt))
        texts = [f"{word} {self.texts[i]}" if word else self.texts[i] for i in at]
        meta = [self.meta[i] for i in at] if self.meta else ()
        shown = media.detach()
        audio = sound_of(self.batch.owner.sound_rate, shown)
        return Samples(shown, texts, on_host(prompt), meta, audio)

    def total(self, media: Tensor, prompt: Tensor, word: str = "") -> Float[Tensor, " m"]:
        """Weighted sum of the rewards, with a gradient with respect to the media."""
        samples = self.samples(media, prompt, word)
        parts = [
            differentiable_scores(n, r, media, samples).to(media) for n, r in self.rewards.items()
        ]
        return torch.stack(parts, 1) @ uploaded(self.weights.to(media.dtype), media.device)

    def score(
        self, media: Tensor, prompt: Tensor, rows: PathRows, words: tuple[str, str] | None
    ) -> Float[Tensor, " m"]:
        """Score for the loss: the weighted sum, or its difference between two words."""
        if words is None:
            return self.total(media, prompt)
        first, second = words[::-1] if rows.swapped else words
        lead = (1 + rows.strength) * self.total(media, prompt, first)
        return lead - self.total(media, prompt, second)

    def slopes(
        self,
        x0: Float[Tensor, "b *d"],
        rows: PathRows,
        trained: Tensor,
        words: tuple[str, str] | None,
    ) -> tuple[Float[Tensor, " m"], Float[Tensor, "m *d"]]:
        """Scores of the kept rows' samples, and their gradients with respect to x0. No other
        gradients remain."""
        parts: list[tuple[Tensor, Tensor]] = []
        for at in trained.split(self.size) if len(trained) else ():
            part, prompt = x0, rows.prompt
            if len(at) < len(x0):
                at = sent(at, x0.device)
                part, prompt = x0[at], picked(rows.prompt, at)
            clean = rows.sigmas[-1] == 0 or rows.noise is not None
            find = partial(self.score, prompt=prompt, rows=rows, words=words)
            score, slope = self.slope(part, prompt, find, clean)
            parts.append((score.to(x0), slope))
        if len(parts) == 1:
            return parts[0]
        scores, slopes = [x0.new_zeros(0)], [x0.new_zeros(0, *x0.shape[1:])]
        return torch.cat(scores + [s for s, _ in parts]), torch.cat(slopes + [s for _, s in parts])

    def slope(
        self,
        x0: Float[Tensor, "m *d"],
        prompt: Tensor,
        find: Callable[[Tensor], Tensor],
        clean: bool = True,
    ) -> tuple[Float[Tensor, " m"], Float[Tensor, "m *d"]]:
        """Scores `find` of the decoded media, and their gradients with respect to x0. `clean`: x0
        is the decoder's input rather than states at the schedule's last level."""
        part = x0.detach().clone().requires_grad_()
        with torch.enable_grad():
            latents = part if clean else self.batch.clean(part, prompt)
            media = self.batch.decode(latents, prompt, graded=True)
            if not media.requires_grad:
                raise UserError(NO_GRADIENT)
            score = find(media)
            if not score.requires_grad:
                raise UserError(
                    f"rewards {', '.join(self.rewards)}: `differentiable` has no gradient"
                )
            (slope,) = torch.autograd.grad(score.sum(), part)
        self.decoded[0] += len(part)
        return score.detach(), slope

    def intermediate_slope(self, rollout: Rollout) -> Float[Tensor, "n *d"]:
        """Gradients of the rewards of predicted samples, which guide a plan's steps."""
        slopes: list[Tensor] = []
        for at in torch.arange(len(rollout.x0)).split(self.size):
            index = sent(at, rollout.x0.device)
            prompt, x0 = picked(rollout.prompt, index), rollout.x0[index]
            slopes.append(self.slope(x0, prompt, partial(self.total, prompt=prompt))[1])
        return torch.cat(slopes)

    @torch.no_grad()
    def agreement(self, samples: Samples, scores: Scores) -> Agreement:
        """Compare differentiable scores with plain ones on samples of the run."""
        n = min(CHECKED, len(samples.prompts))
        group, complete = len(samples.prompts) // len(self.texts), scores.complete
        prompt = torch.arange(n) // group
        size = self.size if isinstance(samples.media, Tensor) else 1  # a list has several sizes
        graded = torch.cat(
            [self._graded(samples, at, prompt) for at in torch.arange(n).split(size)]
        )
        plain = scores.values[:n] @ self.weights.to(scores.values)
        return Agreement.of(torch.where(complete[:n], plain, torch.nan), graded)

    def _graded(self, samples: Samples, at: Tensor, prompt: Tensor) -> Tensor:
        """Differentiable scores of some samples of one size."""
        media = torch.stack([samples.media[i] for i in at.tolist()])
        return self.total(uploaded(media, self.batch.owner.device), prompt[at])

    def check(self, samples: Samples, scores: Scores) -> tuple[str, bool]:
        """A sentence on this agreement in the first iteration, and whether the agreement is
        close."""
        near = self.agreement(samples, scores)
        sentence = f"self-check: rewards with gradients, on the first samples: {near}"
        return sentence, near.close


def differentiable_rewards(rewards: Mapping[str, Reward]) -> dict[str, DifferentiableScore]:
    """Rewards as differentiable functions. UserError, naming it, for a reward that is not
    differentiable."""
    try:
        return {name: differentiable_score(name, reward) for name, reward in rewards.items()}
    except ValueError as error:
        raise UserError(str(error)) from error


def path_entries(
    learner: Learner, policy: Velocity, reward_path: RewardPath, rows: Rows
) -> Entries:
    """Loss of a chunk: anchors, rebuilt samples, reward gradients."""
    likelihood, loss = learner.algorithm.likelihood, learner.algorithm.loss
    assert isinstance(likelihood, Pathwise) and isinstance(loss, RewardGradient)
    assert isinstance(rows, PathRows)
    evaluations: dict[str, Evaluation] = {}
    states = rows.known_states() or []
    if loss.roles and not states:
        with torch.no_grad():
            states = likelihood.path(policy, rows).states
    for role in sorted(loss.roles):
        with torch.no_grad(), learner.policies.using(role):
            evaluations[role] = likelihood.at(policy, rows, states)
    path = likelihood.path(policy, rows)
    rows = replace(rows, weight=path.weight)
    out = velocities_of(path.velocities) if len(rows.sigmas) == 2 else None
    if loss.roles and out is None:
        out = likelihood.at(policy, rows, states)
    trained = on_host(rows.mask).any(1).nonzero()[:, 0]
    value, slope = reward_path.slopes(path.x0, rows, trained, loss.words)
    if len(trained) < len(path.x0):
        zeros, at = torch.zeros_like(path.x0.detach()), sent(trained, path.x0.device)
        value = zeros.flatten(1)[:, 0].index_copy(0, at, value)
        slope = zeros.index_copy(0, at, slope)
    zero_with_gradient = (
        ((path.x0 - path.x0.detach()) * slope).flatten(1).sum(1)
    )  # 0, with the gradient
    evaluations["new"] = Evaluation(
        (value + zero_with_gradient)[:, None], None if out is None else out.out
    )
    return loss(likelihood, evaluations, rows)._replace(new=evaluations["new"])


class GradedSamples(NamedTuple):
    """Samples, scores and the path between them, for the update and the first check."""

    path: RewardPath
    samples: Samples
    scores: Scores


GRADED_SAMPLES: Column[GradedSamples] = Column(
    "path of the rewards' gradients", "reward_gradient", "whole"
)


@dataclass(frozen=True)
class GradedRows:
    """Adds the path from clean latents to a score."""

    session: Session
    inner: MakeRows

    def __call__(self, samples: Sampled, scores: Scored, credit: Credited) -> TrainingRows:
        self._check_applies(scores)
        rows, session = self.inner(samples, scores, credit), self.session
        path = RewardPath.of(session, samples.batch, rows.prompts, rows.iteration)
        scored_samples = scores.samples[0]
        assert isinstance(scored_samples, Samples), (
            "workers return whole samples for reward gradients"
        )
        graded = GradedSamples(path, scored_samples, scores.plans[0].own)
        return replace(rows, table=rows.table.with_value(GRADED_SAMPLES, graded))

    @staticmethod
    def _check_applies(scores: Scored) -> None:
        """UserError for a reward that abstains, since its gradient would be followed all the
        same."""
        for plan in scores.plans:
            abstentions = (~plan.everyone.applies).sum(0).tolist()
            for name, count in zip(plan.everyone.names, abstentions, strict=True):
                if count:
                    raise UserError(
                        f"reward {name} does not apply to {count} of "
                        f"{len(plan.everyone.values)} samples (None), but this recipe follows the "
                        "gradient of every reward in every sample: let it return a score, or "
                        "leave these prompts out"
                    )


def path_loss(
    learner: Learner, training: TrainingRows, chunk: Rows, equal: frozenset[str] | None = None
) -> ChunkEntries:
    """The loss of a chunk: minus the rewards of the rebuilt samples."""
    del equal  # every policy is asked along the path
    velocity: Any = training.policy  # `Algorithm` refuses gradient methods of texts
    path = training.table[GRADED_SAMPLES].path
    return path_entries(learner, velocity, path, chunk), chunk.mask


def check_agreement(learner: Learner, training: TrainingRows, terminal: Terminal) -> TrainingRows:
    """Compare the scores with gradients and the plain ones on the first samples."""
    path, samples, scores = training.table[GRADED_SAMPLES]
    with learner.parallel.together():  # an error on one process ends the others
        sentence, close = path.check(samples, scores)
    terminal.say(sentence)
    if not close:
        terminal.warn(
            "the loss uses a differentiable score that differs from the logged score: see "
            "`differentiable` in docs/own_rewards.md"
        )
    return training


@dataclass(frozen=True)
class CountsDecoded:
    """Adds the number of samples that were decoded with gradients."""

    learner: Learner
    inner: Update

    def __call__(self, rows: TrainingRows) -> Updated:
        updated = self.inner(rows)
        decoded = sum(self.learner.parallel.every(rows.table[GRADED_SAMPLES].path.decoded[0]))
        if not decoded:
            return updated
        return replace(updated, metrics={**updated.metrics, "count/decoded_graded": float(decoded)})


def wrap(stages: Stages, session: Session) -> Stages:
    update = stages.update
    assert isinstance(update, UpdateStage), "features that wrap the stage come later"
    update = replace(update, loss=path_loss, check=check_agreement)
    return replace(
        stages,
        rows=GradedRows(session, stages.rows),
        update=CountsDecoded(session.learner, update),
    )
