"""Quality in five words: DeQA-Score (arXiv:2501.11561) and Q-Align (arXiv:2312.17090), through a
server.

Both continue `The quality of the image is` and score the next word: the softmax over excellent,
good, fair, poor and bad alone, times 5, 4, 3, 2, 1 (DeQA, 1 to 5) or 1, .75, .5, .25, 0 (Q-Align, 0
to 1). The two agree up to 4 q + 1. A sample is unscored if less than half of the probability lies
on the five words.

Their network, mPLUG-Owl2, is in neither transformers nor vLLM: the server must run the authors'
code behind OpenAI's chat completions, take `continue_final_message`, and list the words'
log-probabilities. Other models can be served as well, but their number is neither of these scores:
`model` names the model. To reproduce the authors' figures the server must pad images to a square
with the mean colour and resize them to 448. `jpeg: 75` sends what Flow-GRPO sends; it also divides
by 5 (a `weight` in the run). Tested only with a fake server's answers, not with the published
weights.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from rewards.judging import answers, chat
from rewards.judging.panel import SHORT_ANSWER, Panel, PanelSettings
from rewards.perception.media import expect, items
from rewards.serving.requests import Unparsable
from rewards.types import Inline, Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

RATINGS = ("excellent", "good", "fair", "poor", "bad")
RATING_WEIGHTS = {"deqa": (5.0, 4.0, 3.0, 2.0, 1.0), "q_align": (1.0, 0.75, 0.5, 0.25, 0.0)}
About = Literal["quality", "aesthetics"]


@dataclass(frozen=True)
class FiveWords:
    panel: Panel
    weights: tuple[float, ...]
    about: About
    jpeg: int | None
    one_call: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    concurrent: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        kind = expect(samples, "deqa", "image", "video")
        about = [
            self._messages(chat.message_parts(item, kind, self.panel.frames, self.jpeg), kind)
            for item in items(samples)
        ]
        body = {
            **SHORT_ANSWER,
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
        return self.panel.values(about, self._read, body)

    def _messages(self, shown: list[str | dict[str, Any]], kind: Kind) -> list[dict[str, Any]]:
        question = f"How would you rate the {self.about} of this {kind}?\n"
        start = f"The {self.about} of the {kind} is"
        return [*chat.user(question, *shown), {"role": "assistant", "content": start}]

    def _read(self, answer: chat.Completion) -> float:
        mass = answers.probabilities(answer, RATINGS)
        if mass is None:
            raise Unparsable(f"no log-probabilities of {', '.join(RATINGS)}")
        return sum(p * weight for p, weight in zip(mass, self.weights, strict=True))

    def examples(self) -> Samples:
        return self.panel.examples()


def load(
    server: Inline[PanelSettings],
    kind: Literal["deqa", "q_align"] = "deqa",
    about: About = "quality",
    jpeg: Annotated[int, Field(ge=1, le=100)] | None = None,
) -> Reward:
    """Load the reward.

    kind   scale: deqa from 1 (bad) to 5 (excellent), q_align from 0 to 1
    about  what the five words rate
    jpeg   quality of the JPEG files that are sent, in [1, 100]; null sends PNG
    """
    return FiveWords(server.open(), RATING_WEIGHTS[kind], about, jpeg)
