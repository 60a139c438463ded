"""P(yes) to one question about an image, by a vision-language model of transformers, run locally.

score = P(yes) / (P(yes) + P(no)) of the answer's first token, as VQAScore (arXiv:2404.01291) does
for models with a chat template. `yes` and `no` must each be one token of the model. The image comes
before the question. A judge trained by a flowrl run is such a model: its folder is RUN/model.
Tested with random weights, not with a published model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from rewards.catalogue.vqascore import QUESTION
from rewards.perception.chat_frame import templated
from rewards.perception.embedding import Placement, complete, in_pair_batches
from rewards.perception.hub import HubName, model_path
from rewards.perception.image_model import ImageModelSettings
from rewards.types import Inline, Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")


@dataclass(frozen=True)
class YesNo:
    model: Any
    processor: Any
    answers: tuple[int, int]  # tokens of yes and no
    question: str
    placement: Placement
    batch: int

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        return in_pair_batches(self._score, samples, self.batch)

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[Image.Image, str]]) -> Float[Tensor, " m"]:
        images, prompts = zip(*pairs, strict=True)
        inputs = self.processor(
            text=[self._turn(prompt) for prompt in prompts],
            images=[[image] for image in images],
            padding=True,
            add_special_tokens=False,
            return_tensors="pt",
        ).to(self.placement.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        last = inputs["attention_mask"].sum(1) - 1
        logits = self.model(**inputs).logits[torch.arange(len(pairs)), last].float()
        yes, no = (logits[:, token] for token in self.answers)
        return torch.sigmoid(yes - no)

    def _turn(self, prompt: str) -> str:
        text = self.question.replace("{prompt}", prompt.replace(self.processor.image_token, " "))
        parts = [{"type": "image"}, {"type": "text", "text": text}]
        return templated(
            self.processor,
            [{"role": "user", "content": parts}],
            add_generation_prompt=True,
        )


def load(
    model: HubName,
    question: str = QUESTION,
    yes: str = "Yes",
    no: str = "No",
    common: Inline[ImageModelSettings] = ImageModelSettings(),
) -> Reward:
    """Load the reward. Scores are in 0..1.

    model     vision-language model with a chat template: a folder or a name on the hub
    question  text that is asked about the image, with {prompt} where the prompt goes
    yes       answer that scores 1, one token of the model
    no        answer that scores 0, one token of the model
    """
    if "{prompt}" not in question:
        raise ValueError("vlm_yes_no: the question must contain {prompt}")
    from transformers import AutoModelForImageTextToText, AutoProcessor

    source = model_path(model)
    processor: Any = AutoProcessor.from_pretrained(source)
    if processor.chat_template is None:
        raise ValueError(f"vlm_yes_no: {model} has no chat template")
    processor.tokenizer.padding_side = "right"
    tokens = [processor.tokenizer(word, add_special_tokens=False).input_ids for word in (yes, no)]
    for word, ids in zip((yes, no), tokens, strict=True):
        if len(ids) != 1:
            raise ValueError(f"vlm_yes_no: {word!r} is {len(ids)} tokens in {model}, not one")
    loaded = common.placement.put(complete(AutoModelForImageTextToText.from_pretrained, source))
    answers = (tokens[0][0], tokens[1][0])
    reward = YesNo(loaded, processor, answers, question, common.placement, common.batch)
    return common.over_frames("vlm_yes_no", reward)
