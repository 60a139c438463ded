from flowrl.paths import PROJECT
from flowrl.recipes.table import IMAGE_RECIPES, TEXT_RECIPES
from scripts.generate import readme


def test_the_pages_list_every_recipe_and_word() -> None:
    for name in readme.PARTS:
        text = (PROJECT / name).read_text()
        assert readme.written(name, text) == text, "run: python scripts/generate/readme.py"


def test_every_recipe_has_its_place() -> None:
    page = (PROJECT / "docs" / "recipes.md").read_text()
    links = [f"| [{name}](recipes.md#{name}) |" for name in (*IMAGE_RECIPES, *TEXT_RECIPES)]
    assert all(link in page for link in links)
    places = [f"\n## {name}\n" for name in (*IMAGE_RECIPES, *TEXT_RECIPES)]
    assert all(place in page for place in places)
