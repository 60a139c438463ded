"""Find out which of the installed diffusers' pipelines load as policies, and why others do not.

    python scripts/benchmarks/pipelines.py                   all; writes docs/pipelines.md, and the
                                                             verdicts that `flowrl plan` reads
    python scripts/benchmarks/pipelines.py --only Flux SAG   classes whose name has one; prints
    python scripts/benchmarks/pipelines.py --kept FILE       keeps each result there, and goes on
                                                             where it was cut off

A class is built from tiny random parts of the classes that its constructor asks for (the tests'
named families, else `tests/support/zoo/pipelines.py`). Then it is loaded as a policy, its own call
is replayed, and whole samples are compared, in a process of its own with a time limit. What cannot
be built is listed separately: nothing is claimed of it. About 20 minutes of one core.
"""

import argparse
import inspect
import json
import multiprocessing
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import diffusers  # noqa: E402
import transformers  # noqa: E402
from diffusers.pipelines.pipeline_utils import DiffusionPipeline  # noqa: E402

from flowrl.errors import UserError  # noqa: E402
from flowrl.models.diffusers.call.results.made import made_kind  # noqa: E402
from flowrl.models.diffusers.call.traits import checks  # noqa: E402
from flowrl.models.diffusers.call.traits.verdicts import VERDICTS_FILE as VERDICTS  # noqa: E402
from flowrl.models.diffusers.call.traits.verdicts import swept_verdicts  # noqa: E402
from flowrl.models.diffusers.modular.face import listed_levels  # noqa: E402
from flowrl.models.diffusers.modular.verdicts import (  # noqa: E402
    modular_classes,
    modular_verdicts,
)
from flowrl.models.diffusers.policy import PipelinePolicy  # noqa: E402
from flowrl.models.diffusers.replay.replay import Replay  # noqa: E402
from flowrl.models.diffusers.whole.whole_proof import (  # noqa: E402
    Deviation,
    WholeProof,
    prove_whole,
)
from rewards.types import Kind  # noqa: E402
from tests.support.flex_on_cpu import flex_on_cpu  # noqa: E402
from tests.support.tiny_pipelines import NAMED  # noqa: E402
from tests.support.zoo.calls import SIZES, SPECIALS  # noqa: E402
from tests.support.zoo.calls_videos import VIDEO_SPECIALS  # noqa: E402
from tests.support.zoo.pipelines import Unbuilt, tiny  # noqa: E402

PAGE = ROOT / "docs" / "pipelines.md"
STEPS, FEWER = 4, 3
LIMIT = 600.0  # seconds a class: a busy machine takes several times as long as an idle one
PROMPTS = ["a red cube", "two blue cat on the table", "two blue cat"]
OUTSIDE = re.compile(r"Speech|Proteina|Upscale|Upsampl|Inverse|Marigold|ShapE|ONNX|Onnx")
OWN = "its own call fails with these versions, whatever its parts: "
EDITS = "edits an image by latents or embeddings that are made of it before: no prompt to image"
# what was read in their code, holds whatever the parts, and no tiny ones can show
KNOWN = {
    "BlipDiffusionPipeline": OWN + "its Blip2QFormerModel has no invert_attention_mask",
    "BlipDiffusionControlNetPipeline": OWN + "its Blip2QFormerModel has no invert_attention_mask",
    "ChromaInpaintPipeline": OWN + "its transformer's configuration has no guidance_embeds",
    "EasyAnimateControlPipeline": OWN + "its encode_prompt takes no text_encoder_index",
    "EasyAnimateInpaintPipeline": OWN + "it calls torch.tensor with two arguments",
    "HunyuanDiTPAGPipeline": "exact at guidance 4.5; without guidance its own call fails, whatever "
    "its parts: it has three styles for two copies of a prompt",
    "QwenImageLayeredPipeline": "wants images with transparency; columns are read without",
    "StableDiffusionDiffEditPipeline": EDITS,
    "StableDiffusionLDM3DPipeline": "its images come with depths, and not as tensors",
    "StableDiffusionPix2PixZeroPipeline": EDITS,
    "VQDiffusionPipeline": "steps words of a codebook, which have no velocity",
}


