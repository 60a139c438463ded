"""A process that compares mathematics for `math_answer`. Runs as a script, forever.

Each input line is JSON: {"gold", "text"} asks whether two answers in TeX are equal, {"gold"}
whether an answer can be read at all, {"read"} for an answer's expression. Each output line is true
or false, or the expression as a text, empty if there is none. The parent process enforces the time
limit, so the library's own alarms are off.
"""

import functools
import json
import logging
import resource
import sys
from typing import Any

MEMORY = 2**31  # bytes of addresses: a power of powers must not fill the machine


@functools.lru_cache(4096)
def read_expressions(answer: str) -> tuple[Any, ...]:
    """Parse an answer; strings that are not mathematics are left out."""
    from math_verify import LatexExtractionConfig, parse

    kinds = (LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),)
    boxed = rf"\boxed{{{answer}}}"  # one box: the library would join near ones to a set
    parsed = parse(boxed, kinds, extraction_mode="first_match", parsing_timeout=None)  # type: ignore[arg-type]
    return tuple(one for one in parsed if not isinstance(one, str))


def written(expression: Any) -> str:
    """An expression as text, the same for equal numbers: 0.5 and 1/2 are both 1/2."""
    import sympy

    try:
        return str(sympy.nsimplify(expression, rational=True))
    except (AttributeError, TypeError, ValueError):  # sets, relations: as they are
        return str(expression)


def of_one_size(first: Any, other: Any) -> bool:
    """Whether two numbers are equal for their size. The library rounds at a decimal place, which
    makes 10^{-20} and 10^{-21} equal. A number with a fraction may be rounded to half a percent,
    since the library has compared its first decimals. Of expressions with variables the constant
    terms are compared. True for what has no size."""
    import sympy

    try:
        if first.free_symbols or other.free_symbols:
            first, other = (
                expression.as_independent(*expression.free_symbols, as_Add=True)[0]
                for expression in (first, other)
            )
        values = [sympy.N(expression, 30, chop=False) for expression in (first, other)]
        largest = max(map(abs, values))
        off = abs(values[0] - values[1])
        rounded = any(isinstance(expression, sympy.Float) for expression in (first, other))
        bound = largest * sympy.Float("0.005" if rounded else "1e-6", 30)
        return bool(off <= bound) or any(map(is_percentage, (first, other)))
    except (AttributeError, TypeError, ValueError):  # matrices, relations: their parts are compared
        return True


def is_percentage(expression: Any) -> bool:
    """Whether the library has read a percent sign: 25 % also equals 25."""
    import sympy

    return isinstance(expression, sympy.Mul) and sympy.Rational(1, 100) in expression.args


def compare_by_size() -> None:
    """Let the library's comparison of numbers, also in sets, points and matrices, know sizes."""
    from math_verify import grader

    equal = grader.sympy_numeric_eq

    def equal_and_of_one_size(first: Any, other: Any, *digits: int) -> bool:
        return equal(first, other, *digits) and of_one_size(first, other)

    grader.sympy_numeric_eq = equal_and_of_one_size


def answer(question: dict[str, Any]) -> bool | str:
    from math_verify import verify

    if "read" in question:
        expressions = read_expressions(question["read"])
        return written(expressions[0]) if expressions else ""
    gold = read_expressions(question["gold"])
    if "text" not in question:
        return bool(gold)
    expressions = read_expressions(question["text"])
    # an inequality is the set of its solutions, whichever of the two the right answer is
    return bool(
        verify(list(gold), list(expressions), timeout_seconds=None, allow_set_relation_comp=True)  # type: ignore[arg-type]
    )


def main() -> None:
    import math_verify

    compare_by_size()
    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not be read as an answer
    print(json.dumps("ready"), file=out, flush=True)
    for line in sys.stdin:
        try:
            verdict = answer(json.loads(line))
        except (MemoryError, RecursionError):
            verdict = False
        print(json.dumps(verdict), file=out, flush=True)


if __name__ == "__main__":
    main()
