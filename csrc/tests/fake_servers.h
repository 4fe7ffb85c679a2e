// SPDX-License-Identifier: Apache-2.0
//
// Environment servers for tests of the actor pool, in this process and without
// a network. A test plays a server itself, message by message, or lets a
// CountingServer serve an address.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "transport.h"

namespace fake {

using torchbeast::Segments;
using torchbeast::StreamEvents;

// --- The wire format, written down a second time -----------------------------

inline std::string varint(uint64_t value) {
  std::string out;
  do {
    const uint64_t rest = value >> 7;
    out.push_back(static_cast<char>((value & 127) + (rest ? 128 : 0)));
    value = rest;
  } while (value);
  return out;
}

inline std::string number(int field, uint64_t value) {
  return varint(field * 8) + varint(value);
}

inline std::string bytes(int field, std::string_view value) {
  return varint(field * 8 + 2) + varint(value.size()) + std::string(value);
}

inline std::string fixed64(int field, uint64_t value) {
  std::string out = varint(field * 8 + 1);
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(value >> 8 * i));
  return out;
}

// A message's fields, in order. Numbers of every kind are in `value`.
struct Field {
  uint64_t field = 0;
  uint64_t value = 0;
  std::string bytes;
};

inline std::vector<Field> parse(const std::string& message) {
  std::vector<Field> fields;
  size_t at = 0;
  const auto read = [&] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<uint8_t>(message.at(at++));
      value |= uint64_t{byte & 127u} << shift;
      if (byte < 128) return value;
    }
  };
  while (at < message.size()) {
    const uint64_t tag = read();
    Field field{tag / 8, 0, ""};
    if (tag % 8 == 0) {
      field.value = read();
    } else if (tag % 8 == 1) {
      for (int i = 0; i < 8; ++i) {
        field.value |= uint64_t{static_cast<uint8_t>(message.at(at++))}
                       << 8 * i;
      }
    } else {
      const uint64_t size = read();
      field.bytes = message.substr(at, size);
      at += size;
    }
    fields.push_back(std::move(field));
  }
  return fields;
}

inline uint64_t number_of(const std::vector<Field>& fields, uint64_t field) {
  for (const Field& f : fields) {
    if (f.field == field) return f.value;
  }
  return 0;
}

template <typename... Ts>
std::string raw(Ts... values) {
  std::string out;
  (out.append(reinterpret_cast<const char*>(&values), sizeof(values)), ...);
  return out;
}

// An Array of a Welcome; every key of the path is a name.
inline std::string array(const std::vector<std::string>& path,
                         const std::string& dtype,
                         const std::vector<uint64_t>& shape = {},
                         bool stack = false) {
  std::string out;
  for (const std::string& key : path) out += bytes(1, bytes(1, key));
  out += bytes(2, dtype);
  std::string packed;
  for (const uint64_t axis : shape) packed += varint(axis);
  if (!shape.empty()) out += bytes(3, packed);
  if (stack) out += number(4, 1);
  return out;
}

constexpr int64_t kFrames = 5;  // Of one pixel each.

// Of the environment: an Option whose Value is an integer.
inline std::string option(const std::string& name, uint64_t value) {
  return bytes(1, name) + bytes(2, number(2, 2 * value));  // ZigZag.
}

struct WelcomeOptions {
  uint64_t protocol = 1;
  std::string env = "Counting";
  uint64_t num_envs = 1;
  uint64_t frames_per_step = 4;
  std::string observation = bytes(2, number(1, 2 * 300));  // A Discrete.
  std::string action = bytes(2, number(1, 2 * 300));
  std::vector<std::string> step_arrays = {
      array({"observation", "count"}, "int64", {3}),
      array({"observation", "frame"}, "uint8", {kFrames}, true),
      array({"reward"}, "float32"),
      array({"done"}, "bool"),
      array({"truncated"}, "bool"),
      array({"episode_return"}, "float32"),
      array({"episode_step"}, "int32"),
      array({"last_action"}, "int64"),
      array({"info", "game_return"}, "float32")};
  std::vector<std::string> action_arrays = {array({}, "int64")};
  std::vector<std::string> options = {option("frame_skip", 4)};
};

