"""Runs of a tiny random language model."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from flowrl.run.save import checkpoint
from flowrl.run.watch.alarms import Alarms
from flowrl.session.progress import Progress
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings.read import run_from
from tests.support.iterations import iterate
from tests.support.runs import same_weights

GRPO = {"name": "text_grpo", "length": 6, "group": 6, "kl": 0.0}
TREE = {"name": "text_tree", "length": 6, "roots": 3, "branch": 2, "at": [2]}
REWARD = '''
def share(samples, letter="a"):
    """The share of a text's letters that are this one."""
    return [text.count(letter) / len(text) if text else 0.0 for text in samples.media]


def patchy(samples):
    """Nothing to say of texts with a b; nothing at all of one prompt."""
    pairs = zip(samples.media, samples.prompts)
    return [float("nan") if "b" in t or p == "bead :" else float(len(t)) for t, p in pairs]
'''


def tree(model: Path, folder: Path, recipe: dict[str, Any], **train: Any) -> dict[str, Any]:
    """Settings of a run; prompts and a reward are written into `folder`."""
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": p, "answer": a} for p, a in (("a:", "a"), ("cab :", "b"), ("bead :", "c"))]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.py").write_text(REWARD)
    return {
        "recipe": deepcopy(recipe),  # a test may change the settings of its run
        "model": {"language": str(model), "lora": None, "device": "cpu"},
        "prompts": {"train": str(prompts), "held_out": str(prompts), "per_iteration": 3},
        "rewards": [{"name": f"{folder / 'own.py'}:share"}],
        "train": {"iterations": 3, "lr": 1e-2, "alarms": "off", **train},
        "evaluate": {"every": 2, "samples": 12, "per_prompt": 4},
        "checkpoint": {"every": 1},
        "track": {"images": 4},
    }


def session(model: Path, folder: Path, recipe: dict[str, Any], **train: Any) -> Session:
    run = run_from(tree(model, folder, recipe, **train), "test")
    return open_session(run, folder, open_accelerator(run, folder))


def check_resumed_bits(folder: Path, opened: Callable[[Path], Session]) -> None:
    """Fail unless four iterations end with the same bits after a checkpoint of the second one."""
    whole, broken, again = (opened(folder / name) for name in ("whole", "broken", "again"))
    done, progress = Progress(), Progress()
    for _ in range(4):
        iterate(whole, done)
    for _ in range(2):
        iterate(broken, progress)
    checkpoint.save_checkpoint(broken, progress, Alarms())
    progress = checkpoint.restore(again, folder / "broken" / "checkpoints" / "000002", Alarms())
    for _ in range(2):
        iterate(again, progress)
    assert progress.iteration == 4
    assert same_weights(whole, again)
