"""The spawner: engines start on a port of their own, and nothing of them is left, whoever dies first."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from runtime.errors import EngineLost
from runtime.rollout.spawner import LOOK_S
from runtime.rollout.spawning import PEER_PORT, PORT, SOCKET_FD, Exited, Spawner, own_folder, scrub

# An engine that accepts one byte on its socket, with a child in its session and one that left it; both ignore TERM.
ENGINE = """
import os, signal, socket, subprocess, sys, time
sleeper = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)"]
children = [subprocess.Popen(sleeper), subprocess.Popen(sleeper, start_new_session=True)]
listener = socket.socket(fileno=int(sys.argv[1]))
print(os.getpid(), *(c.pid for c in children), flush=True)
link, _ = listener.accept()
sys.exit(link.recv(1)[0])
"""
ARGV = [sys.executable, "-c", ENGINE, SOCKET_FD]


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


async def words_in(log):
    for _ in range(1000):
        if Path(log).exists() and len(words := Path(log).read_text().split()) >= 3:
            return words
        await asyncio.sleep(0.01)
    raise AssertionError("the engine did not start within 10 s")


async def pids_in(log):
    return [int(word) for word in await words_in(log)]


def gone(pids, limit_s=8.0):
    end = time.monotonic() + limit_s
    while any(alive(p) for p in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def run(scenario):
    spawner = Spawner()
    try:
        return asyncio.run(asyncio.wait_for(scenario(spawner), 30))
    finally:
        spawner.close()


def test_engine_listens_and_its_exit_code_is_told(tmp_path):
    async def scenario(spawner):
        log = str(tmp_path / "log")
        started = await spawner.start("e0", ARGV, os.environ, log, "127.0.0.1")
        pids = await pids_in(log)
        assert pids[0] == started.pid and os.getsid(started.pid) == started.pid
        with socket.create_connection(("127.0.0.1", started.port), 5) as link:
            link.sendall(b"\x07")
            assert await spawner.exits.get() == Exited("e0", 7)
        assert gone(pids), "children of an engine that ended by itself are left"
        again = await spawner.start("e0", ARGV, os.environ, log, "127.0.0.1")
        assert again.pid != started.pid

    run(scenario)


SERVER = """
import socket, sys
ports = [int(p) for p in sys.argv[1:]]
servers = [socket.create_server(("127.0.0.1", p)) for p in ports]
link, _ = servers[0].accept()
"""


def test_ports_are_kept_for_a_server_that_binds_them_itself(tmp_path):
    """Nobody else is given them before, while or after it listens, as long as it runs."""

    async def scenario(spawner):
        argv = [sys.executable, "-c", SERVER, PORT, PEER_PORT]
        started = await spawner.start("e0", argv, os.environ, str(tmp_path / "log"), "127.0.0.1")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", started.port))
        for _ in range(400):
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", started.port)):
                break
            await asyncio.sleep(0.02)
        assert await spawner.exits.get() == Exited("e0", 0), (tmp_path / "log").read_text()
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the kernel may still remember its connection
            other.bind(("127.0.0.1", started.port))
            other.listen()

    run(scenario)


def test_stop_ends_the_whole_tree_also_children_that_ignore_term(tmp_path):
    async def scenario(spawner):
        log = str(tmp_path / "log")
        await spawner.start("e0", ARGV, os.environ, log, "127.0.0.1")
        pids = await pids_in(log)
        await spawner.stop("e0", 0.2)
        assert (await spawner.exits.get()).name == "e0"
        assert gone(pids, 1.0)
        await spawner.stop("e0", 0.2)

    run(scenario)


def test_close_ends_every_engine(tmp_path):
    async def scenario(spawner):
        logs = [str(tmp_path / name) for name in "ab"]
        starts = (spawner.start(log, ARGV, os.environ, log, "127.0.0.1") for log in logs)
        first, second = await asyncio.gather(*starts)
        assert first.port != second.port
        return [pid for log in logs for pid in await pids_in(log)]

    pids = run(scenario)
    assert len(pids) == 6 and gone(pids)


HOLDER = """
import sys, tempfile, time
files = [open(path, "w") for path in sys.argv[1:]]
print(*sys.argv, tempfile.mkdtemp(), flush=True)
time.sleep(300)
"""


@pytest.fixture
def temporary(monkeypatch):
    """A folder for temporary files with a path as short as is usual."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_what_sglang_leaves_goes_with_its_tree(tmp_path, temporary, how):
    """That of the engine that ends: in shared memory, and no file of another name that it has open, and temporary."""
    made = [Path(f"/dev/shm/{name}{os.getpid()}{end}") for end in "ab" for name in ("sglang_loads_", "sgl_shm_", "t_")]

    async def scenario(spawner):
        for i in (0, 3):
            argv, log = [sys.executable, "-c", HOLDER, *map(str, made[i : i + 3])], str(tmp_path / f"log{i}")
            started = await spawner.start(f"e{i}", argv, os.environ, log, "127.0.0.1")
            assert Path((await words_in(log))[-1]).parents[1] == temporary
        folders = sorted(temporary.iterdir(), key=lambda folder: folder.stat().st_ctime_ns)
        if how == "stopped":
            await spawner.stop("e3", 0.2)
        else:
            await asyncio.sleep(LOOK_S + 0.5)
            os.kill(started.pid, signal.SIGKILL)
        assert (await spawner.exits.get()).name == "e3"
        assert [path.exists() for path in made] == [True, True, True, False, False, True]
        assert [path.exists() for path in folders] == [True, False]

    try:
        run(scenario)
        assert [path.exists() for path in made] == [False, False, True, False, False, True]
        assert list(temporary.iterdir()) == []
    finally:
        for path in made:
            path.unlink(missing_ok=True)


