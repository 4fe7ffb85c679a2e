# SPDX-License-Identifier: Apache-2.0
"""The live status line of a terminal; without a terminal, log lines."""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.live import Live
from rich.text import Text

from core.running.log_setup import is_terminal, log_console

log = logging.getLogger(__name__)


REDRAW_S = 0.25  # Drawing takes about a millisecond.
PLAIN_LINE_S = 10.0
BAR_WIDTH = 10


class StatusLine:
    """Shows the progress: a live line in a terminal, else a log line every 10 s.

    A context manager; only one thread may call `update`. It starts no thread, and uses
    the terminal only from the first `update` on: by then the actors have been forked.
    """

    def __init__(self, total_steps: int, num_learners: int = 1):
        self._total_steps = total_steps
        self._num_learners = num_learners
        self._sps = 0.0  # Smoothed, for the ETA.
        self._num_rows = 0
        self._parts: list[tuple[int, str]] = []
        self._shown = True  # Whether `_parts` has been shown.
        self._shown_at = -math.inf
        self._console = log_console()
        self._in_terminal = is_terminal(self._console)
        self._live: Live | None = None
        self._gone = False  # Whether the terminal has closed, as when ssh ends.

    def __enter__(self) -> "StatusLine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Show the last update; its line stays in the terminal."""
        if not self._shown:
            self._show()
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def update(self, row: Mapping[str, Any], bottleneck: str | None = None) -> None:
        """Take the new values in a row of the log; show them if it is time."""
        step, sps, learners = row["step"], row["sps"], self._num_learners
        self._num_rows += 1
        # The first row has no rate yet; in that of the second the actors start.
        is_early = self._num_rows <= 3 or not self._sps
        self._sps = sps if is_early else 0.8 * self._sps + 0.2 * sps
        lag = row.get("policy_lag_mean")
        # If the line is too long, the parts with the highest numbers are left out.
        self._parts = [
            (0, f"step {_short(step)}/{_short(self._total_steps)}"),
            (6, self._progress(step)),
            (5, f"{_short(row['frames'])} frames"),
            (1, f"{sps:,.0f} SPS"),
            (0, f"return(100) {_reward(row['mean_episode_return'])}"),
            (4, "" if lag is None else f"lag {lag:.1f}"),
            (3, bottleneck or ""),
            (2, f"ETA {self._eta(step)}"),
            (7, f"{learners} learners" if learners > 1 else ""),
        ]
        self._shown = False
        now = time.monotonic()
        if now - self._shown_at >= (REDRAW_S if self._in_terminal else PLAIN_LINE_S):
            self._shown_at = now
            self._show()

    def _progress(self, step: int) -> str:
        share = min(1.0, step / self._total_steps)
        if not self._in_terminal:
            return f"{share:.1%}"
        full, empty = "━─" if self._console.encoding.startswith("utf") else "#."
        done = int(share * BAR_WIDTH)
        return f"{full * done}{empty * (BAR_WIDTH - done)} {share:.1%}"

    def _eta(self, step: int) -> str:
        left = max(0, self._total_steps - step)
        return _duration(left / self._sps) if self._sps else "-"

    def _show(self) -> None:
        self._shown = True
        if not self._in_terminal:
            log.info("%s", _join(self._parts))
        elif not self._gone:
            self._draw()

    def _draw(self) -> None:
        try:
            if self._live is None:
                self._live = Live(
                    console=self._console,
                    auto_refresh=False,
                    # print() also goes above the line, unless stdout is a file.
                    redirect_stdout=sys.stdout.isatty(),
                    redirect_stderr=sys.stderr.isatty(),
                )
                self._live.start()
            # Leave the last column free: some terminals wrap a full line.
            line = _join(self._parts, width=self._console.width - 1)
            text = Text(line, no_wrap=True, overflow="ellipsis")
            text.highlight_regex(r"return\(100\) \S+", "bold")
            self._live.update(text, refresh=True)
        except OSError:
            self._gone = True  # The run continues without a terminal.


def _join(parts: Iterable[tuple[int, str]], width: float = math.inf) -> str:
    """Join the texts. Leave out texts with the highest numbers until the rest fits."""
    kept = [(order, text) for order, text in parts if text]
    while True:
        line = "  ".join(text for _, text in kept)
        last = max(order for order, _ in kept)
        if len(line) <= width or last == 0:
            return line
        kept = [(order, text) for order, text in kept if order < last]


def _short(n: float) -> str:
    """Return a count in three digits: 999, 1.23k, 45.6M."""
    for unit in ("", "k", "M", "G"):
        if n < 999.5 or unit == "G":
            break
        n /= 1000
    digits = 0 if not unit or n >= 99.95 else 1 if n >= 9.995 else 2
    return f"{n:.{digits}f}{unit}"


def _reward(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{h}h{m:02d}m"
    return f"{m}m{s:02d}s" if minutes else f"{s}s"
