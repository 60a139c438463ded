"""A transformers that refuses the installed peft is a sentence, before weights load."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from flowrl.cli import doctor
from flowrl.errors import UserError
from flowrl.models import peft_version
from flowrl.models.language.lora import add_text_lora
from tests.support.tiny_lm import llama


@pytest.fixture
def wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make transformers want a version of peft; None: it names none."""

    def written(version: str | None) -> None:
        folder = tmp_path / "integrations"
        folder.mkdir(exist_ok=True)
        line = "" if version is None else f'MIN_PEFT_VERSION = "{version}"\n'
        (folder / "peft.py").write_text(f"import torch\n\n{line}")
        spec = ModuleSpec("transformers", None, origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(peft_version, "find_spec", lambda _: spec)

    return written


@pytest.mark.parametrize("version", ["0.1.0", None])
def test_a_peft_that_is_new_enough_is_no_finding(wants, version: str | None) -> None:
    wants(version)
    assert peft_version.peft_misfit() is None


def test_a_peft_that_is_too_old_is_told_at_the_adapters_and_by_doctor(wants) -> None:
    wants("99.0.0")
    with pytest.raises(UserError, match=r"99\.0\.0 or newer: pip install 'peft>=99\.0\.0'"):
        add_text_lora(llama(), rank=2, alpha=4, targets=None, seed=0)
    (found,) = [finding for finding in doctor._packages() if finding.subject == "peft"]
    assert found.state == "missing" and "pip install 'peft>=99.0.0'" in found.detail


def test_the_installed_transformers_names_a_version() -> None:
    """Else the check would be silent."""
    assert peft_version._least_version() is not None
