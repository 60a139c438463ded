"""`make renew` writes the versions that it tried, and keeps the pins of what it did not install."""

import re

import pytest
import stranger

BEFORE = "accelerate==1.0\nOpen_Clip_Torch==3.3.0\nray==2.50\ntorch==2.13.0\ntransformers==5.0\n"
TRIED = "accelerate==1.1\nnew-package==0.1\ntorch==2.13.0\ntransformers==5.1\n"
AFTER = (
    "accelerate==1.1\nnew-package==0.1\nOpen_Clip_Torch==3.3.0\nray==2.50\ntorch==2.13.0\n"
    "transformers==5.1\n"
)


def renew(tmp_path, monkeypatch, tried: str, *, write: bool = True) -> tuple[str, str]:
    pins, doctor = tmp_path / "constraints.txt", tmp_path / "doctor.py"
    pins.write_text(BEFORE)
    doctor.write_text('{"transformers": "5.0"}')
    monkeypatch.setattr(stranger, "CONSTRAINTS", pins)
    monkeypatch.setattr(stranger, "DOCTOR", doctor)
    monkeypatch.setattr(stranger, "PROVEN_VERSIONS", {"transformers": "5.0"})
    stranger.renewed(tried, write=write)
    return pins.read_text(), doctor.read_text()


def test_pins_of_packages_that_were_not_installed_stay(tmp_path, monkeypatch, capsys):
    pins, doctor = renew(tmp_path, monkeypatch, TRIED)
    assert pins == AFTER and doctor == '{"transformers": "5.1"}'
    said = capsys.readouterr().out
    assert "kept as they were, since not installed: Open_Clip_Torch==3.3.0, ray==2.50" in said
    assert "- accelerate==1.0\n+ accelerate==1.1\n+ new-package==0.1\n" in said
    assert "- ray" not in said


@pytest.mark.parametrize("name", ["open-clip-torch", "open_clip_torch", "Open.Clip.Torch"])
def test_one_package_has_one_pin_however_its_name_is_written(tmp_path, monkeypatch, name):
    pins, _ = renew(tmp_path, monkeypatch, f"{TRIED}{name}==4.0\n")
    assert re.findall("(?i)^open.clip.*$", pins, re.MULTILINE) == [f"{name}==4.0"]


def test_the_installed_size_counts_each_file_once(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_bytes(bytes(3000))
    (tmp_path / "a" / "link").symlink_to(tmp_path / "a" / "b")
    assert stranger.gigabytes(tmp_path) == pytest.approx(3e-6, rel=0.1)


def test_each_notebook_of_the_examples_runs_in_a_folder_of_its_own(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(stranger, "laid_over", lambda *_: (tmp_path / "bin" / "python", ""))
    monkeypatch.setattr(stranger, "tried", lambda lines, folder, _: seen.append(folder) or lines)
    (executed,) = stranger.notebooks(tmp_path, tmp_path, tmp_path, "")
    names = [path.name for path in sorted((stranger.PROJECT / "examples").glob("*.ipynb"))]
    assert executed() == [f"jupyter execute --kernel_name=python3 {name}" for name in names]
    assert all((folder / name).is_file() for folder, name in zip(seen, names, strict=True))
    assert len(seen) == 3 and not stranger.notebooks(tmp_path, tmp_path, tmp_path, "flowrl recipes")


def test_a_run_is_made_before_the_lines_that_read_it():
    lines = [line for _, line in stranger.commands() if not stranger.why(line)]
    chains = stranger.run_chains([*lines, *lines])
    assert sorted(line for chain in chains for line in chain) == sorted(set(lines))
    makers = [line for line in lines if re.search(r"train .*--folder runs/\w+", line)]
    assert makers
    for line in makers:
        (chain,) = [chain for chain in chains if line in chain]
        assert chain[0] == line, chain


@pytest.mark.parametrize("part", stranger.MISSING)
def test_each_refusal_that_a_bare_wheel_may_meet_is_one_that_flowrl_says(part):
    """A sentence that is reworded would make the suite of an hour fail at its end."""
    rooms = [stranger.PROJECT / name for name in ("flowrl", "rewards", "samplers")]
    texts = (path.read_text() for room in rooms for path in room.rglob("*.py"))
    assert any(part in text for text in texts), part


def test_a_part_of_the_commands_writes_nothing(tmp_path, monkeypatch, capsys):
    assert renew(tmp_path, monkeypatch, TRIED, write=False)[0] == BEFORE
    assert "not written" in capsys.readouterr().out
