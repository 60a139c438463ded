"""The files of `flowrl new`: a run file, a reward with a comment on its arguments, and prompts."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml
from PIL import Image, ImageDraw

from flowrl.paths import find
from flowrl.recipes import RECIPES
from flowrl.settings.checks.learning import ONE_STEP
from flowrl.settings.file.inherit import read_tree

Files = dict[str, str | bytes]


@dataclass(frozen=True)
class ClassDefaults:
    """Settings that the index and the class of a pipeline say, for a model without a configuration.

    guidance  the setting, as YAML with a comment
    sizes     height and width, where the class's call has defaults
    call      further arguments of the call
    steps     the class's own number of steps, or a few
    few       whether the pipeline is made for so few steps that training takes them too
    columns   images that its prompts need
    train, evaluate  further settings of these sections, as YAML
    """

    guidance: str
    sizes: Mapping[str, int]
    call: Mapping[str, Any]
    steps: int
    few: bool = False
    columns: Sequence[str] = field(default=())
    train: str = ""
    evaluate: str = ""


HEAD = """\
# yaml-language-server: $schema=run.schema.json
# `flowrl train run.yaml` starts it; `flowrl recipes {recipe}` lists the recipe's settings.
recipe: {{name: {recipe}{settings}}}
model:
"""

TEACHERS = """\
teachers:                                   # docs/feedback.md
  folders: {one: runs/TEACHER/pipeline}     # the result of a run: an adapter, or a pipeline
"""

TAIL = """\
prompts:
  train: prompts.txt                        # txt, jsonl, csv, parquet, a folder, a hub name
  held_out: held_out.txt
  per_iteration: {draws}
rewards:                                    # their weighted sum is maximized
  - {{name: "my_reward.py:{reward}", weight: 1.0}}
{judge}
train: {{iterations: {iterations}, lr: {lr}, updates: {updates}{train}}}
evaluate: {{every: 10, samples: {samples}{evaluate}}}
checkpoint: {{every: 10}}
track: {{training: 8}}                        # samples of each iteration, in samples/training
"""

KNOWN_MODEL = """\
# yaml-language-server: $schema=run.schema.json
# `flowrl train run.yaml` starts it. Model, recipe and training come from the base;
# settings in this file replace the base's.
base: {base}
{recipe}{model}prompts:
  train: prompts.txt                        # txt, jsonl, csv, parquet, a folder, a hub name
  held_out: held_out.txt
rewards:                                    # their weighted sum is maximized
  - {{name: "my_reward.py:{reward}", weight: 1.0}}
{judge}
checkpoint: {{best: null}}
track: {{training: 8}}                        # samples of each iteration, in samples/training
"""

# a judge that training never sees: without one a run cannot tell a hacked reward from a learned one
SHAPES_JUDGE = """\
held_out_rewards:                           # judges: never trained on
  - {name: shapes, kind: strict}"""
NUMBER_JUDGE = """\
held_out_rewards:                           # judges: never trained on
  - {name: format, kind: number}"""
IMAGE_JUDGE = """\
held_out_rewards: []                        # a judge, not trained on: [{name: pickscore}], 4 GB"""
TEXT_JUDGE = """\
held_out_rewards:                           # judges: never trained on
  - {name: "my_reward.py:mentions"}"""

IMAGE_MODEL = """\
  pipeline: {model}
  lora: {lora:<36}# null trains all weights
  guidance: {guidance}
"""

TEXT_MODEL = """\
  language: {model}
  lora: {lora:<36}# null trains all weights
"""

IMAGE_REWARD = '''\
"""Rewards of your own: functions from samples to one score per sample, higher is better.

samples.media    n images [3, height, width] or videos [frames, 3, height, width], floats, RGB,
                 0..1; one tensor [n, ...] where all have one size, else a list
samples.prompts  n texts
samples.group    n group ids; samples of one group share a prompt and are compared with each other
samples.meta     n rows of the prompt file: mappings with all its columns

Return a tensor or a list of n numbers: None for a sample to which the reward does not apply, NaN
for one that it cannot score. Further arguments are settings:
{name: "my_reward.py:sharpness", power: 0.5}
"""

from rewards.types import Samples


def warmth(samples: Samples) -> list[float]:
    """Red minus blue, averaged over the image or the video."""
    return [float((x[..., 0, :, :] - x[..., 2, :, :]).mean()) for x in samples.media]


def sharpness(samples: Samples, power: float = 1.0) -> list[float]:
    """The mean difference of neighbouring pixels, to a power."""
    return [float((x[..., 1:] - x[..., :-1]).abs().mean()) ** power for x in samples.media]
'''

