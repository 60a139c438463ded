"""An engine draws the samples: the same numbers where it has the same weights, a sentence where it
has not."""

import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

pytest.importorskip("httpx")

from flowrl.errors import UserError
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.engine import Engine, EngineRequest, EngineSamples, walked
from flowrl.models.engine.remote import RemoteEngine
from flowrl.models.engine.rolls import EngineRolls, EngineWeights, checked_answer, plain_arguments
from flowrl.models.engine.wire import answer_bytes, read_answer, read_request, request_body
from flowrl.processes.sharding import Sharding
from flowrl.run.evaluate.guard import engine_range
from flowrl.run.evaluate.start_checks import prove_pipeline
from flowrl.run.model_proof import StartProof
from flowrl.session.progress import Progress
from flowrl.settings.read import run_from
from flowrl.settings.trust import SAMPLED_PARTS, used_by
from flowrl.settings.trust import asked as asked_by
from rewards.rights import Right
from rewards.serving.client import Client
from rewards.serving.requests import Patience
from samplers import CPS, DPM2M, Chain, FlowSDE, Latents, Ode, Window, roll
from samplers.affine import affine_steps
from samplers.noise import key_hash
from tests.support.advice import advice
from tests.support.engines import EXAMPLE, ForgetfulEngine, example_engine, served_engine
from tests.support.iterations import iterate
from tests.support.runs import (
    FLOW_GRPO,
    NFT,
    check_resumed_bits,
    flowrl,
    free_port,
    lines,
    opened,
    tree,
    write,
    write_pipeline,
)
from tests.support.tiny import gaussian_velocity
from tests.support.tiny_pipelines import NAMED

LEVELS = [1.0, 0.9, 0.75, 0.5, 0.3, 0.1, 0.0]
MIX = {"name": "mix_grpo", "steps": 6, "group": 4, "clip": 0.2}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("engine") / "pipeline")


def own(pipeline: Path) -> dict[str, Any]:
    return {"own": {"name": f"{EXAMPLE}:SD3Engine", "folder": str(pipeline)}}


