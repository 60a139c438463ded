"""Texts of several turns: an environment answers the model, and the model continues.

The environment's replies become tokens of the completion that the model did not sample. Without an
environment a completion has one turn. Each turn is a decision, taken in a state that has an id. t
tokens of a completion.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from samplers.noise import key_hash
from samplers.untyped import integers


class EnvironmentReply(NamedTuple):
    """The tokens of a reply, the id of the next state, and the reward of the turn that it answers
    (None: no reward). Without tokens the reply ends the completion."""

    ids: Sequence[int]
    state: int
    reward: float | None = None


@runtime_checkable
class Environment(Protocol):
    """Replies to the model after every turn except the last."""

    @property
    def turns(self) -> int:
        """Maximum number of turns of the model."""
        ...

    def start(self, prompt: int) -> int:
        """Id of the state before the first turn of the context `prompt`."""
        ...

    def __call__(self, prompt: int, said: Sequence[Sequence[int]]) -> EnvironmentReply | None:
        """The reply to the model's turns `said` on the context `prompt`, each with its stop token.
        None ends the completion."""
        ...


def state_id(name: str) -> int:
    """Hash of a state's name, from 0 to 2^63 - 1, the same in every process and run."""
    return key_hash("state", name) >> 1


def own_turns(
    ids: Int[Tensor, " t"], from_environment: Bool[Tensor, " t"], end: int
) -> list[list[int]]:
    """Mask of the model's own tokens among the first `end`, without the environment's replies."""
    pairs = zip(integers(ids[:end]), integers(from_environment[:end]), strict=True)
    turns = groupby(pairs, lambda pair: pair[1])
    return [[token for token, _ in turn] for is_reply, turn in turns if not is_reply]


def packed(
    replies: Sequence[Sequence[int]],
) -> tuple[Int[Tensor, "m u"], Int[Tensor, " m"]]:
    """Replies padded with zeros to the longest one, and their lengths."""
    width = max(map(len, replies))
    ids = [[*reply, *[0] * (width - len(reply))] for reply in replies]
    lengths = [len(reply) for reply in replies]
    return torch.tensor(ids), torch.tensor(lengths)
