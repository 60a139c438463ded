"""Every command that takes a pipeline's folder takes a modular one: commands x forms."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file

from flowrl.errors import UserError
from flowrl.models.diffusers.modular import revisions
from flowrl.models.diffusers.modular.folder import ModularSource, check_components, skeleton
from flowrl.session.start_record import StartRecord
from flowrl.settings.read import read_run
from tests.support.advice import advice
from tests.support.runs import flowrl
from tests.support.tiny_modular import twin
from tests.support.tiny_pipelines import NAMED

torch.set_num_threads(1)
FAMILY = "Wan 2.1"
FORMS = ("classic", "modular", "modular of a classic folder")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each form, of the same parts."""
    place = tmp_path_factory.mktemp("forms")
    NAMED[FAMILY].build().save_pretrained(place / "classic")
    twin(FAMILY).save_pretrained(str(place / "modular"), overwrite_modular_index=True)
    return {"classic": place / "classic", "modular": place / "modular", FORMS[2]: place / "classic"}


def tree(folder: Path, form: str, at: Path) -> dict[str, Any]:
    (at / "prompts.txt").write_text("a red cube\ntwo blue cat\n")
    model: dict[str, Any] = {
        "pipeline": str(folder),
        "height": 16,
        "width": 16,
        "guidance": 1.0,
        "call": {"num_frames": 5, "max_sequence_length": 16},
        "lora": {"rank": 2},
    }
    if form == FORMS[2]:
        model["form"] = "modular"
    return {
        "recipe": {"name": "flow_grpo", "steps": 3, "group": 2},
        "model": model,
        "prompts": {
            "train": str(at / "prompts.txt"),
            "held_out": str(at / "prompts.txt"),
            "per_iteration": 2,
        },
        "rewards": ["brightness"],
        "train": {"iterations": 2},
        "evaluate": {"steps": 3, "every": 2, "samples": 2},
    }


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "pytorch_lora_weights.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_commands_take_every_form(
    form: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file, run = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(tree(folders[form], form, tmp_path)))
    assert flowrl("plan", file) == 0
    said = capsys.readouterr().out
    assert "memory: about" in said and "trained model 0.1 MiB" in said
    assert flowrl("prove", file) == 0
    modular = form != "classic"
    name = "WanModularPipeline (modular form, ClassifierFreeGuidance)" if modular else "WanPipeline"
    assert capsys.readouterr().out.startswith(f"{name}, float32")
    assert flowrl("train", file, "--folder", run) == 0
    assert f"{name}, float32, 3 steps" in capsys.readouterr().out
    model = yaml.safe_load((run / "run.yaml").read_text())["model"]
    assert model["form"] == form.split()[0]
    known = None if model["guider"] is None else model["guider"]["guider"]["name"]
    assert known == ("ClassifierFreeGuidance" if modular else None)
    assert flowrl("sample", run, "a red ball", "--count", "1", "--out", tmp_path / "out") == 0
    assert flowrl("evaluate", run, "--samples", "2", "--out", tmp_path / "scores.jsonl") == 0
    assert flowrl("export", run, "--out", tmp_path / "export") == 0
    card = (tmp_path / "export" / "README.md").read_text()
    assert "load_lora_weights" in card
    monkeypatch.chdir(tmp_path)
    assert flowrl("new", "mine", "--model", str(folders[form])) == 0
    written = yaml.safe_load((tmp_path / "mine" / "run.yaml").read_text())
    assert written["model"]["pipeline"] == str(folders[form])


@pytest.mark.slow
def test_both_forms_train_the_same_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    """Without guidance the two forms of Wan call the network alike, so their runs are equal."""
    found = {}
    for form in FORMS:
        place = tmp_path / form.replace(" ", "_")
        place.mkdir()
        (place / "run.yaml").write_text(yaml.safe_dump(tree(folders[form], form, place)))
        assert flowrl("train", place / "run.yaml", "--folder", place / "run") == 0
        found[form] = weights(place / "run")
    for form in FORMS[1:]:
        assert all(
            torch.equal(found[form][name], value) for name, value in found["classic"].items()
        )


