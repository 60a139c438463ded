"""Data sets of programs: rows in the form of each, with content of our own.

Every row has programs that are right and programs that are wrong; its own reference, where the data
set has one, is among the right ones. `source` is where the form was read. Not found, and so not
here: the checkers of Codeforces, which accept several outputs, and the cells of the split `code` of
Skywork-OR1, whose card has the type of its ground truth and not its form.
"""

import base64
import json
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TASK = "Write a program."
DOUBLE = "print(int(input()) * 2)\n"
WHOLE = """import sys


def main():
    for line in sys.stdin.read().splitlines():
        print(int(line) * 2)


if __name__ == "__main__":
    main()
"""
METHOD = """class Solution:
    def longest(self, words: List[str]) -> int:
        found = Counter(len(word) for word in words)
        return max(found)
"""
FUNCTION = "def longest(words):\n    return max(map(len, words))\n"
FIRST = "def longest(words):\n    return len(words[0])\n"
SHOUTING = """class Solution:
    def longest(self, words):
        return str(max(map(len, words)))
"""
PAIR = "def ends(items):\n    return items[0], items[-1]\n"
PAIRS = "def ends(items):\n    return [(items[0], items[-1])]\n"
WRONG_PAIR = "def ends(items):\n    return items[-1], items[0]\n"
COUNTS = "def counts(text):\n    return {int(k): text.count(k) for k in sorted(set(text))}\n"
MEAN = "numbers = [*map(int, input().split())]\nprint(sum(numbers) / len(numbers))\n"


@dataclass(frozen=True)
class ProgramForm:
    """Rows, each with right and wrong programs; `read`: settings of the data set beside `source`,
    `reward`: settings of code_tests beside its kind, `suffix` of the file."""

    rows: tuple[tuple[Mapping[str, Any], tuple[str, ...], tuple[str, ...]], ...]
    source: str
    read: Mapping[str, Any] = field(default_factory=dict)
    reward: Mapping[str, Any] = field(default_factory=dict)
    suffix: str = "jsonl"


def apps(tests: Mapping[str, Any], *solutions: str, starter: str = "") -> dict[str, Any]:
    return {
        "problem_id": 1,
        "question": TASK,
        "solutions": json.dumps(list(solutions)),
        "input_output": json.dumps(tests),
        "difficulty": "interview",
        "url": "",
        "starter_code": starter,
    }


def taco(tests: Mapping[str, Any], *solutions: str, starter: str = "") -> dict[str, Any]:
    row = apps(tests, *solutions, starter=starter)
    more = {"raw_tags": "[]", "name": None, "source": "s", "tags": "[]", "skill_types": "[]"}
    more |= {"time_limit": "1 second", "date": None, "picture_num": None, "memory_limit": "64 MB"}
    return {key: value for key, value in row.items() if key != "problem_id"} | more


def livecodebench(
    public: list[dict[str, str]], private: list[dict[str, str]], function: str = ""
) -> dict[str, Any]:
    packed = zlib.compress(pickle.dumps(json.dumps(private)))
    starter = f"class Solution:\n    def {function}(self, words: List[str]) -> int:\n        "
    return {
        "question_title": "t",
        "question_content": TASK,
        "platform": "leetcode" if function else "atcoder",
        "question_id": "1",
        "contest_id": "1",
        "contest_date": "2024-01-01T00:00:00",
        "starter_code": starter if function else "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(public),
        "private_test_cases": base64.b64encode(packed).decode(),
        "metadata": json.dumps({"func_name": function} if function else {}),
    }


def case(given: str, wanted: str, kind: str = "stdin") -> dict[str, str]:
    return {"input": given, "output": wanted, "testtype": kind}


def kodcode(test: str, solution: str) -> dict[str, Any]:
    return {
        "version": "v1.0",
        "style": "instruct",
        "subset": "Prefill",
        "question_id": "Prefill_1_I",
        "question": TASK,
        "solution": solution,
        "test": test,
        "test_info": [{"function_name": "longest", "parameter_list": "(words)",
                       "function_declaration": "def longest(words):", "docstring": ""}],
        "gpt_pass_sequence": [1, 0],
        "gpt_pass_trial_num": 2,
        "gpt_difficulty": "easy",
        "gpt_pass_percentage": 0.5,
        "metadata": {"original_instruction": "", "prompt_id": "1", "row_id": 1, "seed_ids": "[]"},
    }  # fmt: skip


def mbpp(tests: list[str], code: str, setup: str = "") -> dict[str, Any]:
    return {"task_id": 1, "text": TASK, "code": code, "test_list": tests,
            "test_setup_code": setup, "challenge_test_list": []}  # fmt: skip


