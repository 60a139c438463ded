"""Models that are named by hub name, whose files in the hub's cache are gone, damaged or locked, or
whose cache cannot be written: one sentence that names the file or the folder and what helps,
through every door. Another download is advised for what is gone or damaged alone; a file that is
there is replaced by `--force-download` alone.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec
from safetensors.torch import save_file

from flowrl.api.hub import downloaded_run
from flowrl.cli.given_model import is_pipeline
from flowrl.models.adapters import peft_adapter
from flowrl.models.before_weights import check_before_weights
from flowrl.models.diffusers.modular import revisions
from flowrl.models.diffusers.modular.revisions import check_listed, load_component, pin
from flowrl.models.language.policy import CausalPolicy
from flowrl.models.model_index import read_index
from flowrl.models.open import open_model
from flowrl.models.saved_weights import load_saved
from flowrl.paths import find
from flowrl.run.watch.start_check import refusals, unchecked
from flowrl.settings import LanguageSettings, PipelineSettings, RunSettings
from flowrl.settings.checks.machine import check_hub, check_model, present_source
from flowrl.settings.read import run_from
from rewards import load
from rewards.catalogue import videoalign
from rewards.perception import hub
from rewards.perception.embedding import open_clip_place
from rewards.perception.hub import check_model_name, model_path, weights_file
from tests.models.test_unreachable_weights import classifier, language
from tests.prompts.test_hub_answers import Answering
from tests.support import fuzz, runs, text_runs, tiny_lm
from tests.support.hub.cache import cache, links
from tests.support.hub.repositories import Hub, serving
from tests.support.rights import rights_hold
from tests.support.tiny_pipelines_parts import vae
from tests.support.vanishing import Looks, fails, looking

NAME = "owner/name"
CPU = torch.device("cpu")


def towers(folder: Path) -> Path:
    return Path(shutil.copytree(find("flowrl/demo/shapes-clip"), folder))


def adapter(folder: Path) -> Path:
    from peft import LoraConfig, get_peft_model

    get_peft_model(tiny_lm.llama(), LoraConfig(target_modules=["q_proj"])).save_pretrained(
        str(folder)
    )
    return folder


def weights(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"a": torch.zeros(40)}, folder / "a.pth")
    return folder


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model_config.json").write_text("{}")
    return folder


def towers_of_open_clip(folder: Path) -> Path:
    folder.mkdir()
    (folder / "open_clip_config.json").write_text("{}")
    save_file({"a": torch.zeros(40)}, folder / "open_clip_model.safetensors")
    return folder


def autoencoder(folder: Path) -> Path:
    """A repository with a component of a modular pipeline."""
    vae().save_pretrained(folder / "vae")
    return folder


def run_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "run.yaml").write_text("recipe: flow_grpo\n")
    return folder


def image_run(folder: Path) -> RunSettings:
    return run_from(runs.tree(Path(NAME), folder, dict(runs.NFT)), "run")


def text_run(folder: Path) -> RunSettings:
    return run_from(text_runs.tree(Path(NAME), folder, dict(text_runs.GRPO)), "run")


def planned(run: RunSettings) -> None:
    check_model(run.model)
    check_before_weights(run)


def peft(_: Path) -> None:
    load_saved(find(NAME), "model.lora.from", lambda: peft_adapter(present_source(NAME)))


def component(_: Path) -> None:
    """A component of a modular pipeline, which is in another repository than its index."""
    spec = ComponentSpec(
        name="vae",
        type_hint=AutoencoderKL,
        pretrained_model_name_or_path=NAME,
        subfolder="vae",
    )
    pin([("vae", spec)], "the index")
    check_listed("vae", spec, "the index")
    load_component("vae", spec, "the index", dtype=torch.float32)
    assert spec.pretrained_model_name_or_path == NAME and spec.revision


Read = Callable[[Path], object]


@dataclass(frozen=True)
class Door:
    """What is cached, and what reads it, with a folder for its own files.

    asks  whether it also finds what is gone, rather than leave it to the start
    """

    make: Callable[[Path], Path]
    read: Read
    asks: bool = True
    name: str = NAME


DOORS = {
    "plan, a pipeline": Door(runs.write_pipeline, lambda at: planned(image_run(at))),
    "plan, a language model": Door(language, lambda at: planned(text_run(at))),
    "a start, a pipeline": Door(
        runs.write_pipeline, lambda _: check_hub(PipelineSettings(pipeline=NAME))
    ),
    "a start, a language model": Door(
        language, lambda _: check_hub(LanguageSettings(language=NAME))
    ),
    "a pipeline": Door(runs.write_pipeline, lambda at: open_model(image_run(at), CPU)),
    "a language model": Door(language, lambda at: open_model(text_run(at), CPU)),
    "an adapter": Door(adapter, peft),
    "a reward's model": Door(classifier, lambda _: model_path(NAME)),
    "a reward's settings": Door(classifier, lambda _: check_model_name("it", NAME)),
    "a whole reward": Door(classifier, lambda _: load("sequence_classifier", model=NAME)),
    "a reward of images": Door(towers, lambda _: load("clip", model=NAME)),
    "a reward's tokenizer": Door(
        language, lambda _: load("length", most=9, unit="tokens", tokenizer=NAME)
    ),
    "a reward's file": Door(
        weights, lambda _: weights_file("it", "weights", None, (NAME, "a.pth"))
    ),
    "a reward's folder": Door(
        checkpoint, lambda _: videoalign._folder(None), name=videoalign.HUB_FOLDER
    ),
    "a reward of open_clip": Door(towers_of_open_clip, lambda _: open_clip_place(f"hf-hub:{NAME}")),
    "a modular pipeline": Door(autoencoder, component),
    "--model": Door(runs.write_pipeline, lambda _: is_pipeline(NAME)),
    "new": Door(runs.write_pipeline, lambda _: read_index(NAME)),
    "a run": Door(run_folder, lambda _: downloaded_run(NAME)),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[Callable[[Path], Path], Path]:
    place = tmp_path_factory.mktemp("sources")
    makers = dict.fromkeys(door.make for door in DOORS.values())
    return {make: make(place / str(i)) for i, make in enumerate(makers)}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an empty cache, without a network."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.unreached.cache_clear()
    hub.hub_silence.cache_clear()
    hub.say_cached.cache_clear()
    revisions.commit.cache_clear()
    (tmp_path / "cache").mkdir()
    (tmp_path / "beside").mkdir()
    yield tmp_path / "cache"
    hub.unreached.cache_clear()
    hub.hub_silence.cache_clear()
    hub.say_cached.cache_clear()
    revisions.commit.cache_clear()


def said_by(door: Door, at: Path) -> str:
    with pytest.raises(ValueError) as told:
        door.read(at)
    said = str(told.value)
    fuzz.one_sentence(said, 900)
    for wrong in ("not found", "no folder", "has no ", "couldn't", "not on this machine"):
        assert wrong not in said, said
    return said


def blob(repository: Path) -> Path:
    """The contents of the last file, of weights where it has some."""
    files = links(repository)
    return next((file for file in files if "safetensors" in file.name), files[-1]).resolve()


@pytest.mark.parametrize("door", DOORS)
def test_a_whole_cache_is_read(door: str, root: Path, sources, tmp_path: Path) -> None:
    cache(sources[DOORS[door].make], root, DOORS[door].name)
    DOORS[door].read(tmp_path / "beside")


def gone(repository: Path) -> None:
    blob(repository).unlink()


def all_gone(repository: Path) -> None:
    for file in (repository / "blobs").iterdir():
        file.unlink()


def first_gone(repository: Path) -> None:
    next(file for file in links(repository) if file.suffix != ".md").resolve().unlink()


def no_snapshot(repository: Path) -> None:
    shutil.rmtree(repository / "snapshots")


def no_commit(repository: Path) -> None:
    (repository / "refs" / "main").write_text("")


def empty(repository: Path) -> None:
    blob(repository).write_bytes(b"")


def pages(repository: Path) -> None:
    for file in (repository / "blobs").iterdir():
        file.write_text("<!doctype html><html></html>")


DOWNLOAD, REPLACE = f"run `hf download {NAME}", "--force-download"
# what happens to the cache, and words of the sentence
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a blob is gone": (gone, DOWNLOAD),
    "the first blob is gone": (first_gone, DOWNLOAD),
    "all blobs are gone": (all_gone, DOWNLOAD),
    "the snapshot is gone": (no_snapshot, DOWNLOAD),
    "the branch names no commit": (no_commit, DOWNLOAD),
    "a file is empty": (empty, REPLACE),
    "files are pages": (pages, REPLACE),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("door", DOORS)
def test_what_is_gone_or_damaged_is_named(
    door: str, fault: str, root: Path, sources, tmp_path: Path
) -> None:
    opened = DOORS[door]
    repository = cache(sources[opened.make], root, opened.name)
    do, words = FAULTS[fault]
    do(repository)
    if fault == "a file is empty" and opened.make is run_folder:
        pytest.skip("an empty run.yaml is told by its reader")
    said = said_by(opened, tmp_path / "beside")
    assert str(repository) in said and words.replace(NAME, opened.name) in said, said


def test_plan_says_what_a_start_would_fetch(
    root: Path, sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that is not switched off may have it; plan asks nobody."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    repository = cache(sources[language], root, NAME)
    gone(repository)
    run = text_run(tmp_path / "beside")
    assert not [line for line in refusals(run) if str(root) in line]
    said = [line for line in unchecked(run) if line.startswith(f"files of {NAME}: {repository}")]
    assert len(said) == 1 and said[0].endswith("; a start asks the hub for it")


def test_adapters_name_the_model_and_not_its_place_in_the_cache(
    root: Path, sources, tmp_path: Path
) -> None:
    cache(sources[language], root, NAME)
    policy = open_model(text_run(tmp_path / "beside"), CPU)
    assert isinstance(policy, CausalPolicy) and policy.model.name_or_path == NAME


@pytest.mark.parametrize("locked", ["the cache", "the repository", "the branch", "a file"])
@pytest.mark.parametrize("door", DOORS)
def test_what_is_locked_is_named(
    door: str, locked: str, root: Path, sources, tmp_path: Path
) -> None:
    repository = cache(sources[DOORS[door].make], root, DOORS[door].name)
    file = {
        "the cache": root,
        "the repository": repository,
        "the branch": repository / "refs" / "main",
        "a file": blob(repository),
    }[locked]
    mode = file.stat().st_mode
    file.chmod(0)
    try:
        with rights_hold():
            said = said_by(DOORS[door], tmp_path / "beside")
    finally:
        file.chmod(mode)
    assert "(permission denied): change its rights" in said and "HF_HOME" in said, said
    assert str(root) in said and "ownload" not in said, said


TRIED = 4  # looks of a quick case, evenly spaced


@pytest.mark.quick_cases("a blob")
@pytest.mark.parametrize("way", ["a blob", "the repository", "disk"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("tried", [TRIED, pytest.param(12, marks=pytest.mark.slow)])
def test_what_vanishes_in_the_middle_is_named(
    tried: int, door: str, way: str, root: Path, sources, tmp_path: Path
) -> None:
    opened, beside = DOORS[door], tmp_path / "beside"
    make = lambda: cache(sources[opened.make], root, opened.name)
    repository = make()
    with looking(Looks(root, lambda _: None)) as counted:
        opened.read(beside)
    words = {"a blob": DOWNLOAD, "the repository": "is no longer there", "disk": "disk does not"}
    do = {
        "a blob": lambda _: blob(repository).unlink(missing_ok=True),
        "the repository": lambda _: shutil.rmtree(repository, ignore_errors=True),
        "disk": fails(errno.EIO),
    }
    said = set[str]()
    for look in range(1, counted.count + 1, max(1, counted.count // tried)):
        shutil.rmtree(repository, ignore_errors=True)
        make()
        try:
            with looking(Looks(root, do[way], look, lasting=way == "disk")):
                opened.read(beside)
        except ValueError as error:
            said.add(str(error))
            fuzz.one_sentence(str(error), 900)
            assert str(root) in str(error) or look <= 3, (look, str(error))
    assert said == set() or any(words[way].replace(NAME, opened.name) in t for t in said), said


# what is not cached yet, by door, and the files that a hub serves of it
FETCHING = {
    "a pipeline": "model_index.json",
    "a language model": "config.json",
    "a reward's tokenizer": "tokenizer_config.json",
    "a reward's file": "a.pth",
    "new": "model_index.json",
}


@pytest.fixture
def served(root: Path, sources, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A hub that answers, and an empty cache."""
    files = {
        file.relative_to(source).as_posix(): file.read_text(encoding="latin-1")
        for source in (*sources.values(), sources[language])  # whose files lie over the others
        for file in source.rglob("*")
        if file.name in FETCHING.values() or file.name == "tokenizer.json"
    }
    with serving(Hub({NAME: files})) as url:
        serve(monkeypatch, url)
        yield root


