# SPDX-License-Identifier: Apache-2.0
"""`libtorchbeast`, seen from Python; the C++ has tests of its own in csrc/tests."""
