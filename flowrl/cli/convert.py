"""`flowrl convert`: a folder in diffusers' format from a single file of weights, or the file from
the folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
from diffusers.loaders.single_file import FromSingleFileMixin
from diffusers.loaders.single_file_model import FromOriginalModelMixin

from flowrl.cli.out_folder import out_folder, whole_or_empty
from flowrl.cli.single_file import denoiser_names, first_dtype, write_single_file
from flowrl.errors import UserError
from flowrl.evaluation.outputs import removed_if_empty
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES
from flowrl.models.diffusers.call.traits.checks import absent_parts, pipeline_class
from flowrl.models.out_of_memory import raise_memory
from flowrl.models.saved_weights import reading
from flowrl.paths import find
from flowrl.settings.checks.model_files import pipeline_index
from flowrl.settings.command_line.arguments import Word
from rewards.perception.weight_files import damage_of, safetensors_header

# beginnings of keys of text encoders, which a file of a whole pipeline has
ENCODER_KEYS = ("conditioner.", "cond_stage_model.", "text_encoders.")


@dataclass
class Convert:
    """Write a single file of weights, in the names of the model's original code, as a pipeline's
    folder, or the denoiser of a pipeline's folder as such a file. No network is used."""

    file: Word[Path]
    """A safetensors file of a denoiser, or of a whole pipeline (Stable Diffusion); or a pipeline's
    folder."""
    out: Path
    """A new or empty folder; or, of a folder, a new safetensors file."""
    config: Path | None = None
    """Of a file: the folder of a pipeline of the same model, from which everything comes that the
    file lacks."""


def convert_file(arguments: Convert) -> Path:
    """Write the folder, or the file. UserError for a file that does not fit the folder's pipeline,
    and for a model whose file diffusers does not read back."""
    file = find(str(arguments.file))
    if file.is_dir():
        return _folder_to_file(file, arguments)
    if arguments.config is None:
        raise UserError(
            f"convert: {arguments.file} needs --config: the folder of a pipeline of the same model"
        )
    folder = find(str(arguments.config))
    whole_file = file.is_file() and file.suffix == ".safetensors"
    if whole_file and (damage := damage_of(file)):
        raise UserError(f"convert: {arguments.file} {damage}")
    header = safetensors_header(file) if file.is_file() else None
    if not header:
        raise UserError(f"convert: {arguments.file} is no safetensors file: name one")
    if not folder.is_dir():
        raise UserError(f"convert: --config: there is no folder {arguments.config}")
    out = out_folder(arguments.out)
    with removed_if_empty(out), whole_or_empty(out):
        whole = any(key.startswith(ENCODER_KEYS) for key in header)
        pipe = _whole(file, folder) if whole else _with_denoiser(file, folder)
        pipe.save_pretrained(out)
    return out


def _folder_to_file(folder: Path, arguments: Convert) -> Path:
    if arguments.config is not None:
        raise UserError(
            f"convert: {arguments.file} is a folder, which needs no --config: leave it out"
        )
    if arguments.out.suffix != ".safetensors":
        raise UserError(
            f"convert: --out: {arguments.out} is no name of a safetensors file, which "
            f"{arguments.file} "
            "becomes: end it with .safetensors"
        )
    if not arguments.out.parent.is_dir():
        raise UserError(f"convert: --out: there is no folder {arguments.out.parent}: make it first")
    return write_single_file(folder, arguments.out)[0]


def _whole(file: Path, folder: Path) -> Any:
    """The pipeline of a file that has all of its parts."""
    kind = pipeline_class(pipeline_index(folder), str(folder))
    if not issubclass(kind, FromSingleFileMixin):
        raise UserError(f"convert: diffusers reads no single file as a {kind.__name__}")
    try:
        return kind.from_single_file(
            str(file), config=str(folder), local_files_only=True, torch_dtype=first_dtype(file)
        )
    except (*FAILURES, OSError) as error:
        raise_memory(error)
        raise UserError(f"convert: {_why(file, kind, error)}") from error


def _with_denoiser(file: Path, folder: Path) -> Any:
    """The folder's pipeline with the denoiser of a file."""
    index = pipeline_index(folder)
    names = denoiser_names(folder)
    if len(names) != 1:
        raise UserError(
            f"convert: {folder} has {len(names)} denoisers, and a file is read as the only one: "
            "write its folder with diffusers"
        )
    (name,) = names
    kind: Any = getattr(diffusers, str(index[name][1]))
    if not issubclass(kind, FromOriginalModelMixin):
        raise UserError(f"convert: diffusers reads no single file as a {kind.__name__}")
    dtype = first_dtype(file)
    try:
        denoiser = kind.from_single_file(
            str(file),
            config=str(folder),
            subfolder=name,
            local_files_only=True,
            torch_dtype=dtype,
        )
    except (*FAILURES, OSError) as error:
        raise_memory(error)
        raise UserError(f"convert: {_why(file, kind, error)}") from error
    module: Any = denoiser  # its class, a mixin, says nothing of parameters
    lacking = [n for n, p in module.named_parameters() if p.is_meta]
    if lacking:
        raise UserError(f"convert: {file} lacks {lacking[0]} of {kind.__name__}: another model?")
    pipeline: Any = pipeline_class(index, str(folder))
    with reading(folder, "convert"):
        parts = absent_parts(pipeline, index) | {name: denoiser}
        return pipeline.from_pretrained(folder, **parts, torch_dtype=dtype, local_files_only=True)


def _why(file: Path, kind: type, error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{file} is no {kind.__name__} of the folder's configuration: {text}"
