"""Compare a server's log-probabilities with the learner's at the start, and judge the difference.

Most tokens of a trained model are nearly certain under any weights, so a median is that of rounding
for a model ten steps away. The difference is taken over the other tokens, and held against the
learner's own noise: the same tokens in another batch shape, and in another precision. n tokens.
"""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowrl.likelihoods.rows import TokenRows, take
from flowrl.models.gap import Gap
from flowrl.models.language.token_scores import ScoringPolicy
from flowrl.models.precision import HALF
from flowrl.models.shards import directly, is_sharded
from samplers.completions import TextPlan, TextRollout
from samplers.generate import Sampler, Writer

COMPARED_TOKENS = 1000  # tokens of the comparison, at least
_PROMPTS, _ROOM, _ROUNDS, _SHAPE = (
    16,
    64,
    6,
    8,
)  # prompts, tokens of a completion, rounds, rows in a call
CERTAIN = math.log(0.99)  # a token that is likelier under both is nearly certain
NOISE_BOUND, QUANTIZED_BOUND = 10.0, 3.0  # times the noise
LEAST_NOISE = 1e-5  # nats: kernels differ by as much in float32
UNKNOWN_NOISE = 0.1  # nats, of a quantized learner, which cannot be rounded once more


def token_gap(first: Float[Tensor, " n"], other: Float[Tensor, " n"]) -> Gap:
    """The difference over tokens that are not nearly certain."""
    uncertain = (first < CERTAIN) | (other < CERTAIN)
    return Gap.of((first - other)[uncertain])


