"""Samplers without a run: sample a pipeline under any plan, or steer samples by rewards."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from inspect import isclass, signature
from pathlib import Path
from typing import Any, get_args

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from jaxtyping import Float, Int
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from flowrl.api.calls import public_call
from flowrl.api.parts import GivenGuidance, GivenRewards, SomeRewards
from flowrl.api.run import Run, check_counts, opened_model
from flowrl.api.untouched import untouched
from flowrl.cli.given_model import policy_of
from flowrl.cli.steer import (
    Method,
    SampleScorer,
    SteeredSampler,
    drivable,
    last_weights,
    steered_samples,
)
from flowrl.credit.choices import plans_of
from flowrl.errors import UserError, made_call
from flowrl.models.diffusers.batch import Driven, MediaBatch
from flowrl.models.diffusers.call.results.decoder import Decoded
from flowrl.models.diffusers.policy import PipelinePolicy, PipelineUse
from flowrl.models.open import place
from flowrl.models.out_of_memory import memory_reason, out_of_memory
from flowrl.models.own.policy import OwnPolicy
from flowrl.prompts import PromptSet
from flowrl.prompts.prompt_set import checked_text
from flowrl.run.evaluate.evaluate import Trial
from flowrl.session.live import Live
from flowrl.session.session import load_rewards
from flowrl.settings import RewardSpec
from flowrl.settings.model.pipeline import GuidanceScale
from flowrl.settings.parts.own_parts import part_kind
from flowrl.settings.words.names import unknown_name
from flowrl.settings.words.sentences import plain_message
from flowrl.settings.words.values import short_repr
from rewards import Samples, Scores, score_all
from rewards.checks.settings import function_parameters
from samplers import Plan, Planner, Rollout

PipelineSource = Any  # a diffusers pipeline, its folder or hub name, or a Run


@dataclass(frozen=True)
class SampledPlan:
    """Samples of one plan: n = prompts * plan.group leaves of its trees, ordered by prompt.

    samples    `media` [n 3 h w] or [n f 3 h w] in 0..1, `prompts`, and `group` [n]: the prompt's
               index; None if decoding was left out
    x0         clean latents [n *d]
    prompt     index [n] of each sample's prompt
    steps      the k steps, in order, whose transitions the plan keeps (`train`)
    log_probs  [n k] log-densities of those transitions on each sample's path, as means over
               dimensions
    nodes      [n s] the node that each sample passes after each of the s steps: samples with equal
               numbers share that state. Nodes are numbered over all prompts
    parents    of each step, the parent of each node after it [nodes]; the parents at step 0 are the
               roots
    """

    plan: Plan
    samples: Samples | None
    x0: Float[Tensor, "n *d"]
    prompt: Int[Tensor, " n"]
    steps: tuple[int, ...]
    log_probs: Float[Tensor, "n k"]
    nodes: Int[Tensor, "n s"]
    parents: tuple[Int[Tensor, " _"], ...]

    @classmethod
    def of(cls, rollout: Rollout, samples: Samples | None) -> "SampledPlan":
        plan, draws = rollout.plan, len(rollout.draws)
        n, group = len(rollout.x0), plan.group
        leaves = torch.arange(n)
        before = (plan.roots, *plan.nodes)
        parents = (
            torch.arange(draws * after) // (after // first)
            for first, after in zip(before, plan.nodes, strict=False)
        )
        ways = [e.logp.cpu().repeat_interleave(n // len(e.logp)) for e in rollout.edges]
        return cls(
            plan=plan,
            samples=samples,
            x0=rollout.x0,
            prompt=rollout.prompt.cpu(),
            steps=tuple(e.step for e in rollout.edges),
            log_probs=torch.stack(ways, 1) if ways else torch.zeros(n, 0),
            nodes=torch.stack([leaves // (group // nodes) for nodes in plan.nodes], 1),
            parents=tuple(parents),
        )


@public_call
def sample(
    model: PipelineSource,
    prompts: str | Sequence[str],
    *,
    plan: Planner,
    steps: int = 10,
    guidance: GivenGuidance = 1.0,
    seed: int = 0,
    call: Mapping[str, Any] = {},
    decode: bool = True,
) -> tuple[SampledPlan, ...]:
    """Sample prompts with a planner of `samplers` (Ode, Chain, Window, Fork, Tree) or your own.

    Returns one `SampledPlan` per plan of the planner: a single one, except for planners such as
    Fork. Noise is keyed by seed, prompt and node, so samples do not depend on their batch.

    model     a diffusers pipeline, which is left unchanged; its folder; a hub name; your own module
              (docs/own_models.md); or a `Run`, whose last weights are used
    guidance  scale of classifier-free guidance; "none" switches it off, None is the pipeline's own
              default
    call      additional arguments of the pipeline's own call, such as height
    decode    False skips decoding: only latents and log-probabilities

    UserError for a pipeline that cannot be driven, or a plan that does not fit its noise levels.
    """
    texts = _prompt_list(prompts, "flowrl.sample")
    check_counts("flowrl.sample", {"steps": steps})
    _check_guidance(guidance, "flowrl.sample")
    if not _is_planner(plan):
        raise UserError(
            "flowrl.sample: plan must be a planner of samplers, such as samplers.Ode() or "
            f"samplers.Tree(...), not {short_repr(plan)}"
        )
    planner = _checked_planner(plan, steps, seed)
    with untouched(), _memory_told(), _driven(model, guidance, call) as policy, torch.no_grad():
        batch = MediaBatch(policy, policy.encode(texts, [{} for _ in texts]), steps)
        try:
            rollouts = batch.rollouts(planner, range(len(texts)), seed=seed, iteration=0)
        except ValueError as error:
            raise UserError(f"flowrl.sample: {error}") from error
        plans_sampled = []
        for rollout in rollouts:
            prompt = rollout.prompt.cpu()
            names = [texts[i] for i in prompt.tolist()]
            media = None
            if decode:
                decoded = batch.media(rollout)
                shown, audio = decoded if isinstance(decoded, Decoded) else (decoded, None)
                media = Samples(shown, names, prompt, audio=audio)
            plans_sampled.append(SampledPlan.of(rollout, media))
        return tuple(plans_sampled)


@dataclass(frozen=True)
class SteeredSamples:
    """The chosen samples: `count` per prompt.

    scores       of the chosen samples [n, rewards]
    evaluations  network evaluations of all candidate samples
    """

    samples: Samples
    scores: Scores
    evaluations: int


@public_call
def steer(  # noqa: PLR0913 the options of `flowrl sample --steer`
    model: PipelineSource,
    prompts: str | Sequence[str],
    rewards: SomeRewards,
    *,
    method: Method = "particles",
    particles: int = 8,
    strength: float = 10.0,
    count: int = 1,
    steps: int = 10,
    guidance: GivenGuidance = 1.0,
    seed: int = 0,
    call: Mapping[str, Any] = {},
) -> SteeredSamples:
    """For each sample, select the best of several by the weighted sum of rewards, without training.

    method     best: the highest of `particles`; importance: drawn with weights exp(strength *
               reward); particles: Feynman-Kac resampling during sampling (arXiv:2501.06848)

    The model and the other arguments are as those of `flowrl.sample`, rewards as those of
    `flowrl.train`.
    """
    texts = _prompt_list(prompts, "flowrl.steer")
    check_counts("flowrl.steer", {"particles": particles, "count": count, "steps": steps})
    _check_guidance(guidance, "flowrl.steer")
    if method not in get_args(Method):
        raise UserError(f"flowrl.steer: method {unknown_name(method, get_args(Method))}")
    read = GivenRewards.of(rewards, "flowrl.steer: rewards")
    if not read.specs:
        raise UserError("flowrl.steer: rewards is empty: name what to choose samples by")
    specs = tuple(RewardSpec.model_validate(spec) for spec in read.specs)
    with untouched(), _memory_told(), _driven(model, guidance, call) as policy, torch.no_grad():
        judges = load_rewards(specs, Live(read.objects))
        chosen = PromptSet(texts, tuple({"prompt": text} for text in texts))
        trial = Trial(chosen, tuple(range(len(texts))), count, steps, seed)
        scorer = SampleScorer(
            policy, judges, last_weights(specs), trial, policy.guidance.sample, policy.device
        )
        samples, evaluations = steered_samples(scorer, SteeredSampler(method, particles, strength))
        return SteeredSamples(samples, score_all(judges, samples), evaluations)


@contextmanager
def _memory_told() -> Iterator[None]:
    """Turn an out-of-memory error of the model into a UserError."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise UserError(
            f"{made_call()}: out of memory ({memory_reason(error)}): give fewer prompts, or a "
            "smaller height and width in call"
        ) from error


