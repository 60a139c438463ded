"""A hook of mkdocs.yml: adds the pages of the top level, a page per method, the list of files, and
the source files that pages link to, and gives the search the words of docs/asked.yaml. `make docs`
runs it.

Links of a page are as they are in the repository (`../README.md`, `../flowrl/run/train.py#L40`), so
that they work there, too. Here each is rewritten to the page that shows its target.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from flowrl.pages.charts import Chart, Curve
from scripts.generate.formulas import is_formula, typeset
from scripts.generate.readme import tree

PROJECT = Path(__file__).resolve().parents[2]
TOP = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LOG.md": "log.md",
    "SECURITY.md": "security.md",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash", ".toml": "toml"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
FORMULAS = re.compile(r"(\| [^|`]+ \| `[^`]+` )\| .*\| \[")  # a row: choice, part, formula, source
METHOD = re.compile(r"^## (\w+)$", re.MULTILINE)
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
ARXIV = re.compile(r"(<a\b.*?</a>|<h[1-6]\b.*?</h[1-6]>)|\barXiv:(\d{4}\.\d{4,5})", re.DOTALL)
NAME = re.compile(r"(<(?:code|a)\b[^>]*>)([^<]*)(</(?:code|a)>)")

# the search finds their words after those of the guides
BEHIND_GUIDES = (
    *("reference.md", "changelog.md", "contributing.md", "architecture.md"),
    *("security.md", "log.md", "files.md", "kinds_of_faults.md"),
)

DOCSTRING = re.compile(r"(?<=\n)<p>([^<]*(?:<(?!/p>)[^<]*)*)</p>")  # at the start of a line
FIELD = re.compile(r"((?:<code>)?[\w.]+(?:</code>)?(?:, [\w.]+)*)  +(\S.*)$")
ASKED = PROJECT / "docs" / "asked.yaml"
# Words of a question that name no subject. The search takes every word as the beginning of one, so
# that `i` and `do` would find Installing and Documents before anything that was asked for. All
# pages are about training: `train on a TPU` found those that say it most.
NO_SUBJECT = (
    *("a", "about", "after", "again", "all", "already", "also", "am", "an", "and", "any", "are"),
    *("as", "at", "be", "because", "been", "but", "by", "can", "cannot", "could", "did", "didn"),
    *("do", "does", "doesn", "don", "for", "from", "get", "gets", "give", "go", "goes", "got"),
    *("had", "has", "have", "he", "her", "his", "how", "however", "i", "if", "in", "into", "is"),
    *("isn", "it", "its", "just", "let", "like", "ll", "m", "many", "may", "me", "might", "much"),
    *("must", "my", "need", "no", "not", "now", "of", "off", "on", "one", "only", "or", "other"),
    *("our", "out", "own", "put", "re", "s", "should", "since", "so", "some", "such", "t", "than"),
    *("that", "the", "their", "them", "then", "there", "these", "they", "thing", "this", "to"),
    *("too", "train", "trained", "training", "up", "us", "use", "ve", "via", "want", "was", "we"),
    *("were", "what", "when", "where"),
    *("which", "while", "who", "whom", "why", "will", "with", "won", "would", "yet", "you"),
    "your",
)
MARKS = r"""\s\-,;:!?()\[\]{}"'`/=\u2019"""  # between words, in a regular expression's brackets


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages. docs/index.md is the first page; links to the README lead there."""
    texts = {page: (PROJECT / name).read_text() for name, page in TOP.items()}
    texts["files.md"] = files_text()
    for name, text in method_pages():
        texts[f"methods/{name}.md"] = text
    for file in files.documentation_pages():
        texts[file.src_uri] = (PROJECT / "docs" / file.src_uri).read_text()
    for target in sorted({t for page, text in texts.items() for t in outside(text, page)}):
        texts[source_page(target)] = source_text(target)
    for page, text in texts.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rewrite the links that lead out of docs/, and code with escaped bars in tables."""
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["toc"]
    if here in BEHIND_GUIDES:
        page.meta["search"] = {"boost": 0.2}
    if here == "recipes.md":  # a list that leads to the pages with their curves
        head, mark, rest = markdown.partition("\n## ")
        names = METHOD.findall(markdown)
        markdown = head + "".join(f"\n- [{n}](methods/{n}.md)" for n in names) + "\n" + mark + rest
    if here == "architecture.md":
        markdown += "\nEvery source file in one line: [files.md](files.md).\n"
    base = repository_folder(here)

    def rewritten(found: re.Match[str]) -> str:
        path, mark, anchor = found[2].partition("#")
        if "://" in path or not path or path.startswith("mailto:"):
            return found[0]
        target = posixpath.normpath(posixpath.join(base, path))
        if target.startswith("docs/"):
            there = target.removeprefix("docs/")
        elif target == "README.md":
            there = "index.md"
        else:
            there = TOP.get(target) or source_page(target)
            anchor = anchor.replace("L", "L-0-", 1) if re.fullmatch(r"L\d+", anchor) else anchor
        relative = posixpath.relpath(there, posixpath.dirname(here) or ".")
        return f"{found[1]}{relative}{mark}{anchor}{found[3]}"

    described = here == "recipes.md" or here.startswith("methods/")
    parts, at = [], 0
    for fence in FENCE.finditer(markdown):
        block = flowing(fence[0]) if described else fence[0]
        parts += [bars(LINK.sub(rewritten, markdown[at : fence.start()])), block]
        at = fence.end()
    text = "".join(parts) + bars(LINK.sub(rewritten, markdown[at:]))
    return with_formulas(text) if described else text


