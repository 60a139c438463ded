"""Recipes and parts of a user's own files: the page's own run, settings, resume, refusals."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from flowrl.errors import UserError
from flowrl.losses.base import RatioLoss
from flowrl.paths import PROJECT
from flowrl.recipes import IMAGE_RECIPES, RECIPES
from flowrl.run.evaluate import start_checks
from flowrl.session.start_record import StartRecord
from flowrl.settings import RunSettings, recipe_kind
from flowrl.settings.read import check_plan, dump, override, run_from
from samplers import Kernel, Plan, Solver
from tests.support.runs import environment, flowrl, lines
from tests.test_docs import examples

PAGE = (PROJECT / "docs" / "extending.md").read_text()
PARTS = '''
from dataclasses import dataclass

from flowrl.algorithm import Algorithm
from flowrl.likelihoods.token import Token
from samplers.completions import TextPlan
from samplers.solvers import Plain


@dataclass(frozen=True)
class Halved(Plain):
    """Euler's step in two halves: a second evaluation in the middle."""

    at: float = 0.5

    def evaluations(self, sigma_next: float) -> int:
        return 2

    def __call__(self, at, past):
        middle = at.sigma - self.at * (at.sigma - at.sigma_next)
        x = at.x - (at.sigma - middle) * at.v
        return x - (middle - at.sigma_next) * at.velocity(x, middle), None


@dataclass(frozen=True)
class Pairs:
    def __call__(self, levels, iteration, seed):
        return (TextPlan(len(levels) - 1, (2,)),)


@dataclass(frozen=True)
class Whole(Token):
    ratio: str = "sequence"


class Thawed:
    pass


@dataclass(frozen=True)
class Unbound:
    def __call__(self, x, v, sigma, sigma_next):
        return x


@dataclass(frozen=True)
class Loose:
    def __call__(self, x, v, sigma, sigma_next):
        return x, sigma

    def bound(self, sigmas):
        return self


@dataclass(frozen=True)
class Broken(Loose):
    def bound(self, sigmas):
        return 1 / 0


def no_algorithm(*, steps: int = 4):
    return steps


def raises(*, steps: int = 4):
    return {}["no"]


def untyped(*, steps=4) -> Algorithm: ...


def bare(*, steps: int) -> Algorithm: ...


def taken(*, algorithm: int = 4) -> Algorithm: ...


def collects(**settings: int) -> Algorithm: ...
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a user, with the page's examples as files and PARTS as parts.py."""
    monkeypatch.chdir(tmp_path)
    for code in examples().values():
        named = re.match(r"# (\w+\.py), used in YAML", code)
        if named is not None:
            (tmp_path / named[1]).write_text(code)
    (tmp_path / "credit.py").write_text(examples()["An advantage transform"])
    (tmp_path / "losses.py").write_text(examples()["A loss"])
    (tmp_path / "planners.py").write_text(examples()["A plan"])
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


def run(text: bool = False, **recipe: object) -> RunSettings:
    model = {"language": "a/b"} if text else {"pipeline": "a/b"}
    rest = {"prompts": {"train": "p.txt"}, "rewards": ["brightness"]}
    made = run_from({"recipe": recipe, "model": model, **rest}, "mine.yaml")
    assert run_from(dump(made), "again") == made
    return made


SHORT = [
    "--recipe.steps", "4", "--recipe.group", "4", "--prompts.per_iteration", "2",
    "--train.iterations", "1", "--track.images", "0",
]  # fmt: skip


def pages_run(folder: Path) -> str:
    (config,) = re.findall(r"```yaml\n(# mine.yaml.*?)```", PAGE, re.DOTALL)
    (folder / "mine.yaml").write_text(config)
    return "mine.yaml"


