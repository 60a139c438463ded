"""UniGenBench, DPG-Bench and T2I-CompBench: questions, answers and formulas, recomputed here."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from flowrl.errors import UserError
from flowrl.evaluation.dimensions import dimension_lines
from flowrl.evaluation.suites import load_suite
from rewards import load
from rewards.catalogue.compbench import CompBench, parser
from rewards.catalogue.dpg_bench import dependent
from rewards.catalogue.unigenbench import points_in
from rewards.judging.checkpoint_question import CheckpointQuestion
from rewards.judging.tally import AnswerCount, AnswerTally, by_primary, take_tallies
from rewards.serving.requests import Malformed
from tests.rewards.test_judge import images, said
from tests.rewards.test_published_judges import content, listed, with_column
from tests.support.servers import ChatServer

SERVER = {"model": "tiny", "tries": 1}
# the shape of the authors' scripts, with made-up words
SCRIPT = """
import os
def call(args):
    index, prompt, testpoint, test_desc = args
    other = {"a": "b"}
    explanation_dict = {
        "Style": "how it looks", "Attribute - Color": "which colours",
        "Attribute - Size": "how large",
    }
    explanation = "Defined: "
    for point in testpoint:
        if point not in explanation_dict:
            raise()
        explanation += f"\\n{point}: {explanation_dict[point]}"
    explanation += "\\n;"
    test_explanation = "Meant: "
    for idx, point in enumerate(testpoint):
        test_explanation += f"\\n{point}: {test_desc[idx]}"
    test_explanation += "\\n."
    while True:
        system_prompt = f\'\'\'Prompt {prompt}, points {testpoint}. {explanation} {test_explanation}
        <prompt>{prompt}</prompt> \'\'\'
        path = f"{index}_{prompt}.png"
"""
POINTS = [["Style", "Attribute - Color"], ["Attribute - Color", "Attribute - Size"], ["Style"]]


def script(folder: Path, text: str = SCRIPT) -> str:
    (folder / "qwenvl_72b_en_eval.py").write_text(text, encoding="utf-8")
    return str(folder / "qwenvl_72b_en_eval.py")


def with_points(samples, points=POINTS):
    meta = [
        {"testpoints": own, "testpoint_descriptions": [f"about {p}" for p in own]} for own in points
    ]
    return type(samples)(samples.media, samples.prompts, samples.group, meta)


def test_the_question_is_read_from_the_authors_script_and_filled(tmp_path):
    (question,) = CheckpointQuestion.read("unigenbench", script(tmp_path))
    text = question.fill("a {cat}", ["Attribute - Color", "Style"], ["red hat", "ink"])
    assert text == (
        "Prompt a {cat}, points ['Attribute - Color', 'Style']. "
        "Defined: \nAttribute - Color: which colours\nStyle: how it looks\n; "
        "Meant: \nAttribute - Color: red hat\nStyle: ink\n.\n"
        "        <prompt>a {cat}</prompt> "
    )
    for broken in (
        SCRIPT.replace("{testpoint}. ", ""),
        SCRIPT.replace("{point}: {test_desc[idx]}", "{index}"),
        SCRIPT.replace('explanation += "', 'nothing = "'),
        "x = 1",
    ):
        with pytest.raises(ValueError, match="does not hold UniGenBench's question"):
            CheckpointQuestion.read("unigenbench", script(tmp_path, broken))
    with pytest.raises(ValueError, match="cannot be read"):
        CheckpointQuestion.read("unigenbench", script(tmp_path, "x = ("))
    with pytest.raises(ValueError, match="no such file"):
        CheckpointQuestion.read("unigenbench", "nowhere.py")


COMMON = """
WORDS_EN = {"Style": "how it looks", "Attribute - Color": "which colours"}
WORDS_ZH = {"风格": "艺术"}
TEMPLATE_EN = '''Prompt {prompt}, points {testpoint}. {explanation} {test_explanation} <{prompt}>'''
TEMPLATE_ZH = '''提示词{prompt}, {testpoint}. {explanation}{test_explanation}'''
LANG_CONFIGS = {
    "en": {"explanation_dict": WORDS_EN, "system_prompt_template": TEMPLATE_EN,
           "checkpoint_header": "Defined", "checkpoint_desc_header": "Meant"},
    "zh": {"explanation_dict": WORDS_ZH, "system_prompt_template": TEMPLATE_ZH,
           "checkpoint_header": "说明", "checkpoint_desc_header": "描述"},
}
def build_system_prompt(prompt, testpoint, test_desc, lang):
    config = LANG_CONFIGS[lang]
    explanation_dict = config["explanation_dict"]
    explanation = f"{config['checkpoint_header']}:("
    for point in testpoint:
        explanation += f"\\n{point}: {explanation_dict[point]}"
    explanation += "\\n)"
    test_explanation = f"{config['checkpoint_desc_header']}:("
    for idx, point in enumerate(testpoint):
        test_explanation += f"\\n{point}: {test_desc[idx]}"
    test_explanation += "\\n)"
    return config["system_prompt_template"].format(
        prompt=prompt, testpoint=testpoint, explanation=explanation,
        test_explanation=test_explanation,
    )
