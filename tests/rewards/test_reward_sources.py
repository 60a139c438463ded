"""Models of rewards are looked up before anything is loaded, and without a long wait."""

import time
from pathlib import Path

import pytest

from flowrl.errors import UserError
from flowrl.session.session import check_reward_sources
from flowrl.settings import RewardSpec
from rewards import load
from rewards.load import check_sources
from rewards.perception import hub


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network, and an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.hub_reachable.cache_clear()
    yield
    hub.hub_reachable.cache_clear()


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
    with pytest.raises(ValueError, match="cannot be reached: download the model"):
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
        ValueError, match=f"{name}: .*cannot be reached; name a file with `{setting}`"
    ):
        load(name)
