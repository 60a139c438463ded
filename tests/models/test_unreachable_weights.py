"""A model's folder that vanishes, whose rights forbid to read it, or whose disk stops to answer, at
every look that a reader takes into it: one sentence that says so. Another download helps against
damage alone, so no such sentence advises one.
"""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, BertConfig

from flowrl.errors import UserError
from flowrl.models.before_weights import check_before_weights
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.saved_weights import load_saved, tensors_and_settings
from flowrl.paths import find
from flowrl.settings import LanguageSettings
from flowrl.settings.checks.machine import check_model, reading_model
from flowrl.settings.read import run_from
from rewards import load
from rewards.perception.hub import check_model_name, model_path
from rewards.perception.reachable import DOWNLOAD_AGAIN, reachable, way_to_read
from tests.models.test_damaged_weights import saved
from tests.rewards.test_weight_files import READERS as OF_REWARDS
from tests.rewards.test_weight_files import TINY
from tests.support import fuzz, runs, text_runs, tiny_lm
from tests.support.rights import rights_hold
from tests.support.vanishing import Looks, fails, looking, vanishes

Make, Read = Callable[[Path], Path], Callable[[Path], object]


def pipeline(folder: Path) -> Path:
    return runs.write_pipeline(folder)


def language(folder: Path) -> Path:
    return tiny_lm.write(folder)


def adapter(folder: Path) -> Path:
    folder.mkdir()
    halves = {f"a.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    save_file(halves, folder / "a.safetensors", {"settings": '{"r": 2}'})
    (folder / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 2}')
    return folder


def classifier(folder: Path) -> Path:
    one = BertConfig(**{**TINY.to_dict(), "num_labels": 1})
    AutoModelForSequenceClassification.from_config(one).save_pretrained(folder)
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


def planned(tree: dict[str, Any]) -> None:
    run = run_from(tree, "run")
    check_model(run.model)
    check_before_weights(run)


def plan_pipeline(folder: Path) -> None:
    planned(runs.tree(folder, folder.parent, dict(runs.NFT)))


def plan_language(folder: Path) -> None:
    planned(text_runs.tree(folder, folder.parent, dict(text_runs.GRPO)))


def load_language(folder: Path) -> None:
    with reading_model(LanguageSettings(language=str(folder))):
        CausalPolicy.load(str(folder), dtype=torch.float32, device=torch.device("cpu"))


def load_adapter(folder: Path) -> None:
    file = folder / "a.safetensors"
    load_saved(folder, "the weights", lambda: tensors_and_settings(file, "settings", "the weights"))


READERS = {name: reader for name, reader in OF_REWARDS.items() if name != "a classifier"}  # whole
# a folder, and what reads it
DOORS: dict[str, tuple[Make, Read]] = {
    "plan, a pipeline": (pipeline, plan_pipeline),
    "plan, a language model": (language, plan_language),
    "a language model": (language, load_language),
    "saved weights": (adapter, saved),
    "an adapter": (adapter, load_adapter),
    "a reward's model": (language, lambda folder: model_path(str(folder))),
    "a reward's settings": (language, lambda folder: check_model_name("it", str(folder))),
    "a whole reward": (classifier, lambda folder: load("sequence_classifier", model=str(folder))),
}


def made(make: Make) -> Make:
    """A reward's file of weights in a folder of its own."""

    def inside(folder: Path) -> Path:
        folder.mkdir()
        make(folder)
        return folder

    return inside


def of_folder(make: Make, read: Read, scratch: Path) -> Read:
    """A reader of a file, as one of its folder."""
    scratch.mkdir()
    name = make(scratch).name
    return lambda folder: read(folder / name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Read]]:
    """Whole folders, by door."""
    place = tmp_path_factory.mktemp("whole")
    doors = dict(DOORS)
    for name, (make, read) in READERS.items():
        doors[f"reward, {name}"] = (made(make), of_folder(make, read, place / f"scratch {name}"))
    return {name: (make(place / name), read) for name, (make, read) in doors.items()}


NAMES = [*DOORS, *(f"reward, {name}" for name in READERS)]
TRIED = 12  # looks of a quick case, evenly spaced
DOOR = 3  # looks with which a reader begins; what is gone by then was never there


def looks_of(folder: Path, read: Read) -> int:
    looks = Looks(folder, lambda _: None)
    with looking(looks):
        read(folder)
    return looks.count


@pytest.mark.parametrize("way", ["vanishes", "rights", "disk"])
@pytest.mark.parametrize("door", NAMES)
@pytest.mark.parametrize("tried", [TRIED, pytest.param(10**6, marks=pytest.mark.slow)])
def test_what_keeps_a_folder_from_being_read_is_named(
    tried: int, way: str, door: str, folders: dict[str, tuple[Path, Read]], tmp_path: Path
) -> None:
    source, read = folders[door]
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    most = looks_of(folder, read)
    step = max(1, most // tried)
    said = set[str]()
    for look in range(1, most + 1, step):
        if not folder.exists():
            shutil.copytree(source, folder)
        do = vanishes(folder) if way == "vanishes" else fails(OF[way])
        looks = Looks(folder, do, look, lasting=way != "vanishes")
        try:
            with looking(looks):
                read(folder)
        except ValueError as error:
            said.add(str(error))
            fuzz.one_sentence(str(error), 900)
            assert "ownload" not in str(error), (look, str(error))
            assert str(folder) in str(error), (look, str(error))
        except OSError:
            assert look <= DOOR
    assert any(SAID[way] in text for text in said), said


def test_the_way_to_read_a_file_is_a_download_for_damage_alone(tmp_path: Path) -> None:
    file, damage = tmp_path / "model" / "a.json", ValueError("cut off")
    assert way_to_read(file, damage).startswith(f"there is no folder {file.parent}: give its")
    file.parent.mkdir()
    absent = FileNotFoundError(errno.ENOENT, "No such file", str(file))
    assert way_to_read(file, absent) == way_to_read(file, damage) == DOWNLOAD_AGAIN
    assert way_to_read(file, PermissionError(errno.EACCES, "x")).startswith("change its rights")
    assert "mount it again" in way_to_read(file, OSError(errno.ESTALE, "x"))


def test_rights_of_files_are_named(tmp_path: Path) -> None:
    """By the system's own refusal."""
    folder = adapter(tmp_path / "adapter")
    file = folder / "a.safetensors"
    for locked in (file, folder):
        mode = locked.stat().st_mode
        locked.chmod(0)
        try:
            with rights_hold(), pytest.raises(UserError, match=r"denied\): change its rights"):
                saved(folder)
            with rights_hold(), pytest.raises(UserError, match=r"denied\): change its rights"):
                find(str(file)) if locked == folder else saved(file)
        finally:
            locked.chmod(mode)
    saved(folder)


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH])
def test_a_network_s_error_is_not_the_disk_s(number: int, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "owner" / "name"):
        with pytest.raises(OSError, match="of the hub"), reachable("it", path):
            raise OSError(number, "of the hub")


OF = {"rights": errno.EACCES, "disk": errno.EIO}
SAID = {
    "vanishes": "is no longer there: it was moved, renamed, removed or unmounted",
    "rights": "(permission denied): change its rights",
    "disk": "its disk does not answer; mount it again",
}
