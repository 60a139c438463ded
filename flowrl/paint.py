"""Use a run's weights: paint prompts, or score them."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from flowrl import pictures
from flowrl.arguments import Evaluate, Sample
from flowrl.errors import UserError
from flowrl.evaluate import Trial, judge
from flowrl.evaluate import paint as paint_trial
from flowrl.models.pipeline import PipelinePolicy
from flowrl.paths import numbered
from flowrl.prompts import PromptSet
from flowrl.session import load_policy, load_rewards
from flowrl.settings import RewardSpec, Run
from flowrl.steer import Painter, Steering, paint_steered


def device_of(run: Run) -> torch.device:
    if run.model.device != "auto":
        return torch.device(run.model.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def policy_of(run: Run, folder: Path, weights: str) -> PipelinePolicy:
    """The run's pipeline with its last, its best or other weights."""
    chosen = None if weights == "base" else weights_folder(folder, weights)
    policy = load_policy(run, device_of(run))
    if chosen is not None:
        policy.load_weights(chosen)
    return policy


def weights_folder(folder: Path, weights: str) -> Path:
    if weights == "best":
        found = max((folder / "best").glob("[0-9]*"), default=None)
    elif weights == "last":
        found = next((p for n in ("adapter", "pipeline") if (p := folder / n).is_dir()), None)
    else:
        found = Path(weights) if Path(weights).is_dir() else None
    if found is None:
        unfinished = "; the run has not ended: try --weights best" if weights == "last" else ""
        raise UserError(f"{folder} has no {weights!r} weights{unfinished}")
    return found


def sample(run: Run, given: Sample) -> None:
    rewards = load_rewards(parse_rewards(given.rewards) if given.rewards else run.judges)
    policy = policy_of(run, given.run, given.weights)
    prompts = PromptSet(given.prompts, tuple({"prompt": p} for p in given.prompts))
    steps = given.steps or run.evaluate.steps
    trial = Trial(prompts, tuple(range(len(prompts))), given.count, steps, given.seed)
    guidance = run.model.guidance.sample if given.guidance is None else given.guidance
    if given.steer == "no":
        samples = paint_trial(policy, trial, guidance, device_of(run))
    else:
        painter = Painter(policy, rewards, trial, guidance, device_of(run))
        how = Steering(given.steer, given.particles, given.strength)
        samples, evaluations = paint_steered(painter, how)
        print(f"steered by {', '.join(rewards)}: {evaluations} network evaluations")
    out = given.out or numbered(given.run / "samples", "sample")
    scores = judge(rewards, samples).scores
    for i, media in enumerate(samples.media):
        pictures.save(pictures.to_image(pictures.still(media)), out / f"{i:03d}.png")
    shown = [
        float(v) if ok else None
        for v, ok in zip(scores.values[:, 0], scores.scored[:, 0], strict=True)
    ]
    title = f"{given.run.name}, {given.weights} weights: {scores.names[0]}"
    pictures.save(pictures.grid(samples.media, samples.prompts, shown, title), out / "grid.png")
    print(f"{len(samples.prompts)} pictures in {out}; all on one page: {out / 'grid.png'}")


def evaluate(run: Run, given: Evaluate) -> None:
    source = given.prompts or run.prompts.held_out
    if source is None:
        raise UserError("evaluate: the run has no held-out prompts; give --prompts FILE")
    prompts = PromptSet.read(source, run.prompts.column, "--prompts")
    specs = parse_rewards(given.rewards) if given.rewards else run.judges
    rewards = load_rewards(specs)
    e = run.evaluate
    trial = Trial.of(
        prompts,
        given.samples or e.samples,
        e.per_prompt,
        given.steps or e.steps,
        e.seed if given.seed is None else given.seed,
    )
    policy = policy_of(run, given.run, given.weights)
    result = judge(rewards, paint_trial(policy, trial, run.model.guidance.sample, device_of(run)))
    count = len(result.samples.prompts)
    for name in result.scores.names:
        mean = result.metrics[name]
        error = float(result.scores.values[:, result.scores.names.index(name)].std()) / count**0.5
        print(f"{name}: {mean:.4f} +- {error:.4f} (standard error, {count} samples)")
    print(f"diversity within a prompt: {result.metrics['image/diversity']:.4f}")
    if given.out is not None:
        write_scores(given.out, result.samples.prompts, result.scores.names, result.scores.values)


def write_scores(
    out: Path, prompts: Sequence[str], names: Sequence[str], values: torch.Tensor
) -> None:
    with out.open("w") as file:
        for prompt, row in zip(prompts, values.tolist(), strict=True):
            scores = dict(zip(names, row, strict=True))
            file.write(json.dumps({"prompt": prompt, **scores}) + "\n")
    print(f"scores of every sample: {out}")


def parse_rewards(words: Sequence[str]) -> tuple[RewardSpec, ...]:
    specs = []
    for word in words:
        value = yaml.safe_load(word)
        specs.append(
            RewardSpec.model_validate({"name": value} if isinstance(value, str) else value)
        )
    return tuple(specs)
