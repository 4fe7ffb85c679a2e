# SPDX-License-Identifier: Apache-2.0
"""Print one Markdown table: our results beside published ones.

    make results-table

The table has a row for each environment and variant of the runs in results/*/. Below
the rows of an environment are its rows in results/reference.csv. Our figures are
medians over seeds: of the mean return of the last 100 full games at the end of training
(with the lowest and the highest seed), and of the highest such mean during training.
The protocols of one environment's rows differ: the last columns have the protocol and
the source.

Folders that contain Python code are experiments, not scores, and are left out.
"""

import csv
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import atari_wrappers
from tools import plot

COLUMNS = (
    "environment",
    "system",
    "return",
    "best",
    "seeds",
    "steps",
    "frames",
    "hours",
    "hardware",
    "protocol",
    "source",
)
Row = dict[str, str]  # By column. Missing cells are blank.


def our_rows(results: Path) -> list[Row]:
    """Return a row for each environment and variant in results/*/."""
    claims = [path for path in sorted(results.iterdir()) if is_score(path)]
    return [
        our_row(claim, env, variant, seeds)
        for claim in claims
        for env, variants in plot.by_variant(plot.find_runs([claim])).items()
        for variant, seeds in variants.items()
    ]


def is_score(claim: Path) -> bool:
    return has_runs(claim) and not any(claim.glob("*.py"))


def has_runs(folder: Path) -> bool:
    return any(folder.glob("logs.csv")) or any(folder.glob("*/logs.csv"))


def our_row(claim: Path, env: str, variant: str, seeds: Sequence[plot.Run]) -> Row:
    ends = [run.rows[-1] for run in seeds]

    def median(column: str) -> float | None:
        values = [float(row[column]) for row in ends if row[column]]
        return statistics.median(values) if values else None

    means = sorted(float(row["mean_episode_return"]) for row in ends)
    spread = f" ({means[0]:.4g} to {means[-1]:.4g})" if len(means) > 1 else ""
    return {
        "environment": env,
        "system": f"**TorchBeast** {variant}",
        "return": f"**{number(median('mean_episode_return'))}**{spread}",
        "best": number(median("best_mean_return")),
        "seeds": str(len(seeds)),
        "steps": count(median("step")),
        "frames": count(median("frames")),
        "hours": number(median("time_s"), 3600),
        "hardware": hardware(seeds[0]),
        "protocol": protocol(env, seeds[0].meta["flags"]),
        "source": f"results/{claim.name}",
    }


def hardware(run: plot.Run) -> str:
    """Describe a run's machine, or the part of it that tools.sweep gave the run."""
    cores = f"{run.meta['cpu_count']} CPU"
    try:
        place = json.loads((run.folder / "sweep.json").read_text())
    except FileNotFoundError:
        return cores
    gpus = f"; {len(place['gpus'])} GPU" if place["gpus"] else ""
    return f"{len(place['cores'])} of {cores}{gpus}"


def protocol(env: str, flags: dict[str, Any]) -> str:
    points = [
        "games while training, actions sampled",
        f"discount {flags['discounting']}",
    ]
    if atari_wrappers.is_atari(env):
        name = flags.get("atari_protocol") or "impala"
        points.append(f"Atari protocol {name}")
        for option, value in atari_wrappers.options_of(flags).items():
            if value != atari_wrappers.PROTOCOLS[name][option]:
                points.append(f"{option} {value}")
    elif env.startswith("MinAtar/"):
        points.append("sticky actions 0.1 (MinAtar's own)")
    return "; ".join(points)


def reference_rows(env: str) -> list[Row]:
    """Return a row for each system that has published figures for an environment."""
    rows: dict[str, Row] = {}
    with open(plot.REFERENCE, newline="") as file:
        figures = [row for row in csv.DictReader(file) if row["env"] == env]
    for figure in figures:
        row = rows.setdefault(figure["system"], {"environment": env})
        row |= {key: figure[key] for key in ("system", "hardware", "protocol")}
        row["frames"] = count(float(figure["frames"] or "nan"))
        value, spread = figure["value"], figure["spread"]
        if figure["metric"] == "return":
            row["return"] = f"{value} ± {spread}" if spread else value
        elif figure["metric"] == "minutes":
            row["hours"] = number(float(value), 60)
        sources = [row["source"]] if "source" in row else []
        row["source"] = "; ".join(dict.fromkeys([*sources, figure["source"]]))
    return list(rows.values())


def number(value: float | None, unit: float = 1) -> str:
    return "" if value is None else f"{value / unit:.4g}"


def count(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value / 1e6:.4g}M"


def table(results: Path) -> str:
    """Return the table, sorted by environment, with our rows first."""
    ours = our_rows(results)
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    for env in sorted({row["environment"] for row in ours}):
        of_env = [row for row in ours if row["environment"] == env]
        for row in of_env + reference_rows(env):
            rows.append([row.get(column, "") for column in COLUMNS])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table(plot.REFERENCE.parent))
