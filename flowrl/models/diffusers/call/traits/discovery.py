"""Discovery of a pipeline's traits: everything that later calls depend on, found by trial calls.

No model family is named here. Trial calls show what a pipeline needs (an image, one prompt per
call, a packed state): each works or fails in the pipeline's own code. All trials are here. Each
ends at its first step or earlier, and the result is one frozen record.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.clocked_entry import ClockedEntry
from flowrl.models.diffusers.call.drive.driver import GUIDER, Driver
from flowrl.models.diffusers.call.drive.latents import Entry, PartEntries, PipelineCall, Target
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES, its_own
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.inputs.columns import Extra
from flowrl.models.diffusers.call.inputs.conditioning import (
    SHORT_PROMPT,
    SINGLE,
    Calls,
    Conditioning,
    EncodingLayout,
    learn,
    left_out,
    same_form,
)
from flowrl.models.diffusers.call.levels.schedule import ModelOutput
from flowrl.models.diffusers.call.levels.user_levels import UserLevels
from flowrl.models.diffusers.call.results.decoder import sound_form
from flowrl.models.diffusers.call.traits import checks
from flowrl.models.diffusers.modular.face import GUIDER_OFF
from flowrl.models.out_of_memory import raise_memory

TRIAL_SIZE = 64  # pixels of a placeholder image, where the call gives no size
TRIAL_FRAMES = 9  # of a placeholder video, likewise
SEGMENT = "segment_frame_length"  # the argument with the frames of a segment of a video
TRIAL_STEPS = 2
STRENGTH_STEPS = 20  # the same where a strength leaves a part of the steps, which must not be none
TRIAL_GUIDANCE = 2.0  # with negative prompts
UNGUIDED = 1.0
_DTYPE = "torch."  # begins the name of a dtype

T = TypeVar("T")


@dataclass(frozen=True)
class Encoding:
    """Form of calls that pass the same kind of extra arguments with each row (a negative prompt,
    an image).

    layout  the split of the outputs of `encode_prompt` into rows
    plain   the same without guidance, if it differs: older pipelines return negative prompts and
            prompts as one tensor, or prompts alone
    per_row whether images are passed once per row, not once per call
    shape   [*d] of one row's state in the loop
    guided_only  numbers of the outputs that are None without guidance, where the form is the same
    """

    layout: EncodingLayout
    plain: EncodingLayout | None
    per_row: bool
    shape: tuple[int, ...]
    guided_only: tuple[int, ...] = ()


class Origin(Enum):
    """Source of a trait, which decides whether a kept proof is found by it or brings it."""

    KEY = "key"  # from the arguments, or from trials at load: another value needs another proof
    ROWS = "rows"  # from the prompts of a run, and known again with them
    PROVEN = "proven"  # shown by the proof's own call alone: kept with the proof


KEY, ROWS, PROVEN = ({"origin": origin} for origin in Origin)


@dataclass(frozen=True)
class Traits:
    """Facts about one pipeline, for the user's arguments `call`.

    name       of its class
    call       the user's arguments without images
    shared     the user's images, which all rows share
    kind       the quantity that its model predicts
    guidance   the argument that sets the guidance scale; None without such an argument
    guider     whether a component guides instead, which calls can leave out
    steps      of a trial call
    required   placeholders for required images
    encodings  encodings by the names of a row's own arguments
    blank      a call with one short prompt, for when only the states matter
    stubs      whether its loop runs with denoisers that return zeros
    entry      the place where a state enters its loop
    levels     the user's noise levels; None for the pipeline's own
    json       whether its prompts are JSON objects

    Some traits show only in the pipeline's own call with two prompts. That call runs all steps, so
    it is not a trial: the proof makes it and sets these four (`showing`).

    single     one prompt per call, because it takes no batch
    form       `output_type`: "np" if a pipeline scales tensors differently from images
    sign       -1 if the loop passes minus the flow's velocity to its scheduler
    later      dtype of the states after the first step, if a prediction depends on it (HunyuanVideo
               rounds its timesteps to it); None: that of the first state
    """

    name: str = field(metadata=KEY)
    call: Mapping[str, Any] = field(metadata=KEY)
    shared: Extra = field(metadata=KEY)
    kind: ModelOutput = field(metadata=KEY)
    guidance: str | None = field(metadata=KEY)
    steps: int = field(metadata=KEY)
    guider: bool = field(default=False, metadata=KEY)
    required: Extra = field(default_factory=dict, metadata=ROWS)
    encodings: Mapping[tuple[str, ...], Encoding] = field(default_factory=dict, metadata=ROWS)
    blank: Conditioning = field(
        default=Conditioning(SINGLE, ([()],), (SHORT_PROMPT,)), metadata=ROWS
    )
    stubs: bool = field(default=True, metadata=ROWS)
    entry: Entry | PartEntries | ClockedEntry = field(default=Entry(), metadata=ROWS)
    levels: UserLevels | None = field(default=None, metadata=KEY)
    json: bool = field(default=False, metadata=KEY)
    single: bool = field(default=False, metadata=PROVEN)
    form: Literal["pt", "np"] = field(default="pt", metadata=PROVEN)
    sign: Literal[1, -1] = field(default=1, metadata=PROVEN)
    later: torch.dtype | None = field(default=None, metadata=PROVEN)

    @property
    def trial_guidance(self) -> float | None:
        """A guidance scale above 1 for trials: some pipelines cannot be called without guidance
        (Ideogram 4)."""
        return None if self.guidance is None else TRIAL_GUIDANCE

    def arguments(
        self,
        prompts: Sequence[str],
        steps: int,
        guidance: float | None,
        extras: Sequence[Extra] = (),
    ) -> dict[str, Any]:
        """Arguments of the pipeline's own call that make one sample per prompt.

        `extras` are arguments per row, whose encoding is known. Raises UserError for guidance with
        a pipeline that takes none.
        """
        assert len(extras) in (0, len(prompts))
        arguments = dict(self.call)
        for name, value in arguments.items():
            if columns.TEXT_COLUMNS.fullmatch(name) and isinstance(value, str):
                arguments[name] = [value] * len(prompts)
        if extras:
            arguments |= columns.merged_call(
                extras, per_row=self.encodings[tuple(extras[0])].per_row
            )
        texts = [columns.instruction(prompt) if self.json else prompt for prompt in prompts]
        arguments |= {"prompt": texts, "num_inference_steps": steps}
        arguments |= {"output_type": self.form, "return_dict": False}
        arguments |= {} if self.levels is None else {"sigmas": list(self.levels.at(steps))}
        if self.single:
            texts = [
                name
                for name in arguments
                if columns.TEXT_COLUMNS.fullmatch(name) and arguments[name]
            ]
            arguments |= {name: arguments[name][0] for name in texts}
        if guidance is not None:
            if self.guidance is None and self.guider and guidance == GUIDER_OFF:
                return arguments | {GUIDER: GUIDER_OFF}
            checks.refuse_scale(self.name, self.guidance, guidance)
            assert self.guidance is not None, "a number is refused without the argument"
            arguments[self.guidance] = float(guidance)
        return arguments

    def trial_call(self, conditioning: Conditioning, steps: int) -> PipelineCall:
        """A call for trials, at their guidance scale: only its states are read, not its result."""
        prompts, extras = conditioning.prompts, conditioning.extras
        arguments = self.arguments(prompts, steps, self.trial_guidance, extras)
        return PipelineCall(arguments, conditioning.calls(), stubs=self.stubs)

    @classmethod
    def of_origin(cls, origin: Origin) -> list[str]:
        """Names of the traits that are known in this way."""
        return [trait.name for trait in fields(cls) if trait.metadata["origin"] is origin]

    @property
    def key(self) -> dict[str, Any]:
        """The arguments and what trials found, as plain data by which a kept proof is found."""
        values = {name: getattr(self, name) for name in self.of_origin(Origin.KEY)}
        levels = None if self.levels is None else self.levels.at(self.levels.trial)
        return values | {"levels": levels}

    @property
    def proven(self) -> dict[str, Any]:
        """Traits that only the pipeline's own call shows, as plain data that `showing` reads."""
        values = {name: getattr(self, name) for name in self.of_origin(Origin.PROVEN)}
        dtypes = {k: str(v) for k, v in values.items() if isinstance(v, torch.dtype)}
        return values | dtypes

    def showing(self, **shown: Any) -> "Traits":
        """The same traits with what the pipeline's own call has shown, by name; dtypes may be
        texts. Other rows per call are encoded otherwise."""
        unknown = shown.keys() - set(self.of_origin(Origin.PROVEN))
        assert not unknown, f"{unknown} are found by trials"
        for name, value in shown.items():
            if isinstance(value, str) and value.startswith(_DTYPE):
                shown[name] = getattr(torch, value.removeprefix(_DTYPE))
        single = shown.get("single", self.single)
        encodings = self.encodings if single == self.single else {}
        return replace(self, encodings=encodings, **shown)

    def knowing(self, extra: Extra, encoding: Encoding) -> "Traits":
        return replace(self, encodings={**self.encodings, tuple(extra): encoding})


