import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

import flowrl
from flowrl.errors import UserError
from flowrl.evaluation.folders import embedded_prompt, find_items, prompt_of_name
from flowrl.evaluation.measure import Clock, Cost, Gallery, Item, chunks, parse_specs, scores
from flowrl.evaluation.scoring import sheet_ranks, summary
from flowrl.evaluation.sources import Source
from rewards import Samples
from tests.support import runs
from tests.support.advice import advice


def save(path, shade: int, size=(6, 4), **text: str) -> None:
    info = PngImagePlugin.PngInfo()
    for key, value in text.items():
        info.add_text(key, value)
    Image.new("RGB", size, (shade, shade, shade)).save(path, pnginfo=info)


def table(out) -> list[dict]:
    with (out / "scores.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_folder_is_scored_and_a_torn_file_is_named(tmp_path, capsys):
    for i, shade in enumerate((0, 51, 255)):
        save(tmp_path / f"a_cat_{i:02d}.png", shade, size=(6 + i, 4))
    (tmp_path / "a_dog.png").write_bytes((tmp_path / "a_cat_00.png").read_bytes()[:30])
    assert runs.flowrl("score", tmp_path, "--rewards", "brightness,colour", "--chunk", 2) == 0
    said = capsys.readouterr().out
    rows = table(tmp_path / "scores")
    assert [row["file"] for row in rows] == [f"a_cat_0{i}.png" for i in range(3)] + ["a_dog.png"]
    assert [row["prompt"] for row in rows] == ["a cat"] * 3 + ["a dog"]
    shades = [float(row["brightness"]) for row in rows[:3]]
    assert shades == pytest.approx([0.0, 0.2, 1.0], abs=1e-6)
    assert rows[3]["brightness"] == "" and "a_dog.png: not readable" in rows[3]["problem"]
    assert "not scored: a_dog.png" in said and "4 files, 2 prompts" in said
    line = next(line for line in said.splitlines() if line.startswith("brightness"))
    assert line.split()[1:6] == ["0.4", "0.432", "0", "1", "1"]
    from pyarrow import parquet

    stored = parquet.read_table(tmp_path / "scores" / "scores.parquet").to_pylist()
    assert stored[1]["brightness"] == pytest.approx(0.2) and stored[1]["prompt"] == "a cat"


@pytest.mark.parametrize("out", ["scores", "other/place", "."])
@pytest.mark.parametrize("where", ["captions", "metadata", "names"])
def test_the_sheets_of_earlier_calls_are_no_samples(out, where, tmp_path, capsys):
    """Wherever an earlier call wrote them below the folder: they are not counted, no prompt is
    asked of them, and a page of votes does not show them."""
    for i in range(2):
        save(tmp_path / f"cat_{i}.png", 51 * i, parameters=f"a cat {i}")
        (tmp_path / f"cat_{i}.txt").write_text(f"a cat {i}")
    words = ("score", tmp_path, "--rewards", "brightness", "--prompts-from", where)
    assert runs.flowrl(*words, "--out", tmp_path / out) == 0
    said = capsys.readouterr().out
    assert (tmp_path / out / "sheet_brightness.png").is_file()
    assert runs.flowrl(*words, "--out", tmp_path / "last") == 0
    again = capsys.readouterr().out
    assert again.splitlines()[0] == said.splitlines()[0], "the same files and prompts"
    assert [row["file"] for row in table(tmp_path / "last")] == ["cat_0.png", "cat_1.png"]
    assert len(find_items(tmp_path, None, "auto").items) == 2  # what `flowrl vote` shows


def test_a_picture_of_such_a_name_is_a_sample(tmp_path):
    save(tmp_path / "sheet_music.png", 51)
    assert len(find_items(tmp_path, None, "names").items) == 1


def test_what_a_table_leaves_out_is_said(tmp_path, capsys):
    """The number of files alone showed it; the pages of `flowrl sample` are no samples."""
    for name in ("a.png", "b.png", "c.png", "grid.png", "000.spectrogram.png"):
        save(tmp_path / name, 51)
    rows = [f'{{"file": "{name}.png", "prompt": "a cat"}}' for name in "abc"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows[:2]))
    words = ("score", tmp_path, "--rewards", "brightness", "--out")
    assert runs.flowrl(*words, tmp_path.parent / "one") == 0
    said = capsys.readouterr().out
    assert "does not name 1 of the images and videos there, such as c.png: they are left" in said
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    assert runs.flowrl(*words, tmp_path.parent / "two") == 0
    said = capsys.readouterr().out
    assert "3 files, 1 prompts; prompts from" in said and "left out" not in said


