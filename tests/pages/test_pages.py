"""Pages of runs: their structure, their numbers, and texts that mean harm."""

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml

from flowrl.errors import UserError
from flowrl.evaluation.paired import paired_gain
from flowrl.pages.charts import MOST_POINTS, Chart, Curve, round_ticks
from flowrl.pages.compare_page import difference, write_comparison
from flowrl.pages.curves import RunCharts
from flowrl.pages.records import (
    MOST_EVALUATIONS,
    RECORDS_FOLDER,
    GivenImage,
    cut_back_records,
    read_alarms,
    read_evaluations,
    read_trees,
    thin_out,
    write_record,
)
from flowrl.pages.run_folder import RunFolder
from flowrl.pages.run_page import gain_of, run_page, shown_evaluations, write_report
from flowrl.pages.stack import number
from flowrl.pages.tree import FITS, TreeView
from tests.support.page_runs import ALARM, LONG, RTL, SETTINGS, evaluation, group, tree, write_run
from tests.support.runs import flowrl

VOID = {"meta", "link", "img", "input", "br", "hr"}


class Page(HTMLParser):
    """Elements with their attributes; raises an AssertionError where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.open[-3:], self.getpos())

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.found if name == tag]


def check(text: str) -> Page:
    """Conditions on every page: it is whole, opens offline, and runs no foreign script."""
    page = Page(text)
    ids = [attrs["id"] for _, attrs in page.found if "id" in attrs]
    assert len(ids) == len({*ids})
    links = [attrs["href"] for attrs in page.all("a")]
    assert all(link.startswith("#") and link[1:] in ids for link in links)
    assert all(attrs["alt"].strip() for attrs in page.all("img"))
    sources = [v for _, attrs in page.found for n, v in attrs.items() if n in ("src", "srcset")]
    assert all(source.startswith("data:image/") for source in sources)
    assert not re.search(r"url\(|@import|https?:", re.sub(r'"data:[^"]*"', "", text))
    assert len(page.all("script")) == 1  # ours, without a source
    assert not any(name.startswith("on") for _, attrs in page.found for name in attrs)
    for attrs in page.all("svg"):
        assert attrs.get("aria-label") or attrs.get("aria-hidden") == "true"
    labelled = {attrs["for"] for attrs in page.all("label") if "for" in attrs}
    assert all(i["type"] == "checkbox" or i["id"] in labelled for i in page.all("input"))
    return page


@pytest.mark.parametrize("kind", ["image", "video", "text"])
def test_a_page_is_whole_opens_offline_and_escapes_what_it_shows(tmp_path, kind):
    run = write_run(tmp_path / "run-<i>x", kind)
    page = check(write_report(run).read_text())
    assert page.all("h1") and "run-<i>x" in page.text
    anchors = [attrs["id"] for attrs in page.all("section")]
    order = ["summary", "alarms", "samples", "extremes", "curves", "tree", "plan", "settings"]
    assert anchors == [*order, "environment"]
    for text in ("<script>alert(1)</script>", RTL, LONG[:300], ALARM, "a draw: 1 plan <b>"):
        assert text in page.text
    ranges = [attrs for attrs in page.all("input") if attrs["type"] == "range"]
    assert (ranges[0]["min"], ranges[0]["max"], ranges[0]["value"]) == ("0", "2", "2")
    places = [attrs["data-place"] for attrs in page.all("figure") if "data-place" in attrs]
    assert places == ["0", "1", "2"] * 4  # each prompt: the base, the middle, the last
    clips = [attrs for attrs in page.all("span") if attrs.get("class") == "clip"]
    assert bool(clips) == (kind == "video")
    assert len(page.all("img")) == (0 if kind == "text" else 12 + 4 + 2 * 4)


def test_the_summary_has_the_paired_gain_over_prompts(tmp_path):
    run = RunFolder.read(write_run(tmp_path / "run"))
    first, last = run.evaluations[0], run.evaluations[-1]
    base, now = (
        np.array([np.nan if x is None else x for x in e.scores["shapes"]]) for e in (first, last)
    )
    found, expected = gain_of(run, "shapes", 4), paired_gain(now, base, np.arange(8) // 2)
    assert found is not None and found.gain == expected and found.gain.n == 4
    assert found.gain.value == pytest.approx(0.375)  # 0.5, 0.25, 0.5, 0.25 by prompt
    text = Page(run_page(run)).text
    assert f"{number(found.base)} \N{RIGHTWARDS ARROW} {number(found.now)}" in text
    assert run.best == 4 and "best/000004" in text


def test_a_tree_shows_values_advantages_and_what_is_not_learned_from(tmp_path):
    page = check(run_page(RunFolder.read(write_run(tmp_path / "run"))))
    tips = [attrs["data-tip"] for attrs in page.all("circle") if "data-tip" in attrs]
    assert len(tips) == 2 * (1 + 2 + 2 + 4)  # the last tree, and the first in its fold
    minus = "\N{MINUS SIGN}"
    assert tips[2] == f"step 1, node 2: value 0.250, advantage {minus}1.25"
    assert tips[3] == "step 2, node 1: value 0.750, not trained on"
    edges = [attrs["class"] for attrs in page.all("path")]
    assert edges.count("edge trained") == 2 * 7 and edges.count("edge ode") == 2 * 2


def test_a_rewriting_fits_before_its_node_and_is_whole_in_the_nodes_words():
    long = "a yellow triangle above a red circle, left of a purple square"
    first, *others = tree(2).levels
    view = TreeView(replace(tree(2), levels=[replace(first, texts=[long]), *others]))
    dot = next(view.dots)
    assert dot.text == f"{long[: FITS - 1]}\N{HORIZONTAL ELLIPSIS}" and long in dot.words


def test_a_group_without_branches_is_no_tree(tmp_path):
    run = write_run(tmp_path / "run")
    write_record(run, group(4))
    page = check(run_page(RunFolder.read(run)))
    said = "No step branches: 4 independent samples of one prompt, each from its own noise."
    assert said in page.text and "A group of training" in page.text
    assert "not learned from" in page.text.partition(said)[2]
    assert len(page.all("ol")) == 3  # alarms, the steps, and the leaves of the first tree


@pytest.mark.parametrize(
    ("prompts", "judge", "sentence", "judged"),
    [
        ("a.txt", None, "the prompts of training, scored by shapes, which training raises.", False),
        ("b.txt", None, "prompts from another source than training's, scored by shapes,", False),
        ("b.txt", {"name": "shapes", "weight": 2.0}, "by shapes, which training raises.", False),
        ("b.txt", {"name": "shapes", "kind": "strict", "label": "judge"},
         "scored by judge, which training does not raise.", True),
    ],
)  # fmt: skip
def test_a_page_says_of_evaluations_only_what_is_so(tmp_path, prompts, judge, sentence, judged):
    run = write_run(tmp_path / "run")
    settings = SETTINGS | {"prompts": {"train": "a.txt", "held_out": prompts}}
    settings |= {"held_out_rewards": [judge] if judge else []}
    (run / "run.yaml").write_text(yaml.safe_dump(settings))
    text = check(run_page(RunFolder.read(run))).text
    assert sentence in text.partition("Held-out samples (dots): ")[2]
    assert ("No judge: training raises every reward" in text) is not judged


def test_eight_charts_decide_and_a_reward_is_one_chart(tmp_path):
    run = RunFolder.read(write_run(tmp_path / "run"))
    charts = RunCharts.of(run)
    assert [c.code for c in charts.deciding] == ["held_out/shapes, reward/shapes", "kl"]
    lines = [line.name for line in charts.deciding[0].lines]
    assert lines == ["held-out samples", "training samples"]
    many = [
        {f"reward/r{i}": float(i + k) for i in range(12)} | {"iteration": float(k)}
        for k in range(3)
    ]
    wide = RunCharts.of(replace(run, metrics=many))
    assert len(wide.deciding) == 8 and sum(len(some) for *_, some in wide.others) == wide.folded > 3
    page = check(run_page(run))
    assert len([f for f in page.all("figure") if "data-chart" in f]) == 2 + charts.folded


def test_settings_that_differ_come_first(tmp_path):
    text = Page(run_page(RunFolder.read(write_run(tmp_path / "run")))).text
    chosen = text.partition("All ")[0]
    assert "train.lr 0.0001" in chosen and "train.max_grad_norm" not in chosen
    assert "model.lora null" in chosen and "recipe.name branch_grpo" in chosen
    assert "recipe.at [0, 2]" in chosen
    run = write_run(tmp_path / "moved")
    settings = (run / "run.yaml").read_text().replace("name: shapes", "name: gone.py:mine")
    (run / "run.yaml").write_text(settings + "unknown_key: 1\n")
    page = check(run_page(RunFolder.read(run)))
    assert "unknown_key 1" in page.text and "gone.py:mine" in page.text
    (tmp_path / "harm.py").write_text("raise SystemExit('a page runs no code of the folder')")
    settings = settings.replace("name: branch_grpo", f"name: {tmp_path / 'harm.py'}:mine")
    (run / "run.yaml").write_text(settings)
    assert "recipe.steps 8" in check(run_page(RunFolder.read(run))).text.partition("All ")[0]


def test_a_run_without_records_has_curves_alone_and_damaged_ones_are_left_out(tmp_path):
    run = write_run(tmp_path / "run")
    broken = run / RECORDS_FOLDER / "evaluation-000004.json"
    broken.write_text(broken.read_text()[:-100])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "reward": NaN}\n{"iteration": 6, "rew')
    found = RunFolder.read(run)
    assert [each.iteration for each in found.evaluations] == [0, 2] and found.done == 5
    check(run_page(found))
    for path in (run / RECORDS_FOLDER).iterdir():
        path.unlink()
    page = check(run_page(RunFolder.read(run)))
    assert {attrs["id"] for attrs in page.all("section")} == {
        "summary",
        "alarms",
        "curves",
        "settings",
    }
    (run / "metrics.jsonl").unlink()
    check(run_page(RunFolder.read(run)))


@pytest.mark.parametrize("kind", ["pipe", "link", "a huge file"])
def test_what_is_no_plain_file_of_the_folder_is_left_out(kind, tmp_path, capsys):
    """A pipe would be read for ever, a link may lead to another one's file, and a file of holes
    would fill the memory."""
    run = write_run(tmp_path / "run")
    (run / "error.txt").write_text("a last line\n")
    answer = run / "votes/vote-0001/answer.json"
    answer.parent.mkdir(parents=True)
    answer.write_text(json.dumps({"sentences": ["they prefer it"]}))
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "run.yaml"]
    assert len(files) == 11
    for i, path in enumerate(files):
        path.rename(tmp_path / str(i))
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(tmp_path / str(i))
        else:  # of holes, which take no place on a disk
            with path.open("wb") as file:
                file.truncate(20 * 2**30)
    found = RunFolder.read(run)
    records = (found.evaluations, found.trees, found.starts, found.alarms, found.votes)
    assert not any(records) and not found.metrics
    check(run_page(found))
    assert flowrl("runs", run) == 0 and "a last line" not in capsys.readouterr().out


def test_links_within_a_folder_are_followed(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").rename(run / "kept.jsonl")
    (run / "metrics.jsonl").symlink_to("kept.jsonl")
    (tmp_path / "named").symlink_to(run)
    assert RunFolder.read(tmp_path / "named").done == 4


def test_a_record_that_names_another_server_loads_nothing(tmp_path):
    run = write_run(tmp_path / "run")
    record = run / RECORDS_FOLDER / "evaluation-000004.json"
    record.write_text(
        re.sub('"data:image[^"]*"', '"https://example.org/x.png"', record.read_text())
    )
    page = check(run_page(RunFolder.read(run)).replace('src="data:,"', 'src="data:image/"'))
    assert "Samples over the run" in page.text


def test_images_of_a_row_stand_beside_its_samples(tmp_path):
    run = write_run(tmp_path / "run")
    first = read_evaluations(run)[0].same[0]
    image = GivenImage("source<b>", first.media, first.width, first.height)
    for each in read_evaluations(run):
        shown = [
            [replace(s, given=[image]) for s in some] for some in (each.same, each.best, each.worst)
        ]
        write_record(run, replace(each, same=shown[0], best=shown[1], worst=shown[2]))
    page = check(write_report(run).read_text())
    given = [attrs for attrs in page.all("figure") if attrs.get("class") == "given"]
    assert len(given) == 4 + 4 and "source<b>" in page.text  # once a row of the slider, and a tile


def test_charts_thin_out_long_runs_and_speak_for_themselves():
    line = Curve("reward", [(float(i), float(i % 2)) for i in range(10 * MOST_POINTS)])
    page = Page(Chart("Reward", [line], "reward", base=0.5).figure)
    data = json.loads(page.all("figure")[0]["data-chart"])
    assert len(data["lines"][0]["points"]) == MOST_POINTS
    assert {y for _, y in data["lines"][0]["points"]} == {0.5}
    label = page.all("svg")[0]["aria-label"]
    ends = "from 0.500 at iteration 9 to 0.500 at iteration 2999"
    assert label == f"Reward: reward {ends}, between 0.500 and 0.500"
    assert round_ticks(0.13, 0.98, 4) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    constant = Chart("Ratio", [Curve("mean", [(1.0, 1.0), (2.0, 1.0 + 1e-9)])]).figure
    assert "0.90" in constant and "1.10" in constant  # not zoomed into rounding


def test_few_evaluations_are_shown_where_many_would_be_too_large():
    many = [evaluation(10 * i, [0.5] * 8) for i in range(40)]
    shown = shown_evaluations(many, best=170)
    assert len(shown) <= 26 and shown[0].iteration == 0 and shown[-1].iteration == 390
    assert 170 in [each.iteration for each in shown]
    size = sum(len(sample.media) for sample in many[0].same)
    few = shown_evaluations(many, None, most_bytes=5 * size)
    assert len(few) == 5 and [each.iteration for each in few][::4] == [0, 390]


def test_records_are_bounded_and_a_resumed_run_has_those_of_an_unbroken_one(tmp_path):
    bare = replace(evaluation(0, [0.5] * 8), same=[], best=[], worst=[])

    def write(run, iterations):
        for i in iterations:
            write_record(run, replace(bare, iteration=i))
            thin_out(run, interval=2, best=38 if i >= 38 else None)

    last = 2 * (2 * MOST_EVALUATIONS + 5)
    write(tmp_path / "unbroken", range(0, last + 1, 2))
    write(tmp_path / "broken", range(0, 2 * MOST_EVALUATIONS + 10, 2))
    cut_back_records(tmp_path / "broken", 60)
    write(tmp_path / "broken", range(62, last + 1, 2))
    kept = [[e.iteration for e in read_evaluations(tmp_path / n)] for n in ("unbroken", "broken")]
    assert kept[0] == kept[1] and len(kept[0]) <= MOST_EVALUATIONS + 3
    assert {0, 38, last} <= {*kept[0]}


def test_records_after_the_checkpoint_are_cut_back(tmp_path):
    run = write_run(tmp_path / "run")
    (run / RECORDS_FOLDER / "tree-000004.json.tmp").write_text("{")
    cut_back_records(run, 2)
    assert not list((run / RECORDS_FOLDER).glob("*.tmp"))
    assert [each.iteration for each in read_evaluations(run)] == [0, 2]
    assert [each.iteration for each in read_trees(run)] == [1, 2]
    assert read_alarms(run) == [] and (run / RECORDS_FOLDER / "starts.jsonl").read_text()
    assert tree(4).iteration == 4


def test_runs_compared_prompt_by_prompt(tmp_path, capsys):
    runs = [
        write_run(tmp_path / name, end=end) for name, end in (("a", 0.75), ("b", 0.5), ("c", 1.0))
    ]
    out = tmp_path / "all.html"
    assert flowrl("compare", *runs, "--out", out) == 0 and str(out) in capsys.readouterr().out
    page = check(out.read_text())
    assert page.text.count("\N{MINUS SIGN} a +0.250") == 1  # c against a, the same on all
    assert "In all rows: reward shapes; prompts in both 4; noise the same" in page.text
    a, b = (read_evaluations(run)[-1] for run in runs[:2])
    found = difference(b, a, "shapes")
    assert (found.value, found.n) == (pytest.approx(-0.25), 4)
    assert difference(replace(b, digests=["x"] * 4), a, "shapes").n == 0
    assert flowrl("compare", runs[0], "--out", out) == 2
    assert "give 2 to 12 runs" in capsys.readouterr().err
    with pytest.raises(UserError, match="the same run is given twice"):
        write_comparison([runs[0], runs[0]], out)


def test_two_rewards_share_no_chart(tmp_path):
    """Runs that train on other rewards, or judge by another reward of the same label, have charts
    and numbers of their own."""
    runs = [write_run(tmp_path / name) for name in "abc"]
    settings = yaml.safe_load((runs[0] / "run.yaml").read_text())
    one = {"name": "shapes", "label": "shapes", "weight": 1.0, "settings": {}}
    other = one | {"settings": {"kind": "strict"}}
    trained, judges = ([one], [one], [one | {"weight": 0.5}]), (one, other, one)
    for run, sums, judge in zip(runs, trained, judges, strict=True):
        changed = settings | {"rewards": sums, "held_out_rewards": [judge]}
        (run / "run.yaml").write_text(yaml.safe_dump(changed))
    write_comparison(runs, tmp_path / "all.html")
    text = check((tmp_path / "all.html").read_text()).text
    assert "Training reward: shapes" in text and "Training reward: 0.5 shapes" in text
    assert "held-out shapes of a, c" in text and "held-out shapes of b" in text
    assert text.count("other settings: not comparable") == 2  # of b, with a and with c
    same = [write_run(tmp_path / name) for name in "de"]
    write_comparison(same, tmp_path / "same.html")
    assert "Training reward:" not in check((tmp_path / "same.html").read_text()).text


def test_the_command_names_the_place_of_what_is_wrong(tmp_path, capsys):
    assert flowrl("report", tmp_path) == 2
    assert f"{tmp_path} is not a run's folder" in capsys.readouterr().err
    run = write_run(tmp_path / "run")
    assert flowrl("report", run) == 0 and (run / "report.html").is_file()
    assert flowrl("report", run, "--out", tmp_path / "none" / "page.html") == 2
    assert "there is no folder" in capsys.readouterr().err
    (run / "run.yaml").write_text("- no settings")
    assert flowrl("report", run) == 2
    assert "run.yaml" in capsys.readouterr().err
