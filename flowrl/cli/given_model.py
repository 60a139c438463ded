"""The model of `flowrl sample` and `flowrl evaluate`: a run's, or one without a run."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError

from flowrl.errors import UserError
from flowrl.models.open import evaluation_policy, whole_at_evaluation
from flowrl.models.policy import EvaluationSampler, Policy
from flowrl.models.rewritten import RewrittenPolicy
from flowrl.models.saved_weights import load_saved
from flowrl.paths import find, no_such_model
from flowrl.run.save import checkpoint
from flowrl.session.atomic import CONTENTS, damage, numbered_folders
from flowrl.session.learner import load_models, load_policy
from flowrl.settings import LanguageSettings, PipelineSettings, RewardSpec, RunSettings
from flowrl.settings.checks.machine import check_hub, refuse_single_file
from flowrl.settings.checks.model_files import ANOTHER, check_saved, read_json
from flowrl.settings.command_line.arguments import EvaluateArguments, SampleArguments
from flowrl.settings.model.form import MODULAR_INDEX, is_pipeline_folder
from flowrl.settings.parts.own_parts import is_code
from flowrl.settings.read import Overrides, check_plan, open_folder, override, run_from
from flowrl.settings.trust import EVALUATED_PARTS, SAMPLED_PARTS, within
from flowrl.settings.words.short_forms import REWARDS
from rewards.hub_names import names_repository
from rewards.perception.hub import check_cached, from_hub
from rewards.perception.hub_cache import CachedRepository
from rewards.rights import Limits, Right, need

WEIGHT_FOLDERS = ("adapter", "pipeline", "model", "weights")  # of the last weights
Model = Policy | RewrittenPolicy
TEXT_ADAPTER = "adapter_config.json"  # peft's name
TEXT_LENGTH = 256  # of a text, where no run has set it


def device_of(run: RunSettings) -> torch.device:
    """The run's device; auto means the first GPU, if there is one."""
    if run.model.device != "auto":
        return torch.device(run.model.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def policy_of(run: RunSettings, folder: Path, weights: str) -> Model:
    """The run's model with its last, best, base or other weights."""
    chosen = None if weights == "base" else weights_folder(folder, weights)
    policy = load_models(run, device_of(run))
    load_into(policy, run, chosen)
    return policy


def load_into(policy: Model, run: RunSettings, chosen: Path | None) -> None:
    """Load the weights of a folder or checkpoint; None keeps the base weights."""
    if chosen is not None and (chosen / checkpoint.POLICIES_FILE).is_file():
        checkpoint.bring(policy, run, chosen)
    elif chosen is not None:
        load_saved(chosen, "the weights", lambda: policy.load_weights(chosen))


def weights_folder(folder: Path, weights: str) -> Path:
    """Folder of a run's last or best weights, of a checkpoint by its name (000010), or `weights`
    itself. UserError if it does not exist, or is damaged."""
    if weights == "best":
        chosen = _best(folder)
    elif weights == "last":
        chosen = _last(folder)
    else:
        places = (Path(weights), folder / weights, folder / "checkpoints" / weights)
        chosen = next((place for place in places if place.is_dir()), None)
    if chosen is None:
        unfinished = "; the run has not ended: try --weights best" if weights == "last" else ""
        saved = [path.name for path in numbered_folders(folder / "checkpoints")]
        folders = {"last": _last(folder), "best": _best(folder)}
        named = [name for name, place in folders.items() if place is not None]
        offered = f"; it has {', '.join([*named, 'base', *saved])}"
        hint = "" if unfinished else offered
        raise UserError(f"{folder} has no {weights!r} weights{unfinished}{hint}")
    if chosen.is_relative_to(folder):
        _check_links(chosen)
    check_whole(chosen)
    return chosen


def _check_links(weights: Path) -> None:
    """NotGranted for weights of a run's folder that are links out of it: what a command reads there
    it may write into a new file, which may be published."""
    for path in (weights, *sorted(weights.rglob("*"))):
        need(Right.FILES, str(path), f"{path}, a link out of the folder,", path)


def check_whole(folder: Path) -> None:
    """UserError for a folder of weights that is damaged, before anything loads."""
    if (folder / CONTENTS).exists() and (wrong := damage(folder)) is not None:
        raise UserError(f"{folder} is damaged ({wrong}): {ANOTHER}")
    check_saved(folder, "the weights")


def _best(folder: Path) -> Path | None:
    return next(reversed(numbered_folders(folder / "best")), None)


def _last(folder: Path) -> Path | None:
    return next((p for n in WEIGHT_FOLDERS if (p := folder / n).is_dir()), None)


@dataclass(frozen=True)
class GivenModel:
    """A model and its weights, as given to a command.

    folder   the run's; None for a model without a run
    weights  a folder; None for the base's
    name     of the weights, in titles
    judges   rewards of the run's evaluations; none without a run, nor, where a command can do
             without them, without the right to code
    limits   of what the run's settings may use; None: they are the user's
    """

    run: RunSettings
    folder: Path | None
    weights: Path | None
    name: str
    judges: tuple[RewardSpec, ...] = ()
    limits: Limits | None = None

    def limited(self) -> AbstractContextManager[None]:
        """A context in which the run's settings are used."""
        return within(self.limits)

    @classmethod
    def of(
        cls, arguments: SampleArguments | EvaluateArguments, options: Overrides, command: str
    ) -> "GivenModel":
        """Read a run's settings, or create them for a model. `options` override settings."""
        check_subject(arguments, command)
        places = ("guidance", "height", "width")
        words = [f"--evaluate.{n}={v}" for n in places if (v := getattr(arguments, n)) is not None]
        if arguments.model is not None:
            run = override(override(model_run(arguments.model, arguments.adapter), options), words)
            check_plan(run)
            weights_name = "base" if arguments.adapter is None else "adapter"
            name = f"{Path(arguments.model).name}, {weights_name}"
            return cls(run, None, arguments.adapter, name)
        folder = Path(arguments.run or "")
        opened = (
            open_folder(folder, arguments.trust, _parts(arguments))
            .overridden(options)
            .overridden(words)
        )
        run, opens = opened.run, opened.opens_rewards or isinstance(arguments, EvaluateArguments)
        if not opens and not arguments.rewards:
            print(
                f"{folder} was not started here, so its rewards are not loaded (use --trust=code "
                "to load them)"
            )
        with opened.limited():
            check_plan(run)
            base = arguments.weights == "base"
            weights = None if base else weights_folder(folder, arguments.weights)
        name = f"{folder.name}, {arguments.weights} weights"
        return cls(run, folder, weights, name, run.judges if opens else (), opened.limits)

    def steps(self, policy: Model, count: int | None) -> int:
        """Number of steps: the given one, the run's, or the pipeline's default."""
        if count is not None:
            return count
        if self.folder is not None or self.run.evaluate.steps is not None:
            return self.run.evaluation_steps
        from flowrl.models.diffusers.policy import PipelinePolicy

        if not isinstance(policy, PipelinePolicy):  # texts have a number of steps
            raise UserError("your own model has no default number of steps: set --steps")
        parameter = policy.loop.driver.parameters.get("num_inference_steps")
        if parameter is None or not isinstance(parameter.default, int):
            raise UserError(f"{policy.name} has no default number of steps: set --steps")
        return parameter.default

    def open(self) -> tuple[Model, Model]:
        """Open the model with the base weights, and the same model at the evaluation's guidance
        and size."""
        with self.limited():
            policy = load_models(self.run, device_of(self.run))
            return policy, whole_at_evaluation(policy, self.run)

    def ended_by_base(self, policy: Model, last: int, command: str) -> EvaluationSampler:
        """A policy whose last steps use the base weights. Prints a sentence about it.

        UserError for texts, and if the weights are the base weights.
        """
        from flowrl.models.diffusers.hybrid import HybridPolicy
        from flowrl.models.diffusers.policy import PipelinePolicy

        if not isinstance(policy, PipelinePolicy):
            raise UserError(
                f"{command}: --base-steps is for denoising steps of pipelines: leave it out"
            )
        if self.weights is None:
            raise UserError(f"{command}: --base-steps needs trained weights besides the base model")
        base = None
        if self.run.model.lora is None:
            with self.limited():
                other = load_policy(self.run, device_of(self.run))
            base = evaluation_policy(other, self.run)
            assert isinstance(base, PipelinePolicy)
        steps = "step is" if last == 1 else f"{last} steps are"
        print(
            f"hybrid inference: the last {steps} the base weights, which hides over-optimisation; "
            "leave --base-steps out to see the trained weights alone"
        )
        return HybridPolicy(policy, base, last)


def check_subject(arguments: SampleArguments | EvaluateArguments, command: str) -> None:
    """UserError for words that name neither a run nor a model, or both."""
    if (arguments.run is None) == (arguments.model is None):
        raise UserError(
            f"{command}: give either a run's folder or, with --model, the folder or hub name "
            "of a pipeline or language model"
        )
    if arguments.adapter is not None and arguments.model is None:
        raise UserError(f"{command}: --adapter needs --model; for a run use --weights FOLDER")
    if arguments.model is not None and arguments.weights != "last":
        raise UserError(
            f"{command}: --weights {arguments.weights}: a model without a run has no others: leave "
            "--weights out, or name an adapter's folder with --adapter (`adapter=` of "
            "flowrl.Run.of_model)"
        )


def _parts(arguments: SampleArguments | EvaluateArguments) -> frozenset[str]:
    """The sections of a run file that the command uses."""
    if isinstance(arguments, SampleArguments):
        return SAMPLED_PARTS
    named = {"prompts"} if arguments.prompts or arguments.suite else set[str]()
    return EVALUATED_PARTS - named - (set(REWARDS) if arguments.rewards else set())


def model_run(source: str, adapter: Path | None) -> RunSettings:
    """Settings of a run for a model: defaults, without training."""
    if adapter is not None:
        if not adapter.is_dir():
            raise UserError(f"--adapter: no folder {adapter}")
        check_whole(adapter)
    model: dict[str, Any] = {"lora": None}
    if is_code(source):
        model |= {"own": source, "lora": _text_adapter(adapter)}
        recipe, evaluate = {"name": "flow_grpo"}, {}
    elif is_pipeline(source):
        model |= {"pipeline": source, "guidance": None}
        recipe, evaluate = {"name": "flow_grpo"}, {}
    else:
        model |= {"language": source, "lora": _text_adapter(adapter)}
        recipe, evaluate = {"name": "text_grpo", "length": TEXT_LENGTH}, {"steps": TEXT_LENGTH}
    tree = {
        "recipe": recipe,
        "model": model,
        "prompts": {"train": "none"},
        "rewards": [{"name": "brightness"}],  # a run has one; `--rewards` has those that count
        "evaluate": evaluate,
    }
    return run_from(tree, "--model")


def _text_adapter(folder: Path | None) -> Mapping[str, Any] | None:
    """Rank, alpha and targets of a saved adapter; None for full weights."""
    file = None if folder is None else folder / TEXT_ADAPTER
    if file is None or not file.is_file():
        return None
    saved = read_json(file, "--adapter")
    try:
        targets = saved["target_modules"]
        return {
            "rank": saved["r"],
            "alpha": saved["lora_alpha"],
            "targets": [targets] if isinstance(targets, str) else targets,
        }
    except KeyError as error:
        raise UserError(f"--adapter: {file} has no {error}: copy the adapter again") from error


def is_pipeline(source: str) -> bool:
    """Whether a folder or hub name is a diffusers pipeline rather than a language model. UserError
    for neither."""
    folder = find(source)
    if folder.is_dir():
        if is_pipeline_folder(folder):
            return True
        if (folder / "config.json").is_file():
            return False
        raise UserError(f"--model: {source} has neither model_index.json nor config.json")
    refuse_single_file(source, "--model", ("diffusers", "transformers"))
    if not names_repository(source):
        raise UserError(f"--model: {no_such_model(source)}")
    repository = CachedRepository(source)
    with from_hub("--model", repository, UserError):
        check_cached("--model", repository, UserError)
        return _is_pipeline_on_hub(source)


def _is_pipeline_on_hub(source: str) -> bool:
    indices = (("model_index.json", True), (MODULAR_INDEX, True), ("config.json", False))
    for file, kind in indices:
        if isinstance(try_to_load_from_cache(source, file), str):
            return kind
    try:
        check_hub(PipelineSettings(pipeline=source))
    except UserError as error:
        if isinstance(error.__cause__, EntryNotFoundError):  # it has no such file
            check_hub(LanguageSettings(language=source))
            return False
        raise
    return True
