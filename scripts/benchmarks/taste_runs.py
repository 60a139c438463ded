"""Compare votes of a simulated person, who has a hidden taste, with training on that taste itself.

    python scripts/benchmarks/taste_runs.py                      # hours; goes on where it stopped
    python scripts/benchmarks/taste_runs.py --tastes large --seeds 0 --methods hidden votes-200
    python scripts/benchmarks/taste_runs.py --report-only

The tastes are programs on pixels (flowrl/demo/taste.py), which no fit sees. For each taste and
seed, the person votes on 200 pairs of the demo's base model, for prompts of training, through the
page's own door. Then one run of NFT (demo_votes) or of DPO for each method:

    votes-50, votes-100, votes-200   the reward fitted to the first so many votes
    cautious-200                     the same with `cautious: 1`
    output-200                       the same on the output of clip alone, as the features were
                                     before flowrl had `patches`
    ask-200                          a reward fitted to the first 50 votes; the run asks the other
                                     150 about its own samples, 15 in an iteration (the taste
                                     `large` alone, since the simulated person of a run has it)
    uncertain-200                    the same with `choose: uncertain`
    hidden                           the hidden taste itself, at the scale of the votes' log-odds
    hidden-matched                   the same at the spread of the reward fitted to 200 votes on the
                                     samples voted on, so the rule beside it counts as much
    dpo-200                          DPO on the pairs of all votes
    ready                            the ready-made reward that agrees best with the votes

All but dpo and ready have the demo's rule beside them, that the prompt is followed. The gain is the
hidden taste's on held-out prompts, after minus before. `agreement` is the share of fresh pairs of
held-out prompts that the fitted reward orders as the hidden taste does. Of runs that ask, the
report counts those with the alarm that people no longer agree, although nobody's taste has changed.
FOLDER/results.json is rewritten after each step.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from experiment import ends, flowrl, interval, read
from PIL import Image

import rewards
from flowrl.demo.taste import TASTES
from flowrl.evaluation.agreement import credits
from flowrl.votes.log import VoteLog
from flowrl.votes.plan import VotePlan
from rewards.perception.media import to_tensor
from rewards.types import Samples

VOTES = 200
COUNTS = (50, 100, 200)
ASKS = {"ask": "random", "uncertain": "uncertain"}  # methods that ask: how they choose pairs
FIRST_ASKED = 50  # votes that the run that asks begins with
ASKED = 15  # votes of an iteration of the run that asks
CLIP = {"name": "clip", "model": "flowrl/demo/shapes-clip"}
FEATURES = {
    "fit": (CLIP, {**CLIP, "name": "patches"}),  # the default of fit-reward, in the demo's size
    "output": (CLIP,),
}
STRICT = {"name": "shapes", "kind": "strict"}
READY = (CLIP, {"name": "shapes", "kind": "graded"}, STRICT)
METHODS = (
    "hidden", "votes-200", "hidden-matched", "dpo-200", "ready", "votes-100", "votes-50",
    "cautious-200", "output-200", "ask-200", "uncertain-200",
)  # fmt: skip
AGREEMENT = {"fit": "agreement-{}", "output": "agreement of output-{}"}
HELD_OUT = "configs/prompts/shapes_held_out.jsonl"


@dataclass
class Arguments:
    out: Path = Path("runs/taste")
    tastes: tuple[str, ...] = tuple(TASTES)
    seeds: tuple[int, ...] = (0, 1, 2)
    methods: tuple[str, ...] = METHODS
    agreement: bool = True
    """Also measure how often the fits agree with the hidden taste."""
    report_only: bool = False


@dataclass
class Study:
    """One taste and seed: its folder, and what is known so far."""

    folder: Path
    taste: str
    seed: int
    found: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, out: Path, taste: str, seed: int) -> "Study":
        folder = out / f"{taste}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / "found.json"
        found = json.loads(known.read_text()) if known.exists() else {}
        return cls(folder, taste, seed, found)

    def known(self, name: str, find: Callable[[], Any]) -> Any:
        """Return what was found before, or is found now and kept."""
        if name not in self.found:
            self.found[name] = find()
            (self.folder / "found.json").write_text(json.dumps(self.found, indent=1) + "\n")
            print(f"{self.folder.name}: {name}: {self.found[name]}", flush=True)
        return self.found[name]

    def voted(self) -> Path:
        """The folder of votes on pairs of the base model."""
        return self._votes("votes", self.seed, ())

    def fresh(self) -> Path:
        """As many pairs for held-out prompts, whose votes nobody uses."""
        return self._votes("fresh", 1000 + self.seed, ("--prompts", HELD_OUT))

    def _votes(self, name: str, seed: int, words: Sequence[str]) -> Path:
        folder = self.folder / name
        if not (folder / "answer.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            flowrl(
                "vote", "demo_votes", "--votes", VOTES, "--person", "simulated", "--taste",
                self.taste, "--seed", seed, "--port", 0, "--out", folder, *words,
            )  # fmt: skip
        return folder

    def first(self, count: int) -> Path:
        """A table of the first votes."""
        votes = self.voted()
        lines = (votes / "votes.jsonl").read_text().splitlines(keepends=True)
        table = votes / f"first-{count}.jsonl"
        table.write_text("".join(lines[:count]))
        return table

    def fitted(self, count: int, kind: str = "fit") -> Path:
        """The folder of the reward fitted to the first votes, on one of FEATURES."""
        folder = self.folder / f"{kind}-{count}"
        if not (folder / "fitted.yaml").exists():
            shutil.rmtree(folder, ignore_errors=True)
            features = (json.dumps(each) for each in FEATURES[kind])
            words = ("--features", *features, "--robust", 0, "--out", folder)
            flowrl("fit-reward", self.first(count), *words)
        return folder

    def agreement(self, reward: Any) -> float:
        """Share of fresh pairs that a reward orders as the hidden taste does."""
        samples, pairs, _ = _read(self.fresh())
        taste = torch.tensor([TASTES[self.taste].of(image) for image in samples.media])
        return _agreement(_margins(reward(samples), pairs), _margins(taste, pairs))

    def ready(self) -> dict[str, Any]:
        """The ready-made reward that agrees best with the votes."""
        samples, pairs, labels = _read(self.voted())
        known = {
            name: np.mean(credits(_margins(_load(spec)(samples), pairs), labels, "half"))
            for name, spec in ((json.dumps(each), each) for each in READY)
        }
        return json.loads(max(known, key=lambda name: known[name]))

    def log_odds(self) -> float:
        """Spread of the reward fitted to all votes, over the taste's, on the pairs voted on."""
        samples, pairs, _ = _read(self.voted())
        fit: Any = rewards.load("fitted", path=str(self.fitted(VOTES)))
        taste = torch.tensor([TASTES[self.taste].of(image) for image in samples.media])
        one, other = (np.square(_margins(x, pairs)).mean() for x in (fit(samples), taste))
        return float(np.sqrt(one / other))

    def rewards_of(self, method: str) -> list[dict[str, Any]]:
        """The rewards of training."""
        kind, _, count = method.partition("-")
        if kind == "ready":
            return [self.known("ready reward", self.ready)]
        if kind == "hidden":
            own: dict[str, Any] = {"name": f"flowrl/demo/taste.py:{self.taste}"}
            own["weight"] = 0.5 / TASTES[self.taste].temperature
            if count == "matched":
                own["weight"] = 0.5 * self.known("log-odds of a unit of taste", self.log_odds)
        else:
            votes = FIRST_ASKED if kind in ASKS else int(count)
            path = self.fitted(votes, kind if kind in FEATURES else "fit")
            own = {"name": "fitted", "path": str(path), "weight": 0.5}
            own |= {"cautious": 1} if kind == "cautious" else {}
        return [own, {**STRICT, "weight": 0.5}]

    def gain(self, method: str) -> dict[str, float]:
        """Train, and return the hidden taste and the rule before and after."""
        run = self.folder / f"run-{method}"
        words = [
            "--train.seed", self.seed, "--held_out_rewards",
            json.dumps([{"name": f"flowrl/demo/taste.py:{self.taste}"}, STRICT]),
        ]  # fmt: skip
        if method.startswith("dpo"):
            file = "demo_given_pairs"
            words += ["--given.file", self.voted() / "votes.jsonl"]
        else:
            file = "demo_votes"
            words += ["--rewards", json.dumps(self.rewards_of(method)), "--evaluate.every", 20]
        kind = method.partition("-")[0]
        if kind in ASKS:
            ask = {
                "choose": ASKS[kind], "votes": ASKED, "budget": VOTES - FIRST_ASKED,
                "person": "simulated", "port": 0, "earlier": str(self.first(FIRST_ASKED)),
            }  # fmt: skip
            words += ["--ask", json.dumps(ask)]
        if (run / "checkpoints").exists():
            flowrl("train", "--resume", run)
        else:
            shutil.rmtree(run, ignore_errors=True)
            flowrl("train", file, "--folder", run, *words)
        lines, known = read(run), {}
        for name, short in (
            (f"held_out/{self.taste}", "taste"),
            ("held_out/shapes.strict", "rule"),
        ):
            known[f"{short} before"], known[f"{short} after"] = ends(lines, name)
        return known

    def accused(self, method: str) -> bool:
        """Whether a run that asked has the alarm that people no longer agree with its reward."""
        alarms = self.folder / f"run-{method}" / "report" / "alarms.jsonl"
        return alarms.exists() and "people no longer agree" in alarms.read_text()

    def last_agreement(self, method: str) -> float:
        """Agreement of a run's last votes on random pairs with the fit before them."""
        return read(self.folder / f"run-{method}")[-1]["ask/agreement"]


