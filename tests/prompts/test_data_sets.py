"""One reader for data as it is: nested columns, chats, choices of rows, several data sets."""

import gzip
import json
import pickle
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from flowrl.errors import UserError
from flowrl.evaluation.tables import rows_of
from flowrl.prompts import Chat, PromptSet, on_hub, parquet
from flowrl.run.watch.judges import seen_in_training
from flowrl.session.start_record import StartRecord
from flowrl.settings import RECIPE_SETTINGS, LanguageSettings, PipelineSettings
from flowrl.settings.checks.machine import check_texts
from flowrl.settings.command_line.options import with_options
from flowrl.settings.read import dump, run_from
from flowrl.settings.sections.data import PromptFiles
from rewards.types import cell
from tests.support import text_runs, tiny_lm
from tests.support.advice import advice

SYSTEM = {"role": "system", "content": "be brief"}
USER, REPLY = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
ROWS = [
    {
        "question": f"q{i}",
        "level": i,
        "reward_model": {"ground_truth": str(i)},
        "prompt": [SYSTEM, {"role": "user", "content": f"q{i}", "name": None}],
    }
    for i in range(10)
]


def file(folder: Path, rows: Any = ROWS, name: str = "a.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def read(train: Any, **settings: Any) -> PromptSet:
    return PromptFiles(train=train, **settings).read("train")


def refused(train: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(train, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_columns_nested_named_and_kept(tmp_path):
    source = {"source": file(tmp_path), "columns": {"answer": "reward_model.ground_truth"}}
    found = read(source | {"column": "question"})
    assert found.texts[3] == "q3" and found.meta[3]["answer"] == "3"
    kept = read({"source": source["source"], "column": "question", "keep": ["question", "level"]})
    assert kept.meta[3] == {"question": "q3", "level": 3}


TOLD = {"told": json.dumps({"answer": "4", "more": {"level": 3}}), "prompt": "q"}
OTHERS = [
    {"told": json.dumps({"answer": "5", "more": {"level": 1}}), "prompt": "q1"},
    {"told": "{no object", "prompt": "q2"},
    {"told": None, "prompt": "q3"},
]


def test_the_text_of_a_json_object_has_nested_columns(tmp_path):
    """Tables that have no type for mappings store them so."""
    source = {"source": file(tmp_path, [TOLD, *OTHERS])}
    named = read(source | {"columns": {"answer": "told.answer", "level": "told.more.level"}})
    cells = [(row["answer"], row["level"]) for row in named.meta]
    assert cells == [("4", 3), ("5", 1), (None, None), (None, None)]
    assert read(source | {"where": {"told.more.level": {"min": 2}}}).texts == ("q",)
    assert read(source | {"keep": ["prompt", "told.answer"]}).meta[0]["told.answer"] == "4"
    asked = {"source": file(tmp_path, [{"told": '{"question": "q?"}'}], "b.jsonl")}
    assert read(asked | {"column": "told.question"}).texts == ("q?",)
    assert_in(
        r"no column 'told.x' \(keep\); it has told, prompt, told\.answer",
        refused(source | {"keep": ["told.x"]}),
    )


LISTED = {"prompt": "q", "summaries": [{"text": "a", "notes": ["b", "c"]}, {"text": "d"}]}


def test_an_entry_of_a_list_is_named_by_its_number(tmp_path):
    source = {"source": file(tmp_path, [LISTED, {"prompt": "p", "summaries": [{"text": "e"}]}])}
    columns = {"a": "summaries.0.text", "b": "summaries.1.text", "n": "summaries.0.notes.1"}
    named = read(source | {"columns": columns})
    cells = [(row["a"], row["b"], row["n"]) for row in named.meta]
    assert cells == [("a", "d", "c"), ("e", None, None)]
    assert read(source | {"column": "summaries.0.text"}).texts == ("a", "e")
    assert read(source | {"where": {"summaries.0.text": "e"}}).texts == ("p",)
    assert_in(
        r"no column 'summaries\.2\.text' \(keep\); it has prompt, summaries, "
        r"summaries\.0\.text, summaries\.0\.notes",
        refused(source | {"keep": ["summaries.2.text"]}),
    )


def test_rows_are_filtered_then_shuffled_then_limited(tmp_path):
    source = {"source": file(tmp_path), "column": "question"}
    assert read(source | {"where": {"level": {"min": 8}}}).texts == ("q8", "q9")
    assert read(source | {"where": {"level": {"max": 1.5}}}).texts == ("q0", "q1")
    where = {"reward_model.ground_truth": ["4", "5", "6"], "level": {"min": 5}}
    assert read(source | {"where": where}).texts == ("q5", "q6")
    assert read(source | {"limit": 2}).texts == ("q0", "q1")
    some = [read(source | {"shuffle": seed, "limit": 4}).texts for seed in (0, 0, 1)]
    assert some[0] == some[1] != some[2] and set(some[0]) != {"q0", "q1", "q2", "q3"}
    shuffled = read(source | {"shuffle": 7, "where": {"level": {"min": 5}}})
    assert sorted(shuffled.texts) == [f"q{i}" for i in range(5, 10)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"column": "text"}, "has no column 'text'; it has question, level, reward_model, prompt"),
        ({"column": "reward_model.truth"}, "no column 'reward_model.truth'; .*ground_truth"),
        ({"columns": {"answer": "x"}}, r"has no column 'x' \(columns\); it has"),
        ({"where": {"lev": 1}}, r"has no column 'lev' \(where\); it has question, level"),
        ({"where": {"level": 99}}, "no row has level: 99; its values are 0, 1, 2, 3, 4, ..."),
        ({"keep": ["a"]}, r"has no column 'a' \(keep\)"),
        ({"split": "train"}, "is a file, which has no split: leave it out"),
        ({"column": "level"}, "line 1, level: the prompt is 0, not a text"),
    ],
)
def test_what_cannot_be_read_names_the_file_the_row_and_the_column(tmp_path, settings, words):
    assert_in(words, refused({"source": file(tmp_path), "column": "question"} | settings))


