"""Does training change the sound of a video, and sound alone? Tones are trained to be higher.

    python scripts/benchmarks/sound_runs.py --out runs/sound
    python scripts/benchmarks/sound_runs.py --out runs/alone --alone StableAudioPipeline

The pipeline is diffusers' LTX2Pipeline of random weights: 9 frames of 64 x 64 pixels, a third of
a second of sound. Its vocoder is LTX-2's class with weights set by hand: a bank of sines, one per
mel bin, at 200, 400, ... 3200 Hz, so that a sound is the chord that its spectrogram says. The
reward is the centroid of the sound's power spectrum in kHz; it trains the sound alone, by
`recipe.modalities`. Loudness and the video's brightness are watched and trained by nothing. One
run per seed of training. Prints a table over seeds; the folders have pages, sounds and
spectrograms.

With `--alone` the pipeline is a tiny one of sound alone, of random weights: some 0.1 s at 800 Hz.
The reward is the centroid too, by LoRA of rank 8 and flow_grpo, and loudness is watched. A random
network's predictions may be far smaller than a flow's velocity, whose spread is 1.4 (LongCat's
have 0.12): then samples are noise that no adapter of it moves. `--spread 1` scales its last layer.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
import tyro
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from experiment import GAIN_HEAD, Ends, ends, gain_row, with_seeds
from torch import Tensor, nn

import flowrl
from rewards import Samples
from tests.support.zoo.calls import SIZES, SPECIALS, Special
from tests.support.zoo.calls_videos import VIDEO_SPECIALS
from tests.support.zoo.pipelines import tiny
from tests.support.zoo.sounds import SOUND_SPECIALS

QUIET = {
    "audio_guidance_scale": 1.0, "stg_scale": 0.0, "audio_stg_scale": 0.0, "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
}  # fmt: skip
THINGS = ("a red cube", "two blue cats", "a door that shuts", "rain on a roof", "a slow train")
HELD_OUT = [f"{thing} at night" for thing in THINGS]
WATCHED = ("pitch", "loudness", "brightness")
HEARD = WATCHED[:2]  # of sound alone
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d)
BINS, HOP, RATE, LEVEL = 16, 240, 24_000, 0.05


@dataclass
class Arguments:
    out: Path = Path("runs/sound")
    seeds: tuple[int, ...] = (0, 1, 2)
    iterations: int = 24
    lr: float = 5e-3
    alone: Literal["", "StableAudioPipeline", "StableAudio3Pipeline", "LongCatAudioDiTPipeline"] = (
        ""
    )
    spread: float | None = None
    """Of the network's predictions in its first call, with `alone`; None: as its weights are."""


def vocoder(_: Any) -> LTX2Vocoder:
    """A bank of sines: channel c, bin b of a mel frame is the level of 200 (b + 1) Hz in ear c.

    A frame lasts 240 samples, a whole number of periods, and frames overlap by a Hann window. The
    last activation halves what is negative, so each ear has a second channel of the other sign.
    """
    made = LTX2Vocoder(
        in_channels=2 * BINS, hidden_channels=2 * BINS, upsample_factors=[HOP],
        upsample_kernel_sizes=[2 * HOP], resnet_kernel_sizes=[3], resnet_dilations=[[1]],
    )  # fmt: skip
    for parameter in made.parameters():
        parameter.data.zero_()
    hertz = 200.0 * torch.arange(1, BINS + 1)
    time_ = torch.arange(2 * HOP) / RATE
    sines = torch.hann_window(2 * HOP) * torch.sin(2 * torch.pi * hertz[:, None] * time_)
    (up,) = made.upsamplers
    assert isinstance(up, nn.ConvTranspose1d)
    made.conv_in.weight.data[:, :, 3] = torch.eye(2 * BINS)
    for ear in (0, 1):
        for place, sign in ((ear, 1), (2 + ear, -1)):
            up.weight.data[ear * BINS : (ear + 1) * BINS, place] = sign * sines
            made.conv_out.weight.data[ear, place, 3] = sign * LEVEL
    return made


def pitch(samples: Samples) -> Tensor:
    """The centroid of the power spectrum [n], in kHz."""
    audio = samples.audio
    assert audio is not None
    power = torch.fft.rfft(audio.mono).abs().square()
    hertz = torch.fft.rfftfreq(audio.waveform.shape[-1], 1 / audio.rate)
    return (power * hertz.to(power)).sum(1) / power.sum(1).clamp(min=1e-12) / 1000