def discover(driver: Driver, call: Mapping[str, Any], levels: UserLevels | None) -> Traits:
    """Determine a pipeline's traits. UserError, with the reason, if it cannot be driven; of several
    images in `call`, where it takes one, as `loop.image_shapes.check_several` finds it out."""
    lists = columns.several({name: value for name, value in call.items() if value is not None})
    if lists:
        columns.shared_images(call)  # refuses what cannot be read
    try:
        return _discovered(driver, call, levels)
    except UserError as error:
        if not lists:
            raise
        try:
            _discovered(driver, {**call, **{n: value[0] for n, value in lists.items()}}, levels)
        except UserError:
            raise error from None  # of another cause
        owner = type(driver.pipe).__name__
        raise UserError(columns.one_there(columns.IN_CALL, lists, owner)) from error


def _discovered(driver: Driver, call: Mapping[str, Any], levels: UserLevels | None) -> Traits:
    name, parameters = type(driver.pipe).__name__, driver.parameters
    kind = checks.prediction(driver.pipe.scheduler, name)
    guidance = checks.guidance_argument(parameters, tuple(driver.denoisers.values()))
    call_arguments = checks.arguments(name, call, parameters, guidance)
    call_arguments = columns.with_sounds(call_arguments, sound_form(driver.pipe))
    steps = STRENGTH_STEPS if "strength" in parameters else TRIAL_STEPS
    traits = Traits(
        name,
        {k: value for k, value in call_arguments.items() if not columns.images({k: value})},
        columns.shared_images(call_arguments),
        kind,
        guidance,
        steps if levels is None else levels.trial,
        guider=guidance is None and driver.guider is not None,
        levels=levels,
        sign=-1 if kind == "inverted" else 1,
    )
    with its_own(name, traits.call):
        try:
            return _with_entry(driver, _with_required(driver, traits))
        except ValueError as error:
            if "JSON" not in str(error):
                raise
        return _with_entry(driver, _with_required(driver, replace(traits, json=True)))


