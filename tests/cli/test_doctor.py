"""`flowrl doctor` reads this machine, and names what is missing with the way to get it."""

import pytest

from flowrl.cli import doctor


def test_this_environment_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.print_findings() == 0
    printed = capsys.readouterr().out
    assert "torch" in printed and "extra track" in printed and "launchers" in printed


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        if name == "peft":
            raise doctor.PackageNotFoundError(name)
        return "999"

    monkeypatch.setattr(doctor, "version", absent)
    found = {each.subject: each for each in doctor._packages()}
    assert found["peft"].state == "missing" and "pip install 'peft" in found["peft"].detail


def test_an_old_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "0.1")
    assert all("but flowrl needs" in each.detail for each in doctor._packages())