def assert_in(words: str, sentence: str) -> None:
    assert re.search(words, sentence), sentence


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([SYSTEM, USER, REPLY], "ends with an assistant message, .* set drop_reply: true"),
        ([SYSTEM], "only has a system message; add a user"),
        ([], "the prompt has no messages"),
        (
            [{"from": "narrator", "value": "x"}],
            "message 1 is from 'narrator', and only human, user, gpt, .* are known",
        ),
        (["x"], "message 1 has 'x'; a message must be"),
        ([{"role": "user", "content": 3}], "its content is 3, not a text"),
        ([{"role": "user", "content": [{"type": "video"}]}], "a part of type 'video'"),
        ([{"role": "user", "content": " "}], "the prompt is empty"),
    ],
)
def test_a_chat_that_cannot_be_a_prompt_says_why(tmp_path, value, words):
    sentence = refused({"source": file(tmp_path, [{"chat": value}]), "column": "chat"})
    assert_in(f"a.jsonl, line 1, chat: .*{words}", sentence)


def test_a_chat_with_its_answer_is_a_prompt_without_it(tmp_path):
    source = {"source": file(tmp_path, [{"chat": [SYSTEM, USER, REPLY], "other": [SYSTEM, USER]}])}
    for follow in ({"column": "chat", "drop_reply": True}, {"column": "other"}):
        found = advice(
            "{}: the chat ends with an assistant message, which the model should write: set "
            "drop_reply: true for this data set, or choose another column",
            lambda: read(source | {"column": "chat"}),
            lambda follow=follow: read(source | follow),
        )
        assert found.texts == ("1 + 1?",)


def test_sharegpts_messages_are_those_of_roles(tmp_path):
    """FastChat and LLaMA-Factory read them too: from and value in place of role and content."""
    said = {"system": "be brief", "human": "1 + 1?", "gpt": "2", "observation": "ok"}
    named = {"system": "system", "human": "user", "gpt": "assistant", "observation": "tool"}
    theirs = [{"from": who, "value": text} for who, text in said.items()]
    ours = [{"role": named[who], "content": text} for who, text in said.items()]
    rows = [{"prompt": theirs}, {"prompt": ours}]
    first, second = read({"source": file(tmp_path, rows)}).texts
    assert first == second and first.messages == second.messages
    with pytest.raises(UserError, match="its content is None, not a text"):
        read({"source": file(tmp_path, [{"prompt": [{"from": "human"}]}])})


