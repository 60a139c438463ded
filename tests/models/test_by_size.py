"""Rows of several sizes in one batch: each sample is what the pipeline's own call makes at its
size."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.errors import UserError
from flowrl.iteration.features.sizes import rows_of_sizes
from flowrl.iteration.records import PlanCredit
from flowrl.likelihoods.rows import ROWS_INDEX, take
from flowrl.likelihoods.transition import Transition
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.sizes.by_size import other_sizes
from flowrl.models.diffusers.sizes.mixed_batch import MixedBatch
from flowrl.prompts import PromptSet
from flowrl.prompts.row_sizes import RowSize
from flowrl.table import Table
from samplers import Chain, FlowSDE
from samplers.mixed import by_draws
from samplers.noise import normal
from tests.support.driving import STEPS
from tests.support.tiny_pipelines import NAMED, SQUARE

torch.set_num_threads(1)
PROMPTS = ("a red cube", "a cat", "two blue cat on the table", "a dog")
ROWS: list[dict[str, Any]] = [
    {"height": 16, "width": 24}, {}, {"height": 16, "width": 16}, {"height": 24}
]  # fmt: skip
SIZES = [(16, 24), (16, 16), (16, 16), (24, 16)]
SEED = 3


def own_sample(pipe: Any, prompt: str, size: tuple[int, int], noise: torch.Tensor) -> torch.Tensor:
    """A sample of the pipeline's own call, without flowrl."""
    call = {**SQUARE, "height": size[0], "width": size[1]}
    given = {"prompt": [prompt], "latents": noise, "num_inference_steps": STEPS}
    return pipe(**call, **given, guidance_scale=1.0, output_type="pt", return_dict=False)[0][0]


def opened(name: str) -> tuple[PipelinePolicy, Any]:
    made = PipelinePolicy(NAMED[name].build(), call=SQUARE)
    return made, made.open(PROMPTS, ROWS, STEPS)


@pytest.mark.quick_cases("FLUX.1")
@pytest.mark.parametrize("name", ["SD3", "FLUX.1"])
def test_samples_of_several_sizes_equal_the_pipelines_own(name: str) -> None:
    """FLUX shifts its schedule by the size, and its packed latents of 16 x 24 and 24 x 16 have one
    shape."""
    made, batch = opened(name)
    assert isinstance(batch, MixedBatch) and batch.indices == ((0,), (1, 2), (3,))
    (rollout,) = batch.rollouts(made.plain(2), (7, 8, 9, 10), seed=SEED, iteration=0)
    media = batch.media(rollout)
    assert [tuple(each.shape[1:]) for each in media[::2]] == SIZES
    assert rollout.prompt.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and len(rollout.lengths) == 8
    levels = {tuple(of_size.plan.sigmas) for of_size in rollout.by_size}
    assert len(levels) == (2 if name == "FLUX.1" else 1)
    shapes = {0: batch.by_size[0], 1: batch.by_size[1], 2: batch.by_size[1], 3: batch.by_size[2]}
    for i, prompt in enumerate(PROMPTS):
        noise = normal([(SEED, 0, 7 + i, "root", 1)], shapes[i].owner.shape(STEPS))
        own = own_sample(made.pipe, prompt, SIZES[i], noise)
        torch.testing.assert_close(media[2 * i + 1], own, rtol=1e-4, atol=1e-5)
    luma = torch.tensor([0.299, 0.587, 0.114])
    bright = torch.stack([luma @ each.flatten(1).mean(1) for each in media])
    column = batch.statistics(rollout, media).columns["image/brightness"]
    torch.testing.assert_close(column, bright, rtol=1e-4, atol=1e-5)


def test_rows_of_the_runs_own_size_are_the_same_bits() -> None:
    made = PipelinePolicy(NAMED["SD3"].build(), call=SQUARE)
    plan = Chain(FlowSDE(0.7), 2)
    found = []
    for meta in ([{}] * 4, [{"height": 16, "width": 16}] * 4):
        batch = made.open(PROMPTS, meta, STEPS)
        assert batch.owner is made
        found += batch.rollouts(plan, range(4), seed=SEED, iteration=0)
    assert torch.equal(found[0].x0, found[1].x0)
    assert not other_sizes(made, [{"height": 16}, {}]) and other_sizes(made, ROWS)


