"""A published text that is downloaded is kept whole or not at all: a full disk does not end the
reward, and leaves no cut file, which later would be called another text."""

import errno
import hashlib
import io
import os
import urllib.request
from pathlib import Path

import pytest

from rewards.judging.published_texts import PublishedText

TEXT = "judge the image"
NAMED = PublishedText(
    what="the instruction",
    length=len(TEXT),
    digest=hashlib.sha256(TEXT.encode()).hexdigest()[:16],
    source="its page",
    url="http://hub.invalid/text.txt",
)


def test_a_full_disk_leaves_no_cut_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.cached_assets_path", lambda *_, **__: tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(TEXT.encode()))
    write = Path.write_bytes

    def full(file: Path, content: bytes) -> None:
        write(file, content[:4])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", full)
        assert NAMED.read("it", "instruction", None) == TEXT
    assert not list(tmp_path.iterdir())
    assert NAMED.read("it", "instruction", None) == TEXT
    assert [file.name for file in tmp_path.iterdir()] == ["text.txt"]
