"""The table of votes that a command reads: a folder of `flowrl vote`, or a table of preferences."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flowrl.bounded_files import bounded_bytes
from flowrl.errors import UserError, terminal_text
from flowrl.evaluation.reward_evaluation import EvaluateRewards
from flowrl.pages.reward_page import report_rewards
from flowrl.paths import find
from flowrl.prompts.files import EVENTS, VOTES_TABLE
from flowrl.votes.answer import VoteAnswer, answer_of, votes_text, write_results
from flowrl.votes.log import VoteLog
from flowrl.votes.plan import PLAN, VotePlan
from rewards import Reward


class VotedTable(NamedTuple):
    """A table of preferences, and a sentence about its raters' consistency; empty if unknown."""

    path: Path
    consistency: str


def voted_table(votes: Path, command: str) -> VotedTable:
    """The table of a folder of votes, or a table (a folder of tables) that is named itself.

    For a folder of votes the table is written again from its log. A table that is named itself is
    read as it is, since somebody may have corrected it. UserError, which begins with the command,
    for a folder without a vote."""
    if votes.is_dir():
        if not (votes / PLAN).is_file() and not (votes / EVENTS).is_file():
            return VotedTable(votes, "")
        answer = write_results(votes, VoteLog.read(votes, VotePlan.read(votes)))
        if not answer.pairs:
            raise UserError(f"{command}: {votes}: {answer.sentences[0]}")
        return VotedTable(votes / VOTES_TABLE, _consistency(answer))
    folder = votes.parent
    if votes.name != VOTES_TABLE or not (folder / EVENTS).is_file() or not votes.is_file():
        return VotedTable(votes, "")
    try:
        log = VoteLog.read(folder, VotePlan.read(folder))
        text_of_log = votes_text(folder, log)
    except UserError as error:
        print(terminal_text(f"the raters' own consistency is unknown: {error}"))
        return VotedTable(votes, "")
    log_bytes = text_of_log.encode()
    if votes.stat().st_size != len(log_bytes) or bounded_bytes(votes, len(log_bytes)) != log_bytes:
        print(
            terminal_text(
                f"{votes} is not what its log says, and is read as it is: name {folder} to have it "
                "made of the log"
            )
        )
        return VotedTable(votes, "")
    return VotedTable(votes, _consistency(answer_of(log)))


def _consistency(answer: VoteAnswer) -> str:
    c = answer.consistency
    return f"the raters' own consistency is {c.value:.2f} ({c.n} repeats)" if c.n else ""


def report_rewards_on_votes(arguments: EvaluateRewards, objects: Mapping[str, Reward] = {}) -> Path:
    """`flowrl evaluate-rewards`, also of a folder of votes: the page's folder."""
    table, consistency = voted_table(find(str(arguments.dataset)), "evaluate-rewards")
    notes = [consistency] if consistency else []
    return report_rewards(replace(arguments, dataset=table), objects, notes)