def sanitized(tests: list[str], code: str, imports: list[str]) -> dict[str, Any]:
    return {"source_file": "f", "task_id": 1, "prompt": TASK, "code": code,
            "test_imports": imports, "test_list": tests}  # fmt: skip


def eurus(tests: Mapping[str, Any], source: str = "taco") -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"content": "Think.", "role": "system"}, {"content": TASK, "role": "user"}],
        "ability": "code",
        "reward_model": {"ground_truth": json.dumps(tests), "style": "rule"},
        "extra_info": {"index": 1, "split": "dummy"},
    }


def verifiable(cases: list[dict[str, Any]], solution: str) -> dict[str, Any]:
    return {
        "source": "apps",
        "task_type": "verifiable_code",
        "in_source_id": "1",
        "prompt": TASK,
        "gold_standard_solution": f"```python\n{solution}```",
        "verification_info": {"language": "python", "test_cases": cases},
        "metadata": {"difficulty": "EASY"},
        "problem_id": "1",
    }


def humaneval(test: str, solution: str) -> dict[str, Any]:
    head, _, body = solution.partition("\n")
    return {"task_id": "HumanEval/1", "prompt": f'{head}\n    """Of several words."""\n',
            "canonical_solution": body, "test": test, "entry_point": "longest"}  # fmt: skip


def leetcode(test: str, solution: str) -> dict[str, Any]:
    return {"task_id": "longest-word", "question_id": 1, "difficulty": "Easy", "tags": ["Array"],
            "problem_description": TASK, "starter_code": "class Solution:\n", "query": TASK,
            "prompt": "import math\nfrom typing import *\n", "completion": solution, "test": test,
            "entry_point": "Solution().longest", "response": "", "input_output": []}  # fmt: skip


def bigcodebench(test: str, solution: str) -> dict[str, Any]:
    return {"task_id": "BigCodeBench/1", "complete_prompt": TASK, "instruct_prompt": TASK,
            "canonical_solution": solution, "code_prompt": "", "test": test,
            "entry_point": "longest", "doc_struct": "{}", "libs": "[]"}  # fmt: skip


def codecontests(public: Mapping[str, list[str]], solution: str) -> dict[str, Any]:
    none: dict[str, list[str]] = {"input": [], "output": []}
    return {"name": "t", "description": TASK, "public_tests": public, "private_tests": none,
            "generated_tests": none, "source": 2, "difficulty": 7,
            "solutions": {"language": [3], "solution": [solution]}}  # fmt: skip


def acecode(cases: list[str], solution: str) -> dict[str, Any]:
    message = {"content": TASK, "role": "user"}
    written = {"model_name": "m", "completion_id": 0, "completion": solution, "pass_rate": 1.0,
               "test_results": [1] * len(cases)}  # fmt: skip
    return {"id": "1", "source": "oss", "question": TASK, "test_cases": cases,
            "inferences": [written], "context_messages": [[message]]}  # fmt: skip


LAST = FIRST.replace("words[0]", "words[-1]")
CHECK = """

METADATA = {"author": "someone", "dataset": "test"}


def check(candidate):
    assert candidate(["ab", "c"]) == 2
    assert candidate(["abc"]) == 3
"""
UNIT = """
import unittest


class TestCases(unittest.TestCase):
    def setUp(self):
        self.words = ["ab", "c"]

    def test_two(self):
        self.assertEqual(longest(self.words), 2)

    def test_one(self):
        self.assertEqual(longest(["abc"]), 3)
"""

PLUS = """
def assertion(out, exp, atol):
    assert out == exp, f"out: {out}, exp: {exp}"


"""
LOOP = """inputs = [[["ab", "c"]], [["abc"]]]
results = [2, 3]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(longest(*inp), exp, 0)
"""
CHECK_PLUS = PLUS + "def check(candidate):\n    " + LOOP.replace("longest", "candidate").replace(
    "\n", "\n    "
)  # fmt: skip

CALL = {"fn_name": "longest", "inputs": [[["ab", "abc"]], [["a"]]], "outputs": [3, 1]}
IN_LISTS = {"fn_name": "longest", "inputs": [[["ab", "abc"]]], "outputs": [[3]]}
STDIN = {"inputs": ["3\n", "-4\n"], "outputs": ["6\n", "-8\n"]}
LINES = {"inputs": [["3", "5", ""]], "outputs": [["6", "10"]]}
ENDS = {"fn_name": "ends", "inputs": [[[1, 2, 3]]], "outputs": [[[1, 3]]]}
KEYS = {"fn_name": "counts", "inputs": [["1122"]], "outputs": [[{"1": 2, "2": 2}]]}
FLOATS = {"inputs": ["1 2\n", "1 0 0\n"], "outputs": ["1.50\n", "0.333333333\n"]}

