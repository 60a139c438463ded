"""Estimate a run's memory.

Weights, gradients, optimizer, averages and decoded media are counted, and the activations of
denoisers whose inputs are known (`flowrl.estimate.activations`). Others' are estimated: per token
of an image or text, a block keeps KEPT_SHARE times the inputs and outputs of its linears (fitted to
measured saved tensors of SD3, FLUX and Wan), and a checkpointed block BETWEEN times its width.
Decoding is assumed to hold LAYERS layers of the
decoder's last level.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flowrl.estimate import sizes
from flowrl.estimate.activations import kept_by_call
from flowrl.estimate.by_size import at_size, size_shares
from flowrl.estimate.sizes import Sizes
from flowrl.estimate.started_adapters import StartedAdapters
from flowrl.models.own.policy import automatic_rows
from flowrl.paths import find
from flowrl.settings import (
    LanguageSettings,
    ModelSettings,
    OwnSettings,
    PipelineSettings,
    RunSettings,
)
from flowrl.settings.model.adapters import Lora
from flowrl.settings.sections.train import CallKind
from samplers import Plan

GIB = 2**30
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# (float32 adapters, half precision): these keep their inputs in float32, others in the model's type
KEPT_SHARE = {(False, False): 1.35, (True, False): 1.05, (False, True): 1.6, (True, True): 1.9}
BETWEEN = 1.7
LAYERS = 3
GRADED_LAYERS, CHECKPOINTED_LAYERS = 50, 20  # kept for gradients: measured 44 (SD3) to 51 (Wan)


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated memory of a run, in bytes.

    parts     on the device all the time
    phases    on the device one at a time
    resting   in CPU memory
    media     decoded samples, which stay on the device until they are scored
    outside   the fraction of the trained weights that FSDP2 does not shard
    gathered  bytes that one call under FSDP2 gathers
    whole     whether FSDP2 gathers the model to sample
    """

    parts: Mapping[str, int]
    phases: Mapping[str, int]
    unknown: tuple[str, ...]
    public: bool = False  # sizes are from flowrl's table, and not from the model's files
    resting: int = 0
    media: int = 0
    outside: float = 0.0
    gathered: int = 0
    whole: bool = False

    @property
    def total(self) -> int:
        phases = [n + self.media * (name == "decoding") for name, n in self.phases.items()]
        return sum(self.parts.values()) + max(phases, default=0)

    def sharded(self, processes: int) -> "MemoryEstimate":
        """Memory of one process under FSDP2: its share of the trained model, optimizer and
        averages, all weights outside an image model's blocks, what a call gathers, and the latents
        and media of its own draws."""
        shares = {"frozen parts": 1.0, "states": 0.0, "media": 0.0}
        wholes = {name: shares.get(name, self.outside) for name in self.parts}
        parts = {
            n: int(b * (wholes[n] + (1 - wholes[n]) / processes)) for n, b in self.parts.items()
        }
        phases = {name: n + self.gathered for name, n in self.phases.items()}
        if self.whole:
            trained = [self.parts.get(name, 0) for name in ("trained model", "adapters")]
            phases["sampling"] = sum(trained) - sum(trained) // processes
        return replace(self, parts=parts, phases=phases, media=-(-self.media // processes))

    def __str__(self) -> str:
        held = {**self.parts, **self.phases, "media": self.media}
        listed = ", ".join(f"{name} {size(n)}" for name, n in held.items() if n)
        lacks = f"; not counted: {', '.join(self.unknown)}" if self.unknown else ""
        table = (
            ("; sizes from flowrl's table, since the model is not on this machine")
            if self.public
            else ""
        )
        beside = f"; {size(self.resting)} on the CPU" if self.resting else ""
        return f"memory: about {size(self.total)} ({listed}){beside}{lacks}{table}"


def size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"


def estimate(run: RunSettings, iteration: int = 0) -> MemoryEstimate | None:
    """Estimate a run's memory, for a joint run of both models, at the largest size of its prompts;
    None if a model is not on this machine."""
    sizes = [at_size(run.trained_model, size.given) for _, size in size_shares(run)]
    estimates = [_of_model(run.model_copy(update={"model": m}), iteration) for m in sizes]
    largest = max((one for one in estimates if one is not None), key=_total, default=None)
    if run.joint is None or run.prompt_writer is None or largest is None:
        return largest
    before = _of_model(run.prompt_writer, iteration)
    if before is None:
        return None
    largest = largest if run.joint.train != "text" else _untrained(largest)
    before = before if run.joint.train != "image" else _untrained(before)
    return _together(before, largest, run.prompt_writer.model.device == "cpu")


def _total(memory: MemoryEstimate) -> int:
    return memory.total


def _untrained(memory: MemoryEstimate) -> MemoryEstimate:
    """The memory of a model that is only sampled from."""
    parts = {k: v for k, v in memory.parts.items() if k not in ("gradients", "optimizer", "states")}
    return replace(memory, parts=parts, phases={**memory.phases, "training": 0})


def _together(before: MemoryEstimate, drawer: MemoryEstimate, on_cpu: bool) -> MemoryEstimate:
    """Both models in memory, with one running at a time. `on_cpu`: the language model stays there
    with everything that it needs."""
    if on_cpu:
        return replace(drawer, resting=drawer.resting + before.total)
    parts = {f"the rewriter's {name}": size for name, size in before.parts.items()}
    phases = {f"the rewriter's {name}": size for name, size in before.phases.items()}
    unknown = (*drawer.unknown, *(f"the rewriter's {part}" for part in before.unknown))
    return replace(
        drawer, parts={**drawer.parts, **parts}, phases={**drawer.phases, **phases}, unknown=unknown
    )


def _of_model(run: RunSettings, iteration: int) -> MemoryEstimate | None:
    algorithm, m = run.algorithm(), run.model
    pipeline = m if isinstance(m, PipelineSettings) else None
    model = sizes.of(m, algorithm.steps)
    if model is None:
        return None
    rows = min(rows_per_call(run, model, "training"), _most_trained(run, iteration))
    together = max(rows, algorithm.loss.unit)  # a unit's rows have one backward, however many calls
    phases = {"training": _activations(run, model, together)}
    if model.cached:
        rows = min(rows_per_call(run, model, "sampling"), _most_generated(run))
        phases["sampling, keys and values"] = rows * model.cached * BYTES[run.model.dtype]
    if model.decoding:
        decoded = min(rows_per_call(run, model, "decoding"), _most_decoded(run, iteration))
        decoded = 1 if pipeline is not None and pipeline.vae.slicing else decoded
        wide = BYTES[run.model.dtype]
        phases["decoding"] = decoded * model.decoding * LAYERS * wide
        if algorithm.reward_gradient:
            layers = CHECKPOINTED_LAYERS if run.train.gradient_checkpointing else GRADED_LAYERS
            phases["decoding with gradients"] = decoded * model.decoding * layers * wide
    if pipeline is not None and pipeline.offload:
        phases["encoding"] = sum(model.frozen.values()) * BYTES[run.model.dtype]
    lacks = [f"weights of {name}" for name in model.unknown]
    if run.image_tokens is not None:
        lacks.append("activations of the decoder of images")
    if model.tokens is None and kept_by_call(run.model) is None:
        lacks.append("activations of a model without tokens")
    parts, resting = _weights(run, model) | {"states": _states(run, model, iteration)}, 0
    if run.train.states.device == "cpu" and run.model.device != "cpu":
        resting += parts.pop("states")
    if pipeline is not None and pipeline.offload_experts and m.device != "cpu":
        idle = (model.trained - model.largest) * BYTES[run.model.dtype]
        parts["trained model"] -= idle
        resting += idle
    media = 4 * model.media * _most_decoded(run, iteration)
    if run.model.device == "cpu":  # where they stay
        parts, media = parts | {"media": media}, 0
    return MemoryEstimate(
        parts=parts,
        phases=phases,
        unknown=tuple(lacks),
        public=model.public,
        resting=resting + media,
        media=media,
        outside=0.0 if isinstance(m, LanguageSettings) else model.outside / max(1, model.trained),
        gathered=_gathered(run, model),
        whole=_samples_whole(run),
    )


def _gathered(run: RunSettings, model: Sizes) -> int:
    """Bytes that one call under FSDP2 gathers: a block that is used and the next one; of a language
    model also what is outside of blocks, with its gradients."""
    count = 2 * model.block
    if isinstance(run.model, LanguageSettings):
        count += model.outside * (2 if run.model.lora is None else 1)
    return count * BYTES[run.model.dtype]


def _samples_whole(run: RunSettings) -> bool:
    """Whether a model of texts samples, or is sent to a server that does."""
    server = run.server
    keeps_weights = server is not None and server.sync == "none" and run.prompts.held_out is None
    return isinstance(run.model, LanguageSettings) and not keeps_weights


def _adapters(how: Lora, model: Sizes) -> int:
    """Number of adapter weights: from their rank, or from the file that training starts with."""
    if (started := StartedAdapters.of(how)) is not None:
        return started.weights
    return model.adapters * how.rank + (model.lengths if how.dora else 0)


def trained_weights(run: RunSettings, model: Sizes) -> int:
    """Number of trained weights."""
    return model.trained if run.model.lora is None else _adapters(run.model.lora, model)


def _weights(run: RunSettings, model: Sizes) -> dict[str, int]:
    m, wide = run.model, BYTES[run.model.dtype]
    fine = max(wide, 4)  # what steps are taken of is float32 at least
    trained = trained_weights(run, model)
    algorithm = run.algorithm()
    averages = len(run.averages(algorithm)) * fine * trained
    # the start of adapters is the base itself, with them off
    start = "ref" in algorithm.roles and (m.lora is None or bool(m.compiles))
    teachers = 0 if run.teachers is None else len(run.teachers.folders)
    for _ in range(start + teachers):
        averages += trained * (wide if m.lora is None else fine)
    held = fine * trained if m.lora is not None or wide < 4 else 0  # adapters, or float32 masters
    if m.half_adapters:
        held += BYTES["bfloat16"] * trained  # beside their masters
    waits = isinstance(m, PipelineSettings) and m.offload
    merges = m.lora is not None and m.lora.merge != "none"
    return {
        "trained model": _trained_model(m, model) + model.buffers,
        "merged weights": model.adapted * wide if merges else 0,
        "adapters" if m.lora is not None else "masters": held,
        "frozen parts": 0 if waits else _frozen(m, model),
        "gradients": fine * trained,
        "optimizer": (2 if run.train.optimizer == "adamw8bit" else 2 * fine) * trained,
        "averages and initial weights": averages,
    }


def _trained_model(m: ModelSettings, model: Sizes) -> int:
    """Bytes of the network that learns, or that has adapters."""
    wide, q = BYTES[m.dtype], m.quantized
    if q is None:
        return model.trained * wide
    if q.file is not None:
        return find(q.file).stat().st_size
    small = q.bytes_per_weight
    return (model.trained - model.linear) * wide + int(model.linear * small)


def _frozen(m: ModelSettings, model: Sizes) -> int:
    """Bytes of the other components. Quantized ones count as if all their weights were."""
    wide, q = BYTES[m.dtype], m.quantized
    small = {} if q is None else dict.fromkeys(q.components, q.bytes_per_weight)
    return sum(int(n * small.get(name, wide)) for name, n in model.frozen.items())


def rows_per_call(run: RunSettings, model: Sizes, kind: CallKind) -> int:
    """Rows per call as `Policy.automatic` chooses them; a search on a GPU may find other
    numbers."""
    written = run.train.call_sizes[kind]
    if written != "auto":
        return written
    if isinstance(run.model, LanguageSettings):
        return max(1, min(256, 2**14 // (model.rows * (model.tokens or 1))))
    if isinstance(run.model, OwnSettings):
        return automatic_rows(model.latent)
    return max(1, min(128, 2**18 // max(1, model.latent)))


def _most_trained(run: RunSettings, iteration: int) -> int:
    """The maximum rows of an update call: the texts of an optimizer step, or its samples, which are
    evaluated at one step of the plan at a time."""
    algorithm, draws, updates = (
        run.algorithm(),
        run.prompts.per_iteration * run.rewritings,
        run.train.updates,
    )
    if algorithm.text:
        return -(-draws * algorithm.group // updates)
    groups = max(2, *_groups(run, iteration))  # a given pair has 2
    if algorithm.reward_gradient or algorithm.loss.unit > 1:
        return draws * groups * max(1, algorithm.steps)
    return draws * -(-groups // updates)


def _most_generated(run: RunSettings) -> int:
    """The maximum texts of a generation call: of an iteration, or of an evaluation."""
    evaluated = 0 if run.prompts.held_out is None else run.evaluate.samples
    return max(run.prompts.per_iteration * run.algorithm().group, evaluated)


def _most_decoded(run: RunSettings, iteration: int) -> int:
    """The maximum samples of a decoder call."""
    evaluated = 0 if run.prompts.held_out is None else run.evaluate.samples
    return max(run.prompts.per_iteration * run.rewritings * max(_groups(run, iteration)), evaluated)


def _groups(run: RunSettings, iteration: int) -> list[int]:
    algorithm = run.algorithm()
    plans = algorithm.planned(run.levels(algorithm.steps), iteration, run.train.seed)
    return [plan.group for plan in plans]


def _activations(run: RunSettings, model: Sizes, rows: int) -> int:
    """Bytes that one call keeps for `backward`."""
    m, wide = run.model, BYTES[run.model.dtype]
    if (counted := kept_by_call(m)) is not None:
        one = counted.checkpointed if run.train.gradient_checkpointing else counted.whole
        return int(model.rows * rows * one / m.sharers)
    tokens, text = model.tokens or 0, model.text if model.tokens else 0
    state = model.rows * rows * wide / m.sharers
    seen = tokens * model.inside + text * model.text_inside
    precise = m.lora is not None and not m.half_adapters
    whole = state * seen * KEPT_SHARE[precise, wide < 4]
    if run.train.gradient_checkpointing:
        between = tokens * model.between + text * model.text_between
        whole = state * between * BETWEEN + whole / max(1, model.blocks)
    return int(whole)


def _states(run: RunSettings, model: Sizes, iteration: int) -> int:
    """Count bytes of the latents of trained steps and intermediate samples, or of clean and noised
    latents of matching losses."""
    algorithm = run.algorithm()
    if algorithm.text:
        return 0
    levels = run.levels(algorithm.steps)
    plans = [p for p in algorithm.planned(levels, iteration, run.train.seed) if isinstance(p, Plan)]
    nodes = sum(plan.trained_nodes for plan in plans)
    stored = (
        nodes
        + sum(plan.stored for plan in plans)
        + sum(plan.group for plan in plans) * (1 if nodes else 3)
    )
    wide = 4 if run.train.states.dtype is None else BYTES[run.train.states.dtype]
    return run.prompts.per_iteration * run.rewritings * stored * model.latent * wide
