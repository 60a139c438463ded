"""`flowrl new FOLDER`: a run file, a reward of your own and prompts, ready to be edited and run."""

import json
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import UserError
from flowrl.recipes import RECIPES
from flowrl.recipes.table import TEXT_RECIPES
from flowrl.settings import Run
from flowrl.settings.arguments import Word

IMAGE_RUN = """\
# yaml-language-server: $schema=run.schema.json
# `flowrl train run.yaml` starts it; `flowrl recipes {recipe}` lists the recipe's settings.
recipe: {{name: {recipe}, group: 8}}
model:
  pipeline: {model}
  lora: {lora}
  guidance: {{sample: 1.0, train: 1.0}}
{call}prompts:
  train: prompts.txt
  held_out: held_out.txt
  per_iteration: 8
rewards: [{{name: "my_reward.py:warmth"}}]       # several are added: {{name: ..., weight: 0.5}}
train: {{iterations: 20, lr: 3.0e-4}}
evaluate: {{every: 10, samples: 64}}
checkpoint: {{every: 10}}
"""

TEXT_RUN = """\
# yaml-language-server: $schema=run.schema.json
# `flowrl train run.yaml` starts it; `flowrl recipes {recipe}` lists the recipe's settings.
recipe: {{name: {recipe}, length: 8, group: 8}}
model: {{language: {model}, lora: {lora}}}
prompts:
  train: prompts.txt
  held_out: held_out.txt
  per_iteration: 8
rewards: [{{name: "my_reward.py:short"}}]
train: {{iterations: 20, lr: 3.0e-4}}
evaluate: {{every: 10, samples: 64, per_prompt: 2}}
checkpoint: {{every: 10}}
"""

IMAGE_REWARD = '''\
"""Rewards of your own: functions from samples to one score per sample, higher is better.

samples.media    images [n, 3, height, width] or videos [n, frames, 3, height, width], RGB in 0..1
samples.prompts  n texts
samples.group    n group ids; samples of one group share a prompt and are compared with each other
samples.meta     n rows of the prompt file, with all its columns

Return a tensor or a list of n numbers; None for a sample that cannot be scored.
"""

import torch

from rewards.types import Samples


def warmth(samples: Samples) -> torch.Tensor:
    """Red minus blue, averaged over the image."""
    red, _, blue = samples.media.float().mean((2, 3)).unbind(1)
    return red - blue


def sharpness(samples: Samples, power: float = 1.0) -> torch.Tensor:
    """Mean difference of neighbours. In run.yaml: {name: my_reward.py:sharpness, power: 0.5}"""
    images = samples.media.float()
    across = (images[..., 1:] - images[..., :-1]).abs().flatten(1).mean(1)
    return across**power
'''

TEXT_REWARD = '''\
"""Rewards of your own: functions from samples to one score per sample, higher is better.

samples.media    n completions, as strings
samples.prompts  n prompts
samples.group    n group ids; samples of one group share a prompt and are compared with each other
samples.meta     n rows of the prompt file, with all its columns

Return a tensor or a list of n numbers; None for a sample that cannot be scored.
"""

from rewards.types import Samples


def short(samples: Samples) -> list[float]:
    """One minus a tenth per character, at least 0."""
    return [max(0.0, 1 - len(text.strip()) / 10) for text in samples.media]


def contains(samples: Samples, word: str = "5") -> list[float]:
    """1 where the completion has the word. In run.yaml: {name: my_reward.py:contains, word: "7"}"""
    return [float(word in text) for text in samples.media]
'''

EXAMPLE_COLOURS = ("red", "green", "blue", "yellow", "purple", "black")
EXAMPLE_SHAPES = ("circle", "square", "triangle")


@dataclass
class New:
    """Write a folder with a small run file, a reward of your own, and prompts."""

    folder: Word[Path]
    """The folder to make."""
    model: str | None = None
    """A pipeline's or language model's folder or hub name; a small demo model if not given."""
    recipe: str | None = None
    """One of `flowrl recipes`; nft for images, text_grpo for texts if not given."""
    text: bool = False
    """A language model instead of an image or video pipeline."""


def write_new_run(given: New) -> None:
    """Write the files and print the commands that follow. UserError where a file is in the way."""
    recipe = given.recipe or ("text_grpo" if given.text else "nft")
    if recipe not in RECIPES:
        raise UserError(f"new: no recipe {recipe!r}; `flowrl recipes` lists them")
    if (recipe in TEXT_RECIPES) != given.text:
        kind = "texts: add --text" if recipe in TEXT_RECIPES else "images: leave --text out"
        raise UserError(f"new: recipe {recipe} is for {kind}")
    files = new_files(given, recipe)
    taken = [name for name in files if (given.folder / name).exists()]
    if taken:
        raise UserError(f"new: {given.folder / taken[0]} exists; name another folder")
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (given.folder / name).write_text(content)
    print(f"wrote {', '.join(files)} in {given.folder}\n\nnext:\n  cd {given.folder}")
    print("  flowrl plan run.yaml      # what an iteration does and costs")
    print("  flowrl train run.yaml")


def new_files(given: New, recipe: str) -> dict[str, str]:
    schema = json.dumps(Run.model_json_schema(by_alias=True), indent=2)
    if given.text:
        model, lora = given.model or "flowrl/demo/sums-lm", "null"
        run, reward = TEXT_RUN.format(recipe=recipe, model=model, lora=lora), TEXT_REWARD
        prompts = [f"{a}+{b}=" for a in range(11, 19) for b in range(21, 27)]
    else:
        model = given.model or "flowrl/demo/shapes-sd3"
        lora = "null" if given.model is None else "{rank: 16, alpha: 32}"
        call = "  call: {max_sequence_length: 1}\n" if given.model is None else ""
        run = IMAGE_RUN.format(recipe=recipe, model=model, lora=lora, call=call)
        reward = IMAGE_REWARD
        pairs = [(a, b) for a in EXAMPLE_COLOURS for b in EXAMPLE_SHAPES]
        prompts = [f"a {a} {b}" for a, b in pairs]
        prompts += [f"a {a} {b} above a green square" for a, b in pairs if a != "green"]
    return {
        "run.yaml": run,
        "my_reward.py": reward,
        "prompts.txt": "\n".join(prompts[: -len(prompts) // 4]) + "\n",
        "held_out.txt": "\n".join(prompts[-len(prompts) // 4 :]) + "\n",
        "run.schema.json": schema + "\n",
    }