@pytest.mark.slow
def test_steps_of_several_sizes_have_the_densities_of_their_own_batches() -> None:
    """Noise and log-densities belong to a sample, not to the sizes beside it."""
    made, batch = opened("FLUX.1")
    plan, draws = Chain(FlowSDE(0.7), 2), (4, 5, 6, 7)
    (mixed,) = batch.rollouts(plan, draws, seed=SEED, iteration=2)
    for i, (row, prompt) in enumerate(zip(ROWS, PROMPTS, strict=True)):
        alone = made.open([prompt], [row], STEPS)
        (own,) = alone.rollouts(plan, [draws[i]], seed=SEED, iteration=2)
        for edge, mixed_edge in zip(own.edges, mixed.edges, strict=True):
            there = mixed_edge.logp[2 * i : 2 * i + 2]
            torch.testing.assert_close(edge.logp, there, rtol=1e-4, atol=1e-4)
            assert edge.step == mixed_edge.step


@pytest.mark.slow
def test_rows_are_dealt_by_their_step_whatever_their_size() -> None:
    """Rows of each size count from the same place, as the rows of one size do."""
    _, batch = opened("FLUX.1")
    (mixed,) = batch.rollouts(Chain(FlowSDE(0.7), 2), (4, 5, 6, 7), seed=SEED, iteration=2)
    values = torch.zeros(8, len(mixed.edges), dtype=torch.float64)
    credit = PlanCredit(values, torch.ones_like(values).bool())
    nothing, every = torch.arange(0), torch.tensor([True])
    (last, *_) = Transition().rows(mixed.by_size[0], values[:2], every.expand(2, values.shape[1]))
    before = [replace(take(last, nothing), table=Table({ROWS_INDEX: 4}))]
    rows = rows_of_sizes(Transition(), mixed, credit, before)
    steps = len(rows) // 3  # of three sizes
    assert [each.table[ROWS_INDEX] for each in rows] == [*range(5, 5 + steps)] * 3 and steps > 1


def test_columns_of_sizes_are_joined_in_the_order_of_draws() -> None:
    parts = [torch.tensor([10, 11, 20, 21]), torch.tensor([0, 1])]
    assert by_draws(parts, [(1, 2), (0,)]).tolist() == [0, 1, 10, 11, 20, 21]


@pytest.mark.slow
def test_every_size_is_proven_and_refusals_name_the_row(tmp_path: Path) -> None:
    made = PipelinePolicy(NAMED["SD3"].build(), call=SQUARE).guided(1.0, 1.0)
    made.check_rows(ROWS)
    said = made.proofs(PROMPTS, STEPS, ROWS)
    assert len(said) == 3 and said[0].startswith("height 16, width 24: ")
    assert all(len(each.known_proofs) == 1 for each in made.sized) and len(made.sized) == 3
    assert made.automatic(STEPS) == min(128, 2**18 // (4 * 8 * 12))
    file = tmp_path / "prompts.csv"
    file.write_text("prompt,height\na,16\nb,22\n")
    prompts = PromptSet.read(str(file), "prompt", "prompts.train")
    with pytest.raises(UserError, match=r"prompts\.train: .*prompts\.csv, line 3: .*divisible"):
        made.check_rows(prompts.meta)


def test_training_prompts_have_their_own_sizes_among_those_of_all_rows() -> None:
    made = PipelinePolicy(NAMED["SD3"].build(), call=SQUARE).guided(1.0, 1.0)
    assert made.sized_for(ROWS) == [made], "before any row is known"
    made.check_rows(ROWS)
    for row, (height, width) in zip(ROWS, SIZES, strict=True):
        (sized,) = made.sized_for([row])
        assert sized.shape(STEPS)[-2:] == (height // 2, width // 2)
    assert len(made.sized_for(ROWS)) == len(made.used) == 3


@pytest.mark.parametrize("value", ["tall", True, 0, -16, 16.5, [16], float("inf")])
def test_sizes_that_are_no_numbers_are_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"height: .*not a whole number"):
        RowSize.of({"height": value})


def test_sizes_are_read_from_their_columns() -> None:
    assert RowSize.of({"height": 512.0, "width": "", "num_frames": float("nan")}).given == {
        "height": 512
    }
    assert RowSize.of({"frames": 9}) == RowSize.of({"num_frames": 9, "frames": 9})
    assert not RowSize.of({"frames": ["a.png", "b.png"]}).given
    with pytest.raises(UserError, match="num_frames is 5 but frames is 9"):
        RowSize.of({"num_frames": 5, "frames": 9})
