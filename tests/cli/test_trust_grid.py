"""Each setting that names something, from the code, in several spellings, under each command that
reads a folder: with all rights but its own, the folder uses nothing of what it names. Each has a
harmless twin that is not refused."""

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from flowrl.cli.command_table import COMMANDS as TABLE
from rewards.rights import Right
from scripts.generate.rights import Marked
from tests.settings.test_rights import CODE_PLACES, MARKED, NAMES, put, spelt, values, with_setting
from tests.support import runs, watched
from tests.support.traced import Traced, traced
from tests.support.traced import needed as strace_needed
from tests.support.warm import Warm, small

CANARY = "canary-of-a-secret"
VARIABLE = "CANARY"
SECRETS = (  # variables with a canary, beside the one that settings name
    *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "GITHUB_TOKEN"),
)
COMMANDS = {
    "train": ("train", "--resume", "RUN"),
    "evaluate": ("evaluate", "RUN"),
    "sample": ("sample", "RUN", "a red ball", "--steps", "1"),
    "export": ("export", "RUN"),
    "report": ("report", "RUN", "--out", "PAGE"),
    "compare": ("compare", "RUN", "OTHER", "--out", "PAGE"),
    "doctor": ("doctor", "RUN"),
    "drill": ("drill", "RUN", "--out", "PAGE", "--only", "records", "--yes"),
    "runs": ("runs", "RUN"),
    "vote": (
        *("vote", "RUN", "--person", "simulated", "--port", "0", "--votes", "2"),
        *("--steps", "1", "--out", "PAGE"),
    ),
}
TRUSTING = ("train", "evaluate", "sample", "export", "drill", "vote")
WHOLE = ("train", "evaluate")  # use most of a folder
FORBIDDEN = {
    Right.CODE: ("run", "start"),  # with the right to files it may be read, as weights are
    Right.NETWORK: ("connect",),
    Right.VARIABLES: ("variable",),
    Right.FILES: ("open",),
    Right.ACCOUNTS: ("tracker", "connect"),
}


class Place(NamedTuple):
    """A user's machine with a run begun here, and a port that hears who connects."""

    begun: dict[str, Any]
    run: Path
    outside: Path
    port: int
    server: socket.socket

    def heard(self) -> bool:
        try:
            self.server.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def beside(self) -> dict[str, bytes]:
        """Everything outside the run but the caches of libraries."""
        files = [path for path in self.outside.rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in files if ".cache" not in path.parts}


