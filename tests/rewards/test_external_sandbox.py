"""`isolation: external`: the judge over the input and output of a command of the user's."""

import errno
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rewards import load
from rewards.configuration import CONFIGURATION_VARIABLE, configured_section
from rewards.load import check_reward
from rewards.sandbox.external import External, configured
from rewards.sandbox.run import ProgramResult, SandboxLimits
from tests.rewards.test_program_forms import FORMS
from tests.rewards.test_rewards_code import PLAIN, block, of
from tests.rewards.test_rewards_sandbox import FORGED
from tests.support.advice import advice

# a command that isolates nothing; what is killed there leaves its folder, which a sandbox has alone
FOLDER = tempfile.TemporaryDirectory(prefix="flowrl-tests-")
PYTHON = External(("env", f"TMPDIR={FOLDER.name}", sys.executable))
SHORT = SandboxLimits(seconds=1.0, written=2**16)
BWRAP = [
    *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"),
    *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
]


def configure(tmp_path: Path, monkeypatch, text: str) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(text)
    file.chmod(0o600)
    monkeypatch.setenv(CONFIGURATION_VARIABLE, str(file))
    return file


def test_a_program_reads_its_input_and_its_code_comes_back() -> None:
    assert PYTHON.run_program("print(input()[::-1])", "abc\n", SHORT) == ProgramResult(
        0, "cba\n", ()
    )
    assert PYTHON.run_program("raise SystemExit(7)", "", SHORT).code == 7
    long = "x" * 2**20  # more than a pipe holds, and read late
    assert PYTHON.run_program("print(len(input()))", long, SHORT).output == "1048576\n"
    assert PYTHON.run_program("print(1)", long, SHORT).output == "1\n"


def test_a_programs_own_folder_goes_with_it_and_not_with_its_child() -> None:
    code = (
        "import os\nif os.fork() == 0: raise SystemExit\n"
        "os.wait()\nprint(os.getcwd(), os.path.exists(os.getcwd()))"
    )
    folder, there = PYTHON.run_program(code, "", SHORT).output.split()
    assert Path(folder).is_relative_to(FOLDER.name) and there == "True"
    assert not Path(folder).exists()


@pytest.mark.parametrize("name", ["input mapped", "its name"])
def test_a_program_finds_its_input_and_its_name_as_in_plain_python(name) -> None:
    """Two of the right forms that a pipe and a command line of ours would break."""
    assert PYTHON.run_program(FORMS[name], "1\n", SHORT).output == "1\n"


def test_time_and_output_are_bounded() -> None:
    began = time.monotonic()
    code = "print(1, flush=True)\nwhile 1: pass"
    assert PYTHON.run_program(code, "", SHORT) == ProgramResult(None, "1\n", ())
    found = PYTHON.run_program("while 1: print('x' * 9999)", "", SHORT)
    assert len(found.output) == SHORT.written
    assert time.monotonic() - began < 10


def test_tests_are_judged_as_ever() -> None:
    assert PYTHON.run_tests("def f(x): return x + 1", PLAIN, SHORT) == ([True] * 3, False, {})
    slow = "import time\ndef f(x): return x + 1 if x == 2 else time.sleep(9)"
    assert PYTHON.run_tests(slow, PLAIN, SHORT) == ([True, False, False], True, {})
    gone = "import os\ndef f(x): return os._exit(0) if x < 0 else x + 1"
    assert PYTHON.run_tests(gone, PLAIN, SHORT) == ([True, False, False], False, {})
    rows = [["assert f(2) == 3"], ["assert f(2)"]]
    assert PYTHON.weak_rows(rows, 5.0, SHORT) == [None, "returns True"]


@pytest.mark.parametrize(
    "name", [n if n == "answers for the channel" else pytest.param(n, marks=pytest.mark.slow)
             for n in FORGED],
)  # fmt: skip
def test_a_verdict_cannot_be_forged(name) -> None:
    assert PYTHON.run_tests(FORGED[name], PLAIN, SHORT).passed == [False] * 3


def test_what_is_no_python_is_named(tmp_path, monkeypatch) -> None:
    configure(tmp_path, monkeypatch, '[sandbox]\ncommand = ["/bin/false"]')
    with pytest.raises(ValueError, match=r"`/bin/false` does not run a Python .* code 1"):
        load("code_tests", isolation="external")
    configure(tmp_path, monkeypatch, '[sandbox]\ncommand = ["/no/such"]')
    with pytest.raises(ValueError, match="cannot be started"):
        load("code_tests", isolation="external")


