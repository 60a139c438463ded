"""Export of a run: its adapter in several key formats, merged weights, and a model card."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import nn

from flowrl.cli.given_model import TEXT_ADAPTER, device_of, weights_folder
from flowrl.cli.model_card import CardSubject, write_card
from flowrl.cli.out_folder import out_folder, whole_or_empty
from flowrl.errors import UserError
from flowrl.evaluation.outputs import removed_if_empty
from flowrl.json_text import json_text
from flowrl.models.adapters import ADAPTER, merge_language_adapters
from flowrl.models.description import describe
from flowrl.models.diffusers.lora import own_form
from flowrl.models.diffusers.lora.lora import LORA_FILE, SECOND
from flowrl.models.diffusers.lora.lora_formats import (
    check_written,
    read_adapter,
    write_adapter,
)
from flowrl.models.diffusers.lora.lora_keys import original_layers
from flowrl.models.saved_weights import load_saved, reading
from flowrl.paths import new_numbered
from flowrl.run.save import checkpoint
from flowrl.session.atomic import CONTENTS
from flowrl.session.learner import load_policy
from flowrl.session.smaller_calls import explained
from flowrl.settings import RunSettings
from flowrl.settings.command_line.arguments import ExportArguments, KeyFormat
from flowrl.settings.read import open_folder
from flowrl.settings.trust import SAMPLED_PARTS
from flowrl.whole_file import copy_folder
from rewards.hub_names import names_repository

CONVERTED: tuple[KeyFormat, ...] = ("comfyui", "kohya")
MERGED = "merged"  # the folder of the whole model


def export_run(arguments: ExportArguments) -> tuple[Path, str | None]:
    """Write the files, upload them if requested, and print their location. Returns the folder, and
    its address on the hub."""
    opened = open_folder(arguments.run, arguments.trust, SAMPLED_PARTS)
    with opened.limited():
        out = _export(arguments, opened.run)
    if arguments.push_to_hub is not None:  # named by the user, whatever the folder may do
        address = upload(out, arguments.push_to_hub, private=arguments.private)
        print(f"uploaded: {address}")
        return out, address
    return out, None


def _export(arguments: ExportArguments, run: RunSettings) -> Path:
    weights = _weights(arguments)
    if arguments.push_to_hub is not None:
        check_upload(arguments.push_to_hub)
    if run.prompt_writer is not None and arguments.merged:
        raise UserError(
            "export: --merged is for runs with one model, but a joint run has two: leave it out"
        )
    adapter = (weights / LORA_FILE).is_file()
    if (
        not adapter
        and (arguments.formats or arguments.merged)
        and not (weights / TEXT_ADAPTER).is_file()
    ):
        raise UserError(
            f"export: {weights} has full weights, to which --formats and --merged do not apply: "
            "leave both out"
        )
    if arguments.formats and not adapter:
        raise UserError("export: --formats is for image and video models: leave it out")
    denoisers = _denoisers(run) if adapter else []
    forms = _formats(arguments.formats, weights, denoisers) if adapter else ()
    out = (
        new_numbered(arguments.run, "export")
        if arguments.out is None
        else out_folder(arguments.out)
    )
    with removed_if_empty(out), whole_or_empty(out):
        written = _write(arguments, run, weights, forms, denoisers, out)
    for path in written:
        print(path)
    return out


def _write(
    arguments: ExportArguments,
    run: RunSettings,
    weights: Path,
    forms: Sequence[KeyFormat],
    denoisers: Sequence[nn.Module],
    out: Path,
) -> list[Path]:
    adapter = (weights / LORA_FILE).is_file()
    written = [out / path.name for path in _copied(weights, out, forms, adapter)]
    for form in CONVERTED:
        if form in forms:
            written += _convert(weights, out, form, denoisers)
    if arguments.merged:
        _merge(run, weights, out / MERGED)
        written.append(out / MERGED)
    if arguments.push_to_hub is not None:
        hide_places(out)
    subject = CardSubject(run, arguments.run, weights, arguments.push_to_hub)
    return [*written, write_card(subject, out, [path.name for path in written])]


def hide_places(out: Path) -> None:
    """Keep only the last part of a base model's absolute path in the configurations of adapters, as
    in the card: nobody else has the folder, and its path names this machine's user."""
    for file in sorted(out.rglob(TEXT_ADAPTER)):
        config = json.loads(file.read_text(encoding="utf-8"))
        base = str(config.get("base_model_name_or_path") or "")
        if Path(base).is_absolute():
            config["base_model_name_or_path"] = Path(base).name
            file.write_text(json_text(config, indent=2), encoding="utf-8")


def _weights(arguments: ExportArguments) -> Path:
    if arguments.weights == "base":
        raise UserError("export: the base weights are the original model; choose last or best")
    weights = weights_folder(arguments.run, arguments.weights)
    if (weights / checkpoint.POLICIES_FILE).is_file():
        raise UserError(
            f"export: {weights} is a training checkpoint, which other programs cannot load: "
            "choose last, best or one of their folders"
        )
    return weights


def _denoisers(run: RunSettings) -> list[nn.Module]:
    """The denoisers, from their configurations alone, in the order of the adapter's files."""
    described = describe(run.model)
    if described is None:
        raise UserError(
            f"export: the configuration of {run.model.source} is not on this machine; "
            f"download it with `hf download {run.model.source}`"
        )
    return list(described.denoisers.values())


def _files(weights: Path) -> Iterator[Path]:
    return (path for name in (LORA_FILE, SECOND) if (path := weights / name).is_file())


