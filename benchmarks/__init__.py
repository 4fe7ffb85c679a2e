# SPDX-License-Identifier: Apache-2.0
"""Speed, as ratios of things run side by side on one machine."""
