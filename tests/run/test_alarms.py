"""Each alarm on made-up histories: what raises it, and the nearest history that does not."""

import json

import pytest

from flowrl.run.watch.alarms import Alarms, Unclear
from flowrl.run.watch.judges import judges, no_judge
from flowrl.settings.read import override, run_from

TRAINING = {"reward": 0.5, "reward_std": 0.2, "unscored_share": 0.0}
LOOKS = {"image/brightness": 0.5, "image/saturation": 0.3, "image/diversity": 0.3}


def train(alarms: Alarms, rewards: list[float], **others: float) -> list[str]:
    rows = ({**TRAINING, **others, "reward": reward} for reward in rewards)
    return [sign for at, row in enumerate(rows, 1) for sign in alarms.watch(row, at)]


def evaluation(score: float, error: float = 0.02, **looks: float) -> dict[str, float]:
    """An evaluation of samples whose statistics and scores spread by 0.1 and 0.4."""
    found = {f"held_out/{name}": value for name, value in (LOOKS | looks).items()}
    found |= {f"held_out_std/{name}": 0.1 for name in LOOKS}
    scores = {"held_out/strict": score, "held_out_std/strict": 0.4}
    return found | scores | {"held_out_gain_error/strict": error}


def based(score: float = 0.7) -> Alarms:
    alarms = Alarms()
    assert alarms.compare(evaluation(score), 0) == []
    return alarms


def test_a_held_out_fall_is_told_once():
    alarms = based()
    assert alarms.compare(evaluation(0.69), 20) == []
    (sign,) = alarms.compare(evaluation(0.6), 20)
    assert sign == "the held-out score strict fell from 0.700 to 0.600"
    assert alarms.compare(evaluation(0.5), 20) == []


@pytest.mark.parametrize("score, error", [(0.6, 0.04), (0.66, 0.005), (0.8, 0.02)])
def test_noise_small_falls_and_gains_are_not_told(score, error):
    """2.5 standard errors; eight standard errors, but a tenth of the spread; a gain."""
    assert based().compare(evaluation(score, error), 20) == []


def test_a_fall_of_all_samples_from_a_perfect_score_is_told():
    """Neither evaluation has a spread."""
    none = {"held_out_std/strict": 0.0}
    alarms = Alarms()
    alarms.compare(evaluation(1.0) | none, 0)
    assert alarms.compare(evaluation(1.0, 0.0) | none, 20) == []
    assert len(alarms.compare(evaluation(0.0, 0.0) | none, 20)) == 1


def test_only_rewards_that_scored_the_base_are_compared():
    new = {"held_out/new": 0.1, "held_out_std/new": 0.4, "held_out_gain_error/new": 0.01}
    assert based().compare(evaluation(0.7) | new, 20) == []


def test_a_smaller_fall_is_told_where_the_training_reward_rises():
    still, rising = based(), based()
    train(still, [0.5] * 15)
    train(rising, [0.5 + 0.02 * i for i in range(15)])
    small = evaluation(0.65, 0.015)  # an eighth of the spread, 3.3 standard errors
    assert rising.compare(evaluation(0.65), 20) == [], "2.5 standard errors"
    assert still.compare(small, 20) == []
    (sign,) = rising.compare(small, 20)
    assert sign.startswith("the reward rises, but the held-out score strict fell")


def test_changed_samples_are_told_where_held_out_scores_gain_nothing():
    changed = {"image/brightness": 0.6, "image/saturation": 0.4}
    (sign,) = based().compare(evaluation(0.71, **changed), 20)
    assert "do not rise" in sign and "image/brightness went from 0.500 to 0.600" in sign
    assert based().compare(evaluation(0.8, **changed), 20) == []  # a confirmed gain excuses them
    assert based().compare(evaluation(0.71, **{"image/brightness": 0.6}), 20) == []  # one alone
    near = {"image/brightness": 0.53, "image/saturation": 0.33}
    assert based().compare(evaluation(0.71, **near), 20) == []


FAST = {"image/brightness": 0.55, "image/saturation": 0.35}  # a third of a spread on average


def test_images_that_change_fast_are_told_where_held_out_scores_gain_nothing():
    (sign,) = based().compare(evaluation(0.71, **FAST), 3)
    assert sign == (
        "held-out scores do not rise, and images change by 11 % of their spread per iteration"
    )
    assert based().compare(evaluation(0.71, **FAST), 4) == []
    assert based().compare(evaluation(0.8, **FAST), 3) == []  # a confirmed gain excuses them


def test_a_single_step_may_move_images_as_far_as_two():
    near = {"image/brightness": 0.52, "image/saturation": 0.32}  # 0.13 of a spread on average
    assert based().compare(evaluation(0.71, **near), 1) == []
    assert len(based().compare(evaluation(0.71, **FAST), 1)) == 1