def _formats(
    wanted: Sequence[KeyFormat], weights: Path, denoisers: Sequence[nn.Module]
) -> tuple[KeyFormat, ...]:
    """The formats to write. A format that the model does not support is an error if requested,
    otherwise a note."""
    forms: list[KeyFormat] = ["diffusers"]
    for form in CONVERTED:
        try:
            for file, denoiser in zip(_files(weights), denoisers, strict=False):
                original_layers(denoiser, list(read_adapter(file)), form)
            forms.append(form)
        except UserError as error:
            if form in wanted:
                raise UserError(f"export: {error}") from error
            if not wanted:
                print(f"not in {form}'s format, since {error}")
    return tuple(wanted) or tuple(forms)


def _copied(weights: Path, out: Path, forms: Sequence[KeyFormat], adapter: bool) -> Iterator[Path]:
    """Copy the weights' files; an adapter's in diffusers' format only if requested."""
    if adapter and "diffusers" not in forms:
        return
    for path in sorted(weights.iterdir()):
        if path.name == CONTENTS:  # sums of the run's own files
            continue
        if path.is_dir():
            copy_folder(path, out / path.name)
        else:
            shutil.copy2(path, out / path.name)
        yield path


def _convert(
    weights: Path, out: Path, form: KeyFormat, denoisers: Sequence[nn.Module]
) -> Iterator[Path]:
    """Write each of the adapter's files in another format, and read it back."""
    for file, denoiser in zip(_files(weights), denoisers, strict=False):
        adapter = read_adapter(file)
        number = "_2" if file.name == SECOND else ""
        path = out / f"{form}{number}.safetensors"
        with reading(file, "export"):
            write_adapter(path, adapter, denoiser, form)
            worst = check_written(path, adapter, denoiser, form)
        print(f"{path.name}: {len(adapter)} layers read back, largest difference {worst:.0e}")
        yield path


def _merge(run: RunSettings, weights: Path, folder: Path) -> None:
    """Write the whole model with the adapter merged, in the dtype of the run."""
    from flowrl.models.diffusers.policy import PipelinePolicy
    from flowrl.models.image_tokens.policy import ImageTokenPolicy
    from flowrl.models.own.policy import OwnPolicy

    with explained(run, trains=False):
        policy: Any = load_policy(run, device_of(run))
        load_saved(weights, "export", lambda: policy.load_weights(weights))
    if isinstance(policy, PipelinePolicy):
        policy.frozen.rest()
        for denoiser in policy.denoisers:
            own_form.merge(denoiser, 1.0, ADAPTER)
        policy.pipe.save_pretrained(folder)
    elif isinstance(policy, OwnPolicy):
        policy.merge()
        policy.save(folder)
    else:
        merge_language_adapters(policy.model)
        policy.model.save_pretrained(folder)
        if isinstance(policy, ImageTokenPolicy):
            reader = policy.processor
        else:
            reader = policy.tokenizer if policy.vision is None else policy.vision.processor
        reader.save_pretrained(folder)


def check_upload(repository: str) -> None:
    """UserError, before any work, for a name that the hub refuses or a missing token."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        reason = " ".join(str(error).split())[:200]
        if Path(repository).is_absolute() or repository.startswith((".", "~")):
            reason = "to write a folder, leave it out and set --out (`out=` of Run.export)"
        raise UserError(
            f"push to the hub: {repository[:100]!r} is not owner/name: {reason}"
        ) from error
    if not names_repository(repository):  # the hub's own check takes a name without an owner
        raise UserError(
            f"push to the hub: {repository[:100]!r} is not owner/name, such as me/my-lora"
        )
    if get_token() is None:
        raise UserError(
            "push to the hub: no token for the hub was found: run `hf auth login`, or set HF_TOKEN"
        )


REFUSED_TOKEN = (
    "the hub refuses the token, {status}: run `hf auth login`, or set HF_TOKEN, with one that may "
    "write to {repository}"
)
ANSWERS = {  # a status of the hub -> a clause that says what a user can do
    401: REFUSED_TOKEN,
    403: REFUSED_TOKEN,
    404: "the hub has no owner or repository of this name that the token may see, {status}: check "
    "the name, and whose token it is",
    409: "the hub had another change of {repository} at the same time, {status}: wait until that "
    "has ended",
    413: "the hub, or a proxy before it, takes no request that large, {status}: export without the "
    "merged model, or ask who runs it",
    429: "the hub has had too many requests, {status}: wait some minutes",
}
OWN_FAULT = "the hub has a fault of its own, {status}: wait some minutes"  # from 500 on


def upload(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a folder to a repository, which is created if necessary. Returns its address.

    UserError, which says that the local files are complete, if the hub or the network fails.
    """
    api = HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Export of a flowrl run"
        )
    except Exception as error:  # whatever the hub's client and its HTTP library raise
        again = f"hf upload {quote(repository)} {quote(str(folder))}{' --private' * private}"
        raise UserError(
            f"push to the hub: {repository} was not uploaded ({_refusal(error, repository)}); the "
            f"files are in {folder}, and `{again}` tries again"
        ) from error
    return str(url)


def _refusal(error: Exception, repository: str) -> str:
    """Why an upload failed, without the token, which a proxy or a hub may say back."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    clause = OWN_FAULT if status >= 500 else ANSWERS.get(status)
    if clause is not None:
        return clause.format(status=status, repository=repository)
    reason = " ".join(str(error).split()).replace(get_token() or "\0", "the token")
    return f"{type(error).__name__}: {reason[:200]}"
