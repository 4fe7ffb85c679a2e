# SPDX-License-Identifier: Apache-2.0
"""Counters: means, busy time and episode statistics lose and double nothing."""

import json
import math
import os
import threading
import time

import numpy as np
import pytest
import torch

from core.algorithm import counters
from tests.running.conftest import DEADLINE_S


def test_busy_time_is_the_share_of_the_time_between_two_rows(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    busy = counters.BusyTime()
    with busy.measure("learner"):
        now += 3
    with pytest.raises(ValueError), busy.measure("inference", workers=2):
        now += 1
        raise ValueError  # Time is time.
    busy.add("env", 60.0, workers=4)  # Steps that began before the last row.
    busy.add("learner", 2.0)
    now += 4
    assert busy.pop() == {"learner": 5 / 8, "inference": 0.5 / 8, "env": 1.0}
    now += 1
    busy.add("env", 0.25)
    assert busy.pop() == {"learner": 0.0, "inference": 0.0, "env": 0.25}


def test_averages_are_means_since_the_last_pop():
    averages = counters.Averages()
    averages.add(x=1.0, y=np.float32(3))
    averages.add(x=torch.tensor(2.0), y=None)
    averages.add(x=math.nan)
    averages.add_max(z=-5)
    averages.add_max(z=np.int64(-2))
    averages.add_max(z=math.nan)
    averages.add_max(z=-3)
    assert averages.pop() == {"x": 1.5, "y": 3.0, "z": -2.0}
    assert averages.pop() == {"x": None, "y": None, "z": None}
    averages.add_max(z=-7)
    assert averages.pop() == {"x": None, "y": None, "z": -7.0}


def test_averages_of_another_learner_are_added_once():
    ours, theirs = counters.Averages(), counters.Averages()
    for averages, values in ((ours, [1.0]), (theirs, [2.0, 6.0])):
        for value in values:
            averages.add(x=value)
            averages.add_max(y=value)
    ours.merge(*theirs.take())
    assert ours.pop() == {"x": 3.0, "y": 6.0}
    ours.merge(*theirs.take())
    assert ours.pop() == {"x": None, "y": None}


class Slow(float):
    """A number that lets other threads run while it is read."""

    def __float__(self):
        os.stat("/")  # Releases the GIL.
        return float.__add__(self, 0.0)


def test_averages_lose_no_value_among_threads():
    averages = counters.Averages()
    n, values = 503, (1, 10, 100, 1000)
    start = threading.Barrier(len(values))

    def add(value):
        start.wait(DEADLINE_S)
        for i in range(n):
            averages.add(x=Slow(value))
            averages.add_max(y=Slow(value * i))

    threads = [threading.Thread(target=add, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert averages.pop() == {"x": sum(values) / len(values), "y": 1000.0 * (n - 1)}


def test_no_value_falls_between_two_pops():
    averages = counters.Averages()
    n = 1009

    def add():
        for i in range(n):
            averages.add_max(**{f"value{i}": Slow(i)})

    thread = threading.Thread(target=add)
    thread.start()
    found, deadline = [], time.monotonic() + DEADLINE_S
    while True:
        alive = thread.is_alive()
        found += [value for value in averages.pop().values() if value is not None]
        if not alive:
            break
        assert time.monotonic() < deadline
    assert found == [float(i) for i in range(n)]


def test_episode_stats_are_over_the_last_window_of_games():
    names = ("games", "mean_episode_return", "mean_episode_step", "mean_life_return")
    stats = counters.EpisodeStats(window=3)

    def found():
        return [stats.columns()[name] for name in names]

    assert found() == [0, None, None, None]
    stats.add_games(np.float32([1, 2]), np.float32([10, 20]))
    assert found() == [2, 1.5, 15.0, None]
    stats.add_games([6, 7], [30, 40])
    assert found() == [4, 5.0, 30.0, None]
    stats.add_episodes(np.float32([1, 2, 3, 4]))
    assert found() == [4, 5.0, 30.0, 3.0]


def test_best_is_the_highest_mean_over_a_full_window():
    stats = counters.EpisodeStats(window=3)
    stats.add_games([100, 50], [1, 1])
    assert stats.columns()["best_mean_return"] is None
    stats.add_games([0], [1])
    assert stats.columns()["best_mean_return"] == 50.0
    stats.add_games([10, 10, 11, -90], [1] * 4)
    assert stats.columns()["best_mean_return"] == 50.0
    stats.add_games([1000], [1])
    best = stats.columns()["best_mean_return"]
    assert best == pytest.approx((11 - 90 + 1000) / 3)


def test_games_of_several_learners_are_mixed_in_every_window():
    """One learner's have a return of 0, and it plays three times as many."""
    parts = [counters.EpisodeStats(window=20) for _ in range(2)]
    whole = counters.EpisodeStats(window=20)
    for _ in range(5):
        parts[0].add_games([0.0] * 150, [1] * 150)
        parts[1].add_games([8.0] * 50, [2] * 50)
        for part in parts:
            part.add_episodes([part.columns()["mean_episode_return"]] * 2)
        idle = counters.EpisodeStats()
        whole.merge([part.state() for part in (*parts, idle)])
        found = whole.columns()
        assert found["mean_episode_return"] == found["best_mean_return"] == 2.0
        assert found["mean_episode_step"] == 1.25
        parts = [counters.EpisodeStats(window=20) for _ in range(2)]
    assert found["games"] == 1000
    assert found["mean_life_return"] == 4.0


def test_the_newest_games_of_several_learners_stay_in_the_window():
    parts = [counters.EpisodeStats() for _ in range(2)]
    for part, first in zip(parts, (1.0, 7.0)):
        part.add_games([first, first + 1, first + 2], [1] * 3)
        part.add_episodes([first, first + 1, first + 2])
    for window, newest in ((4, [2, 3, 8, 9]), (7, [1, 2, 3, 7, 8, 9])):
        whole = counters.EpisodeStats(window)
        whole.merge([part.state() for part in parts])
        for name in ("returns", "life_returns"):
            assert sorted(whole.state()[name]) == newest


def test_games_need_as_many_returns_as_steps():
    with pytest.raises(ValueError, match="zip"):
        counters.EpisodeStats().add_games([1.0, 2.0], [3])


def test_episode_stats_come_back_exactly_through_json():
    rng = np.random.default_rng(5)
    stats, copy = counters.EpisodeStats(), counters.EpisodeStats()
    copy.add_games([-1.0], [1])  # To be forgotten.
    for num_games in (13, 101, 7):
        stats.add_games(
            rng.normal(size=num_games).astype(np.float32),
            rng.integers(1, 10_000, num_games),
        )
        stats.add_episodes(rng.normal(size=3 * num_games))
        copy.restore(json.loads(json.dumps(stats.state(), allow_nan=False)))
        for s in (stats, copy):
            s.add_games([0.1, 0.2], [3, 4])
            s.add_episodes([0.1, 0.2])
        assert copy.state() == stats.state()
        assert copy.columns() == stats.columns()
