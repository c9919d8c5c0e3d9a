"""A supervisor over a stand-in world, for faults a real world does not make at will.

python -m tests.unit.world supervise RUN PART...     attempt n plays the n-th part, the last one for ever
python -m tests.unit.world play RUN ATTEMPT PART     what such an attempt runs
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from launcher import machine
from launcher.job import LocalJob
from launcher.plan import JobPlan
from launcher.supervisor import Supervisor, main, open_log
from runtime.errors import EXIT_CODES
from runtime.load import load_run, load_site

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(100)"]
SUICIDE = "import os, sys, time; os.environ['PMI_RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(100)"


class StandIn(LocalJob):
    """Attempt n plays the n-th part."""

    def __init__(self, run: Path, parts: list[str]) -> None:
        super().__init__(run, load_run(run / "config.yaml"), load_site(str(run / "site.yaml")), dict(os.environ))
        self._parts = parts

    def plan(self, attempt: int) -> JobPlan:
        part = self._parts[min(attempt, len(self._parts) - 1)]
        command = [sys.executable, "-m", "tests.unit.world", "play", str(self._run), str(attempt), part]
        if part.startswith("mpiexec"):
            rank = SLEEPER if part == "mpiexec_sleeps" else [sys.executable, "-S", "-c", SUICIDE]
            where = ["-hosts", "localhost", "-launcher", "fork", "-rmk", "user", "-print-all-exitcodes"]
            command = [machine.find_mpiexec(), *where, "-n", "3", *rank]
        return msgspec.structs.replace(super().plan(attempt), command=tuple(command))


def supervise(run: Path, parts: list[str]) -> None:
    open_log(run)
    report = Supervisor(run, StandIn(run, parts), load_run(run / "config.yaml").limits).run()
    print(report.kind)


def play(run: Path, attempt: int, part: str) -> None:
    def report(kind: str, **more) -> None:
        text = json.dumps({"kind": kind, "message": f"played {kind}", "role": "agent", **more})
        (run / "attempts" / str(attempt) / "report.json").write_text(text)

    def step(number: int) -> None:
        line = {"step": number, "version": number, "reward": number / 4, "step_s": 0.5, "lag": 0.0, "time": time.time()}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    if part in ("steps", "hangs"):
        # A child in a session of its own, as ranks and engines are: no signal to a process group finds it.
        subprocess.Popen(SLEEPER, start_new_session=True)
    (run / "events.jsonl").open("a").write("{}\n")
    if part == "steps":
        for number in (1, 2, 3, 4):
            step(number)
        (run / "metrics.jsonl").open("a").write(json.dumps({"step": 4, "eval/held/accuracy": 0.75}) + "\n")
        report("done")
    elif part == "progress":
        step(attempt + 1)
        report("engine_lost", rank=1)
        sys.exit(14)
    elif part == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif part == "silent":
        print("Traceback ...\nValueError: seven")
        sys.exit(3)
    elif part == "wrong_pmi":  # rank 1 ends inside MPI_Init, and rank 0 sees its node's processes go before it does
        log = run / "attempts" / str(attempt) / "rank-1.log"
        log.write_text("OMPI was not built with SLURM's PMI support and therefore cannot execute.\n")
        report("bug", rank=0)
        sys.exit(1)
    elif part == "saves":
        signal.signal(signal.SIGTERM, lambda *_: (report("preempted"), sys.exit(0)))
        time.sleep(100)
    elif part == "reports_and_hangs":
        report("bug")
        time.sleep(100)
    elif part == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)
    else:
        report(part)
        sys.exit(EXIT_CODES[part])


if __name__ == "__main__":
    if sys.argv[1] == "supervise":
        supervise(Path(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1] == "main":
        sys.exit(main(sys.argv[2]))
    else:
        play(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
