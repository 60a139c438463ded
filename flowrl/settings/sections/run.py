"""A run as data: a recipe, a model, prompts, rewards and the training."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from flowrl.algorithm import Algorithm, Average, Decay
from flowrl.credit.intermediate import differs_between_steps
from flowrl.errors import UserError, feature_files
from flowrl.likelihoods.matching import Matching
from flowrl.settings.base import OnResume, Settings
from flowrl.settings.model.engine import EngineSettings
from flowrl.settings.model.environment import EnvironmentSettings, StepSettings, check_turns
from flowrl.settings.model.image_tokens import ImageTokenSettings
from flowrl.settings.model.kinds import AnyModel
from flowrl.settings.model.language import LanguageSettings, RewriterSettings
from flowrl.settings.model.levels import Sigmas, levels_of
from flowrl.settings.model.model import ModelSettings
from flowrl.settings.model.pipeline import Guidance, GuidanceScale, PipelineSettings
from flowrl.settings.model.server import Server
from flowrl.settings.sections.ask import AskSettings
from flowrl.settings.sections.budget import BudgetSettings
from flowrl.settings.sections.data import PromptFiles, RewardSpec, check_sets
from flowrl.settings.sections.given import GivenSettings, with_prompts
from flowrl.settings.sections.joint import JointSettings
from flowrl.settings.sections.recipe import RecipeSettings
from flowrl.settings.sections.recipe_kinds import EveryRecipe, recipe_kind
from flowrl.settings.sections.teachers import TeacherSettings, check_teachers
from flowrl.settings.sections.train import (
    Checkpoint,
    EvaluateSettings,
    StatesSettings,
    Track,
    Train,
)
from flowrl.settings.sections.workers import WorkerSettings
from flowrl.settings.words.names import suggestion
from flowrl.settings.words.scores import TRAINED
from flowrl.settings.words.short_forms import reward_list
from samplers import FlowSDE, Planner

SIZES = ("height", "width", "num_frames")  # of samples, that evaluations may have for themselves
RewardsByName = dict[str, float | dict[str, Any] | None]  # names to weights or settings
RewardList = Annotated[
    tuple[RewardSpec, ...],
    BeforeValidator(
        reward_list,
        json_schema_input_type=str
        | RewardSpec
        | RewardsByName
        | list[str | RewardSpec | RewardsByName],
    ),
]
EVALUATION = "evaluation"  # the average that evaluations use, if the run keeps one


class Steer(Settings):
    """Feynman-Kac particles (arXiv:2501.06848) as the samples of some iterations: Flow-SDE steps,
    resampled in proportion to exp(strength * reward) of the predicted sample. Only for losses on
    clean samples: AWM, NFT, DPO, reward-weighted."""

    iterations: tuple[int, int]
    """Iterations [first, stop) with steering; in other iterations the recipe samples."""
    at: tuple[int, ...] | None = None
    """Steps before which particles are resampled; null: every second step."""
    strength: float = Field(default=5.0, ge=0)
    """Weight of the reward in exp(strength * reward)."""
    potential: Literal["difference", "max", "sum", "terminal"] = "max"
    """The reward of a particle: its gain, its maximum or sum so far, or its last reward."""
    adaptive: bool = True
    """Resample only if a few particles have most of the weight."""
    eta: float = Field(default=0.7, gt=0)
    """Noise of the Flow-SDE steps."""

    def around(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm with particles in these iterations. UserError for text recipes."""
        if algorithm.text:
            raise UserError(
                "steer: particles are only for images and videos; leave it out for texts"
            )
        assert isinstance(algorithm.plan, Planner)
        with feature_files("samplers.routes", "steer"):
            from samplers import FeynmanKac, Particled
        at = self.at or tuple(range(1, algorithm.steps - 1, 2))
        how = FeynmanKac(at, self.strength, self.potential, start=None, adaptive=self.adaptive)
        plan = Particled(algorithm.plan, FlowSDE(self.eta), algorithm.group, how, *self.iterations)
        return replace(algorithm, plan=plan)


