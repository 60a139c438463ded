"""Generate completions for a text plan, with a mask of the tokens that the model wrote.

n leaves of all draws, m rows of one request, t tokens, u new tokens, v tokens of a vocabulary. All
tensors are on the CPU: a sampler brings its tokens there once, and nothing here waits for a GPU.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from samplers.completions import (
    DecisionPoints,
    ForkPoints,
    SegmentPoints,
    TextPlan,
    TextRollout,
    TurnPoints,
)
from samplers.dialogue import Environment, EnvironmentReply, own_turns, packed
from samplers.forks import Grown, by_draw, choose, grow
from samplers.noise import row_keys
from samplers.token_support import TokenSupport, joined_column
from samplers.untyped import integer_rows, integers


@dataclass(frozen=True)
class TokenRequest:
    """Contexts to continue, each with its own noise.

    contexts  tokens of the prompt and of the completion so far
    noise     a 64-bit key per row: rows of the same key and context get the same tokens
    first     start of the noise counter: two requests with one key must not overlap
    room      maximum number of new tokens per row
    spread    whether to return entropies as well
    begun     tokens at the end of each context that a stop text may reach back into; None: 0
    prompt    index of each context's prompt among all prompts of the writer; None: unknown
    """

    contexts: Sequence[Sequence[int]]
    noise: Int[Tensor, " m"]
    room: Int[Tensor, " m"]
    temperature: float
    top_p: float
    first: int = 0
    spread: bool = False
    top_k: int = 0
    min_p: float = 0.0
    begun: Int[Tensor, " m"] | None = None
    prompt: Int[Tensor, " m"] | None = None

    def take(self, rows: Int[Tensor, " r"]) -> "TokenRequest":
        contexts = [self.contexts[i] for i in integers(rows)]
        begun = None if self.begun is None else self.begun[rows]
        prompt = None if self.prompt is None else self.prompt[rows]
        noise, room = self.noise[rows], self.room[rows]
        return replace(self, contexts=contexts, noise=noise, room=room, begun=begun, prompt=prompt)


class WrittenTokens(NamedTuple):
    """New tokens. Entries beyond a row's `lengths` are never read.

    logp     log-probability of each token under the distribution it was sampled from
    stopped  whether its last token ends a completion, itself or as the end of a stop text
    kept     the tokens that top-p, top-k and min-p left; None where they left all
    spread   entropies of the distributions that tokens were sampled from, in nats; None unless
             requested
    """

    ids: Int[Tensor, "m u"]
    logp: Float[Tensor, "m u"]
    lengths: Int[Tensor, " m"]
    stopped: Bool[Tensor, " m"]
    kept: TokenSupport | None = None
    spread: Float[Tensor, "m u"] | None = None


@runtime_checkable
class Sampler(Protocol):
    """Draws tokens: the model itself, or a server that runs it.

    exact      with the current weights
    elsewhere  by another engine, so that its log-probabilities are not quite the trainer's
    """

    @property
    def exact(self) -> bool: ...

    @property
    def elsewhere(self) -> bool: ...

    def __call__(self, asked: TokenRequest) -> WrittenTokens: ...


class Draft(WrittenTokens):
    """Unfinished completions, one per node [m t]. Entries that are not yet written are 0."""

    @classmethod
    def blank(cls, rows: int, length: int) -> "Draft":
        return cls(
            torch.zeros(rows, length, dtype=torch.int64),
            torch.zeros(rows, length),
            torch.zeros(rows, dtype=torch.int64),
            torch.zeros(rows, dtype=torch.bool),
        )

    def take(self, rows: Int[Tensor, " r"]) -> "Draft":
        return Draft(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]

    def behind(self, more: "Draft", draws: int) -> "Draft":
        """Append completions, made from these, to each draw's completions."""
        support = None if self.kept is None else self.kept.within(more.kept)

        def beside(pair: Sequence[Tensor]) -> Tensor:
            return torch.cat([by_draw(part, draws) for part in pair], 1).flatten(0, 1)

        return Draft(
            *(
                joined_column(pair, beside)
                for pair in zip(self._replace(kept=support), more, strict=True)
            )
        )  # type: ignore[arg-type]

    def cut(self, lengths: Int[Tensor, " m"]) -> "Draft":
        """Truncate each completion to its first tokens and mark it unfinished."""
        gone = torch.arange(self.ids.shape[1]) >= lengths[:, None]
        return Draft(
            self.ids.masked_fill(gone, 0),
            self.logp.masked_fill(gone, 0.0),
            lengths,
            torch.zeros_like(self.stopped),
            None if self.kept is None else self.kept.mapped(lambda part: part.masked_fill(gone, 0)),
            None if self.spread is None else self.spread.masked_fill(gone, 0.0),
        )

    def extended(self, rows: Int[Tensor, " r"], part: WrittenTokens) -> "Draft":
        """Append new tokens to these completions."""
        written = torch.arange(part.ids.shape[1]) < part.lengths[:, None]
        row, at = written.nonzero(as_tuple=True)
        cells = rows[row], self.lengths[rows][row] + at

        def put(whole: Tensor | None, new: Tensor | None) -> Tensor | None:
            if new is None:
                return whole
            if whole is None:
                whole = new.new_zeros(*self.ids.shape, *new.shape[2:])
            whole = whole.to(new.dtype)  # a copy where the sampler is more precise
            return whole.index_put(cells, new[row, at])

        ids, logp = put(self.ids, part.ids), put(self.logp, part.logp)
        assert ids is not None and logp is not None
        lengths = self.lengths.index_add(0, rows, part.lengths)
        stopped = self.stopped.index_put((rows,), part.stopped)
        support, spread = self.kept, put(self.spread, part.spread)
        if part.kept is not None:
            support = (support or TokenSupport.none(ids)).put(cells, part.kept[row, at])
        return Draft(ids, logp, lengths, stopped, support, spread)


