"""`flowrl new FOLDER`: a run file, your own reward and prompts, ready to be edited and run."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from flowrl.cli.new_files import Files, example_prompts, image_files, text_files
from flowrl.cli.new_pipeline import PipelineStart, pipeline_files
from flowrl.cli.schema import read_schema
from flowrl.errors import UserError, write_fault
from flowrl.json_text import json_text
from flowrl.paths import find, removed_on_error
from flowrl.recipes import RECIPES
from flowrl.recipes.table import TEXT_RECIPES
from flowrl.run.watch.start_check import check_model_of
from flowrl.settings import RunSettings
from flowrl.settings.command_line.arguments import Word
from flowrl.settings.file.inherit import with_base
from flowrl.settings.file.strict_yaml import parse_yaml
from flowrl.settings.model.form import is_pipeline_folder
from flowrl.settings.model.pipeline import PipelineSettings
from flowrl.settings.read import check_plan, run_from
from flowrl.settings.words.names import unknown_name


@dataclass
class New:
    """Write a folder with a small run file, your own reward, and prompts."""

    folder: Word[Path]
    """The folder to create."""
    model: str | None = None
    """A pipeline's or language model's folder or hub name; by default a small demo model."""
    recipe: str | None = None
    """One of `flowrl recipes`; by default nft for images, text_grpo for texts."""
    text: bool = False
    """Use a language model instead of an image or video pipeline. Not needed if the recipe is for
    texts, or the model is a folder."""


def write_new_run(arguments: New) -> None:
    """Write the files and print the next commands. UserError if a file already exists, or for an
    unsuitable recipe or model."""
    text = arguments.text or arguments.recipe in TEXT_RECIPES or _is_language_model(arguments.model)
    recipe = arguments.recipe or ("text_grpo" if text else "nft")
    if recipe not in RECIPES:
        raise UserError(f"new: recipe {unknown_name(recipe, [*RECIPES])}")
    if (recipe in TEXT_RECIPES) != text:
        reason = "--text asks for" if arguments.text else f"{arguments.model} is"
        raise UserError(f"new: recipe {recipe} is for images, and {reason} a language model")
    start = (
        None
        if arguments.model is None or text
        else pipeline_files(arguments.model, arguments.recipe)
    )
    if start is not None:
        files = start.files
    else:
        files = (
            text_files(arguments.model, recipe) if text else image_files(arguments.model, recipe)
        )
    tree, _ = with_base(parse_yaml(str(files["run.yaml"]), "new"), arguments.folder / "run.yaml")
    run = run_from(tree, "new")
    check_plan(run)
    check_model_of(run)
    schema = json_text(read_schema()["run"], indent=2)
    files["run.schema.json"] = schema + "\n"
    _write(arguments.folder, files)
    _next(arguments.folder, files, start)
    if start is not None and start.guesses:
        print(_guesses(run))


def _write(folder: Path, files: Files) -> None:
    taken = [name for name in files if (folder / name).exists()]
    if taken:
        raise UserError(f"new: {folder / taken[0]} already exists; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with removed_on_error(*(folder / name for name in files)):
            for name, content in files.items():
                place = folder / name
                place.parent.mkdir(exist_ok=True)
                place.write_bytes(content if isinstance(content, bytes) else content.encode())
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with NUL
        raise UserError(f"new: {folder} cannot be written: {write_fault(error)}") from error


def _next(folder: Path, files: Files, start: PipelineStart | None) -> None:
    """Print what was written, the next commands, and where settings come from."""
    written = [name for name in files if not name.startswith("images/")]
    written += ["images/"] * (len(written) < len(files))
    place = quote(str(folder))
    place = f"./{place}" if place.startswith("-") else place
    print(f"wrote {', '.join(written)} in {folder}\n\nnext:\n  cd {place}")
    prompts = next(name for name in files if name.startswith("prompts."))
    print("  flowrl plan run.yaml      # what an iteration does and costs")
    print(f"  flowrl train run.yaml     # rewards are in my_reward.py, prompts in {prompts}")
    lines = example_prompts() if start is not None else str(files["held_out.txt"]).splitlines()
    print(f'  flowrl sample runs/run-0001 "{lines[0] if start is None else lines[-1]}"')
    for note in () if start is None else start.notes:
        print(note)


def _guesses(run: RunSettings) -> str:
    """Values of the run that a model's card says, and no file of it."""
    scale, m = run.evaluation_guidance, run.model
    assert isinstance(m, PipelineSettings)
    guidance = "the pipeline's own" if scale is None else scale if scale == "none" else f"{scale:g}"
    size = "the pipeline's own size"
    if m.height is not None and m.width is not None:
        frames = m.call.get("num_frames")
        size = f"{m.height} x {m.width}" + ("" if frames is None else f" x {frames}")
    return (
        f"guesses, to compare with the model's card: guidance {guidance}, {run.evaluation_steps} "
        f"steps in evaluations, {size}; and the learning rate"
    )


def _is_language_model(model: str | None) -> bool:
    """Whether a local folder has a language model; False for a hub name."""
    folder = None if model is None else find(model)
    if folder is None or not folder.is_dir() or is_pipeline_folder(folder):
        return False
    return (folder / "config.json").is_file() or bool(list(folder.glob("*.gguf")))