"""  # the shape of eval_common.py, with made-up words


def test_both_languages_are_read_from_the_file_that_has_them(tmp_path):
    place: dict = {}
    exec(COMMON, place)
    questions = CheckpointQuestion.read("unigenbench", script(tmp_path, COMMON))
    cases = (["Attribute - Color", "Style"], ["red {hat}", "ink"]), (["风格"], ["水墨"])
    for question, language, (points, texts) in zip(questions, ("en", "zh"), cases, strict=True):
        wanted = place["build_system_prompt"]("a {cat}", points, texts, language)
        assert question.fill("a {cat}", points, texts) == wanted
    with ChatServer(lambda text, shown: "<analysis>['x']</analysis><score>[1]</score>") as server:
        own = {"url": server.url, "question": script(tmp_path, COMMON), **SERVER}
        reward = load("unigenbench", **own)
        given = with_points(images(1.0, 0.5, prompts=["猫", "a"]), [["风格"], ["Style"]])
        assert reward(given).tolist() == [1.0, 1.0]
        assert sorted("提示词" in content(body)[1] for body in server.bodies) == [False, True]
        mixed = with_points(images(1.0, prompts=["猫"]), [["风格", "Style"]])
        with pytest.raises(ValueError, match="row 1: the question does not define the test point"):
            reward(mixed)
    broken = COMMON.replace("{testpoint}", "")
    with pytest.raises(ValueError, match="does not hold UniGenBench's question"):
        CheckpointQuestion.read("unigenbench", script(tmp_path, broken))


def test_unigenbench_is_the_share_of_right_points_and_counts_each_once(tmp_path):
    answers = {
        "a": "<analysis>['ink', \"two's\"]</analysis> x\n<score>[1, 0]</score>",
        "b": "<analysis>['no', 'no']</analysis><score>\n[0, 1]\n</score>",
        "c": "<analysis>['a', 'b']</analysis><score>[1, 1]</score>",  # one point was asked
    }

    def answer(text, shown):
        return answers[text.partition("Prompt ")[2][0]]

    given = with_points(images(1.0, 0.5, 0.2, prompts=["a", "b", "c"]))
    with ChatServer(answer) as server:
        own = {"url": server.url, "question": script(tmp_path), **SERVER}
        reward = load("unigenbench", **own)
        scores = reward(given)
        (parts,) = [each for each in map(content, server.bodies) if "Prompt a," in each[1]]
        last = load(
            "unigenbench", url=server.url, question=script(tmp_path), image="last", **SERVER
        )
        assert last(given.take([1])).tolist() == [0.5]
        assert content(server.bodies[-1])[1] == "data:image/png"
        with pytest.raises(ValueError, match="row 2 of the prompts has no column 'testpoints'"):
            reward.check_prompts(["a", "b"], [given.meta[0], {}])
        unknown = {"testpoints": ["Mood"], "testpoint_descriptions": ["sad"]}
        with pytest.raises(ValueError, match="question does not define the test point 'Mood'"):
            reward.check_prompts(["a"], [unknown])
        with pytest.raises(ValueError, match="two lists of the same length"):
            reward.check_prompts(["a"], [unknown | {"testpoints": []}])
    assert scores[:2].tolist() == [0.5, 0.5] and scores[2].isnan()
    assert parts[0] == "data:image/jpeg" and parts[1].startswith("Prompt a, points ['Style', 'Attr")
    ((tally, counts),) = take_tallies({"u": reward})["u"]
    wanted = {"Style": (1, 1), "Attribute - Color": (0, 2), "Attribute - Size": (1, 1)}
    assert counts == wanted and tally.take() == {}
    assert by_primary(counts) == {"Style": (1, 1), "Attribute": (1, 3)}
    lines = dimension_lines(
        {"u": [(tally, counts)]}, {"u": [(tally, {"Style": AnswerCount(0.0, 1)})]}
    )
    assert lines[:2] == [
        "u: 0.6667 (mean of 2 primary dimensions); base 0.0000",
        "  Style: 1.0000 of 1 answers; base 0.0000",
    ]
    assert lines[2:] == [
        "  Attribute: 0.3333 of 3 answers",
        "    Attribute - Color: 0.0000 of 2 answers",
        "    Attribute - Size: 1.0000 of 1 answers",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<analysis>['a']</analysis>",
        "<analysis>['a']</analysis><score>[1, 0]</score>",
        "<analysis>['a']</analysis><score>1</score>",
        "<analysis>[it is red]</analysis><score>[1]</score>",
        "<analysis>['a'</analysis><score>[1]</score>",
        "<analysis>[" + "(" * 500 + "]</analysis><score>[1]</score>",
        "<score>[1]</score>",
    ],
)
def test_damaged_answers_are_asked_again(text):
    with pytest.raises(Malformed):
        points_in(said(text), 1)


def test_a_point_is_right_only_where_it_scores_one():
    text = "<analysis>['', '', '', '']</analysis><score>[1, True, 2, '1']</score>"
    assert points_in(said(text), 4) == [1.0, 0.0, 0.0, 0.0]


QUESTIONS = [
    {"id": 1, "parents": [0], "tuple": "entity - whole (cat)", "question": "Is there a cat?"},
    {"id": 2, "parents": [1], "tuple": "attribute - color (cat, red)", "question": "Is it red?"},
    {"id": 3, "parents": [2, 0], "tuple": "entity - whole (hat)", "question": "Is there a hat?"},
    {"id": 4, "parents": [0], "tuple": "global - (photo)", "question": "Is it a photo?"},
]


def test_dpg_zeroes_what_depends_on_a_no_and_counts_before():
    assert dependent(QUESTIONS, [True, True, True, False]) == [1, 1, 1, 0]
    assert dependent(QUESTIONS, [True, False, True, True]) == [1, 0, 0, 1]
    assert dependent(QUESTIONS, [False, True, True, True]) == [0, 0, 0, 1]  # through the second
    late = [QUESTIONS[i] for i in (2, 1, 0, 3)]  # in the file's order: the grandchild stays
    assert dependent(late, [True, True, False, True]) == [1, 0, 0, 1]
    given = with_column(images(1.0, 0.5), "dpg_questions", [QUESTIONS, QUESTIONS[:1]])

    def answer(text, shown):
        return listed(no=0.9) if "cat?" in text else listed(Yes=0.8, no=0.2)

    with ChatServer(answer) as server:
        reward = load("dpg_bench", url=server.url, **SERVER)
        assert reward(given).tolist() == [0.25, 0.0]
        with pytest.raises(ValueError, match="row 2 of the prompts has no column 'dpg_questions'"):
            reward.check_prompts(["a", "b"], [given.meta[0], {}])
        with pytest.raises(ValueError, match="depends on the id 1, which no question has"):
            reward.check_prompts(["a"], [{"dpg_questions": QUESTIONS[1:]}])
    ((tally, counts),) = take_tallies({"d": reward})["d"]
    assert counts["entity - whole"] == (1, 3) and counts["attribute - color"] == (1, 1)
    assert by_primary(counts)["global"] == (1, 1) and not tally.overall


def test_compbench_asks_about_things_and_not_about_places(monkeypatch):
    chunks = [SimpleNamespace(text=text) for text in ("a cup", "the left", "top", "a left shoe")]
    parse = SimpleNamespace(noun_chunks=chunks)
    spacy = SimpleNamespace(util=SimpleNamespace(is_package=lambda _: True))
    spacy.load = lambda _: lambda _: parse
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    find = parser("en_core_web_sm")
    assert find is not None and find("a prompt") == ["a cup", "a left shoe"]


def test_compbench_multiplies_the_chances_of_its_noun_phrases():
    phrases = [["a green bench", "a blue bowl"], [str(i) for i in range(12)], []]
    given = with_column(images(1.0, 0.5, 0.2), "noun_phrases", phrases)

    def answer(text, shown):
        return listed(yes=0.3, No=0.2) if "bench?" in text else listed(Yes=0.45, no=0.05)

    with ChatServer(answer) as server:
        reward = load("compbench", url=server.url, spacy_model="none", **SERVER)
        scores = reward(given)
        asked = [content(body)[0] for body in server.bodies]
        with pytest.raises(ValueError, match=r"row 2 .* has no noun phrases.*spacy download"):
            reward.check_prompts(["a", "b"], [given.meta[0], {}])
        parsed = CompBench(reward.panel, lambda prompt: prompt.split(" and "), "none")
        prompts = images(1.0, prompts=["a green bench and a hat"])
        assert parsed(prompts).tolist() == pytest.approx([0.6 * 0.9])
    assert scores[:2].tolist() == pytest.approx([0.6 * 0.9, 0.9**8]) and scores[2].isnan()
    assert any("a green bench?\n" in text for text in asked) and len(asked) == 2 + 8


def test_official_files_of_the_benchmarks(tmp_path):
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    def cell(value: dict) -> str:
        return '"' + json.dumps(value, ensure_ascii=False).replace('"', '""') + '"'

    about = {
        "Primary Categories": "Art",
        "Secondary Categories": "Other",
        "Subjects": "Animal",
        "Sentence Structure": "Descriptive",
        "Testpoints": ["Style", "Attribute - Quantity"],
        "Testpoint Description": ["ink", "two pandas"],
    }
    text = f'index,prompt_en,sub_dims_en\n0,"Ink, two pandas.",{cell(about)}\n'
    suite = load_suite(f"unigenbench:{write('test_prompts_en.csv', text)}")
    assert suite.rows[0] == {
        "prompt": "Ink, two pandas.",
        "category": "Art",
        "testpoints": ["Style", "Attribute - Quantity"],
        "testpoint_descriptions": ["ink", "two pandas"],
    }
    about = {"一级垂类": "艺术", "考点": ["风格"], "考点对应描述": ["水墨画"]}
    text = f"index,prompt_zh,sub_dims_zh\n0,两只熊猫。,{cell(about)}\n"
    suite = load_suite(f"unigenbench:{write('test_prompts_zh.csv', text)}")
    assert suite.rows[0]["testpoints"] == ["风格"] and suite.categories == {"艺术": 1}
    text = f"index,prompt_zh,sub_dims_zh\n0,x,{cell(about | {'考点': []})}\n"
    with pytest.raises(UserError, match="line 2: 考点 and 考点对应描述 differ in length"):
        load_suite(f"unigenbench:{write('short.csv', text)}")
    bad = write("bad.csv", "index,prompt_zh,sub_dims_zh\n0,x,y\n")
    with pytest.raises(UserError, match="line 2: sub_dims_zh is not JSON"):
        load_suite(f"unigenbench:{bad}")
    head = "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,"
    rows = [
        "0,A cat.,,1,0,entity,whole,entity - whole (cat),Is there a cat?",
        '0,A cat.,,2,"1, 3",attribute,color,"attribute - color (cat, red)",Is it red?',
        "0,A cat.,,3,0,global,,global - (photo),Is it a photo?",
        "1,A dog.,,1,0,entity,whole,entity - whole (dog),Is there a dog?",
    ]
    text = "\n".join([f"{head}question_natural_language", *rows, ""])
    suite = load_suite(f"dpg_bench:{write('dpg_bench.csv', text)}")
    assert [row["prompt"] for row in suite.rows] == ["A cat.", "A dog."]
    assert suite.rows[0]["dpg_questions"][1] == {
        "id": 2,
        "parents": [1, 3],
        "tuple": "attribute - color (cat, red)",
        "question": "Is it red?",
    }
    with pytest.raises(UserError, match="line 5: proposition_id and dependency must be numbers"):
        load_suite(f"dpg_bench:{write('odd.csv', text.replace('dog.,,1,0', 'dog.,,1,none'))}")


def test_a_tally_is_empty_after_it_was_taken():
    tally = AnswerTally()
    tally.add("Text Generation", 1.0)
    assert tally.take() == {"Text Generation": AnswerCount(1.0, 1)} and tally.take() == {}
    assert dimension_lines({"x": [(tally, {})]}) == [] and take_tallies({"x": len}) == {}
