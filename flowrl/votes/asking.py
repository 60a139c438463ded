"""The votes of a run that asks, and the fits of its reward to them.

    RUN/ask/000003/         the pairs of iteration 3: their samples, log and votes.jsonl
    RUN/ask/used.jsonl      a line per iteration: the votes that its fit was the first to use
    RUN/ask/versions/0003   that fit, which loads as {name: fitted, path: RUN/ask/versions/0003}

Votes are recorded before anything is scored by their fit, and stored in checkpoints in the order in
which they were used. So a resumed run uses the same votes in the same iterations, whenever they
were given, and so does a run that replays another one's.
"""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from flowrl.bounded_files import bounded_bytes, bounded_lines, parsed_json
from flowrl.demo.taste import TASTES
from flowrl.errors import UserError, in_words
from flowrl.evaluation.measure import Gallery
from flowrl.evaluation.preferences import ReadOptions, load_preferences
from flowrl.evaluation.reader_words import OF_A_TABLE
from flowrl.json_text import json_text
from flowrl.paths import find
from flowrl.session.session import ASKING, Session
from flowrl.settings.sections.ask import ASKED_REWARD, AskSettings
from flowrl.votes.answer import pair_votes, write_results
from flowrl.votes.choice import random_pairs, uncertain_pairs
from flowrl.votes.collect import SampleCopies, VoteQuestion, plan_pairs
from flowrl.votes.fit import voted_pairs
from flowrl.votes.live_page import LivePage
from flowrl.votes.log import VoteLog
from flowrl.votes.plan import VotePlan, first_fault
from flowrl.votes.serve import PageAddress
from flowrl.votes.simulated import SimulatedPerson
from flowrl.votes.voted_table import voted_table
from flowrl.whole_file import write_whole
from rewards.fitted.folder import FittedFolder, prompt_hash
from rewards.fitted.heads import LinearHead, VotedPairs, choose_ridge
from rewards.fitted.scoring import FittedScores
from rewards.types import Samples, parts_of

ASK, USED, VERSIONS, MARK = "ask", "used.jsonl", "versions", "samples.sha256"
_MOST_MARK, MOST_USED = 2**10, 2**27  # bytes
WATCHED = 60  # random votes whose agreement with the fit is watched
FALLEN = 3.0  # standard errors by which it must have fallen for an alarm
CHUNK = 64  # samples per call of the features


class AskedPairs(NamedTuple):
    """Pairs of an iteration that were asked about.

    rows       of the iteration's samples, of all processes
    at_random  whether a pair was chosen at random
    """

    iteration: int
    rows: list[tuple[int, int]]
    at_random: list[bool]
    prompts: list[str]
    features: Float[np.ndarray, "2*k d"]  # of a and b of each pair in turn


class UsedVote(NamedTuple):
    """A vote that a fit has used: of a pair of an iteration. `side` is 1 where a was on the left,
    -1 where it was on the right."""

    asked: int
    pair: int
    label: Annotated[float, Field(ge=0, le=1)]
    side: Annotated[float, Field(ge=-1, le=1)]


@dataclass(frozen=True)
class RecordedPairs:
    """Pairs of an iteration, as a line of the recorded votes has them: see `AskedPairs`."""

    rows: list[tuple[int, int]]
    at_random: list[bool]
    prompts: list[str]


@dataclass(frozen=True)
class RecordedVotes:
    """A line of the recorded votes: those that an iteration's fit was the first to use, and the
    pairs that the iteration asked about; None once the budget was spent."""

    iteration: int
    votes: list[UsedVote]
    asked: RecordedPairs | None


@dataclass
class VotesUsed:
    """The votes that the present fit has used, in their order.

    features  [2v d] of a and b of each vote in turn
    agreed    of the votes on random pairs: whether the fit before them said the same (1, 0, or 1/2
              for a tie)
    """

    features: Float[np.ndarray, "2*v d"]
    label: list[float] = field(default_factory=list)
    side: list[float] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    agreed: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.label)

    def add(self, pairs: AskedPairs, votes: Sequence[UsedVote], head: LinearHead) -> None:
        """Use votes on pairs, and compare those on random pairs with the fit before them, `head`.
        UserError for a vote on a pair that was not asked about."""
        scores, rows = head.scores(pairs.features), list[int]()
        for vote in votes:
            if vote.asked != pairs.iteration or not 0 <= vote.pair < len(pairs.rows):
                raise UserError("ask: a recorded vote is on no pair of its iteration")
            a, b = 2 * vote.pair, 2 * vote.pair + 1
            rows += [a, b]
            self.label.append(vote.label)
            self.side.append(vote.side)
            self.prompts.append(pairs.prompts[vote.pair])
            if pairs.at_random[vote.pair]:
                said = (np.sign(scores[a] - scores[b]) + 1) / 2
                self.agreed.append(1 - abs(float(said) - vote.label))
        self.features = np.concatenate([self.features, pairs.features[rows]])

    def pairs(self, before: VotedPairs | None) -> VotedPairs:
        """These votes after earlier ones."""
        count = len(self)
        new_pairs = VotedPairs(
            self.features, np.arange(0, 2 * count, 2), np.arange(1, 2 * count, 2),
            np.array(self.label), np.array(self.side), self.prompts,
        )  # fmt: skip
        if before is None:
            return new_pairs
        first = len(before.features)
        return VotedPairs(
            np.concatenate([before.features, new_pairs.features]),
            np.concatenate([before.a, new_pairs.a + first]),
            np.concatenate([before.b, new_pairs.b + first]),
            np.concatenate([before.label, new_pairs.label]),
            np.concatenate([before.side, new_pairs.side]),
            [*before.prompts, *new_pairs.prompts],
        )


