"""All programs of `flowrl doctor --sandbox`, right ones and forged verdicts, in each place in which
code is judged: what holds there, and the machine afterwards as it was before."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rewards.checks.escapes import PROTECTION_MEANINGS
from rewards.configuration import CONFIGURATION_VARIABLE
from tests.rewards.test_external_sandbox import COMMANDS
from tests.rewards.test_program_forms import FORMS
from tests.rewards.test_rewards_code import PLAIN
from tests.rewards.test_rewards_sandbox import FORGED
from tests.support import machine

pytestmark = [pytest.mark.slow, machine.needs_root]

NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
IN_BWRAP = ("bwrap", "--dev-bind", "/", "/", "--unshare-user", "--unshare-pid", "--proc", "/proc")
IN_GVISOR = ("runsc", "--ignore-cgroups", "--network=none", "--platform=ptrace", "do")
SHUT = (
    *("unshare", "--user", "--map-root-user", "sh", "-c"),
    "for name in user pid mnt net ipc; do echo 0 > /proc/sys/user/max_${name}_namespaces; done; "
    'exec "$@"',
    "sh",
)
# by place: the words before the command, and protections that the place cannot give
PLACES: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "root": ((), set()),
    "a user": (NOBODY, set()),
    "without namespaces": (SHUT, {"names", "disk"}),
    "bubblewrap": ((*NOBODY, *IN_BWRAP), set()),
    "gVisor": (
        IN_GVISOR,
        {"files", "disk", "processes", "names", "variables", "others"},
    ),
}
# what a command of the user's leaves unbounded: plain bubblewrap bounds neither processes nor
# memory in sum, and `runsc do` shows all files and holds what is written in memory
UNBOUNDED = {
    "bubblewrap": {"processes", "memory"},
    "gVisor": {"memory", "disk", "files", "names"},
}


def needs(*words: str) -> None:
    for word in ("bwrap", "runsc", "setpriv", "unshare"):
        if word in words and shutil.which(word) is None:
            pytest.skip(f"{word} is not installed")
    if "setpriv" in words:
        probe = subprocess.run([*NOBODY, sys.executable, "-c", ""], check=False)
        if probe.returncode:
            pytest.skip(f"another user cannot run {sys.executable}")


def own_environment(tmp_path: Path, **more: str) -> dict[str, str]:
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    for folder in tmp_path.parents[:2]:  # so that another user gets here
        folder.chmod(0o755)
    tmp_path.chmod(0o755)
    return {**os.environ, "HOME": str(tmp_path / "home"), **more}


def rows(said: str) -> dict[str, str]:
    """The answer to each protection: yes, no or impossible."""
    found = {}
    for line in said.splitlines():
        for protection, meaning in PROTECTION_MEANINGS.items():
            if line.startswith(f"{protection} ") and meaning in line:
                found[protection] = line.partition(meaning)[2].partition(":")[0].strip()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_what_tries_to_leave_is_held_and_leaves_nothing(place, tmp_path) -> None:
    before, lacking = PLACES[place]
    needs(*before)
    command = [*before, sys.executable, "-m", "flowrl", "doctor", "--sandbox"]
    done = machine.alone(command, tmp_path, own_environment(tmp_path))
    found = rows(done["said"])
    assert {name for name, answer in found.items() if answer == "no"} == set(), done["said"]
    assert {name for name, answer in found.items() if answer == "impossible"} == lacking
    assert found.keys() == PROTECTION_MEANINGS.keys() and done["code"] == bool(lacking)
    assert done["left"] == {}


def configured(tmp_path: Path, command: list[str]) -> dict[str, str]:
    file = tmp_path / "config.toml"
    file.write_text(f"[sandbox]\ncommand = {json.dumps(command)}\n")
    file.chmod(0o600)
    return own_environment(tmp_path, **{CONFIGURATION_VARIABLE: str(file)})


def external(sandbox: str) -> list[str]:
    needs(COMMANDS[sandbox][0])
    return [*COMMANDS[sandbox], os.path.realpath(sys.executable)]


@pytest.mark.parametrize("sandbox", COMMANDS)
def test_so_it_is_in_a_sandbox_of_the_users(sandbox, tmp_path) -> None:
    environment = configured(tmp_path, external(sandbox))
    command = [sys.executable, "-m", "flowrl", "doctor", "--sandbox", "--isolation", "external"]
    done = machine.alone(command, tmp_path, environment)
    found = rows(done["said"])
    open_there = UNBOUNDED[sandbox] | ({"files", "names"} if sandbox == "bubblewrap" else set())
    assert {name for name, answer in found.items() if answer == "no"} <= open_there, done["said"]
    assert found["end"] == found["network"] == found["variables"] == found["verdict"] == "yes"
    assert done["left"] == {}


JUDGED = """
import json, sys
from rewards.sandbox.external import configured
from rewards.sandbox.run import SandboxLimits
forms, forged, tests = json.loads(sys.argv[1])
external, limits = configured(), SandboxLimits(seconds=30.0)
wrong = []
for name, code in forms.items():
    found = external.run_program(code, "1\\n", limits)
    if found.output.strip() != "1":
        wrong.append([name, found.code, found.output[-200:]])
for name, code in forged.items():
    if any(external.run_tests(code, tests, SandboxLimits(seconds=3.0)).passed):
        wrong.append([name, "forged"])
print(json.dumps(wrong))
"""


@pytest.mark.parametrize("sandbox", COMMANDS)
def test_there_right_programs_pass_and_forged_verdicts_do_not(sandbox, tmp_path) -> None:
    environment = configured(tmp_path, external(sandbox))
    asked = json.dumps([FORMS, FORGED, PLAIN])
    done = machine.alone([sys.executable, "-c", JUDGED, asked], tmp_path, environment)
    assert json.loads(done["said"].splitlines()[-1]) == []
    assert done["code"] == 0 and done["left"] == {}


def test_a_process_a_queue_a_mount_and_a_file_are_seen(tmp_path) -> None:
    """Else the machine would always be as before."""
    leaving = (
        "import ctypes, os, tempfile, time\n"
        "ctypes.CDLL(None).shmget(7, 4096, 0o1600)\n"
        "ctypes.CDLL(None).mount(b'none', b'/mnt', b'tmpfs', 0, None)\n"
        "tempfile.mkstemp()\n"
        "if os.fork() == 0: os.setsid(); os.closerange(0, 9); time.sleep(60)\n"
    )
    done = machine.alone([sys.executable, "-c", leaving], tmp_path, own_environment(tmp_path))
    assert done["left"].keys() == {"processes", "queues", "mounts", "files"}