def test_the_column_system_begins_a_conversation_of_sharegpts(tmp_path):
    """LLaMA-Factory's README: the column is the system message, unless the messages have one."""
    turns = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
    first = {"from": "system", "value": "be kind"}
    rows = [
        {"conversations": turns, "system": "be brief"},
        {"conversations": turns, "system": None},
        {"conversations": [first, *turns], "system": "be brief"},
    ]
    source = {"source": file(tmp_path, rows), "column": "conversations", "drop_reply": True}
    roles = [[m["content"] for m in chat.messages] for chat in read(source).texts]
    assert roles == [["be brief", "1 + 1?"], ["1 + 1?"], ["be kind", "1 + 1?"]]


def test_a_chat_is_a_text_to_rewards_and_messages_to_the_template(tmp_path):
    shots = [SYSTEM, USER, REPLY, {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}]
    source = {"source": file(tmp_path, [ROWS[0], {"prompt": shots}, {"prompt": [USER, REPLY]}])}
    found = read(source | {"drop_reply": True})
    assert found.texts == ("q0", "user: 1 + 1?\nassistant: 2\nuser: 2 + 2?", "1 + 1?")
    chat = found.texts[1]
    assert isinstance(chat, Chat) and chat.messages[3] == {"role": "user", "content": "2 + 2?"}
    copy = pickle.loads(pickle.dumps(chat))  # other processes receive prompts so
    assert copy == chat and copy.messages == chat.messages and copy.at.endswith("line 2")
    assert found.texts[0].messages[1] == {"role": "user", "content": "q0"}  # without empty keys


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("openai/gsm8k", True),
        ("nvidia/HelpSteer2.5", True),
        ("some.one/data-v1.1", True),
        ("data/prompts.jsonl", False),
        ("data/prompts.yaml", False),
        ("./data/prompts", False),
        ("gsm8k", False),
        ("a/b/c", False),
    ],
)
def test_names_of_the_hub_may_have_dots(name, there):
    assert on_hub(name) is there


