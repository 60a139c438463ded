"""`evaluate-rewards` whole, on the set whose truth is known."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.cli.evaluate import evaluate_weights
from flowrl.errors import UserError
from flowrl.evaluation.agreement import Resamples, Ties, credits
from flowrl.evaluation.measure import Cost, Gallery, scores
from flowrl.evaluation.preferences import ReadOptions, load_preferences
from flowrl.evaluation.reward_evaluation import EvaluateRewards, judge_pairs, plain, robust_rows
from flowrl.evaluation.reward_report import RewardResult, headline, results, sentences
from flowrl.paths import PROJECT
from flowrl.settings.command_line.arguments import EvaluateArguments
from rewards import load as load_reward
from rewards.combine import ByScore
from tests.support import runs

PAIRS = PROJECT / "configs" / "preferences" / "pairs.jsonl"
NOISE = 0.1
COST = Cost(0.0, 0, None)


@pytest.fixture(scope="module")
def preferences():
    return load_preferences(PAIRS, ReadOptions())


@pytest.fixture(scope="module")
def graded(preferences) -> np.ndarray:
    gallery = Gallery(preferences.items)
    rows = range(len(preferences.items))
    return scores("shapes", load_reward("shapes"), gallery, rows, 128)[0]


def test_the_known_accuracy_is_found(preferences, graded):
    """Exactly one in ten of the pairs that the checker tells apart has the wrong label."""
    margin = graded[preferences.a] - graded[preferences.b]
    credit = credits(margin, preferences.label, "excluded")
    known = credit[~np.isnan(credit)]
    assert len(known) == 390 and known.mean() == pytest.approx(1 - NOISE, abs=1e-12)
    assert ((margin == 0) == (preferences.label == 0.5)).all()
    size = sum(path.stat().st_size for path in PAIRS.parent.iterdir())
    assert size < 1_000_000


def test_the_known_accuracy_lies_in_its_interval_in_95_of_100_resamplings(preferences, graded):
    """Each draws the prompts anew, with replacement, and all wrong labels anew; the default level
    and the default number of resamples."""
    given = EvaluateRewards(PAIRS)
    named = np.flatnonzero(preferences.label != 0.5)
    margin = (graded[preferences.a] - graded[preferences.b])[named]
    truth, prompt = np.sign(margin), preferences.cluster[named]
    of_prompt = [np.flatnonzero(prompt == c) for c in range(preferences.clusters)]
    resamples = Resamples.draw(len(of_prompt), given.resamples, given.level, given.seed)
    held = widths = 0.0
    for seed in range(100):
        rng = np.random.default_rng([seed, 7])
        drawn = rng.integers(0, len(of_prompt), len(of_prompt))
        rows = np.concatenate([of_prompt[c] for c in drawn])
        cluster = np.repeat(np.arange(len(drawn)), [len(of_prompt[c]) for c in drawn])
        wrong = rng.random(len(rows)) < NOISE
        label = (1 + np.where(wrong, -1, 1) * truth[rows]) / 2
        e = resamples.share(credits(margin[rows], label, "excluded"), cluster)
        held += e.low <= 1 - NOISE <= e.high
        widths += e.high - e.low
    assert held >= 95
    # and not by being wide: 2.58 standard errors of 390 independent pairs to both sides are 0.078
    assert widths / 100 < 0.09


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("evaluation")
    rewards = "shapes,brightness,{name: shapes, kind: strict}"
    words = ["--judges", "jpeg", "--prompts", 30, "--robust", 20, "--resamples", 300, "--out", out]
    assert runs.flowrl("evaluate-rewards", PAIRS, "--rewards", rewards, *words) == 0
    return out


@pytest.mark.slow
def test_the_numbers_are_complete(page):
    found = json.loads((page / "evaluation.json").read_text())
    assert list(found["rewards"]) == ["shapes", "brightness", "shapes.strict", "jpeg"]
    assert found["dataset"]["prompts"] == 30 and found["level"] == 0.99
    shapes, judge = found["rewards"]["shapes"], found["rewards"]["jpeg"]
    assert set(shapes["robustness"]) == {
        *("blur", "noise", "crop", "sharpen", "jpeg", "text", "saturate", "brighten")
    }
    assert judge["kind"] == "judge" and judge["position"]["toward_first"] == 0
    assert judge["position"]["consistent"] == 1 and judge["calibration"]["scale"] is None
    assert shapes["accuracy"]["excluded"]["value"] > 0.75
    assert len(found["differences"]) == 6 and len(found["agreement"]["share"]) == 5
    assert sum(found["dataset"]["categories"].values()) == found["dataset"]["pairs"]
    text = found["rewards"]["brightness"]["robustness"]["text"]
    assert text["shift"]["value"] < -1 and text["raised"] == 0  # a dark band
    assert any("shapes agrees with people" in sentence for sentence in found["sentences"])


class Page(HTMLParser):
    VOID = ("meta", "link", "img", "br", "circle", "rect", "line", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(page):
    text = (page / "evaluation.html").read_text()
    parser = Page()
    parser.feed(text)
    assert not parser.open
    sources = [v for k, v in parser.attributes if k in ("src", "href", "srcset", "action")]
    assert sources and all(v and v.startswith(("data:", "#")) for v in sources)
    assert "<script" not in text and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    for title in ("Accuracy", "What fools it", "Calibration", "Position bias", "Cost"):
        assert f">{title}" in text
    assert len(text) < 1_000_000


def write(folder: Path, rows: list[dict], shades: dict[str, int]) -> Path:
    for name, shade in shades.items():
        Image.new("RGB", (8, 8), (shade, shade, shade)).save(folder / name)
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "own.jsonl"


def test_prompts_and_names_are_escaped_and_missing_files_are_told(tmp_path):
    rows = [
        {"prompt": "<script>alert(1)</script>", "a": "x.png", "b": "y.png", "label": "a"},
        {"prompt": "q & r", "a": "x.png", "b": "<gone>.png", "label": "b"},
        {"prompt": "<i>s</i>", "a": "y.png", "b": "x.png", "label": "a"},
    ]
    path = write(tmp_path, rows, {"x.png": 250, "y.png": 100})
    reward = "{name: brightness, label: <b>y</b>}"
    words = ["--rewards", reward, "--out", tmp_path / "out"]
    assert runs.flowrl("evaluate-rewards", path, *words) == 0
    text = (tmp_path / "out" / "evaluation.html").read_text()
    assert "<script" not in text and "&lt;script&gt;" in text and "<gone>" not in text
    assert "<i>s" not in text and "&lt;i&gt;s" in text
    assert "<b>y" not in text and text.count("&lt;b&gt;y") > 5
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    reward = found["rewards"]["<b>y</b>"]
    assert reward["unscored_pairs"] == 1 and reward["accuracy"]["half"]["n"] == 2
    assert reward["accuracy"]["half"]["value"] == 0.5
    assert list(found["dataset"]["broken"]) == ["<gone>.png"]
    assert any("no verdict on 1 of 3 pairs" in sentence for sentence in found["sentences"])


def test_mistakes_are_one_sentence(tmp_path, capsys):
    for words, said in (
        ([], "no rewards; name some with --rewards"),
        (["--rewards", "shaps"], "did you mean 'shapes'"),
        (["--rewards", "shapes", "--judges", "shapes"], "also among the rewards"),
        (["--rewards", "shapes", "--level", "1"], "must be between 0 and 1"),
        (["--rewards", "shapes", "--layout", "pick"], "'pick' is not known"),
        (["--rewards", "shapes", "--frames", "0"], "--frames must be at least 1"),
        (["--rewards", "shapes", "--prompts", "0"], "--prompts must be at least 1"),
        (["--rewards", "shapes", "--robust", "-1"], "--robust must be at least 0"),
        (["--rewards", "shapes", "--seed", "-1"], "--seed must be at least 0"),
    ):
        assert runs.flowrl("evaluate-rewards", PAIRS, *words) == 2
        assert said in capsys.readouterr().err
    rows = [{"prompt": p, "a": "x.png", "b": "y.png", "label": "a"} for p in ("p", "q")]
    path = write(tmp_path, rows, {})  # files that several samples share
    assert runs.flowrl("evaluate-rewards", path, "--rewards", "brightness") == 2
    said = capsys.readouterr().err
    assert "no sample can be read: x.png: no such file; paths begin at" in said


def test_outputs_are_checked_before_anything_is_scored(tmp_path, capsys, monkeypatch):
    def never(*_: object) -> None:
        raise AssertionError("scored before --out was checked")

    monkeypatch.setattr("flowrl.evaluation.reward_evaluation.scores", never)
    monkeypatch.setattr("flowrl.evaluation.scoring.scores", never)
    taken = tmp_path / "taken"
    taken.write_text("")
    images = tmp_path / "images"
    images.mkdir()
    Image.new("RGB", (4, 4)).save(images / "a_red_circle.png")
    for words in (
        ["evaluate-rewards", PAIRS, "--rewards", "brightness"],
        ["score", images, "--rewards", "brightness"],
    ):
        for out in (taken, taken / "below"):
            assert runs.flowrl(*words, "--out", out) == 2
            assert "is a file" in capsys.readouterr().err
    for out, why in ((tmp_path / "missing" / "x.jsonl", "no folder"), (images, "is a folder")):
        assert runs.flowrl("suites", "shapes", "--out", out) == 2
        assert why in capsys.readouterr().err
        with pytest.raises(UserError, match=why):
            evaluate_weights(EvaluateArguments(tmp_path, out=out), [])
    assert taken.read_text() == ""


def test_a_judge_that_likes_what_it_sees_first_is_found_out(preferences):
    """It says 0.9 or 0.3, or 0.6 of equal ones, for whoever stands first: a lean of 0.1."""
    given = EvaluateRewards(PAIRS, chunk=50)
    better = ByScore(load_reward("shapes"))

    def judge(samples, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        verdict = better(samples, a, b)
        return torch.where(verdict == 0.5, 0.6, 0.3 + 0.6 * verdict)

    gallery = Gallery(preferences.items)
    asked = judge_pairs("biased", judge, 0.0, preferences, gallery, given)
    resamples = Resamples.draw(preferences.clusters, 200, 0.99, 0)
    ties = headline(preferences, None)
    found = results(preferences, [asked], resamples, ties)
    judged = found["rewards"]["biased"]
    assert judged["position"]["toward_first"] == pytest.approx(0.1, abs=1e-6)
    tied = (preferences.label == 0.5).mean()  # where it cannot tell, the first wins both times
    assert judged["position"]["to_first"] == pytest.approx(tied)
    assert judged["accuracy"]["excluded"].value == pytest.approx(1 - NOISE)
    # both orders cancel the lean, so that its ties are ties; asked once it never says tie
    assert judged["accuracy"]["half"].value == pytest.approx((351 + 25) / 415)
    assert judged["accuracy"]["one_order"].value == pytest.approx((351 + 25 / 2) / 415)
    assert judged["cost"]["calls"] <= 2 * len(preferences.a)
    said = " ".join(sentences(found | {"sentences": []}))
    assert "biased favours the first position by 10.0 %" in said


def test_ranked_data_has_correlations():
    found = load_preferences(PAIRS.parent / "ranks.json", ReadOptions(prompts=20))
    gallery = Gallery(found.items)
    rows = range(len(found.items))
    from flowrl.evaluation.measure import Cost
    from flowrl.evaluation.reward_report import RewardResult

    asked = []
    for name, sign in (("shapes", 1), ("against", -1)):
        score = sign * scores(name, load_reward("shapes"), gallery, rows, 64)[0]
        margin = score[found.a] - score[found.b]
        asked.append(RewardResult(name, margin, Cost(0.0, 1, None), 0.0, score=score))
    told = results(found, asked, Resamples.draw(found.clusters, 100, 0.9, 0), "excluded")
    assert told["rewards"]["shapes"]["rank"]["kendall"].value == pytest.approx(1)
    assert told["rewards"]["against"]["rank"]["spearman"].value == pytest.approx(-1)
    assert told["rewards"]["shapes"]["rank"]["groups"] == 20
    said = {s.split()[0]: s for s in sentences(told) if "agrees with people" in s}
    assert "It prefers the samples that people reject" in said["against"]
    assert "It prefers" not in said["shapes"] and "guessing" not in said["shapes"]
    difference = told["differences"][0]
    assert (difference["first"], difference["value"]) == ("shapes", 1.0)
    assert headline(found, None) == "excluded" and headline(found, "half") == "half"


def test_a_handle_is_named(tmp_path):
    """`colour` pays for saturation, so `saturate` must stand in the findings."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(24):
        for side in "ab":
            values = 128 + rng.normal(0, 12, 3) + rng.normal(0, 4, (16, 16, 3))
            image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
            image.save(tmp_path / f"{i}{side}.png")
        rows.append({"prompt": f"p{i}", "a": f"{i}a.png", "b": f"{i}b.png", "label": i % 2})
    path = write(tmp_path, rows, {})
    words = ["--rewards", "colour", "--out", tmp_path / "out", "--resamples", 200]
    assert runs.flowrl("evaluate-rewards", path, *words) == 0
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    said = [
        s for s in found["sentences"] if s.startswith("Edits raise colour, in units of its spread")
    ]
    assert len(said) == 1 and re.search(r"saturate by \d\.\d\d \(\d+ %\)", said[0])


