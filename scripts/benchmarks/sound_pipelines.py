"""Find out which of the installed diffusers' pipelines of sound alone load as policies.

    python scripts/benchmarks/sound_pipelines.py                 all; writes their verdicts, and
                                                                 their tables in docs/pipelines.md
    python scripts/benchmarks/sound_pipelines.py --only LongCat  classes whose name has it; prints

A class is tried with each of its inputs, as `pipelines.py` tries those of images and videos: tiny
random parts (`tests/support/zoo/sounds.py`), its own call replayed, and whole samples compared, as
waveforms whose full scale is 1. About 2 minutes of one core.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import diffusers  # noqa: E402
import pipelines as classic  # noqa: E402

from flowrl.errors import UserError  # noqa: E402
from flowrl.models.diffusers.call.traits.verdicts import (  # noqa: E402
    VERDICTS_FILE,
    swept_verdicts,
)
from flowrl.models.diffusers.policy import PipelinePolicy  # noqa: E402
from tests.support.zoo.calls import SIZES, SPECIALS  # noqa: E402
from tests.support.zoo.pipelines import tiny  # noqa: E402
from tests.support.zoo.sounds import INPUTS, SOUND_SPECIALS  # noqa: E402

# by class, or class and inputs: what was read in their code, and holds whatever the parts
READ = {
    "MusicLDMPipeline": classic.OWN + "it takes the record of its text encoder's features for a "
    "tensor",
    "StableAudioPipeline | prompt, initial_audio_waveforms": "adds the encoded sound to the noise "
    "that it begins with, so its first state is no noise of the scheduler's first level",
}


class Case(NamedTuple):
    """A class with one of its inputs: `more` arguments of its call, and the scale of guidance."""

    name: str
    inputs: str
    more: Mapping[str, Any]
    guided: bool

    @property
    def key(self) -> str:
        return f"{self.name} | {self.inputs}"


def cases() -> Iterator[Case]:
    """The exported pipelines of sound alone, with the inputs that a table has, or a prompt."""
    for name, _ in classic.classes("sound"):
        for inputs, (more, guided) in INPUTS.get(name, {"prompt": ({}, True)}).items():
            yield Case(name, inputs, more, guided)


def judged(case: Case) -> tuple[str, str]:
    """(verdict, note) of a case."""
    for read in (case.name, case.key):
        if read in READ:
            return "refused", READ[read]
    made = tiny(getattr(diffusers, case.name), SPECIALS | SOUND_SPECIALS, SIZES)
    try:
        policy = PipelinePolicy(made.pipe, call={**made.call, **case.more})
        unguided = policy.loop.guidance is None
        scales = (None,) if unguided else (4.5, 1.0) if case.guided else (1.0,)
        proof, whole = classic.proved_by_its_sampler(policy, scales)
    except UserError as error:
        return "refused", " ".join(str(error).removeprefix(case.name).lstrip(": ").split())
    assert classic.follows_prompts(policy, proof), f"{case.key}: its tiny parts ignore the prompt"
    rows = "together" if proof.mixed else "one level"
    row = "one prompt a call" if policy.loop.traits.single else rows
    return "exact", (
        f"{proof.way} | {proof.kind} | {row} | {proof.scheduler} | {classic.stands_in(proof)} | "
        f"{classic.farthest([w.own for w in whole])} | "
        f"{classic.farthest([w.flowrl for w in whole])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the classes' names")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    for case in cases():
        if any(part in case.name for part in given.only):
            verdict, note = judged(case)
            found[case.key] = f"{verdict} | {note}"
            print(f"{verdict:8} {case.key}: {note[:400]}", flush=True)
    if given.only == [""]:
        every = json.loads(VERDICTS_FILE.read_text())
        every[diffusers.__version__]["sound"] = found
        VERDICTS_FILE.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n")
        swept_verdicts.cache_clear()
        classic.write_sound_section()


if __name__ == "__main__":
    main()
