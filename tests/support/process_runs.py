"""Runs that several processes train together. As a script it is what each of the processes does:

    accelerate launch --config_file CONFIG tests/support/process_runs.py JOBS OUT

JOBS is a JSON file `{name: job}`; OUT gets `name.safetensors`, the weights of all policies, and
`name.json`, what the last iteration measured and what the processes were. A job that stops leaves
`name.0.txt` and `name.1.txt`, what each process said.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Required, TypedDict
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from flowrl.errors import UserError
from flowrl.models.language import token_scores
from flowrl.models.shards import local_shard
from flowrl.paths import PROJECT
from flowrl.processes import parallel
from flowrl.run.evaluate.start_checks import prove_pipeline
from flowrl.run.model_proof import StartProof
from flowrl.session.progress import Progress
from tests.support import runs
from tests.support.iterations import iterate

DDP, FSDP2 = (PROJECT / "configs/accelerate" / f"{n}_cpu_2.yaml" for n in ("ddp", "fsdp2"))
Weights = dict[str, torch.Tensor]


class Job(TypedDict, total=False):
    settings: Required[dict[str, Any]]
    iterations: Required[int]
    poison: bool  # gradients of the second process are not numbers
    most_rows: int  # more of them in one call are too many for the second process's memory
    stops: bool  # a UserError is expected of every process
    logits: int  # that are held at once
    cramped: bool  # no process has room for whole weights
    unrounded: bool  # networks that turn float64 to float32 inside are kept from it
    resizes: bool  # its network (Cosmos) resizes by torchvision, for which a stand-in does
    counts: bool  # bytes of collectives are counted, of the last iteration


@contextmanager
def unrounded() -> Iterator[None]:
    """`Tensor.float` leaves float64 as it is, and Wan has no weights that are always float32."""
    rounds = torch.Tensor.float
    kept = patch.object(WanTransformer3DModel, "_keep_in_fp32_modules", None)
    exact = patch.object(
        torch.Tensor, "float", lambda t: t if t.dtype == torch.float64 else rounds(t)
    )
    with kept, exact:
        yield


@contextmanager
def counted(sent: dict[str, float]) -> Iterator[None]:
    """Count the bytes that collectives of large tensors send; a sum over processes sends twice."""
    share = 1 - 1 / dist.get_world_size()
    sizes = {"all_gather_single": (0, 1.0), "reduce_scatter_single": (1, 1.0)}
    sizes |= {"all_reduce": (0, 2.0)}
    with ExitStack() as patches:
        for name, (place, times) in sizes.items():
            real = getattr(dist, name)

            def call(*args: Any, real=real, name=name, place=place, times=times, **how: Any) -> Any:
                keys = ("output_tensor", "input_tensor", "output", "input", "output_list")
                given = [*args, *(how[key] for key in keys if key in how)]
                tensors = [each for each in given if isinstance(each, torch.Tensor)]
                large = tensors[place]
                if large.numel() > 64:
                    bytes_sent = share * times * large.numel() * large.element_size()
                    sent[name] = sent.get(name, 0.0) + bytes_sent
                return real(*args, **how)

            patches.enter_context(patch.object(dist, name, call))
        yield


def train(job: Job, out: Path, name: str) -> None:
    held = job.get("logits", token_scores.LOGITS_HELD)
    with ExitStack() as patches:
        patches.enter_context(patch.object(token_scores, "LOGITS_HELD", held))
        if job.get("unrounded"):
            patches.enter_context(unrounded())
        if job.get("resizes"):
            from tests.support.tiny_modular import anima

            anima()
        if job.get("cramped"):
            patches.enter_context(patch.object(parallel, "free_bytes", lambda _: 0))
        _train(job, out, name)


def _train(job: Job, out: Path, name: str) -> None:
    """Iterate, and let the main process write down what came of it."""
    kept = runs.opened(job["settings"], out)
    proof = StartProof(kept, cache=False)
    with kept.parallel.together():
        prove_pipeline(kept, proof)
    if job.get("poison") and not kept.parallel.main:
        for parameter in kept.learner.policies.parameters.values():
            parameter.register_hook(lambda grad: grad * float("nan"))
    if "most_rows" in job and not kept.parallel.main:
        little_memory(kept.learner.policy, job["most_rows"])
    progress, first = Progress(), kept.learner.policies.state()
    metrics, replayed, norms = dict[str, float](), 0.0, list[float]()
    sent = dict[str, float]()
    with counted(sent) if job.get("counts") else nullcontext():
        for _ in range(job["iterations"]):
            sent.clear()  # the first iteration checks ratios, too
            metrics = iterate(kept, progress).metrics
            replayed += metrics.get("budget/replayed", 0.0)
            norms.append(metrics["grad_norm"])
    weights = kept.learner.policies.state()
    parameters = [p for root in kept.learner.policy.roots().values() for p in root.parameters()]
    held = gather_object([sum(local_shard(p).nbytes for p in parameters)])
    company = kept.parallel.lockstep.company if kept.parallel.lockstep else 0
    every = gather_object([company])
    if kept.parallel.main:
        save_file({k: v.contiguous() for k, v in weights.items()}, out / f"{name}.safetensors")
        moved = max(float((weights[n] - first[n]).abs().max()) for n in first if "current/" in n)
        sizes = str(kept.learner.policy.sizes)
        told = {"metrics": metrics, "processes": str(kept.parallel), "company": every}
        told |= {"sizes": sizes, "held": held, "bytes": sum(p.nbytes for p in parameters)}
        # the latter two over all iterations
        told |= {"moved": moved, "replayed": replayed, "norms": norms, "sent": sent}
        (out / f"{name}.json").write_text(json.dumps(told))


def little_memory(policy: Any, most: int, graded: bool | None = None) -> None:
    """Let the denoiser run out of memory in calls of more than `most` rows: in all of them, or in
    those with gradients or without."""
    for denoiser in policy.denoisers:
        forward = denoiser.forward

        def little(*args: Any, forward=forward, **named: Any) -> Any:
            rows = len(named.get("hidden_states", args[0] if args else ()))
            if rows > most and graded in (None, torch.is_grad_enabled()):
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried {rows} rows")
            return forward(*args, **named)

        denoiser.forward = little


def alone(job: Job, out: Path, **more: Any) -> Weights:
    """The same in this process; `more` are settings of `train`."""
    out.mkdir(exist_ok=True)
    settings = {**job["settings"], "train": {**job["settings"]["train"], **more}}
    train({**job, "settings": settings}, out, "alone")
    return load_file(out / "alone.safetensors")


def launch(config: Path, *words: str | Path, timeout: float = 300) -> subprocess.CompletedProcess:
    """`accelerate launch --config_file config words`, until its end, whose time is bounded."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, *words]
    return subprocess.run(
        [str(word) for word in command],
        env=runs.environment() | {"PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        cwd=PROJECT,
    )


def together(config: Path, jobs: Mapping[str, Job], out: Path) -> dict[str, Weights]:
    """Weights by job, trained by the processes of an accelerate config."""
    out.mkdir(exist_ok=True)
    (out / "jobs.json").write_text(json.dumps(jobs))
    ended = launch(config, PROJECT / "tests/support/process_runs.py", out / "jobs.json", out)
    (out / "log.txt").write_text(ended.stdout)
    assert ended.returncode == 0, ended.stdout[-9000:]
    return trained(jobs, out)


def trained(jobs: Mapping[str, Job], out: Path) -> dict[str, Weights]:
    done = [name for name in jobs if not jobs[name].get("stops")]
    return {name: load_file(out / f"{name}.safetensors") for name in done}


def check_two_as_one(jobs: Mapping[str, Job], out: Path, apart_below: float) -> None:
    """Fail unless two processes train the weights of one process in small chunks."""
    both = together(DDP, jobs, out / "both")
    for name, job in jobs.items():
        one = alone(job, out / name, rows_per_call=3)
        assert apart(one, both[name]) < apart_below, name
        assert told(out / "both", name)["moved"] > 1e-5, name


def told(out: Path, name: str) -> dict[str, Any]:
    return json.loads((out / f"{name}.json").read_text())


def apart(a: Weights, b: Weights) -> float:
    """The largest difference of two runs' weights."""
    assert a.keys() == b.keys() and a
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def main(words: Sequence[str]) -> None:
    torch.set_num_threads(1)
    jobs, out = json.loads(Path(words[0]).read_text()), Path(words[1])
    for name, job in jobs.items():
        try:
            train(job, out, name)
        except (UserError, RuntimeError) as error:
            if not job.get("stops"):
                raise
            said = f"{type(error).__name__}: {error}"
            (out / f"{name}.{PartialState().process_index}.txt").write_text(said)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
