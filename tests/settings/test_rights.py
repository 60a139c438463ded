"""Five rights: the settings that ask for them, from the code, in every spelling; the places where
they are used; and what is recorded of a folder."""

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from flowrl.cli.restarts import trust_of
from flowrl.cli.rights import print_rights
from flowrl.errors import UserError
from flowrl.models.language.chat import rendered
from flowrl.models.language.policy import CausalPolicy
from flowrl.pages.run_folder import RunFolder
from flowrl.paths import PROJECT, own_runs
from flowrl.prompts import PromptSet
from flowrl.recipes import RECIPES
from flowrl.run.show.track import open_trackers
from flowrl.run.workers.head import address_of
from flowrl.settings import RECIPE_SETTINGS, RunSettings, trust
from flowrl.settings.checks.machine import check_language
from flowrl.settings.parts.names import NamedParts
from flowrl.settings.read import dump, open_folder, read_run, run_from
from flowrl.settings.sections.data import PromptFiles
from flowrl.settings.trust import ALL_PARTS, EVALUATED_PARTS, SAMPLED_PARTS
from rewards import load
from rewards.catalogue.unified_reward import _read
from rewards.judging.checkpoint_question import CheckpointQuestion
from rewards.judging.published_texts import PublishedText
from rewards.load import check_files, own_name
from rewards.perception.chat_frame import templated
from rewards.perception.files import open_image_file
from rewards.perception.hub import weights_file
from rewards.rights import Limits, NotGranted, Right, limited, limits
from rewards.serving.client import Client
from samplers.kernels import Kernel
from scripts.generate.rights import reward_settings, run_settings
from tests.support import runs

# settings whose texts name nothing outside the folder: columns, labels, parts of a model, and base
# models, which need no right
PLAIN = {
    *(
        "pipeline",
        "language",
        "model",
        "tower",
        "tokenizer",
        "base",
        "clip",
        "processor",
        "settings",
    ),
    *("system", "template", "stop", "targets", "separator", "device", "components", "arguments"),
    *("call", "name", "config", "split", "revision", "column", "columns", "keep", "where", "label"),
    "negative",  # a text of guidance
    *("scheduler",),  # numbers and names of the scheduler's class
    *("sets", "media", "layout", "rewards", "best", "project", "tags", "frames", "weights", "body"),
    "scheduler",  # values of the folder's own scheduler
    *("function", "reference"),  # columns of code_tests, whose tests need the right
    "guider",  # a class of diffusers and its numbers
    *("hue", "find", "pattern", "question", "condition", "mark", "spacy_model", "yes", "no"),
}
MARKED = [*run_settings(), *reward_settings()]


def takes_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return False
    return annotation is str or any(map(takes_text, get_args(annotation)))


def test_every_setting_of_texts_says_what_it_names():
    unmarked = [each for each in MARKED if each.mark is None and takes_text(each.annotation)]
    assert len(unmarked) > 100
    silent = [
        f"{each.reward}:{each.setting}"
        for each in unmarked
        if each.setting.rpartition(".")[2] not in PLAIN
    ]
    assert not silent, f"mark them (rewards/rights.py), or list them in PLAIN: {silent}"


BASE = {
    "recipe": {"name": "flow_grpo", "steps": 4, "group": 2},
    "model": {"pipeline": "owner/name"},
    "prompts": {"train": "configs/data/simple.txt"},
    "rewards": [{"name": "brightness"}],
}
TEXT = {"recipe": {"name": "text_grpo", "length": 8}, "model": {"language": "owner/name"}}


