"""Make the demo's pipeline from nothing: a tiny StableDiffusion3Pipeline that paints shapes.

    python scripts/pretrain_demo.py --out my-shapes-sd3

Two stages on pictures of `flowrl.demo.world`, with prompts of its train split only: an autoencoder,
then text encoders and a flow transformer together. The numbers of steps are fixed, so the work does
not depend on the machine's speed. Weights are saved in half precision in diffusers' folder format.
"""

import copy
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from diffusers import (
    AutoencoderTiny,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from PIL import Image
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from flowrl.demo import world
from rewards.shapes import detect, is_exact

WORDS = 10  # tokens a prompt: the longest has eight words, and a start and an end
TEXT_WIDTH = 64  # of each of the two text encoders
HEADS, HEAD_WIDTH, LAYERS = 3, 32, 4
MOST_PADDING = 256  # zero tokens that SD3's pipeline appends by default when it has no T5


@dataclass(frozen=True)
class Work:
    """How much is done; the defaults make the shipped weights."""

    pictures: int = 40_000
    autoencoder_steps: int = 4_000
    autoencoder_batch: int = 64
    flow_steps: int = 3_000
    flow_batch: int = 128
    judged: int = 272  # pictures of held-out prompts that the report is made of

    @classmethod
    def quick(cls) -> "Work":
        """Enough to see that everything runs; the pictures are mud."""
        return cls(256, 4, 16, 4, 16, 8)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token a word, start and end around a prompt; the end token also pads, as in CLIP."""
    words = sorted({word for prompt in world.all_prompts() for word in prompt.split()})
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<start>", *words, "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>",
        special_tokens=[(token, vocabulary[token]) for token in ("<start>", "<end>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<start>",
        eos_token="<end>",
        pad_token="<end>",
        model_max_length=WORDS,
    )


def make_text_encoder(tokenizer: PreTrainedTokenizerFast) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=WORDS,
            hidden_act="gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_factor=5.0,  # CLIP's embeddings of std 0.02 are too quiet for a short run
        )
    )


def silence(pipe: StableDiffusion3Pipeline) -> None:
    """Give the pipeline a third encoder that hears nothing and says zeros: what it had without one.

    diffusers loads an SD3 folder without a third encoder only if told so by extra arguments; with
    this T5 of a few kilobytes the folder loads without any. Its tokenizer drops all text, and its
    last norm's weight is zero.
    """
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer.normalizer = normalizers.Replace(Regex(r"[\s\S]"), "")
    config = T5Config(
        vocab_size=2,  # its settings name a padding and an end token
        d_model=pipe.transformer.config.joint_attention_dim,
        d_kv=4,
        d_ff=4,
        num_layers=1,
        num_heads=1,
    )
    encoder = T5EncoderModel(config)
    nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    pipe.register_modules(
        text_encoder_3=encoder,
        tokenizer_3=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>"),
    )


def make_transformer() -> SD3Transformer2DModel:
    """The flow starts as v = 0: its last layer and the blocks' modulations are zero."""
    side = world.SIZE // 4  # of the latents
    transformer = SD3Transformer2DModel(
        sample_size=side,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=LAYERS,
        attention_head_dim=HEAD_WIDTH,
        num_attention_heads=HEADS,
        caption_projection_dim=HEADS * HEAD_WIDTH,
        joint_attention_dim=2 * TEXT_WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=side // 2,
    )
    zero = [transformer.proj_out]
    for block in transformer.transformer_blocks:
        zero += [block.norm1.linear, block.norm1_context.linear]
    for linear in zero:
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    return transformer


def make_pipeline() -> StableDiffusion3Pipeline:
    """The whole pipeline with random weights. AutoencoderTiny makes 8 x 8 x 4 latents."""
    tokenizer = make_tokenizer()
    pipe = StableDiffusion3Pipeline(
        transformer=make_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=AutoencoderTiny(
            encoder_block_out_channels=(32, 32, 32),
            decoder_block_out_channels=(32, 32, 32),
            num_encoder_blocks=(0, 1, 1),
            num_decoder_blocks=(1, 2, 1),
        ),
        text_encoder=make_text_encoder(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=make_text_encoder(tokenizer),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def paint_many(prompts: Sequence[str], rng: random.Random) -> Tensor:
    """Pictures [n 3 32 32] as bytes, in parts that fit a processor's cache."""
    parts = (world.paint(prompts[i : i + 250], rng) for i in range(0, len(prompts), 250))
    return torch.cat([part.mul(255).round().byte() for part in parts])


def timed(name: str, steps: int) -> Iterator[tuple[int, Callable[[float], None]]]:
    """Step numbers, each with a function that takes the loss; a line about every tenth part."""
    wall, cpu, losses = time.perf_counter(), time.process_time(), []
    for step in range(steps):
        yield step, losses.append
        if (step + 1) % max(1, steps // 10) == 0:
            recent = losses[-max(1, steps // 10) :]
            print(
                f"{name} step {step + 1}/{steps} loss {sum(recent) / len(recent):.4f} "
                f"wall {time.perf_counter() - wall:.0f} s cpu {time.process_time() - cpu:.0f} s",
                flush=True,
            )


def train_autoencoder(vae: AutoencoderTiny, pictures: Tensor, work: Work) -> None:
    """Reconstruct pictures from noisy latents of about unit variance (the flow's errors are noise).

    The learning rate falls linearly; latents' mean and spread are held by a weak penalty, so that
    the pipeline's scaling factor is 1.
    """
    vae.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(vae.parameters(), 3e-3, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 50) * (1 - s / work.autoencoder_steps) + 0.003
    )
    for _, note in timed("autoencoder", work.autoencoder_steps):
        rows = torch.randint(len(pictures), (work.autoencoder_batch,))
        x = pictures[rows].float().div(127.5).sub(1).to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            z = vae.encoder(x)
            y = vae.decoder(z + 0.1 * torch.randn_like(z)).float()
        z = z.float()
        spread = z.mean((0, 2, 3)).square().mean() + (z.std((0, 2, 3)) - 1).square().mean()
        loss = functional.mse_loss(y, x) + 0.3 * functional.l1_loss(y, x) + 0.05 * spread
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        rate.step()
        note(loss.item())
    vae.eval().requires_grad_(False)


@torch.no_grad()
def encode(vae: AutoencoderTiny, pictures: Tensor) -> Tensor:
    """Latents [n 4 8 8] of pictures in bytes."""
    return torch.cat([vae.encoder(p.float().div(127.5).sub(1)) for p in pictures.split(250)])


class BiasedAttention:
    """diffusers' joint attention with a bias on the keys, which its own processor ignores.

    m equal tokens weigh in attention as one of them with log(m) added to its logit. So one zero
    token with a bias stands for the many that SD3's pipeline appends in place of T5's.
    """

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask):
        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        image = [heads(f(hidden_states)) for f in (attn.to_q, attn.to_k, attn.to_v)]
        added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text = [heads(f(encoder_hidden_states)) for f in added]
        q, k, v = (torch.cat(pair, 2) for pair in zip(image, text, strict=True))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask.to(q.dtype))
        out = out.transpose(1, 2).flatten(2)
        tokens = hidden_states.shape[1]
        image_out, text_out = attn.to_out[0](out[:, :tokens]), out[:, tokens:]
        return image_out, text_out if attn.context_pre_only else attn.to_add_out(text_out)


def padding_bias(n: int, tokens: int) -> Tensor:
    """Key bias [n 1 1 tokens]: 0, but log(m) at the last token; m in 0..256, log-uniform in m + 1.

    So the model learns to paint alike with any `max_sequence_length`, the costly default too.
    """
    count = torch.exp(torch.rand(n) * math.log(MOST_PADDING + 1)).floor() - 1
    bias = torch.zeros(n, 1, 1, tokens)
    bias[:, 0, 0, -1] = count.log()
    return bias


def flow_loss(pipe: StableDiffusion3Pipeline, x0: Tensor, prompts: Sequence[str]) -> Tensor:
    """Flow matching, arXiv:2403.03206, with logit-normal times and 10 % empty prompts."""
    shown = ["" if random.random() < 0.1 else prompt for prompt in prompts]
    text, _, pooled, _ = pipe.encode_prompt(
        shown, None, None, do_classifier_free_guidance=False, max_sequence_length=1
    )
    sigma = torch.randn(len(x0)).sigmoid()
    noise = torch.randn_like(x0)
    x = torch.lerp(x0, noise, sigma[:, None, None, None])
    tokens = (x0.shape[-1] // 2) ** 2 + text.shape[1]
    velocity = pipe.transformer(
        x,
        text,
        pooled,
        timestep=1000 * sigma,
        joint_attention_kwargs={"attention_mask": padding_bias(len(x0), tokens)},
        return_dict=False,
    )[0]
    return functional.mse_loss(velocity.float(), noise - x0)


def make_optimizers(pipe: StableDiffusion3Pipeline) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for the rest (modulations, embeddings, text)."""
    blocks = pipe.transformer.transformer_blocks.named_parameters()
    matrices = [p for name, p in blocks if p.ndim == 2 and "norm1" not in name]
    taken = {id(p) for p in matrices}
    rest = [p for part in flow_parts(pipe) for p in part.parameters() if id(p) not in taken]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def flow_parts(pipe: StableDiffusion3Pipeline) -> tuple[nn.Module, ...]:
    return pipe.transformer, pipe.text_encoder, pipe.text_encoder_2


def train_flow(
    pipe: StableDiffusion3Pipeline, latents: Tensor, prompts: Sequence[str], work: Work
) -> None:
    """Train transformer and text encoders; the pipeline ends with their averaged weights."""
    usual = pipe.transformer.attn_processors
    pipe.transformer.set_attn_processor(BiasedAttention())
    weights = [p for part in flow_parts(pipe) for p in part.parameters()]
    averages = copy.deepcopy([p.data for p in weights])
    optimizers = make_optimizers(pipe)
    rates = [
        torch.optim.lr_scheduler.LambdaLR(
            o, lambda s: min((s + 1) / 50, 1, max(0.01, (1 - s / work.flow_steps) / 0.4))
        )
        for o in optimizers
    ]
    for step, note in timed("flow", work.flow_steps):
        rows = torch.randint(len(latents), (work.flow_batch,))
        with torch.autocast("cpu", torch.bfloat16):
            loss = flow_loss(pipe, latents[rows], [prompts[row] for row in rows.tolist()])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.step()
            rate.step()
        decay = min(0.998, (1 + step) / (10 + step))
        torch._foreach_lerp_(averages, [p.data for p in weights], 1 - decay)
        note(loss.item())
    for weight, average in zip(weights, averages, strict=True):
        weight.data.copy_(average)
    pipe.transformer.set_attn_processor(usual)


def save(pipe: StableDiffusion3Pipeline, out: Path) -> None:
    """diffusers' folder with weights in float16; loaded as float32 unless told otherwise."""
    silence(pipe)
    pipe.to(torch.float16)
    pipe.save_pretrained(out)
    for file in out.rglob("*.json"):
        # transformers 5 saves its fast tokenizers under a name that transformers 4 does not know
        text = file.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast")
        # transformers loads in the dtype of its settings, diffusers in float32: they must agree
        text = text.replace('"dtype": "float16"', '"dtype": "float32"')
        file.write_text(text)
    # AutoencoderTiny saves an entry that it warns about when it is loaded
    file = out / "vae" / "config.json"
    settings = json.loads(file.read_text())
    del settings["block_out_channels"]
    file.write_text(json.dumps(settings, indent=2) + "\n")


@torch.no_grad()
def judge(out: Path, picture: Path, work: Work) -> float:
    """Strict accuracy on held-out prompts, 10 steps, no guidance; saves a sheet of samples."""
    pipe = DiffusionPipeline.from_pretrained(out)
    pipe.set_progress_bar_config(disable=True)
    held_out = world.prompts_of("held_out")
    prompts = [held_out[i % len(held_out)] for i in range(work.judged)]
    parts = [
        pipe(
            prompts[i : i + 64],
            num_inference_steps=10,
            guidance_scale=1.0,
            max_sequence_length=8,
            generator=torch.Generator().manual_seed(i),
            output_type="pt",
        ).images
        for i in range(0, len(prompts), 64)
    ]
    images = torch.cat(parts)
    right = [
        is_exact(found, world.want(prompt))
        for found, prompt in zip(detect(images), prompts, strict=True)
    ]
    sheet(images[:64], right).save(picture)
    return sum(right) / len(right)


def sheet(images: Tensor, right: Sequence[bool], scale: int = 3) -> Image.Image:
    """Pictures side by side, eight a row, in a green frame if right, otherwise in a red one."""
    side, columns = images.shape[-1] * scale + 4, 8
    rows = -(-len(images) // columns)
    page = Image.new("RGB", (columns * side, rows * side))
    arrays = images.mul(255).round().byte().permute(0, 2, 3, 1).numpy()
    for i, array in enumerate(arrays):
        frame = Image.new("RGB", (side, side), (0, 170, 0) if right[i] else (220, 0, 0))
        inside = Image.fromarray(array).resize((side - 4, side - 4), Image.Resampling.NEAREST)
        frame.paste(inside, (2, 2))
        page.paste(frame, (i % columns * side, i // columns * side))
    return page


def main(out: Path, seed: int = 0, quick: bool = False, threads: int = 2) -> None:
    """Pre-train the demo's pipeline.

    Args:
        out: Folder of the pipeline; the sheet of samples is saved beside it as OUT.png.
        seed: Of everything random.
        quick: A few small steps, to see that it runs.
        threads: Processor threads; more than there are idle cores is slower.
    """
    work = Work.quick() if quick else Work()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    random.seed(seed)
    rng = random.Random(seed)
    started = time.perf_counter(), time.process_time()
    prompts = world.draw_prompts(work.pictures, rng)
    pictures = paint_many(prompts, rng)
    pipe = make_pipeline()
    train_autoencoder(pipe.vae, pictures, work)
    train_flow(pipe, encode(pipe.vae, pictures), prompts, work)
    save(pipe, out)
    accuracy = judge(out, out.with_suffix(".png"), work)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    wall, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
    print(
        f"{out}: {size / 1e6:.1f} MB, {accuracy:.1%} of {work.judged} pictures of held-out prompts "
        f"are right; wall {wall:.0f} s, cpu {cpu:.0f} s"
    )


if __name__ == "__main__":
    tyro.cli(main)
