"""Open the model of a run's settings; no other module knows all kinds of models."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from flowrl.credit.choices import image_plans
from flowrl.errors import UserError
from flowrl.models.call_sizes import CallSizes
from flowrl.models.complete_weights import check_component_files
from flowrl.models.policy import Policy
from flowrl.models.rewritten import RewrittenPolicy
from flowrl.paths import find
from flowrl.prompts import has_images
from flowrl.prompts.row_sizes import RowSize, row_sizes
from flowrl.settings import (
    LanguageSettings,
    ModelSettings,
    OwnSettings,
    PipelineSettings,
    RunSettings,
)
from flowrl.settings.checks.machine import (
    check_language,
    check_model,
    check_pipeline,
    hub_repository,
    reading_model,
)
from flowrl.settings.model.engine import EngineSettings
from flowrl.settings.model.image_tokens import ImageTokenSettings
from flowrl.settings.model.levels import levels_of
from flowrl.settings.sections.data import PromptPlace
from rewards.perception.hub import NOT_ASKED, hub_silence, say_cached
from samplers.scheduler import unbound
from samplers.storage import Storage

if TYPE_CHECKING:
    from flowrl.models.diffusers.call.rows.encoding_cache import EncodingCache
    from flowrl.models.diffusers.modular.folder import ModularSource
    from flowrl.models.engine.rolls import EngineRolls
    from flowrl.models.image_tokens.policy import ImageTokenPolicy
    from flowrl.models.language.policy import CausalPolicy
    from flowrl.models.language.server import CompletionsServer
    from flowrl.models.language.use import Stops, TextUse

DTYPES = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}  # fmt: skip


def open_model(run: RunSettings, device: torch.device, folder: Path | None = None) -> Policy:
    """Load the model. `folder` is a training run's; other uses never sample from a server or an
    engine. UserError, before anything loads, for files that are missing or damaged."""
    check_model(run.model)
    set_kernels(device, tf32=run.model.tf32, cudnn_attention=run.model.cudnn_attention)
    with reading_model(run.model):
        return _loaded(run, device, folder)


def _loaded(run: RunSettings, device: torch.device, folder: Path | None) -> Policy:
    m = run.model
    if isinstance(m, PipelineSettings):
        return _pipeline(run, m, device, folder)
    if isinstance(m, OwnSettings):
        return _own(run, m, device)
    if m.image is not None:
        return _image_tokens(run, m, m.image, device)
    return _language(run, m, device, folder)


def compiles(run: RunSettings, device: torch.device) -> bool:
    """Whether `model.compile` asks for compiled blocks on this device."""
    return run.model.compiles is True or (run.model.compiles == "auto" and device.type == "cuda")


def set_kernels(
    device: torch.device, *, tf32: bool | None, cudnn_attention: bool | Literal["unmasked"]
) -> None:
    """Allow or forbid TF32 (None leaves it unchanged) and cuDNN's attention on a CUDA device, for
    the whole process."""
    if device.type != "cuda":
        return
    from flowrl.models import savings

    savings.cudnn_attention(cudnn_attention)
    if tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32


def _pipeline(
    run: RunSettings, m: PipelineSettings, device: torch.device, folder: Path | None
) -> Policy:
    from flowrl.models import savings
    from flowrl.models.diffusers.batch import Scales
    from flowrl.models.diffusers.call.levels.user_levels import UserLevels
    from flowrl.models.diffusers.call.loop.image_shapes import sized_by_images
    from flowrl.models.diffusers.memory.offload import BaseMemory
    from flowrl.models.diffusers.policy import PipelinePolicy, SchedulerUse

    if m.form == "classic" and (folder_of := find(m.pipeline)).is_dir():
        check_component_files(folder_of)
    user_levels = None
    if m.sigmas is not None:
        user_levels = UserLevels(cache(partial(levels_of, m.sigmas)), trial=run.algorithm().steps)
    call = {"height": m.height, "width": m.width, **m.call}
    policy = PipelinePolicy.load(
        modular_source(m) or loaded_from(m),
        dtype=DTYPES[m.dtype],
        device=device,
        call={key: value for key, value in call.items() if value is not None},
        held=BaseMemory(m.offload, m.offload_experts, m.quantization),
        adapters=m.adapters,
        scheduler=SchedulerUse(
            levels=user_levels,
            settings=m.scheduler,
            own_steps=any(map(unbound, image_plans(run.algorithm()))),
        ),
    )
    savings.decoder(policy.pipe, tiling=m.vae.tiling, slicing=m.vae.slicing)
    if m.attention is not None:
        savings.attention(policy.denoisers, m.attention)
    if compiles(run, device):
        savings.compile_blocks(policy.denoisers)
    use = replace(
        policy.use,
        guidance=Scales(policy.scale(m.guidance.sample), policy.scale(run.training_guidance)),
        encoding_cache=_encoding_cache(m),
        storage=_storage(run),
        noise=run.train.noise,
    )
    if m.engine is not None and folder is not None:
        use = replace(use, rolls=_engine(m.engine, policy, folder))
    policy = policy.alike(policy.state, use)
    if m.guidance.through == "cond":
        policy = policy.through_prompt()
    rows = [row for place in run.prompts.given if folder is not None for row in _rows(run, place)]
    if sized_by_images(policy.loop):
        rows = _rows(run, "train")
    if sized_by_images(policy.loop) or any(size.given for size in row_sizes(rows)):
        policy.check_rows(rows)  # sizes of calls rest on the latents'; before weights are sharded
    return policy


def _engine(s: EngineSettings, policy: Policy, folder: Path) -> "EngineRolls":
    """The engine that samples instead of the model whose trained weights it gets."""
    from accelerate import PartialState

    from flowrl.models.engine.start import engine_rolls

    return engine_rolls(s, policy, folder, PartialState().is_main_process)


def _rows(run: RunSettings, place: PromptPlace) -> Sequence[Mapping[str, Any]]:
    """Rows of prompts on this machine. Rows of evaluations at another size have their own."""
    other_size = place == "held_out" and run.evaluation_size
    return run.prompts.read(place).meta if run.prompts.on_disk(place) and not other_size else ()


def _own(run: RunSettings, m: OwnSettings, device: torch.device) -> Policy:
    from flowrl.models.own.policy import OwnPolicy

    return OwnPolicy(
        m.own.build(),
        name=m.own.name.rpartition(":")[2],
        levels=None if m.sigmas is None else partial(levels_of, m.sigmas),
        storage=_storage(run),
        noise=run.train.noise,
        weights=None if m.weights is None else find(m.weights),
        device=device,
        dtype=DTYPES[m.dtype],
    )


def _storage(run: RunSettings) -> Storage:
    states = run.train.states
    device = None if states.device is None else torch.device(states.device)
    return Storage(None if states.dtype is None else DTYPES[states.dtype], device)


def _encoding_cache(m: PipelineSettings) -> "EncodingCache | None":
    from flowrl.models.diffusers.call.rows.encoding_cache import MIB, EncodingCache

    how = m.encodings
    return None if how.keep == "no" else EncodingCache(how.keep, how.most * MIB)


def call_sizes(run: RunSettings, automatic: int) -> CallSizes:
    """The limits of `train.rows_per_call`, with a number in place of auto."""
    rows = run.train.call_sizes
    return CallSizes(**{kind: automatic if n == "auto" else n for kind, n in rows.items()})


def whole_at_evaluation(
    model: Policy | RewrittenPolicy, run: RunSettings
) -> Policy | RewrittenPolicy:
    """`evaluation_policy` of the image model and, in a joint run, of its language model."""
    if not isinstance(model, RewrittenPolicy):
        return evaluation_policy(model, run)
    assert run.prompt_writer is not None
    text = evaluation_policy(model.text, run.prompt_writer)
    return replace(model, text=text, image=evaluation_policy(model.image, run))


def refuse_sizes(run: RunSettings, owner: str, parameters: Collection[str]) -> None:
    """UserError for a size of evaluations that the pipeline's call does not take."""
    if unknown := set(run.evaluation_size) - set(parameters):
        name = min(unknown)
        raise UserError(f"evaluate.{name}: {owner} takes no {name}: leave it out")


