"""Several requests per question to one model, and the mean of its votes."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.judging import chat
from rewards.rights import Address, Variable, WrittenFile
from rewards.serving.bounded import tokens_asked
from rewards.serving.client import Client, TokenRefused
from rewards.serving.requests import Ask, Failure, Patience
from rewards.types import Kind, OneOrMore, Positive, Samples

AnswerReader = Callable[[chat.Completion], float]
Messages = list[dict[str, Any]]

SHORT_ANSWER: dict[str, Any] = {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}
LONG_ANSWER: dict[str, Any] = {"max_tokens": 2048}


@dataclass(frozen=True)
class Panel:
    """A model that votes `votes` times on each question. `body` is merged into every request.

    frames: images per video. media: the kind of the samples, for the self-test only.
    """

    client: Client
    model: str
    votes: int = 1
    body: Mapping[str, Any] = field(default_factory=dict)
    frames: int = 8
    media: Kind = "image"
    notes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list), repr=False)

    def each_vote(
        self,
        about: Sequence[Messages],
        read: AnswerReader,
        body: Mapping[str, Any],
        seed: int | None = None,
    ) -> Float[Tensor, "q v"]:
        """Every vote on every question; NaN for an answer that could not be read.

        seed: seed of the first vote, for a body that sets a temperature even with one vote.
        """
        answers = self.client.ask(
            self._requests(about, body, seed), lambda _, answer: read(chat.completion(answer))
        )
        flat = [torch.nan if isinstance(value, Failure) else value for value in answers]
        return torch.tensor(flat, dtype=torch.float64).reshape(len(about), self.votes)

    def lists(
        self,
        about: Sequence[Messages],
        read: Callable[[chat.Completion, int], list[float]],
        sizes: Sequence[int],
        body: Mapping[str, Any],
    ) -> list[list[float]]:
        """Several numbers per answer: the mean of a question's votes, empty without votes.

        sizes: how many numbers each question's answer must have; `read` gets the number.
        """
        answers = self.client.ask(
            self._requests(about, body),
            lambda ask, answer: read(chat.completion(answer), sizes[ask.note["question"]]),
        )
        means = []
        for index in range(len(about)):
            of_place = answers[index * self.votes : (index + 1) * self.votes]
            votes = [vote for vote in of_place if not isinstance(vote, Failure)]
            columns = zip(*votes, strict=True) if 2 * len(votes) > self.votes else ()
            means.append([sum(column) / len(votes) for column in columns])
        return means

    def _requests(
        self, about: Sequence[Messages], body: Mapping[str, Any], seed: int | None = None
    ) -> list[Ask]:
        sampling: dict[str, Any] = {"temperature": 0.0}
        asks: list[Ask] = []
        for index, messages in enumerate(about):
            for vote in range(self.votes):
                if self.votes > 1:  # equal at temperature 0; a seed per vote makes them repeatable
                    sampling = {"temperature": 0.7, "seed": vote}
                if seed is not None:
                    sampling |= {"seed": seed + vote}
                fixed = {"model": self.model, "messages": messages}
                request = {**fixed, **sampling, **body, **self.body}
                note = {"question": index, "vote": vote}
                asks.append(Ask("/chat/completions", request, note, tokens_asked(request)))
        return asks

    def values(
        self, about: Sequence[Messages], read: AnswerReader, body: Mapping[str, Any]
    ) -> Float[Tensor, " q"]:
        """Mean of a question's votes; NaN unless more than half of them could be read."""
        votes = self.each_vote(about, read, body)
        read_votes = ~votes.isnan()
        mean = votes.nanmean(1)
        if self.votes > 1:
            spread = (votes - mean[:, None]).square().nanmean(1).sqrt()
            known_spreads = float((~spread.isnan()).sum())
            self.note({"spread": float(spread.nansum()), "spreads": known_spreads})
        return torch.where(2 * read_votes.sum(1) > self.votes, mean, torch.nan)

    def note(self, numbers: Mapping[str, float]) -> None:
        """Collect numbers for the next report, from any thread and in any order."""
        for name, number in numbers.items():
            self.notes[name].append(number)

    def report(self) -> dict[str, float]:
        """Numbers since the last report: the client's counts, the mean standard deviation of
        votes, how often the first sample of a pair wins, and unread verdicts by winner."""
        report = self.client.report()
        sums = {name: math.fsum(notes) for name, notes in self.notes.items()}  # exact in any order
        for name, count in (("spread", "spreads"), ("first_wins", "verdicts")):
            if sums.get(count):
                report[name] = sums[name] / sums[count]
        report |= {name: sums[name] for name in ("unread_first", "unread_second") if name in sums}
        self.notes.clear()
        return report

    def examples(self) -> Samples:
        """A red disc on white, and noise, for a prompt that describes the disc; or two texts."""
        group = torch.zeros(2, dtype=torch.long)
        if self.media == "text":
            question = "What is two plus two? Answer in one short sentence."
            return Samples(["Two plus two is four.", "Banana, banana."], [question] * 2, group)
        y, x = torch.meshgrid(torch.linspace(-1, 1, 256), torch.linspace(-1, 1, 256), indexing="ij")
        disc = torch.where(
            (x * x + y * y < 0.4)[None], torch.tensor([0.86, 0.1, 0.1]).view(3, 1, 1), 1
        )
        noise = torch.rand(3, 256, 256, generator=torch.Generator().manual_seed(0))
        media = torch.stack([disc, noise])
        if self.media == "video":
            media = media[:, None].repeat(1, self.frames, 1, 1, 1)
        return Samples(media, ["a large red circle on a white background"] * 2, group)


@dataclass(frozen=True, kw_only=True)
class PanelSettings:
    """Settings of a served model that scores or judges.

    url      address of the server's OpenAI API, which ends with /v1, such as
             http://127.0.0.1:8000/v1
    model    name of the model, as the server lists it
    key      name of the environment variable with the server's API key; null sends none
    votes    requests per question, at least 1: the score is the mean of the readable answers, of
             which there must be more than half; several are sampled at temperature 0.7, each with a
             seed of its own
    frames   images that are shown of a video, at least 1, spread evenly; no effect on images
    media    kind of the two samples that the judge is tried on before a run: video or text; else
             images; no effect on scores
    body     entries of each request in place of flowrl's, such as {temperature: 0.3, max_tokens:
             4096}; null keeps flowrl's
    """

    url: Address
    model: str
    key: Variable | None = None
    votes: OneOrMore = 1
    frames: OneOrMore = 8
    media: Kind = "image"
    body: Mapping[str, Any] | None = None
    timeout: Positive = 120.0
    tries: OneOrMore = 7
    at_once: OneOrMore = 64
    log: WrittenFile | None = None

    def open(self) -> Panel:
        """ValueError unless a server answers and has this model."""
        patience = Patience(self.timeout, self.tries, self.at_once)
        client = Client(self.url, self.key, patience, self.log)
        try:
            answer = client.get("/models")
        except TokenRefused as error:
            raise ValueError(f"judge: {error}") from error
        except ValueError as error:
            raise ValueError(
                f"judge: {error}; start a server, such as `vllm serve MODEL`, and check that "
                "url ends with /v1"
            ) from error
        data = answer.get("data") if isinstance(answer, dict) else None
        names = [str(m["id"]) for m in data or [] if isinstance(m, dict) and "id" in m]
        if names and self.model not in names:
            raise ValueError(
                f"judge: the server does not serve {self.model!r}; it serves {', '.join(names[:9])}"
            )
        return Panel(client, self.model, self.votes, self.body or {}, self.frames, self.media)
