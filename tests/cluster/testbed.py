#!/usr/bin/env python3
"""A real Slurm of eight nodes on one Linux machine, for tests of what only a cluster does. Root on Debian or Ubuntu.

Every node has its own network (interface hsn0 on a common bridge, no way out), host name, processes, IPC, /tmp,
/dev/shm and /sys: programs on two nodes cannot meet but over the network. The file system is shared, except /tmp.
n1 to n4 pretend to four h100 each (Slurm sets CUDA_VISIBLE_DEVICES), n5 to n8 to four mi300a (ROCR_VISIBLE_DEVICES).
This machine itself is the login node: sbatch, squeue and the like work in any shell while the testbed is up.

What runs is found by a mark in its environment, so nothing that an earlier run left can lead astray: no pid files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Final

BASE: Final = Path("/srv/sluice-testbed")
FOLDERS: Final = ("db", "dev", "etc", "log", "run", "shared", "spool", "state")
HERE: Final = Path(__file__).parent
NODES: Final = {f"n{i}": f"10.77.0.1{i}" for i in range(1, 9)}
GATEWAY: Final = "10.77.0.1"
BRIDGE: Final = "sluice0"
PACKAGES: Final = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurmdbd",
    "munge",
    "mariadb-server-core",  # the server alone: without the package that runs one as a service
    "libpmix-dev",  # Slurm opens the library by the name that only this package has
    "openmpi-bin",
    "iproute2",
)
CLIENT_CONFIG: Final = Path("/run/slurm/conf")
"""Where Slurm's commands look when there is no /etc/slurm/slurm.conf; gone after a reboot, like the rest."""
HOSTS: Final = Path("/etc/hosts")
HOSTS_MARK: Final = "# sluice testbed"
MARK: Final = "SLUICE_TESTBED"
DATABASE: Final = ("--skip-log-bin", "--innodb-buffer-pool-size=32M", "--innodb-log-file-size=8M")
DATABASE_TABLES: Final = ("mysql/mysql_system_tables.sql", "m*/mariadb_system_tables.sql")
LIMIT_S: Final = 60.0
COMMAND_LIMIT_S: Final = 20.0
INSTALL_LIMIT_S: Final = 900.0
POLL_S: Final = 0.05
TAIL_LINES: Final = 20


class ClusterError(Exception):
    """The testbed cannot do what was asked; the text says why."""


def obstacle() -> str:
    """Why this machine can have no testbed; empty if it can."""
    release = Path("/etc/os-release")
    families = [line.partition("=")[2].strip('"') for line in release.read_text().splitlines() if line.startswith("ID")]
    if os.geteuid() != 0:
        return "only root can set up network namespaces, and this is not root"
    if not {"debian", "ubuntu"} & set(" ".join(families).split()):
        return "it installs Debian packages, and this is neither Debian nor Ubuntu"
    if HERE.is_relative_to("/tmp"):
        return f"nodes have a /tmp of their own and would not see this checkout ({HERE.parents[1]})"
    for path in (Path("/etc/slurm/slurm.conf"), CLIENT_CONFIG):
        if path.exists() and not path.is_symlink():
            return f"this machine has a Slurm of its own ({path})"
    if _run(*_unshare(), "true", check=False).returncode != 0:
        return "root may not make namespaces here (a container without CAP_SYS_ADMIN?)"
    return ""


def missing_packages() -> list[str]:
    known = _run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *PACKAGES, check=False).stdout
    return [name for name in PACKAGES if f"{name} installed" not in known.splitlines()]


def install() -> None:
    """Install the Debian packages that are missing."""
    if not (missing := missing_packages()):
        return
    print(f"testbed: installing {', '.join(missing)}", file=sys.stderr, flush=True)
    settings = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "a"}
    apt = ("apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300", "-o", "APT::Install-Recommends=false")
    _run(*apt, "update", env=settings, limit_s=INSTALL_LIMIT_S)
    _run(*apt, "install", *missing, env=settings, limit_s=INSTALL_LIMIT_S)