class Hub:
    """Stands in for `datasets.load_dataset`, and for its builder, which names the files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows, self.asked = list(ROWS), []
        self.file = "hf://datasets/openai/gsm8k@1a2b/main.parquet"
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
        monkeypatch.setattr(datasets, "load_dataset", self)
        monkeypatch.setattr(datasets, "load_dataset_builder", self.builder)

    def builder(self, name: str, config: str | None, revision: str | None) -> SimpleNamespace:
        config = SimpleNamespace(data_files={"train": [self.file]})
        return SimpleNamespace(config=config, cache_dir=".")  # unpacked before

    def __call__(self, name: str, config: str | None, **more: Any) -> datasets.Dataset:
        self.asked.append((name, config, more["split"], more["revision"], more["cache_dir"]))
        if name == "no/where":
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'no/where' doesn't exist")
        return datasets.Dataset.from_list(self.rows)


def test_a_data_set_of_the_hub_has_config_split_and_revision(monkeypatch):
    hub = Hub(monkeypatch)
    source = {"source": "openai/gsm8k.1", "config": "main", "split": "test", "revision": "abc"}
    where = {"reward_model.ground_truth": ["8", "9"]}
    more = {"column": "question", "where": where, "shuffle": 0, "keep": ["question"]}
    found = read(source | more)
    assert sorted(found.texts) == ["q8", "q9"] and found.columns == ["question"]
    assert hub.asked == [("openai/gsm8k.1", "main", "test", "abc", None)]
    assert read("openai/gsm8k", column="question").texts[0] == "q0"
    assert hub.asked[-1] == ("openai/gsm8k", None, "train", None, None)
    assert_in("a/b, row 1, level: the prompt is 0", refused({"source": "a/b", "column": "level"}))
    assert_in("no column 'lev' .where.", refused({"source": "a/b", "where": {"lev": 1}}))
    assert_in("doesn't exist: check the name, or accept its licence", refused("no/where"))
    asked, hub.file = len(hub.asked), "/etc/passwd"
    assert_in("it names /etc/passwd, which is no file of its own", refused("openai/gsm8k"))
    assert len(hub.asked) == asked


def test_a_folder_has_splits_and_no_revision(tmp_path):
    for split in ("train", "test"):
        file(tmp_path, [{"prompt": split}], f"{split}.jsonl")
    assert read(str(tmp_path)).texts == ("train",)
    assert read({"source": str(tmp_path), "split": "test"}).texts == ("test",)
    sentence = refused({"source": str(tmp_path), "revision": "main"})
    assert "is a folder, which has no revision: leave it out" in sentence


def test_a_folder_is_read_as_its_files_are(tmp_path):
    """Cells, places and paths of a folder's tables are those of single files."""
    (tmp_path / "data").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "data" / "a.png")
    (tmp_path / "data" / "train-0.csv").write_text("prompt,code,n,image\na,007,1,a.png\n")
    (tmp_path / "data" / "train-1.csv").write_text("prompt,code,n,image\nb,7,2,\n")
    (tmp_path / "data" / "test-0.csv").write_text("prompt,n\nc,x\nd,y\n")
    source = {"source": str(tmp_path)}
    found = read(source)
    assert found.texts == ("a", "b")
    assert [(row["code"], row["n"]) for row in found.meta] == [("007", 1), ("7", 2)]
    assert found.meta[0]["image"] == str(tmp_path / "data" / "a.png")
    assert found.meta[1].place.endswith(f"{tmp_path}, data/train-1.csv, line 2")
    for split, texts in (("test[1:]+train[:1]", "da"), ("all", "abcd"), ("test[:50%]", "c")):
        assert "".join(read(source | {"split": split}).texts) == texts
    assert_in("has no split 'nope'; it has train, test", refused(source | {"split": "nope"}))
    assert_in("the split 'test.x:y.' cannot be read", refused(source | {"split": "test[x:y]"}))


def test_a_readme_says_how_a_folder_is_read(tmp_path):
    splits = "data_files: [{split: train, path: q.csv}]"
    (tmp_path / "README.md").write_text(
        f'---\nconfigs: [{{config_name: default, {splits}, sep: ";"}}]\n---\n'
    )
    (tmp_path / "q.csv").write_text("prompt;n\na;1\n")
    assert read({"source": str(tmp_path)}).meta == ({"prompt": "a", "n": 1},)


def test_forms_that_datasets_unpacks_without_a_limit_are_refused(tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": "a"}])
    rows.save_to_disk(tmp_path / "saved")
    sentence = refused({"source": str(tmp_path / "saved")})
    assert_in("was written by save_to_disk, .*to_parquet", sentence)
    datasets.load_from_disk(tmp_path / "saved").to_parquet(tmp_path / "train.parquet")
    assert read({"source": str(tmp_path / "train.parquet")}).texts == ("a",)
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "several")
    assert_in(
        r"load_from_disk\(FOLDER\)\['train'\]", refused({"source": str(tmp_path / "several")})
    )
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "a.json").write_text("{}")
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        (packed / name).write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    assert_in(r"a\.jsonl\.gz.*unpack it", refused({"source": str(packed)}))


