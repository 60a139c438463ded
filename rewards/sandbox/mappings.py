"""`mmap.mmap(-1, length)` in a program. Its default is memory that is shared without a file, which
the filter of system calls refuses, since no process need have it mapped to keep it. So it gets a
file without a name, whose size is bounded with that of all files, or private memory where it is too
large for one: a child then has a copy.
"""

from __future__ import annotations

import os
import resource
import sys

TYPE_CHECKING = False  # typing itself takes a tenth of a program's start
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

SHARED_FILES = "/dev/shm"
QUARTER = 4  # of what may be written, one mapping has at most a quarter


class _Finder:
    """Finds `mmap` as the finders behind it do."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "mmap":
            return None
        sys.meta_path.remove(cls)  # type: ignore[arg-type]
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        module.mmap = _with_files(module)


def _with_files(module: Any) -> type:
    """The class `mmap` whose mappings without a file are not shared without one."""
    plain, anonymous, shared = module.mmap, module.MAP_ANONYMOUS, module.MAP_SHARED

    class Mapping(plain):
        def __new__(
            cls, fileno: int, length: int, flags: int = shared, *more: Any, **named: Any
        ) -> Any:
            if fileno != -1 or not flags & shared:
                return plain.__new__(cls, fileno, length, flags, *more, **named)
            try:
                file = _unnamed(length)
            except OSError:
                flags = flags & ~shared | module.MAP_PRIVATE | anonymous
                named.pop("access", None)  # which goes with the default flags alone
                return plain.__new__(cls, -1, length, flags, *more, **named)
            try:
                return plain.__new__(cls, file, length, flags & ~anonymous, *more, **named)
            finally:
                os.close(file)  # it has a copy

    Mapping.__module__, Mapping.__name__, Mapping.__qualname__ = "mmap", "mmap", "mmap"
    return Mapping


def _unnamed(length: int) -> int:
    """A file of this length without a name. OSError if it is too large, or there is no folder."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if 0 <= most < QUARTER * length:
        raise OSError("too large for a file")
    file = os.open(SHARED_FILES, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.ftruncate(file, length)
    except OSError:
        os.close(file)
        raise
    return file


def share_by_files() -> None:
    """Let a later `import mmap` make its mappings so. Elsewhere than on Linux nothing refuses
    them."""
    if sys.platform == "linux":
        sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
