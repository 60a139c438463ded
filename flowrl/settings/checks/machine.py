"""Checks of a run against this machine and its packages, before any weights are read."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from flowrl.algorithm import Algorithm
from flowrl.credit.choices import image_plans
from flowrl.credit.trackers import Bundling
from flowrl.errors import UserError
from flowrl.paths import find, no_such_model
from flowrl.prompts import Chat, PromptSet
from flowrl.prompts.source import column_setting
from flowrl.settings.checks.model_files import (
    check_index,
    check_no_own_code,
    check_pipeline_files,
    check_saved,
    check_text_files,
    check_weights,
)
from flowrl.settings.model.form import PIPELINE_INDEX, PipelineForm
from flowrl.settings.model.language import LanguageSettings
from flowrl.settings.model.model import ModelSettings
from flowrl.settings.model.own_model import OwnSettings
from flowrl.settings.model.pipeline import PipelineSettings
from flowrl.settings.sections.budget import BudgetSettings
from flowrl.settings.sections.data import IN_PYTHON, RewardSpec
from flowrl.settings.sections.run import SIZES, RunSettings
from flowrl.settings.sections.train import StatesSettings
from flowrl.settings.sections.workers import WorkerSettings
from flowrl.settings.words.names import unknown_name
from rewards.hub_names import names_repository
from rewards.perception.hub import (
    answer_of_hub,
    check_cached,
    from_hub,
    present_place,
    token_fault,
)
from rewards.perception.hub_cache import CachedRepository
from rewards.perception.reachable import reachable
from samplers import Plan
from samplers.scheduler import unbound

_HUB_SECONDS = 5.0
_WEIGHT_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")


def check_kind(run: RunSettings, algorithm: Algorithm) -> None:
    """UserError for a text recipe with a pipeline, or an image recipe with a language model."""
    m = run.model
    texts = isinstance(m, LanguageSettings)
    if texts != algorithm.text:
        name = run.recipe.name  # type: ignore[attr-defined]
        if run.image_tokens is not None:
            raise UserError(
                "model.image: images by tokens are trained by recipes for texts, token by token, "
                f"but {name} is for model.pipeline: set recipe: text_grpo, or another of `flowrl "
                "recipes`"
            )
        kind = "language" if algorithm.text else "pipeline"
        raise UserError(f"recipe {name} is for model.{kind}, but the run has model.{m.KIND}")
    if isinstance(m, OwnSettings):
        _check_own(run)
        refuse_scheduler(image_plans(algorithm), m.own.name.rpartition(":")[2])
    if not texts and run.rewriter is None and run.evaluate.temperature != 1:
        raise UserError("evaluate.temperature is only for texts (model.language): leave it out")
    if not texts:
        if run.train.share_prompts:
            raise UserError("train.share_prompts is only for texts (model.language): leave it out")
        return
    if run.train.noise != "generator":
        raise UserError("train.noise: tokens are always drawn by a counter: leave it out")
    if run.train.states != StatesSettings():
        raise UserError(
            "train.states: the states of texts are tokens, which take almost no space: leave it out"
        )
    if run.image_tokens is not None:
        _check_image_tokens(run)
    _refuse_evaluation(run, "is only for images and videos of pipelines")


def _check_image_tokens(run: RunSettings) -> None:
    """UserError for settings that images by tokens do not support."""
    if run.train.share_prompts:
        raise UserError(
            "train.share_prompts: each image's second row of guidance shares nothing with others "
            "(model.image): leave it out"
        )
    if run.given is not None:
        raise UserError(
            "given: the model writes images as tokens (model.image), and files of images have "
            "none: leave it out"
        )


def refuse_scheduler(plans: Sequence[Plan], name: str) -> None:
    """UserError for plans with the steps of a pipeline's scheduler."""
    if any(map(unbound, plans)):
        raise UserError(
            f"kernel: scheduler: {name} is your own model, which has no scheduler: use kernel: "
            "{name: cps, eta: 1}, which draws fresh noise around the predicted sample at every step"
        )


def check_joint(run: RunSettings) -> None:
    """UserError for settings that a run of two models does not support."""
    if run.prompt_writer is None:
        if run.train.rewriter_lr is not None:
            raise UserError("train.rewriter_lr: the run has no model.rewriter: leave it out")
        return
    alone = {
        "given": run.given is not None,
        "budget": run.budget != BudgetSettings(),
        "teachers": run.teachers is not None,
        "workers": run.workers != WorkerSettings(),
        "model.context_parallel": run.model.sharers > 1,
    }
    for place, used in alone.items():
        if used:
            raise UserError(f"{place} does not support two models (recipe joint): leave it out")
    try:
        algorithm = run.prompt_writer.algorithm()
    except UserError as error:
        raise UserError(f"recipe.text: {error}") from error
    if run.train.updates > run.prompts.per_iteration * algorithm.group:
        raise UserError(
            "train.updates: there are more optimizer steps than rewritings in an iteration"
        )