@dataclass(frozen=True)
class Cluster:
    """The one testbed of this machine."""

    base: Path = BASE
    """Where everything lies; outside /tmp, which every node has for itself."""

    @property
    def shared(self) -> Path:
        """A folder that all nodes see; what is in it lives until the next `up`."""
        return self.base / "shared"

    # ---- up and down

    def up(self) -> None:
        """Start it, unless it is up and well. What is left of an earlier one is removed first."""
        if reason := obstacle():
            raise ClusterError(reason)
        if missing := missing_packages():
            raise ClusterError(f"packages are missing, which `install` installs: {', '.join(missing)}")
        others = {p.name for p in self.base.iterdir()} - set(FOLDERS) if self.base.exists() else set()
        if others:
            raise ClusterError(f"{self.base} is somebody's: it holds {', '.join(sorted(others))}")
        if self.is_well():
            return
        self.down()
        shutil.rmtree(self.base, ignore_errors=True)
        self._write_files()
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{GATEWAY}/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        self._start_munge()
        self._start_accounting()
        self.start_controller()
        self._boot(*NODES)

    def down(self) -> None:
        """End it and all that runs on it. The logs and the shared folder stay, to be read."""
        self._kill(self._running())
        _run("ip", "link", "del", BRIDGE, check=False)
        for node in NODES:
            _run("ip", "link", "del", f"{BRIDGE}{node}", check=False)
        _edit_hosts([])
        if CLIENT_CONFIG.is_symlink():
            CLIENT_CONFIG.unlink()
        for name in set(FOLDERS) - {"log", "shared"}:
            shutil.rmtree(self.base / name, ignore_errors=True)

    def is_well(self) -> bool:
        """Everything runs and all nodes can take jobs."""
        wanted = {"munged", "mariadbd", "slurmdbd", "slurmctld", *NODES}
        return wanted <= set(self._running()) and all(map(self.is_ready, NODES))

    def status(self) -> str:
        """What runs, and the nodes as Slurm sees them."""
        running = "".join(f"{name}: {' '.join(map(str, pids))}\n" for name, pids in sorted(self._running().items()))
        return running + _run("sinfo", check=False).stdout if running else "nothing runs\n"

    def is_ready(self, node: str) -> bool:
        """The node takes jobs or runs some."""
        return _show(node, "State") in {"IDLE", "MIXED", "ALLOCATED"}

    # ---- faults

    def kill(self, node: str) -> None:
        """Crash a node: all its processes are gone at once, and its network."""
        self._kill([node])

    def revive(self, node: str) -> None:
        """Boot a node, unless it runs, and wait until it takes jobs."""
        if node not in self._running():
            self._boot(node)

    def stop_controller(self) -> None:
        """Take slurmctld away; jobs run on."""
        for pid in self._running().get("slurmctld", ()):
            os.kill(pid, signal.SIGTERM)
        _until("the end of slurmctld", lambda: "slurmctld" not in self._running(), self._log("slurmctld"))

    def start_controller(self) -> None:
        if "slurmctld" not in self._running():
            self._spawn("slurmctld", *_as_login("slurmctld", "-D", "-f", str(self.base / "etc/slurm.conf")))
        _until("slurmctld", lambda: " is UP" in _run("scontrol", "ping", check=False).stdout, self._log("slurmctld"))

    def set_accounting(self, on: bool) -> None:
        """With or without a database of ended jobs; restarts slurmctld, jobs run on."""
        self.stop_controller()
        self._write_slurm_config(accounting=on)
        self.start_controller()

    # ---- parts

    def _write_files(self) -> None:
        for name in FOLDERS:
            (self.base / name).mkdir(parents=True)
        for path in (self.base, *self.base.iterdir()):
            path.chmod(0o700 if path.name == "db" else 0o755)
        for i in range(4):
            os.mknod(self.base / f"dev/gpu{i}", 0o020666, os.makedev(1, 3))  # Slurm wants a file for each GPU
        self._write_slurm_config(accounting=True)
        self._write("cgroup.conf")
        self._write("gres.conf")
        self._write("slurmdbd.conf", gateway=GATEWAY).chmod(0o600)
        key = self.base / "etc/munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        CLIENT_CONFIG.parent.mkdir(parents=True, exist_ok=True)
        CLIENT_CONFIG.symlink_to(self.base / "etc")
        _edit_hosts([(GATEWAY, "login1"), *((address, node) for node, address in NODES.items())])

    def _write_slurm_config(self, accounting: bool) -> None:
        storage = f"accounting_storage/{'slurmdbd' if accounting else 'none'}"
        self._write("slurm.conf", accounting=storage, gateway=GATEWAY, **NODES)

    def _write(self, name: str, **values: str) -> Path:
        path = self.base / "etc" / name
        path.write_text(Template((HERE / name).read_text()).substitute(values, base=self.base))
        return path

    def _boot(self, *nodes: str) -> None:
        """Start nodes and wait until they take jobs and slurmctld knows that they are new."""
        before = {node: _show(node, "SlurmdStartTime") for node in nodes}
        for node in nodes:
            (self.base / "spool" / node).mkdir(exist_ok=True)
            script = (*_unshare(), "bash", str(HERE / "node.sh"), node, f"{NODES[node]}/24", str(self.base))
            pid = self._spawn(node, *script)
            _until(f"the network of {node}", lambda: self._connect(node, pid), self._log(node))  # noqa: B023
        for node, old in before.items():
            is_new = lambda: _show(node, "SlurmdStartTime") != old and self.is_ready(node)  # noqa: B023, E731
            _until(f"{node} to take jobs", is_new, self._log(node))

    def _connect(self, node: str, pid: int) -> bool:
        """Give the node its hsn0; False while it has no namespace, or the kernel still the link of one that died."""
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            raise ClusterError(f"{node} ended while it was set up{_tail(self._log(node))}")
        if Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
            return False
        here, there = f"{BRIDGE}{node}", ("type", "veth", "peer", "name", "hsn0", "netns", str(pid))
        _run("ip", "link", "del", here, check=False)
        if _run("ip", "link", "add", here, *there, check=False).returncode != 0:
            return False
        _run("ip", "link", "set", here, "master", BRIDGE, "up")
        return True

    def _start_munge(self) -> None:
        run = self.base / "run"
        files = {"key-file": self.base / "etc/munge.key", "pid-file": run / "munged.pid", "seed-file": run / "seed"}
        options = [f"--{name}={path}" for name, path in {**files, "socket": run / "munge.socket"}.items()]
        self._spawn("munged", "munged", "--foreground", *options)
        client = ("munge", "-n", "-S", str(run / "munge.socket"))
        _until("munged", lambda: _run(*client, check=False).returncode == 0, self._log("munged"))

    def _start_accounting(self) -> None:
        """Slurm's daemon and its database, which asks nobody who he is: only root reaches its socket."""
        db = self.base / "db"
        server = ("mariadbd", "--no-defaults", f"--datadir={db}", "--user=root", "--skip-grant-tables", *DATABASE)
        tables = next(path for folder in DATABASE_TABLES for path in Path("/usr/share").glob(folder))
        _run(*server, "--bootstrap", stdin=f"create database mysql;\nuse mysql;\n{tables.read_text()}")
        files = (f"--socket={db / 'socket'}", f"--pid-file={db / 'pid'}")
        self._spawn("mariadbd", *server, "--skip-networking", *files)
        _until("mariadbd", (db / "socket").exists, self._log("mariadbd"))
        self._spawn("slurmdbd", *_as_login("slurmdbd", "-D"))
        add = ("sacctmgr", "-i", "add", "cluster", "sluice")
        _until("slurmdbd", lambda: _run(*add, check=False).returncode == 0, self._log("slurmdbd"))

    # ---- processes

    def _log(self, name: str) -> Path:
        return self.base / "log" / f"{name}.out"

    def _spawn(self, name: str, *command: str) -> int:
        """Start a daemon with our mark, in a session of its own."""
        settings = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "SLURM_CONF": str(self.base / "etc/slurm.conf"),
            "MYSQL_UNIX_PORT": str(self.base / "db/socket"),
            MARK: name,
        }
        with self._log(name).open("ab") as log:
            files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
            files += [(os.POSIX_SPAWN_DUP2, log.fileno(), number) for number in (1, 2)]
            return os.posix_spawnp(command[0], command, settings, file_actions=files, setsid=True)

    def _running(self) -> dict[str, list[int]]:
        """Daemon or node -> its marked processes, here or in namespaces below."""
        found: dict[str, list[int]] = {}
        start = f"{MARK}=".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                marks = [v for v in (entry / "environ").read_bytes().split(b"\0") if v.startswith(start)]
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue  # it has ended, or guards its memory
            if marks:
                found.setdefault(marks[0].removeprefix(start).decode(), []).append(int(entry.name))
        return found

    def _kill(self, names: Iterable[str]) -> None:
        """SIGKILL to daemons and nodes, until nothing of them is left."""
        wanted = set(names)

        def is_gone() -> bool:
            pids = [pid for name, pids in self._running().items() if name in wanted for pid in pids]
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        _until(f"the end of {', '.join(sorted(wanted))}", is_gone, self.base / "log")


