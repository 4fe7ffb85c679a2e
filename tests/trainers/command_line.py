# SPDX-License-Identifier: Apache-2.0
"""What tests of the trainers' command lines share: a refusal, and a run to test."""

import pytest

from core.errors import Exit
from core.running import folder


def refusal(program, argv, capsys):
    """Return what is said of a bad command line, which must exit with status 2."""
    with pytest.raises(SystemExit) as caught:
        program.parse_flags(argv)
    assert caught.value.code == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.endswith(f"See python -m {program.__name__} --help")
    return line


def train(program, savedir, argv, env=None, **env_options):
    """Train, as far as the flags are concerned.

    Servers may have named the environment and told its options.
    """
    flags = program.parse_flags([*argv.split(), "--savedir", str(savedir)])
    if env is not None:
        flags.env = env
    run_dir = folder.prepare_run_dir(savedir, flags.xpid)
    extra = {"env_options": env_options} if env_options else {}
    folder.write_meta(run_dir, flags=vars(flags), extra=extra)
    folder.link_latest(run_dir)


def parse_test(program, savedir, argv=""):
    return program.parse_flags(
        ["--mode", "test", "--savedir", str(savedir), *argv.split()]
    )
