"""Sizes of a model, from its configuration and the headers of its files: no weights are read.

See `flowrl.models.description` for where a configuration comes from.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from flowrl.errors import UserError
from flowrl.estimate.started_adapters import StartedAdapters, layers_of
from flowrl.models.description import Description, describe
from flowrl.models.diffusers.lora.lora import OTHER, default_targets
from flowrl.models.diffusers.modular.face import GUIDER_OFF
from flowrl.models.diffusers.modular.guiders import guider_passes
from flowrl.models.image_tokens.policy import ImageTokenPolicy
from flowrl.models.language.vision import reads_images
from flowrl.models.own.policy import OwnPolicy
from flowrl.models.savings import outer_lists
from flowrl.settings import LanguageSettings, ModelSettings, OwnSettings, PipelineSettings
from flowrl.settings.model.image_tokens import ImageTokenSettings
from flowrl.settings.model.own_model import OwnModelSettings
from flowrl.settings.model.pipeline import GuidanceScale

PROMPT = 64  # tokens of a text's prompt, assumed
# linears of blocks that see the prompt's tokens, which are few beside an image's
TEXT_MODULES = re.compile(r"(^|\.)(add_|to_add|context|txt|ff_context)|attn2\.to_[kv]")
# pipelines whose denoiser sees the edited image's tokens too, and to how many pixels they resize it
EDITING = ("FluxKontextPipeline", "QwenImageEditPipeline")
EDITED_PIXELS = 2**20
# begin the names of pipelines whose default size is their denoiser's `sample_size`; others, such as
# Lumina 2, have numbers of their own
SIZED_BY_DENOISER = (
    "StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline",
    "PixArtAlphaPipeline", "PixArtSigmaPipeline", "SanaPipeline", "AuraFlowPipeline",
    "CogView3PlusPipeline", "CogView4Pipeline",
)  # fmt: skip
SPATIAL = ("scale_factor_spatial", "spatial_compression_ratio")
TEMPORAL = ("scale_factor_temporal", "temporal_compression_ratio")
LEVEL_FACTORS = ("spatial_downsample_factors", "temporal_downsample_factors")
LEVELS = ("block_out_channels", "decoder_block_out_channels", "encoder_block_out_channels")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and its rows, in numbers of weights or activations, not in bytes.

    adapters  weights per unit of rank
    lengths   weights of DoRA's lengths, one per row of an adapted weight
    adapted   weights of the layers that have an adapter
    linear    weights of the trained model's linear layers, which quantization makes smaller
    tokens    of a row, in the trained blocks; None for a model without tokens (a UNet)
    inside    inputs and outputs of the blocks' linear layers per token, over all blocks
    between   inputs of the blocks per token, over all blocks
    text      tokens of a row's text that pass through an image model's blocks
    text_inside   `inside` of these tokens: they may pass through layers of their own
    text_between  `between` of these tokens
    outside   weights outside the blocks
    block     weights of the largest block
    latent    of a row
    decoding  of a row's image at the decoder's last level, one layer
    media     of a row's decoded image or video
    unknown   components whose weights could not be counted
    rows      of the denoiser for one state in training: two with classifier-free guidance
    largest   weights of the largest denoiser
    buffers   bytes of tensors besides weights, such as tables of positions
    cached    numbers of a row's keys and values in sampling, over all layers
    public    whether the configuration comes from flowrl's table instead of the model's files
    """

    trained: int
    frozen: Mapping[str, int]  # by component
    adapters: int
    tokens: int | None
    inside: int
    between: int
    blocks: int
    text_inside: int = 0
    text_between: int = 0
    outside: int = 0
    block: int = 0
    text: int = 0
    latent: int = 0
    decoding: int = 0
    media: int = 0
    unknown: tuple[str, ...] = ()
    rows: int = 1
    largest: int = 0
    buffers: int = 0
    public: bool = False
    adapted: int = 0
    linear: int = 0
    cached: int = 0
    lengths: int = 0


