"""Steps of completions, and gains of the answer's probability by turns or steps.

A completion's text is cut behind each separator, and each of its steps is a decision point, as a
turn is in a run with an environment. n samples, t tokens, k decision points.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.credit.process import Information
from flowrl.errors import UserError
from flowrl.likelihoods.rows import TokenRows
from flowrl.likelihoods.token import TokenPolicy
from rewards.perception.strings import step_ends
from rewards.types import cell
from samplers.completions import StepPoints, TextRollout, TurnPoints
from samplers.untyped import integer_rows, integers


@dataclass(frozen=True)
class Steps:
    """Cuts completions into at most `most` steps; the last one has the rest."""

    separator: str
    most: int
    tokenizer: Any

    def divide(self, rollout: TextRollout) -> TextRollout:
        """Mark where steps begin. A token that ends a separator belongs to the step before it."""
        begins = torch.zeros_like(rollout.ids, dtype=torch.bool)
        for row, (ids, end) in enumerate(
            zip(integer_rows(rollout.ids), integers(rollout.ends), strict=True)
        ):
            begins[row, self._begins(ids[:end])] = True
        plan = replace(rollout.plan, turns=self.most)
        return replace(rollout, plan=plan, points=StepPoints(begins))

    def _begins(self, ids: Sequence[int]) -> list[int]:
        """First tokens of all steps but the first."""
        text = self.decoded(ids)
        ends = step_ends(text, self.separator)[:-1]
        if not ends:
            return []
        length = self._lengths(ids, text)
        positions = [bisect_left(range(len(ids) + 1), end, key=length) for end in ends]
        inside = dict.fromkeys(position for position in positions if 0 < position < len(ids))
        return list(inside)[: self.most - 1]

    def _lengths(self, ids: Sequence[int], text: str) -> Callable[[int], int]:
        """Number of characters of the first tokens, as a function of their number."""
        pieces = self.tokenizer.batch_decode(
            [[token] for token in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if "".join(pieces) == text:  # else letters of several tokens, or spaces between words
            lengths = list(accumulate((len(piece) for piece in pieces), initial=0))
            return lambda count: lengths[count]
        return lambda count: len(self.decoded(ids[:count]))

    def decoded(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def point_ends(rollout: TextRollout) -> Int[Tensor, "n k"]:
    """Number of tokens up to the end of each turn or step, without a reply; 0 where a sample has
    none."""
    ends = torch.zeros(len(rollout.ids), rollout.plan.turns, dtype=torch.long)
    assert isinstance(rollout.points, TurnPoints | StepPoints)
    row, position = rollout.points.begins.nonzero(as_tuple=True)
    ends[row, rollout.point[row, position] - 1] = position
    return ends.scatter(1, rollout.last[:, None], rollout.ends[:, None])


def beginnings(
    rollout: TextRollout, media: Sequence[str], decoded: Callable[[Sequence[int]], str]
) -> list[list[str]]:
    """The text of each sample up to the end of each of its turns or steps; the last is all of it.
    `decoded`: the text of tokens up to such an end."""
    rows = []
    points = zip(integer_rows(rollout.ids), point_ends(rollout).tolist(), media, strict=True)
    for (ids, ends, whole), last in zip(points, integers(rollout.last), strict=True):
        rows.append([*(decoded(ids[:end]) for end in ends[:last]), whole])
    return rows


@torch.no_grad()
def information_gains(
    rollout: TextRollout,
    asked: Information,
    meta: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    policy: TokenPolicy,
    rows_per_call: int,
) -> Float[Tensor, "n k"]:
    """Gains of the right answer's probability by each turn or step but the last: IGPO,
    arXiv:2510.14967.

        gain_k = p(answer | h_k) - p(answer | h_(k-1)),  p = exp(mean of log p(token))

    h_k is the prompt and all up to the turn's end, with the reply; then come `asked.before` and the
    answer. NaN at the last turn. `meta`: the samples' rows of the prompt file.
    """
    last = rollout.last
    before = _tokens(asked.before, tokenizer)
    answers = [_tokens(_answer(row, asked.column), tokenizer) for row in meta]
    rows = [
        ([*ids[:end], *before], answer, prompt)
        for ids, ends, count, answer, prompt in zip(
            integer_rows(rollout.ids), _histories(rollout).tolist(), integers(last), answers,
            integers(rollout.prompt), strict=True,
        )
        for end in ends[: count + 1]
    ]  # fmt: skip
    probabilities = _probabilities(rows, policy, rows_per_call)
    values = torch.full((len(rollout.ids), rollout.plan.turns), torch.nan, dtype=torch.float64)
    values[rollout.exists] = probabilities
    gains = torch.full_like(values, torch.nan)
    gains[:, :-1] = values[:, 1:] - values[:, :-1]
    return gains


def _histories(rollout: TextRollout) -> Int[Tensor, "n k"]:
    """Number of tokens before each turn or step, with the replies before it."""
    histories = torch.zeros(len(rollout.ids), rollout.plan.turns, dtype=torch.long)
    written = rollout.written
    positions = torch.arange(written.shape[1]).expand_as(written)
    for k in range(1, rollout.plan.turns):  # the first own token of the turn
        of_turn = written & (rollout.point == k)
        histories[:, k] = positions.masked_fill(~of_turn, written.shape[1]).amin(1)
    return histories


def _answer(row: Mapping[str, Any], column: str) -> str:
    value = cell(row, column)
    if value is None or not str(value).strip():
        raise UserError(
            f"recipe.answer: a prompt has no answer in the column {column!r} of its file, whose "
            "probability turns are rewarded for"
        )
    return str(value)


def _tokens(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids) if text else []


def _probabilities(
    rows: Sequence[tuple[list[int], list[int], int]], policy: TokenPolicy, rows_per_call: int
) -> Float[Tensor, " m"]:
    """exp(mean log-probability of the answer's tokens) for (history, answer, prompt)."""
    probabilities: list[Tensor] = []
    for start in range(0, len(rows), rows_per_call):
        part = rows[start : start + rows_per_call]
        width = max(len(history) + len(answer) for history, answer, _ in part)
        ids = torch.zeros(len(part), width, dtype=torch.long)
        context = torch.zeros(len(part), width, dtype=torch.bool)
        for row, (history, answer, _) in enumerate(part):
            tokens = [*history, *answer]
            ids[row, : len(tokens)], context[row, : len(history)] = torch.tensor(tokens), True
        lengths = torch.tensor([len(answer) for _, answer, _ in part])
        asked = TokenRows(
            prompt=torch.tensor([prompt for *_, prompt in part]),
            advantage=torch.zeros(len(part), width),
            mask=_own(context, lengths),
            old=None,
            ids=ids,
            lengths=lengths,
            temperature=1.0,
            kept=None,
            from_environment=context,
        )
        logp = policy(asked, False).logp.cpu().double()
        probabilities.append((logp.sum(1) / lengths).exp())
    return torch.cat(probabilities)


def _own(context: Bool[Tensor, "b t"], lengths: Int[Tensor, " b"]) -> Bool[Tensor, "b t"]:
    """Mask of the answer's tokens, behind the history's."""
    first = context.sum(1, keepdim=True)
    positions = torch.arange(context.shape[1])
    return (positions >= first) & (positions < first + lengths[:, None])
