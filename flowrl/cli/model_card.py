"""The model card of an exported run: README.md with the hub's metadata, curves and samples."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from flowrl.errors import UserError
from flowrl.media.curves import CurvePoints, save_curves
from flowrl.models.description import local_folder
from flowrl.models.diffusers.lora.lora import LORA_FILE, SECOND
from flowrl.settings import RewardSpec, Run
from flowrl.settings.read import dump

CARD, CURVES = "README.md", "curves.png"
HELD_OUT = "held_out/"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_PAGES = ("before_after", "after", "before")  # of a run's samples, the most telling first
_EXAMPLES = 5
_NOT_CURVES = ("image/", "text/")


@dataclass(frozen=True)
class CardSubject:
    """An exported run. `weights` are the exported ones; `repository` is of the hub, or None."""

    run: Run
    folder: Path
    weights: Path
    repository: str | None = None

    @property
    def name(self) -> str:
        """The card's title."""
        return self.repository or self.folder.resolve().name

    @property
    def place(self) -> str:
        """The source that the card's code loads: the repository, or the card's own folder."""
        return self.repository or "."

    @property
    def source(self) -> str:
        """The base model."""
        return self.run.model.pipeline or self.run.model.language or ""

    @property
    def iteration(self) -> int | None:
        """The iteration of the weights, where the folder's name is that; None: the last one."""
        return int(self.weights.name) if self.weights.name.isdigit() else None

    def lines(self) -> list[dict[str, Any]]:
        """The run's metrics."""
        file = self.folder / "metrics.jsonl"
        if not file.is_file():
            return []
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_card(subject: CardSubject, out: Path, files: Sequence[str]) -> Path:
    """Write README.md, the curves and a page of samples. `files` are those of the weights."""
    lines = subject.lines()
    data = _metadata(subject)
    parts = [
        f"---\n{data.to_yaml()}\n---\n\n# {subject.name}\n",
        _about(subject),
        _use(subject, files),
        _inference(subject),
        _results(subject, lines),
        _pictures(subject, out, lines),
        _training(subject),
        _prompts(subject),
    ]
    (out / CARD).write_text("\n".join(part for part in parts if part), encoding="utf-8")
    return out / CARD


def _metadata(subject: CardSubject) -> ModelCardData:
    run = subject.run
    on_hub = _HUB_NAME.fullmatch(subject.source) and not Path(subject.source).is_dir()
    kind = "text-to-image" if run.model.pipeline else "text-generation"
    if run.model.call.get("num_frames", 1) != 1:
        kind = "text-to-video"
    tags = ["flowrl", "reinforcement-learning", _recipe(run), *(["lora"] if run.model.lora else [])]
    data = ModelCardData(
        library_name="diffusers" if run.model.pipeline else "transformers",
        pipeline_tag=kind,
        tags=tags,
        base_model=subject.source if on_hub else None,
    )
    if on_hub and run.model.lora is not None:
        data["base_model_relation"] = "adapter"
    return data


def _recipe(run: Run) -> str:
    return str(run.recipe.name)  # type: ignore[attr-defined]


def _about(subject: CardSubject) -> str:
    run, what = subject.run, "An adapter" if subject.run.model.lora else "All weights"
    rewards = ", ".join(spec.label for spec in run.rewards)
    at = "the last iteration" if subject.iteration is None else f"iteration {subject.iteration}"
    return (
        f"{what} of `{subject.source}`, aligned with flowrl by the recipe `{_recipe(run)}` towards "
        f"{rewards}. These are the weights of {at}. The licence is that of the base model, unless "
        "its owner says otherwise.\n"
    )


def _use(subject: CardSubject, files: Sequence[str]) -> str:
    if subject.run.model.pipeline is None:
        return "## Use\n\nThe files are in transformers' format (an adapter: peft's).\n"
    lines = ["import torch", "from diffusers import DiffusionPipeline", ""]
    dtype = f"torch_dtype=torch.{subject.run.model.dtype}"
    if LORA_FILE in files:
        lines.append(f'pipe = DiffusionPipeline.from_pretrained("{subject.source}", {dtype})')
        lines.append(f'pipe.load_lora_weights("{subject.place}", weight_name="{LORA_FILE}")')
        if SECOND in files:
            more = f'weight_name="{SECOND}", load_into_transformer_2=True'
            lines.append(f'pipe.load_lora_weights("{subject.place}", {more})')
    else:
        lines.append(f'pipe = DiffusionPipeline.from_pretrained("{subject.place}", {dtype})')
    others = [name for name in files if name.startswith(("comfyui", "kohya"))]
    said = f"\n`{'`, `'.join(others)}`: the same adapter in other key formats.\n" if others else ""
    code = "\n".join(lines)
    return f"## Use\n\n```python\n{code}\n```\n{said}"


def _inference(subject: CardSubject) -> str:
    run = subject.run
    if run.model.pipeline is None:
        rows = [("most tokens", run.evaluation_steps), ("temperature", run.evaluate.temperature)]
    else:
        scale = run.evaluation_guidance
        sides = [run.evaluate.height or run.model.height, run.evaluate.width or run.model.width]
        rows = [
            ("steps (`num_inference_steps`)", run.evaluation_steps),
            ("guidance", "the pipeline's own" if scale is None else f"{scale:g}"),
            ("size", " x ".join(map(str, sides)) if all(sides) else "the pipeline's own"),
            ("sampling", "deterministic (ODE), whatever noise training sampled with"),
            ("scheduler", _scheduler(subject)),
            *((f"`{key}`", value) for key, value in run.model.call.items()),
        ]
        if run.model.sigmas is not None:
            rows.append(("noise levels", f"`{dump(run)['model']['sigmas']}`"))
    return f"## Inference settings\n\nThose of the evaluations below.\n\n{_table(rows)}"


