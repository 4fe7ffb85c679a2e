# SPDX-License-Identifier: Apache-2.0
"""Environment servers, the wire protocol, TLS, and peers that mean harm."""