def on_page_content(html: str, **_: object) -> str:
    """Let names in tables break after their marks, so that wide tables fit, and let each arXiv id
    lead to its paper, in docstrings too."""
    html = DOCSTRING.sub(lambda found: described(found[1]), html)
    return ARXIV.sub(linked, CELL.sub(lambda cell: NAME.sub(broken, cell[0]), html))


def with_formulas(text: str) -> str:
    """Formulas in the tables of methods, typeset; other code stays code."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if row := FORMULAS.match(line):
            lines[i] = row[1] + CODE.sub(
                lambda code: typeset(code[0][1:-1]) if is_formula(code[0][1:-1]) else code[0],
                line[row.end(1) :],
            )
    return "\n".join(lines)


def described(paragraph: str) -> str:
    """A paragraph of a docstring: a list of fields, of which each line begins with the names and
    two spaces or is indented, as names beside their descriptions; lines that are indented for
    another reason as they are; and others to wrap at any width."""
    lines = paragraph.splitlines()
    if not any(line.startswith(" ") for line in lines) and not all(map(FIELD.match, lines)):
        return f"<p>{paragraph}</p>"
    rows = list[list[str]]()
    for line in lines:
        if found := FIELD.match(line):
            rows.append([found[1], found[2]])
        elif line.startswith(" ") and rows:
            rows[-1].append(line.strip())
        else:
            return f'<p class="kept">{paragraph}</p>'
    named = [f"<dt>{name}</dt><dd>{' '.join(said)}</dd>" for name, *said in rows]
    return f'<dl class="fields">{"".join(named)}</dl>'


def on_post_build(config: MkDocsConfig) -> None:
    """Rewrite the index that the search's plugin has written by then."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    asked = yaml.safe_load(ASKED.read_text(encoding="utf-8"))
    path.write_text(json.dumps(searched(index, asked)), encoding="utf-8")


def searched(index: dict[str, Any], asked: dict[str, list[str]]) -> dict[str, Any]:
    """The index with the phrases of `asked` ({page: phrases}) as a field of each page's first
    entry. A word there weighs as one of a title; results show titles and texts only."""
    fields = index["config"]["fields"]
    words = {re.sub(r"\.md$", ".html", page): phrases for page, phrases in asked.items()}
    docs = [
        {**entry, "asked": words[entry["location"]]} if entry["location"] in words else entry
        for entry in index["docs"]
    ]
    changed = {"separator": separator(), "fields": {**fields, "asked": dict(fields["title"])}}
    return {**index, "config": {**index["config"], **changed}, "docs": docs}


def separator() -> str:
    """The regular expression, the same in JavaScript and in Python, of what stands between the
    words that are searched: spaces and marks, a full stop at a word's end (`train.lr` and `SD3.5`
    are words), and the words of NO_SUBJECT."""
    either = "|".join("".join(f"[{c.upper()}{c}]" for c in word) for word in NO_SUBJECT)
    whole = rf"(?<![^{MARKS}])(?:{either})(?![^{MARKS}.]|\.\w)"
    return rf"{whole}|[{MARKS}]+|\.(?!\w)|&[lg]t;"


