"""The command line as a newcomer meets it: help, versions, and mistakes in one sentence."""

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from flowrl.cli import app, help
from flowrl.cli.app import command, main
from flowrl.cli.command_table import COMMANDS
from flowrl.cli.commands import split_settings
from flowrl.cli.given_model import weights_folder
from flowrl.cli.out_folder import whole_or_empty
from flowrl.cli.schema import read_schema
from flowrl.errors import UserError
from flowrl.evaluation.outputs import removed_if_empty
from flowrl.paths import PROJECT, new_numbered, removed_on_error
from flowrl.settings.command_line.arguments import SampleArguments, parse_arguments
from tests.support import runs

DEMO = str(PROJECT / "configs" / "demo.yaml")
PAPERS = sorted((PROJECT / "configs" / "papers").glob("*.yaml"))


def flowrl(capsys, *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(done.value.code), out, err


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in app.WITHOUT_MODELS])
def test_a_command_quiets_libraries_before_it_imports_them(monkeypatch, name):
    """transformers warns at its import of a torchvision that flowrl does without: `flowrl new`
    began with two such lines."""
    for library in ("TRANSFORMERS", "DIFFUSERS"):
        monkeypatch.setenv(f"{library}_VERBOSITY", "info")  # so that its value before returns
        monkeypatch.delenv(f"{library}_VERBOSITY")
    seen = []
    monkeypatch.setattr(app, "import_module", lambda _: seen.append(dict(os.environ)) or os)
    with pytest.raises(AttributeError):
        command(name)
    (environment,) = seen
    assert environment["TRANSFORMERS_VERBOSITY"] == environment["DIFFUSERS_VERBOSITY"] == "error"
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")  # a reader's own choice stays
    with pytest.raises(AttributeError):
        command(name)
    assert seen[1]["TRANSFORMERS_VERBOSITY"] == "info"


def refusal(capsys, *words: object) -> str:
    """The sentence of a command that is refused with exit code 2."""
    begin = time.monotonic()
    code, _, err = flowrl(capsys, *words)
    assert code == 2, err
    assert time.monotonic() - begin < 20
    sentence = err.strip().splitlines()[-1]
    assert sentence.startswith("flowrl: ") and "Traceback" not in err and "│" not in err
    return sentence


