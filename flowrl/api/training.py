"""Training from Python: `flowrl.train` and `flowrl.recipe`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from flowrl.api.calls import public_call
from flowrl.api.parts import GivenCallbacks, GivenPrompts, SomeRewards
from flowrl.api.run import GivenLora, Run
from flowrl.errors import UserError, made_call
from flowrl.settings.read import run_from
from flowrl.settings.trust import Trust

AUTO: Literal["auto"] = "auto"


@public_call
def recipe(name: str, **settings: Any) -> dict[str, Any]:
    """A recipe with its settings, for `train(recipe=...)`. `flowrl recipes NAME` lists the
    settings.

    UserError, with a suggestion, for an unknown name, setting or value.
    """
    section = {"name": name, **settings}
    rest: dict[str, Any] = {"model": {"pipeline": "-"}, "prompts": {"train": "-"}}
    rest["rewards"] = "length"
    routes = settings.get("modalities")
    if isinstance(routes, Mapping):  # its rewards are those of the run that it will be part of
        named = {str(name): None for names in routes.values() for name in names}
        rest["rewards"] = [{"name": "length", "label": name} for name in named]
    run_from({"recipe": section, **rest}, "flowrl.recipe")
    return section


@public_call
def train(  # noqa: PLR0913 one call has all of a run
    model: Any = None,
    *,
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
    settings: Mapping[str, Any] | str | Path | None = None,
    callbacks: GivenCallbacks = (),
    folder: str | Path | None = None,
    resume: str | Path | None = None,
    trust: Trust = False,
) -> Run:
    """Train a model with rewards, or resume a run. Returns the finished run. It is
    `flowrl.Run(...).train()` in one call.

    model             a diffusers pipeline or a transformers language model, its folder, or a hub
                      name; or your own model, a torch module with `state` (the shape of a
                      sample), `encode(prompts, rows)` and `forward(x, sigma, encoded)`, the
                      velocity (docs/own_models.md): its class, "FILE.py:NAME",
                      {"own": ..., "weights": FILE}, or a module of a class without arguments, in
                      a file of its own, which a later start imports. A live model is read and
                      never changed: a copy is trained
    rewards           names, {"name": ..., "weight": ..., settings}, or callables: a function of
                      (samples), (images, prompts, metadata) or (prompts, completions), or a loaded
                      reward; their weighted sum is maximized
    prompts           a list of texts or rows, a datasets.Dataset, a file, a hub name, or
                      {"source": ...} with the settings of a data set, or a list of these
    held_out          prompts of evaluations, in the same forms; none: no evaluations
    held_out_rewards  rewards of evaluations; none: the training rewards
    given             samples to train on, {"file": ..., "kind": "pairs", ...}: if all samples are
                      given, no prompts are needed, and rewards score only evaluations
    recipe            a name, or `flowrl.recipe(name, ...)`
    lora              rank of the adapters, True for the default rank, 16, a mapping of all their
                      settings, or a `peft.LoraConfig`, of which each field is honoured or refused
                      by name; False trains all weights; None: as in `settings`, whose
                      default is rank 16
    tokenizer         the tokenizer of a live language model
    settings          all other settings, {"train": {"updates": 2}, ...}, or a run's file. The
                      arguments above take precedence
    callbacks         called after each iteration, evaluation and checkpoint: see `Callback`
    folder            the new run's folder; by default the next free one in `runs`
    resume            the folder of a run to resume; it takes rewards that no file can name,
                      iterations, lr, settings and callbacks. "auto", with `folder`: begin the run
                      if the folder is absent, continue it if it is there, and do nothing if it has
                      finished
    trust             grant a resumed folder that was not started here all that it asks for, or the
                      rights that are named, such as "code,network": see SECURITY.md

    UserError, in one sentence, for settings that cannot work, before any weights load; Stopped for
    a run that ended early and can be resumed. Ctrl-C ends a run after its iteration, saves, and
    raises KeyboardInterrupt; a second Ctrl-C raises it at once. The run can be resumed in both
    cases. The state of the process is restored: see `flowrl.api.untouched`.
    """
    file = settings if isinstance(settings, str | Path) else None
    over = None if isinstance(settings, str | Path) else settings
    if resume is not None and resume != AUTO and folder is not None:
        raise UserError(f"{made_call()}: a resumed run already has a folder: leave `folder` out")
    run = Run(
        file, model=model, rewards=rewards, prompts=prompts, held_out=held_out,
        held_out_rewards=held_out_rewards, recipe=recipe, given=given, lora=lora,
        iterations=iterations, lr=lr, seed=seed, tokenizer=tokenizer, settings=over, trust=trust,
    )  # fmt: skip
    if resume is None or resume == AUTO:
        again = None if resume is None else AUTO
        return run.train(folder=folder, resume=again, trust=trust, callbacks=callbacks)
    run.folder = Path(resume)
    return run.resume(callbacks=callbacks)


TrainedRun = Run  # its name before a run could be made without training it
