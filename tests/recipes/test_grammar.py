"""Parts of every recipe by NAME, `{name: NAME, ...settings}` or FILE.py:NAME."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import flowrl as package
from flowrl.algorithm import Algorithm
from flowrl.credit.success import PassAtK
from flowrl.errors import UserError
from flowrl.losses.divergence import TrustRegion
from flowrl.losses.ratio import Surrogate
from flowrl.recipes import RECIPES
from flowrl.session.start_record import StartRecord
from flowrl.settings import recipe_kind
from flowrl.settings.file import older_names
from flowrl.settings.parts.own_parts import parts_written
from flowrl.settings.read import dump, override, run_from
from samplers import CPS, Window
from tests.recipes.test_pins import described
from tests.support.runs import flowrl, lines

MINE = '''
from dataclasses import dataclass

from flowrl.credit.values import by_column
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from samplers import FlowSDE


@dataclass(frozen=True)
class MyCredit:
    """Values less half of the group's mean."""

    share: float = 0.5

    def __call__(self, credit, context):
        rule = lambda value, mask: value - self.share * value.mean(1, keepdim=True)
        return by_column(credit, context, rule)


@dataclass(frozen=True, kw_only=True)
class MyLoss(Surrogate):
    pass


@dataclass(frozen=True)
class MyLikelihood(Transition):
    pass


@dataclass(frozen=True)
class MyKernel(FlowSDE):
    pass
