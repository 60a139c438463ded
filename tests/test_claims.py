"""What pages claim in numbers and names, held against the code that they speak of."""

import re
from collections.abc import Iterator

import pytest

from flowrl.paths import PROJECT
from flowrl.recipes import RECIPES
from flowrl.recipes.table import IMAGE_RECIPES, TEXT_RECIPES
from flowrl.settings.sections.joint import JOINT
from rewards.load import names
from scripts.mutants.run import MUTANTS

PAGES = ("README.md", "docs/index.md", "CHANGELOG.md", "docs/choosing.md")
IMAGES, TEXTS = len(IMAGE_RECIPES), len(TEXT_RECIPES)


def of_the_list(pattern: str) -> set[int]:
    """Numbers that the list of pipelines, which a sweep over all of them writes, has in words."""
    page = (PROJECT / "docs/pipelines.md").read_text()
    return {int(found) for found in re.findall(pattern, page)}


COUNTS: dict[str, set[int]] = {
    r"diffusers' (\d+) pipelines": of_the_list(r"(\d+) pipelines of images and videos that"),
    r"(\d+) are driven\s+exactly": of_the_list(r"take a prompt: (\d+) are exact"),
    r"of its (\d+) modular\s+ones": of_the_list(r"exports (\d+): \d+ are exact"),
    r"modular\s+ones (\d+)": of_the_list(r"exports \d+: (\d+) are exact"),
    r"(\d+) recipes": {IMAGES, IMAGES + TEXTS},
    r"(\d+) of them for images": {IMAGES},
    r"images and videos and (\d+) of texts": {TEXTS},
    r"and others\), (\d+) for\s+language": {TEXTS},
    r"GRPO and (\d+) further recipes": {TEXTS - 1},
    r"\*?\*?(\d+) rewards": {len(names())},
    r"\[(\d+) configurations\]": {len(list((PROJECT / "configs" / "models").glob("*.yaml")))},
}


def claims() -> Iterator[tuple[str, str, str]]:
    for page in PAGES:
        for pattern in COUNTS:
            for found in re.finditer(pattern, (PROJECT / page).read_text()):
                yield page, pattern, found[1]


@pytest.mark.parametrize(("page", "pattern", "number"), list(claims()))
def test_a_number_of_recipes_rewards_or_configurations_is_right(page, pattern, number):
    assert int(number) in COUNTS[pattern], f"{page} counts {number}, the code {COUNTS[pattern]}"


NAMED_RECIPES = (  # how pages and README name a recipe
    r"[Rr]ecipes? \(?`(\w+)`", r"`(\w+)` recipe\b", r"--recipe\.name[ =](\w+)", r"--recipe (\w+)",
    r"\brecipe: \{name: (\w+)[,}]", r"^ *recipe: (\w+) *(?:#.*)?$", r"recipe=?\(?\"(\w+)\"",
)  # fmt: skip
NO_RECIPES = {"NAME": "a word for any", "tilt": "docs/own_models.md defines it"}


def test_what_pages_call_a_recipe_is_one():
    pages = [PROJECT / "README.md", *(PROJECT / "docs").rglob("*.md")]
    named = {
        (found[1], page.name)
        for page in pages
        for pattern in NAMED_RECIPES
        for found in re.finditer(pattern, page.read_text(), re.MULTILINE)
    }
    assert len(named) > 15
    known = {*RECIPES, JOINT, *NO_RECIPES}
    assert not {place for place in named if place[0] not in known}


def test_every_kind_of_claim_stands_somewhere():
    assert {pattern for _, pattern, _ in claims()} == {*COUNTS}


def test_the_page_of_the_architecture_lists_every_room():
    page = (PROJECT / "docs" / "architecture.md").read_text()
    tree = page.split("## Rooms")[1].split("```")[1]
    for path in sorted((PROJECT / "flowrl").iterdir()):
        if (path / "__init__.py").is_file():
            listed = re.search(rf"\s{path.name}/\s", tree)
            assert listed, f"docs/architecture.md lacks the room {path.name}/"


KINDS = PROJECT / "docs" / "kinds_of_faults.md"


def test_every_test_that_the_pages_for_contributors_name_is_there():
    pages = (PROJECT / "CONTRIBUTING.md").read_text() + KINDS.read_text()
    named = set(re.findall(r"`((?:tests|scripts)/[\w/.]+)`", pages))
    assert len(named) > 50
    assert [name for name in sorted(named) if not (PROJECT / name).exists()] == []


def kinds() -> dict[str, dict[str, str]]:
    """The lines of each kind of faults, by its heading."""
    _, *sections = re.split(r"^### ", KINDS.read_text(), flags=re.MULTILINE)
    return {
        section.partition("\n")[0]: dict(re.findall(r"^\* \*\*(\w+):\*\* (.+)$", section, re.M))
        for section in sections
    }


@pytest.mark.parametrize("kind", kinds())
def test_a_kind_of_faults_says_how_it_is_searched_for_and_what_breaks_it(kind):
    lines = kinds()[kind]
    assert [*lines] == ["Members", "Search", "Tests", "Breaks"]
    tests = set(re.findall(r"`tests/([\w/.]+)`", lines["Tests"]))
    broken = {row[0]: row for row in MUTANTS if row.name.startswith("kind-")}
    for name in re.findall(r"`(kind-[\w-]+)`", lines["Breaks"]):
        judged = {test.partition("::")[0] for test in broken[name].tests.split()}
        assert judged <= tests, f"{name} is judged by {judged}, which the kind does not name"


def test_every_break_of_a_kind_stands_on_the_page():
    named = set(re.findall(r"`(kind-[a-z-]+)`", KINDS.read_text()))
    assert named == {row.name for row in MUTANTS if row.name.startswith("kind-")}
