# SPDX-License-Identifier: Apache-2.0
"""Programs around the trainers. The trainers do not need any of them.

    sweep           many runs from one file of settings        for an experiment
    plot            curves of runs                             after a run
    publish         a run's weights and what they need         to share an agent
    results_table   our results and published ones             make results-table
    certs           certificates for servers on other machines before --tls_dir
    learners        torchrun that ends with the learners' exit status
    slurm/ kubernetes/ docker/    for clusters                 docs/scale.md
    launch          starts a trainer                           make train
    setup.sh        creates .venv                              make setup
    wheel.sh        builds a wheel                             make wheel
    fresh/          the README's commands in an empty Debian   make fresh, make images
    runs            reads a run's log and checkpoint           imported by others
    fuzz            random input for all parsers of input      after changing a format
    nemesis/        breaks runs on purpose, measures damage    before a release

The last column says when to use each. `python -m tools.NAME --help` explains a program.
"""

from core.imports import explain_missing_packages, open_closed_streams

# Here once, for each program of this package.
open_closed_streams()
explain_missing_packages()
