"""Slurm's own words about jobs, behind one small interface; works without accounting and while the controller is away.

Text output is read, not JSON, whose keys and types changed in most releases; `-o` formats never did.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal

import msgspec

CALL_LIMIT_S: Final = 20.0
"""A controller that is down keeps commands waiting for minutes."""

SUBMIT_LIMIT_S: Final = 60.0

_THERE: Final = ("idle", "mix", "alloc", "comp", "plnd", "resv")
"""How sinfo begins the states of nodes that take jobs, now or in a while."""

Phase = Literal["queued", "running", "ending", "over"]

_PHASES: Final[dict[str, Phase]] = {
    "PENDING": "queued",
    "REQUEUED": "queued",
    "REQUEUE_FED": "queued",
    "REQUEUE_HOLD": "queued",
    "SPECIAL_EXIT": "queued",
    "RESV_DEL_HOLD": "queued",
    "CONFIGURING": "running",
    "RUNNING": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "STOPPED": "running",
    "SUSPENDED": "running",
    "COMPLETING": "ending",
}
"""Every other state (COMPLETED, CANCELLED, FAILED, TIMEOUT, PREEMPTED, NODE_FAIL, ...) is final."""


class SchedulerDown(Exception):
    """Slurm did not answer; what it knows is unknown, not gone."""


class NoAnswer(SchedulerDown):
    """It did not answer in time: what it was asked to do may have been done."""


class Away(SchedulerDown):
    """The controller could not be reached: nothing was done."""


_AWAY: Final = re.compile(
    "unable to contact slurm controller|unable to establish|connection refused|"
    "unable to resolve|dns srv lookup failed|could not establish a configuration source",
    re.IGNORECASE,
)
_LATE: Final = re.compile("timed out|zero bytes were transmitted", re.IGNORECASE)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm says of a job."""

    state: str
    """Slurm's word, without what follows it."""
    reason: str = ""
    nodes: str = ""
    """As a host list: n[1-2]."""
    seconds_left: float | None = None
    """Of its walltime."""
    starts: str = ""
    """When it is expected to start."""
    fields: dict[str, str] = {}
    """`scontrol show job`, where that was asked."""

    @property
    def phase(self) -> Phase:
        return _PHASES.get(self.state, "over")

    @property
    def is_preempted(self) -> bool:
        """It is losing its nodes, also while the grace still runs."""
        return self.state == "PREEMPTED" or self.fields.get("PreemptTime", "None") not in ("None", "Unknown")


def call(*argv: str, limit_s: float = CALL_LIMIT_S, env: Mapping[str, str] | None = None) -> str:
    """Output of one of Slurm's commands.

    Raises:
        SchedulerDown: it failed; NoAnswer, if it did not answer; Away, if there was nobody to ask.
    """
    return _call(argv, limit_s, env).stdout


def _call(
    argv: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:  # in a session of its own: a terminal's Ctrl-C would end sbatch while its job is being taken
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=limit_s, check=False, start_new_session=True, env=env
        )
    except subprocess.TimeoutExpired as e:
        raise NoAnswer(f"{argv[0]} gave no answer within {limit_s:.0f} s") from e
    except OSError as e:
        raise SchedulerDown(f"{argv[0]}: {e.strerror}") from e
    if done.returncode != 0:
        words = _words(argv[0], done.stderr) or f"exit code {done.returncode}"
        kind = Away if _AWAY.search(words) else NoAnswer if _LATE.search(words) else SchedulerDown
        raise kind(f"{argv[0]}: {words}")
    return done


def _words(name: str, stderr: str) -> str:
    """What a command said, in one line."""
    lines = (line.strip().removeprefix(f"{name}: ").removeprefix("error: ") for line in stderr.splitlines())
    return "; ".join(line for line in lines if line and not line.startswith("Try "))


def jobs(ids: Collection[str]) -> dict[str, Job]:
    """These jobs, as far as Slurm remembers them: one squeue for all, then one sacct for those it no longer lists.

    Raises:
        SchedulerDown: the controller does not answer.
    """
    found: dict[str, Job] = {}
    for line in call("squeue", "--noheader", "--me", "--states=all", "--format=%i|%T|%r|%L|%S|%N").splitlines():
        number, state, reason, left, starts, nodes = line.strip().split("|")
        if number in ids:
            found[number] = Job(state=state, reason=reason, nodes=nodes, starts=starts, seconds_left=seconds(left))
    return found | _accounted(set(ids) - found.keys())


