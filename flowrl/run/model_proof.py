"""The proof of the model at the start of a run: new, or cached from an earlier start.

Only the main process looks for a cached proof, and broadcasts the result: a proof calls the model,
which under FSDP2 all processes must do together or not at all.
"""

from collections.abc import Mapping
from typing import Any

from accelerate.utils import broadcast_object_list

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.sizes.by_size import other_sizes
from flowrl.models.diffusers.whole import proof_cache as proof_cache
from flowrl.models.diffusers.whole.proof_cache import CachedProof
from flowrl.models.rewritten import instructed
from flowrl.prompts import PromptSet
from flowrl.session.session import Session
from flowrl.session.start_record import StartRecord
from flowrl.settings import RunSettings
from flowrl.settings.read import dump

PromptColumns = tuple[
    tuple[str, ...], tuple[Mapping[str, Any], ...]
]  # prompts, and their rows of the file


def proof_prompts(prompts: PromptSet, held_out: PromptSet | None) -> PromptColumns:
    """All prompts of a run, with their rows in the files."""
    held_out_columns = (held_out.texts, held_out.meta) if held_out else ((), ())
    return (*prompts.texts, *held_out_columns[0]), (*prompts.meta, *held_out_columns[1])


def whole_prompts(rows: PromptColumns) -> PromptColumns:
    """The shortest, median and longest prompt, with their rows."""
    texts, meta = rows
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    places = dict.fromkeys((order[0], order[len(order) // 2], order[-1]))
    return tuple(texts[i] for i in places), tuple(meta[i] for i in places if meta)


def proof_digest(
    run: RunSettings,
    policy: PipelinePolicy,
    rows: PromptColumns,
    held_out: PromptSet | None,
    start_record: StartRecord,
    *,
    sharded: bool = False,
) -> str:
    """The digest of a run's start: see `proof_cache`."""
    settings = {
        "model": dump(run)["model"],
        "gradient_checkpointing": run.train.gradient_checkpointing,
        "steps": [run.algorithm().steps, run.evaluation_steps],
        "own_sampler": policy.loop.own_sampler,
        "levels": [run.levels(n) for n in (run.algorithm().steps, run.evaluation_steps)],
        "evaluation": [run.evaluation_guidance, run.evaluation_size, run.evaluate.call],
        "base": start_record.base,
        "processes": [start_record.processes, sharded],
    }
    first: PromptColumns = ((), ()) if held_out is None else (held_out.texts[:1], held_out.meta[:1])
    columns = [(rows[0][:2], rows[1][:2]), whole_prompts(rows), first]
    texts, meta = (
        [value for part in parts for value in part] for parts in zip(*columns, strict=True)
    )
    return proof_cache.digest(policy, settings, texts, meta)


class StartProof:
    """Finds the cached proof of a run's start on all processes. `kept` is None without a cached
    proof. Without `cache` nothing is looked up, but a new proof is stored."""

    def __init__(self, session: Session, cache: bool) -> None:
        self.session = session
        self.rows = proof_prompts(session.prompts, session.held_out)
        self.digest: str | None = None  # of a pipeline, on the main process
        self.sentences: list[str] = []
        box: list[CachedProof | None] = [None]
        if session.parallel.main:
            box[0] = self._found(cache)
        broadcast_object_list(box)
        self.kept = box[0]

    def _found(self, cache: bool) -> CachedProof | None:
        session = self.session
        if not isinstance(session.learner.policy, PipelinePolicy) or session.start_record is None:
            return None
        try:
            if other_sizes(session.learner.policy, self.rows[1]):
                return None  # a cached proof is of the run's own size
            self.digest = proof_digest(
                session.run,
                session.learner.policy,
                self.rows,
                session.held_out,
                session.start_record,
                sharded=session.parallel.lockstep is not None,
            )
        except (UserError, OSError, *FAILURES):  # raised here it would leave the others waiting
            return None  # the proof itself names it
        return proof_cache.read(self.digest) if cache else None

    def prove(self) -> None:
        """Prove the model unless a proof is cached, and print the proof's sentences."""
        policy, say = self.session.learner.policy, self.session.terminal.say
        if (writer := self.session.prompt_writer) is not None:
            instructions = instructed(writer.template, self.rows[0])
            for sentence in writer.learner.policy.proofs(instructions, writer.algorithm.steps):
                say(sentence)
        if isinstance(policy, PipelinePolicy):
            policy.check_all_rows(self.rows[1])
        if self.kept is not None and isinstance(policy, PipelinePolicy):
            self.kept.use(policy)
            self.sentences = [*self.kept.sentences]
            after = [self.kept.line]
        else:
            texts, meta = self.rows
            self._send()
            self.sentences, after = policy.proofs(texts, self.session.algorithm.steps, meta), []
        for sentence in (*self.sentences, *after):
            say(sentence)

    def _send(self) -> None:
        """Send sharded weights to the server that samples, while they are gathered."""
        server, parallel = self.session.run.server, self.session.parallel
        if server is not None and server.sync == "weights" and parallel.blocks:
            from flowrl.models.language.policy import CausalPolicy

            policy = self.session.learner.policy
            assert isinstance(policy, CausalPolicy) and policy.server is not None
            assert policy.server.adapters is not None, "sync keeps the server in step"
            with parallel.whole():
                policy.server.adapters.current()

    def keep(self) -> None:
        """Store a new proof, with the proofs that the base model's evaluation added."""
        policy = self.session.learner.policy
        if self.digest is not None and self.kept is None and isinstance(policy, PipelinePolicy):
            proof_cache.keep(self.digest, CachedProof.of(policy, self.sentences))
