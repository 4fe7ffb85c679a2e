// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <list>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "clock.h"
#include "errors.h"
#include "interrupt.h"
#include "nest.h"
#include "rows.h"

namespace torchbeast {

// Options of a BatchingQueue, which explains them. Sizes are numbers of rows:
// entries along `batch_dim`.
struct QueueOptions {
  int64_t batch_dim = 1;
  int64_t minimum_batch_size = 1;
  int64_t maximum_batch_size = 1024;
  std::optional<int64_t> timeout_ms = std::nullopt;
  bool check_inputs = true;
  std::optional<int64_t> maximum_queue_size = std::nullopt;
};

// The FIFO inside BatchingQueue and DynamicBatcher. An item is a nest with a
// payload. Items leave the queue in batches. Thread-safe.
//   push   adds an item. With `wait`, waits until there is room.
//   take   waits for a batch, as BatchingQueue::dequeue_many does. Returns no
//          items after close().
//   close  wakes every waiter and returns the queued items. A second call
//          throws std::runtime_error. With `why`, closes the queue if it is
//          open; from then on size() throws `why`, and close() does nothing.
// No item is destroyed with the lock held: its memory may belong to Python
// objects, and to release these needs the GIL.
template <typename Payload>
class RowQueue {
 public:
  struct Item {
    Nest nest;
    int64_t rows = 0;
    Payload payload;
    Clock::time_point arrived;
  };
  using Items = std::list<Item>;

  struct Counts {
    int64_t queued = 0;   // Rows in the queue.
    int64_t taken = 0;    // Rows.
    int64_t dropped = 0;  // Rows.
    int64_t batches = 0;  // Taken.
  };

  explicit RowQueue(const QueueOptions& options);
  RowQueue(const RowQueue&) = delete;
  RowQueue& operator=(const RowQueue&) = delete;

  // Throws std::invalid_argument for a nest that does not fit, and QueueClosed
  // after close().
  void push(Nest nest, Payload payload, bool wait);
  Items take();
  Items close(std::exception_ptr why = nullptr);

  // Counts rows as dropped that take() has returned and nobody has received.
  void count_as_dropped(int64_t rows) {
    std::lock_guard lock(mu_);
    counts_.taken -= rows;
    counts_.dropped += rows;
  }

  // Whether push() would not wait if the queue had `uncounted` rows fewer.
  bool has_room(int64_t uncounted) const {
    std::lock_guard lock(mu_);
    return has_room_locked(uncounted);
  }

  bool is_closed() const {
    std::lock_guard lock(mu_);
    return closed_;
  }

  int64_t size() const {
    std::lock_guard lock(mu_);
    if (failure_) std::rethrow_exception(failure_);
    return counts_.queued;
  }

  int64_t num_waiting() const {
    std::lock_guard lock(mu_);
    return num_waiting_;
  }

  Counts counts() const {
    std::lock_guard lock(mu_);
    return counts_;
  }

  const QueueOptions& options() const { return options_; }

 private:
  bool has_room_locked(int64_t uncounted = 0) const {
    return !options_.maximum_queue_size ||
           counts_.queued - uncounted < *options_.maximum_queue_size;
  }

  // When take() stops waiting for the minimum batch size: `timeout_ms` after
  // the arrival of the oldest item.
  std::optional<Clock::time_point> deadline_locked() const {
    if (items_.empty() || !options_.timeout_ms) return std::nullopt;
    return items_.front().arrived + timeout_;
  }

  void wait_locked(std::unique_lock<std::mutex>& lock,
                   std::condition_variable& changed,
                   std::optional<Clock::time_point> deadline = std::nullopt) {
    struct Leave {
      RowQueue* queue;
      ~Leave() { --queue->num_waiting_; }
    };
    ++num_waiting_;
    const Leave leave{this};  // Also runs if the wait throws.
    wait_interruptibly(lock, changed, deadline);
  }

