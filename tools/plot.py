# SPDX-License-Identifier: Apache-2.0
"""Draw the learning curve of one or more runs from their logs.csv.

    python -m tools.plot results/pong-2cores

writes curve.png beside the data: mean return of the last 100 full games against agent
steps. Several folders go into one figure: `--out figure.png`. With `--seeds`, folders
that differ in what follows the last "-" of their names are seeds of one thing, and get
one colour.
"""

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read_curve(folder: Path) -> tuple[list[float], list[float], float]:
    """Return steps, mean returns (rows that have one), and the hours it took."""
    with open(folder / "logs.csv", newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["mean_episode_return"]]
    if not rows:
        raise SystemExit(f"{folder}/logs.csv has no finished game yet: nothing to draw")
    return (
        [float(r["step"]) for r in rows],
        [float(r["mean_episode_return"]) for r in rows],
        float(rows[-1]["time_s"]) / 3600,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="folders with a logs.csv")
    parser.add_argument("--out", type=Path, help="default: curve.png in the first one")
    parser.add_argument("--title", default="")
    parser.add_argument("--seeds", action="store_true", help="see above")
    args = parser.parse_args()

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    colours: dict[str, str] = {}
    for folder in args.folders:
        steps, returns, hours = read_curve(folder)
        group = folder.name.rpartition("-")[0] if args.seeds else folder.name
        is_new = group not in colours
        colours.setdefault(group, f"C{len(colours)}")
        label = group if args.seeds else f"{group}, {hours:.1f} h"
        axes.plot(
            [step / 1e6 for step in steps],
            returns,
            color=colours[group],
            label=label if is_new else None,
        )
    axes.set_xlabel("million agent steps")
    axes.set_ylabel("return, last 100 full games")
    axes.set_title(args.title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.out or args.folders[0] / "curve.png", dpi=120)


if __name__ == "__main__":
    main()
