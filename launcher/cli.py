"""The command line: arguments in, exit code out. Imports little, so that help is instant; commands import late."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from typing import Final

from runtime.errors import DENIED, EXIT_CODES, FULL, TRY_LATER, ConfigError, TryLater

_EPILOG = """\
examples:
  python -m launcher submit configs/quickstart.yaml
  python -m launcher submit run.yaml --set num_steps=200 --set trainer.optimizer.learning_rate=1e-5 --detach
  python -m launcher plan run.yaml
  python -m launcher status
  python -m launcher logs -f --rank 0
  python -m launcher samples --worst -n 3
  python -m launcher resume quickstart --set num_steps=100

RUN is a run folder, the beginning of a run's name or id, or nothing for the newest run in --runs (runs/).
Exit codes: 0 done, 2 something to fix in the config or command, 10 preempted or cancelled, 11 timeout, 12 node failed,
13 peer lost, 14 engine lost, 15 out of memory, 75 Slurm does not answer: try later, 1 bug.
`python -m launcher COMMAND --help` has examples too.
"""

_SUBMIT = """\
examples:
  python -m launcher submit configs/quickstart.yaml
  python -m launcher submit run.yaml --set seed=1 --set data.0.path=other.jsonl
  python -m launcher submit run.yaml --detach          (then: status, logs -f, cancel)
  python -m launcher submit run.yaml --dry-run         (checks everything, asks Slurm too, starts nothing)
  python -m launcher submit run.yaml --site generic-rocm --set-site account=me --set-site time=04:00:00

Ctrl-C cancels the run: it saves at the next boundary and ends, `resume` goes on with it. A second Ctrl-C kills it.
When this command ends otherwise (SIGTERM, a lost terminal), the run goes on, as with --detach.
"""
_PLAN = "example:\n  python -m launcher plan configs/quickstart.yaml --set cluster.num_rollout_nodes=2\n"
_RUN = """\
examples:
  sbatch sbatch/generic-cuda.sbatch run.yaml           (its last line is this command)
  salloc --nodes=2 --gpus-per-node=4 --exclusive       and in it:
  python -m launcher run run.yaml --site generic-cuda

