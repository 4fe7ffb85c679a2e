// SPDX-License-Identifier: Apache-2.0
//
// Lock order: no thread holds GrpcTransport::mu_ and GrpcStream::mu_ together.
// A thread may hold either one when it calls gRPC, which does not call back.

#include "transport_grpc.h"

#include <absl/synchronization/mutex.h>
#include <grpcpp/alarm.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <exception>
#include <fstream>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "clock.h"
#include "errors.h"
#include "interrupt.h"
#include "text.h"

namespace torchbeast {
namespace {

constexpr const char* kStreamMethod = "/torchbeast.EnvServer/Stream";
constexpr const char* kDescribeMethod = "/torchbeast.EnvServer/Describe";

// The longest path of a unix socket: sockaddr_un without the final 0.
constexpr size_t kMaxUnixPath = 107;

// Time limit for connecting by TCP and HTTP/2. gRPC takes it from
// min_reconnect_backoff. The pool makes a new channel for every attempt.
constexpr int kConnectTimeoutMs = 3000;

// The limit at a unix socket, where the acceptor of --listen gives up earlier
// (OPEN_S). gRPC takes it from initial_reconnect_backoff, within 20 %. This is
// also when a channel connects again in the background, by default a second
// after its first attempt. gRPC 1.51 leaves such a connection open if the
// channel is destroyed meanwhile. So it must come later than the pool's next
// attempt, or it would use up a connection of the machine that has dialed in.
constexpr int kUnixTimeoutMs = 10'000;

// gRPC stores the interval as int milliseconds.
constexpr double kMinKeepaliveS = 0.01;
constexpr double kMaxKeepaliveS = 1e6;

constexpr int kMaxFrameBytes = (1 << 24) - 1;  // The maximum of HTTP/2.

// A server that ends a stream resets it, too, so the Write in progress ends
// soon. It would never end if a server did not.
constexpr auto kWriteGrace = std::chrono::seconds(1);

bool is_unix(const std::string& address) {
  return address.starts_with("unix:");
}

// Splits "HOST:PORT#NAME" into "HOST:PORT" and "NAME", which may be empty.
std::pair<std::string, std::string> split_name(const std::string& address) {
  const size_t end = is_unix(address) ? std::string::npos : address.find('#');
  if (end == std::string::npos) return {address, ""};
  return {address.substr(0, end), address.substr(end + 1)};
}

// Returns the contents of a PEM file. If there are none, the connection fails:
// gRPC would take certificates of its own in place of an empty text.
std::string read_pem(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str().empty() ? "cannot be read" : text.str();
}

std::shared_ptr<grpc::ChannelCredentials> make_credentials(
    const std::string& address, const std::optional<Tls>& tls) {
  if (!tls || is_unix(address)) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = read_pem(tls->ca);
  options.pem_cert_chain = read_pem(tls->cert);
  options.pem_private_key = read_pem(tls->key);
  return grpc::SslCredentials(options);
}

std::shared_ptr<grpc::Channel> make_channel(const std::string& address,
                                            double keepalive_s,
                                            const std::optional<Tls>& tls,
                                            size_t max_message_bytes) {
  check_address(address);
  grpc::ChannelArguments args;
  const auto keepalive_ms = static_cast<int>(std::lround(1e3 * keepalive_s));
  // Older and newer gRPC read different options; the newer reads ping_timeout.
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive_ms);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive_ms);
  args.SetInt("grpc.http2.ping_timeout_ms", keepalive_ms);
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  if (is_unix(address)) {
    args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kUnixTimeoutMs);
  }
  args.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kMaxFrameBytes);
  args.SetMaxReceiveMessageSize(static_cast<int>(max_message_bytes));
  args.SetMaxSendMessageSize(static_cast<int>(kMaxMessageBytes));
  // gRPC 1.51 decompresses a message before it checks the size. So servers are
  // asked not to compress, and compressed messages are refused.
  args.SetInt(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET,
              1 << GRPC_COMPRESS_NONE);
  args.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Environment servers are in the same network.
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  const auto [target, name] = split_name(address);
  if (!name.empty()) args.SetSslTargetNameOverride(name);
  return grpc::CreateCustomChannel(target, make_credentials(target, tls), args);
}

grpc::ByteBuffer to_buffer(const std::string& message) {
  const grpc::Slice slice(message);
  return grpc::ByteBuffer(&slice, 1);
}

Segments to_segments(const grpc::ByteBuffer& buffer) {
  auto slices = std::make_shared<std::vector<grpc::Slice>>();
  buffer.Dump(slices.get());  // Copies references only, so cannot fail.
  Segments segments;
  segments.parts.reserve(slices->size());
  for (const grpc::Slice& slice : *slices) {
    segments.parts.emplace_back(reinterpret_cast<const char*>(slice.begin()),
                                slice.size());
  }
  segments.owner = std::move(slices);
  return segments;
}

