// SPDX-License-Identifier: Apache-2.0
//
// An ActorPool with malicious servers. Whatever they send, and in whatever
// order their streams begin and end,
//   * run() throws only ActorError, and all messages are printable;
//   * the numbers of steps add up at any moment;
//   * rollouts of a server that behaves afterwards reach the learner, and no
//     lane of a learner batch is lost.
//
// An input is a few bytes of options, followed by the events: see Game::act.
// The next message of a well-behaved server takes one byte, so that inputs
// reach deep into a run. Other events send such a message with changed bytes,
// or any bytes. One thread plays the servers, the agent and the learner; the
// other runs the pool.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "actor_pool.h"
#include "fake_servers.h"
#include "fuzz.h"
#include "text.h"
#include "wire.h"

using namespace torchbeast;

namespace {

// Larger limits take more time only.
constexpr size_t kMaxStepBytes = 4096;
constexpr int kMaxActs = 40;

// The server's end of a stream's present connection.
struct Link {
  StreamEvents* events = nullptr;
  bool started = false;
  bool connected = false;
  bool ended = false;
  uint64_t next_seq = 0;  // Of the Step that answers the last Action.
  bool whole = true;      // Whether that Step must hold all frames.
  std::string announced;  // The last Welcome that was sent, encoded
  wire::Welcome welcome;  // and decoded.
};

class EvilTransport final : public Transport {
 public:
  explicit EvilTransport(size_t num_streams) : links_(num_streams) {}

  // The address of stream i is i.
  std::shared_ptr<Stream> connect(const std::string& address,
                                  StreamEvents* events,
                                  size_t /*max_message_bytes*/) override {
    auto link = std::make_shared<Link>();
    link->events = events;
    std::lock_guard lock(mu_);
    links_[std::stoul(address)] = link;
    return std::make_shared<EvilStream>(*this, link);
  }

  void shutdown() override {
    for (size_t i = 0; i < links_.size(); ++i) close(i, "shut down", true);
  }

  // Calls fn(link) if the stream is started and has not ended, and returns
  // whether it did. The stream cannot end meanwhile.
  template <typename Fn>
  bool with(size_t stream, Fn fn) {
    std::lock_guard lock(events_mu_);
    const std::shared_ptr<Link> link = at(stream);
    {
      std::lock_guard state(mu_);
      if (!link || !link->started || link->ended) return false;
    }
    if (!std::exchange(link->connected, true)) link->events->on_connected();
    fn(*link);
    return true;
  }

  // Calls on_connected if the stream is started. Returns whether it is open.
  bool is_open(size_t stream) {
    return with(stream, [](Link&) {});
  }

  // Wakes wait().
  void notify() {
    std::lock_guard lock(mu_);
    ++num_changes_;
    changed_.notify_all();
  }
  int64_t num_changes() {
    std::lock_guard lock(mu_);
    return num_changes_;
  }
  // Waits until a stream is started or run() ends, for a short time: the pool
  // may also become idle without either.
  void wait(int64_t num_changes) {
    std::unique_lock lock(mu_);
    changed_.wait_for(lock, std::chrono::milliseconds(1),
                      [&] { return num_changes_ != num_changes; });
  }

  void close(size_t stream, const std::string& why, bool transient) {
    with(stream, [&](Link& link) {
      link.ended = true;
      link.events->on_closed(printable(why, kMaxTextBytes), transient);
    });
  }

 private:
  class EvilStream final : public Stream {
   public:
    EvilStream(EvilTransport& transport, std::shared_ptr<Link> link)
        : transport_(transport), link_(std::move(link)) {}
    void start(std::string) override {
      {
        std::lock_guard lock(transport_.mu_);
        link_->started = true;
      }
      transport_.notify();
    }
    void send(std::string message) override {
      const fake::Action action = fake::parse_action(message);
      link_->next_seq = static_cast<uint64_t>(action.seq) + 1;
      link_->whole = action.whole;
    }
    void cancel() override {}  // The stream ends when the input says so.

   private:
    EvilTransport& transport_;
    const std::shared_ptr<Link> link_;
  };

