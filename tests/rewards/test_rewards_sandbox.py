"""The sandbox: verdicts that cannot be forged, limits that hold, what a program cannot reach."""

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rewards.sandbox import run
from tests.rewards.test_rewards_code import ISOLATED, PLAIN, SMALL, passed

shut_in = pytest.mark.skipif(not ISOLATED, reason="no namespaces are permitted here")

FORGED = {
    "prints a verdict": "print('1\\n111')\nimport sys\nsys.stderr.write('passed')",
    "leaves early": "import sys\nsys.exit(0)",
    "leaves in the middle": "import os\ndef f(x):\n    os._exit(0)",
    "raises SystemExit in the middle": "def f(x):\n    raise SystemExit(0)",
    "equals everything": "class A:\n    def __eq__(s, o): return True\n    __lt__ = __eq__\n"
                         "    def __hash__(s): return 0\ndef f(x): return A()",
    "an int that equals everything": "class A(int):\n    def __eq__(s, o): return True\n"
                                     "def f(x): return A(7)",
    "no assertions": "import builtins\nbuiltins.AssertionError = ValueError\n"
                     "def f(x): raise AssertionError",
    "turns assertions off": "import sys, ast\nast.Assert = ast.Pass\ndef f(x): return 99",
    "writes to all files": "import os\nfor i in range(3, 4096):\n    try: os.write(i, b'111')\n"
                           "    except OSError: pass\ndef f(x): return 99",
    "reads the tests from its callers": "import sys, gc\ndef f(x):\n    seen = []\n"
                                        "    frame = sys._getframe()\n    while frame:\n"
                                        "        seen += [v for v in frame.f_locals.values()]\n"
                                        "        frame = frame.f_back\n"
                                        "    seen = [s for s in seen + gc.get_objects()"
                                        " if type(s) is str and '='.join(['2) =', ' 3']) in s]\n"
                                        "    return 3 if seen else 99",
    "answers for the channel": "import os, json\nfor i in range(3, 4096):\n    try:\n"
                               "        b = json.dumps({'value': True}).encode()\n"
                               "        os.write(i, len(b).to_bytes(4, 'little') + b)\n"
                               "    except OSError: pass\ndef f(x): return 99",
    "names of Python's": "def f(x): return 99\ndef AssertionError(*a): return SystemExit(0)",
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_verdict_cannot_be_forged(name):
    assert passed(FORGED[name]) == [False] * 3


EVERYTHING = """class A:
    n = 0
    def __getattr__(s, name): return lambda *a, **k: True
    def __contains__(s, x): return True
    def __len__(s): A.n += 1; return A.n
    def __bool__(s): A.n += 1; return A.n % 2 == 1
    def __iter__(s): return iter(range(10**6))
    def __getitem__(s, i): return i
    def __call__(s, *a, **k): return A()
def f(*a, **k): return A()
"""
WITH_HELPERS = """class np:
    allclose = array = staticmethod(lambda *a, **k: True)
class pytest: approx = staticmethod(lambda *a: 3)
def Counter(x): return 1
def isclose(*a): return True
def f(x): return 3 if x == 99 else 0
"""
EMPTY = "import numpy as np\ndef f(x): return np.array([])"
TAIL = "def f(x): return [3.0, float('nan'), float('nan')]"
FUNCTION = EVERYTHING.replace("def f(", "def F(")
PICKLED = """import pickle
CODE = "import os\\nfor i in range(3, 4096):\\n  try: os.write(i, b'1')\\n  except OSError: pass\\n"
class A:
    def __reduce__(s): return exec, (CODE,)
def f(x): return pickle.dumps(A())
"""
SOURCE = PICKLED.partition("class A")[0] + "def f(x): return f'exec({CODE!r})'"
EQUAL = "CODE = \"type('E', (), {'__eq__': lambda s, o: True})()\"\n"  # equals everything
UNPICKLED = (
    "import pickle\n"
    + EQUAL
    + """class A:
    def __reduce__(s): return eval, (CODE,)
def f(x): return pickle.dumps(A())
"""
)
EVALUATED = EQUAL + "def f(x): return CODE"
REDEFINED = (
    EQUAL
    + """FRAMES = "import sys\\nfor i in (1, 2): sys._getframe(i).f_globals['f'] = "
def f(x): return f'{FRAMES}lambda x: {CODE}'
"""
)
ANSWERING = """import json, os, stat
def socket():
    for number in range(3, 4096):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode): return number
        except OSError: pass
def exactly(size):
    found = b""
    while len(found) < size: found += os.read(socket(), size - len(found)) or os._exit(0)
    return found
while True:
    request, _, *given = json.loads(exactly(int.from_bytes(exactly(4), "little")))
    answer = {"value": VALUE, "arguments": given[0][0] if request == "call" else []}
    if request == "names": answer = {"value": {"list": ["f", "g"]}}
    if request == "get": answer = {"value": {"held": 1}}
    body = json.dumps(answer).encode()
    os.write(socket(), len(body).to_bytes(4, "little") + body)
"""  # a program that writes its side of the messages itself; VALUE is what its functions return


def answering(value: object) -> str:
    return ANSWERING.replace("VALUE", repr(value))


UNKNOWING = {
    "is NaN in an array of objects": (
        answering({"array": ["O", {"list": [{"float": "nan"}]}]}),
        "assert not abs(f(2) - 3) > 1e-6",
    ),
    "is NaN in a deque": (
        "from collections import deque\ndef f(x): return deque([float('nan')])",
        "from collections import deque\nassert not f(2) > deque([3])",
    ),
    "is the name of the wanted result": (
        "def f(x): return 'wanted'",
        "wanted = 3\nassert eval(f(2)) == wanted",
    ),
    "is empty for approx": (EMPTY, "import pytest\nassert f(2) == pytest.approx(3.0)"),
    "is empty for approx, turned": (EMPTY, "import pytest\nassert pytest.approx(3.0) == f(2)"),
    "is empty for all": (EMPTY, "assert (f(2) == 3).all()"),
    "is empty for allclose": (EMPTY, "import numpy as np\nassert np.allclose(f(2), 3.0)"),
    "is empty for a size": (EMPTY, "assert (abs(f(2) - 3) < 1e-6).all()"),
    "is empty for numpy's tests": (EMPTY, "import numpy as np\n"
                                          "np.testing.assert_allclose(f(2), 3.0)"),
    "has NaN behind max": (TAIL, "assert max(abs(a - b) for a, b in zip(f(2), [3, 4, 5])) < 1e-6"),
    "has NaN behind min": (TAIL, "assert min(-abs(a - b) for a, b in zip(f(2), [3, 4])) > -1e-6"),
    "is a function with a capital": (FUNCTION, "assert 3 in F(2)"),
    "is a pickle": (PICKLED, "import pickle\nassert pickle.loads(f(2)) == 3"),
    "is code for eval": (SOURCE, "assert eval(f(2)) == 3"),
    "is code for exec": (SOURCE, "exec(f(2))\nassert f(2) == 3"),
    "is a pickle that equals all": (UNPICKLED, "import pickle\nassert pickle.loads(f(2)) == 3"),
    "is code that equals all": (EVALUATED, "assert eval(f(2)) == 3"),
    "is code that redefines it": (REDEFINED, "exec(f(2))\nassert f(2) == 3"),
    "contains everything": (EVERYTHING, "assert 3 in f(2) and 4 in f(2)"),
    "has any length": (EVERYTHING, "r = f(2)\nassert len(r) == 1 and len(r) == 2"),
    "is true and false": (EVERYTHING, "r = f(2)\nassert r\nassert not r"),
    "iterates over everything": (EVERYTHING, "assert any(x == 3 for x in f(2))"),
    "is in every set": (EVERYTHING, "assert {3, 4} <= set(f(2))"),
    "has every item": (EVERYTHING, "r = f(2)\nassert r[3] == 3 and r[4] == 4"),
    "has methods of text": (EVERYTHING, "assert f(2).startswith('3')"),
    "has methods of sets": (EVERYTHING, "assert f(2).issuperset({3})"),
    "is a class in place of a function": ("class f:\n    def __init__(s, x): pass\n"
                                          "    def __contains__(s, x): return True",
                                          "assert 3 in f(2)"),
    "counts without end": ("import itertools\ndef f(x): return itertools.count()",
                           "assert 3 in f(2)"),
    "brings numpy": (WITH_HELPERS, "assert np.allclose(f(2), [7.0])"),
    "brings pytest": (WITH_HELPERS, "assert f(99) == pytest.approx(9)"),
    "brings Counter": (WITH_HELPERS, "assert Counter(f(2)) == Counter([7])"),
    "brings isclose": (WITH_HELPERS, "assert isclose(f(2), 7.0)"),
    "empties its argument": ("def f(a):\n    a.clear()\n    return []",
                             "a = [3, 1]\nassert f(a) == sorted(a)"),
    "empties its argument for None": ("def f(a): a.clear()",
                                      "a = [3, 1]\nassert f(a) == (sorted(a) or None)"),
    "is NaN": ("def f(x): return float('nan')", "assert not abs(f(2) - 3) > 1e-6"),
    "is a complex NaN": ("def f(x): return complex('nan')", "assert not abs(f(2) - 3) > 1e-6"),
    "is an array of NaN": ("import numpy\ndef f(x): return numpy.array([numpy.nan])",
                           "import numpy as np\nassert not (abs(f(2) - 3) > 1e-6).any()"),
    "stops the test's loop": ("def f(x): raise StopIteration",
                              "assert all(map(lambda x: f(x) == 3, [1, 2]))"),
    "stops the test's map": ("def f(x): raise StopIteration", "assert all(map(f, [1, 2]))"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWING)
def test_a_result_that_is_no_answer_passes_no_test(name):
    code, test = UNKNOWING[name]
    assert passed(code, [test]) == [False]


@pytest.mark.parametrize("kind", ["O", "U3", "(0,)f8", "V8", "M8[s]", [["a", "f8"]], 7, None])
def test_only_arrays_of_numbers_are_read(kind):
    """A program that sends others has not passed; and it is not that this judge cannot judge it."""
    code = answering({"array": [kind, {"list": ["abc"]}]})
    found = run.run_tests(code, ["assert g(f('hi')) == 'hi'", "assert f(2) == 3"], SMALL)
    assert found.passed == [False, False] and not found.limits


@pytest.mark.parametrize("first", ["", "import resource\n"])
def test_a_program_may_close_all_files_of_usual_numbers(first):
    most = "resource.getrlimit(resource.RLIMIT_NOFILE)[0]" if first else "256"
    code = f"import os\n{first}def f(x):\n    os.closerange(3, {most})\n    return x + 1"
    assert passed(code, ["assert f(2) == 3", "assert f(3) == 4"]) == [True, True]


def test_a_program_that_answers_by_itself_is_judged_by_its_answers():
    assert passed(answering({"int": "0x3"}), ["assert f(2) == 3", "assert f(2) == 4"]) == [
        True,
        False,
    ]


def test_empty_arrays_and_numbers_in_order_still_pass():
    code = "import numpy as np\nclass F:\n    def __contains__(s, x): return x == 3\n"
    code += "def f(x): return np.array([]) if x == 0 else np.array([3.0])\n"
    tests = [
        "import numpy as np\nassert np.array_equal(f(0), np.array([])) and f(0).shape == (0,)",
        "import numpy as np, pytest\nassert f(0) == pytest.approx(np.array([])) and len(f(0)) == 0",
        "import pytest\nassert f(2) == pytest.approx([3.0]) and max(f(2)) == 3",
        "assert sorted([2, 1])[0] == 1",
        "assert max(2, 1, key=lambda x: -x) == 1 and max([], default=7) == 7",
        "assert 3 in F() and 4 not in F()",
        "import pickle\nassert pickle.loads(pickle.dumps([1, {2}])) == [1, {2}]",
    ]
    patient = replace(SMALL, seconds=60.0, memory=2**29)  # imports on a busy machine
    assert passed(code, tests, patient) == [True] * len(tests)


@pytest.mark.parametrize("mark", [b"1", b"1\n", b"0" * 32 + b" 1\n"])
def test_code_that_came_to_run_beside_the_judge_writes_no_verdict(mark):
    """A test that writes stands for it: into every open file, as the judge did, and in its form.
    What comes after it counts for nothing either."""
    writes = "import os\nfor i in range(3, 4096):\n"
    writes += f"    try: os.write(i, {mark!r})\n    except OSError: pass\n"
    code, right = "def f(x): return x", "assert f(3) == 3"
    tests = [right, f"{writes}assert f(2) == 3", right, right]
    assert passed(code, tests) == [True, False, False, False]
    assert passed(code, [f"{writes}os._exit(0)", right]) == [False, False]


def test_verdicts_end_with_the_first_line_of_another_form():
    for other in (b"x 1", b"w 2", b"w", b"1", b"w 1 ", b""):
        assert run._verdicts(b"w 1\nw 0\n" + other + b"\nw 1\n", "w", 9) == [True, False]
    assert run._verdicts(b"w 1\nw 1", "w", 9) == [True]  # the last one was not written whole
    assert run._verdicts(b"w 1\nw 0\nw 1\n", "w", 2) == [True, False]


def test_a_text_of_data_is_still_evaluated():
    code = "def f(x): return f'{x} + max(1, 2) * n'"
    tests = [
        "n = 3\nassert eval(f(2)) == 8",
        "assert eval('[2, 3][1] == n')",
        "assert eval('n > 3')",
    ]
    assert passed(code, tests) == [True, True, False]


def test_what_one_entry_sets_up_is_the_tests_own_in_the_next():
    """A name of an earlier entry never comes from the completion."""
    tests = ["wanted = 3\ndef same(a, b):\n    return a == b", "assert same(f(2), wanted)"]
    assert passed("def f(x): return x + 1", tests) == [True, True]
    forged = "wanted = 99\ndef same(*a): return True\ndef f(x): return 99"
    assert passed(forged, tests) == [True, False]


def test_a_class_for_equality_is_data_or_itself():
    code = "class L(list):\n    def __eq__(s, o): return True\ndef f(x): return L([1])"
    assert passed(code, ["assert f(1) == [2]", "assert f(1) == [1]"]) == [False, True]


def test_a_program_cannot_stand_for_what_a_test_means():
    """Names of Python and of its library are the test's own, whatever the program calls so."""
    code = "def f(x): return [5]\ndef sorted(x): return [1]\nclass math: isclose = lambda *a: True"
    tests = ["assert sorted(f(1)) == [1]", "assert math.isclose(f(1)[0], 1)"]
    assert passed(code, tests) == [False, False]
    assert passed("import math\ndef f(x): return [1]", tests) == [True, True]


STOPPED = {
    "a loop that ignores signals": "import signal\nfor s in (signal.SIGTERM, signal.SIGINT, "
    "signal.SIGALRM, signal.SIGXCPU):\n    signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "children without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "a loop inside": "def f(x):\n    while True: pass",
    "sleep": "import time\ntime.sleep(60)",
    "memory": "def f(x):\n    return len(bytearray(10**10)) * 0 + x + 1",
    "a deep call": "def f(x): return f(x)",
    "a long result": "def f(x): return [0] * 10**7",
    "a nested result": "def f(x):\n    l = []\n    for _ in range(10**5): l = [l]\n    return l",
}


@pytest.mark.quick_cases("a loop that ignores signals", "children without end")
@pytest.mark.parametrize("name", STOPPED)
def test_what_does_not_end_or_fit_is_stopped(name):
    began = time.monotonic()
    assert passed(STOPPED[name]) == [False] * 3
    assert time.monotonic() - began < 30


def test_tests_before_one_that_hangs_count():
    code = "def f(x):\n    while x == -1: pass\n    return x + 1"
    assert run.run_tests(code, PLAIN, SMALL) == ([True, False, False], True, {})


def test_output_is_cut_and_a_script_is_stopped():
    outcome = run.run_program("while True: print('x' * 1000)", "", SMALL)
    assert outcome.code != 0 and len(outcome.output) <= 2**20
    assert run.run_program("import time\ntime.sleep(60)", "", SMALL).code is None


def test_what_it_leaves_running_ends_with_it(tmp_path):
    """A process of its own session, which no signal to a group reaches."""
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.execv('/bin/sleep', ['flowrl-left-behind', '60'])\n    os._exit(0)\n"
        "time.sleep(0.3)\nprint(1)"
    )
    assert run.run_program(code, "", SMALL).output.strip() in ("1", "")
    time.sleep(0.1)
    alive = [p for p in Path("/proc").glob("[0-9]*/cmdline") if _says(p, b"flowrl-left-behind")]
    assert not alive


def _says(path: Path, words: bytes) -> bool:
    try:
        return words in path.read_bytes()
    except OSError:
        return False


def test_packages_of_an_environment_below_are_there(monkeypatch, tmp_path):
    """As in the environment of open_clip, whose numpy is that of the environment that it lies on;
    a folder of source code on the path stays outside."""
    packages, source = tmp_path / "below" / "site-packages", tmp_path / "source"
    for folder, name in ((packages, "of_below"), (source, "of_source")):
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text("KNOWN = 3")
    monkeypatch.setattr(sys, "path", [str(source), *sys.path, str(packages)])
    assert passed("import of_below\ndef f(x): return of_below.KNOWN", ["assert f(2) == 3"]) == [
        True
    ]
    code = "def f(x):\n    import of_source\n    return of_source.KNOWN"
    assert passed(code, ["assert f(2) == 3"]) == [False]


@shut_in
def test_processes_are_bounded():
    code = (
        "import os, time\nmade = 0\ntry:\n    while made < 200:\n"
        "        if os.fork() == 0:\n            time.sleep(5); os._exit(0)\n        made += 1\n"
        "except OSError:\n    pass\nprint(made)"
    )
    said = run.run_program(code, "", SMALL).output
    assert 0 < int(said) <= 16


def reached(folder: Path) -> list[str]:
    """What a program says that tries to read and write files of the run; none may be changed."""
    secret, target = folder / "answers.jsonl", folder / "written"
    secret.write_text("42")
    code = (
        f"import os\nfor path in ({str(target)!r}, '/etc/flowrl', {str(Path.home())!r} + '/x'):\n"
        "    try:\n        open(path, 'w').write('x'); print('wrote', path)\n"
        "    except OSError: pass\n"
        f"try: os.remove({str(secret)!r}); print('removed')\nexcept OSError: pass\n"
        f"try: print(open({str(secret)!r}).read())\nexcept OSError: pass\n"
        "open('own', 'w').write('mine'); print(open('own').read())"
    )
    said = run.run_program(code, "", SMALL).output.split()
    assert secret.read_text() == "42" and not target.exists()
    return said


@shut_in
def test_files_of_the_run_are_neither_read_nor_written(tmp_path):
    assert reached(tmp_path) == ["mine"]


@shut_in
def test_all_its_files_together_are_bounded():
    code = "for i in range(9):\n    open(str(i), 'wb').write(bytes(2**19))"
    assert run.run_program(code, "", SMALL).code == 1


@shut_in
def test_empty_files_are_bounded_too():
    code = "for i in range(20_000):\n    open(str(i), 'w').close()"
    assert run.run_program(code, "", SMALL).code == 1
    assert run.run_program(code.replace("20_000", "2_000"), "", SMALL).code == 0


@shut_in
def test_sockets_are_of_families_that_the_namespace_holds():
    code = (
        "import socket\n"
        "for family in (socket.AF_VSOCK, socket.AF_ALG, socket.AF_PACKET, socket.AF_INET):\n"
        "    try: socket.socket(family, socket.SOCK_STREAM).close(); print('open')\n"
        "    except PermissionError: print('refused')\n"
    )
    assert run.run_program(code, "", SMALL).output.split() == ["refused"] * 3 + ["open"]


def test_no_socket_reaches_anybody():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        code = (
            "import socket\ntry:\n"
            f"    socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)\n"
            "    print('reached')\nexcept OSError as error:\n    print('refused')"
        )
        assert run.run_program(code, "", SMALL).output == "refused\n"
        with pytest.raises(TimeoutError):
            server.accept()


def test_variables_and_open_files_of_the_run_are_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("FLOWRL_SECRET", "42")
    with open(tmp_path / "held", "w") as held:
        os.set_inheritable(held.fileno(), True)
        code = (
            "import os\nprint('FLOWRL_SECRET' in os.environ)\n"
            f"try: os.write({held.fileno()}, b'x')\nexcept OSError: print('closed')"
        )
        said = run.run_program(code, "", SMALL).output
    assert said.split()[0] == "False" and (tmp_path / "held").read_text() == ""


@shut_in
def test_no_privilege_is_left():
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "print(os.geteuid() != 0 or True, libc.mount(b'x', b'/tmp', b'tmpfs', 0, None),"
        " libc.umount2(b'/usr', 2), libc.sethostname(b'x', 1),\n"
        "      [l for l in open('/proc/self/status') if l.startswith('CapEff')][0].split()[1])"
    )
    assert run.run_program(code, "", SMALL).output.split() == ["True", "-1", "-1", "-1", "0" * 16]