// Has fields that wire.cc skips: 2 and 6, and 3, which older servers send.
inline std::string welcome(const WelcomeOptions& options) {
  std::string out = number(1, options.protocol) + bytes(2, "0.0") +
                    bytes(3, std::string(16, 'i')) + bytes(4, options.env) +
                    number(5, options.num_envs) + number(6, 1) +
                    number(7, options.frames_per_step) +
                    bytes(8, options.observation) + bytes(9, options.action);
  for (const std::string& spec : options.step_arrays) out += bytes(10, spec);
  for (const std::string& spec : options.action_arrays) out += bytes(11, spec);
  for (const std::string& one : options.options) out += bytes(12, one);
  return bytes(1, out);
}

inline std::string failure(const std::string& text, bool permanent = false) {
  return bytes(3, bytes(1, text) + number(2, permanent));
}

inline std::string goodbye(const std::string& reason) {
  return bytes(4, bytes(1, reason));
}

// The environments. The values of row n of environment e, incarnation i, are
// functions of e, i and n. The correct action for this row is right_action(e,
// n).
inline int64_t right_action(int64_t env, int64_t n) { return 1000 * env + n; }
inline float reward_of(int64_t n) { return static_cast<float>(n) + 0.5f; }
constexpr int64_t kGame = 7;  // Steps.
inline bool done_of(int64_t n) { return n % kGame == 0; }
inline float return_of(int64_t env, int64_t n) {
  return static_cast<float>(100 * env - n);
}
// Frame p of a stack. The first frame of a game also fills the older places.
inline uint8_t pixel_of(int64_t env, int64_t n, int64_t p) {
  const int64_t seen = std::max(n - kFrames + 1 + p, n - n % kGame);
  return static_cast<uint8_t>(17 * env + 3 * seen);
}

inline std::string step(int64_t first_env, int64_t num_envs,
                        int64_t incarnation, int64_t n,
                        const std::vector<int64_t>& last_actions,
                        bool newest_frames = false) {
  std::string count, frame, reward, done, truncated, ret, steps, last, game;
  for (int64_t k = 0; k < num_envs; ++k) {
    const int64_t env = first_env + k;
    count += raw(env, incarnation, n);
    for (int64_t p = newest_frames ? kFrames - 1 : 0; p < kFrames; ++p) {
      frame += raw(pixel_of(env, n, p));
    }
    reward += raw(reward_of(n));
    done += raw(done_of(n));
    truncated += raw(false);
    ret += raw(return_of(env, n));
    steps += raw(static_cast<int32_t>(n));
    last += raw(last_actions.at(k));
    game += raw(0.25f);
  }
  std::string out = fixed64(1, n);
  for (const auto& part :
       {count, frame, reward, done, truncated, ret, steps, last, game}) {
    out += bytes(2, part);
  }
  if (newest_frames) out += number(3, 1);
  return bytes(2, out);
}

struct Hello {
  std::string version, run_id;
  std::vector<std::string> info_keys;
  int64_t seed = 0, first_env_id = 0, incarnation = 0;
  bool newest_frames = false;
  bool truncation_is_done = false;
};

inline Hello parse_hello(const std::string& message) {
  const auto outer = parse(message);
  if (outer.size() != 1 || outer[0].field != 1) {
    throw std::logic_error("this is no Hello");
  }
  Hello hello;
  const auto fields = parse(outer[0].bytes);
  for (const Field& field : fields) {
    if (field.field == 2) hello.version = field.bytes;
    if (field.field == 3) hello.run_id = field.bytes;
    if (field.field == 4) hello.info_keys.push_back(field.bytes);
  }
  hello.seed = number_of(fields, 5);
  hello.first_env_id = number_of(fields, 6);
  hello.incarnation = number_of(fields, 7);
  hello.newest_frames = number_of(fields, 8);
  hello.truncation_is_done = number_of(fields, 9);
  return hello;
}

struct Action {
  int64_t seq = 0;
  std::vector<int64_t> values;
  bool whole = false;
};

// Whether the server sends row n with the newest frame only.
inline bool may_be_short(const Hello& hello, bool whole, int64_t n) {
  return hello.newest_frames && !whole && !done_of(n);
}

inline Action parse_action(const std::string& message) {
  const auto outer = parse(message);
  if (outer.size() != 1 || outer[0].field != 2) {
    throw std::logic_error("this is no Action");
  }
  const auto fields = parse(outer[0].bytes);
  Action action;
  action.seq = number_of(fields, 1);
  action.whole = number_of(fields, 3);
  for (const Field& field : fields) {
    if (field.field != 2) continue;
    action.values.resize(field.bytes.size() / sizeof(int64_t));
    std::memcpy(action.values.data(), field.bytes.data(), field.bytes.size());
  }
  return action;
}

