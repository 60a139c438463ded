"""A server that draws completions in the model's place: vLLM, SGLang, or what speaks like them.

Prompts and completions travel as tokens, never as text: another tokenization of the same text has
another probability. The server's log-probabilities come along, and what its numbers differ from the
trainer's is weighed in the loss (`flowrl.losses.weights.Mismatch`). m rows, u new tokens.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError

from flowrl.errors import UserError
from flowrl.likelihoods.rows import TokenRows
from flowrl.models.language.served_adapters import Adapters, served
from flowrl.models.language.token_scores import ScoringPolicy
from rewards.serving.client import Client
from rewards.serving.requests import Ask, Failure, Malformed
from samplers.completions import TextPlan, TextRollout
from samplers.generate import TokenRequest, Writer, WrittenTokens

PROMPTS, TOKENS = 8, 8  # what is drawn to see that a server says what the model says
ANOTHER = 1.0  # nats a token that only another model is away from ours
APART = 0x9E3779B1  # odd, so that requests of one key and unlike `first` have unlike seeds
NUMBERED = re.compile("token_id:([0-9]{1,9})")
PLAIN_SAMPLING: Mapping[str, Any] = {  # what servers else take from the model's generation settings
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


Count = Annotated[int, Field(ge=0, lt=2**31)]  # larger ones are a broken answer, asked for again
LogProb = Annotated[float, Field(allow_inf_nan=False)]


class CompletionLogprobs(BaseModel):
    tokens: list[str] = []
    token_logprobs: list[LogProb | None] = []


class CompletionChoice(BaseModel):
    finish_reason: str | None = None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[Count] | None = None
    logprobs: CompletionLogprobs | None = None

    @property
    def ids(self) -> list[int] | None:
        """From whichever of the two places a server puts them in."""
        if self.token_ids is not None:
            return self.token_ids
        words = [] if self.logprobs is None else self.logprobs.tokens
        numbers = [NUMBERED.fullmatch(word) for word in words]
        ids = [int(number[1]) for number in numbers if number is not None]
        return ids if len(ids) == len(words) > 0 else None


class Usage(BaseModel):
    prompt_tokens: Count | None = None


class CompletionAnswer(BaseModel):
    choices: list[CompletionChoice] = Field(min_length=1, max_length=1)
    usage: Usage | None = None


DrawnTokens = tuple[list[int], list[float]]  # tokens of one row and their log-probabilities


@dataclass(frozen=True)
class CompletionsServer:
    """A `samplers.generate.Sampler`. One request a row, with a seed of its own.

    model        the name that the server has for the base model
    stop         tokens that end a completion
    vocabulary   tokens that the model knows
    temperature  of training: the log-probabilities must be those after it
    adapters     keeps the server at the weights in force; None: it has weights of its own
    """

    client: Client
    model: str
    stop: tuple[int, ...]
    vocabulary: int
    temperature: float
    adapters: Adapters | None

    @property
    def exact(self) -> bool:
        return self.adapters is not None

    @property
    def elsewhere(self) -> bool:
        return True

    def __call__(self, asked: TokenRequest) -> WrittenTokens:
        outcomes = self._outcomes(asked)
        drawn = [one for one in outcomes if not isinstance(one, Failure)]
        if len(drawn) < len(outcomes):
            failed = [one for one in outcomes if isinstance(one, Failure)]
            why = failed[0].words or failed[0].reason
            raise UserError(
                f"model.server: {len(failed)} of {len(outcomes)} completions did not come from "
                f"{self.client.url} ({why})"
            )
        return self._part(drawn, asked.noise.device)

    def close(self) -> None:
        """The server keeps nothing of the run."""
        if self.adapters is not None:
            self.adapters.close()

    def _outcomes(self, asked: TokenRequest, again: bool = True) -> list[DrawnTokens | Failure]:
        """Asked `again` of a server that was started anew: it has no adapter until it is told."""
        name = self.model if self.adapters is None else self.adapters.current()
        seeds = ((asked.noise + asked.first * APART) & (2**31 - 1)).tolist()  # all engines take
        asks = [
            Ask("/completions", self._body(name, context, seed, room, asked), {"row": row})
            for row, (context, seed, room) in enumerate(
                zip(asked.contexts, seeds, asked.room.tolist(), strict=True)
            )
        ]
        try:
            return self.client.ask(asks, self._read)
        except UserError:
            raise
        except ValueError as error:
            if again and self.adapters is not None and self.adapters.lost():
                return self._outcomes(asked, again=False)
            raise UserError(f"model.server: {error}") from error

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

    def _read(self, ask: Ask, body: Any) -> DrawnTokens:
        try:
            answer = CompletionAnswer.model_validate(body)
        except ValidationError as error:
            raise Malformed from error
        choice, prompt, room = answer.choices[0], ask.body["prompt"], ask.body["max_tokens"]
        read = None if answer.usage is None else answer.usage.prompt_tokens
        if choice.prompt_token_ids is not None:
            same = choice.prompt_token_ids == prompt
        else:
            same = read is None or read == len(prompt)
        if not same:
            raise UserError(
                f"model.server: a prompt of {len(prompt)} tokens was read as others there; it must "
                "take tokens as they are: switch templates and special tokens off"
            )
        ids, logp = choice.ids, None if choice.logprobs is None else choice.logprobs.token_logprobs
        if ids is None:
            raise UserError(
                "model.server: its answers do not name tokens by number (return_token_ids); "
                "take a newer vLLM or SGLang"
            )
        if not logp or None in logp:
            raise UserError(
                "model.server: its answers have no log-probabilities of the tokens drawn, without "
                "which nothing can be trained; take a server that gives logprobs"
            )
        found = [value for value in logp if value is not None]
        self._check(ids, found, room, choice.finish_reason)
        end = next((i for i, token in enumerate(ids) if token in self.stop), len(ids) - 1) + 1
        return ids[:end], found[:end]

    def _check(self, ids: list[int], logp: list[float], room: int, finish: str | None) -> None:
        if len(ids) != len(logp) or not 0 < len(ids) <= room:
            raise UserError(
                f"model.server: an answer has {len(ids)} tokens and {len(logp)} log-probabilities, "
                f"and 1 to {room} of both were asked for"
            )
        if (most := max(ids)) >= self.vocabulary:
            raise UserError(
                f"model.server: it names token {most}, and model.language has {self.vocabulary}: "
                "is it another model?"
            )
        if len(ids) == room or any(token in self.stop for token in ids):
            return
        if finish == "length":
            raise UserError(
                f"model.server: it cut a completion at {len(ids)} of {room} tokens; give it room "
                "for prompt and completion (vLLM: --max-model-len)"
            )
        raise UserError(
            f"model.server: a completion ended ({finish}) at token {ids[-1]}, which ends none "
            "here; add it to model.stop, or start the server without stop tokens of its own (vLLM: "
            "--generation-config vllm)"
        )

    def _part(self, drawn: Sequence[DrawnTokens], device: torch.device) -> WrittenTokens:
        lengths = torch.tensor([len(ids) for ids, _ in drawn], device=device)
        there = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
        flat = [token for ids, _ in drawn for token in ids]
        said = [value for _, logp in drawn for value in logp]
        ids = torch.zeros(there.shape, dtype=torch.int64, device=device)
        logp = torch.zeros(there.shape, device=device)
        return WrittenTokens(
            ids.masked_scatter(there, torch.tensor(flat, device=device)),
            logp.masked_scatter(there, torch.tensor(said, device=device)),
            lengths,
            torch.tensor([ids[-1] in self.stop for ids, _ in drawn], device=device),
        )

    def proofs(
        self, model: Any, contexts: Sequence[Sequence[int]], apart: bool, steps: int
    ) -> list[str]:
        """It is there, has the model, takes its weights, and says of tokens what the model says."""
        try:
            known = served(self.client)
        except ValueError as error:
            raise UserError(
                f"model.server: {error}; start a server, or leave model.server out"
            ) from error
        if self.model not in known:
            raise UserError(
                f"model.server.model: {self.client.url} serves {', '.join(known) or 'nothing'}, "
                f"not {self.model}"
            )
        spread = [i * len(contexts) // min(PROMPTS, len(contexts)) for i in range(PROMPTS)]
        some = [contexts[i] for i in spread[: len(contexts)]]
        writer = Writer(self, some, tuple(range(len(some))), 0, 0, model.device)
        plan = TextPlan(min(TOKENS, steps), (1,), temperature=self.temperature)
        rollout = writer.write(plan)
        reader = ScoringPolicy(model, some, apart)
        far = self._far(reader, rollout, self.temperature)
        mean = float(far.mean())
        if self.temperature != 1 and float(self._far(reader, rollout, 1.0).mean()) < mean / 2:
            raise UserError(
                "model.server: its log-probabilities are those before the temperature, and "
                f"training draws at {self.temperature:g}; start vLLM with --logprobs-mode "
                "processed_logprobs, or set recipe.temperature: 1"
            )
        if self.exact and not mean < ANOTHER:
            raise UserError(
                f"model.server: its log-probabilities are {mean:.2f} nats a token away from the "
                "model's own: does it serve another model?"
            )
        said = (
            f"{self.client.url} draws completions; its log-probabilities are {mean:.1e} from the "
            f"model's on average, {float(far.max()):.1e} at most"
        )
        own = "it keeps its own weights: the further training gets, the less its samples fit"
        return [said] if self.exact else [said, own]

    @staticmethod
    @torch.no_grad()
    def _far(reader: ScoringPolicy, rollout: TextRollout, temperature: float) -> torch.Tensor:
        """|difference| of each token's log-probability, at this temperature here."""
        blank = torch.zeros_like(rollout.logp)
        rows = TokenRows(
            rollout.prompt, blank, rollout.written, None, rollout.ids, rollout.lengths,
            temperature, None,
        )  # fmt: skip
        return (reader(rows).logp - rollout.logp).abs()[rollout.written]
