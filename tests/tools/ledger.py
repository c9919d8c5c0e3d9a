"""Proves from a run folder that no sample was lost and none was trained twice.

    python -m tests.tools.ledger runs/quickstart-x1

Reads what the run wrote (config.yaml, events.jsonl, metrics.jsonl) and imports nothing of the project, so that a bug
there cannot hide itself here. What it holds the run to:

1. Leases are numbered 0, 1, 2, ... and each is of another prompt. A lease that an attempt left running may be handed
   out again by a later one, as long as its group was not finished.
2. Every lease ends exactly once: it or its group is dropped with a reason, or trained, or at the end still ready or
   running.
3. A trained group is there with all its samples 0 .. num_samples - 1 and all their segments, each named once, in one
   step; a sample that is left out says why.
4. Steps are 0, 1, 2, ..., each of num_prompts groups, each with its line of metrics.
5. No token is older than the staleness bound, and none comes from the future.
6. The version that a lease starts with, or a step trains, was pushed before; pushes skip no version.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Event = dict[str, Any]


@dataclass(kw_only=True)
class LeaseRecord:
    """What the events say of one lease."""

    prompt_id: str
    version: int
    dropped: bool = False
    finished: bool = False
    num_lines: int = 0
    """Samples of the finished group, segments counted one by one."""
    samples: list[Event] = field(default_factory=list)


@dataclass(kw_only=True)
class Ledger:
    num_prompts: int
    num_samples: int
    max_versions: int
    leases: dict[int, LeaseRecord] = field(default_factory=dict)
    groups_of_step: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    pushed: list[int] = field(default_factory=list)
    attempts: int = 0
    leased_in: dict[int, int] = field(default_factory=dict)
    """Lease -> the attempt that last handed it out."""
    end: Event | None = None
    is_engine_down: bool = False
    unexplained: list[int] = field(default_factory=list)
    """Versions that nobody took, with no engine down so far: it may have been lost in the push."""
    problems: list[str] = field(default_factory=list)

    def read(self, events: Iterable[Event]) -> None:
        """Take the events in their order."""
        takers = {
            "attempt": self.attempt,
            "leased": self.leased,
            "group": self.group,
            "dropped": self.drop,
            "trained": self.sample,
            "excluded": self.sample,
            "pushed": self.push,
            "engine_down": self.engine_down,
        }
        for event in events:
            if self.end is not None and event["kind"] != "attempt":
                self.problems.append(f"{event['kind']} after the end: {event}")
            if event["kind"] == "end":
                self.end = event
            elif take := takers.get(event["kind"]):
                take(event)

    def attempt(self, event: Event) -> None:
        self.attempts += 1
        self.is_engine_down = False
        self.unexplained.clear()
        self.end = None

    def leased(self, event: Event) -> None:
        number, prompt_id = event["lease"], event["prompt_id"]
        if (lease := self.leases.get(number)) is not None:
            if lease.prompt_id != prompt_id:
                self.problems.append(f"lease {number} is of prompt {lease.prompt_id} and of {prompt_id}")
            if lease.finished or self.leased_in[number] == self.attempts:
                self.problems.append(f"lease {number} is handed out again")
        elif number != len(self.leases):
            self.problems.append(f"lease {number} comes when {len(self.leases)} was next")
        elif event["version"] not in self.pushed[-1:]:
            self.problems.append(f"lease {number} starts at version {event['version']}, pushed were {self.pushed}")
        self.leases.setdefault(number, LeaseRecord(prompt_id=prompt_id, version=event["version"]))
        self.leased_in[number] = self.attempts

    def group(self, event: Event) -> None:
        number = event["lease"]
        if (lease := self.lease_of(event)) is None:
            return
        if lease.finished:
            self.problems.append(f"the group of lease {number} came in twice")
        if not event["kept"] and not event["reason"]:
            self.problems.append(f"the group of lease {number} was dropped without a reason")
        lease.finished, lease.dropped, lease.num_lines = True, not event["kept"], event["samples"]

    def drop(self, event: Event) -> None:
        """What an attempt begins without, though an earlier one left it running or ready."""
        if (lease := self.lease_of(event)) is not None:
            if lease.dropped or not event["reason"]:
                self.problems.append(f"lease {event['lease']} is dropped again, or without a reason")
            lease.dropped = True

    def sample(self, event: Event) -> None:
        """A trained or excluded one."""
        number, step, version, oldest = event["lease"], event["step"], event["version"], event["oldest"]
        if (lease := self.lease_of(event)) is None:
            return
        name = f"lease {number} sample {event['index']}.{event['segment']}"
        if not lease.finished or lease.dropped:
            self.problems.append(
                f"{name} is trained, but its group was {'dropped' if lease.dropped else 'not finished'}"
            )
        if event["kind"] == "excluded" and not event["reason"]:
            self.problems.append(f"{name} was left out without a reason")
        if version not in self.pushed:
            self.problems.append(f"{name} is trained at version {version}, which was not pushed")
        if not version - self.max_versions <= oldest <= version or lease.version > oldest:
            bound = f"leased at {lease.version}, {self.max_versions} behind at most"
            self.problems.append(f"{name} has tokens of version {oldest}, trained at {version} ({bound})")
        lease.samples.append(event)
        self.groups_of_step[step].add(number)

    def lease_of(self, event: Event) -> LeaseRecord | None:
        """The lease that an event names; None, noted as a problem, when there is none or its prompt is another."""
        lease = self.leases.get(event["lease"])
        if lease is None or lease.prompt_id != event["prompt_id"]:
            self.problems.append(f"{event['kind']} of lease {event['lease']}, prompt {event['prompt_id']}: not leased")
            return None
        return lease

    def push(self, event: Event) -> None:
        version, newest = event["version"], max(self.pushed, default=-1)
        if version not in (newest, newest + 1):
            self.problems.append(f"version {version} is pushed after {newest}")
        self.check_explained()
        if not event["engines"] and not self.is_engine_down:
            self.unexplained.append(version)
        self.is_engine_down = self.is_engine_down and not event["engines"]
        self.pushed.append(version)

    def engine_down(self, event: Event) -> None:
        """Until the next push to somebody there may be nobody to push to, as when a scheduler ends every process."""
        self.is_engine_down = True
        self.unexplained.clear()

    def check_explained(self) -> None:
        self.problems += [f"version {version} is pushed to no engine" for version in self.unexplained]
        self.unexplained.clear()

    # ---- when all events are read

    def close(self, steps_with_metrics: Sequence[int]) -> list[str]:
        self.close_leases()
        self.check_explained()
        steps = sorted(self.groups_of_step)
        if steps != list(range(len(steps))):
            self.problems.append(f"trained steps are not consecutive: {steps}")
        for step, numbers in self.groups_of_step.items():
            if len(numbers) != self.num_prompts:
                self.problems.append(f"step {step} has {len(numbers)} groups instead of {self.num_prompts}")
        if list(steps_with_metrics) != [step + 1 for step in steps]:
            self.problems.append(f"lines of metrics are of steps {list(steps_with_metrics)}, trained were {len(steps)}")
        if max(self.pushed, default=-1) != len(steps):
            self.problems.append(f"{len(steps)} steps were trained, the newest push is {max(self.pushed, default=-1)}")
        return self.problems

    def close_leases(self) -> None:
        if self.end is None:
            self.problems.append("the events have no end")
        ready, running = (set((self.end or {}).get(key, ())) for key in ("ready", "running"))
        self.problems += [f"lease {n} is {w} and unknown" for w in ("ready", "running") for n in self.unknown(w)]
        prompts = Counter(lease.prompt_id for lease in self.leases.values())
        self.problems += [f"prompt {prompt} was leased {n} times" for prompt, n in prompts.items() if n > 1]
        for number, lease in self.leases.items():
            ends = {
                "dropped": lease.dropped,
                "trained": bool(lease.samples),
                "ready at the end": number in ready,
                "running at the end": number in running,
            }
            met = [name for name, is_so in ends.items() if is_so]
            if len(met) != 1:
                self.problems.append(f"lease {number} is {' and '.join(met) or 'lost'}")
            if (number in running) == lease.finished and number in ready | running:
                self.problems.append(
                    f"lease {number} is {met[-1]}, its group is {'' if lease.finished else 'not '}there"
                )
            if lease.samples:
                self.close_group(number, lease)

    def unknown(self, where: str) -> list[int]:
        return sorted(set((self.end or {}).get(where, ())) - set(self.leases))

    def close_group(self, number: int, lease: LeaseRecord) -> None:
        if len({s["step"] for s in lease.samples}) != 1:
            self.problems.append(f"lease {number} is trained in more than one step")
        named = Counter((s["index"], s["segment"]) for s in lease.samples)
        self.problems += [f"lease {number} sample {i}.{k} is there {n} times" for (i, k), n in named.items() if n > 1]
        for index in range(self.num_samples):
            segments = sorted(k for i, k in named if i == index)
            if not segments or segments != list(range(len(segments))):
                self.problems.append(f"lease {number} sample {index} has segments {segments}")
        if len(lease.samples) != lease.num_lines:
            self.problems.append(f"lease {number} has {len(lease.samples)} samples, its group had {lease.num_lines}")
        if extra := sorted({i for i, _ in named} - set(range(self.num_samples))):
            self.problems.append(f"lease {number} has samples {extra}, which nobody asked for")


def read_lines(path: Path) -> list[Event]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(run_dir: Path) -> list[str]:
    """What is wrong with the run's books; empty: nothing."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    ledger = Ledger(
        num_prompts=config["rollout"]["num_prompts"],
        num_samples=config["rollout"]["num_samples"],
        max_versions=config["staleness"]["max_versions"],
    )
    ledger.read(read_lines(run_dir / "events.jsonl"))
    return ledger.close([line["step"] for line in read_lines(run_dir / "metrics.jsonl") if "samples" in line])


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m tests.tools.ledger RUN", file=sys.stderr)
        return 2
    problems = check(Path(sys.argv[1]))
    print("\n".join(problems) or "every sample is accounted for, once")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
