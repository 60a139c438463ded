"""`make demo`: align the shapes world, then say what came of it and which picture to open."""

import json
import subprocess
import sys
from pathlib import Path

from flowrl.paths import PROJECT, numbered
from flowrl.record import METRICS


def main() -> None:
    config = sys.argv[1] if len(sys.argv) > 1 else str(PROJECT / "configs" / "demo.yaml")
    folder = numbered(Path("runs"), Path(config).stem)
    command = [sys.executable, "-m", "flowrl", "train", config, "--folder", str(folder)]
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code)
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    first, last = (line["held_out/shapes.strict"] for line in (lines[0], lines[-1]))
    print(f"\nbefore and after, side by side: {folder / 'samples' / 'before_after.png'}")
    print(f'paint your own: .venv/bin/flowrl sample {folder} "a red circle above a blue square"')
    print(f"held-out strict accuracy: {first:.2f} -> {last:.2f}")


if __name__ == "__main__":
    main()