  std::shared_ptr<Link> at(size_t stream) {
    std::lock_guard lock(mu_);
    return links_[stream];
  }

  std::mutex events_mu_;  // Lock order: before mu_. Held during callbacks.
  std::mutex mu_;
  std::vector<std::shared_ptr<Link>> links_;  // Guarded by mu_; `started` too.
  std::condition_variable changed_;
  int64_t num_changes_ = 0;  // Guarded by mu_.
};

bool is_balanced(const PoolStats& stats) {
  return stats.received == stats.dequeued + stats.discarded + stats.in_flight &&
         stats.discarded >= 0 && stats.in_flight >= 0;
}

class Game {
 public:
  explicit Game(fuzz::Input input)
      : input_(input),
        num_envs_(1 + input_.byte() % 3),
        unroll_length_(1 + input_.byte() % 4),
        num_streams_(1 + input_.byte() % 3),
        chunk_(1 + input_.byte()),
        options_(input_.byte()) {
    QueueOptions queue_options;
    queue_options.minimum_batch_size = num_envs_ * (1 + options_ % 2);
    queue_options.maximum_batch_size = 6;
    queue_options.maximum_queue_size = 6;
    queue_ = std::make_shared<BatchingQueue>(queue_options);
    BatcherOptions batcher_options;
    batcher_options.timeout_ms = std::nullopt;
    batcher_ = std::make_shared<DynamicBatcher>(batcher_options);
    PoolOptions pool_options;
    pool_options.unroll_length = unroll_length_;
    pool_options.num_envs = num_envs_;
    pool_options.learner_queue = queue_;
    pool_options.inference_batcher = batcher_;
    for (size_t i = 0; i < num_streams_; ++i) {
      pool_options.addresses.push_back(std::to_string(i));
    }
    pool_options.initial_agent_state.structure = Structure::tuple({});
    pool_options.named_rows = options_ & 2;
    pool_options.max_failures = options_ & 4 ? 2 : 1 << 30;
    pool_options.first_backoff_s = 0;
    auto transport = std::make_unique<EvilTransport>(num_streams_);
    transport_ = transport.get();
    pool_ = std::make_unique<ActorPool>(std::move(pool_options),
                                        std::move(transport));
    fake::WelcomeOptions welcome;
    welcome.num_envs = static_cast<uint64_t>(num_envs_);
    welcome_ = fake::welcome(welcome);
  }

  void play() {
    std::thread runner([this] { run(); });
    settle();
    try {
      for (int n = 0; n < kMaxActs && !input_.empty() && !has_ended(); ++n) {
        act();
        settle();
        check();
      }
      if (!has_ended()) recover();
    } catch (const ActorError&) {
      // From the queue of a pool that has failed. run() throws it, too.
    }
    pool_->stop();
    runner.join();
    check();
    const PoolStats stats = pool_->stats();
    // The queue of a pool that has failed is closed and empty.
    const int64_t queued = queue_->is_closed() ? 0 : queue_->size();
    REQUIRE(stats.in_flight == unroll_length_ * queued,
            std::to_string(stats.in_flight));
    for (const StreamState state : stats.states) {
      REQUIRE(state == StreamState::kStopped, std::string(name(state)));
    }
  }

 private:
  // Runs in its own thread.
  void run() {
    try {
      pool_->run();
    } catch (const ActorError& error) {
      fuzz::require_printable(error.what());
    } catch (const std::exception& error) {
      REQUIRE(false, error.what());
    }
    ended_ = true;
    transport_->notify();
  }

  bool has_ended() const { return ended_; }

  // One event of one stream.
  void act() {
    const uint8_t code = input_.byte();
    const size_t stream = code / 16 % num_streams_;
    switch (code % 16) {
      case 0:
      case 1:
        say(stream, welcome_);
        break;
      case 2:
      case 3:
        say_step(stream);
        break;
      case 4:
      case 5:  // Several correct steps.
        for (int n = 1 + input_.byte() % 16; n > 0; --n) {
          say_step(stream);
          answer();
        }
        break;
      case 6:
        say(stream, changed(welcome_));
        break;
      case 7:
        say(stream, changed(next_step(stream)));
        break;
      case 8:
        say(stream, std::string(input_.bytes(input_.byte())));
        break;
      case 9:
        say(stream, fake::failure(std::string(input_.bytes(input_.byte()))));
        break;
      case 10:
        say(stream, fake::goodbye(std::string(input_.bytes(input_.byte()))));
        break;
      case 11:
        answer();
        break;
      case 12:
        learn();
        break;
      case 13:
      case 14:
        transport_->close(stream, "lost", true);
        break;
      case 15: {
        const bool transient = input_.byte() % 2;
        transport_->close(stream, std::string(input_.bytes(input_.byte())),
                          transient);
        break;
      }
    }
  }

