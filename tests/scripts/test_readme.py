import importlib

from flowrl.paths import PROJECT
from flowrl.recipes import RECIPES


def test_the_readme_lists_every_file_and_recipe(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "scripts"))
    readme = importlib.import_module("readme")
    text = (PROJECT / "README.md").read_text()
    assert readme.written(text) == text, "run: python scripts/generate/readme.py"
    assert all(f"| {name} " in text for name in RECIPES)
