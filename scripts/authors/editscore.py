"""EditScore's rule by the authors' code: python scripts/authors/editscore.py CHECKOUT (EditScore).

Their class without a model, whose answers are drawn here: `evaluate`, and `batch_evaluate` divided
by 10 as in their reward server. The questions are compared by their digests.
"""

import json

import numpy as np
from common import checkout, digest, save

SAMPLES = 6


def answers():
    """Two scores in 0..25 per sample: (about the edit, about its quality)."""
    rng = np.random.RandomState(0)
    return rng.randint(0, 26, (SAMPLES, 2, 2)).tolist()


class Drawn:
    """The model: an input is (number of the sample, question), an answer its drawn scores."""

    def __init__(self, quality):
        self.quality = quality

    def prepare_input(self, images, question):
        image = images[-1] if isinstance(images, list) else images
        return image, int(question == self.quality)

    def inference(self, given, seed):
        del seed
        sample, which = given
        return json.dumps({"reasoning": "r", "score": answers()[sample][which]})

    def batch_inference(self, given, seed):
        return [self.inference(one, seed) for one in given]


def main():
    checkout()
    from editscore import EditScore

    scorer = EditScore(backbone="none")
    scorer.model = Drawn(scorer.PQ_prompt)
    pairs = [["source", sample] for sample in range(SAMPLES)]
    alone = [scorer.evaluate(pair, "make it red")["overall"] for pair in pairs]
    found = scorer.batch_evaluate(pairs, ["make it red"] * SAMPLES)
    together = [each["O_score"] / 10 for each in found]
    texts = {"following": digest(scorer.SC_prompt), "quality": digest(scorer.PQ_prompt)}
    save("editscore", evaluation=np.array(alone), training=np.array(together), **texts)


if __name__ == "__main__":
    main()