CLAIMS = (
    "Exact means, in float32 on a CPU with tiny random weights, at guidance 4.5 (if there is any) "
    "and 1, over 4 steps and 3: the first state equals the one of the pipeline's own call to "
    "rounding; what the scheduler's `step` receives and what is decoded differ by 0; rows do not "
    "depend on each other; a gradient comes through; two prompts lead to different predictions. "
    "All but the last is checked again when a run starts, with its own arguments and steps.",
    "",
    "Two claims follow, which are not the same, and both are compared over whole samples of three "
    "prompts in one batch (`flowrl prove` does so at a run's own settings). (a) The pipeline's own "
    "scheduler, stepped with flowrl's velocities from flowrl's first state, reproduces the "
    "pipeline's latents and images. (b) flowrl's own Euler steps do so too where the scheduler is "
    "Euler's or DDIM at eta 0, down to that scheduler's last level (DDIM with `set_alpha_to_one: "
    "false` ends at alpha_0, not at 0). With `plan: {kernel: scheduler}` (few-step models) "
    "flowrl's steps are those of the scheduler, with the same noise in both. Elsewhere they stand "
    "in for it, and the line of the proof names the scheduler. The columns (a) and (b) have the "
    "largest difference of an image's or a video's values in 0..1 over the four samples; where "
    "flowrl's steps stand in, (b) shows how far another solver leads in so few steps. A bound "
    "holds for what is claimed: 4 times what one unit of rounding in the first state does to the "
    "own call, which is measured, and at least 1e-4.",
    "",
    "Not covered: a scheduler that draws noise in its steps, where the pipeline takes no `latents` "
    "(else its draws are repeated, and (a) is compared); a rounded list of levels (DDIM, trailing, "
    "with a number of steps that does not divide 1000: the line says so); prompts that are padded "
    "to the longest of a batch without a mask (CogView4), so that a prompt's encoding depends on "
    "those encoded with it. A run encodes each batch once, so its ratios are exact all the same. "
    "Negative prompts are compared after guidance has combined them with the prompt's prediction, "
    "so what they alone get wrong shows multiplied by the scale less 1. That latents follow the "
    "shape of an image is found with one image in five shapes, square, wide and tall.",
    "",
    "Few-step models: LCM, TCD, FlowMatch with `stochastic_sampling` and SANA-Sprint predict the "
    "clean sample and put fresh noise on it, so an ODE in their place samples another "
    "distribution. Such a scheduler is found by its share of fresh noise, which does not shrink "
    "with the step, and refused unless the run has `recipe: {plan: {kernel: scheduler}}`. Then "
    "the numbers of each step are measured at the scheduler itself (boundary scalings, gamma and "
    "angles included), in training and evaluations. Policy gradients train from two steps (the "
    "last draws no noise, so it has no density), matching recipes from one.",
    "",
    "Inpainting with ordinary weights: where the loop puts the noised image back outside the mask "
    "after each step, flowrl's walk does so too, and densities, divergences and matching errors "
    "are means over the free entries. The tests compare the 4-channel "
    "StableDiffusionInpaintPipeline and StableDiffusionXLInpaintPipeline and the 16-channel "
    "StableDiffusion3InpaintPipeline besides those of the table, at strengths 1 and 0.75. Masks "
    "need hard edges on the grid of the latents.",
    "",
    "Videos with sound (LTX-2): a loop that steps several states after one evaluation is driven "
    "as one state of their parts, and (a), (b) and the media's column cover the sound. Its own "
    "guidance (of text for each part, perturbed blocks, parts that do not see each other) is on. "
    "Loops that read their scheduler's list of levels get the level pinned beside the time. The "
    "tests also drive the class with the parts of LTX-2.3.",
    "",
    "Frames at levels of their own (SkyReels-V2's diffusion forcing, Helios, Framepack): a loop "
    "that steps "
    "frames, or chunks of frames, together, in a wave (`call: {ar_step: 5, causal_block_size: 5}`) "
    "or one after the other is driven as one state of these parts, which are found by marks in "
    "what prepare_latents returns. Their states pass the loop again for each velocity, so a part "
    "is given the parts before it as sampled, and a cache is filled from them. A plan has a step "
    "for each step of the loop: for chunks their number times `steps`. Kernels draw noise for the "
    "parts that move, and a density is the mean over these; the step that ends a part draws none. "
    "Recipes on densities of steps train such models, also trees. What needs one level for all of "
    "a state is refused with the reason: matching recipes, gradients of rewards, other solvers and "
    "levels (flash), kernels of one list of levels, scores of intermediate samples and steering. "
    "The table has Helios with one chunk and Framepack with one section; the tests have two of "
    "each, and a long video of SkyReels-V2, whose windows overlap. Where a part is made from the "
    "decoded parts before it (Wan-Animate 2), decoders run in each velocity.",
    "",
    "A column of videos (files, or lists of frames) sets the number of frames where no "
    "`num_frames` of `model.call` does: rows with videos of other lengths have loops and proofs of "
    "their own, as rows of other sizes have.",
    "",
    "Bria Fibo Edit takes its prompts as JSON: a plain one is handed on as the value of "
    "`edit_instruction`, and JSON as it is.",
    "",
    "Refused at load: pipelines whose latents follow the shape of the "
    "conditioning image, unless height and width are set; `denoising_end` and `denoising_start`. "
    "KolorsPipeline is not listed: it needs the package sentencepiece. Written by "
    "`scripts/benchmarks/pipelines.py`, with the verdicts by diffusers' version that `flowrl plan` "
    "and a start read (`flowrl/models/diffusers/call/traits/verdicts.json`).",
)
MODULAR_TITLE = "## Modular pipelines"
MODULAR_CLAIMS = (
    "A modular pipeline (`diffusers.modular_pipelines`, which is experimental) is a tree of "
    "blocks with declared inputs and outputs. flowrl gives it the face of a classic one, so the "
    "same driver proves and trains it: its arguments are what its blocks read before any block "
    "writes it, its encodings what its text blocks declare, its state the `latents` that enter "
    "the loop.",
    "A folder with `modular_model_index.json` alone is driven in its modular form, one with "
    "`model_index.json` in its classic form; `model.form: modular` drives the blocks of a "
    "classic folder too. The proof's line, `run.yaml` and the key of cached proofs hold the "
    "form. A guider is no part of a folder: `guidance` sets its scale, `model.guider: {name: "
    "AdaptiveProjectedGuidance, ...}` its class and settings, and a run's `run.yaml` records "
    "them for each guider.",
    "",
    "`guidance: none` switches all guiders off, with LTX-2's perturbed and isolated passes. A "
    "guider with a `start` or a `stop` is driven step by step (fast-forward), and `flowrl plan` "
    "and the proof's line count its passes so. Settings of the blocks' own class are laid over the "
    "blocks'; those of another class over that class's. Guiders that average over earlier steps "
    "(a momentum) or make the first velocities zero are refused, with the setting that helps: a "
    "step of theirs has no density, or no gradient. Ideogram 4 takes a scale for each step: "
    "`guidance` is the scale of all of them, and null its own list, which is for 48 steps.",
    "",
    "Blocks that a repository brings (`auto_map` in `modular_config.json`) are code, and "
    "components that an index names in another repository are read over the network: both are "
    "refused unless `model.rights` lists `code` or `network`. A component that the blocks need "
    "and the folder lacks is named before any weights load; `plan` loads none. Components in "
    "repositories are of one commit each, which is asked for once; every checkpoint records them, "
    "and a resume refuses others. Blocks that "
    "rewrite the prompt (the upsamplers of FLUX.3 and Ideogram 4, the enhancers of LTX-2 and "
    "ERNIE-Image) are left out: a prompt stands for itself. Text blocks encode with their "
    "guiders on, whatever the scale, since those of Wan and LTX fail without.",
    "",
    "MiniMax-H3 steps its video and its sound by two schedulers, at levels of their own in one "
    "step (shifts 12 and 3). Schedules that differ by a shift have levels whose odds s / (1 - s) "
    "differ by a factor, here 4, and a flow at such a level is, times a number of the level, the "
    "flow at the other one whose data is 4 times as large. So the sound is trained at the video's "
    "levels with its data times 4: Euler's steps are the same, densities differ by a constant, and "
    "a kernel's noise, in its share of the level, is as large for the sound as for the video. "
    "Losses on velocities weigh the sound's error 1 to 4 times as much as its own velocity's, the "
    "more the lower the level. Levels of two schedulers that no shift explains are refused. Its "
    "`steps` are its call's `num_inference_steps`, which count the last level too: 17 are 16 "
    "evaluations. It makes one sample a call, in packed tokens of the text, the sound and the "
    "video. Keyframes in columns of the prompts, which put tokens in front that no step changes, "
    "are refused; references, which are objects in Python, are not driven, and their network is "
    "not loaded.",
    "",
    "Wan-Animate 2 makes a video in segments of `segment_frame_length` frames, each from the last "
    "decoded frames of the one before. A driving video of one segment is driven as one state, a "
    "longer one as parts that are moved one after the other. Its network rests on FlexAttention, "
    "which has no gradient on a CPU: here the same mask stands for it, written out. Its latents "
    "follow the aspect of `image`, whose area alone height and width set.",
    "",
    "Cosmos 3 Distilled and Echo were distilled for a list of levels (`distilled_sigmas` of the "
    "index, the default of Echo's `sigmas`): `steps` is its length, or `model.sigmas` has others. "
    "Their steps draw fresh noise: set `recipe: {plan: {kernel: scheduler}}`. Echo has no "
    "scheduler: FlowMatchEulerDiscreteScheduler's steps with `stochastic_sampling` stand for its "
    "last block's, whose samples they equal to rounding (5e-6 of a value at most in the tests). "
    "An image that fixes its first frame is refused; images and sounds of its memory are objects "
    "in Python.",
    "",
    "Both forms of SD3, Qwen-Image, Wan 2.1, Wan 2.2, LTX-Video and FLUX.2 call the network and "
    "step alike to the bit, with guidance too. FLUX.1 differs by 5e-7, since its blocks pass "
    "one time for all rows, whose embedding is a product of another shape. SDXL differs by 1e-5 "
    "and Z-Image by 1e-6 with guidance: their classic calls put both halves of it into one "
    "batch. Z-Image's classic scale s is the modular scale s + 1.",
)
SOUND_TITLE = "## Pipelines of sound alone"
SOUND_CLAIMS = (
    "Exact means the same as above. What is compared are waveforms, whose full scale is 1: (a) and "
    "(b) have the largest difference of a number of theirs, and the same bound holds.",
    "Their rate is that of the decoder's or the vocoder's configuration. How long they are is an "
    "argument of the class (`audio_end_in_s`, `duration`, `audio_duration_s`, `audio_duration`, "
    "`audio_length_in_s`): set it in `model.call`, or as a column of the prompts. Stable Audio is "
    "tried with EDM's multistep solver. Its checkpoint has CosineDPMSolverMultistepScheduler, "
    "which wants the package torchsde and draws the noise of its steps from a tree; there (a) was "
    "2e-07, and flowrl's steps stand in for it. A given sound (`audio` of Stable Audio 3's "
    "inpainting and audio-to-audio, `src_audio` of ACE-Step's repainting, its `reference_audio`, "
    "whose timbre the song takes) is a WAV file, in a "
    "column of the prompts or in `model.call`, or a tensor from Python; a file is read at the "
    "model's rate and channels, and its encoding is one fixed sample of the posterior. Where a "
    "sound's length sets that of the latents (ACE-Step), rows with sounds of several lengths are "
    "served like rows of several sizes. Guided ACE-Step is "
    "refused: its loop guides with a momentum of -0.75, a constant of its code, so a step's "
    "velocity depends on all steps before it; a replay would evaluate the network at each of them.",
)
NOT_COMPARED = "- | -"  # the end of a row of a sweep without whole samples


