"""A reward for each row, by a column: several data sets in one run."""

import pytest
import torch

from rewards import Samples, check_reward, load
from rewards.checks.self_test import Prompts, self_test
from rewards.load import check_sources
from rewards.types import cell, reports
from tests.support.reward_contract import check_contract, images

LENGTH = {"name": "length", "most": 3, "kind": "near"}
META = [{"data_set": "sums", "answer": "7"}, {"data_set": "code"}] * 2


def samples(meta=META) -> Samples:
    texts = ["7", "a b c", "8", "a"]
    return Samples(texts, ["p"] * 4, torch.arange(4), meta)


def test_every_row_is_scored_by_its_own_reward_and_weight():
    rewards = {"sums": "exact_answer", "code": LENGTH}
    plain = load("by_row", rewards=rewards)
    alone = load(**LENGTH)(samples())
    scores = plain(samples())
    assert scores[[0, 2]].tolist() == [1, 0]
    assert torch.equal(scores[[1, 3]], alone[[1, 3]].double()) and scores[1] != scores[3]
    doubled = load("by_row", rewards=rewards, weights={"sums": 2.0})(samples())
    assert doubled.tolist() == [2, scores[1], 0, scores[3]]
    said = reports({"routed": plain})
    assert said["calls/routed/sums"] == 0.5
    assert said["calls/routed/code"] == pytest.approx(float(alone[[1, 3]].mean()))
    assert plain.report() == {}


def test_images_are_routed_by_any_column():
    reward = load("by_row", column="kind", rewards={"x": "brightness"}, otherwise=0.25)
    check_contract(reward, lambda prompts: with_kind(images(prompts)))
    given = with_kind(images(["a", "b", "c"]))
    found = reward(given)
    assert found[1] == 0.25 and torch.equal(found[[0, 2]], load("brightness")(given)[[0, 2]])


def with_kind(given: Samples) -> Samples:
    meta = [{"kind": "y" if p == "b" else "x"} for p in given.prompts]
    return Samples(given.media, given.prompts, given.group, meta)


def test_what_cannot_be_routed_is_one_sentence():
    reward = load("by_row", rewards={"sums": "exact_answer"})
    with pytest.raises(ValueError, match=r"row 2 .prompt 'p'. has 'code' in the column 'data_set'"):
        reward(samples())
    with pytest.raises(ValueError, match=r"has 'None' in the column"):
        self_test("routed", reward, Prompts(["p"], [{}], "text"))
    with pytest.raises(ValueError, match=r"weights: 'sum' has no reward"):
        load("by_row", rewards={"sums": "exact_answer"}, weights={"sum": 2.0})
    with pytest.raises(ValueError, match=r"at least one value"):
        load("by_row", rewards={})
    with pytest.raises(
        ValueError, match=r"rewards: expected a mapping of names to rewards, such as"
    ):
        check_reward("by_row", {"rewards": ["brightness"]})
    with pytest.raises(ValueError, match=r"rewards: there is no reward 'brihtness'; did you mean"):
        check_reward("by_row", {"rewards": {"a": "brihtness"}})
    check_sources("by_row", {"rewards": {"a": "brightness"}})


def test_a_cell_may_be_nested():
    row = {"a": {"b": {"c": 1}}, "x.y": 2, "n": None}
    assert cell(row, "a.b.c") == 1 and cell(row, "x.y") == 2
    assert cell(row, "a.x") is cell(row, "n.b") is cell(row, "z") is None
    found = load("exact_answer", column="reward_model.ground_truth")(
        samples([{"reward_model": {"ground_truth": answer}} for answer in "7788"])
    )
    assert found.tolist() == [1, 0, 1, 0]
