"""Find out which of the installed diffusers' modular pipelines load as policies, and why not.

    python scripts/benchmarks/modular_pipelines.py                all; writes the verdicts that
                                                                  docs/pipelines.md and `flowrl
                                                                  plan` read
    python scripts/benchmarks/modular_pipelines.py --only Flux    classes whose name has it; prints

A class with a classic form is made of that form's tiny parts (`pipelines.py`). Its own call is
replayed and whole samples are compared, as for classic pipelines.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "benchmarks")]

import diffusers  # noqa: E402
import pipelines as classic  # noqa: E402

from flowrl.errors import UserError  # noqa: E402
from flowrl.models.diffusers.call.traits.checks import IN_STAGES  # noqa: E402
from flowrl.models.diffusers.modular.verdicts import (  # noqa: E402
    MODULAR_VERDICTS_FILE,
    modular_classes,
    modular_verdicts,
)
from flowrl.models.diffusers.policy import PipelinePolicy  # noqa: E402
from tests.support.flex_on_cpu import flex_on_cpu  # noqa: E402
from tests.support.tiny_modular import MODULAR, MODULAR_CALLS, SIBLINGS, of_classic  # noqa: E402
from tests.support.zoo.pipelines import Unbuilt  # noqa: E402

# what was read in their code, and no tiny parts can show
READ = {
    "HeliosPyramidModularPipeline": IN_STAGES,
    "HeliosPyramidDistilledModularPipeline": IN_STAGES,
    "MiniMaxMusic3ModularPipeline": "a language model samples the song's frames, and with them its "
    "length, in each call; windows of 8 s then begin inside the loop, and are blended with the "
    "window before between steps, which no step of a scheduler shows",
}


def built(name: str) -> tuple[Any, dict[str, Any]]:
    """A tiny modular pipeline, and arguments of its call."""
    for key, make in MODULAR.items():
        pipe = make()
        if type(pipe).__name__ == name:
            return pipe, MODULAR_CALLS[key]
    if name not in SIBLINGS:
        raise Unbuilt("no tiny parts")
    return of_classic(name, *classic.made(getattr(diffusers, SIBLINGS[name])))


def trial(name: str, kind: type) -> classic.Result:
    with flex_on_cpu():
        return _trial(name, kind)


def _trial(name: str, kind: type) -> classic.Result:
    del kind
    try:
        pipe, call = built(name)
        policy = PipelinePolicy(pipe, call=call)
        proof, whole = classic.proved_by_its_sampler(policy)
    except UserError as error:
        if error.__cause__ is not None:  # its own call fails: these parts may not suit it
            return classic.Result(name, "untried", str(error.__cause__) or str(error))
        return classic.Result(name, "refused", str(error).removeprefix(name).lstrip(": "))
    except Unbuilt as error:
        return classic.Result(name, "untried", str(error))
    rows = "together" if proof.mixed else "one level"
    row = "one prompt a call" if policy.loop.traits.single else rows
    media = " and ".join(policy.loop.traits.required) or "-"
    return classic.Result(
        name,
        "exact",
        f"{proof.way} | {proof.kind} | {row} | {media} | {proof.guider or '-'} | {proof.scheduler}"
        f" | {classic.stands_in(proof)} | {classic.farthest([w.own for w in whole])}"
        f" | {classic.farthest([w.flowrl for w in whole])}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the classes' names")
    given = parser.parse_args()
    torch.set_num_threads(1)
    vars(classic)["trial"] = trial  # what its processes run
    classic._NAMED.extend((f.build(), f.call) for f in classic.NAMED.values())
    found: dict[str, dict[str, str]] = {"exact": {}, "refused": {}, "untried": {}}
    for name in modular_classes():
        if not any(part in name for part in given.only):
            continue
        if name in READ:
            result = classic.Result(name, "refused", READ[name])
        else:
            result = classic.tried(name, type(None))
        verdict = "untried" if result.verdict == "not built" else result.verdict
        found[verdict][name] = " ".join(result.note.split())[:300]
        print(f"{verdict:10} {name}: {result.note[:400]}", flush=True)
    if given.only == [""]:
        every = (
            json.loads(MODULAR_VERDICTS_FILE.read_text()) if MODULAR_VERDICTS_FILE.is_file() else {}
        )
        every[diffusers.__version__] = found
        MODULAR_VERDICTS_FILE.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n")
        modular_verdicts.cache_clear()
        before = classic.PAGE.read_text().partition(f"\n{classic.MODULAR_TITLE}\n")[0]
        classic.PAGE.write_text("\n".join([before.rstrip(), "", *classic.modular_section()]) + "\n")


if __name__ == "__main__":
    main()