@pytest.fixture
def run_folder(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text((PROJECT / "configs" / "demo.yaml").read_text())
    return folder


@pytest.mark.slow
def test_help_needs_no_torch_and_a_third_of_a_second():
    code = (
        "import sys\n"
        "from flowrl.cli.command_table import COMMANDS\n"
        "from flowrl.cli.app import exit_code\n"
        "for name in COMMANDS:\n"
        "    for words in ([name, '--help'], [name, 'x', '-h']):\n"
        "        assert exit_code(words) == 0, words\n"
        "assert exit_code(['--version']) == 0 and exit_code(['--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'yaml', 'PIL', 'diffusers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    read_schema()  # renewed here where the code has changed
    begin = time.process_time(), os.times().children_user
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    spent = os.times().children_user - begin[1]
    assert spent < 1.2  # of all together, in processor time on a busy machine


def test_every_command_has_help_with_an_example(capsys):
    for name in help.COMMANDS:
        assert callable(command(name))
        code, out, _ = flowrl(capsys, name, "--help")
        assert code == 0 and out.startswith(f"usage: flowrl {name}")
        assert f"example:\n  flowrl {name}" in out and max(map(len, out.splitlines())) <= 105
    code, out, _ = flowrl(capsys, "--help")
    assert code == 0 and all(f"  {name} " in out or f"  {name}\n" in out for name in help.COMMANDS)
    assert flowrl(capsys)[0] == 2
    code, out, _ = flowrl(capsys, "--version")
    assert code == 0 and re.match(r"flowrl \S+", out)


def test_the_help_of_train_lists_every_setting(capsys):
    from flowrl.settings import RECIPE_SETTINGS
    from flowrl.settings.command_line.options import option_names

    _, out, _ = flowrl(capsys, "train", "--help")
    listed = set(re.findall(r"^  --(\S+)", out, re.MULTILINE))
    names = {n.replace("_", "-") for n in option_names(RECIPE_SETTINGS["flow_grpo"])}
    known = {name for name in names if not name.startswith("recipe.")}
    extra = {"recipe.name", "folder", "no-cache", "resume", "restarts", "trust", "wait"}
    assert known <= listed and listed - known == extra
    assert re.search(r"--train.lr \(0.0003\)\n      Learning rate", out)
    assert "--track.with\n" in out and "--model.lora.rank (16)" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("trian",), "'trian' is not a command; did you mean 'train'?"),
        (("train", DEMO, "--train.lr", "abc"), "train.lr: input should be a valid number"),
        (("train", DEMO, "--learning_rate", "1"), "did you mean --train.lr?"),
        (("train", DEMO, "--track.wiht", "x"), "did you mean --track.with?"),
        (("train", DEMO, "--folder", "a", "--folder=b"), "--folder is given twice, with a and b"),
        (("train", "--resume", "a", "--resume", "b"), "--resume is given twice, with a and b"),
        (("plan", DEMO, "--memory", "1GiB", "--memory", "2GiB"), "twice, with 1GiB and 2GiB"),
        (("train", "configs"), "is a folder"),
        (("recipes", "Flow-GRPO"), "did you mean 'flow_grpo'?"),
        (("recipes", "nft", "awm"), "recipes: give a single recipe"),
        (("plan",), "plan: give a run file"),
        (("plan", DEMO, "--memory", "much"), "--memory: 'much' is not a size"),
        (("plan", DEMO, "--iteration", "-1"), "plan: --iteration: input should be greater"),
        (("plan", DEMO, "--recipe.steps", "100000"), "recipe.steps: .*less than or equal to 250"),
        (("plan", DEMO, "--recipe.group", "100000000"), "recipe.group: .*less than or equal to"),
        (("plan", DEMO, DEMO, "--svg", "x.svg"), "--svg draws a single run"),
        (("serve-reward", "brightness", "--port", "99999999"), "--port: .*less than or equal to"),
        (("serve-reward", "brightness", "--prot", "1"), "did you mean --port?"),
        (("serve-reward", "[1]"), "expected a name or {name: ...}"),
        (("serve-reward",), "serve-reward: REWARD: missing"),
        (("schema", "x"), "schema takes no arguments"),
        (("score", "."), "score: --rewards: missing"),
        (("new", ""), "new: FOLDER: the name is empty"),
        (("report", "a" * 300), "a{200}: file name too long"),
        (("plan", "a" * 5000), "is not a file name"),
        (("train", DEMO, "--prompts.train", "a" * 5000), "is not a file name"),
        (
            ("plan", DEMO, "--model.lora.targets", "to_q,to_x", "--model.lora.rank", "4"),
            "lora target 'to_x' matches no linear layer of the model",
        ),
    ],
)
def test_a_mistake_is_one_sentence(capsys, words, sentence):
    assert re.search(sentence.replace("?", r"\?"), refusal(capsys, *words))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("a", "--count", "0"), "sample: --count: input should be greater than or equal to 1"),
        (("a", "--count", "two"), "sample: --count: input should be a valid integer.*'two'"),
        (("a", "--steps", "0"), "sample: --steps: input should be greater than or equal to 1"),
        (("a", "--guidance", "nan"), "sample: --guidance: "),
        (("a", "--steer", "hard"), "sample: --steer: input should be 'no', 'best'"),
        (("a", "--cuont", "2"), "sample: --cuont is not known; did you mean --count"),
        (("a", "--rewards", "{name: [}"), "--rewards: not valid YAML"),
        (("a", "--rewards", "3"), "--rewards: "),
        ((), "sample: give prompts"),
        (("--model.height", "32", "a red ball"), "put them before settings such as --model.h"),
        (
            ("a", "--image", "a.png", "--image", "b.png"),
            "--image is given twice, with a.png and b.png",
        ),
    ],
)
def test_a_mistake_in_sample_is_one_sentence(capsys, run_folder, words, sentence):
    assert re.search(sentence, refusal(capsys, "sample", run_folder, *words))


