"""The documentation as a whole: anchors, settings that pages name, the questions, the site."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from flowrl.paths import PROJECT
from flowrl.recipes import RECIPES
from flowrl.settings.command_line.options import option_names
from flowrl.settings.sections.recipe_kinds import recipe_kind
from flowrl.settings.words.names import WORDS
from scripts.generate.formulas import typeset

DOCS = PROJECT / "docs"
PAGES = [*PROJECT.glob("*.md"), *DOCS.rglob("*.md")]
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
ANCHOR = re.compile(r"\]\(([^)\s#]*)#([^)\s]+)\)")
SETTING = re.compile(
    r"`((?:model|prompts|train|evaluate|checkpoint|track|budget|steer|recipe)"
    r"(?:\.(?!(?:txt|jsonl|md|yaml)`)[a-z_]+)+)(?:: [^`]*)?`"
)


def anchors(page: Path) -> set[str]:
    """Ids of a page's headings, as on the site and on forges."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {head.strip().replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_lead_to_headings(page: Path) -> None:
    for path, anchor in ANCHOR.findall(page.read_text()):
        there = (page.parent / path) if path else page
        if "://" not in path and there.suffix == ".md":
            assert anchor in anchors(there), f"{page.name}: {path}#{anchor}"


def known_settings() -> set[str]:
    names = {name for recipe in RECIPES for name in option_names(recipe_kind(recipe))}
    return {".".join(name.split(".")[:n]) for name in names for n in range(1, 6)}


def test_pages_name_settings_that_exist() -> None:
    known = known_settings()
    named = {
        name: page.name
        for page in PAGES
        if page.name not in ("CHANGELOG.md", "LOG.md", "coming_from.md")
        for name in SETTING.findall(page.read_text())
    }
    assert len(named) > 60
    of_others = {name for row in WORDS for cell in row.peers for name in cell.split(", ")}
    # mappings, whose keys are the user's, and entries of lists
    free = ("model.call.", "prompts.columns.", "model.adapters.", "prompts.train.")
    free += ("prompts.held_out.",)
    lost = {name: page for name, page in named.items() if name not in known | of_others}
    assert not {n: p for n, p in lost.items() if not n.startswith(free)}


def test_questions_are_numbered_and_have_answers_with_links() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", (DOCS / "questions.md").read_text(), re.M)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1)) and rows
    assert all(".md" in answer or "`" in answer for _, _, answer in rows)


def nav_pages(entries: list[object]) -> Iterator[str]:
    for entry in entries:
        assert isinstance(entry, dict)
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from nav_pages(value)


def test_every_page_is_in_the_sites_navigation() -> None:
    text = (PROJECT / "mkdocs.yml").read_text()
    listed = set(nav_pages(yaml.safe_load(text)["nav"]))
    assert {page.name for page in DOCS.glob("*.md")} <= listed
    parts = (DOCS / "results" / "index.md").read_text()
    assert all(f"({page.name})" in parts for page in (DOCS / "results").glob("[!i]*.md"))


class Addresses(HTMLParser):
    """Addresses that a page loads or links to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a":
            self.links.append(given.get("href") or "")
        elif tag in ("script", "img", "link"):
            self.loads.append(given.get("src") or given.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder, built once, without a warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_opens_offline(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        found = Addresses()
        found.feed(page.read_text())
        assert not [a for a in found.loads if a.startswith("http")], page.name
        for link in found.links:
            path = link.partition("#")[0]
            if path and "://" not in path and not path.startswith(("mailto:", "/")):
                assert (page.parent / path).exists(), f"{page.name}: {link}"


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """scripts/generate/site.py, whose name is also one of Python's own modules."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location(
        "site_hook", PROJECT / "scripts" / "generate" / "site.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bars_in_code_of_a_table_lose_their_backslash_and_no_others(hook: ModuleType) -> None:
    row = r"| `a` | x \| y | `KL(new \| role)` |"
    assert hook.bars(row + "\n") == r"| `a` | x \| y | `KL(new | role)` |" + "\n"
    assert hook.bars(r"no table: `a \| b`") == r"no table: `a \| b`"


