# SPDX-License-Identifier: Apache-2.0
"""`tools.runs`: the log of a run that is in progress."""

from tools.runs import log_rows, num_rows


def test_a_row_that_is_being_written_is_left_out(tmp_path):
    assert log_rows(tmp_path) == [] and num_rows(tmp_path) == 0
    log = tmp_path / "logs.csv"
    log.write_text("step,fra")
    assert log_rows(tmp_path) == [] and num_rows(tmp_path) == 0
    log.write_text("step,frames\n100,400\n200,80")
    assert log_rows(tmp_path) == [{"step": "100", "frames": "400"}]
    assert num_rows(tmp_path) == 1
