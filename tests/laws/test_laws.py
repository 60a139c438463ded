"""The kit of laws: on every part of flowrl, on recipes, and on parts whose declaration is false."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from flowrl.credit.choices import AnyPlanner
from flowrl.credit.values import Credit, Transform
from flowrl.errors import UserError
from flowrl.laws import (
    check_kernel,
    check_laws,
    check_loss,
    check_planner,
    check_scoring,
    check_transform,
)
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.transition import Transition
from flowrl.losses.base import Anchor, Objective, RatioLoss
from flowrl.losses.off_policy import REC
from flowrl.losses.ratio import Surrogate
from flowrl.recipes import RECIPES
from flowrl.settings.parts.names import parts_named
from rewards import Samples, load
from samplers import (
    CPS,
    Chain,
    FeynmanKac,
    FlowSDE,
    Gaussian,
    Kernel,
    Ode,
    Plan,
    Thinning,
    steps_of,
)
from samplers.completions import TextPlan
from samplers.forks import Forking
from samplers.kernels import coefficients, is_affine
from samplers.routes.drift import RewardDrift
from samplers.routes.guiding import RewardGuide
from tests.support import runs

LEVELS = [1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0]
KERNEL = FlowSDE()
REQUIRED: dict[str, dict[str, Any]] = {
    "table_sde": {"table": (0.3, 0.3, 0.2, 0.2, 0.1)},
    "looking": {"otherwise": Ode(4)},
    "thinned": {"otherwise": Ode(4), "how": Thinning((1,), (4,), 6)},
    "scattered": {"kernel": KERNEL, "group": 4},
    "merged": {"kernel": KERNEL},
    "granular": {"kernel": KERNEL, "at": (0, 1)},
    "guided": {"otherwise": Chain(KERNEL, 4), "guide": RewardGuide(RewardDrift(1.0))},
    "particled": {
        "otherwise": Ode(4), "kernel": KERNEL, "group": 4, "how": FeynmanKac((1,)), "first": 1,
        "stop": 8,
    },
    "chain": {"kernel": KERNEL, "group": 4},
    "window": {"kernel": KERNEL, "group": 4, "size": 2},
    "fork": {"kernel": KERNEL},
    "tree": {"kernel": KERNEL, "at": (0, 2)},
    "last_steps": {"group": 4},
    "one_of_steps": {"group": 4},
    "two_leaps": {"group": 4},
    "some_steps": {"group": 4},
    "completions": {"group": 4},
    "segments": {"roots": 2, "branch": 2, "at": (2,)},
    "forks": {"roots": 2, "forking": Forking(2, 2)},
    "scale_steps": {"by": "std"},
    "prune_width": {"keep": "branch"},
    "prompt_weight": {"column": "difficulty"},
    "proxy_gate": {"auxiliary": ("reward",)},
    "diverse": {"distance": "reward"},
    "max_variance": {"keep": 2},
    "pass_at_k": {"k": 2},
    "greedy_baseline": {"samples": 3},
    "penalize": {"weight": 0.1},
    "group_preference": {"group": 4},
    "centred_reward": {"group": 4},
    "surrogate": {"low": 0.2, "high": 0.2},
    "preference": {"beta": 1.0},
    "risk_po": {"bundle": 3},
}  # fmt: skip
UNCHECKED = {"novelty", "prompt_weight"}  # they read a column of a feature


def part(protocol: Any, name: str) -> Any:
    """A part of flowrl, with the settings that it needs."""
    try:
        return parts_named(protocol)[name](**REQUIRED.get(name, {}))
    except TypeError as error:
        raise AssertionError(f"{name}: add the settings that it needs to REQUIRED") from error


@pytest.mark.parametrize("name", parts_named(Kernel))
def test_every_kernel_keeps_the_laws_and_is_affine(name):
    kernel = part(Kernel, name)
    check_kernel(kernel, LEVELS)
    assert is_affine(kernel)


@pytest.mark.parametrize("name", parts_named(AnyPlanner))
def test_every_planner_keeps_the_laws(name):
    check_planner(part(AnyPlanner, name), LEVELS)


@pytest.mark.parametrize("name", parts_named(Transform))
def test_every_transform_keeps_the_laws(name):
    assert check_transform(part(Transform, name)) == (name not in UNCHECKED)


@pytest.mark.parametrize("name", parts_named(Objective))
def test_every_loss_keeps_the_laws(name):
    assert check_loss(part(Objective, name)) == (name not in UNCHECKED)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "joint"])
def test_every_recipe_keeps_the_laws(name):
    """Its parts with the recipe's settings, on its own steps."""
    algorithm = RECIPES[name]()
    levels = [1 - k / algorithm.steps for k in range(algorithm.steps)] + [0.0]
    check_planner(algorithm.plan, levels)
    for plan in algorithm.plans[:2]:
        if isinstance(plan, Plan) and plan.kernel is not None:
            check_kernel(plan.kernel, plan.sigmas)
    names = ("reward", *(() if name != "gardo" else ("aesthetic", "distance")))
    for place, each in enumerate(algorithm.advantage.chain):
        check_transform(each, algorithm.plans[0].columns, algorithm.advantage.chain[:place], names)
    check_loss(algorithm.loss, algorithm.likelihood)