constexpr std::array kCodeNames = {
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
};
static_assert(grpc::StatusCode::UNAUTHENTICATED + 1 == kCodeNames.size());

std::string code_name(grpc::StatusCode code) {
  const auto i = static_cast<size_t>(code);
  return i < kCodeNames.size() ? kCodeNames[i]
                               : "status " + std::to_string(code);
}

std::string to_text(const grpc::Status& status) {
  if (status.ok()) return "the server ended the stream";
  return code_name(status.error_code()) + ": " +
         printable(status.error_message(), kMaxTextBytes);
}

// gRPC has no status code for these errors; they differ in their text only. A
// server that refuses the learner's certificate cannot be recognized: it closes
// the connection, like a server that dies.
bool is_permanent(const std::string& message) {
  for (const char* words :
       {"Ssl handshake failed", "is not in peer certificate",
        "Received message larger than max"}) {
    if (message.find(words) != std::string::npos) return true;
  }
  return false;
}

// Whether the server cannot be reached or is busy, and may answer soon. A
// stream gets INTERNAL if its server dies.
bool is_transient(const grpc::Status& status) {
  if (is_permanent(status.error_message())) return false;
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
    case grpc::StatusCode::INTERNAL:
      return true;
    default:
      return false;
  }
}

class GrpcTransport;

// The gRPC objects of one stream. `self_` keeps them alive until the last
// operation has come back through the completion queue.
//
// The operations are: StartCall; then one Read at a time and one Write at a
// time; after one of them has failed and all have come back, Finish. If the
// Write does not come back, the stream is cancelled, but only after
// kWriteGrace: its status would be CANCELLED instead of the server's reason.
// All of them complete in the one thread of the stream's completion queue, so
// the callbacks of StreamEvents come one after the other. mu_ guards the
// members that other threads use, too.
class GrpcStream : public std::enable_shared_from_this<GrpcStream> {
 public:
  GrpcStream(GrpcTransport* transport, StreamEvents* events,
             grpc::CompletionQueue* queue,
             std::shared_ptr<grpc::Channel> channel)
      : transport_(transport),
        events_(events),
        queue_(queue),
        channel_(std::move(channel)) {}

  void start(std::string first_message);
  void send(std::string message);
  void cancel() { context_.TryCancel(); }

  // An operation in progress. The completion queue returns its address.
  struct Operation {
    GrpcStream* stream;
    void (GrpcStream::*complete)(bool ok);
  };

 private:
  void on_started(bool ok);
  void on_read(bool ok);
  void on_written(bool ok);
  void on_grace_over(bool ok);
  void on_finished(bool ok);
  void read();
  void write_locked();
  void finish_if_idle();

  GrpcTransport* const transport_;
  StreamEvents* const events_;
  grpc::CompletionQueue* const queue_;
  const std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;  // Outlives the call.
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;

  // Used only by the thread of the completion queue:
  std::shared_ptr<GrpcStream> self_;  // From start() to on_finished().
  grpc::ByteBuffer received_;
  grpc::Status status_;
  bool reading_ = false;
  grpc::Alarm grace_;
  bool in_grace_ = false;  // `grace_` is set, and has not come back.

  std::mutex mu_;
  std::deque<std::string> to_send_;  // Guarded by mu_.
  bool connected_ = false;           // Guarded by mu_.
  bool writing_ = false;             // Guarded by mu_.
  bool ended_ = false;  // Guarded by mu_. No operation may begin any more.

  Operation start_op_{this, &GrpcStream::on_started};
  Operation read_op_{this, &GrpcStream::on_read};
  Operation write_op_{this, &GrpcStream::on_written};
  Operation grace_op_{this, &GrpcStream::on_grace_over};
  Operation finish_op_{this, &GrpcStream::on_finished};
};

class GrpcTransport final : public Transport {
 public:
  GrpcTransport(int num_threads, double keepalive_s, std::optional<Tls> tls)
      : keepalive_s_(keepalive_s), tls_(std::move(tls)) {
    if (num_threads < 1) {
      throw std::invalid_argument("num_threads is " +
                                  std::to_string(num_threads) +
                                  ", expected at least 1");
    }
    if (!(keepalive_s >= kMinKeepaliveS && keepalive_s <= kMaxKeepaliveS)) {
      throw std::invalid_argument("keepalive_s is " +
                                  std::to_string(keepalive_s) + ", expected " +
                                  std::to_string(kMinKeepaliveS) + " to " +
                                  std::to_string(kMaxKeepaliveS));
    }
    // Builds of abseil without NDEBUG, such as Debian's, look for deadlocks
    // whenever gRPC takes a lock. That is 5 % of the cost of a step.
    absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
    for (int i = 0; i < num_threads; ++i) {
      queues_.push_back(std::make_unique<grpc::CompletionQueue>());
    }
    try {
      for (const auto& queue : queues_) {
        threads_.emplace_back([queue = queue.get()] { serve(*queue); });
      }
    } catch (const std::exception& error) {  // Of the system, or no memory.
      const size_t number = threads_.size() + 1;
      shutdown();
      throw std::runtime_error(
          "num_threads is " + std::to_string(num_threads) + ", but thread " +
          std::to_string(number) + " cannot start: " + error.what() +
          "; choose a smaller number, or allow more threads (ulimit -u)");
    }
  }

