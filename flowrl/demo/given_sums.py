"""Given completions of the text demo's world: pairs of a right and a careless answer.

    python -m flowrl.demo.given_sums FOLDER

sums_pairs.jsonl  prompt, chosen, rejected: training sums that carry, with the right answer and a
                  careless writer's
sums_texts.jsonl  prompt, completion: training sums with their answers
"""

import sys
from pathlib import Path

from flowrl.demo.sums import problems
from flowrl.json_text import json_text

MOST = 2_000  # sums


def write_sums(folder: Path) -> tuple[int, int]:
    """Write the files and return their numbers of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    train = problems("train")[:MOST]
    pairs = [
        {"prompt": sum_.prompt, "chosen": sum_.answer, "rejected": sum_.careless}
        for sum_ in train
        if sum_.carries
    ]
    texts = [{"prompt": sum_.prompt, "completion": sum_.answer} for sum_ in train]
    for name, rows in (("pairs", pairs), ("texts", texts)):
        lines = "".join(json_text(row) + "\n" for row in rows)
        (folder / f"sums_{name}.jsonl").write_text(lines)
    return len(pairs), len(texts)


if __name__ == "__main__":
    pairs_and_texts = write_sums(Path(sys.argv[1]))
    print(f"{sys.argv[1]}: {pairs_and_texts[0]} pairs, {pairs_and_texts[1]} texts")