def settings(pipeline: Path, folder: Path, recipe: dict[str, Any], engine: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    made = tree(pipeline, folder, recipe)
    made["model"]["engine"] = engine
    return made


def trained(made: dict[str, Any], folder: Path) -> Path:
    """Train a run of these settings, and return its folder."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(made))
    assert flowrl("train", file, "--folder", folder / "run") == 0
    return folder / "run"


def refused(made: dict[str, Any]) -> str:
    with pytest.raises((UserError, ValueError)) as error:
        run_from(made, "test")
    return str(error.value)


def request_of(plan: Any, prompts: int = 2, shape: tuple[int, ...] = (3,)) -> EngineRequest:
    """The request for a plan, with the noise keys of `roll`."""
    steps = affine_steps(plan)

    def seeds(*purpose: int | str, nodes: int = plan.group) -> tuple[int, ...]:
        every = [(draw, node % nodes) for draw in range(prompts) for node in range(plan.group)]
        return tuple(key_hash(0, 0, draw, *purpose, node) for draw, node in every)

    return EngineRequest(
        "flowrl-1", ("a",) * prompts, (), {}, None, plan.group, shape, steps,
        tuple(k for k, step in enumerate(plan.steps) if step.train),
        seeds("root", nodes=plan.states[0]),
        tuple(seeds("step", 0, k) if step.std else () for k, step in enumerate(steps)),
    )  # fmt: skip


@pytest.mark.parametrize(
    "planner",
    [
        Chain(FlowSDE(), 3), Chain(CPS(0.8), 3, shared_noise=True), Ode(3), Ode(3, DPM2M()),
        Window(FlowSDE(), 3, size=2), Window(FlowSDE(), 3, size=2, shared_noise=True),
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_a_walk_along_the_numbers_of_a_plan_is_the_plans_own(planner):
    """Every step, noise and log-density that an engine gets from its request alone."""
    (plan,) = planner(LEVELS, 0, 0)
    asked = request_of(plan)
    (here,) = roll([plan], gaussian_velocity, Latents((3,)), [0, 1], seed=0, iteration=0)

    def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return gaussian_velocity(x, torch.full((len(x),), sigma), torch.zeros(len(x)).long())

    found = walked(asked, velocity)
    index = torch.arange(len(here.prompt))
    for k in asked.trained:
        edges = next(edge for edge in here.edges if edge.step == k)
        torch.testing.assert_close(found.states[k + 1], edges.x_next, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(found.logp[k], edges.logp, atol=2e-6, rtol=2e-6)
    last = found.states[len(plan.steps)]
    group = len(index) // len(here.x0)
    torch.testing.assert_close(last, here.x0.repeat_interleave(group, 0), atol=3e-6, rtol=3e-6)
    assert sorted(found.states) == [*asked.levels]


def test_requests_and_samples_survive_the_wire():
    (plan,) = Chain(FlowSDE(), 2)(LEVELS, 0, 0)
    asked = replace(request_of(plan), arguments=({"negative_prompt": "x"},) * 2, guidance=4.5)
    assert read_request(json.loads(json.dumps(request_body(asked)))) == asked
    found = walked(asked, lambda x, sigma: -x)
    again = read_answer(answer_bytes(found))
    assert again.version == found.version and again.states.keys() == found.states.keys()
    for k, state in found.states.items():
        assert torch.equal(again.states[k], state)
    for k, logp in found.logp.items():
        assert torch.equal(again.logp[k], logp)
    with pytest.raises(ValueError, match="no safetensors"):
        read_answer(b"<html>502</html>")
    with pytest.raises(ValueError, match="prompts"):
        read_request(
            {"version": "x"} | {k: v for k, v in request_body(asked).items() if k != "prompts"}
        )


def test_an_answer_that_lacks_something_is_refused_by_name():
    (plan,) = Chain(FlowSDE(), 2)(LEVELS, 0, 0)
    asked = request_of(plan)
    right = walked(asked, lambda x, sigma: -x)
    assert checked_answer(asked, right) is right
    nan = {k: each * torch.nan for k, each in right.logp.items()}
    short = {k: each[:1] for k, each in right.states.items()}
    for wrong, words in (
        (replace(right, logp={}), "no log-density 0"),
        (replace(right, states={}), "no state 0"),
        (replace(right, states=short), "has the shape"),
        (replace(right, logp=nan), "not finite"),
    ):
        with pytest.raises(UserError, match=words):
            checked_answer(asked, wrong)
    assert plain_arguments({"negative_prompt": "a", "seed": 1}) == {
        "negative_prompt": "a",
        "seed": 1,
    }
    row = {"negative_prompt": "a", "image": Image.new("RGB", (4, 4))}
    kept = {name: value for name, value in row.items() if name != "image"}
    advice(
        "model.engine: the column {} of the prompts is a {}, but engines get texts and numbers "
        "alone: leave model.engine out, or leave the column out (prompts.train.keep)",
        lambda: plain_arguments(row),
        lambda: plain_arguments(kept),
    )


@pytest.mark.parametrize(
    ("recipe", "more", "words"),
    [
        ({"name": "awm", "steps": 8, "group": 4}, {}, "the solver SA"),
        ({"name": "branch_grpo", "steps": 12}, {}, "samples trees"),
        ({"name": "refl", "steps": 4}, {}, "KeepingRoute changes samples"),
        (FLOW_GRPO, {"steer": {"iterations": [0, 1]}}, "steer"),
        (NFT, {"steer": {"iterations": [0, 1]}}, "SteeredRoute changes samples"),
        (FLOW_GRPO, {"train": {"recompute_old": False}}, "train.recompute_old"),
        (FLOW_GRPO, {"train": {"states": {"dtype": "bfloat16"}}}, "train.states.dtype"),
        (FLOW_GRPO, {"budget": {"replay": 2}}, "budget.replay"),
        (FLOW_GRPO, {"workers": {"lag": 1}}, "workers.lag"),
    ],
)  # fmt: skip
def test_what_a_request_cannot_carry_is_refused_before_weights_load(
    pipeline, tmp_path, recipe, more, words, capsys
):
    made = settings(pipeline, tmp_path, recipe, {"url": "http://localhost:1"})
    for name, section in more.items():
        made[name] = {**made.get(name, {}), **section}
    assert flowrl("plan", write(made, tmp_path)) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_an_engine_is_your_own_or_an_address(pipeline, tmp_path):
    both = {**own(pipeline), "url": "http://localhost:1"}
    for engine, words in (
        ({}, "set either own"), (both, "set either own"), ({"own": "mine"}, "your own engine"),
    ):  # fmt: skip
        assert words in refused(settings(pipeline, tmp_path, FLOW_GRPO, engine))
    (tmp_path / "mine.py").write_text("class Half:\n    def load(self): ...\n")
    made = settings(pipeline, tmp_path, FLOW_GRPO, {"own": f"{tmp_path}/mine.py:Half"})
    file = tmp_path / "half.yaml"
    file.write_text(yaml.safe_dump(made))
    assert flowrl("plan", file) == 2


def same_runs(here: Path, there: Path, atol: float) -> None:
    """The same metrics and weights, to rounding."""
    for one, other in zip(lines(here), lines(there), strict=True):
        for name in ("reward", "loss", "grad_norm", "ratio", "held_out/brightness"):
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=2e-3, abs=atol), name
    weights = [next(each.glob("adapter/*.safetensors")) for each in (here, there)]
    first, second = map(load_file, weights)
    assert first.keys() == second.keys()
    for name, weight in first.items():
        torch.testing.assert_close(weight, second[name], atol=atol, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [FLOW_GRPO, MIX, NFT], ids=lambda each: each["name"])
def test_a_run_on_a_served_engine_has_the_numbers_of_local_sampling(
    pipeline, tmp_path, recipe, capsys
):
    here = trained(settings(pipeline, tmp_path / "here", recipe, None), tmp_path / "here")
    with served_engine(example_engine(pipeline)) as url:
        made = settings(pipeline, tmp_path / "there", recipe, {"url": url})
        capsys.readouterr()
        there = trained(made, tmp_path / "there")
    said = capsys.readouterr().out
    assert f"{url} draws the samples; its log-densities differ" in said
    same_runs(here, there, atol=2e-4)
    mismatch = [line["mismatch"] for line in lines(there) if "mismatch" in line]
    assert len(mismatch) == 3 and max(mismatch) < 1e-5, mismatch
    assert not list((there / "served").iterdir()), "a run deletes the weights that it has sent"


def test_an_update_on_an_engines_samples_is_the_local_one(pipeline, tmp_path):
    """Two iterations, so the second samples with weights that the engine was given."""
    ends = []
    for name, engine in (("here", None), ("there", own(pipeline))):
        kept = opened(settings(pipeline, tmp_path / name, FLOW_GRPO, engine), tmp_path / name)
        progress = Progress()
        metrics = [iterate(kept, progress).metrics for _ in range(2)]
        weights = [p.detach().clone() for p in kept.learner.policies.network.values()]
        ends.append((metrics, weights))
        kept.learner.close()
    (first, weights), (second, others) = ends
    for one, other in zip(first, second, strict=True):
        assert other["ratio_max"] == pytest.approx(1.0, abs=1e-6), "old is the learner's own"
        assert other["mismatch_effective"] == pytest.approx(1.0, abs=1e-6)
        assert other["mismatch_max"] < 1e-5
        for name in ("reward", "policy_loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=2e-4), name
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)


def started(pipeline: Path, folder: Path, engine: Any, **more: Any) -> None:
    """Open a run on a served engine, with its proofs."""
    with served_engine(engine) as url:
        kept = opened(settings(pipeline, folder, FLOW_GRPO, {"url": url, **more}), folder)
        try:
            prove_pipeline(kept, StartProof(kept, cache=False))
        finally:
            kept.learner.close()


def test_other_weights_are_refused_at_the_start_with_the_numbers(pipeline, tmp_path):
    """A tenth of the weights is a step of the run's learning rate away."""
    engine = example_engine(pipeline)
    with torch.no_grad():
        for number, weight in enumerate(engine.pipe.transformer.parameters()):
            if number % 10 == 0:
                weight.add_(torch.randn(weight.shape, generator=torch.manual_seed(0)), alpha=1e-2)
    with pytest.raises(UserError) as error:
        started(pipeline, tmp_path, engine)
    said = str(error.value)
    assert "differ from the pipeline's own by" in said and "own noise is" in said
    assert "More than 10 times this noise is another model" in said


class HalfEngine:
    """An engine whose network computes in half precision."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def load(self, version: str, folder: Path) -> None:
        self.inner.load(version, folder)

    def sample(self, request: EngineRequest) -> EngineSamples:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner.sample(request)

    def close(self) -> None:
        self.inner.close()


@pytest.mark.slow
def test_an_engine_that_differs_is_one_of_the_pipelines_or_has_its_dtype_named(pipeline, tmp_path):
    half = HalfEngine(example_engine(pipeline))

    def followed() -> None:
        started(pipeline, tmp_path, half, dtype="bfloat16")
        started(pipeline, tmp_path, example_engine(pipeline))

    advice(
        "model.engine: log-densities of {} differ from the pipeline's own by {}. More than {} "
        "times this noise is another model, another guidance, or weights that it did not load: "
        "start it with the weights of model.pipeline; if its network computes in half precision, "
        "set model.engine.dtype",
        lambda: started(pipeline, tmp_path, half),
        followed,
    )


def test_shards_are_no_weights_for_an_engine(pipeline, tmp_path, monkeypatch):
    made = settings(pipeline, tmp_path, FLOW_GRPO, own(pipeline))

    def opened_as(how: Any) -> None:
        monkeypatch.setattr("flowrl.session.learner.sharding", lambda _: how)
        opened(made, tmp_path).learner.close()

    advice(
        "model.engine: it gets whole weights, and FSDP2 shards them: leave one of the two out; "
        "each process then holds the model",
        lambda: opened_as(Sharding()),
        lambda: opened_as(None),
    )


@pytest.mark.slow
def test_weights_that_an_engine_ignores_show_in_the_mismatch(pipeline, tmp_path):
    """Its version is right, so only the numbers tell."""
    engine = ForgetfulEngine(example_engine(pipeline))
    with served_engine(engine) as url:
        made = settings(pipeline, tmp_path, FLOW_GRPO, {"url": url})
        kept = opened(made, tmp_path)
        found = StartProof(kept, cache=False)
        prove_pipeline(kept, found)
        progress, bound = Progress(), engine_range(kept).high
        first, second = (iterate(kept, progress).metrics["mismatch"] for _ in range(2))
        kept.learner.close()
    assert first < bound < second, (first, bound, second)
    assert engine.loads > 1


class Fickle:
    """An engine of which each request has an outcome: an answer, an exception, or the version of
    other weights."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes, self.loads = list(outcomes), 0

    def load(self, version: str, folder: Path) -> None:
        del version
        assert folder.is_dir()
        self.loads += 1

    def sample(self, request: EngineRequest) -> EngineSamples:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        found = walked(request, lambda x, _: -x)
        return replace(found, version=outcome or found.version)

    def close(self) -> None: ...


class TinyModel:
    """The part of a policy that weights are read from."""

    def trainable(self) -> dict[str, torch.Tensor]:
        return {"a.lora_A.weight": torch.ones(2)}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)