GRADED_REWARD = '''\
"""Your own reward with a gradient, which the recipe uses; see docs/own_rewards.md.

media            n images [n, 3, height, width] or videos [n, frames, 3, height, width], floats,
                 RGB, 0..1, with a gradient
samples.prompts  n texts
samples.meta     n rows of the prompt file: mappings with all its columns

Return n floats, one per sample, higher is better; each must depend on its own sample alone.
Arguments of the constructor are
settings: {name: "my_reward.py:Warmth", power: 0.5}
"""

import torch

from rewards.types import Samples


class Warmth:
    """Red minus blue, averaged over the image or the video, to a power that keeps the sign."""

    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def __call__(self, samples: Samples) -> torch.Tensor:
        return self.differentiable(torch.stack([*samples.media]), samples)

    def differentiable(self, media: torch.Tensor, samples: Samples) -> torch.Tensor:
        gap = (media[..., 0, :, :] - media[..., 2, :, :]).flatten(1).mean(1)
        return gap.sign() * gap.abs() ** self.power
'''

TEXT_REWARD = '''\
"""Rewards of your own: functions from samples to one score per sample, higher is better.

samples.media    n completions: strings, without the prompt
samples.prompts  n prompts
samples.group    n group ids; samples of one group share a prompt and are compared with each other
samples.meta     n rows of the prompt file: mappings with all its columns

Return a tensor or a list of n numbers: None for a sample to which the reward does not apply, NaN
for one that it cannot score. Further arguments are settings:
{name: "my_reward.py:near_length", letters: 40}
"""

from rewards.types import Samples


def near_length(samples: Samples, letters: int = LETTERS) -> list[float]:
    """1 for a text of this many letters, less for a shorter or longer one, at least 0."""
    lengths = [len(text.strip()) for text in samples.media]
    return [max(0.0, 1 - abs(length - letters) / letters) for length in lengths]


def mentions(samples: Samples) -> list[float]:
    """The share of the prompt's words that also occur in the completion."""
    pairs = zip(samples.prompts, samples.media, strict=True)
    return [_shared(set(prompt.lower().split()), text.lower()) for prompt, text in pairs]


def _shared(words: set[str], text: str) -> float:
    return sum(word in text for word in words) / max(1, len(words))
'''

EXAMPLE_COLOURS = ("red", "green", "blue", "yellow", "purple", "black")
EXAMPLE_SHAPES = ("circle", "square", "triangle")
SUBJECTS = (
    "the sea", "bicycles", "bread", "a good book", "winter", "trains", "the moon", "friendship",
    "coffee", "maps", "thunder", "gardens", "old houses", "football", "bees", "mountains", "tea",
    "clouds", "violins", "bridges", "snow", "ships", "horses", "paper", "stars", "rivers", "chess",
    "autumn", "bakers", "lighthouses", "owls", "kites",
)  # fmt: skip


