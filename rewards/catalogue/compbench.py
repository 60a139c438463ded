"""T2I-CompBench's rule for attributes (arXiv:2307.06350): one question per noun phrase.

Each of the prompt's first eight noun phrases is asked about the image, with a question mark, such
as `a green bench?`.

    score = product over the phrases of P(yes) / (P(yes) + P(no))

as in BLIPvqa_eval/BLIP_vqa.py and models/blip_vqa.py of github.com/Karine-Huang/T2I-CompBench (at
34134bd8 and 7710d059). Phrases are in the column `noun_phrases` (a list), or spaCy's parser
`spacy_model` finds them, as in their code, without `top`, `the side`, `the left` and `the right`:
`pip install spacy` and `python -m spacy download en_core_web_sm`. A prompt without a noun phrase
scores 1 there and is unscored here. The published judge is BLIP fine-tuned for visual questions
(capfilt-large, 480 x 480); here it is the model behind the server, so numbers are those of that
judge. The benchmark's metrics of space, number and relation (UniDet, CLIP, and their mean for
complex prompts) are not here.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.judging.panel import Panel, PanelSettings
from rewards.judging.yes_no import yes_of_each
from rewards.perception.media import expect
from rewards.types import Inline, Kind, Reward, Samples, cell

SCORED_KINDS: tuple[Kind, ...] = ("image",)

PHRASE_COLUMN = "noun_phrases"
LEFT_OUT_PHRASES = (
    "top",
    "the side",
    "the left",
    "the right",
)  # phrases that the authors leave out
MOST_PHRASES = 8
Phrases = Callable[[str], list[str]]


@dataclass(frozen=True)
class CompBench:
    """T2I-CompBench's BLIP-VQA score. `phrases` finds the noun phrases of prompts without the
    column; None without the parser of `spacy_model`."""

    panel: Panel
    phrases: Phrases | None
    spacy_model: str
    one_call: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "compbench", "image")
        meta = samples.meta or [{}] * len(samples.prompts)
        phrases_by_row = [
            self._phrases(p, row) for p, row in zip(samples.prompts, meta, strict=True)
        ]
        questions = [[f"{phrase}?" for phrase in phrases] for phrases in phrases_by_row]
        chances = yes_of_each(self.panel, samples, questions)
        scores = [math.prod(answers) if answers else math.nan for answers in chances]
        return torch.tensor(scores, dtype=torch.float64)

    def _phrases(self, prompt: str, row: Mapping[str, Any]) -> list[str]:
        phrases = cell(row, PHRASE_COLUMN)
        if phrases is None:
            phrases = self.phrases(prompt) if self.phrases is not None else []
        if not isinstance(phrases, list):
            raise ValueError(f"compbench: {PHRASE_COLUMN} must be a list of texts, not {phrases!r}")
        return [str(phrase) for phrase in phrases[:MOST_PHRASES]]

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError, naming the row, for a prompt without noun phrases."""
        parsing = ""
        if self.phrases is None:
            parsing = f", or pip install spacy and python -m spacy download {self.spacy_model}"
        for row, prompt in enumerate(prompts):
            if not self._phrases(prompt, meta[row] if meta else {}):
                raise ValueError(
                    f"compbench: row {row + 1} of the prompts has no noun phrases: add a column "
                    f"{PHRASE_COLUMN!r} (a list){parsing}"
                )


def load(server: Inline[PanelSettings], spacy_model: str = "en_core_web_sm") -> Reward:
    """Load the reward. Scores are in 0..1.

    spacy_model  spaCy's model that finds the noun phrases of prompts without the column
                 `noun_phrases`
    """
    return CompBench(server.open(), parser(spacy_model), spacy_model)


def parser(model: str) -> Phrases | None:
    """Finder of noun phrases by spaCy; None if spaCy or its model is not installed."""
    if importlib.util.find_spec("spacy") is None:
        return None
    spacy: Any = importlib.import_module("spacy")
    if not spacy.util.is_package(model):
        return None
    read = spacy.load(model)
    return lambda prompt: [
        chunk.text for chunk in read(prompt).noun_chunks if chunk.text not in LEFT_OUT_PHRASES
    ]
