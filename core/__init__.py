# SPDX-License-Identifier: Apache-2.0
"""What the trainers must share exactly. Nothing in here imports a trainer."""
