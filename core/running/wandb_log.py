# SPDX-License-Identifier: Apache-2.0
"""`WandbLog`: sends the rows of a run to Weights & Biases.

All calls of that package are in a thread of their own: a call that fails or hangs stops
neither the other logs nor training.
"""

import contextlib
import logging
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import UsageError, one_line
from core.running.atomic import write_atomically

log = logging.getLogger(__name__)

MAX_ROWS = 1000  # Rows that wait in memory, a few MiB. Further rows are dropped.
HANGS_S = 60.0  # A call that takes longer is warned of.
SAY_END_S = 1.0  # A wait at the end of a run is logged after this time.
END_S = 60.0  # How long the end of a run waits until all rows are sent.

_Row = tuple[int, Mapping[str, float]]  # The step and the columns.


def import_package() -> Any:
    """Import and return the package. From then on it records sys.stdout and sys.stderr.

    Raises:
      UsageError: the package, or one that it needs, cannot be imported.
    """
    try:
        import wandb  # Not above: it is slow, and need not be installed.
    except Exception as error:
        raise UsageError(
            f"--wandb: cannot import wandb: {type(error).__name__}: "
            f"{one_line(str(error))}. Repair the package, or leave --wandb out."
        ) from error
    return wandb


class WandbLog:
    """Sends rows to Weights & Biases. Only one thread may use it.

    Args:
      run_dir: the run's folder; its name is the name of the run there.
      config: the flags.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any]):
        self._wandb = import_package()
        self._run_dir = run_dir
        self._config = dict(config)
        self._rows: queue.SimpleQueue[_Row | None] = queue.SimpleQueue()  # None: end.
        # Starts with the first row. Not a daemon, so that `core.errors.leave` ends the
        # program without the atexit hook of the package, which may hang, too.
        self._thread = threading.Thread(target=self._run, name="Weights & Biases")
        self._called_at: float | None = None  # When the present call began.
        self._warned = False
        self._lost = 0  # Rows that were dropped, or still waited at the end.

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Send a row, or drop it if MAX_ROWS wait."""
        if self._thread.ident is None:
            with contextlib.suppress(RuntimeError):  # No thread now: at the next row.
                self._thread.start()
        elif not self._thread.is_alive():
            return  # It has failed.
        if self._rows.qsize() < MAX_ROWS:
            self._rows.put((step, values))
        else:
            self._lost += 1
        called_at = self._called_at  # The thread may change it.
        if called_at is None or time.monotonic() - called_at < HANGS_S:
            self._warned = False
        elif not self._warned:
            self._warned = True
            log.warning(
                "Weights & Biases hangs: a call has taken %g s. Training and the other "
                "logs go on; up to %d rows wait for it.",
                HANGS_S,
                MAX_ROWS,
            )

    def _run(self) -> None:
        try:
            self._called_at = time.monotonic()
            run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "torchbeast"),
                id=_run_id(self._run_dir),
                name=self._run_dir.name,
                dir=str(self._run_dir),
                config=self._config,
                resume="allow",
            )
            while True:
                self._called_at = None
                row = self._rows.get()
                self._called_at = time.monotonic()
                if row is None:
                    break
                step, values = row
                # W&B ignores steps that it has seen already, before the run was
                # resumed.
                run.log(values, step=step)
            run.finish()
        except Exception as error:  # A failing service must not stop the run.
            log.warning("Weights & Biases failed, and gets no more rows: %s", error)

    def close(self) -> None:
        """Wait until all rows are sent, for at most END_S."""
        if self._thread.ident is None:
            return
        self._rows.put(None)
        self._thread.join(SAY_END_S)
        if self._thread.is_alive():
            log.info("Waiting for Weights & Biases, for up to %g s", END_S)
            self._thread.join(END_S)
        if self._thread.is_alive():
            self._lost += max(0, self._rows.qsize() - 1)  # Less the None at the end.
            log.warning(
                "Weights & Biases did not end within %g s. `wandb sync` sends what it "
                "has written to %s.",
                END_S,
                self._run_dir / "wandb",
            )
        if self._lost:
            log.warning("Weights & Biases lacks %d rows", self._lost)


def _run_id(run_dir: Path) -> str:
    """Return the run's id. Its folder holds it, as two runs may have one name."""
    file = run_dir / "wandb-id"
    if not file.exists():
        name = re.sub(r"[/\\#?%:]", "-", run_dir.name)  # W&B refuses these.
        is_new = not (run_dir / "wandb").exists()  # Otherwise the name was the id.
        name += f"-{secrets.token_hex(4)}" * is_new
        write_atomically(file, name.encode())
    return file.read_text()
