"""The commands that read a run folder: status and samples; and the last words of submit."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

from launcher import runs, slurm
from launcher.progress import Progress, duration
from launcher.progress import number as shown
from launcher.states import UNREADABLE, States, report_of
from runtime.errors import ConfigError
from runtime.load import load_run

ADVICE: Final = {
    "done": "look at reward.png and `python -m launcher samples{run}`{model}",
    "preempted": "`python -m launcher resume{run}` {goes_on}",
    "timeout": "`python -m launcher resume{run}` {goes_on}",
    "node_failed": "`python -m launcher resume{run}` once the node is back or replaced: it {goes_on}",
    "peer_lost": "see `python -m launcher logs{run}`; then `python -m launcher resume{run}` {goes_on}",
    "engine_lost": "see the engine's log (`python -m launcher logs{run} --engine 0`); lower its memory use, resume",
    "config": "change what the message names, then resume, or submit again",
    "out_of_memory": "lower trainer.max_tokens or rollout.max_concurrent, or use more devices; then submit again",
    "bug": "see `python -m launcher logs{run}`; please report it with that log and the run's config.yaml",
    "died": "the supervisor was killed without a word (reboot? SIGKILL?); `python -m launcher resume{run}` {goes_on}",
}
"""One line for each kind of exit report; `advice` fills it in."""

SAMPLE_RULE: Final = "-" * 80


def status(args: argparse.Namespace) -> int:
    root = Path(args.runs)
    if args.run == "all":
        _list(runs.all_runs(root))
        return 0
    run = runs.find(args.run, root)
    states = States()
    (progress, last), state, attempt = _progress(run), states.of(run), runs.last_attempt(run)
    print(f"run      {run}")
    print(f"state    {state}" + (f", attempt {attempt}" if attempt >= 0 else "") + f", age {_age(run)}")
    if number := runs.job_id(run):
        print(f"job      {number}{_job_words(states, run, state)}")
    print(f"step     {progress.step}/{progress.num_steps}" + _last_words(last))
    print(f"reward   {shown(last.get('reward'), '.3f')}, held-out accuracy {shown(progress.accuracy, '.3f')}")
    if state in (*runs.FINAL, "died"):
        print(_ending(run, state, states.job(run)))
    elif progress.seconds_left is not None:
        print(f"left     {duration(progress.seconds_left)}")
    return 0


def _list(found: list[Path]) -> None:
    print(f"{'run':<44} {'state':<10} {'step':>9} {'reward':>7}  age")
    states = States()
    by_run = states.all(found)
    for run in found:
        try:
            progress, last = _progress(run)
        except (ConfigError, OSError):
            by_run[run], progress, last = UNREADABLE, Progress(0), {}
        if by_run[run] == UNREADABLE:
            if (run / "status.json").exists():  # else it was deleted meanwhile
                print(f"{run.name:<44} {UNREADABLE:<10} {'-':>9} {'-':>7}  {_age(run)}")
            continue
        step = f"{progress.step}/{progress.num_steps}"
        print(f"{run.name:<44} {by_run[run]:<10} {step:>9} {shown(last.get('reward'), '.3f'):>7}  {_age(run)}")


def _progress(run: Path) -> tuple[Progress, dict[str, Any]]:
    """Where a run stands, and its last step's metrics."""
    progress, last = Progress(load_run(run / "config.yaml").num_steps), {}
    for line in runs.metrics(run).new():
        last = progress.add(line) or last
    return progress, last


def _last_words(last: dict[str, Any]) -> str:
    return f", the last {duration(time.time() - float(last['time']))} ago" if "time" in last else ""


def _age(run: Path) -> str:
    """Time since it was first submitted, which its folder's name says."""
    try:
        submitted = time.mktime(time.strptime("-".join(run.name.split("-")[-3:-1]), "%y%m%d-%H%M%S"))
    except ValueError:  # the folder was renamed
        return "-"
    return duration(time.time() - submitted)


