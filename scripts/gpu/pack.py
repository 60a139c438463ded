"""Gather what travels to a machine with one GPU beside this tree, and check that it fits.

    python scripts/gpu/pack.py            # .gpu/wheels, .gpu/commit.json, and a report
    python scripts/gpu/pack.py --check    # what is there already; nothing is downloaded
    python scripts/gpu/pack.py --peer flow_grpo=FOLDER   # also sources of a peer, from a checkout

The machine has Python, torch, transformers and many packages, and reaches no registry
(scripts/gpu/there.json lists them, with the versions that are known). What flowrl and its scripts
need beyond that is downloaded as wheels for that Python, at the versions of constraints.txt. Each
wheel's own needs are held against both. A peer (scripts/gpu/peers.py) travels if its own trainer
has done an iteration here with the packages of that machine. Exit code 1: a need is met by neither,
a peer has not done that, or the tree and `.gpu` are larger than what travels.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from packaging.requirements import Requirement  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402

from flowrl.errors import UserError  # noqa: E402
from scripts.gpu.lines import COMMIT, PACKED, git, tree_state  # noqa: E402
from scripts.gpu.peers import PEERS, SAME, SOURCES, packed  # noqa: E402

THERE = Path(__file__).with_name("there.json")
WHEELS = PACKED / "wheels"
SIZES = Path(__file__).with_name("packed.json")  # committed, for docs/first_hour_on_a_gpu.md
MOST = 64 * 2**20  # bytes that travel in a call
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64", "manylinux1_x86_64")  # fmt: skip
SCRIPTS = ("tyro", "trl")  # needs of scripts that run there, beside those of flowrl
CERTAIN = ("typing-extensions", "fsspec")  # small, and there in a version that nobody has read
Versions = dict[str, str | None]  # by canonical name; None: there, in an unknown version


@dataclass(frozen=True)
class Machine:
    """The Python of a machine, and its packages."""

    python: str
    packages: Versions

    @property
    def environment(self) -> dict[str, str]:
        """The markers of requirements, as they read there."""
        short = ".".join(self.python.split(".")[:2])
        return {"python_version": short, "python_full_version": self.python,
                "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix",
                "platform_machine": "x86_64", "implementation_name": "cpython",
                "platform_python_implementation": "CPython", "extra": ""}  # fmt: skip


def machine(file: Path = THERE) -> Machine:
    known = json.loads(file.read_text())
    packages = {canonicalize_name(name): version for name, version in known["packages"].items()}
    return Machine(known["python"], packages)


def project_needs() -> list[Requirement]:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in [*project["dependencies"], *SCRIPTS]]


def pinned() -> dict[str, str]:
    """Versions of constraints.txt, by canonical name."""
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("#")[0].partition("==") for line in lines if "==" in line]
    return {canonicalize_name(name.strip()): version.strip() for name, _, version in pairs}


def verdict(need: Requirement, there: Machine, carried: Mapping[str, str]) -> str:
    """The way in which a need is met: carried, there, unknown (there, in a version that nobody has
    seen), wrong (in a version that does not do) or lacking. A carried wheel comes first."""
    name = canonicalize_name(need.name)
    if name in carried:
        return "carried" if need.specifier.contains(carried[name], prereleases=True) else "wrong"
    if name not in there.packages:
        return "lacking"
    version = there.packages[name]
    if version is None:
        return "there" if not need.specifier else "unknown"
    return "there" if need.specifier.contains(version, prereleases=True) else "wrong"


def applies(need: Requirement, there: Machine) -> bool:
    return need.marker is None or need.marker.evaluate(there.environment)


def needs_of(wheel: Path) -> tuple[str, str, list[Requirement]]:
    """A wheel's name, version and needs. UserError for a file that is no wheel."""
    try:
        with zipfile.ZipFile(wheel) as files:
            (name,) = [n for n in files.namelist() if n.endswith(".dist-info/METADATA")]
            metadata = Parser().parsestr(files.read(name).decode())
    except (zipfile.BadZipFile, ValueError) as error:
        raise UserError(f"{wheel}: not a wheel: delete it and run scripts/gpu/pack.py") from error
    lines = metadata.get_all("Requires-Dist") or []
    return metadata["Name"], metadata["Version"], [Requirement(line) for line in lines]


def carried(folder: Path) -> dict[str, str]:
    """Versions of a folder's wheels. UserError for two of one package."""
    found = dict[str, str]()
    for wheel in sorted(folder.glob("*.whl")):
        name, version, _ = needs_of(wheel)
        name = canonicalize_name(name)
        if name in found:
            raise UserError(f"{folder}: two wheels of {name}: keep one of them")
        found[name] = version
    return found


def unmet(folder: Path, there: Machine) -> list[tuple[str, Requirement, str]]:
    """The needs of flowrl, of each peer and of each wheel that are not met there for certain: who
    needs it, what, and its verdict. Extras are left out."""
    have = carried(folder)
    wanted = [("flowrl", need) for need in project_needs()]
    wanted += [(name, Requirement(need)) for name in packed() for need in SOURCES[name].needs]
    for wheel in sorted(folder.glob("*.whl")):
        name, _, needs = needs_of(wheel)
        wanted += [(name, need) for need in needs]
    return [
        (owner, need, found)
        for owner, need in wanted
        if applies(need, there)
        and (found := verdict(need, there, have)) not in ("carried", "there")
    ]


