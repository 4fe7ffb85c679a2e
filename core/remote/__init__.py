# SPDX-License-Identifier: Apache-2.0
"""Environments on other machines: PolyBeast's servers, and the learner's side of them.

This room holds everything that connects polybeast.py to environment servers: the
servers and their supervisor, the wire protocol (proto/torchbeast.proto) in Python, TLS,
addresses, the servers that a learner starts itself, machines that dial in, and the
learner's watch over all servers. The learner's hot path does not belong here: it is C++
(csrc/).

Environment servers import neither torch nor libtorchbeast. Only the learner may import
`greet` and `pool`, which need them.

Start with `env_server` and `supervisor` for the servers, with `pool` for the learner,
with `server_lists` for the list of servers, with `messages` for the protocol.
"""
