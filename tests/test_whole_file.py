"""Files are written completely or not at all, and nowhere else than it was asked for."""

import os
from pathlib import Path

import pytest

from flowrl.errors import UserError
from flowrl.paths import folder_inside
from flowrl.whole_file import write_whole


@pytest.mark.parametrize("at", ["page.html", "page.html.tmp", ".page.html.tmp"])
def test_a_file_is_written_through_no_link(tmp_path: Path, at: str) -> None:
    """Whoever wrote the folder knows the names of its files, and of temporary ones."""
    outside, folder = tmp_path / "outside", tmp_path / "run"
    outside.write_text("mine")
    folder.mkdir()
    (folder / at).symlink_to(outside)
    write_whole(folder / "page.html", "page")
    assert outside.read_text() == "mine"
    assert (folder / "page.html").read_text() == "page"
    assert not (folder / "page.html").is_symlink()


def test_a_file_that_cannot_be_written_leaves_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_whole(path, "older")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text() == "older"
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_others_may_read_a_file_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "page.html", "page")
    finally:
        os.umask(before)
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o644


def test_a_command_writes_into_no_folder_that_is_a_link(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    for folder in (run, outside):
        folder.mkdir()
    (run / "samples").symlink_to(outside)
    with pytest.raises(UserError, match="is a link"):
        folder_inside(run, "samples")
    assert folder_inside(run, "votes") == run / "votes"
