"""Predicted seconds of an iteration on one GPU by share, without any GPU.

    python scripts/benchmarks/shares.py                        # all subjects; some minutes
    python scripts/benchmarks/shares.py flux text_05b --write  # docs/results/speed.md

products  matrix products, convolutions and attention of networks, at the device's peak
kernels   other kernels of networks: the bytes that they read and write, at its bandwidth; for
          tokens that are sampled, also reading the weights (256 texts a call, the search's most)
launches  what launching a network's kernels takes beyond both
flowrl    its own kernels outside networks, by launches or by bytes, whichever is more
libraries the same of libraries outside networks: transformers' `generate`, schedulers
waits     of the host for the device, each a round trip
decoding  of samples, at the peak

Networks are counted on torch's meta device at the published size. Kernels outside networks are
counted on a pretended device (scripts/benchmarks/device_report.py) around a tiny network, and their
bytes scale with the numbers of a row: latents, or the vocabulary, which is the real one. Nothing
overlaps. Not counted: encoders, rewards, evaluations, checkpoints.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from flowrl.estimate import sizes  # noqa: E402
from flowrl.estimate.flops import PROMPT  # noqa: E402
from flowrl.estimate.memory import rows_per_call  # noqa: E402
from flowrl.estimate.time import flop_count, iteration_work  # noqa: E402
from flowrl.models.description import describe  # noqa: E402
from flowrl.paths import run_file  # noqa: E402
from flowrl.run.call_search import MOST_ROWS  # noqa: E402
from flowrl.settings import LanguageSettings, RunSettings  # noqa: E402
from flowrl.settings.read import override, read_run  # noqa: E402
from scripts.benchmarks import roofline  # noqa: E402
from scripts.benchmarks.real_models import QWEN, numbered  # noqa: E402
from scripts.benchmarks.roofline import BANDWIDTH, PEAK, Seconds, counted  # noqa: E402
from tests.support import runs, tiny_pipelines_image, tiny_pipelines_video  # noqa: E402

PAGE = PROJECT / "docs" / "results" / "speed.md"
BEGIN, END = "<!-- shares -->", "<!-- end of shares -->"
LAUNCH, ROUND_TRIP = 5e-6, 2e-5  # seconds of a kernel's launch, and of waiting for the device
SHARES = ("products", "kernels", "launches", "flowrl", "libraries", "waits", "decoding")
CALLED = " > "  # in the report's name of a line: one of ours, and the one that it called
Changes = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A run whose shares are predicted; `tiny` makes a pipeline of its family, None for texts."""

    config: str
    changes: Changes
    tiny: Callable[[], Any] | None
    call: Changes = field(default_factory=dict[str, Any])