def _job_words(states: States, run: Path, state: str) -> str:
    """What Slurm says of a run's job: why it waits, until when it may run."""
    job = states.job(run)
    if states.trouble:
        return f" (Slurm does not answer, so this is what the run said last: {states.trouble})"
    if job is None or state in runs.FINAL:
        return ""
    if job.phase == "over":
        return f", {job.state.lower()}" + (f" on {job.nodes}" if job.nodes else "")
    if job.phase == "queued":
        why = job.reason if job.reason not in ("", "None") else "Slurm has not looked at it yet"
        return f", waits: {why}" + (f", expected to start {job.starts}" if job.starts[:1].isdigit() else "")
    left = f", {duration(job.seconds_left)} of its walltime left" if job.seconds_left is not None else ""
    return f", {job.state.lower()} on {job.nodes}{left}"


def _ending(run: Path, state: str, job: slurm.Job | None) -> str:
    """The exit report of the newest attempt, and what to do."""
    report = report_of(run, job, state)
    if state == "died" or report is None:
        report_lines = [] if report is None else [f"before   {report.kind}: {report.message}"]
        kind = "died" if state == "died" else "bug"
    else:
        at = "".join(f", {k} {v}" for k, v in (("rank", report.rank), ("step", report.step)) if v is not None)
        report_lines, kind = [f"report   {report.kind}{at}: {report.message}"], report.kind
    return "\n".join([*report_lines, f"advice   {advice(run, kind)}"])


def advice(run: Path, kind: str) -> str:
    """What to do about a kind of end, in words that fit this run."""
    if any((run / "checkpoints").glob("step-*/COMPLETE")):
        goes_on = "goes on from the last checkpoint"
    else:
        goes_on = "starts it from the beginning" if runs.last_attempt(run) >= 0 else "queues it again"
    model = "; the trained model is in hf/" if any((run / "hf").glob("step-*")) else ""
    return ADVICE.get(kind, ADVICE["bug"]).format(run=runs.called(run), goes_on=goes_on, model=model)


def outcome(run: Path, state: str, job: slurm.Job | None = None) -> str:
    """What submit ends with: how it went and where everything is."""
    progress, _ = _progress(run)
    lines = [f"{run.name}: {state}", _ending(run, state, job)]
    if progress.first_accuracy is not None:
        lines.append(f"held-out {progress.first_accuracy:.3f} -> {shown(progress.accuracy, '.3f')}")
    lines.append(f"folder   {run}")
    if (run / "reward.png").exists():
        lines.append(f"plot     {run / 'reward.png'}")
    if exported := sorted((run / "hf").glob("step-*")):
        lines.append(f"model    {exported[-1]}")
    if any((run / "samples").glob("step-*.jsonl")):
        lines.append(f"samples  python -m launcher samples {runs.called(run).strip() or run.name}")
    return "\n".join(lines)


def samples(args: argparse.Namespace) -> int:
    run = runs.find(args.run, Path(args.runs))
    files = sorted((run / "samples").glob("step-*.jsonl"))
    if not files:
        raise ConfigError(
            run.name, "has no samples yet", "wait for its first step; tracking.samples_per_step is not 0?"
        )
    file = files[-1] if args.step is None else run / "samples" / f"step-{args.step:06d}.jsonl"
    if file not in files:
        steps = f"{_step_of(files[0])} to {_step_of(files[-1])}"
        raise ConfigError(f"--step {args.step}", f"{run.name} has no samples of this step", f"it has steps {steps}")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    if args.best or args.worst:
        found.sort(key=_reward, reverse=args.best)
    print(f"{run.name}, step {_step_of(file)}: {min(args.n, len(found))} of {len(found)} samples")
    for sample in found[: args.n]:
        print(_sample_text(sample))
    return 0


def _step_of(file: Path) -> int:
    return int(file.stem.removeprefix("step-"))


def _reward(sample: dict[str, Any]) -> float:
    """For sorting; a failed reward counts as lowest."""
    return float("-inf") if sample["reward"] is None else float(sample["reward"])


def _sample_text(sample: dict[str, Any]) -> str:
    reward = shown(sample["reward"], ".3f") if sample["reward"] is not None else "failed"
    head = (
        f"{sample['prompt_id']} [{sample['index']}]  reward {reward}  {sample['status']}  version {sample['version']}"
    )
    parts = [SAMPLE_RULE, head, "prompt:", _indent(sample["prompt"]), "sampled:", _indent(sample["text"])]
    return "\n".join([*parts, f"answer: {sample['answer']}"])


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in str(text).splitlines()) or "  (nothing)"
