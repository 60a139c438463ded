"""Every JSON that is written is one that strict readers take."""

import ast
import json
import math
from pathlib import Path

import pytest

from flowrl.json_text import exact_text, json_text, not_finite, read_exact
from flowrl.paths import PROJECT
from flowrl.session import record

# texts that no file holds: keys and digests in memory, arguments, and messages to own processes
IN_MEMORY = {
    "flowrl/api/calls.py": 1,
    "flowrl/api/parts.py": 1,
    "flowrl/api/run.py": 2,
    "flowrl/api/same_files.py": 2,
    "flowrl/api/scoring.py": 4,
    "flowrl/api/voting.py": 1,
    "flowrl/cli/model_card.py": 7,
    "flowrl/cli/new_files.py": 2,
    "flowrl/cli/runs.py": 1,
    "flowrl/cli/sandbox_check.py": 1,
    "flowrl/drill/same_end.py": 2,
    "flowrl/evaluation/scoring.py": 1,
    "flowrl/models/diffusers/call/inputs/columns.py": 1,
    "flowrl/models/diffusers/whole/proof_cache.py": 1,
    "flowrl/models/language/served_owner.py": 1,
    "flowrl/models/language/turns.py": 2,
    "flowrl/pages/charts.py": 1,
    "flowrl/pages/compare_page.py": 1,
    "flowrl/pages/run_page.py": 1,
    "flowrl/pages/unseen.py": 2,
    "flowrl/prompts/prompt_set.py": 1,
    "flowrl/session/smaller_calls.py": 1,
    "flowrl/session/start_record.py": 1,
    "flowrl/settings/sections/recipe.py": 1,
    "flowrl/votes/fit.py": 1,
    "flowrl/votes/simulated.py": 1,
    "rewards/catalogue/code_tests.py": 1,
    "rewards/checks/try_programs.py": 1,
    "rewards/fitted/folder.py": 1,
    "rewards/sandbox": 15,
    "rewards/serving/workers.py": 1,
}
WEIRD = {"a": math.nan, "b": [1.0, math.inf, (-math.inf,)], "c": {"d": math.nan}, "e": "NaN"}


def strict(text: str):
    def refuse(name: str):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def loose_writers(source: str) -> int:
    """Calls of json.dumps and json.dump that let NaN through."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return sum(
        ast.unparse(call.func) in ("json.dumps", "json.dump")
        and not any(word.arg == "allow_nan" for word in call.keywords)
        for call in calls
    )


def test_only_texts_that_stay_in_memory_are_written_without_a_look_at_nan():
    found: dict[str, int] = {}
    for room in ("flowrl", "rewards", "samplers"):
        for path in sorted((PROJECT / room).rglob("*.py")):
            text = path.read_text()
            if "json.dump" in text and (count := loose_writers(text)):
                name = path.relative_to(PROJECT).as_posix()
                name = "rewards/sandbox" if name.startswith("rewards/sandbox/") else name
                found[name] = found.get(name, 0) + count
    assert found == IN_MEMORY


def test_numbers_that_are_not_finite_are_null_and_counted():
    assert strict(json_text(WEIRD)) == {
        "a": None, "b": [1.0, None, [None]], "c": {"d": None}, "e": "NaN",
    }  # fmt: skip
    assert json_text({"a": 0.1, "b": [1, "x"]}, indent=1) == json.dumps(
        {"a": 0.1, "b": [1, "x"]}, indent=1
    )
    assert not_finite(WEIRD) == 1 and strict(json_text({math.inf: 1}))


def test_a_checkpoint_s_numbers_come_back_as_they_were():
    back = read_exact(exact_text(WEIRD))
    strict(exact_text(WEIRD))
    assert math.isnan(back["a"]) and back["b"] == [1.0, math.inf, [-math.inf]]
    assert math.isnan(back["c"]["d"]) and back["e"] == "NaN"
    assert read_exact('{"a": Infinity}') == {"a": math.inf}  # of an older version


def test_a_line_of_the_record_is_strict_json(tmp_path):
    tracker = record.JsonlTracker(tmp_path)
    tracker.log({"reward": 1.0, "held_out_std": math.inf, "lr": math.nan}, step=1)
    tracker.log({"reward": 2.0}, step=2)
    lines = [strict(line) for line in (tmp_path / record.METRICS).read_text().splitlines()]
    assert lines[0] == {
        "iteration": 1, "reward": 1.0, "held_out_std": None, "lr": None, "not_finite": 2,
    }  # fmt: skip
    assert lines[1] == {"iteration": 2, "reward": 2.0}


@pytest.mark.parametrize(
    ("numbers", "kept", "said"),
    [
        ((0, 1, 2, 3, 4), [0, 1, 2, 3], []),
        ((1, 2, 3), [1, 2, 3], []),  # without held-out prompts
        ((0, 1, 2, 2, 3), [0, 1, 2, 3], ["line 4 has iteration 2 again"]),
        ((0, 3, 4), [0, 3], ["has no line for iterations 1 to 2, of the 3"]),
        ((0, 1, 3), [0, 1, 3], ["has no line for iteration 2, of the 3"]),
        ((0, 2, 1, 3), [0, 1, 2, 3], []),
        ((), [], ["has no line for iterations 1 to 3, of the 3"]),
    ],
)
def test_a_resume_has_one_line_for_each_iteration_or_says_which_is_missing(
    tmp_path: Path, numbers, kept, said
):
    path, warnings = tmp_path / record.METRICS, []
    path.write_text("".join(f'{{"iteration": {number}}}\n' for number in numbers))
    record.cut_back(tmp_path, 3, warnings.append)
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == kept
    assert len(warnings) == len(said)
    assert all(words in warning for words, warning in zip(said, warnings, strict=True))
