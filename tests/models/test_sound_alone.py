"""Pipelines of sound alone: driven by their own calls, whole samples compared as waveforms."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.schedulers.scheduling_utils import SchedulerOutput

from flowrl.errors import UserError
from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.diffusers.call.results.decoder import Decoded, rate_alone
from flowrl.models.diffusers.call.results.made import made_kind
from flowrl.models.diffusers.call.traits.verdicts import refused_because
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from flowrl.recipes import RECIPES
from flowrl.run.evaluate.start_checks import made_form
from samplers import Chain, ConstantSDE
from tests.models.test_modular_densities import exact, log_density
from tests.support.advice import advice
from tests.support.driving import PROMPTS
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.pipelines import tiny
from tests.support.zoo.sounds import INPUTS, SOUND_SPECIALS

torch.set_num_threads(1)
STEPS = 3


def sounding(name: str, **more: Any) -> PipelinePolicy:
    made = tiny(getattr(diffusers, name), SPECIALS | SOUND_SPECIALS, SIZES)
    return PipelinePolicy(made.pipe, call={**made.call, **more})


# of each class: (channels, numbers) of its waveforms, guidance scales, and
# whether flowrl's Euler steps are the scheduler's own
EXACT = {
    "StableAudioPipeline": ((2, 100), (4.5, 1.0), False),
    "StableAudio3Pipeline": ((2, 100), (4.5, 1.0), True),
    "LongCatAudioDiTPipeline": ((1, 80), (4.5, 1.0), True),
    "AceStepPipeline": ((2, 104), (1.0,), True),
    "AudioLDM2Pipeline": ((1, 64), (4.5, 1.0), True),
    "AudioLDMPipeline": ((1, 64), (4.5, 1.0), True),
    "StableAudio3InpaintPipeline": ((2, 100), (None,), True),
    "StableAudio3AudioToAudioPipeline": ((2, 100), (None,), True),
}


@pytest.mark.quick_cases("StableAudioPipeline")
@pytest.mark.parametrize("name", EXACT)
def test_whole_sounds_are_the_pipelines_own(name: str) -> None:
    """Latents and waveforms of the pipeline's own call, at full scale 1, within the bound."""
    shape, scales, own_steps = EXACT[name]
    more = INPUTS.get(name, {})
    exact = next((call for call, _ in more.values()), {}) if None in scales else {}
    made = sounding(name, **exact)
    for scale in scales:
        proof = made.prove(PROMPTS, steps=STEPS, guidance=scale)
        assert proof.sound and not proof.video and proof.own_steps == own_steps
        whole = prove_whole(made, PROMPTS, (), proof)
        assert whole.failure() is None and whole.unshown is None
        assert whole.own is not None and whole.own.media < 1e-5 < whole.flowrl.media + own_steps
    assert made_form(made).kind == "sound"
    rows = made.encode(PROMPTS)
    x = torch.randn(2, *made.shape(STEPS), generator=torch.Generator().manual_seed(0))
    heard = made.decoded(x, rows, steps=STEPS, guidance=scales[-1])
    assert heard.sound_alone and heard.audio is not None and heard.audio.rate == 800
    assert heard.media.shape == (2, *shape) and heard.media.std() > 1e-3


def test_guidance_with_a_memory_is_refused_by_its_name() -> None:
    """ACE-Step's loop averages over its earlier steps while it guides."""
    made = sounding("AceStepPipeline")
    with pytest.raises(UserError, match=r"averages over earlier steps \(MomentumBuffer\)"):
        made.prove(PROMPTS, steps=STEPS, guidance=4.5)
    assert made.scale("none") == 1.0


def test_the_levels_of_edm() -> None:
    """Ratios s / alpha of its scheduler, whose own function maps other levels to times."""
    made = sounding("StableAudioPipeline")
    schedule, scheduler = made.schedule(STEPS), made.loop.driver.scheduler
    ratios = scheduler.sigmas.double()
    torch.testing.assert_close(
        torch.tensor(schedule.sigmas, dtype=torch.float64), ratios / (1 + ratios)
    )
    assert schedule.preserving and schedule.sigmas[-1] == 0
    between = torch.tensor([0.5])  # as much noise as data
    assert schedule.times(between).item() == pytest.approx(0.25 * math.log(1.0), abs=1e-6)
    assert torch.equal(schedule.times(torch.tensor(schedule.sigmas[:1])), schedule.timesteps[:1])


def test_another_formulation_of_edm_is_refused() -> None:
    """Data of another size, or another prediction, would be read wrongly."""
    made = tiny(diffusers.StableAudioPipeline, SPECIALS | SOUND_SPECIALS, SIZES)
    config = made.pipe.scheduler.config
    for other in ({"sigma_data": 0.5}, {"prediction_type": "epsilon"}):
        made.pipe.scheduler = type(made.pipe.scheduler).from_config(config, **other)
        with pytest.raises(UserError, match="does not determine the model's process"):
            PipelinePolicy(made.pipe, call=made.call)