def test_what_a_folder_cannot_give_is_said(tmp_path, capsys):
    """A link to nowhere, as a hub's cache leaves behind, is counted; no table holds a name that is
    no text."""
    save(tmp_path / "a.png", 51)
    (tmp_path / "b.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "c.png").symlink_to(tmp_path / "c.png")
    assert runs.flowrl("score", tmp_path, "--rewards", "brightness") == 0
    assert [row["file"] for row in table(tmp_path / "scores")] == ["a.png", "b.png", "c.png"]
    assert "not scored: b.png: no such file" in capsys.readouterr().out
    save(tmp_path / "d\udcff.png", 51)
    assert runs.flowrl("score", tmp_path, "--rewards", "brightness", "--out", tmp_path / "o") == 2
    assert "d\\udcff.png': the name of this file is not UTF-8: rename it" in capsys.readouterr().err


def test_the_sheet_shows_the_best_first(tmp_path):
    for name, shade in (("x", 30), ("y", 250), ("z", 140)):
        save(tmp_path / f"{name}.png", shade, size=(128, 128))
    assert runs.flowrl("score", tmp_path, "--rewards", "brightness") == 0
    sheet = np.asarray(Image.open(tmp_path / "scores" / "sheet_brightness.png"))
    assert [int(sheet[100, x, 0]) for x in (60, 196, 332)] == [250, 140, 30]


def test_a_table_gives_prompts_and_columns_and_missing_files_are_named(tmp_path, capsys):
    save(tmp_path / "1.png", 102)
    rows = [
        {"file_name": "1.png", "text": "a cat", "tags": ["x"]},
        {"file_name": "2.png", "text": "a dog", "tags": []},
    ]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert runs.flowrl("score", tmp_path, "--rewards", "brightness", "--sheet", 0) == 0
    found = table(tmp_path / "scores")
    assert [(r["prompt"], r["tags"]) for r in found] == [("a cat", '["x"]'), ("a dog", "[]")]
    assert found[1]["problem"] == "2.png: no such file"
    assert "prompts from" in capsys.readouterr().out
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "1.png", "words": "x"}\n')
    with pytest.raises(UserError, match="but found file_name, words"):
        find_items(tmp_path, None, "auto")


def test_prompts_from_the_files_themselves(tmp_path):
    graph = {
        "3": {"class_type": "KSampler", "inputs": {"positive": ["6", 0], "negative": ["7", 0]}},
        "6": {"class_type": "Guider", "inputs": {"conditioning": ["8", 0]}},
        "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "ugly"}},
        "8": {"class_type": "CLIPTextEncode", "inputs": {"text": "a fox"}},
    }
    save(tmp_path / "a.png", 1, parameters="a cat\nNegative prompt: bad\nSteps: 20")
    save(tmp_path / "b.png", 1, parameters="two\nlines\nSteps: 20, Sampler: Euler")
    save(tmp_path / "c.png", 1, prompt=json.dumps(graph))
    save(tmp_path / "d.png", 1, prompt=" plain ")
    save(tmp_path / "e.png", 1, Description="a described thing")
    save(tmp_path / "f_g_7.png", 1)
    photo = Image.new("RGB", (4, 4))
    exif = photo.getexif()
    exif[0x010E] = "from a camera"
    photo.save(tmp_path / "h.jpg", exif=exif)
    said = [embedded_prompt(path) for path in sorted(tmp_path.iterdir())]
    assert said == [
        *("a cat", "two\nlines", "a fox", "plain", "a described thing"),
        *(None, "from a camera"),
    ]
    found = find_items(tmp_path, None, "auto")
    assert "the files' metadata (6)" in found.origin and "file names (1)" in found.origin
    with pytest.raises(UserError, match="has no prompt in its metadata"):
        find_items(tmp_path, None, "metadata")
    assert {i.prompt for i in find_items(tmp_path, None, "names").items} >= {"a", "f g", "h"}


def test_prompts_from_names(tmp_path):
    names = {"a_red_circle_0003.png": "a red circle", "two cats (2).png": "two cats"}
    names |= {"dog-12.png": "dog", "a_b.c.png": "a b.c"}
    assert {name: prompt_of_name(tmp_path / name) for name in names} == names
    assert prompt_of_name(tmp_path / "a_green_hill" / "0007.png") == "a green hill"


