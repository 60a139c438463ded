"""A run as one object: from a file, from arguments or from a folder, and all that is done to it."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from inspect import iscoroutinefunction, signature
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from PIL.Image import Image
from typing_extensions import TypeAliasType

from flowrl.api.calls import checked_arguments, public_call, public_calls, setting_words
from flowrl.api.given import Given
from flowrl.api.parts import (
    GivenCallbacks,
    GivenGuidance,
    GivenOverrides,
    GivenPrompts,
    GivenRewards,
    PromptSources,
    SomeRewards,
    list_rows_named,
    prompt_settings,
    without_files,
)
from flowrl.api.untouched import untouched
from flowrl.bounded_files import bounded_lines, json_object
from flowrl.cli import run_start
from flowrl.cli.calibrate import Calibrate, print_calibration
from flowrl.cli.check_rows import report_rows
from flowrl.cli.drill import FAULT_KINDS, DrillArguments, drill_run
from flowrl.cli.given_model import model_run
from flowrl.cli.launch import LaunchArguments, LaunchPlace, launch_job
from flowrl.cli.plan import RunPlan, planned
from flowrl.cli.report import Compare, Report
from flowrl.cli.restarts import launched
from flowrl.drill.faults import FaultKind
from flowrl.errors import FolderInUse, UserError, made_call
from flowrl.launching.own_python import python_environment
from flowrl.pages.run_folder import RunFolder
from flowrl.pages.run_page import state, summary_html
from flowrl.pages.stack import number
from flowrl.paths import find, folder_taken, own_name_of
from flowrl.run.evaluate.evaluate import HeldOutResult
from flowrl.run.train import Result
from flowrl.run.watch.start_check import check_start
from flowrl.session import record
from flowrl.session.atomic import numbered_folders
from flowrl.session.folder_wait import FolderWait
from flowrl.session.live import NOTHING_LIVE, Callback, Live
from flowrl.session.progress import deciding
from flowrl.session.session import load_rewards
from flowrl.settings import RewardSpec, RunSettings
from flowrl.settings.command_line.arguments import (
    EvaluateArguments,
    ExportArguments,
    KeyFormat,
    PlanArguments,
    SampleArguments,
)
from flowrl.settings.read import (
    OpenedFolder,
    open_folder,
    override,
    run_from,
    run_of,
    with_full_paths,
)
from flowrl.settings.trust import ALL_PARTS, SAMPLED_PARTS, Trust
from flowrl.settings.words.short_forms import REWARDS
from rewards import Reward, Samples

RUN_FILE = "run.yaml"
# Any: peft.LoraConfig, which is not imported here
GivenLora = TypeAliasType("GivenLora", int | Mapping[str, Any] | bool | Any)
# methods and attributes of TRL, transformers and diffusers, and the name here
_METHODS_ELSEWHERE = {
    "save_pretrained": "export",
    "save_model": "export",
    "save_lora_weights": "export",
    "push_to_hub": "push",
    "generate": "sample",
    "predict": "sample",
    "fit": "train",
    "log_history": "metrics",
    "history": "metrics",
    "state": "metrics",
    "model": "weights",
    "args": "settings",
    "config": "settings",
}


class Best(NamedTuple):
    """The best evaluation of a run, by the reward `checkpoint.best` or the first held-out one."""

    iteration: int
    score: float
    folder: Path  # of the weights


@dataclass(frozen=True)
class Exported:
    """An exported run: the folder with the weights and their card, and its address on the hub."""

    folder: Path
    address: str | None = None


@public_calls
class Run:
    """A run: its settings, and once it has begun its folder.

    Made from a run file or the name of one, `Run("demo")`; from arguments, `Run(model=pipe,
    rewards=[...], ...)`; or from the folder of a run, `Run("runs/demo-0001")`. `train` and
    `resume` return the run itself.

    folder  run.yaml, metrics.jsonl, samples/, checkpoints/, best/, and at the end the weights; the
            command line can read and resume it too. None before the run begins
    live    rewards and callbacks that were passed as objects
    """

    def __init__(  # noqa: PLR0913 one call has all of a run
        self,
        source: str | Path | None = None,
        live: Live = NOTHING_LIVE,
        *,
        model: Any = None,
        rewards: SomeRewards = (),
        prompts: GivenPrompts | None = None,
        held_out: GivenPrompts | None = None,
        held_out_rewards: SomeRewards = (),
        recipe: str | Mapping[str, Any] | None = None,
        given: Mapping[str, Any] | None = None,
        lora: GivenLora | None = None,
        iterations: int | None = None,
        lr: float | None = None,
        seed: int | None = None,
        tokenizer: Any = None,
        settings: GivenOverrides | None = None,
        trust: Trust = False,
    ) -> None:
        """Nothing is read before it is needed; a mistake is an error of the first call.

        source    a run file, the name of one of flowrl's (`flowrl plan demo`), or a run's folder;
                  None: the other arguments have all of it
        settings  over those of the source: {"train": {"updates": 2}}, or the words of a command
                  line, ["--train.updates", "2"]. The other arguments, which are those of
                  `flowrl.train`, take precedence
        trust     grant a folder that was not started here all that it asks for, or the rights that
                  are named, such as "code,network": see SECURITY.md
        """
        numbers = {"iterations": iterations, "lr": lr, "seed": seed}
        place = None if source is None else find(str(source))
        begun = place is not None and (place / RUN_FILE).is_file() and not own_name_of(source)
        self.folder: Path | None = place if begun else None
        self.live = live
        self._trust = trust
        self._given = Given(
            model=model,
            tokenizer=tokenizer,
            rewards=rewards,
            held_out_rewards=held_out_rewards,
            prompts=prompts,
            held_out=held_out,
            recipe=recipe,
            lora=lora,
            train={key: value for key, value in numbers.items() if value is not None},
            settings=settings,
            samples=given,
            file=None if begun or source is None else source,
        )
        self._untrained: tuple[str, Path | None] | None = None

    @classmethod
    def open(cls, folder: str | Path, rewards: SomeRewards = (), trust: Trust = False) -> "Run":
        """The run of a folder, whose settings are checked at once. `rewards` are objects that its
        file cannot name. UserError for a folder without a run, or one from elsewhere that asks for
        rights which `trust` does not grant."""
        run_of(Path(folder), trust, SAMPLED_PARTS)
        return cls.at(folder, rewards, trust)

    @classmethod
    def at(cls, folder: str | Path, rewards: SomeRewards = (), trust: Trust = False) -> "Run":
        """The run of a folder that is read once something is asked of it."""
        run = cls(trust=trust)
        run.folder = Path(folder)
        run.live = Live(GivenRewards.of(rewards, f"{made_call()}: rewards").objects)
        return run

    @classmethod
    def from_pretrained(cls, source: str | Path, trust: Trust = False) -> "Run":
        """The run of a folder, or of a repository of the hub that has one: a run's folder that was
        uploaded whole. UserError for a repository with weights alone, which diffusers, peft and
        transformers load."""
        folder = Path(source).expanduser()
        if folder.is_dir():
            if not (folder / RUN_FILE).is_file() and any(folder.glob("*.safetensors")):
                raise UserError(
                    f"flowrl.Run.from_pretrained: {folder} has weights and no run.yaml, so it is "
                    "not the folder of a run: diffusers loads an adapter by "
                    "pipe.load_lora_weights(FOLDER), and flowrl.Run.of_model(MODEL, FOLDER) "
                    "samples and evaluates it"
                )
            return cls.open(folder, trust=trust)
        from flowrl.api.hub import downloaded_run  # the hub's client takes a second to import

        return cls.open(downloaded_run(str(source)), trust=trust)

    @classmethod
    def of_model(
        cls,
        model: str | Path,
        adapter: str | Path | None = None,
        settings: GivenOverrides | None = None,
    ) -> "Run":
        """An untrained model, by its folder or hub name, for `sample`, `evaluate` and `prove`; and
        an adapter for it, by its folder. `settings`: of its proof."""
        run = cls(settings=settings)
        run._untrained = str(model), None if adapter is None else Path(adapter)
        return run

    if not TYPE_CHECKING:  # with it, a checker would take any attribute for one of these

        def __getattr__(self, name: str) -> Any:
            if name in vars(type(self)):  # a property, whose own error this is
                return object.__getattribute__(self, name)
            method = _METHODS_ELSEWHERE.get(name)
            near = [method] if method else get_close_matches(name, dir(type(self)), n=1)
            hint = f"; did you mean {near[0]!r}?" if near and not name.startswith("_") else ""
            raise AttributeError(f"flowrl.Run has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        if self._untrained is not None:
            model, adapter = self._untrained
            return (
                f"flowrl.Run.of_model({model!r}{'' if adapter is None else f', {str(adapter)!r}'})"
            )
        if self.folder is None:
            return f"flowrl.Run({self._given.name}): not begun; plan(), prove() and train() begin"
        try:
            run = RunFolder.read(self.folder)
        except UserError as error:
            return f"flowrl.Run({str(self.folder)!r}): {error}"
        parts = [run.recipe, state(run)]
        scores = dict(run.column(f"held_out/{run.key}")) if run.key else {}
        if scores and run.best is not None:
            first, best = next(iter(scores.values())), scores[run.best]
            parts.append(f"{run.key} {number(first)} -> {number(best)}, best at {run.best}")
        parts.append(f"{run.raised:.0f} alarms" if run.raised else "no alarms")
        return f"flowrl.Run({str(self.folder)!r}): {', '.join(parts)}"

    def __dir__(self) -> list[str]:
        """The public names alone, as of the package."""
        return [name for name in super().__dir__() if not name.startswith("_")]

    def _repr_html_(self) -> str:
        """The summary of the run's page, for notebooks."""
        if self.folder is None:
            return f"<code>{repr(self).replace('<', '&lt;')}</code>"
        try:
            return summary_html(RunFolder.read(self.folder))
        except UserError as error:
            return f"<p>{str(error).replace('<', '&lt;')}</p>"

    @property
    def settings(self) -> RunSettings:
        """All settings, as in run.yaml."""
        if self.folder is not None:
            return self._opened(SAMPLED_PARTS).run
        with self._read() as (run, _):
            return run

    @contextmanager
    def _read(self) -> Iterator[tuple[RunSettings, Live]]:
        """The settings of a run that has not begun, and its objects; files that Python's prompts
        and model need are there inside. Errors name them without their temporary folder."""
        if self._untrained is not None:
            raise UserError(
                "flowrl.Run.of_model has no settings of a run: use flowrl.Run(model=..., "
                "recipe=..., prompts=..., rewards=...)"
            )
        with TemporaryDirectory() as temporary:
            files = Path(temporary).resolve()
            with list_rows_named(files):
                run, objects = self._given.start(files)
                yield run, Live({**self.live.rewards, **objects}, files=files)

    def _opened(self, parts: frozenset[str]) -> OpenedFolder:
        return open_folder(self.begun, self._trust, parts)

    @property
    def begun(self) -> Path:
        """The run's folder. UserError for a run that has none."""
        if self.folder is None:
            name = "this run" if self._given.file is None else self._given.name
            raise UserError(f"{name} has not begun: train() it first")
        return self.folder

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One mapping per iteration, in order: `iteration` and metrics by name. The first is the
        base model's; None for a number that was not finite. docs/metrics.md explains the names;
        pandas.DataFrame takes the list."""
        path = None if self.folder is None else self.folder / record.METRICS
        if path is None or not path.exists():
            return []
        lines = (json_object(line) for line in bounded_lines(path, record.MOST_METRICS))
        return [dict(line) for line in lines if line is not None]

    @property
    def done(self) -> bool:
        """Whether the run has reached its last iteration and its weights are exported."""
        return self.folder is not None and self.weights is not None

    @property
    def weights(self) -> Path | None:
        """Folder of the final weights, which diffusers, peft or transformers can load; None before
        the run ends."""
        folder = self.begun / self.settings.exported
        return folder if folder.is_dir() else None

    @property
    def best(self) -> Best | None:
        """The best evaluation so far; None without held-out prompts."""
        folder = max(numbered_folders(self.begun / "best"), default=None)
        if folder is None:
            return None
        run, iteration = self.settings, int(folder.name)
        evaluated = (line for line in self.metrics if any(n.startswith("held_out/") for n in line))
        first = {name.removeprefix("held_out/"): x for name, x in next(evaluated, {}).items()}
        key = f"held_out/{deciding(run, first)}"
        line = next(line for line in self.metrics if line["iteration"] == iteration)
        score = line.get(key, math.nan)  # another reward decides since then
        return Best(iteration, score, folder)

    def plan(
        self,
        *,
        svg: str | Path | None = None,
        iteration: int = 0,
        memory: str | None = None,
        devices: str | None = None,
        utilisation: float = 0.4,
        check_rows: bool = False,
    ) -> RunPlan:
        """Describe an iteration and its costs, without loading weights.

        svg          draw the plan's tree into this file
        memory       the memory that the run must fit in, such as "24GiB"; None: that of `devices`,
                     or of the visible GPU
        devices      GPUs to estimate seconds for, such as "8xH100"
        utilisation  the assumed share of the devices' peak FLOP/s
        check_rows   ask of every training row whether anything can win it

        UserError for settings that cannot work together. `accepted` of the result says whether
        `train` would begin here.
        """
        values = {
            "svg": svg, "iteration": iteration, "memory": memory, "devices": devices,
            "utilisation": utilisation, "check_rows": check_rows, "configs": (),
        }  # fmt: skip
        arguments = checked_arguments(PlanArguments, values, {}, "flowrl.Run.plan")
        with untouched(), self._either() as (run, live):
            run_plan = planned(run, arguments, live.rewards)
            if live.files is not None:
                said = tuple(without_files(refusal, live.files) for refusal in run_plan.refusals)
                run_plan = replace(run_plan, refusals=said)
            won = not arguments.check_rows or report_rows(run)
            return (
                run_plan if won else replace(run_plan, refusals=(*run_plan.refusals, ROWS_REFUSED))
            )

    @contextmanager
    def _either(self) -> Iterator[tuple[RunSettings, Live]]:
        """The settings of a run, begun or not, and its objects."""
        if self.folder is None:
            with self._read() as opened_run:
                yield opened_run
            return
        opened = self._opened(ALL_PARTS)
        with opened.limited():
            yield override(opened.run, self._given.overrides), self.live

    def prove(self, *, no_cache: bool = False) -> bool:
        """Compare whole samples of the run's pipeline with the pipeline's own call, over all steps,
        at the run's settings and prompts, and print a table. Returns whether it is accepted; the
        reason of a refusal is printed. The result is cached unless `no_cache`, and `train` does not
        repeat it."""
        from flowrl.cli.prove import prove_run, settings_of_proof

        with untouched():
            if self._untrained is not None:
                run = run_from(settings_of_proof(self._untrained[0]), "prove")
                changed = override(run, self._given.overrides)
                return prove_run(changed, cache=not no_cache, built_in=True)
            with self._either() as (run, _):
                return prove_run(run, cache=not no_cache)

    def calibrate(
        self, *, rounds: int = 20, within: int = 2, by: float = 0.01
    ) -> tuple[float, ...]:
        """Find the noise of each step for the recipe dense_grpo, in rounds of sampling without
        training, and print them.

        rounds  each with the prompts of an iteration
        within  a step gets more noise if the shares of its trajectories that gain and lose differ
                by less than this
        by      the change of a step's noise per round
        """
        values = {"config": None, "rounds": rounds, "within": within, "by": by}
        arguments = checked_arguments(Calibrate, values, {}, "flowrl.Run.calibrate")
        with untouched(), self._either() as (run, live):
            return print_calibration(run, arguments, live)

    def train(
        self,
        *,
        folder: str | Path | None = None,
        resume: Literal["auto"] | None = None,
        wait: bool = False,
        restarts: int = 0,
        no_cache: bool = False,
        trust: Trust = False,
        callbacks: GivenCallbacks = (),
    ) -> "Run":
        """Train to the end. Returns this run, with its folder.

        folder     a new folder; None: the next free one in `runs`
        resume     "auto", with a folder: begin the run if the folder is absent, continue it if it
                   is there, and do nothing if it has finished
        wait       with resume="auto": wait while another process trains in the folder
        restarts   train in a process of its own, and restart it when it dies, at most this many
                   times without a new checkpoint; only of a run file, without Python objects
        no_cache   prove the model at the start even if a proof is cached
        trust      of a folder that another machine has begun: see SECURITY.md
        callbacks  called after each iteration, evaluation and checkpoint: see `Callback`

        UserError, in one sentence, for settings that cannot work, before any weights load; Stopped
        for a run that ended early and can be resumed. Ctrl-C ends a run after its iteration, saves,
        and raises KeyboardInterrupt; a second one raises it at once. The state of the process is
        restored: see `flowrl.api.untouched`.
        """
        if restarts:
            return self._supervised(
                restarts, folder=folder, resume=resume, wait=wait, no_cache=no_cache, trust=trust,
                callbacks=callbacks,
            )  # fmt: skip
        with untouched():
            result = self.begin(
                folder=folder, resume=resume, wait=wait, no_cache=no_cache, trust=trust,
                callbacks=callbacks,
            )  # fmt: skip
        return self._ended(result)

    def begin(
        self,
        *,
        folder: str | Path | None = None,
        resume: Literal["auto"] | None = None,
        wait: bool = False,
        no_cache: bool = False,
        trust: Trust = False,
        callbacks: GivenCallbacks = (),
    ) -> Result:
        """`train` for a program that is the process's own: signals are in the result, and the
        state of the process is not restored."""
        if self.folder is not None:
            raise UserError(f"{self.folder} has begun: call resume(), or make a new flowrl.Run")
        calls = checked_callbacks(callbacks)
        place = None if folder is None else Path(folder).expanduser()
        if resume == "auto":
            if place is None:
                raise UserError('resume="auto" needs the run\'s folder: add folder=')
            return self._continued(place, wait=wait, no_cache=no_cache, trust=trust, calls=calls)
        if resume is not None:
            raise UserError(
                f'resume must be "auto" or None, not {str(resume)[:100]!r}: a folder is resumed by '
                f"flowrl.Run({str(resume)[:100]!r}).resume()"
            )
        if wait:
            raise UserError('wait belongs to resume="auto": leave it out')
        with self._read() as (run, live):
            if place is not None and launched() and run_start.begun_before(run, place):
                return self._again(place, no_cache=no_cache, trust=trust, calls=calls)
            check_start(run, live.rewards)
            if place is not None and place.exists() and not launched():  # else the main one looks
                raise UserError(folder_taken(place))
            whole = Live(live.rewards, (*self.live.callbacks, *calls), live.files)
            name = self._given.named_after(run)
            result = run_start.start(run, name, place, not no_cache, whole)
        return self._kept(result, live)

    def _kept(self, result: Result, live: Live) -> Result:
        self.folder, self.live = result.folder, Live(live.rewards)
        self._given = self._given.begun
        return result

    def _again(
        self, folder: Path, *, no_cache: bool, trust: Trust, calls: tuple[Callback, ...]
    ) -> Result:
        """Resume a folder that a launcher's earlier attempt has begun."""
        self.folder, self._trust, self._given = folder, trust, self._given.again
        return self.begin_again(no_cache=no_cache, callbacks=calls)

    def _continued(
        self, folder: Path, *, wait: bool, no_cache: bool, trust: Trust, calls: tuple[Callback, ...]
    ) -> Result:
        """Begin this run, resume it, or leave a finished one as it is. Settings that have changed
        since the run began follow the rules of a resume."""
        with self._read() as (read, live):
            run = with_full_paths(read)
            check_start(run, live.rewards)
            whole = Live(live.rewards, (*self.live.callbacks, *calls), live.files)
            waits = FolderWait(folder)
            while True:
                try:
                    stands = run_start.folder_state(run, folder)
                    if stands == "finished":
                        print(run_start.finished_words(run, folder))
                        weights = folder / run.exported
                        return self._kept(Result(folder, None, {}, {}, weights), live)
                    if stands == "absent":
                        name = self._given.named_after(run)
                        result = run_start.start(run, name, folder, not no_cache, whole)
                        return self._kept(result, live)
                    opened = open_folder(folder, trust, beside=run).changed(
                        whole.placed(run, folder)
                    )
                    with opened.limited():
                        calling = Live(whole.rewards, whole.callbacks)
                        result = run_start.resume(opened.run, folder, not no_cache, calling)
                    return self._kept(result, live)
                except FolderInUse as error:
                    if not wait:
                        more = f"{error.remedy}; --wait does so, and then goes on"
                        raise FolderInUse(error.reason, more) from error
                    waits.on(error)

    def _supervised(
        self,
        restarts: int,
        *,
        folder: str | Path | None,
        resume: Literal["auto"] | None,
        wait: bool,
        no_cache: bool,
        trust: Trust,
        callbacks: GivenCallbacks,
    ) -> "Run":
        """Train in a child process that the command line supervises."""
        if not self._given.only_file or checked_callbacks(callbacks) or self.live.callbacks:
            raise UserError(
                "restarts: a restart begins with a new process, which has none of this one's "
                "objects: use it with flowrl.Run(FILE), with its changes in `settings`, or restart "
                'the script that calls train(resume="auto")'
            )
        if folder is None:
            raise UserError("restarts needs the run's folder: add folder=")
        words = ["train", str(self._given.file), *setting_words(self._given.overrides)]
        words += ["--folder", str(folder), "--restarts", str(restarts)]
        words += ["--resume", resume] if resume is not None else []
        words += ["--wait"] * wait + ["--no-cache"] * no_cache
        words += [f"--trust={trust}" if isinstance(trust, str) else "--trust"] if trust else []
        done = subprocess.run(
            [sys.executable, "-m", "flowrl", *words], env=python_environment(), check=False
        )
        if done.returncode:
            raise UserError(
                f"the training in {folder} ended with code {done.returncode}; its lines above say "
                "why"
            )
        self.folder = Path(folder)
        return self

    def resume(self, *, no_cache: bool = False, callbacks: GivenCallbacks = ()) -> "Run":
        """Resume the run from its newest checkpoint, to the same bits as without the interruption.
        Settings, rewards and numbers that this object was made with replace the folder's."""
        with untouched():
            result = self.begin_again(no_cache=no_cache, callbacks=callbacks)
        return self._ended(result)

    def begin_again(self, *, no_cache: bool = False, callbacks: GivenCallbacks = ()) -> Result:
        """`resume` for a program that is the process's own: signals are in the result, and the
        state of the process is not restored."""
        folder, calls = self.begun, checked_callbacks(callbacks)
        opened, objects = self._given.resume(folder, self._trust)
        live = Live({**self.live.rewards, **objects}, (*self.live.callbacks, *calls))
        with opened.limited():
            check_start(opened.run, live.rewards)
            result = run_start.resume(opened.run, folder, not no_cache, live)
        return self._kept(result, live)

    def _ended(self, result: Result) -> "Run":
        if result.signal is not None:
            if result.main:
                print(f"saved; resume with: flowrl.train(resume={str(result.folder)!r})")
            signal.raise_signal(result.signal)  # the caller's own handler decides what it does
        return self

    def sample(  # noqa: PLR0913 one keyword for each option of the command
        self,
        prompts: str | Sequence[str],
        *,
        image: str | Path | Image | None = None,
        weights: str = "last",
        count: int = 1,
        steps: int | None = None,
        guidance: GivenGuidance = None,
        height: int | None = None,
        width: int | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        base_steps: int = 0,
        steer: Literal["no", "best", "importance", "particles"] = "no",
        particles: int = 8,
        strength: float = 10.0,
        rewrite: int = 1,
        optimise: Literal["no", "gradient", "search", "best"] = "no",
        rounds: int = 50,
        rate: float = 5.0,
        naturalness: float = 0.01,
        rewards: SomeRewards = (),
        settings: GivenOverrides = (),
        written: bool = False,
    ) -> Samples:
        """Sample `count` times per prompt. Returns images [n 3 h w], videos [n f 3 h w] or n texts
        as `media`, with n = prompts * count; samples of one prompt are contiguous.

        image       for all prompts: the image to edit, or a video's first frame; a file or an image
        weights     last, best, base, or a folder: an adapter's, or one of the run's checkpoints
        steps       denoising steps, or tokens; None: the evaluation's, as of height and width
        guidance    guidance scale, at least 0; "none": the model is called without guidance; None:
                    the evaluation's
        out         a new or empty folder for the samples, their scores and an overview page; None:
                    they are only returned, or, if they are to be `written`, in the next free folder
                    of RUN/samples
        base_steps  the last denoising steps, which use the base weights
        steer       how the rewards select among `particles` samples, with the weight `strength`
        rewrite     in a joint run, rewritings per sample
        optimise    how a better noise is searched for each sample, in `rounds` of size `rate`
        rewards     score, steer and optimise; none: the run's own
        settings    over the run's: {"model": {"dtype": "bfloat16"}}
        """
        texts = _texts(prompts)
        check_counts("sample", {"count": count, "steps": steps})
        with untouched():
            specs, live = self._rewards(rewards)
            values = {
                "prompts": texts, "weights": weights, "count": count, "steps": steps,
                "guidance": guidance, "height": height, "width": width, "seed": seed, "out": out,
                "base_steps": base_steps, "steer": steer, "particles": particles,
                "strength": strength, "rewrite": rewrite, "optimise": optimise, "rounds": rounds,
                "rate": rate, "naturalness": naturalness, "rewards": specs,
                "image": None if isinstance(image, Image) or image is None else str(image),
                **self._subject(),
            }  # fmt: skip
            arguments = checked_arguments(SampleArguments, values, {}, "flowrl.Run.sample")
            from flowrl.cli.sample import FromPython, sample_prompts

            shown = image if isinstance(image, Image) else None
            from_python = FromPython(live, shown, writes=written or out is not None)
            return sample_prompts(arguments, settings, from_python)

    def evaluate(  # noqa: PLR0913 one keyword for each option of the command
        self,
        prompts: GivenPrompts | PromptSources | None = None,
        *,
        rewards: SomeRewards = (),
        weights: str = "last",
        samples: int | None = None,
        steps: int | None = None,
        seed: int | None = None,
        suite: str | None = None,
        alone: bool = False,
        per_prompt: int | None = None,
        guidance: GivenGuidance = None,
        height: int | None = None,
        width: int | None = None,
        base_steps: int = 0,
        pass_at: Sequence[int] = (),
        majority: bool = False,
        out: str | Path | None = None,
        settings: GivenOverrides = (),
    ) -> HeldOutResult:
        """Score samples of held-out prompts, always from the same noise, beside the base model's,
        and print a line for each reward.

        Returns `metrics`: the mean by reward and statistics of the media; `columns`: [n] each;
        `samples` and `scores` [n, rewards]; `base`: the same of the base model. Omitted arguments
        have the values of the run's own evaluations.

        suite       a prompt set with its own rewards: see `flowrl.suites`
        alone       do not evaluate the base model
        per_prompt  the least number of samples per prompt
        base_steps  the last denoising steps, which use the base weights
        pass_at     numbers k for pass@k
        majority    also score the most frequent answer among each prompt's texts
        out         a file for the scores of every sample, as JSON lines
        settings    over the run's: {"evaluate": {"temperature": 0}}
        """
        check_counts("evaluate", {"samples": samples, "steps": steps})
        with untouched(), TemporaryDirectory() as files, list_rows_named(Path(files)):
            specs, live = self._rewards(rewards)
            values = {
                "prompts": self._prompts(prompts, Path(files), settings),
                "weights": weights, "samples": samples, "steps": steps, "seed": seed,
                "suite": suite, "alone": alone, "per_prompt": per_prompt, "guidance": guidance,
                "height": height, "width": width, "base_steps": base_steps,
                "pass_at": tuple(pass_at), "majority": majority, "out": out, "rewards": specs,
                **self._subject(),
            }  # fmt: skip
            arguments = checked_arguments(EvaluateArguments, values, {}, "flowrl.Run.evaluate")
            from flowrl.cli.evaluate import evaluate_weights

            return evaluate_weights(arguments, settings, live).with_base

    def _subject(self) -> dict[str, Any]:
        """Arguments of a command that name this run's weights, or an untrained model."""
        if self._untrained is not None:
            model, adapter = self._untrained
            return {"run": None, "model": model, "adapter": adapter, "trust": self._trust}
        return {"run": str(self.begun), "model": None, "adapter": None, "trust": self._trust}

    def _rewards(self, rewards: SomeRewards) -> tuple[tuple[str, ...], Live]:
        """Rewards as words of a command, and those that are objects."""
        read = GivenRewards.of(rewards, f"{made_call()}: rewards")
        words = tuple(json.dumps(spec) for spec in read.specs)
        return words, Live({**self.live.rewards, **read.objects})

    def _prompts(
        self, prompts: GivenPrompts | PromptSources | None, files: Path, settings: GivenOverrides
    ) -> tuple[str, ...]:
        """Prompts as words of a command, whose settings over the run's are `settings`."""
        if prompts is None or isinstance(prompts, PromptSources):
            return () if prompts is None else prompts.words
        column = "prompt"
        if self._untrained is None:
            column = override(self.settings, settings).prompts.column
        elif settings:
            column = override(model_run(*self._untrained), settings).prompts.column
        named = prompt_settings(prompts, files, "held_out", column)
        sets = named if isinstance(named, list) else [named]
        return tuple(
            prompt_set if isinstance(prompt_set, str) else json.dumps(prompt_set)
            for prompt_set in sets
        )

    def judges(self, given: SomeRewards = (), of_sets: bool = True) -> dict[str, Reward]:
        """Evaluation rewards by label, loaded: the given ones, or the run's. `of_sets`: each scores
        its own data sets alone."""
        if not given:
            opened = self._opened(SAMPLED_PARTS | {*REWARDS})
            changes = {} if of_sets else {"sets": ()}
            specs = [spec.model_copy(update=changes) for spec in opened.run.judges]
            with opened.limited():
                return load_rewards(specs, self.live)
        read = GivenRewards.of(given, f"{made_call()}: rewards")
        named = tuple(RewardSpec.model_validate(spec) for spec in read.specs)
        return load_rewards(named, Live(read.objects))

    def export(
        self,
        *,
        out: str | Path | None = None,
        weights: str = "last",
        formats: Sequence[KeyFormat] = (),
        merged: bool = False,
        push_to_hub: str | None = None,
        private: bool = False,
    ) -> Exported:
        """Write the run's weights into a folder to share: the adapter in the key formats of
        diffusers, ComfyUI and kohya's tools, each read back and compared, and a model card.

        out          a new or empty folder; None: the next free `export-0001` of the run
        weights      last, best, or a folder: an adapter's or a whole model's
        formats      diffusers, comfyui, kohya; none: all that are known for the model
        merged       write the whole model too, with the adapter merged into its weights
        push_to_hub  upload the folder to this repository, owner/name, created if missing
        private      make a newly created repository private
        """
        values = {
            "run": self.begun, "trust": self._trust, "out": out, "weights": weights,
            "formats": tuple(formats), "merged": merged, "push_to_hub": push_to_hub,
            "private": private,
        }  # fmt: skip
        arguments = checked_arguments(ExportArguments, values, {}, "flowrl.Run.export")
        from flowrl.cli.export import export_run

        with untouched():
            return Exported(*export_run(arguments))

    def push(
        self,
        repository: str,
        *,
        private: bool = False,
        weights: str = "last",
        merged: bool = False,
    ) -> Exported:
        """Export the weights and upload them to a repository of the hub, owner/name, which is
        created if missing. Needs the hub's token: `hf auth login`, or HF_TOKEN."""
        return self.export(push_to_hub=repository, private=private, weights=weights, merged=merged)

    def report(self, *, out: str | Path | None = None) -> Path:
        """Write the run's page, one HTML file that opens without a network. Returns its path, by
        default RUN/report.html."""
        from flowrl.cli.report import print_report

        place = None if out is None else Path(out)
        return print_report(Report(self.begun, place))

    def compare(self, *runs: "str | Path | Run", out: str | Path = Path("comparison.html")) -> Path:
        """Write this run and others on one page, with paired intervals over prompts. Returns its
        path."""
        return compare((self, *runs), out=out)

    def drill(
        self,
        *,
        only: Sequence[FaultKind] = FAULT_KINDS,
        iterations: int = 4,
        limit: float = 600.0,
        processes: int = 1,
        seed: int = 0,
        out: str | Path | None = None,
        program: str | None = None,
        yes: bool = False,
    ) -> int:
        """Kill, hang, fill and cut copies of the run on this machine, and write a page. Returns 0
        if everything was as promised, 1 if not, and 130 after Ctrl-C.

        only        kinds of faults
        iterations  that each copy trains beyond the run's newest checkpoint
        limit       seconds within which a training must go on or end
        processes   of torchrun; 1: without a launcher
        out         folder of the page; None: the next free `runs/drill-0001`
        program     the Python of another environment, whose flowrl is drilled
        yes         begin without asking
        """
        values = {
            "folder": self.begun, "only": tuple(only), "iterations": iterations, "limit": limit,
            "processes": processes, "seed": seed, "out": out, "program": program, "yes": yes,
        }  # fmt: skip
        arguments = checked_arguments(DrillArguments, values, {}, "flowrl.Run.drill")
        return drill_run(arguments, self._trust)

    def launch(  # noqa: PLR0913 one keyword for each option of the command
        self,
        where: LaunchPlace,
        *,
        folder: str | Path | None = None,
        nodes: int = 1,
        gpus: int | None = None,
        cpus: int | None = None,
        accelerate_config: str = "",
        submit: bool = False,
        trust: Trust = False,
        time: str = "",
        partition: str = "",
        account: str = "",
        notice: int = 300,
        gpu: str = "H100",
        image: str = "",
        volume: str = "",
        mount: str = "/runs",
        port: int = 29500,
    ) -> int:
        """Print what starts the run's file on other machines, or submit it: a job script for
        "slurm", tasks for "ray", a task file for "sky", a Job for "k8s", or the command of
        "accelerate" for this machine. Each start goes on from the newest checkpoint. Returns 0, or
        what a submitted command returned.

        folder             the run's, on a disk that all machines see; required
        nodes, gpus, cpus  machines, and on each the GPUs, or the processes without GPUs
        accelerate_config  None of your own: the one of configs/accelerate that fits
        submit             hand it to sbatch, Ray or accelerate instead of printing it
        trust              rights for a folder that was not started here, also at later starts
        time, partition, account, notice  of slurm; `notice`: seconds before the time limit at which
                           the run gets a signal to save
        gpu, image, volume, mount  of sky and k8s
        port               of ray: at which the processes meet
        """
        if not self._given.only_file:
            raise UserError(
                "launch: other machines read the run from a file: use flowrl.Run(FILE), with its "
                "changes in `settings`"
            )
        values = {
            "where": where, "config": str(self._given.file), "folder": folder, "nodes": nodes,
            "gpus": gpus, "cpus": cpus, "accelerate_config": accelerate_config, "submit": submit,
            "trust": trust, "time": time, "partition": partition, "account": account,
            "notice": notice, "gpu": gpu, "image": image, "volume": volume, "mount": mount,
            "port": port,
        }  # fmt: skip
        arguments = checked_arguments(LaunchArguments, values, {}, "flowrl.Run.launch")
        return launch_job(arguments, setting_words(self._given.overrides))


