"""Calls around a run: files to start from, lists, and what this machine can do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from flowrl.api.calls import checked_arguments, public_call
from flowrl.cli.runs import RunLine, run_lines
from flowrl.errors import UserError
from flowrl.evaluation.suites import Suite, Suites, list_suites, load_suite

Shell = Literal["bash", "zsh", "fish"]


@public_call
def new_run(
    folder: str | Path,
    *,
    model: str | Path | None = None,
    recipe: str | None = None,
    text: bool = False,
) -> Path:
    """Write a small run file, a reward of your own and prompts into a folder, as `flowrl new` does.
    Returns the run file, for `flowrl.Run`.

    model   a pipeline's or language model's folder or hub name; None: a small demo model
    recipe  None: nft for images, text_grpo for texts
    text    a language model, where neither the recipe nor the folder says so

    UserError if a file already exists, or the recipe does not suit the model.
    """
    from flowrl.cli.new import New, write_new_run

    values = {"folder": folder, "model": model, "recipe": recipe, "text": text}
    arguments = checked_arguments(New, values, {}, "flowrl.new_run")
    write_new_run(arguments)
    return arguments.folder / "run.yaml"


@public_call
def convert(file: str | Path, *, out: str | Path, config: str | Path | None = None) -> Path:
    """Write a single file of weights, in the names of the model's original code, as a pipeline's
    folder, or the denoiser of a pipeline's folder as such a file. `out` is returned. No network is
    used.

    file    a safetensors file of a denoiser, or of a whole pipeline (Stable Diffusion); or a
            pipeline's folder
    out     a new or empty folder; or, of a folder, a new safetensors file (a second denoiser's is
            beside it, NAME_2.safetensors)
    config  of a file: the folder of a pipeline of the same model, from which everything comes that
            the file lacks

    UserError for a file that does not fit that pipeline, and for a model of which diffusers' own
    reader does not read back every weight to the bit: no file is left then.
    """
    from flowrl.cli.convert import Convert, convert_file

    values = {"file": file, "config": config, "out": out}
    return convert_file(checked_arguments(Convert, values, {}, "flowrl.convert"))


@public_call
def list_runs(folders: str | Path | Sequence[str | Path] = ()) -> list[RunLine]:
    """The runs in these folders, or in `runs`: how far each is, its state, best score and alarms.
    The last one that did something is first. pandas.DataFrame takes the list. UserError for a
    folder that has no run."""
    folder_list = [folders] if isinstance(folders, str | Path) else folders
    return run_lines([Path(folder) for folder in folder_list])


@public_call
def list_recipes(names: str | Sequence[str] = (), *, all: bool = False) -> str:
    """The algorithms by what they rest on, as a text; or one of them, by its name or
    FILE.py:FUNCTION, with the types, defaults and source of its settings; or a part of algorithms
    by its name, or all `parts`.

    all  contributed recipes too
    """
    from flowrl.cli.recipe_text import recipe_list, recipe_text

    name_list = [names] if isinstance(names, str) else list(names)
    if len(name_list) > 1:
        raise UserError(f"recipes: give a single recipe, not {' '.join(name_list)[:200]}")
    return recipe_text(name_list[0]) if name_list else recipe_list(all)


@public_call
def list_rewards(names: str | Sequence[str] = ()) -> str:
    """The rewards by what they score, as a text; or one of them, by its name or FILE.py:FUNCTION,
    with the media that it scores, what it needs, and the types, defaults and meanings of its
    settings. UserError for a name that is no reward."""
    from flowrl.cli.reward_text import all_rewards, reward_text

    name_list = [names] if isinstance(names, str) else list(names)
    if len(name_list) > 1:
        raise UserError(f"rewards: give a single reward, not {' '.join(name_list)[:200]}")
    return reward_text(name_list[0]) if name_list else all_rewards()


@public_call
def suites(
    name: str = "", *, out: str | Path | None = None, get: str | Path | None = None
) -> Suite | None:
    """List the prompt sets with their own metrics; or print one and return it, with its prompts.

    name  NAME or NAME:FILE; without it all are listed
    out   write its prompts to this file as JSON lines
    get   download its official file to this path
    """
    arguments = checked_arguments(
        Suites, {"name": name, "out": out, "get": get}, {}, "flowrl.suites"
    )
    list_suites(arguments)
    return load_suite(name) if name and get is None else None


@public_call
def schema() -> dict[str, Any]:
    """The JSON schema of a run's file, for editors."""
    from flowrl.cli.schema import read_schema

    return read_schema()["run"]


@public_call
def completion_script(shell: Shell) -> str:
    """The script that completes commands, options and runs in a shell: bash, zsh or fish."""
    from flowrl.cli.completion import SHELLS

    if shell not in SHELLS:
        raise UserError(f"completion: give a shell, one of {', '.join(SHELLS)}")
    return SHELLS[shell]


@public_call
def doctor(
    folder: str | Path | None = None,
    *,
    device: str | None = None,
    run: str | Path | None = None,
    sandbox: bool = False,
    isolation: Literal["full", "external"] = "full",
    program: str | Path | None = None,
) -> int:
    """Print what this machine can run, what is missing and how to get it. Returns the exit code of
    `flowrl doctor`: 0 if all that was asked for works here, 1 if not, 2 without the device.

    folder     a run's folder: which rights it asks for, and whether they are granted. Nothing that
               it names is imported
    device     test this device in short runs: proof, ratio, waits, speed and memory; `run` takes
               the place of the demo
    sandbox    try the sandbox of the reward code_tests, flowrl's own or the external one, in this
               Python or in that of another environment (`program`)

    UserError for a device that no machine has.
    """
    from flowrl.cli.doctor import Doctor, print_findings

    values = {
        "folder": folder, "device": device, "run": run, "sandbox": sandbox,
        "isolation": isolation, "program": program,
    }  # fmt: skip
    arguments = checked_arguments(Doctor, values, {}, "flowrl.doctor")
    if arguments.folder is not None:
        from flowrl.cli.rights import print_rights

        return print_rights(arguments.folder)
    if arguments.sandbox:
        from flowrl.cli.sandbox_check import check_sandbox

        return check_sandbox(arguments.program, arguments.isolation)
    if arguments.program is not None:
        raise UserError("doctor: --program needs --sandbox")
    if arguments.device is None:
        if arguments.run is not None:
            raise UserError("doctor: --run needs --device")
        return print_findings()
    from flowrl.cli.commands import quiet
    from flowrl.cli.installed import check_torchvision

    quiet()
    check_torchvision()
    from flowrl.cli.device_check import check_device

    return check_device(arguments.device, arguments.run)
