# SPDX-License-Identifier: Apache-2.0
"""Speed, as ratios of things run side by side on one machine."""

from core.installed import explain_missing_packages

explain_missing_packages()  # Here once, for each program of this package.