def linked(found: re.Match[str]) -> str:
    """An arXiv id as a link; what is a link or a heading stays as it is."""
    name = found[2]
    return found[1] or f'<a href="https://arxiv.org/abs/{name}">arXiv:{name}</a>'


def broken(found: re.Match[str]) -> str:
    return found[1] + re.sub(r"([._/,=-])(?=\w)", r"\1<wbr>", found[2]) + found[3]


def bars(text: str) -> str:
    """`a \\| b` in a table's row as `a | b`: in code, this Markdown shows the backslash, GitHub's
    does not."""
    lines = text.splitlines(keepends=True)
    return "".join(
        CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line[:1] == "|" else line
        for line in lines
    )


def flowing(fence: str) -> str:
    """A docstring's block with a line per paragraph, to wrap at any width; a paragraph with an
    indented line keeps its lines."""
    head, _, rest = fence.partition("\n")
    if head != "```text":
        return fence
    body = rest.removesuffix("\n```").split("\n\n")
    joined = [part if "\n " in f"\n{part}" else part.replace("\n", " ") for part in body]
    return "\n".join([head, "\n\n".join(joined), "```"])


def repository_folder(page: str) -> str:
    """The folder of the repository that a page's links start from."""
    if page in TOP.values() or page.startswith("source/"):
        return ""
    if page.startswith("methods/"):
        return "docs"  # their text is cut from docs/recipes.md
    return posixpath.dirname(posixpath.join("docs", page))


def outside(text: str, page: str) -> Iterator[str]:
    """Paths of the repository outside of docs/ that a page links to."""
    for found in LINK.finditer(FENCE.sub("", text)):
        path = found[2].partition("#")[0]
        if "://" in path or not path:
            continue
        target = posixpath.normpath(posixpath.join(repository_folder(page), path))
        elsewhere = target.startswith("docs/") or target in (*TOP, "README.md")
        if not elsewhere and (PROJECT / target).exists():
            yield target


def source_page(target: str) -> str:
    return f"source/{target}.md"


def source_text(target: str) -> str:
    """A file as a page, which the search leaves to the guides; of a folder the names of what is in
    it."""
    path, head = PROJECT / target, f"---\nsearch: {{exclude: true}}\n---\n# {target}"
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if not each.name.startswith((".", "_")))
        return f"{head}/\n\n" + "".join(f"* `{name}`\n" for name in names)
    if path.suffix not in LANGUAGES and path.suffix not in ("", ".txt", ".jsonl"):
        return f"{head}\n\nSee the repository.\n"
    text = path.read_text()
    fence = "`" * 4
    language = LANGUAGES.get(path.suffix, "text")
    return f'{head}\n\n{fence}{{ .{language} linenums="1" }}\n{text}\n{fence}\n'


def files_text() -> str:
    """Every source file with the first sentence of its docstring."""
    return (
        "# Files\n\nEvery source file in one line. `tests/` mirrors these folders; what "
        f"tests share is in `tests/support/`.\n\n{tree()}\n"
    )


def method_pages() -> Iterator[tuple[str, str]]:
    """(name, text): when to use a recipe, its section of docs/recipes.md, its figures, its curve on
    the demo and its configurations."""
    choosing = (PROJECT / "docs" / "choosing.md").read_text()
    recipes = (PROJECT / "docs" / "recipes.md").read_text()
    figures = (PROJECT / "docs" / "results" / "methods.md").read_text().splitlines()
    used, curves = configurations(), json.loads((PROJECT / "docs" / "curves.json").read_text())
    for section in re.split(r"^## ", recipes, flags=re.MULTILINE)[1:]:
        name, _, text = section.partition("\n")
        row = next((i for i, line in enumerate(figures) if line.startswith(f"| {name} |")), None)
        parts = [f"# {name}\n\n{when(name, choosing)}\n{as_prose(text)}"]
        if row is not None:
            table = upright(head_of(figures, row), figures[row])
            beside = "All methods: [results/methods.md](results/methods.md)."
            parts.append(f"## On the demo\n\n{table}\n\n{beside}\n")
        if name in curves:
            parts.append(curve_text(name, curves[name]))
        links = "".join(f"* [{path}](../{path})\n" for path in used.get(name, ()))
        if links:
            parts.append(f"## Configurations\n\n{links}")
        yield name, "\n".join(parts)


