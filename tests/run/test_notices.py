"""Notices of runs: what a command and a webhook of the user's configuration get, and when."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowrl.cli import doctor
from flowrl.cli.restarts import _Parent
from flowrl.errors import UserError
from flowrl.processes import watch
from flowrl.run import start as run_start
from flowrl.run.train import Result
from flowrl.session.notices import Notices, configured_receiver, open_notices
from rewards.configuration import CONFIGURATION_VARIABLE, configuration_file
from tests.support import process_runs, runs
from tests.support.advice import advice

KEPT = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"  # a notice per line


@pytest.fixture(autouse=True)
def _wanted(monkeypatch) -> None:
    monkeypatch.delenv("FLOWRL_NOTIFY", raising=False)


def configure(folder: Path, monkeypatch, text: str) -> None:
    file = folder / "config.toml"
    file.write_text(text)
    file.chmod(0o600)
    monkeypatch.setenv(CONFIGURATION_VARIABLE, str(file))


def keeping(folder: Path, monkeypatch, more: str = "") -> Path:
    """Configure a command that appends each notice to a file, which is returned."""
    kept = folder / "notices.jsonl"
    words = json.dumps([sys.executable, "-c", KEPT, str(kept)])
    configure(folder, monkeypatch, f"[notify]\ncommand = {words}\n{more}")
    return kept


def sent(kept: Path) -> list[dict]:
    return [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []


def run_folder(place: Path) -> Path:
    """A folder as a run of 3 of 4 iterations leaves it."""
    place.mkdir()
    (place / "run.yaml").write_text("recipe: {name: nft}\ntrain: {iterations: 4}\n")
    scores = {0: 0.25, 1: None, 2: 0.75, 3: 0.5}
    lines = [
        {"iteration": done} | ({} if score is None else {"held_out/redness": score})
        for done, score in scores.items()
    ]
    lines[3]["alarms"] = 2
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


@contextmanager
def webhook(answer: int = 200, slow: float = 0.0) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A server's address, and the paths and bodies that it gets."""
    bodies: list[tuple[str, bytes]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answer)
            self.send_header("Location", "/elsewhere")
            for _ in range(int(slow * 20)):  # a byte now and then: no call of a socket is late
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/secret-name", bodies
    finally:
        server.shutdown()
        server.server_close()