@dataclass(frozen=True)
class Result:
    name: str
    verdict: str  # exact, refused, known, not built
    note: str


def classes(*kinds: Kind) -> Iterator[tuple[str, type]]:
    """Pipelines of prompts: the public ones that take a `prompt`, and make media of these kinds."""
    for name in sorted(dir(diffusers)):
        if "Pipeline" not in name or OUTSIDE.search(name):
            continue
        try:
            found = getattr(diffusers, name)
        except (ImportError, RuntimeError):
            continue  # wants a library that is not here
        if not (inspect.isclass(found) and issubclass(found, DiffusionPipeline)):
            continue
        if (
            found is not DiffusionPipeline
            and "prompt" in inspect.signature(found.__call__).parameters
            and made_kind(found) in kinds
        ):
            yield name, found


def made(kind: type) -> tuple[Any, Mapping[str, Any]]:
    """A tiny pipeline of the class, and arguments of its call."""
    for pipe, call in _NAMED:
        if type(pipe) is kind:
            return pipe, call
    built = tiny(kind, SPECIALS | VIDEO_SPECIALS, SIZES)
    return built.pipe, built.call


_NAMED: list[tuple[Any, Mapping[str, Any]]] = []


Scales = tuple[float | None, ...]


def proved(policy: PipelinePolicy, scales: Scales = ()) -> tuple[Replay, list[WholeProof]]:
    """The proof with guidance at most steps, and whole samples at all steps and scales: these, or
    4.5 and 1 if there is any guidance.

    A few take a scale and ignore it in so few steps: then they are tried at their own.
    """
    scales = scales or ((None,) if policy.loop.guidance is None else (4.5, 1.0))
    listed = listed_levels(policy.pipe)
    counts = (STEPS, FEWER) if listed is None else (len(listed),)
    try:
        replay = policy.prove(PROMPTS[:2], steps=counts[0], guidance=scales[0])
    except UserError as error:
        if "has no effect on" not in str(error):
            raise
        scales = (None, 1.0)
        replay = policy.prove(PROMPTS[:2], steps=counts[0], guidance=None)
    whole = []
    for steps in counts:
        for scale in scales:
            each = replay
            if (steps, scale) != (replay.steps, replay.guidance):
                each = policy.prove(
                    PROMPTS[:2], steps=steps, guidance=scale, complete=False, gradient=False
                )
            whole.append(prove_whole(policy, PROMPTS, (), each))
            if (failure := whole[-1].failure() or whole[-1].unshown) is not None:
                raise UserError(failure)
    return replay, whole


