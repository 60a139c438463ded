"""Samples of the initial policy, for credit that compares with them (A*-PO, arXiv:2505.20686)."""

from dataclasses import dataclass, replace

from flowrl.credit.trackers import TRACKER, ReadsStart
from flowrl.iteration.records import Drawn, Sampled
from flowrl.iteration.stages import Sample, Score, Stages
from flowrl.prompts import Draws
from flowrl.session.session import Session


@dataclass(frozen=True)
class LearnsStart:
    """Lets the initial policy sample the prompts that are new to the tracker, before the policy
    samples them."""

    session: Session
    sample: Sample
    score: Score

    def __call__(self, drawn: Drawn) -> Sampled:
        count = self.learn(drawn)
        samples = self.sample(drawn)
        return replace(samples, metrics={**samples.metrics, "count/start": float(count)})

    def learn(self, drawn: Drawn) -> int:
        """Return the number of samples, over all processes. Collective.

        Their draws have negative ids, by prompt, so that a prompt has the same noise in whichever
        iteration it is first used.
        """
        session, tracker = self.session, self.session.table[TRACKER]
        assert isinstance(tracker, ReadsStart), "`Algorithm.samples_start` asks for one"
        prompts = tracker.unknown(drawn.draws.rows)
        if not prompts:
            return 0
        per_prompt = -(-tracker.samples // session.algorithm.group)
        ids = [
            -1 - prompt * per_prompt - index for prompt in prompts for index in range(per_prompt)
        ]
        rows = [prompt for prompt in prompts for _ in range(per_prompt)]
        start_draws = Drawn.of(session.parallel, drawn.iteration, Draws.each(ids, rows), "ref")
        scores = self.score(self.sample(start_draws)).plans[0].totals.view(len(prompts), -1)
        tracker.learn(prompts, scores[:, : tracker.samples])
        return scores.numel()


def wrap(stages: Stages, session: Session) -> Stages:
    return replace(stages, sample=LearnsStart(session, stages.sample, stages.score))
