# SPDX-License-Identifier: Apache-2.0
"""Programs around the trainers. The trainers do not need any of them.

    sweep           many runs from one file of settings        for an experiment
    plot            curves of runs                             after a run
    publish         a run's weights and what they need         to share an agent
    results_table   our results beside published ones          for results/README.md
    certs           certificates for servers on other machines before --tls_dir
    launch          starts a trainer for make train            never by hand
    fuzz            random input for all that reads input      after changing a format
    nemesis/        breaks runs on purpose, measures damage    before a release

The last column says when. `python -m tools.NAME --help` explains each.
"""

from core.installed import explain_missing_packages

explain_missing_packages()  # Here once, for each program of this package.