def test_keep_reads_no_other_column_of_a_parquet_file(tmp_path, monkeypatch):
    rows = [{"prompt": "a", "level": 1, "more": "x" * 99}, {"prompt": "b", "level": 2, "more": ""}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = {"source": str(tmp_path / "a.parquet"), "where": {"level": 2}, "keep": ["prompt"]}
    monkeypatch.setattr(parquet, "MOST_TABLE_BYTES", 70)
    assert read(source).meta == ({"prompt": "b"},)
    assert_in("once unpacked", refused(source | {"keep": ["prompt", "more"]}))


def two(folder: Path, **weights: float) -> list[dict[str, Any]]:
    more = [{"prompt": f"code {i}", "tests": "x"} for i in range(40)]
    sets = {"sums": file(folder, [{"prompt": f"sum {i}"} for i in range(5)]),
            "code": file(folder, more, "b.jsonl")}  # fmt: skip
    return [
        {"source": path, "name": name} | ({"weight": weights[name]} if weights else {})
        for name, path in sets.items()
    ]


def test_several_data_sets_are_drawn_by_their_sizes_or_weights(tmp_path):
    joined = read(two(tmp_path), per_iteration=9)
    assert len(joined) == 45 and not joined.shares
    assert joined.meta[0] == {"prompt": "sum 0", "tests": None, "data_set": "sums"}
    assert joined.meta[5] == {"prompt": "code 0", "tests": "x", "data_set": "code"}
    rows = [row for i in range(5) for row in joined.draw(i, 9, 0).rows]
    assert sorted(rows) == list(range(45))
    weighted = read(two(tmp_path, sums=1, code=3), per_iteration=8)
    draws = [weighted.draw(i, 8, 0) for i in range(20)]
    for draw in draws:
        assert Counter(weighted.meta[row]["data_set"] for row in draw.rows) == {
            "sums": 2,
            "code": 6,
        }
    count = Counter(row for draw in draws for row in draw.rows)
    assert {count[row] for row in range(5)} == {8}  # 40 draws of 5: each once before any repeats
    assert {count[row] for row in range(5, 45)} == {3}
    assert weighted.draw(7, 8, 0) == draws[7] != weighted.draw(7, 8, 1)
    likely = torch.where(torch.arange(45) % 2 == 0, 1.0, 0.0)
    picked = weighted.draw(0, 8, 0, likely).rows
    assert sum(row < 5 for row in picked) == 2 and all(row % 2 == 0 for row in picked)
    assert weighted.weights()[:5].sum() == pytest.approx(float(weighted.weights().sum()) / 4)


def test_what_several_data_sets_cannot_be(tmp_path):
    sets = two(tmp_path, sums=1, code=99)
    assert "sums has weight 1, too small for a single prompt per iteration of 16" in refused(sets)
    with pytest.raises(ValueError, match="all of its data sets a weight, or none of them"):
        PromptFiles(train=[sets[0], {"source": sets[1]["source"]}])
    with pytest.raises(ValueError, match="not unique; give each data set a `name`"):
        PromptFiles(train=[sets[0]["source"]] * 2)
    own = file(tmp_path, [{"prompt": "a", "data_set": "x"}], "c.jsonl")
    assert "has a column 'data_set'" in refused([sets[1]["source"], own])


def settings_of(folder: Path, prompts: Any) -> dict[str, Any]:
    tree = text_runs.tree(tiny_lm.write(folder / "lm"), folder, text_runs.GRPO)
    return tree | {"prompts": prompts}


def test_settings_come_back_as_they_were_written(tmp_path):
    plain = {
        "train": "a.jsonl",
        "held_out": "b.jsonl",
        "per_iteration": 3,
        "column": "prompt",
        "unwinnable": "leave_out",
    }
    run = run_from(settings_of(tmp_path, plain), "test")
    assert dump(run)["prompts"] == plain
    many = {"source": "o/d", "config": "main", "where": {"level": {"min": 3}, "n": [1, 2]}}
    run = run_from(settings_of(tmp_path, plain | {"train": ["a.jsonl", many]}), "test")
    assert dump(run)["prompts"]["train"] == ["a.jsonl", many]
    assert run_from(dump(run), "again") == run
    tree = dump(run)
    tree = with_options(tree, RECIPE_SETTINGS["text_grpo"], ["--prompts.train", "c.jsonl"])
    assert dump(run_from(tree, "options"))["prompts"]["train"] == "c.jsonl"
    tree = with_options(
        tree, RECIPE_SETTINGS["text_grpo"], ["--prompts.train", "{source: a/b, limit: 3}"]
    )
    assert dump(run_from(tree, "options"))["prompts"]["train"] == {"source": "a/b", "limit": 3}


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (3, "prompts.train: expected a file, or a data set such as {source: openai/gsm8k"),
        ([], "prompts.train: expected a file"),
        ({"source": "a/b", "wher": 1}, "prompts.train.0.wher: 'wher' is not known; did you mean"),
        ({"source": "a/b", "limit": 0}, "prompts.train.0.limit: .*greater than or equal to 1"),
        (
            {"source": "a/b", "where": {"n": {"mn": 1}}},
            "where: n: expected a value, a list of values, or",
        ),
        ({"config": "main"}, "prompts.train.0.source: missing"),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path, train, words):
    with pytest.raises(UserError) as caught:
        run_from(settings_of(tmp_path, {"train": train}), "test")
    assert_in(words, str(caught.value))


