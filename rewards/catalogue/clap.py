"""Agreement of the sound with its prompt by a CLAP model: arXiv:2211.06687.

cos(sound, prompt) of transformers' `ClapModel`. The sound is mixed to one channel, brought to the
model's rate and cut after its longest input (10 s for the published models), from the beginning;
shorter sounds are repeated, as its own feature extractor does.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from rewards.perception.embedding import DtypeName, Placement, complete, tokenize
from rewards.perception.hub import HubName, model_path
from rewards.perception.sound import expect_sound, resampled
from rewards.types import Kind, OneOrMore, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("sound", "video")


@dataclass(frozen=True)
class Clap:
    model: Any
    tokenizer: Any
    extractor: Any
    placement: Placement
    batch: int = 16

    @torch.no_grad()
    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        audio = expect_sound(samples, "clap")
        rate = self.extractor.sampling_rate
        wave = resampled(audio.mono.detach().cpu(), audio.rate, rate)
        wave = wave[:, : int(self.extractor.max_length_s * rate)]
        parts = zip(wave.split(self.batch), _cut(samples.prompts, self.batch), strict=True)
        products = [self._sounds(w) * self._texts(list(p)) for w, p in parts]
        return torch.cat(products).sum(1).double().cpu() if products else torch.zeros(0)

    def _sounds(self, wave: Float[Tensor, "n t"]) -> Float[Tensor, "n e"]:
        inputs = self.extractor(list(wave.numpy()), sampling_rate=self.extractor.sampling_rate,
            return_tensors="pt")  # fmt: skip
        seen = self.model.audio_model(
            input_features=inputs["input_features"].to(self.placement.device, self.placement.dtype),
            is_longer=torch.as_tensor(inputs["is_longer"]).to(self.placement.device),
        )
        projected = self.model.audio_projection(seen.pooler_output)
        return functional.normalize(projected.float(), dim=-1)

    def _texts(self, prompts: list[str]) -> Float[Tensor, "n e"]:
        longest = self.model.config.text_config.max_position_embeddings - 2  # RoBERTa's padding
        limit = min(longest, self.tokenizer.model_max_length)
        tokens = tokenize(self.tokenizer, prompts, limit, self.placement.device)
        pooled = self.model.text_model(**tokens).pooler_output
        return functional.normalize(self.model.text_projection(pooled).float(), dim=-1)


def _cut(prompts: Any, size: int) -> list[Any]:
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def load(
    model: HubName = "laion/clap-htsat-unfused",
    batch: OneOrMore = 16,
    device: str = "auto",
    dtype: DtypeName = "float32",
) -> Reward:
    """Load the reward.

    model  CLAP model with its tokenizer and feature extractor: a folder or a name on the hub
    """
    from transformers import AutoFeatureExtractor, AutoTokenizer, ClapModel

    placement, path = Placement.of(device, dtype), model_path(model)
    return Clap(
        placement.put(complete(ClapModel.from_pretrained, path)),
        AutoTokenizer.from_pretrained(path),
        AutoFeatureExtractor.from_pretrained(path),
        placement,
        batch,
    )
