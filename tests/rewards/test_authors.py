"""Rewards on files of the authors' own classes, against the scores of their code.

The arrays are written by `scripts/authors/*.py` in the authors' environments. A file is made again
from its layout, since every weight is drawn by its name.
"""

import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flowrl.evaluation.suite_layouts import dpg_rows
from flowrl.paths import PROJECT
from rewards import Samples, load
from rewards.catalogue.editreward import FOLLOWING_TEXT, QUALITY_TEXT
from rewards.catalogue.editscore import FOLLOWING_QUESTION, QUALITY_QUESTION
from rewards.catalogue.geneval import GenEval
from rewards.catalogue.hpsv3 import INSTRUCTION
from rewards.catalogue.videoalign import VIDEO_INSTRUCTION
from rewards.checks.proofs import PROOFS
from rewards.judging.tally import take_tallies
from rewards.load import names
from rewards.perception.detect import Detection
from rewards.perception.scalar_heads import INSTRUCTION_TAIL
from scripts.authors.common import (
    ARRAYS,
    PROMPTS,
    bert_words,
    clip_base,
    png_files,
    qwen_base,
    state_of,
)
from tests.support.servers import ChatServer

CPU = {"device": "cpu", "dtype": "float32"}


def script(name: str, monkeypatch) -> ModuleType:
    """A script of the authors' folder, which imports its neighbour by its bare name."""
    folder = PROJECT / "scripts" / "authors"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location(f"authors_{name}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def arrays(name: str) -> dict:
    with np.load(ARRAYS / f"{name}.npz") as file:
        return dict(file)


def given(media: np.ndarray, prompts=PROMPTS, meta=()) -> Samples:
    """8-bit media [n ... h w 3] as samples."""
    values = torch.from_numpy(media).movedim(-1, -3).float() / 255
    return Samples(values, list(prompts), torch.arange(len(prompts)), meta)


def short(monkeypatch, published, text: str, theirs: str) -> None:
    """The authors' text is the known one; the scores are those of a short text in its place."""
    assert theirs == f"{published.length} {published.digest}"
    monkeypatch.setitem(published.__dict__, "length", len(text))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    monkeypatch.setitem(published.__dict__, "digest", digest)


def equal(score, wanted: np.ndarray, room: float) -> None:
    """Within `room` of the authors' scores, which spread far more than that."""
    assert wanted.std() > 100 * room
    np.testing.assert_allclose(score.double().numpy(), wanted, rtol=0, atol=room)


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [1, 3])
def test_videoalign_scores_as_the_authors(outputs, tmp_path, monkeypatch):
    theirs, tool = arrays(f"videoalign_{outputs}"), script("videoalign", monkeypatch)
    qwen_base(tmp_path / "base", "qwen2_vl")
    (tmp_path / "checkpoint-10").mkdir()
    state = state_of(theirs["layout"])
    torch.save(state, tmp_path / "checkpoint-10" / "model.pth")
    (tmp_path / "model_config.json").write_text(str(theirs["config"]))
    (tmp_path / "text.txt").write_text(tool.INSTRUCTION)
    short(monkeypatch, VIDEO_INSTRUCTION, tool.INSTRUCTION, str(theirs["text"]))
    settings = {"checkpoint": str(tmp_path), "base": str(tmp_path / "base")}
    settings |= {"instruction": str(tmp_path / "text.txt"), "video_fps": tool.FPS, **CPU}
    parts = ("visual_quality", "motion_quality", "text_alignment", "overall")
    for column, part in enumerate(parts):
        reward = load("videoalign", kind=part, **settings)
        samples = given(tool.videos("even"))
        equal(reward(samples), theirs["even"][:, column], 1e-4)
    resized = load("videoalign", **settings)(given(tool.videos("resized")))
    equal(resized, theirs["resized"][:, 3], 5e-3)


