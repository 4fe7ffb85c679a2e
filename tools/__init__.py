# SPDX-License-Identifier: Apache-2.0
"""What runs, publishes, draws and breaks runs; the trainers do without."""

from core.installed import explain_missing_packages

explain_missing_packages()  # Here once, for each program of this package.
