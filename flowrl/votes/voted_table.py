"""The table of votes that a command reads: a folder of `flowrl vote`, or a table of preferences."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flowrl.bounded_files import bounded_bytes
from flowrl.errors import UserError, terminal_text
from flowrl.evaluation.reward_evaluation import EvaluateRewards
from flowrl.evaluation.tables import SUFFIXES
from flowrl.pages.reward_page import report_rewards
from flowrl.paths import find
from flowrl.prompts.files import EVENTS, VOTES_TABLE, folders_of_votes
from flowrl.votes.answer import answer_of, testing_notes, votes_text, write_results
from flowrl.votes.log import VoteLog
from flowrl.votes.plan import PLAN, VotePlan
from rewards import Reward


class VotedTable(NamedTuple):
    """A table of preferences, and sentences about its raters' consistency and the run's recorded
    scores of its samples; none if unknown."""

    path: Path
    notes: tuple[str, ...] = ()


def voted_table(votes: Path, command: str) -> VotedTable:
    """The table of a folder of votes, or a table (a folder of tables) that is named itself.

    For a folder of votes the table is written again from its log. A table that is named itself is
    read as it is, since somebody may have corrected it. UserError, which begins with the command,
    for a folder without a vote, and for one above folders of votes."""
    if votes.is_dir():
        if not (votes / PLAN).is_file() and not (votes / EVENTS).is_file():
            _check_not_above_votes(votes, command)
            return VotedTable(votes)
        answer = write_results(votes, VoteLog.read(votes, VotePlan.read(votes)))
        if not answer.pairs:
            raise UserError(f"{command}: {votes}: {answer.sentences[0]}")
        return VotedTable(votes / VOTES_TABLE, testing_notes(answer))
    folder = votes.parent
    if votes.name != VOTES_TABLE or not (folder / EVENTS).is_file() or not votes.is_file():
        return VotedTable(votes)
    try:
        log = VoteLog.read(folder, VotePlan.read(folder))
        text_of_log = votes_text(folder, log)
    except UserError as error:
        print(terminal_text(f"the raters' own consistency is unknown: {error}"))
        return VotedTable(votes)
    log_bytes = text_of_log.encode()
    if votes.stat().st_size != len(log_bytes) or bounded_bytes(votes, len(log_bytes)) != log_bytes:
        print(
            terminal_text(
                f"{votes} is not what its log says, and is read as it is: name {folder} to have it "
                "made of the log"
            )
        )
        return VotedTable(votes)
    return VotedTable(votes, testing_notes(answer_of(log)))


def _check_not_above_votes(folder: Path, command: str) -> None:
    """UserError, beginning with the command, for a run's folder in the place of votes on it, and
    for a folder that has folders of votes and no table: one of them has to be named."""
    votes_there = folders_of_votes(folder)
    is_run = (folder / "run.yaml").is_file()
    if is_run and not votes_there:
        raise UserError(
            f"{command}: {folder} is a run without votes: `flowrl vote {folder}` collects them"
        )
    has_table = any(path.suffix.lower() in SUFFIXES for path in folder.iterdir())
    if votes_there and (is_run or not has_table):
        of = "a run, with votes" if is_run else "no folder of votes, but has some"
        raise UserError(f"{command}: {folder} is {of}: name one, such as {votes_there[-1]}")


def report_rewards_on_votes(arguments: EvaluateRewards, objects: Mapping[str, Reward] = {}) -> Path:
    """`flowrl evaluate-rewards`, also of a folder of votes: the page's folder."""
    table, notes = voted_table(find(str(arguments.dataset)), "evaluate-rewards")
    return report_rewards(replace(arguments, dataset=table), objects, notes)
