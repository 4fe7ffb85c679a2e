// SPDX-License-Identifier: Apache-2.0
//
// No thread holds two of the locks here, or calls StreamEvents with a lock.

#include "transport_local.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "text.h"

namespace torchbeast {
namespace {

constexpr size_t kHeaderBytes = 4;
// A shorter message comes with its header in one system call.
constexpr size_t kReadBytes = 64 << 10;
constexpr auto kPollAgain = std::chrono::milliseconds(10);

#ifdef MSG_NOSIGNAL
constexpr int kSendFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
#else
constexpr int kSendFlags = MSG_DONTWAIT;  // macOS: SO_NOSIGPIPE, see connect().
#endif

std::string error_text(const char* what, int error) {
  return std::string(what) + ": " + std::strerror(error);
}

void set_nonblocking(int fd) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
}

// Returns PATH.s for unix:PATH: there its server takes streams without gRPC.
// None for other addresses, and for paths that are too long.
std::optional<std::string> stream_path(const std::string& address) {
  if (!address.starts_with("unix:")) return std::nullopt;
  std::string path = address.substr(std::string("unix:").size()) + ".s";
  if (path.size() >= sizeof(sockaddr_un::sun_path)) return std::nullopt;
  return path;
}

// One connection. The thread of its Poller reads and calls StreamEvents; any
// thread sends. Only the Poller's thread closes the socket, or the destructor
// if the stream was never started.
class LocalStream {
 public:
  LocalStream(std::string path, StreamEvents* events, size_t max_message_bytes)
      : path_(std::move(path)),
        events_(events),
        max_message_bytes_(max_message_bytes) {}
  ~LocalStream() { close_socket(); }

  bool connect();
  void open(std::string first_message);
  // Returns whether the Poller must call write() when the socket has room.
  bool send(std::string message);
  void cancel();

  // For the thread of the Poller:
  void greet() {
    if (!end_) events_->on_connected();
  }
  bool is_open() const { return !end_; }
  pollfd wants() const {
    return {fd_, static_cast<short>(POLLIN | (waits_ ? POLLOUT : 0)), 0};
  }
  void handle(short happened, std::vector<char>& scratch);
  void close();

 private:
  struct End {
    std::string reason;
    bool transient = true;
  };

  void read(std::vector<char>& scratch);
  void take(const char* data, size_t size);
  void write();
  void close_socket();
  bool flush_locked();

  const std::string path_;
  StreamEvents* const events_;
  const size_t max_message_bytes_;

  // Used only by the thread of the Poller, and before by connect() and open():
  int fd_ = -1;
  std::optional<End> end_;  // The stream has ended.
  std::array<unsigned char, kHeaderBytes> header_ = {};
  size_t header_size_ = 0;  // Bytes of header_ that have come.
  std::shared_ptr<char[]> body_;
  size_t body_size_ = 0;  // Bytes of body_ that have come,
  size_t body_end_ = 0;   // of so many.
  bool reads_reason_ = false;
  std::string reason_;

  std::mutex mu_;
  std::deque<std::string> to_send_;  // Guarded by mu_. With headers.
  size_t sent_ = 0;   // Guarded by mu_. Bytes of the first of to_send_.
  int open_fd_ = -1;  // Guarded by mu_. -1 before and after the connection.
  bool cancelled_ = false;           // Guarded by mu_.
  std::atomic<bool> waits_ = false;  // to_send_ is not empty.
};

// Connects. Returns false if nobody listens at the path: there is no socket, or
// only that of a killed server. If the server is busy, the Poller's thread
// reports this as the end of the stream.
bool LocalStream::connect() {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
  if (fd < 0) {
    end_ = End{error_text("cannot create a socket", errno)};
    return true;
  }
  fd_ = fd;
#ifdef SO_NOSIGPIPE
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof(on));
#endif
  set_nonblocking(fd);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address),
                sizeof(address)) != 0) {
    if (errno != EAGAIN) return false;  // EAGAIN: too many wait there already.
    end_ = End{error_text("cannot connect", errno)};
  }
  return true;
}

void LocalStream::open(std::string first_message) {
  if (end_) return;
  {
    std::lock_guard lock(mu_);
    open_fd_ = fd_;
    if (cancelled_) ::shutdown(fd_, SHUT_RDWR);
  }
  send(std::move(first_message));
}

bool LocalStream::send(std::string message) {
  const auto size = static_cast<uint32_t>(message.size());
  std::array<char, kHeaderBytes> header;
  for (size_t i = 0; i < kHeaderBytes; ++i) {
    header[i] = static_cast<char>(size >> 8 * i);
  }
  message.insert(0, header.data(), kHeaderBytes);
  std::lock_guard lock(mu_);
  if (open_fd_ < 0) return false;
  to_send_.push_back(std::move(message));
  if (waits_) return false;  // The Poller knows it.
  waits_ = !flush_locked();
  return waits_;
}