def test_what_cannot_be_scored_is_one_sentence(tmp_path, capsys):
    assert runs.flowrl("score", tmp_path, "--rewards", "brightness") == 2
    assert "has no images or videos" in capsys.readouterr().err
    save(tmp_path / "x.png", 1)
    assert runs.flowrl("score", tmp_path, "--rewards", "brighness") == 2
    assert "did you mean 'brightness'" in capsys.readouterr().err
    assert runs.flowrl("score", tmp_path, "--rewards", "{name: brightness, sing: 1}") == 2
    assert "no setting 'sing'" in capsys.readouterr().err
    assert runs.flowrl("score", tmp_path / "none", "--rewards", "brightness") == 2
    assert "no such folder" in capsys.readouterr().err


def test_specifications():
    given = parse_specs(["shapes,brightness", "{name: shapes, iou: 0.85}"], "here")
    assert list(given) == ["shapes", "brightness", "shapes(iou=0.85)"]
    assert given["shapes(iou=0.85)"].settings == {"iou": 0.85}
    with pytest.raises(UserError, match=r"here: .*given twice"):
        parse_specs(["jpeg,jpeg,jpeg"], "here")
    with pytest.raises(UserError, match=r"here: .*not valid YAML"):
        parse_specs(["{name: shapes"], "here")


def items(groups: list[int]) -> list[Item]:
    return [Item(Source(f"{i}.png"), f"p{g}", g, {}) for i, g in enumerate(groups)]


def test_chunks_never_part_a_group():
    groups = [0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 3]
    parts = list(chunks(items(groups), range(len(groups)), 4))
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9, 10]]
    assert list(chunks(items(groups), [0, 2, 5, 6], 100)) == [[0, 2, 5, 6]]


def test_scores_are_those_of_one_call_whatever_the_chunk_and_kinds_are_parted(tmp_path):
    for i in range(7):
        save(tmp_path / f"{i}.png", 20 * i)
    still = Image.new("RGB", (6, 4), "white")
    still.save(tmp_path / "7.gif", save_all=True, append_images=[Image.new("RGB", (6, 4))])
    found = find_items(tmp_path, None, "names").items
    seen: list[set] = []

    def reward(samples: Samples) -> torch.Tensor:
        seen.append({m.ndim for m in samples.media})
        return torch.stack([m.mean() for m in samples.media]).float()

    by_chunk = [scores("r", reward, Gallery(found), range(8), size)[0] for size in (1, 3, 100)]
    assert all(np.array_equal(by_chunk[0], values) for values in by_chunk)
    assert by_chunk[0].tolist() == pytest.approx([20 * i / 255 for i in range(7)] + [0.5])
    assert all(len(kinds) == 1 for kinds in seen)


def test_what_a_reward_refuses_is_said_in_its_name(tmp_path):
    save(tmp_path / "x.png", 1)

    def reward(samples: Samples) -> torch.Tensor:
        raise ValueError("no videos, please")

    with pytest.raises(UserError, match="the reward r raised ValueError: no videos, please"):
        scores("r", reward, Gallery(find_items(tmp_path, None, "names").items), [0], 1)


def test_the_first_of_several_calls_is_not_timed():
    clock = Clock(calls=[(10, 100.0), (10, 1.0), (10, 3.0)])
    assert clock.cost.seconds == pytest.approx(0.2) and clock.cost.calls == 20
    assert Clock(calls=[(10, 1.0)]).cost.seconds == pytest.approx(0.1)


def test_the_table_has_milliseconds_and_megabytes_of_each_sample():
    column = np.array([1.0, np.nan, 3.0])
    costs = {"a": Cost(0.0123, 2, 4.56), "b": Cost(2.0, 2, None)}
    head, *lines = summary({"a": column, "b": column}, costs).strip().splitlines()
    assert head.endswith("unscored  ms per sample  MB per sample")
    assert [line.split()[5:] for line in lines] == [["1", "12.3", "4.6"], ["1", "2000.0", "-"]]


def test_a_sheet_keeps_both_ends_and_some_between():
    assert sheet_ranks(5, 9) == [0, 1, 2, 3, 4]
    at = sheet_ranks(1000, 96)
    assert len(at) == len(set(at)) == 96 and at[:32] == list(range(32))
    assert at[-32:] == list(range(968, 1000)) and all(np.diff(at) > 0)


