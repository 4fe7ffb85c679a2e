# SPDX-License-Identifier: Apache-2.0
"""Averages and busy times between two rows of the log; statistics of the last games."""

import collections
import contextlib
import math
import operator
import reprlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from core.columns import Field as Field  # Forks import it from here.
from core.errors import ConfigError


class Averages:
    """Means and maxima of values between two log rows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Both guarded by the lock. `pop` keeps the names.
        self._sums: dict[Any, tuple[float, int]] = {}
        self._maxima: dict[str, float | None] = {}

    def add(self, values: Mapping[Any, Any] = {}, /, **named: Any) -> None:
        """Count one value for each name or `Field`. None and NaN are not counted.

        Raises:
          ConfigError: a value is not a number.
        """
        with self._lock:
            for name, value in {**values, **named}.items():
                total, count = self._sums.get(name, (0.0, 0))
                if (number := as_number(name, value)) is not None:
                    total, count = total + number, count + 1
                self._sums[name] = total, count

    def add_max(self, **values: Any) -> None:
        """Like `add`, but `pop` will return the largest value."""
        with self._lock:
            for name, value in values.items():
                number, largest = as_number(name, value), self._maxima.get(name)
                if largest is None or (number is not None and number > largest):
                    self._maxima[name] = number

    def pop(self) -> dict[Any, float | None]:
        """Return means and maxima since the last call; None where nothing was added."""
        with self._lock:
            row: dict[Any, float | None] = {
                name: total / count if count else None
                for name, (total, count) in self._sums.items()
            }
            row |= self._maxima
            self._sums = dict.fromkeys(self._sums, (0.0, 0))
            self._maxima = dict.fromkeys(self._maxima)
        return row

    def take(self) -> tuple[dict[Any, tuple[float, int]], dict[str, float | None]]:
        """Return all values, for `merge` in another learner, and reset them here."""
        with self._lock:
            taken = self._sums, self._maxima
            self._sums, self._maxima = {}, {}
        return taken

    def merge(
        self,
        sums: Mapping[Any, tuple[float, int]],
        maxima: Mapping[str, float | None],
    ) -> None:
        """Add sums with their counts, and maxima: of another learner, or of a batch."""
        with self._lock:
            for name, (total, count) in sums.items():
                before = self._sums.get(name, (0.0, 0))
                self._sums[name] = before[0] + total, before[1] + count
        self.add_max(**maxima)


def as_number(column: Any, value: Any) -> float | None:
    """Return a number, also of numpy or torch, as a float; None for None and NaN.

    Raises:
      ConfigError: `value` is not a number.
    """
    if value is None:
        return None
    if isinstance(value, (str, bytes)):  # Also "7", which float() accepts.
        raise not_a_number(column, value)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise not_a_number(column, value) from error
    return None if math.isnan(number) else number


def not_a_number(column: Any, value: Any) -> ConfigError:
    """Return the exception for a value that a column cannot have."""
    name = column.name if isinstance(column, Field) else column
    text = " ".join(reprlib.repr(value).split())  # A tensor has several lines.
    return ConfigError(
        f"the log's column {name} was given {text}, which is a "
        f"{type(value).__name__}; expected a number"
    )


class BusyTime:
    """The share of the time that each stage works between two log rows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Both guarded by the lock.
        self._seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def add(self, stage: str, seconds: float, *, workers: int = 1) -> None:
        """Count the time that one of a stage's `workers` has worked."""
        with self._lock:
            self._seconds[stage] = self._seconds.get(stage, 0) + seconds / workers

    @contextlib.contextmanager
    def measure(self, stage: str, *, workers: int = 1) -> Iterator[None]:
        """Count the time that the block takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(stage, time.monotonic() - began, workers=workers)

    def pop(self) -> dict[str, float]:
        """Return each stage's share of the time since the last call, at most 1."""
        with self._lock:
            now = time.monotonic()
            wall = max(now - self._since, 1e-9)
            shares = {k: min(1.0, s / wall) for k, s in self._seconds.items()}
            self._seconds = dict.fromkeys(self._seconds, 0.0)
            self._since = now
        return shares


class EpisodeStats:
    """Returns and lengths of the last `window` full games and episodes. Thread-safe."""

    def __init__(self, window: int = 100):
        self._lock = threading.Lock()
        # All guarded by the lock.
        self._returns: collections.deque[float] = collections.deque(maxlen=window)
        self._steps: collections.deque[int] = collections.deque(maxlen=window)
        self._life_returns: collections.deque[float] = collections.deque(maxlen=window)
        self._games = 0
        self._best: float | None = None  # The highest mean over a full window.

    def add_games(self, returns: Iterable[float], steps: Iterable[float]) -> None:
        """Count finished full games."""
        with self._lock:
            for game_return, game_steps in zip(returns, steps, strict=True):
                self._games += 1
                self._returns.append(float(game_return))
                self._steps.append(int(game_steps))
                if len(self._returns) == self._returns.maxlen:
                    mean = sum(self._returns) / len(self._returns)
                    if self._best is None or mean > self._best:
                        self._best = mean

    def add_episodes(self, returns: Iterable[float]) -> None:
        """Count finished episodes as the learner sees them: often single lives."""
        with self._lock:
            self._life_returns.extend(float(r) for r in returns)

    def columns(self) -> dict[str, float | None]:
        """Return the log's columns about games and episodes; None: there is none yet.

        `core.columns` says what each means.
        """
        with self._lock:
            return {
                "mean_episode_return": _mean(self._returns),
                "mean_episode_step": _mean(self._steps),
                "games": self._games,
                "best_mean_return": self._best,
                "mean_life_return": _mean(self._life_returns),
            }

    def state(self) -> dict[str, Any]:
        """Return all fields as JSON values, for `restore` and `merge`."""
        with self._lock:
            return {
                "games": self._games,
                "best": self._best,
                "returns": list(self._returns),
                "steps": list(self._steps),
                "life_returns": list(self._life_returns),
            }

    def merge(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Add the games and episodes in the `state()`s of learners of the same time.

        Which came first is not known: those of each learner are spread evenly over the
        time. So they are mixed in every window as they are in all.
        """
        games: list[tuple[float, float, int]] = []
        lives: list[tuple[float, float]] = []
        total, span = 0, 1.0
        for state in states:
            returns, life_returns = state["returns"], state["life_returns"]
            ages = _ages(returns, state["games"])
            games += zip(ages, returns, state["steps"])
            lives += zip(_ages(life_returns, len(life_returns)), life_returns)
            total += state["games"]
            span = min([span, *ages[:1]])
        age = operator.itemgetter(0)
        # Only the last games of each are known. Use the time in which all are.
        games = sorted((g for g in games if age(g) <= span), key=age, reverse=True)
        self.add_games([x for _, x, _ in games], [steps for *_, steps in games])
        self.add_episodes(x for _, x in sorted(lives, key=age, reverse=True))
        with self._lock:
            self._games += total - len(games)

    def restore(self, state: Mapping[str, Any]) -> None:
        window = self._returns.maxlen
        with self._lock:
            self._games = state["games"]
            self._best = state["best"]
            self._returns = collections.deque(state["returns"], window)
            self._steps = collections.deque(state["steps"], window)
            self._life_returns = collections.deque(state["life_returns"], window)


def _ages(kept: Sequence[float], total: int) -> list[float]:
    """Return how long ago each of the last events of `total` was: 1 is the oldest."""
    return [(len(kept) - i) / total for i in range(len(kept))]


def _mean(values: Sequence[float] | collections.deque) -> float | None:
    return sum(values) / len(values) if values else None
