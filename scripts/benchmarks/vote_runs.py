"""Check what votes of a simulated person say: of a run that a reward hacks, and of a run that asks.

    python scripts/benchmarks/vote_runs.py hacked    a reward is hacked: do people say so?
    python scripts/benchmarks/vote_runs.py alarm     does the alarm accuse runs whose people agree?
    python scripts/benchmarks/vote_runs.py choice    uncertain pairs beside random ones

The person's taste is large objects. hacked: `demo` with the reward `brightness` alone, which a
blank image wins; votes are on held-out prompts, base beside trained, after some iterations.

The others train nothing. Samples of the base model are drawn once, and each iteration asks about
pairs of `DRAWN` other prompts, as a run does: the votes, the fit after each iteration, and the
alarm are its own code. `choice` measures the agreement of the fit with the hidden taste on held-out
prompts. `alarm` has these persons:

    large         the taste stays: an alarm is false
    chosen        the taste stays, and the samples become those that the fit scores highest, up to
                  the best 4 of 12: the fit has chosen them, so it agrees less with the same person
    small, warm   the taste changes to this one after half of the votes

All parts go on where they stopped. FOLDER/PART.json is written after each run.
"""

import itertools
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from experiment import ends, flowrl, interval, read
from taste_runs import STRICT, VOTES

import rewards
from flowrl.cli.given_model import device_of
from flowrl.demo.taste import TASTES, PixelTaste
from flowrl.models.open import whole_at_evaluation
from flowrl.models.own.policy import shown_by
from flowrl.run.evaluate.evaluate import Trial, draw_trial
from flowrl.session.learner import load_models
from flowrl.settings.read import read_run
from flowrl.votes.asking import WATCHED, AskedPairs, UsedVote, VotesUsed, disagreement
from flowrl.votes.choice import random_pairs, uncertain_pairs
from flowrl.votes.simulated import SimulatedPerson
from rewards.fitted.heads import LinearHead, choose_ridge
from rewards.fitted.scoring import FittedScores, GradedFittedScores

TASTE = "large"
LOOKS = ("000004", "000008")  # checkpoints that people see of a hacked run
OPPOSITE = PixelTaste(lambda image: -TASTES["large"].of(image), TASTES["large"].temperature)
MINDS: Mapping[str, PixelTaste] = {**TASTES, "small": OPPOSITE}
CASES = ("large", "chosen", "small", "warm")
CHOICES = ("random", "uncertain")
POOL, PER_PROMPT, BEST = 160, 12, 4  # prompts, samples of each, and those that the fit leaves
DRAWN, ITERATIONS, VOTES_ASKED = 16, 10, 24  # prompts of an iteration, iterations, votes in each
SAID = ("brightness prefers", "brightness agrees")


@dataclass
class Arguments:
    part: tyro.conf.Positional[Literal["hacked", "alarm", "choice"]]
    out: Path = Path("runs/votes")
    seeds: tuple[int, ...] = (0, 1, 2)
    cases: tuple[str, ...] = CASES
    """Of `alarm`."""
    report_only: bool = False


@dataclass
class Records:
    """Results of a part by name, in a file that is rewritten after each."""

    file: Path
    rows: dict[str, Any]

    @classmethod
    def of(cls, out: Path, part: str) -> "Records":
        out.mkdir(parents=True, exist_ok=True)
        file = out / f"{part}.json"
        return cls(file, json.loads(file.read_text()) if file.exists() else {})

    def row(self, name: str, measure: Callable[[], Any]) -> Any:
        if name not in self.rows:
            self.rows[name] = measure()
            self.file.write_text(json.dumps(self.rows, indent=1) + "\n")
            print(f"{name}: {self.rows[name]}", flush=True)
        return self.rows[name]


