"""Answers of OpenAI's completions API, with the fields in which servers return tokens."""

import re
from typing import Annotated

from pydantic import BaseModel, Field

NUMBERED = re.compile("token_id:([0-9]{1,9})")
Count = Annotated[int, Field(ge=0, lt=2**31)]  # larger ones are a broken answer, asked for again
LogProb = Annotated[float, Field(allow_inf_nan=False)]


class CompletionLogprobs(BaseModel):
    tokens: list[str] = []
    token_logprobs: list[LogProb | bool | str | None] = []


class CompletionChoice(BaseModel):
    index: Count = 0
    finish_reason: str | None = None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[Count] | None = None
    logprobs: CompletionLogprobs | None = None

    @property
    def ids(self) -> list[int] | None:
        """Token ids from either field in which servers return them; None if missing."""
        if self.token_ids is not None:
            return self.token_ids
        words = [] if self.logprobs is None else self.logprobs.tokens
        numbers = [NUMBERED.fullmatch(word) for word in words]
        ids = [int(number[1]) for number in numbers if number is not None]
        return ids if len(ids) == len(words) > 0 else None


class Usage(BaseModel):
    prompt_tokens: Count | None = None


class CompletionAnswer(BaseModel):
    choices: list[CompletionChoice] = Field(min_length=1)
    usage: Usage | None = None