  ~GrpcTransport() override { shutdown(); }

  std::shared_ptr<Stream> connect(const std::string& address,
                                  StreamEvents* events,
                                  size_t max_message_bytes) override;
  void shutdown() override;

  // Registers a started stream: shutdown() cancels it and waits for its end.
  void add(const std::shared_ptr<GrpcStream>& stream);
  void remove(GrpcStream* stream);

 private:
  static void serve(grpc::CompletionQueue& queue) {
    void* tag = nullptr;
    bool ok = false;
    while (queue.Next(&tag, &ok)) {
      const auto* operation = static_cast<GrpcStream::Operation*>(tag);
      (operation->stream->*operation->complete)(ok);
    }
  }

  const double keepalive_s_;
  const std::optional<Tls> tls_;
  std::vector<std::unique_ptr<grpc::CompletionQueue>> queues_;
  std::vector<std::thread> threads_;

  std::mutex mu_;
  std::condition_variable all_removed_;
  std::vector<GrpcStream*> streams_;  // Guarded by mu_. Alive: see self_.
  size_t next_queue_ = 0;             // Guarded by mu_.
  bool stopping_ = false;             // Guarded by mu_.
};

void GrpcStream::start(std::string first_message) {
  self_ = shared_from_this();
  transport_->add(self_);
  to_send_.push_back(std::move(first_message));
  grpc::GenericStub stub(channel_);
  call_ = stub.PrepareCall(&context_, kStreamMethod, queue_);
  call_->StartCall(&start_op_);
}

void GrpcStream::send(std::string message) {
  std::lock_guard lock(mu_);
  if (ended_) return;
  to_send_.push_back(std::move(message));
  if (connected_ && !writing_) write_locked();
}

void GrpcStream::write_locked() {
  writing_ = true;
  call_->Write(to_buffer(to_send_.front()), &write_op_);
  to_send_.pop_front();
}

void GrpcStream::read() {
  reading_ = true;
  call_->Read(&received_, &read_op_);
}

void GrpcStream::on_started(bool ok) {
  if (ok) {
    events_->on_connected();
    read();
  }
  {
    std::lock_guard lock(mu_);
    connected_ = ok;
    ended_ = !ok;
    if (ok) write_locked();
  }
  finish_if_idle();
}

void GrpcStream::on_read(bool ok) {
  reading_ = false;
  if (ok) {
    Segments message = to_segments(received_);
    received_.Clear();
    events_->on_message(std::move(message));
    read();
    return;
  }
  {
    std::lock_guard lock(mu_);
    ended_ = true;
    in_grace_ = writing_;
  }
  if (in_grace_) {
    grace_.Set(queue_, std::chrono::system_clock::now() + kWriteGrace,
               &grace_op_);
  }
  finish_if_idle();
}

void GrpcStream::on_grace_over(bool) {
  in_grace_ = false;
  {
    std::lock_guard lock(mu_);
    if (writing_) cancel();
  }
  finish_if_idle();
}

void GrpcStream::on_written(bool ok) {
  {
    std::lock_guard lock(mu_);
    writing_ = false;
    // If this Write has failed, the Read will fail, too, and set ended_.
    if (ok && !ended_ && !to_send_.empty()) write_locked();
  }
  if (in_grace_) grace_.Cancel();  // It comes back at once.
  finish_if_idle();
}

void GrpcStream::finish_if_idle() {
  {
    std::lock_guard lock(mu_);
    if (!ended_ || writing_ || reading_ || in_grace_) return;
  }
  call_->Finish(&status_, &finish_op_);
}

void GrpcStream::on_finished(bool) {
  events_->on_closed(to_text(status_), is_transient(status_));
  const std::shared_ptr<GrpcStream> self = std::move(self_);
  transport_->remove(this);
}

// The object that the pool holds. Its destructor ends the stream.
class Handle final : public Stream {
 public:
  explicit Handle(std::shared_ptr<GrpcStream> stream)
      : stream_(std::move(stream)) {}
  ~Handle() override { stream_->cancel(); }
  void start(std::string first_message) override {
    stream_->start(std::move(first_message));
  }
  void send(std::string message) override { stream_->send(std::move(message)); }
  void cancel() override { stream_->cancel(); }

