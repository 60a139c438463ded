"""Open the model of a run's settings; no other module knows all kinds of models."""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flowrl.credit.choices import image_plans
from flowrl.errors import UserError
from flowrl.models.call_sizes import CallSizes
from flowrl.models.policy import Policy
from flowrl.models.rewritten import RewrittenPolicy
from flowrl.paths import find
from flowrl.prompts import has_images
from flowrl.prompts.row_sizes import RowSize, row_sizes
from flowrl.settings import ModelSettings, Run
from flowrl.settings.model.levels import levels_of
from flowrl.settings.sections.data import PromptPlace
from samplers.scheduler import unbound
from samplers.storage import Storage

if TYPE_CHECKING:
    from flowrl.models.diffusers.call.rows.encoding_cache import EncodingCache
    from flowrl.models.diffusers.modular.folder import ModularSource
    from flowrl.models.language.policy import CausalPolicy

DTYPES = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}  # fmt: skip


def open_model(run: Run, device: torch.device, folder: Path | None = None) -> Policy:
    """Load the model. `folder` is a training run's; other uses never sample from a server."""
    set_kernels(device, tf32=run.model.tf32, cudnn_attention=run.model.cudnn_attention)
    if run.model.pipeline:
        return _pipeline(run, device, folder is not None)
    if run.model.own is not None:
        return _own(run, device)
    policy = _language(run, device)
    if run.model.server is not None and folder is not None:
        _connect(policy, run, folder)
    return policy


def compiles(run: Run, device: torch.device) -> bool:
    """Whether `model.compile` asks for compiled blocks on this device."""
    return run.model.compile is True or (run.model.compile == "auto" and device.type == "cuda")


def set_kernels(device: torch.device, *, tf32: bool | None, cudnn_attention: bool) -> None:
    """Allow or forbid TF32 (None leaves it unchanged) and cuDNN's attention on a CUDA device, for
    the whole process."""
    if device.type != "cuda":
        return
    torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
    if tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32


def _pipeline(run: Run, device: torch.device, trains: bool) -> Policy:
    from flowrl.models import savings
    from flowrl.models.diffusers.batch import Scales
    from flowrl.models.diffusers.call.levels.user_levels import UserLevels
    from flowrl.models.diffusers.call.loop.image_shapes import sized_by_images
    from flowrl.models.diffusers.memory.offload import BaseMemory
    from flowrl.models.diffusers.policy import PipelinePolicy

    m, sigmas = run.model, run.model.sigmas
    assert m.pipeline is not None
    own = None
    if sigmas is not None:
        own = UserLevels(cache(partial(levels_of, sigmas)), trial=run.algorithm().steps)
    call = {"height": m.height, "width": m.width, **m.call}
    policy = PipelinePolicy.load(
        modular_source(m) or place(m.pipeline),
        dtype=DTYPES[m.dtype],
        device=device,
        call={key: value for key, value in call.items() if value is not None},
        held=BaseMemory(m.offload, m.offload_experts, m.quantization),
        levels=own,
        adapters=m.adapters,
        scheduler=m.scheduler,
    )
    savings.decoder(policy.pipe, tiling=m.vae.tiling, slicing=m.vae.slicing)
    if m.attention is not None:
        savings.attention(policy.denoisers, m.attention)
    if compiles(run, device):
        savings.compile_blocks(policy.denoisers)
    policy.loop.own_sampler = any(map(unbound, image_plans(run.algorithm())))
    policy.guidance = Scales(policy.scale(m.guidance.sample), policy.scale(run.training_guidance))
    policy.encoding_cache = _encoding_cache(run)
    policy.storage, policy.noise = _storage(run), run.train.noise
    rows = [row for place in run.prompts.given if trains for row in _rows(run, place)]
    if sized_by_images(policy.loop):
        rows = _rows(run, "train")
    if sized_by_images(policy.loop) or any(size.given for size in row_sizes(rows)):
        policy.check_rows(rows)  # sizes of calls rest on the latents'; before weights are sharded
    return policy


def _rows(run: Run, place: PromptPlace) -> Sequence[Mapping[str, Any]]:
    """Rows of prompts on this machine. Rows of evaluations at another size have their own."""
    others = place == "held_out" and run.evaluation_size
    return run.prompts.read(place).meta if run.prompts.on_disk(place) and not others else ()