  const QueueOptions options_;
  const std::chrono::milliseconds timeout_;
  mutable std::mutex mu_;
  std::condition_variable
      filled_;                    // take() waits: enough rows, or a first item.
  std::condition_variable room_;  // push() waits for room.
  Items items_;                   // Guarded by mu_.
  int64_t num_waiting_ = 0;       // Guarded by mu_. Threads in wait_locked.
  Counts counts_;                 // Guarded by mu_.
  bool closed_ = false;           // Guarded by mu_.
  std::exception_ptr failure_;    // Guarded by mu_. The argument of close().
};

namespace internal {

inline const QueueOptions& checked(const QueueOptions& options) {
  auto expect = [](bool good, const std::string& message, int64_t got) {
    if (!good) {
      throw std::invalid_argument(message + ", got " + std::to_string(got));
    }
  };
  expect(options.batch_dim >= 0, "Batch dim must be >= 0", options.batch_dim);
  expect(options.minimum_batch_size >= 1, "Min batch size must be >= 1",
         options.minimum_batch_size);
  expect(options.maximum_batch_size >= options.minimum_batch_size,
         "Max batch size must be >= min batch size (" +
             std::to_string(options.minimum_batch_size) + ")",
         options.maximum_batch_size);
  if (options.timeout_ms) {
    expect(*options.timeout_ms >= 0, "Timeout must be >= 0 ms",
           *options.timeout_ms);
  }
  if (options.maximum_queue_size) {
    expect(*options.maximum_queue_size >= options.maximum_batch_size,
           "Max queue size must be >= max batch size (" +
               std::to_string(options.maximum_batch_size) + ")",
           *options.maximum_queue_size);
  }
  return options;
}

}  // namespace internal

template <typename Payload>
RowQueue<Payload>::RowQueue(const QueueOptions& options)
    : options_(internal::checked(options)),
      // At most a year, so that adding it to a time does not overflow.
      timeout_(std::min<int64_t>(options.timeout_ms.value_or(0),
                                 int64_t{365} * 24 * 3600 * 1000)) {}

template <typename Payload>
void RowQueue<Payload>::push(Nest nest, Payload payload, bool wait) {
  const int64_t rows =
      count_rows(nest, options_.batch_dim, options_.check_inputs);
  if (rows > options_.maximum_batch_size) {
    throw std::invalid_argument(leaf_is(nest, 0) + "expected at most " +
                                std::to_string(options_.maximum_batch_size) +
                                " rows (maximum batch size) along " +
                                axis_name(options_.batch_dim) + ", got " +
                                std::to_string(rows));
  }
  Items item;  // A list of one item, to allocate its node without the lock.
  item.push_back({std::move(nest), rows, std::move(payload), {}});
  bool notify = false;
  {
    std::unique_lock lock(mu_);
    while (wait && !closed_ && !has_room_locked()) wait_locked(lock, room_);
    if (closed_) throw QueueClosed("The queue is closed");
    if (options_.check_inputs && !items_.empty()) {
      check_alike(items_.back().nest, item.front().nest, options_.batch_dim);
    }
    if (options_.timeout_ms) item.front().arrived = Clock::now();
    counts_.queued += rows;
    // With a timeout, one thread must wake for the first item to wait for its
    // deadline.
    notify = counts_.queued >= options_.minimum_batch_size ||
             (options_.timeout_ms && items_.empty());
    items_.splice(items_.end(), item);
  }
  if (notify) filled_.notify_one();
}

template <typename Payload>
auto RowQueue<Payload>::take() -> Items {
  Items batch;
  bool room = false;
  bool more = false;
  {
    std::unique_lock lock(mu_);
    while (!closed_ && counts_.queued < options_.minimum_batch_size) {
      const auto deadline = deadline_locked();
      if (deadline && Clock::now() >= *deadline) break;
      wait_locked(lock, filled_, deadline);
    }
    if (closed_) return {};
    const bool had_room = has_room_locked();
    int64_t rows = 0;
    auto end = items_.begin();
    while (end != items_.end() &&
           rows + end->rows <= options_.maximum_batch_size) {
      rows += end->rows;
      ++end;
    }
    batch.splice(batch.end(), items_, items_.begin(), end);
    counts_.queued -= rows;
    counts_.taken += rows;
    ++counts_.batches;
    room = !had_room && has_room_locked();
    // Another thread must take the items that are left, or wait for their
    // deadline.
    more = counts_.queued >= options_.minimum_batch_size ||
           (options_.timeout_ms && !items_.empty());
  }
  // All: how many of the waiting items fit depends on their rows.
  if (room) room_.notify_all();
  if (more) filled_.notify_one();
  return batch;
}

template <typename Payload>
auto RowQueue<Payload>::close(std::exception_ptr why) -> Items {
  Items dropped;
  {
    std::lock_guard lock(mu_);
    if (closed_ && (why || failure_)) return {};
    if (closed_) {
      throw std::runtime_error("Queue was closed already; call close() once");
    }
    closed_ = true;
    failure_ = std::move(why);
    counts_.dropped += counts_.queued;
    counts_.queued = 0;
    dropped.swap(items_);
  }
  filled_.notify_all();
  room_.notify_all();
  return dropped;
}

}  // namespace torchbeast