// --- Streams -----------------------------------------------------------------

// A thread of the transport. Runs the posted tasks in order.
class Worker {
 public:
  ~Worker() { stop(); }

  void post(std::function<void()> task) {
    std::lock_guard lock(mu_);
    if (stopping_) return;
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  // Returns when all tasks posted before are done.
  void stop() {
    {
      std::lock_guard lock(mu_);
      stopping_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  void work() {
    std::unique_lock lock(mu_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;  // Guarded by mu_.
  bool stopping_ = false;                    // Guarded by mu_.
  std::thread thread_{[this] { work(); }};   // Last: it uses the others.
};

class Connection;
using ConnectionPtr = std::shared_ptr<Connection>;

// Answers the messages of the pool, in the transport's thread.
class Server {
 public:
  virtual ~Server() = default;
  virtual void on_message(Connection& connection, std::string message) = 0;
};

// The server's end of a stream. Thread-safe.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::string where, StreamEvents* to, Worker* by, size_t limit)
      : address(std::move(where)),
        max_message_bytes(limit),
        events_(to),
        worker_(by) {}

  const std::string address;
  const size_t max_message_bytes;  // The pool's limit.
  // State of the Server. Used in the transport's thread only.
  Hello hello;
  int64_t n = -1;
  std::vector<int64_t> last_actions;
  bool whole = true;  // Whether the next row must hold all frames.

  void connected() {
    post([this] { events_->on_connected(); });
  }

  // Sends in parts of `chunk` bytes.
  void send(const std::string& message, size_t chunk = 11) {
    post([this, message, chunk] { deliver(message, chunk); });
  }

  void close(const std::string& reason = "connection lost",
             bool transient = true) {
    post([this, reason, transient] {
      std::unique_lock lock(mu_);
      if (std::exchange(ended_, true)) return;
      changed_.notify_all();
      lock.unlock();
      events_->on_closed(reason, transient);
    });
  }

  // Returns when either side has ended the stream.
  void wait_closed() {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [&] { return ended_; });
  }

  // The next message of the pool.
  std::string receive() {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [&] { return ended_ || !received_.empty(); });
    if (received_.empty()) throw std::logic_error("the pool ended the stream");
    std::string message = std::move(received_.front());
    received_.pop_front();
    return message;
  }

  bool has_ended() const {
    std::lock_guard lock(mu_);
    return ended_;
  }

  // Called by the pool's end of the stream.
  void take(std::string message, Server* server) {
    if (server) {
      post([this, server, message = std::move(message)] {
        if (!has_ended()) server->on_message(*this, message);
      });
      return;
    }
    std::lock_guard lock(mu_);
    received_.push_back(std::move(message));
    changed_.notify_all();
  }

  // In the transport's thread only.
  void deliver(const std::string& message, size_t chunk = 11) {
    if (has_ended()) return;
    auto owner = std::make_shared<std::string>(message);
    Segments segments;
    for (size_t i = 0; i < owner->size(); i += chunk) {
      segments.parts.push_back(std::string_view(*owner).substr(i, chunk));
    }
    segments.owner = owner;
    events_->on_message(std::move(segments));
  }

 private:
  void post(std::function<void()> task) {
    worker_->post(
        [self = shared_from_this(), task = std::move(task)] { task(); });
  }

  StreamEvents* const events_;
  Worker* const worker_;
  mutable std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::string> received_;  // Guarded by mu_.
  bool ended_ = false;                // Guarded by mu_.
};

// Shared by tests and the transport: which server serves an address.
// Thread-safe.
class Network {
 public:
  // Streams to an address without a server wait for accept().
  void serve(const std::string& address, Server* server) {
    std::lock_guard lock(mu_);
    servers_[address] = server;
  }
  void refuse(const std::string& address, bool refuse = true) {
    std::lock_guard lock(mu_);
    refused_[address] = refuse;
  }

  // Waits for the next stream that the test must serve, and connects it.
  ConnectionPtr accept() {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [&] { return !dialled_.empty(); });
    const ConnectionPtr connection = dialled_.front();
    dialled_.pop_front();
    lock.unlock();
    connection->connected();
    return connection;
  }

  size_t num_dialled() const {
    std::lock_guard lock(mu_);
    return dialled_.size();
  }

  std::atomic<int> num_streams{0};  // Stream objects that exist.

  std::vector<ConnectionPtr> connections() const {  // So far.
    std::lock_guard lock(mu_);
    return connections_;
  }

  Server* dial(const ConnectionPtr& connection) {
    std::lock_guard lock(mu_);
    connections_.push_back(connection);
    if (refused_[connection->address]) {
      connection->close("connection refused");
      return nullptr;
    }
    Server* const server = servers_[connection->address];
    if (server) {
      connection->connected();
    } else {
      dialled_.push_back(connection);
      changed_.notify_all();
    }
    return server;
  }

 private:
  mutable std::mutex mu_;
  std::condition_variable changed_;
  std::map<std::string, Server*> servers_;  // Guarded by mu_, like all here.
  std::map<std::string, bool> refused_;
  std::deque<ConnectionPtr> dialled_;
  std::vector<ConnectionPtr> connections_;
};

class Stream final : public torchbeast::Stream {
 public:
  Stream(std::shared_ptr<Network> network, ConnectionPtr connection)
      : network_(std::move(network)), connection_(std::move(connection)) {
    ++network_->num_streams;
  }
  ~Stream() override {
    connection_->close("dropped");
    --network_->num_streams;
  }

