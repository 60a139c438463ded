"""A transformers model that writes images as tokens, as a policy: Janus and Emu3."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from flowrl.errors import UserError
from flowrl.likelihoods.rows import TokenRows
from flowrl.models import savings
from flowrl.models.adapters import load_adapters, peft_adapter
from flowrl.models.call_sizes import CallKind, CallSizes, SamplingCallSize
from flowrl.models.complete_weights import lacks
from flowrl.models.image_tokens.batch import CodeBatch
from flowrl.models.image_tokens.drawing import CodeSampler
from flowrl.models.image_tokens.emu3 import Emu3Images
from flowrl.models.image_tokens.family import GuidedCodes, ImageFamily, PromptTokens
from flowrl.models.image_tokens.janus import JanusImages
from flowrl.models.language import lora
from flowrl.models.language.loading import OWN_CODE, read_errors
from flowrl.models.language.proofs import check_room, tolerance
from flowrl.models.language.use import TextUse
from flowrl.models.shards import GatheredCalls
from flowrl.settings.model.image_tokens import ImageTokenSettings
from samplers.completions import Completions
from samplers.generate import TokenRequest

PLAIN_USE = TextUse()
WRITERS = {"janus": "Janus", "emu3": "Emu3"}  # names of configurations, and of models


class ImageTokenPolicy:
    """One model that writes images: its prompts, codes, decoder and trainable weights.

    A recipe for texts trains it, code by code; rewards see the decoded images. The language model
    and what embeds and predicts codes learn; the decoder, and the part that reads images, do not.
    The model stays in evaluation mode.
    """

    rows_per_call = SamplingCallSize()

    def __init__(
        self,
        model: Any,
        processor: Any,
        settings: ImageTokenSettings,
        published: Any,
        use: TextUse = PLAIN_USE,
    ) -> None:
        self.model, self.processor = model.eval(), processor
        self.family = image_family(model, processor, settings, published)
        scale = self.family.guidance if settings.guidance is None else settings.guidance
        self.guided = GuidedCodes(self.family, scale)
        self.sizes = CallSizes()
        self.name = type(model).__name__
        for name, value in (("system", use.system), ("template", use.template)):
            if value and not self.family.reads_chats:
                raise UserError(
                    f"model.{name}: {self.name} reads prompts of images without a chat template: "
                    "remove the setting"
                )
        self.use = use
        self.context: int | None = model.config.get_text_config().max_position_embeddings
        self._published = published
        self.calls = GatheredCalls(model, self.language)

    @property
    def language(self) -> nn.Module:
        """The language model, the first of the family's parts."""
        return next(iter(self.family.trained.values()))

    @classmethod
    def load(
        cls,
        source: str,
        settings: ImageTokenSettings,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: str | None = None,
        use: TextUse = PLAIN_USE,
    ) -> "ImageTokenPolicy":
        """Load a model from a folder or a hub name. UserError for one that writes no images, or
        whose files cannot be read or lack weights, and for settings that it does not have."""
        config = {} if attention is None else {"attn_implementation": attention}
        with read_errors(source):
            model_config = AutoConfig.from_pretrained(source, **OWN_CODE)
        refuse_other_writers(model_config, source)
        with read_errors(source):
            processor = AutoProcessor.from_pretrained(source, **OWN_CODE)
            loaded: Any = AutoModelForImageTextToText.from_pretrained(
                source, dtype=dtype, output_loading_info=True, **config
            )
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise UserError(f"model.language: {source}: {lacks(missing, type(model).__name__)}")
        model.requires_grad_(False)
        return cls(model.to(dtype).to(device), processor, settings, _published(source), use)

    @classmethod
    def without_weights(
        cls,
        source: str,
        settings: ImageTokenSettings,
        attention: str | None = None,
        use: TextUse = PLAIN_USE,
    ) -> "ImageTokenPolicy":
        """The model of a local folder on torch's meta device, for questions that its configuration
        and its processor answer. UserError, as `load`."""
        config = {} if attention is None else {"attn_implementation": attention}
        with read_errors(source):
            model_config = AutoConfig.from_pretrained(source, **OWN_CODE)
        refuse_other_writers(model_config, source)
        with read_errors(source):
            processor = AutoProcessor.from_pretrained(source, **OWN_CODE)
            with torch.device("meta"):
                model = AutoModelForImageTextToText.from_config(model_config, **config)
        return cls(model, processor, settings, _published(source), use)

    def encode(self, prompt: str) -> PromptTokens:
        """Tokens of a prompt, up to the beginning of its image."""
        return self.family.encode(prompt, self.use.system, self.use.template)

    def check_steps(self, steps: int, setting: str) -> None:
        """UserError for a number of tokens that is not an image's."""
        codes = self.family.layout.codes
        if steps != codes:
            height, width = self.family.size
            raise UserError(
                f"{setting} is {steps}, but an image of {self.name} ({height} x {width} pixels) "
                f"has {codes} tokens: set {setting}: {codes}"
            )

    def open(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]], steps: int
    ) -> CodeBatch:
        del meta
        self.check_steps(steps, "recipe.length")
        read = [self.encode(prompt) for prompt in prompts]
        self._check_room(prompts, read)
        return CodeBatch(
            guided=self.guided,
            model=self.model,
            prompts=read,
            steps=steps,
            sizes=self.sizes,
            calls=self.calls,
        )

    def _check_room(self, prompts: Sequence[str], read: Sequence[PromptTokens]) -> None:
        if self.context is not None:
            layout = self.family.layout
            whole = int(layout.offset(torch.tensor(layout.codes - 1))) + 1
            check_room(prompts, [max(tokens, key=len) for tokens in read], whole, self.context)

    def trial_calls(
        self, prompts: Sequence[str], steps: int
    ) -> dict[CallKind, Callable[[int], object]]:
        """Calls of each kind, as functions of their rows, with the memory of the run's largest
        calls: the longest prompt."""
        longest = max(prompts, key=lambda prompt: len(self.encode(prompt).prompt))
        batch = self.open([longest], [], steps)
        codes = torch.zeros(1, steps, dtype=torch.int64, device=self.model.device)

        @torch.no_grad()
        def sampling(rows: int) -> None:
            batch.policy(_trial_rows(rows, steps))

        def training(rows: int) -> None:
            batch.policy(_trial_rows(rows, steps)).logp.sum().backward()

        @torch.no_grad()
        def decoding(rows: int) -> None:
            self.family.decode(codes.expand(rows, -1))

        return {"sampling": sampling, "decoding": decoding, "training": training}

    def plain(self, group: int) -> Completions:
        return Completions(group, self.use.temperature, exact=True)

    def automatic(self, steps: int) -> int:
        """Rows per call for about 16,000 tokens of the model, assuming prompts of 64 tokens."""
        return max(1, min(256, 2**14 // (self.guided.rows * (steps + 64))))

    def proofs(
        self, prompts: Sequence[str], steps: int, meta: Sequence[Mapping[str, Any]] = ()
    ) -> list[str]:
        """Check that all prompts fit, and that codes have the same probabilities when they are
        drawn, from a cache and with padding on the left, as in training."""
        del meta
        self.check_steps(steps, "recipe.length")
        read = [self.encode(prompt) for prompt in prompts]
        self._check_room(prompts, read)
        lengths = [len(tokens.prompt) for tokens in read]
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        height, width = self.family.size
        with_guidance = (
            f"guidance {self.guided.scale:g}, which takes two rows a token"
            if self.guided.rows == 2
            else "no guidance"
        )
        few = [read[lengths.index(end(lengths))] for end in (min, max)]
        return [
            f"{self.name}: {size:.3g} million weights, images of {height} x {width} pixels by "
            f"{steps} of {self.family.codebook} tokens, prompts of {min(lengths)} to "
            f"{max(lengths)} tokens, {with_guidance}",
            self._prove_codes(few),
        ]

    @torch.no_grad()
    def _prove_codes(self, few: Sequence[PromptTokens]) -> str:
        """Draw the first codes of two images in one call, up to the second row of the image, and
        score them."""
        layout = self.family.layout
        count = min(layout.codes, layout.width + 2)
        asked = TokenRequest(
            contexts=[()] * 2,
            noise=torch.arange(2),
            room=torch.full((2,), count),
            temperature=1.0,
            top_p=1.0,
            prompt=torch.arange(2),
        )
        batch = CodeBatch(self.guided, self.model, few, count, self.sizes, self.calls)
        rows = _trial_rows(1, 1)
        batch.policy(rows)  # the plain call that `flowrl.processes.lockstep` may repeat
        sampler = CodeSampler(self.guided, self.model, few, None)
        drawn = self.calls(lambda _: list(sampler(asked)[:2]), {})
        ids, logp = drawn[0], drawn[1]
        scored = batch.policy(_rows_of(ids, torch.arange(2))).logp.cpu()
        moved = float((scored.exp() - logp.exp()).abs().max())
        if not moved <= tolerance(self.model):
            raise UserError(
                f"model.image: {self.name} gives an image's tokens other probabilities in training "
                f"than in sampling, by up to {moved:.1e}: it cannot be trained"
            )
        return (
            f"sampling and training give an image's tokens the same probabilities, with a "
            f"difference of at most {moved:.1e}"
        )

    def add_lora(
        self,
        *,
        rank: int,
        alpha: int | float,
        targets: Sequence[str] | None,
        seed: int,
        dora: bool = False,
    ) -> None:
        """Add adapters to the language model's linear layers named in `targets`; None: to all."""
        language = re.escape(next(iter(self.family.trained)))
        lora.add_text_lora(
            self.model,
            rank=rank,
            alpha=alpha,
            targets=targets,
            seed=seed,
            dora=dora,
            outside=rf"(?!(.+\.)?{language}\.).*",
        )

    def begin_from(self, source: str) -> None:
        """Add the adapters of a peft folder, as the start of training."""
        config, at = peft_adapter(source)
        self.add_lora(
            rank=config.r,
            alpha=config.lora_alpha,
            targets=sorted(config.target_modules or ()),
            seed=0,
            dora=bool(config.use_dora),
        )
        load_adapters(self.model, at, complete=True)

    def roots(self) -> dict[str, nn.Module]:
        return {"model": self.calls}

    def trainable(self) -> dict[str, nn.Parameter]:
        """The adapters' parameters if there are any, otherwise all of what writes images."""
        named = dict(self.model.named_parameters())
        adapters = {name: p for name, p in named.items() if ".lora_" in name}
        parts = tuple(f"{name}." for name in self.family.trained)
        return adapters or {name: p for name, p in named.items() if name.startswith(parts)}

    def train_all(self) -> None:
        for part in self.family.trained.values():
            part.requires_grad_(True)

    def checkpoint_gradients(self) -> None:
        savings.checkpoint_layers(self.language)

    def save(self, folder: Path) -> None:
        """Save files that plain transformers loads: an adapter (peft) or the whole model."""
        lora.save_text_weights(self.model, folder, self._published)
        self.processor.save_pretrained(folder)

    def load_weights(self, folder: Path) -> None:
        """Load weights that `save` wrote, into a policy with the same base model."""
        lora.load_text_weights(self.model, folder)

    def close(self) -> None:
        """Do nothing, since nothing is held outside this process."""


def refuse_other_writers(config: Any, source: str) -> None:
    """UserError for a configuration of a model that writes no images."""
    if config.model_type not in WRITERS:
        raise UserError(
            f"model.image: {source} is a {config.model_type} model, and only "
            f"{' and '.join(WRITERS.values())} write images as tokens here: leave the setting out"
        )


def image_family(
    model: Any, processor: Any, settings: ImageTokenSettings, published: Any
) -> ImageFamily:
    """The family of a loaded model. UserError for settings that it does not have."""
    if model.config.model_type == "emu3":
        return Emu3Images(model, processor, published, settings)
    for name in ("negative", "height", "width"):
        if getattr(settings, name) is not None:
            raise UserError(f"model.image.{name} is a setting of Emu3, not of Janus: leave it out")
    return JanusImages(model, processor, published)


def _published(source: str) -> GenerationConfig:
    """The generation settings that a model was published with, or transformers' own without any."""
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:
        return GenerationConfig()


def _trial_rows(rows: int, steps: int) -> TokenRows:
    return _rows_of(torch.zeros(rows, steps, dtype=torch.int64), torch.zeros(rows).long())


def _rows_of(ids: torch.Tensor, prompt: torch.Tensor) -> TokenRows:
    """Rows of codes at temperature 1, all of which were drawn."""
    lengths = torch.full((len(ids),), ids.shape[1])
    mask = torch.ones_like(ids, dtype=torch.bool)
    return TokenRows(
        prompt=prompt,
        advantage=torch.zeros(ids.shape),
        mask=mask,
        old=None,
        ids=ids,
        lengths=lengths,
        temperature=1.0,
        kept=None,
    )