def test_every_reward_of_groups_says_so():
    assert load("win_rate", judge="brightness").per == "group"
    group = load("win_rate", judge="brightness")
    check_scoring("win_rate", group)


@dataclass(frozen=True)
class Clipped:
    """A kernel that clips the predicted clean sample."""

    affine: bool = False

    def __call__(self, x, v, sigma, sigma_next) -> Gaussian:
        at, to = (s.view(-1, *[1] * (x.ndim - 1)) for s in (sigma, sigma_next))
        clean, noise = (x - at * v).clamp(-1, 1), x + (1 - at) * v
        return Gaussian((1 - to) * clean + 0.6 * to * noise, 0.8 * sigma_next)

    def bound(self, sigmas):
        return self


@dataclass(frozen=True)
class Offset(Clipped):
    """Affine, but with a constant: its slopes are not those of unit states."""

    def __call__(self, x, v, sigma, sigma_next) -> Gaussian:
        return Gaussian(x - v + 1, sigma_next)


@dataclass(frozen=True)
class Learned(Clipped):
    def __call__(self, x, v, sigma, sigma_next) -> Gaussian:
        return Gaussian(x - v, sigma_next * (1 + v.flatten(1).mean(1).abs()))


@dataclass(frozen=True)
class Noisy(Clipped):
    def __call__(self, x, v, sigma, sigma_next) -> Gaussian:
        return Gaussian(x - v + torch.randn_like(x), sigma_next)


@dataclass(frozen=True)
class Batched(Clipped):
    def __call__(self, x, v, sigma, sigma_next) -> Gaussian:
        return Gaussian(x - v.mean(0), sigma_next)


@dataclass(frozen=True)
class Tupled(Clipped):
    def __call__(self, x, v, sigma, sigma_next):
        return x - v, sigma_next


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (Clipped(affine=True), "Clipped says affine = True, but its mean is not a x"),
        (Offset(affine=True), "Offset says affine = True"),
        (Learned(), "the std of its steps changes with state or velocity"),
        (Noisy(), "returns another step for the same state"),
        (Batched(), "depends on the other rows"),
        (Tupled(), "must return samplers.Gaussian"),
    ],
)
def test_a_kernel_that_breaks_a_law_is_refused(kernel, says):
    with pytest.raises(UserError, match=says):
        check_kernel(kernel)


def test_an_honest_kernel_keeps_the_laws_and_has_no_coefficients():
    check_kernel(Clipped())
    levels = (torch.tensor([0.5]), torch.tensor([0.4]))
    assert coefficients(Clipped(), *levels) is None
    assert coefficients(CPS(), *levels) is not None


class Squared(RatioLoss):
    homogeneous = True

    def policy(self, log_ratio, evaluations, rows):
        return (log_ratio - rows.advantage).square(), {}


class Detached(Squared):
    homogeneous = False

    def policy(self, log_ratio, evaluations, rows):
        return -rows.advantage * log_ratio.detach(), {}


class Short(Squared):
    def policy(self, log_ratio, evaluations, rows):
        return (-rows.advantage * log_ratio).sum(), {}


