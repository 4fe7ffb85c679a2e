# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.ceilings`: programs that fail. Nothing is timed here."""

import pytest

from benchmarks import ceilings


def test_a_program_that_refuses_its_flags_is_quoted(monkeypatch):
    monkeypatch.setattr(ceilings.time, "sleep", lambda _: None)
    with pytest.raises(RuntimeError, match="ended with 2 after .*") as caught:
        ceilings.measure_whole("json.tool", ["--batch_size", "0"], whole_s=1.0)
    assert "json.tool: error: " in str(caught.value).splitlines()[-1]
