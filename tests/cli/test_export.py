"""`flowrl export`: files that other programs load, a card that the hub's parser reads, uploads."""

import json
import re
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from xml.etree import ElementTree

import huggingface_hub
import pytest
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import HfApi, ModelCard
from markdown_it import MarkdownIt
from peft import get_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file

from flowrl.cli import export
from flowrl.models.diffusers.lora.lora import LORA_FILE
from flowrl.models.diffusers.lora.lora_formats import read_adapter
from flowrl.pages.charts import Chart, Curve, chart_sheet
from flowrl.settings.read import run_from, run_of
from tests.support import runs
from tests.support.advice import advice
from tests.support.hub.cache import cache
from tests.support.runs import flowrl

PROMPT = "a red ball"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished run with an adapter, and its base model."""
    made = tmp_path_factory.mktemp("run")
    base = runs.write_pipeline(made / "base")
    file = runs.write(runs.tree(base, made, runs.FLOW_GRPO, iterations=2), made)
    assert flowrl("train", file, "--folder", made / "out", "--no-cache") == 0
    return made / "out", base


@pytest.fixture(scope="module")
def out(run: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "new"
    assert flowrl("export", run[0], "--weights", "best", "--merged", "--out", folder) == 0
    return folder


def plain(folder: Path) -> Any:
    """The tiny pipeline has no third text encoder, which diffusers wants to be told."""
    return DiffusionPipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)


def sampled(pipe: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    given: dict[str, Any] = {"height": 16, "width": 16, "num_inference_steps": 2}
    draws = torch.Generator().manual_seed(0)
    return pipe(PROMPT, **given, generator=draws, output_type="pt", return_dict=False)[0]


def test_plain_diffusers_loads_the_folder_and_the_merged_model(run, out):
    base = plain(run[1])
    before = sampled(base)
    base.load_lora_weights(out)  # the file is found among those of the other formats
    adapted, merged = sampled(base), sampled(plain(out / "merged"))
    torch.testing.assert_close(adapted, merged, rtol=1e-3, atol=1e-3)
    assert float((adapted - before).abs().max()) > 5e-3
    weights = read_adapter(out / LORA_FILE)
    two = [plain(folder).transformer for folder in (run[1], out / "merged")]
    for name, layer in weights.items():
        old, new = (model.get_submodule(name).weight for model in two)
        torch.testing.assert_close((new - old).double(), layer.change(), rtol=1e-3, atol=1e-6)


def test_the_other_formats_are_beside_it(out):
    """Their weights are compared in tests/models/test_lora_formats.py."""
    assert all("lora_unet_joint_blocks_" in key for key in load_file(out / "kohya.safetensors"))
    comfyui = load_file(out / "comfyui.safetensors")
    assert all(key.startswith("diffusion_model.joint_blocks.") for key in comfyui)


def test_the_hubs_parser_reads_the_card(run, out):
    card = ModelCard.load(out / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == "diffusers" and data["pipeline_tag"] == "text-to-image"
    assert {"flowrl", "lora", "flow_grpo"} <= set(data["tags"])
    assert "base_model" not in data  # a folder is no name of the hub
    for part in ("## Use", "## Inference settings", "## Results", "## Curves", "## Samples",
                 "## Recipe", "## Rewards", "## Prompts"):  # fmt: skip
        assert part in card.text, part
    assert "| steps (`num_inference_steps`) | 3 |" in card.text
    assert "deterministic (ODE)" in card.text and "FlowMatchEulerDiscreteScheduler" in card.text
    assert "| recipe.group | `4` |" in card.text and "| `brightness` | 1.0 |" in card.text
    assert f"- `{PROMPT}`" in card.text and str(run[0]) not in card.text.split("## Prompts")[0]
    assert "](curves.svg)" in card.text and "](samples.png)" in card.text
    assert min(Image.open(out / "samples.png").size) > 100
    drawing = ElementTree.parse(out / "curves.svg").getroot()
    assert drawing.tag.endswith("svg") and float(drawing.attrib["width"]) > 300
    assert "No judge: training raises every reward" in card.text


def test_a_model_without_a_key_map_is_refused_by_name_or_left_out(
    run, capsys, tmp_path, monkeypatch
):
    from flowrl.models.diffusers.lora import lora_keys

    monkeypatch.setattr(lora_keys, "RULES", {"comfyui": {}, "kohya": {}})
    assert flowrl("export", run[0], "--formats", "kohya", "--out", tmp_path / "a") == 2
    said = capsys.readouterr().err
    assert "SD3Transformer2DModel's layers in kohya's tools are not known" in said
    assert not (tmp_path / "a").exists()
    said_way = ("--formats", "diffusers")  # the message names it
    assert " ".join(said_way) in said
    assert flowrl("export", run[0], *said_way, "--out", tmp_path / "a") == 0
    capsys.readouterr()
    assert flowrl("export", run[0], "--out", tmp_path / "b") == 0
    said = capsys.readouterr().out
    assert "not in comfyui's format, since" in said and "not in kohya's format, since" in said
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        LORA_FILE, "README.md", "curves.svg", "samples.png",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--weights", "base"), "the base weights are the original model"),
        (("--weights", "checkpoints/000002"), "is a training checkpoint"),
        (("--formats", "gguf"), "--formats"),
        (("--out", "."), "already has files: choose a new folder"),
        (("--push-to-hub", "a/b/c"), "is not owner/name"),
        (("--push-to-hub", "my-lora"), "'my-lora' is not owner/name, such as me/my-lora"),
        (("--push-to-hub", "me/new"), "no token"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(run, capsys, monkeypatch, words, message):
    monkeypatch.chdir(run[0])
    monkeypatch.setattr(export, "get_token", lambda: None)
    assert flowrl("export", ".", *words) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


class Hub:
    """What `HfApi` is asked for; `error` is raised by the upload."""

    asked: list[tuple[Any, ...]]
    error: Exception | None = None

    def create_repo(self, repository: str, *, private: bool, exist_ok: bool) -> str:
        self.asked.append(("create", repository, private, exist_ok))
        return f"https://huggingface.co/{repository}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        if self.error is not None:
            raise self.error
        names = {path.name for path in Path(folder_path).iterdir()}
        self.asked.append(("upload", repo_id, names, commit_message))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    Hub.asked, Hub.error = [], None
    monkeypatch.setattr(export, "HfApi", Hub)
    monkeypatch.setattr(export, "get_token", lambda: "a token")
    yield Hub


class ConnectError(Exception):
    """As an HTTP library raises it that is no base class of the hub's own errors."""


