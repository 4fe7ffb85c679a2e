// SPDX-License-Identifier: Apache-2.0
//
// The transport to servers on this machine: a plain unix socket for each
// stream. A message costs two system calls, and no thread hands it to another
// one. gRPC's Python server takes longer for a message than 32 CartPoles take
// for a step.
//
// A server at unix:PATH also listens at PATH.s (core/remote/local_streams.py).
// A message is its length, 4 bytes in little-endian order, and its bytes. A
// server may end its stream with the length 0 and, until it closes the
// connection, a text that says why.

#pragma once

#include <memory>

#include "transport.h"

namespace torchbeast {

// Returns a transport that connects to PATH.s if the address is unix:PATH and
// a server listens there, and otherwise over `others`. Its streams belong to
// `num_threads` threads, which start with the first stream.
std::unique_ptr<Transport> make_local_transport(
    int num_threads, std::unique_ptr<Transport> others);

}  // namespace torchbeast