def _is_planner(plan: object) -> bool:
    """Whether an object can be called as a planner is. Its protocol fits whatever can be called,
    such as a kernel of `samplers`."""
    if isclass(plan) or not callable(plan):
        return False
    try:
        signature(plan).bind((1.0, 0.0), 0, 0)
    except (TypeError, ValueError):  # other parameters, or none that can be read
        return False
    return True


def _checked_planner(plan: Planner, steps: int, seed: int) -> Planner:
    """The planner, whose every result is checked. UserError, before any model is read, for one that
    returns something else on evenly spaced levels, or has a kernel or solver that is none."""
    for name, parameter in function_parameters(type(plan)).items() if is_dataclass(plan) else ():
        part, kind = getattr(plan, name, None), part_kind(parameter.annotation)
        if part is not None and kind is not None and not _is_ours(part):
            try:
                kind.try_part(type(part).__name__, part)
            except ValueError as error:
                raise UserError(f"flowrl.sample: plan: {name}: {error}") from error

    def planner(sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        plans = plans_of(plan, sigmas, iteration, seed)
        of_media = tuple(one for one in plans if isinstance(one, Plan))
        if len(of_media) < len(plans):
            raise UserError("its plans are of texts: return samplers.Plan, of noise levels")
        return of_media

    try:
        planner([1 - k / steps for k in range(steps)] + [0.0], 0, seed)
    except UserError as error:
        raise UserError(f"flowrl.sample: plan: {error}") from error
    except ValueError:  # of these levels, which may not be the model's: asked again with those
        pass
    return planner


def _is_ours(part: object) -> bool:
    return type(part).__module__.partition(".")[0] in ("samplers", "flowrl")


def _prompt_list(prompts: str | Sequence[str], at: str) -> tuple[str, ...]:
    texts = (prompts,) if isinstance(prompts, str) else tuple(prompts)
    if not texts:
        raise UserError(f"{at}: prompts must not be empty")
    return tuple(checked_text(text, f"{at}: prompts") for text in texts)


def _check_guidance(guidance: GuidanceScale, at: str) -> None:
    """UserError for a value that is no scale, with the sentence of a run's file."""
    try:
        TypeAdapter(GuidanceScale).validate_python(guidance)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{at}: guidance: {plain_message(first)}") from error


@contextmanager
def _driven(
    model: PipelineSource, guidance: GuidanceScale, call: Mapping[str, Any]
) -> Iterator[Driven]:
    """The model as a policy. A live pipeline is restored afterwards."""
    policy: PipelinePolicy | OwnPolicy
    if isinstance(model, Run):
        if call:
            raise UserError("a run has its own call arguments (model.call): leave call out")
        opened, named = opened_model(model), "last" if model.done else "best"
        with opened.limited():
            drivable_policy = drivable(policy_of(opened.run, opened.folder, named))
        assert isinstance(drivable_policy, PipelinePolicy | OwnPolicy), "both are drivable"
        policy = drivable_policy
    elif isinstance(model, DiffusionPipeline):
        with _as_before(model):
            live = PipelinePolicy(model, call=call, use=PipelineUse(device=model.device))
            yield live.guided(guidance, guidance)
        return
    elif isinstance(model, nn.Module):
        if call:
            raise UserError("call holds arguments of a pipeline's own call: leave it out")
        with _modes([model]):
            policy = OwnPolicy(model)
            yield policy
        return
    elif isinstance(model, str | Path):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        source = place(str(model))
        policy = PipelinePolicy.load(source, dtype=torch.float32, device=device, call=call)
    else:
        raise UserError(
            "the model must be a diffusers pipeline, a folder, a hub name, your own model "
            "(docs/own_models.md) or a flowrl.Run, not "
            f"{type(model).__name__}"
        )
    yield policy.guided(guidance, guidance)


@contextmanager
def _modes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the training mode of modules."""
    modes = [(m, m.training) for part in modules for m in part.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _as_before(pipe: Any) -> Iterator[None]:
    """Restore everything that driving changes in a pipeline: training modes, progress bar,
    scheduler."""
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    scheduler, bar = pipe.scheduler, vars(pipe).get("_progress_bar_config")
    try:
        with _modes(modules):
            yield
    finally:
        pipe.scheduler = scheduler
        if bar is None:
            vars(pipe).pop("_progress_bar_config", None)
        else:
            pipe._progress_bar_config = bar