def _load(spec: dict[str, Any]) -> Any:
    return rewards.load(spec["name"], **{k: v for k, v in spec.items() if k != "name"})


def _read(folder: Path) -> tuple[Samples, np.ndarray, np.ndarray]:
    """Samples, pairs and labels of a folder of votes; skips are left out."""
    plan = VotePlan.read(folder)
    assert VoteLog.read(folder, plan).finished
    images = []
    for each in plan.samples:
        with Image.open(folder / each.file) as image:
            images.append(to_tensor(image))
    prompts = [each.prompt for each in plan.samples]
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    group = torch.tensor([number[prompt] for prompt in prompts])
    at = {each.file: row for row, each in enumerate(plan.samples)}
    votes = [json.loads(line) for line in (folder / "votes.jsonl").read_text().splitlines()]
    pairs = np.array([[at[vote["a"]], at[vote["b"]]] for vote in votes])
    return (
        Samples(torch.stack(images), prompts, group),
        pairs,
        np.array([v["label"] for v in votes]),
    )


def _margins(scores: torch.Tensor, pairs: np.ndarray) -> np.ndarray:
    values = scores.double().cpu().numpy()
    return values[pairs[:, 0]] - values[pairs[:, 1]]


def _agreement(margin: np.ndarray, true: np.ndarray) -> float:
    kept = true != 0
    return float(np.mean(credits(margin[kept], (true[kept] > 0).astype(float), "half")))


