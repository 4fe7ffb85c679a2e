// SPDX-License-Identifier: Apache-2.0

#include "transport_local.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <random>

#include "testing.h"

using namespace torchbeast;
using testing::background;
using testing::wait_until;

namespace {

constexpr size_t kMax = 8 << 20;
constexpr int kBacklog = 64;

// Keeps all events. Checks that none comes before start() or after the last.
class Recorder final : public StreamEvents {
 public:
  void on_connected() override {
    std::lock_guard lock(mu_);
    CHECK(!connected_ && !closed_);
    connected_ = true;
  }
  void on_message(Segments message) override {
    std::string text;
    for (const auto part : message.parts) text += part;
    std::lock_guard lock(mu_);
    CHECK(connected_ && !closed_);
    messages_.push_back(std::move(text));
    changed_.notify_all();
  }
  void on_closed(const std::string& reason, bool transient) override {
    std::lock_guard lock(mu_);
    CHECK(!closed_);
    closed_ = true;
    reason_ = reason;
    transient_ = transient;
    changed_.notify_all();
  }

  std::string message(size_t i) {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [&] { return messages_.size() > i || closed_; });
    CHECK(messages_.size() > i);
    return messages_[i];
  }
  // Waits for the end of the stream.
  std::string reason() {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [&] { return closed_; });
    return reason_ + (transient_ ? "" : " (permanent)");
  }
  bool has_connected() {
    std::lock_guard lock(mu_);
    return connected_;
  }
  size_t num_messages() {
    std::lock_guard lock(mu_);
    return messages_.size();
  }

 private:
  std::mutex mu_;
  std::condition_variable changed_;
  std::vector<std::string> messages_;
  std::string reason_;
  bool connected_ = false, closed_ = false, transient_ = false;
};

std::string framed(const std::string& message) {
  std::string bytes;
  for (int i = 0; i < 4; ++i) {
    bytes += static_cast<char>(message.size() >> 8 * i);
  }
  return bytes + message;
}

// A listening socket at PATH.s, and what a server does with a connection.
class Server {
 public:
  Server() {
    char name[] = "/tmp/torchbeast-test-XXXXXX";
    CHECK(::mkdtemp(name));
    folder_ = name;
    fd_ = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    (folder_ + "/env.s").copy(address.sun_path, sizeof(address.sun_path) - 1);
    CHECK_EQ(
        ::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    CHECK_EQ(::listen(fd_, kBacklog), 0);
  }
  ~Server() {
    stop_listening();
    ::unlink((folder_ + "/env.s").c_str());
    ::rmdir(folder_.c_str());
  }

  std::string address() const { return "unix:" + folder_ + "/env"; }
  int accept() { return ::accept(fd_, nullptr, nullptr); }
  void stop_listening() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  static std::string read(int fd, size_t size) {
    std::string bytes(size, 0);
    CHECK_EQ(::recv(fd, bytes.data(), size, MSG_WAITALL),
             static_cast<ssize_t>(size));
    return bytes;
  }
  static std::string receive(int fd) {
    const std::string header = read(fd, 4);
    size_t size = 0;
    for (int i = 0; i < 4; ++i) {
      size |= size_t{static_cast<unsigned char>(header[i])} << 8 * i;
    }
    return read(fd, size);
  }
  static void write(int fd, const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t count =
          ::send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (count < 0) return;  // The client has closed the connection.
      sent += static_cast<size_t>(count);
    }
  }

 private:
  std::string folder_;
  int fd_ = -1;
};

// Answers connect() for all addresses that have no local socket.
class NoTransport final : public Transport {
 public:
  std::shared_ptr<Stream> connect(const std::string& address, StreamEvents*,
                                  size_t) override {
    throw std::invalid_argument("not local: " + address);
  }
  void shutdown() override {}
};

struct Scene {
  Server server;
  Recorder events;
  std::unique_ptr<Transport> transport =
      make_local_transport(2, std::make_unique<NoTransport>());

  std::shared_ptr<Stream> connect(size_t max_bytes = kMax) {
    return transport->connect(server.address(), &events, max_bytes);
  }
};

std::string random_text(size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::string text(size, 0);
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

}  // namespace