  // Overwrites, inserts or erases some bytes.
  std::string changed(std::string message) {
    for (int n = 1 + input_.byte() % 4; n > 0; --n) {
      const size_t at = message.empty() ? 0 : input_.number() % message.size();
      const uint8_t kind = input_.byte();
      switch (kind % 3) {
        case 0:
          message.replace(at, 1 + kind / 3 % 4, input_.bytes(1 + kind / 3 % 4));
          break;
        case 1:
          message.insert(at, input_.bytes(kind / 3));
          break;
        case 2:
          message.erase(at, kind / 3);
          break;
      }
    }
    return message;
  }

  void say(size_t stream, const std::string& message) {
    const Segments segments = fuzz::segments_of(message, chunk_);
    wire::Welcome welcome;
    bool is_welcome = false;
    try {
      const auto [kind, body] = wire::open(segments);
      is_welcome = kind == wire::Kind::kWelcome;
      if (is_welcome) welcome = wire::decode_welcome(segments, body);
    } catch (const wire::DecodeError&) {
      is_welcome = false;
    }
    if (is_welcome && step_bytes(welcome) > kMaxStepBytes) return;
    const int64_t connects = pool_->stats().connects;
    transport_->with(stream, [&](Link& link) {
      if (is_welcome) {
        link.announced = message;
        link.welcome = welcome;
      }
      link.events->on_message(segments);
    });
    // After the first Welcome, the pool accepts no other.
    if (is_welcome && pool_->stats().connects > connects) welcome_ = message;
  }

  static double step_bytes(const wire::Welcome& welcome) {
    double total = 0;
    for (const wire::ArraySpec& spec : welcome.step_arrays) {
      total += static_cast<double>(spec.nbytes) * welcome.num_envs;
    }
    return total;
  }

  // The correct next message of the server. Observations are zeros.
  std::string next_step(size_t stream) {
    std::string message;
    transport_->with(stream, [&](Link& link) {
      const bool is_short = options_ & 8 && !link.whole;
      message = fake::fixed64(1, link.next_seq);
      for (const wire::ArraySpec& spec : link.welcome.step_arrays) {
        const size_t size =
            is_short && spec.stack ? spec.frame_nbytes() : spec.nbytes;
        message +=
            fake::bytes(2, std::string(size * link.welcome.num_envs, '\0'));
      }
      if (is_short) message += fake::number(3, 1);
    });
    return fake::bytes(2, message);
  }

  void say_step(size_t stream) {
    const auto state = pool_->stats().states[stream];
    if (state == StreamState::kGreeting) say(stream, welcome_);
    say(stream, next_step(stream));
  }

  // The agent answers one batch, if there is one, with zeros.
  void answer() {
    if (batcher_->size() == 0) return;
    const auto batch = batcher_->get_batch();
    if (!batch) return;
    const int64_t rows = batch->inputs().leaves.at(0).shape.at(1);
    const Segments segments = fuzz::segments_of(welcome_, welcome_.size());
    const auto welcome =
        wire::decode_welcome(segments, wire::open(segments).body);
    const wire::Layout actions = wire::layout(welcome.action_arrays);
    Nest outputs;
    outputs.structure =
        Structure::tuple({Structure::dict({{"action", actions.structure}}),
                          Structure::tuple({})});
    for (const size_t i : actions.arrays) {
      const wire::ArraySpec& spec = welcome.action_arrays[i];
      Shape shape = {1, rows};
      shape.insert(shape.end(), spec.shape.begin(), spec.shape.end());
      outputs.leaves.push_back(buffers_->allocate(spec.dtype, shape));
      Array& array = outputs.leaves.back();
      std::fill_n(array.data, array.nbytes(), '\0');
    }
    batch->set_outputs(std::move(outputs));
  }