'''
REST = {
    "model": {"pipeline": "flowrl/demo/shapes-sd3", "lora": None,
              "call": {"max_sequence_length": 1}},
    "prompts": {"train": "configs/prompts/shapes_train.jsonl", "per_iteration": 2},
    "rewards": [{"name": "shapes", "kind": "strict"}],
    "train": {"iterations": 1, "lr": 1e-4},
    "track": {"images": 0},
}  # fmt: skip
GRPO = {"name": "flow_grpo", "steps": 5, "group": 5}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def made(**recipe: Any) -> Algorithm:
    return run_from({"recipe": recipe, **REST}, "x").recipe.algorithm()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_parts_that_it_shows(name: str) -> None:
    """What `flowrl recipes NAME` prints, put into a run's file as YAML, is the recipe again."""
    shown = yaml.safe_dump(parts_written(RECIPES[name]()))
    again = recipe_kind(name)(name=name, **yaml.safe_load(shown)).algorithm()
    want, got = described(RECIPES[name]()), described(again)
    trackers = [each["Algorithm"].pop("tracker") for each in (want, got)]
    assert got == want and [bool("NoTracker" in str(t)) for t in trackers].count(True) in (0, 2)


@pytest.mark.quick_cases("all own")
@pytest.mark.long
@pytest.mark.parametrize(
    "parts",
    [
        {"advantage": {"name": "pass_at_k", "k": 4}},
        pytest.param({"advantage": "mine.py:MyCredit"}, marks=pytest.mark.slow),
        {"advantage": [{"name": "mine.py:MyCredit", "share": 0.9}, "clip"],
         "likelihood": "mine.py:MyLikelihood", "kernel": {"name": "mine.py:MyKernel", "eta": 0.5},
         "loss": "mine.py:MyLoss"},
        pytest.param(
            {"plan": {"name": "window", "size": 1}, "kernel": {"name": "cps", "eta": 0.8},
             "likelihood": {"ratio": "cps"},
             "loss": {"name": "surrogate", "low": 0.1, "high": 0.2}}, marks=pytest.mark.slow),
        {"likelihood": {"means": True}, "loss": "trust_region"},
    ],
    ids=["pass_at_k", "own credit", "all own", "named", "trust region"],
)  # fmt: skip
def test_an_image_recipe_trains_with_parts_from_yaml(here: Path, capsys, parts: dict) -> None:
    (here / "run.yaml").write_text(yaml.safe_dump({"recipe": {**GRPO, **parts}, **REST}))
    assert flowrl("train", "run.yaml", "--folder", "run") == 0, capsys.readouterr().err
    assert lines(here / "run")[-1]["ratio"] == pytest.approx(1, abs=1e-4)
    record = StartRecord.read(next((here / "run" / "checkpoints").iterdir()))
    assert record is not None
    assert ("mine.py" in {Path(name).name for name in record.sources}) == ("mine.py" in str(parts))
    assert flowrl("train", "--resume", "run", "--train.iterations", "2") == 0
    assert "recipe" not in capsys.readouterr().out.split("changed since")[-1].split("\n")[0]


@pytest.mark.long
def test_python_and_the_command_line_say_the_same() -> None:
    credit = {"name": "pass_at_k", "k": 4}
    want = made(**GRPO, advantage=credit)
    assert want.transforms == (PassAtK(4),) and want.loss.anchors[0].weight == 0.04
    of_python = package.recipe("flow_grpo", steps=5, group=5, advantage=credit)
    assert run_from({"recipe": of_python, **REST}, "x").recipe.algorithm() == want
    live = package.recipe("flow_grpo", steps=5, group=5, advantage=PassAtK(4))
    assert dump(run_from({"recipe": live, **REST}, "x"))["recipe"]["advantage"] == credit
    plain = run_from({"recipe": GRPO, **REST}, "x")
    words = ["--recipe.advantage.name", "pass_at_k", "--recipe.advantage.k", "4"]
    assert override(plain, words).recipe.algorithm() == want
    short = override(plain, ["--recipe.loss.low", "0.1", "--recipe.plan.kernel.eta", "0.5"])
    changed = short.recipe.algorithm()
    assert (changed.loss.low, changed.loss.high, changed.plan.kernel.eta) == (0.1, 1e-4, 0.5)


def test_a_new_part_keeps_what_both_have() -> None:
    window = made(**GRPO, plan={"name": "window", "size": 2, "kernel": {"name": "cps"}}).plan
    assert isinstance(window, Window) and window.group == 5 and window.kernel == CPS()
    region = made(**GRPO, kl=0.5, likelihood={"means": True}, loss={"name": "trust_region"}).loss
    assert isinstance(region, TrustRegion) and region.anchors[0].weight == 0.5
    nft = made(name="nft", kl=0.5, loss={"name": "surrogate", "low": 0.1, "high": 0.1}).loss
    assert isinstance(nft, Surrogate) and nft.anchors[0].weight == 0.5


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"advantage": "pass_at_k"}, "advantage: pass_at_k needs the setting 'k'"),
        ({"advantage": "pass_at_kk"}, "recipe.advantage: 'pass_at_kk' is not known; did you mean"),
        ({"loss": {"name": "surrogate", "lo": 1}}, "surrogate: 'lo' is not known; did you mean"),
        ({"loss": {"name": "surrogate", "low": "x"}}, "loss: surrogate: low: "),
        ({"loss": "nft"}, "use the Matching likelihood"),
        ({"loss": {"name": "surrogate"}, "plan": 3}, "recipe.plan: "),
        (
            {"advantage": "leave_one_out", "scale": "group"},
            "scale has no effect, since",
        ),
        (
            {"kernel": "ddim", "eta": 0.3},
            "eta has no effect, since",
        ),
        ({"plan": {"group": 10**9}}, "samples per prompt; at most"),
        ({"likelihood": "token"}, "needs a text plan"),
    ],
)
def test_what_does_not_fit_is_one_sentence(recipe: dict, words: str) -> None:
    with pytest.raises(UserError) as refused:
        made(**GRPO, **recipe)
    assert words in str(refused.value) and "\n" not in str(refused.value)


FLAT = {
    "name": "text", "length": 8, "group": 4, "plan": "forks", "roots": 3, "top": 1, "by": "entropy",
    "advantage": "tempo", "loss": "gppo", "keep_low": 0.5, "ratio": "sequence", "kl": 0.1,
}  # fmt: skip


def test_older_names_are_read_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = {"model": {"language": "a/b"}, "prompts": REST["prompts"], "rewards": ["length"]}
    old = {**model, "recipe": {k: v for k, v in FLAT.items() if k != "group"}}
    run = run_from(old, "old.yaml")
    algorithm = run.recipe.algorithm()
    assert algorithm.plan.roots == 3 and algorithm.plan.forking.by == "entropy"
    assert algorithm.loss.keep_low == 0.5 and algorithm.loss.anchors[0].weight == 0.1
    assert algorithm.likelihood.ratio == "sequence"
    said = capsys.readouterr().err
    assert "are now inside its parts: recipe: {name: text, length: 8, kl: 0.1, plan: {" in said
    assert run_from(dump(run), "again") == run == run_from(old, "old.yaml")
    assert capsys.readouterr().err == ""
    plain = run_from({**model, "recipe": {"name": "text"}}, "x")
    assert override(plain, ["--recipe.low", "0.1"]).recipe.algorithm().loss.low == 0.1
    with pytest.raises(UserError, match=r"recipe\.bound: no chosen part uses it"):
        run_from({**model, "recipe": {"name": "text", "bound": 3.0}}, "x")
    with pytest.raises(UserError, match=r"recipe\.low: this setting of the loss is now inside it"):
        written = {"name": "text", "loss": {"name": "gppo"}, "low": 0.1}
        run_from({**model, "recipe": written}, "x")


def test_renamed_settings_compare_equal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(older_names, "_said", set[str]())  # a process says each once
    own = [{"name": "jpeg"}]
    old = run_from({**REST, "recipe": {"name": "nft", "draws": 3}, "way_rewards": own}, "x")
    new = {"recipe": {"name": "nft", "levels_per_sample": 3}, "intermediate_rewards": own}
    assert old == run_from({**REST, **new}, "x") and dump(old) == dump(
        run_from({**REST, **new}, "x")
    )
    said = capsys.readouterr().err
    assert "recipe.draws is now called recipe.levels_per_sample" in said
    assert "way_rewards is now called intermediate_rewards" in said
    assert override(old, ["--recipe.draws", "5"]).recipe.levels_per_sample == 5  # type: ignore[attr-defined]
    lv = run_from({**REST, "recipe": {"name": "draft_lv", "draws": 3}}, "x").recipe
    assert lv.draws == 3  # type: ignore[attr-defined] # which are noises


def test_an_older_name_lies_over_a_newer_base(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: configs/demo.yaml\nrecipe: {draws: 6}\n")
    from flowrl.settings.read import read_run

    assert read_run(tmp_path / "a.yaml").recipe.levels_per_sample == 6  # type: ignore[attr-defined]
