"""Noise of a counter: SplitMix64, normal numbers, rows that depend on their keys alone."""

from statistics import NormalDist

import pytest
import torch

from flowrl.errors import UserError
from flowrl.session.progress import Progress
from flowrl.settings.checks.machine import check_kind
from flowrl.settings.read import run_from
from samplers import counter_noise
from samplers.counter_noise import counter_normal
from samplers.noise import key_hash, row_keys
from tests.support import runs
from tests.support.iterations import collect, iterate

WORD = 2**64


def number(key: tuple[int | str, ...], place: int) -> float:
    """Element `place` of a key's row, by Python's integers and its normal distribution."""
    z = (key_hash(*key) + (place // 2 + 1) * 0x9E3779B97F4A7C15) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    z ^= z >> 31
    half = z % 2**32 if place % 2 else z >> 32
    size = -NormalDist().inv_cdf((2 * (half >> 1) + 1) / 2**33)
    return -size if half & 1 else size


def test_elements_are_splitmix64_through_the_normal_quantile():
    keys = [(3, "step", 1), (3, "step", 2), (2**40, 0)]
    drawn = counter_normal(row_keys(keys), (5, 41), "cpu")
    assert drawn.dtype == torch.float32
    mine = torch.tensor([[number(key, i) for i in range(205)] for key in keys])
    torch.testing.assert_close(drawn.flatten(1), mine, rtol=0, atol=3e-6)


def test_numbers_are_normal():
    keys = row_keys([(7, i) for i in range(4)])
    drawn = counter_normal(keys, (250_000,), "cpu").double().flatten()
    n = len(drawn)
    assert abs(drawn.mean()) < 4 / n**0.5
    assert abs(drawn.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((drawn**4).mean() - 3) < 4 * (96 / n) ** 0.5
    chance = torch.special.ndtr(drawn).sort()[0]
    away = (chance - (torch.arange(n) + 0.5) / n).abs().max()
    assert away < 1.95 / n**0.5  # Kolmogorov and Smirnov's bound at 0.1 %
    pairs = drawn.view(-1, 2)
    assert abs((pairs[:, 0] * pairs[:, 1]).mean()) < 4 / len(pairs) ** 0.5  # two of one word


def test_a_tail_is_as_long_as_its_bits():
    """The largest number of 31 bits is the quantile of 2^-33."""
    bits = torch.tensor([[0, 1, 2**32 - 1, 2**32 - 2]])
    found = counter_noise._normals(bits)[0, 1::2]
    most, least = -NormalDist().inv_cdf(2.0**-33), 0.0
    wanted = torch.tensor([most, -most, least, least])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_a_row_depends_on_its_key_alone(monkeypatch):
    six = row_keys([(0, i) for i in range(6)])
    whole = counter_normal(six, (7,), "cpu")
    assert torch.equal(whole[[4]], counter_normal(row_keys([(0, 4)]), (7,), "cpu"))
    assert torch.equal(whole[:, :4], counter_normal(six, (4,), "cpu"))
    monkeypatch.setattr(counter_noise, "DRAWN", 14)
    assert torch.equal(whole, counter_normal(six, (7,), "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [runs.FLOW_GRPO, runs.NFT], ids=["grpo", "nft"])
def test_a_run_draws_all_of_its_noise_by_the_counter(pipeline, tmp_path, recipe):
    def opened(kind: str):
        return runs.session(pipeline, tmp_path, recipe, noise=kind)

    kept, again, other = opened("counter"), opened("counter"), opened("generator")
    drawn, same, plain = (collect(each, 0) for each in (kept, again, other))
    assert drawn.samples is not None and same.samples is not None and plain.samples is not None
    assert torch.equal(drawn.samples.media, same.samples.media)
    assert not torch.equal(drawn.samples.media, plain.samples.media)
    if recipe is runs.NFT:  # what is added to clean samples
        noise = [each.rows[0].noise for each in (drawn, plain)]
        assert not torch.equal(*noise) and abs(float(noise[0].mean())) < 0.5
    metrics = iterate(kept, Progress()).metrics
    assert metrics.get("ratio_max", 1.0) == metrics.get("ratio_min", 1.0) == 1


def test_texts_refuse_the_setting(pipeline, tmp_path):
    text = runs.tree(pipeline, tmp_path, {"name": "text_grpo"}, noise="counter")
    text["model"] = {"language": str(tmp_path)}
    run = run_from(text, "test")
    with pytest.raises(UserError, match=r"train\.noise: tokens are always drawn by a counter"):
        check_kind(run, run.algorithm())
