// SPDX-License-Identifier: Apache-2.0
//
// The transport over gRPC. It sends and receives the messages of
// proto/torchbeast.proto as bytes; wire.h encodes and decodes them.

#pragma once

#include <memory>
#include <optional>
#include <string>

#include "transport.h"

namespace torchbeast {

inline constexpr double kDefaultKeepaliveS = 10;

// Throws std::invalid_argument, saying what is wrong, unless `address` is
// "unix:PATH", with a path that a socket can have, or "HOST:PORT".
// "HOST:PORT#NAME" is a server at HOST:PORT whose certificate has the name
// NAME.
void check_address(const std::string& address);

// Paths of PEM files for TLS. Each new connection reads the files, so it has
// the certificate of that moment. Both sides prove who they are; a server's
// certificate must have the host name of its address.
struct Tls {
  std::string ca;    // The authority that has signed the server's certificate.
  std::string cert;  // The learner's certificate.
  std::string key;   // The key of the learner's certificate.
};

// Makes a transport whose streams are calls of /torchbeast.EnvServer/Stream.
// `num_threads` threads receive messages; each has its own completion queue,
// and a stream belongs to one of them. Each stream has its own connection, so
// it does not wait for bytes of another stream and does not share its back-off.
// If a server's machine is frozen or cut off, its streams end within twice
// `keepalive_s`. If only the server's program hangs, they do not: its gRPC
// still answers pings. With `tls`, connections are encrypted, except those to
// unix sockets.
std::unique_ptr<Transport> make_grpc_transport(
    int num_threads = 1, double keepalive_s = kDefaultKeepaliveS,
    std::optional<Tls> tls = {});

// Asks the server at `address` for its Welcome: sends an encoded Hello to
// /torchbeast.EnvServer/Describe and returns the encoded Welcome. Throws
// ServerUnavailable or ServerMismatch with the address and the reason, at the
// latest after `timeout_s`; soon if the server refuses the connection. Blocks.
std::string describe(const std::string& address, const std::string& hello,
                     double timeout_s, const std::optional<Tls>& tls = {});

}  // namespace torchbeast
