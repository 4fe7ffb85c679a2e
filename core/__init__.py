# SPDX-License-Identifier: Apache-2.0
"""Code that both trainers must share exactly. No module here imports a trainer."""
