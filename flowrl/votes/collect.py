"""A new folder of votes, from samples of any source. Its files are copies of the pixels that
rewards score, so it can be moved, and a file says nothing of its origin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from flowrl.errors import UserError
from flowrl.evaluation.measure import Gallery, Item
from flowrl.evaluation.preferences import Preferences
from flowrl.votes.plan import PlannedSample, SourceKind, VotePlan, orders, pairs_within
from rewards.perception.media import to_pil

SAMPLES = "samples"
MOST_PAIRS = 200  # of a folder, unless --votes says otherwise


@dataclass(frozen=True)
class VoteQuestion:
    """The way to ask for votes: the question, the number of pairs (None: the source's own), the
    number of raters, and the seed of pairs, order and sides."""

    text: str
    votes: int | None = None
    raters: int = 1
    seed: int = 0


@dataclass
class SampleCopies:
    """Writes samples into a folder of votes, in the order in which they are added."""

    folder: Path
    planned: list[PlannedSample] = field(default_factory=list)

    def add(
        self, media: object, prompt: str, origin: str, scores: Mapping[str, float | None] = {}
    ) -> int:
        """Write a sample; returns its row. UserError for anything but an image."""
        if not isinstance(media, Tensor) or media.ndim != 3:
            kind = "a text" if isinstance(media, str) else "a video"
            raise UserError(f"vote: {origin} is {kind}, and the page shows images only")
        row = len(self.planned)
        file = f"{SAMPLES}/{row:05d}.png"
        (self.folder / SAMPLES).mkdir(exist_ok=True)
        to_pil(media).save(self.folder / file, "PNG", compress_level=1)
        whole = prompt.encode("utf-8", "replace").decode()  # halves of a character have no code
        self.planned.append(PlannedSample(file, whole, origin, scores))
        return row


def plan_pairs(
    copies: SampleCopies,
    kind: SourceKind,
    source: str,
    pairs: Sequence[tuple[int, int]],
    question: VoteQuestion,
    sides: tuple[str, ...] = (),
) -> VotePlan:
    """Write the plan of votes on these pairs of copied samples; with `sides`, their a is a sample
    of the first side."""
    turns = orders(len(pairs), question.raters, question.seed)
    plan = VotePlan(question.text, question.seed, kind, source, sides, copies.planned, pairs, turns)
    plan.write(copies.folder)
    return plan


def plan_folder(
    folder: Path, items: Sequence[Item], source: str, question: VoteQuestion
) -> VotePlan:
    """The plan of votes on samples of a folder: pairs of samples of one prompt. UserError if no
    prompt has two samples that can be read."""
    pairs = pairs_within(
        [item.group for item in items], question.votes or MOST_PAIRS, question.seed
    )
    if not pairs:
        raise UserError(
            f"vote: {source} has no two samples of one prompt: sample each prompt twice or more"
        )
    return _copied(folder, items, pairs, "folder", source, question)


def plan_again(folder: Path, given: Preferences, source: str, question: VoteQuestion) -> VotePlan:
    """The plan of votes on the pairs of a preference file. UserError for a file of texts."""
    if given.texts:
        raise UserError(f"vote: {source} has texts, and the page shows images only")
    pairs = list(dict.fromkeys(zip(given.a.tolist(), given.b.tolist(), strict=True)))
    return _copied(folder, given.items, pairs[: question.votes], "preferences", source, question)


def _copied(
    folder: Path,
    items: Sequence[Item],
    pairs: Sequence[tuple[int, int]],
    kind: SourceKind,
    source: str,
    question: VoteQuestion,
) -> VotePlan:
    """Copy the samples of these pairs, without pairs of which one cannot be read."""
    copies, gallery = SampleCopies(folder), Gallery(items)
    rows: dict[int, int | None] = {}
    for row in dict.fromkeys(row for pair in pairs for row in pair):
        media = gallery.samples([row]).media[0]
        item = items[row]
        rows[row] = None if media is None else copies.add(media, item.prompt, item.source.name)
    whole = [(a, b) for x, y in pairs if (a := rows[x]) is not None and (b := rows[y]) is not None]
    for why in gallery.broken.values():
        print(f"left out: {why}")
    if not whole:
        raise UserError(f"vote: no pair of {source} can be read")
    return plan_pairs(copies, kind, source, whole, question)