@pytest.mark.slow
@pytest.mark.long
def test_the_pages_three_files_train(here: Path, capsys) -> None:
    """A stranger's reward, kernel and recipe, each in a file of its own: the page's own run."""
    assert flowrl("train", pages_run(here), "--folder", "run", *SHORT) == 0
    out = capsys.readouterr().out
    (floor,) = re.findall(r"recomputed, largest difference (\S+)", out)
    assert float(floor) < 1e-5 and "reward warmth" in out
    assert lines(here / "run")[-1]["ratio"] == pytest.approx(1, abs=1e-5)
    record = StartRecord.read(next((here / "run" / "checkpoints").iterdir()))
    assert record is not None
    files = {Path(name).name for name in record.sources}
    assert files == {"my_recipe.py", "my_kernel.py", "my_rewards.py"}


@pytest.mark.slow
def test_the_pages_run_on_two_processes_resumes_and_says_what_changed(here: Path, capsys) -> None:
    config = PROJECT / "configs" / "accelerate" / "ddp_cpu_2.yaml"
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(config), "-m", "flowrl"]
    words = ["train", pages_run(here), "--folder", "run", *SHORT]
    paths = {"PYTHONPATH": str(PROJECT)}
    subprocess.run([sys.executable, *launch, *words], env=environment() | paths, check=True)
    assert lines(here / "run")[-1]["ratio"] == pytest.approx(1, abs=1e-5)
    (here / "my_kernel.py").write_text((here / "my_kernel.py").read_text() + "\n# changed\n")
    assert flowrl("train", "--resume", "run", "--train.iterations", "2") == 0
    out = capsys.readouterr().out
    assert "the source " in out and "my_kernel.py" in out
    settings = yaml.safe_load((here / "run" / "run.yaml").read_text())
    settings["recipe"] = {"name": "flow_grpo"}
    (here / "run" / "run.yaml").write_text(yaml.safe_dump(settings))
    assert flowrl("train", "--resume", "run") == 2
    assert "recipe.name cannot change within a run" in capsys.readouterr().err


def test_processes_with_different_files_are_refused(here: Path, monkeypatch) -> None:
    made = run(name="my_recipe.py:my_recipe")
    start_checks.check_same_sources(made)
    monkeypatch.setattr(
        start_checks, "gather_object", lambda mine: [*mine, {"my_recipe.py": "another"}]
    )
    with pytest.raises(UserError, match=r"my_recipe.py: these files differ between processes"):
        start_checks.check_same_sources(made)


def test_settings_of_an_own_recipe_are_those_of_its_function(here: Path, capsys) -> None:
    name = "my_recipe.py:my_recipe"
    made = run(name=name, steps=6, group=4)
    algorithm = made.algorithm()
    assert (algorithm.steps, algorithm.group, algorithm.plan.kernel.eta) == (6, 4, 0.7)  # type: ignore[union-attr]
    own = override(made, ["--recipe.kernel", "my_kernel.py:FadingSDE", "--recipe.clip", "1e-3"])
    assert type(own.algorithm().plan.kernel).__name__ == "FadingSDE"  # type: ignore[union-attr]
    other = override(made, ["--recipe.name", "flow_grpo"])
    assert (other.recipe.name, other.recipe.steps) == ("flow_grpo", 6)  # type: ignore[attr-defined]
    back = override(other, ["--recipe.name", "mix_grpo"])
    assert back.algorithm().plan.kernel.eta == 0.7  # type: ignore[union-attr]
    assert re.search(
        r"mix_grpo has no .*kernel flow_sde, kl_form: left out", capsys.readouterr().err
    )
    assert override(back, ["--recipe.name", "flow_grpo"]).recipe.kernel == "flow_sde"  # type: ignore[attr-defined]
    assert override(own, ["--recipe.name", "mix_grpo"]).recipe.kernel == FADING  # type: ignore[attr-defined]
    assert flowrl("recipes", name) == 0
    out = capsys.readouterr().out
    assert "A leave-one-out baseline" in out and re.search(r"kernel +null +\(null or FILE", out)