def known_files(
    model: str,
    recipe: str | None,
    base: str,
    columns: Sequence[str] = (),
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Files:
    """Files for a run with a model whose settings are included in flowrl.

    columns  images that its prompts need
    changes  sections that differ from the base's, for a model that is not the base's own; None:
             the base is the model's
    """
    settings = [] if recipe is None else [f"name: {recipe}{_group(recipe)}"]
    routed = read_tree(find(base))[0]["recipe"].get("modalities") is not None
    settings += ["modalities: null"] if routed else []  # they are of the base's rewards
    other = changes is not None or find(model).is_dir()
    sections = {name: dict(section) for name, section in (changes or {}).items()}
    section = {"pipeline": _source(model)} if other else {}
    section |= sections.pop("model", {})
    if recipe is None:
        settings += [
            f"{name}: {_flow(value)}" for name, value in sections.pop("recipe", {}).items()
        ]
    place = f"model: {_flow(section)}\n" if section else ""
    place += "".join(f"{name}: {_flow(value)}\n" for name, value in sections.items())
    graded = recipe is not None and RECIPES[recipe]().reward_gradient
    reward, code = ("Warmth", GRADED_REWARD) if graded else ("warmth", IMAGE_REWARD)
    body = KNOWN_MODEL.format(
        base=base,
        recipe=f"recipe: {{{', '.join(settings)}}}\n" if settings else "",
        model=place,
        reward=reward,
        judge=IMAGE_JUDGE,
    )
    return with_pictures(_files(body, code, example_prompts()), columns)


def _flow(value: Any) -> str:
    """A value as YAML in one line."""
    text = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=1000)
    return text.strip().removeprefix("[").removesuffix("]")


def with_pictures(files: Files, columns: Sequence[str]) -> Files:
    """The files with prompts that are rows with these columns of images, and the images."""
    if not columns:
        return files
    pictures = {
        f"images/{colour}_{shape}.png": example_image(colour, shape)
        for colour in EXAMPLE_COLOURS[:3]
        for shape in EXAMPLE_SHAPES
    }
    mask = {"images/mask.png": example_image("white", "square", ground="black")}
    if any("mask" in name for name in columns):
        pictures |= mask
    places = list(pictures)
    changed: Files = {}
    for name, content in files.items():
        if not name.endswith(".txt"):
            changed[name] = _rows_not_lines(content)
            continue
        rows = list[str]()
        for number, prompt in enumerate(str(content).splitlines()):
            place = places[number % (len(EXAMPLE_SHAPES) * 3)]
            cells = {column: next(iter(mask)) if "mask" in column else place for column in columns}
            rows.append(json.dumps({"prompt": prompt, **cells}))
        changed[name.replace(".txt", ".jsonl")] = "\n".join(rows) + "\n"
    return changed | pictures


def _rows_not_lines(content: str | bytes) -> str | bytes:
    """A run file that names prompt files with rows."""
    if isinstance(content, bytes):
        return content
    for name in ("prompts", "held_out"):
        content = content.replace(f": {name}.txt", f": {name}.jsonl")
    return content


def example_image(colour: str, shape: str, ground: str = "white") -> bytes:
    """A PNG of a shape."""
    image = Image.new("RGB", (512, 512), ground)
    draw, box = ImageDraw.Draw(image), (128, 128, 384, 384)
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(256, 128), (128, 384), (384, 384)], fill=colour)
    file = BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def example_prompts() -> list[str]:
    pairs = [(a, b) for a in EXAMPLE_COLOURS for b in EXAMPLE_SHAPES]
    prompts = [f"a {a} {b}" for a, b in pairs]
    return prompts + [f"a {a} {b} above a green square" for a, b in pairs if a != "green"]


def image_files(model: str | None, recipe: str, defaults: ClassDefaults | None = None) -> Files:
    """Files for a run of images or videos, by name. `defaults`: what is known of the model."""
    lora = "null" if model is None else "{rank: 16, alpha: 32}"
    guidance = (
        "{sample: 1.0, train: 1.0}       # 1 is no guidance"
        if defaults is None
        else defaults.guidance
    )
    body = IMAGE_MODEL.format(
        model=_source(model or "flowrl/demo/shapes-sd3"), lora=lora, guidance=guidance
    )
    if model is None:
        body += "  call: {max_sequence_length: 1}           # arguments of the pipeline's call\n"
    else:
        body += "  dtype: bfloat16\n"
        body += _sizes(defaults)
    steps = "" if defaults is None or not defaults.few else f", steps: {defaults.steps}"
    head = HEAD.format(recipe=recipe, settings=f"{steps}{_group(recipe)}")
    body += TEACHERS if recipe == "opd" else ""
    graded = RECIPES[recipe]().reward_gradient
    reward, code = ("Warmth", GRADED_REWARD) if graded else ("warmth", IMAGE_REWARD)
    judge = SHAPES_JUDGE if model is None else IMAGE_JUDGE
    tail = TAIL.format(
        reward=reward, judge=judge, draws=8, iterations=20, lr="3.0e-4", updates=1, samples=64,
        evaluate="" if defaults is None else defaults.evaluate,
        train="" if defaults is None else defaults.train,
    )  # fmt: skip
    files = _files(head + body + tail, code, example_prompts())
    return files if defaults is None else with_pictures(files, defaults.columns)


