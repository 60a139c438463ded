"""A reward or judge in another process or on another machine: `flowrl serve-reward NAME`.

Groups are sent whole, so that groupwise rewards can be served too. Samples that the server could
not score, and samples of a request that failed after all retries, are unscored (NaN) and counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from rewards.rights import Address, Variable, WrittenFile
from rewards.serving import wire
from rewards.serving.bounded import EXAMPLE_BYTES
from rewards.serving.client import Client, TokenRefused
from rewards.serving.codec import ImageFormat, VideoFormat
from rewards.serving.requests import Ask, Failure, Malformed, Patience
from rewards.types import Inline, Judge, Kind, OneOrMore, Positive, Reward, RewardScores, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image", "video", "text")


@dataclass(frozen=True)
class RemoteReward:
    """One score per sample from the server; NaN for samples without one. It abstains where the
    served reward does."""

    client: Client
    batch: int = 16
    pictures: ImageFormat = "png"
    videos: VideoFormat = "frames"
    one_call: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    concurrent: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Float[Tensor, " n"] | RewardScores:
        parts = list(whole_groups(samples.group.tolist(), self.batch))
        asks = [self._ask("/score", samples.take(rows)) for rows in parts]
        return _gather(self.client, asks, parts).plain

    def examples(self) -> Samples | None:
        """Examples of the served reward, if it has any."""
        examples = self.client.get("/examples", EXAMPLE_BYTES)
        if examples is None:
            return None
        return wire.decode_samples(wire.WireSamples.model_validate(examples))

    def _ask(self, path: str, samples: Samples, **more: list[int]) -> Ask:
        body = wire.encode_samples(samples, self.pictures, self.videos) | more
        values = len(more.get("a", samples.prompts))
        return Ask(path, body, {"path": path, "values": values}, values)


@dataclass(frozen=True)
class RemoteJudge:
    """P(a is preferred) for each pair. Each image is sent only once for all of its pairs."""

    remote: RemoteReward

    def __call__(
        self, samples: Samples, a: Int[Tensor, " p"], b: Int[Tensor, " p"]
    ) -> Float[Tensor, " p"]:
        pairs = list(zip(a.tolist(), b.tolist(), strict=True))
        parts = list(few_samples(pairs, self.remote.batch))
        asks: list[Ask] = []
        for part in parts:
            rows = sorted({row for i in part for row in pairs[i]})
            index = {row: at for at, row in enumerate(rows)}
            first = [index[pairs[i][0]] for i in part]
            second = [index[pairs[i][1]] for i in part]
            asks.append(self.remote._ask("/judge", samples.take(rows), a=first, b=second))
        return _gather(self.remote.client, asks, parts).values

    def examples(self) -> Samples | None:
        return self.remote.examples()


def _gather(client: Client, asks: list[Ask], parts: list[list[int]]) -> RewardScores:
    """Scores of all requests, in the rows of their parts; NaN for requests that failed."""
    scores = RewardScores.nowhere(sum(map(len, parts)))
    scores.applies.fill_(True)

    def read(ask: Ask, body: Any) -> RewardScores:
        answer = wire.read_scores(body, ask.note["values"])
        if answer is None:
            raise Malformed
        return answer

    for outcome, part in zip(client.ask(asks, read), parts, strict=True):
        if not isinstance(outcome, Failure):
            scores.put(part, outcome)
    return scores


def whole_groups(group: list[int], most: int) -> Iterator[list[int]]:
    """Split rows into parts of whole groups, with at most `most` rows unless one group is
    larger."""
    part: list[int] = []
    start = 0
    while start < len(group):
        end = start
        while end < len(group) and group[end] == group[start]:
            end += 1
        if part and len(part) + end - start > most:
            yield part
            part = []
        part = [*part, *range(start, end)]
        start = end
    if part:
        yield part


def few_samples(pairs: list[tuple[int, int]], most: int) -> Iterator[list[int]]:
    """Split pairs, in order, into parts with at most `most` samples (or a single pair)."""
    part: list[int] = []
    seen: set[int] = set()
    for i, pair in enumerate(pairs):
        if part and len(seen | set(pair)) > most:
            yield part
            part, seen = [], set()
        part.append(i)
        seen |= set(pair)
    if part:
        yield part


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a served reward or judge.

    url       address of the server, such as http://127.0.0.1:8100
    key       name of the environment variable with the server's token; null sends none
    batch     samples per request, at least 1; more only where one group is larger, since a group is
              sent whole
    videos    videos as frames, without loss, or as a lossy mp4, which is smaller
    """

    url: Address
    key: Variable | None = None
    batch: OneOrMore = 16
    pictures: ImageFormat = "png"
    videos: VideoFormat = "frames"
    timeout: Positive = 60.0
    tries: OneOrMore = 7
    at_once: OneOrMore = 8
    log: WrittenFile | None = None

    def open(self, does: str) -> RemoteReward:
        """ValueError unless the URL is a reward server with our format that supports `does`."""
        patience = Patience(self.timeout, self.tries, self.at_once)
        client = Client(self.url, self.key, patience, self.log)
        try:
            health = client.get("/health")
        except TokenRefused as error:
            raise ValueError(f"remote: {error}") from error
        except ValueError as error:
            raise ValueError(
                f"remote: {error}; start one with `flowrl serve-reward NAME --port PORT`, or fix "
                "url"
            ) from error
        if not isinstance(health, dict) or health.get("format") != wire.FORMAT:
            raise ValueError(
                f"remote: {client.url} is not a reward server with the format {wire.FORMAT}"
            )
        if not health.get(does):
            raise ValueError(f"remote: {health.get('reward')} at {client.url} has no {does}")
        return RemoteReward(client, self.batch, self.pictures, self.videos)


def load(server: Inline[ServerSettings]) -> Reward:
    """Load the reward of a server."""
    return server.open("scores")


def judge(server: Inline[ServerSettings]) -> Judge:
    """Load the judge of a server; every served reward can also judge."""
    return RemoteJudge(server.open("judges"))
