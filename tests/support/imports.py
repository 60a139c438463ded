"""Modules that a test imports in place of installed ones."""

import sys

import pytest


def forget_module(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The next import reads the module anew, and what it puts there is gone after the test.
    `monkeypatch.delitem` alone keeps nothing in mind of a module that was not there."""
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
