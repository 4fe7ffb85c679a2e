// SPDX-License-Identifier: Apache-2.0
//
// What the actor pool needs from a network: streams of messages, and events.
// transport_grpc.h is the real one; tests bring their own.

#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace torchbeast {

// No message may be larger; whoever receives a larger one ends the stream.
inline constexpr size_t kMaxMessageBytes = size_t{256} << 20;

// Of what the other side says for people to read; the rest is left out.
inline constexpr size_t kMaxTextBytes = 16 << 10;

// One received message, in the pieces in which it arrived.
struct Segments {
  std::vector<std::string_view> parts;
  std::shared_ptr<void> owner;  // Keeps `parts` valid.

  size_t size() const {
    size_t total = 0;
    for (const std::string_view part : parts) total += part.size();
    return total;
  }
};

// What happens on one stream. The events of a stream come one after the other,
// in threads of the transport, without locks held: first on_connected, unless
// the connection fails; then messages; on_closed once, always, as the last.
// None comes before Stream::start, and none from within a method of Stream.
class StreamEvents {
 public:
  virtual ~StreamEvents() = default;

  virtual void on_connected() = 0;
  virtual void on_message(Segments message) = 0;
  // `transient`: the other side is not there, or busy; it may be back soon.
  // Otherwise it refused what was sent to it, or sent what cannot be read.
  // `reason` is printable, whatever the other side said.
  virtual void on_closed(const std::string& reason, bool transient) = 0;
};

// One stream, seen from the side that opened it. Thread-safe; nothing blocks.
// A stream may be dropped at any time: its events come to their end all the
// same.
class Stream {
 public:
  virtual ~Stream() = default;

  virtual void start(std::string first_message) = 0;  // Once.
  virtual void send(std::string message) = 0;  // Of no effect after the end.
  virtual void cancel() = 0;  // Ends the stream soon: on_closed follows.
};

class Transport {
 public:
  virtual ~Transport() = default;  // Calls shutdown().

  // Prepares a stream; Stream::start dials. `events` outlives the on_closed of
  // the stream, or shutdown() if the stream was never started. A larger message
  // than `max_message_bytes` ends the stream before it is read.
  virtual std::shared_ptr<Stream> connect(const std::string& address,
                                          StreamEvents* events,
                                          size_t max_message_bytes) = 0;

  // Ends every stream and returns when the last event has been handled and the
  // transport's threads have ended. Not to be called from an event. After it,
  // connect throws std::runtime_error. Blocks. Calling it again is fine.
  virtual void shutdown() = 0;
};

}  // namespace torchbeast
