"""VQAScore of CLIP-FlanT5, arXiv:2404.01291: how likely the model is to answer `Yes`, run locally.

CLIP's image tower (ViT-L/14-336) sees the image, padded to a square with the mean colour; its patch
states in the second-to-last layer, without the class token, go through two linear layers with a
GELU into the encoder of a T5, in place of `<image>` in the question:

    Does this figure show "{prompt}"? Please answer yes or no.
    score = exp(-mean cross-entropy of `Yes` and the end token), in 0..1

the geometric mean of both tokens' probabilities, over the tokenizer's words only: rows of the
vocabulary without a word are left out. The texts before and after the image are tokenised
separately, so that an end token also stands before the image. All of this follows
linzhiqiu/t2v_metrics (clip_t5_model.py and mm_utils.py at 1bec3905 and 41eac4ea) and
linzhiqiu/CLIP-FlanT5 (llava/model/language_model/clip_t5.py).

`model` is a folder in the layout of zhiqiulin/clip-flant5-xxl or -xl: T5's configuration with
`mm_*` entries, T5's weights in one or several files with `mm_projector.0` and `.2` among them. The
tower is read from `tower`, and entries `vision_tower.*` of the files are left out. bfloat16 by
default (their autocast): 23 GB for xxl, 6.3 GB for xl, from the number of weights.

Not tried on the published weights. The projector has the sizes in the file. The tokenizer is
transformers' fast one; theirs is the slow one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from rewards.perception.embedding import (
    DtypeName,
    Placement,
    complete,
    image_processor,
    in_pair_batches,
)
from rewards.perception.frames import Aggregate, Frames, OverFrames
from rewards.perception.hub import HubName, fetched_folder, model_path
from rewards.perception.weight_files import weights_of_file
from rewards.types import Inline, Kind, OneOrMore, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

CHAT_OPENING = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
CLIP_QUESTION = 'Does this figure show "{prompt}"? Please answer yes or no.'
ANSWER = "Yes"
BEFORE, BEHIND = f"{CHAT_OPENING} USER: ", "\n{} ASSISTANT: "
LONGEST = 2048  # tokens of a whole question, the image one of them
PROJECTOR = "mm_projector."
TIED_WEIGHTS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
KNOWN_VISION = {  # entries of the configuration, and the only values that are known here
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_select_layer": -2,
    "mm_vision_select_feature": "patch",
}
NOT_READ = ("vision_tower.", "embed_tokens.")  # loaded from the tower; another name of `shared`


@dataclass(frozen=True)
class ClipFlanT5Settings:
    """`rewards.meanings` says what each of them means."""

    batch: OneOrMore = 4
    device: str = "auto"
    dtype: DtypeName = "bfloat16"


@dataclass(frozen=True)
class ClipFlanT5:
    tower: Any
    projector: nn.Sequential
    language: Any
    tokenizer: Any
    processor: Any
    placement: Placement
    question: str
    batch: int

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        return in_pair_batches(self._score, samples, self.batch)

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[Image.Image, str]]) -> Float[Tensor, " m"]:
        images, prompts = zip(*pairs, strict=True)
        seen = self._seen(images)
        before = self._words(BEFORE)
        room = LONGEST - len(before) - 1  # the image takes the place of one token
        rows = [
            torch.cat([before, patches, self._words(BEHIND.format(self._asked(p)))[:room]])
            for patches, p in zip(seen, prompts, strict=True)
        ]
        mask = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for row, vectors in enumerate(rows):
            mask[row, : len(vectors)] = 1
        labels = self._ids(ANSWER).repeat(len(rows), 1)
        logits = self.language(
            inputs_embeds=nn.utils.rnn.pad_sequence(rows, batch_first=True),
            attention_mask=mask.to(self.placement.device),
            labels=labels,
        ).logits
        words = logits[..., : len(self.tokenizer)].float()  # the authors drop rows without a word
        chances = words.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        return chances.mean(1).exp()

    def _asked(self, prompt: str) -> str:
        return self.question.replace("{prompt}", prompt)

    def _ids(self, text: str) -> Int[Tensor, " t"]:
        """Token ids of a text, with its end token."""
        return torch.tensor(self.tokenizer(text)["input_ids"], device=self.placement.device)

    def _words(self, text: str) -> Float[Tensor, "t e"]:
        return self.language.shared(self._ids(text))

    def _seen(self, images: Sequence[Image.Image]) -> Float[Tensor, "m p e"]:
        mean = tuple(int(255 * value) for value in self.processor.image_mean)
        squares = [squared(image, mean) for image in images]
        pixels = self.processor(squares, return_tensors="pt")["pixel_values"]
        states = self.tower(
            pixel_values=pixels.to(self.placement.device, self.placement.dtype),
            output_hidden_states=True,
        ).hidden_states
        return self.projector(states[-2][:, 1:])


def squared(image: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    """Pad an image to a square of one colour, with the image in the middle."""
    side = max(image.size)
    whole = Image.new("RGB", (side, side), colour)
    whole.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return whole


def state_of(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a folder: one file, or the parts that its index names."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if index.is_file():
            parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif (folder / name).is_file():
            parts = [name]
        else:
            continue
        state: dict[str, Tensor] = {}
        for part in parts:
            if not (folder / part).is_file():
                raise ValueError(f"clip_flant5: {folder} lacks {part}, which {index.name} names")
            state |= weights_of_file("clip_flant5", folder / part)
        return {name: value for name, value in state.items() if not name.startswith(NOT_READ)}
    raise ValueError(f"clip_flant5: {folder} has neither model.safetensors nor pytorch_model.bin")


def language_model(folder: Path, state: Mapping[str, Tensor]) -> Any:
    """T5 with the weights of `state`. ValueError if they belong to another model."""
    from accelerate import init_empty_weights
    from transformers import T5Config, T5ForConditionalGeneration

    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") != "clip_t5":
        raise ValueError(
            f"clip_flant5: {folder} has the model type {config.get('model_type')!r}, not clip_t5"
        )
    odd = {
        name: config.get(name) for name in KNOWN_VISION if config.get(name) != KNOWN_VISION[name]
    }
    if odd:
        raise ValueError(f"clip_flant5: {folder} has {odd}, but only {KNOWN_VISION} is supported")
    of_t5 = {k: v for k, v in config.items() if k != "model_type" and not k.startswith("mm_")}
    with init_empty_weights(include_buffers=False):
        model = T5ForConditionalGeneration(T5Config.from_dict(of_t5))
    whole = {name: v for name, v in state.items() if not name.startswith(PROJECTOR)}
    if "shared.weight" in whole:
        whole = dict.fromkeys(TIED_WEIGHTS, whole["shared.weight"]) | whole
    try:
        model.load_state_dict(whole, strict=True, assign=True)
    except RuntimeError as error:
        first = " ".join(str(error).split())[:200]
        raise ValueError(f"clip_flant5: {folder} has weights of another model: {first}") from error
    return model


def _linear(weight: Tensor) -> nn.Linear:
    """Build a layer with the size of this weight."""
    outputs, inputs = weight.shape
    return nn.Linear(inputs, outputs)


def projector_of(state: Mapping[str, Tensor], place: str) -> nn.Sequential:
    """Two linear layers with a GELU between them. ValueError for any other layout."""
    entries = {k.removeprefix(PROJECTOR): v for k, v in state.items() if k.startswith(PROJECTOR)}
    if set(entries) != {"0.weight", "0.bias", "2.weight", "2.bias"}:
        names = ", ".join(sorted(entries)) or "none"
        raise ValueError(f"clip_flant5: {place}: expected {PROJECTOR}0 and .2, found {names}")
    first, last = entries["0.weight"], entries["2.weight"]
    layers = nn.Sequential(_linear(first), nn.GELU(), _linear(last))
    layers.load_state_dict(entries)
    return layers


def load(
    model: HubName = "zhiqiulin/clip-flant5-xxl",
    tower: HubName = "openai/clip-vit-large-patch14-336",
    tokenizer: HubName = "google/flan-t5-xxl",
    question: str = CLIP_QUESTION,
    frames: Frames = "all",
    aggregate: Aggregate = "mean",
    common: Inline[ClipFlanT5Settings] = ClipFlanT5Settings(),
) -> Reward:
    """Load the reward. Scores are in 0..1.

    model      folder or hub name in the layout of clip-flant5-xxl or -xl: T5's configuration and
               weights with the projector
    tower      CLIP model whose image tower sees the image: a folder or a name on the hub
    tokenizer  T5's tokenizer: a folder or a name on the hub
    question   text that is asked about the image, with {prompt} where the prompt goes
    """
    if "{prompt}" not in question:
        raise ValueError("clip_flant5: the question must contain {prompt}")
    placement = Placement.of(common.device, common.dtype)
    folder = Path(model_path(model))
    from transformers import AutoTokenizer, CLIPVisionModel

    if not folder.is_dir():
        folder = fetched_folder("clip_flant5", model, "name its folder with `model`")
    state, seen = state_of(folder), model_path(tower)
    reward = ClipFlanT5(
        tower=placement.put(complete(CLIPVisionModel.from_pretrained, seen)),
        projector=placement.put(projector_of(state, str(folder))),
        language=placement.put(language_model(folder, state)),
        tokenizer=AutoTokenizer.from_pretrained(model_path(tokenizer)),
        processor=image_processor(seen),
        placement=placement,
        question=question,
        batch=common.batch,
    )
    return OverFrames(reward, "clip_flant5", frames, aggregate)
