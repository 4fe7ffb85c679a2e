# SPDX-License-Identifier: Apache-2.0
"""Set up Python's logging: log records go to the terminal and to the run's out.log."""

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler

from core import ranks
from core.running.log_file import LogFile, report_lost
from core.running.supervise import Repeats

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


def frequent_warnings(n: int) -> list[str]:
    """Return the n most frequent warnings since logging was set up."""
    for handler in logging.getLogger().handlers:
        for repeats in handler.filters:
            if isinstance(repeats, Repeats):
                return repeats.most_frequent(n)
    return []


@contextlib.contextmanager
def setup_logging(run_dir: Path | None) -> Iterator[None]:
    """Show log records on stderr and, with a run's folder, append them to its out.log.

    In a terminal the records appear above the live line of `StatusLine`. In the block
    of another call, this call replaces the other's handlers. If the block raises an
    exception, out.log gets the traceback.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if (handler.name or "").startswith("torchbeast "):
            root.removeHandler(handler)
            handler.close()
    handlers: list[logging.Handler] = [_console_handler()]
    if run_dir is not None:
        handlers.append(FileHandler(run_dir / "out.log"))
    repeats = Repeats()
    who = f"learner {ranks.rank()}: " if ranks.rank() else ""
    line_format = f"%(asctime)s %(levelname)-7s {who}%(message)s"
    for handler in handlers:
        handler.addFilter(repeats)
        handler.name = f"torchbeast {type(handler).__name__}"
        if not isinstance(handler, RichHandler):
            handler.setFormatter(logging.Formatter(line_format, _TIME_FORMAT))
        root.addHandler(handler)
    old_level = root.level
    # Of several learners, only learner 0 logs INFO. The others log problems only.
    root.setLevel(logging.WARNING if ranks.rank() else logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    except Exception as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        entry = {"name": __name__, "levelno": logging.ERROR, "levelname": "ERROR"}
        entry["msg"] = text
        for handler in handlers[1:]:  # The program prints it to the terminal itself.
            handler.handle(logging.makeLogRecord(entry))
        raise
    finally:
        # The terminal's handler is closed last, so that it shows lost data.
        for handler in reversed(handlers):
            root.removeHandler(handler)
            handler.close()
            if isinstance(handler, FileHandler):
                report_lost(handler.file)
        logging.captureWarnings(False)
        root.setLevel(old_level)


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