def asking(engine: Engine, folder: Path, patience: float = 30.0) -> EngineRolls:
    model: Any = TinyModel()
    return EngineRolls(engine, EngineWeights(model, engine, folder), "mine", 8, patience)


@pytest.mark.parametrize("lost", [LookupError("none"), "flowrl-another"], ids=["none", "another"])
def test_lost_weights_are_sent_again_once(tmp_path, lost):
    """A stale version is never trained on."""
    (plan,) = Chain(FlowSDE(), 2)(LEVELS, 0, 0)
    engine = Fickle(lost, None)
    assert isinstance(engine, Engine)
    found = asking(engine, tmp_path).answer(request_of(plan))
    assert found.version.startswith("flowrl-") and engine.loads == 2
    with pytest.raises(UserError, match="although it was given them twice"):
        asking(Fickle(lost, lost), tmp_path).answer(request_of(plan))


@pytest.mark.parametrize("error", [KeyError("scale"), ValueError("no such scale")])
def test_mistakes_of_an_engine_end_the_run_with_its_words(tmp_path, error):
    (plan,) = Chain(FlowSDE(), 2)(LEVELS, 0, 0)
    with pytest.raises(UserError, match=f"mine: {type(error).__name__}: .*scale"):
        asking(Fickle(error), tmp_path).answer(request_of(plan))


