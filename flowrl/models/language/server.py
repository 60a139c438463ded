"""A server that samples completions instead of the model: vLLM, SGLang, or a compatible one.

Prompts and completions are sent as tokens, never as text, since another tokenization of the same
text has another probability. The server returns log-probabilities, and their difference from the
trainer's is corrected in the loss (`flowrl.losses.weights.Mismatch`). m rows, u new tokens.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import ValidationError

from flowrl.errors import UserError
from flowrl.models.language.completion_answers import CompletionAnswer, CompletionChoice
from flowrl.models.language.served_adapters import InStep, served
from flowrl.models.language.served_ahead import AnswersAhead, Loaded, Recording
from flowrl.models.language.served_check import (
    Comparison,
    quantization_in,
    server_gap,
    token_gap,
)
from flowrl.models.language.served_owner import ServerOwner
from flowrl.models.language.token_scores import ScoringPolicy
from rewards.serving.bounded import tokens_asked
from rewards.serving.client import Client
from rewards.serving.requests import Again, Ask, Failure, Malformed
from samplers.completions import TextPlan
from samplers.generate import TokenRequest, Writer, WrittenTokens

ABSENT = ("unreachable", "timeout")  # reasons of failures of a server that is gone
BROKEN_OFF = ("abort", "error")  # how a server ends completions that it did not complete
SURE = 1e-3  # a server's log-probability of a sure token may be this far above 0
STRIDE = 0x9E3779B1  # odd: requests of one key with unlike `first` get unlike seeds
PLAIN_SAMPLING: Mapping[str, Any] = {  # servers default to the model's generation settings
    "n": 1,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logprobs": 1,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "skip_special_tokens": False,
}


DrawnTokens = tuple[list[int], list[float]]  # tokens of one row and their log-probabilities


@dataclass(frozen=True)
class CompletionsServer:
    """A `samplers.generate.Sampler` that sends one request per row, each with its own seed.

    model        the server's name of the base model
    stop         tokens that end a completion
    vocabulary   size of the model's vocabulary
    temperature  of training: the server's log-probabilities must include it
    adapters     keeps the server at the current weights; None: the server keeps its own weights
    grouped      one request for all completions of a context, with the first one's seed
    owner        says whose the server is; None: nobody asks
    quantized    how the server's weights are quantized; None: as its name says, if it does
    patience     seconds to wait for a server that does not answer
    ahead        the answers of later iterations
    """

    client: Client
    model: str
    stop: tuple[int, ...]
    vocabulary: int
    temperature: float
    adapters: InStep | None
    grouped: bool = False
    owner: ServerOwner | None = None
    quantized: str | None = None
    patience: float = 0.0
    ahead: AnswersAhead = field(default_factory=AnswersAhead)

    @property
    def exact(self) -> bool:
        return self.adapters is not None

    @property
    def elsewhere(self) -> bool:
        return True

    def begin(self, writer: Writer, plans: Sequence[TextPlan]) -> None:
        """Ask for a writer's completions with the present weights, and go on."""
        adapters, answers = self.adapters, self.ahead.known
        loaded = None if adapters is None else Loaded(adapters.current(), adapters)
        copy = replace(self, adapters=loaded, ahead=AnswersAhead())
        aside = replace(writer, sampler=Recording(copy, answers))
        self.ahead.begin(lambda: [aside.write(plan, index) for index, plan in enumerate(plans)])

    def __call__(self, asked: TokenRequest) -> WrittenTokens:
        if (answer := self.ahead.take(asked)) is not None:
            return answer
        self._wait()
        outcomes = self._outcomes(asked)
        if any(isinstance(one, Failure) and one.reason in ABSENT for one in outcomes):
            self._wait()
            outcomes = self._outcomes(asked)  # the same requests have the same tokens
        drawn = [one for one in outcomes if not isinstance(one, Failure)]
        if len(drawn) < len(outcomes):
            failed = [one for one in outcomes if isinstance(one, Failure)]
            reason = failed[0].words or failed[0].reason
            raise UserError(
                f"model.server: {len(failed)} of {len(outcomes)} completions failed at "
                f"{self.client.url} ({reason})"
            )
        return self._part(drawn)

    def _wait(self) -> None:
        """Wait until the server lists its models, or until the patience is over: the requests say
        what is wrong then."""
        end, waits = time.monotonic() + self.patience, False
        while True:
            try:
                served(self.client)
                return
            except ValueError as error:
                if time.monotonic() > end:
                    return
                if not waits:
                    print(
                        f"model.server: {error}; waiting for it up to {self.patience:g} s "
                        "(model.server.patience)",
                        file=sys.stderr,
                    )
                waits = True
                time.sleep(min(1.0, self.patience))

    def close(self) -> None:
        """Remove the run's adapters from the server, or give it its own weights back."""
        if self.ahead.running:
            self.client.cancel()
        self.ahead.thread.shutdown(cancel_futures=True)
        given_back = self.adapters is None or self.adapters.close()
        if self.owner is not None:
            self.owner.release(given_back)

    def _outcomes(self, asked: TokenRequest, again: bool = True) -> list[DrawnTokens | Failure]:
        """One outcome per row. `again`: reload the adapter and retry if the server restarted."""
        name = self.model if self.adapters is None else self.adapters.current()
        # 31 bits: all engines accept such seeds
        seeds = ((asked.noise + asked.first * STRIDE) & (2**31 - 1)).tolist()
        rooms, asks = asked.room.tolist(), list[Ask]()
        for first, count in self._requests(asked, rooms):
            body = self._body(name, asked.contexts[first], seeds[first], rooms[first], asked)
            request = body | {"n": count}
            asks.append(Ask("/completions", request, {"row": first}, tokens_asked(request)))
        try:
            answers = self.client.ask(asks, self._read)
        except UserError:
            raise
        except ValueError as error:
            if again and self.adapters is not None and self.adapters.lost():
                return self._outcomes(asked, again=False)
            raise UserError(f"model.server: {error}") from error
        if self.adapters is not None and not self.adapters.held():
            if again:
                return self._outcomes(asked, again=False)
            raise UserError(
                "model.server: it lost the run's weights twice within one batch of requests; does "
                "it restart repeatedly, or is it used by another run?"
            )
        outcomes = list[DrawnTokens | Failure]()
        for ask, one in zip(asks, answers, strict=True):
            outcomes += [one] * ask.body["n"] if isinstance(one, Failure) else one
        return outcomes

    def _requests(self, asked: TokenRequest, rooms: Sequence[int]) -> list[tuple[int, int]]:
        """First row and number of rows of each request: one row, or adjacent rows that continue one
        context."""
        if not self.grouped:
            return [(row, 1) for row in range(len(rooms))]
        requests = list[tuple[int, int]]()
        for row, key in enumerate(zip(asked.contexts, rooms, strict=True)):
            first, count = requests[-1] if requests else (0, 0)
            if count and key == (asked.contexts[first], rooms[first]):
                requests[-1] = first, count + 1
            else:
                requests.append((row, 1))
        return requests

    def _body(
        self, name: str, context: Sequence[int], seed: int, room: int, asked: TokenRequest
    ) -> dict[str, Any]:
        return {
            **PLAIN_SAMPLING,
            "model": name,
            "prompt": list(context),
            "seed": seed,
            "max_tokens": room,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "stop_token_ids": list(self.stop),
            "ignore_eos": not self.stop,
        }

    def _read(self, ask: Ask, body: Any) -> list[DrawnTokens]:
        try:
            answer = CompletionAnswer.model_validate(body)
        except ValidationError as error:
            raise Malformed from error
        if len(answer.choices) != ask.body["n"]:
            raise Malformed
        read = None if answer.usage is None else answer.usage.prompt_tokens
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        return [self._choice(ask, choice, read) for choice in choices]

    def _choice(self, ask: Ask, choice: CompletionChoice, read: int | None) -> DrawnTokens:
        """The tokens of one completion. `read`: number of prompt tokens, as counted by the
        server."""
        prompt, room = ask.body["prompt"], ask.body["max_tokens"]
        if choice.prompt_token_ids is not None:
            same = choice.prompt_token_ids == prompt
        else:
            same = read is None or read == len(prompt)
        if not same:
            raise UserError(
                f"model.server: the server tokenized a prompt of {len(prompt)} tokens "
                "differently; it must accept token ids unchanged: switch off its templates and "
                "special tokens"
            )
        if choice.finish_reason in BROKEN_OFF or choice.ids == []:
            raise Again("malformed", words=f"an answer has no whole text ({choice.finish_reason})")
        ids, logp = choice.ids, None if choice.logprobs is None else choice.logprobs.token_logprobs
        if ids is None:
            raise UserError(
                "model.server: its answers have no token ids (return_token_ids); use a newer "
                "vLLM or SGLang"
            )
        if not logp or None in logp:
            raise UserError(
                "model.server: its answers have no log-probabilities of the sampled tokens, which "
                "training needs; use a server that returns logprobs"
            )
        values = [v for v in logp if type(v) is float and v <= SURE]
        if len(values) < len(logp):
            wrong = next(v for v in logp if type(v) is not float or v > SURE)
            raise UserError(
                f"model.server: an answer gives {wrong!r:.60} as the log-probability of a token, "
                "but it must be a number of at most 0; use a server that returns logprobs"
            )
        self._check(ids, values, room, choice.finish_reason)
        end = next((i for i, token in enumerate(ids) if token in self.stop), len(ids) - 1) + 1
        return ids[:end], values[:end]

    def _check(self, ids: list[int], logp: list[float], room: int, finish: str | None) -> None:
        if len(ids) != len(logp) or not 0 < len(ids) <= room:
            raise UserError(
                f"model.server: an answer has {len(ids)} tokens and {len(logp)} "
                f"log-probabilities instead of 1 to {room} of both"
            )
        if (most := max(ids)) >= self.vocabulary:
            raise UserError(
                f"model.server: it returned token {most}, but the vocabulary of model.language has "
                f"{self.vocabulary}: does it serve another model?"
            )
        if len(ids) == room or any(token in self.stop for token in ids):
            return
        if finish == "length":
            raise UserError(
                f"model.server: it cut off a completion after {len(ids)} of {room} tokens; "
                "raise its limit for prompt and completion (vLLM: --max-model-len)"
            )
        raise UserError(
            f"model.server: a completion ended ({finish}) at token {ids[-1]}, which is not a "
            "stop token here; add it to model.stop, or start the server without its own stop "
            "tokens (vLLM: --generation-config vllm)"
        )

    def _part(self, drawn: Sequence[DrawnTokens]) -> WrittenTokens:
        lengths = torch.tensor([len(ids) for ids, _ in drawn])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        flat = [token for ids, _ in drawn for token in ids]
        values = [value for _, logp in drawn for value in logp]
        ids = torch.zeros(mask.shape, dtype=torch.int64)
        logp = torch.zeros(mask.shape)
        return WrittenTokens(
            ids.masked_scatter(mask, torch.tensor(flat)),
            logp.masked_scatter(mask, torch.tensor(values)),
            lengths,
            torch.tensor([ids[-1] in self.stop for ids, _ in drawn]),
        )

    def proofs(self, reader: ScoringPolicy, steps: int) -> list[str]:
        """Check that the server runs, serves the model, loads adapters, and agrees on
        log-probabilities with the reader, whose contexts are all prompts."""
        try:
            models = served(self.client)
        except ValueError as error:
            raise UserError(
                f"model.server: {error}; start a server, or remove model.server"
            ) from error
        if self.model not in models:
            raise UserError(
                f"model.server.model: {self.client.url} serves {', '.join(models) or 'nothing'}, "
                f"not {self.model}"
            )
        if self.owner is not None:
            self.owner.take()
        drawn = Comparison.drawn(self, reader, steps, self.temperature)
        return self._compared(drawn, self.quantized or quantization_in(self.model))

    def _compared(self, drawn: Comparison, kind: str | None) -> list[str]:
        """Compare log-probabilities with the model's own. UserError for other weights."""
        gap = server_gap(drawn, self.temperature, kind)
        if self.temperature != 1 and not gap.same:
            plain = token_gap(drawn.ours(1.0), drawn.theirs)
            if plain.mean < gap.gap.mean / 2:
                raise UserError(
                    "model.server: its log-probabilities ignore the temperature, but training "
                    f"samples at {self.temperature:g}; start vLLM with --logprobs-mode "
                    "processed_logprobs, or set recipe.temperature: 1"
                )
        if self.exact and not gap.same:
            raise UserError(
                f"model.server: its log-probabilities differ from the model's own by {gap}. More "
                f"than {gap.times:g} times this noise is another model, or weights that an "
                "earlier run has left: restart it with the weights of model.language"
                + ("" if kind else "; if it is quantized, set model.server.quantized")
            )
        sentences = [
            f"{self.client.url} samples completions; its log-probabilities differ from the model's "
            f"by {gap}"
        ]
        if kind is not None:
            sentences.append(
                f"the server's weights are quantized ({kind}): samples are off-policy by what "
                f"rounding changes, up to {gap.times:g} times the noise"
            )
        if not self.exact:
            far = "" if gap.same else ", and they are not those of the model now"
            sentences.append(
                f"the server keeps its own weights{far}, so samples become more off-policy during "
                "training"
            )
        return sentences