def proved_by_its_sampler(
    policy: PipelinePolicy, scales: Scales = ()
) -> tuple[Replay, list[WholeProof]]:
    """The same, with the steps of its own scheduler if no other ones sample its distribution."""
    try:
        return proved(policy, scales)
    except UserError as error:
        if "plan: {kernel: scheduler}" not in str(error):
            raise
    return proved(policy.with_own_steps(), scales)


def follows_prompts(policy: PipelinePolicy, proof: Replay) -> bool:
    """Whether two prompts lead to different predictions: else an exact replay shows little."""
    conditioning = policy.loop.encode(PROMPTS[:2], policy.loop.tried(()))
    start = policy.loop.start(STEPS)
    x = torch.randn(1, *start.shape, generator=torch.Generator().manual_seed(2))
    sigma = torch.full((2,), start.schedule.visits[1])
    with torch.no_grad():
        x = x.expand(2, *start.shape).contiguous()
        v = policy.loop.velocity(x, sigma, conditioning, proof.to_way).float()
    return float((v[0] - v[1]).abs().max()) > 1e-5 * float(v.abs().max())


def trial(name: str, kind: type) -> Result:
    with flex_on_cpu():
        return _trial(name, kind)


def _trial(name: str, kind: type) -> Result:
    try:
        if name in KNOWN:
            return Result(name, "known", KNOWN[name])
        checks.refuse_parts(name, inspect.signature(kind.__init__).parameters)
        checks.refuse_class(kind)
        pipe, call = made(kind)
        policy = PipelinePolicy(pipe, call=call)
        proof, whole = proved_by_its_sampler(policy)
    except UserError as error:
        if error.__cause__ is not None:  # its own call fails: these parts may not suit it
            return Result(name, "not built", str(error.__cause__) or str(error))
        return Result(name, "refused", str(error).removeprefix(name).lstrip(": "))
    except Unbuilt as error:
        return Result(name, "not built", str(error))
    if not follows_prompts(policy, proof):
        return Result(name, "not built", "exact, but its tiny parts ignore the prompt")
    rows = "together" if proof.mixed else "one level"
    row = "one prompt a call" if policy.loop.traits.single else rows
    media = " and ".join(policy.loop.traits.required) or "-"
    return Result(
        name,
        "exact",
        f"{proof.way} | {proof.kind} | {row} | {media} | {proof.scheduler} | {stands_in(proof)}"
        f" | {farthest([w.own for w in whole])} | {farthest([w.flowrl for w in whole])}",
    )


