# SPDX-License-Identifier: Apache-2.0
"""Copy the weights and flags of a trained agent, for others to play with.

    python -m tools.publish runs/my-run results/play/my-agent
    python -m monobeast --mode test --savedir results/play --xpid my-agent --video

The copy has the run's meta.json and its newest good checkpoint, without the optimizer
and with the weights in float16, which is a quarter of the size. Tensors with numbers
too large for float16 stay float32. `--init_from results/play/my-agent` starts a
training run with these weights.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from core.running import checkpoint
from core.running.common_flags import NETWORK_FLAGS

FLAGS = ("env", *NETWORK_FLAGS)  # All that is needed of those in a checkpoint.


def publish(run_dir: Path, out: Path) -> Path:
    """Return the path of the new checkpoint."""
    found = checkpoint.load(run_dir / "checkpoints")
    if found is None:
        raise SystemExit(f"{run_dir}: no checkpoint")
    if not (run_dir / "meta.json").is_file():
        raise SystemExit(f"{run_dir}: no meta.json, which --mode test needs")
    if any((out / "checkpoints").glob("step-*")):
        raise SystemExit(f"{out} has checkpoints already; name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(run_dir / "meta.json", out)
    return checkpoint.save(
        out / "checkpoints",
        step=found.step,
        tensors={
            "model": {name: halve(x) for name, x in found.tensors["model"].items()}
        },
        state={"flags": {k: v for k, v in found.state["flags"].items() if k in FLAGS}},
    )


def halve(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor as float16, unless it has a number too large for that."""
    if tensor.dtype != torch.float32:
        return tensor
    half = tensor.half()
    return half if half.isinf().equal(tensor.isinf()) else tensor


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.publish",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("out", type=Path, help="a new folder")
    args = parser.parse_args(argv)
    try:
        path = publish(args.run, args.out)
    except checkpoint.CheckpointError as error:
        raise SystemExit(f"{args.run}: {error}") from error
    except OSError as error:
        raise SystemExit(f"{args.out}: {error}") from error
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