def test_the_reward_runs_behind_the_configured_command(tmp_path, monkeypatch) -> None:
    own = tmp_path / "mine"
    own.write_text(
        f'#!/bin/sh\necho >> {tmp_path}/started\nTMPDIR={tmp_path} exec {sys.executable} "$@"\n'
    )
    own.chmod(0o755)
    configure(tmp_path, monkeypatch, f'[sandbox]\ncommand = ["{own}"]')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reward = load("code_tests", isolation="external")
    media = [block("def f(x):\n    return x + 1"), block("def f(x):\n    return x")]
    assert reward(of(media, PLAIN)).tolist() == [1, 0]
    # one to try the command, and a program and a judge for each text
    assert len((tmp_path / "started").read_text()) == 5


@pytest.mark.parametrize(("text", "said"), [
    ("", "isolation: external needs command = .* below .sandbox."),
    ("[sandbox]", "write command = .* below .sandbox."),
    ('[sandbox]\ncommand = "bwrap python3"', "a list of words"),
    ('[sandbox]\ncommand = ["a"]\nnetwork = true', "and nothing else"),
    ('[sandbox]\ncommand = ["a"]\n[more]', "and nothing else"),
    ("[sandbox", "config.toml"),
])  # fmt: skip
def test_a_configuration_of_another_form_is_refused(text, said, tmp_path, monkeypatch) -> None:
    configure(tmp_path, monkeypatch, text)
    with pytest.raises(ValueError, match=said):
        configured()


def test_a_configuration_that_others_may_write_is_refused(tmp_path, monkeypatch) -> None:
    file = configure(tmp_path, monkeypatch, '[sandbox]\ncommand = ["a"]')
    assert configured().command == ("a",)
    file.chmod(0o620)
    with pytest.raises(ValueError, match="others can write it"):
        configured()


def test_a_configuration_is_mended_as_its_messages_say(tmp_path, monkeypatch) -> None:
    def section(text: str) -> Mapping[str, Any] | None:
        configure(tmp_path, monkeypatch, text)
        return configured_section("sandbox")

    def example() -> External:
        """What the message shows, with the words that its dots stand for."""
        with pytest.raises(ValueError, match="write ") as error:
            configured()
        shown = str(error.value).partition("write ")[2].partition(", a list of words")[0]
        line, _, header = shown.partition(" below ")
        configure(tmp_path, monkeypatch, f"{header}\n{line.replace('...', repr('--unshare-all'))}")
        return configured()

    assert advice(
        "write [{}] as a section",
        lambda: section('sandbox = "bwrap"'),
        lambda: section('[sandbox]\ncommand = ["bwrap"]'),
    ) == {"command": ["bwrap"]}
    configure(tmp_path, monkeypatch, '[sandbox]\ncommand = "bwrap python3"')
    sandbox = advice("write {}, a list of words, and nothing else", configured, example)
    assert sandbox.command == ("bwrap", "--unshare-all", "python3")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no configuration"))
    for followed in (
        lambda: monkeypatch.setenv(CONFIGURATION_VARIABLE, str(tmp_path / "config.toml")),
        lambda: monkeypatch.delenv(CONFIGURATION_VARIABLE),
    ):
        monkeypatch.setenv(CONFIGURATION_VARIABLE, str(tmp_path / "gone.toml"))
        advice(
            "{} names {}, which is no file: correct it, or unset it",
            lambda: configured_section("sandbox"),
            lambda followed=followed: (followed(), configured_section("sandbox")),
        )


@pytest.mark.parametrize("setting", ["command", "external", "sandbox"])
def test_a_runs_file_names_no_command(setting) -> None:
    with pytest.raises(ValueError, match="never in a run's file; here write isolation: external"):
        check_reward("code_tests", {setting: ["sh", "-c", "id"]})


COMMANDS = {
    "bubblewrap": BWRAP,
    "gVisor": ["runsc", "--ignore-cgroups", "--network=none", "do"],
}


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", COMMANDS)
def test_in_a_sandbox_of_the_user(sandbox) -> None:
    command = COMMANDS[sandbox]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    inside = External((*command, os.path.realpath(sys.executable)))
    inside.check()
    assert inside.run_tests("def f(x): return x + 1", PLAIN, SHORT).passed == [True] * 3
    code = (
        "import socket\ntry: socket.create_connection(('1.1.1.1', 53), 1)\n"
        "except OSError as error: print(error.errno)"
    )
    found = inside.run_program(code, "", SHORT).output
    assert found in (f"{errno.ENETUNREACH}\n", f"{errno.EHOSTUNREACH}\n")