ROWS_REFUSED = "training rows that nothing can win: the lines above name them"


@public_call
def compare(runs: Sequence[str | Path | Run], *, out: str | Path = Path("comparison.html")) -> Path:
    """Write two to twelve runs on one page: scores with paired intervals over prompts, curves, the
    same samples side by side, and the settings that differ. Returns the page's path. UserError for
    a folder without a run."""
    from flowrl.cli.report import print_comparison

    folders = tuple(run.begun if isinstance(run, Run) else Path(run) for run in runs)
    return print_comparison(Compare(folders, Path(out)))


def takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument; True where its signature is unknown."""
    try:
        signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # of a function in C
        return True
    return True


def checked_callbacks(callbacks: GivenCallbacks) -> tuple[Callback, ...]:
    """The callbacks as a tuple. UserError for anything that a run cannot call with an event and
    wait for."""
    listed = callbacks if isinstance(callbacks, Iterable) else [callbacks]
    functions = (callbacks,) if callable(callbacks) else tuple(listed)
    for function in functions:
        fault = "" if callable(function) else "cannot be called"
        fault = "is asynchronous" if iscoroutinefunction(function) else fault
        if not fault and not takes_one(function):
            fault = "does not take one argument"
        if fault:
            raise UserError(
                f"{made_call()}: callbacks must be functions of an event, and {function!r:.80} "
                f"{fault}: write `def callback(event): ...`, which asks by event.stop(), "
                "event.save() or event.evaluate()"
            )
    return functions


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


def opened_model(run: Run) -> OpenedFolder:
    """The folder of a run that has begun, as it may be used for samples: see `open_folder`."""
    return run._opened(SAMPLED_PARTS)