TEST(messages_of_all_sizes_arrive_in_order) {
  Scene scene;
  const auto stream = scene.connect();
  stream->start("hello");
  const int fd = scene.server.accept();
  CHECK_EQ(Server::receive(fd), "hello");
  // Around the sizes of the header and of the read buffer, and longer than what
  // a socket holds.
  const std::vector<size_t> sizes = {
      1, 2, 3, 65531, 65532, 65533, 65536, 65540, 131072, 3 << 20, 7};
  auto echo = background([&] {
    for (size_t i = 0; i < sizes.size(); ++i) {
      Server::write(fd, framed(Server::receive(fd)));
    }
  });
  for (size_t i = 0; i < sizes.size(); ++i) {
    stream->send(random_text(sizes[i], i));
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    CHECK(scene.events.message(i) == random_text(sizes[i], i));
  }
  echo.get();
  ::close(fd);
  CHECK_EQ(scene.events.reason(), "the server closed the connection");
}

TEST(a_message_may_come_in_any_pieces) {
  Scene scene;
  const auto stream = scene.connect();
  stream->start("hello");
  const int fd = scene.server.accept();
  std::string bytes;
  for (unsigned i = 0; i < 40; ++i) bytes += framed(random_text(1 + 97 * i, i));
  std::mt19937 random(1);
  for (size_t begin = 0; begin < bytes.size();) {
    const size_t size =
        std::min<size_t>(1 + random() % 999, bytes.size() - begin);
    Server::write(fd, bytes.substr(begin, size));
    begin += size;
  }
  for (unsigned i = 0; i < 40; ++i) {
    CHECK(scene.events.message(i) == random_text(1 + 97 * i, i));
  }
  ::close(fd);
}

TEST(a_server_may_say_why_it_ends_a_stream) {
  Scene scene;
  const auto stream = scene.connect();
  stream->start("hello");
  const int fd = scene.server.accept();
  Server::write(fd, framed("last") + framed("") + "busy: \x1b[2J");
  Server::write(fd, std::string(1 << 20, 'x'));
  ::close(fd);
  CHECK_EQ(scene.events.message(0), "last");
  const std::string reason = scene.events.reason();
  CHECK(reason.starts_with("busy: ?[2Jxxx"));
  CHECK_EQ(reason.size(), size_t{kMaxTextBytes});
}

TEST(a_server_that_dies_in_a_message_ends_its_stream) {
  for (const bool reads : {false, true}) {  // If not, the connection is reset.
    Scene scene;
    const auto stream = scene.connect();
    stream->start("hello");
    const int fd = scene.server.accept();
    if (reads) CHECK_EQ(Server::receive(fd), "hello");
    Server::write(fd, framed("whole") + framed("half of it").substr(0, 9));
    ::close(fd);
    CHECK_EQ(scene.events.message(0), "whole");
    const std::string reason = scene.events.reason();
    CHECK(reason.starts_with("the server closed the connection") ||
          reason.starts_with("the connection broke"));
    CHECK_EQ(scene.events.num_messages(), size_t{1});
    stream->send("nobody reads this");
  }
}

TEST(random_bytes_end_a_stream_once) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    Scene scene;
    const auto stream = scene.connect(300);
    stream->start("hello");
    const int fd = scene.server.accept();
    std::string bytes = random_text(seed, seed);
    for (size_t i = 2; i < bytes.size(); i += 4) bytes[i] &= seed % 2;
    Server::write(fd, bytes);
    ::close(fd);
    scene.events.reason();
  }
}

TEST(a_message_that_is_too_long_is_not_read) {
  Scene scene;
  const auto stream = scene.connect(1000);
  stream->start("hello");
  const int fd = scene.server.accept();
  Server::write(
      fd, framed(std::string(1000, 'a')) + framed(std::string(1001, 'b')));
  CHECK_EQ(scene.events.reason(),
           "Received message larger than max (1001 vs. 1000) (permanent)");
  CHECK_EQ(scene.events.num_messages(), size_t{1});
  CHECK_EQ(Server::receive(fd), "hello");
  char byte;
  CHECK_EQ(::recv(fd, &byte, 1, 0), 0);  // The connection is closed.
  ::close(fd);
}

TEST(a_server_that_accepts_nobody_can_be_tried_again) {
  Scene scene;
  std::vector<std::shared_ptr<Stream>> queued;
  for (int i = 0; i <= kBacklog; ++i) queued.push_back(scene.connect());
  const auto stream = scene.connect();
  stream->start("hello");
  CHECK(scene.events.reason().starts_with("cannot connect: "));
  CHECK(!scene.events.has_connected());
}