def _own(run: Run, device: torch.device) -> Policy:
    from flowrl.models.own.policy import OwnPolicy

    m, sigmas = run.model, run.model.sigmas
    assert m.own is not None
    model = m.own.build()
    user = None if sigmas is None else partial(levels_of, sigmas)
    policy = OwnPolicy(model, name=m.own.name.rpartition(":")[2], levels=user)
    if m.weights is not None:
        policy.load_file(find(m.weights))
    policy.place(device, DTYPES[m.dtype])
    policy.storage, policy.noise = _storage(run), run.train.noise
    return policy


def _storage(run: Run) -> Storage:
    states = run.train.states
    device = None if states.device is None else torch.device(states.device)
    return Storage(None if states.dtype is None else DTYPES[states.dtype], device)


def _encoding_cache(run: Run) -> "EncodingCache | None":
    from flowrl.models.diffusers.call.rows.encoding_cache import MIB, EncodingCache

    how = run.model.encodings
    return None if how.keep == "no" else EncodingCache(how.keep, how.most * MIB)


def call_sizes(run: Run, automatic: int) -> CallSizes:
    """The limits of `train.rows_per_call`, with a number in place of auto."""
    rows = run.train.call_sizes
    return CallSizes(**{kind: automatic if n == "auto" else n for kind, n in rows.items()})


def whole_at_evaluation(model: Policy | RewrittenPolicy, run: Run) -> Policy | RewrittenPolicy:
    """`evaluation_policy` of the image model and, in a joint run, of its language model."""
    if not isinstance(model, RewrittenPolicy):
        return evaluation_policy(model, run)
    assert run.before is not None
    text = evaluation_policy(model.text, run.before)
    return replace(model, text=text, image=evaluation_policy(model.image, run))


def refuse_sizes(run: Run, owner: str, parameters: Collection[str]) -> None:
    """UserError for a size of evaluations that the pipeline's call does not take."""
    if unknown := set(run.evaluation_size) - set(parameters):
        name = min(unknown)
        raise UserError(f"evaluate.{name}: {owner} takes no {name}: leave it out")


def evaluation_policy(policy: Policy, run: Run) -> Policy:
    """The policy at `evaluate`'s guidance, size and arguments, or the same policy if they equal the
    model's.

    Otherwise a policy with the same modules, so that it always has the same weights. At the same
    size proofs are shared; another size has its own. UserError for a size that the pipeline
    refuses.
    """
    size, guidance, call = run.evaluation_size, run.evaluation_guidance, run.evaluate.call
    same = not size and not call and guidance == run.model.guidance.sample
    if run.model.pipeline is None or same:
        return policy
    from flowrl.models.diffusers.policy import PipelinePolicy
    from flowrl.models.diffusers.sizes.by_size import LoopSize, called_with

    assert isinstance(policy, PipelinePolicy)
    twin = copy.copy(policy)
    refuse_sizes(run, policy.name, policy.loop.driver.parameters)
    if size:
        twin = copy.copy(policy.at(LoopSize.of(policy.loop, RowSize(**size))))
    if call:
        twin = called_with(twin, call)
        twin.encoding_cache = None  # of training's arguments
    if size or call:
        twin.used, twin.one_size = {}, False
        twin.sizes = call_sizes(run, twin.automatic(run.evaluation_steps))
    twin.guidance = policy.guidance._replace(sample=policy.scale(guidance))
    return twin


def _language(run: Run, device: torch.device) -> "CausalPolicy":
    from flowrl.models.language.policy import CausalPolicy

    m = run.model
    assert m.language is not None
    refuse_images(run, m.language)
    policy = CausalPolicy.load(
        place(m.language), dtype=DTYPES[m.dtype], device=device, gguf_file=m.gguf_file,
        attention=m.attention, quantized=m.quantization,
    )  # fmt: skip
    set_up_language(policy, run)
    return policy


