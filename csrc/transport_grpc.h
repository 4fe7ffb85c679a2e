// SPDX-License-Identifier: Apache-2.0
//
// The protocol of proto/torchbeast.proto over gRPC. Messages stay bytes here:
// wire.h knows what is in them.

#pragma once

#include <memory>
#include <optional>
#include <string>

#include "transport.h"

namespace torchbeast {

inline constexpr double kDefaultKeepaliveS = 10;

// Throws std::invalid_argument, saying what is wrong, unless `address` is
// "unix:PATH", with a path that a socket can have, or "HOST:PORT".
void check_address(const std::string& address);

// What both sides of a connection prove to each other, as the contents of PEM
// files. Servers are checked against the name by which they are addressed.
struct Tls {
  std::string ca;    // Who must have signed the server's certificate.
  std::string cert;  // Ours.
  std::string key;   // To it.
};

// Streams of /torchbeast.EnvServer/Stream. `num_threads` threads, each with a
// completion queue of its own, receive for all streams; a stream stays with one
// of them. Every stream has a connection of its own, so that none waits for
// another's bytes and none inherits another's back-off. A peer whose machine is
// frozen, or cut off, is noticed within twice `keepalive_s`; one whose program
// hangs is not, as its gRPC goes on answering pings. With `tls` all of them are
// encrypted but those to unix sockets, which the kernel guards.
std::unique_ptr<Transport> make_grpc_transport(
    int num_threads = 1, double keepalive_s = kDefaultKeepaliveS,
    std::optional<Tls> tls = {});

// Asks the server at `address` what its streams are like: sends the bytes of a
// Hello to /torchbeast.EnvServer/Describe and returns the bytes of the Welcome.
// A server that is not there yet is tried again for `timeout_s`. Throws
// ServerUnavailable or ServerMismatch with the address and the reason. Blocks.
std::string describe(const std::string& address, const std::string& hello,
                     double timeout_s, const std::optional<Tls>& tls = {});

}  // namespace torchbeast
