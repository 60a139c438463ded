"""Tell files that are not what their names say, by their first bytes.

A clone without Git LFS has pointers in place of data, the address of a page saves the page, and
some files have another form than their ending. Readers ask here, so that their errors say it.
"""

import codecs
import os
import re
import stat
from pathlib import Path
from typing import IO

FIRST_BYTES = 1024

# what stands in a file's place, whatever its name promises: beginning, clause with the fix
_STAND_INS = (
    (
        re.compile(rb"version https://git-lfs\."),
        "is a pointer of Git LFS, without the data: run `git lfs pull` in its folder",
    ),
    (
        re.compile(rb"/annex/objects/"),
        "is a pointer of git-annex, without the data: run `git annex get` in its folder",
    ),
    (
        re.compile(
            rb"(\xef\xbb\xbf)?\s*(<!--.*?-->\s*)*(<!doctype\s+html|<html[\s>])", re.I | re.S
        ),
        "is an HTML page, not the file that the page is about: download the file itself (on "
        "huggingface.co its address has /resolve/ in place of /blob/, on GitHub /raw/)",
    ),
    (
        re.compile(rb"(\xef\xbb\xbf)?\s*<\?xml[^>]*>\s*<Error>", re.I),
        "is the error message of a storage service: download the file again",
    ),
)

# other forms: beginning, endings of files that have it, clause with the fix
# torch.save writes zip archives, and some programs call theirs .pth.tar
_ZIPPED = (".zip", ".bin", ".pt", ".pth", ".ckpt", ".tar", ".npz", ".whl", ".xlsx", ".jar")
_IMAGES = ("", ".png", ".apng", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".gif")
_FORMS = (
    (re.compile(rb"PAR1"), (".parquet",), "is a parquet file: give it the ending .parquet"),
    (re.compile(rb"ARROW1\0"), (".arrow",), "is an Arrow file: convert it to parquet"),
    (re.compile(rb"\x1f\x8b\x08"), (".gz", ".tgz"), "is compressed by gzip: decompress it"),
    (re.compile(rb"\x28\xb5\x2f\xfd"), (".zst",), "is compressed by zstd: decompress it"),
    (re.compile(rb"\xfd7zXZ\0"), (".xz",), "is compressed by xz: decompress it"),
    (re.compile(rb"BZh[1-9]1AY"), (".bz2",), "is compressed by bzip2: decompress it"),
    (
        re.compile(rb"PK\x03\x04"),
        _ZIPPED,
        "is a zip archive: unpack it; save zipped weights of torch as safetensors",
    ),
    (re.compile(rb"\x89PNG|\xff\xd8\xff"), _IMAGES, "is an image"),
    (
        re.compile(rb"....ftyp(hei[cxms]|hev[cx]|mif1|msf1)", re.S),
        (".heic", ".heif"),
        "is a HEIC image, as phones write: convert it to JPEG or PNG",
    ),
    (
        re.compile(rb"....ftypavi[fs]", re.S),
        (".avif",),
        "is an AVIF image: convert it to JPEG or PNG",
    ),
    (
        re.compile(rb"....ftyp|\x1a\x45\xdf\xa3", re.S),
        ("", ".mp4", ".mov", ".m4v", ".webm", ".mkv", ".m4a"),
        "is a video",
    ),
    (re.compile(rb"GGUF"), (".gguf",), "is a GGUF file: give it the ending .gguf"),
)
_BINARY_TABLES = (".parquet",)  # a text's form is not known by its first bytes: it has none of them
_CONTROLS = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f]")  # but tabs, ends of lines and of pages


def unlike_its_name(name: str, begin: bytes) -> str | None:
    """Return what a file of this name is, as a clause with the fix, if its first bytes
    (`FIRST_BYTES` of them) are those of a stand-in, or of a form that belongs to other endings.
    None for any other file."""
    for form, words in _STAND_INS:
        if form.match(begin):
            return words
    ending = Path(name).suffix.lower()
    for form, endings, words in _FORMS:
        if ending not in endings and form.match(begin):
            return words
    if ending in _BINARY_TABLES and not begin.startswith(b"PAR1") and _is_text(begin):
        return "is text, as JSON lines or CSV are: give it their ending, .jsonl or .csv"
    return None


def _is_text(begin: bytes) -> bool:
    """Whether a file that begins with these bytes seems to be a text; an empty one is none."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # the last letter may be cut
    try:
        text = decoder.decode(begin)
    except UnicodeDecodeError:
        return False
    return bool(text.strip()) and not _CONTROLS.search(text)


def file_unlike_its_name(path: Path) -> str | None:
    """`unlike_its_name` of a file. OSError if it cannot be read."""
    with open_plain(path) as file:
        return unlike_its_name(path.name, file.read(FIRST_BYTES))


def open_plain(path: str | Path) -> IO[bytes]:
    """Open a plain file to read its bytes. OSError if it cannot be read, and for a pipe or a
    device, which may never end and whose opening may never return."""
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 the caller closes it
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError("a pipe or a device, not a file")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
