"""Find out where a reward fitted to votes loses a hidden taste, without training.

    python scripts/benchmarks/taste_fits.py features    what features see of each taste
    python scripts/benchmarks/taste_fits.py moved       whether a fit holds on a trained policy

features: samples of the demo's base model, drawn once. For each taste and set of features, fits to
50, 100 and 200 votes of the simulated person, and to `CLEAN` votes without errors, which bound what
the features can tell.

moved: runs and fits of `taste_runs.py` in FOLDER, which must have ended. The fits score samples of
each run's checkpoints, so of policies that have moved away from what was voted on.

Both compare within prompts, as training does. `agreement` is the share of pairs of samples of a
prompt that the fit orders as the taste does, and `correlation` is that of scores and taste, each
less its mean over the prompt. Prompts of the votes are not judged.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import tyro
from experiment import interval
from taste_runs import CLIP, FEATURES, Study

import rewards
from flowrl.cli.given_model import device_of, load_into
from flowrl.demo.taste import TASTES
from flowrl.models.open import whole_at_evaluation
from flowrl.models.own.policy import shown_by
from flowrl.run.evaluate.evaluate import Trial, draw_trial
from flowrl.session.learner import load_models
from flowrl.settings.read import read_run
from flowrl.votes.choice import candidate_pairs
from flowrl.votes.simulated import SimulatedPerson
from rewards.catalogue.fitted import load_columns
from rewards.fitted.folder import FeatureSource
from rewards.fitted.heads import LinearHead, VotedPairs, choose_ridge
from rewards.types import Samples

COUNTS = (50, 100, 200)
CLEAN = 2000  # votes without errors
CHUNK = 256  # samples per call of the features
SETS = {
    "clip (its output)": FEATURES["output"],
    "patches": ({**CLIP, "name": "patches"},),
    "clip and patches": FEATURES["fit"],
}
CHECKPOINTS = ("base", "000010", "000020")
Array = np.ndarray


@dataclass
class Arguments:
    part: tyro.conf.Positional[Literal["features", "moved"]]
    folder: Path = Path("runs/taste")
    """Of `taste_runs.py`; PART.json is written there."""
    tastes: tuple[str, ...] = ("large",)
    seeds: tuple[int, ...] = (0, 1, 2)
    """`features`: of the persons' errors and pairs. `moved`: of the runs."""
    methods: tuple[str, ...] = ("hidden", "output-200", "votes-200")
    """Runs whose checkpoints are sampled by `moved`."""
    prompts: int = 120
    """Prompts that are sampled; two thirds of those of `features` are voted on."""
    per_prompt: int = 12


class Found(NamedTuple):
    """Agreement and correlation with a taste, and the standard deviation of the scores, all within
    prompts."""

    agreement: float
    correlation: float
    spread: float

    @classmethod
    def of(cls, scores: Array, taste: Array, per_prompt: int) -> "Found":
        """Compare n scores with n tastes, `per_prompt` of each prompt."""
        one, other = (within(values, per_prompt) for values in (scores, taste))
        said, true = (np.sign(values[:, :, None] - values[:, None, :]) for values in (one, other))
        known = true != 0
        right = (said == true)[known] + (said == 0)[known] / 2
        together = (one * other).sum() / np.sqrt((one**2).sum() * (other**2).sum())
        return cls(float(right.mean()), float(together), float(one.std()))


def within(values: Array, per_prompt: int) -> Array:
    """Values [n] as [prompts, per_prompt], each less its prompt's mean."""
    rows = values.reshape(-1, per_prompt)
    return rows - rows.mean(1, keepdims=True)


