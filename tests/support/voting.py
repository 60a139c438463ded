"""Small folders of votes, and a client of their page."""

import itertools
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from flowrl.votes.collect import SampleCopies, VoteQuestion, plan_pairs
from flowrl.votes.plan import VotePlan
from rewards.audio import Audio

HOSTILE = "\u202eleft\u202c \u0642\u0637\u0629 <script>document.title = 'in'</script>"
COLOURS = list(itertools.product((40, 120, 200, 250), repeat=3))


def written_plan(
    folder: Path,
    pairs: int = 20,
    prompts: int = 5,
    raters: int = 1,
    sides: tuple[str, ...] = ("trained", "base"),
    texts: tuple[str, ...] = (),
    seed: int = 0,
) -> VotePlan:
    """A folder of votes on images of one colour each; every image differs from all others."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = SampleCopies(folder)
    for i in range(2 * pairs):
        colour = torch.tensor(COLOURS[i % len(COLOURS)], dtype=torch.float32) / 255
        image = colour[:, None, None].expand(3, 8, 8 + i // len(COLOURS)).clone()
        prompt = texts[i // 2 % len(texts)] if texts else f"prompt {i // 2 % prompts}"
        origin = sides[i % 2] if sides else f"file {i}"
        copies.add(image, prompt, origin, {"size": float(1 - i % 2)} if sides else {})
    kind = "run" if sides else "folder"
    order = [(2 * k, 2 * k + 1) for k in range(pairs)]
    question = VoteQuestion("Which one?", raters=raters, seed=seed)
    return plan_pairs(copies, kind, "a run", order, question, sides)


def written_media(folder: Path, kind: str, pairs: int = 4) -> VotePlan:
    """A folder of votes on videos (the odd ones longer, with sound), sounds, texts, or edits."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = SampleCopies(folder)
    for i in range(2 * pairs):
        prompt = f"prompt {i // 2}"
        colour = torch.tensor(COLOURS[i], dtype=torch.float32)[:, None, None] / 255
        if kind == "text":
            copies.add(f"answer {i}\n<b>{HOSTILE}</b>", prompt, f"file {i}")
        elif kind == "edit":
            source = folder / f"given-{i // 2}.png"
            Image.new("RGB", (9, 7), COLOURS[40 + i // 2]).save(source)
            copies.add(colour.expand(3, 8, 8).clone(), prompt, f"file {i}", source=str(source))
        elif kind == "sound":
            waves = torch.linspace(-0.5, 0.5, 800 + i).sin()[None, None]
            copies.add(Audio(waves, 8000), prompt, f"file {i}")
        else:
            frames = torch.arange(4 + i % 2)[:, None, None, None] * 0.02
            video = colour.expand(len(frames), 3, 8, 8) * 0.9 + frames
            sound = Audio(torch.zeros(1, 1, 8000), 8000) if i % 2 else None
            copies.add(video, prompt, f"file {i}", sound=sound)
    order = [(2 * k, 2 * k + 1) for k in range(pairs)]
    return plan_pairs(copies, "folder", "a folder", order, VoteQuestion("Which one?"))


def colour_of(png: bytes) -> tuple[int, ...]:
    """The first pixel of a PNG."""
    import io

    return tuple(np.asarray(Image.open(io.BytesIO(png)))[0, 0].tolist())


def log_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