class Answered(NamedTuple):
    """A draft with an environment's replies to one turn.

    from_environment  tokens of these replies
    states            of the environment, after them; 0 for none
    rewards           of the turns that they answer; NaN for none
    """

    draft: Draft
    from_environment: Bool[Tensor, "m t"]
    states: Int[Tensor, " m"]
    rewards: Float[Tensor, " m"]


@dataclass(frozen=True)
class Writer:
    """`contexts` are the draws' prompts. Noise is keyed by (seed, iteration, draw, plan's index,
    segment or round of forks, node). The `environment` answers completions that have stopped,
    `at_once` of them side by side, in threads."""

    sampler: Sampler
    contexts: Sequence[Sequence[int]]
    draws: tuple[int, ...]
    seed: int
    iteration: int
    environment: Environment | None = None
    at_once: int = 1

    @torch.no_grad()
    def write(self, plan: TextPlan, index: int = 0) -> TextRollout:
        if self.environment is not None:
            plan = replace(plan, turns=self.environment.turns)
        draft, nodes = Draft.blank(len(self.draws), plan.length), 1
        rows = torch.arange(len(self.draws))
        for k, count in enumerate(plan.nodes):
            first, end = plan.segments[k]
            draft = draft.take(torch.arange(len(draft.ids)).repeat_interleave(count // nodes))
            nodes = count
            noise = self._noise(index, k, nodes)
            live = (~draft.stopped).nonzero()[:, 0]
            draft = self._extend(draft, live, noise[live], plan, (first, end))
        points: DecisionPoints = SegmentPoints()
        lengths = draft.lengths
        if plan.forking is not None:
            draft, points = self._fork(draft, plan, index)
            lengths = draft.lengths
        if self.environment is not None:
            draft, points = self._converse(draft, plan, index, self.environment)
            lengths = draft.lengths - points.from_environment.sum(1)
        return TextRollout(
            plan=plan,
            ids=draft.ids,
            logp=draft.logp,
            lengths=lengths,
            stopped=draft.stopped,
            kept=draft.kept,
            prompt=rows.repeat_interleave(plan.group),
            draws=self.draws,
            seed=self.seed,
            iteration=self.iteration,
            index=index,
            points=points,
            replayed=torch.zeros_like(draft.stopped),
            elsewhere=self.sampler.elsewhere,
        )

    def _noise(self, index: int, part: int, nodes: int) -> Int[Tensor, " m"]:
        key = self.seed, self.iteration
        keys = [
            (*key, draw, "token", index, part, node) for draw in self.draws for node in range(nodes)
        ]
        return row_keys(keys)

    def _extend(
        self, draft: Draft, rows: Tensor, noise: Tensor, plan: TextPlan, span: tuple[int, int]
    ) -> Draft:
        """Extend unfinished rows of a draft up to the end of the span. The noise counter starts at
        the span's first number."""
        if len(rows) == 0:
            return draft
        group = len(draft.ids) // len(self.draws)
        ids, lengths = integer_rows(draft.ids[rows]), integers(draft.lengths[rows])
        contexts = [
            [*self.contexts[row // group], *tokens[:length]]
            for row, tokens, length in zip(integers(rows), ids, lengths, strict=True)
        ]
        room = span[1] - draft.lengths[rows]
        forks = plan.forking is not None and plan.forking.by == "entropy"
        request = TokenRequest(
            contexts=contexts,
            noise=noise,
            room=room,
            temperature=plan.temperature,
            top_p=plan.top_p,
            first=span[0],
            spread=forks,
            top_k=plan.top_k,
            min_p=plan.min_p,
            begun=None if self.environment is not None else draft.lengths[rows],
            prompt=rows // group,
        )
        greedy = (rows % group == group - 1) & plan.greedy
        for part, temperature in ((~greedy, plan.temperature), (greedy, 0.0)):
            if len(at := part.nonzero()[:, 0]):
                asked = replace(request.take(at), temperature=temperature)
                draft = draft.extended(rows[at], self.sampler(asked))
        return draft

    def _converse(
        self, draft: Draft, plan: TextPlan, index: int, environment: Environment
    ) -> tuple[Draft, TurnPoints]:
        """Take the further turns of stopped completions. Turn k's noise starts at k times the
        plan's length, after the noise of earlier turns.
        """
        assert plan.forking is None and not plan.cuts, "a tree cannot have several turns"
        from_environment = torch.zeros_like(draft.ids, dtype=torch.bool)
        noise, live = self._noise(index, 0, plan.group), draft.stopped
        states = draft.ids.new_zeros(len(draft.ids), plan.turns)
        rewards = torch.full(states.shape, torch.nan, dtype=torch.float64)
        starts = [environment.start(prompt) for prompt in range(len(self.draws))]
        states[:, 0] = draft.ids.new_tensor(starts).repeat_interleave(plan.group)
        for turn in range(1, plan.turns):
            answered = self._answered(draft, from_environment, live, environment)
            draft, more = answered.draft, answered.from_environment
            states[:, turn], rewards[:, turn - 1] = answered.states, answered.rewards
            from_environment = from_environment | more
            live = more.any(1)
            rows = live.nonzero()[:, 0]
            draft = self._extend(draft, rows, noise[rows], plan, (turn * plan.length, plan.length))
            live = live & draft.stopped
        return draft, TurnPoints(from_environment, states, rewards)

    def _answered(
        self,
        draft: Draft,
        from_environment: Bool[Tensor, "m t"],
        live: Bool[Tensor, " m"],
        environment: Environment,
    ) -> Answered:
        """Append the environment's replies to live rows: the states are those that follow, the
        rewards of the turns that end here. A reply that leaves no room for a token of the model is
        dropped, and its completion is cut off.
        """
        group, before = len(draft.ids) // len(self.draws), draft.lengths
        replies, cut = dict[int, EnvironmentReply](), torch.zeros_like(live)
        rewards = torch.full((len(live),), torch.nan, dtype=torch.float64)
        rows = integers(live.nonzero()[:, 0])
        turns = [own_turns(draft.ids[i], from_environment[i], int(before[i])) for i in rows]
        prompts = [row // group for row in rows]
        for row, reply in zip(rows, self._replies(environment, prompts, turns), strict=True):
            end = int(before[row])
            if reply is not None and reply.reward is not None:
                rewards[row] = reply.reward
            if reply is None or not reply.ids:
                continue
            if end + len(reply.ids) < draft.ids.shape[1]:
                replies[row] = reply
            else:
                cut[row] = True
        draft = draft._replace(stopped=draft.stopped & ~cut)
        states = torch.zeros_like(before)
        if replies:
            rows = torch.tensor(list(replies))
            ids, lengths = packed([reply.ids for reply in replies.values()])
            blank = draft.logp.new_zeros(ids.shape)
            part = WrittenTokens(ids, blank, lengths, torch.zeros_like(lengths, dtype=torch.bool))
            draft = draft.extended(rows, part)
            states[rows] = states.new_tensor([reply.state for reply in replies.values()])
        positions = torch.arange(draft.ids.shape[1])
        from_environment = (positions >= before[:, None]) & (positions < draft.lengths[:, None])
        return Answered(draft, from_environment, states, rewards)

    def _replies(
        self,
        environment: Environment,
        prompts: Sequence[int],
        turns: Sequence[Sequence[Sequence[int]]],
    ) -> list[EnvironmentReply | None]:
        """Replies to several rows, in their order."""
        if self.at_once == 1:
            return list(map(environment, prompts, turns))
        with ThreadPoolExecutor(self.at_once) as threads:
            return list(threads.map(environment, prompts, turns))

    def _fork(self, draft: Draft, plan: TextPlan, index: int) -> tuple[Draft, ForkPoints]:
        rule, draws = plan.forking, len(self.draws)
        assert rule is not None
        grown = Grown.roots(draws, plan.nodes[0], plan.length)
        for number in range(rule.rounds):
            score = -draft.logp if rule.by == "surprise" else draft.spread
            assert score is not None
            written = torch.arange(plan.length) < draft.lengths[:, None]
            leaf, position = choose(grown, by_draw(score, draws), by_draw(written, draws), rule)
            grown = grow(grown, leaf, position, rule.branch)
            leaf, position = (part.repeat_interleave(rule.branch, 1) for part in (leaf, position))
            start = torch.arange(draws)[:, None] * (len(draft.ids) // draws)
            branches = draft.take((start + leaf).flatten()).cut(position.flatten())
            rows = torch.arange(len(branches.ids))
            noise = self._noise(index, number + 1, leaf.shape[1])
            branches = self._extend(branches, rows, noise, plan, (0, plan.length))
            draft = draft.behind(branches, draws)
        return draft, ForkPoints(grown.common.flatten(0, 1))
