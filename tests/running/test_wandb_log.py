# SPDX-License-Identifier: Apache-2.0
"""Rows go to Weights & Biases, and a run does not need it."""

import re
import sys
import threading
from types import SimpleNamespace

import pytest

from core.running import logs, wandb_log
from tests.conftest import DEADLINE_S, wait_until
from tests.running.conftest import steps_of


def wandb_that_hangs(hangs, gate):
    """Return the package, of which one call waits for the gate, and its calls."""
    calls = []

    def answer(name, step=None):
        calls.append((name, step))
        if name == hangs:
            assert gate.wait(DEADLINE_S)

    run = SimpleNamespace(
        log=lambda row, step: answer("log", step), finish=lambda: answer("finish")
    )

    def init(**options):
        answer("init")
        return run

    return SimpleNamespace(init=init), calls


def test_wandb_gets_its_rows_once_there_can_be_a_thread(tmp_path, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    wandb, calls = wandb_that_hangs("never", threading.Event())
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with logs.RunLog(tmp_path, wandb={}) as run_log:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            run_log.log({"step": 1})
        run_log.log({"step": 2})
    assert [step for name, step in calls if name == "log"] == [1, 2]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_wandb_that_hangs_holds_up_neither_rows_nor_the_end(
    tmp_path, monkeypatch, caplog, background, call
):
    gate = threading.Event()
    wandb, calls = wandb_that_hangs(call, gate)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(wandb_log, "MAX_ROWS", 3)
    monkeypatch.setattr(wandb_log, "HANGS_S", 0.0)
    monkeypatch.setattr(wandb_log, "SAY_END_S", 0.0)
    monkeypatch.setattr(wandb_log, "END_S", 0.01)
    before = threading.enumerate()

    def write_rows() -> None:
        with logs.RunLog(tmp_path, wandb={}) as run_log:
            for step in range(1, 10):
                run_log.log({"step": step})
                wait_until(lambda: call == "finish" or call in dict(calls))

    try:
        background(write_rows).result(DEADLINE_S)
        assert steps_of(tmp_path) == [*range(1, 10)]
        if call != "finish":
            assert caplog.text.count("Weights & Biases hangs") == 1
            lost = 9 - (call == "log")  # Also those that still wait at the end.
            assert f"Weights & Biases lacks {lost} rows" in caplog.text
        assert "Weights & Biases did not end within 0.01 s" in caplog.text
    finally:
        gate.set()
    wait_until(lambda: set(threading.enumerate()) <= set(before))
    sent = [step for name, step in calls if name == "log"]
    assert sent == sorted(set(sent)) and calls[-1] == ("finish", None)


def test_wandb_that_fails_is_left_alone(tmp_path, monkeypatch, caplog):
    calls = []

    def init(**options):
        calls.append(options)
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with logs.RunLog(tmp_path, wandb={}) as run_log:
        for step in (1, 2):
            run_log.log({"step": step})
    assert len(calls) == 1
    assert caplog.text.count("Weights & Biases failed, and gets no more rows: no") == 1
    assert steps_of(tmp_path) == [1, 2]


def test_wandb_that_fails_at_the_end_does_not_fail_the_run(
    tmp_path, monkeypatch, caplog
):
    def finish():
        raise OSError("no network")

    run = SimpleNamespace(log=lambda row, step: None, finish=finish)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    with logs.RunLog(tmp_path, wandb={}) as run_log:
        run_log.log({"step": 1})
    assert "Weights & Biases failed, and gets no more rows: no" in caplog.text


def test_wandb_gets_the_rows_under_the_id_of_the_run(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(
        log=lambda row, step: calls.append(("log", row, step)),
        finish=lambda: calls.append(("finish",)),
    )

    def init(**options):
        calls.append(("init", options))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run_dir = tmp_path / "pong:1"
    run_dir.mkdir()
    with logs.RunLog(run_dir, wandb={"seed": 3}) as run_log:
        assert calls == []  # It would start threads before the actors are forked.
        run_log.log({"step": 5, "sps": 2.0, "entropy": None})
        run_log.log({"step": 7})
    (_, options), *rest = calls
    assert rest == [
        ("log", {"step": 5, "sps": 2.0}, 5),
        ("log", {"step": 7}, 7),
        ("finish",),
    ]
    assert re.fullmatch("pong-1-[0-9a-f]{8}", options["id"])
    assert options["id"] == wandb_log._run_id(run_dir.rename(tmp_path / "moved"))
    (tmp_path / "old" / "wandb").mkdir(parents=True)
    assert wandb_log._run_id(tmp_path / "old") == "old"
    assert options["name"] == "pong:1"
    assert options["resume"] == "allow"
    assert options["config"] == {"seed": 3}
