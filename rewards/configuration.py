"""The user's configuration: what only the person who runs flowrl may decide, never a run's file.

It names commands that run as this user, so a file that others can write is refused.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIGURATION_VARIABLE = "FLOWRL_CONFIG"
SECTIONS = ("sandbox", "notify")
# of the run's variables, what commands such as docker, bwrap and curl need to work
PASSED_ON = ("PATH", "HOME", "LANG", "XDG_RUNTIME_DIR", "DOCKER_HOST", "CONTAINER_HOST")


def configuration_file() -> Path:
    """The user's configuration: FLOWRL_CONFIG, or flowrl/config.toml in XDG_CONFIG_HOME or
    ~/.config."""
    named, base = os.environ.get(CONFIGURATION_VARIABLE), os.environ.get("XDG_CONFIG_HOME")
    return Path(named or Path(base or "~/.config") / "flowrl" / "config.toml").expanduser()


def configured_section(name: str) -> Mapping[str, Any] | None:
    """A section of the user's configuration; None without the file or the section.

    ValueError for a file that others can write, that is no TOML, or that has sections of other
    names, for a section that is no table, and where FLOWRL_CONFIG names what is no file: who sets
    it waits for what the file says. /dev/null says that there is none.
    """
    assert name in SECTIONS
    file = configuration_file()
    if not file.is_file():
        if os.environ.get(CONFIGURATION_VARIABLE) and str(file) != os.devnull:
            raise ValueError(
                f"{CONFIGURATION_VARIABLE} names {file}, which is no file: correct it, or unset it"
            )
        return None
    status = file.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise ValueError(
            f"{file} belongs to another user, or others can write it: it names a command that "
            f"runs as you, so make it your own (chown, chmod go-w)"
        )
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{file}: {error}") from error
    other = next((key for key in tree if key not in SECTIONS), None)
    if other is not None:
        sections = " and ".join(f"[{section}]" for section in SECTIONS)
        raise ValueError(
            f"{file} has {other[:100]!r}: its sections are {sections}, and nothing else"
        )
    section = tree.get(name)
    if section is not None and not isinstance(section, dict):
        raise ValueError(f"{file}: write [{name}] as a section")
    return section


def passed_on(named: tuple[str, ...] = ()) -> dict[str, str]:
    """The variables that a command of the configuration gets: those of PASSED_ON, and those that
    its section names."""
    return {name: os.environ[name] for name in (*PASSED_ON, *named) if name in os.environ}