class Infinite(Squared):
    def policy(self, log_ratio, evaluations, rows):
        return log_ratio / rows.advantage.sub(rows.advantage), {}


@pytest.mark.parametrize("likelihood", [Transition(), Matching(), Token()])
@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (Squared, "Squared says homogeneous = True, but its values for 0.25 A"),
        (Detached, "do not depend on the trained policy"),
        (Short, "one value per entry"),
        (Infinite, "not finite"),
    ],
)
def test_a_loss_that_breaks_a_law_is_refused(loss, says, likelihood):
    with pytest.raises(UserError, match=says):
        check_loss(loss(), likelihood)


def test_anchors_do_not_end_homogeneity():
    assert check_loss(Surrogate(0.2, 0.2, anchors=(Anchor(0.1),)), Token())
    assert REC().homogeneous and not REC(factor="advantage").homogeneous
    assert not REC(pull=0.1).homogeneous


def fills(credit: Credit, context) -> Credit:
    return Credit(credit.value, torch.ones_like(credit.mask))


def changes(credit: Credit, context) -> Credit:
    credit.value.mul_(2)
    return credit


def leaks(credit: Credit, context) -> Credit:
    return Credit(credit.value + 1, credit.mask)


def draws(credit: Credit, context) -> Credit:
    return Credit(torch.rand_like(credit.value) * credit.mask, credit.mask)


def drops(credit: Credit, context) -> Credit:
    return Credit(credit.value[1:], credit.mask[1:])


def halves(credit: Credit, context) -> Credit:
    return Credit(credit.value / 0 * credit.mask, credit.mask)


def alone(credit: Credit, context):
    return credit.value


def fails(credit: Credit, context):
    return credit.no


@dataclass(frozen=True)
class Fills:
    """Says that it counts samples without a score as 0."""

    keeps_mask: bool = False

    def __call__(self, credit: Credit, context) -> Credit:
        return Credit(credit.value, torch.ones_like(credit.mask))


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (fills, "fills fills masked entries"),
        (Fills(keeps_mask=True), "Fills fills masked entries"),
        (changes, "changes the credit that it is given"),
        (leaks, "value of a masked entry must be 0"),
        (draws, "returns other credit for the same scores"),
        (drops, "a row for every sample"),
        (halves, "not finite"),
        (alone, "must return flowrl.credit.values.Credit"),
        (fails, "fails fails in a trial call as a transform"),
    ],
)
def test_a_transform_that_breaks_a_law_is_refused(transform, says):
    with pytest.raises(UserError, match=says):
        check_transform(transform)


def test_an_honest_filler_runs_but_behind_no_selection():
    assert check_transform(Fills())
    drop = part(Transform, "drop_flat")
    check_transform(Fills(), before=(part(Transform, "standardize"),))
    with pytest.raises(UserError, match="put Fills before DropFlat"):
        check_transform(Fills(), before=(drop,))


class Wrong(Plan):
    """A plan whose nodes are not those of its steps."""

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        return (2, *[4] * (len(self.steps) - 1))


@dataclass(frozen=True)
class Planning:
    """A planner that returns `what`."""

    what: str

    def __call__(self, sigmas, iteration, seed):
        whole = Plan(steps_of(sigmas), roots=4)
        return {
            "none": (),
            "later": (whole,) if iteration < 7 else (),
            "plan": whole,
            "mixed": (whole, TextPlan(4, (2,))),
            "nodes": (Wrong(steps_of(sigmas), roots=4),),
            "ends": (Plan(steps_of(sigmas[1:]), roots=4),),
            "random": (Plan(steps_of(sigmas), roots=int(torch.randint(2, 10**9, ()))),),
            "honest": (whole,),
        }[self.what]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("none", "Planning returned no plan for iteration 0"),
        ("later", "Planning returned no plan for iteration 7"),
        ("plan", "Planning returned a Plan, but a planner returns a tuple"),
        ("mixed", "Planning returned a tuple of Plan, TextPlan"),
        ("nodes", r"returned a Wrong that says it has \(2, 4, .* nodes and a group of 4, but"),
        ("ends", "a plan goes from noise level 0.9 to 0, but"),
        ("random", "two calls return different plans"),
    ],
)
def test_a_planner_that_breaks_a_law_is_refused(what, says):
    with pytest.raises(UserError, match=says):
        check_planner(Planning(what))
    check_planner(Planning("honest"))


