"""Rolls plans out on an engine: requests, weights by version, and checks of what comes back.

The processes of a run share the weights' files: the main process writes them, the others wait.
Versions come from the weights' values, so that processes agree on them without a message.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.checksum import weights_checksum
from flowrl.models.diffusers.batch import RollCall
from flowrl.models.engine.protocol import Engine, EngineRequest, EngineSamples
from flowrl.models.policy import Policy
from samplers import Edges, Plan, Rollout
from samplers.affine import affine_steps
from samplers.host import sent
from samplers.noise import key_hash

_SENT_PREFIX = "flowrl-"  # of the versions of all weights that are sent
_HEAD_START = 600.0  # seconds that the other processes leave to the main one, which saves
_LONGEST_WAIT = 1.0  # seconds between two tries of an engine that does not answer
_OUTAGES = (ConnectionError, TimeoutError)


@dataclass
class EngineWeights:
    """Keeps an engine at the current weights.

    model   the policy whose trained weights are sent
    folder  where their files are, one folder for each version
    main    whether this process writes them
    """

    model: Policy[Any, Any, Any]
    engine: Engine
    folder: Path
    main: bool = True
    loaded: str | None = None

    def current(self) -> str:
        """The version of the current weights, after the engine has them."""
        version = f"{_SENT_PREFIX}{weights_checksum(self.model.trainable().items())}"
        if version != self.loaded:
            self.engine.load(version, self._files(version))
            self.loaded = version
            if self.main:
                self._sweep(but=version)
        return version

    def forget(self) -> None:
        """Load the weights again before the next request, since the engine may have lost them."""
        self.loaded = None

    def close(self) -> None:
        """Leave the engine and delete the files. An engine that is gone has forgotten them."""
        with suppress(*_OUTAGES):
            self.engine.close()
        if self.main:
            self._sweep()
        self.loaded = None

    def _files(self, version: str) -> Path:
        """The folder with the current weights."""
        path = self.folder.absolute() / version
        if self.main and not path.is_dir():
            beside = path.with_name(f"new-{version}")
            shutil.rmtree(beside, ignore_errors=True)
            self._save(beside)
            os.replace(beside, path)  # a process that sees the folder sees all files
        end = time.monotonic() + _HEAD_START
        while not path.is_dir():
            if time.monotonic() > end:
                raise UserError(
                    f"model.engine: the main process has not written {path} within "
                    f"{_HEAD_START:.0f} s: processes on other machines must see the run's folder"
                )
            time.sleep(0.1)
        return path

    def _save(self, folder: Path) -> None:
        """Write the trained weights: adapters, or the trained modules alone."""
        if any(".lora_" in name for name in self.model.trainable()):
            self.model.save(folder)
            return
        for name, module in self.model.roots().items():
            assert isinstance(module, ModelMixin), "denoisers are modules of diffusers"
            module.save_pretrained(folder / name)

    def _sweep(self, but: str | None = None) -> None:
        for path in self.folder.glob("*flowrl-*"):
            if path.name != but:
                shutil.rmtree(path, ignore_errors=True)


@dataclass
class EngineRolls:
    """A `flowrl.models.diffusers.batch.Rolls` that asks an engine.

    place     of the engine, in messages
    prompts   most prompts of a request
    patience  seconds to wait for an engine that does not answer
    bound     mean difference of log-densities, in nats, that is the learner's own noise; infinite
              until the start has measured it
    """

    engine: Engine
    weights: EngineWeights
    place: str
    prompts: int
    patience: float
    bound: float = field(default=math.inf, init=False)

    def allow(self, bound: float) -> None:
        """Note the difference that is noise."""
        self.bound = bound

    def close(self) -> None:
        self.weights.close()

    def __call__(self, asked: RollCall) -> tuple[Rollout, ...]:
        self._check(asked)
        rollouts = list[Rollout]()
        for index, plan in enumerate(asked.plans):
            rollouts.append(self._rolled(asked, plan, index))
            asked.sampling.announce(rollouts, len(asked.plans))
        return tuple(rollouts)

    def _check(self, asked: RollCall) -> None:
        """UserError for states that a request cannot describe, which a loaded pipeline shows."""
        latents = asked.latents
        refused = {
            "states with several parts (a video and its sound)": latents.layout is not None,
            "states of which a given image holds entries": latents.held is not None,
            "first states that are not plain noise": latents.begin is not None,
        }
        name = asked.batch.owner.name
        for words, applies in refused.items():
            if applies:
                raise UserError(
                    f"model.engine: {name} has {words}, which an engine cannot be asked for: leave "
                    "model.engine out"
                )

    def _rolled(self, asked: RollCall, plan: Plan, index: int) -> Rollout:
        count, latents = len(asked.draws), asked.latents
        parts = [range(count)[i : i + self.prompts] for i in range(0, count, self.prompts)]
        answers = [self.answer(_request(asked, plan, index, part)) for part in parts]

        def state(k: int) -> Tensor:
            rows = torch.cat([answer.states[k] for answer in answers])
            return sent(rows.to(latents.dtype), latents.device)

        def density(k: int) -> Tensor:
            rows = torch.cat([answer.logp[k] for answer in answers])
            return sent(rows.to(latents.dtype), latents.device)

        prompt = sent(torch.arange(count).repeat_interleave(plan.group), latents.device)
        put = latents.storage.put
        edges = tuple(
            Edges(k, put(state(k)), put(state(k + 1)), None, density(k), prompt)
            for k, step in enumerate(plan.steps)
            if step.train
        )
        return Rollout(
            plan=plan,
            x0=state(len(plan.steps)),
            prompt=prompt,
            draws=tuple(asked.draws),
            edges=edges,
            seed=asked.seed,
            iteration=asked.iteration,
            index=index,
            storage=latents.storage,
            noise=latents.noise,
        )

    def answer(self, request: EngineRequest) -> EngineSamples:
        """The answer to a request, with the current weights. An engine that is away is waited for;
        one that has lost the weights gets them once more."""
        end, waits, again = time.monotonic() + self.patience, False, True
        version = "of this iteration"  # until they have a name
        while True:
            try:
                version = self.weights.current()
                answer = self.engine.sample(replace(request, version=version))
                held = answer.version
                if held == version:
                    return checked_answer(request, answer)
            except _OUTAGES as error:
                self._wait(error, end, waits)
                waits = True
                continue
            except UserError:
                raise
            except LookupError as error:
                if type(error) is not LookupError:  # a mistake of the user's code
                    raise self._failed(error) from error
                held = str(error)
            except Exception as error:  # an engine's own
                raise self._failed(error) from error
            if not again:
                raise UserError(
                    f"model.engine: {self.place} does not hold the weights {version}, although it "
                    f"was given them twice ({held}): does it restart again and again, or does "
                    "another run use it? Give each run an engine of its own"
                )
            again = False
            self.weights.forget()

    def _wait(self, error: Exception, end: float, waits: bool) -> None:
        """Wait a little for an engine that does not answer. UserError once the patience is over."""
        self.weights.forget()
        reason = str(error) or type(error).__name__
        if time.monotonic() >= end:
            raise UserError(
                f"model.engine: {self.place} does not answer ({reason}): start it, then resume the "
                "run, or leave model.engine out"
            ) from error
        if not waits:
            print(
                f"model.engine: {self.place} does not answer ({reason}); waiting for it up to "
                f"{self.patience:g} s (model.engine.patience)",
                file=sys.stderr,
            )
        time.sleep(min(_LONGEST_WAIT, self.patience))

    def _failed(self, error: Exception) -> UserError:
        words = " ".join(str(error).split())[:500]
        return UserError(f"model.engine: {self.place}: {type(error).__name__}: {words}")


def checked_answer(request: EngineRequest, answer: EngineSamples) -> EngineSamples:
    """An answer that has what was asked for. UserError otherwise. Whether states are finite is
    checked_answer with the samples."""
    count = len(request.seeds)
    shapes: list[tuple[str, Mapping[int, Tensor], Sequence[int], tuple[int, ...]]] = [
        ("state", answer.states, request.levels, (count, *request.shape)),
        ("log-density", answer.logp, request.trained, (count,)),
    ]
    for name, tensors, indices, shape in shapes:
        if lacking := [k for k in indices if k not in tensors]:
            raise UserError(
                f"model.engine: its answer has no {name} {lacking[0]} of {len(request.steps)} "
                "steps; see docs/engines.md for what an answer has"
            )
        for k in indices:
            if tuple(tensors[k].shape) != shape:
                raise UserError(
                    f"model.engine: {name} {k} of its answer has the shape "
                    f"{list(tensors[k].shape)}, not {list(shape)}: does it sample another "
                    "pipeline, or another size?"
                )
    for k in request.trained:
        if not bool(answer.logp[k].isfinite().all()):
            raise UserError(
                f"model.engine: log-densities of step {k} are not finite: its network overflows, "
                "or the step's std is not the request's"
            )
    return answer


def _request(asked: RollCall, plan: Plan, index: int, part: range) -> EngineRequest:
    """The request for some of the draws. Its version is filled in when it is sent."""
    try:
        steps = affine_steps(plan)
    except ValueError as problem:
        raise UserError(f"model.engine: iteration {asked.iteration + 1}: {problem}") from problem
    owner: Any = asked.batch.owner
    prompts: Any = asked.batch.conditioning
    rows = [asked.rows[i] for i in part]
    draws = [asked.draws[i] for i in part]
    roots = plan.states[0]

    def seeds(*purpose: int | str, nodes: int = plan.group) -> tuple[int, ...]:
        key = (asked.seed, asked.iteration)
        return tuple(
            key_hash(*key, draw, *purpose, node % nodes)
            for draw in draws
            for node in range(plan.group)
        )

    return EngineRequest(
        version="",
        prompts=tuple(prompts.prompts[row] for row in rows),
        arguments=tuple(plain_arguments(prompts.extras[row]) for row in rows)
        if prompts.extras
        else (),
        call=dict(owner.call),
        guidance=owner.guidance.sample,
        group=plan.group,
        shape=tuple(asked.latents.shape),
        steps=steps,
        trained=tuple(k for k, step in enumerate(plan.steps) if step.train),
        seeds=seeds("root", nodes=roots),
        step_seeds=tuple(
            seeds("step", index, k) if step.std else () for k, step in enumerate(steps)
        ),
    )


def plain_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a prompt that a request can carry. UserError for images and other objects."""
    for name, value in row.items():
        if not isinstance(value, str | int | float | bool | None):
            raise UserError(
                f"model.engine: the column {name} of the prompts is a {type(value).__name__}, but "
                "engines get texts and numbers alone: leave model.engine out, or leave the column "
                "out (prompts.train.keep)"
            )
    return dict(row)