@pytest.mark.slow
def test_a_modular_run_resumes_to_the_bit(folders: dict[str, Path], tmp_path: Path) -> None:
    settings = tree(folders["modular"], "modular", tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    assert flowrl("train", file, "--folder", tmp_path / "whole") == 0
    assert flowrl("train", file, "--folder", tmp_path / "cut", "--train.iterations", "1") == 0
    assert flowrl("train", "--resume", tmp_path / "cut", "--train.iterations", "2") == 0
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert flowrl("train", "--resume", tmp_path / "cut", "--model.form", "classic") == 2


@pytest.mark.slow
def test_full_weights_of_a_modular_pipeline_are_saved_and_read(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    settings = tree(folders["modular"], "modular", tmp_path)
    settings["model"]["lora"] = None
    file, run = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(settings))
    assert flowrl("train", file, "--folder", run) == 0
    assert (run / "pipeline" / "modular_model_index.json").is_file()
    assert flowrl("sample", run, "a red ball", "--count", "1", "--out", tmp_path / "out") == 0
    saved = tree(run / "pipeline", "modular", tmp_path)
    file.write_text(yaml.safe_dump(saved))
    assert flowrl("plan", file) == 0


def test_a_damaged_index_is_told(folders: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for part in folders["modular"].iterdir():
        (broken / part.name).symlink_to(part)
    (broken / "modular_model_index.json").unlink()
    (broken / "modular_model_index.json").write_text("{")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree(broken, "modular", tmp_path)))
    assert flowrl("plan", file) == 2
    assert "modular_model_index.json cannot be read" in capsys.readouterr().err


@pytest.fixture
def repositories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The hub's cache, without a network."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    revisions.commit.cache_clear()
    yield cache
    revisions.commit.cache_clear()


def at_commit(cache: Path, commit: str, part: Path) -> None:
    """Acme's repository has this part, and its main branch is at this commit."""
    repository = cache / "models--acme--parts"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(part, repository / "snapshots" / commit / part.name)


def of_acme(folder: Path, to: Path) -> Path:
    """A copy of a folder by links, whose VAE is in another repository."""
    to.mkdir()
    for part in folder.iterdir():
        if part.is_dir() and part.name != "vae":
            (to / part.name).symlink_to(part)
    index = json.loads((folder / "modular_model_index.json").read_text())
    index["vae"][2].update(subfolder="vae", pretrained_model_name_or_path="acme/parts")
    (to / "modular_model_index.json").write_text(json.dumps(index))
    return to


FIRST, SECOND = "1" * 40, "2" * 40


def test_the_commits_of_components_are_known_before_they_load(
    folders: dict[str, Path], tmp_path: Path, repositories: Path
) -> None:
    place = of_acme(folders["modular"], tmp_path / "wan")
    local = of_acme(folders["modular"], tmp_path / "local")

    def downloaded() -> None:
        shutil.copytree(folders["modular"] / "vae", local / "vae")
        assert ModularSource(str(local)).load(torch.float32).vae is not None

    def allowed() -> None:
        check_components(skeleton(str(place)), ModularSource(str(place), ["network"]))

    for follow in (downloaded, allowed):
        advice(
            "another repository, which is read over the network: download it into the folder, or "
            "set model.rights: [network]",
            lambda: ModularSource(str(place)).revisions(),
            follow,
        )
    source = ModularSource(str(place), ["network"])

    def downloaded() -> dict[str, str]:
        at_commit(repositories, FIRST, folders["modular"] / "vae")
        return source.revisions()

    commits = advice(
        "{} is in {}, which is neither on the hub nor in its cache ({}): download it with",
        lambda: source.load(torch.float32),
        downloaded,
    )
    assert commits == {"vae": f"acme/parts@{FIRST}"}
    assert source.load(torch.float32).vae is not None
    at_commit(repositories, SECOND, folders["modular"] / "vae")
    assert source.revisions() == {"vae": f"acme/parts@{FIRST}"}  # asked for once a process


