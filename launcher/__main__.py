"""`python -m launcher`."""

import importlib.util
import io
import os
import sys
from pathlib import Path

OURS = Path(__file__).parents[1] / "runtime/__init__.py"

if __name__ == "__main__":
    found = importlib.util.find_spec("runtime")
    if found is None or found.origin is None or not OURS.samefile(found.origin):  # the current directory comes first
        other = found and (found.origin or next(iter(found.submodule_search_locations or ()), ""))
        sys.stderr.write(f"error: {other}: hides Sluice's package `runtime`\n  fix: rename it, or start elsewhere\n")
        sys.exit(2)
    from launcher.cli import main

    os.umask(os.umask(0o077) | 0o022)  # what it writes is read again, and files that others can write are refused
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # answers hold what some terminals have no letters for
    else:  # it was closed
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.exit(main())
