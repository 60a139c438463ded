"""The page of votes in a real browser: a person's way through it by keys and by taps.

Needs Chromium and playwright (`pip install playwright`). Screenshots go to FLOWRL_SHOTS, if it is
set, to be looked at.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowrl.paths import PROJECT
from flowrl.votes.answer import pair_votes
from flowrl.votes.log import VoteLog
from tests.support.voting import log_lines, written_media, written_plan

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install one, or set CHROMIUM"),
]
HOSTILE = "<b>bold</b> \u202eleft\u202c \u0642\u0637\u0629 <script>document.title = 'in'</script>"
LONG = "a very long prompt " * 520  # about 10,000 characters
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


SERVE = """
import sys
from pathlib import Path
from flowrl.votes.serve import PageAddress, serve_votes
serve_votes(Path(sys.argv[1]), PageAddress(port=int(sys.argv[2])))
"""


def started(folder: Path, raters: int = 1, port: int = 0) -> tuple[subprocess.Popen, list[str]]:
    """The page of a folder in a process of its own, and its links."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(folder), str(port)],
        cwd=PROJECT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    links: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        links += re.findall(r"http://\S+\?token=\S+", line)
        if len(links) == raters:
            return process, links
    raise AssertionError("the command ended without its links")


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield opened
        opened.close()


def wait_for_text(page, selector: str, pattern: str) -> None:
    """Wait until an element's text matches. The page's policy forbids scripts of the tests too."""
    until = time.monotonic() + 60
    while not re.search(pattern, page.locator(selector).text_content() or ""):
        assert time.monotonic() < until, (selector, pattern)
        time.sleep(0.05)


class Person:
    """A page, and what went wrong in it."""

    def __init__(self, browser, size) -> None:
        self.context = browser.new_context(viewport=size, has_touch=size is PHONE)
        self.page = self.context.new_page()
        self.failures = []
        self.page.on("pageerror", lambda error: self.failures.append(str(error)))
        self.page.on("console", self._noted)
        self.page.set_default_timeout(60_000)

    def _noted(self, message) -> None:
        if message.type == "error" and "ERR_CONNECTION" not in message.text:
            self.failures.append(message.text)

    def enter(self, link: str) -> None:
        self.page.goto(link)
        self.page.get_by_role("button", name="Begin").click()
        self.shown(1)
        assert "token" not in self.page.url

    def shown(self, number: int) -> None:
        """Wait until this pair is shown."""
        wait_for_text(self.page, "#left", rf"^{number} of")
        self.page.wait_for_selector("body:not(.waiting)")

    def finished(self) -> str:
        self.page.wait_for_selector("#end:not([hidden])")
        return self.page.inner_text("#found")

    def rest(self, first: int, last: int) -> str:
        """Vote left on all that is left; returns what was found."""
        for k in range(first, last + 1):
            self.page.keyboard.press("ArrowLeft")
            if k < last:
                self.shown(k + 1)
        return self.finished()

    def snapshot(self, name: str) -> None:
        if folder := os.environ.get("FLOWRL_SHOTS"):
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))

    def fits(self) -> None:
        """Nothing is wider than the window, and both sides and all buttons are inside."""
        wide = "document.documentElement.scrollWidth - window.innerWidth"
        assert self.page.evaluate(wide) <= 0
        size = self.page.viewport_size
        for element in self.page.query_selector_all("#pair img, #pair canvas, footer button"):
            box = element.bounding_box()
            if box is None:  # of another kind of samples
                continue
            assert box["x"] >= 0 and box["x"] + box["width"] <= size["width"] + 1, box
            assert box["y"] >= 0 and box["y"] + box["height"] <= size["height"] + 1, box


def test_twenty_pairs_by_keys_with_undo_reload_zoom_and_a_restart(tmp_path, browser):
    folder = tmp_path / "votes"
    plan = written_plan(folder, pairs=20, texts=("a red cat", HOSTILE, LONG))
    process, (link,) = started(folder)
    port = int(re.search(r":(\d+)/", link)[1])
    person = Person(browser, WIDE)
    person.enter(link)
    titles, keys = set(), ["ArrowLeft", "ArrowRight", "ArrowDown", "b", "s"]
    person.snapshot("wide-first")
    for k in range(5):
        person.fits()
        titles.add(person.page.inner_text("#prompt"))
        person.page.keyboard.press(keys[k])
        person.shown(k + 2)
    assert any("<script>" in title for title in titles) and person.page.title() == "Vote"
    person.page.keyboard.press("u")
    person.shown(5)
    person.page.keyboard.press("ArrowLeft")
    person.shown(6)
    person.page.reload()
    person.shown(6)
    person.page.keyboard.press("z")
    person.snapshot("wide-zoomed")
    assert "zoomed" in person.page.get_attribute("body", "class")
    person.page.keyboard.press("z")
    process.send_signal(signal.SIGKILL)
    process.wait()
    person.page.keyboard.press("ArrowRight")  # kept by the page until the server is back
    person.page.wait_for_selector("#trouble:not([hidden])")
    person.snapshot("wide-trouble")
    process, _ = started(folder, port=port)
    person.shown(7)
    found = person.rest(7, 22)
    person.snapshot("wide-end")
    assert "people prefer the trained weights in" in found and "20 pairs" in found
    assert process.wait(timeout=60) == 0
    assert not person.failures
    log = VoteLog.read(folder, plan)
    given = [each.verdict for each in log.raters["rater-1"].given]
    assert given == ["left", "right", "equal", "both_bad", "left", "right", *["left"] * 16]
    assert len(pair_votes(log)) == 20
    assert [each["event"] for each in log_lines(folder)].count("vote") == 22


