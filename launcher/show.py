"""The commands that read a run folder: status and samples; and the last words of submit."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from launcher import runs, slurm
from launcher.failures import summary
from launcher.lines import JsonLines
from launcher.progress import Progress, duration, said_state, told_as
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
    "engine_lost": "mend what the message says, or where that is no more than a death see the engine's log "
    "(`python -m launcher logs{run} --engine 0`) and lower its memory use; then resume",
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
    (progress, last), state = _progress(run), states.of(run)
    print(f"run      {run}")
    print(f"state    {said_state(run, state)}, time {_time(run, state)}")
    if number := runs.job_id(run):
        print(f"job      {number}{_job_words(states, run, state)}")
    print(f"step     {progress.step}/{progress.num_steps}" + _last_words(last))
    held_out = ", ".join(f"{newest:.3f} on {name}" for name, (_, newest) in progress.held_out.items())
    print(f"reward   {shown(last.get('reward'), '.3f')}, held-out accuracy {held_out or '-'}")
    if failed := summary(run):
        print(f"failed   {failed}")
    if state in (*runs.FINAL, "died"):
        print(_ending(run, state, states.job(run)))
    elif progress.seconds_left is not None:
        print(f"left     {duration(progress.seconds_left)}")
    return 0


def _list(found: list[Path]) -> None:
    print(f"{'run':<44} {'state':<10} {'step':>9} {'reward':>7}  {'time':<7}  why it ended")
    states = States()
    by_run = states.all(found)
    for run in found:
        try:
            progress, last = _progress(run)
        except (ConfigError, OSError):
            by_run[run], progress, last = UNREADABLE, Progress(0), {}
        if by_run[run] == UNREADABLE:
            if (run / "status.json").exists():  # else it was deleted meanwhile
                print(f"{run.name:<44} {UNREADABLE:<10} {'-':>9} {'-':>7}  -")
            continue
        step, state = f"{progress.step}/{progress.num_steps}", told_as(run, by_run[run])
        line = f"{run.name:<44} {state:<10} {step:>9} {shown(last.get('reward'), '.3f'):>7}  {_time(run, state):<7}"
        print(f"{line}  {_reason(run, state, states)}".rstrip())


def _progress(run: Path) -> tuple[Progress, dict[str, Any]]:
    """Where a run stands, and its last step's metrics."""
    progress, last = Progress(load_run(run / "config.yaml").num_steps), {}
    for line in runs.metrics(run).new():
        last = progress.add(line) or last
    return progress, last


def _last_words(last: dict[str, Any]) -> str:
    return f", the last {duration(time.time() - float(last['time']))} ago" if "time" in last else ""


def _reason(run: Path, state: str, states: States) -> str:
    """Why it ended early, in short."""
    report = report_of(run, states.job(run), state) if state in (*runs.FINAL, "died") else None
    if report is None or report.kind == "done":
        return ""
    message = next(iter(report.message.splitlines()), "")
    return f"{report.kind}: {message if len(message) <= 60 else message[:57] + '...'}"


def _time(run: Path, state: str) -> str:
    """From its first submission, which its folder's name says, to its end, or until now."""
    try:
        submitted = time.mktime(time.strptime("-".join(run.name.split("-")[-3:-1]), "%y%m%d-%H%M%S"))
    except ValueError:  # the folder was renamed
        return "-"
    return duration((runs.read_status(run).updated if state in (*runs.FINAL, "died") else time.time()) - submitted)


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
        places = ("rank", report.rank), ("node", report.node or None), ("step", report.step)
        at = "".join(f", {what} {where}" for what, where in places if where is not None)
        report_lines, kind = [f"report   {report.kind}{at}: {report.message}"], report.kind
    return "\n".join([*report_lines, f"advice   {advice(run, kind)}"])


def has_checkpoint(run: Path) -> bool:
    return any((folder / "COMPLETE").exists() for folder in runs.by_step(run / "checkpoints"))


def is_lost(run: Path, every: int) -> bool:
    """Whether a checkpoint was made once, and none is whole now. `every`: checkpoint.interval. The first one may not
    have been written to its end when the run was killed; the second is not begun before."""
    report = runs.read_report(run, runs.last_attempt(run))
    is_done = report is not None and report.kind == "done"
    done = runs.last_step(run)
    return (done >= 2 * every > 0 or (done > 0 and is_done)) and not has_checkpoint(run)