def ranked(samples: Samples) -> torch.Tensor:
    """Reads its batch: the place of a sample among all."""
    return samples.media.flatten(1).std(1).argsort().argsort().double()


def within(samples: Samples) -> torch.Tensor:
    """Compares the samples of a group."""
    spread = samples.media.flatten(1).std(1)
    same = samples.group[:, None] == samples.group[None]
    return spread - (same * spread).sum(1) / same.sum(1)


def own(samples: Samples) -> torch.Tensor:
    return samples.media.flatten(1).std(1)


class Said:
    def __init__(self, function, per):
        self.function, self.per = function, per

    def __call__(self, samples: Samples) -> torch.Tensor:
        return self.function(samples)


@pytest.mark.parametrize(
    ("function", "per", "says"),
    [
        (own, "sample", None),
        (own, "group", None),
        (within, "group", None),
        (within, "sample", "says per = 'sample'"),
        (ranked, "group", "may compare samples of one group alone"),
        (ranked, "sample", "says per = 'sample'"),
        (own, "batch", "reward Said: per must be 'sample' or 'group'"),
    ],
)
def test_a_reward_keeps_what_it_says(function, per, says):
    if says is None:
        check_scoring("mine", Said(function, per))
        return
    with pytest.raises(UserError, match=says):
        check_scoring("mine", Said(function, per))


PARTS = """
from dataclasses import dataclass
from functools import cached_property

import torch

from flowrl.credit.values import Credit
from flowrl.losses.base import RatioLoss
from samplers import Gaussian, Plan, steps_of


@dataclass(frozen=True)
class Clips:
    affine: bool = True

    def __call__(self, x, v, sigma, sigma_next):
        at, to = (s.view(-1, *[1] * (x.ndim - 1)) for s in (sigma, sigma_next))
        clean, noise = (x - at * v).clamp(-1, 1), x + (1 - at) * v
        return Gaussian((1 - to) * clean + 0.6 * to * noise, 0.8 * sigma_next)

    def bound(self, sigmas):
        return self


@dataclass(frozen=True)
class Squares(RatioLoss):
    homogeneous: bool = True

    def policy(self, log_ratio, evaluations, rows):
        return (log_ratio - rows.advantage).square(), {}


@dataclass(frozen=True)
class Fills:
    keeps_mask: bool = True

    def __call__(self, credit, context):
        return Credit(credit.value, torch.ones_like(credit.mask))


class Odd(Plan):
    @cached_property
    def nodes(self):
        return (2, *[4] * (len(self.steps) - 1))


@dataclass(frozen=True)
class Plans:
    what: str = "none"

    def __call__(self, sigmas, iteration, seed):
        whole = Plan(steps_of(sigmas), roots=4)
        odd = Odd(steps_of(sigmas), roots=4)
        return {"none": (), "wrong": (odd,), "honest": (whole,)}[self.what]


def batch(samples):
    return samples.media.flatten(1).std(1).argsort().argsort().double()


batch.per = "sample"


def group(samples):
    same = samples.group[:, None] == samples.group[None]
    spread = samples.media.flatten(1).std(1)
    return spread - (same * spread).sum(1) / same.sum(1)


group.per = "group"
"""
FALSE: dict[str, tuple[dict[str, Any], str]] = {
    "a kernel that clips": ({"kernel": {"name": "P:Clips"}}, "Clips says affine = True"),
    "a loss that is not homogeneous": (
        {"loss": {"name": "P:Squares"}}, "Squares says homogeneous = True",
    ),
    "a transform that fills": ({"advantage": ["P:Fills"]}, "Fills fills masked entries"),
    "a planner without plans": ({"name": "nft", "plan": "P:Plans"}, "Plans returned no plan"),
    "a plan with wrong nodes": (
        {"name": "nft", "plan": {"name": "P:Plans", "what": "wrong"}}, "but its steps make",
    ),
    "a reward that reads its batch": ({"reward": "P:batch"}, "says per = 'sample'"),
}  # fmt: skip
HONEST: dict[str, dict[str, Any]] = {
    "a kernel that clips": {"kernel": {"name": "P:Clips", "affine": False}, "kl": 0.1},
    "a loss that is not homogeneous": {"loss": {"name": "P:Squares", "homogeneous": False}},
    "a transform that fills": {
        "advantage": [{"name": "P:Fills", "keeps_mask": False}, "standardize"]
    },
    "a planner with a plan": {"name": "nft", "plan": {"name": "P:Plans", "what": "honest"}},
    "a reward of groups": {"reward": "P:group"},
}


