"""Models of rewards are looked up before anything is loaded, and without a long wait."""

import importlib
import time
from pathlib import Path

import pytest

from flowrl.errors import UserError
from flowrl.paths import PROJECT
from flowrl.run.watch.start_check import refusals
from flowrl.session.session import check_reward_sources
from flowrl.settings import RewardSpec
from flowrl.settings.read import override, read_run
from rewards import load
from rewards.checks.settings import settings_of
from rewards.load import check_files, check_sources, names
from rewards.perception import hub
from rewards.perception.hub import is_hub_name
from rewards.rights import marks


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network, and an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.unreached.cache_clear()
    hub.hub_silence.cache_clear()
    yield
    hub.unreached.cache_clear()
    hub.hub_silence.cache_clear()


@pytest.mark.parametrize(
    ("name", "settings", "model"),
    [
        ("pickscore", {}, "yuvalkirstain/PickScore_v1"),
        ("clip", {}, "openai/clip-vit-large-patch14"),
        ("clipped", {"reward": {"name": "clip", "model": "a/b"}}, "a/b"),
        ("gate", {"reward": "geneval", "where": "jpeg"}, "facebook/mask2former"),
        ("win_rate", {"judge": "pickscore"}, "yuvalkirstain/PickScore_v1"),
        ("sequence_classifier", {"model": "no/such"}, "no/such"),
    ],
)
def test_a_model_that_is_nowhere_is_one_sentence_soon(offline, name, settings, model):
    begun = time.monotonic()
    with pytest.raises(ValueError, match=f"there is no folder {model}.*the hub.*cannot be reached"):
        check_sources(name, settings)
    with pytest.raises(ValueError, match=r"cannot be reached .*: download the model"):
        load(name, **settings)
    with pytest.raises(UserError, match=f"reward {name}: there is no folder"):
        check_reward_sources([RewardSpec(name=name, settings=settings)])
    assert time.monotonic() - begun < 20


def test_what_is_local_is_found_without_a_network(offline, tmp_path):
    check_sources("clip", {"model": "flowrl/demo/shapes-clip"})
    check_sources("clip", {"model": "ViT-L-14/openai", "library": "open_clip"})
    check_sources("brightness", {})
    assert Path(hub.model_path("flowrl/demo/shapes-clip")).is_dir()
    snapshot = tmp_path / "cache" / "models--a--b" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "cache" / "models--a--b" / "refs"
    refs.mkdir()
    (refs / "main").write_text("1234")
    assert hub.model_path("a/b") == str(snapshot)


def test_a_path_that_is_no_name_on_the_hub_is_refused(offline):
    with pytest.raises(
        ValueError, match="there is no folder /none/at/all, and it is not a hub name"
    ):
        hub.model_path("/none/at/all")


@pytest.mark.parametrize(
    ("name", "setting"), [("imagereward", "checkpoint"), ("aesthetic", "head")]
)
def test_a_file_that_is_nowhere_is_one_sentence(offline, name, setting):
    with pytest.raises(
        ValueError, match=f"{name}: .*cannot be reached .*; name a file with `{setting}`"
    ):
        load(name)


def named_files():
    """Each setting of the catalogue that names a file, a folder or a model."""
    for name in names():
        module = importlib.import_module(f"rewards.catalogue.{name}")
        for maker in ("load", "judge"):
            if maker in vars(module):
                for setting, parameter in settings_of(vars(module)[maker]).items():
                    path = any(mark.path and not mark.hub for mark in marks(parameter.annotation))
                    if path or is_hub_name(parameter.annotation):
                        yield name, maker, setting


NAMED_FILES = list(named_files())


@pytest.mark.parametrize(("name", "maker", "setting"), NAMED_FILES)
def test_a_file_that_is_not_there_is_told_before_weights(name, maker, setting):
    with pytest.raises(ValueError, match=f"{setting}: .*no (such file or )?folder.*/no/such/thing"):
        check_files(name, {setting: "/no/such/thing"}, maker)
    check_files(name, {setting: "flowrl/demo/shapes-taste"}, maker)


PAGE = "<!doctype html>\n<html><head><title>config.json at main</title></head></html>\n"


@pytest.mark.parametrize(("name", "maker", "setting"), NAMED_FILES)
def test_a_page_in_place_of_a_file_is_told_before_weights(name, maker, setting, tmp_path):
    for file in (tmp_path / "weights.safetensors", tmp_path / "config.json"):
        file.write_text(PAGE)
    with pytest.raises(ValueError, match=f"{name}.*: {setting}: .*is an HTML page, not the file"):
        check_files(name, {setting: str(tmp_path)}, maker)


def test_files_of_inner_rewards_are_told_too_and_by_plan():
    assert {"fitted", "process_reward", "hpsv3"} <= {name for name, _, _ in NAMED_FILES}
    with pytest.raises(ValueError, match="path: no such file or folder: nonexist"):
        check_files("clipped", {"reward": {"name": "fitted", "path": "nonexist"}})
    run = override(
        read_run(PROJECT / "configs" / "demo.yaml"),
        ["--rewards", "[{name: fitted, path: nonexist}]"],
    )
    assert any("no such file or folder: nonexist" in each for each in refusals(run))


def test_each_faulty_reward_is_refused_once(tmp_path):
    """By the check of its name and settings; what else reads it does not say the same again."""
    own = tmp_path / "own.py"
    own.write_text("def light(samples):\n    return [0.0]\n\nlight.per = 'sample'\n")
    faulty = {
        "shapess": "there is no reward 'shapess'",
        "{name: shapes, kindd: strict}": "has no setting 'kindd'",
        f"{{name: {own}:dark}}": "no function or class 'dark'",
        f"{{name: {own}:light, width: 1}}": "has no setting 'width'",
        "{name: clipped, reward: shapess}": "there is no reward 'shapess'",
    }
    demo = read_run(PROJECT / "configs" / "demo.yaml")
    for spec, said in faulty.items():
        found = list(refusals(override(demo, ["--rewards", f"[{spec}]"])))
        assert len(found) == 1 and found[0].startswith("rewards: ") and said in found[0], found
    both = override(demo, ["--rewards", "[shapess]", "--held_out_rewards", "[brightnes]"])
    assert [sentence.partition(":")[0] for sentence in refusals(both)] == [
        "rewards", "held_out_rewards",
    ]  # fmt: skip
