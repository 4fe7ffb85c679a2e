# SPDX-License-Identifier: Apache-2.0
"""Parsers of single flags, and an argument parser whose errors are one line."""

import argparse
import decimal
import difflib
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from core import ranks

MAX_INT = 10**18  # Fits into 64 bits; without a limit 1e999999 would fill the memory.
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
# Flags of one program only: for the error message if the other program gets them.
ONLY_IN = {
    "MonoBeast (python -m monobeast)": (
        "envs_per_actor",
        "num_buffers",
        "serial",
        "start_method",
    ),
    "PolyBeast (python -m polybeast)": (
        "actor_device",
        "envs_per_stream",
        "insecure",
        "keepalive_s",
        "learner_device",
        "listen",
        "max_learner_queue_size",
        "max_streams",
        "num_inference_threads",
        "num_servers",
        "pipes_basename",
        "server_addresses",
        "streams_per_server",
        "tls_dir",
        "write_profiler_trace",
    ),
}


def int_at_least(at_least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers >= `at_least`, for `type=`.

    200000, 200_000, 2e5, 200k and 0.2M are the same number.
    """

    def parse(text: str) -> int:
        digits = r"[\d_]*\.?\d+(?:[eE]\+?\d{1,3})?"
        match = re.fullmatch(rf"({digits})([kMG]?)", text, re.ASCII)
        value = decimal.Decimal(-1)
        if match is not None:
            value = decimal.Decimal(match[1].replace("_", "")) * UNITS[match[2]]
        if not at_least <= value <= MAX_INT or value % 1:
            raise argparse.ArgumentTypeError(
                f"expected a whole number >= {at_least} (and at most 10^18), such as "
                f"20000, 20_000, 2e4, 20k or 1.5M, got {text!r}"
            )
        return int(value)

    return parse


def number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return a parser of finite numbers in [low, high], for `type=`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and math.isfinite(value)):
            bounds = f">= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
            raise argparse.ArgumentTypeError(
                f"expected a number {bounds}, got {text!r}"
            )
        return value

    return parse


def folder_path(text: str) -> str:
    """Parse the path of a folder, which may begin with ~, for `type=`."""
    try:
        return str(Path(text).expanduser())
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(
            f"expected a folder, got {text!r}: {error} Write the path without ~."
        ) from None


def names(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of names of columns in logs.csv, for `type=`."""
    if re.search('[\n\r"]', text):
        raise argparse.ArgumentTypeError(
            f"expected names without double quotes or line breaks, got {text!r}"
        )
    result = tuple(name for name in text.split(",") if name)
    for name in result:
        if result.count(name) > 1:
            raise argparse.ArgumentTypeError(
                f"expected each name once, got {name!r} twice"
            )
    return result


def to_argv(flags: argparse.Namespace, actions: Iterable[argparse.Action]) -> list[str]:
    """Return the command line that sets the flags `actions` as in `flags`.

    Flags with their default are left out.
    """
    argv = []
    for action in actions:
        value, name = getattr(flags, action.dest), action.option_strings[0]
        if value is None or value == action.default:
            continue
        match value:
            case bool():
                # The last name of a flag with an opposite is --no-NAME.
                argv.append(name if value else action.option_strings[-1])
            case tuple():
                argv.append(f"{name}={','.join(map(str, value))}")
            case list() if action.nargs is not None:
                argv += [name, *map(str, value)]
            case list():
                argv += [f"{name}={one}" for one in value]
            case _:
                argv.append(f"{name}={value}")
    return argv


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, which ends with the command that shows the help.

    `@file` stands for the flags in a file, written as on a command line; # begins a
    comment. Flags after `@file` override the flags in the file. In `--server_addresses
    @file`, `@file` is the value of the flag.
    """

    def __init__(self, **kwargs: Any):
        kwargs.setdefault(
            "epilog",
            "@FILE stands for the flags in a file; later flags override them. The "
            "folder settings/ has such files for the trainers.",
        )
        super().__init__(fromfile_prefix_chars="@", **kwargs)

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        try:
            arg_line.encode()
            return _keep_address_files(shlex.split(arg_line, comments=True))
        except ValueError as error:  # No UTF-8, a quote without its end, \ at the end.
            self.error(f"cannot read the line {arg_line!r} of an @FILE: {error}")

    def parse_args(self, args=None, namespace=None):
        args = _keep_address_files(sys.argv[1:] if args is None else args)
        try:
            flags, unknown = self.parse_known_args(args, namespace)
        # Not UTF-8 (before Python 3.12), or a file that names itself.
        except (UnicodeDecodeError, RecursionError) as error:
            self.error(f"cannot read an @FILE: {error}")
        if unknown:
            self.error(self._unknown(unknown[0].partition("=")[0]))
        return flags

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        end += ranks.explain_share()
        self.exit(2, f"{self.prog}: error: {message}{end} See {self.prog} --help\n")

    def _unknown(self, flag: str) -> str:
        if not flag.startswith("-"):
            return f"{flag!r} is not a flag, nor the value of one"
        for program, flags in ONLY_IN.items():
            if flag.lstrip("-") in flags:
                return f"{flag} is for {program} only"
        known = [name.lstrip("-") for name in self._option_string_actions]
        near = difflib.get_close_matches(flag.lstrip("-"), known, n=1)
        did_you_mean = "".join(f". Did you mean --{name}?" for name in near)
        return f"there is no flag {flag}{did_you_mean}"


def _keep_address_files(args: Sequence[str]) -> list[str]:
    """Join `--server_addresses @file` with a =: argparse must not read flags there."""
    result: list[str] = []
    for arg in map(str, args):
        if arg.startswith("@") and result and result[-1] == "--server_addresses":
            result[-1] += f"={arg}"
        else:
            result.append(arg)
    return result


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None, False and (), which tell a reader nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == ():
            return action.help
        return super()._get_help_string(action)


def divisor(number: int, *, at_most: int) -> int:
    """Return the largest divisor of `number` that is <= `at_most`."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)