def test_a_configuration_on_the_hub_names_no_folder_of_this_machine(tmp_path):
    (tmp_path / "unet").mkdir()
    bases = {"adapter_config.json": "/home/me/models/sums-lm", "unet/adapter_config.json": "a/b"}
    for name, base in bases.items():
        (tmp_path / name).write_text(json.dumps({"base_model_name_or_path": base, "r": 4}))
    export.hide_places(tmp_path)
    for name, base in (("adapter_config.json", "sums-lm"), ("unet/adapter_config.json", "a/b")):
        config = json.loads((tmp_path / name).read_text())
        assert config == {"base_model_name_or_path": base, "r": 4}


def test_an_upload_has_all_files_and_its_failure_keeps_them(run, api, capsys, tmp_path):
    words = ("export", run[0], "--formats", "diffusers", "--push-to-hub", "me/new")
    assert flowrl(*words, "--private", "--out", tmp_path / "a") == 0
    (create, sent) = api.asked
    assert create == ("create", "me/new", True, True)
    assert sent[1] == "me/new" and {LORA_FILE, "README.md", "curves.svg"} <= sent[2]
    assert "uploaded: https://huggingface.co/me/new" in capsys.readouterr().out
    assert 'load_lora_weights("me/new"' in (tmp_path / "a" / "README.md").read_text()
    for name, kind in (("b", OSError), ("c", ConnectError)):
        api.error = kind("Name or service not known")
        assert flowrl(*words, "--out", tmp_path / name) == 2
        said = capsys.readouterr().err
        assert f"was not uploaded ({kind.__name__}: Name or service not known)" in said
        assert f"hf upload me/new {tmp_path / name}" in said and said.count("\n") == 1
        assert (tmp_path / name / "README.md").is_file()


