"""Pipelines of sound alone: driven by their own calls, whole samples compared as waveforms."""

from typing import Any

import diffusers
import pytest
import torch

from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from flowrl.run.evaluate.start_checks import made_form
from tests.support.driving import PROMPTS
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.pipelines import tiny
from tests.support.zoo.sounds import SOUND_SPECIALS

torch.set_num_threads(1)
STEPS = 3


def sounding(name: str, **more: Any) -> PipelinePolicy:
    made = tiny(getattr(diffusers, name), SPECIALS | SOUND_SPECIALS, SIZES)
    return PipelinePolicy(made.pipe, call={**made.call, **more})


# a class of each way to make sound: (channels, numbers) of its waveforms, guidance scales, and
# whether flowrl's Euler steps are the scheduler's own
EXACT = {
    "StableAudioPipeline": ((2, 100), (4.5, 1.0), False),
    "StableAudio3Pipeline": ((2, 100), (4.5, 1.0), True),
    "LongCatAudioDiTPipeline": ((1, 80), (4.5, 1.0), True),
}


@pytest.mark.quick_cases("StableAudioPipeline")
@pytest.mark.parametrize("name", EXACT)
def test_whole_sounds_are_the_pipelines_own(name: str) -> None:
    """Latents and waveforms of the pipeline's own call, at full scale 1, within the bound."""
    shape, scales, own_steps = EXACT[name]
    made = sounding(name)
    for scale in scales:
        proof = made.prove(PROMPTS, steps=STEPS, guidance=scale)
        assert proof.sound and not proof.video and proof.own_steps == own_steps
        whole = prove_whole(made, PROMPTS, (), proof)
        assert whole.failure() is None and whole.unshown is None
        assert whole.own is not None and whole.own.media < 1e-5 < whole.flowrl.media + own_steps
    assert made_form(made).kind == "sound"
    rows = made.encode(PROMPTS)
    x = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(0))
    heard = made.decoded(x, rows, steps=STEPS, guidance=1.0)
    assert heard.sound_alone and heard.audio is not None and heard.audio.rate == 800
    assert heard.media.shape == (2, *shape) and heard.media.std() > 1e-3
