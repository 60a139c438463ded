"""Fonts for prompts in any script: DejaVu for Latin, Greek, Cyrillic and Arabic, and whatever the
system has for Chinese, Japanese, Korean and the rest."""

import logging
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

log = logging.getLogger(__name__)

_FOLDERS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.fonts",
    "~/.local/share/fonts",
    "/System/Library/Fonts",
    "/Library/Fonts",
    "C:/Windows/Fonts",
)
# names of files that hold many scripts, the best first
_WANTED = (
    "dejavusans.",
    "notosans-regular",
    "notosanscjk",
    "notoserifcjk",
    "sourcehansans",
    "wqy-",
    "unifont",
    "arialuni",
    "arial unicode",
    "droidsansfallback",
    "ipag",
    "nanumgothic",
    "applesdgothicneo",
    "hiragino",
    "pingfang",
    "malgun",
    "msyh",
    "msgothic",
    "notosansarabic",
    "notonaskharabic",
)
_ABSENT = "\U0010ffff"  # a noncharacter: fonts show their box for it
_MOST_FILES = 20_000
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
Place = tuple[int | float, int | float]


@dataclass(frozen=True)
class Fonts:
    """Fonts of one size, tried in order for each letter."""

    fonts: tuple[Font, ...]

    def runs(self, text: str) -> Iterator[tuple[str, Font]]:
        """Split a text into runs, each with a font that has all of its letters."""
        part, font = "", self.fonts[0]
        for letter in text:
            best = font if letter.isspace() else self._font(letter)
            if best is not font and part:
                yield part, font
                part = ""
            part, font = part + letter, best
        if part:
            yield part, font

    def _font(self, letter: str) -> Font:
        chosen = next((font for font in self.fonts if has_letter(font, letter)), None)
        if chosen is None:
            _warn_once(_script(letter))
        return chosen or self.fonts[0]

    def draw(self, pen: ImageDraw.ImageDraw, place: Place, text: str, colour: object) -> None:
        """Draw a line of text, switching fonts as needed."""
        x, y = place
        for part, font in self.runs(text):
            pen.text((x, y), part, colour, font)  # type: ignore[arg-type]
            x += pen.textlength(part, font)


@cache
def has_letter(font: Font, letter: str) -> bool:
    """Whether a font has its own glyph for a letter."""
    return _glyph(font, letter) != _glyph(font, _ABSENT)


def _glyph(font: Font, letter: str) -> tuple[tuple[int, int], bytes]:
    _, _, right, bottom = font.getbbox(letter)
    image = Image.new("L", (max(1, int(right) + 1), max(1, int(bottom) + 1)))
    ImageDraw.Draw(image).text((0, 0), letter, 255, font)
    return image.size, image.tobytes()


@cache
def load_fonts(size: int) -> Fonts:
    """Load Pillow's own font first, so that ASCII looks the same everywhere, then fonts of this
    machine."""
    fonts: list[Font] = [ImageFont.load_default(size)]
    for path in font_files():
        try:
            fonts.append(ImageFont.truetype(str(path), size))
        except OSError:  # a damaged file, or a format that FreeType cannot read
            continue
    return Fonts(tuple(fonts))


@cache
def font_files() -> tuple[Path, ...]:
    """Find font files that cover many scripts, from fontconfig, matplotlib and the system's font
    folders, best first."""
    paths = {path.name.lower(): path for path in (*_in_folders(), *_matplotlib(), *_fontconfig())}
    ranked = [
        (rank, name)
        for name in sorted(paths)
        for rank, wanted in enumerate(_WANTED)
        if name.startswith(wanted)
    ]
    return tuple(paths[name] for _, name in sorted(ranked))


def _fontconfig() -> list[Path]:
    program = shutil.which("fc-list")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, "--format", "%{file}\n"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [Path(line) for line in done.stdout.splitlines() if line.strip()]


def _matplotlib() -> list[Path]:
    spec = find_spec("matplotlib")
    folders = spec.submodule_search_locations if spec else None
    return [p for f in folders or () for p in Path(f).glob("mpl-data/fonts/ttf/*.ttf")]


def _in_folders() -> Iterator[Path]:
    seen = 0
    for folder in _FOLDERS:
        for path in Path(folder).expanduser().rglob("*"):
            seen += 1
            if seen > _MOST_FILES:
                return
            if path.suffix.lower() in (".ttf", ".otf", ".ttc"):
                yield path


_SCRIPTS: Sequence[tuple[int, int, str]] = (
    (0x0370, 0x03FF, "Greek"),
    (0x0400, 0x052F, "Cyrillic"),
    (0x0590, 0x05FF, "Hebrew"),
    (0x0600, 0x06FF, "Arabic"),
    (0x0900, 0x0DFF, "Indic"),
    (0x0E00, 0x0E7F, "Thai"),
    (0x1100, 0x11FF, "Korean"),
    (0x3040, 0x30FF, "Japanese"),
    (0x2E80, 0x9FFF, "Chinese"),
    (0xAC00, 0xD7AF, "Korean"),
    (0x1F000, 0x1FAFF, "emoji"),
    (0x20000, 0x323AF, "Chinese"),
)


def _script(letter: str) -> str:
    point = ord(letter)
    return next((n for first, last, n in _SCRIPTS if first <= point <= last), f"U+{point:04X}")


@cache
def _warn_once(script: str) -> None:
    log.warning(
        "no font on this machine has %s letters, so pages show boxes for them; install one, such "
        "as Noto Sans CJK (fonts-noto-cjk) or GNU Unifont",
        script,
    )
