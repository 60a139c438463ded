"""A server that generates completions, and the weights that correct for its differences."""

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
from rewards.rights import Address, Variable
from samplers.completions import TextPlan


class CorrectionSettings(Settings):
    """Truncated importance sampling: completions are weighted by the ratio of the model's
    probability to the server's, so that the server's rounding or older weights do not bias the
    gradient."""

    level: Literal["token", "sequence"] = "sequence"
    """The ratio per token, or the product over the completion."""
    mode: Literal["truncate", "mask", "none"] = "mask"
    """Ratios outside low..high: truncate clips them, mask leaves them out, none only measures
    them."""
    low: float = Field(default=0.0, ge=0, lt=1)
    high: float = Field(default=3.0, gt=1)

    def weight(self) -> Mismatch:
        return Mismatch(self.level, self.mode, self.high, self.low)


class Server(Settings):
    """A server with OpenAI's completions API that accepts and returns token ids: vLLM or SGLang."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = dict.fromkeys(
        ("url", "token", "timeout", "tries", "in_flight", "requests", "quantized", "patience"),
        OnResume.FREE,
    )
    url: Address
    """Address, such as http://localhost:8000/v1."""
    model: str
    """The server's name of the base model."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """The server's interface for adapters."""
    sync: Literal["lora", "weights", "none"] = "lora"
    """lora: the server loads every new adapter. weights: it reads all weights from files, in place
    (vLLM). none: it keeps its weights, so that samples are off-policy, and the model itself
    generates the evaluations' completions."""
    quantized: Literal["fp8", "int8", "int4"] | None = None
    """How the server's weights are quantized, which has a bound of its own at the start; null: as
    the model's name there says (AWQ, GPTQ, FP8, ...), if it does."""
    requests: Literal["row", "group"] = "row"
    """row: a separate request and seed for each completion. group: one request for all completions
    of a prompt, whose tokens then depend on which completions share a request."""
    token: Variable | None = None
    """Name of the environment variable with the server's API key."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds per attempt at a completion."""
    tries: int = Field(default=7, ge=1)
    """Maximum attempts at a completion."""
    patience: float = Field(default=600.0, ge=0)
    """Seconds to wait for a server that does not answer at all, such as one that restarts."""
    in_flight: int = Field(default=64, ge=1)
    """Maximum number of requests at a time."""
    correction: CorrectionSettings = CorrectionSettings()

    @model_validator(mode="after")
    def _whole(self) -> "Server":
        if not self.url.rstrip("/").endswith("/v1"):
            raise ValueError(
                f"url: {self.url!r} must end with /v1, the path of the completions API"
            )
        if self.sync == "weights" and self.engine != "vllm":
            raise ValueError(
                "sync: weights is a protocol of vLLM; train adapters (sync: lora), or set sync: "
                "none"
            )
        return self

    def around(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm with the correction in its loss. UserError if servers cannot run its
        plan."""
        levels = [0.0] * (algorithm.steps + 1)
        for plan in algorithm.planned(levels, 0, 0):
            assert isinstance(plan, TextPlan)
            if plan.forking is not None:
                raise UserError(
                    "model.server: forks need the entropy of every token, which servers do not "
                    "return; leave model.server out, or choose another recipe"
                )
            if plan.top_p < 1 or plan.top_k or plan.min_p:
                raise UserError(
                    "model.server: servers do not say which tokens top-p, top-k or min-p kept, "
                    "so probabilities are unknown; set recipe.top_p: 1, recipe.top_k: 0 and "
                    "recipe.min_p: 0"
                )
        return corrected(algorithm, self.correction.weight())


def corrected(algorithm: Algorithm, weight: Mismatch) -> Algorithm:
    """The algorithm whose loss weights tokens by the ratio of the trainer's to the sampler's
    probability."""
    loss = algorithm.loss
    if isinstance(loss, VESPO) and weight.mode != "none":  # has weights of its own
        loss = replace(loss, mismatch=weight)
        weight = replace(weight, mode="none")
    if isinstance(loss, RatioLoss):
        loss = replace(loss, weights=(*loss.weights, weight))
    return replace(algorithm, loss=loss)
