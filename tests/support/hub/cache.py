"""Repositories in a local cache of the hub, as its client lays them out: files by their contents in
`blobs`, links to them in the folder of a commit, and the commit of the main branch."""

import os
from pathlib import Path

from tests.support.hub.repositories import COMMIT, etag


def cache(source: Path, root: Path, name: str, kind: str = "model") -> Path:
    """Put a folder into the cache `root` as the repository `name`. Return its folder there."""
    repository = root / f"{kind}s--{name.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    blobs.mkdir(parents=True)
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        content = file.read_bytes()
        blob = blobs / etag(content)
        blob.write_bytes(content)
        link = snapshot / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return repository


def links(repository: Path) -> list[Path]:
    """The links of the main branch's files, in order."""
    return sorted(path for path in (repository / "snapshots").rglob("*") if path.is_symlink())