@dataclass(frozen=True)
class Comparison:
    """A server's tokens, and the learner's log-probabilities of them."""

    reader: ScoringPolicy
    rollouts: Sequence[TextRollout]

    @classmethod
    def drawn(
        cls, sampler: Sampler, reader: ScoringPolicy, steps: int, temperature: float
    ) -> "Comparison":
        """Draw at least COMPARED_TOKENS tokens, or as many as _ROUNDS rounds have, of prompts that
        are spread evenly over the reader's."""
        count = min(_PROMPTS, len(reader.contexts))
        spread = [i * len(reader.contexts) // count for i in range(count)]
        contexts = [reader.contexts[i] for i in spread]
        room, rollouts, tokens = min(_ROOM, steps), list[TextRollout](), 0
        for iteration in range(_ROUNDS):
            rows = sum(len(rollout.ids) for rollout in rollouts)
            length = tokens / rows if rows else room
            group = max(1, math.ceil((COMPARED_TOKENS - tokens) / max(length, 1) / count))
            writer = Writer(sampler, contexts, tuple(range(count)), 0, iteration)
            rollouts.append(writer.write(TextPlan(room, (group,), temperature=temperature)))
            tokens += int(rollouts[-1].written.sum())
            if tokens >= COMPARED_TOKENS:
                break
        return cls(replace(reader, contexts=contexts), rollouts)

    @property
    def count(self) -> int:
        return sum(int(rollout.written.sum()) for rollout in self.rollouts)

    @property
    def theirs(self) -> Float[Tensor, " n"]:
        return torch.cat([rollout.logp[rollout.written] for rollout in self.rollouts])

    @torch.no_grad()
    def ours(
        self, temperature: float, shape: int = _SHAPE, model: Any = None
    ) -> Float[Tensor, " n"]:
        """Log-probabilities under the learner, `shape` rows in a call, or under a copy of it."""
        reader = self.reader
        if model is not None:
            reader = replace(reader, model=model, calls=directly)
        parts = [
            reader(part).logp.cpu()[part.written.cpu()]
            for rollout in self.rollouts
            for part in _parts(rollout, temperature, shape)
        ]
        return torch.cat(parts)

    def noise(self, logp: Float[Tensor, " n"], temperature: float) -> tuple[Gap, str]:
        """The learner's own noise, and its sources: another batch shape, another precision."""
        model = self.reader.model
        gap, sources = Gap(LEAST_NOISE, LEAST_NOISE), ["another batch shape"]
        gap = gap.or_more(token_gap(logp, self.ours(temperature, shape=1)))
        if is_quantized(model):
            return gap.or_more(Gap(UNKNOWN_NOISE, UNKNOWN_NOISE)), "the quantized learner"
        dtype = torch.float32 if model.dtype in HALF else torch.bfloat16
        rounded = self.rounded(logp, temperature, lambda weight: weight.to(dtype))
        if rounded is not None:
            gap, sources = gap.or_more(rounded), [*sources, str(dtype).removeprefix("torch.")]
        return gap, " and ".join(sources)

    def rounded(
        self,
        logp: Float[Tensor, " n"],
        temperature: float,
        rounding: Callable[[Tensor], Tensor],
    ) -> Gap | None:
        """The difference from a copy of the learner with rounded weights. None for sharded weights,
        and where a GPU has no room for the copy."""
        model = self.reader.model
        if is_sharded(model):
            return None
        with suppress(torch.OutOfMemoryError):
            return token_gap(logp, self.ours(temperature, model=rounded_copy(model, rounding)))
        return None


def _parts(rollout: TextRollout, temperature: float, shape: int) -> Iterator[TokenRows]:
    blank = torch.zeros_like(rollout.logp)
    rows = TokenRows(
        prompt=rollout.prompt,
        advantage=blank,
        mask=rollout.written,
        old=None,
        ids=rollout.ids,
        lengths=rollout.lengths,
        temperature=temperature,
        kept=None,
    )
    for index in torch.arange(len(rollout.ids)).split(shape):
        yield take(rows, index)


def rounded_copy(model: Any, rounding: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a model whose weights are rounded one by one, so that no second copy in the model's
    own precision is ever held."""
    memo = {
        id(weight): nn.Parameter(rounding(weight.detach()), requires_grad=False)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, memo)


def is_quantized(model: Any) -> bool:
    return getattr(model, "hf_quantizer", None) is not None


def to_integers(bits: int, group: int | None = None) -> Callable[[Tensor], Tensor]:
    """Round matrices to symmetric integers, with a scale per row, or per `group` of inputs."""

    def rounding(weight: Tensor) -> Tensor:
        if weight.ndim < 2:
            return weight
        wide = weight.float()
        if group is not None and wide.shape[-1] % group == 0:
            wide = wide.unflatten(-1, (-1, group))
        scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / (2 ** (bits - 1) - 1)
        return ((wide / scale).round() * scale).view_as(weight).to(weight.dtype)

    return rounding


def to_float8(weight: Tensor) -> Tensor:
    """Round a matrix to float8 (e4m3), with a scale per row."""
    if weight.ndim < 2:
        return weight
    wide = weight.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448  # the largest number of e4m3
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


WEIGHT_ROUNDINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "fp8": to_float8,
    "int8": to_integers(8),
    "int4": to_integers(4, group=128),
}

KIND_WORDS = {
    "fp8": re.compile(r"fp8|float8|e4m3", re.IGNORECASE),
    "int8": re.compile(r"int8|w8a8|w8a16|8bit", re.IGNORECASE),
    "int4": re.compile(r"awq|gptq|int4|w4a16|4bit|fp4|nf4|q4_", re.IGNORECASE),
}  # of words in names of models


@dataclass(frozen=True)
class ServerGap:
    """The difference from a server, and its bound: `times` the learner's noise."""

    gap: Gap
    noise: Gap
    sources: str
    times: float
    tokens: int

    @property
    def same(self) -> bool:
        return self.gap.within(self.noise, self.times)

    def __str__(self) -> str:
        return (
            f"{self.gap}, over {self.tokens} tokens; the model's own noise is {self.noise} "
            f"({self.sources})"
        )


def server_gap(drawn: Comparison, temperature: float, kind: str | None) -> ServerGap:
    """Compare a server with the learner. `kind`: how the server's weights are quantized, for which
    the bound is the learner's difference from itself with weights rounded so."""
    logp = drawn.ours(temperature)
    gap = token_gap(logp, drawn.theirs)
    noise, sources = drawn.noise(logp, temperature)
    rounded = None if kind is None else drawn.rounded(logp, temperature, WEIGHT_ROUNDINGS[kind])
    if rounded is None:
        return ServerGap(gap, noise, sources, NOISE_BOUND, drawn.count)
    return ServerGap(
        gap, noise.or_more(rounded), f"weights in {kind}", QUANTIZED_BOUND, drawn.count
    )


def quantization_in(name: str) -> str | None:
    """Read how weights are quantized from the name of a model, such as Qwen2.5-7B-Instruct-AWQ."""
    return next((kind for kind, words in KIND_WORDS.items() if words.search(name)), None)