@pytest.fixture(scope="module")
def place(pipeline, tmp_path_factory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("grid")
    tree = small(pipeline, folder)
    tree["train"]["iterations"] = 1
    file = runs.write(tree, folder)
    assert runs.flowrl("train", file, "--folder", folder / "run") == 0
    begun = yaml.safe_load((folder / "run/run.yaml").read_text())
    outside = folder / "outside"
    (outside / ".ssh").mkdir(parents=True)
    for name in (".cache/huggingface", ".aws"):
        (outside / name).mkdir(parents=True)
    secrets = (".ssh/id_rsa", ".netrc", ".cache/huggingface/token", ".aws/credentials")
    for name in (*secrets, "secret.txt"):
        (outside / name).write_text(f"{CANARY}\n")
    (outside / "e.py").write_text(f"raise SystemError({CANARY!r})\n")
    run = folder / "elsewhere"
    shutil.move(folder / "run", run)  # as a download is
    shutil.copy(folder / "prompts.jsonl", run)
    for part in ("train", "held_out"):
        begun["prompts"][part] = str(run / "prompts.jsonl")
    put(run, begun)
    shutil.copytree(run, folder / "other")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield Place(begun, run, outside, server.getsockname()[1], server)


@pytest.fixture(scope="module")
def commands() -> Iterator[Warm]:
    started = Warm()
    yield started
    started.close()


def spellings(each: Marked, place: Place) -> list[Any]:
    """Values that all need the right, as a stranger might write them."""
    assert each.mark is not None
    last = each.setting.rpartition(".")[2]
    first, _ = values(each.mark, place.run, last)
    secret = place.outside / "secret.txt"
    if each.mark.right is Right.NETWORK:
        hosts = ("127.0.0.1", "localhost", "[::1]", "user:word@127.0.0.1")
        return [f"http://{host}:{place.port}/v1" for host in hosts] + [
            f" HTTP://127.0.0.1:{place.port}"
        ]
    if each.mark.right is Right.VARIABLES:
        return [VARIABLE, f" {VARIABLE}"]
    if each.mark.right is Right.ACCOUNTS:
        return [["wandb"], "wandb", ["tensorboard", "wandb"]]
    if each.mark.right is Right.FILES and each.mark.path:
        paths = [
            str(secret), str(place.run / "../outside/secret.txt"), "~/secret.txt",
            str(place.run / "link"), f"/proc/self/root{secret}", f"file://{secret}",
        ]  # fmt: skip
        return [{"task": path} for path in paths] if last == "folders" else paths
    if each.mark.right is Right.CODE and first == "/x/e.py:f":
        return [name.format(place.outside / "e.py") for name in NAMES]
    return [first]


def trees(each: Marked, value: Any, place: Place) -> dict[str, Any]:
    last = each.setting.rpartition(".")[2]
    if each.reward:
        needed = {"url": f"http://127.0.0.1:{place.port}"} if last in ("key", "log") else {}
        return {**place.begun, "rewards": [{"name": each.reward, **needed, last: value}]}
    return with_setting(each.setting, value, place.begun)


def words_of(place: Place, command: str, trust: str, folder: Path) -> list[str]:
    pages = folder / "pages"  # a page is written beside itself first
    pages.mkdir(exist_ok=True)
    names = {"RUN": place.run, "OTHER": place.run.with_name("other"), "PAGE": pages / "page"}
    words = [str(names.get(word, word)) for word in COMMANDS[command]]
    return words + ([f"--trust={trust}"] if trust and command in TRUSTING else [])


def used(place: Place, commands: Warm, command: str, trust: str, tmp_path: Path) -> tuple:
    """The exit code, what the command said, and what it used."""
    link = place.run / "link"
    if not link.is_symlink():
        link.symlink_to(place.outside / "secret.txt")
    words = words_of(place, command, trust, tmp_path)
    events, said = tmp_path / "events", tmp_path / "said"
    for file in (events, said):
        file.write_text("")
    environment = {
        watched.EVENTS: str(events), watched.PLACES: str(place.outside),
        watched.SECRET: VARIABLE, VARIABLE: CANARY, "HOME": str(place.outside),
        **dict.fromkeys(SECRETS, CANARY),
        "HF_TOKEN_PATH": str(place.outside / ".cache/huggingface/token"), "HF_HUB_OFFLINE": "1",
        "FLOWRL_STATE": str(tmp_path / "state"),
    }  # fmt: skip
    code = commands.run(*words, out=said, env=environment)
    found = [json.loads(line) for line in events.read_text().splitlines()]
    return code, said.read_text(), found


def holding(*folders: Path) -> list[Path]:
    """Files of a run, of pages and of flowrl's state that hold the canary."""
    files = [path for folder in folders for path in folder.rglob("*")]
    return [p for p in files if p.is_file() and not p.is_symlink() and _holds(p)]


def _holds(path: Path) -> bool:
    return path.name != "events" and CANARY.encode() in path.read_bytes()


def test_the_grid_has_every_command_that_reads_a_run() -> None:
    named = {name for name, each in TABLE.items() if "RUN" in f"{each.usage} {each.example}"}
    settings = {"launch", "fit-reward"}  # the name of a new run; a folder of votes
    assert named - settings <= COMMANDS.keys() <= TABLE.keys()


def wrong_uses(
    place: Place,
    commands: Warm,
    tmp_path: Path,
    right: Right,
    tree: dict[str, Any],
    only: Sequence[str],
) -> list[str]:
    """What the commands did with this tree that it had no right to."""
    found: list[str] = []
    others = ",".join(each for each in Right if each is not right)
    put(place.run, tree)
    before = place.beside()
    for command in only:
        code, said, events = used(place, commands, command, others, tmp_path)
        found += [f"{command}: {e}" for e in events if e[0] in FORBIDDEN[right]]
        if place.heard() or CANARY in said:
            found.append(f"{command}: the canary was heard")
        found += [f"{command}: {path} holds the canary" for path in holding(place.run, tmp_path)]
        if place.beside() != before:
            found.append(f"{command}: something outside the run was written")
        if command == "train" and code != 2:  # evaluate does not ask for what it does not use
            found.append(f"{command}: exit code {code}: {said[-300:]}")
    return found


NAMING = [each for each in MARKED if each.mark is not None]
QUICK = ("remote:url", "remote:key", ":track.with", ":model.weights", "code_tests:isolation")


def title(each: Marked) -> str:
    return f"{each.reward}:{each.setting}"


@pytest.mark.slow
@pytest.mark.parametrize("each", NAMING, ids=title)
def test_no_command_uses_what_a_strange_folder_names(each, place, commands, tmp_path):
    assert each.mark is not None
    found, last = list[str](), each.setting.rpartition(".")[2]
    for number, value in enumerate(spellings(each, place)):
        tree = trees(each, value, place)
        # the first spelling under every command, the others where all of a folder is used
        only = [*COMMANDS] if number == 0 else WHOLE
        wrong = wrong_uses(place, commands, tmp_path, each.mark.right, tree, only)
        found += [f"{value!r}: {what}" for what in wrong]
    assert not found
    _, good = values(each.mark, place.run, last)
    if good is not None:
        put(place.run, trees(each, good, place))
        _, said, _ = used(place, commands, "doctor", "", tmp_path)
        asked = [line for line in said.splitlines() if "not granted: " in line]
        assert "accounts: to" in said and not [line for line in asked if f"{last}: " in line], said


@pytest.mark.slow
@pytest.mark.parametrize("name", CODE_PLACES)
def test_no_command_imports_what_a_strange_folder_names(name, place, commands, tmp_path):
    found: list[str] = []
    for number, spelling in enumerate(NAMES):
        written = spelling.format(place.outside / "e.py")
        tree = {**place.begun, **spelt(CODE_PLACES[name], written)}
        only = [*COMMANDS] if number == NAMES.index("{}:f") else WHOLE
        wrong = wrong_uses(place, commands, tmp_path, Right.CODE, tree, only)
        found += [f"{written!r}: {what}" for what in wrong]
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("command", ["evaluate", "sample", "export", "report", "compare"])
def test_the_folder_itself_is_used_without_any_right(command, place, commands, tmp_path):
    put(place.run, place.begun)
    code, said, events = used(place, commands, command, "", tmp_path)
    assert code == 0, said[-900:]
    kinds = {"connect", "variable", "tracker"}
    assert not [event for event in events if event[0] in kinds]
    assert not [event for event in events if CANARY in event[1] or "/.ssh" in event[1]]


def _asking(place: Place, **more: str) -> dict[str, Any]:
    return {"rewards": [{"name": "remote", "url": f"http://127.0.0.1:{place.port}", **more}]}


NAMED: dict[str, tuple[Right, Callable[[Place], dict[str, Any]]]] = {
    "code": (Right.CODE, lambda p: {"rewards": [{"name": f"{p.outside / 'e.py'}:f"}]}),
    "network": (Right.NETWORK, _asking),
    "variables": (Right.VARIABLES, lambda p: _asking(p, key=VARIABLE)),
    "files": (Right.FILES, lambda p: {"prompts": {"train": str(p.outside / "secret.txt")}}),
    "trackers": (Right.ACCOUNTS, lambda _: {"track": {"with": ["wandb"]}}),
    "the hub's token": (
        Right.ACCOUNTS,
        lambda _: {"rewards": [{"name": "clip", "model": "owner/name"}]},
    ),
}
HARMLESS = {"rewards": [{"name": "flowrl/demo/taste.py:warm"}, {"name": "brightness"}]}
SECRET_FILES = (".ssh", ".netrc", ".aws", ".cache/huggingface/token")


class Listener(ThreadingHTTPServer):
    """A server and hub of this machine that has nothing, and keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Refusing)
        self.heard: list[str] = []
        self.port = self.server_address[1]


class Refusing(BaseHTTPRequestHandler):
    def refuse(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        assert isinstance(self.server, Listener)
        self.server.heard.append(f"{self.requestline}\n{self.headers}\n{body!r}")
        self.send_error(404)

    do_GET = do_HEAD = do_POST = refuse

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing into the tests' output."""


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def as_downloaded(place: Place, folder: Path, port: int) -> Place:
    """A copy of the run in a folder where nothing was begun."""
    shutil.copytree(place.run, folder / "run", ignore=shutil.ignore_patterns("link"))
    shutil.copytree(place.run.with_name("other"), folder / "other")
    run = folder / "run"
    begun = json.loads(json.dumps(place.begun).replace(str(place.run), str(run)))
    return place._replace(begun=begun, run=run, port=port)


def under_strace(place: Place, hub: Listener, words: Sequence[str]) -> Traced:
    """A command under strace: every place of flowrl's own is in the folder of `place`, and every
    variable that is known for a secret, and every file, has the canary."""
    folder = place.run.parent
    (folder / "tmp").mkdir(exist_ok=True)
    own = {name: value for name, value in runs.environment().items() if name != "HF_HUB_OFFLINE"}
    return traced(words, folder, own | {
        "HOME": str(place.outside), "TMPDIR": str(folder / "tmp"), VARIABLE: CANARY,
        "FLOWRL_STATE": str(folder / "state"), "FLOWRL_CACHE": str(folder / "cache"),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.port}", "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys(SECRETS, CANARY),
    })  # fmt: skip


