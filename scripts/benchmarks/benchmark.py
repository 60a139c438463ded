"""Peak memory and seconds per iteration of Flow-GRPO, MixGRPO and BranchGRPO on a GPU.

    python scripts/benchmarks/benchmark.py --out runs/benchmark   # on a GPU; repeat until done
    python scripts/benchmarks/benchmark.py --tiny --out runs/tiny # a smoke test on the CPU

A call takes ten minutes at most (`--seconds`): each case becomes a file of `out` once it is
measured, finished cases are not repeated, and a killed case is recorded as killed. The exit code is
0 once all are done, 1 while some are left. The table of all cases is printed at the end.

The architecture of Stable Diffusion 3.5 Medium at 512 px and of Wan 2.1 1.3B at 480 px with random
weights in bfloat16, adapters of rank 32, one draw of a group of 8, brightness as the reward. Prompt
encoders are tiny ones of the right widths: encodings are made once and are not measured.
`ratio` is the iteration beside its own network evaluations timed alone: as many calls of the bare
denoiser, without and with gradients, at the same batch. Those are timed first, and warm up; of the
iterations the median is taken, and none begins once they have taken two minutes.
"""

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import tyro
from diffusers import AutoencoderKL, AutoencoderKLWan, SD3Transformer2DModel, WanTransformer3DModel

from flowrl.cli.commands import quiet
from flowrl.estimate import memory
from flowrl.session.progress import Progress
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings import RECIPE_SETTINGS
from flowrl.settings.read import run_from
from tests.support.iterations import iterate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.benchmarks.benchmark_results import Case, Results
from scripts.benchmarks.network_alone import network_alone
from tests.support.tiny_pipelines import NAMED

RECIPES: dict[str, dict[str, Any]] = {
    "flow_grpo": {"steps": 10, "group": 8},
    "mix_grpo": {"steps": 10, "group": 8, "window": 4},
    "branch_grpo": {"steps": 10, "branch": 2, "at": [0, 3, 6]},
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"train": {"gradient_checkpointing": True}},
    "compile": {"model": {"compile": True}},
    "both": {"train": {"gradient_checkpointing": True}, "model": {"compile": True}},
}


ENOUGH = 120  # seconds of iterations


@dataclass
class Arguments:
    models: tuple[str, ...] = ("sd35m", "wan13b")
    recipes: tuple[str, ...] = tuple(RECIPES)
    ways: tuple[str, ...] = ("plain", "checkpointing", "compile", "both")
    rows: int | None = None
    """Rows per call; by default 4 images, or 1 video."""
    frames: int = 81
    """Of Wan; as many as the memory allows."""
    iterations: int = 3
    tiny: bool = False
    """Tiny models on the CPU: shows that the script runs (compile wants a C compiler), and nothing
    of speed."""
    out: Path = Path("runs/benchmark")
    """A folder: a JSON file a case."""
    seconds: float = 540
    """Of this call: no case begins that would hardly end within it."""


@dataclass(frozen=True)
class Subject:
    """A model's architecture: its family's pipeline with another denoiser and decoder."""

    family: str
    denoiser: Callable[[], Any]
    decoder: Callable[[], Any] | None
    size: dict[str, int]
    rows: int
    call: dict[str, Any] = field(default_factory=dict)


def sd35m() -> Any:
    """stabilityai/stable-diffusion-3.5-medium's configuration, the widths of prompts aside."""
    return SD3Transformer2DModel(
        sample_size=128, patch_size=2, in_channels=16, out_channels=16, num_layers=24,
        attention_head_dim=64, num_attention_heads=24, joint_attention_dim=32,
        caption_projection_dim=1536, pooled_projection_dim=32, pos_embed_max_size=384,
        qk_norm="rms_norm", dual_attention_layers=tuple(range(13)),
    )  # fmt: skip


def wan13b() -> Any:
    """Wan-AI/Wan2.1-T2V-1.3B-Diffusers' configuration, the width of prompts aside."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=12, attention_head_dim=128, in_channels=16,
        out_channels=16, text_dim=16, freq_dim=256, ffn_dim=8960, num_layers=30,
        cross_attn_norm=True, qk_norm="rms_norm_across_heads",
    )  # fmt: skip


def image_decoder() -> Any:
    """The decoder of Stable Diffusion 3: an eighth of the side, 16 channels."""
    return AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=16, layers_per_block=2, scaling_factor=1.5305, shift_factor=0.0609,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def subjects(arguments: Arguments) -> dict[str, Subject]:
    wan = {"num_frames": 5 if arguments.tiny else arguments.frames}
    if arguments.tiny:
        small = {"height": 16, "width": 16}
        return {
            "sd35m": Subject("SD3", lambda: NAMED["SD3"].build().transformer, None, small, 4),
            "wan13b": Subject(
                "Wan 2.1", lambda: NAMED["Wan 2.1"].build().transformer, None, small, 1, wan
            ),
        }
    wide = {"height": 480, "width": 832}
    square = {"height": 512, "width": 512}
    return {
        "sd35m": Subject("SD3", sd35m, image_decoder, square, 4),
        "wan13b": Subject("Wan 2.1", wan13b, AutoencoderKLWan, wide, 1, wan),
    }


def write(subject: Subject, folder: Path, dtype: torch.dtype) -> Path:
    """The pipeline's folder; random weights, of a size that keeps bfloat16 finite."""
    pipe = NAMED[subject.family].build()
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # billions of random numbers
        parts = {**pipe.components, "transformer": subject.denoiser()}
        if subject.decoder is not None:
            parts["vae"] = subject.decoder()
    type(pipe)(**parts).to(dtype).save_pretrained(folder)
    return folder