def test_a_phone_by_taps_and_two_raters(tmp_path, browser):
    folder = tmp_path / "votes"
    plan = written_plan(folder, pairs=10, raters=2, texts=("a red cat", HOSTILE, LONG))
    process, links = started(folder, raters=2)
    people = [Person(browser, PHONE) for _ in links]
    for k, (person, link) in enumerate(zip(people, links, strict=True)):
        total = len(plan.turns[f"rater-{k + 1}"])
        person.enter(link)
        person.snapshot(f"phone-{k}")
        left, right = (person.page.locator(f"#image-{s}").bounding_box() for s in ("left", "right"))
        assert left["y"] + left["height"] <= right["y"], "stacked"
        button = person.page.locator("[data-verdict=left]").bounding_box()
        assert button["y"] > 844 * 0.7 and button["height"] >= 44, "within a thumb's reach"
        for n in range(1, total + 1):
            person.fits()
            target = ("[data-verdict=right]", "#image-left", "[data-verdict=equal]")[n % 3]
            person.page.tap(target)
            if n < total:
                person.shown(n + 1)
        person.finished()
        person.snapshot(f"phone-end-{k}")
    first = people[0]
    assert "1 more rater" in first.page.inner_text("#found")
    first.page.reload()
    wait_for_text(first.page, "#found", "people")
    assert process.wait(timeout=60) == 0
    assert not [f for person in people for f in person.failures]
    assert all(
        len(o.given) == len(plan.turns[r]) for r, o in VoteLog.read(folder, plan).raters.items()
    )


def test_two_tabs_of_one_person_never_count_a_pair_twice(tmp_path, browser):
    folder = tmp_path / "votes"
    plan = written_plan(folder, pairs=6)
    process, (link,) = started(folder)
    person = Person(browser, WIDE)
    person.enter(link)
    tab = person.context.new_page()
    tab.goto(person.page.url)
    wait_for_text(tab, "#left", "^1 of")
    person.page.keyboard.press("ArrowLeft")
    person.shown(2)
    tab.keyboard.press("ArrowRight")  # of the pair that the other tab has voted on
    wait_for_text(tab, "#left", "^2 of")
    time.sleep(0.3)
    given = VoteLog.read(folder, plan).raters["rater-1"].given
    assert [each.verdict for each in given] == ["left"]
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("kind", ["video", "text", "edit"])
def test_videos_texts_and_edits(kind, size, tmp_path, browser):
    folder = tmp_path / "votes"
    plan = written_media(folder, kind)
    process, (link,) = started(folder)
    person = Person(browser, size)
    person.enter(link)
    page = person.page
    person.fits()
    person.snapshot(f"{kind}-{size['width']}")
    shown = {"video": "canvas", "text": ".text", "edit": ".look img"}[kind]
    seen = page.locator(f"#pair {shown} >> visible=true")
    assert seen.count() == {"video": 2, "text": 2, "edit": 3}[kind]
    if kind == "video":
        first = [page.evaluate(PIXEL, side) for side in ("left", "right")]
        until = time.monotonic() + 20
        while [page.evaluate(PIXEL, side) for side in ("left", "right")] == first:
            assert time.monotonic() < until, "the videos do not move"
        page.keyboard.press("m")
        wait_for_text(page, "#heard", "Sound: (left|right)")
        page.keyboard.press("m")
        wait_for_text(page, "#heard", "Sound off")
    if kind == "text":
        assert "<script>" in page.inner_text("#text-left") and page.title() == "Vote"
        page.locator("#text-left").click()  # reading is no vote
        wait_for_text(page, "#left", "^1 of")
    if kind == "edit":
        boxes = [page.locator(f"#image-{s}").bounding_box() for s in ("left", "source", "right")]
        along = "x" if size is WIDE else "y"
        assert boxes[0][along] < boxes[1][along] < boxes[2][along], "the source is between"
    for k in range(1, 5):
        page.keyboard.press("ArrowLeft") if size is WIDE else page.tap("[data-verdict=left]")
        if k < 4:
            person.shown(k + 1)
    person.finished()
    assert process.wait(timeout=60) == 0
    assert not person.failures
    assert VoteLog.read(folder, plan).finished


PIXEL = """(side) => [...document.getElementById(`video-${side}`).getContext("2d")
  .getImageData(0, 0, 1, 1).data].join()"""