def stands_in(proof: Replay) -> str:
    """Relation of flowrl's Euler steps to the scheduler's, and what prompts share."""
    steps = "its own" if proof.own_steps else "stand in"
    steps = "stand in, it draws noise" if proof.noisy else steps
    steps = "its own, by kernel: scheduler" if proof.sampler else steps
    padding = "" if proof.padding is None else f"; pads without a mask ({proof.padding:.1%})"
    return steps + padding


def farthest(deviations: Sequence[Deviation | None]) -> str:
    """The largest difference of media of several whole samples; a dash where none was compared."""
    known = [each.media for each in deviations if each is not None]
    return f"{max(known):.1g}" if known else "-"


def _child(name: str, kind: type, pipe: Connection) -> None:
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  pipelines warn at length
    try:
        pipe.send(trial(name, kind))
    except checks.FAILURES as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno}"
        pipe.send(Result(name, "not built", f"{type(error).__name__}: {error} ({where})"))


def tried(name: str, kind: type) -> Result:
    """In a process of its own, which ends at the limit."""
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(name, kind, there))
    child.start()
    there.close()
    try:
        return (
            here.recv() if here.poll(LIMIT) else Result(name, "not built", "too slow to be tried")
        )
    except EOFError:
        return Result(name, "not built", "its process ended by itself")
    finally:
        child.kill()
        child.join()


