"""The checks of a run before its first iteration: model, processes, noise levels, rewards."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from accelerate.utils import gather_object

from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.rows import of_parts, parts_of_samples
from flowrl.likelihoods.transition import Transition
from flowrl.models.diffusers.batch import Driven
from flowrl.models.diffusers.call.inputs.columns import TEXT_COLUMNS, images, sounds
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.image_tokens.policy import ImageTokenPolicy
from flowrl.models.language.advice import experts_warning, learning_rate_warning
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.open import DTYPES
from flowrl.models.own.policy import OwnPolicy
from flowrl.models.policy import Policy
from flowrl.prompts import IMAGE_COLUMNS
from flowrl.prompts.prompt_set import SOUND_COLUMNS
from flowrl.prompts.row_sizes import RowSize
from flowrl.run.model_proof import StartProof
from flowrl.run.watch.guidance_check import guided_target
from flowrl.run.watch.judges import no_judge, seen_in_training
from flowrl.run.watch.text_facts import text_length
from flowrl.session.given_samples import GIVEN
from flowrl.session.session import Session, prove_rewards
from flowrl.session.start_record import source_digests
from flowrl.settings import LanguageSettings, RunSettings
from flowrl.settings.checks.guidance import check_measured_guidance
from rewards.types import MediaForm
from samplers import Plan, evaluations
from samplers.clock import PartClock
from samplers.planners import CLEAN


def prove_pipeline(session: Session, proof: StartProof) -> None:
    """Check the model, the processes and the rewards with this run's settings and prompts."""
    check_same_sources(session.run)
    proof.prove()
    for sentence in (
        *no_judge(session.run),
        *seen_in_training(session.prompts, session.held_out),
        *text_length(session.run, session.prompts),
        *unread_columns(session),
    ):
        session.terminal.say(sentence)
    check_proven_guidance(session)
    check_levels(session)
    if session.run.engine is not None:
        session.terminal.say(_engine_sentence(session))
    for sentence in counts_on_levels(session):
        session.terminal.say(sentence)
    for warning in _model_warnings(session):
        session.terminal.warn(warning)
    for sentence in session.parallel.proofs():
        session.terminal.say(sentence)
    if GIVEN in session.table:
        for sentence in session.table[GIVEN].proofs():
            session.terminal.say(sentence)
    _prove_scores(session, made_form(session.learner.policy))


def _prove_scores(session: Session, form: MediaForm) -> None:
    """Check rewards, their gradients and the held-out rewards, on samples of the model's form."""
    for sentence in prove_rewards(session.rewards, session.run, session.prompts, form):
        session.terminal.say(sentence)
    if session.run.intermediate_rewards:
        for sentence in prove_rewards(
            session.intermediate_rewards, session.run, session.prompts, form
        ):
            session.terminal.say(sentence)
    if session.algorithm.reward_gradient or "slope" in session.algorithm.asks:
        from flowrl.run.evaluate.gradient_proof import prove_gradients  # of a feature

        for sentence in prove_gradients(session, form):
            session.terminal.say(sentence)
    if session.run.held_out_rewards and session.held_out is not None:
        for sentence in prove_rewards(session.judges, session.run, session.held_out, form):
            session.terminal.say(sentence)


def _engine_sentence(session: Session) -> str:
    """Compare the engine that samples with the model. UserError for other weights."""
    from flowrl.models.engine.check import EngineComparison, prove_engine, spread_places
    from flowrl.models.engine.rolls import EngineRolls

    run, policy = session.run, session.learner.policy
    assert isinstance(policy, PipelinePolicy) and run.engine is not None
    rolls = policy.use.rolls
    assert isinstance(rolls, EngineRolls), "a training run asks its engine"
    texts, meta = session.prompts.take(spread_places(len(session.prompts)))
    comparison = EngineComparison.drawn(policy, texts, meta, session.algorithm.steps)
    engine_dtype = None if run.engine.dtype is None else DTYPES[run.engine.dtype]
    return prove_engine(rolls, comparison, DTYPES[run.model.dtype], engine_dtype)


