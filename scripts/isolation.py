"""Run a program that nobody trusts: with no network, no files but Python's, and an empty home.

Three ways, the best first: bubblewrap, Linux namespaces through `unshare`, and a separate user.
Each is tried before it is relied on. `TRUST` is no way at all, for a teacher who knows the
students.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOBODY = "65534"
DISK = 256 * 2**20  # bytes of the empty home
HOME = "/tmp/home"
DROP = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
POWERLESS = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "USER": "student",
    "LC_ALL": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "agg",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Isolation:
    """A way to run a program apart; `command` takes the program and its empty home."""

    name: str
    promise: str
    command: Callable[[list[str], Path], list[str]]
    home: str = ""  # as the program sees it; empty: the folder itself
    keeps_apart: bool = True

    def start(
        self, program: list[str], folder: Path, stderr: int = subprocess.DEVNULL
    ) -> subprocess.Popen:
        """Start `program` in a session of its own, talking through its standard streams."""
        home = self.home or str(folder)
        path = "/course" if self.home else str(ROOT)
        return subprocess.Popen(
            self.command(program, folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env=ENVIRONMENT | {"HOME": home, "TMPDIR": home, "PYTHONPATH": path},
            start_new_session=True,
        )

    def fault(self) -> str:
        """Why this machine cannot do it; empty if it can."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            give_away(folder)
            try:
                program = [sys.executable, "-c", "import llm_course"]
                process = self.start(program, folder, subprocess.PIPE)
            except OSError as error:
                return str(error)
            try:
                _, errors = process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                end(process)
                return "it did not end"
        said = errors.decode(errors="replace").strip().splitlines()
        return "" if process.returncode == 0 else (said or [f"status {process.returncode}"])[-1]


def give_away(folder: Path) -> None:
    """Let the unprivileged user write to `folder`, if we may say so."""
    folder.chmod(0o700)
    if os.name == "posix" and os.geteuid() == 0:
        os.chown(folder, int(NOBODY), int(NOBODY))


def visible_paths() -> dict[str, str]:
    """What the program may read, by the name that it has there: libraries, Python, the package."""
    system = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives"]
    python = [sys.prefix, sys.base_prefix, *(path for path in sys.path if "-packages" in path)]
    paths = {path: path for path in system if os.path.exists(path)}
    for path in python:
        # under its real name too: a link is followed inside
        for name in (path, os.path.realpath(path)):
            if os.path.isdir(name) and not any(Path(name).is_relative_to(p) for p in paths):
                paths[name] = name
    return paths | {str(ROOT / "llm_course"): "/course/llm_course", runner(): runner()}


def runner() -> str:
    return str(ROOT / "scripts" / "answers.py")


def bubblewrap(program: list[str], folder: Path) -> list[str]:
    paths = visible_paths()
    binds = [part for old, new in paths.items() for part in ("--ro-bind", old, new)]
    above = {str(folder): None for new in paths.values() for folder in reversed(Path(new).parents)}
    for path in sorted(above.keys() - {"/", "/tmp", "/usr"}, reverse=True):
        binds = ["--perms", "0755", "--dir", path, *binds]
    places = ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(DISK)]
    places += ["--tmpfs", "/tmp", *binds, "--perms", "1777", "--dir", HOME, "--chdir", HOME]
    parts = ["--die-with-parent", "--cap-drop", "ALL"]
    if os.geteuid() != 0:
        return ["bwrap", "--unshare-all", *parts, *places, "--", *program]
    # root becomes nobody inside, where Python can be read even if it lives in root's home
    parts += [f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts", "cgroup-try")]
    parts += [part for cap in ("UID", "GID", "PCAP") for part in ("--cap-add", f"CAP_SET{cap}")]
    return ["bwrap", *parts, *places, "--", *DROP, *POWERLESS, *program]


def namespaces(program: list[str], folder: Path) -> list[str]:
    """A tree of bind mounts, a change of root, and no rights left."""
    is_root = os.geteuid() == 0
    root = shlex.quote(str(folder))
    lines = ["set -e", "mount --make-rprivate /", f"mount -t tmpfs -o size={DISK} tmpfs {root}"]
    for old, new in visible_paths().items():
        target = shlex.quote(f"{folder}{new}")
        make = "mkdir -p" if os.path.isdir(old) else f"mkdir -p $(dirname {target}); touch"
        lines.append(f"{make} {target}")
        lines.append(f"mount --rbind {shlex.quote(old)} {target}")
        lines.append(f"mount -o remount,bind,ro {target}")
    lines.append(f"mkdir -p {root}/proc {root}/dev {root}{HOME}")
    lines.append(f"mount -t proc proc {root}/proc")
    for device in ("null", "zero", "random", "urandom"):
        lines.append(f"touch {root}/dev/{device}; mount --bind /dev/{device} {root}/dev/{device}")
    lines.append(f"chmod 1777 {root}/tmp {root}{HOME}")
    last = [*DROP, *POWERLESS] if is_root else ["setpriv", *POWERLESS]
    inside = f"cd {HOME}; exec {shlex.join([*last, *program])}"
    lines.append(f"exec chroot {root} sh -c {shlex.quote(inside)}")
    unshare = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
    mapped = [] if is_root else ["--user", "--map-root-user"]
    return [*unshare, *mapped, "sh", "-c", "\n".join(lines)]


def other_user(program: list[str], folder: Path) -> list[str]:
    """The unprivileged user, if the solutions and the gradebook are closed to it."""
    if os.geteuid() != 0:
        raise OSError("only root can become another user")
    for secret in (ROOT / "solutions", ROOT / "_nbgrader"):
        look = subprocess.run([*DROP, "test", "-r", str(secret)], check=False)
        if look.returncode == 0:
            raise OSError(f"{secret} can be read by everyone: chmod 700 it")
    return [*DROP, *POWERLESS, *program]


TRUST = Isolation("trust", "with your own rights: nothing is kept apart", lambda p, _: p, "", False)
EMPTY = "no network, no files but Python's, an empty home"
WAYS = [
    Isolation("bubblewrap", EMPTY, bubblewrap, HOME),
    Isolation("namespaces", EMPTY, namespaces, HOME),
    Isolation("user", "an unprivileged user; the network is not cut off", other_user),
]


@cache
def find_ways() -> dict[str, str]:
    """For each way its fault on this machine, empty if it works."""
    if os.name != "posix":
        return {way.name: "this is not Linux" for way in WAYS}
    return {way.name: way.fault() for way in WAYS}


def choose() -> Isolation:
    """The best way that works here."""
    faults = find_ways()
    for way in WAYS:
        if not faults[way.name]:
            return way
    reasons = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
    raise ValueError(
        f"nothing here keeps students' code apart ({reasons}). Install bubblewrap, grade on another"
        " machine, or, for students whom you trust with your files, add --trust"
    )


def end(process: subprocess.Popen) -> None:
    """End a program and everything that it started in its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, 9)
    process.kill()
    process.wait()
