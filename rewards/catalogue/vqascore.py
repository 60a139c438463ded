"""VQAScore of a vision-language model behind a server, arXiv:2404.01291: P(Yes) to one question.

score = P(first token is `Yes`), over the whole vocabulary, capitalised and without a blank, as
t2v_metrics 3 computes it for Qwen2.5-VL and Qwen3-VL. The question is theirs. `yes` and ` Yes` are
other tokens and do not count. If the model's folder sets a repetition penalty, their probability
includes it, while servers list the probability before the penalty. For a video t2v_metrics samples
8 frames per second; here `frames` images are spread evenly over it, so scores of videos differ from
theirs.

The original VQAScore model, CLIP-FlanT5, is the reward `clip_flant5`. Its score is exp(-mean
cross-entropy) of `Yes` and the end token, with another question, so its scale differs. Tested only
with a fake server's answers, not with a published model.
"""

from functools import partial

from rewards.catalogue.judge import Pointwise
from rewards.judging.panel import SHORT_ANSWER, PanelSettings
from rewards.judging.token_mass import first_token_mass
from rewards.types import Inline, Kind, Reward

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

QUESTION = 'Does this figure show "{prompt}"? Please answer Yes or No.'


def load(server: Inline[PanelSettings], question: str = QUESTION) -> Reward:
    """Load the reward. Scores are in 0..1.

    question  text that is asked about the image, with {prompt} where the prompt goes
    """
    return Pointwise(
        server.open(), question, partial(first_token_mass, forms=("Yes",)), SHORT_ANSWER, last=True
    )
