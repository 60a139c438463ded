"""Levels of a state's parts that have a scheduler of their own, beside those of the state.

A part whose schedule differs from the state's by a shift is a flow at the state's levels, with data
of another size (`samplers.part_levels`). For any other schedule there is no such size, and it is
refused.
"""

from collections.abc import Sequence

import torch

from flowrl.errors import UserError
from flowrl.models.diffusers.call.levels.schedule import PipelineSchedule
from samplers.part_levels import own_level

SHIFT_DIGITS = 6  # of a size of data: the lists of levels are rounded to float32
NEAR_LEVEL = 2e-6  # between a part's level and that of its shift, likewise


def data_sizes(
    schedule: PipelineSchedule, schedulers: Sequence[str], owner: str
) -> tuple[float, ...]:
    """The size of each part's data in flow states; `schedulers` step the parts. UserError for
    levels that no shift explains."""
    sizes = []
    for name in schedulers:
        part = schedule.beside.get(name, schedule)
        check_visits(schedule, part, name, owner)
        inner = [pair for pair in zip(schedule.sigmas, part.sigmas, strict=True) if 0 < pair[0] < 1]
        assert inner, "a trial with more than one step"
        level, part_level = min(inner, key=lambda pair: abs(pair[0] - 0.5))
        size = (level / (1 - level)) * ((1 - part_level) / part_level)
        sizes.append(float(f"{size:.{SHIFT_DIGITS}g}"))
    check_shifts(schedule, schedulers, sizes, owner)
    return tuple(sizes)


def check_visits(schedule: PipelineSchedule, part: PipelineSchedule, name: str, owner: str) -> None:
    """UserError unless both begin at pure noise and visit as many levels in the same order."""
    ends = [(visited.sigmas[0], visited.sigmas[-1]) for visited in (schedule, part)]
    orders = [
        [visited.first_call(k) for k in range(len(visited.sigmas) - 1)]
        for visited in (schedule, part)
    ]
    if part is not schedule and (ends != [(1.0, 0.0)] * 2 or orders[0] != orders[1]):
        raise UserError(
            f"{owner} steps a part of its state by {name}, whose levels {part.sigmas} do not go "
            f"from 1 to 0 in the steps of the state's levels {schedule.sigmas}"
        )


def check_shifts(
    schedule: PipelineSchedule, schedulers: Sequence[str], data: Sequence[float], owner: str
) -> None:
    """UserError unless each part's levels are those of its size of data."""
    for name, size in zip(schedulers, data, strict=True):
        part = schedule.beside.get(name, schedule)
        check_visits(schedule, part, name, owner)
        wanted = own_level(torch.tensor(schedule.sigmas, dtype=torch.float64), size)
        away = float((wanted - torch.tensor(part.sigmas, dtype=torch.float64)).abs().max())
        if away > NEAR_LEVEL:
            raise UserError(
                f"{owner} steps a part of its state by {name}, whose levels {part.sigmas} are no "
                f"shift of the state's levels {schedule.sigmas} (off by {away:.2g}): our samplers "
                "have one list of levels for all parts"
            )