 private:
  const std::shared_ptr<GrpcStream> stream_;
};

std::shared_ptr<Stream> GrpcTransport::connect(const std::string& address,
                                               StreamEvents* events,
                                               size_t max_message_bytes) {
  grpc::CompletionQueue* queue;
  {
    std::lock_guard lock(mu_);
    if (stopping_) throw std::runtime_error("The transport was shut down");
    queue = queues_[next_queue_++ % queues_.size()].get();
  }
  return std::make_shared<Handle>(std::make_shared<GrpcStream>(
      this, events, queue,
      make_channel(address, keepalive_s_, tls_, max_message_bytes)));
}

void GrpcTransport::add(const std::shared_ptr<GrpcStream>& stream) {
  std::lock_guard lock(mu_);
  streams_.push_back(stream.get());
  if (stopping_) stream->cancel();
}

void GrpcTransport::remove(GrpcStream* stream) {
  std::lock_guard lock(mu_);
  std::erase(streams_, stream);
  if (streams_.empty()) all_removed_.notify_all();
}

void GrpcTransport::shutdown() {
  {
    std::unique_lock lock(mu_);
    if (std::exchange(stopping_, true)) return;
    for (GrpcStream* stream : streams_) stream->cancel();
    all_removed_.wait(lock, [&] { return streams_.empty(); });
  }
  for (const auto& queue : queues_) queue->Shutdown();
  for (std::thread& thread : threads_) thread.join();
}

}  // namespace

void check_address(const std::string& address) {
  if (is_unix(address)) {
    const size_t length = address.size() - std::string("unix:").size();
    if (length == 0 || length > kMaxUnixPath) {
      throw std::invalid_argument(
          "The address " + address + " has a path of " +
          std::to_string(length) + " bytes; a unix socket's has 1 to " +
          std::to_string(kMaxUnixPath) +
          ". Choose a shorter directory, such as one in /tmp");
    }
    return;
  }
  const std::string target = split_name(address).first;
  const size_t colon = target.rfind(':');
  const std::string port =
      colon == std::string::npos ? "" : target.substr(colon + 1);
  const bool digits = !port.empty() && port.size() <= 5 &&
                      port.find_first_not_of("0123456789") == std::string::npos;
  if (colon == 0 || !digits || std::stoi(port) < 1 || std::stoi(port) > 65535) {
    throw std::invalid_argument("The address " + address +
                                " is neither unix:PATH nor HOST:PORT with a "
                                "port of 1 to 65535");
  }
}

std::unique_ptr<Transport> make_grpc_transport(int num_threads,
                                               double keepalive_s,
                                               std::optional<Tls> tls) {
  return std::make_unique<GrpcTransport>(num_threads, keepalive_s,
                                         std::move(tls));
}

namespace {

// The gRPC objects of a unary call. The queue has one event: the end of the
// call.
struct OneCall {
  grpc::ClientContext context;
  grpc::CompletionQueue queue;

  void wait() {
    void* tag = nullptr;
    bool ok = false;
    while (
        queue.AsyncNext(
            &tag, &ok, std::chrono::system_clock::now() + kInterruptInterval) ==
        grpc::CompletionQueue::TIMEOUT) {
      if (interrupt_check) interrupt_check();
    }
  }

  ~OneCall() {
    context.TryCancel();  // If the wait was interrupted, the call still runs.
    queue.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue.Next(&tag, &ok)) {
    }
  }
};

}  // namespace

std::string describe(const std::string& address, const std::string& hello,
                     double timeout_s, const std::optional<Tls>& tls) {
  if (!(timeout_s >= 0)) {
    throw std::invalid_argument("timeout_s is " + std::to_string(timeout_s) +
                                ", expected a number of seconds >= 0");
  }
  constexpr double kForeverS = 1e9;  // gRPC's clock overflows above this.
  timeout_s = std::min(timeout_s, kForeverS);
  grpc::ByteBuffer welcome;
  grpc::Status status;
  OneCall one_call;
  one_call.context.set_deadline(std::chrono::system_clock::now() +
                                seconds(timeout_s));
  grpc::GenericStub stub(
      make_channel(address, kDefaultKeepaliveS, tls, kMaxMessageBytes));
  const auto call = stub.PrepareUnaryCall(&one_call.context, kDescribeMethod,
                                          to_buffer(hello), &one_call.queue);
  call->StartCall();
  call->Finish(&welcome, &status, &one_call.queue);
  one_call.wait();
  if (!status.ok()) {
    const std::string text = "The environment server " + address +
                             " does not say what it serves: " + to_text(status);
    if (is_transient(status)) throw ServerUnavailable(text);
    throw ServerMismatch(text);
  }
  std::vector<grpc::Slice> slices;
  welcome.Dump(&slices);
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

}  // namespace torchbeast
