"""Checks of a run against this machine and its packages, before any weights are read."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from flowrl.algorithm import Algorithm
from flowrl.credit.trackers import ScoreQuantiles
from flowrl.errors import UserError
from flowrl.paths import find
from flowrl.prompts import Chat, PromptSet
from flowrl.settings.model import ModelSettings
from flowrl.settings.run import Run
from flowrl.settings.train import StatesSettings
from flowrl.settings.words import unknown_name

_HUB_SECONDS = 5.0
_WEIGHT_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")


def check_kind(run: Run, algorithm: Algorithm) -> None:
    """UserError for a recipe of text with a pipeline, or of images with a language model."""
    m = run.model
    kind, other = ("language", "pipeline") if algorithm.text else ("pipeline", "language")
    if (m.language is not None) != algorithm.text:
        name = run.recipe.name  # type: ignore[attr-defined]
        raise UserError(f"recipe {name} is for model.{kind}, and the run has model.{other}")
    if m.pipeline is not None and run.evaluate.temperature != 1:
        raise UserError("evaluate.temperature is for text (model.language): leave it out")
    if m.language is None:
        if run.train.share_prompts:
            raise UserError("train.share_prompts is for texts (model.language): leave it out")
        return
    if run.train.states != StatesSettings():
        raise UserError(
            "train.states: the states of texts are tokens, which take no space: leave it out"
        )
    for place in ("guidance", "height", "width"):
        if getattr(run.evaluate, place) is not None:
            raise UserError(f"evaluate.{place} is for images and videos: leave it out")


def check_bundles(run: Run, algorithm: Algorithm) -> None:
    """UserError for draws that do not fill RiskPO's bundles."""
    tracker = algorithm.tracker()
    if isinstance(tracker, ScoreQuantiles) and run.drawn % tracker.bundle:
        raise UserError(
            f"prompts.per_iteration: the recipe judges bundles of {tracker.bundle} draws, but "
            f"{run.drawn} are not a multiple of it: set a multiple, or recipe.bundle"
        )


def check_texts(prompts: PromptSet, m: ModelSettings) -> None:
    """Raise a UserError if a pipeline, which takes a text, gets a list of chat messages."""
    chat = next((text for text in prompts.texts if isinstance(text, Chat)), None)
    if chat is not None and m.pipeline is not None:
        raise UserError(
            f"{chat.at}: the prompt is a list of chat messages, but model.pipeline takes a text: "
            "name another column (prompts.column)"
        )


def check_model(m: ModelSettings) -> None:
    """UserError for a model or an environment that does not exist. Contacts no server."""
    if m.pipeline is not None:
        check_pipeline(m.pipeline)
        return
    assert m.language is not None
    check_language(m.language, m.gguf_file)
    if m.environment is not None:
        m.environment.function()


def check_hub(m: ModelSettings) -> None:
    """UserError, within seconds, for a hub name whose model can be neither found nor reached."""
    place = "model.language" if m.pipeline is None else "model.pipeline"
    source, wanted = m.pipeline or m.language or "", m.gguf_file or "config.json"
    if find(source).is_dir():
        return
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    wanted = wanted if m.pipeline is None else "model_index.json"
    if isinstance(huggingface_hub.try_to_load_from_cache(source, wanted), str):
        return
    try:
        url = huggingface_hub.hf_hub_url(source, wanted)
        huggingface_hub.get_hf_file_metadata(url, timeout=_HUB_SECONDS)
    except GatedRepoError as error:
        raise UserError(
            f"{place}: {source} is gated: accept its licence on the hub, and log in (hf auth login)"
        ) from error
    except HfHubHTTPError as error:
        raise UserError(f"{place}: the hub has no {source} with a file {wanted}") from error
    except Exception as error:  # whatever the installed HTTP library raises
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise UserError(
            f"{place}: {source} is neither a folder nor in the hub's cache, and the hub cannot be "
            f"reached ({why}); `hf download {source}` brings it where there is a network"
        ) from error


def check_optimizer(name: str) -> None:
    """UserError where the library of an optimizer is missing."""
    if name == "adamw8bit" and find_spec("bitsandbytes") is None:
        raise UserError(
            "train.optimizer: adamw8bit needs bitsandbytes, which is not installed; pip install "
            "bitsandbytes, or set train.optimizer: adamw"
        )


def check_language(source: str, gguf_file: str | None) -> None:
    """UserError for a value that is neither a transformers folder nor a hub name."""
    _check_source(source, gguf_file or "config.json", "model.language", "transformers")


def check_pipeline(source: str) -> None:
    """UserError for a value that is neither a diffusers folder nor a hub name."""
    _check_source(source, "model_index.json", "model.pipeline", "diffusers")


def _check_source(source: str, wanted: str, place: str, library: str) -> None:
    folder = find(source)
    if folder.is_dir():
        if not (folder / wanted).is_file():
            raise UserError(f"{place}: {source} has no {wanted}; give a {library} folder")
    elif folder.is_file() or Path(source).suffix in _WEIGHT_FILES:
        raise UserError(
            f"{place}: {source} is a single file; give a folder in {library}' format, such as one "
            "that `save_pretrained` writes"
        )
    elif source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise UserError(f"{place}: no folder {source}, and not a hub name (owner/name)")


def check_trackers(names: Sequence[str]) -> None:
    """UserError for a tracker that accelerate does not know, or that cannot be imported."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = [str(name) for name in LOGGER_TYPE_TO_CLASS]
    here = [str(name) for name in get_available_trackers()]
    for name in names:
        if name not in known:
            raise UserError(f"track.with: {unknown_name(name, known)}")
        if name not in here:
            extra = "'flowrl[track]'" if name == "tensorboard" else name
            raise UserError(
                f"track.with: {name} is not installed; pip install {extra}, or leave it out"
            )
        _check_import(name)


def _check_import(name: str) -> None:
    module = name
    if name == "tensorboard":  # accelerate takes either library
        module = "torch.utils.tensorboard" if find_spec(name) else "tensorboardX"
    try:
        import_module(module)
    except Exception as error:  # a library's own code runs here, and may raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"track.with: {name} is installed, but importing {module} fails ({why}); repair it, or "
            "leave it out"
        ) from error
