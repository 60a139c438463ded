"""Given samples in a run: checked at the start, encoded once, and drawn by epochs."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.functional import interpolate

from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.rows import Rows, take
from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.diffusers.media_encoder import MediaEncoder
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.language.batch import TextBatch
from flowrl.models.language.given_texts import check_length, completion_rows
from flowrl.models.language.turns import turn_template
from flowrl.prompts import Draws, PromptSet
from flowrl.prompts.row_sizes import unsized
from flowrl.session.given_file import (
    GivenFile,
    GivenItem,
    read_sample,
    wrong_size,
)
from flowrl.session.learner import Learner
from flowrl.session.record import Terminal
from flowrl.session.row_answers import Asker, KeptAnswers, RowAnswers, WinnableDraws
from flowrl.settings import LanguageSettings
from flowrl.settings.sections.given import GivenSettings
from flowrl.table import Column
from rewards.checks.winnable import Winnable
from samplers import Plan, Rollout, steps_of

GIVEN_INDEX = -1  # in place of the plan's index, in the keys of given samples' noise
KEPT_BYTES = 2**31  # of encoded samples, on the CPU; others are encoded again
ROW = "row"  # column with the number of a given prompt
ROUND_TRIPS = 4  # given samples that are decoded again at the start


@dataclass
class KeptLatents:
    """The encoder of a run's pipeline, and its cached latents."""

    encoder: MediaEncoder | None = None  # once it is needed
    latents: OrderedDict[int, Tensor] = field(default_factory=OrderedDict[int, Tensor])

    def encode(self, batch: MediaBatch) -> MediaEncoder:
        if self.encoder is None:
            self.encoder = MediaEncoder.of(batch)
        return self.encoder

    def keep(self, item: int, latents: Tensor) -> None:
        """Cache the newest latents, up to KEPT_BYTES."""
        self.latents[item] = latents
        if len(self.latents) * latents.numel() * latents.element_size() > KEPT_BYTES:
            self.latents.popitem(last=False)


@dataclass(frozen=True)
class GivenRows:
    """This process's rows of an iteration. A row's `prompt` is an index into `draws`, the ids of
    the drawn prompts."""

    rows: tuple[Rows, ...]
    draws: tuple[int, ...]
    policy: Any
    count: int  # given prompts of all processes


