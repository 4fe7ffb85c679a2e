# SPDX-License-Identifier: Apache-2.0
"""`make bench`: what it compares, and what it calls slower. Nothing is timed here."""

import json
from pathlib import Path

import pytest

from benchmarks import bench

EMULATOR = [5000.0, 5100.0, 4900.0, 5000.0, 5050.0]
TURNS = [0.50, 0.51, 0.49, 0.50, 0.52]  # Per emulator; the spread is 0.03.
MACHINE = {"cpu": "EPYC", "cores": 2, "torch": "2.13"}


def row_of(turns, *, emulator=EMULATOR, **machine):
    """A file of the history in which the learner has these rates per emulator."""
    rates = [ratio * y for ratio, y in zip(turns, emulator)]
    names = ("learner", "learner, LSTM")
    return {
        **MACHINE,
        **machine,
        "steps_per_s": {bench.YARDSTICK: emulator, **dict.fromkeys(names, rates)},
    }


def shifted(by):
    return row_of([ratio + by for ratio in TURNS])


def status(row, earlier):
    return bench.report(row, earlier, Path("x.json"))


def test_a_fall_beyond_both_spreads_is_slower_and_ends_with_status_1(capsys):
    assert status(shifted(-0.05), row_of(TURNS)) == 1  # The noise is 0.042.
    out = capsys.readouterr().out
    assert "Slower by more than the noise: learner; learner, LSTM." in out
    assert "0.450    0.500    -10%     8%  slower" in out


@pytest.mark.parametrize("by", [-0.04, 0.0, 0.1])
def test_a_fall_within_the_noise_and_a_rise_end_with_status_0(by, capsys):
    assert status(shifted(by), row_of(TURNS)) == 0
    assert "slower" not in capsys.readouterr().out.lower()


@pytest.mark.parametrize("wide", ["now", "before"])
def test_the_spread_of_either_file_is_noise(wide):
    spread = row_of([0.30, *TURNS[1:4], 0.60])
    both = (shifted(-0.05), spread) if wide == "before" else (spread, shifted(0.05))
    assert not any(change.is_slower for change in bench.compare(*both).values())


def test_a_machine_that_is_slower_as_a_whole_is_not():
    today = row_of(TURNS, emulator=[rate / 2 for rate in EMULATOR])
    changes = bench.compare(today, row_of(TURNS))
    assert [change.change for change in changes.values()] == pytest.approx([0.0, 0.0])


def test_what_only_one_of_them_has_is_not_compared():
    earlier = row_of(TURNS)
    del earlier["steps_per_s"]["learner, LSTM"]
    assert bench.compare(row_of(TURNS), earlier).keys() == {"learner"}


def test_the_newest_file_of_the_same_kind_of_machine_is_compared_with(tmp_path):
    for name, row in {
        "20260101-0000-a": row_of(TURNS, note="old"),
        "20260102-0000-b": row_of(TURNS, note="new"),
        "20260103-0000-c": row_of(TURNS, cpu="Xeon"),
        "20260104-0000-d": row_of(TURNS, cores=4),
        "20260105-0000-e": row_of(TURNS, torch="2.14"),
        "20260106-0000-f": {"steps_per_s": {}},  # Older files do not name the CPU.
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(row))
    assert bench.last_of_kind(tmp_path, row_of(TURNS))["note"] == "new"
    assert bench.last_of_kind(tmp_path, row_of(TURNS, cpu="Arm")) is None


def test_without_an_earlier_file_the_status_is_0(capsys):
    assert status(row_of(TURNS), None) == 0
    assert "Nothing to compare with" in capsys.readouterr().out


def test_this_machine_has_a_kind():
    kind = bench.kind_of_machine()
    assert kind.keys() == MACHINE.keys() and all(kind.values())