class Refusing(BaseHTTPRequestHandler):
    """A hub, or a proxy before it, that answers with one status and says the token back."""

    status = 401

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        creates = self.path == "/api/repos/create"
        made = b'{"url": "https://huggingface.co/me/new"}'
        kept = creates and self.status == 409  # of a new repository it means that there is one
        body = made if kept else f'{{"error": "not with {TOKEN}"}}'.encode()
        self.send_response(200 if kept else self.status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Request-Id", "7")
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
SAID = {
    401: "the hub refuses the token, 401: run `hf auth login`, or set HF_TOKEN, with one that may "
    "write to me/new",
    403: "the hub refuses the token, 403: run `hf auth login`",
    404: "no owner or repository of this name that the token may see, 404: check the name",
    409: "the hub had another change of me/new at the same time, 409: wait until that has ended",
    413: "takes no request that large, 413: export without the merged model, or ask who runs it",
    418: "HfHubHTTPError: ",
    429: "the hub has had too many requests, 429: wait some minutes",
    500: "the hub has a fault of its own, 500: wait some minutes",
    503: "the hub has a fault of its own, 503: wait some minutes",
}


@pytest.mark.quick_cases("401", "404", "500")
@pytest.mark.parametrize("status", SAID)
def test_what_the_hub_answers_is_one_sentence_with_what_to_do(
    run, capsys, tmp_path, monkeypatch, status
):
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        hub = HfApi(endpoint=f"http://127.0.0.1:{server.server_port}", token=TOKEN)
        monkeypatch.setattr(Refusing, "status", status)
        monkeypatch.setattr(export, "HfApi", lambda: hub)
        monkeypatch.setattr(export, "get_token", lambda: TOKEN)
        words = ("--push-to-hub", "me/new", "--private", "--out", tmp_path / "a")
        assert flowrl("export", run[0], "--formats", "diffusers", *words) == 2
        server.shutdown()
    said = capsys.readouterr().err
    assert said.startswith("flowrl: push to the hub: me/new was not uploaded (")
    assert SAID[status] in said and said.count("\n") == 1 and TOKEN not in said
    assert f"the files are in {tmp_path / 'a'}, and `hf upload me/new {tmp_path / 'a'}" in said
    assert {LORA_FILE, "README.md"} <= {path.name for path in (tmp_path / "a").iterdir()}


def test_the_hubs_own_client_without_a_network_is_one_sentence(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "HfApi", lambda: HfApi(endpoint="http://127.0.0.1:9"))  # discard
    monkeypatch.setattr(export, "get_token", lambda: "a token")
    words = ("--formats", "diffusers", "--push-to-hub", "me/new", "--out", tmp_path / "a")
    assert flowrl("export", run[0], *words) == 2
    assert "me/new was not uploaded (ConnectError: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_text_run_has_a_card_whose_lines_load_it(tmp_path, capsys, monkeypatch):
    words = ("--train.iterations", "1", "--recipe.group", "4", "--prompts.per_iteration", "2",
             "--evaluate.samples", "8", "--model.lora.rank", "2")  # fmt: skip
    assert flowrl("train", "configs/text_demo.yaml", "--folder", tmp_path / "run", *words) == 0
    assert flowrl("export", tmp_path / "run", "--formats", "kohya") == 2
    assert flowrl("export", tmp_path / "run") == 0
    card = ModelCard.load(tmp_path / "run" / "export-0001" / "README.md")
    assert card.data.library_name == "transformers" and "most tokens" in card.text
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    monkeypatch.chdir(tmp_path / "run" / "export-0001")
    names: dict[str, Any] = {}
    exec(code, names)  # as its reader does, in the folder
    trained = load_file("adapter_model.safetensors")
    read = get_peft_model_state_dict(names["model"])
    assert read.keys() == trained.keys()
    assert all(torch.equal(read[name], trained[name]) for name in trained)
    assert names["tokenizer"].decode(names["tokenizer"]("a b").input_ids)


def test_prompts_in_a_card_are_text_alone(run, tmp_path):
    """A card loads nothing that a prompt names: no image, no script, no link."""
    file = Path(run_of(run[0]).prompts.train[0].source)
    kept = file.read_text()
    harm = [
        "![x](https://example.org/a.png) `![y](https://example.org/b.png)",
        "``` <script>alert(1)</script> <img src=https://example.org/c.png>",
        "a | b [link](https://example.org) <https://example.org>",
    ]
    try:
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in harm))
        assert flowrl("export", run[0], "--out", tmp_path / "new") == 0
    finally:
        file.write_text(kept)
    text = (tmp_path / "new" / "README.md").read_text().split("---\n", 2)[2]
    page = MarkdownIt("commonmark").enable("table").render(text)
    assert "example.org/c.png" in page and "<script" not in page and "href" not in page
    assert re.findall('src="([^"]*)"', page) == ["curves.svg", "samples.png"]


def test_names_in_a_card_are_text_alone(run, tmp_path):
    """A run folder's own name, which is no code, becomes neither an image nor HTML."""
    folder = tmp_path / "![x](track.png) <img src=a> [b](c) *d*"
    shutil.copytree(run[0], folder)
    assert flowrl("export", folder, "--out", tmp_path / "new") == 0
    text = (tmp_path / "new" / "README.md").read_text().split("---\n", 2)[2]
    page = MarkdownIt("commonmark").enable("table").render(text)
    assert "<h1>![x](track.png) &lt;img src=a&gt; [b](c) *d*</h1>" in page
    assert re.findall('src="([^"]*)"', page) == ["curves.svg", "samples.png"]


def test_a_sheet_of_charts_is_one_drawing_and_empty_ones_are_refused():
    line = Curve("reward", [(0.0, 1.0), (2.0, 3.0)])
    sheet = ElementTree.fromstring(chart_sheet([Chart("a <b>", [line])] * 3 + [Chart("c", [])]))
    lines = [each for each in sheet.iter() if each.tag.endswith("polyline")]
    assert len(lines) == 3 and all(each.attrib["stroke"] for each in lines)
    assert [each.text for each in sheet.iter() if each.text == "a <b>"] == ["a <b>"] * 3
    with pytest.raises(ValueError, match="no curve has a value"):
        chart_sheet([Chart("c", [])])


def test_a_configuration_that_is_downloaded_is_there(tmp_path, pipeline, monkeypatch):
    """A run's folder on a machine without its model: what `hf download` puts into the hub's cache
    is found."""
    root = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    tree = runs.tree(Path("owner/tiny"), tmp_path, runs.NFT)
    own_run = run_from(tree, "test")

    def downloaded():
        cache(pipeline, root, "owner/tiny")
        return export._denoisers(own_run)

    (denoiser,) = advice(
        "is not on this machine; download it with `hf download {}`",
        lambda: export._denoisers(own_run),
        downloaded,
    )
    assert type(denoiser).__name__ == "SD3Transformer2DModel"
