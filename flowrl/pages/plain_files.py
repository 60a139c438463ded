"""Files of a run's folder that a page reads. Anybody may have written the folder."""

import errno
import os
import stat
from pathlib import Path

MOST_READ_BYTES = 2**29  # of a file; a million lines of metrics.jsonl have fewer


def plain_bytes(run: Path, path: Path, most: int = MOST_READ_BYTES) -> bytes:
    """The content of a plain file in a run's folder, of at most so many bytes.

    OSError if there is none. A pipe or a device, which might never end, a link that leads out of
    the folder, and a larger file count as none.
    """
    real = path.resolve(strict=True)
    if not real.is_relative_to(run.resolve()):
        raise OSError(errno.ELOOP, "a link out of the run's folder", str(path))
    file = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, "too large", str(path))
        return opened.read(most)