def check_workers(run: RunSettings, algorithm: Algorithm) -> None:
    """UserError for workers or a lag that a run does not support."""
    w = run.workers
    if w.sampling == 0 and w.gpus:
        raise UserError("workers.gpus: it needs workers; also set workers.sampling")
    if w.sampling or w.lag:
        _check_sampling(run, algorithm)
    if w.evaluate and run.prompts.held_out is None:
        raise UserError(
            "workers.evaluate: the run has no held-out prompts to evaluate on; set "
            "prompts.held_out, or leave it out"
        )
    if not w.any:
        if w.address is not None:
            raise UserError("workers.address: it needs workers; also set workers.sampling")
        return
    specs = {spec.label: spec for spec in (*run.rewards, *run.judges, *run.intermediate_rewards)}
    for label in w.rewards:
        if label not in specs:
            raise UserError(
                f"workers.rewards: no reward has the label {label!r}; choose one of "
                f"{', '.join(specs)}"
            )
        if algorithm.reward_gradient or "slope" in algorithm.asks:
            raise UserError(
                f"workers.rewards: {label}: this recipe uses reward gradients, which cannot come "
                "from another process; leave it out"
            )
    _refuse_python_rewards(w, specs.values())
    if find_spec("ray") is None:  # last: it hides no other mistake
        raise UserError("workers need Ray: pip install 'flowrl[ray]'")


def _refuse_python_rewards(w: WorkerSettings, specs: Iterable[RewardSpec]) -> None:
    """UserError for a Python object that other processes would have to load by its name."""
    for spec in specs:
        if not spec.name.startswith(IN_PYTHON):
            continue
        if spec.label in w.rewards:
            raise UserError(
                f"workers.rewards: {spec.label} is a Python object, but a process of its own loads "
                "it by name: leave it out there, or put it into a file (FILE.py:FUNCTION)"
            )
        if w.sampling:
            raise UserError(
                f"workers: reward {spec.label} is a Python object, but workers load rewards by "
                "name; put the reward into a file (FILE.py:FUNCTION), or set workers.sampling: 0"
            )


def _check_sampling(run: RunSettings, algorithm: Algorithm) -> None:
    """UserError for samples that workers, or a lag, cannot have."""
    name = "sampling" if run.workers.sampling else "lag"
    if run.drawn == 0:
        raise UserError(f"workers.{name}: all samples are given; set workers.{name}: 0")
    if run.workers.sampling and run.model.compiles == "auto":
        raise UserError(
            "workers.sampling: with model.compile: auto each process decides by itself; set it to "
            "true or false"
        )
    if run.workers.sampling and run.server is not None:
        raise UserError(
            "workers.sampling: with model.server the server samples; set workers.sampling: 0, or "
            "leave the server out"
        )
    if run.engine is not None:
        raise UserError(
            f"workers.{name}: with model.engine the engine samples; set workers.{name}: 0, or "
            "leave the engine out"
        )
    if run.workers.lag and algorithm.reward_gradient:
        raise UserError(
            "workers.lag: reward gradients need samples from the current weights; set lag: 0"
        )


def _refuse_evaluation(run: RunSettings, reason: str) -> None:
    for place in ("guidance", *SIZES):
        if getattr(run.evaluate, place) is not None:
            raise UserError(f"evaluate.{place} {reason}: leave it out")
    if run.evaluate.call:
        raise UserError(f"evaluate.call {reason}: leave it out")


def _check_own(run: RunSettings) -> None:
    """UserError for settings that have no effect on a user's own model."""
    _refuse_evaluation(run, "is a setting of pipelines")
    if run.given is not None:
        raise UserError(
            "given: samples are encoded by a pipeline's encoder, which model.own does not have: "
            "leave given out"
        )
    if run.teachers is not None:
        raise UserError(
            "teachers: their weights are a pipeline's files, but the run has model.own: leave them "
            "out, and choose another recipe"
        )
    if run.train.gradient_checkpointing:
        raise UserError(
            "train.gradient_checkpointing: your own model calls torch.utils.checkpoint in "
            "its forward itself: leave the setting out"
        )


