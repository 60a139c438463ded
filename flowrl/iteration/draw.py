"""The stage `draw`: which prompts an iteration samples."""

from dataclasses import dataclass

from flowrl.iteration.records import Drawn
from flowrl.prompts import Draws
from flowrl.session.session import Session


@dataclass(frozen=True)
class PlainDraw:
    """Prompts in turn, in an order that the seed shuffles for every pass over them."""

    session: Session

    def __call__(self, iteration: int) -> Drawn:
        session = self.session
        draws = session.prompts.draw(iteration, session.draw_count, session.run.train.seed, None)
        return draws_here(session, iteration, draws)


def draws_here(session: Session, iteration: int, draws: Draws) -> Drawn:
    """These draws, without rows that nothing can win, sampled by the algorithm's own policy."""
    winnable = session.winnable(iteration, draws)
    return Drawn.of(session.parallel, iteration, winnable, session.algorithm.behaviour)
