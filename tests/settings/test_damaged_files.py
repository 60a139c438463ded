"""Damaged run files and prompt files: one sentence, or a valid run; never a trace."""

import json
import os
import random
import re
import string
import time
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from hypothesis import strategies as st

from flowrl.errors import UserError
from flowrl.paths import PROJECT
from flowrl.prompts import PromptSet
from flowrl.settings.file.strict_yaml import parse_yaml
from flowrl.settings.read import check_plan, check_rewards, read_run, run_from
from tests.support import fuzz

RUN = (PROJECT / "configs" / "demo.yaml").read_text()


def sentence(path: Path) -> str:
    """The error of a run's file; it is one line, short, and comes at once."""
    begin = time.process_time()
    with pytest.raises(UserError) as caught:
        run = read_run(path)
        check_plan(run)
        check_rewards(run)
    assert time.process_time() - begin < 5
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1500, text[:300]
    assert "pydantic" not in text
    return text


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n"
    for a, b in zip(string.ascii_lowercase, string.ascii_lowercase[1:12], strict=False)
)
MERGES = "a: &a {k0: 1}\n" + "".join(
    f"{b}: &{b}\n  <<: [{', '.join([f'*{a}'] * 9)}]\n"
    for a, b in zip(string.ascii_lowercase, string.ascii_lowercase[1:12], strict=False)
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr: 3.0e-4", "lr: 2020-13-45", "line 10: '2020-13-45' is not of type timestamp"),
        ("lr: 3.0e-4", "lr: !!int ''", "line 10: '' is not of type int"),
        ("lr: 3.0e-4", "lr: !!bool maybe", "line 10: 'maybe' is not of type bool"),
        ("lr: 3.0e-4", f"lr: {'9' * 4300}", "line 10: the integer is too large"),
        ("lr: 3.0e-4", f"lr: {'9' * 5300}", "line 10: .* is not of type int"),
        ("group: 12", "group: 010", "line 2: 010 would be read as 8: write 8"),
        ("lr: 3.0e-4", "seed: 1:30:00", "line 10: 1:30:00 would be read as 5400"),
        ("lr: 3.0e-4", "lr: .inf", "train.lr: input should be a finite number"),
        ("lr: 3.0e-4", "lr: .nan", "train.lr: input should be a finite number"),
        ("{name: nft,", "{name: [],", r"recipe.name: \[\] is not known"),
        ("{name: nft,", "{name: {},", "recipe.name: {} is not known"),
        ("[{name: shapes, kind: strict}]", "[{name: shapes, settings: 1}]", "settings: expected a"),
        ("lr: 3.0e-4", f"lr: {'[' * 5000}{']' * 5000}", "nested more than 40 deep"),
        ("group: 12", "group: 100000000", "recipe.group: .*less than or equal to 10000"),
        ("steps: 7", "steps: 100000", "recipe.steps: .*less than or equal to 250"),
        ("train: {iter", "train: {lr: 1.0}\ntrain: {iter", "train is given twice, in line 10 and"),
        ("lr: 3.0e-4", "lr: 1.0, lr: 3.0e-4", "train.lr is given twice"),
        ("max_sequence_length: 1", "eta: 0.7", "model.call: eta has no effect"),
        ("# A tiny", "? [a]\n: 1\n# A tiny", "not valid YAML: line 1"),
        ("train: {iter", "loop: &l [*l]\ntrain: {iter", "contains itself"),
        ("train: {iter", f"{LAUGHS}train: {{iter", "more than 20000 values"),
        ("train: {iter", f"{MERGES}train: {{iter", "more than 20000 values"),
        ("configs/prompts/shapes_train.jsonl", "''", "train: the file name is empty"),
        ("# A tiny", "\x07# A tiny", "not valid YAML"),
        ("train: {iter", '"\\n": 1\ntrain: {iter', r"run.yaml: '\\n': '\\n' is not known"),
    ],
)  # fmt: skip
def test_a_mutated_run_is_one_sentence(tmp_path, old, new, message):
    assert old in RUN
    (tmp_path / "run.yaml").write_text(RUN.replace(old, new, 1))
    assert re.search(message, sentence(tmp_path / "run.yaml"))


def test_files_that_are_no_text_or_too_large(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"recipe: {name: caf\xe9}")
    assert "line 1 is not UTF-8" in sentence(path)
    path.write_text("# " + "x" * 2**18)
    assert "more than 262144 characters" in sentence(path)
    path.write_text("")
    assert "expected settings" in sentence(path)
    assert "is a folder" in sentence(tmp_path)