def test_a_batch_of_sounds_has_ratio_one_and_rows_of_their_own() -> None:
    made = sounding("StableAudioPipeline").guided(1.0, 1.0)
    batch = MediaBatch(made, made.encode(PROMPTS), STEPS)
    chain = Chain(ConstantSDE(0.3), 2)
    (rollout,) = batch.rollouts(chain, [4, 7], seed=1, iteration=0)
    heard = batch.media(rollout)
    assert isinstance(heard, Decoded) and heard.sound_alone and len(heard.media) == 4
    statistics = batch.statistics(rollout, heard.media)
    assert {"sound/level", "sound/diversity"} < statistics.means.keys()
    alone = MediaBatch(made, made.encode(PROMPTS[1:]), STEPS)
    (other,) = alone.rollouts(chain, [7], seed=1, iteration=0)
    torch.testing.assert_close(other.x0, rollout.x0[2:], rtol=1e-4, atol=1e-5)
    made.sizes.sampling = made.sizes.decoding = 3
    (again,) = batch.rollouts(chain, [4, 7], seed=1, iteration=0)
    cut = batch.media(again)
    assert isinstance(cut, Decoded) and cut.sound_alone
    torch.testing.assert_close(cut.media, heard.media, rtol=1e-3, atol=1e-5)


def test_what_a_class_makes_is_read_of_its_code() -> None:
    kinds = {name: made_kind(getattr(diffusers, name)) for name in (*EXACT, "MusicLDMPipeline")}
    assert set(kinds.values()) == {"sound"}
    assert made_kind(diffusers.FluxPipeline) == "image"
    assert made_kind(diffusers.WanPipeline) == made_kind(diffusers.LTX2Pipeline) == "video"
    assert refused_because("MusicLDMPipeline") is not None
    assert all(refused_because(name) is None for name in EXACT)


def test_a_rate_that_no_configuration_has_is_added_to_one(tmp_path: Path) -> None:
    """Also to one whose class has no such entry: diffusers keeps it."""
    pipe = tiny(diffusers.AudioLDM2Pipeline, SPECIALS | SOUND_SPECIALS, SIZES).pipe
    pipe.vocoder = None  # those of transformers always have a rate
    pipe.vae.save_pretrained(tmp_path)
    file = tmp_path / "config.json"

    def added() -> int | None:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"sampling_rate": 800}))
        pipe.vae = type(pipe.vae).from_pretrained(tmp_path)
        return rate_alone(pipe)

    rate = advice(
        "makes sound, but no configuration of its components has its rate: add {} (Hz) to the "
        "one of its decoder or vocoder",
        lambda: rate_alone(pipe),
        added,
    )
    assert rate == 800


class Seeded(diffusers.EDMDPMSolverMultistepScheduler):
    """Draws the noise of its steps by its generator's first seed alone, as a Brownian tree does
    (CosineDPMSolverMultistepScheduler, whose package is not installed)."""

    def step(self, model_output, timestep, sample, generator=None, return_dict=True):
        after = super().step(model_output, timestep, sample, return_dict=False)[0]
        draws = torch.Generator().manual_seed(generator.initial_seed() + self.step_index)
        level = self.sigmas[self.step_index]
        noise = 0.3 * level**2 * torch.randn(after.shape, generator=draws)
        return (after + noise,) if not return_dict else SchedulerOutput(prev_sample=after + noise)


def test_noise_that_a_seed_alone_decides_is_seen() -> None:
    """Repeated with the same seed its steps are equal, and they draw noise all the same."""
    made = tiny(diffusers.StableAudioPipeline, SPECIALS | SOUND_SPECIALS, SIZES)
    made.pipe.scheduler = Seeded.from_config(made.pipe.scheduler.config)
    policy = PipelinePolicy(made.pipe, call=made.call)
    proof = policy.prove(PROMPTS, steps=STEPS, guidance=1.0)
    assert proof.noisy and proof.reading is not None and proof.reading < 1e-5
    assert "draws noise in its steps" in str(proof)


def test_densities_are_those_of_a_plain_loop() -> None:
    """In float64, from the network's own calls and the formulas of EDM and Flow-GRPO."""
    made = sounding("StableAudioPipeline")
    network: Any = copy.deepcopy(made.pipe.transformer).double()
    calls: list[tuple[Any, Any]] = []
    hook = made.pipe.transformer.register_forward_pre_hook(
        lambda _, args, given: calls.append((args[1], copy.deepcopy(given))), with_kwargs=True
    )
    made.pipe(
        PROMPTS[:1], num_inference_steps=STEPS, guidance_scale=1.0, output_type="pt", **made.call
    )
    hook.remove()
    algorithm = RECIPES["flow_grpo"](steps=STEPS, group=2)
    made = made.guided(1.0, 1.0)
    batch = MediaBatch(made, made.encode(PROMPTS[:1]), STEPS)
    (rollout,) = batch.rollouts(algorithm.plan, [0], seed=0, iteration=0)
    assert rollout.edges
    for edge in rollout.edges:
        step = rollout.plan.steps[edge.step]
        (time, given), s = calls[edge.step], step.sigma
        size = math.hypot(s, 1 - s)
        alpha, spread = (1 - s) / size, s / size
        arguments = {key: exact(value) for key, value in given.items()}
        arguments["rotary_embedding"] = tuple(map(exact, given["rotary_embedding"]))
        for row, logp in enumerate(edge.logp):
            x, after = (states[row : row + 1].double() for states in (edge.x, edge.x_next))
            with torch.no_grad():
                predicted = network(x / size, time.double(), **arguments)[0]
            clean = alpha * x / size - spread * predicted
            noise = spread * x / size + alpha * predicted
            want = log_density(x, noise - clean, after, s, step.sigma_next, 0.7)
            assert float(logp) == pytest.approx(float(want), abs=1e-4)