@dataclass(frozen=True)
class GivenSamples:
    """Given samples of a run, with their encoded latents."""

    file: GivenFile
    settings: GivenSettings
    learner: Learner
    kept: KeptLatents = field(default_factory=KeptLatents)
    winnable_draws: WinnableDraws | None = None  # of images and videos

    @classmethod
    def open(cls, learner: Learner) -> "GivenSamples | None":
        """Read the file of a run; None without one."""
        if learner.run.given is None:
            return None
        samples = cls(GivenFile.read(learner.run), learner.run.given, learner)
        if isinstance(learner.run.model, LanguageSettings):
            return samples
        numbered = tuple({ROW: row} for row in range(len(samples.file.prompts)))
        answers = RowAnswers(
            PromptSet(samples.file.prompts.texts, numbered),
            [Asker("given", ReadableRows(samples))],
            KeptAnswers([]),
        )
        state = PartialState()
        warn = Terminal(state.is_main_process).warn
        winnable_draws = WinnableDraws(answers, learner.run.train.seed, state, warn, "given.file")
        return replace(samples, winnable_draws=winnable_draws)

    def draws(self, iteration: int) -> Draws:
        """Draw the given prompts of an iteration; an epoch contains each once, in a new order.
        Collective."""
        count = self.settings.count(self.learner.run.prompts.per_iteration)
        drawn = self.file.prompts.draw(iteration, count, self.learner.run.train.seed)
        if self.winnable_draws is None:
            return drawn
        if self.kept.encoder is None:  # it knows the size that samples are read for
            with self.learner.parallel.together():
                self.kept.encode(self.open_batch([0]))
        return self.winnable_draws.winnable(iteration, drawn)

    def open_batch(self, rows: Sequence[int]) -> Any:
        texts, meta = self.file.prompts.take(rows)
        meta = [unsized(row) for row in meta]  # given samples have the run's size
        return self.learner.policy.open(texts, meta, self.learner.algorithm.steps)

    def rows(self, iteration: int) -> GivenRows:
        """Rows of an iteration's given samples. A process without a share gets masked rows of the
        first sample."""
        draws, learner = self.draws(iteration), self.learner
        mine, counts = learner.parallel.share(len(draws.ids))
        ids, rows = (part[mine.start : mine.stop] for part in (draws.ids, draws.rows))
        with learner.parallel.together():
            batch = self.open_batch(rows)
            columns = (
                [self._of_texts(batch, rows)]
                if isinstance(batch, TextBatch)
                else self._of_media(batch, rows, ids, iteration)
            )
        if not counts:
            columns = [take(column, torch.arange(0)) for column in columns]
        return GivenRows(tuple(columns), ids, batch.policy, len(draws.ids))

    def _places(self, rows: Sequence[int]) -> tuple[list[int], Tensor, Tensor]:
        """The samples of some prompts, the index of each sample's prompt, and its advantage."""
        group = self.file.group
        items = [item for row in rows for item in self.file.rows[row]]
        prompt = torch.arange(len(rows)).repeat_interleave(group)
        weights = [1.0, -1.0] if group == 2 else [self.settings.weight]
        return items, prompt, torch.tensor(weights * len(rows))

    def _of_texts(self, batch: TextBatch, rows: Sequence[int]) -> Rows:
        items, prompt, advantage = self._places(rows)
        texts = [str(self.file.items[item].sample) for item in items]
        return completion_rows(batch, texts, prompt, advantage, paired=self.file.group == 2)

    def _of_media(
        self, batch: MediaBatch, rows: Sequence[int], ids: tuple[int, ...], iteration: int
    ) -> list[Rows]:
        algorithm, run = self.learner.algorithm, self.learner.run
        items, prompt, advantage = self._places(rows)
        x0 = torch.stack([self.encoded(batch, item) for item in items])
        sigmas = batch.owner.schedule(algorithm.steps).sigmas
        rollout = Rollout(
            plan=Plan(steps_of(sigmas), roots=self.file.group),
            x0=x0,
            prompt=prompt.to(x0.device),
            draws=tuple(ids),
            edges=(),
            seed=run.train.seed,
            iteration=iteration,
            index=GIVEN_INDEX,
        )
        mask = torch.ones(len(items), 1, dtype=torch.bool)
        assert isinstance(algorithm.likelihood, Matching)
        return [*algorithm.likelihood.rows(rollout, advantage[:, None], mask)]

    def encoded(self, batch: MediaBatch, item: int) -> Tensor:
        """Latents of a sample, encoded when it is first drawn."""
        latent = self.kept.latents.get(item)
        if latent is None:
            encode = self.kept.encode(batch)
            latent = encode(self.media(self.file.items[item], encode)).cpu()
            self.kept.keep(item, latent)
        return latent.to(batch.owner.device)

    def media(self, item: GivenItem, encode: MediaEncoder) -> Tensor:
        """A given sample at the run's size and number of frames. UserError if it does not fit."""
        want = encode.media
        media = read_sample(item, want[0] if encode.video else 1)
        if media.ndim != len(want) or (encode.video and len(media) < want[0]):
            kind = f"a video of {want[0]} frames" if encode.video else "an image"
            have = f"{len(media)} frames" if media.ndim == 4 else "an image"
            raise UserError(f"{item.place}: the run generates {kind}, but this sample is {have}")
        if media.shape[-2:] == want[-2:]:
            return media
        if self.settings.fit == "exact":
            raise UserError(wrong_size(item, media.shape[-2:], want[-2:]))
        return cropped(media, want[-2], want[-1])

    def proofs(self) -> list[str]:
        """Check the given samples with the model; returns a sentence per finding. UserError if the
        pipeline cannot encode them or a completion is too long."""
        shown = [*range(min(ROUND_TRIPS, len(self.file.rows)))]
        said = [self.file.described(self.settings, self.learner.run.prompts.per_iteration)]
        if not isinstance(self.learner.policy, PipelinePolicy):
            batch = self.open_batch(shown)
            for item in self.file.items if self.settings.fit == "exact" else ():
                check_length(batch, str(item.sample), batch.steps, item.place)
            otherwise = turn_template(batch.tokenizer, batch.template).given_otherwise()
            return said if otherwise is None else [*said, otherwise]
        batch = self.open_batch(shown[:1])
        encode = self.kept.encode(batch)
        items = list(dict.fromkeys(item for row in shown for item in self.file.rows[row]))
        loss: list[float] = []
        for item in items[:ROUND_TRIPS]:
            media = self.media(self.file.items[item], encode)
            loss.append(encode.round_trip(batch, media, self.encoded(batch, item)))
        return [*said, f"given samples, encoded and decoded again: {min(loss):.1f} dB or better"]


GIVEN: Column[GivenSamples] = Column("given samples", "given", "whole")
"""The given samples of a run, which its session holds."""


@dataclass(frozen=True)
class ReadableRows:
    """Whether the given samples of rows can be read and fit, as `rewards.checks.winnable` asks: a
    file that shows its damage only when it is decoded must not end a run."""

    samples: GivenSamples

    def winnable(
        self,
        prompts: Sequence[str],  # noqa: ARG002
        meta: Sequence[Mapping[str, Any]],
    ) -> list[Winnable]:
        return [self._read(self.samples.file.rows[row[ROW]]) for row in meta]

    def _read(self, items: Sequence[int]) -> Winnable:
        encode = self.samples.kept.encoder
        assert encode is not None, "the draws know it"
        for item in items:
            try:
                self.samples.media(self.samples.file.items[item], encode)
            except UserError as error:
                return Winnable("no", str(error))
        return Winnable("yes")


def cropped(media: Tensor, height: int, width: int) -> Tensor:
    """Scale an image or video [... 3 h w] until it covers the size, then crop its centre."""
    h, w = media.shape[-2:]
    scale = max(height / h, width / w)
    size = max(height, round(h * scale)), max(width, round(w * scale))
    frames = media if media.ndim == 4 else media[None]
    grown = interpolate(frames, size, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    cut = grown[..., top : top + height, left : left + width]
    return cut if media.ndim == 4 else cut[0]