def of(m: ModelSettings, length: int) -> Sizes | None:
    """Sizes of a run, None if no configuration is known. `length`: tokens of a completion, or
    steps of a sample."""
    if isinstance(m, OwnSettings):
        return _own(m.own)
    described = describe(m)
    if described is None:
        return None
    if isinstance(m, PipelineSettings):
        return _pipeline(described, m, length)
    if isinstance(m, LanguageSettings) and m.image is not None:
        return _image_tokens(described, m.image, length)
    return _language(described, length)


def rows_per_state(
    described: Description, guidance: GuidanceScale | Literal["auto"], steps: int
) -> list[int]:
    """Denoiser rows per state, at each of a sample's steps: two with classifier-free guidance,
    unless the denoiser takes the scale as an input, or as many as a modular pipeline's guider makes
    there. None means the pipeline's own scale; `Run.trained_model` replaces auto."""
    assert guidance != "auto", "the recipe decides: Run.trained_model"
    if described.in_blocks:
        return guider_passes(
            described.blocks, GUIDER_OFF if guidance == "none" else guidance, steps
        )
    return [_classic_rows(described, guidance)] * steps


def _classic_rows(described: Description, guidance: GuidanceScale) -> int:
    if guidance == "none" or described.first.config.get("guidance_embeds"):
        return 1
    if guidance is None and described.guided_by_part:
        return 2
    scale = described.default("guidance_scale") if guidance is None else guidance
    return 2 if isinstance(scale, int | float) and described.guides_at(scale) else 1


def _language(described: Description, length: int) -> Sizes:
    model: Any = described.language_model()
    head = model.get_output_embeddings()
    linears = [x for x in model.modules() if isinstance(x, nn.Linear | Conv1D)]
    targets = [x for x in linears if x is not head]
    trained = _count(model)
    repeated = model.get_decoder() if reads_images(model.config) else model
    sizes = Sizes(
        trained,
        {},
        _ends(targets),
        PROMPT + length,
        **_work(repeated),
        lengths=_rows(targets),
    )
    more = {"public": described.public, "adapted": _weights(targets), "linear": _weights(targets)}
    more["cached"] = cached_numbers(model.config.get_text_config(), PROMPT + length)
    return replace(sizes, outside=trained - sum(map(_count, _blocks(repeated))), **more)


def _image_tokens(
    described: Description, settings: ImageTokenSettings, length: int
) -> Sizes | None:
    """Sizes of a model that writes images, whose other parts are frozen; None without its files.
    Activations of its decoder are not known."""
    if described.folder is None:
        return None
    policy = ImageTokenPolicy.without_weights(str(described.folder), settings)
    parts, language = policy.family.trained, policy.language
    trained = sum(_count(part) for part in parts.values())
    linears = [x for part in parts.values() for x in part.modules() if isinstance(x, nn.Linear)]
    targets = [x for x in language.modules() if isinstance(x, nn.Linear)]
    height, width = policy.family.size
    cached = cached_numbers(policy.model.config.get_text_config(), PROMPT + length)
    return Sizes(
        trained,
        {"decoder and other parts": _count(policy.model) - trained},
        _ends(targets),
        PROMPT + length,
        **_work(language),
        lengths=_rows(targets),
        adapted=_weights(targets),
        linear=_weights(linears),
        outside=trained - sum(map(_count, _blocks(language))),
        cached=policy.guided.rows * cached,
        rows=policy.guided.rows,
        media=3 * height * width,
    )


def cached_numbers(config: Any, tokens: int) -> int:
    """Numbers of a row's keys and values after this many tokens. A layer with a window keeps no
    more than it; layers without attention keep no keys."""
    numbers = config.to_dict()
    layers = numbers.get("num_hidden_layers") or numbers.get("n_layer") or 0
    heads = numbers.get("num_attention_heads") or numbers.get("n_head") or 0
    width = numbers.get("hidden_size") or numbers.get("n_embd") or 0
    if not (layers and heads and width):
        return 0
    per_token = (numbers.get("num_key_value_heads") or heads) * (
        numbers.get("head_dim") or width // heads
    )
    kinds = numbers.get("layer_types") or ["full_attention"] * layers
    window = numbers.get("sliding_window") or tokens
    tokens_kept = {"full_attention": tokens, "sliding_attention": min(window, tokens)}
    return 2 * per_token * sum(tokens_kept.get(kind, 0) for kind in kinds)