def anew(run: Path) -> str:
    """The command for another run like this one."""
    return f"`python -m launcher submit {shlex.quote(str(run / 'config.yaml'))}` begins anew, as another run"


def advice(run: Path, kind: str) -> str:
    """What to do about a kind of end, in words that fit this run."""
    if kind != "done" and is_lost(run, load_run(run / "config.yaml").checkpoint.interval):
        return f"it has no complete checkpoint to go on from: {anew(run)}"
    if has_checkpoint(run):
        goes_on = "goes on from the last checkpoint"
    elif runs.last_attempt(run) >= 0:
        goes_on = "starts it from the beginning"
    else:
        goes_on = "queues it again" if (run / runs.SCRIPT).exists() else "starts it"
    model = "; the trained model is in hf/" if _models(run) else ""
    return ADVICE.get(kind, ADVICE["bug"]).format(run=runs.called(run), goes_on=goes_on, model=model)


def _models(run: Path) -> list[Path]:
    """What it exported, without those of steps that it has not, or no longer, done."""
    return [model for model in runs.by_step(run / "hf") if runs.step_of(model) <= runs.last_step(run)]


def outcome(run: Path, state: str, job: slurm.Job | None = None) -> str:
    """What submit ends with: how it went and where everything is."""
    progress, _ = _progress(run)
    lines = [f"{run.name}: {state}", _ending(run, state, job)]
    if failed := summary(run):
        lines.append(f"failed   {failed}")
    lines += [f"held-out {first:.3f} -> {last:.3f} on {name}" for name, (first, last) in progress.held_out.items()]
    lines.append(f"folder   {run}")
    if (run / "reward.png").exists():
        lines.append(f"plot     {run / 'reward.png'}")
    if exported := _models(run):
        lines.append(f"model    {exported[-1]}")
    if runs.by_step(run / "samples"):
        lines.append(f"samples  python -m launcher samples {runs.called(run).strip() or run.name}")
    return "\n".join(lines)


def samples(args: argparse.Namespace) -> int:
    run = runs.find(args.run, Path(args.runs))
    files = runs.by_step(run / "samples")
    if not files:
        raise ConfigError(
            run.name, "has no samples yet", "wait for its first step; tracking.samples_per_step is not 0?"
        )
    file = files[-1] if args.step is None else run / "samples" / f"step-{args.step:06d}.jsonl"
    if file not in files:
        steps = f"{runs.step_of(files[0])} to {runs.step_of(files[-1])}"
        raise ConfigError(f"--step {args.step}", f"{run.name} has no samples of this step", f"it has steps {steps}")
    found = list(_read(file))
    if args.best or args.worst:
        found.sort(key=lambda sample: float("-inf") if sample.reward is None else sample.reward, reverse=args.best)
    print(f"{run.name}, step {runs.step_of(file)}: {min(args.n, len(found))} of {len(found)} samples")
    for sample in found[: args.n]:
        print(_sample_text(sample))
    return 0


class Turn(msgspec.Struct):
    by: str
    text: str


class Sampled(msgspec.Struct):
    """A line of a file in samples/, as far as it is shown."""

    prompt_id: str
    prompt: str
    text: str
    reward: float | None
    """None: it failed, which counts as lowest."""
    status: str
    version: int
    index: int = 0
    answer: Any = None
    messages: list[dict[str, Any]] = []
    """Of the prompt, where there are several."""
    turns: list[Turn] | None = None
    reason: str | None = None


def _read(file: Path) -> Iterator[Sampled]:
    for line in JsonLines(file).new():
        with contextlib.suppress(msgspec.ValidationError):
            yield msgspec.convert(line, Sampled)


def _sample_text(sample: Sampled) -> str:
    reward = shown(sample.reward, ".3f") if sample.reward is not None else "failed"
    head = f"{sample.prompt_id} [{sample.index}]  reward {reward}  {sample.status}  version {sample.version}"
    parts = [SAMPLE_RULE, head]
    for message in sample.messages or [{"content": sample.prompt}]:
        role = f", {message['role']}" if "role" in message else ""
        parts += [f"prompt{role}:", _indent(message.get("content", ""))]
    for turn in sample.turns or [Turn(by="policy", text=sample.text)]:
        parts += ["sampled:" if turn.by == "policy" else f"{turn.by}:", _indent(turn.text)]
    parts += [f"reason: {sample.reason}"] if sample.reason else []
    return "\n".join([*parts, f"answer: {sample.answer}"])


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in str(text).splitlines()) or "  (nothing)"