def test_words_after_two_dashes_are_no_options():
    words, options = split_settings(["run", "--count", "2", "--", "--a.b", "--count"])
    given = parse_arguments(SampleArguments, words, "sample")
    assert (given.run, given.prompts, given.count) == ("run", ("--a.b", "--count"), 2)
    assert options == []


def test_evaluate_takes_no_zeros(capsys, run_folder):
    for option in ("--samples", "--steps"):
        said = refusal(capsys, "evaluate", run_folder, option, 0)
        assert f"evaluate: {option}: input should be greater than or equal to 1, not '0'" in said


@pytest.mark.parametrize("command", ["plan", "prove", "train"])
def test_a_file_without_a_recipe_is_named(capsys, tmp_path, command):
    (tmp_path / "cut.yaml").write_text("model: {pipeline: flowrl/demo/shapes-sd3}\n")
    said = refusal(capsys, command, tmp_path / "cut.yaml")
    assert "cut.yaml: recipe: missing" in said


def test_samples_never_replace_files(capsys, run_folder, tmp_path):
    (tmp_path / "file").write_text("")
    said = refusal(capsys, "sample", run_folder, "a", "--out", tmp_path / "file")
    assert "is a file; give a folder instead" in said
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "000.png").write_text("mine")
    said = refusal(capsys, "sample", run_folder, "a", "--out", tmp_path / "old")
    assert "already has files: choose a new folder" in said
    assert (tmp_path / "old" / "000.png").read_text() == "mine"
    said = refusal(capsys, "sample", run_folder, "a", "--out", tmp_path / "file" / "in")
    assert "cannot write into the folder" in said


def test_a_port_in_use_is_one_sentence(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal(capsys, "serve-reward", "brightness", "--port", port)
    assert f"cannot listen on 127.0.0.1:{port}" in said and "set another --port" in said


def test_a_tracker_that_does_not_import_is_one_sentence(capsys, tmp_path, monkeypatch):
    from flowrl.settings.checks import machine as checks

    def broken(name: str) -> None:
        raise AttributeError("module 'x' has no attribute 'y'\nat all")

    monkeypatch.setattr(checks, "import_module", broken)
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["tensorboard"])
    said = refusal(capsys, "train", DEMO, "--track.with", "tensorboard")
    assert "tensorboard is installed, but importing" in said and "leave it out" in said
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [])
    said = refusal(capsys, "train", DEMO, "--track.with", "tensorboard")
    assert "pip install 'flowrl[track]'" in said


FEW = ["configs/papers/flow_grpo_sd35m_geneval.yaml", *PAPERS[::48]]


@pytest.mark.parametrize("papers", [FEW, pytest.param(PAPERS, marks=pytest.mark.slow)])
def test_plan_needs_neither_prompts_nor_a_hub(capsys, papers):
    code, out, err = flowrl(capsys, "plan", *papers)
    assert code == 1, err  # without their prompts these runs do not start, and plan says so
    assert all(f"{path}\nrecipe " in out for path in papers)
    assert "refused: prompts.train: no such file: data/geneval/train.jsonl; configs/" in out
    assert "not checked here:\n  files of stabilityai/stable-diffusion-3.5-medium" in out
    assert "there is no reward" not in out and "has no setting" not in out


@pytest.mark.slow
def test_plan_exits_with_1_where_the_run_does_not_fit(capsys):
    code, out, _ = flowrl(capsys, "plan", DEMO, "--memory", "1MiB")
    assert code == 1 and "does not fit in 1.0 MiB" in out
    assert flowrl(capsys, "plan", DEMO, "--memory", "100GiB")[0] == 0


