"""Run folders from elsewhere: their code runs after `--trust` alone, and `sample` opens none."""

import shutil
from pathlib import Path

import pytest
import yaml

import flowrl
from flowrl.errors import UserError
from flowrl.settings.read import open_folder, read_run
from flowrl.settings.sections.data import RewardSpec
from tests.support import runs
from tests.support.warm import small

OWN = """
from pathlib import Path

with (Path(__file__).parent / "ran.txt").open("a") as file:
    file.write("imported\\n")


def bright(samples):
    return samples.media.flatten(1).mean(1)
"""


@pytest.fixture(scope="module")
def begun(pipeline, tmp_path_factory) -> Path:
    """A run that was begun here, whose reward notes that it was imported."""
    place = tmp_path_factory.mktemp("begun")
    (place / "own.py").write_text(OWN)
    tree = small(pipeline, place) | {"rewards": [{"name": f"{place / 'own.py'}:bright"}]}
    tree["train"]["iterations"] = 1
    assert runs.flowrl("train", runs.write(tree, place), "--folder", place / "run") == 0
    return place / "run"


@pytest.fixture
def elsewhere(begun, tmp_path) -> Path:
    """The same folder at another place, as a download is, with a file that nothing has imported."""
    shutil.copytree(begun, tmp_path / "run")
    shutil.copy(begun.parent / "own.py", tmp_path / "own.py")
    file = tmp_path / "run" / "run.yaml"
    file.write_text(
        file.read_text().replace(str(begun.parent / "own.py"), str(tmp_path / "own.py"))
    )
    return tmp_path / "run"


def ran(run: Path) -> bool:
    return (run.parent / "ran.txt").exists()


COMMANDS = [("train", "--resume"), ("evaluate",)]


@pytest.mark.quick_cases("evaluate")
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_code_of_a_folder_from_elsewhere_runs_after_trust_alone(elsewhere, capsys, words):
    assert runs.flowrl(*words, elsewhere) == 2
    said = capsys.readouterr().err
    assert "was not started here" in said and "own.py:bright" in said and "--trust" in said
    assert said.count("\n") == 1 and not ran(elsewhere)
    assert runs.flowrl(*words, elsewhere, "--trust") == 0
    assert ran(elsewhere)
    assert runs.flowrl(*words, elsewhere) == 0, "once trusted, it is known"


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_folder_that_was_begun_here_needs_no_flag(begun, words):
    assert runs.flowrl(*words, begun) == 0


def test_sample_opens_no_rewards_of_a_folder_from_elsewhere(elsewhere, capsys):
    assert runs.flowrl("sample", elsewhere, "a red ball") == 0
    assert "its rewards are not loaded" in capsys.readouterr().out
    assert not ran(elsewhere) and list(elsewhere.glob("samples/sample-0001/000.png"))
    assert runs.flowrl("export", elsewhere) == 0 and not ran(elsewhere)


PARTS = [
    ("recipe", {"name": "flow_grpo", "steps": 4, "group": 2, "kernel": "PLACE/own.py:Kernel"}),
    ("model.sigmas", "PLACE/own.py:levels"),
]


@pytest.mark.parametrize(("path", "value"), PARTS)
@pytest.mark.parametrize("command", ["sample", "export", "evaluate"])
def test_parts_of_the_recipe_are_not_imported_either(elsewhere, capsys, command, path, value):
    tree = yaml.safe_load((elsewhere / "run.yaml").read_text())
    inner = tree["model"] if path.startswith("model.") else tree
    text = yaml.safe_dump(value).replace("PLACE", str(elsewhere.parent))
    inner[path.rpartition(".")[2]] = yaml.safe_load(text)
    (elsewhere / "run.yaml").write_text(yaml.safe_dump(tree))
    words = ["a red ball"] if command == "sample" else []
    assert runs.flowrl(command, elsewhere, *words) == 2
    assert "was not started here" in capsys.readouterr().err and not ran(elsewhere)


def test_python_asks_too(elsewhere):
    with pytest.raises(UserError, match=r"trust='code"):
        flowrl.train(resume=elsewhere)
    opened = flowrl.TrainedRun.open(elsewhere)
    with pytest.raises(UserError, match=r"trust='code"):
        opened.judges()
    assert not ran(elsewhere)
    assert flowrl.TrainedRun.open(elsewhere, trust=True).judges() and ran(elsewhere)


def test_a_job_on_a_new_machine_goes_on_with_what_its_own_file_names(elsewhere, tmp_path):
    """`train FILE --folder RUN --resume auto` where no record of the folder is: FILE is the user's,
    and grants what it names itself, and nothing else."""
    run = read_run(elsewhere / "run.yaml")
    with pytest.raises(UserError, match="was not started here"):
        open_folder(elsewhere)
    assert open_folder(elsewhere, beside=run).run == run
    other = run.model_copy(update={"rewards": (RewardSpec(name="brightness"),)})
    with pytest.raises(UserError, match="was not started here"):
        open_folder(elsewhere, beside=other)
    assert not ran(elsewhere)