def evaluation_policy(policy: Policy, run: RunSettings) -> Policy:
    """The policy at `evaluate`'s guidance, size and arguments, or the same policy if they equal the
    model's.

    Otherwise a policy with the same modules, so that it always has the same weights. At the same
    size proofs are shared; another size has its own. UserError for a size that the pipeline
    refuses.
    """
    size, guidance, call = run.evaluation_size, run.evaluation_guidance, run.evaluate.call
    same = not size and not call and guidance == run.guidance.sample
    if not isinstance(run.model, PipelineSettings) or same:
        return policy
    from flowrl.models.diffusers.policy import PipelinePolicy
    from flowrl.models.diffusers.sizes.by_size import KnownRows, LoopSize, called_with

    assert isinstance(policy, PipelinePolicy)
    twin = policy
    refuse_sizes(run, policy.name, policy.loop.driver.parameters)
    if size:
        twin = policy.at(LoopSize.of(policy.loop, RowSize(**size)))
    if call:
        twin = called_with(twin, call)
    state = twin.state
    if size or call:  # the sizes of training's rows are not those of evaluations
        alone = twin.alike(replace(state, rows=KnownRows()), twin.use)
        rows = call_sizes(run, alone.automatic(run.evaluation_steps))
        state = replace(alone.state, sizes=rows)
    scales = policy.guidance._replace(sample=policy.scale(guidance))
    encodings = None if call else policy.encoding_cache  # of training's arguments
    return twin.alike(state, replace(twin.use, guidance=scales, encoding_cache=encodings))


