"""`make demo`: align the shapes world, then print the result and the image to open."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flowrl.paths import PROJECT, numbered
from flowrl.session.record import METRICS


def trained(config: str, overrides: Sequence[str] = ()) -> tuple[Path, dict, dict]:
    """Run a configuration in a new folder: the folder, and its first and its last metrics."""
    folder = numbered(Path("runs"), Path(config).stem)
    command = [sys.executable, "-m", "flowrl", "train", config, "--folder", str(folder)]
    code = subprocess.run([*command, *overrides], check=False).returncode
    if code:
        sys.exit(code)
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return folder, lines[0], lines[-1]


def main() -> None:
    config = sys.argv[1] if len(sys.argv) > 1 else str(PROJECT / "configs" / "demo.yaml")
    folder, *ends = trained(config)
    first, last = (line["held_out/shapes.strict"] for line in ends)
    print(f"\nbefore and after, side by side: {folder / 'samples' / 'before_after.png'}")
    print(f'sample your own: .venv/bin/flowrl sample {folder} "a red circle above a blue square"')
    print(f"held-out strict accuracy: {first:.2f} -> {last:.2f}")


if __name__ == "__main__":
    main()
