"""A server that draws completions in the model's place, and how its samples are weighed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.losses.base import RatioLoss
from flowrl.losses.token import VESPO
from flowrl.losses.weights import Mismatch
from flowrl.settings.base import OnResume, Settings
from samplers.completions import TextPlan


class CorrectionSettings(Settings):
    """Weighs what the server drew by the model's probability over the server's (truncated
    importance sampling), so that other numerics or older weights there do not bias the gradient."""

    level: Literal["token", "sequence"] = "sequence"
    """Of a token, or its product over the completion."""
    mode: Literal["truncate", "mask", "none"] = "mask"
    """Outside of low..high: cut to it, or not trained on. none only measures."""
    low: float = Field(default=0.0, ge=0, lt=1)
    high: float = Field(default=3.0, gt=1)

    def weight(self) -> Mismatch:
        return Mismatch(self.level, self.mode, self.high, self.low)


class Server(Settings):
    """A server of OpenAI's completions that takes and names tokens: vLLM or SGLang."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = dict.fromkeys(
        ("url", "token", "timeout", "tries", "in_flight"), OnResume.FREE
    )
    url: str
    """Such as http://localhost:8000/v1."""
    model: str
    """What the server calls the base model."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """How adapters are loaded there and asked for."""
    sync: Literal["lora", "none"] = "lora"
    """lora: the server loads the adapter whenever it has changed. none: it keeps the weights that
    it was started with, so that samples are off-policy, and evaluations are drawn here."""
    token: str | None = None
    """The environment variable that has the server's API key."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds of one try of a completion."""
    tries: int = Field(default=7, ge=1)
    in_flight: int = Field(default=64, ge=1)
    """Most completions that are asked for at once."""
    correction: CorrectionSettings = CorrectionSettings()

    @model_validator(mode="after")
    def _whole(self) -> "Server":
        if not self.url.rstrip("/").endswith("/v1"):
            raise ValueError(f"url: {self.url!r} must end with /v1, where completions are")
        return self

    def around(self, algorithm: Algorithm) -> Algorithm:
        """With the correction in its loss. UserError for plans that a server cannot carry out."""
        levels = [0.0] * (algorithm.steps + 1)
        for plan in algorithm.plan(levels, 0, 0):
            assert isinstance(plan, TextPlan)
            if plan.forking is not None:
                raise UserError(
                    "model.server: forks need the entropy of every token, which servers do not "
                    "give; leave model.server out, or take another recipe"
                )
            if plan.top_p < 1:
                raise UserError(
                    "model.server: a server does not say which tokens top-p left, so their "
                    "probabilities are not known; set recipe.top_p: 1"
                )
        loss, weight = algorithm.loss, self.correction.weight()
        if isinstance(loss, VESPO) and weight.mode != "none":  # weighs rows by itself
            loss = replace(loss, mismatch=weight)
            weight = replace(weight, mode="none")
        if isinstance(loss, RatioLoss):
            loss = replace(loss, weights=(*loss.weights, weight))
        return replace(algorithm, loss=loss)