// Sends what the socket takes. Returns whether nothing is left. After an error
// nothing is: the Poller's read() ends the stream.
bool LocalStream::flush_locked() {
  while (!to_send_.empty()) {
    const std::string& first = to_send_.front();
    const ssize_t count = ::send(open_fd_, first.data() + sent_,
                                 first.size() - sent_, kSendFlags);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (count < 0) {
      ::shutdown(open_fd_, SHUT_RDWR);  // Or read() might not meet an error.
      to_send_.clear();
      sent_ = 0;
      return true;
    }
    sent_ += static_cast<size_t>(count);
    if (sent_ == first.size()) {
      to_send_.pop_front();
      sent_ = 0;
    }
  }
  return true;
}

void LocalStream::write() {
  std::lock_guard lock(mu_);
  waits_ = !flush_locked();
}

void LocalStream::cancel() {
  std::lock_guard lock(mu_);
  cancelled_ = true;
  if (open_fd_ >= 0) ::shutdown(open_fd_, SHUT_RDWR);  // Wakes the Poller.
}

void LocalStream::handle(short happened, std::vector<char>& scratch) {
  if (happened & POLLOUT) write();
  if (happened & (POLLIN | POLLHUP | POLLERR | POLLNVAL)) read(scratch);
}

// Reads once. Bytes of a long message go to their place at once.
void LocalStream::read(std::vector<char>& scratch) {
  const size_t missing = body_ ? body_end_ - body_size_ : 0;
  const bool is_long = missing >= scratch.size();
  char* const to = is_long ? body_.get() + body_size_ : scratch.data();
  const ssize_t count =
      ::recv(fd_, to, is_long ? missing : scratch.size(), MSG_DONTWAIT);
  if (count < 0 &&
      (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) {
    return;
  }
  if (reads_reason_ && count <= 0) {
    end_ = End{reason_.empty() ? "the server ended the stream"
                               : printable(reason_, kMaxTextBytes)};
  } else if (count < 0) {
    end_ = End{error_text("the connection broke", errno)};
  } else if (count == 0) {
    end_ = End{"the server closed the connection"};
  } else {
    take(to, static_cast<size_t>(count));
  }
}

// Takes bytes that have come: parts of headers and messages, or the reason for
// the end. Bytes of a message may already be in body_.
void LocalStream::take(const char* data, size_t size) {
  while (size > 0 && !end_) {
    if (reads_reason_) {
      reason_.append(data, std::min(size, kMaxTextBytes - reason_.size()));
      return;
    }
    if (!body_) {
      const size_t count = std::min(size, kHeaderBytes - header_size_);
      std::memcpy(header_.data() + header_size_, data, count);
      header_size_ += count;
      data += count;
      size -= count;
      if (header_size_ < kHeaderBytes) return;
      header_size_ = 0;
      body_end_ = 0;
      for (size_t i = 0; i < kHeaderBytes; ++i) {
        body_end_ |= size_t{header_[i]} << 8 * i;
      }
      if (body_end_ > max_message_bytes_) {
        end_ = End{"Received message larger than max (" +
                       std::to_string(body_end_) + " vs. " +
                       std::to_string(max_message_bytes_) + ")",
                   /*transient=*/false};
        return;
      }
      reads_reason_ = body_end_ == 0;
      if (reads_reason_) continue;
      body_.reset(new (std::nothrow) char[body_end_]);
      body_size_ = 0;
      if (!body_) {
        end_ = End{"no memory for a message of " + std::to_string(body_end_) +
                   " bytes"};
        return;
      }
    }
    const size_t count = std::min(size, body_end_ - body_size_);
    char* const to = body_.get() + body_size_;
    if (to != data) std::memcpy(to, data, count);
    body_size_ += count;
    data += count;
    size -= count;
    if (body_size_ < body_end_) return;
    Segments message;
    message.parts.emplace_back(body_.get(), body_end_);
    message.owner = std::exchange(body_, nullptr);
    events_->on_message(std::move(message));
  }
}

void LocalStream::close() {
  close_socket();
  events_->on_closed(end_->reason, end_->transient);
}

void LocalStream::close_socket() {
  std::lock_guard lock(mu_);
  open_fd_ = -1;
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

// A thread that waits for its streams' sockets.
class Poller {
 public:
  Poller() {
    if (::pipe(wake_.data()) != 0) {
      throw std::runtime_error(error_text("cannot create a pipe", errno));
    }
    for (const int fd : wake_) set_nonblocking(fd);
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::exception& error) {  // Of the system, or no memory.
      close_pipe();
      throw std::runtime_error("cannot start a thread: " +
                               std::string(error.what()));
    }
  }
  ~Poller() {
    stop();
    close_pipe();
  }

  void add(std::shared_ptr<LocalStream> stream) {
    {
      std::lock_guard lock(mu_);
      added_.push_back(std::move(stream));
    }
    wake();  // If the Poller is stopping, it cancels the stream.
  }

  void wake() {
    const char byte = 0;
    // If the pipe is full, the thread wakes up anyway.
    [[maybe_unused]] const ssize_t count = ::write(wake_[1], &byte, 1);
  }

  // Ends all streams; returns after their last callbacks.
  void stop() {
    {
      std::lock_guard lock(mu_);
      stopping_ = true;
    }
    wake();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run();
  bool adopt();
  void close_pipe() {
    for (const int fd : wake_) ::close(fd);
  }

  std::array<int, 2> wake_ = {-1, -1};
  std::thread thread_;
  std::vector<std::shared_ptr<LocalStream>> streams_;  // Used by thread_ only.

  std::mutex mu_;
  std::vector<std::shared_ptr<LocalStream>> added_;  // Guarded by mu_.
  bool stopping_ = false;                            // Guarded by mu_.
};

void Poller::run() {
  std::vector<char> scratch(kReadBytes);
  std::vector<pollfd> fds;
  while (adopt()) {
    fds.assign(1, {wake_[0], POLLIN, 0});
    for (const auto& stream : streams_) fds.push_back(stream->wants());
    if (::poll(fds.data(), fds.size(), -1) < 0) {
      if (errno != EINTR) {
        std::this_thread::sleep_for(kPollAgain);  // No memory.
      }
      continue;
    }
    if (fds[0].revents) {
      while (::read(wake_[0], scratch.data(), scratch.size()) > 0) {
      }
    }
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (fds[i + 1].revents) streams_[i]->handle(fds[i + 1].revents, scratch);
    }
  }
}

// Begins with the added streams, and drops those that have ended. Returns
// whether there is something to wait for.
bool Poller::adopt() {
  std::vector<std::shared_ptr<LocalStream>> added;
  bool stopping = false;
  {
    std::lock_guard lock(mu_);
    added.swap(added_);
    stopping = stopping_;
  }
  for (auto& stream : added) {
    stream->greet();
    streams_.push_back(std::move(stream));
  }
  std::erase_if(streams_, [&](const auto& stream) {
    if (stream->is_open()) {
      if (stopping) stream->cancel();
      return false;
    }
    stream->close();
    return true;
  });
  return !stopping || !streams_.empty();
}

// The object that the pool holds. Its destructor ends the stream.
class Handle final : public Stream {
 public:
  Handle(std::shared_ptr<Poller> poller, std::shared_ptr<LocalStream> stream)
      : poller_(std::move(poller)), stream_(std::move(stream)) {}
  ~Handle() override { stream_->cancel(); }
  void start(std::string first_message) override {
    stream_->open(std::move(first_message));
    poller_->add(stream_);
  }
  void send(std::string message) override {
    if (stream_->send(std::move(message))) poller_->wake();
  }
  void cancel() override { stream_->cancel(); }

 private:
  const std::shared_ptr<Poller> poller_;
  const std::shared_ptr<LocalStream> stream_;
};

class LocalTransport final : public Transport {
 public:
  LocalTransport(int num_threads, std::unique_ptr<Transport> others)
      : num_threads_(std::max(1, num_threads)), others_(std::move(others)) {}
  ~LocalTransport() override { shutdown(); }

  std::shared_ptr<Stream> connect(const std::string& address,
                                  StreamEvents* events,
                                  size_t max_message_bytes) override {
    auto path = stream_path(address);
    if (!path) return others_->connect(address, events, max_message_bytes);
    auto stream = std::make_shared<LocalStream>(std::move(*path), events,
                                                max_message_bytes);
    // Before start(), because another transport is needed if nobody listens.
    if (!stream->connect()) {
      return others_->connect(address, events, max_message_bytes);
    }
    std::lock_guard lock(mu_);
    if (stopping_) throw std::runtime_error("The transport was shut down");
    while (pollers_.size() < num_threads_) {
      pollers_.push_back(std::make_shared<Poller>());
    }
    return std::make_shared<Handle>(pollers_[next_++ % pollers_.size()],
                                    std::move(stream));
  }

  void shutdown() override {
    std::vector<std::shared_ptr<Poller>> pollers;
    {
      std::lock_guard lock(mu_);
      stopping_ = true;
      pollers = pollers_;
    }
    for (const auto& poller : pollers) poller->stop();
    others_->shutdown();
  }

 private:
  const size_t num_threads_;
  const std::unique_ptr<Transport> others_;

  std::mutex mu_;
  std::vector<std::shared_ptr<Poller>> pollers_;  // Guarded by mu_.
  size_t next_ = 0;                               // Guarded by mu_.
  bool stopping_ = false;                         // Guarded by mu_.
};

}  // namespace

std::unique_ptr<Transport> make_local_transport(
    int num_threads, std::unique_ptr<Transport> others) {
  return std::make_unique<LocalTransport>(num_threads, std::move(others));
}

}  // namespace torchbeast