def settings_of(
    tmp_path: Path, given: dict[str, Any], pipeline: Path | None = None
) -> dict[str, Any]:
    """A run of a pipeline, which does not exist unless it is given, with parts of a user's file."""
    (tmp_path / "parts.py").write_text(PARTS)

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: placed(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [placed(inner) for inner in value]
        return (
            str(value).replace("P:", f"{tmp_path / 'parts.py'}:")
            if isinstance(value, str)
            else value
        )

    given = placed(given)
    recipe = {"name": "flow_grpo", "steps": 4, "group": 4} | given
    reward = recipe.pop("reward", "brightness")
    if recipe["name"] == "nft":
        recipe["levels_per_sample"] = 2
    if "plan" in recipe:
        recipe.pop("group")
    tree = runs.tree(pipeline or tmp_path / "no_weights", tmp_path, recipe)
    return tree | {"rewards": [{"name": reward}]}


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("what", FALSE)
def test_a_false_declaration_is_refused_before_weights_load(
    what, command, pipeline, tmp_path, capsys
):
    """The pipeline of the run does not even exist; a reward is asked once the model is known."""
    given, says = FALSE[what]
    called = "reward" in given
    file = runs.write(settings_of(tmp_path, given, pipeline if called else None), tmp_path)
    code = runs.flowrl(command, file)
    shown = capsys.readouterr()
    if called and command == "plan":
        assert code == 1 and "refused: " in shown.out and says in shown.out
    else:
        assert code == 2 and says in shown.err and "no_weights" not in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("what", HONEST)
def test_an_honest_part_is_planned(what, pipeline, tmp_path, capsys):
    file = runs.write(settings_of(tmp_path, HONEST[what], pipeline), tmp_path)
    assert runs.flowrl("plan", file) == 0
    assert "recipe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kernel": {"name": "P:Clips", "affine": False}, "kl": 0.1, "kl_form": "velocity"},
         "kl_form: velocity divides the distance"),
        ({"kernel": {"name": "P:Clips", "affine": False}, "kl": 0.0, "kl_form": "velocity"}, None),
        ({"name": "temp_flow", "loss": {"name": "P:Squares", "homogeneous": False}},
         "ScaleSteps: advantages carry the weights of steps"),
        ({"name": "flash_grpo", "kernel": {"name": "P:Clips", "affine": False}},
         "EvenGradients divides by the slope"),
        ({"advantage": ["drop_flat", {"name": "P:Fills", "keeps_mask": False}]},
         "put Fills before DropFlat"),
    ],
)  # fmt: skip
def test_what_needs_a_property_refuses_a_part_without_it(given, says, pipeline, tmp_path, capsys):
    given = {"name": "flow_grpo"} | given
    tree = settings_of(tmp_path, given, pipeline)
    if given["name"] != "flow_grpo":
        tree["recipe"].pop("group")
    code = runs.flowrl("plan", runs.write(tree, tmp_path))
    shown = capsys.readouterr()
    assert (says in shown.err and code == 2) if says else "recipe flow_grpo" in shown.out


def test_the_kits_names_stand_for_the_parts_of_an_algorithm():
    algorithm = RECIPES["flow_grpo"]()
    levels = [1 - k / algorithm.steps for k in range(algorithm.steps)] + [0.0]
    assert all(a > b for a, b in pairwise(levels))
    check_laws(algorithm, levels, 0, ("reward",))
    assert get_args(AnyPlanner)