def test_an_engine_that_is_away_is_waited_for(tmp_path, capsys, monkeypatch):
    """Until it comes back, with its weights again; or until the patience is over."""
    monkeypatch.setattr("flowrl.models.engine.rolls._LONGEST_WAIT", 0.01)
    (plan,) = Chain(FlowSDE(), 2)(LEVELS, 0, 0)
    asked, away = request_of(plan), ConnectionError("no answer")
    engine = Fickle(away, TimeoutError(), None)
    assert asking(engine, tmp_path).answer(asked).version.startswith("flowrl-")
    assert engine.loads == 3, "it may have come back without them"
    assert capsys.readouterr().err.count("waiting for it up to 30 s (model.engine.patience)") == 1
    engine = Fickle(away, None)
    again = asking(engine, tmp_path, patience=0.0)
    advice(
        "model.engine: {} does not answer ({}): start it, then resume the run, or leave "
        "model.engine out",
        lambda: again.answer(asked),
        lambda: again.answer(asked),
    )
    assert engine.loads == 2, "a resumed run sends its weights"


def test_a_server_that_is_gone_or_refuses_says_so():
    port = free_port()
    gone = RemoteEngine(Client(f"http://127.0.0.1:{port}", None, Patience(1.0, tries=1)))
    with pytest.raises(ConnectionError, match="no answer"):
        gone.load("flowrl-1", Path("x"))

    class Mistaken:
        def load(self, version: str, folder: Path) -> None: ...

        def sample(self, request: EngineRequest) -> EngineSamples:
            raise ValueError("no such scale")

        def close(self) -> None: ...

    (plan,) = Chain(FlowSDE(), 2)(LEVELS, 0, 0)
    with served_engine(Mistaken(), token="secret") as url:
        client = RemoteEngine(Client(url, None, Patience(5.0, tries=1)))
        with pytest.raises(ValueError, match="status 401"):
            client.load("flowrl-1", Path("x"))
    with served_engine(Mistaken()) as url:
        client = RemoteEngine(Client(url, None, Patience(5.0, tries=1)))
        with pytest.raises(LookupError, match="no weights of a run"):
            client.sample(request_of(plan))
        client.load("flowrl-1", Path("x"))
        with pytest.raises(ValueError, match="status 422, no such scale"):
            client.sample(request_of(plan))