def with_images(driver: Driver, traits: Traits, images: Extra) -> Traits:
    """The same traits with the form of states from these images instead of placeholders."""
    traits = replace(traits, required=images)
    return _with_entry(driver, traits.knowing(images, discover_encoding(driver, traits, images)))


def discover_encoding(driver: Driver, traits: Traits, extra: Extra) -> Encoding:
    """Determine how rows with extra arguments of these names are passed and encoded."""
    choices = (False, True) if columns.images(extra) else (False,)
    return _first_to_work(partial(_encoding, driver, traits, extra, per_row) for per_row in choices)


def encoded(
    driver: Driver,
    traits: Traits,
    prompts: Sequence[str],
    extras: Sequence[Extra],
    scale: float = TRIAL_GUIDANCE,
) -> Calls:
    """Outputs of `encode_prompt`, at a guidance scale if the pipeline has one."""
    guidance = None if traits.guidance is None else scale
    return driver.encoded(traits.arguments(prompts, traits.steps, guidance, extras))


def _with_required(driver: Driver, traits: Traits) -> Traits:
    """Find the images and sounds that the pipeline requires, and how rows with these are encoded.

    A pipeline that does not accept batches is called with one prompt at a time.
    """
    width, height = (traits.call.get(name, TRIAL_SIZE) for name in ("width", "height"))
    frames = _trial_frames(driver, traits.call)
    likely = [[], *checks.needed_images(driver.parameters)]
    most_images = len(likely) - 1
    form = sound_form(driver.pipe)
    sound_names = [
        name for name in columns.sounds(driver.parameters) if traits.call.get(name) is None
    ]
    likely += [sound_names] if sound_names and form is not None else []

    def trial(names: Sequence[str], single: bool) -> Traits:
        images = {**columns.placeholder_images(names, width, height, frames), **traits.shared}
        if names is sound_names and form is not None:
            images = {**columns.placeholder_sounds(names, form), **traits.shared}
        tried = replace(traits, required=images, single=single)
        return tried.knowing(images, discover_encoding(driver, tried, images))

    trials = (partial(trial, names, single) for single in (False, True) for names in likely)
    # the reason to show is that of a batch with the most images that can be given
    return _first_to_work(trials, reason=most_images)


