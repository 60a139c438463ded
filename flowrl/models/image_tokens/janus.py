"""Janus and Janus-Pro (arXiv:2410.13848, arXiv:2501.17811), by transformers' own class.

An image has `num_image_tokens` codes, which have embeddings and a head of their own. Guidance's
other row is the prompt with padding in place of all tokens but the first and the last, as in
`JanusForConditionalGeneration.generate`; those tokens are attended to.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.models.image_tokens.family import CodeLayout, PromptTokens, unnormalized
from flowrl.models.language.chat import chat_turns, images_refused, rendered
from flowrl.prompts import Chat, has_images
from rewards.perception.unended import without_added_end

OWN_GUIDANCE = 5.0  # of `generate` where a model publishes no scale


class JanusImages:
    """An `ImageFamily`: a `JanusForConditionalGeneration` with its processor, and the generation
    settings that it was published with. UserError for settings without what `generate` needs."""

    def __init__(self, model: Any, processor: Any, published: Any) -> None:
        self.model, self.processor = model, processor
        config = model.config
        codes = config.vision_config.num_image_tokens
        width = config.vq_config.num_patches
        if codes != width**2:
            raise UserError(
                f"model.image: config.json names {codes} tokens for an image, but the decoder "
                f"takes {width} x {width}: set vision_config.num_image_tokens there to {width**2}"
            )
        self.layout = CodeLayout(codes, width)
        self.codebook: int = config.vq_config.num_embeddings
        self.guidance = float(published.guidance_scale or OWN_GUIDANCE)
        for name in ("bos_token_id", "pad_token_id"):
            if getattr(published, name) is None:
                raise UserError(
                    f"model.image: generation_config.json has no {name}, which Janus needs for "
                    "the row of guidance without the prompt: add the token's number there"
                )
        begins = processor.tokenizer.convert_tokens_to_ids(processor.image_start_token)
        self.kept, self.pad = frozenset((published.bos_token_id, begins)), published.pad_token_id
        side = width * 2 ** (len(config.vq_config.channel_multiplier) - 1)
        self.size = side, side

    @property
    def reads_chats(self) -> bool:
        return self.processor.chat_template is not None

    @property
    def trained(self) -> Mapping[str, nn.Module]:
        inner = self.model.model
        return {
            "model.language_model": inner.language_model,
            "model.generation_embeddings": inner.generation_embeddings,
            "model.generation_aligner": inner.generation_aligner,
            "model.generation_head": inner.generation_head,
        }

    def encode(self, prompt: str, system: str | None, template: Mapping[str, Any]) -> PromptTokens:
        if has_images(prompt):
            raise images_refused(prompt)
        text: str = prompt
        if self.reads_chats:
            turns = [_in_parts(turn) for turn in chat_turns(prompt, system)]
            text = rendered(self.processor, turns, prompt, template)
        elif isinstance(prompt, Chat):
            raise UserError(
                f"{prompt.at}: the prompt is a list of chat messages, but the processor of "
                "model.language has no chat template: name a column of texts (prompts.column)"
            )
        ids = self.processor(text=[text], generation_mode="image").input_ids[0]
        ids = without_added_end(self.processor.tokenizer, text, [int(i) for i in ids])
        return PromptTokens(ids, [i if i in self.kept else self.pad for i in ids])

    def embedded(
        self, ids: Int[Tensor, "m s"], codes: Bool[Tensor, "m s"]
    ) -> Float[Tensor, "m s d"]:
        # both for all places, since a device would wait for the places of either
        texts = self.model.get_input_embeddings()(ids.masked_fill(codes, 0))
        images = self.model.prepare_embeddings_for_image_generation(ids.masked_fill(~codes, 0))
        return torch.where(codes[..., None], images, texts)

    def states(self, embeddings: Float[Tensor, "m s d"], **more: Any) -> Any:
        return self.model.model.language_model(inputs_embeds=embeddings, **more)

    def head(self, states: Float[Tensor, "*m d"]) -> Float[Tensor, "*m v"]:
        return self.model.model.generation_head(states)

    def decode(self, codes: Int[Tensor, "n c"]) -> Float[Tensor, "n 3 h w"]:
        images = self.processor.image_processor
        pixels = self.model.model.vqmodel.decode(codes)
        return unnormalized(pixels, images.image_mean, images.image_std)


def _in_parts(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its text as a part, which is the form that Janus' template reads."""
    content = turn["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**turn, "content": parts}
