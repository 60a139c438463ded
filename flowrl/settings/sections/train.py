"""Training, evaluation, checkpoints and trackers."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from flowrl.settings.base import WITHOUT_COMMAS, OnResume, Settings
from flowrl.settings.model.pipeline import GuidanceScale
from rewards.rights import Account


class ScheduleSettings(Settings):
    """Schedule of the learning rate over the iterations."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = Field(default=0, ge=0)
    """Iterations of linear warm-up."""


CallKind = Literal["sampling", "decoding", "training"]
RowCount = Literal["auto"] | Annotated[int, Field(ge=1)]


class RowsPerCall(Settings):
    """Maximum rows per call of the model, by the kind of call."""

    sampling: RowCount = "auto"
    """Rows per call of the text encoders and the denoiser, or of generation."""
    decoding: RowCount = "auto"
    """Rows per call of the decoder."""
    training: RowCount = "auto"
    """Rows per call of the update's evaluations, with and without gradients."""


def checked_rows(value: Any, place: str = "") -> Any:
    """A number of rows, or auto. ValueError, with the `place`, for anything else."""
    text = str(value)
    if value == "auto":
        return value
    if not isinstance(value, bool) and text.isdecimal() and text.strip("0"):
        if len(text) > 18:  # torch counts rows in 64 bits
            raise ValueError(f"{place}{text[:100]!r} is more rows than a call can have")
        return value
    raise ValueError(f"{place}{text[:100]!r} is neither auto nor a number of rows of at least 1")


class StatesSettings(Settings):
    """Dtype and device in which states of images and videos are kept until the update."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {"device": OnResume.FREE, "dtype": OnResume.SAID}
    dtype: Literal["bfloat16", "float16"] | None = None
    """Half precision halves their memory. The sampler continues from the rounded state, so the
    ratio of unchanged weights stays 1. null: as computed, in float32 or better."""
    device: Literal["cpu"] | None = None
    """cpu: in the CPU's memory, from which each call of the update copies its own states; no number
    changes. null: on the model's device."""


AdamDecay = Annotated[float, Field(ge=0, lt=1)]


class HeldOutGoal(Settings):
    """A held-out score with which a run is done."""

    name: str | None = None
    """Label of a held-out reward; null: the one that decides which weights are best."""
    at_least: float
    """The mean over held-out prompts that has to be reached."""
    evaluations: int = Field(default=1, ge=1, alias="for")
    """Number of evaluations in a row that have to reach it."""


class Until(Settings):
    """Ends of a run before train.iterations, whichever comes first. The iteration in progress is
    finished, evaluated, saved and exported like the last one; a resume with a farther end goes
    on."""

    held_out: HeldOutGoal | None = None
    hours: float | None = Field(default=None, gt=0)
    """Hours of training, without the start and evaluations before it, over all starts."""
    samples: int | None = Field(default=None, ge=1)
    """Samples given to rewards (`count/scored`), over all iterations."""

    @model_validator(mode="after")
    def _ends(self) -> "Until":
        if self.held_out is None and self.hours is None and self.samples is None:
            raise ValueError("give one of held_out, hours and samples, or leave it out")
        return self


class Train(Settings):
    """The optimizer, and the length of a run."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "gradient_checkpointing": OnResume.FREE,
        "on_failure": OnResume.FREE,
        "alarms": OnResume.FREE,
        "self_test": OnResume.FREE,
        "optimizer": OnResume.NEVER,
    }
    iterations: int = Field(default=100, ge=1)
    until: Until | None = None
    """Ends before that: {hours: 12}, {samples: 100000}, {held_out: {at_least: 0.9, for: 2}}."""
    lr: float = Field(default=3e-4, gt=0, le=1)
    """Learning rate, at most 1. 3e-4 is for adapters; all weights of a large model need about 1e-6
    to 1e-5."""
    rewriter_lr: float | None = Field(default=None, gt=0, le=1)
    """Learning rate of model.rewriter; null: lr."""
    schedule: ScheduleSettings = ScheduleSettings()
    updates: int = Field(default=1, ge=1)
    """Optimizer steps per pass over an iteration's samples; each sees an equal share of them."""
    epochs: int = Field(default=1, ge=1)
    """Passes over an iteration's samples (num_iterations of TRL, ppo_epochs of verl), in the same
    shares. The ratio is relative to the sampling policy, so that losses clip the change over all
    passes."""
    rows_per_call: RowCount | RowsPerCall = "auto"
    """Maximum rows per call of the model: one number, auto, or a mapping with sampling, decoding
    and training. auto: from the settings on a CPU and for texts, by a search on a GPU. A size is
    halved after an out-of-memory error."""
    states: StatesSettings = StatesSettings()
    noise: Literal["generator", "counter"] = "generator"
    """Where the noise of images and videos is drawn, from the same keys. generator: on the CPU, by
    torch. counter: on the model's device, which copies none; the same bits on every device, and
    others than generator's."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the model's blocks, and run the blocks again for gradients: a third
    more time for a fraction of the memory."""
    share_prompts: bool = False
    """Evaluate shared prefixes of a call's texts once in the update: the prompt of a group, the
    trunk of a tree. Faster, especially for long prompts; equal up to rounding. For
    model.language."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit (from bitsandbytes) keeps 2 bytes per trained weight instead of 8."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    betas: tuple[AdamDecay, AdamDecay] = (0.9, 0.999)
    weight_decay: float = Field(default=1e-4, ge=0)
    recompute_old: bool | None = None
    """Recompute the samples' log-probabilities at the training batch's shape, so that the first
    ratio is exactly 1. null: for a half-precision model.dtype, unless images are replayed; replayed
    texts keep theirs. With one update this costs nothing."""
    on_failure: Literal["raise", "skip_group"] = "raise"
    """Action if a whole group has no score."""
    alarms: Literal["warn", "stop", "off"] = "warn"
    """Action on signs of collapse, reward hacking or lost scores: see docs/alarms.md."""
    self_test: Literal["raise", "warn", "off"] = "raise"
    """Action if a reward fails its test at the start."""
    seed: int = 0

    @field_validator("rows_per_call", mode="before")
    @classmethod
    def _rows(cls, value: Any) -> Any:
        """Report one sentence per error, instead of one per possible type of the value."""
        if not isinstance(value, Mapping):
            return value if isinstance(value, RowsPerCall) else checked_rows(value)
        names = list(RowsPerCall.model_fields)
        unknown = sorted(map(str, value.keys() - {*names}))
        if unknown:
            raise ValueError(f"{unknown[0][:100]!r} is not one of {', '.join(names)}")
        return {name: checked_rows(rows, f"{name}: ") for name, rows in value.items()}

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per iteration."""
        return self.updates * self.epochs

    @property
    def call_sizes(self) -> dict[CallKind, RowCount]:
        """`rows_per_call` for each kind of call."""
        rows = self.rows_per_call
        if not isinstance(rows, RowsPerCall):
            rows = RowsPerCall(sampling=rows, decoding=rows, training=rows)
        return {
            "sampling": rows.sampling,
            "decoding": rows.decoding,
            "training": rows.training,
        }


