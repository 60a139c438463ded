"""A run, from Python: its metrics, its best weights, samples and evaluations."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from PIL.Image import Image

from flowrl.api.parts import GivenPrompts, GivenReward, GivenRewards, prompt_settings
from flowrl.api.untouched import untouched
from flowrl.cli.given_model import policy_of
from flowrl.cli.sample import check_takes_image, with_image, with_rows
from flowrl.errors import UserError
from flowrl.models.open import whole_at_evaluation
from flowrl.prompts import PromptSet
from flowrl.run.evaluate.attempts import Attempts
from flowrl.run.evaluate.evaluate import HeldOutResult, Trial, draw_trial, score_trial
from flowrl.session import record
from flowrl.session.atomic import numbered_folders
from flowrl.session.live import NOTHING_LIVE, Live
from flowrl.session.progress import deciding
from flowrl.session.session import load_rewards
from flowrl.settings import PromptFiles, RewardSpec, RunSettings
from flowrl.settings.model.pipeline import GuidanceScale
from flowrl.settings.read import OpenedFolder, dump, open_folder, run_from, run_of
from flowrl.settings.trust import SAMPLED_PARTS, Trust
from flowrl.settings.words.short_forms import REWARDS
from rewards import Reward, Samples


class Best(NamedTuple):
    """The best evaluation of a run, by the reward `checkpoint.best` or the first held-out one."""

    iteration: int
    score: float
    folder: Path  # of the weights


@dataclass(frozen=True)
class TrainedRun:
    """A run's folder, which the command line can also read and resume.

    folder  run.yaml, metrics.jsonl, samples/, checkpoints/, best/, and at the end the weights
    live    rewards that were passed as objects; rewards from files need not be here
    """

    folder: Path
    live: Live = NOTHING_LIVE

    @classmethod
    def open(
        cls, folder: str | Path, rewards: Sequence[GivenReward] = (), trust: Trust = False
    ) -> "TrainedRun":
        """Open the folder of an earlier run. `rewards` are objects that its file cannot name;
        `trust` grants a folder from elsewhere all that it asks for, or the rights that it names,
        such as "code,network". UserError for a folder without a run."""
        run_of(Path(folder), trust, SAMPLED_PARTS)
        return cls(Path(folder), Live(GivenRewards.of(rewards, "rewards").objects))

    @property
    def settings(self) -> RunSettings:
        """All settings, as in run.yaml."""
        return self._opened(SAMPLED_PARTS).run

    def _opened(self, parts: frozenset[str]) -> OpenedFolder:
        return open_folder(self.folder, parts=parts)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One mapping per iteration, in order: `iteration` and metrics by name. The first is the
        base model's; None for a number that was not finite. docs/metrics.md explains the names;
        pandas.DataFrame takes the list."""
        path = self.folder / record.METRICS
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def done(self) -> bool:
        """Whether the run has reached its last iteration and its weights are exported."""
        return self.weights is not None

    @property
    def weights(self) -> Path | None:
        """Folder of the final weights, which diffusers, peft or transformers can load; None before
        the run ends."""
        folder = self.folder / self.settings.exported
        return folder if folder.is_dir() else None

    @property
    def best(self) -> Best | None:
        """The best evaluation so far; None without held-out prompts."""
        folder = max(numbered_folders(self.folder / "best"), default=None)
        if folder is None:
            return None
        run, iteration = self.settings, int(folder.name)
        evaluated = (line for line in self.metrics if any(n.startswith("held_out/") for n in line))
        first = {name.removeprefix("held_out/"): x for name, x in next(evaluated, {}).items()}
        key = f"held_out/{deciding(run, first)}"
        line = next(line for line in self.metrics if line["iteration"] == iteration)
        score = line.get(key, math.nan)  # another reward decides since then
        return Best(iteration, score, folder)

    def sample(
        self,
        prompts: str | Sequence[str],
        *,
        image: str | Path | Image | None = None,
        weights: str = "last",
        count: int = 1,
        steps: int | None = None,
        guidance: GuidanceScale = None,
        seed: int = 0,
    ) -> Samples:
        """Sample `count` times per prompt. Returns images [n 3 h w], videos [n f 3 h w] or n texts
        as `media`, with n = prompts * count; samples of one prompt are contiguous.

        image     for all prompts: the image to edit, or a video's first frame; a file or an image
        weights   last, best, base, or a folder: an adapter's, or one of the run's checkpoints
        steps     denoising steps, or tokens; guidance: the scale. None: the run's values
        """
        texts = _texts(prompts)
        check_counts("sample", {"count": count, "steps": steps})
        changed = {} if guidance is None else {"guidance": {"sample": guidance}}
        with untouched():
            opened = self._opened(SAMPLED_PARTS)
            with opened.limited():
                run = _with_model(opened.run, changed)
                chosen = with_rows(run, texts)
                policy = policy_of(run, self.folder, weights)
            rows = tuple(range(len(texts)))
            trial = Trial(
                with_image(chosen, image), rows, count, steps or run.evaluation_steps, seed
            )
            check_takes_image(policy, image)
            return draw_trial(policy, trial).samples

    def evaluate(
        self,
        prompts: GivenPrompts | None = None,
        *,
        rewards: Sequence[GivenReward] = (),
        weights: str = "last",
        samples: int | None = None,
        steps: int | None = None,
        seed: int | None = None,
    ) -> HeldOutResult:
        """Score samples of held-out prompts, always from the same noise.

        Returns `metrics`: the mean by reward and statistics of the media; `columns`: [n] each;
        `samples` and `scores` [n, rewards]. Omitted arguments have the values of the run's own
        evaluations.
        """
        check_counts("evaluate", {"samples": samples, "steps": steps})
        with untouched():
            own = SAMPLED_PARTS if prompts is not None else SAMPLED_PARTS | {"prompts"}
            opened = self._opened(own)
            run, e = opened.run, opened.run.evaluate
            with opened.limited() if prompts is None else nullcontext():
                held_out = self._held_out(run, prompts)
            trial = Trial.of(
                held_out,
                samples or e.samples,
                e.per_prompt,
                steps or run.evaluation_steps,
                e.seed if seed is None else seed,
            )
            judges = self.judges(rewards, of_sets=prompts is None)
            with opened.limited():
                policy = whole_at_evaluation(policy_of(run, self.folder, weights), run)
            with opened.limited() if prompts is None else nullcontext():
                return score_trial(judges, draw_trial(policy, trial), Attempts.of(e))

    def judges(self, given: Sequence[GivenReward] = (), of_sets: bool = True) -> dict[str, Reward]:
        """Evaluation rewards by label, loaded: the given ones, or the run's. `of_sets`: each scores
        its own data sets alone."""
        if not given:
            opened = self._opened(SAMPLED_PARTS | {*REWARDS})
            kept = {} if of_sets else {"sets": ()}
            specs = [spec.model_copy(update=kept) for spec in opened.run.judges]
            with opened.limited():
                return load_rewards(specs, self.live)
        read = GivenRewards.of(given, "rewards")
        specs = tuple(RewardSpec.model_validate(spec) for spec in read.specs)
        return load_rewards(specs, Live(read.objects))

    def _held_out(self, run: RunSettings, prompts: GivenPrompts | None) -> PromptSet:
        if prompts is None:
            if run.prompts.held_out is None:
                raise UserError(f"{self.folder} has no held-out prompts: pass prompts")
            return run.prompts.read("held_out")
        with TemporaryDirectory() as files:
            column = run.prompts.column
            given = prompt_settings(prompts, Path(files), "held_out", column)
            files_of = PromptFiles.model_validate({"train": given, "column": column})
            return files_of.read("train")


def _texts(prompts: str | Iterable[str]) -> tuple[str, ...]:
    listed = prompts if isinstance(prompts, Iterable) else ()
    texts = (prompts,) if isinstance(prompts, str) else tuple(listed)
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError("sample: prompts must be texts, and not empty")
    return texts


def check_counts(place: str, counts: Mapping[str, Any]) -> None:
    """UserError for anything but whole numbers from 1; None stands for the run's own."""
    for name, value in counts.items():
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if value is not None and not (whole and int(value) >= 1):
            raise UserError(f"{place}: {name} must be a whole number from 1, not {value!r:.50}")


def _with_model(run: RunSettings, changed: Mapping[str, Any]) -> RunSettings:
    tree = dump(run)
    tree["model"] |= changed
    return run_from(tree, "sample") if changed else run
