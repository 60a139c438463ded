"""A process that compares mathematics for `math_answer`. Runs as a script, forever.

Each input line is JSON: {"gold": text} asks whether a right answer can be read at all, {"gold",
"text", "boxed"} whether a completion has that answer, {"read", "boxed"} for a completion's answer.
Each output line is true or false, or the answer as a text, empty if there is none. The parent
process enforces the time limit, so the library's own alarms are off.
"""

import functools
import json
import logging
import resource
import sys
from typing import Any

ENVIRONMENTS = ("$", r"\(", r"\[", r"\boxed")  # signs of mathematics in a text

MEMORY = 2**31  # bytes of addresses: a power of powers must not fill the machine


def bare(gold: str) -> str:
    """A reference answer as TeX: the text after ####, boxed if it is bare."""
    last = gold.rpartition("####")[2].strip()
    return last if any(sign in last for sign in ENVIRONMENTS) else rf"\boxed{{{last}}}"


@functools.lru_cache(4096)
def read_expressions(text: str, boxed: bool) -> tuple[Any, ...]:
    """Parse expressions in a text; strings that are not mathematics are left out."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    latex = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=not boxed)
    kinds = (latex,) if boxed else (latex, ExprExtractionConfig())
    if boxed and r"\boxed" not in text:
        return ()
    mode = "first_match" if boxed else "any_match"
    parsed = parse(text, kinds, extraction_mode=mode, parsing_timeout=None)  # type: ignore[arg-type]
    return tuple(one for one in parsed if not isinstance(one, str))


def written(expression: Any) -> str:
    """An expression as text, the same for equal numbers: 0.5 and 1/2 are both 1/2."""
    import sympy

    try:
        return str(sympy.nsimplify(expression, rational=True))
    except (AttributeError, TypeError, ValueError):  # sets, relations: as they are
        return str(expression)


def answer(question: dict[str, Any]) -> bool | str:
    from math_verify import verify

    if "read" in question:
        found = read_expressions(question["read"], question["boxed"])
        return written(found[0]) if found else ""
    gold = read_expressions(bare(question["gold"]), False)
    if "text" not in question:
        return bool(gold)
    given = read_expressions(question["text"], question["boxed"])
    return bool(verify(list(gold), list(given), timeout_seconds=None))  # type: ignore[arg-type]


def main() -> None:
    import math_verify

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
