import json

import pytest
import torch
import yaml

from flowrl.errors import UserError
from flowrl.evaluation.suites import SUITES, by_category, load_suite, suite_summary
from rewards import Scores, load
from rewards.catalogue.shapes import parse_shapes
from rewards.perception.strings import quoted
from tests.support import runs

OWN = [name for name, kind in SUITES.items() if kind.read is None]


@pytest.mark.parametrize("name", OWN)
def test_our_own_suites_load_and_every_category_has_prompts(name):
    suite = load_suite(name)
    assert len(suite.rows) >= 30 and suite.rewards
    assert len({row["prompt"] for row in suite.rows}) == len(suite.rows)
    assert sum(suite.categories.values()) == len(suite.rows) == len(suite.prompts)
    assert len(suite.categories) >= 4


def test_our_rows_say_what_their_rewards_need():
    assert all(parse_shapes(row["prompt"]) for row in load_suite("shapes").rows)
    for row in load_suite("text").rows:
        assert quoted(row["prompt"]) == [row["text"]]
    for row in load_suite("compositional").rows:
        assert row["tag"] == row["category"]
        for thing in row["include"]:
            assert thing["count"] >= 1 and ("color" not in thing or thing["color"] in row["prompt"])
        assert all(t["count"] > row["include"][0]["count"] for t in row.get("exclude", ()))


def test_official_layouts(tmp_path):
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    row = {"tag": "colors", "include": [{"class": "cow", "count": 1, "color": "red"}]}
    path = write("geneval.jsonl", json.dumps(row | {"prompt": "a photo of a red cow"}) + "\n")
    suite = load_suite(f"geneval:{path}")
    assert suite.categories == {"colors": 1} and suite.mean == "categories"
    assert suite.prompts.meta[0]["include"] == row["include"]
    path = write("ocr.txt", 'A sign that says "Open now".\n\nA cap with "A B C D E" on it\n')
    suite = load_suite(f"ocr:{path}")
    assert [r["text"] for r in suite.rows] == ["Open now", "A B C D E"]
    assert suite.categories == {"2 to 4 words": 1, "5 words or more": 1}
    with pytest.raises(UserError, match="line 1: no text in double quotes"):
        load_suite(f"ocr:{write('bad.txt', 'A sign')}")
    path = write("drawbench.txt", "An elephant.\nAn elephant.\nA clock.\n")
    assert [r["prompt"] for r in load_suite(f"drawbench:{path}").rows] == [
        "An elephant.",
        "A clock.",
    ]
    path = write("drawbench.csv", "Prompts,Category\nA red car.,Colors\n")
    assert load_suite(f"drawbench:{path}").categories == {"Colors": 1}
    path = write("parti.tsv", "Prompt\tCategory\tChallenge\tNote\nbond\tAbstract\tBasic\tx\n")
    assert load_suite(f"parti:{path}").rows[0]["challenge"] == "Basic"
    rows = [{"prompt": "two cats", "atom_count": 3, "vqa_list": [["How many cats?", "two"]]}]
    path = write("geneval2.jsonl", json.dumps(rows[0]) + "\n")
    suite = load_suite(f"geneval2:{path}")
    assert suite.categories == {"3 atoms": 1} and suite.rows[0]["vqa_list"] == rows[0]["vqa_list"]
    rows = [
        {"prompt_en": "a still bowl", "dimension": ["temporal_flickering"]},
        {"prompt_en": "a dog", "dimension": ["object_class"], "auxiliary_info": {}},
        {"prompt_en": "a dog runs", "dimension": ["motion_smoothness", "dynamic_degree"]},
    ]
    suite = load_suite(f"vbench:{write('VBench_full_info.json', json.dumps(rows))}")
    assert [row["prompt"] for row in suite.rows] == ["a still bowl", "a dog runs"]
    assert list(suite.categories) == ["temporal_flickering", "dynamic_degree, motion_smoothness"]
    with pytest.raises(UserError, match="row 1 lacks prompt_en"):
        load_suite(f"vbench:{write('bad.json', '[{}]')}")
    write("color_val.txt", "a green bench and a blue bowl\n")
    write("t2i_compbench_shape_val.txt", "an oblong plum.\t\n")
    suite = load_suite(f"t2i_compbench:{tmp_path}")
    assert [(r["category"], r["prompt"]) for r in suite.rows] == [
        ("color", "a green bench and a blue bowl"),
        ("shape", "an oblong plum."),
    ]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UserError, match="did you mean 'geneval'"):
        load_suite("genevol")
    with pytest.raises(UserError, match="needs its official file: parti:FILE"):
        load_suite("parti")
    with pytest.raises(UserError, match="leave the file out"):
        load_suite("shapes:x")
    with pytest.raises(UserError, match="no such file"):
        load_suite("geneval:nowhere.jsonl")
    own = tmp_path / "mine.jsonl"
    own.write_text('{"prompt": "a cat"}\n{"prompt": ""}\n')
    with pytest.raises(UserError, match="row 2: the prompt is empty"):
        load_suite(str(own))
    own.write_text('{"prompt": "a cat"}\n')
    assert load_suite(str(own)).categories == {"all": 1}


def test_means_by_category_leave_out_what_is_unscored():
    values = torch.tensor([[1.0], [0.0], [0.0], [3.0]])
    scored = torch.tensor([[True], [True], [False], [True]])
    meta = [{"category": c} for c in ("x", "x", "x", "y")]
    scores = Scores(values, scored, ("r",))
    assert by_category(scores, meta) == {"r": {"x": 0.5, "y": 3.0}}
    assert "shapes r: 1.7500 (mean of categories)" in suite_summary(
        load_suite("shapes"), scores, meta
    )


def test_the_command_lists_shows_and_writes(tmp_path, capsys):
    assert runs.flowrl("suites") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in SUITES)
    assert runs.flowrl("suites", "text") == 0
    assert "rewards: ocr" in capsys.readouterr().out
    out = tmp_path / "out.jsonl"
    assert runs.flowrl("suites", "shapes", "--out", out) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == list(load_suite("shapes").rows)
    assert load("shapes", kind="strict")  # the suite's reward is there
    assert runs.flowrl("suites", "shape") == 2
    assert "did you mean 'shapes'" in capsys.readouterr().err


def test_a_run_is_evaluated_on_a_suite(tmp_path, capsys):
    run = runs.tree(runs.write_pipeline(tmp_path / "pipeline"), tmp_path, runs.NFT)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    own = tmp_path / "mine.jsonl"
    rows = [{"prompt": "a red ball", "category": c} for c in ("x", "y")]
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--weights", "base", "--suite", own, "--steps", 2]
    assert runs.flowrl("evaluate", tmp_path, *words) == 0
    said = capsys.readouterr().out
    lines = dict(line.split(": ") for line in said.splitlines() if ": " in line)
    assert "4 samples" in lines["brightness"]  # two prompts, each twice
    means = [float(lines[f"  {c}"]) for c in "xy"]
    assert sum(means) / 2 == pytest.approx(float(lines["brightness"].split()[0]), abs=1e-3)
    assert runs.flowrl("evaluate", tmp_path, *words, "--prompts", own) == 2
    assert "leave out either --prompts or --suite" in capsys.readouterr().err