def download(names: Sequence[str], there: Machine) -> None:
    """Download wheels for the machine's Python, without their needs, at the pinned versions."""
    pins, short = pinned(), ".".join(there.python.split(".")[:2])
    wanted = [f"{name}=={pins[name]}" if name in pins else name for name in names]
    platforms = [word for each in PLATFORMS for word in ("--platform", each)]
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
        "--python-version", short, "--implementation", "cp", *platforms, "-d", str(WHEELS), *wanted,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"pack: no wheels of {', '.join(wanted)}: {done.stderr.strip()[-400:]}")


def gather(there: Machine) -> None:
    """Download what lacks, and what that needs in turn."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    tried, have = set[str](), carried(WHEELS)
    if lacking := [name for name in CERTAIN if name not in have]:
        download(lacking, there)
    while names := sorted(
        {canonicalize_name(need.name) for _, need, found in unmet(WHEELS, there)
         if found in ("lacking", "wrong")} - tried
    ):  # fmt: skip
        tried |= set(names)
        download(names, there)


def sizes() -> dict[str, int]:
    """Bytes of the tree that git knows, and of wheels and peers, which are carried beside it."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    files = [PROJECT / name for name in names if name]
    beside = [path for path in PACKED.rglob("*") if path.is_file()]
    peers = [path for path in beside if path.is_relative_to(PEERS)]
    return {
        "tree": sum(path.stat().st_size for path in files if path.is_file()),
        "wheels": sum(path.stat().st_size for path in beside if path not in peers),
        "peers": sum(path.stat().st_size for path in peers),
    }


def add_peer(name: str, checkout: Path) -> None:
    """Copy what a peer's trainer needs from a checkout of its repository, in the place of what was
    there. UserError for an unknown peer, or a folder that is no checkout with those files."""
    if name not in SOURCES:
        raise UserError(f"--peer: {name!r} is not known; choose from {', '.join(SOURCES)}")
    try:
        commit = git("-C", str(checkout.absolute()), "rev-parse", "HEAD").strip()
    except subprocess.CalledProcessError as error:
        raise UserError(f"--peer {name}={checkout}: not a checkout: git clone it first") from error
    target = PEERS / name
    shutil.rmtree(target, ignore_errors=True)
    for pattern in SOURCES[name].files:
        named = git("-C", str(checkout.absolute()), "ls-files", "-z", pattern).split("\0")
        files = [file for file in named if file and (checkout / file).is_file()]
        if not files:
            raise UserError(f"--peer {name}={checkout}: it has no {pattern}: is it {name}?")
        for file in files:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkout / file, target / file)
    (target / "source.json").write_text(json.dumps({"commit": commit}))


def peer_faults(there: Machine) -> list[str]:
    """The packed peers whose own trainer has not done an iteration here, of these sources and with
    the packages of the machine."""
    faults = list[str]()
    for name in packed():
        again = f"python -m scripts.gpu.peers {name} --try, with the packages of there.json"
        file = PEERS / name / "tried.json"
        if not file.is_file():
            faults.append(f"peer {name}: it has not been tried: {again}")
            continue
        tried = json.loads(file.read_text())
        source = json.loads((PEERS / name / "source.json").read_text())
        other = [p for p in SAME if tried["versions"].get(p) != there.packages[p]]
        if tried["commit"] != source["commit"]:
            faults.append(f"peer {name}: other sources were tried: {again}")
        elif other:
            faults.append(f"peer {name}: tried with another {', '.join(other)}: {again}")
    return faults


def report(there: Machine) -> list[str]:
    """Lines of faults; none if all that travels is there, fits and is complete."""
    faults = [
        f"{owner} needs {need}: {found}"
        for owner, need, found in unmet(WHEELS, there)
        if found != "unknown"
    ]
    faults += peer_faults(there)
    found = sizes()
    if sum(found.values()) > MOST:
        faults.append(f"{sum(found.values()) / 2**20:.1f} MiB travel, and 64 MiB may")
    return faults


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="download nothing")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=FOLDER")
    given = parser.parse_args(words)
    there = machine()
    try:
        for name, _, folder in (word.partition("=") for word in given.peer):
            add_peer(name, Path(folder))
        if not given.check:
            gather(there)
            rounded = {name: round(size / 2**20, 1) for name, size in sizes().items()}
            SIZES.write_text(json.dumps(rounded) + "\n")
        state: dict[str, Any] = tree_state()
        PACKED.mkdir(exist_ok=True)
        COMMIT.write_text(json.dumps(state))
        faults = report(there)
        unknown = [f"{owner}: {need}" for owner, need, v in unmet(WHEELS, there) if v == "unknown"]
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(f"{name} {version}" for name, version in carried(WHEELS).items()))
    print(", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes().items()))
    print(f"commit {state['commit'][:12]}{', changed' if state['differs'] else ''}")
    print(f"there in an unknown version: {'; '.join(unknown) or 'nothing'}")
    print("\n".join(faults) or "complete")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