  void start(std::string message) override {
    server_ = network_->dial(connection_);
    connection_->take(std::move(message), server_);
  }
  void send(std::string message) override {
    connection_->take(std::move(message), server_);
  }
  void cancel() override { connection_->close("cancelled"); }

 private:
  const std::shared_ptr<Network> network_;
  const ConnectionPtr connection_;
  Server* server_ = nullptr;
};

class Transport final : public torchbeast::Transport {
 public:
  Transport(std::shared_ptr<Network> network, int num_threads)
      : network_(std::move(network)), workers_(num_threads) {}
  ~Transport() override { shutdown(); }

  std::shared_ptr<torchbeast::Stream> connect(const std::string& address,
                                              StreamEvents* events,
                                              size_t limit) override {
    const auto connection = std::make_shared<Connection>(
        address, events, &workers_[next_++ % workers_.size()], limit);
    return std::make_shared<Stream>(network_, connection);
  }

  void shutdown() override {
    // Later, another transport of the network may be gone, with its workers.
    if (std::exchange(stopped_, true)) return;
    for (const auto& connection : network_->connections()) {
      connection->close("shut down");
    }
    for (Worker& worker : workers_) worker.stop();
  }

 private:
  const std::shared_ptr<Network> network_;
  std::deque<Worker> workers_;
  size_t next_ = 0;
  bool stopped_ = false;
};

// K environments that count, and check that each action is the right one.
class CountingServer : public Server {
 public:
  explicit CountingServer(int64_t num_envs) {
    options_.num_envs = static_cast<uint64_t>(num_envs);
  }
  explicit CountingServer(WelcomeOptions options)
      : options_(std::move(options)) {}

  void on_message(Connection& connection, std::string message) override {
    const auto K = static_cast<int64_t>(options_.num_envs);
    if (connection.n < 0) {
      connection.hello = parse_hello(message);
      connection.last_actions.assign(K, 0);
      connection.deliver(welcome(options_));
    } else {
      const Action action = parse_action(message);
      std::vector<int64_t> expected;
      for (int64_t k = 0; k < K; ++k) {
        expected.push_back(
            right_action(connection.hello.first_env_id + k, connection.n));
      }
      if (action.seq != connection.n || action.values != expected) ++errors_;
      connection.last_actions = action.values;
      connection.whole = action.whole;
    }
    ++connection.n;
    reply(connection);
  }

  // Sends row connection.n, in the transport's thread.
  virtual void reply(Connection& connection) {
    if (connection.n > 0) {
      steps_ += static_cast<int64_t>(options_.num_envs);
    }
    const bool is_short =
        may_be_short(connection.hello, connection.whole, connection.n);
    short_steps_ += is_short;
    connection.deliver(step(connection.hello.first_env_id,
                            static_cast<int64_t>(options_.num_envs),
                            connection.hello.incarnation, connection.n,
                            connection.last_actions, is_short));
  }

  int64_t short_steps() const { return short_steps_; }
  int64_t errors() const { return errors_; }  // Wrong actions.
  int64_t steps() const { return steps_; }    // Sent, without the first rows.

 private:
  WelcomeOptions options_;
  std::atomic<int64_t> errors_{0};
  std::atomic<int64_t> short_steps_{0};  // With the newest frames only.
  std::atomic<int64_t> steps_{0};
};

}  // namespace fake
