"""Code by tests: what passes, what is stopped, and what cannot be forged."""

import json

import pytest
import torch

from rewards import Samples, load
from rewards.code_tests import last_program, read_tests
from rewards.sandbox import run
from rewards.sandbox.run import SandboxLimits
from rewards.self_test import Prompts, self_test
from tests.support.reward_contract import check_contract, texts

SMALL = SandboxLimits(seconds=1.5, memory=2**28, written=2**20, processes=16)
PLAIN = ["assert f(2) == 3", "assert f(-1) == 0", "assert f(10) == 11"]


def of(media, tests) -> Samples:
    n = len(media)
    return Samples(list(media), ["p"] * n, torch.zeros(n, dtype=torch.long), [{"tests": tests}] * n)


def block(code: str) -> str:
    return f"So:\n```python\n{code}\n```\nThat is it."


def passed(code: str, tests=PLAIN) -> list[bool]:
    return run.tests(code, tests, SMALL)[0]


def test_scores_are_shares_or_all_or_nothing():
    codes = ["def f(x):\n    return x + 1", "def f(x):\n    return abs(x) + 1", "def f(x): return"]
    media = [block(code) for code in codes] + ["no code", block("def f(x:"), "```python\nx = 1"]
    got = load("code_tests")(of(media, PLAIN))
    assert got.tolist() == [1, pytest.approx(2 / 3), 0, 0, 0, 0]
    reward = load("code_tests", kind="strict")
    assert reward(of(media, json.dumps(PLAIN))).tolist() == [1, 0, 0, 0, 0, 0]
    assert reward.report() == {"late": 0, "without_code": 2}


def test_printed_output_is_compared_but_for_blanks_at_ends():
    pairs = [{"input": "2 3\n", "output": "5"}, {"input": "1 1", "output": "2\n"}]
    good = "a, b = map(int, input().split())\nif __name__ == '__main__':\n    print(a + b, '')\n"
    media = [block(good), block("print(5)"), block(good + "raise SystemExit(1)")]
    assert load("code_tests")(of(media, pairs)).tolist() == [1, 0.5, 0]
    columns = {"inputs": ["2 3\n", "1 1"], "outputs": ["5", "2"]}
    assert load("code_tests", kind="strict")(of(media, columns)).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\nor\n```\nb\n```", "b\n"),
        ("```python\na\n```\nruns:\n```text\nb\n```", "a\n"),
        ("~~~py\na\n~~~", "a\n"),
        ("````\n```\na\n```\n````", "```\na\n```\n"),
        ("```python\na", None),
        ("a = 1", None),
        ("", None),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(text, code):
    assert last_program(text) == code


BROKEN = {
    "none": [],
    "nothing": "",
    "a number": 3,
    "no Python": ["assert f(", "x"],
    "no output": [{"input": ""}],
    "of two kinds": ["x", {}],
    "no JSON": "[1",
}


@pytest.mark.parametrize("tests", BROKEN.values(), ids=BROKEN)
def test_tests_that_cannot_be_run_name_their_row(tests):
    with pytest.raises(ValueError, match=r"row 2 \(prompt 'b'\): tests"):
        rows = Prompts(("a", "b"), [{"tests": PLAIN}, {"tests": tests}], "text")
        self_test("code_tests", load("code_tests"), rows)


def test_missing_tests_are_told_or_unscored():
    reward = load("code_tests")
    with pytest.raises(ValueError, match="no prompt has a column 'tests'"):
        self_test("code_tests", reward, Prompts(("a",), [{"test": 1}], "text"))
    assert reward(of([block("f = 1")], None)).isnan().all()


HONEST = {
    "classes": ("class S:\n    def __init__(s): s.l = []\n    def push(s, x): s.l.append(x)\n"
                "    def __len__(s): return len(s.l)\n    def __iter__(s): return iter(s.l)",
                "s = S()\ns.push(4)\ns.push(5)\nassert len(s) == 2 and list(s) == [4, 5]\n"
                "assert s.l == [4, 5]"),
    "a list sorted in place": ("def f(l): l.sort()", "l = [3, 1]\nf(l)\nassert l == [1, 3]"),
    "errors": ("def f(x): raise KeyError(x)",
               "try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    raise AssertionError"),
    "generators": ("def f():\n    i = 0\n    while True:\n        yield i\n        i += 1",
                   "g = f()\nassert [next(g), next(g)] == [0, 1]"),
    "values": ("V = (1, 2.5, float('inf'), None, True, 'é', b'x', {1: {2}}, 10**30, 1j)\n"
               "def f(*a, **k): return a, k",
               "assert f(*V, k=V) == (V, {'k': V}) and V[8] == 10**30 and V[2] > 1e308"),
    "helpers of the test": ("def f(x): return x + 1",
                            "from math import isclose\ndef check(g):\n"
                            "    assert isclose(g(1), 2)\n\ncheck(f)"),
    "nothing printed is read": ("print('x' * 10**5)\ndef f(x):\n    print(x)\n    return x",
                                "assert f(3) == 3"),
    "no script": ("def f(): return 1\nif __name__ == '__main__':\n    input()", "assert f() == 1"),
    "numpy's numbers": ("import numpy as np\ndef f(x): return np.int64(x) + 1", "assert f(1) == 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass(name):
    code, test = HONEST[name]
    assert passed(code, [test, test.replace("assert ", "assert not ")])[0]


def test_it_keeps_the_contract_and_passes_its_self_test():
    def made(prompts):
        samples = texts(prompts)
        media = [block(f"def f(x):\n    return {'x' if i % 2 else 'abs(x)'} + 1") for i in range(6)]
        media[4] = samples.media[4]
        return Samples(media, samples.prompts, samples.group, [{"tests": PLAIN}] * 6)

    scores = check_contract(load("code_tests"), made)
    assert len(scores.unique()) == 3
    prompts = Prompts(("Add one.",), [{"tests": PLAIN}], "text")
    assert self_test("code_tests", load("code_tests"), prompts).endswith("the same")


@pytest.mark.parametrize("settings", [{"seconds": 0.0}, {"parallel": 0}, {"memory": 10}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match="code_tests: "):
        load("code_tests", **settings)


def test_tests_of_both_forms_are_read():
    assert read_tests('["assert f(1)"]').python == ("assert f(1)",)
    assert read_tests([{"input": 1, "output": 2}]).pairs == (("1", "2"),)
    assert read_tests("assert f(1)").python == ("assert f(1)",)
