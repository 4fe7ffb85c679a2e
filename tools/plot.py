# SPDX-License-Identifier: Apache-2.0
"""Draw learning curves from the logs.csv of runs: one panel for each environment.

    python -m tools.plot results/minatar
    python -m tools.plot results/minatar --x hours --out hours.png
    python -m tools.plot results/lag --against lag

Each folder is a run or contains runs. Runs whose names differ only in the number at the
end are seeds of one variant. A variant has one colour, a line for the median of its
seeds and a band for their interquartile range, up to the step that all seeds have
reached. The curve is the mean return of the last 100 full games, or the column --y.
Dashed lines are published returns for that environment (results/reference.csv), after
the number of frames that the authors trained for.

With --against FLAG the figure has points instead of curves: the mean over the last
fifth of each run, against the value of the flag in the run's name (`lag=20-vtrace-1`).

Writes curve.png into the first folder, or --out.
"""

import argparse
import csv
import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.transforms import offset_copy

REFERENCE = Path(__file__).parents[1] / "results" / "reference.csv"
POINTS = 500  # On the x axis that seeds share.
LAST = 0.2  # The part of a run whose mean --against shows.
RETURN = "mean_episode_return"

LEGEND_LINE_INCHES = 0.19
LABELS_POINTS = 36  # Height of the x axis' numbers and label, above the legend.

# For --x: the column of logs.csv, what it is divided by, and the label.
AXES = {
    "steps": ("step", 1e6, "million agent steps"),
    "frames": ("frames", 1e6, "million frames"),
    "hours": ("time_s", 3600, "hours"),
}


@dataclasses.dataclass
class Run:
    """The contents of a run's folder."""

    folder: Path
    meta: dict[str, Any]
    rows: list[dict[str, str]]  # Of logs.csv; only those that have the column --y.

    @property
    def env(self) -> str:
        options = self.meta.get("env_options", {})
        return options.get("create_env", self.meta["flags"]["env"])

    @property
    def name(self) -> str:
        """The name of its folder, without the seed at the end."""
        return re.sub(rf"-{self.meta['flags']['seed']}$", "", self.folder.name)

    @property
    def variant(self) -> str:
        """Its name, without the words in the name of its environment."""
        name = self.name
        env = re.findall(r"[\w.=+]+", self.env.lower())
        words = [word for word in name.split("-") if word.lower() not in env]
        return "-".join(words) or name

    def column(self, name: str) -> np.ndarray:
        return np.array([float(row[name]) for row in self.rows])

    def split(self, flag: str) -> tuple[str, float]:
        """Return its variant without the value of a flag, and that value."""
        match = re.search(rf"(?:^|-){flag}=(-?[\d.]+(?:e-?\d+)?)", self.variant)
        if match is None:
            raise SystemExit(f"{self.folder}: its name does not have {flag}=<number>")
        return self.variant.replace(match[0], "").strip("-") or flag, float(match[1])

    def last(self, name: str) -> float:
        """Return the mean of a column over the last part of the run."""
        step = self.column("step")
        return self.column(name)[step >= (1 - LAST) * step[-1]].mean()


def find_runs(folders: Iterable[Path], y: str = RETURN) -> list[Run]:
    """Return the runs in some folders; a folder may be a run itself.

    Leaves out runs that have no values of `y` yet.
    """
    found = []
    for folder in folders:
        logs = [folder / "logs.csv", *sorted(folder.glob("*/logs.csv"))]
        inside = [path.parent for path in logs if path.exists()]
        if not inside:
            raise SystemExit(f"{folder}: no run, and no folder of runs: no logs.csv")
        found += [run for run in inside if run == folder or not is_other_name(run)]
    runs = [read_run(folder, y) for folder in found]
    for run in runs:
        if not run.rows:
            print(f"{run.folder}: has no {y} yet, left out", file=sys.stderr)
    return [run for run in runs if run.rows]


def is_other_name(run: Path) -> bool:
    """Return whether a folder is `latest`, or another link to a run beside it."""
    if run.name == "latest":
        return True
    target = run.parent / run.readlink() if run.is_symlink() else None
    return target is not None and target.parent.samefile(run.parent)


