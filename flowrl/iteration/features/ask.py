"""Votes of people on the samples of an iteration, and its reward fitted to them before they are
scored: see flowrl/votes/asking.py."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from flowrl.errors import UserError
from flowrl.iteration.records import Sampled, Scored
from flowrl.iteration.stages import Score, Stages
from flowrl.session.session import ASKING, Session
from flowrl.votes.asking import AskedPairs, RecordedVotes, RunVotes, UsedVote
from rewards import Samples

BEAT = 0.5  # seconds between two looks at the votes, in which all processes take part


@dataclass(frozen=True)
class AskedScore:
    """Asks about pairs of the samples, fits the reward again, then scores all samples by it. The
    main process asks and fits; all processes choose, gather and score together."""

    session: Session
    asking: RunVotes
    inner: Score

    def __call__(self, samples: Sampled) -> Scored:
        began = time.perf_counter()
        self.renew(samples)
        waited = time.perf_counter() - began
        scored = self.inner(samples)
        metrics = {**scored.metrics, **self.asking.metrics, "seconds/asking": waited}
        return replace(scored, metrics=metrics)

    def renew(self, samples: Sampled) -> None:
        """Collective."""
        asking, iteration = self.asking, samples.drawn.iteration
        recorded = asking.recorded.get(iteration)
        local_samples = samples.unit.samples[0]
        assert isinstance(local_samples, Samples), "workers are refused"
        spent = asking.asked >= asking.settings.budget
        if spent and asking.pending is None and recorded is None:
            return
        pairs = None if spent else self.chosen(samples, local_samples.on_cpu(), recorded)
        if recorded is None:
            votes = self.voted(samples, local_samples.on_cpu(), pairs)
        else:
            votes = self.again(pairs, recorded)
        self.fit(iteration, votes, pairs)

    def chosen(
        self, samples: Sampled, local_samples: Samples, recorded: RecordedVotes | None
    ) -> AskedPairs | None:
        """The pairs of this iteration, the same on all processes: as recorded, or as chosen by the
        main process."""
        asking, drawn = self.asking, samples.drawn
        gather = drawn.gatherer(self.session.parallel)
        features = gather(torch.from_numpy(asking.of_samples(local_samples))).numpy()
        texts = drawn.draws.texts or self.session.prompts.take(drawn.draws.rows)[0]
        prompts = [str(text) for text in texts]
        group = len(features) // len(drawn.draws.ids)
        if recorded is not None:
            return _as_recorded(recorded, drawn.iteration, prompts, group, features)
        pairs = None
        with self.session.parallel.together():
            if self.session.parallel.main:
                pairs = asking.choose(features, prompts, group, drawn.iteration)
        return self.session.parallel.every(pairs)[0]

    def voted(
        self, samples: Sampled, local_samples: Samples, pairs: AskedPairs | None
    ) -> list[UsedVote]:
        """The new votes: on this iteration's pairs, or, if they are not waited for, those that are
        in on the pairs before. Collective."""
        asking, parallel = self.asking, self.session.parallel
        votes, media = list[UsedVote](), self.media(samples, local_samples, pairs)
        if pairs is not None:
            asking.asked += len(pairs.rows)
            with parallel.together():
                if parallel.main:
                    asking.show(pairs, media)
        if asking.settings.wait and pairs is not None:
            asking.pending = pairs
            self.wait()
        if not asking.settings.wait or pairs is not None:
            # the page shows other pairs by now, so that no vote comes too late to be counted
            with parallel.together():
                votes = asking.collected() if parallel.main else []
            votes = parallel.every(votes)[0]
            asking.use(votes)
            asking.pending = None if asking.settings.wait else pairs
        return votes

    def media(
        self, samples: Sampled, local_samples: Samples, pairs: AskedPairs | None
    ) -> Mapping[int, Samples]:
        """A sample of each row of the pairs, from all processes."""
        if pairs is None:
            return {}
        group = len(local_samples.prompts) // max(1, len(samples.drawn.indices))
        rows_asked = {row for pair in pairs.rows for row in pair}
        by_row: dict[int, Samples] = {}
        for at, index in enumerate(samples.drawn.indices if samples.drawn.counts else ()):
            for k in range(group):
                if (row := index * group + k) in rows_asked:
                    by_row[row] = local_samples.take([at * group + k])
        return {row: s for part in self.session.parallel.every(by_row) for row, s in part.items()}

    def wait(self) -> None:
        """Wait until all votes are in. Other processes take part in a beat, so that none of them
        takes the wait for a process that has died."""
        parallel, all_in = self.session.parallel, False
        while not all_in:
            with parallel.together():
                all_in = self.asking.all_in() if parallel.main else False
            all_in = any(parallel.every(all_in))
            if not all_in:
                time.sleep(BEAT)

    def again(self, pairs: AskedPairs | None, recorded: RecordedVotes) -> list[UsedVote]:
        """Use recorded votes in place of asking."""
        asking = self.asking
        votes = recorded.votes
        if not asking.settings.wait:
            asking.use(votes)
        if pairs is not None:
            asking.pending, asking.asked = pairs, asking.asked + len(pairs.rows)
        elif not asking.settings.wait:
            asking.pending = None
        if asking.settings.wait and pairs is not None:
            asking.use(votes)
            asking.pending = None
        return votes

    def fit(self, iteration: int, votes: list[UsedVote], pairs: AskedPairs | None) -> None:
        """Record new votes, and fit the reward to all of them on the main process."""
        asking, parallel = self.asking, self.session.parallel
        head = None
        with parallel.together():
            if parallel.main:
                asking.note(iteration, votes, pairs)
                head = asking.refitted() if votes else None
        head = parallel.every(head)[0]
        if head is not None:
            asking.renew(head)


def _as_recorded(
    recorded: RecordedVotes,
    iteration: int,
    prompts: list[str],
    group: int,
    features: np.ndarray,
) -> AskedPairs | None:
    record = recorded.asked
    if record is None:
        return None
    flat = [row for pair in record.rows for row in pair]
    prompts_asked = list[str]()
    if all(0 <= row < len(features) for row in flat):
        prompts_asked = [prompts[a // group] for a, _ in record.rows]
    if prompts_asked != record.prompts or len(record.at_random) != len(record.rows):
        raise UserError(
            f"ask: the recorded votes of iteration {iteration} are on samples of other prompts: "
            "replay them with the settings and prompts of their run"
        )
    return AskedPairs(iteration, record.rows, record.at_random, prompts_asked, features[flat])


def wrap(stages: Stages, session: Session) -> Stages:
    asking = session.table[ASKING]
    assert isinstance(asking, RunVotes), "a start opens it"
    return replace(stages, score=AskedScore(session, asking, stages.score))
