import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.errors import UserError
from flowrl.evaluation.measure import Gallery
from flowrl.evaluation.preferences import LAYOUTS, ReadOptions, load_preferences, preference_label
from flowrl.evaluation.sources import Source, read_media
from flowrl.evaluation.tables import rows_of
from flowrl.prompts import PromptSet
from rewards.perception.moving import spaced
from tests.support import runs

ANY = ReadOptions()


def picture(shade: int, size: int = 4) -> bytes:
    store = io.BytesIO()
    Image.new("RGB", (size, size), (shade, shade, shade)).save(store, "PNG")
    return store.getvalue()


def write(folder: Path, name: str, rows: list[dict]) -> Path:
    path = folder / name
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), path)
    return path


def told(preferences) -> list[tuple[str, str, float]]:
    """(a, b, label) of each pair, by the names of its samples."""
    names = [item.source.name for item in preferences.items]
    triples = zip(preferences.a, preferences.b, preferences.label, strict=True)
    return [(names[a], names[b], float(label)) for a, b, label in triples]


def test_plain_rows_are_read_with_words_and_numbers(tmp_path):
    labels = ["a", "b", "tie", 1, 0, 0.5, "0.25", "A"]
    rows = [
        {"prompt": f"p{i}", "a": f"{i}a.png", "b": f"{i}b.png", "label": label, "category": "x"}
        for i, label in enumerate(labels)
    ]
    found = load_preferences(write(tmp_path, "own.jsonl", rows), ANY)
    assert found.layout == "plain" and found.clusters == 8 and found.rank is None
    assert found.label.tolist() == [1, 0, 0.5, 1, 0, 0.5, 0.25, 1]
    assert told(found)[0] == ("0a.png", "0b.png", 1.0)
    assert found.category == ("x",) * 8


def test_a_sample_of_several_pairs_is_one_sample_and_groups_are_contiguous(tmp_path):
    rows = [
        {"prompt": "p", "a": "1.png", "b": "2.png", "label": "a"},
        {"prompt": "q", "a": "1.png", "b": "3.png", "label": "b"},
        {"prompt": "p", "a": "2.png", "b": "4.png", "label": "a"},
    ]
    found = load_preferences(write(tmp_path, "own.jsonl", rows), ANY)
    assert [item.source.name for item in found.items] == [
        "1.png",
        "2.png",
        "4.png",
        "1.png",
        "3.png",
    ]
    assert [item.group for item in found.items] == [0, 0, 0, 1, 1]
    assert found.cluster.tolist() == [0, 1, 0]
    assert told(found) == [("1.png", "2.png", 1), ("1.png", "3.png", 0), ("2.png", "4.png", 1)]


def test_pick_a_pic_has_bytes_and_rows_without_a_label(tmp_path, capsys):
    rows = [
        {"caption": "c", "jpg_0": picture(9), "jpg_1": picture(200), "label_0": 0.0, "label_1": 1.0}
        | {"has_label": label}
        for label in (True, False)
    ]
    found = load_preferences(write(tmp_path, "pick.parquet", rows), ANY)
    assert found.layout == "pickapic" and found.label.tolist() == [0.0] and found.unlabelled == 1
    media = Gallery(found.items).samples([0, 1]).media
    assert media.mean((1, 2, 3)).mul(255).round().tolist() == [9.0, 200.0]
    file = tmp_path / "pick.parquet"
    assert PromptSet.read(str(file), "prompt", "here").texts == ("c", "c")
    words = ("--rewards", "brightness", "--robust", "0", "--out", tmp_path / "out")
    assert runs.flowrl("evaluate-rewards", file, *words) == 0
    said = capsys.readouterr().out
    assert "2 samples, 1 pairs, 1 rows without a judgement left out" in said


def test_rankings_give_all_pairs_the_best_first_and_equal_ranks_are_ties(tmp_path):
    row = {"id": "1", "prompt": "p", "generations": ["x", "y", "z"], "ranking": [2, 1, 2]}
    found = load_preferences(write(tmp_path, "test.json", [row, row | {"id": "2"}]), ANY)
    assert found.layout == "imagereward" and found.clusters == 1
    assert told(found)[:3] == [("x", "y", 0.0), ("x", "z", 0.5), ("y", "z", 1.0)]
    assert [rows.tolist() for rows in found.groups] == [[0, 1, 2], [3, 4, 5]]
    assert found.rank.tolist() == [2, 1, 2, 2, 1, 2]
    same = {"prompt": "p", "image_path": ["x", "y"], "rank": [0, 1]}
    hpd = load_preferences(write(tmp_path, "hpd.json", [same]), ANY)
    assert hpd.layout == "hpdv2" and told(hpd) == [("x", "y", 1.0)]