def test_a_base_on_the_authors_machine_is_the_published_one(tmp_path, monkeypatch):
    theirs, tool = arrays("videoalign_1"), script("videoalign", monkeypatch)
    config = json.loads(str(theirs["config"]))
    config["model_config"]["model_name_or_path"] = "/m2v_intern/someone/Qwen2-VL-2B-Instruct"
    qwen_base(tmp_path / "base", "qwen2_vl")
    (tmp_path / "checkpoint-10").mkdir()
    torch.save(state_of(theirs["layout"]), tmp_path / "checkpoint-10" / "model.pth")
    (tmp_path / "model_config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text(tool.INSTRUCTION)
    short(monkeypatch, VIDEO_INSTRUCTION, tool.INSTRUCTION, str(theirs["text"]))
    asked = []

    def base_of(name: str) -> str:
        asked.append(name)
        return str(tmp_path / "base")

    monkeypatch.setattr("rewards.catalogue.videoalign.model_path", base_of)
    own = {"checkpoint": str(tmp_path), "instruction": str(tmp_path / "text.txt"), **CPU}
    load("videoalign", video_fps=8, **own)
    assert asked == ["Qwen/Qwen2-VL-2B-Instruct"]


def test_hpsv3_scores_as_the_authors(tmp_path, monkeypatch):
    theirs, tool = arrays("hpsv3"), script("hpsv3", monkeypatch)
    base = qwen_base(tmp_path / "base", "qwen2_vl")
    save_file(state_of(theirs["layout"]), tmp_path / "HPSv3.safetensors")
    (tmp_path / "text.txt").write_text(tool.INSTRUCTION + INSTRUCTION_TAIL)
    short(monkeypatch, INSTRUCTION, tool.INSTRUCTION + INSTRUCTION_TAIL, str(theirs["text"]))
    settings = {"checkpoint": str(tmp_path / "HPSv3.safetensors"), "base": str(base)}
    reward = load("hpsv3", instruction=str(tmp_path / "text.txt"), **settings, **CPU)
    for kind in tool.SIZES:
        equal(reward(given(tool.images(kind))), theirs[kind], 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen", "mimo"])
def test_editreward_scores_as_the_authors(kind, tmp_path, monkeypatch):
    theirs, tool = arrays(f"editreward_{kind}"), script("editreward", monkeypatch)
    base = qwen_base(tmp_path / "base", "qwen2_5_vl", tool.SYSTEM[kind])
    torch.save(state_of(theirs["layout"]), tmp_path / "model.pth")
    sources, edits = tool.images()
    meta = [{"source": file} for file in png_files(tmp_path, sources)]
    texts = [FOLLOWING_TEXT, QUALITY_TEXT]
    names = ("INSTRUCTION_EDIT_FOLLOWING", "INSTRUCTION_EDIT_QUALITY")
    files = [Path(tmp_path / f"{i}.txt") for i in (0, 1)]
    for text, name, question, file in zip(texts, names, tool.QUESTIONS, files, strict=True):
        short(monkeypatch, text, question, str(theirs[name]))
        file.write_text(question)
    settings = {"checkpoint": str(tmp_path), "base": str(base), **CPU}
    settings |= {"following": str(files[0]), "quality": str(files[1])}
    for pooling in ("mean", "min", "sum"):
        score = load("editreward", kind=pooling, **settings)(given(edits, meta=meta))
        equal(score, theirs[pooling], 5e-6)


def test_mps_scores_as_the_authors(tmp_path, monkeypatch):
    theirs, tool = arrays("mps"), script("mps", monkeypatch)
    base = clip_base(tmp_path / "base", tool.WIDTH, 64, tool.WIDTH, patch=16)
    (tmp_path / "MPS_overall_checkpoint.pth").write_bytes(theirs["pickled"].tobytes())
    settings = {"checkpoint": str(tmp_path / "MPS_overall_checkpoint.pth"), "clip": str(base)}
    reward = load("mps", device="cpu", **settings)
    for kind in tool.SIZES:
        equal(reward(given(tool.images(kind), tool.TEXTS)), theirs[kind], 5e-5)


def test_imagereward_scores_as_the_authors(tmp_path, monkeypatch):
    theirs, tool = arrays("imagereward"), script("imagereward", monkeypatch)
    torch.save(state_of(theirs["layout"]), tmp_path / "ImageReward.pt")
    words = bert_words(tmp_path / "words")
    settings = {"checkpoint": str(tmp_path / "ImageReward.pt"), "tokenizer": str(words)}
    reward = load("imagereward", device="cpu", **settings)
    for kind in tool.SIZES:
        equal(reward(given(tool.images(kind))), theirs[kind], 1e-4)


def clip_folder(folder: Path, layout: np.ndarray, **sizes) -> Path:
    save_file(state_of(layout), clip_base(folder, **sizes) / "model.safetensors")
    return folder


def test_pickscore_scores_as_the_authors(tmp_path, monkeypatch):
    theirs, tool = arrays("pickscore"), script("pickscore", monkeypatch)
    folder = str(clip_folder(tmp_path / "base", theirs["layout"]))
    reward = load("pickscore", model=folder, processor=folder, device="cpu")
    for kind in tool.SIZES:
        equal(reward(given(tool.images(kind))), theirs[kind], 1e-5)


def test_the_aesthetic_head_scores_as_the_authors(tmp_path, monkeypatch):
    theirs, tool = arrays("aesthetic"), script("aesthetic", monkeypatch)
    folder = str(clip_folder(tmp_path / "base", theirs["clip"], embedding=tool.WIDTH))
    torch.save(state_of(theirs["layout"]), tmp_path / "head.pth")
    reward = load("aesthetic", model=folder, head=str(tmp_path / "head.pth"), device="cpu")
    for kind in tool.SIZES:
        equal(reward(given(tool.images(kind))), theirs[kind], 1e-5)


@pytest.mark.slow
def test_clip_flant5_scores_as_the_authors(tmp_path, monkeypatch):
    theirs, tool = arrays("clip_flant5"), script("clip_flant5", monkeypatch)
    tower = clip_folder(tmp_path / "tower", theirs["tower"], **tool.TOWER)
    for name in ("model", "words"):
        (tmp_path / name).mkdir()
    state = state_of(theirs["layout"], tool.drawn_as)
    torch.save(state, tmp_path / "model" / "pytorch_model.bin")
    (tmp_path / "model" / "config.json").write_text(str(theirs["config"]))
    (tmp_path / "words" / "tokenizer.json").write_text(str(theirs["words"]))
    (tmp_path / "words" / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    own = {
        name: str(tmp_path / place) for name, place in (("model", "model"), ("tokenizer", "words"))
    }
    reward = load("clip_flant5", tower=str(tower), **own, **CPU)
    for kind in tool.SIZES:
        equal(reward(given(tool.images(kind), tool.TEXTS)), theirs[kind], 1e-6)


def test_dreamsim_scores_as_the_authors(tmp_path, monkeypatch):
    theirs, tool = arrays("dreamsim"), script("dreamsim", monkeypatch)
    for name, path in tool.PATHS.items():
        state = state_of(theirs[f"{name}_layout"], lambda key, start=name: f"{start}.{key}")
        (tmp_path / path).parent.mkdir(exist_ok=True)
        torch.save(state if name == "dino" else {"state_dict": state}, tmp_path / path)
    adapter = tmp_path / "ensemble_lora"
    adapter.mkdir()
    save_file(state_of(theirs["adapter"]), adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(str(theirs["adapter_config"]))
    reward, scores = load("dreamsim", folder=str(tmp_path), device="cpu"), []
    for shown, reference in tool.images():
        (file,) = png_files(tmp_path, [reference])
        scores.append(reward(given(shown[None], ["a"], [{"reference": file}])))
    equal(1 - torch.cat(scores), theirs["distances"], 2e-6)


@dataclass(frozen=True)
class Found:
    """A detector that has found the drawn boxes."""

    things: tuple[Detection, ...]
    names: frozenset[str] = frozenset({"cup", "tie", "dog"})

    def __call__(self, images, least: float) -> list[list[Detection]]:
        return [list(self.things)]


def test_geneval_judges_as_the_authors(monkeypatch):
    wanted, tool = arrays("geneval")["verdicts"], script("geneval", monkeypatch)
    verdicts = []
    for row, found, colours in tool.cases():
        things = tuple(
            Detection(name, float(box[4]), tuple(map(float, box[:4])))
            for name, boxes in found.items()
            for box in boxes
        )
        reward = GenEval(
            Found(things), lambda _, own, name, c=colours: c[name][: len(own)], "official"
        )
        verdicts.append(bool(reward(given(np.zeros((1, 8, 8, 3), np.uint8), ["a"], [row]))))
    assert verdicts == wanted.tolist() and 50 < sum(verdicts) < 350


@pytest.mark.parametrize("protocol", ["evaluation", "training"])
def test_editscore_reckons_as_the_authors(protocol, tmp_path, monkeypatch):
    theirs, tool = arrays("editscore"), script("editscore", monkeypatch)
    files = {}
    for name, published in (("following", FOLLOWING_QUESTION), ("quality", QUALITY_QUESTION)):
        short(monkeypatch, published, f"{name}: <instruction>", str(theirs[name]))
        files[name] = str(tmp_path / f"{name}.txt")
        Path(files[name]).write_text(f"{name}: <instruction>")
    shown = np.arange(tool.SAMPLES, dtype=np.uint8)[:, None, None, None] * 40
    edits = np.broadcast_to(shown, (tool.SAMPLES, 4, 4, 3)).copy()
    (source,) = png_files(tmp_path, edits[:1])

    def answer(text, images) -> str:
        sample, which = round(float(images[-1].mean()) * 255 / 40), int("quality" in text)
        return json.dumps({"reasoning": "r", "score": tool.answers()[sample][which]})

    samples = given(edits, ["make it red"] * tool.SAMPLES, [{"source": source}] * tool.SAMPLES)
    with ChatServer(answer) as server:
        own = {"url": server.url, "model": "tiny", "tries": 1, **files}
        score = load("editscore", protocol=protocol, **own)(samples)
    equal(score, theirs[protocol], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arithmetic", "geometric"])
def test_soft_tifa_reckons_as_the_authors(kind, tmp_path, monkeypatch):
    wanted, tool = arrays("soft_tifa")[kind], script("soft_tifa", monkeypatch)
    tokenizer = str(qwen_base(tmp_path / "base", "qwen2_vl"))

    def answer(text, images) -> dict:
        chances = tool.drawn_scores(round(float(images[0].mean()) * 255 / 6), text[:-1])
        named = chances[0].log_softmax(-1).tolist()
        top = [{"token": reward.tokenizer.decode([i]), "logprob": p} for i, p in enumerate(named)]
        top = [token for token in top if token["token"].isascii()]  # half a letter has no name
        said = {"content": [{**top[0], "top_logprobs": top}]}
        return {"message": {"content": "x"}, "logprobs": said}

    level = np.arange(tool.SAMPLES, dtype=np.uint8)[:, None, None, None] * 6
    shown = np.broadcast_to(level, (tool.SAMPLES, 4, 4, 3)).copy()
    samples = given(shown, ["a"] * tool.SAMPLES, [{"vqa_list": pairs} for pairs in tool.cases()])
    with ChatServer(answer) as server:
        own = {"url": server.url, "model": "tiny", "tries": 1, "tokenizer": tokenizer}
        reward = load("soft_tifa", kind=kind, **own)
        equal(reward(samples), wanted, 1e-6)


def test_vqascore_asks_and_reckons_as_the_authors(monkeypatch):
    wanted, tool = arrays("vqascore")["scores"], script("vqascore", monkeypatch)

    def answer(text, images) -> dict:
        level = round(float(images[0].mean()) * 255 / tool.LEVEL)
        chances = tool.drawn_logits(level, text.removesuffix("\n")).log_softmax(-1).tolist()
        top = [{"token": t, "logprob": p} for t, p in zip(tool.WORDS, chances, strict=True)]
        said = {"content": [{**top[0], "top_logprobs": top}]}
        return {"message": {"content": "x"}, "logprobs": said}

    with ChatServer(answer) as server:
        reward = load("vqascore", url=server.url, model="tiny", tries=1)
        equal(reward(given(tool.images(), tool.PROMPTS)), wanted, 1e-6)


def test_flicker_is_the_authors(monkeypatch):
    wanted, tool = arrays("flicker")["scores"], script("flicker", monkeypatch)
    equal(load("flicker")(given(tool.videos())), wanted, 1e-6)


@pytest.mark.slow
def test_dpg_bench_reckons_as_the_authors(tmp_path, monkeypatch):
    wanted, tool = arrays("dpg_bench"), script("dpg_bench", monkeypatch)
    tool.write(tmp_path / "dpg_bench.csv")
    rows = dpg_rows(tmp_path / "dpg_bench.csv")[1:]

    def answer(text, images) -> str:
        (asked,) = re.findall(r"Is \S+ there\?", text)
        return "yes" if tool.yes(asked) else "no"

    shown = np.zeros((tool.SAMPLES, 4, 4, 3), np.uint8)
    with ChatServer(answer) as server:
        reward = load("dpg_bench", url=server.url, model="tiny", tries=1)
        equal(reward(given(shown, [row["prompt"] for row in rows], rows)), wanted["scores"], 1e-12)
    ((_, counts),) = take_tallies({"dpg": reward})["dpg"]
    found = [counts[kind][0] / counts[kind][1] for kind in tool.KINDS]
    np.testing.assert_allclose(found, wanted["kinds"], rtol=0, atol=1e-12)


def test_other_chat_templates_are_refused(tmp_path, monkeypatch):
    theirs, tool = arrays("hpsv3"), script("hpsv3", monkeypatch)
    base = qwen_base(tmp_path / "base", "qwen2_vl")
    save_file(state_of(theirs["layout"]), tmp_path / "HPSv3.safetensors")
    (tmp_path / "text.txt").write_text(tool.INSTRUCTION + INSTRUCTION_TAIL)
    short(monkeypatch, INSTRUCTION, tool.INSTRUCTION + INSTRUCTION_TAIL, str(theirs["text"]))
    settings = {"checkpoint": str(tmp_path / "HPSv3.safetensors"), "base": str(base), **CPU}
    settings["instruction"] = str(tmp_path / "text.txt")
    own = json.loads((base / "tokenizer_config.json").read_text())
    template = own.pop("chat_template")
    for other, message in (
        (template.replace("part.text ", "part.text | trim "), "does not write an image, a video"),
        (None, "has no chat template"),
    ):
        extra = {} if other is None else {"chat_template": other}
        (base / "tokenizer_config.json").write_text(json.dumps({**own, **extra}))
        (base / "chat_template.json").unlink(missing_ok=True)
        with pytest.raises(ValueError, match=message):
            load("hpsv3", **settings)


def test_the_catalogue_says_what_each_reward_was_compared_with():
    """The page's column is the table's; the scripts of rewards that were run are there."""
    page = (PROJECT / "docs" / "rewards.md").read_text(encoding="utf-8")
    for name, proof in PROOFS.items():
        assert name in names()
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        word = proof.basis if proof.largest is None else f"{proof.basis}, {proof.largest:g}"
        assert row.endswith(f"| {word} |") or name == "ocr" or "VBench" in proof.about, name
        there = [f for f in (PROJECT / "scripts" / "authors").glob("*.py") if f.stem == name]
        assert bool(there) == (proof.basis == "authors' code run"), name
        assert (proof.largest is not None) == (proof.basis == "authors' code run")