  void learn() {
    if (queue_->size() >= queue_->options().minimum_batch_size) {
      queue_->dequeue_many();
    }
  }

  // Waits until the pool's thread is idle.
  void settle() {
    while (!has_ended()) {
      const int64_t num_changes = transport_->num_changes();
      const PoolStats stats = pool_->stats();
      const int64_t others = stats.waiting_for_room - 1;
      bool busy = others >= 0 && queue_->has_room(others * num_envs_);
      bool any_waiting = false;
      int64_t asked = 0;
      for (size_t i = 0; i < num_streams_; ++i) {
        const StreamState state = stats.states[i];
        const bool is_open = transport_->is_open(i);
        if (state == StreamState::kWaitingToConnect) {
          any_waiting = true;
        } else if (state == StreamState::kWaitingForInference) {
          asked += num_envs_;
        } else {  // If the stream is not open, run() is about to return.
          busy |= !is_open || state == StreamState::kConnecting ||
                  state == StreamState::kReceiving;
        }
      }
      busy |= asked > batcher_->size();  // A stream is about to ask the agent.
      if (!busy && !any_waiting) return;
      transport_->wait(num_changes);
    }
  }

  void check() {
    const PoolStats stats = pool_->stats();
    REQUIRE(is_balanced(stats),
            std::to_string(stats.received) + " received, " +
                std::to_string(stats.dequeued) + " dequeued, " +
                std::to_string(stats.discarded) + " discarded, " +
                std::to_string(stats.in_flight) + " in flight");
    for (const std::string& line : pool_->take_events()) {
      fuzz::require_printable(line);
    }
  }

  // Ends all streams and answers all batches. Then one stream fills every free
  // lane, so no batch may stay half full.
  void recover() {
    const auto end_all = [this] {
      for (int round = 0; round < 2; ++round) {
        for (size_t i = 0; i < num_streams_; ++i) {
          transport_->close(i, "lost", true);
        }
        while (batcher_->size() > 0) answer();
        settle();
      }
    };
    end_all();
    const PoolStats before = pool_->stats();
    if (has_ended() || before.connects == 0) return;
    // A batch has at most 6 rollouts.
    int64_t left = 7 * unroll_length_ * (before.slabs_open + 1);
    const auto is_good = [&] {
      const PoolStats stats = pool_->stats();
      return stats.dequeued > before.dequeued && stats.slabs_open <= 1;
    };
    for (; !is_good() && !has_ended(); --left) {
      REQUIRE(left > 0, std::to_string(pool_->stats().slabs_open));
      say_step(0);
      while (queue_->size() > 0) learn();
      settle();
      answer();
      if (pool_->stats().states[0] == StreamState::kClosing) {
        transport_->close(0, "lost", true);  // The pool may connect again.
        settle();
        REQUIRE(has_ended(), pool_->take_events().back());
      }
    }
    if (has_ended()) return;
    end_all();
    check();
  }

  fuzz::Input input_;
  const int64_t num_envs_;
  const int64_t unroll_length_;
  const size_t num_streams_;
  const size_t chunk_;
  const uint8_t options_;
  std::string welcome_;  // The Welcome that the pool accepts.
  std::shared_ptr<BatchingQueue> queue_;
  std::shared_ptr<DynamicBatcher> batcher_;
  std::unique_ptr<ActorPool> pool_;
  EvilTransport* transport_;  // Owned by the pool.
  const std::shared_ptr<BufferPool> buffers_ = BufferPool::create();
  std::atomic<bool> ended_{false};
};

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  // K, T, streams, bytes per part, options; then some steps on stream 0.
  fuzz::write_seeds(
      *argc, *argv,
      {std::string("\0\1\0\6\2\0\4\17\14\4\17", 11),
       std::string("\1\2\2\377\3\0\20\40\4\7\24\7\44\7\35\24\7", 17)});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Game(fuzz::Input(data, size)).play();
  return 0;
}