class Walking(Fickle):
    """An engine that answers every request, and keeps the arguments of the call."""

    def sample(self, request: EngineRequest) -> EngineSamples:
        self.outcomes.append(request.call)
        return walked(request, lambda x, _: -x)


def test_values_that_json_cannot_hold_reach_an_engine_of_ones_own(tmp_path):
    (plan,) = Chain(FlowSDE(), 2)(LEVELS, 0, 0)
    plain = request_of(plan)
    for value in (math.inf, date(2026, 1, 1)):
        asked, mine = replace(plain, call={"since": value}), Walking()
        with served_engine(Walking()) as url:
            served = asking(RemoteEngine(Client(url, None, Patience(5.0, tries=1))), tmp_path)
            advice(
                "model.call has a value that JSON cannot hold ({}): leave it out, or use your own "
                "engine (model.engine.own)",
                lambda served=served, asked=asked: served.answer(asked),
                lambda served=served: served.answer(plain),
            )
        asking(mine, tmp_path).answer(asked)
        assert mine.outcomes == [{"since": value}]


def test_first_states_of_another_size_than_noise_are_sampled_here(tmp_path):
    """SDXL's, as its scheduler has them."""
    family = NAMED["SDXL"]
    made = PipelinePolicy(family.build(), call=family.call)

    def rolled(policy: PipelinePolicy) -> None:
        batch: Any = policy.open(["a red ball"], [{}], 2)
        with torch.no_grad():
            batch.rollouts(Ode(1), (0,), seed=0, iteration=0)

    elsewhere = made.alike(made.state, replace(made.use, rolls=asking(Walking(), tmp_path)))
    advice(
        "model.engine: {} has {}, which an engine cannot be asked for: leave model.engine out",
        lambda: rolled(elsewhere),
        lambda: rolled(made),
    )