def put(folder: Path, tree: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return folder


def with_setting(path: str, value: Any, base: dict[str, Any] = BASE) -> dict[str, Any]:
    """Settings of a run with one more, given by its path in a file."""
    language = path.startswith(("model.server", "model.gguf", "model.environment"))
    tree = json.loads(json.dumps({**base, **(TEXT if language else {})}))
    if path.startswith("model.rewriter"):
        tree["recipe"] = {"name": "joint", "text": "text_grpo", "image": "flow_grpo"}
        tree["model"]["rewriter"] = {"language": "owner/name"}
    if path.startswith("model.weights"):
        tree["model"] = {"own": "flowrl/demo/taste.py:PixelTaste"}
    inner, (*above, last) = tree, path.split(".")
    whole = {
        "server": {"url": "http://localhost:9/v1", "model": "m", "sync": "none"},
        "environment": {"name": "flowrl/demo/maze.py:reply"},
        "engine": {} if "own" in (last, *above) else {"url": "http://localhost:9"},
        "adapters": {"path": "owner/name"},
        "quantization": {"backend": "gguf", "file": "x"},
        "given": {"file": "x", "kind": "texts"},
        "own": {"name": "x"},
    }
    for name in above:
        if not inner.get(name):  # as a whole run.yaml has it
            inner[name] = dict(whole.get(name, {}))
        found = inner[name]
        if not isinstance(found, dict):
            found = inner[name] = {"source": found}
        inner = found
    if last == "from":  # such adapters have their own settings
        inner.clear()
    inner[last] = value
    if above[-1:] == ["adapters"]:
        tree["model"]["adapters"] = [inner]
    if path.startswith("model.rights"):
        tree["model"]["form"] = "modular"
    if path.startswith("model.own"):
        del tree["model"]["pipeline"]
    return tree


def values(mark: Any, folder: Path, setting: str) -> tuple[Any, Any]:
    """A value that needs the mark's right, and its harmless twin."""
    outside, inside = folder.parent / "outside", folder / "inside"
    found: dict[Right, tuple[Any, Any]] = {
        Right.CODE: ("/x/e.py:f", "flowrl/demo/maze.py:reply"),
        Right.NETWORK: ("http://127.0.0.1:9/v1", None),
        Right.VARIABLES: ("CANARY", None),
        Right.FILES: (str(outside), str(inside)),
        Right.ACCOUNTS: (["wandb"], ["tensorboard"]),
    }
    if mark.right is Right.CODE and mark.what == "kernels on the hub":
        return "owner/kernels", "native"
    if setting == "isolation":
        return "best", "full"
    if setting == "column":
        return "tests", None
    if setting == "rights":  # of a modular pipeline's folder
        return [str(mark.right)], []
    if mark.right is Right.FILES and not mark.path:  # a plain name
        return "../outside", "inside"
    if setting == "folders":
        return {"task": str(outside)}, {"task": str(inside)}
    return found[mark.right]


@pytest.mark.parametrize(
    "each", [m for m in MARKED if m.mark is not None], ids=lambda m: f"{m.reward}:{m.setting}"
)
def test_each_marked_setting_asks_for_its_right(each, tmp_path):
    folder = put(tmp_path / "run", BASE)
    last = each.setting.rpartition(".")[2]
    bad, good = values(each.mark, folder, last)

    def asks(value: Any) -> set[Right]:
        if each.reward:
            reward = {"name": each.reward, last: value}
            tree = {**BASE, "rewards": [reward]}
        else:
            tree = with_setting(each.setting, value)
        return {n.right for n in trust.asked(tree, folder) if n.at.endswith(last)}

    assert each.mark.right in asks(bad)
    if good is not None:
        assert asks(good) == set()


NAMES = [
    "{}:",
    "{}:f ",
    "{}:A.f",
    "{}:f\n",
    "{}\n",
    " {}:f",
    "{}:f:g",
    "{}",
    "{}:f",
    "{}:1",
    "{}:f#",
]
CODE_PLACES = {
    "rewards": {"rewards": [{"name": "NAME"}]},
    "rewards, short": {"rewards": "NAME"},
    "rewards, a key": {"rewards": {"NAME": 0.5}},
    "held_out_rewards": {"held_out_rewards": ["NAME"]},
    "intermediate_rewards": {"intermediate_rewards": ["NAME"]},
    "their older name": {"way_rewards": ["NAME"]},
    "win_rate": {"rewards": [{"name": "win_rate", "judge": "NAME"}]},
    "in settings": {"rewards": [{"name": "win_rate", "settings": {"judge": {"name": "NAME"}}}]},
    "by_row": {"rewards": [{"name": "by_row", "rewards": {"a": "NAME"}}]},
    "ensemble": {"rewards": [{"name": "ensemble", "rewards": ["brightness", {"name": "NAME"}]}]},
    "recipe": {"recipe": {"name": "NAME"}},
    "recipe, short": {"recipe": "NAME"},
    "kernel": {"recipe": {"name": "flow_grpo", "kernel": "NAME"}},
    "advantage": {"recipe": {"name": "flow_grpo", "advantage": ["NAME"]}},
    "loss": {"recipe": {"name": "flow_grpo", "loss": {"name": "NAME"}}},
    "a plan's kernel": {"recipe": {"name": "flow_grpo", "plan": {"kernel": {"name": "NAME"}}}},
    "joint": {"recipe": {"name": "joint", "text": "NAME", "image": {"name": "flow_grpo"}}},
    "sigmas": {"model": {"pipeline": "owner/name", "sigmas": "NAME"}},
    "own": {"model": {"own": "NAME"}},
    "own, short": {"model": "NAME"},
    "environment": {**TEXT, "model": {"language": "a/b", "environment": {"name": "NAME"}}},
}  # fmt: skip


TABLES = {"recipes": RECIPES, "their settings": RECIPE_SETTINGS, "parts": NamedParts((Kernel,), ())}


@pytest.mark.parametrize("table", TABLES)
def test_asking_whether_a_table_has_a_name_imports_no_file(table, tmp_path):
    """Of each table that makes its values when they are asked for."""
    (tmp_path / "e.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\ndef f(): return 1\n"
    )
    for spelling in NAMES:
        name = spelling.format(tmp_path / "e.py")
        assert name not in TABLES[table]
        with pytest.raises(KeyError):
            TABLES[table][name]
    assert not (tmp_path / "ran").exists()


def test_a_page_of_a_strange_folder_imports_no_recipe(tmp_path):
    (tmp_path / "e.py").write_text(f"raise SystemError({str(tmp_path)!r})\n")
    for spelling in NAMES:
        recipe = {"name": spelling.format(tmp_path / "e.py"), "steps": 4}
        folder = put(tmp_path / "run", {**BASE, "recipe": recipe})
        assert RunFolder.read(folder).chosen["recipe"] == recipe


def test_a_name_in_a_file_has_one_grammar():
    read = {name.format("e.py"): own_name(name.format("e.py")) for name in NAMES}
    files = {name: (own.file, own.function) for name, own in read.items() if own is not None}
    assert files == {" e.py:f": (" e.py", "f"), "e.py": ("e.py", None), "e.py:f": ("e.py", "f")}


def spelt(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {name if k == "NAME" else k: spelt(v, name) for k, v in value.items()}
    if isinstance(value, list):
        return [spelt(each, name) for each in value]
    return name if value == "NAME" else value


def _open_all(run: RunSettings) -> None:
    """Open whatever a run names, as far as it can be."""
    for spec in (*run.rewards, *run.held_out_rewards, *run.intermediate_rewards):
        with suppress(ValueError):
            load(spec.name, **spec.settings)
    with suppress(ValueError, UserError):
        run.algorithm()
    if run.environment is not None:
        with suppress(UserError):
            run.environment.function()


@pytest.mark.parametrize("place", CODE_PLACES)
def test_no_spelling_of_a_file_is_imported(place, tmp_path):
    """Of a stranger's folder every spelling is refused or no file's name, and neither imports."""
    (tmp_path / "e.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        "def f(samples): return samples.media.flatten(1).mean(1)\n"
    )
    for name in NAMES:
        written = name.format(tmp_path / "e.py")
        folder = put(tmp_path / "run", {**BASE, **spelt(CODE_PLACES[place], written)})
        try:
            opened = open_folder(folder)
        except UserError as error:
            own = own_name(written)
            if own is not None and own.function is not None:
                assert "--trust=code" in str(error), (written, error)
        else:
            own = own_name(written)
            assert own is None or own.function is None, written
            with opened.limited():
                _open_all(opened.run)
        assert not (tmp_path / "ran").exists(), written


PROGRAMS = ("flowrl/cli/app.py:main", "rewards/sandbox/run.py:run_program",
            "flowrl/demo/world.py:write_prompts", "flowrl/demo/../cli/app.py:main")  # fmt: skip


@pytest.mark.parametrize("place", CODE_PLACES)
def test_flowrls_own_programs_are_code_too(place, tmp_path):
    """A folder from elsewhere that could name any function of flowrl could write and connect by
    their arguments. Its examples, which take samples and turns alone, need no right."""
    for written in PROGRAMS:
        folder = put(tmp_path / "run", {**BASE, **spelt(CODE_PLACES[place], written)})
        with pytest.raises(UserError, match="--trust=code"):
            open_folder(folder)
    tree = {**BASE, **spelt(CODE_PLACES[place], "flowrl/demo/taste.py:warm")}
    assert not [n for n in trust.asked(tree, tmp_path) if n.right is Right.CODE]


def test_every_file_of_flowrl_but_its_examples_needs_the_right_to_code(tmp_path):
    names = [f"{path.relative_to(PROJECT)}:main" for top in ("flowrl", "rewards", "samplers")
             for path in (PROJECT / top).rglob("*.py")]  # fmt: skip
    tree = {**BASE, "rewards": [{"name": name} for name in names]}
    asking = {n.value for n in trust.asked(tree, tmp_path)}
    assert {*names} - asking == {"flowrl/demo/maze.py:main", "flowrl/demo/taste.py:main"}
    with limited(Limits(tmp_path)):
        for name in ("rewards/types.py:Samples", "flowrl/demo/sums.py:problems"):
            with pytest.raises(NotGranted, match="needs the right to code"):
                load(name)


@pytest.mark.parametrize(
    "parts", [SAMPLED_PARTS, EVALUATED_PARTS, ALL_PARTS], ids=["sample", "evaluate", "train"]
)
def test_a_command_asks_for_what_it_uses(parts, tmp_path):
    found = set[str]()
    cases = {
        "rewards": {"rewards": [{"name": "remote", "url": "http://127.0.0.1:9"}]},
        "track": {"track": {"with": ["wandb"]}},
        "workers": {"workers": {"sampling": 1, "address": "ray://x"}},
        "prompts": {"prompts": str(tmp_path / "p.txt")},
        "sigmas": {"model": {"pipeline": "a/b", "sigmas": "/x/e.py:f"}},
    }
    (tmp_path / "p.txt").write_text("a\n")
    for name, more in cases.items():
        try:
            open_folder(put(tmp_path / "run", {**BASE, **more}), parts=parts)
        except UserError as error:
            assert "--trust" in str(error)
            found.add(name)
    wanted = {
        SAMPLED_PARTS: {"sigmas"},
        EVALUATED_PARTS: {"sigmas", "rewards", "prompts"},
        ALL_PARTS: set(cases),
    }
    assert found == wanted[parts]


@pytest.fixture
def listener():
    """A port, and the bytes that arrive there."""
    got = bytearray()
    server = socket.create_server(("127.0.0.1", 0))

    def listen():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            got.extend(connection.recv(65536))
            connection.close()

    threading.Thread(target=listen, daemon=True).start()
    yield server.getsockname()[1], got
    server.close()


def test_a_canary_reaches_no_listener_page_or_file(listener, tmp_path, monkeypatch, capfd):
    """A variable, a file as a question, and a log outside, before and after --trust=network."""
    port, got = listener
    monkeypatch.setenv("CANARY", "canary-of-a-variable")
    (tmp_path / "secret.txt").write_text("canary-of-a-file {prompt}")
    server = {"url": f"http://127.0.0.1:{port}", "key": "CANARY", "log": str(tmp_path / "log")}
    asking = {"name": "unified_reward", "model": "m", "question": str(tmp_path / "secret.txt")}
    for reward in ({"name": "remote", **server}, {**asking, **server}):
        folder = put(tmp_path / "run", {**BASE, "rewards": [reward]})
        for words in ((), ("--trust=network",), ("--trust=network,files",)):
            assert runs.flowrl("evaluate", folder, *words) == 2
            said = capfd.readouterr()
            assert "variables" in said.err and "canary-of" not in said.err + said.out
    assert not got and not (tmp_path / "log").exists()
    assert not [path for path in folder.rglob("*") if path.name != "run.yaml"]


JOINING = {**BASE, "workers": {"sampling": 1, "address": "ray://x"}}
USES = {
    "an address": lambda p: Client("http://127.0.0.1:9"),
    "a key": lambda p: Client("http://127.0.0.1:9", "CANARY"),
    "a log": lambda p: Client("http://127.0.0.1:9", None, log=str(p / "log")),
    "an image": lambda p: open_image_file(p / "x.png"),
    "code": lambda p: load(f"{p / 'e.py'}:f"),
    "tests": lambda p: load("code_tests"),
    "aesthetic": lambda p: load("aesthetic", head=str(p / "x")),
    "mps": lambda p: load("mps", checkpoint=str(p / "x")),
    "editreward": lambda p: load("editreward", checkpoint=str(p / "x")),
    "videoalign": lambda p: load("videoalign", video_fps=8, checkpoint=str(p)),
    "dreamsim": lambda p: load("dreamsim", folder=str(p)),
    "fitted": lambda p: load("fitted", path=str(p)),
    "hps": lambda p: load("hps", architecture=str(p / "x")),
    "less isolation": lambda p: _isolated(p),
    "a look at weights": lambda p: check_files("mps", {"checkpoint": str(p / "p.txt")}),
    "weights of a reward": lambda p: weights_file("r", "checkpoint", str(p / "x"), ("a", "b")),
    "a published text": lambda p: _text().read("r", "question", str(p / "x")),
    "a published question": lambda p: CheckpointQuestion.read("r", str(p / "x")),
    "a question": lambda p: _read(str(p / "x")),
    "prompts": lambda p: PromptSet.read(str(p / "p.txt"), "prompt", "here"),
    "trackers": lambda p: open_trackers(
        run_from({**BASE, "track": {"with": ["wandb"]}}, ""), p, None, 0
    ),
    "a cluster": lambda p: address_of(run_from(JOINING, "").workers),
}
NEEDED = {
    "an address": Right.NETWORK, "a key": Right.VARIABLES, "code": Right.CODE, "tests": Right.CODE,
    "less isolation": Right.CODE,
    "trackers": Right.ACCOUNTS, "a cluster": Right.NETWORK,
}  # fmt: skip


def _text() -> PublishedText:
    return PublishedText("a text", 1, "0", "nowhere")


def _isolated(place: Path) -> Any:
    """Less isolation, where the tests of this column may run."""
    found = limits()
    assert found is not None
    with limited(replace(found, own=frozenset({(Right.CODE, "tests")}))):
        return load("code_tests", isolation="best")


@pytest.mark.parametrize("use", USES)
def test_each_use_needs_its_right(use, tmp_path, monkeypatch):
    """With all other rights the use itself is refused: each of the checks stands by itself."""
    monkeypatch.setenv("CANARY", "x")
    (tmp_path / "e.py").write_text("raise SystemError('imported')")
    (tmp_path / "p.txt").write_text("a\n")
    (tmp_path / "fitted.yaml").write_text("")
    right = NEEDED.get(use, Right.FILES)
    folder = put(tmp_path / "run", BASE)
    all_others = limited(Limits(folder, frozenset(Right) - {right}))
    with all_others, pytest.raises((NotGranted, UserError), match=f"right to {right}"):
        USES[use](tmp_path)


def test_rows_of_prompt_files_name_images_within_the_folder_alone(tmp_path):
    folder = put(tmp_path / "run", BASE)
    for place in (tmp_path, folder):
        (place / "x.png").write_bytes(b"")
    (folder / "link.png").symlink_to(tmp_path / "x.png")
    for name, fits in {"x.png": True, "../x.png": False, "link.png": False,
                       str(tmp_path / "x.png"): False}.items():  # fmt: skip
        rows = folder / "rows.jsonl"
        rows.write_text(json.dumps({"prompt": "a", "image": name}) + "\n")
        with limited(Limits(folder)):
            if fits:
                assert len(PromptSet.read(str(rows), "prompt", "here")) == 1
            else:
                with pytest.raises(UserError, match="right to files"):
                    PromptSet.read(str(rows), "prompt", "here")


def test_prompt_files_outside_are_not_read_without_the_right(tmp_path):
    (tmp_path / "p.txt").write_text("a\n")
    prompts = PromptFiles.model_validate({"train": str(tmp_path / "p.txt")})
    assert prompts.on_disk("train")
    with limited(Limits(put(tmp_path / "run", BASE))):
        assert not prompts.on_disk("train")


def test_the_hub_gets_no_token_without_accounts(tmp_path, monkeypatch):
    from huggingface_hub.utils import get_token_to_send

    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    assert get_token_to_send(None) == "hf_canary"
    with limited(Limits(tmp_path)):
        assert get_token_to_send(None) is None
    with limited(Limits(tmp_path, frozenset({Right.ACCOUNTS}))):
        assert get_token_to_send(None) == "hf_canary"
    assert get_token_to_send(None) == "hf_canary"


def test_what_the_user_names_needs_no_right(tmp_path):
    (tmp_path / "p.txt").write_text("a\n")
    opened = open_folder(put(tmp_path / "run", BASE))
    opened = opened.overridden(["--prompts.train", str(tmp_path / "p.txt")])
    with opened.limited():
        assert len(opened.run.prompts.read("train")) == 1
        with pytest.raises(ValueError, match="right to files"):
            open_image_file(tmp_path / "p.png")


REMOTE = {**BASE, "rewards": [{"name": "remote", "url": "http://127.0.0.1:9", "key": "CANARY"}]}


def fresh(monkeypatch):
    monkeypatch.setattr(trust, "_remembered", {})


def test_named_rights_are_granted_alone_and_remembered(tmp_path, monkeypatch):
    folder = put(tmp_path / "run", REMOTE)
    with pytest.raises(UserError, match=r"--trust=network,variables "):
        open_folder(folder)
    with pytest.raises(UserError, match=r"--trust=variables "):
        open_folder(folder, "network")
    assert open_folder(folder, ["network", "variables"]).limits is not None
    fresh(monkeypatch)
    opened = open_folder(folder)
    assert opened.limits is not None and not opened.opens_rewards
    assert open_folder(folder, True).limits is None
    fresh(monkeypatch)
    assert open_folder(folder).limits is None
    with pytest.raises(UserError, match="choose from code, network, variables, files, accounts"):
        open_folder(folder, "netwrok")


@pytest.mark.parametrize("change", ["more", "another", "writer", "owner", "damage"])
def test_trust_holds_for_what_was_asked_and_by_whom(change, tmp_path, monkeypatch):
    folder = put(tmp_path / "run", REMOTE)
    trust.remember(folder, REMOTE)
    fresh(monkeypatch)
    assert open_folder(folder).limits is None
    if change == "more":
        put(folder, {**REMOTE, "track": {"with": ["wandb"]}})
    elif change == "another":
        put(folder, {**BASE, "rewards": [{"name": "remote", "url": "http://127.0.0.1:8"}]})
    elif change == "writer":
        (folder / "run.yaml").chmod(0o666)
    else:
        mark = trust._mark(folder.resolve())
        read = json.loads(mark.read_text())
        mark.write_text(
            json.dumps({**read, "owners": [os.getuid() + 1] * 2}) if change == "owner" else "{"
        )
    fresh(monkeypatch)
    with pytest.raises(UserError, match="--trust="):
        open_folder(folder)
    assert open_folder(folder, True).limits is None
    assert open_folder(folder).limits is None


def opened_to_all(mark: Path) -> None:
    mark.chmod(0o666)


def given_away(mark: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files to another user")
    os.chown(mark, 4242, -1)


def written_by_an_older_version(mark: Path) -> None:
    mark.write_text(json.loads(mark.read_text())["path"] + "\n")


def linked(mark: Path) -> None:
    mark.rename(mark.with_name("beside"))
    mark.symlink_to(mark.with_name("beside"))


def of_another_folder(mark: Path) -> None:
    record = json.loads(mark.read_text())
    mark.write_text(json.dumps({**record, "path": "/another"}))


FORGED: dict[str, tuple[Callable[[Path], object], ...]] = {
    "all may write it": (opened_to_all,),
    "another user's": (given_away,),
    "another user's, in the form of an older version": (written_by_an_older_version, given_away),
    "in the form of an older version, and all may write it": (
        written_by_an_older_version,
        opened_to_all,
    ),
    "a link": (linked,),
    "another folder's": (of_another_folder,),
    "all may write in its folder": (lambda mark: mark.parent.chmod(0o777),),
    "in another user's folder": (lambda mark: given_away(mark.parent),),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_record_that_others_could_have_written_is_not_believed(how, tmp_path, monkeypatch):
    monkeypatch.setenv(trust.STATE_VARIABLE, str(tmp_path / "state"))
    folder = put(tmp_path / "run", REMOTE)
    trust.remember(folder, REMOTE)
    mark = trust._mark(folder.resolve())
    assert not mark.stat().st_mode & 0o077 and not mark.parent.stat().st_mode & 0o022
    fresh(monkeypatch)
    assert open_folder(folder).limits is None
    for change in FORGED[how]:
        change(mark)
    fresh(monkeypatch)
    with pytest.raises(UserError, match="--trust=") as said:
        open_folder(folder)
    others = how != "another folder's"
    assert ("that another user has written, or could have" in str(said.value)) == others


def test_a_record_that_the_user_s_own_group_may_write_is_believed(tmp_path, monkeypatch):
    """As with the usual umask of systems that give each user a group."""
    monkeypatch.setenv(trust.STATE_VARIABLE, str(tmp_path / "state"))
    folder = put(tmp_path / "run", REMOTE)
    trust.remember(folder, REMOTE)
    mark = trust._mark(folder.resolve())
    for path, mode in ((mark, 0o664), (mark.parent, 0o775)):
        os.chown(path, -1, os.getegid())
        path.chmod(mode)
    fresh(monkeypatch)
    assert open_folder(folder).limits is None


def test_a_folder_that_an_older_version_recorded_is_trusted_for_what_it_asks_now(
    tmp_path, monkeypatch
):
    folder = put(tmp_path / "run", REMOTE)
    mark = trust._mark(folder.resolve())
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(f"{folder.resolve()}\n")
    assert open_folder(folder).limits is None
    fresh(monkeypatch)
    put(folder, {**REMOTE, "track": {"with": ["wandb"]}})
    with pytest.raises(UserError, match="asks for more than when it was trusted"):
        open_folder(folder)


def test_a_folder_that_cannot_remember_asks_again(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(trust.STATE_VARIABLE, str(tmp_path / "file" / "inside"))
    folder = put(tmp_path / "run", REMOTE)
    trust.remember(folder, REMOTE)
    assert open_folder(folder).limits is None
    fresh(monkeypatch)
    with pytest.raises(UserError, match="was not started here"):
        open_folder(folder)


def test_a_base_outside_the_folder_is_not_read(tmp_path):
    (tmp_path / "other.yaml").write_text("][ not YAML")  # which reading it would tell
    folder = put(tmp_path / "run", {**BASE, "base": "../other.yaml"})
    with pytest.raises(UserError, match="--trust=files"):
        open_folder(folder, parts=SAMPLED_PARTS)
    (tmp_path / "other.yaml").write_text("train: {lr: 1.0e-5}\n")
    assert open_folder(folder, "files").run.train.lr == 1e-5
    put(folder, {"base": "configs/demo.yaml"})
    assert open_folder(folder, parts=SAMPLED_PARTS).run.recipe.name


def test_doctor_says_right_by_right_and_imports_nothing(tmp_path, capsys):
    (tmp_path / "e.py").write_text("raise SystemError('imported')")
    code = f"{tmp_path / 'e.py'}:f"
    tree = {**REMOTE, "recipe": {"name": "flow_grpo", "kernel": code}}
    folder = put(tmp_path / "run", tree)
    lines = (folder / "run.yaml").read_text().splitlines()
    assert print_rights(folder) == 1
    said = capsys.readouterr().out
    for value, place in ((code, "recipe.kernel"), ("CANARY", "rewards.key")):
        number = next(i for i, line in enumerate(lines, 1) if value in line)
        assert f"not granted: {place}: {value!r}" in said and f", line {number}" in said
    assert "files: to" in said and "not asked for" in said
    assert "--trust=code,network,variables" in said
    trust.remember(folder, tree)
    assert print_rights(folder) == 0 and "not granted" not in capsys.readouterr().out


@pytest.mark.parametrize("file", dict(own_runs()).values(), ids=lambda file: file.stem)
def test_no_shipped_run_begins_to_need_trust(file, tmp_path, monkeypatch):
    """A folder that a shipped run began goes on without --trust."""
    tree = dump(read_run(file))
    folder = put(tmp_path / "run", tree)
    trust.remember(folder, tree)
    fresh(monkeypatch)
    assert open_folder(folder).limits is None


def test_words_of_trust():
    assert trust_of(["--resume", "x"]) is False
    assert trust_of(["--trust"]) is True
    assert trust_of(["--trust=code,network"]) == "code,network"


def _demo_model(folder: Path, file: str, **changes: Any) -> Path:
    """A copy of a demo's language model, with changes to one of its files."""
    shutil.copytree(PROJECT / "flowrl/demo/sums-lm", folder)
    whole = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps(whole))
    (folder / "theirs.py").write_text("raise SystemExit('imported')")
    return folder


OWN_CODE = {
    "config.json": {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}},
    "tokenizer_config.json": {
        "tokenizer_class": "Theirs",
        "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]},
    },
}


@pytest.mark.parametrize("file", OWN_CODE)
def test_code_in_a_model_folder_is_refused_in_a_sentence(file, tmp_path, capsys):
    model = _demo_model(tmp_path / "model", file, **OWN_CODE[file])
    with pytest.raises(UserError, match="code of its own"):
        CausalPolicy.load(str(model), dtype=torch.float32, device="cpu")
    if file == "config.json":
        with pytest.raises(UserError, match="code of its own"):
            check_language(str(model), None)
    assert "y/N" not in capsys.readouterr().out


TEMPLATES = ['{% include "x" %}', "{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ messages | nothing }}"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_raises_is_a_sentence(template):
    tokenizer = AutoTokenizer.from_pretrained(PROJECT / "flowrl/demo/sums-lm")
    tokenizer.chat_template = template
    turns = [{"role": "user", "content": "a"}]
    with pytest.raises(UserError, match=r"the chat template of model\.language"):
        rendered(tokenizer, turns, "a", {})
    with pytest.raises(ValueError, match=r"the chat template of .*sums-lm cannot write a turn"):
        templated(tokenizer, turns)