@shut_in
def test_settings_of_the_kernel_are_only_read():
    """Also by a root that stays root, which owns their files: where /proc is mounted, it is
    read-only."""
    code = (
        "lines = [line.split() for line in open('/proc/self/mountinfo')]\n"
        "print([line[5].split(',')[0] for line in lines if line[4] == '/proc'])\n"
        "open('/proc/sys/kernel/ostype').read()\n"
        "try: open('/proc/self/comm', 'w')\nexcept OSError as error: print(error.errno)"
    )
    assert run.run_program(code, "", SMALL).output.split("\n")[:2] == ["['ro']", "30"]


@shut_in
def test_memory_is_bounded_in_sum():
    """14 processes of 64 MB under a limit of 256 MB in sum, and memory outside of processes."""
    code = (
        "import os, time\nready, done = os.pipe()\nfor _ in range(14):\n    if os.fork() == 0:\n"
        "        kept = bytearray(64 * 2**20); os.write(done, b'x'); time.sleep(20); os._exit(0)\n"
        "seen = 0\nwhile seen < 14:\n    seen += len(os.read(ready, 14))\n"
        "time.sleep(2)\nprint('all at once')"
    )
    assert "all" not in run.run_program(code, "", replace(SMALL, seconds=15.0)).output
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "print(libc.shmget(0, 2**20, 0o1600), libc.memfd_create(b'x', 0), libc.unshare(0x10000000))"
    )
    assert run.run_program(code, "", SMALL).output.split() == ["-1", "-1", "-1"]
