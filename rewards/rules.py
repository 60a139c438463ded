"""Rules of rewards that later versions have changed: a run that was begun before says so.

A run records `RULES_VERSION`, the version of the rules of all rewards. When a rule changes, the
version is raised and a line is added to `RULE_CHANGES`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rewards.load import Want, rewards_within

RULES_VERSION = 6


class Change(NamedTuple):
    """A changed rule.

    since     the first version of the rules that has it
    reward    name of the reward
    what      the present rule and, in parentheses, the older one
    concerns  whether a reward with these settings follows it
    """

    since: int
    reward: str
    what: str
    concerns: Callable[[Mapping[str, Any]], bool] = lambda _: True


def _finds(*ways: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda settings: settings.get("find", "all") in ways


RULE_CHANGES = (
    Change(
        2,
        "code_tests",
        "the program is the last block that says it is Python, else the last one without a "
        "language that does something (before: the last block); programs run as Python's scripts "
        "do; rows with fn_name or testtype: functional call the function (before: they read "
        "input) and may use Python's library without importing it; printed numbers with a fraction "
        "are compared as numbers (before: as texts); a sample whose tests the judge cannot run is "
        "unscored (before: 0)",
    ),
    Change(
        2,
        "math_answer",
        "the last box is the answer (before: neighbouring boxes were one set), answers with the "
        "same text are equal, money, thousands and repeating decimals are read, and a right "
        "answer that no text matches leaves its samples unscored (before: it ended the run); "
        "lists, bases, arrays and 4.5e3 are read, and of several formulas all are the answer",
    ),
    Change(
        3,
        "code_tests",
        "check(candidate) and classes of unittest are called (before: tests that only define them "
        "passed every program), and tests that run nothing leave their samples unscored",
    ),
    Change(
        3,
        "math_answer",
        "numbers are equal for their size (before: 10^{-20} and 10^{-21} were equal, since "
        "decimals were compared), printed mathematics (90°, √2, x²) and \\mathrm{e} are read, a "
        "right letter of a choice may stand before its words, and <answer> tags hold the answer",
    ),
    Change(
        5,
        "code_tests",
        "blocks behind </think> come before those of the reasoning (before: any block that said it "
        "was Python came before one that did not)",
    ),
    Change(
        4,
        "math_answer",
        "mixed numbers, words such as million, powers without a box and a last line of #### are "
        "read, an inequality is the interval of its solutions, and another unit is another answer "
        "(before: 3 1/2 was 2, and 5 cm equalled 5 m)",
    ),
    Change(
        2,
        "exact_answer",
        "a box may have braces of any depth, also \\fbox (before: two levels of \\boxed)",
        _finds("boxed"),
    ),
    Change(
        2,
        "exact_answer",
        "the last <answer> counts, also after one that is not closed (before: the text from "
        "the one that is not closed)",
        _finds("tag"),
    ),
    Change(
        2,
        "exact_answer",
        "a sign behind a letter or a digit is none, so 5-3 ends with 3 (before: with -3)",
        _finds("last_number"),
    ),
    Change(
        2,
        "format",
        "a box may have braces of any depth, and empty boxes do not count (before: two levels)",
        lambda settings: settings.get("kind") == "boxed",
    ),
    Change(
        6,
        "process_reward",
        "of a tokenizer that ends every text (add_eos_token) the steps follow the prompt itself "
        "(before: the end between them, after which no step stood in training)",
    ),
)


def changed_rules(
    name: str, settings: Mapping[str, Any], version: int, want: Want = "load"
) -> Iterator[str]:
    """A clause for each rule of a reward and of its members that has changed since a version of
    the rules, beginning with the reward's name. Imports no user's file."""
    for member, member_settings in rewards_within(name, settings, want):
        for change in RULE_CHANGES:
            if (
                change.reward == member
                and change.since > version
                and change.concerns(member_settings)
            ):
                yield f"{member}: {change.what}"
