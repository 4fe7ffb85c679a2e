# SPDX-License-Identifier: Apache-2.0
"""The test suite; a package so that `--env tests.counting_env:make` can be imported."""
