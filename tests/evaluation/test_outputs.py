"""Places of output are tried before the long work that fills them."""

import json
from pathlib import Path

import pytest

from flowrl.errors import UserError
from flowrl.evaluation.outputs import check_output_file, make_output_folder
from flowrl.settings.command_line.arguments import MOST_COUNTED
from tests.support.runs import flowrl

NOWHERE = ("/proc/new", "a\0b", "x" * 300)


@pytest.mark.parametrize("place", NOWHERE)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(place: str) -> None:
    way = "choose (another|a shorter) (place|name)"
    with pytest.raises(UserError, match=f"--out: .* cannot be written: .*{way}"):
        check_output_file(Path(place))
    with pytest.raises(UserError, match=f"--out: cannot write into the folder .*{way}"):
        make_output_folder(Path(place))


def test_a_file_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    """A new file is not left behind, and an earlier output may be replaced."""
    check_output_file(tmp_path / "new.jsonl", begins=b"{")
    assert not (tmp_path / "new.jsonl").exists()
    (tmp_path / "run.yaml").write_text("recipe: {name: nft}\n")
    (tmp_path / "old.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="exists, and is nothing that this command writes"):
        check_output_file(tmp_path / "run.yaml", begins=b"{")
    for name in ("old.jsonl", "empty.jsonl"):
        before = (tmp_path / name).read_bytes()
        check_output_file(tmp_path / name, begins=b"{")
        assert (tmp_path / name).read_bytes() == before


def test_commands_keep_what_they_did_not_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("recipe: {name: nft}\n")
    words = ("evaluate", tmp_path, "--out", tmp_path / "run.yaml"), ("suites", "shapes", "--out")
    for command in (words[0], (*words[1], tmp_path / "run.yaml")):
        assert flowrl(*command) == 2
        assert "choose another name" in capsys.readouterr().err
    assert (tmp_path / "run.yaml").read_text() == "recipe: {name: nft}\n"


@pytest.mark.parametrize("option", ["--samples", "--per-prompt", "--base-steps", "--steps"])
def test_counts_that_no_memory_holds_are_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flowrl("evaluate", tmp_path, option, str(10**12)) == 2
    assert (
        f"{option}: input should be less than or equal to {MOST_COUNTED}" in capsys.readouterr().err
    )
