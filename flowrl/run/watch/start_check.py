"""Everything that a start refuses before weights load: one list for `train`, `prove`, `new`, `plan`
and the Python API.

`check_start` raises the first refusal; `refusals` lists all of them, in the same words. What needs
weights, a network or a server is not refused here: `unchecked` names it.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from flowrl.errors import UserError
from flowrl.prompts import PromptSet
from flowrl.prompts.prompt_set import DATA_SET, evaluated_rows
from flowrl.settings import OwnSettings, PipelineSettings, RunSettings
from flowrl.settings.checks.machine import check_hub, check_model, hub_repository
from flowrl.settings.read import run_checks, run_yaml_text
from flowrl.settings.sections.data import PromptPlace, RewardSpec
from rewards.types import Reward, cell

Check = Callable[[], object]


def check_start(run: RunSettings, opened: Mapping[str, Reward] = {}) -> None:
    """UserError for a run that cannot work on this machine. Reads no weights. `opened`: rewards
    that are Python objects, by their labels."""
    for check in _checks(run, opened):
        check()
    for part in (run, run.prompt_writer):
        if part is not None:
            check_hub(part.model)


def refusals(run: RunSettings, opened: Mapping[str, Reward] = {}) -> Iterator[str]:
    """Why this run could not start on this machine, one sentence each. A prompt file on the hub is
    not read. `opened`: rewards that are Python objects, by their labels."""
    sentences = set[str]()
    for check in _checks(run, opened, hub=False):
        try:
            check()
        except UserError as error:
            if str(error) not in sentences:
                yield str(error)
            sentences.add(str(error))
        except Exception:  # it may stumble over what a check before it has refused
            if not sentences:
                raise


def check_shares(run: RunSettings, processes: int) -> None:
    """UserError, before anything is created, if a training process would have no sampling
    worker."""
    if 0 < run.workers.sampling < processes:
        raise UserError(
            f"workers.sampling: {run.workers.sampling} for {processes} training processes, each "
            f"of which needs its own workers; set it to {processes} or a multiple"
        )
    if run.workers.lag and run.server is not None and processes > 1:
        raise UserError(
            f"workers.lag: {processes} training processes share the server's weights, which change "
            "while the others' samples are drawn; train in one process, or set workers.lag: 0"
        )
    if run.workers.sampling and run.model.sharers > 1:
        raise UserError(
            "workers.sampling: workers do not split calls; set model.context_parallel: 1, or "
            "workers.sampling: 0"
        )


def check_model_of(run: RunSettings) -> None:
    """UserError for a model that this run could not drive, without its prompts and rewards."""
    check_model(run.model)
    check_classes_of(run)


def _checks(run: RunSettings, opened: Mapping[str, Reward], *, hub: bool = True) -> Iterator[Check]:
    if run.given is not None:  # first: its file may hold the prompts too
        yield partial(_given, run)
    yield partial(run_yaml_text, run)
    yield from run_checks(run, opened, hub=hub)
    yield partial(_shares, run)
    yield partial(_needs_of_rewards, run, opened)
    of_user = isinstance(run.model, OwnSettings)
    if not of_user:
        yield partial(_guidance, run)
        yield partial(_own_sizes, run)
    for place in run.prompts.given:
        if hub or not run.prompts.on_hub(place):
            yield partial(_rows, run, place, opened)
    if not of_user:
        yield partial(check_classes_of, run)
        yield partial(_kinds, run, opened)


# each imports what is slow to import


def _given(run: RunSettings) -> None:
    from flowrl.session.given_check import check_given

    check_given(run)


def _guidance(run: RunSettings) -> None:
    from flowrl.run.watch.guidance_check import check_guidance

    check_guidance(run)


def _own_sizes(run: RunSettings) -> None:
    from flowrl.run.watch.size_check import check_own_sizes

    check_own_sizes(run)


def _rows(run: RunSettings, place: PromptPlace, opened: Mapping[str, Reward]) -> None:
    from flowrl.run.watch.size_check import check_rows_of

    prompts = run.prompts.read(place)
    if not isinstance(run.model, OwnSettings):
        check_rows_of(run, place, prompts)
    if place == "held_out":
        check_drawn_sets(run, prompts)
    readable = [spec for _, spec in _valid_rewards(run, opened)]
    for spec in run.judges if place == "held_out" else run.rewards if run.drawn else ():
        if spec in readable:
            check_reward_columns(spec, place, prompts)


def check_drawn_sets(run: RunSettings, held_out: PromptSet) -> None:
    """UserError if evaluations have no prompt of a data set that has its own rewards."""

    def sets_of(samples: int) -> tuple[int, set[Any]]:
        rows = evaluated_rows(len(held_out), samples, run.evaluate.per_prompt)
        return len(rows), {held_out.meta[row].get(DATA_SET) for row in rows}

    wanted = {name for spec in run.held_out_rewards for name in spec.sets}
    count, drawn = sets_of(run.evaluate.samples)
    for spec in run.held_out_rewards:
        if absent := [name for name in spec.sets if name not in drawn]:
            more = range(count + 1, len(held_out) + 1)
            samples = (prompts * run.evaluate.per_prompt for prompts in more)
            enough = next(number for number in samples if wanted <= sets_of(number)[1])
            sets = run.prompts.held_out or ()
            room = count >= len(sets)  # for a prompt of each, if all are short
            raise UserError(
                f"evaluate.samples: the {count} prompts of an evaluation include none of "
                f"{absent[0]}, which {spec.label} scores: set evaluate.samples: {enough}"
                + (f", or `limit` the others to as many prompts as {absent[0]} has" if room else "")
            )


def check_reward_columns(spec: RewardSpec, place: PromptPlace, prompts: PromptSet) -> None:
    """UserError for a reward that reads a column which no row of its prompts has."""
    from rewards.load import columns_needed

    rows = [row for row in prompts.meta if not spec.sets or row.get(DATA_SET) in spec.sets]
    for setting, column in columns_needed(spec.name, spec.settings):
        if rows and all(cell(row, column) is None for row in rows):
            raise UserError(
                f"reward {spec.label}: no row of prompts.{place} has a column {column!r} "
                f"({setting}); it has {', '.join(prompts.columns)}: name another with `{setting}`, "
                "or add it to the file"
            )


def _kinds(run: RunSettings, opened: Mapping[str, Reward]) -> None:
    """UserError for a reward of other media than the model makes, as far as both say it."""
    from flowrl.run.watch.text_facts import likely_form
    from rewards.kinds import check_kinds

    if run.train.self_test != "raise" or not run.drawn:
        return
    media_kind = likely_form(run).kind
    for place, spec in _valid_rewards(run, opened):
        try:
            check_kinds(spec.name, spec.settings, media_kind)
        except ValueError as error:
            raise UserError(f"{place}: {spec.label}: {error}") from error


def _shares(run: RunSettings) -> None:
    from flowrl.session.session import on_cpu

    on_cpu(run)
    check_shares(run, 1)


def check_classes_of(run: RunSettings) -> None:
    """UserError for what the model's classes and configuration refuse, without asking whether its
    files of weights are whole."""
    from flowrl.models.before_weights import check_before_weights

    check_before_weights(run)


def _needs_of_rewards(run: RunSettings, opened: Mapping[str, Reward]) -> None:
    from rewards.load import check_files, check_packages

    for place, spec in _valid_rewards(run, opened):
        try:
            check_packages(spec.name, spec.settings)
            check_files(spec.name, spec.settings)
        except ValueError as error:
            raise UserError(f"{place}: {spec.label}: {error}") from error


def _valid_rewards(
    run: RunSettings, opened: Mapping[str, Reward]
) -> Iterator[tuple[str, RewardSpec]]:
    """The rewards that a file names, with their places, without those that `check_rewards` refuses:
    what else would be said of such a one is the same fault in other words."""
    from rewards.load import check_reward

    for place, spec in _rewards(run):
        if spec.label in opened:
            continue
        try:
            check_reward(spec.name, spec.settings)
        except ValueError:
            continue
        yield place, spec


def _rewards(run: RunSettings) -> Iterator[tuple[str, RewardSpec]]:
    for place in ("rewards", "held_out_rewards", "intermediate_rewards"):
        for spec in getattr(run, place):
            yield place, spec


def _uncounted_adapters(run: RunSettings) -> Iterator[str]:
    """A sentence on adapters to start from whose layers the estimates do not know."""
    from flowrl.estimate.started_adapters import uncounted
    from flowrl.models.description import describe

    for part in filter(None, (run.prompt_writer, run)):
        m = part.model
        if isinstance(m, OwnSettings) or m.lora is None or m.lora.start is None:
            continue
        described = describe(m)
        models = [] if described is None else described.denoisers.values()
        if (sentence := uncounted(m.lora, models)) is not None:
            yield sentence


def unchecked(run: RunSettings) -> Iterator[str]:
    """Sentences on what `plan` could not check here, and why."""
    from flowrl.models.description import has_weights

    for part in filter(None, (run.prompt_writer, run)):
        source = part.model.source
        repository = None if isinstance(part.model, OwnSettings) else hub_repository(source)
        fault = None if repository is None else repository.fault()
        if fault is not None and fault.fetched:
            yield f"files of {source}: {fault.words}; a start asks the hub for it"
        elif not has_weights(part.model):
            yield (
                f"files of {source}: it is not on this machine; `hf download {source}` downloads it"
            )
    yield from _uncounted_adapters(run)
    yield "weights: none were read, so damage behind their headers is found at the start"
    yield (
        "the proof at load: it calls the model with its weights; `flowrl prove` runs it alone"
        if isinstance(run.model, PipelineSettings)
        else "the proof at load: it calls the model with its weights"
    )
    from flowrl.run.watch.size_check import unknown_sizes

    if (unknown := unknown_sizes(run)) is not None:
        yield unknown
    places = [place for place in run.prompts.given if run.prompts.on_hub(place)]
    if places:
        yield f"prompts.{' and prompts.'.join(places)}: on the hub, which plan does not ask"
    if run.given is not None:
        from flowrl.session.given_check import unknown_size

        if unknown_size(run):
            yield (
                "the size of given samples: the model's files do not tell the run's; set "
                "model.height and model.width"
            )
    labels = ", ".join(dict.fromkeys(spec.label for _, spec in _rewards(run)))
    yield f"rewards ({labels}): their weights or servers were not opened, nor was their self-test"
    if run.server is not None:
        yield f"model.server: {run.server.url} was not asked"
    if run.engine is not None:
        yield f"model.engine: {run.engine.place} was not asked, nor were its weights compared"
    yield "the disk: what a run writes depends on its weights and samples, and others write too"
    yield "free memory: other processes may hold some of it when the run starts"
    yield "processes: a launcher's number of processes, and sharding, are known at the start"