def test_a_command_gets_a_notice_and_no_variable_that_its_section_does_not_name(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hidden")
    monkeypatch.setenv("CHANNEL", "runs")
    kept = tmp_path / "kept.json"
    code = (
        "import json, os, sys; json.dump([json.load(sys.stdin), dict(os.environ), os.getcwd()], "
        f"open({str(kept)!r}, 'w'))"
    )
    words = json.dumps([sys.executable, "-c", code])
    configure(tmp_path, monkeypatch, f'[notify]\ncommand = {words}\nenvironment = ["CHANNEL"]')
    notices = open_notices(run_folder(tmp_path / "mine"), pytest.fail)
    assert notices is not None
    notices.send("failed", "the disk is full.")
    notices.close()
    notice, environment, folder = json.loads(kept.read_text())
    assert notice == {
        "text": "mine: the disk is full (3 of 4 iterations; held-out redness 0.250 -> 0.750 at 2)",
        "state": "failed",
        "run": str(tmp_path / "mine"),
        "host": os.uname().nodename,
        "iteration": 3,
        "iterations": 4,
        "alarms": 2,
        "held_out": {"name": "redness", "base": 0.25, "best": 0.75, "best_at": 2},
    }
    assert environment["CHANNEL"] == "runs" and "HF_TOKEN" not in environment
    assert "PYTHONPATH" not in environment and folder == str(tmp_path)


def test_a_webhook_gets_it_by_post(tmp_path, monkeypatch) -> None:
    with webhook() as (url, bodies):
        configure(tmp_path, monkeypatch, f'[notify]\nurl = "{url}"')
        notices = open_notices(run_folder(tmp_path / "mine"), pytest.fail)
        assert notices is not None
        notices.send("finished", "the run is done")
        notices.close()
    ((path, body),) = bodies
    notice = json.loads(body)
    assert path == "/secret-name" and notice["state"] == "finished"
    assert notice["held_out"]["best"] == 0.75


BROKEN = {
    "fails": ("raise SystemExit('no such channel')", "ended with code 1: no such channel"),
    "hangs": ("import time; time.sleep(60)", "did not end within 0.3 seconds"),
    "leaves a child with its output": (
        "import subprocess, sys; subprocess.Popen(['sleep', '60'])\nraise SystemExit(7)",
        "ended with code 7",
    ),
    "writes without end": (
        "import sys\nwhile True: sys.stderr.write('x' * 9999)",
        "did not end within 0.3 seconds",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_command_that_does_not_work_is_one_warning_in_bounded_time(
    how, tmp_path, monkeypatch
) -> None:
    code, said = BROKEN[how]
    words = json.dumps([sys.executable, "-I", "-S", "-c", code])
    seconds = 0.3 if "0.3" in said else 10
    configure(tmp_path, monkeypatch, f"[notify]\ncommand = {words}\nseconds = {seconds}")
    warned: list[str] = []
    notices = open_notices(tmp_path / "gone", warned.append)
    assert notices is not None
    began = time.monotonic()
    notices.send("failed", "one")
    notices.send("failed", "two")
    notices.close()
    assert time.monotonic() - began < 5
    assert len(warned) == 1 and said in warned[0] and sys.executable in warned[0]


@pytest.mark.parametrize(("answer", "slow", "said"), [
    (404, 0.0, "it answered 404"),
    (302, 0.0, "it answered 302"),
    (200, 1.5, "did not answer within 0.3 seconds"),
    (0, 0.0, "cannot be reached"),
])  # fmt: skip
def test_a_webhook_that_does_not_work_is_one_warning_without_its_address(
    answer, slow, said, tmp_path, monkeypatch
) -> None:
    warned: list[str] = []
    with webhook(answer, slow) as (url, bodies):
        if not answer:
            url = "http://127.0.0.1:9/secret-name"
        configure(tmp_path, monkeypatch, f'[notify]\nurl = "{url}"\nseconds = 0.3')
        notices = open_notices(tmp_path / "gone", warned.append)
        assert notices is not None
        notices.send("failed", "one")
        notices.close()
    assert len(warned) == 1 and said in warned[0] and "http://127.0.0.1" in warned[0]
    assert "secret-name" not in warned[0] and all(path != "/elsewhere" for path, _ in bodies)


MISTAKES = {
    'command = ["a"]\nurl = "https://a.org/b"': "write one of",
    "": "write one of",
    'command = "a b"': "command must be a list of words",
    'command = ["a", 1]': "command must be a list of words",
    'command = ["a"]\nwhen = 1': "no key 'when', but command, url",
    'command = ["a"]\non = ["done"]': "'done' is none of finished, failed, stopped, alarm",
    'command = ["a"]\nseconds = 0': "above 0 and at most 60",
    'command = ["a"]\nseconds = nan': "above 0 and at most 60",
    'command = ["a"]\nseconds = true': "seconds is not a number",
    'command = ["a"]\nenvironment = "PATH"': "environment must be a list of words",
    'url = "file:///etc/passwd"': "must be an address such as",
    'url = "https://me:word@a.org/b"': "must be an address such as",
    'url = "https://a.org/b c"': "must be an address such as",
    'url = "https://a.org:port/b"': "must be an address such as",
    "url = 3": "must be an address such as",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_section_of_another_form_is_a_warning_and_hinders_no_run(
    text, tmp_path, monkeypatch
) -> None:
    configure(tmp_path, monkeypatch, f"[notify]\n{text}")
    with pytest.raises(ValueError, match=r"config\.toml: ") as refused:
        configured_receiver()
    assert (
        MISTAKES[text] in str(refused.value) and "word" not in str(refused.value).split("list")[0]
    )
    warned: list[str] = []
    assert open_notices(tmp_path, warned.append) is None
    assert len(warned) == 1 and "no notice of this run is sent" in warned[0]


def test_an_empty_command_is_written_as_the_sentence_shows(tmp_path, monkeypatch) -> None:
    def configured(line: str) -> object:
        configure(tmp_path, monkeypatch, f"[notify]\n{line}")
        return configured_receiver()

    for line in ('command = ["my-program"]', 'url = "https://example.org/a"'):
        receiver = advice(
            "[notify] command is empty: write {}",
            lambda: configured("command = []"),
            partial(configured, line),
        )
        assert receiver is not None


def test_a_configuration_that_others_may_write_sends_nothing(tmp_path, monkeypatch) -> None:
    keeping(tmp_path, monkeypatch)
    assert configured_receiver() is not None
    monkeypatch.setenv("FLOWRL_NOTIFY", "off")
    assert configured_receiver() is None
    monkeypatch.delenv("FLOWRL_NOTIFY")
    configuration_file().chmod(0o622)
    with pytest.raises(ValueError, match="others can write it"):
        configured_receiver()
    monkeypatch.setenv(CONFIGURATION_VARIABLE, os.devnull)
    assert configured_receiver() is None


@pytest.mark.parametrize(
    ("variable", "word", "says"),
    [
        (CONFIGURATION_VARIABLE, "/nowhere/config.toml", "which is no file: correct it, or unset"),
        (CONFIGURATION_VARIABLE, "/", "which is no file: correct it, or unset"),
        ("FLOWRL_NOTIFY", "0", "FLOWRL_NOTIFY is '0', and its words are off and on"),
        ("FLOWRL_NOTIFY", "OFF", "its words are off and on"),
    ],
)
def test_a_variable_that_is_set_and_means_nothing_is_said(
    variable, word, says, tmp_path, monkeypatch
) -> None:
    """Who sets it waits for a notice, or for none."""
    keeping(tmp_path, monkeypatch)
    monkeypatch.setenv(variable, word)
    warned: list[str] = []
    assert open_notices(tmp_path, warned.append) is None
    assert len(warned) == 1 and says in warned[0]
    assert says in doctor._notices().detail


def test_the_last_notice_does_not_wait_for_alarms(tmp_path, monkeypatch) -> None:
    kept = keeping(tmp_path, monkeypatch)
    receiver = configured_receiver()
    assert receiver is not None
    gate, real = threading.Event(), type(receiver).deliver

    def held(self, notice) -> str:
        gate.wait(5)
        return real(self, notice)

    monkeypatch.setattr(type(receiver), "deliver", held)
    notices = Notices(receiver, run_folder(tmp_path / "mine"), pytest.fail)
    for number in range(5):
        notices.send("alarm", f"alarm {number}")
    time.sleep(0.05)  # the first one is on its way
    notices.send("finished", "the run is done")
    threading.Timer(0.1, gate.set).start()
    notices.close()
    assert [notice["state"] for notice in sent(kept)] == ["alarm", "finished"]


def test_only_states_that_the_user_wants_are_sent(tmp_path, monkeypatch) -> None:
    kept = keeping(tmp_path, monkeypatch, 'on = ["failed"]')
    notices = open_notices(tmp_path / "mine", pytest.fail)
    assert notices is not None
    notices.send("finished", "no")
    notices.send("failed", "yes")
    notices.close()
    assert [notice["state"] for notice in sent(kept)] == ["failed"]


ENDS = {
    "done": (Result(Path("r"), weights=Path("r/adapter")), "finished", "the run is done"),
    "signal": (Result(Path("r"), signal=15), "stopped", "stopped by SIGTERM"),
    "sentence": (UserError("the disk is full"), "failed", "the disk is full"),
    "fault": (RuntimeError("shape mismatch"), "failed", "RuntimeError: shape mismatch"),
    "second Ctrl-C": (KeyboardInterrupt(), "stopped", "stopped at once (KeyboardInterrupt)"),
}


@pytest.mark.parametrize("end", ENDS)
def test_each_end_is_sent_once_by_the_main_process_alone(end, tmp_path, monkeypatch) -> None:
    kept = keeping(tmp_path, monkeypatch)
    ending, state, said = ENDS[end]

    def one(main: bool, done_before: bool = False) -> None:
        process = SimpleNamespace(is_main_process=main)
        try:
            with run_start.ends_noticed(tmp_path / "run", process, done_before) as notices:
                if isinstance(ending, BaseException):
                    raise ending
                assert notices.ended(ending) is ending
        except BaseException as error:
            assert error is ending, error

    one(main=False)
    assert sent(kept) == []
    one(main=True)
    assert [(n["state"], said in n["text"]) for n in sent(kept)] == [(state, True)]
    if end == "done":
        one(main=True, done_before=True)
        assert len(sent(kept)) == 1


def test_a_process_that_the_watch_ends_sends_its_reason(tmp_path, monkeypatch) -> None:
    kept = keeping(tmp_path, monkeypatch)
    child = os.fork()
    if child == 0:
        main = SimpleNamespace(is_main_process=True)
        with run_start.ends_noticed(tmp_path / "run", main, False):
            watch.end_process("no progress for 1800 s", 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert [notice["text"] for notice in sent(kept)] == ["run: no progress for 1800 s"]


@pytest.mark.parametrize(("code", "count"), [(-9, 1), (1, 0)])
def test_the_parent_of_restarts_sends_what_a_killed_child_could_not(
    code, count, tmp_path, monkeypatch
) -> None:
    kept = keeping(tmp_path, monkeypatch)
    sender = _Parent(1, run_folder(tmp_path / "mine"))._report(code, "ended by SIGKILL")
    assert (sender > 0) is bool(count)
    if sender:
        os.waitpid(sender, 0)
    assert [notice["state"] for notice in sent(kept)] == ["failed"] * count


def test_doctor_tries_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(CONFIGURATION_VARIABLE, os.devnull)
    assert "no [notify] in" in doctor._notices().detail
    monkeypatch.setenv("FLOWRL_NOTIFY", "off")
    assert "FLOWRL_NOTIFY is off" in doctor._notices().detail
    monkeypatch.delenv("FLOWRL_NOTIFY")
    kept = keeping(tmp_path, monkeypatch, 'on = ["failed"]')
    found = doctor._notices()
    assert found.state == "ok" and found.detail.endswith("it gets failed")
    assert [notice["state"] for notice in sent(kept)] == ["test"]
    configure(tmp_path, monkeypatch, '[notify]\ncommand = ["/nowhere/program"]')
    found = doctor._notices()
    assert found.state == "note" and "cannot be started" in found.detail
    configure(tmp_path, monkeypatch, "[notify]\ncommand = 3")
    assert doctor._notices().detail.startswith("none are sent")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    return runs.write_pipeline(tmp_path_factory.mktemp("pipeline") / "sd3")


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_sends_each_end_once(
    tmp_path, monkeypatch, pipeline
) -> None:
    """A callback's exception, then a resume to the end, then a resume of the finished run."""
    kept = keeping(tmp_path, monkeypatch)
    settings = runs.tree(pipeline, tmp_path, runs.NFT, iterations=2)
    settings["evaluate"] |= {"samples": 2, "per_prompt": 1, "steps": 2}
    settings["rewards"] = [{"name": f"{tmp_path / 'once.py'}:score"}]
    (tmp_path / "once.py").write_text(
        "from pathlib import Path\n"
        "def score(samples):\n"
        "    if Path('broken').exists() and len(samples.prompts) > 2:\n"
        "        raise RuntimeError('the server is gone')\n"
        "    return samples.media.mean((1, 2, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    config = runs.write(settings, tmp_path)
    Path("broken").touch()
    assert runs.flowrl("train", config, "--folder", "run", "--train.self_test", "off") == 3
    Path("broken").unlink()
    assert runs.flowrl("train", "--resume", "run") == 0
    assert runs.flowrl("train", "--resume", "run") == 0
    states = [notice["state"] for notice in sent(kept)]
    assert [state for state in states if state != "alarm"] == ["failed", "finished"]
    first, last = (n for n in sent(kept) if n["state"] != "alarm")
    assert "the server is gone" in first["text"] and first["iteration"] == 0
    assert last["iteration"] == 2 and last["held_out"]["name"] == "score"


@pytest.mark.slow
def test_two_processes_send_one_notice(tmp_path, monkeypatch, pipeline) -> None:
    kept = keeping(tmp_path, monkeypatch)
    settings = runs.tree(pipeline, tmp_path, runs.NFT, iterations=1)
    config = runs.write(settings, tmp_path)
    words = ("-m", "flowrl", "train", config, "--folder", tmp_path / "run")
    ended = process_runs.launch(process_runs.DDP, *words)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert [n["state"] for n in sent(kept) if n["state"] != "alarm"] == ["finished"]