def check_bundles(run: RunSettings, algorithm: Algorithm) -> None:
    """UserError if the draws do not fill the bundles of a tracker."""
    tracker = algorithm.tracker()
    if isinstance(tracker, Bundling) and run.drawn % tracker.bundle:
        raise UserError(
            f"prompts.per_iteration: the recipe judges bundles of {tracker.bundle} draws, but "
            f"{run.drawn} are not a multiple of it: set a multiple, or recipe.bundle"
        )


def check_start_samples(run: RunSettings, algorithm: Algorithm) -> None:
    """UserError if samplers that only have the trained weights would have to sample the initial
    policy."""
    if not algorithm.samples_start:
        return
    name = run.recipe.name  # type: ignore[attr-defined]
    if run.server is not None:
        raise UserError(
            f"model.server: recipe {name} also samples the initial policy, whose weights the "
            "server does not have: leave model.server out"
        )
    if run.engine is not None:
        raise UserError(
            f"model.engine: recipe {name} also samples the initial policy, whose weights the "
            "engine does not have: leave model.engine out"
        )
    if run.workers.sampling:
        raise UserError(
            f"workers.sampling: recipe {name} also samples the initial policy, whose weights the "
            "workers do not have: set workers.sampling: 0"
        )


def check_texts(prompts: PromptSet, m: ModelSettings) -> None:
    """UserError if a pipeline, which takes a text, gets a list of chat messages."""
    chat = next((text for text in prompts.texts if isinstance(text, Chat)), None)
    if chat is not None and not isinstance(m, LanguageSettings):
        raise UserError(
            f"{chat.at}: the prompt is a list of chat messages, but model.{m.KIND} takes a text: "
            f"name another column ({column_setting(chat.at)})"
        )


def check_model(m: ModelSettings) -> None:
    """UserError for a model or an environment that does not exist. Contacts no server."""
    for place, source in m.given_adapters.items():
        on_hub = names_repository(source)
        if not find(source).exists() and not (on_hub and Path(source).suffix not in _WEIGHT_FILES):
            raise UserError(f"{place}: there is no file or folder {source}")
        if (repository := hub_repository(source)) is not None:
            with from_hub(place, repository, UserError):
                check_cached(place, repository, UserError, asks=False)
        check_saved(find(source), place)
    if m.quantized is not None:
        m.quantized.check()
    match m:
        case PipelineSettings():
            check_pipeline(m.pipeline, m.form)
            if m.engine is not None and m.engine.own is not None:
                m.engine.own.check()
        case LanguageSettings():
            check_language(m.language, m.gguf_file)
            if m.environment is not None:
                m.environment.function()
        case OwnSettings():
            m.own.check()
            if m.weights is not None and not find(m.weights).is_file():
                raise UserError(f"model.weights: there is no file {m.weights}")
            if m.weights is not None:
                check_saved(find(m.weights), "model.weights")
        case _:
            raise AssertionError(m)


@contextmanager
def reading_model(m: ModelSettings) -> Iterator[None]:
    """Read the model's own folder in the body. UserError if it is gone meanwhile, its rights do not
    let it be read, or its disk does not answer, whatever its readers raise then."""
    if isinstance(m, OwnSettings):  # code, whose weights' file has a check of its own
        yield
        return
    with reading_source(f"model.{m.KIND}", m.source):
        yield


@contextmanager
def reading_source(place: str, source: str) -> Iterator[None]:
    """Read a folder or a repository of the hub's cache in the body. UserErrors begin with `place`,
    as of `reading_model`."""
    with ExitStack() as stack:
        stack.enter_context(reachable(place, find(source), UserError))
        if (repository := hub_repository(source)) is not None:
            stack.enter_context(from_hub(place, repository, UserError))
        yield


def hub_repository(source: str) -> CachedRepository | None:
    """The repository of a model that is named by its hub name; None for a folder or a file."""
    if find(source).exists() or not names_repository(source):
        return None
    return CachedRepository(source)


def present_source(source: str) -> str:
    """The place that loaders read a folder, a file or a repository from: `present_place` of a hub
    name."""
    return source if hub_repository(source) is None else present_place(source)


def check_hub(m: ModelSettings) -> None:
    """UserError, within seconds, for a hub name whose model is neither cached nor reachable, or
    whose files in the hub's cache are damaged, locked or gone."""
    place, source = f"model.{m.KIND}", m.source
    if isinstance(m, OwnSettings) or find(source).is_dir():
        return
    if (repository := hub_repository(source)) is None:
        _ask_hub(place, source, m.configuration)
        return
    with from_hub(place, repository, UserError):
        check_cached(place, repository, UserError)
        _ask_hub(place, source, m.configuration)


