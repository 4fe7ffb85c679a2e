// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "buffer_pool.h"
#include "errors.h"
#include "listeners.h"
#include "nest.h"
#include "row_queue.h"

namespace torchbeast {

// FIFO between actor threads (enqueue) and learner threads (dequeue_many) of
// nests, which leave it joined into batches. Thread-safe.
//   enqueue       waits while `maximum_queue_size` rows or more are queued. The
//                 constructor refuses fewer than `maximum_batch_size`.
//   enqueue_now   never waits: for who asks has_room() first.
//   dequeue_many  waits for `minimum_batch_size` rows; or, with `timeout_ms`,
//                 until the oldest item has been queued for so long (0: until
//                 there is one). Takes
//                 whole items, in order, while `maximum_batch_size` is not
//                 exceeded. So a batch is smaller than the minimum only after
//                 a timeout, or where the next item would be too much.
//   close         wakes every waiter and drops what is queued. Once only:
//                 std::runtime_error.
//   fail          closes, unless it is closed: from then on size() throws
//   `why`,
//                 and close() does nothing.
// After close(), enqueue throws QueueClosed and dequeue_many returns nothing.
// All sizes count rows: entries along `batch_dim`. An item may have several and
// is never split.
//
// A batch of one item is that item, not copied. Others are joined along
// `batch_dim` in memory of `buffers`, in the thread that dequeues, with no lock
// held; so several threads may form batches at once.
//
// enqueue throws std::invalid_argument, naming the leaf, for an item without
// leaves, without rows, with too few dimensions, or with more than
// `maximum_batch_size` rows; with `check_inputs` also for one whose leaves
// differ in rows, or that differs from what is queued in structure, dtypes or
// other axes. Without it, such a batch is lost and dequeue_many throws.
//
// Rows enqueued == size() + dequeued() + dropped(), always. Destroying a queue
// closes it, and lets threads that wait in it leave first.
class BatchingQueue {
 public:
  // Throws std::invalid_argument for options that make no sense.
  explicit BatchingQueue(
      const QueueOptions& options,
      std::shared_ptr<BufferPool> buffers = BufferPool::create())
      : buffers_(std::move(buffers)), queue_(options) {}

  void enqueue(Nest item) { queue_.push(std::move(item), {}, /*wait=*/true); }

  void enqueue_now(Nest item) {
    queue_.push(std::move(item), {}, /*wait=*/false);
  }

  // Whether an item may come, when `uncounted` rows of those here do not count.
  bool has_room(int64_t uncounted = 0) const {
    return queue_.has_room(uncounted);
  }

  std::optional<Nest> dequeue_many() {
    auto items = queue_.take();
    if (items.empty()) return std::nullopt;
    changed_.call();
    if (items.size() == 1) return std::move(items.front().nest);
    std::vector<const Nest*> nests;
    nests.reserve(items.size());
    int64_t rows = 0;
    for (const auto& item : items) {
      nests.push_back(&item.nest);
      rows += item.rows;
    }
    try {
      return concatenate(nests, options().batch_dim, *buffers_);
    } catch (...) {
      queue_.count_as_dropped(rows);
      throw;
    }
  }

  void close() {
    const auto dropped = queue_.close();
    changed_.call();
  }

  void fail(std::exception_ptr why) {
    const auto dropped = queue_.fail(std::move(why));
    changed_.call();
  }

  bool is_closed() const { return queue_.is_closed(); }
  int64_t size() const { return queue_.size(); }
  // Rows that nobody will see: queued at close(), or of a failed dequeue_many.
  int64_t dropped() const { return queue_.counts().dropped; }
  // Rows handed out by dequeue_many, from the moment it takes them.
  int64_t dequeued() const { return queue_.counts().taken; }
  // Threads that wait in enqueue or dequeue_many.
  int64_t num_waiting() const { return queue_.num_waiting(); }

  // Calls `fn` after each dequeue_many took something and after close(), in
  // their threads, with no lock held; also at once, if closed already. May call
  // it more often. It must not throw, and cannot be removed.
  void on_change(std::function<void()> fn) {
    changed_.add(fn);
    if (is_closed()) fn();
  }

  const QueueOptions& options() const { return queue_.options(); }
  const std::shared_ptr<BufferPool>& buffers() const { return buffers_; }

 private:
  const std::shared_ptr<BufferPool> buffers_;
  Listeners changed_;
  RowQueue<std::monostate> queue_;
};

}  // namespace torchbeast
