"""Models of published size with random weights, made on the device and handed over as objects.

The denoiser and the decoder have their published configuration, in bfloat16. Prompt encoders have
the published width and one layer, since encodings are made once and are not what is measured. No
file of a model is read or written. A rehearsal has the family's tiny pipeline, handed over alike.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import diffusers
import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from flowrl.iteration.open import open_stages
from flowrl.iteration.ratio_check import noise_floor
from flowrl.models.description import describe
from flowrl.models.diffusers.call.traits import checks
from flowrl.paths import run_file
from flowrl.session.progress import Progress
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings import RunSettings
from flowrl.settings.file.inherit import merged
from flowrl.settings.read import override, read_run
from scripts.benchmarks.real_models import clip_of_width, t5_encoder
from scripts.gpu.trial import Trial
from tests.support import tiny_pipelines_image, tiny_pipelines_video
from tests.support.tiny_pipelines_parts import TOKENS, tokenizer

DEVICE = "cuda"
FIXED = Path(__file__).with_name("fixed.py")
PROMPTS = ("a red ball", "a blue cube on the table")
LONG = 512  # tokens of prompts, as the published encoders pad them
SAME_NORM = 0.2  # relative difference of gradient norms in bfloat16 and float32
MADE = ("transformer", "vae")  # the parts that are not encoders
UpdateFigures = dict[str, float]


Settings = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A run of a published configuration, changed to fit minutes of one GPU.

    changes   of the configuration
    tiny      the pipeline of a rehearsal
    smaller   further changes in a rehearsal
    encoders  builds the scheduler, the encoders and tokenizers at the published width
    decoder   published numbers of the decoder that the table of public configurations lacks, since
              no weight's shape depends on them
    """

    config: str
    changes: Settings
    tiny: Callable[[], Any]
    smaller: Settings
    encoders: Callable[[], dict[str, Any]]
    decoder: Settings


def _sd3_parts() -> dict[str, Any]:
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "text_encoder": CLIPTextModelWithProjection(clip_of_width(768, 12)),
        "tokenizer": tokenizer(77),
        "text_encoder_2": CLIPTextModelWithProjection(clip_of_width(1280, 20)),
        "tokenizer_2": tokenizer(77),
        "text_encoder_3": t5_encoder(),
        "tokenizer_3": tokenizer(LONG),
    }


def _flux_parts() -> dict[str, Any]:
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True
        ),
        "text_encoder": CLIPTextModel(clip_of_width(768, 12)),
        "tokenizer": tokenizer(77),
        "text_encoder_2": t5_encoder(),
        "tokenizer_2": tokenizer(LONG),
    }


def _wan_parts() -> dict[str, Any]:
    from tests.support.zoo.settings import FLOW

    return {
        "scheduler": diffusers.UniPCMultistepScheduler(**FLOW),
        "text_encoder": t5_encoder(),
        "tokenizer": tokenizer(LONG),
    }


SMALL = {"height": 16, "width": 16, "call": {"max_sequence_length": TOKENS}}
SD35 = Subject(
    "papers/flow_grpo_sd35m_pickscore",
    {"recipe": {"group": 8}, "model": {"dtype": "bfloat16"}, "train": {"rows_per_call": 4}},
    tiny_pipelines_image.sd3,
    {"recipe": {"group": 4, "steps": 3}, "model": SMALL | {"lora": {"targets": None}}},
    _sd3_parts,
    {"scaling_factor": 1.5305, "shift_factor": 0.0609},
)
FLUX = Subject(
    "papers/flow_grpo_flux_pickscore",
    {"train": {"rows_per_call": 4, "gradient_checkpointing": True}},
    tiny_pipelines_image.flux,
    {"recipe": {"group": 4, "steps": 3}, "model": SMALL},
    _flux_parts,
    {"scaling_factor": 0.3611, "shift_factor": 0.1159},
)
WAN = Subject(
    "models/wan21_14b",
    {"recipe": {"steps": 3, "group": 2, "window": 1}},
    tiny_pipelines_video.wan,
    {"model": SMALL | {"call": {"num_frames": 5, "max_sequence_length": TOKENS}}},
    _wan_parts,
    {},
)
SUBJECTS = {"sd35": SD35, "flux": FLUX, "wan": WAN}


