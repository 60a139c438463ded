"""Pages of runs in a headless Chromium: the slider moves, images are there, and nothing fails."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

import pytest

import flowrl
from flowrl.pages.compare_page import write_comparison
from flowrl.pages.records import write_record
from flowrl.pages.run_page import write_report
from tests.support.page_runs import group, write_long_run, write_run
from tests.support.tiny_clap import saved_clap

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install one, or set CHROMIUM"),
]

FAILURES = """<script>
window.failures = [];
window.onerror = (text) => { failures.push(String(text)); };
console.error = console.warn = (...texts) => failures.push(texts.join(" "));
window.alert = (text) => failures.push("alert " + text);
document.addEventListener("error", (e) => failures.push("not loaded: " + e.target.tagName), true);
</script>"""
FACTS = """<script>
window.addEventListener("load", async () => {
  const opened = performance.now();
  for (const image of document.images) image.loading = "eager";
  await Promise.all([...document.images].map((image) => image.decode().catch(() => null)));
  const shown = (figure) => figure.checkVisibility();
  const facts = { opened };
  const slider = document.querySelector(".slider input[type=range]");
  const names = () => [...document.querySelectorAll(".slider .row:first-child figure")]
    .filter(shown).map((figure) => figure.dataset.name);
  if (slider) {
    facts.last = names();
    slider.value = "1";
    slider.dispatchEvent(new Event("input"));
    facts.middle = names();
    facts.words = slider.getAttribute("aria-valuetext");
    document.querySelector("#every").click();
    facts.every = names();
    document.querySelector("#every").click();
  }
  const chart = document.querySelector(".chart");
  const before = chart.querySelector("output").textContent;
  chart.querySelector("svg").focus();
  chart.querySelector("svg").dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
  facts.chart = [before, chart.querySelector("output").textContent];
  const tree = document.querySelector(".tree svg");
  if (tree) {
    tree.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    facts.tree = tree.closest(".tree").querySelector("output").textContent;
  }
  const motion = document.querySelector(".motion");
  if (motion) {
    facts.motion = [motion.textContent];
    motion.click();
    facts.motion.push(motion.textContent);
  }
  const heard = (audio) => new Promise((done) => {
    audio.onloadedmetadata = () => done(audio.duration);
    audio.onerror = () => done(null);
    audio.preload = "metadata";
    audio.load();
  });
  facts.seconds = await Promise.all([...document.querySelectorAll("audio")].map(heard));
  facts.images = document.images.length;
  facts.missing = [...document.images].filter((image) => !image.naturalWidth).length;
  facts.wide = document.documentElement.scrollWidth - window.innerWidth;
  const over = (some) => [...document.querySelectorAll(some)]
    .filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.className);
  facts.scrolled = over(".summary, .strip");
  facts.outside = over(".cards div, .row figcaption, .tile figcaption, .chart");
  document.body.style.width = "390px";  // a headless window is not as narrow as a phone
  facts.outside.push(...over(".cards div, .row figcaption, .tile figcaption, .chart"));
  facts.failures = window.failures;
  const form = document.createElement("form");
  form.method = "post";
  form.enctype = "multipart/form-data";
  form.action = "ADDRESS";
  const box = document.createElement("textarea");
  box.name = "facts";
  box.value = JSON.stringify(facts);
  form.append(box);
  document.body.append(form);
  form.submit();
});
</script>"""
OPENS_WITHIN = 150  # seconds, on a busy machine too


class Listener(BaseHTTPRequestHandler):
    """Keeps what a page sends of itself."""

    facts: Queue[dict]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        form = BytesParser(policy=HTTP).parsebytes(
            f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode() + body
        )
        (box,) = form.iter_parts()
        self.facts.put(json.loads(box.get_payload(decode=True)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Nothing on stderr."""


@contextmanager
def listening() -> Iterator[tuple[str, Queue[dict]]]:
    """An address of this machine, and what is sent there."""
    sent: Queue[dict] = Queue()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Keeps", (Listener,), {"facts": sent}))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def facts(page: Path, width: int = 1280) -> dict:
    """Open a copy of the page that looks at itself and sends what it saw.

    In real time: a clock of the browser's own runs out before another process, such as the one that
    reads a sound's length, has answered. A form is what the page's policy lets it send.
    """
    assert CHROMIUM is not None
    copy = page.with_name(f"looked-at-{page.name}")
    text = page.read_text().replace("<head>", f"<head>{FAILURES}", 1)
    with listening() as (address, sent):
        script = FACTS.replace("ADDRESS", address)
        copy.write_text(text.replace("</body></html>", f"{script}</body></html>"))
        command = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            f"--window-size={width},900", f"--user-data-dir={page.parent / 'browser'}",
            copy.as_uri(),
        ]  # fmt: skip
        log = page.with_name("browser.log")
        with log.open("wb") as lines:
            browser = subprocess.Popen(command, stdout=lines, stderr=lines)
        try:
            return sent.get(timeout=OPENS_WITHIN)
        except Empty:
            raise AssertionError(f"the page sent nothing: {log.read_text()[-2000:]}") from None
        finally:
            browser.terminate()
            browser.wait(timeout=30)