def _language(
    run: RunSettings, m: LanguageSettings, device: torch.device, folder: Path | None
) -> "CausalPolicy":
    from flowrl.models.language.policy import CausalPolicy

    refuse_images(run, m.language)
    serve = None if m.server is None or folder is None else partial(_server, run, m, folder)
    return CausalPolicy.load(
        loaded_from(m), dtype=DTYPES[m.dtype], device=device, gguf_file=m.gguf_file,
        attention=m.attention, quantized=m.quantization, use=text_use(run, m), serve=serve,
        named=place(m.language),
    )  # fmt: skip


def _image_tokens(
    run: RunSettings, m: LanguageSettings, image: ImageTokenSettings, device: torch.device
) -> "ImageTokenPolicy":
    from flowrl.models.image_tokens.policy import ImageTokenPolicy

    policy = ImageTokenPolicy.load(
        loaded_from(m), image, dtype=DTYPES[m.dtype], device=device, attention=m.attention,
        use=text_use(run, m),
    )  # fmt: skip
    check_image_steps(policy, run)
    return policy


def check_image_steps(policy: "ImageTokenPolicy", run: RunSettings) -> None:
    """UserError for numbers of tokens in a run's settings that are not an image's."""
    policy.check_steps(run.algorithm().steps, "recipe.length")
    policy.check_steps(run.evaluation_steps, "evaluate.steps")


def text_use(run: RunSettings, m: LanguageSettings) -> "TextUse":
    """A run's settings of its language model."""
    from flowrl.models.language.use import TextUse

    return TextUse(
        system=m.system,
        stop=m.stop,
        temperature=run.evaluate.temperature,
        template=m.template,
        steps=m.steps,
        environment=m.environment,
        adapt_vision=m.lora is not None and m.lora.vision,
        share_prompts=run.train.share_prompts,
        float32_head=m.head_dtype is not None,
    )


def refuse_images(run: RunSettings, source: str) -> None:
    """UserError, before weights load, for prompts with images that the model does not read."""
    from transformers import AutoConfig

    from flowrl.models.language.chat import images_refused
    from flowrl.models.language.loading import read_errors
    from flowrl.models.language.vision import reads_images

    if not (find(source) / "config.json").is_file() or not run.prompts.on_disk("train"):
        return
    with read_errors(source):
        config = AutoConfig.from_pretrained(find(source))
    pictured = next(filter(has_images, run.prompts.read("train").texts), None)
    if pictured is not None and not reads_images(config):
        raise images_refused(pictured)


def refuse_long_stops(stops: "Stops") -> None:
    """UserError for a text that ends completions and that a server could not end them at."""
    if stops.texts is not None:
        raise UserError(
            f"model.stop: {stops.texts.texts[0]!r} has several tokens in this tokenizer, "
            "but a server ends completions at single tokens: choose a text with a single token"
        )


