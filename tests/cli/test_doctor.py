"""`flowrl doctor` reads this machine, and names what is missing with the way to get it."""

import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch

from flowrl.cli import doctor


def test_this_environment_is_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "HUB_SECONDS", 0.01)
    assert doctor.print_findings() == 0
    printed = capsys.readouterr().out
    subjects = ("python", "torch", "memory", "hub", "hub cache", "proof cache", "disk", "launchers")
    listed = [line[8:].split("  ")[0] for line in printed.splitlines()]
    assert set(subjects) <= set(listed)
    extras = set(distribution("flowrl").metadata.get_all("Provides-Extra") or ()) - {"dev"}
    assert {f"extra {name}" for name in extras} <= set(listed)
    assert printed.endswith("nothing that every run needs is missing\n")


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor.version

    def absent(name: str) -> str:
        if name in ("peft", "wandb"):
            raise doctor.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor, "version", absent)
    found = {each.subject: each for each in (*doctor._packages(), *doctor._optional())}
    assert found["peft"].state == "missing" and "pip install 'peft" in found["peft"].detail
    assert found["wandb"] == ("note", "wandb", "for track.with: [wandb]: pip install wandb")
    monkeypatch.setattr(doctor, "findings", lambda: iter(found.values()))
    assert doctor.print_findings() == 1 and "missing: peft" in capsys.readouterr().out


def test_libraries_that_do_not_import_side_by_side_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(name: str) -> None:
        raise RuntimeError(f"Failed to import {name}:\ncannot import name 'X' from 'transformers'")

    assert list(doctor._together()) == []
    monkeypatch.setattr(doctor.importlib, "import_module", refused)
    (found,) = doctor._together()
    assert found.state == "missing" and "cannot import name 'X'" in found.detail
    assert "pip install -U diffusers transformers peft" in found.detail


def test_every_extra_says_what_it_is_for() -> None:
    wanted = set(distribution("flowrl").metadata.get_all("Provides-Extra") or ())
    assert wanted - {"dev"} == set(doctor.EXTRAS)


def test_a_source_tree_that_is_not_installed_reads_its_own_requirements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = list(doctor._packages()), list(doctor._extras())

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    known = doctor.version
    monkeypatch.setattr(doctor, "distribution", missing)
    monkeypatch.setattr(doctor, "version", lambda n: missing(n) if n == "flowrl" else known(n))
    first, *packages = doctor._packages()
    assert (first.state, first.subject) == ("note", "flowrl")
    assert {each.subject for each in packages} == {each.subject for each in here[0]}
    assert {each.subject for each in doctor._extras()} == {each.subject for each in here[1]}


def test_other_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "0.1")
    assert all("but flowrl needs" in each.detail for each in doctor._packages())
    monkeypatch.setattr(doctor, "version", lambda name: "999")
    found = {each.subject: each for each in doctor._packages()}
    assert found["torch"].state == "note" and "tested with 2." in found["torch"].detail
    assert found["pillow"].state == "ok"
    monkeypatch.setattr(
        doctor, "version", lambda name: f"{doctor.PROVEN_VERSIONS.get(name, '999')}+cu130"
    )
    assert {each.state for each in doctor._packages()} == {"ok"}


def test_macos_and_mps_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "on macOS" in doctor._python().detail and doctor._python().state == "note"
    (device,) = doctor._devices()
    assert device.subject == "mps" and "set model.device: cpu" in device.detail
    assert doctor._sandbox().state == "note"


def test_a_driver_without_cuda_in_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    (device,) = doctor._devices()
    assert "built without CUDA" in device.detail and "pytorch.org" in device.detail


def test_a_hub_out_of_reach_is_a_note() -> None:
    found = doctor._reachable("http://127.0.0.1:9/")
    assert found.state == "note" and "cannot be reached" in found.detail


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / "not" / "yet"
    assert "free in" in doctor._write_access("disk", new, "").detail and not new.exists()
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    assert doctor._write_access("disk", new, "runs go there").state == "missing"
    assert doctor._write_access("hub cache", new, "other").state == "note"


def test_missing_launchers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "accelerate").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = doctor._launchers()
    assert found.state == "note" and "no torchrun" in found.detail