def strayed(place: Place, hub: Listener, done: Traced) -> list[str]:
    """What a command did that no folder may have it do without a right."""
    folder = place.run.parent
    own = [folder / name for name in ("run", "pages", "state", "cache", "tmp")]
    own += [place.outside / ".cache", "/dev", "/proc"]
    found = [f"changed {path}" for path in done.changed() if not _below(path, own)]
    secret = [place.outside / name for name in SECRET_FILES]
    found += [f"opened {path}" for path in done.opened() if _below(path, secret)]
    found += [f"sent {call}" for call in done.sent(CANARY)]
    found += [f"the hub heard {heard}" for heard in hub.heard if CANARY in heard]
    found += [f"{path} holds the canary" for path in holding(*map(Path, own[:5]))]
    return found + (["the canary was printed"] if CANARY in done.said else [])


def _below(path: str, places: Sequence[str | Path]) -> bool:
    return any(Path(path).is_relative_to(each) for each in places)


@pytest.mark.slow
@strace_needed
@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("command", TRUSTING)
def test_nor_does_the_kernel_see_it(command, named, place, listener, tmp_path):
    """The calls of a command and of all that it starts, with all rights but one."""
    right, tree = NAMED[named]
    own = as_downloaded(place, tmp_path, listener.port)
    put(own.run, own.begun | tree(own))
    others = ",".join(each for each in Right if each is not right)
    done = under_strace(own, listener, words_of(own, command, others, tmp_path))
    assert not strayed(own, listener, done)
    # the hub may be read without its token, and a page of votes is read by who votes
    if right is Right.ACCOUNTS:
        assert command == "vote" or done.connections() <= {listener.port}
    else:
        assert listener.port not in done.connections()
        assert command == "vote" or not done.connections()
    assert not [p for p in done.opened() if _below(p, [own.outside]) and ".cache" not in p]
    assert command != "train" or named == "the hub's token" or done.code == 2, done.said[-900:]


