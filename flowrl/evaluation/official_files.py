"""Download of official prompt files, each known by its digest."""

import hashlib
import http.client
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import UserError
from flowrl.evaluation.outputs import check_output_file

MOST_BYTES = 2**24
TIMEOUT = 30.0  # seconds without an answer


@dataclass(frozen=True)
class OfficialFile:
    """A file of a GitHub repository, and the SHA-256 of the version that this project was tested
    with."""

    repository: str
    file: str
    sha256: str

    @property
    def url(self) -> str:
        return f"https://raw.githubusercontent.com/{self.repository}/{self.file}"


OFFICIAL_FILES = {
    "geneval": OfficialFile(
        "djghosh13/geneval",
        "main/prompts/evaluation_metadata.jsonl",
        "5c48e0813e812e3c373fa5c8ed07a8f0a483be30272b4427b0559c8048e67c13",
    ),
    "ocr": OfficialFile(
        "yifan123/flow_grpo",
        "main/dataset/ocr/test.txt",
        "4dd8caf3ab6ade73bd376c7d14c6ca49b6eacfb1bd321e22c40714ae4a98d4dc",
    ),
    "drawbench": OfficialFile(
        "yifan123/flow_grpo",
        "main/dataset/drawbench/test.txt",
        "9006b98feabb94b28a2bc0c88de42fd4f31a9ec3c2a19e308a02c5385b7172f0",
    ),
    "parti": OfficialFile(
        "google-research/parti",
        "main/PartiPrompts.tsv",
        "fab29e41bb512a169b56acab4cf2a41dcb675e285df2efcde6640c7dd3c440eb",
    ),
}


def download_official(suite: str, out: Path) -> str:
    """Download the official file of a suite, and return a sentence with its source.

    UserError: unknown address, no answer, or a file that differs from the known one.
    """
    if suite not in OFFICIAL_FILES:
        suites = ", ".join(OFFICIAL_FILES)
        raise UserError(f"--get: no download is known for {suite!r}, only for {suites}")
    check_output_file(out, "--get")
    official = OFFICIAL_FILES[suite]
    try:
        with urllib.request.urlopen(official.url, timeout=TIMEOUT) as answer:
            content = answer.read(MOST_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"--get: could not download {official.url} ({error})") from error
    if hashlib.sha256(content).hexdigest() != official.sha256:
        raise UserError(
            f"--get: {official.url} is not the file that flowrl knows: it has changed or is "
            f"incomplete. Check https://github.com/{official.repository} and download it by hand"
        )
    out.write_bytes(content)
    return f"{out}: {official.url}; licence: see https://github.com/{official.repository}"