def read_run(folder: Path, y: str = RETURN) -> Run:
    with open(folder / "logs.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(y)]
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{folder}: cannot read its meta.json: {error}") from error
    return Run(folder, meta, rows)


def by_variant(
    runs: Iterable[Run], against: str | None = None, together: str | None = None
) -> dict[str, dict[str, list[Run]]]:
    """Return the seeds of each variant of each environment.

    With `against`, runs that differ only in that flag are one variant. With `together`,
    all environments count as one environment of that name.
    """
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        if against:
            variant = run.split(against)[0]
        else:
            variant = run.name if together else run.variant
        groups.setdefault(together or run.env, {}).setdefault(variant, []).append(run)
    return groups


def aggregate(
    curves: Sequence[tuple[np.ndarray, np.ndarray]], points: int = POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate curves, each (x, y), on one x axis; return it and quartiles of y.

    Returns:
      x: [points], the range in which all curves have values.
      quartiles: [3, points]; the middle one is the median.
    """
    first = max(x[0] for x, _ in curves)
    x = np.linspace(first, max(first, min(x[-1] for x, _ in curves)), points)
    ys = np.stack([np.interp(x, *curve) for curve in curves])  # [seeds, points]
    return x, np.percentile(ys, [25, 50, 75], axis=0)


def read_reference(env: str) -> list[dict[str, str]]:
    """Return the published returns of an environment, the highest first."""
    with open(REFERENCE, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["env"] == env]
    returns = [row for row in rows if row["metric"] == "return"]
    return sorted(returns, key=lambda row: -float(row["value"]))


def draw_curves(axes: plt.Axes, seeds: Sequence[Run], x_axis: str, y: str, **style):
    """Draw the median of some seeds' curves, and a band."""
    column, unit, _ = AXES[x_axis]
    curves = [(run.column(column) / unit, run.column(y)) for run in seeds]
    x, (low, median, high) = aggregate(curves)
    axes.plot(x, median, **style)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.25, linewidth=0)


def draw_points(axes: plt.Axes, runs: Sequence[Run], flag: str, y: str, **style):
    """Draw the end of each run over the value of a flag, and a line of medians."""
    x = np.array([run.split(flag)[1] for run in runs])
    ends = np.array([run.last(y) for run in runs])
    values = np.unique(x)
    axes.plot(values, [np.median(ends[x == value]) for value in values], **style)
    axes.plot(x, ends, "o", color=style["color"], markersize=4, alpha=0.6)
    axes.set_xscale("symlog", linthresh=min(values[values > 0], default=1))
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def draw(
    runs: Sequence[Run],
    x_axis: str,
    y: str = RETURN,
    against: str | None = None,
    together: str | None = None,
) -> plt.Figure:
    """Return the figure: a panel for each environment."""
    groups = by_variant(runs, against, together)
    columns = min(len(groups), 3)
    lines = -(-len(groups) // columns)
    size = (6.4, 3.6) if len(groups) == 1 else (4.2 * columns, 3.4 * lines)
    is_published = y == RETURN and not against
    references = {env: read_reference(env) if is_published else [] for env in groups}
    # Lines of the longest legend below a panel. Other legends are inside their panel.
    most = max(len(groups[env]) + len(x) if x else 0 for env, x in references.items())
    size = (size[0], size[1] + lines * most * LEGEND_LINE_INCHES)
    figure, grid = plt.subplots(
        lines, columns, figsize=size, layout="constrained", squeeze=False
    )
    colours: dict[str, str] = {}
    for axes, (env, variants) in zip(grid.flat, groups.items()):
        for variant, seeds in variants.items():
            colour = colours.setdefault(variant, f"C{len(colours)}")
            if against:
                draw_points(axes, seeds, against, y, color=colour, label=variant)
            else:
                name = f"{variant}, {len(seeds)} seeds" if len(seeds) > 1 else variant
                draw_curves(axes, seeds, x_axis, y, color=colour, label=name)
        bottom, top = axes.get_ylim()
        for i, row in enumerate(references[env]):
            value, frames = float(row["value"]), row["frames"]
            after = f" ({int(frames) / 1e6:g}M frames)" if frames else ""
            # A line far above the curves would make them flat: only the legend has it.
            is_near = value < top + (top - bottom)
            axes.plot(
                [0, 1],
                [value if is_near else np.nan] * 2,
                transform=axes.get_yaxis_transform(),
                color=matplotlib.colormaps["Dark2"](i),
                linewidth=1,
                linestyle="--" if is_near else "",
                label=f"{row['system']}: {value:.6g}{after}",
            )
        axes.set_title(env)
        axes.set_xlabel(against or AXES[x_axis][2])
        axes.set_ylabel("return, last 100 full games" if y == RETURN else y)
        axes.grid(alpha=0.3)
        if references[env]:  # Below the axes: it would hide the curves.
            axes.legend(
                fontsize="x-small",
                loc="upper center",
                bbox_to_anchor=(0.5, 0.0),
                bbox_transform=offset_copy(
                    axes.transAxes, figure, y=-LABELS_POINTS, units="points"
                ),
            )
        else:
            axes.legend(fontsize="x-small", framealpha=0.6)
    for axes in grid.flat[len(groups) :]:
        axes.remove()
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, help="runs, or folders of runs"
    )
    parser.add_argument("--x", choices=AXES, default="steps", help="default: steps")
    parser.add_argument(
        "--y", default=RETURN, help=f"a column of logs.csv. Default: {RETURN}"
    )
    parser.add_argument(
        "--against", metavar="FLAG", help="a point for the end of each run, by flag"
    )
    parser.add_argument(
        "--together", metavar="TITLE", help="draw one panel for all environments"
    )
    parser.add_argument(
        "--out", type=Path, help="default: curve.png in the first folder"
    )
    parser.add_argument("--title", help="title of the figure")
    args = parser.parse_args(argv)

    if not (runs := find_runs(args.folders, args.y)):
        raise SystemExit("nothing to draw")
    figure = draw(runs, args.x, args.y, args.against, args.together)
    if args.title:
        figure.suptitle(args.title)
    out = args.out or args.folders[0] / "curve.png"
    figure.savefig(out, dpi=120, bbox_inches="tight")
    plt.close(figure)
    print(f"Wrote {out}")


if __name__ == "__main__":
    main()
