"""Teachers of a run: folders of trained weights, one for each task of its prompts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.losses.averages import TEACHER
from flowrl.paths import find
from flowrl.prompts import PromptSet
from flowrl.prompts.prompt_set import PromptRow
from flowrl.settings.base import OnResume, Settings
from flowrl.settings.model.form import is_pipeline_folder
from rewards.rights import ReadFile

ADAPTER_FILE, PIPELINE_FILE = "pytorch_lora_weights.safetensors", "model_index.json"


class TeacherSettings(Settings):
    """Weights to distil into the student (for the recipe opd)."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {"column": OnResume.NEVER}
    folders: dict[str, ReadFile] = Field(min_length=1)
    """Task -> folder of its teacher: an adapter, or a pipeline of the same architecture, as saved
    by runs of flowrl (`runs/NAME/adapter`, `runs/NAME/pipeline`)."""
    column: str = "data_set"
    """Column of the prompt file with a prompt's task; not needed for a single teacher. `data_set`
    is the name of the row's data set, if `prompts.train` has several."""

    def check(self, prompts: PromptSet | None, adapters: bool) -> None:
        """UserError for a prompt without a teacher, a folder without weights, or weights that do
        not fit the student's. `adapters`: whether the student has any; without `prompts` only the
        folders are checked."""
        if prompts is not None:
            self.tasks(prompts, range(len(prompts)))
        for task, folder in self.folders.items():
            place, path = f"teachers.folders.{task}", find(folder)
            if not path.is_dir():
                raise UserError(f"{place}: no folder {folder}")
            if (path / ADAPTER_FILE).is_file():
                continue
            if not is_pipeline_folder(path):
                inside = [n for n in ("adapter", "pipeline") if (path / n).is_dir()]
                hint = f"; did you mean {Path(folder) / inside[0]}?" if inside else ""
                raise UserError(
                    f"{place}: {folder} has neither {ADAPTER_FILE} nor {PIPELINE_FILE}{hint}"
                )
            if adapters:
                raise UserError(
                    f"{place}: {folder} has full weights, which do not fit the student's "
                    "adapters: set model.lora: null, or use a teacher with an adapter"
                )

    def tasks(self, prompts: PromptSet, rows: Sequence[int]) -> tuple[str, ...]:
        """Task of each of these prompt rows. UserError for a row without a task or with a task
        that has no teacher."""
        if len(self.folders) == 1:
            return tuple(self.folders) * len(rows)
        tasks: list[str] = []
        for number in rows:
            row = prompts.meta[number] if prompts.meta else {}
            at = row.place if isinstance(row, PromptRow) else f"prompts.train, row {number + 1}"
            task = row.get(self.column)
            if task is None:
                raise UserError(
                    f"{at} has no {self.column!r}, the column of tasks (teachers.column)"
                )
            if str(task) not in self.folders:
                names = ", ".join(self.folders)
                raise UserError(
                    f"{at}: {self.column} is {str(task)!r}, but the teachers are {names}"
                )
            tasks.append(str(task))
        return tuple(tasks)


def check_teachers(teachers: TeacherSettings | None, algorithm: Algorithm) -> None:
    """UserError for a distillation recipe without teachers, or teachers that the recipe does not
    use."""
    asked = TEACHER in algorithm.roles
    if asked and teachers is None:
        raise UserError(
            "this recipe distils a teacher, but the run has none: add teachers: {folders: "
            "{NAME: FOLDER}}, with the adapter or pipeline that another run saved"
        )
    if teachers is not None and not asked:
        raise UserError(
            "teachers: this recipe does not use teachers: leave them out, or use the recipe opd"
        )