FORMULAS = {
    "x' = x - h (v + g^2)": (
        "<i>x</i>&prime; = <i>x</i> &minus; <i>h</i> (<i>v</i> + <i>g</i><sup>2</sup>)"
    ),
    "g = eta sqrt(sigma / (1 - sigma))": (
        "<i>g</i> = <i>&eta;</i> &radic;(<i>&sigma;</i> / (1 &minus; <i>&sigma;</i>))"
    ),
    "log p_new - noise_hat": "log <i>p</i><sub>new</sub> &minus; noise&#770;",
    "V_{k+1} gamma^(j - k)": (
        "<i>V</i><sub><i>k</i>+1</sub> <i>&gamma;</i><sup><i>j</i> &minus; <i>k</i></sup>"
    ),
    "e^-h + 1e-10 x": "<i>e</i><sup>&minus;<i>h</i></sup> + 1e-10 <i>x</i>",
    "the group's sum of A": "the group&rsquo;s sum of <i>A</i>",
    r"\|v - v_ref\|^2 * x0 >= 0": (
        "&#124;<i>v</i> &minus; <i>v</i><sub>ref</sub>&#124;<sup>2</sup> &middot; "
        "<i>x</i><sub>0</sub> &ge; 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_is_typeset_without_a_script(text: str) -> None:
    assert typeset(text) == f'<span class="formula">{FORMULAS[text]}</span>'


def test_formulas_of_methods_are_typeset_and_other_code_is_not(hook: ModuleType) -> None:
    page = (PROJECT / "docs/recipes.md").read_text()
    shown = hook.with_formulas(hook.bars(page))
    assert len(shown.splitlines()) == len(page.splitlines())
    row = next(line for line in shown.splitlines() if "`Surrogate(low=0.0001" in line)
    assert "<i>r</i> <i>A</i>, clip(<i>r</i>, 1 &minus; low" in row and "`loss = " not in row
    cells = [re.sub(r"`[^`]*`", "", line).count("|") for line in shown.splitlines()]
    assert cells == [
        re.sub(r"`[^`]*`", "", line).count("|") for line in hook.bars(page).splitlines()
    ]
    spans = re.findall(r'<span class="formula">(.*?)</span>', shown)
    assert len(set(spans)) > 60 and "`ScaleSteps(by='1/h')`" in shown
    for span in spans:  # nothing that Markdown would read
        assert not re.search(r"[*_`|\[\]]", span), span
    assert (
        "`fraction`" in shown
        and "`{name:" in page
        and shown.count("`{name:") == page.count("`{name:")
    )


def test_a_docstring_wraps_at_any_width_and_keeps_its_columns(hook: ModuleType) -> None:
    block = "```text\none\ntwo\n\nkept\n  a  b\n```"
    assert hook.flowing(block) == "```text\none two\n\nkept\n  a  b\n```"
    assert hook.flowing("```bash\na\nb\n```") == "```bash\na\nb\n```"


def test_names_in_cells_may_break_and_keep_their_text(hook: ModuleType) -> None:
    page = '<p><code>a_b</code></p><td><code>x.y_z</code> <a href="p_q.html">r/s.py:3</a></td>'
    broken = hook.on_page_content(page)
    assert broken.replace("<wbr>", "") == page
    assert "<code>x.<wbr>y_<wbr>z</code>" in broken and "p_q.html" in broken
    assert "r/<wbr>s.<wbr>py:3" in broken and "<p><code>a_b</code></p>" in broken


def test_an_arxiv_id_leads_to_its_paper(hook: ModuleType) -> None:
    address = "https://arxiv.org/abs/2505.05470"
    found = hook.on_page_content("<p>see arXiv:2505.05470, eq. 9</p><h2>arXiv:2505.05470</h2>")
    link = f'<a href="{address}">arXiv:2505.05470</a>'
    assert found == f"<p>see {link}, eq. 9</p><h2>arXiv:2505.05470</h2>"
    assert hook.on_page_content(found) == found  # a link is none in a link


def test_sources_are_not_searched(hook: ModuleType) -> None:
    targets = ("flowrl/table.py", "flowrl/iteration", "docs/images/report.png")
    heads = [yaml.safe_load(hook.source_text(target).split("---")[1]) for target in targets]
    assert heads == [{"search": {"exclude": True}}] * 3


def asked_words() -> dict[str, list[str]]:
    return yaml.safe_load((DOCS / "asked.yaml").read_text(encoding="utf-8"))


def test_every_page_has_the_words_of_its_readers() -> None:
    asked = asked_words()
    assert set(asked) == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    for page, phrases in asked.items():
        title = (DOCS / page).read_text(encoding="utf-8").partition("\n")[0].lower()
        assert all(isinstance(phrase, str) for phrase in phrases), page
        assert len({*phrases}) == len(phrases), page
        assert len([phrase for phrase in phrases if phrase.lower() not in title]) > 3, page


def test_the_words_of_readers_are_searched_with_the_title(hook: ModuleType) -> None:
    entries = [
        {"location": where, "title": "T", "text": "x"} for where in ("a.html", "a.html#b", "c.html")
    ]
    config = {"separator": " ", "fields": {"title": {"boost": 7.0}, "text": {"boost": 1.0}}}
    index = hook.searched({"config": config, "docs": entries}, {"a.md": ["out of memory"]})
    assert index["docs"] == [{**entries[0], "asked": ["out of memory"]}, *entries[1:]]
    assert index["config"]["fields"] == {**config["fields"], "asked": {"boost": 7.0}}
    assert index["config"]["separator"] == hook.separator()


QUESTIONS = {
    "How do I resume a run?": ["resume", "run"],
    "It doesn't learn, what's wrong with it?": ["learn", "wrong"],
    "train.lr and num_generations=8 for SD3.5": ["train.lr", "num_generations", "8", "SD3.5"],
    "end-to-end (out of memory).": ["end", "end", "memory"],
    "a GPU/CPU do document Using index": ["GPU", "CPU", "document", "Using", "index"],
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_searched_by_its_subjects(question: str, hook: ModuleType) -> None:
    """By word, as the site's search splits a question, and at once, as it splits a page."""
    by_word = [part for word in question.split() for part in re.split(hook.separator(), word)]
    at_once = re.split(hook.separator(), question)
    assert [*filter(None, by_word)] == [*filter(None, at_once)] == QUESTIONS[question]


@pytest.mark.slow
def test_questions_lead_to_their_pages(site: Path) -> None:
    """Questions in words of readers, by the code that answers in a browser."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, which runs the search's code")
    support = PROJECT / "tests" / "support"
    questions = yaml.safe_load((support / "site_questions.yaml").read_text(encoding="utf-8"))
    [worker] = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    index = site / "search" / "search_index.json"
    done = subprocess.run(
        [node, str(support / "site_search.js"), str(worker), str(index)],
        input=json.dumps([*questions]), capture_output=True, text=True, check=True,
    )  # fmt: skip
    answers: dict[str, list[str]] = json.loads(done.stdout)
    wanted = {
        question: [page.replace(".md", ".html") for page in pages]
        for question, pages in questions.items()
    }
    lost = {q: answers[q][:3] for q in wanted if not {*answers[q][:3]} & {*wanted[q]}}
    first = [q for q in wanted if answers[q][:1] and answers[q][0] in wanted[q]]
    assert len(lost) <= len(wanted) // 10, lost
    assert len(first) >= len(wanted) * 3 // 4, {*wanted} - {*first}


def test_fields_of_a_docstring_stand_beside_their_names(hook: ModuleType) -> None:
    plain, kept = "<p>One\ntwo.</p>", "<p>kept\n  as it is</p>"
    html = f"<div>\n{plain}\n<p>a     first\n      line\nb, c  <code>x</code></p>\n{kept}"
    fields = (
        '<dl class="fields"><dt>a</dt><dd>first line</dd><dt>b, c</dt><dd><code>x</code></dd></dl>'
    )
    as_it_is = kept.replace("<p>", '<p class="kept">')
    assert hook.on_page_content(html) == f"<div>\n{plain}\n{fields}\n{as_it_is}"


def test_a_methods_page_begins_with_when_to_use_it(hook: ModuleType) -> None:
    pages = dict(hook.method_pages())
    begun = {name: text.split("\n\n")[1] for name, text in pages.items()}
    assert all(text.startswith("When to use it") for text in begun.values())
    assert "\n* nothing special: trained on clean samples" in pages["nft"]
    assert not [name for name, text in pages.items() if "```text" in text]
    assert "| `eta` | float | `0.7` | noise of a sampling step, above 0" in pages["flow_grpo"]


def test_a_docstring_in_a_section_becomes_paragraphs(hook: ModuleType) -> None:
    text = "\n```text\nOne a_b\n    more `c_d`.\nTwo.\n\nThree\nfour.\n```\n\n| a |"
    assert hook.as_prose(text) == "\nOne a\\_b more `c_d`.\n\nTwo.\n\nThree four.\n\n\n| a |"
    assert hook.as_prose("no block") == "no block"


def test_a_methods_figures_stand_below_their_own_heads(hook: ModuleType) -> None:
    pages = dict(hook.method_pages())
    assert "| stricter | 0.835 |" in pages["crd"]
    assert "| sampling to 0.85, thousands | - |" in pages["ddpo"]


def test_a_wide_row_stands_upright(hook: ModuleType) -> None:
    table = hook.upright("| method | end | cost |", "| nft | 0.9 | 3 k |")
    assert table.splitlines() == [
        "| figure | value |", "|---|---|", "| end | 0.9 |", "| cost | 3 k |"
    ]  # fmt: skip