def test_what_a_rank_holds_that_outlives_its_engine_goes_though_nobody_had_looked_yet(tmp_path):
    held = Path(f"/dev/shm/sgl_shm_{os.getpid()}rank")
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {HOLDER!r}, sys.argv[1]])"

    async def scenario(spawner):
        argv, log = [sys.executable, "-c", code, str(held)], str(tmp_path / "log")
        started = await spawner.start("e0", argv, os.environ, log, "127.0.0.1")
        await words_in(log)
        os.kill(started.pid, signal.SIGKILL)
        assert (await spawner.exits.get()).code == -signal.SIGKILL and not held.exists()

    try:
        run(scenario)
    finally:
        held.unlink(missing_ok=True)


def test_temporary_files_stay_where_they_were_if_sockets_would_not_fit_into_a_folder_of_their_own(temporary):
    mark, long = "0123456789abcdef", temporary / ("x" * 40)
    long.mkdir()
    env = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": "/mine"}
    own = str(temporary / "sluice-01234567")
    assert own_folder(env, mark) == (own, {**env, "TMPDIR": own})
    own, env = own_folder({}, mark)
    assert own == env["TMPDIR"] == "/tmp/sluice-01234567"
    assert env["TORCHINDUCTOR_CACHE_DIR"].startswith("/tmp/torchinductor_"), "where torch would have it"
    for outer in (str(long), "/nowhere"):
        assert own_folder({"TMPDIR": outer}, mark) == ("", {"TMPDIR": outer})


def test_killed_spawner_leaves_nothing_and_is_told(tmp_path, temporary):
    async def scenario(spawner):
        log = str(tmp_path / "log")
        await spawner.start("e0", ARGV, os.environ, log, "127.0.0.1")
        pids = await pids_in(log)
        os.kill(spawner.pid, signal.SIGKILL)
        assert await asyncio.wait_for(spawner.exits.get(), 8) == Exited("e0", -9)
        assert gone(pids) and list(temporary.iterdir()) == []
        with pytest.raises(EngineLost, match="spawner"):
            await spawner.start("e1", ARGV, os.environ, log, "127.0.0.1")

    run(scenario)


def test_killed_agent_leaves_nothing(tmp_path):
    agent = f"""
import asyncio, os, sys
from runtime.rollout.spawning import Spawner
spawner = Spawner()
async def main():
    await spawner.start("e0", {ARGV!r}, os.environ, {str(tmp_path / "log")!r}, "127.0.0.1")
    print(spawner.pid, flush=True)
    await asyncio.sleep(300)
asyncio.run(main())
"""
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE, cwd=root)
    spawner_pid = int(process.stdout.readline())
    pids = [spawner_pid, *asyncio.run(pids_in(tmp_path / "log"))]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout.read() == b"", "the spawner held the stdout of its rank"
    assert gone(pids)


AGENT = """
import asyncio, os, sys
from runtime.rollout.spawning import Spawner
spawner = Spawner()
async def main():
    argv = [sys.executable, "-c", sys.argv[1], sys.argv[3]]
    started = await spawner.start("e0", argv, os.environ, sys.argv[2], "127.0.0.1")
    await asyncio.sleep(LOOK)
    print(spawner.pid, started.pid, flush=True)
    await asyncio.sleep(300)
asyncio.run(main())
"""


def test_what_was_left_where_all_was_killed_at_once_goes_with_the_next_start(tmp_path, temporary):
    """And nothing of an agent that lives, nor what is young."""
    shared = [Path(f"/dev/shm/sgl_shm_{os.getpid()}{end}") for end in "ab"]
    code, root = AGENT.replace("LOOK", str(LOOK_S + 0.5)), Path(__file__).parents[2]
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", code, HOLDER, str(tmp_path / path.name), str(path)],
            stdout=subprocess.PIPE,
            cwd=root,
        )
        for path in shared
    ]
    pids = [[agent.pid, *map(int, agent.stdout.readline().split())] for agent in agents]
    of = [asyncio.run(words_in(tmp_path / path.name))[-1] for path in shared]
    folders = [Path(word).parent for word in of]
    try:
        for pid in pids[0]:
            os.kill(pid, signal.SIGKILL)
        assert gone(pids[0]) and folders[0].is_dir() and shared[0].exists()
        (young := temporary / "sluice-00000000").mkdir()
        for folder in folders:
            os.utime(folder, (0, 0))

        async def scenario(spawner):
            await spawner.start("e1", ARGV, os.environ, str(tmp_path / "log"), "127.0.0.1")
            assert [path.exists() for path in (*folders, *shared, young)] == [False, True, False, True, True]

        run(scenario)
    finally:
        agents[1].kill()
        for agent in agents:
            agent.wait()
        assert gone(pids[1]) and not shared[1].exists()


def test_refused_start_names_the_reason(tmp_path):
    async def scenario(spawner):
        with pytest.raises(EngineLost, match="nosuch"):
            await spawner.start("e0", ["/nosuch"], os.environ, str(tmp_path / "log"), "127.0.0.1")
        with pytest.raises(EngineLost, match="cannot start"):
            await spawner.start("e0", ARGV, os.environ, str(tmp_path / "log"), "192.0.2.1")

    run(scenario)


def test_environment_is_scrubbed():
    kept = {"NCCL_DEBUG": "1", "FI_PROVIDER": "cxi", "SLINGSHOT_VNIS": "3", "ROCR_VISIBLE_DEVICES": "0", "PATH": "/bin"}
    dropped = ["PMI_RANK", "PMIX_RANK", "OMPI_COMM", "MPIR_X", "SLURM_NTASKS", "HYDRA_X", "http_proxy"]
    assert scrub({**kept, **dict.fromkeys([*dropped, "HTTPS_PROXY"], "x")}) == kept