def settings(
    subject: Subject, source: Path, recipe: str, way: str, arguments: Arguments
) -> dict[str, Any]:
    prompts = source / "prompts.txt"
    prompts.write_text("a red ball\na blue cube\n")
    half = "float32" if arguments.tiny else "bfloat16"
    model = {
        "pipeline": str(source), "dtype": half, "lora": {"rank": 32, "alpha": 64}, **subject.size,
        "call": {"max_sequence_length": 16, **subject.call},
    }  # fmt: skip
    rows = arguments.rows or subject.rows
    train = {"rows_per_call": rows, "lr": 1e-4, "self_test": "off", "alarms": "off"}
    more = WAYS[way]
    fields = RECIPE_SETTINGS[recipe].model_fields
    clip = {"clip": 1.0} if "clip" in fields else {}  # random weights in bfloat16: no verdict
    return {
        "recipe": {"name": recipe, **RECIPES[recipe], **clip},
        "model": model | more.get("model", {}),
        "prompts": {"train": str(prompts), "per_iteration": 1},
        "rewards": [{"name": "brightness"}],
        "train": train | more.get("train", {}),
        "track": {"images": 0},
    }


def opened(tree: dict[str, Any], folder: Path) -> Session:
    run = run_from(tree, "benchmark")
    return open_session(run, folder, open_accelerator(run, folder))


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def alone(session: Session) -> tuple[float, float]:
    """Seconds per row of the bare denoiser: without gradients, and with backward."""
    policy: Any = session.learner.policy
    rows, device = policy.rows_per_call, session.accelerator.device
    frozen, graded = network_alone(session, rows)
    return timed(frozen, device) / rows, timed(graded, device) / rows


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """The median of the seconds of five calls, or of fewer slow ones, after two that warm up."""
    taken: list[float] = []
    for repeat in range(7):
        began = clock(device)
        call()
        if repeat > 1:
            taken.append(clock(device) - began)
        if sum(taken) > 10:
            break
    return sorted(taken)[len(taken) // 2]


def measured(tree: dict[str, Any], folder: Path, iterations: int) -> dict[str, Any]:
    session = opened(tree, folder)
    progress, metrics = Progress(), dict[str, float]()
    frozen, graded = alone(session)
    if session.accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken: list[float] = []
    while len(taken) < iterations and sum(taken) < ENOUGH:
        began = clock(session.accelerator.device)
        metrics = iterate(session, progress).metrics
        taken.append(clock(session.accelerator.device) - began)
    peak = torch.cuda.max_memory_allocated() if session.accelerator.device.type == "cuda" else None
    counts = {name: metrics[f"count/{name}"] for name in ("sampling", "training", "frozen")}
    network = frozen * (counts["sampling"] + counts["frozen"]) + graded * counts["training"]
    seconds, wanted = sorted(taken)[len(taken) // 2], memory.estimate(session.run)
    return {
        "iterations": taken,
        "seconds": seconds,
        "seconds/sample": metrics["seconds/sample"],
        "seconds/update": metrics["seconds/update"],
        "network_alone": network,
        "row_frozen": frozen,
        "row_graded": graded,
        "ratio": seconds / network,
        "peak_bytes": peak,
        "estimated_bytes": None if wanted is None else wanted.total,
        "evaluations": counts,
    }


def kept(results: Results, case: Case, tree: dict[str, Any], iterations: int) -> None:
    """Measure, print and keep one."""
    results.begin(case)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found: dict[str, Any] = measured(tree, Path(folder), iterations)
        except torch.OutOfMemoryError as error:
            found = {"error": str(error).splitlines()[0]}
    found["wall"] = time.perf_counter() - began
    print(json.dumps(results.save(case, found)), flush=True)
    gc.collect()
    torch.compiler.reset()  # or the next case's blocks are one recompilation too many
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def call(arguments: Arguments, results: Results, cases: list[Case]) -> None:
    """Run as many cases as this call has time for, at least one."""
    end = time.perf_counter() + arguments.seconds
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    sources: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as place:
        for case in results.left(cases):
            remaining = end - time.perf_counter()
            if sources and not results.fits(case, remaining, arguments.seconds):
                return
            subject = subjects(arguments)[case.model]
            if case.model not in sources:
                sources[case.model] = write(subject, Path(place) / case.model, dtype)
            tree = settings(subject, sources[case.model], case.recipe, case.way, arguments)
            kept(results, case, tree, arguments.iterations)


def main(arguments: Arguments) -> int:
    quiet()
    if not arguments.tiny and not torch.cuda.is_available():
        sys.exit("benchmark: no GPU is visible; --tiny shows on a CPU that the script runs")
    if arguments.tiny:
        arguments = replace(arguments, iterations=1)
    results = Results(arguments.out)
    cases = [Case(*case) for case in product(arguments.models, arguments.recipes, arguments.ways)]
    call(arguments, results, cases)
    print(results.table())
    missing = len(results.left(cases))
    print(f"{missing} cases are left: the same command goes on" if missing else "all are done")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
