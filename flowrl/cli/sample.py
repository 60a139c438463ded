"""Generate samples for prompts, with a run's weights or with an untrained model."""

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image

from flowrl.cli.given_model import GivenModel, Model, device_of, load_into
from flowrl.cli.optimise import NoiseSearch, optimised_samples
from flowrl.cli.out_folder import out_folder
from flowrl.cli.steer import (
    SampleScorer,
    SteeredSampler,
    drivable,
    last_weights,
    steered_samples,
)
from flowrl.errors import UserError, terminal_text
from flowrl.evaluation.measure import parse_specs
from flowrl.evaluation.outputs import removed_if_empty
from flowrl.iteration.sample import decode_samples_of
from flowrl.json_text import json_text
from flowrl.media.pictures import ABSTAINS, ShownScore
from flowrl.media.statistics import Statistics
from flowrl.models.own.policy import shown_by
from flowrl.models.policy import Policy
from flowrl.models.rewritten import RewrittenPolicy
from flowrl.pages.sample_files import Page
from flowrl.paths import find, folder_inside, new_numbered
from flowrl.prompts import PromptSet
from flowrl.prompts.prompt_set import checked_text
from flowrl.prompts.row_sizes import RowSize
from flowrl.run.evaluate.evaluate import Trial, TrialSamples, draw_trial, score_trial
from flowrl.session.live import NOTHING_LIVE, Live
from flowrl.session.session import load_rewards
from flowrl.session.smaller_calls import explained
from flowrl.settings import PipelineSettings, RewardSpec, RunSettings
from flowrl.settings.command_line.arguments import SampleArguments
from flowrl.settings.read import Overrides
from rewards import Reward, Samples, score_all
from rewards.combine import blamed
from rewards.perception.files import open_image_file


@dataclass(frozen=True)
class FromPython:
    """Arguments of `sample_prompts` from Python alone: rewards that are objects, and an image.

    writes  whether the samples are written; otherwise they are only returned, unscored
    """

    live: Live = NOTHING_LIVE
    image: Image | None = None
    writes: bool = True


WORDS_ALONE = FromPython()


def sample_prompts(
    arguments: SampleArguments, options: Overrides, from_python: FromPython = WORDS_ALONE
) -> Samples:
    """Generate and score samples of prompts, and write them with an overview page."""
    specs = tuple(parse_specs(arguments.rewards, "--rewards").values())
    if arguments.out is None:
        return _drawn_samples(arguments, options, from_python, specs, None)
    with removed_if_empty(out_folder(arguments.out)) as out:  # also of what is refused
        return _drawn_samples(arguments, options, from_python, specs, out)


def _drawn_samples(
    arguments: SampleArguments,
    options: Overrides,
    from_python: FromPython,
    specs: tuple[RewardSpec, ...],
    out: Path | None,
) -> Samples:
    chosen = GivenModel.of(arguments, options, "sample")
    run = chosen.run
    sides = [name for name in ("height", "width") if getattr(arguments, name) is not None]
    texts = tuple(checked_text(text, "sample: prompts") for text in arguments.prompts)
    with chosen.limited():
        prompts = with_rows(run, texts, None, sides)
    image = arguments.image if from_python.image is None else from_python.image
    prompts = with_image(prompts, image)
    named = bool(specs)  # by the user
    specs = specs or chosen.judges
    _refuse(arguments, chosen, bool(specs))
    if not from_python.writes:
        selects = arguments.steer != "no" or arguments.optimise != "no" or arguments.rewrite > 1
        rewards = _loaded(specs, named, chosen, from_python) if selects else {}
        with explained(run, trains=False, fewer="prompts"):
            samples, _ = _sampled(arguments, chosen, prompts, specs, rewards, image)
        return samples
    if out is None:
        at = Path("samples") if chosen.folder is None else folder_inside(chosen.folder, "samples")
        out = new_numbered(at, "sample")
    with removed_if_empty(out), explained(run, trains=False, fewer="prompts"):
        rewards = _loaded(specs, named, chosen, from_python)
        return _write(arguments, chosen, prompts, specs, rewards, out, image)


def _loaded(
    specs: Sequence[RewardSpec], named: bool, chosen: GivenModel, from_python: FromPython
) -> dict[str, Reward]:
    """The rewards; those that the user named have the user's rights."""
    with nullcontext() if named else chosen.limited():
        return load_rewards(specs, from_python.live)