def drawn(given: Arguments, kind: Literal["train", "held_out"], weights: Path | None) -> Samples:
    """Samples of the demo's model with these weights; None: the base's."""
    run = read_run(Path("configs/demo_votes.yaml"))
    prompts = run.prompts.read(kind)
    count = min(given.prompts, len(prompts))
    rows = tuple(i * len(prompts) // count for i in range(count))
    loaded = load_models(run, device_of(run))
    load_into(loaded, run, weights)
    policy = whole_at_evaluation(loaded, run)
    trial = Trial(prompts, rows, given.per_prompt, run.evaluation_steps, 77)
    return shown_by(policy, draw_trial(policy, trial).samples)


def features_of(samples: Samples, name: str) -> Array:
    """Features [n d] of one of SETS."""
    sources = [FeatureSource(e["name"], {"model": e["model"]}) for e in SETS[name]]
    columns, count = load_columns(sources), len(samples.prompts)
    parts = [range(at, min(at + CHUNK, count)) for at in range(0, count, CHUNK)]
    return np.concatenate([columns.of(samples.take(part)) for part in parts])


def voted(
    samples: Samples, x: Array, taste: str, values: Array, groups: Array, count: int, seed: int
) -> VotedPairs:
    """Votes on pairs of samples of a prompt, prompts in turn; CLEAN of them have no errors."""
    rng = random.Random(f"{taste} {seed}")
    mind = TASTES[taste]
    person = SimulatedPerson(lambda image, _: mind.of(image), mind.temperature)
    of_prompt: dict[int, list[tuple[int, int]]] = {}
    for a, b in candidate_pairs(groups.tolist()).tolist():
        of_prompt.setdefault(int(groups[a]), []).append((a, b))
    for pairs in of_prompt.values():
        rng.shuffle(pairs)
    order = sorted(of_prompt)
    rng.shuffle(order)
    rows, labels = list[tuple[int, int]](), list[float]()
    for i in range(count):
        a, b = of_prompt[order[i % len(order)]][i // len(order)]
        rows.append((a, b))
        if count == CLEAN:
            labels.append(float((np.sign(values[a] - values[b]) + 1) / 2))
        else:
            said = person.verdict(float(values[a]), float(values[b]), rng)
            labels.append({"left": 1.0, "right": 0.0, "equal": 0.5}[said])
    a, b = np.array(rows).T
    return VotedPairs(
        x, a, b, np.array(labels), np.zeros(count), [str(samples.prompts[i]) for i in a.tolist()]
    )


def features(given: Arguments) -> dict[str, Any]:
    """Print what fits on each set of features find of each taste."""
    samples, result = drawn(given, "train", None), dict[str, Any]()
    groups = np.arange(len(samples.prompts)) // given.per_prompt
    judged = groups >= 2 * groups.max() // 3
    tastes = {name: np.array([TASTES[name].of(m) for m in samples.media]) for name in given.tastes}
    print("| taste | features | votes | agreement | correlation |\n|---|---|---|---|---|")
    for name in SETS:
        x = features_of(samples, name)
        for taste, values in tastes.items():
            for count in (*COUNTS, CLEAN):
                found = []
                for seed in given.seeds[: 1 if count == CLEAN else None]:
                    pairs = voted(samples, x, taste, values, groups[~judged], count, seed)
                    head = LinearHead.fit(pairs, choose_ridge(pairs).ridge)
                    of = Found.of(head.scores(x[judged]), values[judged], given.per_prompt)
                    found.append(of)
                votes = f"{count} without errors" if count == CLEAN else str(count)
                result[f"{taste}, {name}, {votes}"] = found
                print(f"| {taste} | {name} | {votes} | {_cells(found)} |", flush=True)
    return result


def moved(given: Arguments) -> dict[str, Any]:
    """Print how the fits of a study hold on samples of its runs' checkpoints."""
    result = dict[str, Any]()
    print(
        "| taste | run | weights | fit | agreement | correlation | spread | taste of the samples |"
        "\n|---|---|---|---|---|---|---|---|"
    )
    for taste in given.tastes:
        studies = [Study.of(given.folder, taste, seed) for seed in given.seeds]
        for method in given.methods:
            for weights in CHECKPOINTS if method == given.methods[0] else CHECKPOINTS[1:]:
                rows = dict[str, list[tuple[Found, float]]]()
                for study in studies:
                    run = study.folder / f"run-{method}" / "checkpoints" / weights
                    samples = drawn(given, "held_out", None if weights == "base" else run)
                    values = np.array([TASTES[taste].of(media) for media in samples.media])
                    for kind in FEATURES:
                        fit: Any = rewards.load("fitted", path=str(study.fitted(200, kind)))
                        scores = fit(samples).double().numpy()
                        of = Found.of(scores, values, given.per_prompt)
                        rows.setdefault(kind, []).append((of, float(values.mean())))
                for kind, found in rows.items():
                    result[f"{taste}, {method}, {weights}, {kind}"] = found
                    cells = _cells([of for of, _ in found])
                    spread = interval([of.spread for of, _ in found], ".2f")
                    mean = interval([value for _, value in found])
                    line = f"| {taste} | {method} | {weights} | {kind}-200 | {cells} | {spread}"
                    print(f"{line} | {mean} |", flush=True)
    return result


def _cells(found: Sequence[Found]) -> str:
    agreement = interval([of.agreement for of in found])
    return f"{agreement} | {interval([of.correlation for of in found])}"


def main(given: Arguments) -> None:
    torch.set_num_threads(1)
    given.folder = given.folder.resolve()
    given.folder.mkdir(parents=True, exist_ok=True)
    result = features(given) if given.part == "features" else moved(given)
    (given.folder / f"{given.part}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