def test_the_other_layouts(tmp_path):
    train = {"prompt": "p", "file_path": ["x", "y"], "human_preference": [0, 1]}
    assert told(load_preferences(write(tmp_path, "train.json", [train]), ANY)) == [("x", "y", 0.0)]
    sides = {"prompt": "p", "left_model": "m", "right_model": "n"}
    votes = {"leftvote": 1.0, "rightvote": 0.0, "tievote": 0.5, "bothbad_vote": 0.5}
    rows = [
        sides | {"left_output_image": "l", "right_output_image": "r", "vote_type": vote}
        for vote in votes
    ]
    assert load_preferences(write(tmp_path, "genai.jsonl", rows), ANY).label.tolist() == [
        *votes.values()
    ]
    rows = [sides | {"left_video": "l.mp4", "right_video": "r.mp4", "vote_type": "leftvote"}]
    assert told(load_preferences(write(tmp_path, "video.jsonl", rows), ANY)) == [
        ("l.mp4", "r.mp4", 1.0)
    ]
    edit = {"instruct_prompt": "make it red", "left_output_image": "l", "right_output_image": "r"}
    edited = load_preferences(
        write(tmp_path, "edit.jsonl", [edit | {"vote_type": "rightvote"}]), ANY
    )
    assert edited.items[0].prompt == "make it red" and edited.label.tolist() == [0.0]
    row = {"path_A": "a.mp4", "path_B": "b.mp4", "prompt": "p", "VQ": "A", "MQ": "B", "TA": "same"}
    path = write(tmp_path, "videogen.csv", [row | {"Overall": "B"}])
    assert load_preferences(path, ANY).label.tolist() == [0.0]
    assert load_preferences(path, ReadOptions(dimension="VQ")).label.tolist() == [1.0]
    assert load_preferences(path, ReadOptions(dimension="TA")).label.tolist() == [0.5]


def test_what_is_wrong_is_named_with_its_row(tmp_path):
    good = {"prompt": "p", "a": "x", "b": "y", "label": "a"}
    for bad, said in (
        ({"label": "left-ish"}, "line 2: the label is 'left-ish'"),
        ({"label": 2}, "a number in 0..1"),
        ({"prompt": " "}, "line 2: the prompt is empty"),
        ({"a": 5}, "line 2, sample 1: 5 is neither a path"),
    ):
        path = write(tmp_path, "bad.jsonl", [good, good | bad])
        with pytest.raises(UserError, match=said):
            load_preferences(path, ANY)
    with pytest.raises(UserError, match="match no known layout"):
        load_preferences(write(tmp_path, "odd.jsonl", [{"prompt": "p", "chosen": "x"}]), ANY)
    with pytest.raises(UserError, match="layout hpdv2 needs image_path, rank"):
        load_preferences(path, ReadOptions(layout="hpdv2"))
    with pytest.raises(UserError, match="'pick' is not known"):
        load_preferences(path, ReadOptions(layout="pick"))
    with pytest.raises(UserError, match="needs Harmony"):
        load_preferences(path, ReadOptions(dimension="Harmony"))
    with pytest.raises(UserError, match="two lists of equal length"):
        short = {"prompt": "p", "generations": ["x", "y"], "ranking": [1]}
        load_preferences(write(tmp_path, "short.json", [short]), ANY)
    with pytest.raises(UserError, match="no such file"):
        load_preferences(tmp_path / "none.jsonl", ANY)
    (tmp_path / "torn.jsonl").write_text('{"prompt": "p"}\n{"prompt": ')
    with pytest.raises(UserError, match=r"torn.jsonl cannot be read: line 2"):
        load_preferences(tmp_path / "torn.jsonl", ANY)


def test_every_layout_is_told_from_the_others_by_its_columns():
    for name, layout in LAYOUTS.items():
        if name == "texts":
            continue  # has the columns of `chosen`, and is told by its cells
        fitting = [o for o, it in LAYOUTS.items() if set(it.columns) <= set(layout.columns)]
        fitting.remove("texts") if "texts" in fitting else None
        assert fitting[0] == name, "the first that fits is taken, so the one with more stands first"


def test_a_part_of_the_prompts_is_drawn_by_the_seed(tmp_path):
    rows = [{"prompt": f"p{i}", "a": "x", "b": "y", "label": "a"} for i in range(20)]
    path = write(tmp_path, "own.jsonl", rows)
    some = [load_preferences(path, ReadOptions(prompts=5, seed=s)) for s in (0, 0, 1)]
    prompts = [{item.prompt for item in p.items} for p in some]
    assert len(prompts[0]) == 5 and prompts[0] == prompts[1] != prompts[2]


def test_tables_keep_odd_line_ends_inside_cells(tmp_path):
    prompt = 'one\u2028two, "three"\nfour'
    path = write(tmp_path, "odd.jsonl", [{"prompt": prompt}])
    assert rows_of(path)[0] == [{"prompt": prompt}]
    (tmp_path / "odd.csv").write_text('prompt,n\n"one,\n""two""",3\n')
    assert rows_of(tmp_path / "odd.csv")[0] == [{"prompt": 'one,\n"two"', "n": "3"}]
    parts = tmp_path / "parts"
    parts.mkdir()
    for i in (1, 0):
        write(parts, f"{i}.parquet", [{"prompt": str(i)}])
    assert [row["prompt"] for row in rows_of(parts)[0]] == ["0", "1"]
    with pytest.raises(UserError, match="several tables"):
        rows_of(tmp_path)