def test_cells_that_a_spreadsheet_takes_for_formulas_are_text(tmp_path):
    save(tmp_path / "=cmd.png", 51)
    rows = [{"file_name": "=cmd.png", "text": "=1+1", "note": "@SUM(A1)", "plain": "a = b"}]
    (tmp_path / "metadata.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert runs.flowrl("score", tmp_path, "--rewards", "brightness") == 0
    (row,) = table(tmp_path / "scores")
    assert [cell for cell in row.values() if cell[:1] in ("=", "@", "+", "-")] == []
    assert "'=cmd.png" in row.values() and "'@SUM(A1)" in row.values() and row["plain"] == "a = b"
    assert float(row["brightness"]) == pytest.approx(0.2, abs=1e-6)


def film(path, frames: int = 3) -> None:
    stills = [Image.new("RGB", (6, 4), (40 * i,) * 3) for i in range(frames)]
    stills[0].save(path, save_all=True, append_images=stills[1:])


def test_a_file_of_another_kind_is_unscored_by_those_that_refuse_it(tmp_path, capsys):
    """One animation among images ends nothing, and one too short for a reward of motion neither."""
    save(tmp_path / "a.png", 51)
    film(tmp_path / "b.gif"), film(tmp_path / "c.gif", 2)
    names = "brightness,jpeg,smoothness"
    assert runs.flowrl("score", tmp_path, "--rewards", names, "--chunk", 100) == 0
    said = capsys.readouterr().out
    rows = {row["file"]: row for row in table(tmp_path / "scores")}
    scored = {name: [bool(row[r]) for r in names.split(",")] for name, row in rows.items()}
    assert scored == {
        "a.png": [True, True, False], "b.gif": [True, False, True], "c.gif": [True, False, False]
    }  # fmt: skip
    assert "not scored by jpeg: b.gif and 1 others: the reward 'jpeg' scores images" in said
    assert "needs at least 3 frames, but a video has 2" in rows["c.gif"]["problem"]
    assert "scores videos; it was given images" in rows["a.png"]["problem"]
    (tmp_path / "a.png").unlink()
    assert runs.flowrl("score", tmp_path, "--rewards", "jpeg") == 2
    assert "reward 'jpeg': the reward 'jpeg' scores images" in capsys.readouterr().err


def test_files_to_which_a_reward_does_not_apply_are_not_unscored(tmp_path, capsys):
    for name in ("a.png", "b.png", "c.png"):
        save(tmp_path / name, 51)
    code = "def own(samples):\n    return [None, float('nan'), 0.5]\n"
    (tmp_path / "own.py").write_text(code)
    assert runs.flowrl("score", tmp_path, "--rewards", f"{tmp_path / 'own.py'}:own") == 0
    said = capsys.readouterr().out
    assert "own does not apply to a.png: it returned None" in said
    (line,) = [line for line in said.splitlines() if line.split()[:2] == ["own", "0.5"]]
    assert line.split()[5] == "1", "unscored"


def test_an_error_of_one_reward_keeps_the_scores_of_the_others(tmp_path, capsys):
    save(tmp_path / "a.png", 51)
    code = "def wrong(samples):\n    raise ValueError('no weights today')\n"
    (tmp_path / "own.py").write_text(code)
    own = f"{tmp_path / 'own.py'}:wrong"
    assert runs.flowrl("score", tmp_path, "--rewards", f"brightness,{own}") == 2
    said = capsys.readouterr().err
    assert "no weights today" in said and "the scores of brightness are in" in said
    assert float(table(tmp_path / "scores")[0]["brightness"]) == pytest.approx(0.2)


def test_captions_beside_the_files(tmp_path):
    for name in ("IMG_1.png", "IMG_2.jpg", "IMG_3.png", "IMG_4.png", "a_dog.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    (tmp_path / "IMG_1.txt").write_text("a red fox,\r\nin snow\n", encoding="utf-8-sig")
    (tmp_path / "IMG_2.caption").write_text("a cat")
    (tmp_path / "IMG_3.txt").write_text("0 0.5 0.5 0.1 0.1\n")  # a detector's boxes
    (tmp_path / "IMG_4.txt").write_text("a hat\nNegative prompt: blur\nSteps: 20")
    found = find_items(tmp_path, None, "auto")
    prompts = {item.source.name: item.prompt for item in found.items}
    assert prompts == {
        "IMG_1.png": "a red fox, in snow", "IMG_2.jpg": "a cat", "IMG_3.png": "IMG",
        "IMG_4.png": "a hat", "a_dog.png": "a dog",
    }  # fmt: skip
    assert found.origin == "prompts from captions beside the files (3), file names (2)"
    names = {item.prompt for item in find_items(tmp_path, None, "names").items}
    assert names == {"IMG", "a dog"}
    with pytest.raises(UserError, match=r"a_dog.png has no caption beside it, such as a_dog.txt"):
        (tmp_path / "IMG_3.txt").write_text("a tree")
        find_items(tmp_path, None, "captions")
    (tmp_path / "IMG_1.txt").write_bytes("one\rtwo\nthe painter\x92s house".encode("latin-1"))
    with pytest.raises(UserError, match=r"IMG_1.txt cannot be read: line 3 is not UTF-8; save"):
        find_items(tmp_path, None, "auto")


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_tables_name_the_line_that_is_not_utf8_and_keep_unusual_letters(tmp_path, form):
    save(tmp_path / "1.png", 102)
    unusual = "a fox\u2028on\u0085white\x0b"
    row = json.dumps({"file": "1.png", "prompt": unusual}, ensure_ascii=False)
    lines = {"jsonl": row, "csv": f'file,prompt\r\n1.png,"{unusual}"'}[form]
    (tmp_path / f"prompts.{form}").write_bytes(lines.encode() + b"\r\n")
    (item,) = find_items(tmp_path, None, "auto").items
    assert item.prompt == unusual
    (tmp_path / f"prompts.{form}").write_bytes(lines.encode() + b"\r\n1.png,\x92\r\n")
    place = lines.count("\r\n") + 2
    with pytest.raises(UserError, match=f"line {place} is not UTF-8; save the file as UTF-8"):
        find_items(tmp_path, None, "auto")


def test_a_function_of_python_is_a_column_beside_named_rewards(tmp_path):
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")

    def redness(samples):
        return samples.media[:, 0].mean((1, 2)) - samples.media[:, 2].mean((1, 2))

    table = flowrl.score(tmp_path, [redness, "brightness"], out=tmp_path / "out") / "scores.csv"
    (row,) = csv.DictReader(table.open())
    assert float(row["redness"]) == pytest.approx(1.0) and 0 < float(row["brightness"]) < 1


@pytest.mark.parametrize("name", ["../secret.png", "/etc/hostname", "0/../../secret.png"])
def test_a_table_that_the_folder_brings_along_names_files_inside_it_alone(name, tmp_path):
    folder = tmp_path / "images"
    (folder / "0").mkdir(parents=True)
    for file in (folder / "a.png", tmp_path / "secret.png"):
        save(file, 99)
    rows = [{"file": "a.png", "prompt": "x"}, {"file": name, "prompt": "y"}]
    table = folder / "prompts.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("score", folder, "--rewards", "brightness", "--sheet", 0)
    advice(
        "{} names {}, which is outside the folder that brought the table along: remove that row, "
        "or name the table yourself: --prompts {}",
        lambda: runs.ended(*words),
        lambda: runs.ended(*words, "--prompts", table),
    )

    def with_rows(*kept):
        table.write_text("".join(json.dumps(row) + "\n" for row in kept))
        runs.ended(*words, "--out", tmp_path / "scores")

    advice(
        "remove that row, or name the table yourself",
        lambda: with_rows(*rows),
        lambda: with_rows(rows[0]),
    )
    with_rows({"file": "0/../a.png", "prompt": "x"})  # inside


def test_a_caption_that_leads_out_of_the_folder_is_not_read(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    save(folder / "a.png", 99)
    (tmp_path / "secret").write_text("a secret")
    (folder / "words").write_text("a red ball")
    caption = folder / "a.txt"
    caption.symlink_to(tmp_path / "secret")
    words = ("score", folder, "--rewards", "brightness", "--sheet", 0, "--out", tmp_path / "out")

    def own_file():
        caption.unlink()
        caption.write_text("a blue ball")
        runs.ended(*words[:-1], tmp_path / "own")

    for follow in (lambda: runs.ended(*words, "--prompts-from", "names"), own_file):
        advice(
            "{} leads out of {}: put the caption's own file in the place of the link, or use "
            "--prompts-from names",
            lambda: runs.ended(*words[:-1], tmp_path / "refused"),
            follow,
        )
        assert not (tmp_path / "refused").exists()
    assert "a blue ball" in (tmp_path / "own" / "scores.csv").read_text()
    caption.unlink()
    caption.symlink_to("words")
    assert runs.flowrl(*words[:-1], tmp_path / "other") == 0
    assert "a red ball" in (tmp_path / "other" / "scores.csv").read_text()


@pytest.mark.parametrize("where", ["captions", "metadata", "names"])
def test_a_table_that_would_not_be_read_is_refused(where, tmp_path):
    """It was left out without a word."""
    folder, table = tmp_path / "images", tmp_path / "t.jsonl"
    folder.mkdir()
    save(folder / "a.png", 99)
    table.write_text(json.dumps({"file": "a.png", "prompt": "x"}))
    for kept in ((table, "auto"), (None, "names")):
        advice(
            "--prompts names the table {}, and --prompts-from {} reads none: leave one of them out",
            lambda: find_items(folder, table, where),
            lambda options=kept: find_items(folder, *options),
        )