def _scheduler(subject: CardSubject) -> str:
    folder = local_folder(subject.source)
    file = None if folder is None else folder / "scheduler" / "scheduler_config.json"
    if file is None or not file.is_file():
        return "the pipeline's own"
    return f"the pipeline's own, {json.loads(file.read_text(encoding='utf-8'))['_class_name']}"


def _results(subject: CardSubject, lines: Sequence[Mapping[str, Any]]) -> str:
    held_out = [line for line in lines if any(key.startswith(HELD_OUT) for key in line)]
    if len(held_out) < 2:
        return "## Results\n\nThe run had no evaluations on held-out prompts.\n"
    until = subject.iteration
    first = held_out[0]
    last = next((line for line in held_out if line["iteration"] == until), held_out[-1])
    names = [key for key in first if key.startswith(HELD_OUT) and key in last]
    shown = [n for n in names if not n.startswith(f"{HELD_OUT}image/") or n.endswith("diversity")]
    rows = [(n.removeprefix(HELD_OUT), f"{first[n]:.4f}", f"{last[n]:.4f}") for n in shown]
    alarms = sum(line.get("alarms", 0) for line in lines)
    head = ("held out", "base", f"iteration {last['iteration']}")
    return (
        f"## Results\n\n{run_samples(subject.run)}\n\n{_table(rows, head)}\n"
        f"Alarms during training: {alarms:.0f}.\n"
    )


def run_samples(run: Run) -> str:
    """A sentence on the evaluations of a run."""
    e = run.evaluate
    return (
        f"Means over {e.samples} samples of held-out prompts, from the same noise (seed {e.seed})."
    )


def _pictures(subject: CardSubject, out: Path, lines: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    curves = dict(_curves(lines))
    if curves:
        save_curves(curves, out / CURVES)
        parts.append(f"## Curves\n\n![reward and held-out scores over the iterations]({CURVES})\n")
    page = _page(subject.folder / "samples")
    if page is not None:
        shutil.copy2(page, out / f"samples{page.suffix}")
        beside = "before and after training" if page.stem == "before_after" else "of the run"
        parts.append(f"## Samples\n\n![samples {beside}](samples{page.suffix})\n")
    return "\n".join(parts)


def _page(samples: Path) -> Path | None:
    names = (samples / f"{name}.{end}" for name in _PAGES for end in ("gif", "png"))
    return next((path for path in names if path.is_file()), None)


def _curves(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, CurvePoints]]:
    names = dict.fromkeys(
        key for line in lines for key in line
        if key == "reward" or key == "kl" or key.startswith(HELD_OUT)
    )  # fmt: skip
    for name in names:
        short = name.removeprefix(HELD_OUT)
        if short.startswith(_NOT_CURVES) and short != "image/diversity":
            continue
        found = [(line["iteration"], line[name]) for line in lines if name in line]
        points = [(float(i), float(v)) for i, v in found if isinstance(v, int | float)]
        if points:
            yield name, points


def _training(subject: CardSubject) -> str:
    tree = dump(subject.run)
    rows = [(f"recipe.{key}", f"`{value}`") for key, value in tree["recipe"].items()]
    rows += [(f"train.{k}", f"`{tree['train'][k]}`") for k in ("iterations", "lr", "updates")]
    rows += [(f"model.{k}", f"`{tree['model'][k]}`") for k in ("dtype", "guidance", "lora")]
    rewards = [_reward(spec) for spec in subject.run.rewards]
    held = [_reward(spec) for spec in subject.run.held_out_rewards]
    said = f"## Recipe\n\n{_table(rows)}\n## Rewards\n\n{_table(rewards, ('reward', 'weight'))}"
    return said + (f"\nHeld out:\n\n{_table(held, ('reward', 'weight'))}" if held else "")


def _reward(spec: RewardSpec) -> tuple[str, str]:
    return f"`{spec.label}`", str(spec.weight)


def _prompts(subject: CardSubject) -> str:
    prompts = subject.run.prompts
    rows = [("training", ", ".join(f"`{each.source}`" for each in prompts.train))]
    if prompts.held_out is not None:
        rows.append(("held out", ", ".join(f"`{each.source}`" for each in prompts.held_out)))
    rows.append(("an iteration", f"{prompts.per_iteration} prompts"))
    examples = ""
    try:
        if prompts.on_disk("train"):
            texts = prompts.read("train").texts[:_EXAMPLES]
            examples = "\n" + "".join(f"- {_plain(text)}\n" for text in texts)
    except UserError:  # the file may be gone by now, and the card does not need it
        examples = ""
    return f"## Prompts\n\n{_table(rows)}{examples}"


def _plain(text: str) -> str:
    return " ".join(str(text).split())[:200]


def _table(rows: Sequence[Sequence[Any]], head: Sequence[str] = ("setting", "value")) -> str:
    cells = [[_plain(str(cell)).replace("|", "\\|") for cell in row] for row in rows]
    lines = [" | ".join(head), "|".join(["---"] * len(head)), *(" | ".join(row) for row in cells)]
    return "".join(f"| {line} |\n" for line in lines)