FORMS: dict[str, ProgramForm] = {
    "APPS": ProgramForm(
        (
            (apps(CALL, FUNCTION), (FUNCTION, METHOD), (FIRST, SHOUTING)),
            (apps(IN_LISTS, FUNCTION), (FUNCTION,), (FIRST,)),
            (apps(STDIN, DOUBLE, WHOLE), (DOUBLE, WHOLE), ("print(6)",)),
            (apps(LINES, WHOLE), (WHOLE,), (DOUBLE,)),
            (apps(ENDS, PAIR), (PAIR, PAIRS), (WRONG_PAIR,)),
            (apps(KEYS, COUNTS), (COUNTS,), ("def counts(text):\n    return {}\n",)),
            (apps(FLOATS, MEAN), (MEAN,), ("print(1.5)", "print('0.333333333')")),
        ),
        "codeparrot/apps, and eval/testing_util.py of hendrycks/apps: the names that its programs "
        "may use without importing them, and how results are compared",
        {"column": "question"},
        {"column": "input_output", "reference": "solutions"},
    ),
    "TACO": ProgramForm(
        (
            (taco(CALL, METHOD, starter="class Solution:\n    def longest(self, words):\n"),
             (METHOD, FUNCTION), (FIRST,)),
            (taco(STDIN, DOUBLE), (DOUBLE,), ("print(input())",)),
        ),
        "BAAI/TACO, columns as opencompass lists them",
        {"column": "question"},
        {"column": "input_output", "reference": "solutions"},
        "parquet",
    ),
    "LiveCodeBench, public": ProgramForm(
        (
            (livecodebench([case("3\n", "6\n")], []), (DOUBLE,), ("print(3)",)),
        ),
        "lcb_runner/benchmarks/code_generation.py of LiveCodeBench, in PRIME-RL/PRIME's copy",
        {"column": "question_content"},
        {"column": "public_test_cases"},
    ),
    "LiveCodeBench, functions": ProgramForm(
        (
            (livecodebench([case('["ab", "c"]', "2", "functional")], [], "longest"),
             (METHOD, FUNCTION), (SHOUTING, "class Solution:\n    pass\n")),
        ),
        "the same; starter_code and metadata name the function",
        {"column": "question_content"},
        {"column": "public_test_cases", "function": "metadata"},
    ),
    "LiveCodeBench, private": ProgramForm(
        (
            (livecodebench([], [case("3\n", "6\n"), case("5\n", "10\n")]), (DOUBLE,),
             ("print(6)",)),
        ),
        "the same: base64 of a compressed pickle of JSON",
        {"column": "question_content"},
        {"column": "private_test_cases"},
    ),
    "LiveCodeBench, private functions": ProgramForm(
        (
            (livecodebench([], [case('["ab", "c"]', "2", "functional")], "longest"), (METHOD,),
             (SHOUTING,)),
        ),
        "the same",
        {"column": "question_content"},
        {"column": "private_test_cases", "function": "starter_code"},
    ),
    "KodCode": ProgramForm(
        (
            (kodcode("from solution import longest\n\ndef test_longest():\n"
                     '    assert longest(["ab", "c"]) == 2\n\ndef test_one():\n'
                     '    assert longest(["abc"]) == 3\n', FUNCTION), (FUNCTION,),
             (FIRST + "1/0\n",)),
            (kodcode("import pytest\nfrom solution import longest\n\ndef test_none():\n"
                     "    with pytest.raises(ValueError):\n        longest([])\n", FUNCTION),
             (FUNCTION,), (FIRST,)),
            (kodcode("from solution import *\n\ndef test_longest():\n"
                     '    assert longest(["ab", "c"]) == 2\n', FUNCTION), (FUNCTION,),
             ("def longest(words):\n    return 1\n",)),
        ),
        "the card of KodCode-V1, as its copies list its features; the tests of KodCode-AI/kodcode "
        "are files of pytest beside solution.py",
        {"column": "question"},
        {"column": "test", "reference": "solution"},
        "parquet",
    ),
    "MBPP": ProgramForm(
        (
            (mbpp(['assert longest(["ab", "c"]) == 2', 'assert longest(["a"]) == 1'], FUNCTION),
             (FUNCTION, FUNCTION.replace("\n", "\r\n")), (FIRST.replace("words[0]", "words[-1]"),)),
        ),
        "google-research-datasets/mbpp: text, code, test_list, test_setup_code",
        {"column": "text"},
        {"column": "test_list", "reference": "code"},
    ),
    "MBPP, sanitized": ProgramForm(
        (
            (sanitized(["assert math.isclose(half(3), 1.5)"],
                       "def half(n):\n    return n / 2\n", ["import math"]),
             ("def half(n):\n    return n / 2\n",), ("def half(n):\n    return n // 2\n",)),
        ),
        "google-research-datasets/mbpp, sanitized: prompt, code, test_imports, test_list",
        {},
        {"column": "test_list", "reference": "code"},
    ),
    "MBPP+": ProgramForm(
        (
            (sanitized(['assert longest(["ab", "c"]) == 2'], FUNCTION, []) | {"test": PLUS + LOOP},
             (FUNCTION,), (LAST,)),
        ),
        "evalplus/mbppplus: the template of its tests in a copy of its tools, and the columns of "
        "MBPP, sanitized, with `test` (from memory)",
        {},
        {"column": "test", "reference": "code"},
    ),
    "HumanEval+": ProgramForm(
        (
            (humaneval(CHECK_PLUS, FUNCTION), (FUNCTION,), (LAST,)),
        ),
        "evalplus/humanevalplus, from memory: the columns of HumanEval, with the tests of MBPP+ "
        "inside check(candidate)",
        {},
        {"column": "test", "function": "entry_point"},
    ),
    "AceCode-87K": ProgramForm(
        (
            (acecode(['assert longest(["ab", "c"]) == 2', 'assert longest(["abc"]) == 3'],
                     FUNCTION), (FUNCTION,), (LAST,)),
        ),
        "TIGER-AI-Lab/AceCoder, README of its data: question, test_cases, inferences, "
        "context_messages",
        {"column": "question"},
        {"column": "test_cases"},
        "parquet",
    ),
    "Eurus-2, code": ProgramForm(
        (
            (eurus(STDIN), (DOUBLE, WHOLE), ("print(6)",)),
            (eurus(CALL, "apps"), (FUNCTION, METHOD), (FIRST,)),
        ),
        "PRIME-RL/Eurus-2-RL-Data, as verl's prime_code reads its ground truth",
        {"where": {"ability": "code"}},
        {"column": "reward_model.ground_truth"},
        "parquet",
    ),
    "Open-R1, verifiable code": ProgramForm(
        (
            (verifiable([{"fn_name": None, "input": "3\n", "output": "6\n",
                          "type": "stdin_stdout"}], DOUBLE), (DOUBLE,), ("print(3)",)),
        ),
        "open-r1/verifiable-coding-problems-python, as ms-swift's page and its code reward read it",
        {},
        {"column": "verification_info.test_cases", "reference": "gold_standard_solution"},
    ),
    "HumanEval": ProgramForm(
        (
            (humaneval(CHECK, FUNCTION), (FUNCTION,), (LAST, "def longest(words):\n    pass\n")),
        ),
        "human_eval/execution.py of openai/human-eval: check(entry_point) behind the row's test",
        {},
        {"column": "test", "function": "entry_point"},
    ),
    "LeetCodeDataset": ProgramForm(
        (
            (leetcode(CHECK, METHOD), (METHOD,), (METHOD.replace("max", "min"),)),
        ),
        "newfacade/LeetCodeDataset, from memory: check(candidate), and an entry_point that may be "
        "a method of Solution()",
        {"column": "query"},
        {"column": "test", "function": "entry_point", "reference": "completion"},
    ),
    "BigCodeBench": ProgramForm(
        (
            (bigcodebench(UNIT, FUNCTION), (FUNCTION,), (LAST,)),
        ),
        "bigcodebench/eval/__init__.py of bigcode-project/bigcodebench: its loader runs the class "
        "TestCases",
        {"column": "instruct_prompt"},
        {"column": "test", "reference": "canonical_solution"},
    ),
    "CodeContests": ProgramForm(
        (
            (codecontests({"input": ["3\n", "5\n"], "output": ["6\n", "10\n"]}, DOUBLE),
             (DOUBLE,), ("print(6)",)),
        ),
        "deepmind/code_contests, as alpha_codium/code_contests of Codium-ai/AlphaCodium reads it",
        {"column": "description"},
        {"column": "public_tests", "reference": "solutions.solution"},
        "parquet",
    ),
}  # fmt: skip
