"""`flowrl plan --check-rows`: which training rows can be won."""

from collections import Counter

from flowrl.paths import cache_folder
from flowrl.session.row_answers import (
    ANSWERS_FILE,
    TRAINING_ROWS,
    KeptAnswers,
    RowAnswers,
    askers_of,
    lost_of,
    row_place,
)
from flowrl.session.row_checks import refusal_of_rows
from flowrl.session.session import load_rewards
from flowrl.settings import RunSettings
from rewards.load import may_know


def report_rows(run: RunSettings) -> bool:
    """Print how many rows can be won, and those that cannot. Returns whether a start accepts them.

    UserError if the prompts or a reward cannot be read.
    """
    specs = [spec for spec in run.rewards if may_know(spec.name, spec.settings)]
    prompts, stored = run.prompts.read("train"), KeptAnswers([cache_folder() / ANSWERS_FILE])
    if not specs:
        print(f"{TRAINING_ROWS}: no reward says whether its rows can be won")
        return True
    stored.read()
    answers = RowAnswers(prompts, askers_of(load_rewards(specs)), stored).every(range(len(prompts)))
    count, lost = Counter(one.answer for one in answers.values()), lost_of(answers)
    print(
        f"{TRAINING_ROWS}: {count['yes']} rows can be won, {count['no']} cannot, and of "
        f"{count['unknown']} there is no reference"
    )
    for row, reason in sorted(lost.items()):
        print(f"cannot be won: {row_place(prompts, row)}: {reason}")
    refused = bool(lost) and run.prompts.unwinnable == "refuse"
    if refused:
        print(f"before training: {refusal_of_rows(prompts, lost)}")
    return not refused