def _unshare() -> tuple[str, ...]:
    """Command that starts another in a node's namespaces, whose first process dies with it."""
    return ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")


def _as_login(*command: str) -> tuple[str, ...]:
    """Slurm's daemons run only where the host name is what their config says."""
    return ("unshare", "--uts", "sh", "-c", 'hostname login1 && exec "$@"', "sh", *command)


def _show(node: str, field: str) -> str:
    """What slurmctld says of a node; empty if it does not answer."""
    words = _run("scontrol", "show", "node", node, "-o", check=False).stdout.split()
    return next((word.partition("=")[2] for word in words if word.startswith(f"{field}=")), "")


def _edit_hosts(entries: list[tuple[str, str]]) -> None:
    """Replace our lines. In place: in a container the file is a mount of its own."""
    others = [line for line in HOSTS.read_text().splitlines() if not line.endswith(HOSTS_MARK)]
    ours = [f"{address} {name}  {HOSTS_MARK}" for address, name in entries]
    HOSTS.write_text("".join(f"{line}\n" for line in (*others, *ours)))


def _run(
    *command: str,
    check: bool = True,
    limit_s: float = COMMAND_LIMIT_S,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Raises: ClusterError with the command and what it said, if it fails and `check`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=env, input=stdin)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        done = subprocess.CompletedProcess(command, 124, "", str(error))
    if check and done.returncode != 0:
        raise ClusterError(f"{' '.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done


def _until(what: str, is_so: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > end:
            raise ClusterError(f"waited {LIMIT_S:.0f} s for {what}{_tail(log)}")
        time.sleep(POLL_S)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if log.is_file() else []
    return "\n".join([f"; the end of {log}:", *lines]) if lines else f"; see {log}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=BASE, help=f"where to put everything; not below /tmp ({BASE})")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("install", help="install the Debian packages that are missing")
    actions.add_parser("up", help="start it, unless it runs; removes what an earlier one left")
    actions.add_parser("down", help="end it and all that runs on it; keeps its logs")
    actions.add_parser("status", help="what runs")
    for action, text in (("kill", "crash a node"), ("revive", "boot a node again")):
        actions.add_parser(action, help=text).add_argument("node", choices=NODES)
    actions.add_parser("ctld", help="take slurmctld away, or back").add_argument("to", choices=("stop", "start"))
    actions.add_parser("accounting", help="with slurmdbd, or without").add_argument("to", choices=("on", "off"))
    return parser


def main() -> int:
    words = _parser().parse_args()
    cluster = Cluster(words.base.absolute())
    does: dict[str, Callable[[], None]] = {
        "install": install,
        "up": cluster.up,
        "down": cluster.down,
        "status": lambda: print(cluster.status(), end=""),
        "kill": lambda: cluster.kill(words.node),
        "revive": lambda: cluster.revive(words.node),
        "ctld": lambda: cluster.start_controller() if words.to == "start" else cluster.stop_controller(),
        "accounting": lambda: cluster.set_accounting(words.to == "on"),
    }
    try:
        does[words.action]()
    except ClusterError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
