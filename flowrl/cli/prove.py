"""`flowrl prove`: the proof of a run's model at load, and of pipelines over whole samples."""

import sys
from typing import Any

from flowrl.cli.given_model import device_of
from flowrl.errors import UserError
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.sizes.by_size import other_sizes, rows_by_size
from flowrl.models.diffusers.whole import proof_cache as proof_cache
from flowrl.models.diffusers.whole.proof_cache import CachedProof
from flowrl.models.diffusers.whole.whole_proof import LEGEND, WholeProof, deviations, prove_whole
from flowrl.models.open import evaluation_policy
from flowrl.prompts import PromptSet
from flowrl.run.model_proof import PromptColumns, proof_digest, proof_prompts, whole_prompts
from flowrl.run.watch.start_check import check_model_of
from flowrl.session.learner import load_policy
from flowrl.session.smaller_calls import explained
from flowrl.session.start_record import StartRecord
from flowrl.settings import RunSettings
from flowrl.settings.checks.machine import check_hub
from flowrl.settings.read import check_plan

PROMPTS = ("a red cube", "two blue cats on the table", "a photo of a small house near the sea")
SETTINGS = {
    "recipe": {"name": "flow_grpo"},
    "prompts": {"train": "built in"},
    "rewards": [{"name": "brightness"}],
}


def settings_of_proof(pipeline: str) -> dict[str, Any]:
    """Settings of a run that proves a pipeline without a run file."""
    return {**SETTINGS, "model": {"pipeline": pipeline}}


def prove_run(run: RunSettings, *, cache: bool, built_in: bool = False) -> bool:
    """Print the sentences of the proof and the table of deviations. Returns whether the pipeline
    is accepted; the reason of a refusal goes to standard error. `built_in`: prove it with built-in
    prompts, since the run has no file of its own."""
    if built_in:
        held_out = None
        prompts = PromptSet(PROMPTS, tuple({"prompt": text} for text in PROMPTS))
    else:
        prompts = run.prompts.read("train")
        held_out = None if run.prompts.held_out is None else run.prompts.read("held_out")
    check_plan(run)
    check_model_of(run)
    check_hub(run.model)
    with explained(run, trains=False):  # which is no reason to refuse a pipeline
        try:
            _prove(run, prompts, held_out, cache)
        except UserError as error:
            print(f"refused: {error}", file=sys.stderr)
            return False
    return True


def _prove(run: RunSettings, prompts: PromptSet, held_out: PromptSet | None, cache: bool) -> None:
    policy, rows = load_policy(run, device_of(run)), proof_prompts(prompts, held_out)
    if not isinstance(policy, PipelinePolicy):
        for sentence in policy.proofs(rows[0], run.algorithm().steps, rows[1]):
            print(sentence)
        return
    policy.check_rows(rows[1])
    digest = None  # a cached proof is of the run's own size
    if not other_sizes(policy, rows[1]):
        digest = proof_digest(run, policy, rows, held_out, StartRecord.of(run, 1))
    stored = proof_cache.read(digest) if cache and digest is not None else None
    if stored is None:
        sentences = policy.proofs(rows[0], run.algorithm().steps, rows[1])
    else:
        sentences = list(stored.sentences)
        stored.use(policy)
    print("\n".join(sentences), flush=True)
    whole = stored.whole if stored is not None else ()
    if not whole:
        for size in rows_by_size(policy, *rows):
            shown = tuple(size.take(rows[0])), tuple(size.take(rows[1]))
            whole = (*whole, *_whole(run, size.policy, shown, size.policy is policy))
        if digest is not None:
            proof_cache.keep(digest, CachedProof.of(policy, sentences, whole))
    print(f"{deviations(whole)}\n{LEGEND}")
    if stored is not None:
        print(stored.line)


def _whole(
    run: RunSettings, policy: PipelinePolicy, rows: PromptColumns, own_size: bool
) -> tuple[WholeProof, ...]:
    """The proofs over whole samples, with the steps, guidance scales and sizes of the run's
    training and evaluations. UserError if one fails. Rows with another size than the run's
    (`own_size` False) have it in evaluations too."""
    scales, steps, proofs = policy.guidance, run.algorithm().steps, []
    evaluator = evaluation_policy(policy, run)
    assert isinstance(evaluator, PipelinePolicy)
    evaluated = run.evaluation_steps, evaluator.guidance.sample
    sized = own_size and evaluator.loop is not policy.loop
    pairs = [(steps, scales.sample), (steps, scales.train), *(() if sized else (evaluated,))]
    cases = [(policy, *pair) for pair in dict.fromkeys(pairs)]
    for subject, count, guidance in [*cases, *([(evaluator, *evaluated)] if sized else ())]:
        replay = subject.known_proofs.get((count, guidance)) or subject.prove(
            rows[0][:2], steps=count, guidance=guidance, meta=rows[1][:2]
        )
        proofs.append(prove_whole(subject, *whole_prompts(rows), replay))
        failure = proofs[-1].failure()
        if failure is not None:
            print(deviations(proofs))
            raise UserError(f"{subject.name}: {failure}")
    return tuple(proofs)