@pytest.mark.parametrize("width", [1280, 500])  # a headless window is not narrower
@pytest.mark.parametrize("kind", ["image", "video", "text"])
def test_a_page_in_the_browser(tmp_path, kind, width):
    seen = facts(write_report(write_run(tmp_path / "run", kind)), width)
    assert seen["failures"] == [] and seen["missing"] == 0 and seen["wide"] <= 0
    assert seen["last"] == ["base", "iteration 4"] and seen["middle"] == ["base", "iteration 2"]
    assert seen["words"] == "iteration 2" and seen["outside"] == []
    assert seen["every"] == ["base", "iteration 2", "iteration 4"]
    before, first = seen["chart"]
    assert first.startswith("0: ") and before != first
    assert seen["tree"].startswith(("step 0, node 1", "part 1, node 1"))
    assert bool(seen["images"]) == (kind != "text")
    assert seen.get("motion") == (["Pause videos", "Play videos"] if kind == "video" else None)


TONES = '''
import math

import torch


class Tones(torch.nn.Module):
    """Tones of a quarter of a second: the state is their octave and their loudness."""

    state, rate = (2,), 8000

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = torch.nn.Linear(3, 2)

    def encode(self, prompts, rows):
        return torch.zeros(len(prompts), 1)

    def forward(self, x, sigma, encoded):
        return self.network(torch.cat([x, sigma.to(x)[:, None]], 1))

    def decode(self, x0, encoded):
        hertz, size = 440 * 2 ** x0[:, :1].clamp(-2, 2), x0[:, 1:].sigmoid()
        time = torch.arange(self.rate // 4) / self.rate
        return (0.5 * size * torch.sin(2 * math.pi * hertz * time))[:, None]
'''


def test_sounds_of_a_model_of_ones_own_are_played(tmp_path):
    """Scored by CLAP; each player of the page reads its sound, whose length is the model's."""
    (tmp_path / "tones.py").write_text(TONES)
    (tmp_path / "prompts.txt").write_text("a red cube\ntwo blue cat\n")
    prompts = str(tmp_path / "prompts.txt")
    settings = {
        "recipe": {"name": "flow_grpo", "steps": 3, "group": 4},
        "model": {"own": f"{tmp_path / 'tones.py'}:Tones", "lora": None, "device": "cpu"},
        "prompts": {"train": prompts, "held_out": prompts, "per_iteration": 2},
        "rewards": [{"name": "clap", "model": saved_clap(tmp_path / "clap"), "device": "cpu"}],
        "train": {"iterations": 2, "lr": 1e-2},
        "evaluate": {"every": 1, "steps": 3, "samples": 2},
        "track": {"images": 2},
    }
    run = flowrl.train(settings=settings, folder=tmp_path / "run")
    lines = [line for line in run.metrics if line.get("iteration")]
    assert all(line["reward_std/clap"] > 0 and line["grad_norm"] > 0 for line in lines)
    seen = facts(tmp_path / "run" / "report.html")
    assert seen["failures"] == [] and seen["missing"] == 0 and seen["outside"] == []
    assert len(seen["seconds"]) >= 4
    assert seen["seconds"] == pytest.approx([0.25] * len(seen["seconds"]))


def test_a_page_without_a_tree_runs_its_whole_script(tmp_path):
    run = write_run(tmp_path / "run")
    for iteration in (1, 2, 4):
        write_record(run, group(iteration))
    seen = facts(write_report(run))
    assert seen["failures"] == [] and "tree" not in seen


def test_two_runs_are_compared_without_scrolling(tmp_path):
    runs = [write_run(tmp_path / f"a-run-with-a-long-name-{end}", end=end) for end in (0.75, 0.5)]
    write_comparison(runs, tmp_path / "all.html")
    seen = facts(tmp_path / "all.html")
    assert seen["failures"] == [] and seen["scrolled"] == [] and seen["outside"] == []


def test_a_comparison_in_the_browser(tmp_path):
    runs = [write_run(tmp_path / name, end=end) for name, end in (("a", 0.75), ("b", 0.5))]
    write_comparison([*runs, write_run(tmp_path / "c")], tmp_path / "all.html")
    seen = facts(tmp_path / "all.html")
    assert seen["failures"] == [] and seen["missing"] == 0 and seen["wide"] <= 0
    assert seen["images"] == 4 * 4  # the base and three runs of each prompt


def test_a_run_of_200_iterations_is_small_and_opens_quickly(tmp_path):
    page = write_report(write_long_run(tmp_path / "run"))
    assert page.stat().st_size < 15e6
    seen = facts(page)
    # Half a second; work that grows with the square of the iterations would take far longer.
    assert seen["opened"] < 10_000 and seen["failures"] == [] and seen["missing"] == 0