def test_the_rows_to_change_are_whole_groups(preferences):
    rows = robust_rows(preferences, 7, 0)
    groups = {preferences.items[row].group for row in rows}
    assert 3 <= len(groups) <= 7 and rows == sorted(rows)
    assert all(
        (item.group in groups) == (row in set(rows)) for row, item in enumerate(preferences.items)
    )
    assert robust_rows(preferences, 0, 0) == []


def test_numbers_become_json():
    tree = {"x": float("nan"), "y": (np.float64(1), np.int64(2)), "z": float("inf"), "w": "s"}
    assert plain(tree) == {"x": None, "y": [1.0, 2], "z": None, "w": "s"}


def verdicts_of(preferences, seed: int, right: float) -> np.ndarray:
    """Margins that name people's winner in this share of the pairs."""
    wrong = np.random.default_rng(seed).random(len(preferences.a)) >= right
    return np.where(wrong, -1.0, 1.0) * (preferences.label - 0.5)


def report_on(preferences, taste: RewardResult, ties: Ties = "half") -> dict:
    """What the report says of a fitted reward beside one that is right in 7 of 10 pairs."""
    beside = RewardResult("plain", verdicts_of(preferences, 1, 0.7), COST, 0.0)
    resamples = Resamples.draw(preferences.clusters, 200, 0.95, 0)
    tree = results(preferences, [taste, beside], resamples, ties)
    return {**tree, "sentences": sentences(tree)}