@pytest.mark.parametrize("name", IMAGE_RECIPES)
def test_every_recipe_takes_an_own_kernel_or_solver(here: Path, name: str) -> None:
    fields = recipe_kind(name).model_fields
    places = {"kernel": "my_kernel.py:FadingSDE", "solver": "parts.py:Halved"}
    own = {part: place for part, place in places.items() if part in fields}
    if not own:  # a plan of plain steps, whose solver is not a choice
        assert IMAGE_RECIPES[name]().reward_gradient
        return
    more = {"most": 1e-7} if name == "flow_dppo" else {}  # a divergence bound for its noise
    plans = (
        run(False, name=name, **own, **more).recipe.algorithm().plans
    )  # opd also needs a teacher
    found = {type(part).__name__ for plan in plans for part in (plan.kernel, plan.solver)}  # type: ignore[union-attr]
    assert {place.split(":")[1] for place in own.values()} <= found
    assert isinstance(plans[0], Plan)


def test_an_own_part_has_settings_of_its_own(here: Path) -> None:
    kernel = {"name": "my_kernel.py:FadingSDE", "eta": 0.25}
    made = run(name="grpo_guard", steps=4, kernel=kernel).algorithm().plans[0].kernel  # type: ignore[union-attr]
    assert isinstance(made, Kernel) and made.eta == 0.25  # type: ignore[attr-defined]
    solver = run(name="nft", solver={"name": "parts.py:Halved", "at": 0.25}).algorithm()
    assert isinstance(solver.plans[0].solver, Solver)  # type: ignore[union-attr]
    assert solver.plans[0].evaluations == 24 * 20  # type: ignore[union-attr]


def test_texts_take_an_own_advantage_and_loss_by_name(here: Path) -> None:
    loss = {"name": "losses.py:SquaredRatio", "strength": 2.0}
    made = run(True, name="text", advantage="credit.py:Range", loss=loss).algorithm()
    assert [type(t).__name__ for t in made.transforms] == ["Range"]
    assert isinstance(made.loss, RatioLoss) and made.loss.strength == 2.0  # type: ignore[attr-defined]
    assert made.likelihood == RECIPES["text"]().likelihood
    with_kl = run(True, name="text", loss=loss, kl=0.1).algorithm().loss
    assert with_kl.anchors[0].weight == 0.1 and with_kl.strength == 2.0  # type: ignore[attr-defined]
    own = run(True, name="text", likelihood="parts.py:Whole", loss="losses.py:SquaredRatio")
    assert own.algorithm().likelihood.ratio == "sequence"  # type: ignore[attr-defined]
    whole = {"name": "parts.py:Whole", "kl_form": "k2"}
    assert run(True, name="text", likelihood=whole).algorithm().likelihood.kl_form == "k2"  # type: ignore[attr-defined]
    images = {"name": "planners.py:EvenSteps", "kernel": {"eta": 0.5}, "group": 2}
    with pytest.raises(UserError, match="Token"):  # a plan of images
        run(True, name="text", length=4, plan=images).algorithm()
    texts = "parts.py:Pairs"
    assert run(True, name="text", length=4, plan=texts).algorithm().group == 2
    with pytest.raises(UserError, match="top_p has no effect, since"):
        run(True, name="text", plan=texts, top_p=0.9).algorithm()


