"""Code by tests: what passes, what is stopped, and what cannot be forged."""

import json
import re
import warnings
from dataclasses import replace

import pytest
import torch

from rewards import Samples, load
from rewards.answers.code_tests import read_tests
from rewards.answers.programs import last_program
from rewards.catalogue.code_tests import CodeTests
from rewards.checks.self_test import Prompts, self_test
from rewards.sandbox import run
from rewards.sandbox.run import SandboxLimits
from tests.support.reward_contract import check_contract, texts

ISOLATED = not run.run_program("", "", SandboxLimits()).missing
SMALL = SandboxLimits(seconds=1.5, memory=2**28, written=2**20, processes=16)
PLAIN = ["assert f(2) == 3", "assert f(-1) == 0", "assert f(10) == 11"]


def loaded(**settings) -> CodeTests:
    """The reward, on systems without namespaces too."""
    if ISOLATED:
        return load("code_tests", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load("code_tests", isolation="best", **settings)


def of(media, tests) -> Samples:
    n = len(media)
    return Samples(list(media), ["p"] * n, torch.zeros(n, dtype=torch.long), [{"tests": tests}] * n)


def block(code: str) -> str:
    return f"So:\n```python\n{code}\n```\nThat is it."


def passed(code: str, tests=PLAIN, limits=SMALL) -> list[bool]:
    return run.run_tests(code, tests, limits)[0]


@pytest.mark.slow
def test_scores_are_shares_or_all_or_nothing():
    codes = ["def f(x):\n    return x + 1", "def f(x):\n    return abs(x) + 1", "def f(x): return"]
    media = [block(code) for code in codes] + ["no code", block("def f(x:"), "```python\nx = 1"]
    got = loaded()(of(media, PLAIN))
    assert got.tolist() == [1, pytest.approx(2 / 3), 0, 0, 0, 0]
    reward = loaded(kind="strict")
    assert reward(of(media, json.dumps(PLAIN))).tolist() == [1, 0, 0, 0, 0, 0]
    assert reward.report() == {"late": 0, "without_code": 2, "unjudged": 0}


def test_printed_output_is_compared_but_for_blanks_at_ends():
    pairs = [{"input": "2 3\n", "output": "5"}, {"input": "1 1", "output": "2\n"}]
    good = "a, b = map(int, input().split())\nif __name__ == '__main__':\n    print(a + b, '')\n"
    media = [block(good), block("print(5)"), block(good + "raise SystemExit(1)")]
    assert loaded()(of(media, pairs)).tolist() == [1, 0.5, 0]
    columns = {"inputs": ["2 3\n", "1 1"], "outputs": ["5", "2"]}
    assert loaded(kind="strict")(of(media, columns)).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\nor\n```python\nb\n```", "b\n"),
        ("```python\na\n```\nprints\n```\nb()\n```", "a\n"),
        ("```\na = 1\n```\nprints\n```\n5\n```", "a = 1\n"),
        ("```\nprint(1)\n```\nprints\n```\nYes\n[1, 2]\n```", "print(1)\n"),
        ("```\n5\n```\n```\nnot (python\n```", "not (python\n"),
        ("```\na = 1\n```\n```json\n{}\n```\n```bash\npython a.py\n```", "a = 1\n"),
        ("Draft:\n```python\na\n```\n</think>\n```Python3 title='x'\nb\n```", "b\n"),
        ("<think>\n```python\na\n```\n</think>\n```\nb()\n```", "b()\n"),
        ("<think>```python\na\n```</think>\n```python\nb\n```", "b\n"),
        ("<think>\n```python\na\n</think>\n```python\nb\n```", "b\n"),
        ("<think>\n```python\na\n```\n</think>\nas above", "a\n"),
        ("1. So\n\n   ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"),
        ("- ```python\n  a\n  ```", "a\n"),
        ("\t```py\n\ta\n\t```", "a\n"),
        ("```python\r\na\r\nb\r\n```\r\n", "a\nb\n"),
        ("```{.python}\na\n```", "a\n"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("```python\na\n`````", "a\n"),
        ("an ```inline``` word\n```\na = 1\n```", "a = 1\n"),
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
    reward = loaded()
    with pytest.raises(ValueError, match=r"row 2 \(prompt 'b'\): tests"):
        reward.check_prompts(["a", "b"], [{"tests": None}, {"tests": tests}])
    (told,) = reward.winnable(["a"], [{"tests": tests}])
    assert told.answer == "no" and told.why.startswith("its tests cannot be read")


def test_missing_tests_are_told_or_unscored():
    reward = loaded()
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
    "an argument of the same name": ("def f(x): return x + 1",
                                     "def check(f):\n    assert f(1) == 2\n\ncheck(f)"),
    "linked nodes": ("class Node:\n    def __init__(s, v, n=None): s.val, s.next = v, n\n"
                     "def f(l): return Node(l[0], f(l[1:])) if l else None",
                     "n = f([1, 2])\nfound = []\nwhile n:\n    found.append(n.val)\n"
                     "    n = n.next\nassert found == [1, 2]"),
    "an iterator of its own": ("class Bag:\n    def __init__(s): s.n = 0\n"
                               "    def __iter__(s): return s\n    def __next__(s):\n"
                               "        s.n += 1\n        if s.n > 2: raise StopIteration\n"
                               "        return s.n\n    def __contains__(s, x): return x == 7",
                               "b = Bag()\nassert list(b) == [1, 2] and 7 in b and 8 not in b"),
    "maps and views": ("def f(l): return map(str, l)\ndef g(d): return d.keys()",
                       "assert list(f([1, 2])) == ['1', '2']\nassert sorted(g({2: 1})) == [2]"),
    "containers of the library": ("from collections import Counter\n"
                                  "def f(l): return Counter(l)",
                                  "assert f([1, 1]) == {1: 2} == Counter([1, 1])"),
    "a name of the library's": ("def gcd(a, b): return gcd(b, a % b) if b else a",
                                "assert gcd(4, 6) == 2"),
    "a method that changes its argument": ("class Solution:\n    def rotate(self, l, k):\n"
                                           "        l[:] = l[-k:] + l[:-k]",
                                           "l = [1, 2, 3]\nSolution().rotate(l, 1)\n"
                                           "assert l == [3, 1, 2]"),
    "NaN": ("def f(x): return x", "import math\nr = f(math.nan)\nassert math.isnan(r)\n"
                                  "assert r != r"),
    "arrays": ("import numpy as np\ndef f(n): return np.arange(n) / 2",
               "assert f(3).shape == (3,) and np.allclose(f(3), [0, 0.5, 1])"),
    "an own name of a module": ("def select(l): return l[0]", "assert select([3]) == 3"),
    "decimals and fractions": ("from decimal import Decimal\nfrom fractions import Fraction\n"
                               "def f(x): return [Decimal(x) / 4, Fraction(int(x), 4)]",
                               "from decimal import Decimal as D\nfrom fractions import Fraction\n"
                               "assert f(3) == [D('.75'), Fraction(3, 4)] == f(D(3))"),
    "dates": ("import datetime as d\ndef f(x): return x + d.timedelta(1), d.time(1)\n"
              "def g(): return d.datetime(2020, 1, 2, 3)",
              "from datetime import date, datetime, time\n"
              "assert f(date(2020, 2, 28)) == (date(2020, 2, 29), time(1))\n"
              "assert g() == datetime(2020, 1, 2, 3)"),
    "deques": ("from collections import deque\ndef f(d): d.rotate(1); return deque(d)",
               "from collections import deque\nassert f(deque([1, 2])) == deque([2, 1])"),
    "annotations that are objects": (
        "def f(x: int): return x\ndef g(): return f.__annotations__ == {'x': int}", "assert g()"),
    "numpy's numbers": ("import numpy as np\ndef f(x): return np.int64(x) + 1", "assert f(1) == 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass(name):
    code, test = HONEST[name]
    limits = replace(SMALL, seconds=20.0)  # on a busy machine numpy's import alone takes seconds
    assert run.run_tests(code, [test, test.replace("assert ", "assert not ")], limits)[0][0]


def test_it_keeps_the_contract_and_passes_its_self_test():
    def made(prompts):
        samples = texts(prompts)
        media = [block(f"def f(x):\n    return {'x' if i % 2 else 'abs(x)'} + 1") for i in range(6)]
        media[4] = samples.media[4]
        return Samples(media, samples.prompts, samples.group, [{"tests": PLAIN}] * 6)

    scores = check_contract(loaded(), made)
    assert len(scores.unique()) == 3
    prompts = Prompts(("Add one.",), [{"tests": PLAIN}], "text")
    assert self_test("code_tests", loaded(), prompts).endswith("the same")


WEAK = {
    "nothing is asserted": ["f(2)"],
    "one constant": ["assert f(2) == True", "assert f(4)"],
    "an undefined helper": ["check(f(2), 3)"],
    "NaN": ["def near(a, b): return not max(0, abs(a - b)) > 1e-6", "assert not f(2) is None"],
    "its argument": ["assert f([1]) == [1]"],
    "in place": ["a = [2, 1]\nf(a)\nassert a == sorted(a)"],
    "any error": ["try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert 0"],
    "an undefined tolerance": ["import numpy as np\nassert np.allclose(f(2), 3)"],
}


MEMBERS = {
    "a number": "assert 5317 in f(2)",
    "numbers": "r = f(2)\nassert 17 in r and -40 in r",
    "a huge number": "assert 10**15 + 7 in f(2)",
    "a number that the test computes": "assert sum(range(10**5)) in f(2)",
    "a text": "assert 'seven' in f(2)",
    "a number as a text": "assert '5317' in f(2)",
    "digits of a result": "assert str(5317) in str(f(2))",
    "digits in a result's text": "assert str(abs(-73)) in f(2)",
    "a word": "w = 'ca' + 'ts'\nassert len('word') == 4 and w in f(2)",
    "an item": "assert (1, 'x') in f(2)",
    "a list among lists": "assert [1, 2] in f(2)",
    "a subset": "assert {3, 4} <= set(f(2))",
    "a subset of pairs": "assert set(f(2)) >= {(1, 2), (3, 4)}",
    "any": "assert any(x == 5317 for x in f(2))",
    "keys": "assert 'a' in f(2).keys() and f(2)['b']",
    "counted": "assert f(2).count('seven') >= 1",
    "found": "assert f(2).find('seven') >= 0",
    "floats": "assert 2.5 in f(2)",
    "bytes": "assert b'x' in f(2)",
    "inside items": "assert all('x' in one for one in f(2))",
}
EXACT = {
    "one text": "assert f() == 'seven'",
    "one set": "assert f() == {'a'}",
    "one list": "assert f() == ['a', 1]",
    "one dictionary": "assert f() == {'a': 1}",
    "membership in the test's": "assert f(2) in (3, 4)",
    "a size": "r = f(2)\nassert 3 in r and len(r) == 1",
}


def test_a_container_of_everything_is_no_answer():
    """Tests that ask whether something is in the result are told, tests of the result are not."""
    rows = {**MEMBERS, **EXACT}
    found = run.weak_rows([[test] for test in rows.values()], 60.0, SandboxLimits())
    weak = {name for name, how in zip(rows, found, strict=True) if how}
    assert weak == set(MEMBERS)


@pytest.mark.slow
def test_rows_whose_tests_pass_for_anything_are_named():
    reward = loaded()
    rows = [*WEAK.values(), PLAIN, ["while True: f(1)"]]
    with pytest.warns(UserWarning, match=r"the tests of 8 of 10 rows.*row 1 .'p0'.*and 3 more"):
        reward.check_prompts([f"p{i}" for i in range(10)], [{"tests": tests} for tests in rows])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reward.check_prompts(["p"], [{"tests": PLAIN}])
        reward.check_prompts(["p"], [{"tests": [{"input": "1", "output": "2"}]}])
    for output, how in ((" \n", "prints nothing"), ("1", "prints its input")):
        with pytest.warns(UserWarning, match=f"1 of 1 rows.*{how}"):
            reward.check_prompts(["p"], [{"tests": [{"input": "1", "output": output}]}])


@pytest.mark.parametrize("settings", [{"seconds": 0.0}, {"parallel": 0}, {"memory": 10}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=f"reward .code_tests.: {next(iter(settings))}: "):
        loaded(**settings)


UNJUDGED = {
    "a function": ("def f(g, x): return g(x)", "assert f(lambda x: x, 3) == 3", "pass what only"),
    "a module that is not there": ("def f(x): return x",
                                   "import not_installed\nassert f(3) == 3", "is not installed"),
    "a class caught": ("class Bad(Exception): pass\ndef f(x): raise Bad(x)",
                       "try:\n    f(1)\nexcept Bad:\n    pass", "catch Bad"),
    "a class compared with": ("class A: pass\ndef f(x): return A()",
                              "assert isinstance(f(1), A)", "compare with A"),
    "a class inherited from": ("class A:\n    def f(s): return 3",
                               "class B(A): pass\nassert B().f() == 3", "inherit from A"),
    "objects compared": ("class P:\n    def __init__(s, x): s.x = x\n"
                         "    def __eq__(s, o): return s.x == o.x\ndef f(x): return P(x)",
                         "assert f(1) == P(1)", "compare two objects"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNJUDGED)
def test_what_the_judge_cannot_run_is_unscored_with_a_reason(name):
    code, test, why = UNJUDGED[name]
    reward = loaded(seconds=20.0)
    with pytest.warns(UserWarning, match=f"a sample is unscored, since .*{why}"):
        assert reward(of([block(code)], [test])).isnan().all()
    assert reward.report()["unjudged"] == 1
    (told,) = reward.winnable(["p"], [{"tests": [test], "reference": code}])
    assert told.answer == "no" and re.search(why, told.why)


@pytest.mark.slow
def test_a_program_cannot_make_its_own_failure_the_judges():
    """It raises the judge's errors, and returns what the judge cannot compare."""
    codes = [
        "def f(x): raise ModuleNotFoundError('x', name='x')",
        "import nothing_like_this\ndef f(x): return x",
        "def f(x): return lambda: 3",
        "def f(x): raise TypeError('a function cannot be passed to the completion')",
        "def f(x): return 'x' * 2**25",
        "class A: pass\ndef f(x): return A()",
        "def g(x): return x",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = loaded(seconds=20.0)(of([block(code) for code in codes], ["assert f(2) == 3"]))
    assert scores.tolist() == [0] * len(codes)


@pytest.mark.slow
def test_a_row_says_whether_it_can_be_won():
    reward = loaded(seconds=20.0)
    pairs = [{"input": "2 3", "output": "5"}]
    adds = "print(sum(map(int, input().split())))"
    rows = [
        {"tests": PLAIN, "reference": "def f(x): return x + 1"},
        {"tests": PLAIN, "reference": ["def f(x): return x", block("def f(x): return x + 1")]},
        {"tests": json.dumps(pairs), "reference": json.dumps([adds])},
        {"tests": PLAIN},
        {"tests": None, "reference": "x"},
        {"tests": pairs, "reference": "print(6)"},
        {"tests": [*PLAIN, "assert f(1) == 7"], "reference": "def f(x): return x + 1"},
    ]
    got = [one.answer for one in reward.winnable(["p"] * len(rows), rows)]
    assert got == ["yes", "yes", "yes", "unknown", "unknown", "no", "no"]
    assert reward.winnable(["p"], rows[6:])[0].why == "its reference fails test 4"
    keys = reward.answer_keys(["p"] * len(rows), rows)
    assert [key is None for key in keys] == [False] * 3 + [True] * 2 + [False] * 2
    assert len(set(keys)) == 6  # of equal rows equal, of others not
    assert loaded(seconds=3.0).answer_keys(["p"], rows[:1]) != keys[:1]  # a limit decides too


CALLS = {
    "APPS": ({"fn_name": "add", "inputs": [[2, 3], [1, -1]], "outputs": [5, [0]]}, ""),
    "APPS, a wrapped list": ({"fn_name": "add", "inputs": [[[1], [2]]], "outputs": [[[1, 2]]]}, ""),
    "APPS, a list": ({"fn_name": "add", "inputs": [[[1], [2]]], "outputs": [[1, 2]]}, ""),
    "LiveCodeBench, by its starter": (
        [{"input": "2\n3", "output": "5", "testtype": "functional"}],
        "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
    ),
    "LiveCodeBench, by its metadata": (
        [{"input": "[2]\n[3]\n", "output": "[2, 3]", "testtype": "functional"}],
        '{"func_name": "add"}',
    ),
    "pytest functions": (
        "from solution import add\n\ndef test_two():\n    assert add(2, 3) == 5\n\n"
        "def test_lists():\n    assert add([2], [3]) == [2, 3]\n", ""),
    "a name of its own": ("import solution as s\nfrom solution import add as plus\n"
                          "assert plus(2, 3) == 5 == s.add(1, 4)", ""),
    "all names": ("from solution import *\nassert add(2, 3) == 5", ""),
}  # fmt: skip
ADDS = "def add(a, b):\n    return a + b"
METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b"


@pytest.mark.quick_cases("by its starter", "JSON-APPS, a wrapped", "pytest functions")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("as_text", [False, True], ids=["values", "JSON"])
def test_functions_are_called_in_the_forms_of_data_sets(name, as_text):
    tests, names = CALLS[name]
    codes = [ADDS] if isinstance(tests, str) else [ADDS, METHOD]
    wrong = [code.replace("a + b", "b") for code in codes] + ["def other(): pass", "print(5)"]
    given = json.dumps(tests) if as_text and not isinstance(tests, str) else tests
    samples = of([block(code) for code in codes + wrong], given)
    rows = [{**row, "names": names} for row in samples.meta]
    reward = loaded(function="names", kind="strict", seconds=20.0)
    scores = reward(replace(samples, meta=rows))
    assert scores.tolist() == [1] * len(codes) + [0] * len(wrong)


def test_a_function_with_a_name_of_the_library_is_the_programs():
    """`gcd` and `sum` are Python's too; a program without them has not solved the row."""
    for name in ("gcd", "sum"):
        tests = {"fn_name": name, "inputs": [[[4, 6]]], "outputs": [10]}
        samples = of([block(f"def {name}(l): return l[0] + l[1]"), block("x = 1")], tests)
        assert loaded(seconds=20.0)(samples).tolist() == [1, 0]


def test_lines_as_lists_and_columns_inside_columns():
    ground = {"inputs": [["2", "1 2"]], "outputs": [["3"]]}
    code = "input()\nprint(sum(map(int, input().split())))"
    samples = of([block(code), block("print(4)")], None)
    meta = [{"reward_model": {"ground_truth": json.dumps(ground)}}] * 2
    reward = loaded(column="reward_model.ground_truth", seconds=20.0)
    assert reward(replace(samples, meta=meta)).tolist() == [1, 0]
    listed = [{"checks": [{"tests": None}, {"tests": json.dumps(ground)}]}] * 2
    reward = loaded(column="checks.1.tests", seconds=20.0)
    assert reward(replace(samples, meta=listed)).tolist() == [1, 0]


UNREADABLE = {
    "functional without a name": ([{"input": "1", "output": "1", "testtype": "functional"}],
                                  "nothing names the function"),
    "both kinds": ([{"input": "1", "output": "1", "testtype": kind}
                    for kind in ("stdin", "functional")],
                   "for all"),
    "counts": ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
    "no pair": ({"inputs": [], "outputs": []}, "every program would pass"),
    "no list": ({"fn_name": "f", "inputs": ["1"], "outputs": [1]}, "lists of arguments"),
    "no name": ({"fn_name": "f(", "inputs": [[1]], "outputs": [1]}, "not the name"),
    "a fixture": ("def test_a(tmp_path): assert f(1)", "needs pytest"),
    "a decorator": ("import pytest\n@pytest.mark.parametrize('x', [1])\ndef test_a(x): assert f(x)",
                    "needs pytest"),
    "neither": ("[1", "neither JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_tests_of_no_form_are_refused_with_their_reason(name):
    tests, why = UNREADABLE[name]
    with pytest.raises(ValueError, match=rf"row 1 \(prompt 'p'\): tests: .*{why}"):
        loaded().check_prompts(["p"], [{"tests": tests}])
    reward, rows = loaded(), [{"tests": tests}, {"tests": PLAIN}]
    assert [one.answer for one in reward.winnable(["p", "q"], rows)] == ["no", "unknown"]
    with pytest.warns(UserWarning, match=f"unscored, since its tests cannot be read: .*{why}"):
        assert reward(of(["x"], tests)).isnan().all()


def test_tests_of_both_forms_are_read():
    assert read_tests('["assert f(1)"]').python == ("assert f(1)",)
    assert read_tests([{"input": 1, "output": 2}]).pairs == (("1", "2"),)
    assert read_tests("assert f(1)").python == ("assert f(1)",)