def _trial_frames(driver: Driver, call: Mapping[str, Any]) -> int:
    """The frames of a placeholder video: as many as are asked for, or as a segment has, of which a
    shorter video is none (Wan-Animate 2)."""
    if "num_frames" in call:
        return call["num_frames"]
    segment = driver.parameters.get(SEGMENT)
    return TRIAL_FRAMES if segment is None else call.get(SEGMENT, segment.default)


def _with_entry(driver: Driver, traits: Traits) -> Traits:
    """Find the blank call, the entry of a state, and whether stubs can replace the denoisers.

    A loop that reads inside its denoisers (attention maps, keys and values) fails with stubs, but
    not during the one run that records the form of the outputs.
    """
    extras = (traits.required,) if traits.required else ()
    shape = traits.encodings[tuple(traits.required)].shape
    calls = encoded(driver, traits, [SHORT_PROMPT], extras)
    traits = replace(traits, blank=Conditioning(SINGLE, ([calls],), (SHORT_PROMPT,), extras))
    call = traits.trial_call(traits.blank, traits.steps)

    def trial(stubs: bool) -> tuple[bool, Entry | PartEntries]:
        return stubs, driver.find_entry(replace(call, stubs=stubs), shape)

    with torch.no_grad():
        stubs, entry = _first_to_work(partial(trial, stubs) for stubs in (True, False))
        return replace(traits, entry=entry, stubs=stubs and driver.takes_stubs(call))


def _encoding(driver: Driver, traits: Traits, extra: Extra, per_row: bool) -> Encoding:
    """Probe the encoder with prompts, and the denoiser with two rows.

    Every text argument takes the probes' lengths, since a pipeline may omit a mask if all lengths
    are equal.
    """
    traits = traits.knowing(extra, Encoding(SINGLE, None, per_row, ()))  # for the arguments
    texts = [name for name in extra if columns.TEXT_COLUMNS.fullmatch(name)]

    def encode(scale: float, prompts: Sequence[str]) -> Calls:
        rows = [{**extra, **dict.fromkeys(texts, prompt)} for prompt in prompts]
        return encoded(driver, traits, prompts, rows if extra else (), scale)

    def layout(scale: float) -> EncodingLayout:
        return SINGLE if traits.single else learn(partial(encode, scale), traits.name)

    guided = layout(TRIAL_GUIDANCE)
    prompts = (SHORT_PROMPT,) * (1 if traits.single else 2)
    calls, rows = encode(TRIAL_GUIDANCE, prompts), (extra,) * len(prompts) if extra else ()
    call = traits.trial_call(Conditioning(SINGLE, ([calls],), prompts, rows), traits.steps)
    with torch.no_grad(), driver.stubs.learning():
        first = driver.received(call, Target(torch.empty(0), 0)).folded(len(prompts))
        parts = driver.parts(call)
    shape = tuple(first.sample.shape[1:]) if parts is None else (parts.size,)
    encoding = Encoding(guided, None, per_row, shape)
    pair = _with_and_without(driver, traits, rows[:1])
    if pair is None:
        return encoding
    if not same_form(*pair):
        return replace(encoding, plain=layout(UNGUIDED))
    return replace(encoding, guided_only=left_out(*pair))


def _with_and_without(
    driver: Driver, traits: Traits, rows: Sequence[Extra]
) -> tuple[Calls, Calls] | None:
    """Outputs of `encode_prompt` with guidance and without; None for a pipeline that has only one
    of them."""
    if traits.guidance is None:
        return None
    guided = encoded(driver, traits, [SHORT_PROMPT], rows)
    try:
        return guided, encoded(driver, traits, [SHORT_PROMPT], rows, UNGUIDED)
    except FAILURES as error:  # it cannot be called without guidance (Ideogram 4)
        raise_memory(error)
        return None


def _first_to_work(trials: Iterable[Callable[[], T]], reason: int = 0) -> T:
    """Return the first result; if all fail, raise the error of the trial numbered `reason`."""
    reasons: list[Exception] = []
    for trial in trials:
        try:
            return trial()
        except FAILURES as error:
            raise_memory(error)
            reasons.append(error)
    raise reasons[reason]