TEST(a_stream_ends_when_it_is_cancelled_or_dropped) {
  for (const bool drops : {false, true}) {
    Scene scene;
    auto stream = scene.connect();
    stream->start("hello");
    const int fd = scene.server.accept();
    CHECK_EQ(Server::receive(fd), "hello");
    if (drops) {
      stream = nullptr;
    } else {
      stream->cancel();
      stream->cancel();
      stream->send("too late");
    }
    scene.events.reason();
    char byte;
    CHECK_EQ(::recv(fd, &byte, 1, 0), 0);
    ::close(fd);
  }
}

TEST(a_server_that_reads_nothing_does_not_block_the_sender) {
  Scene scene;
  const auto stream = scene.connect();
  stream->start("hello");
  const int fd = scene.server.accept();
  for (int i = 0; i < 20; ++i) stream->send(std::string(1 << 20, 'x'));
  Server::write(fd, framed("still here"));
  CHECK_EQ(scene.events.message(0), "still here");
  scene.transport->shutdown();
  scene.events.reason();
  ::close(fd);
}

TEST(shutdown_ends_all_streams_whatever_they_do) {
  Scene scene;
  std::vector<Recorder> events(24);
  std::vector<std::shared_ptr<Stream>> streams;
  for (Recorder& recorder : events) {
    streams.push_back(
        scene.transport->connect(scene.server.address(), &recorder, kMax));
  }
  std::atomic<bool> ends = false;
  auto server = background([&] {
    std::vector<int> fds;
    for (size_t i = 0; i < events.size(); ++i) {
      fds.push_back(scene.server.accept());
      fcntl(fds.back(), F_SETFL, O_NONBLOCK);
    }
    while (!ends) {
      for (const int fd : fds) Server::write(fd, framed("step"));
    }
    for (const int fd : fds) ::close(fd);
  });
  for (const auto& stream : streams) stream->start("hello");
  auto sender = background([&] {
    while (!ends) {
      for (const auto& stream : streams) stream->send("action");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  });
  wait_until([&] {
    return std::ranges::all_of(events,
                               [](auto& e) { return e.num_messages(); });
  });
  scene.transport->shutdown();
  std::vector<size_t> counts;
  for (Recorder& recorder : events) {
    recorder.reason();
    counts.push_back(recorder.num_messages());
  }
  ends = true;
  server.get();
  sender.get();
  for (size_t i = 0; i < events.size(); ++i) {
    CHECK_EQ(events[i].num_messages(), counts[i]);
  }
  CHECK_THROWS(std::runtime_error, "was shut down", scene.connect());
  scene.transport->shutdown();
}

TEST(other_addresses_go_to_the_other_transport) {
  Scene scene;
  const std::string path = scene.server.address();
  std::string too_long = path;  // Of the same socket.
  while (too_long.size() < 200) too_long.insert(too_long.rfind('/'), "/.");
  for (const std::string& address :
       {std::string("127.0.0.1:4431"), path + "x", path.substr(5), too_long}) {
    CHECK_THROWS(std::invalid_argument, "not local: " + address,
                 scene.transport->connect(address, &scene.events, kMax));
  }
  scene.server.stop_listening();  // Its socket is still there.
  CHECK_THROWS(std::invalid_argument, "not local: " + path, scene.connect());
}

#ifdef __GLIBC__
TEST(a_thread_that_cannot_start_is_an_error_and_leaves_nothing) {
  Scene scene;
  const auto num_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         {});
  };
  const auto before = num_files();
  pthread_attr_t usual, impossible;
  CHECK_EQ(pthread_getattr_default_np(&usual), 0);
  CHECK_EQ(pthread_attr_init(&impossible), 0);
  CHECK_EQ(pthread_attr_setstacksize(&impossible, size_t{1} << 60), 0);
  CHECK_EQ(pthread_setattr_default_np(&impossible), 0);
  std::string error;
  try {
    scene.connect();
  } catch (const std::runtime_error& caught) {
    error = caught.what();
  }
  CHECK_EQ(pthread_setattr_default_np(&usual), 0);
  CHECK(error.starts_with("cannot start a thread: "));
  CHECK_EQ(num_files(), before);
  scene.connect();  // Now it can.
}
#endif

TEST(a_stream_that_was_never_started_leaves_nothing) {
  Scene scene;
  auto stream = scene.connect();
  stream->cancel();
  stream->send("not sent");
  stream = nullptr;
  scene.transport->shutdown();
  CHECK(!scene.events.has_connected());
}
