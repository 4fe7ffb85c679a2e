# SPDX-License-Identifier: Apache-2.0
"""Train a copy of a run's folder beside the original, on the same servers.

Both have the same name, seed and meta.json. If the servers took the two learners for
one run, the learners would take the servers' places from each other for ever. Instead
the copy counts as another run: it waits while the original trains, and trains later.
"""

import argparse
import shutil

from tools.nemesis.playground import serve
from tools.nemesis.programs import FLAGS, Program, workplace
from tools.nemesis.result import Result

REFUSED = "these have them"  # A server without a free place says this.
NUM_ENVS = "4"  # Of the run's batch, and of a stream.


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=200, help="to train beside a copy")


def measure(flags: argparse.Namespace) -> Result:
    with (
        workplace() as folder,
        workplace() as elsewhere,
        serve(2, "--envs_per_stream", NUM_ENVS) as servers,
    ):
        argv = [*FLAGS[2:], "--server_addresses", ",".join(servers.addresses)]
        with Program("polybeast", folder, *argv) as program:
            program.wait_for(program.newest)
        shutil.copytree(folder / "runs", elsewhere / "runs", symlinks=True)
        with Program("polybeast", folder, *argv) as original:
            rows = original.rows()
            original.wait_for(lambda: original.rows() > rows)
            with Program("polybeast", elsewhere, *argv) as copy:
                copy.wait_for(lambda: REFUSED in copy.text())
                rows, rows_of_copy = original.rows(), copy.rows()
                original.wait_for(lambda: original.rows() > rows + flags.rows)
                lost = original.text().count("connected again")
                stolen = copy.rows() - rows_of_copy
                original.process.terminate()
                status = original.wait()
                copy.wait_for(lambda: copy.rows() > rows_of_copy + 1)
    found = Result(
        {"copies": 1},
        {"copies": 1},
        {"rows_beside_the_copy": flags.rows, "streams_lost": lost, "stolen": stolen},
    )
    found.require(lost == 0, f"the original lost {lost} streams, expected none")
    found.require(stolen == 0, f"the copy logged {stolen} rows, expected none")
    found.require(status == 75, f"the original ended with {status}, expected 75")
    return found