def _accounted(ids: Collection[str]) -> dict[str, Job]:
    """What accounting remembers; nothing where there is none. The newest of a job's records is its last line."""
    if not ids:
        return {}
    query = ["--noheader", "--parsable2", "--allocations", "--duplicates", "--format=JobIDRaw,State,NodeList"]
    try:
        lines = call("sacct", *query, "--jobs", ",".join(sorted(ids))).splitlines()
    except SchedulerDown:
        return {}
    rows = [line.split("|") for line in lines]
    return {number: Job(state=state.split()[0], reason=state, nodes=nodes) for number, state, nodes in rows if state}


def job(number: str) -> Job | None:
    """One job in all its detail, for its own supervisor; None: Slurm no longer knows it.

    Raises:
        SchedulerDown: the controller does not answer.
    """
    try:
        text = call("scontrol", "show", "job", "--oneliner", number)
    except SchedulerDown as e:
        if "Invalid job id" in str(e):
            return None
        raise
    fields = dict(re.findall(r"(\w+)=(\S*)", text))
    return Job(
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        nodes=fields.get("NodeList", ""),
        fields=fields,
    )


def hostnames(host_list: str) -> tuple[str, ...]:
    """n[1-2] -> n1, n2."""
    return tuple(call("scontrol", "show", "hostnames", host_list).split())


def submit(script: str, options: Sequence[str] = ()) -> str:
    """Submit a batch script; its job id.

    Raises:
        SchedulerDown: sbatch refused; the message is what it said.
    """
    return call("sbatch", "--parsable", *options, script, limit_s=SUBMIT_LIMIT_S).strip().partition(";")[0]


def try_out(script: str) -> str:
    """Let Slurm look at a batch script without queueing it; what it said: when and where the job could start.

    Raises:
        SchedulerDown: it would refuse it.
    """
    words = _words("sbatch", _call(("sbatch", "--test-only", script), SUBMIT_LIMIT_S).stderr)
    return re.sub(r"^Job \d+ ", "", words)  # a number that no job will have


def number_of(script: str, but: str = "") -> str:
    """The waiting or running job of a batch script, other than job `but`; empty: there is none.

    Raises:
        SchedulerDown: the controller does not answer.
    """
    for line in call("squeue", "--noheader", "--me", "--format=%i|%o").splitlines():
        number, _, command = line.strip().partition("|")
        if command == script and number != but:
            return number
    return ""


def nodes_are_away(partition: str) -> bool:
    """Whether nodes of a partition (of any, if it is empty) are down or drained, so that a job may only have to wait.

    Raises:
        SchedulerDown: the controller does not answer.
    """
    of = [f"--partition={partition}"] if partition else []
    states = call("sinfo", "--noheader", "--format=%t", *of).split()
    return any(state.endswith("*") or not state.startswith(_THERE) for state in states)


def per_node(text: str) -> tuple[int, ...]:
    """8(x2),4 -> 8, 8, 4, as Slurm writes SLURM_JOB_CPUS_PER_NODE."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(int(count) for count, times in found for _ in range(int(times or 1)))


def seconds(text: str) -> float | None:
    """[days-]hours:minutes:seconds, as squeue writes times; None: no limit, or not known."""
    if not re.fullmatch(r"(\d+-)?(\d+:)*\d+", text):
        return None
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    return float(sum(part * 60**i for i, part in enumerate(reversed(parts))) + int(days or 0) * 86400)


class Watch:
    """Asks about all jobs at once, and seldom: many people poll one controller."""

    def __init__(self, every_s: float = 30.0) -> None:
        self._every_s = every_s
        self._asked: frozenset[str] = frozenset()
        self._when = float("-inf")
        self.asked_at = 0.0
        """Wall time of the last answer."""
        self._jobs: dict[str, Job] = {}
        self.trouble = ""
        """Why Slurm gave no answer last time."""

    def jobs(self, ids: Collection[str]) -> dict[str, Job] | None:
        """As `jobs`; an answer is kept for a while. None: Slurm does not answer."""
        wanted = frozenset(ids)
        if not wanted <= self._asked or time.monotonic() - self._when > self._every_s:
            self._asked, self._when, self.asked_at = wanted, time.monotonic(), time.time()
            try:
                self._jobs, self.trouble = jobs(wanted), ""
            except SchedulerDown as e:
                self.trouble = str(e)
        return None if self.trouble else self._jobs