def test_a_resume_notices_another_revision_and_another_choice_of_rows(tmp_path, monkeypatch):
    hub = Hub(monkeypatch)
    tree = settings_of(tmp_path, {"train": "o/d", "column": "question"})

    def digest(**choice: Any) -> str:
        tree["prompts"]["train"] = {"source": "o/d", **choice}
        return StartRecord.of(run_from(tree, "test"), 1).prompts["prompts.train"]

    first = digest()
    assert digest() == first != digest(limit=3)
    assert digest(shuffle=1) not in (first, digest(shuffle=2))
    hub.rows[4] = hub.rows[4] | {"level": 77}  # the hub has a new revision
    assert digest() != first
    plain = file(tmp_path)
    tree["prompts"]["train"] = plain
    alone = StartRecord.of(run_from(tree, "test"), 1).prompts["prompts.train"]
    tree["prompts"]["train"] = {"source": plain, "limit": 3}
    assert StartRecord.of(run_from(tree, "test"), 1).prompts["prompts.train"] != alone


def test_a_chat_is_refused_for_a_pipeline(tmp_path):
    prompts = read(file(tmp_path))
    check_texts(prompts, LanguageSettings(language="x"))
    with pytest.raises(
        UserError, match=r"line 1: the prompt is a list of chat messages, but model"
    ):
        check_texts(prompts, PipelineSettings(pipeline="x"))


def test_a_piece_of_an_image_is_relative_to_the_file(tmp_path):
    Image.new("RGB", (8, 4)).save(tmp_path / "sheet.png")
    piece, missing = "sheet.png#xywh=4,0,4,4", "none.png#xywh=4,0,4,4"
    rows = [{"prompt": "a", "image": image} for image in (piece, missing, ["sheet.png", piece])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = PromptSet.read(str(tmp_path / "rows.jsonl"), "prompt", "train.prompts")
    sheet, whole = (str(tmp_path / name) for name in ("sheet.png", piece))
    assert [row["image"] for row in read.meta] == [whole, missing, [sheet, whole]]


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("Prompt\na cat\na dog\n", "set column: Prompt"),
        ("text,side\na cat,left\n", "set column: text"),
        ("prompt;side\na cat;left\n", "not separated by commas"),
        ("a red cat\na blue dog\n", "add the line 'prompt' above it"),
        ("a red cat,left\na blue dog,right\n", "its first line seems to be a row"),
        ("cat,1\ndog,2\n", "its first line seems to be a row"),
        ("cat\ndog\n", "set column: cat, or add the line 'prompt' above it"),
    ],
)
def test_a_table_without_the_column_names_the_remedy(tmp_path, text, remedy):
    (tmp_path / "prompts.csv").write_text(text)
    with pytest.raises(UserError, match="has no column 'prompt'") as error:
        PromptSet.read(str(tmp_path / "prompts.csv"), "prompt", "prompts.train")
    assert remedy in str(error.value)


