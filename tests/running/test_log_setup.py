# SPDX-License-Identifier: Apache-2.0
"""Log records go to stderr and to out.log."""

import logging
import re
import warnings

import pytest

from core.running import log_file, log_setup, logs


def test_records_go_to_stderr_and_are_appended_to_out_log(tmp_path, capsys):
    for text in ("first start", "second start"):
        with log_setup.setup_logging(tmp_path):
            logging.getLogger("some.module").info(text)
            logging.debug("not shown")
    lines = (tmp_path / "out.log").read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", x) for x in lines] == [
        "INFO    first start",
        "INFO    second start",
    ]
    assert capsys.readouterr().err.splitlines() == lines


def test_setting_up_twice_shows_a_record_once(tmp_path, capsys):
    with log_setup.setup_logging(tmp_path), log_setup.setup_logging(tmp_path):
        logging.info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert (tmp_path / "out.log").read_text().count("once") == 1


def test_closing_leaves_the_root_logger_as_it_was(tmp_path):
    root = logging.getLogger()
    before = list(root.handlers), root.level, warnings.showwarning
    with log_setup.setup_logging(tmp_path):
        assert root.level == logging.INFO
    assert (list(root.handlers), root.level, warnings.showwarning) == before


def test_without_a_run_directory_records_go_to_stderr_only(capsys):
    with log_setup.setup_logging(None):
        logging.warning("hello")
    assert capsys.readouterr().err.endswith("WARNING hello\n")


def test_warnings_are_in_out_log(tmp_path):
    with log_setup.setup_logging(tmp_path):
        warnings.warn("a shape changed", stacklevel=1)
    assert "a shape changed" in (tmp_path / "out.log").read_text()


def test_the_exception_that_ends_a_run_is_in_out_log(tmp_path, capsys):
    def broken():
        raise FloatingPointError("the loss is not finite")

    with pytest.raises(FloatingPointError):
        with log_setup.setup_logging(tmp_path):
            broken()
    text = (tmp_path / "out.log").read_text()
    assert "FloatingPointError: the loss is not finite" in text
    assert "in broken" in text
    assert capsys.readouterr().err == ""  # The program itself shows it, as the last.


def test_out_log_keeps_the_start_and_the_newest_lines_within_a_limit(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(logs, "MAX_OUT_LOG_BYTES", 1000)
    monkeypatch.setattr(log_file.LogFile, "start", lambda self: None)  # No thread.
    for start in range(2):  # The second one resumes the run.
        with log_setup.setup_logging(tmp_path):
            with logs.RunLog(tmp_path, resume_step=60 * start) as run_log:
                for step in range(60):
                    logging.info("line %d of start %d", step, start)
                    run_log.log({"step": 60 * start + step})
                assert "created again" not in (tmp_path / "out.log").read_text()
    texts = {path.name: path.read_text() for path in tmp_path.glob("out*.log")}
    assert texts.keys() == {"out.first.log", "out.previous.log", "out.log"}
    assert all(len(text) < 1100 for text in texts.values())
    assert "line 0 of start 0" in texts["out.first.log"]
    newest = texts["out.previous.log"] + texts["out.log"]
    found = [int(n) for n in re.findall(r"line (\d+) of start 1", newest)]
    assert found == [*range(found[0], 60)] and len(found) > 9
