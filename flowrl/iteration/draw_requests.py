"""Prompts that an iteration asks for: what a tracker, a budget and a lag share."""

from flowrl.budget.spending import DrawRequest
from flowrl.credit.trackers import TRACKER
from flowrl.session.session import Session


def draw_request(session: Session, iteration: int) -> DrawRequest:
    """The request of an iteration for prompts: how many, and by which of a tracker's weights, as
    they stand now."""
    prompts, weights = session.prompts, None
    if TRACKER in session.table:
        weights = session.table[TRACKER].weights(len(prompts))
    return DrawRequest(prompts, session.draw_count, session.run.train.seed, iteration, weights)