def when(name: str, choosing: str) -> str:
    """The rows of docs/choosing.md that lead to a recipe, as a list under a sentence."""
    found = list[str]()
    for line in choosing.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("| ") and len(cells) > 1 and f"(recipes.md#{name})" in line:
            found.append(f"* {cells[0]}" + (f": {cells[2]}" if len(cells) > 2 else ""))
    if not found:
        return (
            "When to use it: [which method](choosing.md) names no situation for it. Take it to "
            "compare, or for a paper that used it."
        )
    return "\n".join(["When to use it ([which method](choosing.md)):", "", *found])


def as_prose(text: str) -> str:
    """A section whose first block is a recipe's docstring, with that as paragraphs: each line that
    is not indented begins one, if others are."""
    head, fence, rest = text.partition("```text\n")
    body, end, after = rest.partition("\n```")
    if not fence or not end:
        return text
    paragraphs = list[str]()
    for block in body.split("\n\n"):
        lines = block.splitlines()
        hanging = any(line.startswith(" ") for line in lines)
        for i, line in enumerate(lines):
            if i == 0 or (hanging and not line.startswith(" ")):
                paragraphs.append(line.strip())
            else:
                paragraphs[-1] += f" {line.strip()}"
    return f"{head}{chr(10).join(f'{escaped(one)}{chr(10)}' for one in paragraphs)}{after}"


def escaped(line: str) -> str:
    """A plain text as Markdown: its marks are marks, except within backticks."""
    parts = line.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*_<\[\]#])", r"\\\1", parts[i])
    return "`".join(parts)


def head_of(lines: list[str], row: int) -> str:
    """The head of the table in which a line is."""
    return next(lines[i - 1] for i in range(row, 0, -1) if lines[i].startswith("|---"))


def upright(head: str, row: str) -> str:
    """A wide table of one row as a line per column, without the method's name."""
    names, values = ([cell.strip() for cell in line.strip("| ").split("|")] for line in (head, row))
    lines = [f"| {name} | {value} |" for name, value in zip(names[1:], values[1:], strict=True)]
    return "\n".join(["| figure | value |", "|---|---|", *lines])


WORLDS = {  # of a held-out score: what it counts, the world, its page
    "shapes.strict": ("share of images that show the prompt", "the demo's images", "gallery.md"),
    "learned": ("the demo's learned reward", "the demo's images", "gallery.md"),
    "exact_answer": ("share of right sums", "the demo's sums", "language.md"),
    "reached": ("share of goals reached", "the demo's maze", "language.md"),
}


def curve_text(name: str, curve: dict[str, Any]) -> str:
    """A chart of one short run, and how it was made."""
    counted, world, page = WORLDS[curve["score"]]
    anchor = "#texts" if page == "language.md" else ""
    compared = f"[results/methods.md](results/methods.md{anchor})"
    points = [(float(at), float(score)) for at, score, _ in curve["points"]]
    chart = Chart(
        f"Held-out {curve['score']}: {counted}",
        [Curve(name, points, marks=True)],
        base=points[0][1],
    )
    return (
        f"## Its curve\n\n{chart.figure}\n\nOne short run on [{world}]({page}): "
        f"seed 0, {curve['samples']} held-out samples, "
        f"{curve['points'][-1][2]:,} network evaluations in sampling "
        f"(`python scripts/benchmarks/method_curves.py --methods {name}`). One seed, and "
        f"short: {compared} compares methods over seeds.\n"
    )


def configurations() -> dict[str, list[str]]:
    """Run files of configs/ by their recipe."""
    found: dict[str, list[str]] = {}
    for path in sorted([*PROJECT.glob("configs/*.yaml"), *PROJECT.glob("configs/*/*.yaml")]):
        tree: Any = yaml.safe_load(path.read_text())
        recipe = tree.get("recipe") if isinstance(tree, dict) else None
        name = recipe.get("name") if isinstance(recipe, dict) else recipe
        if isinstance(name, str):
            found.setdefault(name, []).append(path.relative_to(PROJECT).as_posix())
    return found
