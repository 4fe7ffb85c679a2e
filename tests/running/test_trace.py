# SPDX-License-Identifier: Apache-2.0
"""`core.running.trace`: what a trace has before it is written."""

import json
import os

import pytest

from core.errors import UsageError
from core.running import trace as trace_module
from core.running.trace import TRACED_SPANS, UNTRACED_UPDATES, Trace


def test_a_trace_is_written_once_it_has_enough_of_each_span(tmp_path):
    """Many updates may end between two ticks, and spans begin before the trace."""
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        trace.tick(0)
        for name in ("inference", "learn"):
            with trace.span(name):
                pass
        with trace.span("learn"):
            trace.tick(UNTRACED_UPDATES)
        for name in ("inference", "learn"):
            for _ in range(TRACED_SPANS):
                trace.tick(1000)
                assert not path.exists()
                with trace.span(name):
                    pass
        trace.tick(1000)
    events = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert [events.count(name) for name in ("inference", "learn")] == [TRACED_SPANS] * 2


@pytest.mark.parametrize("fault", ["no folder", "disk full"])
def test_a_trace_that_torch_cannot_write_is_not_called_written(fault, tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        trace.tick(0)
        trace.tick(UNTRACED_UPDATES)
        if fault == "no folder":
            tmp_path.rmdir()
        else:
            export = trace._profiler.export_chrome_trace
            trace._profiler.export_chrome_trace = lambda path: (
                export(path) or os.truncate(path, 1000)
            )
    (record,) = caplog.records
    said = f"torch could not write {path}: no folder, or no space?"
    assert record.getMessage() == said


def test_a_run_that_is_too_short_for_a_trace_says_so(tmp_path, caplog):
    with Trace(tmp_path / "trace.json") as trace:
        trace.tick(0)
    assert "Too few updates for a trace" in caplog.text
    assert not (tmp_path / "trace.json").exists()


def test_a_torch_that_traces_one_thread_only_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "_ExperimentalConfig", lambda: None)  # As 2.6.
    with pytest.raises(UsageError, match="--write_profiler_trace needs torch 2.7 or"):
        Trace(tmp_path / "trace.json")
