"""EditScore, arXiv:2509.23909: how well an image was edited, by a generative judge behind a server.

Serve EditScore-7B (a LoRA that must first be merged into Qwen2.5-VL) or its Qwen3-VL versions with
vLLM. Two questions: one about the source and the edit, answered with [success, no over-editing],
and one about the edit alone, answered with [naturalness, no artifacts], each 0 to 25.

    following = min(first two) / 2.5    quality = min(last two) / 2.5
    overall   = mean over passes of sqrt(following * quality), 0 to 10

`kind: average_first` is sqrt(mean success * mean quality), which their code offers too; the other
kinds are its parts. A pass whose numbers cannot be read, or lie outside 0..25, does not count: the
authors' batch code takes the middle of the range instead. `protocol: training` follows the authors'
reward server for RL (`batch_evaluate`): it asks the second question about both images as well, and
divides by 10, so scores lie in 0..1; their evaluation asks it about the edit alone. `votes` is
their number of passes (4 or 8 in training). The two texts are the authors' and do not come with
flowrl. Tested only with a fake server's answers, not with the published weights.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.judging import chat
from rewards.judging.panel import Messages, Panel, PanelSettings
from rewards.judging.published_texts import PublishedText
from rewards.perception.media import expect, items
from rewards.perception.references import check_image_column, column_images
from rewards.rights import ReadFile
from rewards.serving.requests import Unparsable
from rewards.types import Inline, Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image",)

EditPart = Literal["overall", "average_first", "prompt_following", "consistency", "quality"]
HIGHEST = 25
SEED = 42
SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_tokens": 512}
_SOURCE = "editscore/vie_prompts.py of github.com/VectorSpaceLab/EditScore"
FOLLOWING_QUESTION = PublishedText(
    "EditScore's question about an edit", 1524, "2fbb018b0e448b2d", _SOURCE, scale=HIGHEST, parts=3
)
QUALITY_QUESTION = PublishedText(
    "EditScore's question about quality", 1196, "8249deba103d112d", _SOURCE, scale=HIGHEST, parts=3
)
_PAIR = re.compile(
    r"\"score\"\s*:\s*\[\s*(-?\d++(?:\.\d++)?+)\s*,\s*(-?\d++(?:\.\d++)?+)\s*\]", re.IGNORECASE
)


def two_scores_in(answer: chat.Completion) -> tuple[float, float]:
    """The two numbers of the last `"score": [a, b]`, 0 to 25, even in JSON with stray quotes."""
    pairs = _PAIR.findall(answer.text)
    pair = tuple(map(float, pairs[-1])) if pairs else (-1.0, -1.0)
    if not all(0 <= score <= HIGHEST for score in pair):
        raise Unparsable(f"no two scores from 0 to {HIGHEST}")
    return pair[0], pair[1]


@dataclass(frozen=True)
class EditScore:
    panel: Panel
    following: str
    quality: str
    part: EditPart
    column: str
    labels: bool
    training: bool
    one_call: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    concurrent: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "editscore", "image")
        sources = column_images("editscore", samples, self.column)
        rows = [row for row, source in enumerate(sources) if source is not None]
        scores = torch.full((len(sources),), torch.nan, dtype=torch.float64)
        media = items(samples)
        of_both: list[Messages] = []
        alone: list[Messages] = []
        for row in rows:
            question = self.following.replace("<instruction>", samples.prompts[row])
            of_both.append(self._message(question, [sources[row], media[row]]))
            shown = [sources[row], media[row]] if self.training else [media[row]]
            alone.append(self._message(self.quality, shown))
        if rows:
            scores[rows] = self._scores(of_both, alone) / (10 if self.training else 1)
        return scores

    def _message(self, question: str, images: Sequence[Any]) -> Messages:
        parts: list[Any] = []
        for number, image in enumerate(images, 1):
            parts += [f"<img{number}>: "] * self.labels + [chat.image_part(image)]
        return chat.user(*parts, question)

    def _scores(self, of_both: list[Messages], alone: list[Messages]) -> Float[Tensor, " m"]:
        if self.part == "prompt_following":
            return self._votes(of_both, lambda success, _: success).nanmean(1)
        if self.part == "consistency":
            return self._votes(of_both, lambda _, second: second).nanmean(1)
        quality = self._votes(alone, min)
        if self.part == "quality":
            return quality.nanmean(1)
        if self.part == "average_first":
            success = self._votes(of_both, lambda success, _: success)
            return (success.nanmean(1) * quality.nanmean(1)).sqrt()
        return (self._votes(of_both, min) * quality).sqrt().nanmean(1)

    def _votes(
        self, about: list[Messages], of: Callable[[float, float], float]
    ) -> Float[Tensor, "m v"]:
        def read(answer: chat.Completion) -> float:
            return of(*two_scores_in(answer)) / (HIGHEST / 10)

        return self.panel.each_vote(about, read, SAMPLING, SEED)

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        check_image_column("editscore", self.column, prompts, meta)


def load(
    server: Inline[PanelSettings],
    following: ReadFile | None = None,
    quality: ReadFile | None = None,
    kind: EditPart = "overall",
    column: str = "source",
    base: Literal["qwen2.5", "qwen3"] = "qwen2.5",
    protocol: Literal["evaluation", "training"] = "evaluation",
) -> Reward:
    """Load the reward.

    following  file with the authors' question about source and edit, or their `vie_prompts.py` with
               both questions, which is not run; needed, since no address of it is known
    quality    file with the authors' question about the edit alone, or their `vie_prompts.py`;
               needed too
    kind       overall: the mean over passes of sqrt(following * quality); average_first: sqrt(mean
               success * mean quality); prompt_following, consistency and quality: success, no
               over-editing and the smaller of naturalness and no artifacts alone; 0 to 10
    column     column of the prompt file with the path of the source image
    base       model that is served: the messages to qwen2.5 label the images, those to qwen3 do not
    protocol   evaluation: the second question shows the edit alone; training, as in the authors'
               reward server: it shows both images, and scores are divided by 10
    votes      passes per question, at least 1, each sampled with a seed of its own; the authors
               train with 4 or 8; more cost as many times more requests
    """
    first = FOLLOWING_QUESTION.read("editscore", "following", following)
    second = QUALITY_QUESTION.read("editscore", "quality", quality)
    return EditScore(
        server.open(),
        following=first,
        quality=second,
        part=kind,
        column=column,
        labels=base == "qwen2.5",
        training=protocol == "training",
    )
