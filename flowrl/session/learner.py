"""The policies that a run trains, their optimizers, and the processes that share them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from flowrl.algorithm import Algorithm
from flowrl.models import savings
from flowrl.models.adapters import adapter_switch, has_lengths
from flowrl.models.fixed_order import fix_order
from flowrl.models.merged import MergedAdapters
from flowrl.models.open import DTYPES, call_sizes, evaluation_policy, open_model
from flowrl.models.policy import Policy
from flowrl.models.precision import scaler
from flowrl.models.rewritten import REWRITER, RewrittenPolicy
from flowrl.models.saved_weights import load_saved
from flowrl.paths import find
from flowrl.processes import context_parallel
from flowrl.processes.launch import sharding
from flowrl.processes.parallel import Parallel
from flowrl.processes.sharding import Sharding
from flowrl.session import optimizers
from flowrl.session.policies import Policies
from flowrl.session.teachers import load_teachers
from flowrl.settings import RunSettings
from flowrl.settings.checks.machine import present_source
from flowrl.settings.checks.sharding import check_sharded
from flowrl.settings.sections.run import EVALUATION


@dataclass(frozen=True)
class Learner:
    """One model of a run as losses and updates need it, without prompts, rewards and folder.

    evaluator   the policy at the guidance and size of evaluations, with the same weights
    prompt_writer  the learner whose texts are this one's prompts; None: prompts are the run's
    name        of the model in metrics, checkpoints and folders; "" if rewards score its samples
    template    the text that the prompt writer gets, with {prompt} for the prompt
    loss_weight factor of the loss
    """

    run: RunSettings
    algorithm: Algorithm
    parallel: Parallel
    policy: Policy
    evaluator: Policy | RewrittenPolicy
    policies: Policies
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # of losses; does nothing unless the network is float16
    merging: MergedAdapters
    prompt_writer: "Learner | None" = None
    name: str = ""
    template: str = "{prompt}"
    loss_weight: float = 1.0

    @property
    def chain(self) -> "tuple[Learner, ...]":
        """The models that produce a sample, in the order of sampling; this one is the last."""
        return (*(() if self.prompt_writer is None else self.prompt_writer.chain), self)

    @property
    def learns(self) -> bool:
        """Whether the model has weights to train, or is only sampled from."""
        return bool(self.policies.parameters)

    def named(self, metric: str) -> str:
        return f"{self.name}/{metric}" if self.name else metric

    @contextmanager
    def using(self, which: str) -> Iterator[None]:
        """Run the modules of all models of the chain with the weights of a policy."""
        with ExitStack() as stack:
            for learner in self.chain:
                stack.enter_context(learner.policies.using(which))
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run the modules of the chain with the weights of evaluations, merged if set."""
        with self.using(evaluated(self.run)), ExitStack() as stack:
            for learner in self.chain:
                stack.enter_context(learner.merging.evaluation())
            yield

    def save(self, folder: Path) -> None:
        """Write the weights of the chain's trained models; a named model's go to its subfolder."""
        for learner in self.chain:
            if learner.learns:
                learner.policy.save(folder / learner.name)
        fix_order(folder)

    def close(self) -> None:
        for learner in self.chain:
            learner.policy.close()

    @classmethod
    def open(cls, run: RunSettings, folder: Path, accelerator: Accelerator) -> "Learner":
        """Load and shard the models. UserError for a model or processes that cannot run."""
        how = sharding(accelerator)  # before weights are loaded, since it may refuse
        if how is not None:
            check_sharded(run)
        learner = cls._one(run, folder, accelerator, how, run.learns)
        if run.prompt_writer is None:
            return learner
        joint, rewriter = run.joint, run.rewriter
        assert joint is not None and rewriter is not None
        writer = cls._one(run.prompt_writer, folder, accelerator, None, joint.train != "image")
        writer = replace(writer, name=REWRITER, template=rewriter.template)
        text: Any = writer.evaluator
        image: Any = learner.evaluator
        pair = RewrittenPolicy(text, image, rewriter.template, run.prompt_writer.evaluation_steps)
        return replace(learner, prompt_writer=writer, evaluator=pair, loss_weight=joint.weight)

    @classmethod
    def _one(
        cls,
        run: RunSettings,
        folder: Path,
        accelerator: Accelerator,
        how: Sharding | None,
        learns: bool,
    ) -> "Learner":
        merge = "none" if run.model.lora is None else run.model.lora.merge
        context_parallel.refuse_model(run.model, accelerator.num_processes)
        algorithm = run.algorithm()
        device = torch.device("cpu") if run.model.device == "cpu" else accelerator.device
        policy = load_policy(run, device, folder, learns)
        teachers = load_teachers(run, policy)  # before sharding, as whole weights
        evaluator = evaluation_policy(policy, run)  # before sharding: it calls the whole model
        parallel = Parallel.open(accelerator, policy.roots(), how, run.model.sharers)
        policies = Policies(
            policy.trainable() if learns else {},
            run.averages(algorithm),
            keep_start="ref" in algorithm.roles,
            changed=parallel.reshard if parallel.blocks else None,
            switch=None if run.model.compiles else adapter_switch(policy.roots().values()),
            loaded=teachers,
        )
        parallel.follow(policies)
        optimizer = optimizers.build(run.train, policies.parameters.values())
        losses = scaler(device, DTYPES[run.model.dtype])
        merging = MergedAdapters.of(policy.roots(), merge if learns else "none")
        return cls(
            run=run,
            algorithm=algorithm,
            parallel=parallel,
            policy=policy,
            evaluator=evaluator,
            policies=policies,
            optimizer=optimizer,
            scaler=losses,
            merging=merging,
        )

    @property
    def sampler(self) -> str:
        """Name of the policy that drew the samples, with its weights at that time."""
        return self.policies.at_sampling(self.algorithm.behaviour)

    @property
    def old(self) -> str:
        """Name of the policy that evaluates `old` for rows without it: the sampling policy, or the
        proximal policy, with the weights at the start of the update (`train.recompute_old` and a
        lag)."""
        return "current" if self.decouples else self.sampler

    @cached_property
    def recomputes_old(self) -> bool:
        """Whether updates compute the samples' log-probabilities again."""
        return self.run.recomputes_old

    @cached_property
    def decouples(self) -> bool:
        """Whether `old` is the proximal policy: see `Run.decouples`."""
        return self.run.decouples(self.algorithm)

    def __str__(self) -> str:
        """Device, precision and trained parameters in one line per model."""
        if self.prompt_writer is not None:
            drawer = replace(self, prompt_writer=None)
            return f"{self.prompt_writer}, which rewrites the prompts\n{drawer}"
        m, device = self.run.model, self.parallel.device
        name = f" ({torch.cuda.get_device_name()})" if device == "cuda" else ""
        tf32 = " by TF32" if device == "cuda" and torch.backends.cuda.matmul.allow_tf32 else ""
        trained = sum(p.numel() for p in self.policies.network.values())
        whole = sum(p.numel() for root in self.policy.roots().values() for p in root.parameters())
        how = (
            "all weights"
            if m.lora is None
            else f"the adapters of {m.lora.start}"  # which have their own rank
            if m.lora.start is not None
            else f"{'DoRA' if m.lora.dora else 'LoRA'} of rank {m.lora.rank}"
        )
        how = how if self.learns else "nothing"
        off = m.compiles == "auto" and not savings.are_compiled(self.policy.roots().values())
        compiled = f"; model.compile: auto is off on {device}" if off else ""
        return (
            f"device {device}{name}, {m.dtype}{tf32}; trained: {how}, {trained / 1e6:.4g} of "
            f"{whole / 1e6:.4g} million parameters{compiled}"
        )


