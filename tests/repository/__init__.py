# SPDX-License-Identifier: Apache-2.0
"""Documents, results, tools and the packaging."""