def disagreement(agreed: Sequence[float]) -> str:
    """The alarm, a sentence, if the newest votes on random pairs agree with the fit before them
    less than the earlier ones did, by `FALLEN` standard errors; otherwise empty."""
    before, now = np.array(agreed[:-WATCHED]), np.array(agreed[-WATCHED:])
    if len(before) < WATCHED:
        return ""
    error = float(np.sqrt(before.var(ddof=1) / len(before) + now.var(ddof=1) / len(now)))
    if before.mean() - now.mean() <= FALLEN * error:
        return ""
    return (
        f"people no longer agree with the reward: {100 * now.mean():.0f} % of the last {WATCHED} "
        f"votes on random pairs, {100 * before.mean():.0f} % before. Look at the samples and at "
        "the votes in the run's folder ask; lower train.lr, or ask for more votes per iteration"
    )


@dataclass
class RunVotes:
    """The votes of a run, and what asks for them. `page` is the main process's.

    start     the fit that the run began with
    earlier   votes that it was fitted to, on the main process
    recorded  votes of iterations that were recorded before this start, or by the replayed run
    pending   pairs that are shown, while their votes are not waited for
    asked     pairs that were asked about so far
    """

    session: Session
    reward: FittedScores
    start: FittedFolder
    earlier: VotedPairs | None
    recorded: Mapping[int, RecordedVotes]
    page: LivePage
    used: VotesUsed
    version: int = 0
    asked: int = 0
    pending: AskedPairs | None = None
    digest: str = ""
    raised: bool = False  # whether the alarm was

    @classmethod
    def of(cls, session: Session) -> "RunVotes":
        """The votes of a run that asks. UserError for earlier or replayed votes that cannot be
        read."""
        settings = session.run.ask
        assert settings is not None
        label = next(spec.label for spec in session.run.rewards if spec.name == ASKED_REWARD)
        reward = next(parts_of(session.rewards[label], FittedScores))
        main, folder = session.parallel.main, session.folder / ASK
        source = folder if settings.replay is None else find(settings.replay) / ASK
        if settings.replay is not None and not (source / USED).is_file():
            raise UserError(f"ask.replay: {settings.replay} has no recorded votes ({ASK}/{USED})")
        earlier = None
        if main and settings.earlier is not None:
            earlier = earlier_votes(find(settings.earlier), reward)
        taste = TASTES["large"]
        person = SimulatedPerson(
            lambda image, _: taste.of(image), taste.temperature, seed=session.run.train.seed
        )
        page = LivePage(
            folder,
            PageAddress(port=settings.port),
            person if settings.person == "simulated" else None,
        )
        width = len(reward.fitted.head.centre)
        return cls(
            session=session,
            reward=reward,
            start=reward.fitted,
            earlier=earlier,
            recorded=_recorded(source),
            page=page,
            used=VotesUsed(np.zeros((0, width))),
            digest=reward.fitted.digest,
        )

    @property
    def settings(self) -> AskSettings:
        settings = self.session.run.ask
        assert settings is not None
        return settings

    @property
    def folder(self) -> Path:
        return self.session.folder / ASK

    def of_samples(self, samples: Samples) -> Float[np.ndarray, "n d"]:
        """Features of samples."""
        count, columns = len(samples.prompts), self.reward.columns
        parts = [range(at, min(at + CHUNK, count)) for at in range(0, count, CHUNK)]
        return np.concatenate([columns.of(samples.take(part)) for part in parts])

    def choose(
        self, features: Float[np.ndarray, "n d"], prompts: Sequence[str], group: int, iteration: int
    ) -> AskedPairs | None:
        """The pairs to ask about among an iteration's samples, `group` of each draw; None once the
        budget is spent."""
        count = min(self.settings.votes, self.settings.budget - self.asked)
        if count <= 0:
            return None
        groups = [row // group for row in range(len(features))]
        seed = (self.session.run.train.seed, iteration)
        if self.settings.choose == "random":
            rows = random_pairs(groups, count, seed)
            at_random = [True] * len(rows)
        else:
            head = self.reward.fitted.head
            rows, at_random = uncertain_pairs(
                head.model, head.scaled(features), groups, count, seed
            )
        flat = [row for pair in rows for row in pair]
        asked_prompts = [prompts[a // group] for a, _ in rows]
        return AskedPairs(iteration, rows, at_random, asked_prompts, features[flat])

    def show(self, pairs: AskedPairs, media: Mapping[int, Samples]) -> None:
        """Put pairs on the page, on the main process. `media` has a sample of each row. Pairs that
        a killed process has shown are gone on with."""
        folder = self.folder / f"{pairs.iteration:06d}"
        mark = hashlib.sha256(np.ascontiguousarray(pairs.features).tobytes()).hexdigest()
        mark_file = folder / MARK
        if not mark_file.is_file() or bounded_bytes(mark_file, _MOST_MARK) != mark.encode():
            if folder.exists():
                shutil.move(folder, _free(folder))  # of other samples
            self._write(folder, pairs, media)
            write_whole(mark_file, mark)
        log = self.page.turn_to(folder, str(pairs.iteration))
        left = sum(len(order) for order in log.plan.turns.values())
        left -= sum(len(of_rater.given) for of_rater in log.raters.values())
        if left and self.page.person is None:
            self.session.terminal.say(
                f"iteration {pairs.iteration}: {left} pairs wait for your vote: {self.page.link} "
                "(a browser that was let in goes on by itself; Ctrl-C twice stops the run, and no "
                "vote is lost)"
            )

    def _write(self, folder: Path, pairs: AskedPairs, media: Mapping[int, Samples]) -> None:
        folder.mkdir(parents=True)
        copies, row_of = SampleCopies(folder), dict[int, int]()
        for row in dict.fromkeys(row for pair in pairs.rows for row in pair):
            (row_of[row],) = copies.add_all(media[row], f"iteration {pairs.iteration}")
        planned = [(row_of[a], row_of[b]) for a, b in pairs.rows]
        seed = self.session.run.train.seed + pairs.iteration
        question = VoteQuestion(self.settings.question, seed=seed)
        plan_pairs(copies, "asked", str(self.session.folder), planned, question)

    def all_in(self) -> bool:
        """Whether all votes on the pending pairs are in, on the main process."""
        self.page.check()
        assert self.pending is not None
        folder = self.folder / f"{self.pending.iteration:06d}"
        log = VoteLog.read(folder, VotePlan.read(folder))
        return log.finished

    def collected(self) -> list[UsedVote]:
        """The votes on the pending pairs, on the main process. A replay that goes on after the
        recorded votes has shown the pairs of the last ones to nobody."""
        if self.pending is None:
            return []
        folder = self.folder / f"{self.pending.iteration:06d}"
        if not folder.exists():
            return []
        log = VoteLog.read(folder, VotePlan.read(folder))
        write_results(folder, log)
        return [
            UsedVote(self.pending.iteration, v.pair, v.label, 1.0 if v.a_left else -1.0)
            for v in pair_votes(log)
        ]

    def note(self, iteration: int, votes: Sequence[UsedVote], asked: AskedPairs | None) -> None:
        """Record the votes that an iteration's fit is the first to use, on the main process."""
        recorded = None
        if asked is not None:
            recorded = RecordedPairs(asked.rows, asked.at_random, asked.prompts)
        line = RecordedVotes(iteration, list(votes), recorded)
        lines = {**_recorded(self.folder), iteration: line}
        self.folder.mkdir(parents=True, exist_ok=True)
        texts = [
            json_text(asdict(lines[number]), ensure_ascii=False) + "\n" for number in sorted(lines)
        ]
        write_whole(self.folder / USED, "".join(texts))

    def use(self, votes: Sequence[UsedVote]) -> None:
        """Add votes on the pending pairs to those that are used, on all processes."""
        if not votes:
            return
        assert self.pending is not None
        self.used.add(self.pending, votes, self.reward.fitted.head)

    def refitted(self) -> LinearHead:
        """A head that is fitted to all votes, on the main process. Its scores are 0 where the first
        fit's are, so that scores of different iterations differ by the fit alone."""
        pairs = self.used.pairs(self.earlier)
        head = LinearHead.fit(pairs, choose_ridge(pairs).ridge)
        return replace(head, centre=self.start.head.centre)

    def renew(self, head: LinearHead) -> None:
        """Score by a new head from now on, on all processes; the main one writes its folder."""
        seen = self.start.seen | {prompt_hash(prompt) for prompt in self.used.prompts}
        about = {"votes": {"of": "this run", "pairs": len(self.used)}}
        fitted = FittedFolder(self.start.sources, head, frozenset(seen), about)
        self.version += 1
        self.reward.renew(fitted)
        self.digest = fitted.digest
        if self.session.parallel.main:
            folder = self.folder / VERSIONS / f"{self.version:04d}"
            folder.mkdir(parents=True, exist_ok=True)
            card = (
                f"# Version {self.version} of a reward that a run has fitted to votes\n\n"
                f"{len(self.used)} votes of the run; digest {self.digest[:12]}.\n"
            )
            fitted.write(folder, card)

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of an iteration's line. `ask/digest` are the first 12 hexadecimal digits of the
        version's digest, as a number."""
        numbers = {
            "ask/votes": float(len(self.used)),
            "ask/version": float(self.version),
            "ask/digest": float(int(self.digest[:12], 16)),
        }
        if self.used.agreed:
            numbers["ask/agreement"] = float(np.mean(self.used.agreed[-WATCHED:]))
        return numbers

    def alarm(self) -> str:
        """The alarm of votes that no longer agree, once; empty without one."""
        text = "" if self.raised else disagreement(self.used.agreed)
        self.raised = self.raised or bool(text)
        return text

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores: tensors, numbers and texts."""
        head, pending = self.reward.fitted.head, self.pending
        return {
            "used": {**vars(self.used), "features": _tensor(self.used.features)},
            "version": self.version,
            "asked": self.asked,
            "raised": self.raised,
            "pending": None
            if pending is None
            else {**pending._asdict(), "features": _tensor(pending.features)},
            "head": {
                **{name: _tensor(getattr(head, name)) for name in ("centre", "scale")},
                **{
                    name: _tensor(getattr(head.model, name))
                    for name in ("weight", "basis", "spread")
                },
                **{name: float(getattr(head.model, name)) for name in ("beta", "log_nu", "ridge")},
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with a checkpoint's votes and version."""
        used, pending = dict(state["used"]), state["pending"]
        self.used = VotesUsed(**{**used, "features": used["features"].numpy()})
        self.pending = None
        if pending is not None:
            rows = [(int(a), int(b)) for a, b in pending["rows"]]
            self.pending = AskedPairs(
                **{**pending, "rows": rows, "features": pending["features"].numpy()}
            )
        self.asked, self.raised = int(state["asked"]), bool(state["raised"])
        self.version = int(state["version"])
        if self.version:
            saved_head = state["head"]
            numbers = {k: v.numpy() if isinstance(v, Tensor) else v for k, v in saved_head.items()}
            centre, scale = numbers.pop("centre"), numbers.pop("scale")
            head = LinearHead(centre, scale, replace(self.start.head.model, **numbers))
            self.version -= 1  # `renew` counts it
            self.renew(head)

    def close(self) -> None:
        self.page.close()


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, np.float64))


def _free(folder: Path) -> Path:
    """A name beside a folder that nothing has."""
    number = 1
    while (other := folder.with_name(f"{folder.name}-other-{number}")).exists():
        number += 1
    return other


def _recorded(folder: Path) -> dict[int, RecordedVotes]:
    """The recorded lines of a folder of votes by iteration. UserError for a damaged one."""
    path = folder / USED
    if not path.is_file():
        return {}
    reader = TypeAdapter(RecordedVotes)
    try:
        lines = [
            reader.validate_python(parsed_json(line)) for line in bounded_lines(path, MOST_USED)
        ]
    except (OSError, ValueError) as error:
        reason = first_fault(error) if isinstance(error, ValidationError) else str(error)
        raise UserError(f"{path} is damaged ({reason}): bring it back from a copy") from error
    return {line.iteration: line for line in lines}


def earlier_votes(path: Path, reward: FittedScores) -> VotedPairs:
    """Votes before the run, a table or a folder of them, with the features of its reward."""
    with in_words(OF_A_TABLE):
        preferences = load_preferences(voted_table(path, "ask.earlier").path, ReadOptions())
    gallery = Gallery(preferences.items)
    features: list[Float[np.ndarray, " d"]] = []
    width = len(reward.fitted.head.centre)
    for at in range(0, len(preferences.items), CHUNK):
        samples = gallery.samples(range(at, min(at + CHUNK, len(preferences.items))))
        for row in range(len(samples.prompts)):
            alone = samples.take([row])
            readable = alone.media[0] is not None
            features.append(reward.columns.of(alone)[0] if readable else np.full(width, np.nan))
    return voted_pairs(preferences, np.stack(features))


def with_asking(session: Session) -> Session:
    """The session with the votes of its run, if it asks."""
    if session.run.ask is None:
        return session
    return replace(session, table=session.table.with_value(ASKING, RunVotes.of(session)))
