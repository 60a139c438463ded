"""Samples of the initial policy, for credit that compares with them (A*-PO, arXiv:2505.20686)."""

from flowrl.credit.trackers import ReadsStart
from flowrl.prompts import Draws
from flowrl.run.experience.round import sample_round
from flowrl.run.state.session import Session


def learn_start_values(
    session: Session, iteration: int, draws: Draws, seconds: dict[str, float]
) -> int:
    """Let the initial policy sample these draws' prompts that are new to the tracker, and return
    the number of samples. Collective.

    Its draws have negative ids, by prompt, so that a prompt has the same noise in whichever
    iteration it is first used.
    """
    tracker = session.tracker
    if not isinstance(tracker, ReadsStart):
        return 0
    new = tracker.unknown(draws.rows)
    if not new:
        return 0
    each = -(-tracker.samples // session.algorithm.group)
    ids = [-1 - prompt * each - place for prompt in new for place in range(each)]
    rows = [prompt for prompt in new for _ in range(each)]
    made = sample_round(session, iteration, Draws.each(ids, rows), seconds, "ref")
    scores = made.parts[0].totals.view(len(new), -1)
    tracker.learn(new, scores[:, : tracker.samples])
    return scores.numel()