@pytest.mark.slow
@strace_needed
@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in TRUSTING])
def test_nor_in_a_command_that_can_be_granted_nothing(command, place, listener, tmp_path):
    """All that folders may name at once."""
    own = as_downloaded(place, tmp_path, listener.port)
    tree: dict[str, Any] = {}
    for _, named in NAMED.values():
        more = named(own)
        tree |= more | {"rewards": [*tree.get("rewards", []), *more.get("rewards", [])]}
    put(own.run, own.begun | tree)
    done = under_strace(own, listener, words_of(own, command, "", tmp_path))
    assert not strayed(own, listener, done) and not done.connections()
    assert not [p for p in done.opened() if _below(p, [own.outside]) and ".cache" not in p]


@pytest.mark.slow
@strace_needed
@pytest.mark.parametrize("command", COMMANDS)
def test_the_kernel_sees_a_harmless_folder_work(command, place, listener, tmp_path):
    """The twin of each right: files of flowrl and of the folder alone, and no right granted."""
    own = as_downloaded(place, tmp_path, listener.port)
    put(own.run, own.begun | HARMLESS | {"train": {**own.begun["train"], "iterations": 2}})
    done = under_strace(own, listener, words_of(own, command, "", tmp_path))
    assert done.code == 0, done.said[-900:]
    assert not strayed(own, listener, done)
    assert not listener.heard and listener.port not in done.connections()
    assert not done.connections() or command == "vote"  # its own page


USED: dict[str, Callable[[Place, Traced], Any]] = {
    "code": lambda place, done: str(place.outside / "e.py") in done.opened(),
    "network": lambda place, done: place.port in done.connections(),
    "variables": lambda _, done: done.sent(CANARY),
    "files": lambda place, done: str(place.outside / "secret.txt") in done.opened(),
    "the hub's token": lambda _, done: done.sent(CANARY),
}


@pytest.mark.slow
@strace_needed
@pytest.mark.parametrize("named", USED)
def test_the_kernel_sees_what_a_right_is_used_for(named, place, listener, tmp_path):
    """Else the grid would see nothing at all."""
    own = as_downloaded(place, tmp_path, listener.port)
    put(own.run, own.begun | NAMED[named][1](own))
    done = under_strace(own, listener, ["train", "--resume", str(own.run), "--trust"])
    assert USED[named](own, done), done.said[-900:]
