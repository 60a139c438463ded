"""A transformers causal or vision-language model as a policy, with its chat template."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from flowrl.errors import UserError
from flowrl.models import savings
from flowrl.models.adapters import load_adapters, peft_adapter
from flowrl.models.call_sizes import CallKind, CallSizes, SamplingCallSize
from flowrl.models.complete_weights import check_fits, lacks
from flowrl.models.language import lora
from flowrl.models.language.batch import TextBatch
from flowrl.models.language.chat import chat_tokens
from flowrl.models.language.environment import Replies
from flowrl.models.language.head import float32_head
from flowrl.models.language.loading import OWN_CODE, check_numbers, read_errors
from flowrl.models.language.prefixes import Packing
from flowrl.models.language.proofs import (
    check_room,
    prove_images,
    prove_packing,
    prove_padding,
)
from flowrl.models.language.steps import Steps
from flowrl.models.language.token_scores import ScoringPolicy, has_separate_head
from flowrl.models.language.trial_calls import trial_sampling, trial_training
from flowrl.models.language.use import OpenServer, Stops, TextUse
from flowrl.models.language.vision import (
    PromptImages,
    Vision,
    model_class,
    outside_of,
    reads_images,
)
from flowrl.models.out_of_memory import raise_memory
from flowrl.models.quantization import (
    configuration,
    keep_differentiable,
    loading,
    refuse_quantized,
)
from flowrl.models.shards import GatheredCalls
from flowrl.prompts import Chat
from flowrl.prompts.source import column_setting
from flowrl.settings import EnvironmentSettings
from flowrl.settings.model.quantization import Quantization
from rewards.perception.unended import unended_tokens
from samplers.completions import Completions

_PROVEN = 256  # prompts with images that are read at the start, evenly spaced


class CausalPolicy:
    """One language model: its prompts, completions and trainable weights.

    `use` holds a run's settings of the model; `serve` opens a server that samples in its place.
    `rows_per_call` bounds the completions in one call of the model; a model on torch's meta device
    has no `weights`, and is never called. The model stays in evaluation mode, so dropout is off in
    sampling and training alike. Its published generation settings (repetition penalty, top-k, ...)
    are ignored: training does not apply a penalty, so the ratio of new to old would be wrong.

    UserError for settings that do not fit the model or its tokenizer.
    """

    rows_per_call = SamplingCallSize()

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        use: TextUse = TextUse(),
        serve: OpenServer | None = None,
        rows_per_call: int | None = None,
        vision: Vision | None = None,
        weights: bool = True,
    ) -> None:
        use.check(tokenizer)
        self.model, self.tokenizer, self.use = model.eval(), tokenizer, use
        self.vision = vision  # reads the images of prompts
        self.sizes = CallSizes.same(rows_per_call)
        self.name = type(model).__name__
        self._published = model.generation_config
        model.generation_config = GenerationConfig()
        self.stops = Stops.of(tokenizer, self._own_stop(), use)
        self.steps = (  # cuts completions into steps
            None if use.steps is None else Steps(use.steps.separator, use.steps.most, tokenizer)
        )
        self.environment = self._replies(use.environment)
        text = model.config.get_text_config().to_dict()
        self.context: int | None = text.get("max_position_embeddings")
        self._separate_head = not weights or has_separate_head(model)
        if use.float32_head:
            float32_head(model)
        # of texts that begin alike, in evaluations
        self.packing = Packing.of(model) if use.share_prompts else None
        # not every call has images: their part is gathered with what is outside of blocks
        self.calls = GatheredCalls(model, model if vision is None else model.get_decoder())
        # samples instead of the model
        self.server = None if serve is None else serve(model, self.stops)

    @classmethod
    def load(  # noqa: PLR0913
        cls,
        source: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        gguf_file: str | None = None,
        attention: str | None = None,
        quantized: Quantization | None = None,
        use: TextUse = TextUse(),
        serve: OpenServer | None = None,
        named: str | None = None,
    ) -> "CausalPolicy":
        """Load a model from a folder, a hub name, or a GGUF file in the folder. `attention` is a
        name of transformers' `attn_implementation`; None leaves the choice to transformers.
        `named` is the base model's name in its adapters' files, `source` if it is None."""
        gguf = {} if gguf_file is None else {"gguf_file": gguf_file}
        config: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
        with read_errors(source):
            if gguf_file is not None:
                from transformers import GgufConfig  # which transformers 5.0 does not have yet

                config["quantization_config"] = GgufConfig(dequantize=True)
            elif quantized is not None:
                config["quantization_config"] = configuration(quantized, transformers, dtype)
                config["device_map"] = {"": str(device)}
            tokenizer = AutoTokenizer.from_pretrained(source, **OWN_CODE, **gguf)
            model_config = AutoConfig.from_pretrained(source, **OWN_CODE, **gguf)
            kind = model_class(model_config)
            read = partial(kind.from_pretrained, source, dtype=dtype, **gguf, **config)
            plain = gguf_file is None and quantized is None
            with loading(quantized):
                model, info = _with_files_named(read, kind, model_config, source if plain else "")
        if missing := sorted(info["missing_keys"]):
            raise UserError(f"model.language: {source}: {lacks(missing, type(model).__name__)}")
        if plain and (folder := Path(source)).is_dir():
            check_fits(model, folder, "model.language")
        check_numbers(model, tokenizer, source)
        model.requires_grad_(False)
        keep_differentiable(model, quantized)
        if quantized is None:
            model = model.to(dtype).to(device)
        vision = Vision.of(model, source) if reads_images(model_config) else None
        if vision is not None and tokenizer.chat_template is None:
            tokenizer.chat_template = vision.processor.chat_template
        if named is not None:
            model.name_or_path = named
        return cls(model, tokenizer, use=use, serve=serve, vision=vision)

    @classmethod
    def without_weights(
        cls, source: str, attention: str | None = None, use: TextUse = TextUse()
    ) -> "CausalPolicy":
        """The model of a local folder on torch's meta device, for questions that its classes, its
        configuration and its tokenizer answer. UserError, as `load`, for files that cannot be
        read."""
        config: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
        with read_errors(source):
            tokenizer = AutoTokenizer.from_pretrained(source, **OWN_CODE)
            model_config = AutoConfig.from_pretrained(source, **OWN_CODE)
            kind = model_class(model_config)
            with torch.device("meta"):
                model = kind.from_config(model_config, **config)
            if (Path(source) / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(source)
        check_numbers(model, tokenizer, source)
        vision = Vision.of(model, source) if reads_images(model_config) else None
        if vision is not None and tokenizer.chat_template is None:
            tokenizer.chat_template = vision.processor.chat_template
        return cls(model, tokenizer, use=use, vision=vision, weights=False)

    def _replies(self, how: EnvironmentSettings | None) -> Replies | None:
        if how is None:
            return None
        stops = self.stops
        return Replies(how, self.tokenizer, tuple(stops.tokens), stops.texts, self.use.template)

    @property
    def stop(self) -> list[int]:
        """Single tokens that end a completion, in ascending order."""
        return self.stops.tokens

    def _own_stop(self) -> list[int]:
        published = self._published.eos_token_id
        listed = published if isinstance(published, list) else [published]
        return sorted({i for i in (*listed, self.tokenizer.eos_token_id) if i is not None})

    def encode(self, prompt: str) -> list[int]:
        """Tokens of a prompt; with a chat template, a text is the user's turn."""
        if self.tokenizer.chat_template is not None:
            ids = chat_tokens(self.tokenizer, prompt, self.use.system, self.use.template)
        elif isinstance(prompt, Chat):
            raise UserError(
                f"{prompt.at}: the prompt is a list of chat messages, but the tokenizer of "
                "model.language has no chat template: name a column of texts "
                f"({column_setting(prompt.at)}), or use a model that has one"
            )
        else:
            ids = unended_tokens(self.tokenizer, prompt)
        if not ids:
            raise UserError(f"the prompt {prompt!r} has no tokens")
        return ids

    def open(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]], steps: int
    ) -> TextBatch:
        contexts, images = self._read(prompts, meta)
        if self.context is not None:
            check_room(prompts, contexts, steps, self.context)
        answers = None if self.environment is None else self.environment.to(prompts, meta)
        return TextBatch(
            model=self.model,
            tokenizer=self.tokenizer,
            contexts=contexts,
            stop=self.stop,
            steps=steps,
            separate_head=self._separate_head,
            rows_per_call=self.rows_per_call,
            server=self.server,
            answers=answers,
            stop_texts=self.stops.texts,
            packing=self.packing,
            images=images,
            cut=self.steps,
            calls=self.calls,
            template=self.use.template,
        )

    def _read(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]
    ) -> tuple[list[list[int]], list[PromptImages | None]]:
        """Tokens of prompts, and their images; no images if no prompt has any. `meta`: their rows,
        or empty. UserError for images that the run's other settings exclude."""
        if self.vision is None:
            return [self.encode(prompt) for prompt in prompts], []
        rows = meta or [{} for _ in prompts]
        pairs = [
            self.vision.encode(prompt, row, self.use.system, self.use.template)
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        images = [image for _, image in pairs]
        if all(image is None for image in images):
            images = []
        for name, other in (("model.server", self.server), ("train.share_prompts", self.packing)):
            if images and other is not None:
                raise UserError(
                    f"{name}: it passes prompts on as tokens only, but these have images: leave "
                    "the setting out"
                )
        return [ids for ids, _ in pairs], images

    def trial_calls(
        self, prompts: Sequence[str], steps: int
    ) -> dict[CallKind, Callable[[int], object]]:
        """Calls of each kind, as functions of their rows, with the memory of the run's largest
        calls: the longest prompt and `steps` tokens. None for a model that reads images."""
        if self.vision is not None:
            return {}
        context = max(map(self.encode, prompts), key=len)
        scoring = ScoringPolicy(self.model, [context], self._separate_head)
        return {
            "sampling": partial(trial_sampling, self.model, context, steps),
            "training": partial(trial_training, scoring, steps),
        }

    def plain(self, group: int) -> Completions:
        return Completions(group, self.use.temperature, exact=True)

    def automatic(self, steps: int) -> int:
        """Rows per call for about 16,000 tokens, assuming prompts of 64 tokens."""
        return max(1, min(256, 2**14 // (steps + 64)))

    def proofs(
        self, prompts: Sequence[str], steps: int, meta: Sequence[Mapping[str, Any]] = ()
    ) -> list[str]:
        """Check that all prompts fit and that padding does not change predictions."""
        if self.vision is not None:  # reading all images of a data set may take hours
            indices = range(0, len(prompts), -(-len(prompts) // _PROVEN))
            prompts, meta = [prompts[i] for i in indices], [meta[i] for i in indices if meta]
        read = [self._read([prompts[i]], meta[i : i + 1]) for i in range(len(prompts))]
        contexts, shown = (
            [ids_and_image[0][0] for ids_and_image in read],
            [i for i, x in enumerate(read) if x[1]],
        )
        if self.context is not None:
            check_room(prompts, contexts, steps, self.context)
        all_of = range(len(contexts))
        ends = [
            min(all_of, key=lambda i: len(contexts[i])),
            max(shown or all_of, key=lambda i: len(contexts[i])),
        ]
        few, images = self._read([prompts[i] for i in ends], [meta[i] for i in ends if meta])
        reader = ScoringPolicy(self.model, few, self._separate_head, None, images, self.calls)
        full_reader = replace(reader, contexts=contexts, images=())
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        stop_texts = [self.tokenizer.decode([i]) for i in self.stops.tokens]
        ends = ", ".join(
            map(repr, [*stop_texts, *(self.stops.texts.texts if self.stops.texts else ())])
        )
        template = "its chat template" if self.tokenizer.chat_template else "plain text"
        sentences = [
            f"{self.name}: {size:.3g} million weights, {template}, prompts of "
            f"{min(map(len, contexts))} to {max(map(len, contexts))} tokens, "
            + (f"stops at {ends}" if ends else f"no stop token: all texts have {steps} tokens")
        ]
        if not self._separate_head:
            sentences.append(
                f"{self.name} computes logits with more than its head, so all of them are held in "
                "memory at once"
            )
        alone = self.sizes.rows("sampling", 2) == self.sizes.rows("training", 2) == 1
        if alone:  # what padding or several images would change in a call does not occur
            sentences.append("each call has one row, without padding")
        else:
            sentences.append(prove_padding(reader, self.stops.tokens))
        if images:
            sentences.append(prove_images(reader, self.stops.tokens, alone=alone))
        if self.packing is not None:
            sentences.append(prove_packing(full_reader, steps))
        if self.environment is not None:
            sentences += self.environment.described()
        if self.server is not None:
            sentences += self.server.proofs(full_reader, steps)
        return sentences

    def add_lora(
        self,
        *,
        rank: int,
        alpha: int | float,
        targets: Sequence[str] | None,
        seed: int,
        dora: bool = False,
    ) -> None:
        """Add adapters to the linear layers named in `targets`; None: to all but the head. The
        vision part gets adapters only if `use.adapt_vision` is set."""
        self._add_lora(rank, alpha, targets, seed, dora, self.use.adapt_vision)

    def _add_lora(
        self,
        rank: int,
        alpha: int | float,
        targets: Sequence[str] | None,
        seed: int,
        dora: bool,
        adapt_vision: bool,
    ) -> None:
        outside = None if self.vision is None or adapt_vision else outside_of(self.model)
        lora.add_text_lora(
            self.model,
            rank=rank,
            alpha=alpha,
            targets=targets,
            seed=seed,
            dora=dora,
            outside=outside,
        )

    def begin_from(self, source: str) -> None:
        """Add the adapters of a peft folder, as the start of training. The folder says whether the
        vision part has adapters."""
        config, at = peft_adapter(source)
        self._add_lora(
            rank=config.r,
            alpha=config.lora_alpha,
            targets=sorted(config.target_modules or ()),
            seed=0,
            dora=bool(config.use_dora),
            adapt_vision=not config.exclude_modules,
        )
        load_adapters(self.model, at, complete=True)

    def roots(self) -> dict[str, nn.Module]:
        return {"model": self.calls}

    def trainable(self) -> dict[str, nn.Parameter]:
        """The adapters' parameters if there are any, otherwise all parameters of the model."""
        named = dict(self.model.named_parameters())
        return {name: p for name, p in named.items() if ".lora_" in name} or named

    def train_all(self) -> None:
        refuse_quantized(self.model, "the language model")
        self.model.requires_grad_(True)

    def checkpoint_gradients(self) -> None:
        savings.checkpoint_layers(self.model)

    def save(self, folder: Path) -> None:
        """Save files that plain transformers loads: an adapter (peft) or the whole model."""
        lora.save_text_weights(self.model, folder, self._published)
        (self.tokenizer if self.vision is None else self.vision.processor).save_pretrained(folder)

    def load_weights(self, folder: Path) -> None:
        """Load weights that `save` wrote, into a policy with the same base model."""
        lora.load_text_weights(self.model, folder)

    def close(self) -> None:
        """Remove the run's adapter from the server, if there is one."""
        if self.server is not None:
            self.server.close()


def _with_files_named(read: Callable[..., Any], kind: Any, config: Any, source: str) -> Any:
    """A model and what it says of its weights. UserError, which names the file, for one in the
    folder `source` with another model's tensors, of which transformers names none."""
    try:
        return read(output_loading_info=True)
    except (RuntimeError, ValueError) as error:
        raise_memory(error)
        if (folder := Path(source)).is_dir() and source:
            with torch.device("meta"):
                check_fits(kind.from_config(config), folder, "model.language")
        raise
