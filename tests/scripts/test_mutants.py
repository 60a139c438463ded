"""The list of mutants fits the code: running it is `python scripts/mutants/run.py`, not a test."""

from collections import Counter

from flowrl.paths import PROJECT
from scripts.mutants.run import MUTANTS, main


def test_every_mutants_text_is_once_in_its_file():
    assert MUTANTS
    assert not [name for name, times in Counter(m.name for m in MUTANTS).items() if times > 1]
    for mutant in MUTANTS:
        times = (PROJECT / mutant.file).read_text().count(mutant.find)
        assert times == 1, f"{mutant.name}: {mutant.find!r} is {times} times in {mutant.file}"
        assert mutant.put != mutant.find, mutant.name


def test_every_mutants_tests_are_there():
    for mutant in MUTANTS:
        for test in mutant.tests.split():
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (PROJECT / "tests" / file).read_text(), (
                mutant.name
            )


def test_the_list_is_printed_without_running_anything(capsys):
    assert main(["--list", "--only", "kernels-"]) == 0
    said = capsys.readouterr().out
    assert "kernels-euler" in said and "noise-key" not in said