def settings(subject: Subject, folder: Path, *changes: Settings) -> RunSettings:
    """The run: one prompt an iteration, a reward that does not look, and no evaluations."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    tree: Settings = {
        "prompts": {"train": str(prompts), "held_out": None, "per_iteration": 1},
        "rewards": [{"name": f"{FIXED}:fixed"}],
        "held_out_rewards": [],
        "recipe": {"clip": 1.0},  # random weights in bfloat16: the rounding says nothing
        "model": {"offload": False, "vae": {"slicing": False, "tiling": False}},
        "train": {"self_test": "off", "alarms": "off"},
        "track": {"with": [], "images": 0},
        "evaluate": {"average": None},
    }
    for change in (subject.changes, *changes):
        tree = merged(tree, change)
    return override(read_run(run_file(subject.config)), tree)


def built(subject: Subject, run: RunSettings) -> Any:
    """The pipeline of published size, with random weights on the device."""
    described = describe(run.model)
    assert described is not None, "the table of public configurations has each subject"
    more = {"vae": subject.decoder}
    kinds = {
        name: (getattr(diffusers, config["_class_name"]), {**config, **more.get(name, {})})
        for name, config in described.configs.items()
    }
    return put_together(described.kind, kinds, subject.encoders())


def built_tiny(subject: Subject) -> Any:
    """The tiny pipeline, its denoiser and decoder made again as those of published size are."""
    known = subject.tiny()
    kinds = {name: (type(vars(known)[name]), vars(known)[name].config) for name in MADE}
    rest = {name: part for name, part in known.components.items() if name not in MADE}
    return put_together(type(known), kinds, rest)


def put_together(kind: Any, models: Mapping[str, tuple[Any, Any]], parts: Mapping[str, Any]) -> Any:
    """A pipeline on the device, of parts and of models that are made from class and settings."""
    made = {name: random_model(*model) for name, model in models.items()}
    return kind(**parts, **made).to(DEVICE)


def random_model(kind: Any, config: Any) -> nn.Module:
    """A model of diffusers in bfloat16, made on the device. No matrix is zero: zeros make products
    faster, and gradients nothing."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            model = kind.from_config(config)
            for parameter in model.parameters():
                if parameter.ndim > 1 and not bool(parameter.any()):
                    nn.init.normal_(parameter, std=0.02)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def in_dtype(pipe: Any, dtype: torch.dtype) -> Any:
    """The pipeline in a dtype, but for what `from_pretrained` keeps in float32."""
    pipe.to(dtype=dtype)
    for model in pipe.components.values():
        kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
        for name, parameter in model.named_parameters() if kept else ():
            if kept & set(name.split(".")):
                parameter.data = parameter.data.float()
    return pipe


@contextmanager
def opened(subject: Subject, *changes: Settings, rehearse: bool) -> Iterator[Session]:
    """An opened run whose pipeline is made here and handed over as an object, on the device."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with TemporaryDirectory() as name:
        folder, given = Path(name), [{"model": {"device": DEVICE}}, *changes]
        if rehearse:
            made = built_tiny(subject)
            subject.tiny().save_pretrained(folder / "model")  # what estimates read
            own = {"model": {"pipeline": str(folder / "model")}}
            run = settings(subject, folder, subject.smaller, own, *given)
        else:
            run = settings(subject, folder, *given)
            made = built(subject, run)

        def handed_over(*_: Any, **__: Any) -> Any:
            return in_dtype(made, getattr(torch, run.model.dtype))

        with patch.object(checks, "from_pretrained", handed_over):
            session = open_session(run, folder, open_accelerator(run, folder))
        try:
            yield session
        finally:
            session.learner.close()


def first_update(session: Session) -> UpdateFigures:
    """Loss, gradient norm, and the largest difference of log-densities of sampling and update."""
    stages = open_stages(session, Progress())
    rows = stages.collected(0)
    floor = noise_floor(session.learner, rows)
    metrics = stages.update(rows).metrics
    assert floor is not None, "the recipe stores the densities of its samples"
    return {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "mismatch": floor}


def same_gradients(trial: Trial, what: str, found: dict[str, UpdateFigures]) -> bool:
    """Check that all figures are finite, and that the gradient is as long in both precisions: what
    is fast but wrong fails here."""
    half, whole = found["bfloat16"]["grad_norm"], found["float32"]["grad_norm"]
    finite = all(math.isfinite(value) for each in found.values() for value in each.values())
    difference = abs(half / whole - 1) if whole else math.inf
    return trial.check(
        f"{what}: bfloat16 beside float32", finite and difference <= SAME_NORM,
        difference=difference, allowed=SAME_NORM, **found,
    )  # fmt: skip
