"""A model's configuration files, without its weights: from a folder, the hub's cache, or the table
of public configurations that comes with flowrl."""

import inspect
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import diffusers
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn
from transformers import AutoConfig

from flowrl.errors import UserError
from flowrl.models.complete_weights import unloaded
from flowrl.models.diffusers.call.drive.driver import DENOISERS
from flowrl.models.diffusers.call.inputs.columns import images, sounds
from flowrl.models.diffusers.call.traits.checks import pipeline_class, refuse_parts
from flowrl.models.diffusers.modular.folder import (
    ModularSource,
    check_components,
    components_reached,
    of_class,
)
from flowrl.models.diffusers.modular.verdicts import modular_classes
from flowrl.models.language.loading import read_errors
from flowrl.models.language.vision import ROW_COLUMNS, model_class, reads_images
from flowrl.models.open import modular_source, place
from flowrl.models.public_configs import PUBLIC_MODELS
from flowrl.settings import LanguageSettings, ModelSettings, OwnSettings, PipelineSettings
from flowrl.settings.checks.machine import hub_repository
from flowrl.settings.checks.model_files import (
    NO_MODEL,
    check_no_own_code,
    component_parts,
    pipeline_index,
    read_json,
)
from rewards.perception.weight_files import WEIGHT_SUFFIXES, safetensors_header

CLIP_TOKENS = 77
FROM = "pretrained_model_name_or_path"  # where a modular index has a component from


@dataclass(frozen=True)
class Description:
    """Components of a model, known from its configuration files.

    pipeline  class of the pipeline; None for a language model
    configs   arguments of each component's class, by component
    counts    numbers of weights of the components that are not denoisers; None: unknown
    public    whether it comes from flowrl's table instead of the model's own files
    folder    folder of a language model's own configuration
    gguf      name of the GGUF file in `folder` whose metadata are the configuration, if any
    writes    whether the run asks a language model for images, so that it reads none
    modular   the folder of a pipeline that is driven in its modular form
    guider    the settings of `model.guider` for a modular pipeline from the table
    clip      number of tokens of the pipeline's first tokenizer, which is CLIP's where there are
              several
    """

    pipeline: str | None
    configs: Mapping[str, Mapping[str, Any]]
    counts: Mapping[str, int | None]
    public: bool = False
    folder: Path | None = None
    gguf: str | None = None
    clip: int = CLIP_TOKENS
    writes: bool = False
    modular: ModularSource | None = None
    guider: Mapping[str, Any] | None = None

    @cached_property
    def kind(self) -> Any:
        """The pipeline's class; of a modular one, with the face that the driver sees."""
        if self.in_blocks:
            return type(self.blocks)
        return getattr(diffusers, self.pipeline or "")

    @cached_property
    def blocks(self) -> Any:
        """A modular pipeline without its weights: of its folder, or of its class's own blocks."""
        if self.modular is not None:
            return self.modular.skeleton()
        return of_class(getattr(diffusers, self.pipeline or ""), self.guider)

    @property
    def in_blocks(self) -> bool:
        """Whether the pipeline is driven in its modular form."""
        return self.modular is not None or self.pipeline in modular_classes()

    @cached_property
    def denoisers(self) -> dict[str, nn.Module]:
        """Denoisers on torch's meta device, in the pipeline's order."""
        return {n: self.component(n) for n in self.configs if n in DENOISERS}

    @property
    def first(self) -> Any:
        """The first denoiser, or the only one."""
        return next(iter(self.denoisers.values()))

    def component(self, name: str) -> nn.Module:
        """Load a component of diffusers on torch's meta device. UserError for a configuration that
        its class does not take."""
        config = self.configs[name]
        kind = getattr(diffusers, str(config.get("_class_name")), None)
        if kind is None:
            raise UserError(
                f"model.pipeline: {name}/config.json names no class of diffusers "
                f"{diffusers.__version__} (_class_name): download it again"
            )
        with torch.device("meta"):
            return kind.from_config(config)

    def language_model(self) -> nn.Module:
        """Load a language model on torch's meta device."""
        config = self._language_config()
        with torch.device("meta"):
            return model_class(config).from_config(config)

    def image_columns(self, columns: Sequence[str]) -> list[str]:
        """Those columns of prompts from which the model reads images."""
        if self.pipeline is not None:
            return [name for name in images(columns) if self.takes(name)]
        reads = not self.writes and reads_images(self._language_config())
        return [name for name in columns if name in ROW_COLUMNS] if reads else []

    def sound_columns(self, columns: Sequence[str]) -> list[str]:
        """Those columns of prompts from which the model reads sounds."""
        return (
            [] if self.pipeline is None else [name for name in sounds(columns) if self.takes(name)]
        )

    def _language_config(self) -> Any:
        if self.folder is not None and self.gguf is not None:
            return gguf_config(self.folder, self.gguf)
        if self.folder is not None:
            check_no_own_code(self.folder, "model.language")
            with read_errors(str(self.folder)):
                return AutoConfig.from_pretrained(self.folder)
        settings = dict(self.configs["model"])
        return AutoConfig.for_model(settings.pop("model_type"), **settings)

    def default(self, name: str) -> Any:
        """Default value of an argument of the pipeline's call; None without such an argument."""
        return self._parameters[name].default if self.takes(name) else None

    def takes(self, name: str) -> bool:
        """Whether the pipeline's call has this argument."""
        return name in self._parameters

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.kind.__call__).parameters

    @property
    def guided_by_part(self) -> bool:
        """Whether a component of the pipeline sets guidance, rather than an argument of the
        call."""
        return not self.in_blocks and "guider" in inspect.signature(self.kind).parameters

    def guides_at(self, scale: float) -> bool:
        """Whether the pipeline class applies guidance at a scale, according to its own property
        (above 0: Z-Image, Krea2); above 1 for classes without the property, or whose property
        reads a component."""
        kind = self.kind
        rule = inspect.getattr_static(kind, "do_classifier_free_guidance", None)
        if not isinstance(rule, property):
            return scale > 1
        bare = kind.__new__(kind)
        vars(bare)["_guidance_scale"] = scale
        try:
            return bool(rule.__get__(bare))
        except (AttributeError, TypeError):
            return scale > 1

    def vae(self) -> Mapping[str, Any]:
        """Arguments of the decoder, including its class's defaults; empty without a decoder."""
        config = self.configs.get("vae", {})
        kind = getattr(diffusers, config.get("_class_name", ""), None)
        if kind is None:
            return config
        parameters = inspect.signature(kind.__init__).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty} | dict(config)


