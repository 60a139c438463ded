"""`flowrl new FOLDER`: a run file, your own reward and prompts, ready to be edited and run."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from flowrl.cli.new_files import image_files, known_files, text_files
from flowrl.cli.schema import read_schema
from flowrl.errors import UserError
from flowrl.json_text import json_text
from flowrl.paths import CONFIGS_FOLDER, find, removed_on_error
from flowrl.recipes import RECIPES
from flowrl.recipes.table import TEXT_RECIPES
from flowrl.run.watch.start_check import check_model_of
from flowrl.settings.command_line.arguments import Word
from flowrl.settings.file.inherit import read_tree, with_base
from flowrl.settings.file.strict_yaml import parse_yaml
from flowrl.settings.model.form import is_pipeline_folder
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


def write_new_run(given: New) -> None:
    """Write the files and print the next commands. UserError if a file already exists, or for an
    unsuitable recipe or model."""
    text = given.text or given.recipe in TEXT_RECIPES or _is_language_model(given.model)
    recipe = given.recipe or ("text_grpo" if text else "nft")
    if recipe not in RECIPES:
        raise UserError(f"new: recipe {unknown_name(recipe, [*RECIPES])}")
    if (recipe in TEXT_RECIPES) != text:
        why = "--text asks for" if given.text else f"{given.model} is"
        raise UserError(f"new: recipe {recipe} is for images, and {why} a language model")
    known = None if given.model is None or text else known_model(given.model)
    if known is not None:
        files = known_files(given.model or "", given.recipe, known)
    else:
        files = text_files(given.model, recipe) if text else image_files(given.model, recipe)
    tree, _ = with_base(parse_yaml(files["run.yaml"], "new"), given.folder / "run.yaml")
    run = run_from(tree, "new")
    check_plan(run)
    check_model_of(run)
    schema = json_text(read_schema()["run"], indent=2)
    files["run.schema.json"] = schema + "\n"
    taken = [name for name in files if (given.folder / name).exists()]
    if taken:
        raise UserError(f"new: {given.folder / taken[0]} already exists; choose another folder")
    try:
        given.folder.mkdir(parents=True, exist_ok=True)
        with removed_on_error(*(given.folder / name for name in files)):
            for name, content in files.items():
                (given.folder / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(f"new: {given.folder} cannot be written: {error.strerror}") from error
    example = files["held_out.txt"].splitlines()[0]
    place = quote(str(given.folder))
    place = f"./{place}" if place.startswith("-") else place
    print(f"wrote {', '.join(files)} in {given.folder}\n\nnext:\n  cd {place}")
    print("  flowrl plan run.yaml      # what an iteration does and costs")
    print("  flowrl train run.yaml     # rewards are in my_reward.py, prompts in prompts.txt")
    print(f'  flowrl sample runs/run-0001 "{example}"')
    if known is not None:
        print(f"the model's settings come from {known}: see that file, and `flowrl plan`")
    elif given.model is not None and not text and not find(given.model).is_dir():
        print(
            f"{given.model} is assumed to be a diffusers pipeline; use --text for a language model"
        )


def _is_language_model(model: str | None) -> bool:
    """Whether a local folder has a language model; False for a hub name."""
    folder = None if model is None else find(model)
    if folder is None or not folder.is_dir() or is_pipeline_folder(folder):
        return False
    return (folder / "config.json").is_file() or bool(list(folder.glob("*.gguf")))


def known_model(model: str) -> str | None:
    """flowrl's file `configs/models/...` for a hub name, or for a folder with the same name."""
    folder = find(model)
    name = folder.resolve().name if folder.is_dir() else model
    for path in sorted((CONFIGS_FOLDER / "models").glob("*.yaml")):
        tree, _ = read_tree(path)
        source = tree["model"].get("pipeline", "")
        if name.lower() in (source.lower(), source.rpartition("/")[2].lower()):
            return f"configs/models/{path.name}"
    return None