def test_anchors_of_ordinary_use_stay():
    text = "a: &a {lr: 1}\nb: {<<: *a, x: 2}\nc: *a"
    assert parse_yaml(text, "x") == {"a": {"lr": 1}, "b": {"lr": 1, "x": 2}, "c": {"lr": 1}}
    assert parse_yaml("b: {<<: {lr: 1}, lr: 2}", "x") == {"b": {"lr": 2}}


WILD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.dates(), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
    st.sampled_from([10**9, -1, 0, "", "null", ".inf", [[[]]], {"name": []}, "a\x00b", "~x/y"]),
)  # fmt: skip
SNIPPETS = ("!!int ''", "!!bool maybe", "&a [*a]", "<<: 1", "? ", "]", "{", "'", "\t", "- ",
            "!!x y", ": ", "2020-99-99", "\x00", "é", "*b", "!!python/object:os.system",
            "1_0", "0x", "[" * 60)  # fmt: skip


def paths(tree, at=()):
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from paths(value, (*at, key))


@st.composite
def mutated_runs(draw) -> str:
    tree = yaml.safe_load(RUN)
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(list(paths(tree))))
        node = tree
        for part in path[:-1]:
            node = node[part]
        if draw(st.booleans()):
            node[path[-1]] = deepcopy(draw(WILD))  # it may be changed below
        elif isinstance(node, dict):
            node[draw(st.text(max_size=8))] = node.pop(path[-1])
        else:
            del node[path[-1]]
        if not tree:
            break
    text = yaml.safe_dump(tree, allow_unicode=True)
    if draw(st.booleans()):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(SNIPPETS)) + text[at + draw(st.integers(0, 9)) :]
    return text


def check_text(text: str) -> None:
    try:
        run = run_from(parse_yaml(text, "run.yaml"), "run.yaml")
        check_plan(run)
        check_rewards(run)
    except UserError as error:
        fuzz.one_sentence(str(error))


@pytest.mark.slow
@pytest.mark.long
@fuzz.COUNTS
def test_mutated_runs_are_valid_or_one_sentence(count):
    fuzz.examples(count, mutated_runs(), check_text)