@pytest.mark.parametrize("revision", [FIRST, "v1"])
def test_a_revision_that_the_index_names_is_in_the_command(
    revision: str, folders: dict[str, Path], tmp_path: Path, repositories: Path
) -> None:
    """The main branch is in the cache already; the plain command would fetch it again."""
    place = of_acme(folders["modular"], tmp_path / "wan")
    named_in(place, revision=revision)
    at_commit(repositories, SECOND, folders["modular"] / "vae")
    source = ModularSource(str(place), ["network"])
    with pytest.raises(UserError, match=f"`hf download acme/parts --revision {revision}`"):
        source.load(torch.float32)

    def downloaded() -> Any:
        at_commit(repositories, FIRST, folders["modular"] / "vae")
        (repositories / "models--acme--parts/refs/v1").write_text(FIRST)
        return source.load(torch.float32)

    if revision == FIRST:
        pipe = advice(
            "whose commit {} is not in the hub's cache, and the hub {}: download it with",
            lambda: source.load(torch.float32),
            downloaded,
        )
    else:
        pipe = downloaded()
    assert pipe.vae is not None


def named_in(place: Path, **entries: str) -> None:
    """Change where the index says that the VAE is."""
    file = place / "modular_model_index.json"
    index = json.loads(file.read_text())
    index["vae"][2].update(entries)
    file.write_text(json.dumps(index))


def test_a_folder_that_a_repository_lacks_is_corrected_in_the_index(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = of_acme(folders["modular"], tmp_path / "wan")
    monkeypatch.setattr(revisions, "hub_silence", lambda _: None)
    monkeypatch.setattr(revisions, "_files", lambda *_: ("vae/config.json",))

    def checked(folder: Path) -> None:
        spec = skeleton(str(folder))._component_specs["vae"]
        spec.revision = FIRST
        revisions.check_listed("vae", spec, str(folder))

    def corrected() -> None:
        named_in(place, subfolder="vae")
        checked(place)

    named_in(place, subfolder="decoder")
    for follow in (lambda: checked(folders["modular"]), corrected):
        advice(
            "and {} has none at {}: correct the index, or give a whole folder",
            lambda: checked(place),
            follow,
        )


@pytest.mark.slow
def test_a_resume_refuses_another_commit_of_a_component(
    folders: dict[str, Path], tmp_path: Path, repositories: Path, capsys: Any
) -> None:
    place, file, run = of_acme(folders["modular"], tmp_path / "wan"), tmp_path / "run.yaml", "run"
    at_commit(repositories, FIRST, folders["modular"] / "vae")
    settings = tree(place, "modular", tmp_path)
    settings["model"]["rights"] = ["network"]
    settings["train"]["iterations"] = 1
    file.write_text(yaml.safe_dump(settings))
    assert flowrl("train", file, "--folder", tmp_path / run) == 0
    words = ("train", "--resume", tmp_path / run, "--train.iterations", "2")
    at_commit(repositories, SECOND, folders["modular"] / "vae")
    revisions.commit.cache_clear()
    capsys.readouterr()

    def resumed() -> None:
        capsys.readouterr()
        if flowrl(*words) != 0:
            raise UserError(capsys.readouterr().err)

    def anew() -> dict[str, str] | None:
        index = (place / "modular_model_index.json").read_text()
        named_in(place, revision=FIRST)
        assert flowrl("train", file, "--folder", tmp_path / "new") == 0
        record = StartRecord.of(read_run(tmp_path / "new" / "run.yaml"), 1)
        (place / "modular_model_index.json").write_text(index)
        return record.revisions

    with pytest.raises(UserError, match=rf"the vae of {place} .* with revision: {FIRST} for it in"):
        resumed()
    commits = advice(
        "the {} of {} is not the one that {} was started with: {} now, {} before; start a new "
        "run, with revision: {} for it in the index to train the earlier one",
        resumed,
        anew,
    )
    assert commits == {"vae": f"acme/parts@{FIRST}"}
    (repositories / "models--acme--parts/refs/main").write_text(FIRST)
    revisions.commit.cache_clear()
    resumed()
