"""A transformers causal language model as a policy, with its chat template if it has one."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
)

from flowrl.errors import UserError
from flowrl.models import savings
from flowrl.models.adapters import has_adapters, load_adapters, peft_adapter, save_adapters
from flowrl.models.call_sizes import CallKind, CallSizes, SamplingRows
from flowrl.models.language import lora
from flowrl.models.language.batch import TextBatch
from flowrl.models.language.chat import chat_tokens
from flowrl.models.language.environment import Replies
from flowrl.models.language.generation import Generation
from flowrl.models.language.prefixes import Packing, refuse_moved
from flowrl.models.language.server import CompletionsServer
from flowrl.models.language.stop_texts import StopTexts
from flowrl.models.language.token_scores import ScoringPolicy, has_separate_head
from flowrl.models.language.trial_calls import trial_sampling, trial_training
from flowrl.models.precision import HALF
from flowrl.prompts import Chat
from rewards.perception.hub import of_network
from samplers.completions import Completions

# How far padding may move the distribution of the next token, in total variation. Rounding alone
# moves that of SmolLM2-135M by 3e-6 in float32 and by 0.03 in bfloat16, where the log-probabilities
# of its unlikeliest tokens move by 0.5 nats.
PADDING_TOLERANCE, HALF_PADDING_TOLERANCE = 1e-4, 0.1


class CausalPolicy:
    """One language model: its prompts, completions and trainable weights.

    `rows_per_call` bounds the completions in one call of the model. The model stays in evaluation
    mode, so dropout is off in sampling and training alike. Its published generation settings
    (repetition penalty, top-k, ...) are ignored: training does not apply a penalty, so the ratio
    of new to old would be wrong.
    """

    rows_per_call = SamplingRows()

    def __init__(self, model: Any, tokenizer: Any, *, rows_per_call: int | None = None) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.sizes = CallSizes.same(rows_per_call)
        self.name = type(model).__name__
        self.system: str | None = None
        self.temperature = 1.0  # of evaluations
        self.server: CompletionsServer | None = None  # samples instead of the model
        self.environment: Replies | None = None  # replies between the model's turns
        self.packing: Packing | None = None  # of texts that begin alike, in evaluations
        self._published = model.generation_config
        model.generation_config = GenerationConfig()
        self.stop = self._own_stop()
        self.stop_texts: StopTexts | None = None
        text = model.config.get_text_config().to_dict()
        self.context: int | None = text.get("max_position_embeddings")
        self._separate_head = has_separate_head(model, [1, 2, 3])

    @classmethod
    def load(
        cls,
        source: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        gguf_file: str | None = None,
        attention: str | None = None,
    ) -> "CausalPolicy":
        """Load a model from a folder, a hub name, or a GGUF file in the folder. `attention` is a
        name of transformers' `attn_implementation`; None leaves the choice to transformers."""
        gguf = {} if gguf_file is None else {"gguf_file": gguf_file}
        config: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
        try:
            if gguf_file is not None:
                from transformers import GgufConfig  # which transformers 5.0 does not have yet

                config["quantization_config"] = GgufConfig(dequantize=True)
            tokenizer = AutoTokenizer.from_pretrained(source, **gguf)
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **gguf, **config)
        except Exception as error:
            if not isinstance(error, ValueError | ImportError) and not of_network(error):
                raise
            raise UserError(f"model.language: {source} cannot be loaded: {error}") from error
        model.requires_grad_(False)
        return cls(model.to(dtype).to(device), tokenizer)

    def configure(self, *, system: str | None, stop: Sequence[str], temperature: float) -> None:
        """Set a system message for prompts without one, additional stop tokens and texts, and the
        temperature of evaluations."""
        if system is not None and self.tokenizer.chat_template is None:
            raise UserError("model.system: this tokenizer has no chat template; remove the setting")
        long = []
        for text in stop:
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
            if not text or not ids:
                raise UserError(f"model.stop: {text!r} has no tokens; leave it out")
            if len(ids) == 1:
                self.stop = sorted({*self.stop, *ids})
            else:
                long.append(text)
        self.stop_texts = StopTexts(tuple(long), self.tokenizer) if long else None
        self.system, self.temperature = system, temperature

    def _own_stop(self) -> list[int]:
        published = self._published.eos_token_id
        listed = published if isinstance(published, list) else [published]
        return sorted({i for i in (*listed, self.tokenizer.eos_token_id) if i is not None})

    def encode(self, prompt: str) -> list[int]:
        """Tokens of a prompt; with a chat template, a text is the user's turn."""
        if self.tokenizer.chat_template is not None:
            ids = chat_tokens(self.tokenizer, prompt, self.system)
        elif isinstance(prompt, Chat):
            raise UserError(
                f"{prompt.at}: the prompt is a list of chat messages, but the tokenizer of "
                "model.language has no chat template: name a column of texts (prompts.column), or "
                "use a model that has one"
            )
        else:
            ids = self.tokenizer(prompt).input_ids
        if not ids:
            raise UserError(f"the prompt {prompt!r} has no tokens")
        return list(ids)

    def open(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]], steps: int
    ) -> TextBatch:
        contexts = [self.encode(prompt) for prompt in prompts]
        self._check_room(prompts, contexts, steps)
        answers = None if self.environment is None else self.environment.to(prompts, meta)
        return TextBatch(
            self.model, self.tokenizer, contexts, self.stop, steps, self._separate_head,
            self.rows_per_call, self.server, answers, self.stop_texts, self.packing,
        )  # fmt: skip

    def _check_room(
        self, prompts: Sequence[str], contexts: Sequence[Sequence[int]], steps: int
    ) -> None:
        if self.context is None:
            return
        long = [i for i, ids in enumerate(contexts) if len(ids) + steps > self.context]
        if long:
            worst = max(long, key=lambda i: len(contexts[i]))
            raise UserError(
                f"{len(long)} of {len(prompts)} prompts are too long: the model has "
                f"{self.context} positions, a completion takes up to {steps}, and the prompt "
                f"{_short(prompts[worst])} has {len(contexts[worst])} tokens; remove such "
                "prompts, or lower recipe.length"
            )

    def trial_calls(
        self, prompts: Sequence[str], steps: int
    ) -> dict[CallKind, Callable[[int], object]]:
        """Calls of each kind, as functions of their rows, on the longest prompt and `steps` tokens:
        their memory is that of a run's largest call."""
        context = max(map(self.encode, prompts), key=len)
        return {
            "sampling": partial(trial_sampling, self.model, context, steps),
            "training": partial(
                trial_training, ScoringPolicy(self.model, [context], self._separate_head), steps
            ),
        }

    def plain(self, group: int) -> Completions:
        return Completions(group, self.temperature, exact=True)

    def automatic(self, steps: int) -> int:
        """Rows per call for about 16,000 tokens, assuming prompts of 64 tokens."""
        return max(1, min(256, 2**14 // (steps + 64)))

    def proofs(
        self, prompts: Sequence[str], steps: int, meta: Sequence[Mapping[str, Any]] = ()
    ) -> list[str]:
        """Check that all prompts fit and that padding does not change predictions."""
        del meta  # other columns change neither
        contexts = [self.encode(prompt) for prompt in prompts]
        self._check_room(prompts, contexts, steps)
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        own = [self.tokenizer.decode([i]) for i in self.stop]
        ends = ", ".join(map(repr, [*own, *(self.stop_texts.texts if self.stop_texts else ())]))
        template = "its chat template" if self.tokenizer.chat_template else "plain text"
        sentences = [
            f"{self.name}: {size:.3g} million weights, {template}, prompts of "
            f"{min(map(len, contexts))} to {max(map(len, contexts))} tokens, "
            + (f"stops at {ends}" if ends else f"no stop token: all texts have {steps} tokens")
        ]
        if not self._separate_head:
            sentences.append(
                f"{self.name} computes logits with more than its head, so they are held whole"
            )
        sentences.append(self._prove_padding(contexts))
        if self.packing is not None:
            sentences.append(self._prove_packing(contexts, steps))
        if self.environment is not None:
            sentences.append(self.environment.described())
        if self.server is not None:
            sentences += self.server.proofs(self.model, contexts, self._separate_head, steps)
        return sentences

    def _prove_padding(self, contexts: Sequence[Sequence[int]]) -> str:
        ends = [min(contexts, key=len), max(contexts, key=len)]
        ids = torch.tensor([ends[0]], device=self.model.device)
        with torch.no_grad():  # the plain call that `flowrl.processes.lockstep` may repeat
            self.model.base_model(input_ids=ids, use_cache=False)
        alone = torch.cat([self._next([context]) for context in ends])
        moved = float((self._next(ends).exp() - alone.exp()).abs().sum(-1).max() / 2)
        if not moved <= self._tolerance:
            raise UserError(
                f"left padding changes {self.name}'s next-token distribution by {moved:.1e} "
                "(total variation): set train.rows_per_call: 1"
            )
        return f"left padding changes {self.name}'s next token by {moved:.1e} (total variation)"

    @property
    def _tolerance(self) -> float:
        return HALF_PADDING_TOLERANCE if self.model.dtype in HALF else PADDING_TOLERANCE

    def share_prompts(self) -> None:
        """Evaluate shared prefixes of texts once. UserError for a model that cannot."""
        self.packing = Packing.of(self.model)

    @torch.no_grad()
    def _prove_packing(self, contexts: Sequence[Sequence[int]], steps: int) -> str:
        """Compare texts in one pack with the same texts by themselves."""
        context = [*max(contexts, key=len)]
        ends = [context[:4], context[:2] + context[-2:], context[-4:]]
        texts = [[*context, *end[:steps]] for end in ends]
        device, head = self.model.device, self.model.get_output_embeddings()
        found = []
        for packing in (None, Packing(math.inf)):
            reader = ScoringPolicy(self.model, (), self._separate_head, packing)
            last = reader.last_states(texts, device)
            logits = torch.cat([last[i, : len(text)] for i, text in enumerate(texts)])
            found.append((head(logits) if self._separate_head else logits).float().softmax(-1))
        moved = float((found[1] - found[0]).abs().sum(-1).max() / 2)
        refuse_moved(self.model, moved, self._tolerance)
        return (
            f"common beginnings of texts are evaluated once, which moves {self.name}'s next token "
            f"by {moved:.1e} (total variation)"
        )

    @torch.no_grad()
    def _next(self, contexts: Sequence[Sequence[int]]) -> Tensor:
        """Log-probabilities of each context's next token [n v], from left-padded generation."""
        listener = _ScoreRecorder()
        Generation(self.model, self.stop).generated(contexts, listener, 1)
        return listener.scores[0].log_softmax(-1)

    def add_lora(
        self, *, rank: int, alpha: int | float, targets: Sequence[str] | None, seed: int
    ) -> None:
        """Add adapters to the linear layers named in `targets`; None: to all but the head."""
        lora.add_text_lora(self.model, rank=rank, alpha=alpha, targets=targets, seed=seed)

    def begin_from(self, source: str) -> None:
        """Add the adapters of a peft folder, which train from there."""
        config, at = peft_adapter(source)
        targets = sorted(config.target_modules or ())
        self.add_lora(rank=config.r, alpha=config.lora_alpha, targets=targets, seed=0)
        load_adapters(self.model, at, every=True)

    def roots(self) -> dict[str, nn.Module]:
        return {"model": self.model.base_model}  # the head is called separately

    def trainable(self) -> dict[str, nn.Parameter]:
        """The adapters' parameters if there are any, otherwise all of the model's."""
        named = dict(self.model.named_parameters())
        return {name: p for name, p in named.items() if ".lora_" in name} or named

    def train_all(self) -> None:
        self.model.requires_grad_(True)

    def checkpoint_gradients(self) -> None:
        savings.checkpoint_layers(self.model)

    def save(self, folder: Path) -> None:
        """Save files that plain transformers loads: an adapter (peft) or the whole model."""
        if has_adapters(self.model):
            save_adapters(self.model, folder)
        else:
            own, self.model.generation_config = self.model.generation_config, self._published
            self.model.save_pretrained(folder)
            self.model.generation_config = own
        self.tokenizer.save_pretrained(folder)

    def load_weights(self, folder: Path) -> None:
        """Load weights that `save` wrote, into a policy with the same base model."""
        lora.load_text_weights(self.model, folder)

    def close(self) -> None:
        """Remove the run's adapter from the server, if there is one."""
        if self.server is not None:
            self.server.close()


class _ScoreRecorder(LogitsProcessor):
    def __init__(self) -> None:
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        del input_ids
        self.scores.append(scores)
        return scores


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