def prompts_of(path: Path) -> PromptSet | str:
    begin = time.process_time()
    try:
        return PromptSet.read(str(path), "prompt", "prompts.train")
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 700
        return str(error)
    finally:
        assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"null\nnull\n", "line 1: expected an object .*, not null"),
        ("a.jsonl", b"\n\n \n", "has no prompts"),
        ("a.jsonl", b"{}\n", "has no column 'prompt'; it has no columns"),
        ("a.jsonl", b'{"prompt": "caf\xe9"}\n', "line 1 is not UTF-8"),
        ("a.jsonl", b'{"prompt": ' + b"[" * 100_000, "nested too deep"),
        ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": 3}\n', "line 3: the prompt is 3, not"),
        ("a.jsonl", b'{"prompt": [{"role": "user"}]}', "line 1: message 1: its content is None"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\\ud800"}\n', "line 2: .*surrogate"),
        ("a.jsonl", b'{"prompt": "a", "prompt": "b"}\n', "line 1: .*'prompt' is given twice"),
        ("a.txt", b"a\nb\0c\n", "line 2: .*the character NUL"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2: not valid JSON .*value: column 12"),
        ("a.json", b'[{"prompt": "a"},\n {"prompt"}]', "not valid JSON .*: line 2, column 11"),
        ("a.jsonl", b'{"n": ' + b"9" * 5000 + b"}", "line 1: not valid JSON"),
        ("a.json", b"[]", "has no prompts"),
        ("a.json", b"3", "expected a list of objects"),
        ("a.json", b"[1, 2]", "row 1: expected an object"),
        ("a.json", b'{"prompt": ["a"], "n": [1, 2]}', "different lengths"),
        ("a.csv", b"prompt,n\n", "has no prompts"),
        ("a.csv", b"prompt,prompt\na,b\n", "have the same name"),
        ("a.csv", b"prompt\na,b\n", "more cells than columns"),
        ("a.csv", b'prompt\n"a', "not valid CSV"),
        ("a.parquet", b"PAR1garbagePAR1", "not valid parquet"),
        ("a.parquet", b"", "not valid parquet"),
        ("a.parquet", b"\x00\x01\x02", "not valid parquet"),
        ("a.parquet", b'{"prompt": "a"}\n', "it is text, as JSON lines or CSV are: give it their"),
        ("a.parquet", b"\xef\xbb\xbfprompt,n\r\na,1\r\n", "it is text, as JSON lines or CSV are"),
        ("a.parquet", b"[" + "\u00e9".encode() * 600, "it is text, as JSON lines or CSV are"),
        ("a.txt", b"\n\n", "has no prompts"),
        ("a.xlsx", b"x", "cannot read .xlsx"),
    ],
)  # fmt: skip
def test_a_damaged_prompt_file_is_one_sentence(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    found = prompts_of(tmp_path / name)
    assert isinstance(found, str) and re.search(message, found), found


@pytest.mark.long
def test_folders_that_are_no_data_set_are_refused_at_once(tmp_path):
    assert "without .jsonl" in str(prompts_of(tmp_path))
    for i in range(50):
        (tmp_path / str(i)).mkdir()
        for k in range(110):
            (tmp_path / str(i) / f"{k}.jsonl").touch()
    assert "more than 5000 files" in str(prompts_of(tmp_path))


@pytest.mark.long
def test_what_a_folder_holds_is_read_anew(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "a red ball"}\n')
    stat = file.stat()
    assert PromptSet.read(str(tmp_path), "prompt", "x").texts == ("a red ball",)
    file.write_text('{"prompt": "a red cat!"}\n')  # of the same size, at the same time
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert PromptSet.read(str(tmp_path), "prompt", "x").texts == ("a red cat!",)


@pytest.mark.long
def test_formats_agree(tmp_path):
    from pyarrow import Table, parquet

    rows = [{"prompt": "a, \"b\"\nc", "n": 1, "x": 0.5, "ok": True, "tag": None},
            {"prompt": "ü", "n": 20, "x": 1.0, "ok": False, "tag": "t"}]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\r\n".join(map(json.dumps, rows)), encoding="utf-8-sig")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_text(json.dumps({k: [r[k] for r in rows] for k in rows[0]}))
    (tmp_path / "c.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.csv").write_text(
        'prompt,n,x,ok,tag\n"a, ""b""\nc",1,0.5,true,\nü,20,1.0,False,t\n', encoding="utf-8"
    )
    parquet.write_table(Table.from_pylist(rows), tmp_path / "a.parquet")
    for path in sorted(tmp_path.iterdir()):
        read = PromptSet.read(str(path), "prompt", "x")
        assert list(read.meta) == rows and read.texts == tuple(r["prompt"] for r in rows), path
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "more": 1}\n')
    read = PromptSet.read(str(tmp_path / "b.jsonl"), "prompt", "x")
    assert read.meta == ({"prompt": "a", "more": None}, {"prompt": "b", "more": 1})


def damaged_table(rng: random.Random, parquet: bytes) -> tuple[str, bytes]:
    """A prompt file with some damage: bytes changed, cut, doubled, or values replaced."""
    kind = rng.choice(["jsonl", "json", "csv", "txt", "parquet"])
    values = [None, 1, 1e400, True, [], {}, "x", "", [{"role": "user"}], "a" * 300, {"a": [1, "b"]}]
    rows = [{"prompt": f"prompt {i}", "n": i} for i in range(rng.randint(0, 5))]
    for row in rows:
        if rng.random() < 0.3:
            row[rng.choice(["prompt", "n", "image", ""])] = rng.choice(values)
    texts = {
        "csv": "\n".join(["prompt,n", *(f"{r['prompt']},{r['n']}" for r in rows)]),
        "txt": "\n".join(str(row["prompt"]) for row in rows),
        "json": json.dumps(rows),
        "jsonl": "\n".join(map(json.dumps, rows)),
    }
    data = parquet if kind == "parquet" else texts[kind].encode()
    return kind, data if rng.random() < 0.2 else fuzz.damaged(data, rng)


@fuzz.COUNTS
def test_damaged_prompt_files_are_valid_or_one_sentence(count, tmp_path):
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist([{"prompt": f"p {i}"} for i in range(9)]), tmp_path / "p")
    whole = (tmp_path / "p").read_bytes()

    def check(rng: random.Random) -> None:
        kind, data = damaged_table(rng, whole)
        path = tmp_path / f"a.{kind}"
        path.write_bytes(data)
        found = prompts_of(path)
        if isinstance(found, PromptSet):
            assert all(isinstance(t, str) and t.strip() for t in found.texts)

    fuzz.cases(count, check)
