"""The share of rows in which what is right wins and what is wrong does not, by data set.

    python scripts/benchmarks/data_sets.py

Rows have the exact form of each data set with content of our own: tests/data_sets.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.data_sets import answers, programs
from tests.data_sets.scored import rows_won, scored


def main() -> None:
    for name, form in {**answers.FORMS, **programs.FORMS}.items():
        with TemporaryDirectory() as folder:
            found = scored(form, Path(folder))
        print(f"{name:32} {rows_won(found)} of {len(found)}", flush=True)


if __name__ == "__main__":
    main()
