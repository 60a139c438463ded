"""Files of equal weights with equal bytes."""

import json
from pathlib import Path

LENGTH_BYTES = 8  # bytes: a little-endian number before the header of a safetensors file


def fix_order(folder: Path) -> None:
    """Put the metadata of a folder's safetensors files in the order of their names.

    safetensors writes them in an order that differs from process to process. The order changes no
    length, so the weights stay where they are. ValueError for a file whose header is not one.
    """
    for path in sorted(folder.rglob("*.safetensors")):
        with path.open("r+b") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
            metadata = header.get("__metadata__", {})
            header["__metadata__"] = dict(sorted(metadata.items()))
            if not metadata:
                continue
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
            written = text.encode().ljust(length)
            if len(written) != length:
                raise ValueError(f"{path}: its header is not as safetensors writes it")
            file.seek(LENGTH_BYTES)
            file.write(written)
