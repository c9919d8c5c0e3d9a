"""Draws reward.png of a run folder from metrics.jsonl: python -m runtime.plot RUN."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl


def draw(run_dir: Path) -> Path | None:
    """Reward of every step and the accuracies of evaluation sets over steps; None where there is nothing yet."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    path = run_dir / "metrics.jsonl"
    lines: list[dict[str, Any]] = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    if not lines:
        return None
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = [x for x in lines if "reward" in x]
    axes.plot([x["step"] for x in steps], [x["reward"] for x in steps], color="0.6", label="training reward")
    for key in sorted({k for x in lines for k in x if k.startswith("eval/") and k.endswith("/accuracy")}):
        points = [(x["step"], x[key]) for x in lines if key in x]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{key.split('/')[1]} accuracy")
    axes.set(xlabel="step", ylabel="reward, accuracy", title=run_dir.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    target = run_dir / "reward.png"
    figure.savefig(target.with_suffix(".part.png"), dpi=120)
    target.with_suffix(".part.png").rename(target)
    plt.close(figure)
    return target


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