def fitted_to(preferences, share: float, seen_right: float, unseen_right: float) -> RewardResult:
    """A reward that was fitted to votes on the first prompts; it is right in so many pairs of
    these, and of the others."""
    seen = preferences.cluster < share * preferences.clusters
    margin = np.where(
        seen,
        verdicts_of(preferences, 2, seen_right),
        verdicts_of(preferences, 3, unseen_right),
    )
    score = np.zeros(len(preferences.items))
    return RewardResult("taste", margin, COST, 0.0, score=score, seen=seen)


@pytest.mark.parametrize("ties", ["half", "excluded", "calibrated"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_pairs_of_prompts_that_a_fit_has_seen_move_no_number_that_tests_it(
    share, ties, preferences
):
    """Whatever it says of them: accuracy, categories, calibration, differences, and its agreement
    with people."""
    good, bad = (
        report_on(preferences, fitted_to(preferences, share, right, 0.6), ties)
        for right in (1.0, 0.0)
    )
    assert good["rewards"]["taste"]["seen"]["accuracy"].value > 0.9
    assert bad["rewards"]["taste"]["seen"]["accuracy"].value < 0.2
    for name in ("accuracy", "categories", "calibration", "tie_threshold"):
        one, other = (tree["rewards"]["taste"][name] for tree in (good, bad))
        assert str(one) == str(other), name
    assert str(good["differences"]) == str(bad["differences"])
    assert str(good["agreement"]["share"][0]) == str(bad["agreement"]["share"][0])
    accuracy = good["rewards"]["taste"]["accuracy"][ties]
    assert accuracy.n == (0 if share == 1 else accuracy.n) and not accuracy.value > 0.7


@pytest.mark.parametrize(("share", "unseen_right", "says", "never"), [
    (0.0, 1.0, ["It is significantly better than plain on the same pairs."], "fitted to"),
    (0.5, 1.0, ["pairs of prompts that neither was fitted to.",
                "taste was fitted to votes on the prompts of"], "on the same pairs"),
    (0.5, 0.5, ["plain agrees with people on", "these are left out of its accuracy, since its "
                "agreement there (100.0 %) is no test."], "taste is significantly better"),
    (1.0, 0.0, ["where its agreement (100.0 %) is no test: it has no accuracy here.",
                "No pair tests both it and taste, so they cannot be compared."], "taste agrees"),
])  # fmt: skip
def test_no_sentence_praises_a_fit_for_prompts_that_it_has_seen(
    share, unseen_right, says, never, preferences
):
    untied = replace(preferences, label=np.where(preferences.label == 0.5, 1.0, preferences.label))
    said = report_on(untied, fitted_to(untied, share, 1.0, unseen_right))["sentences"]
    for sentence in says:
        assert any(sentence in line for line in said), said
    assert not any(never in line for line in said), said


ONLY_TEXTS = """
from rewards.perception.media import expect

def of_texts(samples):
    expect(samples, "of_texts", "text")
    return [float(len(text)) for text in samples.media]
"""


@pytest.mark.parametrize("reward", ["{name: length, most: 20}", "of_texts.py:of_texts"])
@pytest.mark.parametrize("command", ["evaluate-rewards", "score"])
def test_a_reward_of_texts_says_once_that_it_was_given_images(
    command, reward, tmp_path, monkeypatch, capsys
):
    (tmp_path / "of_texts.py").write_text(ONLY_TEXTS)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a red square.png")
    monkeypatch.chdir(tmp_path)
    data = PAIRS if command == "evaluate-rewards" else tmp_path
    assert runs.flowrl(command, data, "--rewards", reward, "--out", tmp_path / "out") == 2
    said = capsys.readouterr()
    assert (said.out + said.err).count("scores text; it was given images") == 1