@pytest.mark.slow
def test_plan_estimates_seconds_on_named_devices(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, _ = flowrl(capsys, "plan", DEMO, "--devices", "2xH100", "--utilisation", "0.5")
    assert code == 0 and "fits in 74.5 GiB (H100)" in out
    assert "s per iteration on 2 x H100 at 50% of 67 TFLOP/s in float32 (sampling" in out
    preset = "configs/papers/flow_grpo_sd35m_ocr.yaml"  # no file of the model is here
    code, out, _ = flowrl(capsys, "plan", preset, "--memory", "1GiB")
    assert code == 1 and "sizes from flowrl's table" in out
    for wrong in (("--devices", "8xH1000"), ("--devices", "H100", "--utilisation", "0")):
        assert refusal(capsys, "plan", DEMO, *wrong).startswith("flowrl: ")


def test_plan_prints_the_text_length_that_is_paid_for(capsys, tmp_path):
    _, out, _ = flowrl(capsys, "plan", DEMO)
    assert "text: 1 tokens per prompt (model.call.max_sequence_length, as set)" in out
    tree = yaml.safe_load(Path(DEMO).read_text())
    del tree["model"]["call"]
    path = runs.write(tree, tmp_path)
    _, out, _ = flowrl(capsys, "plan", path, "--svg", tmp_path / "missing" / "p.svg")
    assert "text: 256 tokens per prompt (model.call.max_sequence_length, the pipeline's" in out
    assert re.search(r"; the longest training prompt has \d+ words", out)
    assert (tmp_path / "missing" / "p.svg").read_text().startswith("<svg")
    (tmp_path / "file").write_text("")
    assert "--svg: cannot write" in refusal(capsys, "plan", path, "--svg", tmp_path / "file" / "p")


def test_single_files_of_weights_are_named(capsys, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    for name in (str(tmp_path / "model.safetensors"), "owner/model.safetensors"):
        said = refusal(capsys, "train", DEMO, "--model.pipeline", name)
        assert (
            f"model.pipeline: {name} is a single file; give a folder in diffusers' format" in said
        )


def test_a_hub_that_cannot_be_reached_is_one_sentence_at_once(capsys, monkeypatch):
    def unreachable(url: str, timeout: float) -> None:
        assert "owner/name" in url and timeout <= 5
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    said = refusal(capsys, "train", DEMO, "--model.pipeline", "owner/name")
    assert "model.pipeline: owner/name is neither a folder nor in the hub's cache" in said
    assert "cannot be reached (OSError: Name or service not known); run `hf download" in said


def test_the_schema_is_json(capsys):
    _, out, _ = flowrl(capsys, "schema")
    assert json.loads(out)["properties"].keys() >= {"recipe", "model", "rewards"}


@pytest.mark.parametrize("command", ["suites", "path configs/demo.yaml", "--help"])
def test_standard_output_on_a_full_disk_is_one_sentence(tmp_path, command):
    line = f"{sys.executable} -m flowrl {command} > /dev/full"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=runs.environment(), check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 3 and done.stderr.count("\n") == 1
    assert re.search("standard output.*: no space left on device", done.stderr)


def test_two_commands_at_once_get_two_folders(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: new_numbered(tmp_path / "samples", "sample"), range(8)))
    assert len({*found}) == 8 and all(folder.is_dir() for folder in found)


def test_a_command_that_fails_leaves_no_half_written_folder(tmp_path):
    with pytest.raises(OSError), removed_if_empty(tmp_path / "a"), whole_or_empty(tmp_path / "a"):
        (tmp_path / "a/merged").mkdir(parents=True)
        (tmp_path / "a/x.safetensors").write_text("")
        raise OSError
    assert not (tmp_path / "a").exists()


def test_a_file_that_is_cut_short_is_removed(tmp_path):
    with pytest.raises(OSError), removed_on_error(tmp_path / "a", tmp_path / "b"):
        (tmp_path / "a").write_text("half")
        raise OSError
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("command", [("plan", DEMO), ("doctor",)])
def test_a_deleted_working_folder_is_one_sentence(capsys, tmp_path, monkeypatch, command):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the working folder no longer exists" in refusal(capsys, *command)


def read_a_file(folder: Path) -> None:
    (folder / "metrics.jsonl").read_text()


def read_without_a_name(folder: Path) -> None:
    raise FileNotFoundError(f"No such file or directory: {folder}/model.safetensors")


def refuse_a_file(folder: Path) -> None:
    try:
        read_a_file(folder)
    except FileNotFoundError as error:
        raise UserError("the weights cannot be read: download them again") from error


@pytest.mark.parametrize("use", [read_a_file, read_without_a_name, refuse_a_file])
@pytest.mark.parametrize("option", ["{}", "--run={}"])
def test_a_folder_that_vanishes_under_a_command_is_named(
    capsys, monkeypatch, run_folder, use, option
):
    def command_of(_name: str):
        def vanishing(_words: list[str]) -> int:
            shutil.rmtree(run_folder)
            use(run_folder)
            raise AssertionError

        return vanishing

    monkeypatch.setattr(app, "command", command_of)
    named = refusal(capsys, "report", option.format(run_folder))
    assert named.startswith(f"flowrl: {run_folder} is no longer there")


def test_a_file_that_was_never_there_is_a_fault_of_the_program(monkeypatch, run_folder):
    monkeypatch.setattr(app, "command", lambda _name: lambda _words: read_a_file(run_folder))
    with pytest.raises(FileNotFoundError):
        main(["report", str(run_folder)])


@pytest.mark.parametrize(
    "error", [OSError("no file named model.safetensors"), FileNotFoundError(2, "No such file", "a")]
)
def test_an_error_of_another_file_is_not_one_of_standard_output(monkeypatch, capsys, error):
    def fails(words: list[str]) -> int:
        raise error

    monkeypatch.setattr(app, "exit_code", fails)
    with pytest.raises(OSError, match=r"no file named|No such file"):
        main(["plan", "demo"])
    assert "standard output" not in capsys.readouterr().err


def test_letters_that_standard_output_lacks_are_escaped(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(app, "exit_code", lambda words: print("a \u00fc", words[0]) or 0)
    with pytest.raises(SystemExit) as ended:
        main(["\u65e5"])
    assert ended.value.code == 0 and out.buffer.getvalue() == b"a \\xfc \\u65e5\n"


def test_a_reward_may_take_standard_output_away(monkeypatch):
    def takes(words: list[str]) -> int:
        monkeypatch.setattr(sys, "stdout", None)
        return 0

    monkeypatch.setattr(app, "exit_code", takes)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "demo"])
    assert ended.value.code == 0


