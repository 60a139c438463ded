"""Control groups: where they are delegated, what is written there, and that a program enters its
own. The hierarchy is a folder of files; no machine of ours delegates a real one."""

import os
from pathlib import Path

import pytest

from rewards.sandbox import cgroup, run
from rewards.sandbox.run import SandboxLimits
from tests.rewards.test_rewards_code import ISOLATED


def hierarchy(tmp_path: Path, enabled: str = "memory pids") -> tuple[str, str]:
    """A user's service in a slice that is delegated to it, and the file that names it."""
    slice_folder = tmp_path / "root/user.slice/app.slice"
    (slice_folder / "mine.service").mkdir(parents=True)
    for folder, text in ((slice_folder, enabled), (slice_folder / "mine.service", "")):
        (folder / "cgroup.procs").write_text("")
        (folder / "cgroup.subtree_control").write_text(text)
    own = tmp_path / "own"
    own.write_text("4:memory:/other\n0::/user.slice/app.slice/mine.service\n")
    return str(tmp_path / "root"), str(own)


def test_the_slice_above_is_found(tmp_path):
    root, own = hierarchy(tmp_path)
    assert cgroup.delegated_folder(root, own, 1000) == f"{root}/user.slice/app.slice"


def test_without_controllers_or_a_second_version_there_is_none(tmp_path):
    root, own = hierarchy(tmp_path, "cpu memory")
    assert cgroup.delegated_folder(root, own, 1000) is None
    Path(own).write_text("4:memory:/other\n")
    assert cgroup.delegated_folder(root, own, 1000) is None
    assert cgroup.delegated_folder(root, f"{own}-not-there", 1000) is None


def test_what_this_user_may_not_move_is_not_used(tmp_path, monkeypatch):
    root, own = hierarchy(tmp_path)
    shut = f"{root}/user.slice/app.slice/cgroup.procs"
    monkeypatch.setattr(cgroup.os, "access", lambda path, mode: path != shut)
    assert cgroup.delegated_folder(root, own, 1000) is None


def test_root_uses_only_what_systemd_gives(tmp_path, monkeypatch):
    root, own = hierarchy(tmp_path)
    folder = f"{root}/user.slice/app.slice"
    given = dict[str, bytes]()

    def attribute(path: str, name: str) -> bytes:
        if path not in given:
            raise OSError
        return given[path]

    monkeypatch.setattr(cgroup.os, "getxattr", attribute)
    monkeypatch.setattr(cgroup.os.path, "isdir", lambda path: True)
    assert cgroup.delegated_folder(root, own, 0) is None
    given[f"{root}/user.slice"] = b"1"
    assert cgroup.delegated_folder(root, own, 0) == folder


def test_limits_are_written_and_empty_groups_of_the_dead_are_removed(tmp_path):
    settings = {"memory": 2**28, "written": 2**20, "processes": 16}
    gone, alive = tmp_path / "flowrl-4000000-ab", tmp_path / f"flowrl-{os.getpid()}-cd"
    gone.mkdir()
    alive.mkdir()
    group = cgroup.group_name(str(tmp_path), "ef")
    assert not gone.exists() and alive.exists()
    assert cgroup.make_group(group, settings, 2)
    read = {path.name: path.read_text() for path in Path(group).iterdir()}
    assert read == {
        "memory.max": str(2**28 + 2**20 + cgroup.KEEPER_BYTES), "memory.swap.max": "0",
        "memory.oom.group": "1", "pids.max": "18",
    }  # fmt: skip
    assert not cgroup.make_group(group, settings, 2), "it exists"


@pytest.mark.skipif(not ISOLATED, reason="no namespaces are permitted here")
def test_a_program_enters_its_group_and_the_group_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_groups", lambda: str(tmp_path))
    monkeypatch.setattr(cgroup, "REMOVE_SECONDS", 0.0)
    result = run.run_program("import os\nprint(os.getpid(), os.fork() >= 0)", "", SandboxLimits())
    assert result.code == 0 and result.output.count("True") == 2 and not result.missing
    (group,) = tmp_path.iterdir()
    assert (group / "cgroup.procs").read_text() == "0"
    assert (group / "cgroup.kill").read_text() == "1"


@pytest.mark.skipif(not ISOLATED, reason="no namespaces are permitted here")
def test_a_group_that_the_kernel_refuses_leaves_the_watcher(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_new_group", lambda: str(tmp_path / "not/there"))
    code = (
        "import os, time\nfor _ in range(9):\n    if os.fork() == 0:\n"
        "        kept = bytearray(2**26); time.sleep(3); os._exit(0)\ntime.sleep(3)\nprint('all')"
    )
    result = run.run_program(code, "", SandboxLimits(seconds=4.0, memory=2**28))
    assert result.output == "" and result.code == 137