def serve(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    constants = huggingface_hub.constants
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", url)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between the client's own tries
    hub.unreached.cache_clear()
    hub.hub_silence.cache_clear()
    hub.say_cached.cache_clear()
    revisions.commit.cache_clear()


@pytest.mark.parametrize("door", FETCHING)
def test_a_cache_that_cannot_be_written_is_named(door: str, served: Path, tmp_path: Path) -> None:
    served.chmod(0o555)
    try:
        with rights_hold():
            said = said_by(DOORS[door], tmp_path / "beside")
    finally:
        served.chmod(0o755)
    assert f"the hub's cache {served} cannot be written" in said, said
    assert "(permission denied): change its rights, or set HF_HOME to another folder" in said, said


def refusing(call: Callable[..., Any], root: Path, number: int) -> Callable[..., Any]:
    """A call that fails for paths below `root`."""

    def refused(path: Any, *rest: Any, **named: Any) -> Any:
        if Path(path).is_relative_to(root):
            raise OSError(number, os.strerror(number), os.fspath(path))
        return call(path, *rest, **named)

    return refused


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("door", FETCHING)
def test_a_full_or_read_only_disk_is_named(
    number: int, door: str, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only disk refuses folders, a full one the contents, in an error without a file's
    name."""
    if number == errno.EROFS:
        monkeypatch.setattr(os, "mkdir", refusing(os.mkdir, served, number))
    else:

        def full(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(huggingface_hub.file_download, "http_get", full)
    said = said_by(DOORS[door], tmp_path / "beside")
    way = "free space on its disk" if number == errno.ENOSPC else "change its rights"
    assert f"the hub's cache {served} cannot be written" in said, said
    assert f"({os.strerror(number).lower()}): {way}" in said and "HF_HOME" in said, said


def test_a_hub_that_answers_gives_what_is_gone(served: Path, sources, tmp_path: Path) -> None:
    repository = cache(sources[weights], served, NAME)
    gone(repository)
    file = Path(weights_file("it", "weights", None, (NAME, "a.pth")))
    assert file.is_file() and file.is_relative_to(repository)


LOADING = (  # doors that read weights; each says it once
    "a pipeline", "a language model", "an adapter", "a reward's model", "a whole reward",
    "a reward of images", "a reward's tokenizer", "a reward's folder", "a run",
    "a reward of open_clip", "a modular pipeline",
)  # fmt: skip


@pytest.mark.quick_cases("-0")
@pytest.mark.parametrize("status", [0, 500])
@pytest.mark.parametrize("door", DOORS)
def test_a_whole_cache_is_read_beside_a_silent_hub(
    status: int,
    door: str,
    root: Path,
    sources,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Within its own limit, and with a line that says so; status 0: no answer at all."""
    opened = DOORS[door]
    cache(sources[opened.make], root, opened.name)
    made = Answering({}, slow=() if status else (opened.name,))
    made.status = status
    monkeypatch.setattr(hub, "_TIMEOUT", 0.3)
    with serving(made) as url:
        serve(monkeypatch, url)
        begun = time.monotonic()
        opened.read(tmp_path / "beside")
        made.release.set()
    assert time.monotonic() - begun < 20
    assert len([path for path in made.asked if opened.name in path]) <= 2, made.asked
    said = capsys.readouterr().err
    assert said.count("is read from the hub's cache") == (door in LOADING), said


def test_a_long_wait_for_the_hub_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "NOTICE_SECONDS", 0.05)
    with hub.waiting("owner/name"):
        assert not capsys.readouterr().err
        time.sleep(0.3)
    said = capsys.readouterr().err
    assert said.startswith("waiting for the hub (http") and said.count("\n") == 1
    assert "owner/name" in said and "HF_HUB_OFFLINE=1" in said
    with hub.waiting("owner/name"):
        pass
    time.sleep(0.1)
    assert not capsys.readouterr().err


def token_locked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "token").write_text("hf_abc")
    (folder / "token").chmod(0)