class EvaluateSettings(Settings):
    """Evaluations: deterministic samples of held-out prompts and their scores."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {"average": OnResume.NEVER}
    every: int = Field(default=10, ge=1)
    steps: int | None = Field(default=None, ge=1, le=1_000_000)
    """Denoising steps (num inference steps), or the maximum tokens of a text; null: the
    recipe's."""
    temperature: float = Field(default=1.0, ge=0)
    """Temperature of text; 0 takes the likeliest token, so all samples of a prompt are equal."""
    guidance: GuidanceScale = None
    """Guidance scale of images and videos, none: without; null: model.guidance.sample."""
    call: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the pipeline's call in evaluations alone, over those of model.call."""
    height: int | None = Field(default=None, ge=1)
    """Height of images and videos in pixels; null: model.height."""
    width: int | None = Field(default=None, ge=1)
    """Width of images and videos in pixels; null: model.width."""
    num_frames: int | None = Field(default=None, ge=1)
    """Frames of videos; null: those of training."""
    samples: int = Field(default=512, ge=1, le=1_000_000)
    per_prompt: int = Field(default=4, ge=1, le=100_000)
    """Minimum samples per prompt, from which the diversity is measured."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers k, at most per_prompt, for pass@k: the probability that one of k samples of a prompt
    is a success."""
    majority: bool = False
    """Score the most frequent answer among a prompt's texts (majority vote), for rewards that find
    an answer."""
    success: float = 1.0
    """Minimum score of a success, for pass@k and the majority vote."""
    trained: bool = True
    """Also measure the training rewards, beside held-out rewards that differ from them. Their
    scores, held_out/trained/NAME, choose no weights and raise no alarm. false: where a reward costs
    too much to ask it twice."""
    seed: int = 1234
    average: float | None = Field(default=None, gt=0, lt=1)
    """Decay, per iteration, of the averaged weights that are evaluated and saved; null: none."""

    @field_validator("call")
    @classmethod
    def _of_call(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in ("height", "width", "num_frames"):
            if name in value:
                raise ValueError(f"{name} has a setting of its own: set evaluate.{name}")
        return value

    @model_validator(mode="after")
    def _enough_samples(self) -> "EvaluateSettings":
        if self.pass_at and max(self.pass_at) > self.per_prompt:
            raise ValueError(
                f"pass_at: {max(self.pass_at)} needs that many samples of each prompt, but "
                f"per_prompt is {self.per_prompt}: raise per_prompt"
            )
        return self


class Checkpoint(Settings):
    """Checkpoints for resuming a run, and the best weights."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {"best": OnResume.SAID}
    every: int = Field(default=10, ge=1)
    keep: int = Field(default=2, ge=1)
    best: str | None = None
    """Held-out reward that decides which weights are the best; null: the first."""


class Track(Settings):
    """Trackers for the metrics, and samples to inspect."""

    trackers: tuple[Annotated[Account, WITHOUT_COMMAS], ...] = Field(default=(), alias="with")
    """Trackers of accelerate: tensorboard, wandb, trackio, ..."""
    images: int = Field(default=16, ge=0)
    """Number of samples (images, videos or texts) of each evaluation to write to `samples/`."""
    training: int = Field(default=0, ge=0, le=64)
    """Number of samples of each training iteration to write to `samples/training/`, with their
    rewards and advantages; those of the newest 100 iterations are kept."""
    project: str = Field(default="flowrl", pattern=r"^\w[\w .-]*$")
    """The trackers' project or experiment; for TensorBoard the folder in the run's folder."""
    name: str | None = Field(default=None, min_length=1)
    """The run's name in trackers; null: the name of its folder."""
    tags: tuple[str, ...] = ()
    """Tags of the run in trackers."""
    panel: bool = True
    """Show a live panel on a terminal; false: print a line per iteration."""
