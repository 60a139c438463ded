"""Reward models that are a Qwen-VL with a head on special tokens: HPSv3, VideoReward, EditReward.

The authors embed images themselves and call the language model on vectors alone, so positions are
sequential, 0 to L - 1 on all three axes, instead of the image grid's (M-RoPE). They are passed
explicitly here, since the whole model of transformers would compute the grid's positions and so
other scores.

Files have the names of transformers up to 4.46, or of later versions; both are renamed by hand and
loaded strictly, since transformers renames entries neither in `load_state_dict` nor for custom
classes. Vectors of rotary frequencies stay in float32, whatever the weights are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor
from torch.nn import functional

from rewards.perception.chat_frame import IMAGE, chat_frame, vision_block
from rewards.perception.embedding import OPENAI_MEAN, OPENAI_STD, DtypeName, Placement
from rewards.types import OneOrMore

PATCH, MERGE, TEMPORAL = 14, 2, 2
FACTOR = PATCH * MERGE
_RENAMED = (  # the file's start of a name, and that of the bare model; the first that fits
    ("model.visual.", "visual."),
    ("visual.", "visual."),
    ("model.language_model.", "language_model."),
    ("model.", "language_model."),
)


def resized(height: int, width: int, least: int, most: int) -> tuple[int, int]:
    """Sides as multiples of 28 whose product lies between `least` and `most`, as close to the
    original as possible.

    When an image is enlarged, rounding up may exceed `most`, as in the authors' code.
    """
    h, w = (max(FACTOR, round(side / FACTOR) * FACTOR) for side in (height, width))
    if h * w > most:
        scale = math.sqrt(height * width / most)
        h, w = (math.floor(side / scale / FACTOR) * FACTOR for side in (height, width))
    elif h * w < least:
        scale = math.sqrt(least / (height * width))
        h, w = (math.ceil(side * scale / FACTOR) * FACTOR for side in (height, width))
    return max(h, FACTOR), max(w, FACTOR)


@dataclass(frozen=True)
class QwenSettings:
    """dtype  numbers that the network computes in; heads stay in float32"""

    batch: OneOrMore = 2
    device: str = "auto"
    dtype: DtypeName = "bfloat16"

    @property
    def placement(self) -> Placement:
        return Placement.of(self.device, self.dtype)


@dataclass(frozen=True)
class Patches:
    """Normalised patches [n 1176] of an image or video, and its patch grid [t, h, w]."""

    values: Float[Tensor, "n p"]
    grid: tuple[int, int, int]

    @property
    def tokens(self) -> int:
        """Number of language-model tokens: one per 2 x 2 patches."""
        return math.prod(self.grid) // MERGE**2


def image_patches(image: Image.Image, pixels: int) -> Patches:
    """Patches of an image resized to about this many pixels (bicubic, PIL) and repeated as a pair
    of frames."""
    height, width = resized(image.height, image.width, pixels, pixels)
    image = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    frame = flat.view(height, width, 3).permute(2, 0, 1).float()
    return _patches(frame.expand(TEMPORAL, -1, -1, -1))


def video_patches(frames: Float[Tensor, "f 3 h w"], least: int, most: int) -> Patches:
    """Patches of frames in 0..1: rounded to 8 bits, resized as tensors (bicubic, antialias),
    rounded again."""
    height, width = resized(frames.shape[-2], frames.shape[-1], least, most)
    whole = (frames.float().nan_to_num(0.0).clamp(0, 1) * 255).round()
    small = functional.interpolate(whole, (height, width), mode="bicubic", antialias=True)
    small = small.clamp(0, 255).round()
    odd = len(small) % TEMPORAL
    return _patches(torch.cat([small, small[-1:]]) if odd else small)


def _patches(frames: Float[Tensor, "f 3 h w"]) -> Patches:
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (OPENAI_MEAN, OPENAI_STD))
    f, _, height, width = frames.shape
    t, h, w = f // TEMPORAL, height // PATCH, width // PATCH
    cut = ((frames / 255 - mean) / std).reshape(
        t, TEMPORAL, 3, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH
    )
    # one row per patch, the four patches of a token together; in it channel, frame, row, column
    rows = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1)
    return Patches(rows, (t, h, w))


@dataclass(frozen=True)
class Turn:
    """A user turn: images or one video, followed by the text."""

    media: tuple[Patches, ...]
    text: str
    pad: str = IMAGE

    def written(self, frame: tuple[str, str]) -> str:
        """The turn's text, between the two texts from the chat template (`chat_frame`)."""
        shown = "".join(vision_block(self.pad * one.tokens) for one in self.media)
        return f"{frame[0]}{shown}{self.text}{frame[1]}"