def test_speed_is_measured_from_the_last_evaluation():
    alarms = based()
    assert alarms.compare(evaluation(0.71, **FAST), 10) == []
    alarms = restored(alarms)
    (sign,) = alarms.compare(evaluation(0.71), 13)  # back at the base's
    assert "11 % of their spread per iteration" in sign


@pytest.mark.parametrize("error, told", [(0.06, 1), (0.07, 0)])
def test_few_samples_move_by_chance(error, told):
    """A third of a spread is 2.2 and 1.9 standard errors of the held-out score."""
    assert len(based().compare(evaluation(0.71, error, **FAST), 3)) == told


def test_a_state_without_its_last_evaluation_is_refused():
    alarms = based()
    alarms.check(0)
    last = dict(alarms.last)
    for wrong in ({}, last | {"iteration": 1.0}, {"iteration": 0.0}):
        alarms.last = wrong
        with pytest.raises(ValueError, match=r"alarms\.last"):
            alarms.check(0)


def test_samples_that_become_alike_are_told_whatever_the_scores():
    (sign,) = based().compare(evaluation(0.9, **{"image/diversity": 0.17}), 20)
    assert sign == "image/diversity fell from 0.300 to 0.170"
    assert based().compare(evaluation(0.9, **{"image/diversity": 0.19}), 20) == []


def test_without_held_out_prompts_two_training_statistics_have_to_change():
    one, two = Alarms(), Alarms()
    for alarms in (one, two):
        assert alarms.compare({}, 0) == []
        train(alarms, [0.5] * 5, **LOOKS)
    assert train(one, [0.5] * 5, **LOOKS | {"image/brightness": 0.9}) == []
    changed = LOOKS | {"image/brightness": 0.9, "image/saturation": 0.1}
    (sign,) = train(two, [0.5] * 5, **changed)
    assert sign.startswith("the samples have changed: image/brightness went from 0.500 to ")
    with_held_out = based()
    train(with_held_out, [0.5] * 5, **LOOKS)
    assert train(with_held_out, [0.5] * 5, **changed | {"image/diversity": 0.1}) == []
    alike = Alarms()
    train(alike, [0.5] * 5, **LOOKS)
    (sign,) = train(alike, [0.5] * 5, **LOOKS | {"image/diversity": 0.1})
    assert sign.startswith("image/diversity fell from 0.300 to ")


def test_texts_that_no_longer_end_by_themselves_are_told():
    alarms = Alarms()
    train(alarms, [0.5] * 5, **{"text/stopped": 0.9})
    (sign,) = train(alarms, [0.5] * 5, **{"text/stopped": 0.4})
    assert sign.startswith("text/stopped fell from 0.900 to ")
    (sign,) = based_on_texts().compare(texts(0.4), 20)
    assert sign == "text/stopped fell from 0.900 to 0.400"
    assert based_on_texts().compare(texts(0.5), 1) == []  # however fast


def texts(stopped: float) -> dict[str, float]:
    return {"held_out/text/stopped": stopped, "held_out_std/text/stopped": 0.3}


def based_on_texts() -> Alarms:
    alarms = Alarms()
    alarms.compare(texts(0.9), 0)
    return alarms


def test_a_reward_far_below_its_best_is_told():
    (sign,) = train(Alarms(), [0.8] * 10 + [0.8 - 0.05 * i for i in range(10)])
    assert sign.startswith("the reward fell from 0.800 to ")
    assert train(Alarms(), [0.5 + 0.01 * i for i in range(30)]) == []
    noisy = [0.8, 0.6] * 8 + [0.6, 0.7] * 4  # less than three standard errors of two windows
    assert train(Alarms(), noisy) == []


@pytest.mark.parametrize("score, at, told", [(0.72, 7, 0), (0.7, 7, 1), (0.72, 4, 1)])
def test_a_reward_fall_beside_a_held_out_gain_is_not_told(score, at, told):
    """MixGRPO's window moves. A gain excuses it until five iterations after the evaluation."""
    alarms = based()
    assert train(alarms, [0.8] * 5) == []
    assert alarms.compare(evaluation(score), at) == []
    rows = [TRAINING | {"reward": 0.6}] * 5
    assert len([s for k, row in enumerate(rows, 6) for s in alarms.watch(row, k)]) == told


def test_more_than_a_tenth_unscored_is_told():
    def lost(*shares: float) -> list[str]:
        alarms, found = Alarms(), []
        for share in shares:
            row = TRAINING | {"unscored_share": share}
            found += alarms.unscored(row)
            alarms.watch(row, 1)
        return found

    assert lost(0.12) == ["12 % of the samples have no score"]
    assert lost(*[0.0] * 5, *[0.11] * 5) == ["11 % of the samples have no score"]
    assert lost(*[0.09] * 20) == []
    assert lost(*[0.0] * 5, 0.4, *[0.0] * 9) == []  # an outage of one iteration