IMAGE_CALL = {"height": 16, "width": 16, "max_sequence_length": 16}
SUBJECTS = {
    "demo": Subject("demo_flow_grpo", {}, tiny_pipelines_image.sd3, IMAGE_CALL),
    "sd35": Subject(
        "papers/flow_grpo_sd35m_pickscore", {"model": {"dtype": "bfloat16"}},
        tiny_pipelines_image.sd3, IMAGE_CALL,
    ),
    "flux": Subject("papers/flow_grpo_flux_pickscore", {}, tiny_pipelines_image.flux, IMAGE_CALL),
    "wan": Subject(
        "models/wan21_14b", {}, tiny_pipelines_video.wan, IMAGE_CALL | {"num_frames": 5}
    ),
    "text_05b": Subject("papers/text_grpo_qwen25_05b_gsm8k", {}, None),
    "text_7b": Subject(
        "papers/text_grpo_qwen25_gsm8k", {"model": {"language": "Qwen/Qwen2.5-7B-Instruct"}}, None
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """Kernels outside networks in a call of a network, and their bytes per number of a row."""

    count: float = 0.0
    bytes: float = 0.0

    def seconds(self, numbers: float, launched: bool) -> float:
        """Least seconds. `launched`: the device waits for launches."""
        return max(self.count * (LAUNCH if launched else 2e-6), self.bytes * numbers / BANDWIDTH)


@dataclass(frozen=True)
class Outside:
    """Work outside networks in a call of a network: flowrl's kernels, libraries' kernels, and the
    host's waits."""

    flowrl: Kernels = Kernels()
    libraries: Kernels = Kernels()
    waits: float = 0.0


def report(folder: Path, tree: Changes) -> dict[str, Any]:
    """The counts of a run's second iteration on a pretended device."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "scripts/benchmarks/device_report.py", "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"device_report.py: {done.stderr[-2000:]}")
    return json.loads(lines[-1])


def outside_of(found: Mapping[str, Any], phase: str, numbers: float) -> Outside:
    """Work outside networks per call of a phase; `numbers` of all rows of a call."""
    lines, calls = found["by_line"], found["calls"][phase]

    def kernels(library: bool) -> Kernels:
        chosen = [
            line for line in lines if line["phase"] == phase and of_library(line["line"]) == library
        ]
        count = sum(line.get("kernel", 0) for line in chosen)
        size = sum(line.get("kernel_bytes", 0) for line in chosen)
        return Kernels(count / calls, size / calls / numbers)

    return Outside(kernels(False), kernels(True), found["syncs_per_call"][phase])


def of_library(line: str) -> bool:
    """Whether a line of the report is a library's, called by one of ours."""
    return not line.rpartition(CALLED)[2].startswith(("flowrl/", "samplers/", "rewards/"))


def image_outside(subject: Subject) -> dict[str, Outside]:
    """Work around a tiny pipeline, with the recipe of the subject."""
    assert subject.tiny is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subject.tiny().save_pretrained(folder / "model")
        recipe = {"name": "flow_grpo", "steps": 4, "group": 4}
        tree = runs.tree(folder / "model", folder, recipe, self_test="off", rows_per_call=4)
        tree["model"] |= {"call": subject.call}
        run = override(read_run(written(folder, tree)), {})
        model = sizes.of(run.trained_model, run.algorithm().steps)
        assert model is not None
        found = report(folder, tree)
    return {phase: outside_of(found, phase, 4 * model.latent) for phase in ("sampling", "training")}


def written(folder: Path, tree: Changes) -> Path:
    file = folder / "settings.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def text_outside() -> dict[str, Outside]:
    """Work around a tiny language model with the real vocabulary, per number of its logits."""
    rows, length, words = 8, 8, QWEN["vocab_size"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                 "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
        Qwen2ForCausalLM(Qwen2Config(**QWEN | small)).save_pretrained(folder / "model")
        numbered(words).save_pretrained(folder / "model")
        (folder / "prompts.jsonl").write_text('{"prompt": "w1 w22 w333"}\n' * 2)
        found = report(folder, {
            "recipe": {"name": "text_grpo", "length": length, "group": rows // 2},
            "model": {"language": str(folder / "model"), "lora": None},
            "prompts": {"train": str(folder / "prompts.jsonl"), "per_iteration": 2},
            "rewards": [{"name": "length", "kind": "near", "unit": "characters", "most": 100}],
            "train": {"rows_per_call": rows, "self_test": "off"},
        })  # fmt: skip
    sampled, trained = rows * words, rows * length * words
    return {"sampling": outside_of(found, "sampling", sampled),
            "training": outside_of(found, "training", trained)}  # fmt: skip


def shared(network: Seconds, outside: Outside, numbers: float, calls: float) -> dict[str, float]:
    """Seconds of so many calls by share. `network`: of one call; `numbers`: of its rows."""
    busy = network.products + network.passes
    launched = network.kernels * LAUNCH
    bound = launched > busy  # then kernels outside wait for their launches too
    return {
        "products": calls * network.products,
        "kernels": calls * network.passes,
        "launches": calls * max(0.0, launched - busy),
        "flowrl": calls * outside.flowrl.seconds(numbers, bound),
        "libraries": calls * outside.libraries.seconds(numbers, bound),
        "waits": calls * outside.waits * ROUND_TRIP,
        "decoding": 0.0,
    }


def image_shares(run: RunSettings, outside: Mapping[str, Outside]) -> dict[str, dict[str, float]]:
    """Seconds of sampling and training by share."""
    known, model = describe(run.model), sizes.of(run.trained_model, run.algorithm().steps)
    assert known is not None and model is not None
    work, count = iteration_work(run), flop_count(known, run.trained_model, run.algorithm().steps)
    assert count is not None
    rows_of = {kind: rows_per_call(run, model, kind) for kind in ("sampling", "training")}
    network, inputs = roofline.made(run)
    dtype = torch.bfloat16 if run.model.half_adapters else torch.float32
    if run.model.lora is not None:
        network = roofline.adapted(network, run, dtype)
    if run.model.dtype == "float32":
        network = network.float()
        given = inputs

        def inputs() -> dict[str, Any]:
            return {k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                    for k, v in given().items()}  # fmt: skip

    plain, graded = roofline.call(network, inputs, False), roofline.call(network, inputs, True)
    found, scale = {}, run.guidance.sample
    for phase, one, evaluations in (
        ("sampling", plain, work.sampling), ("training", graded, work.training)
    ):  # fmt: skip
        rows = rows_of[phase]
        guided = roofline.guided_rows(
            known, run, run.training_guidance if phase == "training" else scale
        )
        of_call = one.times(rows * guided)
        of_call.kernels = one.kernels  # rows of a call share its kernels
        found[phase] = shared(of_call, outside[phase], rows * model.latent, evaluations / rows)
    if work.frozen:
        rows = rows_of["training"]
        of_call = plain.times(rows * roofline.guided_rows(known, run, run.training_guidance))
        of_call.kernels = plain.kernels
        more = shared(of_call, Outside(), 0, work.frozen / rows)
        found["training"] = {name: found["training"][name] + more[name] for name in SHARES}
    peak = PEAK[torch.float32 if run.model.dtype == "float32" else torch.bfloat16]
    found["sampling"]["decoding"] = work.samples * (count.decode or 0.0) / peak
    return found


def text_shares(run: RunSettings, outside: Mapping[str, Outside]) -> dict[str, dict[str, float]]:
    """Seconds of sampling and training by share: every token is a call that reads all weights."""
    known = describe(run.model)
    assert known is not None
    model: Any = known.language_model().to(torch.bfloat16)
    described, work = sizes.of(run.trained_model, run.algorithm().steps), iteration_work(run)
    assert described is not None
    length, config = run.algorithm().steps, model.config.get_text_config()
    sampled = run.train.call_sizes["sampling"]
    sampled = MOST_ROWS if sampled == "auto" else sampled
    words, weights = config.vocab_size, sum(p.numel() for p in model.parameters())
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * heads * width * (PROMPT + length / 2) * sampled * 2
    token = text_call(model, sampled, 1, False)
    token.passes += (2 * weights + cache) / BANDWIDTH
    calls = work.samples / sampled * length
    found = {"sampling": shared(token, outside["sampling"], sampled * words, calls)}
    trained = rows_per_call(run, described, "training")
    graded = text_call(model, trained, PROMPT + length, True)
    if run.train.gradient_checkpointing:
        graded += text_call(model, trained, PROMPT + length, False)
    calls = work.training / trained
    found["training"] = shared(graded, outside["training"], trained * length * words, calls)
    plain = text_call(model, trained, PROMPT + length, False)
    more = shared(plain, Outside(), 0, work.frozen / trained)
    found["training"] = {name: found["training"][name] + more[name] for name in SHARES}
    return found


def text_call(model: Any, rows: int, tokens: int, grad: bool) -> Seconds:
    ids = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
    mask = torch.empty(rows, 1, tokens, tokens, device="meta", dtype=torch.bool)
    with counted() as mode, torch.set_grad_enabled(grad):
        out = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        if grad:
            out.backward(torch.empty_like(out))
    return mode.seconds


def shares_of(name: str) -> dict[str, dict[str, float]]:
    subject = SUBJECTS[name]
    run = override(read_run(run_file(subject.config)), subject.changes)
    if isinstance(run.model, LanguageSettings):
        return text_shares(run, text_outside())
    return image_shares(run, image_outside(subject))


def rows_of_table(name: str, found: Mapping[str, Mapping[str, float]]) -> list[str]:
    whole = sum(sum(each.values()) for each in found.values())
    lines = []
    for phase, shares in found.items():
        cells = " | ".join(f"{100 * shares[share] / whole:.1f}" for share in SHARES)
        lines.append(f"| {name} | {phase} | {sum(shares.values()):.3g} s | {cells} |")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("subjects", nargs="*", default=[*SUBJECTS], metavar="SUBJECT")
    parser.add_argument("--write", action="store_true", help="into docs/results/speed.md")
    given = parser.parse_args(words)
    if odd := [name for name in given.subjects if name not in SUBJECTS]:
        parser.error(f"no subject is called {odd[0]}; choose from {', '.join(SUBJECTS)}")
    lines = [f"| run | phase | least seconds | {', % | '.join(SHARES)}, % |",
             "|" + "---|" * (3 + len(SHARES))]  # fmt: skip
    for name in given.subjects:
        found = shares_of(name)
        assert all(math.isfinite(v) for each in found.values() for v in each.values())
        lines += rows_of_table(name, found)
        print("\n".join(lines[-2:]), flush=True)
    table = "\n".join(lines)
    if given.write:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
