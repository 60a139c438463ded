"""Which optimizer step an iteration's rows are dealt to."""

import torch

from flowrl.iteration.minibatches import RowAssignment
from flowrl.likelihoods.rows import Rows, input_of


def test_only_draws_that_share_a_state_take_turns():
    """With one row each, draws are dealt by their own numbers; with a state that is theirs alone,
    also by the number of the rows, which is that of the plan's step."""
    assignment, draws = RowAssignment(seed=0, iteration=0, updates=2), (0, 1, 2)

    def dealt(number: int, together: int = 1, state: torch.Tensor | None = None) -> list[int]:
        prompt, ones = torch.arange(3), torch.ones(3, 1)
        rows = Rows(prompt // together, ones, ones.bool(), None, state=state)
        inputs = input_of(rows, together)
        return assignment.steps(rows, inputs, draws, number, together).tolist()

    assert dealt(0) == dealt(1) == [0, 1, 0]
    states = torch.arange(3)
    assert dealt(0, state=states) == [0, 1, 0] and dealt(1, state=states) == [1, 0, 1]
    assert dealt(0, together=3) == dealt(1, together=3, state=states) == [0, 0, 0]