def local_folder(source: str) -> Path | None:
    """Find a model's local folder: as given, below the project, or in the hub's cache. None for one
    in the cache that lost the contents of files, which a start asks the hub for."""
    folder = Path(place(source))
    if folder.is_dir():
        return folder
    try:
        cached = Path(snapshot_download(source, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
    lost = any(path.is_symlink() and not path.exists() for path in cached.rglob("*"))
    return None if lost else cached


def has_weights(m: ModelSettings) -> bool:
    """Whether files of weights are on this machine, which are not beside a hub name's
    configurations alone. True for your own code."""
    if isinstance(m, OwnSettings) or Path(place(m.source)).is_dir():
        return True
    folder = local_folder(m.source)
    files = () if folder is None else folder.rglob("*")
    return any(file.suffix in WEIGHT_SUFFIXES for file in files)


def describe(m: ModelSettings) -> Description | None:
    """Read a model's configurations; None if neither local files nor the table of public models
    have them, as after a download that was cut off."""
    if isinstance(m, OwnSettings):
        return None
    source, folder, gguf = m.source, _folder_with(m), _gguf(m)
    if folder is None:
        if gguf is not None or source not in PUBLIC_MODELS:
            return None
        description, guider = public_model(source), _guider_of(m)
        return description if guider is None else replace(description, guider=guider)
    if isinstance(m, PipelineSettings):
        return _pipeline_folder(folder, m)
    if gguf is not None and unreadable_gguf(folder, gguf):
        return None
    writes = isinstance(m, LanguageSettings) and m.image is not None
    return Description(None, {}, {}, folder=folder, gguf=gguf, writes=writes)


def _guider_of(m: ModelSettings) -> Mapping[str, Any] | None:
    return m.guider if isinstance(m, PipelineSettings) else None


def unknown_because(m: ModelSettings) -> str:
    """Why `describe` returns None, with the fix."""
    if isinstance(m, OwnSettings):
        return f"{m.source} is your own code, whose operations are not counted"
    source, folder = m.source, _folder_with(m)
    if folder is not None and (gguf := _gguf(m)) is not None:
        return unreadable_gguf(folder, gguf)
    if Path(place(source)).is_dir():
        return f"{source} has no {m.configuration}"
    repository = hub_repository(source)
    begun = repository is not None and isinstance(repository.snapshot(), Path)
    whole = " whole" if begun else ""
    return f"{source} is not{whole} on this machine; `hf download {source}` downloads it"


def _gguf(m: ModelSettings) -> str | None:
    return m.gguf_file if isinstance(m, LanguageSettings) else None


def _folder_with(m: ModelSettings) -> Path | None:
    """The model's local folder if it has the file with the configuration, and in the hub's cache
    also those of the denoisers: a download may have ended between them."""
    folder = local_folder(m.source)
    if folder is None or not (folder / m.configuration).is_file():
        return None
    if isinstance(m, PipelineSettings) and not Path(place(m.source)).is_dir():
        index = read_json(folder / m.configuration, "model.pipeline")
        names = denoisers_inside(index, m.source)
        if not all((folder / name / "config.json").is_file() for name in names):
            return None
    return folder


def denoisers_inside(index: Mapping[str, Any], source: str) -> list[str]:
    """The denoisers that an index names, without those of a modular one which are in another place
    than its own, `source`."""
    models = _models_of(index)
    places = {n: dict(*index[n][2:3]).get(FROM) for n in DENOISERS if n in models}
    return [name for name, repository in places.items() if repository in (None, source)]


def unreadable_gguf(folder: Path, name: str) -> str:
    """Why a GGUF file cannot be read; empty if it can."""
    try:
        gguf_config(folder, name)
    except ImportError:  # of older transformers
        return (
            "this version of transformers needs the package gguf to read GGUF: pip install "
            "'flowrl[gguf]'"
        )
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        return f"{folder / name} cannot be read as GGUF ({reason})"
    return ""


@lru_cache(maxsize=4)
def gguf_config(folder: Path, name: str) -> Any:
    """Configuration from a GGUF file's metadata, cached since reading it takes seconds."""
    return AutoConfig.from_pretrained(folder, gguf_file=name)


@lru_cache(maxsize=4)
def public_model(source: str) -> Description:
    """Description of a model from the table, cached with its denoisers, since plans need it
    repeatedly."""
    model = PUBLIC_MODELS[source]
    return Description(model.pipeline, model.configs, model.counts, public=True)


def _pipeline_folder(folder: Path, m: PipelineSettings) -> Description:
    if (source := modular_source(m)) is not None:
        return _modular_folder(folder, source)
    index = pipeline_index(folder)
    pipeline_class(index, str(folder))
    parts = [n for n, v in index.items() if not n.startswith("_") and (folder / n).is_dir()]
    models = [n for n in parts if (folder / n / "config.json").is_file()]
    refuse_parts(index["_class_name"], models)
    configs = {n: read_json(folder / n / "config.json", "model.pipeline") for n in models}
    counts = {n: _count(folder / n, index[n]) for n in models if n not in DENOISERS}
    counts |= dict.fromkeys(n for n in _models_of(index) if n not in (*models, *DENOISERS))
    return Description(index["_class_name"], configs, counts, clip=_tokens(folder / "tokenizer"))


def _modular_folder(folder: Path, source: ModularSource) -> Description:
    source = replace(source, place=str(folder))
    pipe = source.skeleton()
    check_components(pipe, source)
    loaded = components_reached(pipe._blocks, source.given)
    parts = [n for n in component_parts(folder, "modular") if n in loaded]
    models = [n for n in parts if (folder / n / "config.json").is_file()]
    refuse_parts(type(pipe).__name__, models)
    configs = {n: read_json(folder / n / "config.json", "model.pipeline") for n in models}
    counts = {n: _numbers(folder / n) for n in models if n not in DENOISERS}
    clip = _tokens(folder / "tokenizer")
    return Description(type(pipe).__name__, configs, counts, clip=clip, modular=source)


def _tokens(folder: Path) -> int:
    """Number of tokens that a tokenizer pads to, if it has a limit; otherwise CLIP's number."""
    file = folder / "tokenizer_config.json"
    saved = read_json(file, "model.pipeline") if file.is_file() else {}
    length = saved.get("model_max_length", CLIP_TOKENS)
    return length if isinstance(length, int) and length < 10_000 else CLIP_TOKENS


def _models_of(index: Mapping[str, Any]) -> list[str]:
    """Components of an index that have weights."""
    named = {
        n: v for n, v in index.items() if n[0] != "_" and isinstance(v, list) and None not in v[:2]
    }
    return [n for n, v in named.items() if len(v) > 1 and not NO_MODEL.search(str(v[1]))]


def _count(folder: Path, named: Sequence[Any]) -> int | None:
    """Number of weights of a component: of its files, or without these of its class at its
    configuration. `named`: library and class, as an index names them."""
    if list(folder.glob("*.safetensors")):
        return _numbers(folder)
    built = unloaded(folder, named)
    return None if built is None else sum(p.numel() for p in built.parameters())


def _numbers(folder: Path) -> int | None:
    """Count the numbers in all tensors of a folder's safetensors files; None without such files, or
    if one has no readable header."""
    files = list(folder.glob("*.safetensors"))
    files = [f for f in files if "." not in f.stem] or files  # not the half-precision variants
    total = 0
    for path in files:
        if (header := safetensors_header(path)) is None:
            return None
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
        total += sum(math.prod(shape) for shape in shapes)
    return total if files else None