def unread_columns(session: Session) -> Iterator[str]:
    """A sentence for columns that other models take as images or texts, and this one does not."""
    policy = session.learner.policy
    columns: Collection[str] = ()
    if isinstance(policy, PipelinePolicy):
        parameters = list(policy.loop.driver.parameters)
        columns = {*images(parameters), *sounds(parameters)}
        columns |= set(filter(TEXT_COLUMNS.fullmatch, parameters))
        columns |= {name for name in RowSize._fields if name in parameters}
    elif isinstance(policy, CausalPolicy):
        if policy.vision is not None:
            return
    elif not isinstance(policy, ImageTokenPolicy):
        return
    rows = [
        row for prompts in (session.prompts, session.held_out) if prompts for row in prompts.meta
    ]
    filled = dict.fromkeys(name for row in rows for name, value in row.items() if value)
    unread = [
        name
        for name in filled
        if name not in (*columns, "prompt")
        and (_holds_files(name) or (columns and _argument(name)))
    ]
    if unread:
        yield (
            f"prompts: the model takes no {', '.join(unread)}: only rewards read "
            f"{'this column' if len(unread) == 1 else 'these columns'}"
        )


def _holds_files(name: str) -> bool:
    return bool(IMAGE_COLUMNS.fullmatch(name) or SOUND_COLUMNS.fullmatch(name))


def _argument(name: str) -> bool:
    return TEXT_COLUMNS.fullmatch(name) is not None or name in RowSize._fields


def black_images(pipe: Any) -> Iterator[str]:
    """A sentence for a pipeline whose safety checker replaces samples by black images."""
    if pipe.components.get("safety_checker") is not None:
        yield (
            f"{type(pipe).__name__} has a safety checker, and each sample that it flags becomes a "
            "black image, which is scored and trained on; to train without it, write "
            '"safety_checker": [null, null] into a copy of its model_index.json'
        )


def _model_warnings(session: Session) -> Iterator[str]:
    """Warn of black images, and of settings that harm language models."""
    if isinstance(session.learner.policy, PipelinePolicy):
        yield from black_images(session.learner.policy.pipe)
    if not isinstance(session.run.model, LanguageSettings):
        return
    learner = session.learner
    weights = sum(p.numel() for p in learner.policies.parameters.values())
    assert isinstance(learner.policy, CausalPolicy | ImageTokenPolicy)
    config = learner.policy.model.config
    warnings = learning_rate_warning(session.run, weights), experts_warning(config)
    yield from (warning for warning in warnings if warning is not None)


def check_proven_guidance(session: Session) -> None:
    """UserError for guidance scales of the loaded pipeline that its recipe cannot train at: another
    scale than the samples' where densities are compared, a guided one in a matching loss."""
    policy, run, algorithm = session.learner.policy, session.run, session.algorithm
    if not isinstance(policy, PipelinePolicy):
        return
    check_measured_guidance(run, algorithm, *policy.guidance)
    if not isinstance(algorithm.likelihood, Matching) or run.training_guidance == "none":
        return
    at = algorithm.steps, policy.guidance.train
    proofs = [sized.known_proofs.get(at) for sized in policy.sized]
    if any(proof is not None and proof.evaluations > 1 for proof in proofs):
        raise UserError(guided_target(run))


def check_levels(session: Session) -> None:
    """Raise a UserError if the plan does not fit the model's own noise levels, or if it credits
    parts that the model's samples do not have.

    The settings are checked on evenly spaced levels. A scheduler whose list ends at a level near 0
    has one step less that may be noisy. Evaluations have no such plan, so the sizes of held-out
    prompts do not count."""
    if not isinstance(session.learner.policy, Driven):
        return
    policy, forms, meta = session.learner.policy, set[object](), session.prompts.meta
    for sized in policy.sized_for(meta) if isinstance(policy, PipelinePolicy) else [policy]:
        plans = _plans_at(session, sized)
        forms.add(tuple((p.columns.nodes, p.columns.noisy) for p in plans))
    if len(forms) > 1:
        raise UserError(
            "recipe: on the model's noise levels its plan draws noise at other steps for samples "
            "of another size, so their credit cannot be compared step by step: choose prompts of "
            "one size with `where`, or another recipe"
        )


