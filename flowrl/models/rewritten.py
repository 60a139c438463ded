"""A pipeline whose prompts a language model writes, as one model for evaluations and commands.

Each sample of a prompt has its own rewriting. Equal rewritings are encoded once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.media.statistics import Statistics
from flowrl.models.call_sizes import CallSizes
from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.diffusers.sizes.mixed_batch import refuse_mixed
from flowrl.models.evaluation_counter import Meter
from flowrl.models.policy import Policy
from samplers import Planner, Rollout, Sampling
from samplers.completions import TextPlanner

REWRITER = "rewriter"  # its name in metrics, checkpoints and folders


def instructed(template: str, prompts: Sequence[str]) -> list[str]:
    """The texts that the language model continues."""
    return [template.replace("{prompt}", prompt) for prompt in prompts]


def open_texts(
    policy: Policy, texts: Sequence[str], meta: Sequence[Mapping[str, Any]], steps: int
) -> MediaBatch:
    """Encode texts; equal texts with the same row of their file are encoded once."""
    keys = [(text, id(row)) for text, row in zip(texts, meta, strict=True)]
    position = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    first = [keys.index(key) for key in position]
    batch: Any = policy.open([texts[i] for i in first], [meta[i] for i in first], steps)
    refuse_mixed(batch, "model.rewriter")
    assert isinstance(batch, MediaBatch), "only pipelines have a rewriter"
    index = torch.tensor([position[key] for key in keys])
    return replace(batch, conditioning=batch.conditioning.take(index))


@dataclass(frozen=True)
class JointPlan:
    """Planners of an evaluation: `group` texts per prompt, and one image per text."""

    text: TextPlanner
    image: Planner
    group: int


@dataclass
class JointBatch:
    """Prompts of an evaluation, and after `rollouts` their rewritings and images.

    texts   the rewriting of each sample
    images  the batch of those rewritings
    """

    owner: "RewrittenPolicy"
    prompts: Any  # of the language model, encoded
    meta: Sequence[Mapping[str, Any]]
    steps: int
    texts: list[str] = field(default_factory=list)
    images: MediaBatch | None = None

    @property
    def policy(self) -> Any:
        assert self.images is not None
        return self.images.policy

    @property
    def meter(self) -> Meter:
        """Evaluations of the image model."""
        return Meter() if self.images is None else self.images.meter

    def rollouts(
        self,
        plan: JointPlan,
        draws: Sequence[int],
        *,
        seed: int,
        iteration: int,
        sampling: Sampling[Rollout] = Sampling(),
    ) -> tuple[Rollout, ...]:
        """Sample texts, then an image for each. `prompt` of the result are indices into `draws`."""
        keyed = {"seed": seed, "iteration": iteration}
        (written,) = self.prompts.rollouts(plan.text, draws, **keyed)
        self.texts = [text.strip() for text in self.prompts.media(written)]
        meta = [self.meta[i] for i in written.prompt.tolist()]
        self.images = open_texts(self.owner.image, self.texts, meta, self.steps)
        ids = [draw * plan.group + i for draw in draws for i in range(plan.group)]
        rollouts = self.images.rollouts(plan.image, ids, **keyed, sampling=sampling)
        return tuple(
            replace(rollout, prompt=written.prompt, draws=tuple(draws)) for rollout in rollouts
        )

    def media(self, rollout: Rollout) -> Tensor:
        assert self.images is not None, "`rollouts` writes the prompts"
        return self.images.decode(rollout.x0, torch.arange(len(rollout.x0)))

    def statistics(self, rollout: Rollout, media: Tensor) -> Statistics:
        assert self.images is not None, "`rollouts` writes the prompts"
        return self.images.statistics(rollout, media)


@dataclass(frozen=True)
class RewrittenPolicy:
    """The two models of a joint run, for evaluations and commands.

    length  maximum number of tokens of a rewriting
    learns  whether the language model and the image model were trained
    """

    text: Policy
    image: Policy
    template: str
    length: int
    learns: tuple[bool, bool] = (True, True)

    @property
    def sizes(self) -> CallSizes:
        return self.image.sizes

    def open(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]], steps: int
    ) -> JointBatch:
        texts = self.text.open(instructed(self.template, prompts), meta, self.length)
        return JointBatch(self, texts, meta, steps)

    def plain(self, group: int) -> JointPlan:
        return JointPlan(self.text.plain(group), self.image.plain(1), group)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The trained parameters of both, with their names in checkpoints."""
        text = self.text.trainable() if self.learns[0] else {}
        image = self.image.trainable() if self.learns[1] else {}
        return {f"{REWRITER}.{name}": p for name, p in text.items()} | image

    def load_weights(self, folder: Path) -> None:
        """Load weights that a joint run exported."""
        if self.learns[0]:
            self.text.load_weights(folder / REWRITER)
        if self.learns[1]:
            self.image.load_weights(folder)