class RunSettings(Settings):
    """All settings of a run."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "track": OnResume.FREE,
        "checkpoint": OnResume.FREE,
    }
    recipe: Annotated[SerializeAsAny[RecipeSettings], EveryRecipe]
    model: AnyModel
    prompts: PromptFiles
    rewards: RewardList = Field(min_length=1)
    """Rewards of training; samples are compared by their weighted sum."""
    held_out_rewards: RewardList = ()
    """Rewards of evaluations; if empty, the training rewards."""
    given: GivenSettings | None = None
    intermediate_rewards: RewardList = ()
    """Rewards of predicted clean images during sampling, for recipes and steering that use them; if
    empty, the training rewards. Of texts: of all up to the end of a turn or step, for recipes that
    compare those. A reward may return None for an image that is not clear enough yet."""
    teachers: TeacherSettings | None = None
    """Trained weights to distil into the student, for distillation recipes."""
    budget: BudgetSettings = BudgetSettings()
    train: Train = Train()
    workers: WorkerSettings = WorkerSettings()
    steer: Steer | None = None
    ask: AskSettings | None = None
    evaluate: EvaluateSettings = EvaluateSettings()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()

    @model_validator(mode="before")
    @classmethod
    def _prompts_of_given(cls, tree: Any) -> Any:
        return with_prompts(tree)

    @field_validator("recipe", mode="wrap")
    @classmethod
    def _by_name(cls, value: Any, _: Callable[[Any], Any]) -> RecipeSettings:
        """Check only the settings of the named recipe, since errors of other recipes would hide its
        own."""
        if isinstance(value, RecipeSettings):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"expected a name, or {{name: NAME, ...settings}}, not {value!r}")
        try:
            kind = recipe_kind(value.get("name"))
        except UserError as error:
            raise ValueError(str(error)) from error
        return kind.model_validate(value)

    def averages(self, algorithm: Algorithm) -> tuple[Average, ...]:
        """Averages of the algorithm and of `evaluate.average`."""
        if self.evaluate.average is None:
            return algorithm.averages
        return (*algorithm.averages, Average(EVALUATION, Decay(start=self.evaluate.average)))

    def algorithm(self) -> Algorithm:
        """The recipe with its settings, plus the correction for a server or an engine, the steering
        and the budget.

        UserError for choices that cannot be combined.
        """
        algorithm = self.recipe.algorithm()
        if self.server is not None and algorithm.text:
            if self.decouples(algorithm):
                algorithm = self.workers.within_clip(algorithm)
            algorithm = self.server.around(algorithm)
        elif self.decouples(algorithm):
            algorithm = self.workers.around(algorithm)
        if algorithm.text:
            scored = bool(self.intermediate_rewards)
            check_turns(self.environment, self.text_steps, algorithm, scored)
        if self.steer is not None:
            algorithm = self.steer.around(algorithm)
        check_teachers(self.teachers, algorithm)
        check_intermediate(algorithm, bool(self.intermediate_rewards), self.budget)
        algorithm = self.budget.around(algorithm)
        return algorithm if self.engine is None else self.engine.around(algorithm)

    @property
    def server(self) -> Server | None:
        """Server that generates completions; None: the model itself generates."""
        return self.model.server if isinstance(self.model, LanguageSettings) else None

    @property
    def engine(self) -> EngineSettings | None:
        """Sampler elsewhere that draws a pipeline's samples; None: the pipeline itself samples."""
        return self.model.engine if isinstance(self.model, PipelineSettings) else None

    @property
    def environment(self) -> EnvironmentSettings | None:
        """The environment that replies to the model's texts; None: texts have one turn."""
        return self.model.environment if isinstance(self.model, LanguageSettings) else None

    @property
    def text_steps(self) -> StepSettings | None:
        """The steps into which texts are cut; None: they are not cut."""
        return self.model.steps if isinstance(self.model, LanguageSettings) else None

    @property
    def image_tokens(self) -> ImageTokenSettings | None:
        """Images that a language model writes as tokens; None: its samples are texts, or the run
        has no language model."""
        return self.model.image if isinstance(self.model, LanguageSettings) else None

    @property
    def writes_texts(self) -> bool:
        """Whether the samples are texts."""
        return isinstance(self.model, LanguageSettings) and self.model.image is None

    @property
    def rewriter(self) -> RewriterSettings | None:
        """The language model that writes the pipeline's prompts, if one does."""
        return self.model.rewriter if isinstance(self.model, PipelineSettings) else None

    @property
    def sigmas(self) -> Sigmas | None:
        """Noise levels in place of the model's own, if the run sets them."""
        return None if isinstance(self.model, LanguageSettings) else self.model.sigmas

    @property
    def guidance(self) -> Guidance:
        """Guidance of a pipeline; other models have none, which is scale 1."""
        return self.model.guidance if isinstance(self.model, PipelineSettings) else Guidance()

    @property
    def joint(self) -> JointSettings | None:
        """The recipe, if two models learn together."""
        return self.recipe if isinstance(self.recipe, JointSettings) else None

    @property
    def prompt_writer(self) -> "RunSettings | None":
        """The run of the language model that writes this run's prompts: the same prompts, rewards
        and iterations with its own recipe, model and learning rate. None: prompts are used as
        given."""
        joint, rewriter = self.joint, self.rewriter
        if joint is None or rewriter is None:
            return None
        train = {"lr": self.train.rewriter_lr or self.train.lr, "gradient_checkpointing": False}
        changed = {
            "recipe": joint.text_recipe,
            "model": rewriter.model(),
            "train": self.train.model_copy(update={**train, "states": StatesSettings()}),
            "evaluate": self.evaluate.model_copy(
                update=dict.fromkeys(("steps", "guidance", *SIZES)) | {"call": {}}
            ),
            "steer": None,
            "intermediate_rewards": (),
        }
        return self.model_copy(update=changed)

    @property
    def learns(self) -> bool:
        """Whether this run's own model is trained."""
        return self.joint is None or self.joint.train != "text"

    @property
    def drawn(self) -> int:
        """Number of an iteration's prompts that get generated samples; the others have given
        samples."""
        draws = self.prompts.per_iteration
        return draws if self.given is None else draws - self.given.count(draws)

    @property
    def rewritings(self) -> int:
        """Draws per prompt: one, or in a joint run one per rewriting."""
        return 1 if self.prompt_writer is None else self.prompt_writer.algorithm().group

    @property
    def asked_intermediate(self) -> tuple[RewardSpec, ...]:
        """Rewards of intermediate states."""
        return self.intermediate_rewards or self.rewards

    @property
    def judges(self) -> tuple[RewardSpec, ...]:
        """Evaluation rewards: the held-out ones, or the training ones."""
        return self.held_out_rewards or self.rewards

    @property
    def trained_beside(self) -> tuple[RewardSpec, ...]:
        """Training rewards that evaluations measure beside the held-out ones, under names of their
        own; none where the held-out ones are the same, or there are none."""
        if not self.held_out_rewards or not self.evaluate.trained:
            return ()
        judging = [(spec.name, spec.settings) for spec in self.held_out_rewards]
        return tuple(
            spec.model_copy(update={"label": TRAINED + spec.label})
            for spec in self.rewards
            if (spec.name, spec.settings) not in judging
        )

    @property
    def evaluation_steps(self) -> int:
        """Number of denoising steps in evaluations; for texts, the maximum number of tokens."""
        return self.evaluate.steps or self.algorithm().steps

    def levels(self, steps: int) -> tuple[float, ...]:
        """Levels of `model.sigmas` with the final 0. Without that setting, evenly spaced levels are
        used in place of the pipeline's, which only its call shows."""
        if self.sigmas is not None:
            return (*levels_of(self.sigmas, steps), 0.0)
        return tuple(1 - k / steps for k in range(steps + 1))

    @property
    def evaluation_guidance(self) -> GuidanceScale:
        """Guidance scale of evaluations; None is the pipeline's own."""
        e = self.evaluate
        return self.guidance.sample if e.guidance is None else e.guidance

    @property
    def training_guidance(self) -> GuidanceScale:
        """Guidance scale of the rows on which the loss is computed; None is the pipeline's own."""
        guidance = self.guidance
        if guidance.train != "auto":
            return guidance.train
        return "none" if isinstance(self.algorithm().likelihood, Matching) else guidance.sample

    @property
    def trained_model(self) -> ModelSettings:
        """The model's settings, a pipeline's with the guidance of training as a scale."""
        if not isinstance(self.model, PipelineSettings):
            return self.model
        guidance = self.model.guidance.model_copy(update={"train": self.training_guidance})
        return self.model.model_copy(update={"guidance": guidance})

    @property
    def evaluation_size(self) -> dict[str, int]:
        """Height, width and frames of evaluations, each only if it differs from training's."""
        sizes = {name: getattr(self.evaluate, name) for name in SIZES}
        return {k: v for k, v in sizes.items() if v is not None and v != self.trained_size[k]}

    @property
    def trained_size(self) -> dict[str, int | None]:
        """Height, width and frames of training; None for the pipeline's own."""
        m = self.model
        if not isinstance(m, PipelineSettings):
            return dict.fromkeys(SIZES)
        sizes = {"height": m.height, "width": m.width, "num_frames": None}
        return {name: m.call.get(name, value) for name, value in sizes.items()}

    @property
    def exported(self) -> str:
        """Name of the folder with the last weights."""
        if not self.learns:
            return "weights"
        whole = "pipeline" if isinstance(self.model, PipelineSettings) else "model"
        return "adapter" if self.model.lora else whole

    @property
    def recomputes_old(self) -> bool:
        """`train.recompute_old`, or its default: true where rounding changes log-probabilities by
        more than a clip range, and where an engine samples. Replayed texts keep theirs; replayed
        images are not marked."""
        if self.train.recompute_old is not None:
            return self.train.recompute_old
        if self.engine is not None:
            return True
        half = self.model.dtype in ("bfloat16", "float16")
        return half and not (self.budget.replay and isinstance(self.model, PipelineSettings))

    def decouples(self, algorithm: Algorithm) -> bool:
        """Whether `old` is the proximal policy, with the weights at the start of an update, rather
        than the sampling policy (PPO's decoupled objective, arXiv:2110.00641)."""
        stored = not isinstance(algorithm.likelihood, Matching) and "old" in algorithm.loss.roles
        return self.workers.lag > 0 and self.recomputes_old and stored

    @model_validator(mode="after")
    def _consistent(self) -> "RunSettings":
        for place, specs in (
            ("rewards", self.rewards),
            ("held_out_rewards", self.held_out_rewards),
            ("intermediate_rewards", self.intermediate_rewards),
        ):
            labels = [spec.label for spec in specs]
            if len(set(labels)) < len(labels):
                raise ValueError(
                    f"{place}: {labels} are not unique; remove one, or give it a `label`"
                )
        check_sets(self.prompts, self.held_out_rewards, (*self.rewards, *self.intermediate_rewards))
        if self.recipe.modalities is not None:
            reward_labels = [spec.label for spec in self.rewards]
            named = [name for names in self.recipe.modalities.values() for name in names]
            odd = [name for name in named if name not in reward_labels]
            if odd or set(reward_labels) - set(named):
                which = odd[0] if odd else next(name for name in reward_labels if name not in named)
                labels = ", ".join(reward_labels)
                raise ValueError(
                    f"recipe.modalities: {which} is none of the rewards: name one of {labels}"
                    if odd
                    else f"recipe.modalities: {which} trains no part: name it for one"
                )
        images = isinstance(self.model, PipelineSettings)
        if self.budget.replay and self.train.recompute_old and images:
            raise ValueError(
                "budget.replay: a replayed image keeps its old log-probabilities, which "
                "train.recompute_old would replace: leave one of the two out"
            )
        if self.engine is not None:
            self._check_engine()
        if self.given is not None and self.given.share < 1 and self.drawn == 0:
            raise ValueError(
                f"given.share: {self.given.share:g} of prompts.per_iteration "
                f"{self.prompts.per_iteration} leaves no prompts to sample: raise "
                "per_iteration, lower the share, or set it to 1"
            )
        if self.joint is not None and self.image_tokens is not None:
            raise ValueError(
                "model.image: a joint run's images are a pipeline's: set model.pipeline, or train "
                "this model by itself, with a recipe for texts such as text_grpo"
            )
        if (self.joint is None) != (self.rewriter is None):
            raise ValueError(
                "model.rewriter: model.rewriter and the recipe joint need each other, but this "
                "run has only one of them"
            )
        goal = None if self.train.until is None else self.train.until.held_out
        if goal is not None and self.prompts.held_out is None:
            raise ValueError(
                "train.until: held_out needs scores of held-out prompts: set prompts.held_out, or "
                "leave it out"
            )
        named = {
            "checkpoint.best": self.checkpoint.best,
            "train.until.held_out.name": None if goal is None else goal.name,
        }
        for place, name in named.items():
            if name is not None and name not in [spec.label for spec in self.judges]:
                labels = [spec.label for spec in self.judges]
                raise ValueError(
                    f"{place}: {name!r} is not a held-out reward; {suggestion(name, labels)}"
                )
        return self

    def _check_engine(self) -> None:
        """ValueError for settings of the pipeline's own sampling beside an engine."""
        if self.train.recompute_old is False:
            raise ValueError(
                "train.recompute_old: an engine's log-densities are not the pipeline's to the bit, "
                "so they are always computed again: leave it out"
            )
        if self.train.states.dtype is not None:
            raise ValueError(
                "train.states.dtype: samples go on from rounded states, which an engine does not "
                "do: leave it out"
            )
        if self.budget.replay:
            raise ValueError(
                "budget.replay: a replayed image keeps its old log-densities, but an engine's are "
                "computed again: leave one of the two out"
            )


def asks_intermediate(algorithm: Algorithm) -> bool:
    """Whether any plan of the run scores intermediate samples, or credit reads rewards of turns."""
    return algorithm.by_turn or bool(algorithm.asks)


def check_intermediate(algorithm: Algorithm, scored: bool, budget: BudgetSettings) -> None:
    """UserError for intermediate rewards that are not used or cannot be compared by the credit,
    and for a budget that needs one advantage per sample. `scored`: whether `intermediate_rewards`
    has any."""
    if scored and not asks_intermediate(algorithm):
        raise UserError(
            "intermediate_rewards: this recipe does not score intermediate states: leave it "
            "out, use a recipe that does (potential_tree, pro_grpo, text_process), or set steer"
        )
    if scored and not differs_between_steps(algorithm.transforms):
        raise UserError(
            "intermediate_rewards: this recipe subtracts intermediate rewards from the "
            "samples' rewards, so both must be the same: leave intermediate_rewards out"
        )
    for name, wanted in (("subset", budget.subset is not None), ("replay", budget.replay > 0)):
        if wanted and (algorithm.by_step or (scored and algorithm.text)):
            raise UserError(
                f"budget.{name} needs one score per sample, but this recipe has credit per "
                "step: leave it out"
            )
