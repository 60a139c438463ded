"""`model.engine`: a sampler elsewhere that draws the samples of a pipeline's training."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.likelihoods.pathwise import Pathwise
from flowrl.likelihoods.transition import Transition
from flowrl.losses.base import RatioLoss
from flowrl.losses.weights import BoundMode, StepMismatch
from flowrl.settings.base import OnResume, Settings
from flowrl.settings.model.own_code import OwnCode
from flowrl.settings.words.short_forms import model_of_own
from rewards.rights import Address, Variable
from samplers import PlainRoute, Plan
from samplers.affine import affine_steps
from samplers.scheduler import unbound

OTHER_STEPS = (
    "an engine takes steps of the form a x + b v + c clean + std noise (docs/engines.md); leave "
    "model.engine out, or choose another recipe, kernel or solver (recipe.solver: {name: dpm2m} "
    "or {name: euler})"
)


class OwnEngineSettings(OwnCode):
    """A user's class with the methods of `flowrl.models.engine.Engine`, `mine.py:MyEngine`, or
    `{name: mine.py:MyEngine, ...settings}`. Keys other than `name` are its arguments."""

    WHAT: ClassVar[str] = "engine"
    PLACE: ClassVar[str] = "model.engine.own"

    def check(self) -> tuple[Any, dict[str, Any]]:
        """The class, with its arguments converted. UserError if they are invalid, or if it lacks a
        method of an engine."""
        engine, settings = super().check()
        lacking = [name for name in ("load", "sample", "close") if name not in dir(engine)]
        if isinstance(engine, type) and lacking:
            raise UserError(
                f"{self.PLACE}: {self.name} has no method {lacking[0]}: an engine has load, "
                "sample and close; see docs/engines.md"
            )
        return engine, settings

    def build(self) -> Any:
        """Build the engine. UserError if the user's code raises."""
        return self.called()


class StepCorrection(Settings):
    """Truncated importance sampling: each step is weighted by the ratio of the model's density to
    the engine's, so that the engine's rounding does not bias the gradient."""

    mode: BoundMode = "mask"
    """Ratios outside low..high: truncate clips them, mask leaves them out, none only measures
    them."""
    low: float = Field(default=0.0, ge=0, lt=1)
    high: float = Field(default=3.0, gt=1)

    def weight(self, likelihood: Transition) -> StepMismatch:
        return StepMismatch(likelihood, self.mode, self.high, self.low)


class EngineSettings(Settings):
    """A sampler elsewhere that draws the samples of training and of its evaluations, with the
    weights that are trained; the pipeline here scores, decodes and learns from them."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = dict.fromkeys(
        ("own", "url", "token", "timeout", "tries", "patience", "prompts", "dtype"), OnResume.FREE
    )
    own: Annotated[
        OwnEngineSettings | None,
        BeforeValidator(model_of_own, json_schema_input_type=OwnEngineSettings | str | None),
    ] = None
    """Your own engine, FILE.py:NAME or {name: FILE.py:NAME, ...settings}. Set this or `url`."""
    url: Address | None = None
    """Address of an engine that is served over HTTP, such as http://localhost:8200."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the engine's network, whose rounding the start allows; null: the model's own."""
    prompts: int = Field(default=8, ge=1)
    """Maximum number of prompts in a request, each with its whole group."""
    token: Variable | None = None
    """Name of the environment variable with the server's API key."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds per attempt at a request."""
    tries: int = Field(default=7, ge=1)
    """Maximum attempts at a request that the engine answers with an error of its own."""
    patience: float = Field(default=600.0, ge=0)
    """Seconds to wait for an engine that does not answer at all, such as one that restarts."""
    correction: StepCorrection = StepCorrection()

    @model_validator(mode="after")
    def _one(self) -> "EngineSettings":
        if (self.own is None) == (self.url is None):
            raise ValueError("set either own (FILE.py:NAME, your own class) or url (an address)")
        return self

    @property
    def place(self) -> str:
        """Name the engine in sentences: its address, or its class."""
        return self.url if self.own is None else self.own.name  # type: ignore[return-value]

    def around(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm with the correction in its loss. UserError for what an engine cannot be
        asked for."""
        for plan in algorithm.plans:
            assert isinstance(plan, Plan), "pipelines have no plans of texts"
            _check_plan(plan)
        if isinstance(algorithm.likelihood, Pathwise):
            raise UserError(
                "model.engine: this recipe follows the reward's gradient through the sampling "
                "steps, which an engine's samples do not have: leave model.engine out"
            )
        likelihood, loss = algorithm.likelihood, algorithm.loss
        if not isinstance(likelihood, Transition) or not isinstance(loss, RatioLoss):
            return algorithm
        weight = self.correction.weight(likelihood)
        return replace(algorithm, loss=replace(loss, weights=(*loss.weights, weight)))


def _check_plan(plan: Plan) -> None:
    """UserError, by name, for what requests cannot carry."""
    other = next((r for r in plan.route.layers if not isinstance(r, PlainRoute)), None)
    if other is not None:
        raise UserError(
            f"model.engine: {type(other).__name__} changes samples while they are drawn, which an "
            "engine does elsewhere: leave model.engine out, or choose another recipe"
        )
    if set(plan.nodes) != {plan.group} or plan.split is not None or plan.noise_of is not None:
        raise UserError(
            "model.engine: this recipe samples trees, or samples that share the noise of steps, "
            "but an engine draws samples independently of each other: leave model.engine out, or "
            "choose another recipe"
        )
    if unbound(plan):
        raise UserError(
            "model.engine: the steps of the pipeline's own scheduler are known once it is loaded: "
            "choose another recipe.kernel, or leave model.engine out"
        )
    try:
        affine_steps(plan)
    except ValueError as problem:
        raise UserError(f"model.engine: {problem}, but {OTHER_STEPS}") from problem