@pytest.mark.slow
def test_a_run_on_an_engine_resumes_with_the_same_bits(pipeline, tmp_path):
    check_resumed_bits(settings(pipeline, tmp_path, FLOW_GRPO, own(pipeline)), tmp_path)


@pytest.mark.slow
def test_all_weights_reach_an_engine(pipeline, tmp_path):
    here = settings(pipeline, tmp_path / "here", FLOW_GRPO, None)
    there = settings(pipeline, tmp_path / "there", FLOW_GRPO, own(pipeline))
    for made in (here, there):
        made["model"]["lora"] = None
        made["train"]["lr"] = 1e-4
    metrics = [
        lines(trained(made, tmp_path / name)) for made, name in ((here, "here"), (there, "there"))
    ]
    for one, other in zip(*metrics, strict=True):
        assert one.get("reward") == pytest.approx(other.get("reward"), abs=1e-4)
    assert max(line["mismatch"] for line in metrics[1] if "mismatch" in line) < 1e-5


def test_an_engine_in_a_folder_from_elsewhere_needs_its_right(pipeline, tmp_path):
    mine, there = (
        [each.right for each in asked_by(settings(pipeline, tmp_path, FLOW_GRPO, engine), tmp_path)
         if each.at.startswith("model.engine")]
        for engine in (own(pipeline), {"url": "http://localhost:1", "token": "NAME"})
    )  # fmt: skip
    assert mine == [Right.CODE] and set(there) == {Right.NETWORK, Right.VARIABLES}
    for engine in (own(pipeline), {"url": "http://localhost:1"}):
        needs = asked_by(settings(pipeline, tmp_path, FLOW_GRPO, engine), tmp_path)
        of_engine = [each for each in needs if each.at.startswith("model.engine")]
        assert of_engine and not used_by(of_engine, SAMPLED_PARTS)


def test_plan_says_what_it_did_not_ask(pipeline, tmp_path, capsys):
    made = settings(pipeline, tmp_path, FLOW_GRPO, {"url": "http://localhost:1"})
    assert flowrl("plan", write(made, tmp_path)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "model.engine: http://localhost:1 was not asked" in said
    assert "samples are drawn by http://localhost:1" in said
