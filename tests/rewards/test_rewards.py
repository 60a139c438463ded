import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rewards.catalogue as catalogue
from rewards import Samples, Scores, check_reward, load, score_all
from rewards.load import names, reward_module


def samples(n: int, group: int = 1) -> Samples:
    return Samples(["x"] * n, ["p"] * n, torch.arange(n) // group)


def test_samples_must_agree_in_number():
    with pytest.raises(ValueError, match="2 prompts but 3 media"):
        Samples(["x"] * 3, ["p"] * 2, torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="2 prompts but 1 meta"):
        Samples(["x"] * 2, ["p"] * 2, torch.zeros(2, dtype=torch.long), [{}])


def test_what_cannot_be_scored_is_counted_not_zero():
    given_ = {
        "tensor": lambda s: torch.tensor([1.0, float("nan"), 3.0]),
        "listed": lambda s: [None, 2, 0.5],
        "silent": lambda s: None,
    }
    scores = score_all(given_, samples(3))
    assert scores.names == ("tensor", "listed", "silent")
    assert scores.scored.tolist() == [
        [True, False, False],
        [False, True, False],
        [True, True, False],
    ]
    assert scores.values.tolist() == [[1, 0, 0], [0, 2, 0], [3, 0.5, 0]]
    assert scores.unscored == {"tensor": 1, "listed": 0, "silent": 0}, "None is no failure"
    assert (~scores.applies).sum(0).tolist() == [0, 1, 3]
    assert scores.values.dtype == torch.float64 and isinstance(scores, Scores)


def test_an_error_names_its_reward():
    def broken(s: Samples) -> torch.Tensor:
        raise RuntimeError("no answer")

    for reward, kind, message in (
        (broken, RuntimeError, "no answer"),
        (lambda s: torch.ones(4), ValueError, r"shape \[4\]; expected 3"),
        (lambda s: torch.tensor([1.0, float("inf"), 0.0]), ValueError, "infinite"),
    ):
        with pytest.raises(kind, match=message) as caught:
            score_all({"fine": lambda s: torch.zeros(3), "judge": reward}, samples(3))
        assert caught.value.__notes__ == ["in reward 'judge'"]
    with pytest.raises(ValueError, match="at least one reward"):
        score_all({}, samples(3))


def test_a_total_order_wins_in_order():
    order = torch.tensor([3.0, 1.0, 2.0, 0.0, 1.0])

    def judge(s: Samples, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert (s.group[a] == s.group[b]).all() and (a < b).all()
        return (order[a] > order[b]).float()

    group = torch.tensor([0, 0, 0, 1, 1])
    got = load("win_rate", judge=judge)(Samples(["x"] * 5, ["p"] * 5, group))
    assert got.tolist() == [1, 0, 0.5, 0, 1]


@given(st.integers(2, 6), st.integers(1, 3), st.integers(0, 99))
def test_win_rates_of_a_group_share_out_its_pairs(size, groups, seed):
    rng = torch.Generator().manual_seed(seed)

    def judge(s: Samples, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(a), generator=rng)

    got = load("win_rate", judge=judge)(samples(size * groups, size)).view(groups, size)
    torch.testing.assert_close(got.sum(1), torch.full((groups,), size / 2, dtype=torch.float64))


def test_pairs_without_a_verdict_are_left_out():
    def judge(s: Samples, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tensor([1.0, float("nan"), float("nan")])

    group = torch.tensor([0, 0, 0, 1])
    got = load("win_rate", judge=judge)(Samples(["x"] * 4, ["p"] * 4, group))
    assert got[:2].tolist() == [1, 0]
    assert got[2:].isnan().all(), "no verdict, and alone in its group: unscored"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with one more reward, `constant`, and one file that has no `load` yet."""
    (tmp_path / "constant.py").write_text(
        "import torch\n\n\ndef load(value: float, times: int = 1):\n"
        "    return lambda samples: torch.full((len(samples.prompts),), float(value * times))\n"
    )
    (tmp_path / "hollow.py").write_text("")
    monkeypatch.setattr(catalogue, "__path__", [*catalogue.__path__, str(tmp_path)])
    monkeypatch.setattr(sys.modules["rewards.load"], "REWARD_FOLDERS", catalogue.__path__)
    yield
    for name in ("constant", "hollow"):
        sys.modules.pop(f"rewards.catalogue.{name}", None)


def test_a_file_of_the_folder_is_a_reward(toy):
    assert "constant" in names() and not {"types", "load", "media"} & set(names())
    scores = score_all({"c": load("constant", value=2.0, times=3)}, samples(2))
    assert scores.values.flatten().tolist() == [6, 6]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("constnat", {}, "no reward 'constnat'; did you mean 'constant'"),
        ("types", {}, "no reward 'types'"),
        ("constant", {"valu": 1}, "no setting 'valu'; did you mean 'value'"),
        ("constant", {"times": 1}, "needs the setting 'value'"),
        ("hollow", {}, "rewards/catalogue/hollow.py has no function 'load'"),
    ],
)
def test_slips_are_told_without_loading(toy, name, settings, message):
    for act in (lambda: check_reward(name, settings), lambda: load(name, **settings)):
        with pytest.raises(ValueError, match=message):
            act()


def test_a_users_file_is_read_again_only_after_a_change(tmp_path: Path) -> None:
    """A notebook's process goes on after a repair; an unchanged file keeps its classes."""
    file = tmp_path / "mine.py"
    samples = Samples(torch.zeros(2, 3, 4, 4), ["a"] * 2, torch.zeros(2, dtype=torch.long))
    file.write_text("def mine(samples):\n    return [1.0] * len(samples.media)\n")
    assert list(load(f"{file}:mine")(samples)) == [1.0, 1.0]
    before = reward_module(f"{file}:mine")[0]
    assert reward_module(f"{file}:mine")[0] is before
    file.write_text("def mine(samples):\n    return [20.0] * len(samples.media)\n")
    assert list(load(f"{file}:mine")(samples)) == [20.0, 20.0]
    file.write_text("def mine(samples:\n")
    with pytest.raises(ValueError, match=r"mine\.py, line 1: "):
        load(f"{file}:mine")
    file.write_text("def mine(samples):\n    return [3.0] * len(samples.media)\n")
    assert list(load(f"{file}:mine")(samples)) == [3.0, 3.0]