def _own(model: OwnModelSettings) -> Sizes | None:
    """The sizes of a user's own model; None if it cannot be created on the meta device."""
    try:
        policy = OwnPolicy(model.build("meta"))
    except UserError:
        return None
    roots = list(policy.roots().values())
    linears = [x for root in roots for x in root.modules() if isinstance(x, nn.Linear)]
    trained, latent = sum(map(_count, roots)), math.prod(policy.row_shape)
    frozen = {"frozen modules": _count(policy.model) - trained}
    sizes = Sizes(
        trained=trained,
        frozen=frozen,
        adapters=_ends(linears),
        tokens=None,
        inside=0,
        between=0,
        blocks=0,
        adapted=_weights(linears),
        lengths=_rows(linears),
    )
    return replace(sizes, outside=trained, latent=latent, media=latent)


def _pipeline(described: Description, m: PipelineSettings, steps: int) -> Sizes:
    denoisers = described.denoisers
    shape = RowShape.of(described, m)
    targets = [linear for model in denoisers.values() for linear in _adapted(m, model)]
    return Sizes(
        **_work(described.first),
        outside=_outside(denoisers.values()),
        trained=sum(map(_count, denoisers.values())),
        frozen={n: c for n, c in described.counts.items() if c is not None},
        largest=max(map(_count, denoisers.values()), default=0),
        buffers=sum(buffer.nbytes for model in denoisers.values() for buffer in model.buffers()),
        adapters=_ends(targets),
        lengths=_rows(targets),
        adapted=_weights(targets),
        linear=_weights(
            x for d in denoisers.values() for x in d.modules() if isinstance(x, nn.Linear)
        ),
        tokens=shape.tokens,
        text=_size("max_sequence_length", described, m) or 0,
        latent=shape.latent,
        decoding=shape.decoding,
        media=shape.media,
        unknown=tuple(sorted(n for n, c in described.counts.items() if c is None)),
        rows=max(rows_per_state(described, m.guidance.train, steps)),
        public=described.public,
    )


def _adapted(m: ModelSettings, denoiser: nn.Module) -> Iterator[nn.Linear]:
    """The linear layers that would get adapters."""
    targets = m.lora.targets if m.lora is not None else None
    if m.lora is not None and (started := StartedAdapters.of(m.lora)) is not None:
        targets = layers_of(denoiser, started.layers)
    ends = tuple(f".{end}" for end in targets or default_targets(denoiser))
    for name, module in denoiser.named_modules():
        if isinstance(module, nn.Linear) and f".{name}".endswith(ends):
            yield module


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _ends(linears: Iterable[nn.Linear | Conv1D]) -> int:
    return sum(sum(linear.weight.shape) for linear in linears)


def _rows(linears: Iterable[nn.Linear | Conv1D]) -> int:
    """Number of outputs: the smaller index of a Conv1D's weight is its input."""
    return sum(linear.weight.shape[1 if isinstance(linear, Conv1D) else 0] for linear in linears)


def _weights(linears: Iterable[nn.Linear | Conv1D]) -> int:
    return sum(linear.weight.numel() for linear in linears)


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [block for listed in outer_lists(model) for block in listed]


def _outside(models: Iterable[nn.Module]) -> int:
    """Weights outside the blocks."""
    return sum(_count(model) - sum(map(_count, _blocks(model))) for model in models)


def _work(model: nn.Module) -> dict[str, Any]:
    """The fields of `Sizes` about a model's blocks."""
    blocks = _blocks(model)
    parts = [_block_work(block) for block in blocks]
    work = {name: sum(getattr(part, name) for part in parts) for name in BlockWork._fields}
    return work | {"blocks": len(blocks), "block": max(map(_count, blocks), default=0)}


class BlockWork(NamedTuple):
    """Work per token of a block, within its layers and between tokens, and per token of its
    text."""

    inside: int
    between: int
    text_inside: int
    text_between: int


