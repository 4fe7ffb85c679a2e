# SPDX-License-Identifier: Apache-2.0
"""Set up Python's logging: log records go to the terminal and to the run's out.log."""

import logging
import sys
import traceback
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler

from core import ranks
from core.running.log_file import LogFile, report_lost
from core.running.supervise import Repeats

log = logging.getLogger(__name__)


_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


class FileHandler(logging.Handler):
    """Appends log records to out.log. A full disk raises no error: see `LogFile`."""

    def __init__(self, path: Path):
        super().__init__()
        self.file = LogFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.file.write((self.format(record) + "\n").encode(errors="replace"))
        except Exception:  # A mistake in the logging call, such as "%d" with a str.
            self.handleError(record)

    def close(self) -> None:
        self.file.close()
        super().close()


class Logging:
    """Sends log records to the terminal and to out.log until closed."""

    def __init__(self, run_dir: Path | None):
        self._root = logging.getLogger()
        self._old_level = self._root.level
        self._handlers: list[logging.Handler] = [_console_handler()]
        self._file_handler: FileHandler | None = None
        if run_dir is not None:
            self._file_handler = FileHandler(run_dir / "out.log")
            self._handlers.append(self._file_handler)
        repeats = Repeats()
        for handler in self._handlers:
            handler.addFilter(repeats)
            handler.name = f"torchbeast {type(handler).__name__}"
            if not isinstance(handler, RichHandler):
                handler.setFormatter(logging.Formatter(_line_format(), _TIME_FORMAT))
            self._root.addHandler(handler)
        # Of several learners, only learner 0 logs INFO. The others log problems only.
        self._root.setLevel(logging.WARNING if ranks.rank() else logging.INFO)
        logging.captureWarnings(True)

    def __enter__(self) -> "Logging":
        return self

    def __exit__(self, exc_type: Any, error: BaseException | None, tb: Any) -> None:
        # The program will print the traceback to the terminal only.
        if isinstance(error, Exception) and self._file_handler is not None:
            text = "".join(traceback.format_exception(error))
            self._file_handler.handle(
                logging.LogRecord(
                    log.name, logging.ERROR, __file__, 0, "%s", (text.rstrip(),), None
                )
            )
        self.close()

    def close(self) -> None:
        # The terminal's handler is closed last, so that it shows lost data.
        for handler in reversed(self._handlers):
            self._root.removeHandler(handler)
            handler.close()
            if isinstance(handler, FileHandler):
                report_lost(handler.file)
        if self._handlers:
            logging.captureWarnings(False)
            self._root.setLevel(self._old_level)
        self._handlers = []


def frequent_warnings(n: int) -> list[str]:
    """Return the n most frequent warnings since logging was set up."""
    for handler in logging.getLogger().handlers:
        for repeats in handler.filters:
            if isinstance(repeats, Repeats):
                return repeats.most_frequent(n)
    return []


def setup_logging(run_dir: Path | None) -> Logging:
    """Show log records on stderr and, with a run's folder, append them to its out.log.

    In a terminal the records appear above the live line of `StatusLine`. A second call
    replaces the handlers of the first.

    Returns:
      A context manager, which also has `close`. If its block raises an exception,
      out.log gets the traceback.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if (handler.name or "").startswith("torchbeast "):
            root.removeHandler(handler)
            handler.close()
    return Logging(run_dir)


def _line_format() -> str:
    who = f"learner {ranks.rank()}: " if ranks.rank() else ""
    return f"%(asctime)s %(levelname)-7s {who}%(message)s"


def _console_handler() -> logging.Handler:
    console = Console(stderr=True)
    if not is_terminal(console) or ranks.rank():
        return logging.StreamHandler(sys.stderr)
    return RichHandler(
        console=console,
        show_path=False,
        omit_repeated_times=False,
        log_time_format="%H:%M:%S",
        highlighter=NullHighlighter(),
    )


def is_terminal(console: Console) -> bool:
    """Return whether lines can be redrawn.

    (rich's own test cannot be used, since the variable FORCE_COLOR changes its result.)
    """
    return console.file.isatty() and not console.is_dumb_terminal


def log_console() -> Console:
    """Return the console of the log records.

    The live line needs the same console, so that log records appear above the line.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, RichHandler):
            return handler.console
    return Console(stderr=True)