def _plans_at(session: Session, policy: Driven) -> list[Plan]:
    """The plans of the first iteration on a policy's own levels."""
    steps = session.algorithm.steps
    sigmas = policy.schedule(steps).sigmas
    try:
        plans = session.algorithm.planned(sigmas, 0, session.run.train.seed)
    except ValueError as problem:
        levels = ", ".join(f"{sigma:.3f}" for sigma in sigmas[-4:])
        raise UserError(
            f"recipe: the plan does not fit the model's {steps} steps, whose levels end at "
            f"{levels} (below {CLEAN} a level counts as the end): {problem}; raise recipe.steps, "
            "or let the plan's window or splits end at an earlier step"
        ) from problem
    images = [p for p in plans if isinstance(p, Plan)]
    likelihood, clock = session.algorithm.likelihood, policy.schedule(steps).clock
    if clock is not None:
        check_clock(likelihood, clock, policy.name)
    policy.fitted(images, steps)
    if isinstance(likelihood, Transition | Matching) and likelihood.parts:
        layout = parts_of_samples(likelihood.parts, policy.layout)
        assert layout is not None
        of_parts(torch.zeros(1, len(likelihood.parts)), likelihood.parts, layout)
    return images


def check_clock(likelihood: object, clock: PartClock, model: str) -> None:
    """UserError for a recipe that needs one level for all of a state, where a model's parts have
    levels of their own."""
    if not isinstance(likelihood, Transition):
        raise UserError(
            f"recipe: {model} steps parts of its state at levels of their own, where the densities "
            "of its steps are known, but no errors at new noise levels and no gradients of "
            "rewards: use a recipe that trains on densities of steps, such as flow_grpo"
        )
    if likelihood.ratio != "density" and not clock.even:
        raise UserError(
            f"recipe: {model} moves parts from different levels in one step, so its noise has no "
            f"one size, by which the ratio {likelihood.ratio} is scaled: use a recipe whose ratio "
            "is that of densities, such as flow_grpo"
        )


def check_same_sources(run: RunSettings) -> None:
    """UserError if processes have different source files of the run's own parts."""
    by_process = gather_object([source_digests(run)])
    differ = {
        name
        for digests in by_process
        for name, digest in digests.items()
        if by_process[0].get(name) != digest
    }
    if differ:
        raise UserError(
            f"{', '.join(sorted(differ))}: these files differ between processes; copy one "
            "version to every machine"
        )


def made_form(policy: Policy) -> MediaForm:
    """The form of the samples that a proven policy generates."""
    if isinstance(policy, OwnPolicy):
        assert policy.form is not None
        return policy.form
    if isinstance(policy, ImageTokenPolicy):
        return MediaForm("image")
    if not isinstance(policy, PipelinePolicy):
        return MediaForm("text")
    proofs = [proof for sized in policy.sized for proof in sized.known_proofs.values()]
    if any(proof.sound for proof in proofs):
        return MediaForm("sound")
    return MediaForm("video" if any(proof.video for proof in proofs) else "image")


def counts_on_levels(session: Session) -> Iterator[str]:
    """A sentence if the model's own noise levels change the work that `flowrl plan` computed for
    evenly spaced levels: a level near 0 ends the noise one step earlier."""
    run, policy, algorithm = session.run, session.learner.policy, session.algorithm
    if not isinstance(policy, Driven) or run.sigmas is not None:
        return
    levels = (policy.schedule(algorithm.steps).sigmas, run.levels(algorithm.steps))
    counts = []
    for sigmas in levels:
        plans = [p for p in algorithm.planned(sigmas, 0, run.train.seed) if isinstance(p, Plan)]
        way, rows = (sum(getattr(p, of) for p in plans) for of in ("predicted", "trained_nodes"))
        counts.append((evaluations(plans), way, rows))
    of_model, even = counts
    if of_model != even:
        words = ("network evaluations", "intermediate scores", "trained rows")
        differences = [
            f"{n} instead of {m} {word}"
            for word, n, m in zip(words, of_model, even, strict=True)
            if n != m
        ]
        yield (
            f"on the model's own noise levels a draw has {', '.join(differences)}, while `flowrl "
            "plan` assumes evenly spaced levels"
        )