def _block_work(block: nn.Module) -> BlockWork:
    """The work of a block. One without its own linear layers for text has the text in its token
    stream; with cross attention the text stays outside."""
    linears = {n: x for n, x in block.named_modules() if isinstance(x, nn.Linear)}
    linears = {n: x for n, x in linears.items() if not OTHER.search(n)}
    texts = {n: x for n, x in linears.items() if TEXT_MODULES.search(n)}
    of_images = [x for n, x in linears.items() if n not in texts]
    inside, between = _ends(of_images), min((x.in_features for x in of_images), default=0)
    crossed = any("attn2" in name for name in texts)
    through = _ends(texts.values()) if texts else inside
    return BlockWork(inside, between, through, 0 if crossed else between)


@dataclass(frozen=True)
class RowShape:
    """Sizes of one row.

    frames                  of the latents, before they are packed
    height                  of the latents, before they are packed
    width                   of the latents, before they are packed
    channels                of the latents
    tokens                  in the trained blocks; None for a model without tokens (a UNet)
    decoding                of a row's image at the decoder's last level, one layer
    media                   numbers in a row's decoded image or video
    """

    frames: int
    height: int
    width: int
    channels: int
    tokens: int | None
    decoding: int
    media: int

    @property
    def latent(self) -> int:
        """Number of values in a row's latents."""
        return self.frames * self.height * self.width * self.channels

    @classmethod
    def of(cls, described: Description, m: PipelineSettings) -> "RowShape":
        """Read the sizes of one row from diffusers' configurations."""
        vae, config = described.vae(), dict(described.first.config)
        levels = next((vae[n] for n in LEVELS if vae.get(n)), [vae.get("base_dim", 1)])
        spatial, temporal = _compression(vae)
        size = _own_side(described) or 512
        height = _size("height", described, m) or size
        width = _size("width", described, m) or size
        frames = _size("num_frames", described, m) or 1
        chunk, ahead = _chunks(vae, temporal)
        latent_frames = max(0, frames - ahead) // chunk * (-(-chunk // temporal)) + -(
            -ahead // temporal
        )
        channels = config.get("in_channels", 4)
        latent_channels = vae.get("latent_channels") or vae.get("z_dim") or channels
        shape = latent_frames, height // spatial, width // spatial
        patch = _patch_size(vae, config)
        tokens = None
        if patch is not None:
            sizes = list(patch) if isinstance(patch, list | tuple) else [patch]
            deep = sizes[0] if len(sizes) == 3 else config.get("patch_size_t") or 1
            side = _patch(vae, config)
            tokens = max(1, math.prod(shape) // (deep * side**2))
            if described.pipeline in EDITING:  # the edited image, as tokens of the same size
                resized = m.call.get("_auto_resize", True)  # else it keeps its own size: the rows'
                edited = EDITED_PIXELS if resized else height * width
                tokens += edited // (spatial * side) ** 2
        pixels = frames * height * width
        return cls(
            frames=shape[0],
            height=shape[1],
            width=shape[2],
            channels=latent_channels,
            tokens=tokens,
            decoding=pixels * levels[0],
            media=3 * pixels,
        )


@dataclass(frozen=True)
class SizeLimits:
    """Sizes that a pipeline can generate, as far as its configuration shows.

    factor   of pixels: a height or width is a multiple of it
    longest  pixels of the longest height or width; None without a limit
    frames   of a video are `ahead` more than a multiple of this
    rounds   whether the pipeline packs latents, and rounds a side to what it packs
    """

    factor: int
    longest: int | None
    frames: int
    ahead: int
    rounds: bool = False

    @classmethod
    def of(cls, described: Description) -> "SizeLimits":
        vae, config = described.vae(), dict(described.first.config)
        spatial, temporal = _compression(vae)
        patch = _patch(vae, config)
        most = config.get("pos_embed_max_size")  # SD3: patches of a side
        longest = most * patch * spatial if isinstance(most, int) else None
        frames, ahead = _chunks(vae, temporal)
        rounds = _packed(vae, config)
        return cls(spatial * patch, longest, frames=frames, ahead=ahead, rounds=rounds)

    def impossible(self, sizes: Mapping[str, int | None]) -> str | None:
        """Why a pipeline, whose own checks take these sizes, could not generate them: a side beyond
        the model's longest one, or, for a model of patches that does not pack its latents, and so
        does not round them, half a patch."""
        sides = {n: v for n, v in sizes.items() if n in ("height", "width") and type(v) is int}
        if self.rounds:
            sides = {name: value - value % self.factor for name, value in sides.items()}
        return self.refusal(sides)

    def refusal(self, sizes: Mapping[str, int]) -> str | None:
        """Why a pipeline cannot generate these sizes, by the names of its call's arguments."""
        for name in ("height", "width"):
            pixels = sizes.get(name, self.factor)
            if pixels % self.factor:
                near = max(self.factor, round(pixels / self.factor) * self.factor)
                return (
                    f"{name} {pixels} is not a multiple of {self.factor}, as the model's latents "
                    f"need: use {near}"
                )
            if self.longest is not None and pixels > self.longest:
                return f"{name} {pixels} is above the model's longest side of {self.longest} pixels"
        frames = sizes.get("num_frames", self.ahead)
        if more := (frames - self.ahead) % self.frames:
            near = frames - more
            return (
                f"{frames} frames are not {self.ahead} more than a multiple of {self.frames}, as "
                f"the model's latents need: use {near} or {near + self.frames}"
            )
        return None


def _compression(vae: Mapping[str, Any]) -> tuple[int, int]:
    """Pixels per latent in space, and frames per latent in time."""
    levels = next((vae[n] for n in LEVELS if vae.get(n)), [vae.get("base_dim", 1)])
    halvings = len(vae.get("dim_mult") or levels) - 1
    if LEVEL_FACTORS[0] in vae:  # of each level
        spatial, temporal = (math.prod(vae[name]) for name in LEVEL_FACTORS)
        return spatial, temporal
    spatial = next((vae[n] for n in SPATIAL if vae.get(n)), 2**halvings)
    return spatial, next((vae[n] for n in TEMPORAL if vae.get(n)), 1)


def _chunks(vae: Mapping[str, Any], temporal: int) -> tuple[int, int]:
    """Frames of a chunk that the decoder makes at once, and those ahead of the first: one latent's,
    and one frame; for MiniMax-H3 17 and 5, in 5 and 2 latents."""
    clip = vae.get("clip_length")
    return (temporal, 1) if clip is None else (clip, -(-clip // temporal))


def _patch(vae: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Latents on a side of a token, packed or not; 1 for a model without tokens."""
    patch = _patch_size(vae, config)
    if patch is None:
        return 1
    side = list(patch)[-1] if isinstance(patch, list | tuple) else patch
    return side * (2 if _packed(vae, config) and side == 1 else 1)


def _patch_size(vae: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """The denoiser's patch; 1 for packed latents (FLUX.3 names no patch), None without tokens."""
    size = config.get("patch_size", config.get("all_patch_size"))
    return 1 if size is None and _packed(vae, config) else size


def _packed(vae: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether a token is four latents that the pipeline packs (FLUX, Qwen-Image)."""
    channels = config.get("in_channels", 4)
    latent_channels = vae.get("latent_channels") or vae.get("z_dim") or channels
    return channels == 4 * latent_channels


def known_size(described: Description, m: PipelineSettings) -> tuple[int | None, int | None]:
    """Height and width of the run's samples, in pixels: its settings', the defaults of the
    pipeline's call, or, for pipelines that take them from it, those of the denoiser's
    configuration; None where none of them says."""
    taken = (described.pipeline or "").startswith(SIZED_BY_DENOISER)
    side = _own_side(described) if taken else None
    return _size("height", described, m) or side, _size("width", described, m) or side


def _own_side(described: Description) -> int | None:
    """The side in pixels that the denoiser's configuration names."""
    side = described.first.config.get("sample_size")
    spatial, _ = _compression(described.vae())
    return side * spatial if isinstance(side, int) else None


def _size(name: str, described: Description, m: PipelineSettings) -> int | None:
    """Return a size from the run's settings, or the pipeline's own default."""
    written = m.call.get(name, getattr(m, name, None))
    if written is not None:
        return int(written)
    default = described.default(name)
    return default if isinstance(default, int) else None