def _sizes(defaults: ClassDefaults | None) -> str:
    """The settings of sizes: those that the class's call has, or what to fill in."""
    if defaults is None:
        return (
            "  # height: 512\n  # width: 512\n"
            "  # call: {num_frames: 33}                  # arguments of the pipeline's call\n"
        )
    lines = "".join(f"  {name}: {value}\n" for name, value in defaults.sizes.items())
    return lines + (f"  call: {_flow(dict(defaults.call))}\n" if defaults.call else "")


def text_files(model: str | None, recipe: str) -> Files:
    """Files for a run of texts, by name."""
    lora = "null" if model is None else "{rank: 16, alpha: 32}"
    body = TEXT_MODEL.format(model=_source(model or "flowrl/demo/sums-lm"), lora=lora)
    if model is None:
        prompts = [f"{a}+{b}=" for a in range(11, 19) for b in range(21, 27)]
        length, letters, draws, iterations, samples = 8, 4, 8, 20, 64
    else:
        prompts = [f"Tell me about {subject} in one sentence." for subject in SUBJECTS]
        body += f"{_gguf_line(find(model))}  dtype: bfloat16\n"
        body += "  # system: ...                             # the chat template's system message\n"
        length, letters, draws, iterations, samples = 24, 60, 4, 12, 32
    kl = ", kl: 0.0" if recipe == "text_grpo" else ""  # saves the calls of the model as it was
    head = HEAD.format(
        recipe=recipe, settings=f", length: {length}{_group(recipe)}{_at(recipe, length)}{kl}"
    )
    tail = TAIL.format(
        reward="near_length", judge=NUMBER_JUDGE if model is None else TEXT_JUDGE,
        draws=_whole(recipe, draws), iterations=iterations, lr="3.0e-4",
        updates=1 if recipe in ONE_STEP else 2, samples=samples, evaluate="", train="",
    )  # fmt: skip
    reward = TEXT_REWARD.replace("LETTERS", str(letters))
    return _files(head + body + tail, reward, prompts)


def _files(run: str, reward: str, prompts: list[str]) -> Files:
    last = -len(prompts) // 4  # a quarter is held out
    return {
        "run.yaml": run,
        "my_reward.py": reward,
        "prompts.txt": "\n".join(prompts[:last]) + "\n",
        "held_out.txt": "\n".join(prompts[last:]) + "\n",
    }


def _group(recipe: str) -> str:
    """`, group: 8` for a recipe whose own group is larger."""
    group = signature(RECIPES[recipe]).parameters.get("group")
    return ", group: 8" if group is not None and group.default > 8 else ""


def _whole(recipe: str, draws: int) -> int:
    """The smallest number of draws, at least `least`, that fills the recipe's bundles, if any."""
    bundle = signature(RECIPES[recipe]).parameters.get("bundle")
    return draws if bundle is None else -(-draws // bundle.default) * bundle.default


def _at(recipe: str, length: int) -> str:
    """`, at: [4]` for trees: the tokens at which they branch, earlier for a shorter text."""
    free = signature(RECIPES[recipe]).parameters
    places = free["at"].default if "at" in free and "group" not in free else ()
    first = sorted({max(1, place * length // free["length"].default) for place in places})
    return f", at: {first}" if first else ""


def _source(model: str) -> str:
    """A model as YAML; a folder by its full path, since the run starts in another folder."""
    folder = Path(model).expanduser()
    name = str(folder.resolve()) if folder.is_dir() else model
    return name if re.fullmatch(r"[\w./:-]+", name) else json.dumps(name)


def _gguf_line(folder: Path) -> str:
    """The setting for a folder whose only weights are GGUF."""
    files = sorted(path.name for path in folder.glob("*.gguf"))
    return f"  gguf_file: {files[0]}\n" if files and not list(folder.glob("*.safetensors")) else ""