@contextmanager
def spread(module: nn.Module) -> Iterator[None]:
    """Scale each convolution, in the first call, to outputs of mean 0 and spread 1."""

    def scaled(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
        middle, size = output.mean(), output.std()
        for name, parameter in layer.named_parameters(recurse=False):
            parameter.data.sub_(middle if name == "bias" else 0).div_(size)
        return (output - middle) / size

    layers = [each for each in module.modules() if isinstance(each, CONVOLUTIONS)]
    hooks = [each.register_forward_hook(scaled) for each in layers]
    yield
    for hook in hooks:
        hook.remove()


def sounding() -> tuple[Any, dict[str, Any]]:
    """The pipeline, and the arguments of its call."""
    own = {"LTX2Pipeline": Special({"vocoder": vocoder}, {"num_frames": 9})}
    made = tiny(diffusers.LTX2Pipeline, SPECIALS | VIDEO_SPECIALS | own, SIZES)
    made.pipe.set_progress_bar_config(disable=True)
    call = {**made.call, **QUIET}
    with torch.no_grad(), spread(made.pipe.audio_vae.decoder):
        made.pipe(
            prompt=list(THINGS), num_inference_steps=1, guidance_scale=1.0,
            generator=torch.Generator().manual_seed(0), **call,
        )  # fmt: skip
    return made.pipe, call


def trained(seed: int, given: Arguments) -> dict[str, Ends]:
    """Held-out scores before and after one run."""
    pipe, call = sounding()
    size = {name: call.pop(name) for name in ("height", "width")}
    settings = {
        "model": {"call": call, "guidance": {"sample": 1.0, "train": 1.0}, **size},
        "prompts": {"per_iteration": 2},
        "train": {"seed": seed, "updates": 2},
        "evaluate": {"every": given.iterations, "samples": 20, "steps": 6, "guidance": 1.0},
        "track": {"panel": False, "training": 0},
    }  # fmt: skip
    recipe = flowrl.recipe("nft", steps=6, group=8, modalities={"audio": ["pitch"]})
    run = flowrl.train(
        pipe, rewards=[pitch], held_out_rewards=[pitch, "loudness", "brightness"],
        prompts=list(THINGS), held_out=HELD_OUT, recipe=recipe, lora=False,
        iterations=given.iterations, lr=given.lr,
        settings=settings, folder=given.out / f"seed{seed}",
    )  # fmt: skip
    return {name: ends(run.metrics, f"held_out/{name}") for name in WATCHED}


def predicting(pipe: Any, call: Mapping[str, Any], spread: float) -> None:
    """Scale the last layer of a pipeline's network to predictions of this spread, in a first
    call."""
    layer, sizes = pipe.transformer.proj_out, list[float]()
    hook = layer.register_forward_hook(lambda *seen: sizes.append(float(seen[2].std())))
    pipe(
        prompt=list(THINGS), num_inference_steps=1, guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0), **call,
    )  # fmt: skip
    hook.remove()
    for parameter in layer.parameters():
        parameter.data.mul_(spread / sizes[0])


def trained_alone(seed: int, given: Arguments) -> dict[str, Ends]:
    """The same of a pipeline of sound alone."""
    made = tiny(getattr(diffusers, given.alone), SPECIALS | SOUND_SPECIALS, SIZES)
    if given.spread is not None:
        predicting(made.pipe, made.call, given.spread)
    settings = {
        "model": {"call": made.call, "guidance": {"sample": 1.0, "train": 1.0}},
        "prompts": {"per_iteration": 4},
        "train": {"seed": seed, "updates": 2},
        "evaluate": {"every": given.iterations, "samples": 40, "steps": 6, "guidance": 1.0},
        "track": {"panel": False, "training": 0},
    }  # fmt: skip
    run = flowrl.train(
        made.pipe, rewards=[pitch], held_out_rewards=[pitch, "loudness"], prompts=list(THINGS),
        held_out=HELD_OUT, recipe=flowrl.recipe("flow_grpo", steps=6, group=8), lora=8,
        iterations=given.iterations, lr=given.lr, settings=settings,
        folder=given.out / f"{given.alone}-seed{seed}",
    )  # fmt: skip
    return {name: ends(run.metrics, f"held_out/{name}") for name in HEARD}


def main(given: Arguments) -> None:
    torch.set_num_threads(1)
    run = trained_alone if given.alone else trained
    found = with_seeds(given.seeds, lambda seed: run(seed, given))
    print(GAIN_HEAD)
    for name in HEARD if given.alone else WATCHED:
        print(gain_row(name, [each[name] for each in found]))


if __name__ == "__main__":
    main(tyro.cli(Arguments))