def report(studies: Sequence[Study]) -> None:
    """Print a table per taste over its seeds."""
    for taste in dict.fromkeys(study.taste for study in studies):
        own = [study for study in studies if study.taste == taste]
        print(f"\n{taste}, {len(own)} seeds; mean (95 % interval over seeds)\n")
        print(
            "| method | taste before | taste after | gain | of hidden's | of hidden-matched's | "
            "rule after |\n|---|---|---|---|---|---|---|"
        )
        for method in METHODS:
            done = [study.found for study in own if method in study.found]
            if not done:
                continue
            cells = [
                [found[method][name] for found in done]
                for name in ("taste before", "taste after", "rule after")
            ]
            gains = [b - a for a, b in zip(cells[0], cells[1], strict=True)]
            shares = " | ".join(
                _share(done, method, other) for other in ("hidden", "hidden-matched")
            )
            before, after, rule = (interval(cell) for cell in cells)
            print(f"| {method} | {before} | {after} | {interval(gains)} | {shares} | {rule} |")
        for method in METHODS:
            asked = [study for study in own if method in study.found]
            if method.partition("-")[0] in ASKS and asked:
                accused = sum(study.accused(method) for study in asked)
                last = interval([study.last_agreement(method) for study in asked])
                print(
                    f"{method}: {accused} of {len(asked)} runs have the alarm that people no "
                    f"longer agree; agreement of the last votes on random pairs {last}"
                )
        names = [AGREEMENT["fit"].format(count) for count in COUNTS]
        names += [AGREEMENT["output"].format(VOTES), "agreement of ready"]
        for name in names:
            values = [study.found[name] for study in own if name in study.found]
            if values:
                print(f"{name}: {interval(values)}")


def _share(done: Sequence[dict[str, Any]], method: str, other: str) -> str:
    """A method's gain over another one's, of each seed that has both."""
    shares = [_gain(found[method]) / _gain(found[other]) for found in done if other in found]
    return interval(shares) if shares else "-"


def _gain(ends: dict[str, float]) -> float:
    return ends["taste after"] - ends["taste before"]


def main(given: Arguments) -> None:
    torch.set_num_threads(1)
    given.out = given.out.resolve()
    studies = [Study.of(given.out, t, seed) for t in given.tastes for seed in given.seeds]
    # a method of all studies before the next one, so that a stopped study is even
    for method in () if given.report_only else given.methods:
        for study in studies:
            study.known(method, lambda s=study, m=method: s.gain(m))
    for study in studies if given.agreement and not given.report_only else ():
        for count, kind in [*((count, "fit") for count in COUNTS), (VOTES, "output")]:
            path = study.fitted(count, kind)
            study.known(
                AGREEMENT[kind].format(count),
                lambda s=study, p=path: s.agreement(rewards.load("fitted", path=str(p))),
            )
        study.known(
            "agreement of ready",
            lambda s=study: s.agreement(_load(s.known("ready reward", s.ready))),
        )
    results = [{"taste": s.taste, "seed": s.seed, **s.found} for s in studies]
    (given.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    report(studies)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
