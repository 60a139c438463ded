"""A run that asks people during training."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from flowrl.settings.base import OnResume, Settings
from rewards.rights import ReadFile

ASKED_REWARD = "fitted"  # name of the reward that votes of the run renew


class AskSettings(Settings):
    """Votes of people on the run's own samples, to which its reward `{name: fitted}` is fitted
    again in each iteration: see docs/your_own_taste.md."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        "votes": OnResume.SAID,
        "budget": OnResume.SAID,
        "question": OnResume.FREE,
        "port": OnResume.FREE,
        "wait": OnResume.SAID,
        "replay": OnResume.SAID,
        "person": OnResume.SAID,
    }
    votes: int = Field(default=24, ge=1)
    """Number of pairs that an iteration asks about; one in ten is asked twice."""
    choose: Literal["random", "uncertain"] = "random"
    """How an iteration's pairs are chosen among its own samples. uncertain: those whose votes are
    expected to say most about the reward's weights, and a quarter at random."""
    budget: int = Field(default=200, ge=1)
    """Number of pairs that the run asks about. After them the reward stays as it is."""
    wait: bool = True
    """Wait for an iteration's votes before its samples are scored. false: use those that have
    arrived by then, and drop an iteration's other pairs when the next ones are there."""
    person: Literal["page", "simulated"] = "page"
    """page: a person, in a browser. simulated: a program with the demo's hidden taste, for
    trials."""
    question: str = "Which one do you prefer?"
    """The question above each pair."""
    earlier: ReadFile | None = None
    """Votes, or a folder of them, that the run's reward was fitted to. Each new fit has them too;
    null: only the run's own votes."""
    replay: ReadFile | None = None
    """The folder of a run whose recorded votes are used in place of asking, in the same
    iterations."""
    port: int = Field(default=8300, ge=0, le=65535)
    """Port of the page on this machine; 0 is any free one."""
