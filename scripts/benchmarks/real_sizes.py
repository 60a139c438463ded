"""Start a run at the true size of a published model, on a CPU and with random weights.

    python scripts/benchmarks/real_sizes.py sd35 --guidance 5 --height 512 --width 512
    python scripts/benchmarks/real_sizes.py wan --guidance 5 --height 160 --frames 5
    python scripts/benchmarks/real_sizes.py text
    python scripts/benchmarks/real_sizes.py sd35 --neighbours 0.01     must be refused

The models are the denoisers of SD3.5-medium, SDXL and Wan 2.1 1.3B, and Qwen2.5-0.5B, in bfloat16
with adapters of rank 16. `flowrl train` runs one iteration of few steps: its lines show the proof
and the noise floor. Then the run's peak memory, less that of a process which imports as much and
loads nothing, is compared with the estimate of `flowrl plan`, and the adapter is loaded into a
plain pipeline. `--neighbours` adds a share of another row's output to each.
"""

import argparse
import importlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import diffusers
import transformers
import yaml
from real_models import PIPELINES, TOKENS, has_adapter, save

from flowrl.cli.app import exit_code
from flowrl.estimate.memory import estimate
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.settings.read import read_run

TEXTS = ("a red ball", "a blue cube on the table left of a cat")


def settings(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "lora": {"rank": 16}}
    train = {"iterations": 1, "rows_per_call": 2, "gradient_checkpointing": True}
    prompts = folder / "prompts.jsonl"
    if given.model == "text":
        rows: list[dict[str, str]] = [{"prompt": "w1 w22 w333"}]
        recipe = {"name": "text_grpo", "length": 16, "group": 4}
        model |= {"language": str(folder / "model")}
        reward = {"name": "length", "kind": "near", "unit": "characters", "most": 100}
    else:
        rows = [{"prompt": text} for text in TEXTS]
        recipe = {"name": "flow_grpo", "steps": given.steps, "group": 2}
        call = {"num_frames": given.frames} if given.model == "wan" else {}
        call |= {} if given.model == "sdxl" else {"max_sequence_length": TOKENS}
        model |= {
            "pipeline": str(folder / "model"),
            "guidance": {"sample": given.guidance, "train": given.guidance},
            "height": given.height, "width": given.width, "call": call,
        }  # fmt: skip
        reward = {"name": "brightness"}
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "recipe": recipe, "model": model, "rewards": [reward], "train": train,
        "prompts": {"train": str(prompts), "per_iteration": 1},
    }  # fmt: skip


def mixed(share: float) -> None:
    """Let every pipeline that is loaded from now on mix a share of the next row into each."""
    load = PipelinePolicy.load.__func__  # type: ignore[attr-defined]

    def loaded(kind: Any, source: str, **how: Any) -> PipelinePolicy:
        policy = load(kind, source, **how)
        network = policy.denoisers[0]
        real = network.forward

        def forward(*args: Any, **named: Any) -> Any:
            output = real(*args, **named)[0]
            return (output + share * output.roll(1, 0),)

        vars(network)["forward"] = forward
        return policy

    vars_of: Any = PipelinePolicy
    vars_of.load = classmethod(loaded)


def in_a_process(work: Any, *words: Any) -> float:
    """Do work in a process of its own; its exit code must be 0. Return all such processes' peak."""
    process = get_context("spawn").Process(target=work, args=words)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{work.__name__} ended with exit code {process.exitcode}")
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20


def trained(words: list[str], neighbours: float) -> None:
    """Run `flowrl train`, then print the process's peak and CPU seconds as its last line."""
    if neighbours:
        mixed(neighbours)
    code = exit_code(["train", *words]) if words else imported()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"code": code, "peak": peak, "cpu": time.process_time()}))


def imported() -> int:
    """Import what a run does, and load nothing: `flowrl --help` needs less."""
    for name in ("flowrl.run.start", "flowrl.pages.run_page"):
        importlib.import_module(name)
    for kind in ("StableDiffusion3Pipeline", "StableDiffusionXLPipeline", "WanPipeline"):
        getattr(diffusers, kind)
    getattr(transformers, "Qwen2ForCausalLM")  # noqa: B009 libraries that import when asked
    return 0


def measured(words: list[str], neighbours: float, *, shown: bool = True) -> dict[str, float]:
    """Run this file in another process, and return what its last line says."""
    command = [sys.executable, __file__, "--run", str(neighbours), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = ""
        for line in process.stdout:
            if shown and not line.startswith('{"code"'):
                print(line, end="", flush=True)
    return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", choices=(*PIPELINES, "text"))
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--frames", type=int, default=5)
    parser.add_argument("--height", type=int, default=256, help="pixels")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--neighbours", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        in_a_process(save, given.model, given.seed, folder / "model")
        file = folder / "real_size.yaml"
        file.write_text(yaml.safe_dump(settings(given, folder)))
        expected = estimate(read_run(file))
        assert expected is not None
        empty = measured([], 0.0, shown=False)["peak"]
        began = time.perf_counter()
        found = measured([str(file), "--folder", str(folder / "run"), "--no-cache"],
                         given.neighbours)  # fmt: skip
        peak, planned = found["peak"] - empty, expected.total / 2**30
        print(
            f"{given.model}: exit code {found['code']}, {time.perf_counter() - began:.0f} s, "
            f"{found['cpu']:.0f} CPU s, peak {peak:.1f} GiB (estimate {planned:.1f}, "
            f"{planned / peak:.2f} of it)"
        )
        if not found["code"]:
            taken = has_adapter(given.model, folder / "model", folder / "run")
            print(f"adapter in a plain pipeline: {'loaded' if taken else 'EMPTY'}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        trained(sys.argv[3:], float(sys.argv[2]))
    else:
        main()