def test_a_parquet_file_has_columns_and_no_first_line(tmp_path):
    file, column = tmp_path / "p.parquet", pyarrow.array(["a cat"])
    pyarrow.parquet.write_table(pyarrow.table({"x": column}), file)
    with pytest.raises(UserError, match=r"it has x: set column: x$"):
        PromptSet.read(str(file), "prompt", "prompts.train")
    twice = pyarrow.Table.from_arrays([column, column], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(twice, file)
    with pytest.raises(UserError, match="two columns have the same name"):
        PromptSet.read(str(file), "prompt", "prompts.train")
    with pytest.raises(UserError, match="two columns have the same name"):
        rows_of(file)


def test_held_out_prompts_that_training_sees_are_named(tmp_path):
    sets = {}
    for name, text in (("train", "a\nb\n"), ("seen", "b\n"), ("new", "b\nc\n")):
        (tmp_path / f"{name}.txt").write_text(text)
        sets[name] = PromptSet.read(str(tmp_path / f"{name}.txt"), "prompt", "prompts")
    assert not [*seen_in_training(sets["train"], sets["new"])]
    assert not [*seen_in_training(sets["train"], None)]
    (said,) = seen_in_training(sets["train"], sets["seen"])
    assert "every prompt of prompts.held_out is also in prompts.train" in said


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n"])
def test_lines_end_as_on_any_system(tmp_path, end):
    (tmp_path / "p.txt").write_bytes(f"a{end}b\u2028c{end}{end}d{end}".encode())
    found = PromptSet.read(str(tmp_path / "p.txt"), "prompt", "x")
    assert found.texts == ("a", "b\u2028c", "d")
    (tmp_path / "p.jsonl").write_bytes(f'{{"prompt": "a"}}{end}{{"prompt": "b"}}{end}'.encode())
    assert PromptSet.read(str(tmp_path / "p.jsonl"), "prompt", "x").texts == ("a", "b")


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_what_python_calls_a_line_end_is_none_of_a_file(tmp_path, inside):
    """Signs at which `str.splitlines` cuts, unescaped within a prompt."""
    prompt = f"a hen{inside}on grass"
    assert len(prompt.splitlines()) == 2
    (tmp_path / "p.txt").write_text(f"{prompt}\na cow\n", encoding="utf-8", newline="")
    assert PromptSet.read(str(tmp_path / "p.txt"), "prompt", "x").texts == (prompt, "a cow")
    rows = [{"prompt": prompt if ord(inside) > 0x7F else "a hen"}, {"prompt": "a cow"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    (tmp_path / "p.jsonl").write_text(lines, encoding="utf-8", newline="")
    read = PromptSet.read(str(tmp_path / "p.jsonl"), "prompt", "x").texts
    assert read == (rows[0]["prompt"], "a cow")


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (("007", "012"), ["007", "012"]),
        (("1_000", "2"), ["1_000", "2"]),
        (("nan", "inf"), ["nan", "inf"]),
        (("12345678901234567890.1", "2"), ["12345678901234567890.1", "2"]),
        (("7", "-12"), [7, -12]),
        (("0.5", "1e3"), [0.5, 1000.0]),
        (("2", "0.5"), [2, 0.5]),
        (("True", "false"), [True, False]),
        (("", "3"), [None, 3]),
    ],
)
def test_cells_of_a_csv_are_numbers_only_where_json_would_write_them_so(tmp_path, cells, values):
    rows = "".join(f"a,{cell}\n" for cell in cells)
    (tmp_path / "p.csv").write_text(f"prompt,answer\n{rows}")
    found = PromptSet.read(str(tmp_path / "p.csv"), "prompt", "x")
    assert [repr(row["answer"]) for row in found.meta] == [repr(value) for value in values]


def test_prompts_of_a_csv_are_texts(tmp_path):
    (tmp_path / "p.csv").write_text("prompt,title\n1984,1\n2001,2\n")
    found = PromptSet.read(str(tmp_path / "p.csv"), "prompt", "x")
    assert found.texts == ("1984", "2001") and found.meta[0] == {"prompt": "1984", "title": 1}
    assert PromptSet.read(str(tmp_path / "p.csv"), "title", "x").texts == ("1", "2")


def test_the_end_of_a_name_may_be_in_capitals(tmp_path):
    for name, text in (("P.TXT", "a\n"), ("P.CSV", "prompt\na\n")):
        (tmp_path / name).write_text(text)
        assert PromptSet.read(str(tmp_path / name), "prompt", "x").texts == ("a",)
    assert not on_hub("data/P.TXT")


@pytest.mark.parametrize("text", ["\u200b", "\ufeff \u2060", " "])
def test_a_prompt_that_shows_nothing_is_empty(tmp_path, text):
    assert "line 1: the prompt is empty" in refused(file(tmp_path, [{"prompt": text}]))


def test_a_table_of_tabs_has_quotes_in_its_texts(tmp_path):
    """The rows of PartiPrompts.tsv: some prompts begin with a quote that does not end the cell."""
    rows = ["Prompt\tCategory", '"hello" on a sign\tWords', 'a 2" nail\tThings', "a robot\tThings"]
    (tmp_path / "parti.tsv").write_text("\n".join(rows) + "\n")
    found = read({"source": str(tmp_path / "parti.tsv"), "column": "Prompt"})
    assert found.texts == ('"hello" on a sign', 'a 2" nail', "a robot")
    assert [row["Category"] for row in found.meta] == ["Words", "Things", "Things"]
    table, _ = rows_of(tmp_path / "parti.tsv")
    assert [row["Prompt"] for row in table] == list(found.texts)
    (tmp_path / "quoted.tsv").write_text('prompt\tn\n"two\nlines\t"\t1\n')
    quoted = read({"source": str(tmp_path / "quoted.tsv")})
    assert quoted.texts == ("two\nlines\t",) and quoted.meta[0]["n"] == 1


def test_a_csv_with_other_separators_names_them(tmp_path):
    text = 'prompt;note;weight\r\n"a red circle; large";"two\r\nlines";0,5\r\n'
    (tmp_path / "excel.csv").write_text(text)
    sentence = refused({"source": str(tmp_path / "excel.csv")})
    assert_in("its cells are separated by ';': save it with commas, or as jsonl", sentence)
    with pytest.raises(UserError, match="separated by ';'"):
        rows_of(tmp_path / "excel.csv")


@pytest.mark.parametrize(
    ("text", "line"), [('prompt\na\n"b, c\nd\n', 3), ('"prompt\na\n', 1), ('prompt\n"a"b\n', 2)]
)
def test_a_record_without_an_end_is_told_by_its_line(tmp_path, text, line):
    (tmp_path / "open.csv").write_text(text)
    assert_in(f"line {line}: not valid CSV", refused({"source": str(tmp_path / "open.csv")}))
    with pytest.raises(UserError, match=f"line {line}: not valid CSV"):
        rows_of(tmp_path / "open.csv")


def test_columns_may_name_the_prompt_itself(tmp_path):
    rows = [{"question": "1 + 1?", "chosen": "2"}]
    found = read({"source": file(tmp_path, rows), "columns": {"prompt": "question"}})
    assert found.texts == ("1 + 1?",) and found.meta[0]["prompt"] == "1 + 1?"


def test_conversations_that_do_not_end_with_an_answer_are_left_out_and_told(tmp_path):
    human, gpt = {"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}
    rows = [{"conversations": turns} for turns in ([human, gpt], [human], [], [human, gpt])]
    with pytest.warns(UserWarning, match=r"2 of 4 rows left out: .* \(line 2\)"):
        found = read({"source": file(tmp_path, rows)})
    assert found.texts == ("1 + 1?",) * 2 and [r["completion"] for r in found.meta] == ["2"] * 2


def test_a_folder_of_images_alone_says_where_texts_stand(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (4, 4)).save(folder / "a.png")
    Image.new("RGB", (4, 4)).save(folder / "b.png")
    (folder / "metadata.jsonl").write_text('{"file_name": "a.png"}\n{"file_name": "b.png"}\n')
    sentence = refused({"source": str(folder)})
    assert_in("its images have no texts; put metadata.jsonl beside them", sentence)
    lines = [{"file_name": f"{n}.png", "prompt": f"a {n}"} for n in "ab"]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read({"source": str(folder)}).texts == ("a a", "a b")


@pytest.mark.parametrize("ending", [".tar", ".zip"])
def test_an_archive_is_to_be_unpacked(tmp_path, ending):
    (tmp_path / f"a{ending}").write_bytes(b"x")
    assert_in("unpack it, and use one of", refused({"source": str(tmp_path / f"a{ending}")}))


@pytest.mark.parametrize("text", ["{", "{not JSON}", '{"a":' * 100_000])
def test_a_text_that_only_begins_as_an_object_has_no_columns(text: str) -> None:
    assert cell({"about": text}, "about.a") is None
