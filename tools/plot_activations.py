"""Draws step time against peak GPU memory, without checkpointing, from a record of benchmarks/activations.py.

    python tools/plot_activations.py RECORD.json PICTURE.svg

Needs matplotlib.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

OURS = "saved_tensors, "


def draw(record: Path, picture: Path) -> None:
    runs = [run for run in json.loads(record.read_text())["runs"] if not run["checkpointed"] and run.get("ideal")]

    def total(run: dict) -> float:
        return (run["peak"] + run["parameters"]) / 2**30

    plain = next(run for run in runs if run["variant"] == "plain")
    ours = [plain, *(run for run in runs if run["variant"].startswith(OURS))]
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for label, style, key in (
        ("saved_tensors", "o-", "seconds"),
        ("what the link allows for the same bytes", "--", "ideal"),
    ):
        times = [run[key]["median"] if key == "seconds" else run[key] for run in ours]
        axes.plot([total(run) for run in ours], [1e3 * time for time in times], style, label=label)
    for run in ours:
        name = run["variant"].removeprefix(OURS)
        axes.annotate(
            name, (total(run), 1e3 * run["seconds"]["median"]), (4, 5), textcoords="offset points", fontsize=8
        )
    for run in runs:
        if run not in ours:
            axes.plot(total(run), 1e3 * run["seconds"]["median"], "s", label=run["variant"])
    axes.set(xlabel="peak GPU memory, GiB (weights, and what the step holds)", ylabel="forward and backward, ms")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{plain['tokens']:,} tokens, no checkpointing", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
