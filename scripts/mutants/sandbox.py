"""Mutants of the sandbox: a call that is let through, a limit or a protection that is believed, a
process that is not ended, a rule of Landlock's or of a control group that is left out; and of what
is bounded before it is read. `run.py` runs them.

A row is name, file, text that occurs once in it, what to put, tests that must fail.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[2]
CONFINE, CALLS = "rewards/sandbox/confine.py", "rewards/sandbox/syscalls.py"
KEEPER, LANDLOCK, GROUP = (
    f"rewards/sandbox/{name}.py" for name in ("keeper", "landlock", "cgroup")
)
AWAY, TRAINING = "rewards/sandbox/away.py", "flowrl/drill/training.py"
LESS, ESCAPES = "rewards/test_less_isolation.py", "rewards/test_sandbox_escapes.py"
CODE, GROUPS, EXTERNAL = (
    f"rewards/test_{name}.py" for name in ("rewards_sandbox", "cgroup", "external_sandbox")
)
REACHES = f"{LESS}::test_without_namespaces_no_call_reaches_others"
MOUNTS = f"{LESS}::test_where_mounts_alone_are_refused_a_program_has_its_own_folder"
LIMITS = f"{LESS}::test_a_limit_that_the_kernel_does_not_have_is_a_missing_protection"
READS = f"{LESS}::test_with_landlock_nothing_is_read_or_written_by_a_library"
LEFT = f"{ESCAPES}::test_nothing_is_alive_after_the_verdict"
TOGETHER = f"rewards/test_rewards_code.py {CODE}"
ENDED = "cli/test_ended.py"
_REFUSED = "refused = UNCOUNTED | ({} if processes else STARTING) | ({} if alone else REACHING)"


def calls_let_through() -> Iterator[tuple[str, str, str, str, str]]:
    """A row for each call that only a process with namespaces may make."""
    tree = ast.parse((_PROJECT / CALLS).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REACHING":
            assert isinstance(node.value, ast.Dict)
            for key in node.value.keys:
                assert isinstance(key, ast.Constant)
                if key.value not in ("socket", "fchmodat2"):  # by its families; of newer kernels
                    put = f"{_REFUSED}\n    refused.pop({key.value!r}, None)"
                    yield f"calls-{key.value}", CALLS, _REFUSED, put, REACHES


# fmt: off
ROWS = (
    *calls_let_through(),
    ("calls-unknown", CALLS, "    steps += [(RETURN, 0, 0, ENOSYS)]", "    steps += [(RETURN, 0, 0, ALLOW)]", REACHES),
    ("calls-third-set", CALLS, "    if column == 0:\n", "    if column == 9:\n", REACHES),
    ("calls-reaching", CALLS, "({} if alone else REACHING)", "{}", REACHES),
    ("calls-shared", CALLS, "(ANY_BIT, 0, 1, SHARED),", "(ANY_BIT, 0, 1, 0),",
     f"{ESCAPES}::test_memory_is_mapped_where_it_can_be_counted"),
    ("calls-huge", CALLS, "(ANY_BIT, 2, 0, HUGE),", "(ANY_BIT, 2, 0, 0),",
     f"{ESCAPES}::test_memory_is_mapped_where_it_can_be_counted"),
    ("calls-families", CALLS, "steps += [(RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)]\n    steps += _clone",
     "steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ALLOW)]\n    steps += _clone", LEFT),
    ("calls-clone", CALLS, "(ANY_BIT, 0, 1, CLONE_NAMESPACES),", "(ANY_BIT, 0, 1, 0),", LEFT),
    ("mounts-own", CONFINE, "    if own_mounts:\n", "    if True:\n",
     f"{LESS}::test_nothing_is_mounted_unless_the_space_of_mounts_is_new"),
    ("mounts-folder", CONFINE, "                    os.chown(path, uid, uid)", "                    pass", MOUNTS),
    ("mounts-libraries", CONFINE, "if not _tried(functools.partial(_reads_as, uid, libraries)):", "if False:", MOUNTS),
    ("mounts-read-only", CONFINE, "        _read_only(libc, target)\n", "", LEFT),
    ("limits-lost", CONFINE, "                lost.append(RESTING[kind])", "                pass", LIMITS),
    ("limits-processes", CONFINE, "        limits[resource.RLIMIT_NPROC] = processes\n", "        pass\n",
     TOGETHER),
    ("limits-files", CONFINE, "nr_inodes={MOST_FILES}", "nr_inodes=0", TOGETHER),
    ("keeper-memory", KEEPER, "(counted and held_bytes() > memory)", "False", TOGETHER),
    ("keeper-first-thread", KEEPER, "        if status:\n            return status\n", "        return status\n",
     LEFT),
    ("keeper-lifeline", KEEPER, "        if file in ready:\n            return None\n", "",
     f"{ESCAPES}::test_nothing_is_alive_after_the_run_is_killed_in_the_middle"),
    ("keeper-folder", KEEPER, "    if _closed(settings[\"lifeline\"]):", "    if False:",
     f"{ESCAPES}::test_nothing_is_alive_after_the_run_is_killed_in_the_middle"),
    ("landlock-restricts", LANDLOCK, "return libc.syscall(RESTRICT_SELF, rules, 0) == 0", "return True", READS),
    ("landlock-read", LANDLOCK, "(read, READ_RIGHTS), (write,", "(read, READ_RIGHTS), ([\"/\"],", READS),
    ("landlock-links", LANDLOCK, "rights if folder else rights & FILE_RIGHTS", "rights", f"{LESS}::test_right_programs_are_right"),
    ("group-kill", GROUP, '        _write(group, "cgroup.kill", 1)\n', "        pass\n", GROUPS),
    ("group-pids", GROUP, '        "pids.max": settings["processes"] + keepers,\n', "", GROUPS),
    ("group-memory", GROUP, '        "memory.oom.group": 1,\n', "", GROUPS),
    ("group-given", GROUP, "and (user or _delegated(folder, root))", "", GROUPS),
    ("away-input", AWAY, "        _read_all_input()\n", "", EXTERNAL),
    ("away-name", AWAY, "    sys.argv = [AWAY_FILE]\n", "", EXTERNAL),
    ("away-owner", AWAY, "os.getpid() == owner and shutil", "shutil", EXTERNAL),
    ("ended-forked", "flowrl/cli/ended.py", "        if signal.getsignal(number) is signal.SIG_DFL:", "        if False:", ENDED),
    ("ended-once-more", "flowrl/cli/ended.py", "        signal.signal(number, signal.SIG_DFL)\n        if os.getpid()", "        if os.getpid()", ENDED),
    ("ended-launcher", "flowrl/cli/ended.py", "    if not alone or threading", "    if threading", ENDED),
    ("drill-signals", TRAINING, "        for process in family:\n            self.signal(signal.SIGKILL, process)\n", "",
     "drill/test_faults.py::test_nothing_that_was_started_is_alive_afterwards"),
    ("answer-inflated", "rewards/serving/bounded.py", "self._inflate.decompress(part, self.most - self.size + 1)",
     "self._inflate.decompress(part)", "rewards/test_remote_wire.py rewards/test_remote_client.py"),
    ("answer-bound", "rewards/serving/bounded.py", "        if self.size > self.most:\n", "        if False:\n",
     "rewards/test_remote_wire.py rewards/test_remote_client.py"),
    ("image-pixels", "rewards/perception/files.py", "    if image.width * image.height > most_pixels:", "    if False:",
     "rewards/test_image_files.py"),
    ("parquet-rows", "flowrl/prompts/parquet.py", "    if rows > MOST_TABLE_ROWS:", "    if False:",
     "prompts/test_hostile_tables.py"),
    ("parquet-groups", "flowrl/prompts/parquet.py", "rows = max(header.num_rows, sum(counts))", "rows = header.num_rows",
     "prompts/test_hostile_tables.py"),
    ("parquet-below-zero", "flowrl/prompts/parquet.py", "if min(header.num_rows, *counts, 0) < 0:", "if False:",
     "prompts/test_hostile_tables.py::test_counts_below_zero_are_damage"),
    ("parquet-bytes", "flowrl/prompts/parquet.py", "    if size > MOST_TABLE_BYTES:", "    if False:",
     "prompts/test_hostile_tables.py"),
    ("weights-header", "rewards/perception/weight_files.py", "    if length > MOST_HEADER and length <= size - 8:", "    if False:",
     "rewards/test_weight_files.py"),
    ("weights-header-read", "rewards/perception/weight_files.py", "length > min(file.stat().st_size - 8, MOST_HEADER)",
     "length > file.stat().st_size - 8", "rewards/test_weight_files.py"),
    ("parquet-cells", "flowrl/prompts/parquet.py", "    if cells > MOST_CELLS:", "    if False:",
     "prompts/test_hostile_tables.py"),
)
