"""Success rates of prompts, measured during the run, and the drawing order based on them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from flowrl.prompts import uncertainty, weighted_draw

KEEP = 0.5  # of a prompt's evidence, from visit to visit: the last visits count most
START_EVIDENCE = 1 / (1 - KEEP)  # evidence that a constant stream of single samples leads to


@dataclass(frozen=True)
class Difficulty:
    """Selection of prompts by success rate, within `low`..`high`. `uncertain`: rates near 1/2 are
    drawn more often. A measurement expires `revisit` iterations after the prompt was last drawn."""

    low: float = 0.0
    high: float = 1.0
    revisit: int = 50
    uncertain: bool = False

    @property
    def indifferent(self) -> bool:
        """Whether all prompts are equally worth drawing."""
        return not self.uncertain and self.low <= 0 and self.high >= 1


@dataclass
class Rates:
    """Each prompt's success rate, evidence (samples, decayed by `KEEP` per draw) and last draw.

    m samples with a share s of successes update a rate p of evidence N by p <- p + m (s - p) / (N +
    m) with the decayed N. A prompt that was never drawn has the mean of the known rates, or 1/2.
    """

    known: dict[int, tuple[float, float, int]] = field(default_factory=dict)

    def rate(self, prompt: int) -> float:
        if prompt in self.known:
            return self.known[prompt][0]
        rates = [rate for rate, _, _ in self.known.values()]
        return sum(rates) / len(rates) if rates else 0.5

    def learn(
        self,
        prompts: Sequence[int],
        successes: Bool[Tensor, "d n"],
        scored: Bool[Tensor, "d n"],
        iteration: int,
    ) -> None:
        """Update the rates from n samples of each of d draws."""
        for prompt, won, seen in zip(prompts, successes, scored, strict=True):
            m = int(seen.sum())
            if m == 0:
                continue
            share = float((won & seen).sum()) / m
            rate, evidence, _ = self.known.get(prompt, (self.rate(prompt), START_EVIDENCE, 0))
            evidence_kept = KEEP * evidence
            self.known[prompt] = (
                rate + m * (share - rate) / (evidence_kept + m),
                evidence_kept + m,
                iteration,
            )

    def guess(self, prompt: int, how: Difficulty, iteration: int) -> float:
        """The assumed rate of each prompt: 1/2 if it was last drawn too long ago."""
        seen = self.known.get(prompt, (0.0, 0.0, iteration))[2]
        return 0.5 if iteration - seen >= how.revisit else self.rate(prompt)

    def inside(self, prompt: int, how: Difficulty, iteration: int) -> bool:
        if prompt not in self.known:
            return True
        rate, _, seen = self.known[prompt]
        return how.low <= rate <= how.high or iteration - seen >= how.revisit

    def order(
        self,
        how: Difficulty,
        iteration: int,
        weights: Tensor,
        key: Iterable[int | str],
    ) -> list[int]:
        """All prompts with a positive weight in drawing order: at random by weight, with prompts
        outside the range last."""
        if how.uncertain:
            guesses = [self.guess(i, how, iteration) for i in range(len(weights))]
            rates = torch.tensor(guesses, dtype=torch.float64)
            weights = weights * uncertainty(rates, torch.ones_like(rates))
        drawn = weighted_draw(weights, int((weights > 0).sum()), tuple(key))
        return sorted(drawn, key=lambda prompt: not self.inside(prompt, how, iteration))

    def state(self) -> dict[str, Any]:
        return {str(prompt): list(rate) for prompt, rate in self.known.items()}

    def restore(self, state: dict[str, Any]) -> None:
        self.known = {int(prompt): (p, n, int(seen)) for prompt, (p, n, seen) in state.items()}