def page(results: list[Result]) -> str:
    counts = Counter(r.verdict for r in results)
    lines = [
        "# Which pipelines are policies",
        "",
        f"diffusers {diffusers.__version__} (transformers {transformers.__version__}), "
        f"{len(results)} pipelines of images and videos that "
        f"take a prompt: {counts['exact']} are exact, {counts['refused']} are refused, and "
        f"{counts['known']} are not tried for a reason that was read in their code. Of the other "
        f"{counts['not built']} nothing is claimed: no tiny parts are known for them, or their own "
        "call fails with those.",
        "",
        *CLAIMS,
        "",
        "Stand-ins: small decoders for the language models, the mean colour of an image for what "
        "those see of it, an interpolation of torch for torchvision's nearest resize (Cosmos), a "
        "mask that is written out for FlexAttention (AnyFlow, Wan-Animate 2).",
        "",
        "Columns: the way to a timestep; what the model predicts; whether rows of several noise "
        "levels share a call, or a call makes one prompt only; which images it requires "
        "(columns of the prompt file, or `call`); the scheduler that it was tried with; whether "
        "flowrl's Euler steps are that scheduler's own or stand in for it; (a) and (b).",
        *rows_of_before(results),
        "",
        "## Exact",
        "",
        "| pipeline | way | predicts | rows | needs | scheduler | Euler steps | (a) | (b) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {r.name} | {r.note} |" for r in results if r.verdict == "exact"]
    for verdict, title in (
        ("refused", "Refused, with the reason"),
        ("known", "Not tried, for a reason that was read in their code"),
        ("not built", "Not judged, with what stood in the way"),
    ):
        lines += ["", f"## {title}", "", "| pipeline | |", "|---|---|"]
        chosen = [r for r in results if r.verdict == verdict]
        lines += [f"| {r.name} | {_cell(r.note)} |" for r in chosen]
    return "\n".join([*lines, "", *sound_section(), "", *modular_section()]) + "\n"


def sound_section() -> list[str]:
    """The pipelines of sound alone, as `sound_pipelines.py` found them."""
    found = swept_verdicts().get("sound", {})
    rows = {key: note.partition(" | ")[::2] for key, note in found.items()}
    exact = {key: note for key, (verdict, note) in rows.items() if verdict == "exact"}
    refused = {key: note for key, (verdict, note) in rows.items() if verdict == "refused"}
    classes_of = {key.partition(" | ")[0] for key in found}
    lines = [
        SOUND_TITLE,
        "",
        f"diffusers {diffusers.__version__} exports {len(classes_of)} of sound alone that take a "
        f"prompt. With the inputs below, {len(exact)} are exact and {len(refused)} are refused. "
        + SOUND_CLAIMS[0],
        "",
        *SOUND_CLAIMS[1:],
        "",
        "| pipeline | inputs | way | predicts | rows | scheduler | Euler steps | (a) | (b) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {key} | {note} |" for key, note in sorted(exact.items())]
    lines += ["", "### Refused, with the reason", "", "| pipeline | inputs | |", "|---|---|---|"]
    return lines + [f"| {key} | {_cell(note)} |" for key, note in sorted(refused.items())]


