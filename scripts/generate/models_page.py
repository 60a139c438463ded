"""Write docs/models.md from configs/models: recipe, sizes, memory and hardware by `flowrl plan`.

    HF_HUB_OFFLINE=1 python scripts/generate/models_page.py

`tests/recipes/test_model_configs.py` fails until the page is what this writes. Sizes are from
flowrl's table of public configurations, so nothing is downloaded and no weights are read.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from flowrl.estimate import fit, memory
from flowrl.estimate.devices import parse_devices
from flowrl.estimate.time import duration, estimate_time
from flowrl.models.public_configs import PUBLIC_MODELS
from flowrl.settings import RunSettings
from flowrl.settings.file.inherit import read_tree
from flowrl.settings.model.pipeline import GuidanceScale, PipelineSettings
from flowrl.settings.read import read_run

PROJECT = Path(__file__).resolve().parents[2]
CONFIGS = PROJECT / "configs" / "models"
PAGE = PROJECT / "docs" / "models.md"
LADDER = ("RTX-4090", "L40S", "H100", "H200", "8xH100")
TIMED, UTILISATION = "8xH100", 0.4
OURS = "Nobody published"
HEAD = """# Models: configurations for SDXL, SD3, FLUX, Qwen-Image, Wan and others

<!-- Written by scripts/generate/models_page.py from configs/models and `flowrl plan`. -->

A file for each model, with its sampling, its memory and the hardware that it needs:

```bash
# what an iteration does, and what makes it fit
flowrl plan models/flux1_dev --memory 24GiB --prompts.train mine.txt --prompts.held_out held_out.txt
flowrl train models/flux1_dev --prompts.train mine.txt --prompts.held_out held_out.txt
```

A file of your own can begin with one of these, or with any other run's file:

```yaml
base: configs/models/flux1_dev.yaml   # or a path relative to this file
prompts: {train: mine.txt, held_out: held_out.txt, per_iteration: 8}
recipe: {group: 12}
rewards: [my_reward.py:warmth]
```

* Mappings merge at every depth; any other value, a list or `null` too, replaces that of the base.
  A recipe of another name replaces the base's whole, whose settings are those of its own recipe.
  The option `--recipe.name` does not: the file's steps, group and other settings stay where the new
  recipe has them too. Write a file with a base for another recipe's own numbers.
* What you name takes the place of what it excludes in the base: `model: {lora: {from: FILE}}` that
  of rank, alpha and targets, `model: {language: NAME}` that of a pipeline and its settings.
* `base` is relative to the file that it stands in; a name that begins with `configs/` may also be
  one of flowrl's. All other paths are relative to the file that they stand in too, and
  then to the folder in which `flowrl` is called ([installing.md](installing.md)).
* A base may have a base. A circle of files, a missing base and a damaged one are refused, with
  the names of the files.
* Options of the command line lie over both. The run's folder has the resolved settings in its
  `run.yaml`, so that `--resume`, `sample` and `evaluate` need none of the files again.

## A model without a configuration

`flowrl new my_run --model HUB_NAME_OR_FOLDER` reads the model's index and the configurations of its
parts, from its folder, the hub's cache, or the hub (a few small files, within 20 seconds):

* a class and a size that one of these configurations is made for: the file begins with that one,
  as for `black-forest-labs/FLUX.1-Krea-dev`, `Qwen/Qwen-Image-Edit-2509` or Wan's image-to-video
  checkpoints, with what differs for the class and its source;
* another class: its guidance, steps and sizes are the defaults of its call; an index that says that
  its model is distilled gives few steps without guidance;
* a class that needs images gets `prompts.jsonl` with columns for them, and example images.

Guidance and steps that a checkpoint was made for stand on its card and in none of its files: the
command names them as guesses. A gated or unknown name is refused with a sentence; without an answer
of the hub the file says so. `flowrl plan` reads the same files, so that it knows the memory of a
model that is not on this machine; a part whose size no file says is named as unknown.