def _write(
    arguments: SampleArguments,
    chosen: GivenModel,
    prompts: PromptSet,
    specs: tuple[RewardSpec, ...],
    rewards: dict[str, Reward],
    out: Path,
    image: str | Image | None,
) -> Samples:
    samples, policy = _sampled(arguments, chosen, prompts, specs, rewards, image)
    with chosen.limited():
        rows_by_prompt = _rows_by_prompt(chosen.run) if rewards else {}
    page = Page(samples, [None] * len(samples.prompts), chosen.name)
    _save_each(page, policy, out)  # before a reward is asked, which may fail
    if rewards:
        page = _scored(page, rewards, rows_by_prompt)
    page = replace(page, samples=shown_by(policy, page.samples))
    whole = page.save(out, "grid")
    print(f"{len(page.scores)} samples in {out}; overview page: {whole}")
    return samples


def _sampled(
    arguments: SampleArguments,
    chosen: GivenModel,
    prompts: PromptSet,
    specs: tuple[RewardSpec, ...],
    rewards: dict[str, Reward],
    image: str | Image | None,
) -> tuple[Samples, Model]:
    """The samples, and the model that made them."""
    run = chosen.run
    base, policy = chosen.open()
    takes_image = check_takes_image(policy, image)
    with chosen.limited():
        pictured = _rows_have_images(run)
        trial_rows = _rows_by_prompt(run) if arguments.rewrite > 1 else {}
    if takes_image and image is None and pictured:
        print("the run's prompts have images, but this command gives no image: add --image FILE")
    load_into(base, run, chosen.weights)
    steps = chosen.steps(policy, arguments.steps)
    trial = Trial(prompts, tuple(range(len(prompts))), arguments.count, steps, arguments.seed)
    if arguments.rewrite > 1:
        trial_with_rows = with_known_rows(trial, trial_rows)
        assert isinstance(policy, RewrittenPolicy), "`_refuse` has asked for a joint run"
        result = best_rewritings(policy, trial_with_rows, arguments.rewrite, rewards, specs)
    elif arguments.steer == "no" and arguments.optimise == "no":
        result = draw_trial(
            chosen.ended_by_base(policy, arguments.base_steps, "sample")
            if arguments.base_steps
            else policy,
            trial,
        )
    else:
        option = "--steer" if arguments.optimise == "no" else "--optimise"
        weights = last_weights(specs, run.train.iterations)
        driven = drivable(_at_one_size(policy, prompts, option), option)
        guidance = driven.guidance.sample
        scorer = SampleScorer(driven, rewards, weights, trial, guidance, device_of(run))
        samples, summary = _improved(scorer, arguments)
        result = TrialSamples(samples, Statistics({}, {}))
        print(summary)
    return result.samples, policy


def _at_one_size(policy: Any, prompts: PromptSet, option: str) -> Any:
    """The policy at the size of the prompts. UserError, naming the option, for several sizes."""
    from flowrl.models.diffusers.policy import PipelinePolicy
    from flowrl.models.diffusers.sizes.by_size import rows_by_size

    if not isinstance(policy, PipelinePolicy):
        return policy
    first, *other_sizes = rows_by_size(policy, prompts.texts, prompts.meta)
    if other_sizes:
        raise UserError(
            f"sample: {option} needs prompts of one size, but the run's files give them "
            f"{1 + len(other_sizes)}: sample them one by one, or set --height and --width"
        )
    return first.policy


