"""`model.compile` at SD3.5-medium's size: seconds until it runs, cold and from its cache; what it
gains; whether its numbers are those of the plain blocks."""

import tarfile
from typing import Any

import torch

from flowrl.models import savings
from scripts.benchmarks.network_alone import network_alone
from scripts.gpu.subjects import SD35, opened
from scripts.gpu.trial import LARGEST, Trial

CLOSE = 0.05  # relative difference of outputs in bfloat16


def measure(trial: Trial) -> None:
    with opened(SD35, rehearse=trial.rehearse) as session:
        rows = 1 if trial.rehearse else 4
        roots = session.learner.policy.roots().values()
        frozen, graded = network_alone(session, rows)
        calls = (("without gradients", frozen), ("with gradients", graded))
        plain = [trial.timed(f"plain, {name}", call, rows=rows) for name, call in calls]
        if not trial.tried("compile", lambda: compiled(trial, session)):
            return
        for (name, call), before in zip(calls, plain, strict=True):
            seconds = trial.wall(call)
            trial.measured(f"cold, {name}", seconds=seconds)
            after = trial.timed(f"compiled, {name}", call, rows=rows)
            trial.measured(f"compiled beside plain, {name}", ratio=after / before)
        breaks = torch._dynamo.utils.counters["graph_break"]
        trial.measured("graph breaks", number=sum(breaks.values()), reasons=dict(breaks))
        same_outputs(trial, session, roots)
        torch.compiler.reset()
        for name, call in calls:
            trial.measured(f"from the cache, {name}", seconds=trial.wall(call))
    packed_cache(trial)


def compiled(trial: Trial, session: Any) -> str:
    """Compile the denoiser's blocks at their next call."""
    if trial.rehearse:
        raise RuntimeError("the pretended device has no Triton")
    savings.compile_blocks(session.learner.policy.denoisers)
    return "blocks are compiled at their next call"


def same_outputs(trial: Trial, session: Any, roots: Any) -> None:
    """Check the compiled network's output against the plain one's."""
    outputs = []
    denoiser = session.learner.policy.denoisers[0]
    frozen, _ = network_alone(session, 1)
    hook = denoiser.register_forward_hook(
        lambda _m, _a, out: outputs.append(out[0].float().clone())
    )
    frozen()
    savings.uncompile(roots)
    frozen()
    hook.remove()
    one, other = outputs[0], outputs[len(outputs) // 2]
    error = float((one - other).norm() / other.norm())
    trial.check("compiled output", error <= CLOSE, error=error, allowed=CLOSE)
    savings.compile_blocks(session.learner.policy.denoisers)


def packed_cache(trial: Trial) -> None:
    """Put the compiler's cache into a file that comes back, if it is small enough."""
    cache, file = trial.out / "compiled", trial.out / "compiled.tar.gz"
    if not cache.is_dir():
        return
    with tarfile.open(file, "w:gz") as out:
        out.add(cache, "compiled")
    size = file.stat().st_size
    if size > LARGEST:
        file.unlink()
    trial.measured("compiler's cache", bytes=size, back=size <= LARGEST)