def test_pieces_bytes_and_animations_are_read_and_bad_files_name_themselves(tmp_path):
    sheet = Image.new("RGB", (8, 4), "white")
    sheet.paste((255, 0, 0), (4, 0, 8, 4))
    sheet.save(tmp_path / "sheet.png")
    film = [Image.new("RGB", (8, 4), (shade,) * 3) for shade in (250, 200, 150, 100, 0)]
    film[0].save(tmp_path / "film.gif", save_all=True, append_images=film[1:])
    (tmp_path / "torn.png").write_bytes(picture(3)[:40])
    (tmp_path / "empty.png").write_bytes(b"")
    cells = [
        "sheet.png#xywh=4,0,4,4",
        {"bytes": picture(51), "path": None},
        {"bytes": None, "path": "film.gif"},
        "torn.png",
        "empty.png",
        "none.png",
        "sheet.png#xywh=6,0,4,4",
    ]
    found = read_media(
        [Source.of(cell, tmp_path, f"row {i}") for i, cell in enumerate(cells)], frames=3
    )
    red, gray, film, *rest = found.media
    assert torch.equal(red, torch.tensor([1.0, 0, 0]).view(3, 1, 1).expand(3, 4, 4))
    assert gray.shape == (3, 4, 4) and float(gray.mean()) == pytest.approx(0.2)
    assert film.shape == (3, 3, 4, 8) and [round(255 * float(f.mean())) for f in film] == [
        250,
        150,
        0,
    ]
    assert rest == [None] * 4
    assert found.broken["empty.png"] == "empty.png: an empty file"
    assert found.broken["none.png"] == "none.png: no such file"
    assert "torn.png: not readable" in found.broken["torn.png"]
    assert "outside the image" in found.broken["sheet.png#xywh=6,0,4,4"]


@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 100])
@pytest.mark.parametrize("most", [1, 2, 16])
def test_frames_are_evenly_spaced_with_both_ends(count, most):
    at = sorted(spaced(count, most))
    assert len(at) == min(count, most)
    if len(at) > 1:
        steps = np.diff(at)
        assert at[0] == 0 and at[-1] == count - 1 and steps.max() - steps.min() <= 1


def test_videos_are_read_where_pyav_is(tmp_path):
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "film.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for k in range(20):
            frame = av.VideoFrame.from_ndarray(
                np.full((32, 32, 3), 10 * k, np.uint8), format="rgb24"
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    (tmp_path / "torn.mp4").write_bytes(b"not a film")
    sources = [Source.of(name, tmp_path, "") for name in ("film.mp4", "torn.mp4")]
    found = read_media(sources, frames=5)
    shades = found.media[0].mean((1, 2, 3)).mul(255)
    assert found.media[0].shape == (5, 3, 32, 32)
    assert shades.tolist() == pytest.approx([0, 50, 100, 140, 190], abs=6)
    assert found.media[1] is None and "torn.mp4" in found.broken


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("cell", ["x", 1, ["a", "b"], {"a": 1}, None])
def test_a_line_may_lack_every_column_and_a_cell_be_of_any_kind(tmp_path, layout, cell):
    form = LAYOUTS[layout]
    names = [*form.columns, *([form.dimension] if form.dimension else []), "prompt"]
    first = dict.fromkeys(names, cell)
    for second in ({"other": 1}, *({k: cell for k in names if k != name} for name in names)):
        path = write(tmp_path, "v.jsonl", [first, second])
        try:
            load_preferences(path, ReadOptions(layout=layout))
        except UserError as error:
            assert str(error).strip() and "\n" not in str(error)


def test_labels():
    assert [preference_label(x, "here") for x in ("Left", "same", 0.75, "1")] == [
        1.0,
        0.5,
        0.75,
        1.0,
    ]
    for bad in (None, -1, float("nan"), "c"):
        with pytest.raises(UserError, match="here: the label"):
            preference_label(bad, "here")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prompt,prompt\na,b\n", "two columns have the same name"),
        ("prompt,n\na,1\nb,2,3\n", "line 3: more cells than columns"),
    ],
)
def test_a_table_whose_cells_have_no_column_of_their_own_is_refused(tmp_path, text, reason):
    (tmp_path / "t.CSV").write_text(text)
    with pytest.raises(UserError, match=reason):
        rows_of(tmp_path / "t.CSV")
    (tmp_path / "t.TSV").write_text("prompt\tn\t\na\t1\t\n")
    assert rows_of(tmp_path / "t.TSV")[0] == [{"prompt": "a", "n": "1", "": ""}]


def test_plain_pairs_may_be_texts(tmp_path):
    rows = [
        {"prompt": "say hi", "a_text": "hello there", "b_text": "no.png", "label": "a"},
        {"prompt": "say hi", "a_text": "x", "b_text": "y", "label": 0.5},
    ]
    table = tmp_path / "texts.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_preferences(table, ReadOptions())
    assert found.layout == "plain_texts" and found.texts
    assert [item.source.text for item in found.items] == ["hello there", "no.png", "x", "y"]
    assert found.label.tolist() == [1.0, 0.5]
    assert [row["label"] for row in found.rows] == ["a", 0.5]