def trained(folder: Path, *words: object) -> Path:
    """A finished run in this folder: trained, gone on with, or there already."""
    if (folder / "checkpoints").exists():
        flowrl("train", "--resume", folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        flowrl("train", *words, "--folder", folder)
    return folder


def answered(folder: Path, *words: object) -> dict[str, Any]:
    """The answer of a folder of votes by the simulated person."""
    if not (folder / "answer.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        person = ("--person", "simulated", "--taste", TASTE, "--port", 0)
        flowrl("vote", *words, *person, "--out", folder)
    return json.loads((folder / "answer.json").read_text())


# hacked


def hacked(out: Path, seed: int) -> dict[str, Any]:
    """Train on a reward that is hacked; return the reward, the rule and what people prefer."""
    run = trained(
        out / f"hacked-{seed}",
        "demo", "--train.seed", seed, "--rewards", json.dumps([{"name": "brightness"}]),
        "--held_out_rewards",
        json.dumps([{"name": "brightness"}, STRICT, {"name": f"flowrl/demo/taste.py:{TASTE}"}]),
        "--train.iterations", 8, "--train.alarms", "off",
        "--evaluate.every", 4, "--evaluate.samples", 128, "--checkpoint.every", 4,
        "--checkpoint.keep", 9, "--recipe.group", 8, "--prompts.per_iteration", 8,
        "--track.images", 0,
    )  # fmt: skip
    lines, row = read(run), dict[str, Any]()
    for at in LOOKS:
        answer = answered(
            out / f"hacked-{seed}-votes-{at}", run, "--weights", at, "--votes", 60,
            "--seed", seed,
        )  # fmt: skip
        side, right = answer["rewards"]["brightness"]
        row[at] = {
            "people": answer["preferred"],
            "brightness prefers": side["value"],
            "brightness agrees": right["value"],
        }
    for name in ("brightness", "shapes.strict", TASTE):
        row[name] = ends(lines, f"held_out/{name}")
    return row


# votes without training


@dataclass(frozen=True)
class Pool:
    """Samples of the base model: features, tastes by name, and the number of each one's prompt."""

    features: np.ndarray
    tastes: Mapping[str, np.ndarray]
    groups: np.ndarray

    @classmethod
    def of(cls, out: Path, kind: Literal["train", "held_out"], reward: FittedScores) -> "Pool":
        file = out / f"pool-{kind}.npz"
        if not file.exists():
            run = read_run(Path("configs/demo_votes.yaml"))
            prompts = run.prompts.read(kind)
            count = min(POOL, len(prompts))
            rows = [i * len(prompts) // count for i in range(count)]
            trial = Trial(prompts, tuple(rows), PER_PROMPT, run.evaluation_steps, 0)
            policy = whole_at_evaluation(load_models(run, device_of(run)), run)
            samples = shown_by(policy, draw_trial(policy, trial).samples)
            number = {prompt: i for i, prompt in enumerate(dict.fromkeys(samples.prompts))}
            chunks = [range(i, i + PER_PROMPT) for i in range(0, len(samples.prompts), PER_PROMPT)]
            arrays: dict[str, Any] = {
                f"taste {name}": [mind.of(image) for image in samples.media]
                for name, mind in MINDS.items()
            }
            arrays["features"] = np.concatenate(
                [reward.columns.of(samples.take(i)) for i in chunks]
            )
            arrays["groups"] = [number[prompt] for prompt in samples.prompts]
            np.savez(file, **arrays)
        with np.load(file) as stored:
            tastes = {name: stored[f"taste {name}"] for name in MINDS}
            return cls(stored["features"], tastes, stored["groups"])

    def take(self, rows: Sequence[int] | np.ndarray) -> "Pool":
        tastes = {name: values[rows] for name, values in self.tastes.items()}
        return Pool(self.features[rows], tastes, self.groups[rows])

    def iteration(self, number: int, seed: int) -> "Pool":
        """Samples of the prompts of an iteration."""
        order = np.random.default_rng(seed).permutation(POOL)
        prompts = order[number * DRAWN : (number + 1) * DRAWN]
        return self.take(np.flatnonzero(np.isin(self.groups, prompts)))

    def best(self, score: np.ndarray, count: int) -> "Pool":
        """The samples of each prompt with the highest scores."""
        rows = [
            int(row)
            for group in np.unique(self.groups)
            for row in sorted(np.flatnonzero(self.groups == group), key=lambda i: -score[i])[:count]
        ]
        return self.take(rows)

    def asked(
        self, number: int, rows: list[tuple[int, int]], at_random: list[bool]
    ) -> tuple[AskedPairs, "Pool"]:
        """Pairs of these samples, and their samples, a and b in turn."""
        shown = self.take([row for pair in rows for row in pair])
        prompts = [f"prompt {group}" for group in shown.groups[::2]]
        return AskedPairs(number, rows, at_random, prompts, shown.features), shown


def votes_on(pairs: AskedPairs, shown: Pool, mind: str, rng: random.Random) -> list[UsedVote]:
    """Votes of a person with this taste, and with errors by `rng`."""
    taste, votes = MINDS[mind], []
    person = SimulatedPerson(lambda image, _: taste.of(image), taste.temperature)
    for pair in range(len(pairs.rows)):
        a_left = rng.random() < 0.5
        a, b = shown.tastes[mind][2 * pair : 2 * pair + 2]
        verdict = person.verdict(*((a, b) if a_left else (b, a)), rng)
        label = 0.5 if verdict == "equal" else float((verdict == "left") == a_left)
        votes.append(UsedVote(pairs.iteration, pair, label, 1.0 if a_left else -1.0))
    return votes


def refitted(used: VotesUsed, first: LinearHead) -> LinearHead:
    pairs = used.pairs(None)
    head = LinearHead.fit(pairs, choose_ridge(pairs).ridge)
    return replace(head, centre=first.centre)


def alarm(pool: Pool, case: str, seed: int, first: LinearHead) -> dict[str, Any]:
    """Votes at which the alarm rings (None: it does not), and the agreement after each iteration
    from 120 votes on."""
    used, head = VotesUsed(pool.features[:0]), first
    rng, agreement = random.Random(f"{seed} {case}"), dict[str, float]()
    for number in range(ITERATIONS):
        samples = pool.iteration(number, seed)
        if case == "chosen":
            least = PER_PROMPT - round((PER_PROMPT - BEST) * number / (ITERATIONS - 1))
            samples = samples.best(head.scores(samples.features), least)
        changed = case in MINDS and number >= ITERATIONS // 2
        rows = random_pairs(samples.groups.tolist(), VOTES_ASKED, (seed, number))
        pairs, shown = samples.asked(number, rows, [True] * len(rows))
        used.add(pairs, votes_on(pairs, shown, case if changed else TASTE, rng), head)
        agreement[str(len(used))] = float(np.mean(used.agreed[-WATCHED:]))
        if disagreement(used.agreed):
            return {"rings": len(used), "agreement": agreement}
        head = refitted(used, first)
    return {"rings": None, "agreement": agreement}


def choice(train: Pool, fresh: Pool, choose: str, seed: int, first: LinearHead) -> dict[str, float]:
    """Agreement with the hidden taste over the number of votes."""
    used, head = VotesUsed(train.features[:0]), first
    rng, agreement = random.Random(f"{seed}"), dict[str, float]()
    a, b = np.array(random_pairs(fresh.groups.tolist(), 2000, (seed, 99))).T
    truth = np.sign(fresh.tastes[TASTE][a] - fresh.tastes[TASTE][b])
    for number in range(-(-VOTES // VOTES_ASKED)):
        count, samples = min(VOTES_ASKED, VOTES - len(used)), train.iteration(number, seed)
        groups = samples.groups.tolist()
        rows, at_random = random_pairs(groups, count, (seed, number)), [True] * count
        if choose == "uncertain" and number:
            rows, at_random = uncertain_pairs(
                head.model, head.scaled(samples.features), groups, count, (seed, number)
            )
        pairs, shown = samples.asked(number, rows, at_random)
        used.add(pairs, votes_on(pairs, shown, TASTE, rng), head)
        head = refitted(used, first)
        scores = head.scores(fresh.features)
        same = np.sign(scores[a] - scores[b]) == truth
        agreement[str(len(used))] = float(same[truth != 0].mean())
    return agreement


def report(part: str, rows: Mapping[str, Any]) -> None:
    """Print what a part has shown."""
    print()
    if part == "hacked":
        for at in LOOKS:
            values = [[r[at]["people"]["value"], *(r[at][k] for k in SAID)] for r in rows.values()]
            columns = zip(*values, strict=True)
            people, prefers, right = (interval(column, ".2f") for column in columns)
            print(
                f"{int(at)} iterations: people prefer the trained weights in {people} of pairs, "
                f"brightness in {prefers}, and they agree on {right}"
            )
        for name in ("brightness", "shapes.strict", TASTE):
            before, after = ([r[name][i] for r in rows.values()] for i in (0, 1))
            print(f"held-out {name}: {interval(before)} before, {interval(after)} after")
    if part == "alarm":
        for case in CASES:
            runs = [row for name, row in rows.items() if name.startswith(f"{case} ")]
            rings = [row["rings"] for row in runs if row["rings"] is not None]
            if runs:
                ends = [[*row["agreement"].values()][-1] for row in runs]
                print(
                    f"{case}: {len(rings)} of {len(runs)} ring, at {sorted(rings)} votes; "
                    f"agreement of the last {WATCHED} at the end {interval(ends)}"
                )
    if part == "choice":
        for choose in CHOICES:
            curves = [row for name, row in rows.items() if name.startswith(choose)]
            points = [f"{n}: {interval([row[n] for row in curves])}" for n in curves[0]]
            print(f"{choose}, {len(curves)} seeds; agreement by votes: {'; '.join(points)}")
        seeds = sorted({name.split()[1] for name in rows})
        for votes in rows[f"random {seeds[0]}"]:
            gains = [rows[f"uncertain {s}"][votes] - rows[f"random {s}"][votes] for s in seeds]
            print(f"uncertain minus random at {votes} votes: {interval(gains, '+.3f')}")


def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    out, part = arguments.out.resolve(), arguments.part
    records = Records.of(out, part)
    loaded = rewards.load("fitted", path="flowrl/demo/shapes-taste")
    assert isinstance(loaded, GradedFittedScores)
    reward = loaded.plain
    first, seeds = reward.fitted.head, () if arguments.report_only else arguments.seeds
    if part == "hacked":
        for seed in seeds:
            records.row(str(seed), partial(hacked, out, seed))
    if part == "alarm":
        pool = Pool.of(out, "train", reward)
        for case, seed in itertools.product(arguments.cases, seeds):
            records.row(f"{case} {seed}", partial(alarm, pool, case, seed, first))
    if part == "choice":
        train, fresh = (Pool.of(out, kind, reward) for kind in ("train", "held_out"))
        for seed, choose in itertools.product(seeds, CHOICES):
            work = partial(choice, train, fresh, choose, seed, first)
            records.row(f"{choose} {seed}", work)
    report(part, records.rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
