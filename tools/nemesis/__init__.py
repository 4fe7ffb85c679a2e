# SPDX-License-Identifier: Apache-2.0
"""A nemesis: breaks runs on purpose, counts what it broke, and measures the damage.

    python -m tools.nemesis kills --count 1000
    python -m tools.nemesis --all --out results/reliability

Each figure is a module here with two functions:

    add_flags(parser)    declares its flags; the defaults are the published form
    measure(flags)       breaks things, and returns a `Result`

`python -m tools.nemesis FIGURE` prints one line of JSON and exits with status 0 if the
goals hold, else 1. A figure that injected fewer faults than asked for has failed,
whatever else it measured.
"""

FOLDER = "NEMESIS_FOLDER"  # The variable that names the folder of a program.