def _server(
    run: RunSettings, m: LanguageSettings, folder: Path, model: Any, stops: "Stops"
) -> "CompletionsServer":
    """The server that samples instead of the model whose weights it gets."""
    from accelerate import PartialState

    from flowrl.models.language.served_adapters import Adapters, InStep, Weights
    from flowrl.models.language.served_owner import ServerOwner
    from flowrl.models.language.server import CompletionsServer
    from rewards.serving.client import Client
    from rewards.serving.requests import Patience
    from samplers.completions import TextPlan

    assert m.server is not None
    s = m.server
    refuse_long_stops(stops)
    patience = Patience(timeout=s.timeout, tries=s.tries, at_once=s.in_flight)
    try:
        client = Client(s.url, s.token, patience)
    except ValueError as error:
        raise UserError(f"model.server: {error}") from error
    vllm = s.engine == "vllm"
    main, served = PartialState().is_main_process, folder / "served"
    beside = Client(client.url.removesuffix("/v1"), s.token, patience)
    owner = ServerOwner(beside, s.model, folder, s.sync == "weights", main)
    weights: InStep | None = None
    if s.sync == "lora":
        prefix = "" if vllm else f"{s.model}:"
        weights = Adapters(model, served, client, client if vllm else beside, prefix, main)
    elif s.sync == "weights":
        base = place(m.language)
        base = str(Path(base).absolute()) if Path(base).is_dir() else base
        weights = Weights(
            model=model,
            folder=served,
            name=s.model,
            admin=beside,
            owner=owner,
            base=base,
            main=main,
        )
    algorithm = run.algorithm()
    (plan, *_) = algorithm.planned([0.0] * (algorithm.steps + 1), 0, 0)
    assert isinstance(plan, TextPlan)
    return CompletionsServer(
        client,
        s.model,
        tuple(stops.tokens),
        model.config.get_text_config().vocab_size,
        plan.temperature,
        weights,
        grouped=s.requests == "group",
        owner=owner,
        quantized=s.quantized,
        patience=s.patience,
    )


def modular_source(m: ModelSettings) -> "ModularSource | None":
    """The source of a model that is driven in its modular form, else None."""
    if not isinstance(m, PipelineSettings) or m.form != "modular":
        return None
    from flowrl.models.diffusers.modular.folder import ModularSource

    sizes = {"height": m.height, "width": m.width}
    names = [name for name, value in {**sizes, **m.call}.items() if value is not None]
    return ModularSource(place(m.pipeline), m.rights, m.guider, names)


def with_guider(run: RunSettings) -> RunSettings:
    """The run with the class and settings of its modular pipeline's guider, which its folder does
    not hold."""
    m, source = run.model, modular_source(run.model)
    if source is None or not isinstance(m, PipelineSettings) or m.guider is not None:
        return run
    from flowrl.models.diffusers.modular.folder import guiders_of

    guiders = guiders_of(source.skeleton())
    return run.model_copy(update={"model": m.model_copy(update={"guider": guiders})})


def loaded_from(m: PipelineSettings | LanguageSettings) -> str:
    """The place that loaders read a model from: its folder; its hub name, while the hub answers for
    it; and otherwise the folder of the hub's cache, since the hub's own client would wait for long.
    UserError if that folder lacks files."""
    place_of_model, repository = f"model.{m.KIND}", hub_repository(m.source)
    silence = None if repository is None else hub_silence(m.source)
    if repository is None or silence is None:
        return place(m.source)
    folder = repository.snapshot()
    way = f": run {repository.command()} where there is a network"
    if silence.startswith(NOT_ASKED):
        way = ""
    if not isinstance(folder, Path):
        raise UserError(
            f"{place_of_model}: {m.source} is neither a folder nor in the hub's cache "
            f"{repository.root}, and the hub {silence}{way}"
        )
    try:
        if isinstance(m, PipelineSettings):
            check_pipeline(str(folder), m.form)
        else:
            check_language(str(folder), m.gguf_file)
    except UserError as error:
        raise UserError(f"{error}; the hub, which has the rest, {silence}{way}") from error
    say_cached(m.source, folder, silence)
    return str(folder)


def place(source: str) -> str:
    """An existing folder, as given or below the project's folder; otherwise the name on the hub."""
    return str(find(source)) if find(source).is_dir() else source