@dataclass(frozen=True)
class QwenBackbone:
    """A Qwen2-VL or Qwen2.5-VL without its language head. `rewards`: ids of the special tokens.

    frame  the texts around a turn, from `chat_frame`
    """

    model: Any
    tokenizer: Any
    frame: tuple[str, str]
    rewards: tuple[int, ...]
    placement: Placement

    @torch.no_grad()
    def hidden(self, turns: Sequence[Turn]) -> Float[Tensor, "n k e"]:
        """Hidden states after the last norm at the k special tokens, float32.

        ValueError unless each turn has each of these tokens once, in this order.
        """
        rows = [self._ids(turn) for turn in turns]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).to(self.placement.device)
        ids = ids.to(self.placement.device)
        vectors = self.model.language_model.embed_tokens(ids)
        pad = self._id(turns[0].pad)
        vectors[(ids == pad) & mask] = self._seen([one for t in turns for one in t.media])
        steps = torch.arange(ids.shape[1], device=ids.device).expand(3, len(rows), -1)
        out = self.model.language_model(
            inputs_embeds=vectors,
            attention_mask=mask.long(),
            position_ids=steps,
            use_cache=False,
        ).last_hidden_state
        at = torch.tensor([[row.tolist().index(token) for token in self.rewards] for row in rows])
        return out[torch.arange(len(rows))[:, None], at.to(out.device)].float()

    def _ids(self, turn: Turn) -> Int[Tensor, " l"]:
        ids = self.tokenizer(turn.written(self.frame), add_special_tokens=False)["input_ids"]
        in_turn = tuple(token for token in ids if token in self.rewards)
        visual = sum(one.tokens for one in turn.media)
        if in_turn != self.rewards or ids.count(self._id(turn.pad)) != visual:
            raise ValueError(
                "a prompt contains one of the model's special tokens, such as <|Reward|> or "
                f"{turn.pad}: {turn.text[-300:]!r}"
            )
        return torch.tensor(ids)

    def _id(self, token: str) -> int:
        return self.tokenizer.convert_tokens_to_ids(token)

    def _seen(self, media: Sequence[Patches]) -> Float[Tensor, "t e"]:
        values = torch.cat([one.values for one in media])
        grid = torch.tensor([one.grid for one in media], device=self.placement.device)
        out = self.model.visual(
            values.to(self.placement.device, self.placement.dtype), grid_thw=grid
        )
        return out if isinstance(out, Tensor) else out.pooler_output  # before transformers 5


def split_names(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split entries into the network's, under the bare model's names, and all others."""
    network: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for name, value in state.items():
        new = next((b + name.removeprefix(a) for a, b in _RENAMED if name.startswith(a)), None)
        if new is None:
            rest[name] = value
        else:
            network[new] = value
    return network, rest


def open_backbone(
    reward: str, base: str, tokens: Sequence[str], network: dict[str, Tensor], placement: Placement
) -> QwenBackbone:
    """Load the network from the file, with the configuration and tokenizer of the folder `base`.

    ValueError, in one sentence, if the file's entries do not belong to such a model.
    """
    from accelerate import init_empty_weights
    from tokenizers import AddedToken
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    frame = chat_frame(reward, base, tokenizer)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in tokens], True)
    config = AutoConfig.from_pretrained(base)
    if config.model_type not in ("qwen2_vl", "qwen2_5_vl"):
        raise ValueError(
            f"{reward}: {base} is a {config.model_type}; expected Qwen2-VL or Qwen2.5-VL"
        )
    embedding = network.get("language_model.embed_tokens.weight")
    if embedding is None or len(embedding) != len(tokenizer):
        rows = "no embedding" if embedding is None else f"an embedding of {len(embedding)} rows"
        raise ValueError(
            f"{reward}: the file has {rows}; expected {len(tokenizer)}, the tokens of {base} and "
            f"{', '.join(tokens)}"
        )
    config.text_config.vocab_size = len(tokenizer)
    with init_empty_weights(include_buffers=False):
        model = AutoModel.from_config(config)
    try:
        model.load_state_dict(network, strict=True, assign=True)
    except RuntimeError as error:
        first = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{reward}: the file is not a {config.model_type} of {base}: {first}"
        ) from error
    ids = tuple(tokenizer.convert_tokens_to_ids(list(tokens)))
    return QwenBackbone(put_weights(model, placement), tokenizer, frame, ids, placement)


def put_weights(model: Any, placement: Placement) -> Any:
    """Move the model and set it up for inference; parameters take the dtype, buffers keep
    theirs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(placement.device, placement.dtype)
    return model.to(placement.device).eval().requires_grad_(False)


def linear_layers(
    reward: str, state: Mapping[str, Tensor], prefix: str, places: Sequence[int], outputs: int
) -> torch.nn.Sequential:
    """Linear layers `<prefix><place>.weight` and `.bias` with ReLUs between them, float32."""
    wanted = {f"{prefix}{place}.{part}" for place in places for part in ("weight", "bias")}
    names = {name for name in state if name.startswith(prefix)}
    if names != wanted or len(state[f"{prefix}{places[-1]}.weight"]) != outputs:
        listed = ", ".join(sorted(names)) or "nothing"
        raise ValueError(
            f"{reward}: expected a head {', '.join(sorted(wanted))} with {outputs} outputs; the "
            f"file has {listed}"
        )
    layers: list[torch.nn.Module] = []
    for place in places:
        weight, bias = state[f"{prefix}{place}.weight"], state[f"{prefix}{place}.bias"]
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight, "bias": bias})
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]).float().eval().requires_grad_(False)


def refuse_others(reward: str, entries: Mapping[str, Tensor], head: str | tuple[str, ...]) -> None:
    """ValueError for entries outside the network, the reward head and the language head."""
    extra = sorted(n for n in entries if not n.startswith(head) and n != "lm_head.weight")
    if extra:
        raise ValueError(f"{reward}: the file has entries of another model: {', '.join(extra[:4])}")
