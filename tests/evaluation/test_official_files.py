"""Official prompt files come from an address, and are compared with a digest."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from flowrl.evaluation import official_files
from flowrl.evaluation.official_files import OFFICIAL_FILES, OfficialFile
from flowrl.evaluation.suites import SUITES, load_suite
from tests.support import runs

CONTENT = b"Prompt\tCategory\tChallenge\tNote\nbond\tAbstract\tBasic\tx\n"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/a/b/main/parti.tsv" else 404)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def official(monkeypatch) -> Iterator[type[OfficialFile]]:
    """A local server in the place of GitHub's."""
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    class Local(OfficialFile):
        @property
        def url(self) -> str:
            return f"http://127.0.0.1:{server.server_port}/{self.repository}/{self.file}"

    yield Local
    server.shutdown()
    server.server_close()


def test_the_official_file_is_written_and_its_source_printed(
    official, monkeypatch, tmp_path, capsys
):
    known = official("a/b", "main/parti.tsv", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(OFFICIAL_FILES, "parti", known)
    out = tmp_path / "parti.tsv"
    assert runs.flowrl("suites", "parti", "--get", out) == 0
    assert out.read_bytes() == CONTENT
    assert "licence: see https://github.com/a/b" in capsys.readouterr().out
    assert load_suite(f"parti:{out}").rows[0]["prompt"] == "bond"


@pytest.mark.parametrize(
    ("suite", "file", "sentence"),
    [
        ("parti", "main/parti.tsv", "is not the file that flowrl knows"),
        ("parti", "main/gone.tsv", r"could not download http.* \(HTTP Error 404"),
        ("shapes", "", "no download is known for 'shapes', only for geneval"),
    ],
)
def test_another_file_or_none_is_one_sentence(
    official, monkeypatch, tmp_path, capsys, suite, file, sentence
):
    monkeypatch.setitem(OFFICIAL_FILES, "parti", official("a/b", file, "0" * 64))
    out = tmp_path / "out.tsv"
    with pytest.raises(official_files.UserError, match=sentence):
        official_files.download_official(suite, out)
    assert runs.flowrl("suites", suite, "--get", out) != 0
    assert not out.exists()


def test_every_official_file_belongs_to_a_suite_that_reads_one():
    assert all(SUITES[name].read is not None for name in OFFICIAL_FILES)
    assert OFFICIAL_FILES["geneval"].url.startswith("https://raw.githubusercontent.com/djghosh13/")
