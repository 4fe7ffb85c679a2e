# SPDX-License-Identifier: Apache-2.0
"""The test suite. `make test` runs all of it, in about 13 minutes on two cores.

    algorithm/ environments/ running/ actors/ remote/    the rooms of core/, by module
    extension/     libtorchbeast from Python; the C++ has its own tests in csrc/tests
    trainers/      the two programs: networks, flags, whole runs, resuming, forks
    launching/     torchrun, Slurm, Kubernetes, Docker: the files of tools/ for clusters
    repository/    documents, results, tools, packaging, the rules of the house
    classic/       classic gym and atari-py, in an environment of their own:
                   `make test-classic`

`faults.md` has the tests of each fault in docs/reliability.md.

While you change a module, run its own file: a second to a minute. What is beside this
file serves the tests: environments that count, fail or misbehave, and hostile peers;
in conftest.py programs as processes and environment servers in threads. It is a package
so that `--env tests.counting_env:make` can be imported.
"""