def load_policy(
    run: RunSettings, device: torch.device, folder: Path | None = None, learns: bool = True
) -> Policy:
    """Load the model with new adapters, or with all weights trainable; unchanged if it does not
    learn."""
    m = run.model
    policy = open_model(run, device, folder)
    policy.sizes.take(asdict(call_sizes(run, policy.automatic(run.algorithm().steps))))
    if not learns:
        return policy
    if m.lora is None:
        policy.train_all()
    elif m.lora.start is not None:
        start, place = m.lora.start, "model.lora.from"
        load_saved(find(start), place, lambda: policy.begin_from(present_source(start)))
    else:
        policy.add_lora(
            rank=m.lora.rank,
            alpha=m.lora.alpha,
            targets=m.lora.targets,
            seed=run.train.seed,
            dora=m.lora.dora,
        )
    if m.half_adapters and not has_lengths(policy.trainable()):  # `Policies` makes float32 masters
        for adapter in policy.trainable().values():
            adapter.data = adapter.data.bfloat16()
    if run.train.gradient_checkpointing:
        policy.checkpoint_gradients()
    return policy


def load_models(run: RunSettings, device: torch.device) -> Policy | RewrittenPolicy:
    """The run's model as commands open it: in a joint run both models, with their trained parts."""
    policy = load_policy(run, device, learns=run.learns)
    if run.prompt_writer is None or run.joint is None or run.rewriter is None:
        return policy
    learns = run.joint.train != "image"
    text = load_policy(run.prompt_writer, device, learns=learns)
    template, length = run.rewriter.template, run.prompt_writer.evaluation_steps
    return RewrittenPolicy(text, policy, template, length, (learns, run.learns))


def evaluated(run: RunSettings) -> str:
    """Name of the policy that evaluations and exports use."""
    return EVALUATION if run.evaluate.average is not None else "current"