def test_samples_to_which_no_reward_applies_are_no_failures_and_are_named_once():
    alarms, row = Alarms(), TRAINING | {"unscored_share": 0.55, "abstained_share": 0.5}
    assert [alarms.unapplied(row) for _ in range(2)] == [
        ["no reward applies to 50 % of the samples"],
        [],
    ]
    assert alarms.unscored(row | {"unscored_share": 0.5}) == []
    found: list[str] = []
    for _ in range(6):
        found += alarms.unscored(row)
        alarms.watch(row, 1)
    assert found == [], "a failure on one in twenty"
    assert alarms.unscored(TRAINING | {"unscored_share": 0.9, "abstained_share": 0.2}) != []


def test_an_iteration_without_a_reward_interrupts_no_window():
    alarms = Alarms()
    for k in range(12):
        alone = {"unscored_share": 1.0, "abstained_share": 1.0}
        row = alone if k % 3 == 2 else TRAINING | {"reward_std/x": 0.0, "reward/x": 1.0}
        assert alarms.watch(row, k) == []
        assert alarms.constant(row) == (["x"] if k == 6 else [])


def restored(alarms: Alarms) -> Alarms:
    """Through a checkpoint."""
    again = Alarms()
    assert again.restore(json.loads(json.dumps(alarms.state())))
    return again


def test_alarms_go_on_after_a_checkpoint():
    rewards = [0.8] * 10 + [0.8 - 0.05 * i for i in range(10)]
    whole, first = based(), based()
    signs = train(whole, rewards) + whole.compare(evaluation(0.5), 20)
    before = train(first, rewards[:12])
    again = restored(first)
    assert signs == before + train(again, rewards[12:]) + again.compare(evaluation(0.5), 20)
    assert len(signs) == 2


def test_the_state_of_an_older_version_is_refused_whole():
    alarms = based()
    before = json.dumps(alarms.state())
    old = {"history": [], "best": 0.5, "raised": ["reward"], "flat": {}}
    assert not alarms.restore(old)
    assert json.dumps(alarms.state()) == before


CHANGED = {"image/brightness": 0.6, "image/saturation": 0.4}


def test_a_gain_of_a_training_reward_excuses_nothing():
    """A hacked reward that is its own judge rises: nobody can tell, and a judge can."""
    (sign,) = based().compare(evaluation(0.9, **CHANGED), 20, ())
    assert isinstance(sign, Unclear) and sign.startswith("image/brightness went from 0.500 to 0.6")
    assert based().compare(evaluation(0.9, **CHANGED), 20, ("strict",)) == []
    both = {"held_out/own": 0.7, "held_out_std/own": 0.4}
    alarms = Alarms()
    alarms.compare(evaluation(0.7) | both, 0, ("strict",))
    risen = both | {"held_out/own": 0.9, "held_out_gain_error/own": 0.02}
    (sign,) = alarms.compare(evaluation(0.71, **CHANGED) | risen, 20, ("strict",))
    assert not isinstance(sign, Unclear) and "not trained on do not rise, and image" in sign


def test_a_training_reward_that_gains_nothing_or_falls_is_an_alarm_without_a_judge():
    (sign,) = based().compare(evaluation(0.71, **CHANGED), 20, ())
    assert not isinstance(sign, Unclear) and sign.startswith("held-out scores do not rise, and ")
    (sign,) = based().compare(evaluation(0.5), 20, ())
    assert "fell from 0.700 to 0.500" in sign


def test_what_was_unclear_may_become_an_alarm():
    alarms = based()
    assert isinstance(alarms.compare(evaluation(0.9, **CHANGED), 20, ())[0], Unclear)
    assert alarms.compare(evaluation(0.9, **CHANGED), 40, ()) == []
    (sign,) = alarms.compare(evaluation(0.71, **CHANGED), 60, ())
    assert not isinstance(sign, Unclear)


def reward(name: str, **settings: object) -> dict[str, object]:
    return {"name": name, **settings}


@pytest.mark.parametrize(
    ("trained", "held_out", "found"),
    [
        ([reward("jpeg")], [], ()),
        ([reward("jpeg")], [reward("jpeg", label="other", weight=2.0)], ()),
        ([reward("jpeg")], [reward("jpeg", kind="small"), reward("jpeg")], ("jpeg.small",)),
    ],
)
def test_judges_are_held_out_rewards_that_are_not_trained_on(trained, held_out, found):
    rest = {"recipe": "nft", "model": {"pipeline": "-"}, "prompts": {"train": "-", "held_out": "-"}}
    run = run_from({**rest, "rewards": trained, "held_out_rewards": held_out}, "test")
    assert judges(run) == found
    assert (not [*no_judge(run)]) == bool(found)
    (said,) = no_judge(override(run, ["--prompts.held-out", "null"]))
    assert "prompts.held_out" in said
