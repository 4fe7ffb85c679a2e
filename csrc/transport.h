// SPDX-License-Identifier: Apache-2.0
//
// The interface between the actor pool and a network. transport_grpc.h is the
// implementation over gRPC, transport_local.h the one for servers on this
// machine; tests/fake_servers.h is one for tests.

#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace torchbeast {

// The largest message. A receiver ends the stream for a larger one.
inline constexpr size_t kMaxMessageBytes = size_t{256} << 20;

// The longest text from a server that is logged or shown. The rest is cut
// off.
inline constexpr size_t kMaxTextBytes = 16 << 10;

// One received message, in the parts in which it arrived.
struct Segments {
  std::vector<std::string_view> parts;
  std::shared_ptr<void> owner;  // Keeps `parts` valid.

  size_t size() const {
    size_t total = 0;
    for (const std::string_view part : parts) total += part.size();
    return total;
  }
};

// Callbacks for the events of one stream. The transport calls them in its own
// threads, one after the other, with no lock held:
//   on_connected  first, unless the connection fails.
//   on_message    for each message.
//   on_closed     last, exactly once, in any case.
// No callback comes before Stream::start, and none from inside a method of
// Stream.
class StreamEvents {
 public:
  virtual ~StreamEvents() = default;

  virtual void on_connected() = 0;
  virtual void on_message(Segments message) = 0;
  // `transient`: the server cannot be reached or is busy, and may answer soon.
  // Otherwise the server refused a message, or sent one that cannot be read.
  // `reason` is printable.
  virtual void on_closed(const std::string& reason, bool transient) = 0;
};

// The client's end of one stream. Thread-safe; no method blocks. Dropping the
// object cancels the stream; on_closed still follows.
class Stream {
 public:
  virtual ~Stream() = default;

  // Opens the connection, and sends the first message. May be called once.
  virtual void start(std::string first_message) = 0;
  // Does nothing after the end of the stream.
  virtual void send(std::string message) = 0;
  // Ends the stream soon. on_closed follows.
  virtual void cancel() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;  // Calls shutdown().

  // Returns a stream, which begins with Stream::start. Does not block. `events`
  // must live until on_closed has returned, or, if the stream was never
  // started, until shutdown() has returned. A message larger than
  // `max_message_bytes` ends the stream before it is read.
  virtual std::shared_ptr<Stream> connect(const std::string& address,
                                          StreamEvents* events,
                                          size_t max_message_bytes) = 0;

  // Ends all streams. Returns when the last callback has returned and the
  // transport's threads have ended. Do not call it from a callback. Afterwards
  // connect throws std::runtime_error. Blocks. A second call does nothing.
  virtual void shutdown() = 0;
};

}  // namespace torchbeast