def token_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "token").write_bytes(b"\xff\xfe\x00h")


def token_of_two_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "token: hf_abc")


def nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pass


def no_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, "mirror.example")


def proxy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    serve(monkeypatch, "http://hub.invalid")


# what is wrong around the hub, and words of the sentence
AROUND: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = {
    "a token that is locked": (token_locked, "token cannot be read (permission denied)"),
    "a token that is damaged": (token_damaged, "token holds no token; log in again"),
    "a token of two words": (token_of_two_words, "holds no token; log in again"),
    "a login page": (nothing, "answers as no hub does"),
    "no address": (no_address, "mirror.example"),
    "a proxy that is away": (proxy, "through the proxy of HTTP_PROXY"),
}
ASKING = {
    **{name: DOORS[name].read for name in FETCHING if name != "new"},
    "a reward's model": DOORS["a reward's model"].read,
    "a reward's folder": DOORS["a reward's folder"].read,
    "a run": DOORS["a run"].read,
}


@pytest.mark.parametrize("fault", AROUND)
@pytest.mark.parametrize("door", ASKING)
def test_what_is_wrong_around_the_hub_is_named(
    door: str, fault: str, root: Path, sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For what is not cached; what is cached is read."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    do, words = AROUND[fault]
    made = Answering({})
    made.status, made.page = 200, fault == "a login page"
    with serving(made) as url, rights_hold():
        serve(monkeypatch, url)
        do(tmp_path, monkeypatch)
        with pytest.raises(ValueError) as told:
            ASKING[door](tmp_path / "beside")
        said = str(told.value)
        fuzz.one_sentence(said, 700)
        assert words in said and "secret" not in said, said
        cache(sources[DOORS[door].make], root, DOORS[door].name)
        ASKING[door](tmp_path / "beside")


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_the_commands_of_the_messages_mend_the_cache(
    damage: str, served: Path, sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain download fetches what is gone, and leaves what is damaged as it is."""
    name = "config.json"
    repository = cache(sources[language], served, NAME)
    file = next(file for file in links(repository) if file.name == name).resolve()

    def read() -> Path:
        hub.hub_silence.cache_clear()
        hub.unreached.cache_clear()
        return Path(weights_file("it", "weights", None, (NAME, name)))

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", damage == "gone")
    file.unlink() if damage == "gone" else file.write_bytes(b"")
    with pytest.raises(ValueError, match=f"`hf download {NAME} {name}") as told:
        read()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    command = str(told.value).split("`")[1].split()
    assert command[:4] == ["hf", "download", NAME, name]
    assert command[4:] == ([] if damage == "gone" else ["--force-download"])
    huggingface_hub.hf_hub_download(NAME, name)
    assert file.stat().st_size == 0 or damage == "gone"
    huggingface_hub.hf_hub_download(NAME, name, force_download=damage == "damaged")
    assert read().stat().st_size
