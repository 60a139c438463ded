"""Links out of a run's folder among what commands read there and write into new files: the weights,
and the page of samples that an exported card shows."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flowrl.cli.given_model import weights_folder
from flowrl.cli.model_card import _page
from rewards.rights import Limits, NotGranted, Right, limited

PLACES = {"last": "adapter", "best": "best/000001", "000001": "checkpoints/000001"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for place in PLACES.values():
        (tmp_path / "run" / place).mkdir(parents=True)
        weights = {"a": torch.zeros(4)}
        save_file(weights, tmp_path / "run" / place / "pytorch_lora_weights.safetensors")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("canary")
    return tmp_path / "run"


def moved_out(run: Path, place: Path) -> None:
    there = run.parent / "outside" / place.name
    place.rename(there)
    place.symlink_to(there)


def whole(run: Path, place: str) -> None:
    moved_out(run, run / place)


def above(run: Path, place: str) -> None:
    moved_out(run, run / Path(place).parts[0])


def a_file(run: Path, place: str) -> None:
    (run / place / "notes.txt").symlink_to(run.parent / "outside/secret")


def a_folder_within(run: Path, place: str) -> None:
    (run / place / "second").mkdir()
    (run / place / "second/more").symlink_to(run.parent / "outside")


@pytest.mark.parametrize("named", PLACES)
@pytest.mark.parametrize("put", [whole, above, a_file, a_folder_within])
def test_weights_that_lead_out_need_the_right_to_files(
    put: Callable[[Path, str], None], named: str, run: Path
) -> None:
    put(run, PLACES[named])
    with (
        limited(Limits(run, frozenset(Right) - {Right.FILES})),
        pytest.raises(NotGranted, match="a link out of the folder, needs the right to files"),
    ):
        weights_folder(run, named)
    for limits in (None, Limits(run, frozenset({Right.FILES}))):
        with limited(limits):
            assert weights_folder(run, named) == run / PLACES[named]


@pytest.mark.parametrize("named", PLACES)
def test_weights_in_the_folder_itself_need_none(named: str, run: Path) -> None:
    (run / PLACES[named] / "again").symlink_to(run / "adapter/pytorch_lora_weights.safetensors")
    with limited(Limits(run)):
        assert weights_folder(run, named) == run / PLACES[named]


def test_a_card_shows_no_picture_from_outside(run: Path) -> None:
    samples = run / "samples"
    samples.mkdir()
    (samples / "before_after.png").symlink_to(run.parent / "outside/secret")
    os.mkfifo(samples / "after.gif")
    assert _page(run) is None
    (samples / "before.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert _page(run) == samples / "before.png"