def _save_each(page: Page, policy: Policy | RewrittenPolicy, out: Path) -> None:
    """Write a file per sample; for tensors also one file with their numbers. Of sound alone the
    sample's file is its WAV, beside images of it."""
    if page.samples.kind == "tensor":
        np.save(out / "samples.npy", torch.as_tensor(page.samples.media).cpu().numpy())
    shown = replace(page, samples=shown_by(policy, page.samples))
    shown.save_each(out)
    if not shown.texts:  # so that `flowrl score` and `flowrl vote` know the prompts of the files
        ending = "gif" if shown.moving else "png"
        ending = "wav" if page.samples.kind == "sound" else ending
        rows = [
            {"file": f"{i:03d}.{ending}", "prompt": prompt}
            for i, prompt in enumerate(shown.samples.prompts)
        ]
        lines = [json_text(row, ensure_ascii=False) + "\n" for row in rows]
        (out / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def _scored(
    page: Page, rewards: Mapping[str, Reward], rows_by_prompt: Mapping[str, Mapping[str, Any]]
) -> Page:
    """The page with the scores of the first reward. Prompts get their rows from the run's prompt
    files. A reward's error is printed, and the samples stay unscored."""
    prompts = page.samples.prompts
    try:
        rows = page.samples.meta or [{}] * len(prompts)
        meta = [
            {**rows_by_prompt.get(str(p), {}), **row} for p, row in zip(prompts, rows, strict=True)
        ]
        samples = replace(page.samples, meta=meta)
        scores = score_trial(rewards, TrialSamples(samples, Statistics({}, {}))).scores
    except Exception as error:  # a reward's own code
        said = blamed(error) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        lacks = any(str(text) not in rows_by_prompt for text in prompts)
        hint = " (prompts that are not in the run's prompt files have no columns)" if lacks else ""
        words = f"unscored: {said[:400]}{hint}"
        print(terminal_text(words), file=sys.stderr)
        return page
    values, applies = scores.column(scores.names[0])
    shown: list[ShownScore] = [
        ABSTAINS if not applied else None if value != value else value
        for value, applied in zip(values.tolist(), applies.tolist(), strict=True)
    ]
    return Page(page.samples, shown, f"{page.title}: {scores.names[0]}")


def _improved(scorer: SampleScorer, arguments: SampleArguments) -> tuple[Samples, str]:
    """Samples from optimised noise, or steered samples, and a sentence about their cost."""
    if arguments.optimise != "no":
        search = NoiseSearch(
            arguments.optimise, arguments.rounds, arguments.rate, arguments.naturalness
        )
        return optimised_samples(scorer, search)
    assert arguments.steer != "no"
    how = SteeredSampler(arguments.steer, arguments.particles, arguments.strength)
    samples, evaluations = steered_samples(scorer, how)
    return samples, f"steered by {', '.join(scorer.rewards)}: {evaluations} network evaluations"


def best_rewritings(
    policy: RewrittenPolicy,
    trial: Trial,
    tries: int,
    rewards: Mapping[str, Reward],
    specs: Sequence[RewardSpec],
) -> TrialSamples:
    """The best of `tries` rewritings' images for each sample of the trial, by the weighted sum of
    the rewards. Prints a line for each, with its rewriting. An unscored image is only chosen if all
    images are unscored."""
    assert isinstance(policy, RewrittenPolicy)  # of the recipe joint
    wide = replace(trial, group=trial.group * tries)
    batch = policy.open(*wide.prompts.take(wide.rows), wide.steps)
    plan = policy.plain(wide.group)
    (rollout,) = batch.rollouts(plan, wide.rows, seed=wide.seed, iteration=0)
    samples = decode_samples_of(batch, rollout, wide.prompts, wide.rows, "the samples")
    weights = torch.tensor([spec.weight_at(0) for spec in specs])
    total = score_all(rewards, samples).totals(weights).nan_to_num(-torch.inf)
    best = total.view(-1, tries).argmax(1) + torch.arange(len(total) // tries) * tries
    scores = [f"{x:.3f}" if x > -torch.inf else "unscored" for x in total.tolist()]
    if bool(total.isinf().all()):
        print(f"{', '.join(rewards)} scored no image: the first rewriting of each prompt is kept")
    for i in best.tolist():
        print(f"{samples.prompts[i]!r}: {batch.texts[i]!r}, {scores[i]}")
    return TrialSamples(samples.take(best.tolist()), Statistics({}, {}))


def with_known_rows(trial: Trial, rows_by_prompt: Mapping[str, Mapping[str, Any]]) -> Trial:
    """The trial with the columns of the run's own prompts, since a reward may read them."""
    prompts = trial.prompts
    rows = tuple({**rows_by_prompt.get(str(text), {}), "prompt": text} for text in prompts.texts)
    return replace(trial, prompts=replace(prompts, meta=rows))


def _refuse(arguments: SampleArguments, chosen: GivenModel, rewards: bool) -> None:
    """UserError for options that exclude each other, or need rewards or a rewriter."""
    lacking = "--model has none" if chosen.folder is None else "the run's are not loaded"
    if arguments.rewrite > 1 and chosen.run.joint is None:
        raise UserError("sample: --rewrite is for runs of the recipe joint: leave it out")
    if arguments.rewrite > 1 and not rewards:
        raise UserError(
            f"sample: --rewrite needs rewards for the selection, and {lacking}: add --rewards"
        )
    if arguments.rewrite > 1 and (
        arguments.steer != "no" or arguments.optimise != "no" or arguments.base_steps
    ):
        raise UserError(
            "sample: --rewrite cannot be combined with --steer, --optimise or --base-steps: leave "
            "them out"
        )
    if arguments.steer != "no" and not rewards:
        raise UserError(
            f"sample: --steer needs rewards for the selection, and {lacking}: add --rewards"
        )
    if arguments.optimise != "no" and not rewards:
        raise UserError(
            f"sample: --optimise needs rewards for the selection, and {lacking}: add --rewards"
        )
    if arguments.optimise != "no" and (arguments.steer != "no" or arguments.base_steps):
        raise UserError(
            "sample: --optimise cannot be combined with --steer or --base-steps: leave them out"
        )
    if arguments.steer != "no" and arguments.base_steps:
        raise UserError("sample: --steer and --base-steps exclude each other: leave one out")


def with_rows(
    run: RunSettings,
    texts: tuple[str, ...],
    image: str | Path | Image | None = None,
    fixed: Collection[str] = (),
) -> PromptSet:
    """Prompts with their rows, which contain the image if there is one, and the sizes, except for
    those that are `fixed`, that the run's files have for a prompt.

    An environment gets the first row with this prompt in the run's files, or only the prompt.
    UserError for an image that cannot be read.
    """
    rows: list[dict[str, Any]] = [{"prompt": text} for text in texts]
    if isinstance(run.model, PipelineSettings):
        rows_by_prompt = _rows_by_prompt(run)
        sizes = [RowSize.of(rows_by_prompt.get(text, {})).given for text in texts]
        free_sizes = [
            {k: v for k, v in sizes_of_row.items() if k not in fixed} for sizes_of_row in sizes
        ]
        rows = [row | size for row, size in zip(rows, free_sizes, strict=True)]
    if run.environment is not None:
        rows = _rows_of_run(run, texts, run.environment.name)
    return with_image(PromptSet(texts, tuple(rows)), image)


def with_image(prompts: PromptSet, image: str | Path | Image | None) -> PromptSet:
    """Prompts whose rows have this image, if there is one. UserError if it cannot be read."""
    if image is None:
        return prompts
    whole = image if isinstance(image, Image) else _absolute(str(image))
    return replace(prompts, meta=tuple({**row, "image": whole} for row in prompts.meta))


def _rows_of_run(run: RunSettings, texts: Sequence[str], environment: str) -> list[dict[str, Any]]:
    rows_by_prompt = _rows_by_prompt(run)
    for text in dict.fromkeys(texts):
        if text not in rows_by_prompt:
            print(f"{text!r} is not in the run's prompt files: {environment} gets only the prompt")
    return [dict(rows_by_prompt.get(text, {"prompt": text})) for text in texts]


def _rows_by_prompt(run: RunSettings) -> dict[str, Mapping[str, Any]]:
    """The first row of each prompt in the run's files that are on this machine."""
    rows_by_prompt: dict[str, Mapping[str, Any]] = {}
    for place in run.prompts.given:
        if run.prompts.on_disk(place):
            read = run.prompts.read(place)
            rows_by_prompt |= dict(zip(map(str, read.texts[::-1]), read.meta[::-1], strict=True))
    return rows_by_prompt


def _absolute(image: str) -> str:
    """The absolute path of an image, or of a part of it, after a trial read."""
    file, mark, piece = image.partition("#xywh=")
    whole = f"{find(file).absolute()}{mark}{piece}"
    try:
        open_image_file(whole)
    except ValueError as error:
        raise UserError(f"sample: the image: {error}") from error
    return whole


def check_takes_image(policy: Policy | RewrittenPolicy, image: object) -> bool:
    """Whether the policy is a pipeline whose call has an argument `image`; UserError if it takes
    no image."""
    from flowrl.models.diffusers.policy import PipelinePolicy

    if not isinstance(policy, PipelinePolicy):
        if image is not None:
            raise UserError("sample: an image is given, but the run's model is not a pipeline")
        return False
    takes = "image" in policy.loop.driver.parameters
    if image is not None and not takes:
        raise UserError(f"sample: --image is given, but the call of {policy.name} takes no image")
    return takes


def _rows_have_images(run: RunSettings) -> bool:
    """Whether the run's own prompts have a column `image`, if one of their files is on this
    machine."""
    prompts = run.prompts
    return any(
        p for p in prompts.given if prompts.on_disk(p) and "image" in prompts.read(p).columns
    )