def write_sound_section() -> None:
    """Replace the section of sound in the page, before that of the modular pipelines."""
    text = PAGE.read_text()
    before, title, modular = text.partition(f"\n{MODULAR_TITLE}\n")
    before = before.partition(f"\n{SOUND_TITLE}\n")[0].rstrip()
    PAGE.write_text("\n".join([before, "", *sound_section()]) + f"\n{title}{modular}")


def modular_section() -> list[str]:
    """The modular pipelines, as `modular_pipelines.py` found them."""
    found = modular_verdicts()
    exact, refused, untried = (found.get(v, {}) for v in ("exact", "refused", "untried"))
    lines = [
        MODULAR_TITLE,
        "",
        f"diffusers {diffusers.__version__} exports {len(modular_classes())}: {len(exact)} are "
        f"exact, {len(refused)} are refused, and {len(untried)} are not tried. "
        + MODULAR_CLAIMS[0],
        "",
        *MODULAR_CLAIMS[1:],
        "",
        "| modular pipeline | way | predicts | rows | needs | guider | scheduler | Euler steps "
        "| (a) | (b) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {name} | {note} |" for name, note in sorted(exact.items())]
    for chosen, title in ((refused, "Refused, with the reason"), (untried, "Not tried")):
        lines += ["", f"### {title}", "", "| modular pipeline | |", "|---|---|"]
        lines += [f"| {name} | {_cell(note)} |" for name, note in sorted(chosen.items())]
    return lines


def rows_of_before(results: Sequence[Result]) -> list[str]:
    """A paragraph on rows that are kept from a sweep which compared no whole samples."""
    exact = [r for r in results if r.verdict == "exact"]
    before = sum(r.note.endswith(NOT_COMPARED) for r in exact)
    if not before:
        return []
    return [
        "",
        f"{len(exact) - before} of the {len(exact)} were compared over whole samples. The other "
        f"{before} have dashes there: their rows, and the tables below, are of an older sweep. It "
        "replayed every step of one call (4 steps, guidance 4.5), without the checks of the first "
        "state and of neighbouring rows.",
    ]


def _cell(text: str) -> str:
    flat = " ".join(text.replace("|", "/").split())
    return flat if len(flat) <= 240 else flat[:237] + "..."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the classes' names")
    parser.add_argument("--kept", type=Path, help="a file of results to go on from")
    given = parser.parse_args()
    torch.set_num_threads(1)
    # once, before the processes part
    _NAMED.extend((family.build(), family.call) for family in NAMED.values())
    results = known(given.kept)
    named = {type(pipe) for pipe, _ in _NAMED}
    for name, kind in sorted(classes("image", "video"), key=lambda each: each[1] not in named):
        if any(part in name for part in given.only) and name not in results:
            r = results[name] = tried(name, kind)
            print(f"{r.verdict:10} {r.name}: {_cell(r.note)}", flush=True)
            if given.kept is not None:
                with given.kept.open("a") as file:
                    file.write(json.dumps(asdict(r)) + "\n")
    if given.only == [""]:
        PAGE.write_text(page([results[name] for name in sorted(results)]))
        keep_verdicts(results.values())


def keep_verdicts(results: Iterable[Result]) -> None:
    """Write what `flowrl plan` and a start read, beside that of other versions of diffusers."""
    own: dict[str, dict[str, str]] = {}
    for result in results:
        own.setdefault(result.verdict, {})[result.name] = " ".join(result.note.split())
    every = json.loads(VERDICTS.read_text())
    sound = every.get(diffusers.__version__, {}).get("sound")  # of `sound_pipelines.py`
    every |= {diffusers.__version__: own | ({} if sound is None else {"sound": sound})}
    VERDICTS.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n")


def known(kept: Path | None) -> dict[str, Result]:
    """Results of an earlier sweep, by name; a last line that was cut off is left out."""
    results: dict[str, Result] = {}
    for line in kept.read_text().splitlines() if kept is not None and kept.is_file() else ():
        try:
            result = Result(**json.loads(line))
        except json.JSONDecodeError:
            continue
        results[result.name] = result
    return results


if __name__ == "__main__":
    main()