FADING = "my_kernel.py:FadingSDE"
REFUSED = [
    ({"name": "my_recipe.py:my_recipe", "stepz": 3}, r"recipe.stepz: .*did you mean 'steps'"),
    ({"name": "my_recipe.py:my_recipe", "steps": "a"}, "recipe.steps: input should be a valid int"),
    (
        {"name": "my_recipe.py:mine"},
        "recipe.name: my_recipe.py has no function or class 'mine'; choose one of my_rec",
    ),
    ({"name": "my_recipe.py"}, "names no function; write FILE.py:FUNCTION"),
    ({"name": "nowhere.py:f"}, "recipe.name: no such file: nowhere.py; paths are relative to"),
    ({"name": "parts.py:no_algorithm"}, "must return a flowrl.algorithm.Algorithm, not int"),
    ({"name": "parts.py:raises"}, r"recipe: parts.py:raises raised KeyError: 'no' .parts.py, line"),
    ({"name": "parts.py:untyped"}, "the parameter 'steps' has no type: write it as"),
    ({"name": "parts.py:bare"}, "the parameter 'steps' has no default"),
    ({"name": "parts.py:taken"}, "'algorithm' cannot be a setting: choose another name"),
    ({"name": "parts.py:collects"}, "'settings' collects arguments, but a setting needs a name"),
    ({"name": "flow_grpo", "kernel": {"name": FADING, "etta": 1}}, "recipe.kernel: .*mean 'eta'"),
    ({"name": "flow_grpo", "kernel": {"name": FADING, "eta": "x"}}, "eta: expected a valid number"),
    (
        {"name": "flow_grpo", "kernel": {"nam": FADING}},
        "or FILE.py:NAME, not",
    ),
    (
        {"name": "flow_grpo", "kernel": FADING, "eta": 0.1},
        "eta has no effect, since",
    ),
    (
        {"name": "flow_grpo", "kernel": "wn"},
        r"did you mean 'wan'\? \(a kernel of your own must be given as FILE",
    ),
    (
        {"name": "dance_grpo", "kernel": "wann"},
        "'wann' is not known; .*a kernel of your own must be given as FI",
    ),
    ({"name": "flow_grpo", "kernel": "parts.py:Thawed"}, r"needs @dataclass\(frozen=True\)"),
    ({"name": "flow_grpo", "kernel": "parts.py:Unbound"}, "has no bound; a kernel is a frozen"),
    ({"name": "flow_grpo", "kernel": "parts.py:Loose"}, r"must return samplers.Gaussian\(mean"),
    ({"name": "flow_grpo", "kernel": "parts.py:Broken"}, "trial call as a kernel .ZeroDivisionErr"),
    ({"name": "flow_grpo", "kernel": "parts.py:bare"}, "is a function, but a kernel is a frozen"),
    ({"name": "nft", "solver": FADING}, "has no evaluations, memory, random; a solver is"),
    (
        {"name": "awm", "solver": "parts.py:Halved", "noise": 0.1},
        "noise has no effect, since this run replaces the recipe's solver",
    ),
]


@pytest.mark.parametrize(("recipe", "message"), REFUSED)
def test_what_is_no_part_is_refused_in_a_sentence(here: Path, recipe: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_plan(run(**recipe))
    assert "\n" not in str(caught.value)


def test_a_setting_of_a_base_that_a_part_replaces_is_taken_back_as_the_message_says() -> None:
    """clip is the loss's alone, whatever else the run replaces, and a base cannot lose it."""
    own: dict = {
        "advantage": ["sum", "standardize"],
        "loss": {"name": "surrogate", "low": 0.1, "high": 0.2},
    }
    with pytest.raises(UserError, match="replaces the recipe's loss: leave it out") as refused:
        run(name="flow_grpo", clip=0.5, **own).algorithm()
    said = re.search(r"where a base sets it: clip: ([^,]+),", str(refused.value))
    assert said is not None
    run(name="flow_grpo", clip=float(said[1]), **own).algorithm()


def test_an_own_kernel_by_option_leaves_the_files_eta_out(here: Path, capsys) -> None:
    published = run(name="flow_grpo", eta=0.3)
    own = override(published, ["--recipe.kernel", f"{{name: {FADING}, eta: 0.5}}"])
    assert own.algorithm().plans[0].kernel.eta == 0.5  # type: ignore[union-attr]
    assert "nothing reads recipe.eta any more: 0.3 is left out" in capsys.readouterr().err
    with pytest.raises(UserError, match="eta has no effect, since"):
        override(published, [f"--recipe.kernel={FADING}", "--recipe.eta", "0.4"]).algorithm()
    assert override(published, ["--recipe.kernel", "wan"]).recipe.eta == 0.3  # type: ignore[attr-defined]


def test_an_own_kernel_does_what_it_says(here: Path) -> None:
    kernel = run(name="flow_grpo", kernel=FADING).algorithm().plans[0].kernel  # type: ignore[union-attr]
    assert kernel is not None
    x = v = torch.zeros(1, 3)
    step = kernel(x, v, torch.tensor([0.8]), torch.tensor([0.55]))
    assert float(step.std) == pytest.approx(0.7 * 0.8 * 0.25**0.5)