A single file of weights (`my_flux.safetensors`, in the names of the model's original code)
becomes a folder by `flowrl convert FILE --config FOLDER --out NEW`, without a network: diffusers
converts its names, and everything that the file lacks comes from FOLDER, a pipeline of the same
model.

## The table

*memory*: of the whole run on one GPU, as `flowrl plan` estimates it. *hardware*: the smallest of
one RTX 4090, L40S, H100 and H200, and eight H100 with FSDP2, into whose memory the run fits.
*time*: an iteration on eight H100 at 40 % of their peak arithmetic. *guidance*: in sampling /
training / evaluation; `own` is the pipeline's. *numbers*: the source that the file's first lines
name; *ours* where nobody published a recipe for the model. Each file is run for one iteration on
a tiny pipeline of its class with random weights (`tests/recipes/test_model_configs.py`, a slow
test). No model was trained at its true size for this page, and no time or memory was measured.

"""
TAIL = """
Sizes are the public configurations' (`flowrl/models/public_configs.json`). Wan's, SD3.5's
and FLUX.2's were compared with public code; the others are known sizes, most of them the defaults
of diffusers' classes, and were not compared with the repositories' own files. The denoisers' counts
of weights agree with the sizes that the models' names or cards state.

## Prompts and rewards

Prompts below `data/` are not part of this project:
[configs/papers/README.md](../configs/papers/README.md) lists their sources. Reserve some of
`data/videos/train.txt` as `test.txt`. `data/edits/*.jsonl` are your own: one object per line with
the instruction in `prompt`, the image's file in `image`, and what GenEval needs. Any other reward
fits as well: [rewards.md](rewards.md).
"""


def page() -> str:
    return HEAD + table(sorted(CONFIGS.glob("*.yaml"))) + TAIL


def table(paths: list[Path]) -> str:
    head = ("configuration", "model", "recipe", "size", "guidance", "adapters", "memory",
            "hardware", "time", "numbers")  # fmt: skip
    rows = [head, ("---",) * len(head), *(row(path) for path in paths)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def row(path: Path) -> tuple[str, ...]:
    run = read_run(path)
    return (*settings(path, run), *memory_cells(run), time_cell(run), sources(path))


def _scale(scale: GuidanceScale) -> str:
    own = {None: "own", "none": "none"}
    return own[scale] if scale is None or scale == "none" else f"{scale:g}"


def settings(path: Path, run: RunSettings) -> tuple[str, ...]:
    m, name = run.model, str(run.recipe.name)  # type: ignore[attr-defined]
    assert isinstance(m, PipelineSettings), path
    sides = [str(side) for side in (m.height, m.width, m.call.get("num_frames")) if side]
    scales = (m.guidance.sample, run.training_guidance, run.evaluation_guidance)
    said = " / ".join(_scale(scale) for scale in scales)
    adapters = "all weights" if m.lora is None else f"rank {m.lora.rank}"
    link = f"[models/{path.stem}](../configs/models/{path.name})"
    recipe = f"[{name}](recipes.md#{name})"
    return link, f"`{m.pipeline}`", recipe, " x ".join(sides), said, adapters


def memory_cells(run: RunSettings) -> tuple[str, str]:
    """Memory on one GPU, and the smallest hardware of LADDER that it fits."""
    needed = memory.estimate(run)
    assert needed is not None, run.model.source
    more = " +" if needed.unknown else ""
    fitting = (name for name in LADDER if fit.fits(run, fit.limit(None, parse_devices(name))))
    found = next(fitting, "more than 8xH100")
    return f"{memory.size(needed.total)}{more}", found if "x" in found else f"1x{found}"


def time_cell(run: RunSettings) -> str:
    found = estimate_time(run, parse_devices(TIMED), UTILISATION)
    assert found is not None, run.model.source
    return duration(found.total)


def comments(path: Path) -> Iterator[str]:
    """The file's first lines, without their marks."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").strip()


def sources(path: Path) -> str:
    text = " ".join(comments(path))
    papers = ", ".join(dict.fromkeys(re.findall(r"arXiv:\d{4}\.\d{5}", text)))
    return f"ours{f', after {papers}' if papers else ''}" if OURS in text else papers


def from_table(path: Path) -> bool:
    """Whether the model's public configuration is in flowrl's table."""
    return read_tree(path)[0]["model"]["pipeline"] in PUBLIC_MODELS


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
