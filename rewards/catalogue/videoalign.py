"""VideoReward of VideoAlign: quality, motion and text alignment of a video, arXiv:2501.13918.

A Qwen2-VL-2B reads the frames, an instruction and the prompt, with a special token after each of
three parts. A linear layer maps each token's state to its score: the released file has one row for
all three tokens; the training script makes three rows, of which the i-th counts for the i-th token.
VQ and MQ stand before the prompt, so only TA depends on it. Each is normalised by the mean and
standard deviation of the checkpoint's `inference_config`; overall is their sum.

A checkpoint is a folder: `model_config.json` and `checkpoint-<step>/model.pth` (the highest step),
in which the adapter is stored separately from the weights and is merged here in float32: W + alpha
/ r * B A. The authors run it unmerged in bfloat16, so figures differ by that rounding; they also
round rotary frequencies to bfloat16, which is not reproduced. A checkpoint with a separate adapter
file lacks the rows of the three tokens and is refused.

Scores depend on the frame rate: `video_fps` is the frame rate of the samples. The model gets 2
frames per second (the checkpoint's `fps`), at least 4 frames. The authors read an mp4, a lossy step
that is left out. The network needs 4.4 GB in bfloat16. Not tried on the published weights; the
authors' code gave the same scores for tiny random weights of both forms
(`scripts/authors/videoalign.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, ValidationError
from torch import Tensor

from rewards.hub_names import names_repository
from rewards.judging.published_texts import PublishedText
from rewards.perception.chat_frame import VIDEO
from rewards.perception.embedding import in_batches
from rewards.perception.hub import HubName, fetched_folder, model_path
from rewards.perception.media import WrongMedia, expect, items
from rewards.perception.qwen import (
    QwenBackbone,
    QwenSettings,
    Turn,
    open_backbone,
    refuse_others,
    split_names,
    video_patches,
)
from rewards.perception.weight_files import weights_of_file
from rewards.rights import ReadFile, Right, need
from rewards.types import Inline, Kind, Positive, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("video",)

HUB_FOLDER = "KwaiVGI/VideoReward"
PUBLISHED_BASE = "Qwen/Qwen2-VL-2B-Instruct"
TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
DIMENSIONS = ("VQ", "MQ", "TA")
LEAST_PIXELS = 128 * 28 * 28
LEAST_FRAMES, MOST_FRAMES = 4, 768
WRAPPED = "base_model.model."
VIDEO_HEAD = "rm_head.weight"
VideoPart = Literal["overall", "visual_quality", "motion_quality", "text_alignment"]
COLUMNS: dict[str, tuple[int, ...]] = {
    "overall": (0, 1, 2),
    "visual_quality": (0,),
    "motion_quality": (1,),
    "text_alignment": (2,),
}
VIDEO_INSTRUCTION = PublishedText(
    "VideoAlign's instruction",
    3997,
    "fdb6309bac618dd0",
    "prompt_template.py of github.com/KwaiVGI/VideoAlign",
    "https://raw.githubusercontent.com/KwaiVGI/VideoAlign/"
    "3e5ebc600aebc4d28300e9132b0a23ee8e1bc47c/prompt_template.py",
)


class DataFields(BaseModel):
    fps: float
    max_frame_pixels: int
    sample_type: Literal["uniform"]
    eval_dim: tuple[Literal["VQ"], Literal["MQ"], Literal["TA"]]
    prompt_template_type: Literal["detailed_special"]
    num_frames: int | None = None


class ModelFields(BaseModel):
    model_name_or_path: str
    output_dim: Literal[1, 3]
    use_special_tokens: Literal[True]


class AdapterFields(BaseModel):
    lora_r: int
    lora_alpha: float
    use_rslora: bool = False


class ModelConfig(BaseModel):
    """Fields of `model_config.json` that affect the score."""

    data_config: DataFields
    model_config_: ModelFields
    peft_lora_config: AdapterFields
    inference_config: dict[str, float] | None = None


def config_of(folder: Path) -> ModelConfig:
    """Read a checkpoint's configuration. ValueError, naming the field, for another kind of
    checkpoint."""
    file = folder / "model_config.json"
    if not file.is_file():
        raise ValueError(f"videoalign: {folder} has no model_config.json")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"videoalign: {file} is not a JSON object: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"videoalign: {file} is not a JSON object")
    try:
        return ModelConfig.model_validate({**raw, "model_config_": raw.get("model_config")})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])).replace("config_.", "config.")
        raise ValueError(f"videoalign: {file}: {field}: {first['msg']}") from error


def frame_places(total: int, video_fps: float, data: DataFields) -> list[int]:
    """Indices of the frames to show: an even number of them, including the first and the last."""
    most = min(MOST_FRAMES, total) // 2 * 2
    if most < 2:
        raise WrongMedia(f"videoalign: a video needs at least 2 frames, not {total}")
    wanted = data.num_frames or min(max(total / video_fps * data.fps, LEAST_FRAMES), most)
    count = min(2 * round(wanted / 2), most)
    return torch.linspace(0, total - 1, count).round().long().tolist()


def merged_adapter(state: Mapping[str, Tensor], adapter: AdapterFields) -> dict[str, Tensor]:
    """Weights of the model without its peft wrapping: W = base + scale * B A, in float32."""
    rank = adapter.lora_r
    scale = adapter.lora_alpha / (rank**0.5 if adapter.use_rslora else rank)
    merged: dict[str, Tensor] = {}
    for name, value in state.items():
        plain = name.removeprefix(WRAPPED)
        if ".lora_A." in plain or ".lora_B." in plain:
            continue
        if plain.endswith(".base_layer.weight"):
            module = name.removesuffix(".base_layer.weight")
            a, b = (state.get(f"{module}.lora_{part}.default.weight") for part in "AB")
            if a is None or b is None or a.shape[0] != rank:
                raise ValueError(
                    f"videoalign: the adapter of {module} is missing or its rank is not {rank}"
                )
            value = (value.float() + scale * (b.float() @ a.float())).to(value.dtype)
        merged[plain.replace(".base_layer.", ".")] = value
    return merged


def checkpoint_file(folder: Path) -> Path:
    """`model.pth` of the highest step. ValueError if the adapter was saved separately."""
    steps = {
        int(path.name.removeprefix("checkpoint-")): path
        for path in folder.glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit()
    }
    if not steps:
        raise ValueError(f"videoalign: {folder} has no checkpoint-<step>")
    file = steps[max(steps)] / "model.pth"
    if not file.is_file():
        raise ValueError(
            f"videoalign: {file} does not exist; an adapter alone (adapter_model.safetensors) "
            "lacks the rows of the three tokens, so use the whole state"
        )
    return file


@dataclass(frozen=True)
class VideoAlign:
    backbone: QwenBackbone
    head: Float[Tensor, "o e"]
    instruction: str
    data: DataFields
    video_fps: float
    mean: Float[Tensor, " 3"]
    std: Float[Tensor, " 3"]
    part: VideoPart
    batch: int

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        if not samples.prompts:
            return torch.zeros(0)
        expect(samples, "videoalign", "video")
        pairs = list(zip(items(samples), samples.prompts, strict=True))
        scores = (in_batches(self.dimensions, pairs, self.batch) - self.mean) / self.std
        return scores[:, COLUMNS[self.part]].sum(1)

    def dimensions(self, pairs: Sequence[tuple[Tensor, str]]) -> Float[Tensor, "m 3"]:
        """VQ, MQ and TA before normalisation, each from its own row of the head, or all from its
        only row."""
        turns = []
        for video, prompt in pairs:
            places = frame_places(len(video), self.video_fps, self.data)
            shown = video_patches(video[places].cpu(), LEAST_PIXELS, self.data.max_frame_pixels)
            text = self.instruction.replace(PublishedText.field, prompt)
            turns.append(Turn((shown,), text, VIDEO))
        rows = self.head.expand(len(TOKENS), -1)
        return torch.einsum("nke,ke->nk", self.backbone.hidden(turns).cpu(), rows)


def load(
    video_fps: Positive,
    kind: VideoPart = "overall",
    checkpoint: ReadFile | None = None,
    base: HubName | None = None,
    instruction: ReadFile | None = None,
    normalise: bool = True,
    common: Inline[QwenSettings] = QwenSettings(),
) -> Reward:
    """Load the reward.

    video_fps    frames per second of the samples, above 0; it decides which frames the model is
                 shown
    kind         overall: the sum of the three; or visual_quality, motion_quality or text_alignment
                 alone
    checkpoint   folder of the published checkpoint; null takes the hub's
    base         model with the configuration and tokenizer: a folder or a name on the hub; null
                 takes what the checkpoint names, or Qwen/Qwen2-VL-2B-Instruct where that is a path
                 on the authors' machine
    instruction  file with the authors' instruction, or their Python file that has it, which is not
                 run; null fetches it at the first use
    normalise    whether each part is normalised by the checkpoint's mean and standard deviation
    """
    folder = _folder(checkpoint)
    config = config_of(folder)
    constants = config.inference_config
    if normalise and constants is None:
        raise ValueError(f"videoalign: {folder} has no inference_config; set normalise: false")
    mean, std = (
        torch.tensor(
            [
                constants[f"{d}_{statistic}"] if normalise and constants else default
                for d in DIMENSIONS
            ]
        )
        for statistic, default in (("mean", 0.0), ("std", 1.0))
    )
    text = VIDEO_INSTRUCTION.read("videoalign", "instruction", instruction)
    outputs = config.model_config_.output_dim
    where = model_path(base or _named_base(config.model_config_.model_name_or_path))
    state = merged_adapter(
        weights_of_file("videoalign", checkpoint_file(folder)), config.peft_lora_config
    )
    network, heads = split_names(state)
    refuse_others("videoalign", heads, VIDEO_HEAD)
    if VIDEO_HEAD not in heads or heads[VIDEO_HEAD].shape[0] != outputs:
        raise ValueError(
            f"videoalign: {folder}: {VIDEO_HEAD} should have {outputs} rows, its `output_dim`"
        )
    backbone = open_backbone("videoalign", where, TOKENS, network, common.placement)
    head = heads[VIDEO_HEAD].float()
    return VideoAlign(
        backbone=backbone,
        head=head,
        instruction=text,
        data=config.data_config,
        video_fps=video_fps,
        mean=mean,
        std=std,
        part=kind,
        batch=common.batch,
    )


def _named_base(name: str) -> str:
    """The base that a checkpoint names, or PUBLISHED_BASE for a folder that is not on this
    machine."""
    return name if Path(name).is_dir() or names_repository(name) else PUBLISHED_BASE


def _folder(checkpoint: str | None) -> Path:
    if checkpoint is not None:
        need(Right.FILES, checkpoint, path=Path(checkpoint))
        if not Path(checkpoint).is_dir():
            raise ValueError(f"videoalign: no such folder: {checkpoint}")
        return Path(checkpoint)
    return fetched_folder("videoalign", HUB_FOLDER, "name its folder with `checkpoint`")