A job that Slurm requeues goes on with its run.
"""
_STATUS = (
    "examples:\n  python -m launcher status\n  python -m launcher status quickstart\n  python -m launcher status all\n"
)
_LOGS = """\
examples:
  python -m launcher logs                      (end of every log of the newest run's newest attempt)
  python -m launcher logs -f                   (follow all of them)
  python -m launcher logs quickstart --rank 1 -n 200
  python -m launcher logs --engine 0 --attempt 0
"""
_CANCEL = (
    "example:\n  python -m launcher cancel quickstart\n\nThe run saves and ends; after limits.stop_s it is killed.\n"
)
_RESUME = """\
examples:
  python -m launcher resume
  python -m launcher resume quickstart --set num_steps=100 --detach

May change: num_steps, evaluation, tracking, cluster, staleness, limits, checkpoint. Any other change is refused, with a
diff, unless --accept-changes is given.
"""
_SAMPLES = """\
examples:
  python -m launcher samples                   (newest step of the newest run)
  python -m launcher samples quickstart --step 10 --worst -n 3
"""


FAULTY: Final = (errno.EIO, errno.ESTALE, errno.ENOTCONN)
"""Of an OSError: a disk or a network's file system, which does not say of which file it speaks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. A user's mistake is one message on stderr and code 2."""
    args, unknown = parser().parse_known_args(argv)
    if unknown:
        args.own.error(_refusal(args, unknown))
    try:
        return _run(args)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return TRY_LATER if isinstance(e, TryLater) else EXIT_CODES["config"]
    except KeyboardInterrupt as e:
        print(f"interrupted: {e}" if str(e) else "interrupted", file=sys.stderr)
        return EXIT_CODES["preempted"]
    except BrokenPipeError:  # `... | head` has read enough
        sys.stderr.close()
        return 0
    except OSError as e:
        if e.filename is None and e.errno not in (*FULL, *FAULTY):
            raise
        fix = "let it be writable, or use another folder" if e.errno in DENIED else "check the path"
        fix = "make room there" if e.errno in FULL else fix
        fix = "try again; if that does not help, ask your site what is the matter" if e.errno in FAULTY else fix
        place = e.filename or ("a disk or file system" if e.errno in FAULTY else "standard output")
        print(f"error: {place}: {e.strerror}\n  fix: {fix}", file=sys.stderr)
        return EXIT_CODES["config"]


def _refusal(args: argparse.Namespace, unknown: Sequence[str]) -> str:
    """What is wrong with arguments that a command does not know, and how they may be meant."""
    import re
    from difflib import get_close_matches

    said, first = f"unknown: {' '.join(unknown)}", unknown[0]
    if first.startswith("-"):
        options = re.findall(r"--[a-z-]+", args.own.format_usage())
        near = get_close_matches(first.partition("=")[0], options, n=1)
        return f"{said}; did you mean {near[0]}?" if near else said
    bare = next((given for given in getattr(args, "overrides", []) if "=" not in given), "")
    if bare:
        value = getattr(args, "config", "VALUE") if first.endswith((".yaml", ".yml")) else first
        return f"{said}; write it with an equals sign: --set {bare}={value}"
    return f"{said}; did you mean --set {first}?" if "=" in first and hasattr(args, "overrides") else said


def _run(args: argparse.Namespace) -> int:
    from launcher import commands, logs, show

    handlers = {
        "submit": commands.submit,
        "plan": commands.show_plan,
        "run": commands.run_here,
        "resume": commands.resume,
        "cancel": commands.cancel,
        "status": show.status,
        "samples": show.samples,
        "logs": logs.logs,
    }
    return handlers[args.command](args)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m launcher",
        description="Train language models with reinforcement learning: start runs and look after them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, examples: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(own=made)
        return made

    submit = add("submit", "check a config, start the run, follow it", _SUBMIT)
    _add_config(submit)
    submit.add_argument("--detach", action="store_true", help="return once the run is started")
    submit.add_argument(
        "--dry-run", action="store_true", help="check, print the plan, let Slurm look at the script; start nothing"
    )
    _add_config(add("plan", "print nodes, ranks, roles and the exact command of a run; change nothing", _PLAN))
    _add_config(add("run", "train here and now, inside a Slurm job or allocation of yours", _RUN))

    status = add("status", "what a run does, or how it ended and what to do", _STATUS)
    _add_run(status, "run folder, name or id, or all (default: the newest)")
    _add_logs(add("logs", "print or follow the logs of an attempt", _LOGS))
    _add_run(add("cancel", "stop a run", _CANCEL))

    resume = add("resume", "go on with a run from its last checkpoint", _RESUME)
    _add_run(resume)
    _add_set(resume)
    _add_set_site(resume)
    resume.add_argument("--accept-changes", action="store_true", help="allow any change of the config")
    resume.add_argument("--detach", action="store_true", help="return once the run is started")

    samples = add("samples", "print answers the policy gave", _SAMPLES)
    _add_run(samples)
    samples.add_argument("--step", type=int, metavar="N", help="of this step (default: the newest)")
    order = samples.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="highest rewards first")
    order.add_argument("--worst", action="store_true", help="lowest rewards first")
    samples.add_argument("-n", type=_positive, default=8, metavar="K", help="how many (default: 8)")
    return top


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", metavar="CONFIG", help="YAML file of the run")
    _add_set(command)
    command.add_argument("--site", help="a file in configs/site, or a path (default: the config's `site`)")
    _add_set_site(command)


def _add_set(command: argparse.ArgumentParser) -> None:
    text = "change one value, written as in YAML; list entries by index: data.0.path=x.jsonl (repeatable)"
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=text)


def _add_set_site(command: argparse.ArgumentParser) -> None:
    text = "change one value of the site: account=me, time=04:00:00, gpus_per_node=8 (repeatable)"
    command.add_argument(
        "--set-site", action="append", default=[], metavar="KEY=VALUE", dest="site_overrides", help=text
    )


def _add_run(command: argparse.ArgumentParser, text: str = "run folder, name or id (default: the newest)") -> None:
    command.add_argument("run", metavar="RUN", nargs="?", default="", help=text)
    command.add_argument("--runs", default="runs", metavar="DIR", help="folder of the run folders (default: runs)")


def _add_logs(command: argparse.ArgumentParser) -> None:
    _add_run(command)
    command.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="R", help="only this rank's")
    which.add_argument("--engine", type=int, metavar="E", help="only this engine's")
    command.add_argument("--attempt", type=int, metavar="N", help="of this attempt (default: the newest)")
    command.add_argument("-n", type=_positive, default=20, metavar="LINES", help="last lines of each log (default: 20)")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value