def set_up_language(policy: "CausalPolicy", run: Run) -> None:
    """Apply a run's settings to its language model. UserError for those that do not fit it."""
    from flowrl.models.language.head import float32_head
    from flowrl.models.language.steps import Steps

    m = run.model
    if m.head_dtype is not None:
        float32_head(policy.model)
    if run.train.share_prompts:
        policy.share_prompts()
    policy.adapt_vision = m.lora is not None and m.lora.vision
    policy.configure(
        system=m.system, stop=m.stop, temperature=run.evaluate.temperature, template=m.template
    )
    if m.environment is not None:
        policy.reply_by(m.environment)
    if m.steps is not None:
        policy.steps = Steps(m.steps.separator, m.steps.most, policy.tokenizer)


def refuse_images(run: Run, source: str) -> None:
    """UserError, before weights load, for prompts with images that the model does not read."""
    from transformers import AutoConfig

    from flowrl.models.language.chat import images_refused
    from flowrl.models.language.vision import reads_images

    if not (find(source) / "config.json").is_file() or not run.prompts.on_disk("train"):
        return
    config = AutoConfig.from_pretrained(find(source))
    pictured = next(filter(has_images, run.prompts.read("train").texts), None)
    if pictured is not None and not reads_images(config):
        raise images_refused(pictured)


def refuse_long_stops(policy: "CausalPolicy") -> None:
    """UserError for a text that ends completions and that a server could not end them at."""
    if policy.stop_texts is not None:
        raise UserError(
            f"model.stop: {policy.stop_texts.texts[0]!r} has several tokens in this tokenizer, "
            "but a server ends completions at single tokens: choose a text with a single token"
        )


def _connect(policy: "CausalPolicy", run: Run, folder: Path) -> None:
    from accelerate import PartialState

    from flowrl.models.language.served_adapters import Adapters, InStep, Weights
    from flowrl.models.language.served_owner import ServerOwner
    from flowrl.models.language.server import CompletionsServer
    from rewards.serving.client import Client
    from rewards.serving.requests import Patience
    from samplers.completions import TextPlan

    s = run.model.server
    assert s is not None
    refuse_long_stops(policy)
    patience = Patience(timeout=s.timeout, tries=s.tries, at_once=s.in_flight)
    try:
        client = Client(s.url, s.token, patience)
    except ValueError as error:
        raise UserError(f"model.server: {error}") from error
    vllm = s.engine == "vllm"
    main, served = PartialState().is_main_process, folder / "served"
    beside = Client(client.url.removesuffix("/v1"), s.token, patience)
    owner = ServerOwner(beside, s.model, folder, s.sync == "weights", main)
    kept: InStep | None = None
    if s.sync == "lora":
        prefix = "" if vllm else f"{s.model}:"
        kept = Adapters(policy.model, served, client, client if vllm else beside, prefix, main)
    elif s.sync == "weights":
        assert run.model.language is not None
        base = place(run.model.language)
        base = str(Path(base).absolute()) if Path(base).is_dir() else base
        kept = Weights(policy.model, served, s.model, beside, owner, base, main)
    algorithm = run.algorithm()
    (plan, *_) = algorithm.planned([0.0] * (algorithm.steps + 1), 0, 0)
    assert isinstance(plan, TextPlan)
    policy.server = CompletionsServer(
        client,
        s.model,
        tuple(policy.stop),
        policy.model.config.get_text_config().vocab_size,
        plan.temperature,
        kept,
        grouped=s.requests == "group",
        owner=owner,
        quantized=s.quantized,
        patience=s.patience,
    )


def modular_source(m: ModelSettings) -> "ModularSource | None":
    """The model's folder and rights if it is driven in its modular form, else None."""
    if m.form != "modular" or m.pipeline is None:
        return None
    from flowrl.models.diffusers.modular.folder import ModularSource

    return ModularSource(place(m.pipeline), m.rights, m.guider)


def with_guider(run: Run) -> Run:
    """The run with the class and settings of its modular pipeline's guider, which its folder does
    not hold."""
    source = modular_source(run.model)
    if source is None or run.model.guider is not None:
        return run
    from flowrl.models.diffusers.modular.folder import guiders_of

    found = guiders_of(source.skeleton())
    return run.model_copy(update={"model": run.model.model_copy(update={"guider": found})})


def place(source: str) -> str:
    """An existing folder, as given or below the project's folder; otherwise the name on the hub."""
    return str(find(source)) if find(source).is_dir() else source