def _ask_hub(place: str, source: str, wanted: str) -> None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    if isinstance(huggingface_hub.try_to_load_from_cache(source, wanted), str):
        return
    if (obstacle := token_fault()) is not None:
        raise UserError(f"{place}: {source} is not in the hub's cache, and the hub {obstacle}")
    try:
        url = huggingface_hub.hf_hub_url(source, wanted)
        huggingface_hub.get_hf_file_metadata(url, timeout=_HUB_SECONDS)
    except EntryNotFoundError as error:
        raise UserError(f"{place}: {source} on the hub has no file {wanted}") from error
    except Exception as error:  # whatever the installed HTTP library raises
        if (answer := answer_of_hub(error, source)) is not None:
            raise UserError(f"{place}: {answer}") from error
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise UserError(
            f"{place}: {source} is neither a folder nor in the hub's cache, and the hub cannot "
            f"be reached ({reason}); run `hf download {source}` where there is a network"
        ) from error


def check_optimizer(name: str) -> None:
    """UserError if an optimizer's library is missing."""
    if name == "adamw8bit" and find_spec("bitsandbytes") is None:
        raise UserError(
            "train.optimizer: adamw8bit needs bitsandbytes, which is not installed; pip install "
            "bitsandbytes, or set train.optimizer: adamw"
        )


def check_language(source: str, gguf_file: str | None) -> None:
    """UserError for a value that is neither a transformers folder nor a hub name, and for a folder
    without whole weights."""
    folder = find(source)
    with reachable("model.language", folder, UserError):
        _check_source(source, gguf_file or "config.json", "model.language", "transformers")
        if gguf_file is not None and folder.is_dir():
            check_saved(folder / gguf_file, "model.gguf_file")
        elif folder.is_dir():
            check_text_files(folder, "model.language")
            check_no_own_code(folder, "model.language")
            check_weights(folder, "model.language")


def check_pipeline(source: str, form: PipelineForm = "classic") -> None:
    """UserError for a value that is neither a diffusers folder nor a hub name, and for a folder
    without whole weights."""
    folder = find(source)
    with reachable("model.pipeline", folder, UserError):
        if not folder.is_dir():
            _check_source(source, PIPELINE_INDEX, "model.pipeline", "diffusers")
            return
        check_index(folder, source, form)
        check_pipeline_files(folder, form)


def _check_source(source: str, wanted: str, place: str, library: str) -> None:
    folder = find(source)
    if folder.is_dir():
        if not (folder / wanted).is_file():
            raise UserError(f"{place}: {source} has no {wanted}; give a {library} folder")
        return
    refuse_single_file(source, place, (library,))
    if (repository := hub_repository(source)) is None:
        raise UserError(f"{place}: {no_such_model(source)}")
    with from_hub(place, repository, UserError):
        check_cached(place, repository, UserError, asks=False)


def refuse_single_file(source: str, place: str, libraries: Sequence[str]) -> None:
    """UserError, which begins with `place`, for a single file, or a name of one with weights, where
    a folder of one of the libraries is taken."""
    file = find(source)
    if not file.is_file() and Path(source).suffix not in _WEIGHT_FILES:
        return
    formats, way = "' or ".join(libraries), ""
    if file.is_file() and file.suffix == ".gguf" and "transformers" in libraries:
        folder = Path(source).parent
        way = f", or in a run's file set model.language: {folder} and model.gguf_file: {file.name}"
    elif file.is_file() and file.suffix == ".gguf":
        way = f", and this file as model.quantization: {{backend: gguf, file: {source}}}"
    elif file.is_file() and file.suffix == ".safetensors" and "diffusers" in libraries:
        way = (
            f"; `flowrl convert {source} --config FOLDER --out NEW` writes one of a pipeline from "
            "it and a folder of the same model"
        )
    raise UserError(
        f"{place}: {source} is a single file; give a folder in {formats}' format, as written by "
        f"`save_pretrained`{way}"
    )


def check_trackers(names: Sequence[str]) -> None:
    """UserError for a tracker that accelerate does not know, or that cannot be imported."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    loggers = [str(name) for name in LOGGER_TYPE_TO_CLASS]
    installed = [str(name) for name in get_available_trackers()]
    for name in names:
        if name not in loggers:
            raise UserError(f"track.with: {unknown_name(name, loggers)}")
        if name not in installed:
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
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"track.with: {name} is installed, but importing {module} fails ({reason}); repair "
            "it, or leave it out"
        ) from error