def test_a_copy_beside_the_best_weights_is_not_taken(tmp_path):
    for name in ("000001", "000002", "000002 (copy)", "000003.old"):
        (tmp_path / "best" / name).mkdir(parents=True)
    assert weights_folder(tmp_path, "best") == tmp_path / "best/000002"
    (tmp_path / "checkpoints" / "000004").mkdir(parents=True)
    for name in ("000004", "checkpoints/000004", str(tmp_path / "checkpoints" / "000004")):
        assert weights_folder(tmp_path, name) == tmp_path / "checkpoints" / "000004"
    with pytest.raises(UserError, match="has no '000005' weights; it has best, base, 000004"):
        weights_folder(tmp_path, "000005")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_caller_may_close_its_streams(tmp_path, closed):
    """No file that a command opens becomes standard output in their place."""
    code = "import os; from flowrl.cli.app import exit_code, open_closed; open_closed(); "
    code += "print(1); f = os.open('kept', os.O_CREAT); os._exit(10 * f + exit_code(['x']))"
    line = f'{sys.executable} -c "{code}" {closed}'
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=runs.environment(), check=False)
    assert done.returncode >= 32 and done.returncode % 10 == 2
    line = f"{sys.executable} -m flowrl version {closed}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=runs.environment(), check=False)
    assert done.returncode == 0


def test_a_folder_with_a_run_does_not_take_the_place_of_a_name(tmp_path, monkeypatch, capsys):
    """Both are named, and both ways work; a run's own folder is told how it is resumed."""
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.yaml").write_text("base: configs/demo.yaml\n")
    for verb in ("plan", "train", "prove", "calibrate"):
        code, _, said = flowrl(capsys, verb, "demo")
        assert code == 2
        assert "write demo/run.yaml or configs/demo.yaml" in said
    for way in ("demo/run.yaml", "configs/demo.yaml"):
        assert flowrl(capsys, "plan", way)[0] == 0
    code, _, said = flowrl(capsys, "train", "other")
    assert code == 2 and "flowrl train --resume other" in said and "resume()" not in said
    (tmp_path / "f.txt").write_text("x")
    code, _, said = flowrl(capsys, "train", "demo/run.yaml", "--folder", "f.txt")
    assert code == 2 and "already exists" in said and "--resume" not in said
