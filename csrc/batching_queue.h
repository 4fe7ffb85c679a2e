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

// FIFO of nests between actor threads (enqueue) and learner threads
// (dequeue_many), which get them joined into batches. Thread-safe.
//   enqueue       waits while `maximum_queue_size` rows or more are queued.
//   enqueue_now   does not wait. For callers that have asked has_room().
//   dequeue_many  waits for `minimum_batch_size` rows. With `timeout_ms` it
//                 waits no longer than until the oldest item has been queued
//                 for this time (0: until there is an item). Takes whole items,
//                 in order, up to `maximum_batch_size` rows. So a batch is
//                 smaller than the minimum only after a timeout, or if the next
//                 item would exceed the maximum.
//   close         wakes every waiter and drops the queued items. A second call
//                 throws std::runtime_error.
//   fail          closes the queue if it is open. From then on size() throws
//                 `why`, and close() does nothing.
// After close(), enqueue throws QueueClosed and dequeue_many returns nothing.
// Sizes are numbers of rows: entries along `batch_dim`. An item may have
// several rows and is never split.
//
// A batch of one item is that item; it is not copied. Several items are joined
// along `batch_dim` into memory of `buffers`, in the thread that dequeues and
// with no lock held. So several threads can form batches at the same time.
//
// enqueue throws std::invalid_argument, naming the leaf, for an item without
// leaves, without rows, with too few dimensions, or with more than
// `maximum_batch_size` rows. With `check_inputs` it also throws if leaves
// differ in rows, or if the item and the queued ones differ in structure,
// dtypes or other axes. Without `check_inputs`, dequeue_many throws for such a
// batch and drops it.
//
// Rows enqueued == size() + dequeued() + dropped(), at any moment. Callers that
// wait must share the ownership of the queue.
class BatchingQueue {
 public:
  using Counts = RowQueue<std::monostate>::Counts;

  // Throws std::invalid_argument for bad options, such as a
  // `maximum_queue_size` below `maximum_batch_size`.
  explicit BatchingQueue(
      const QueueOptions& options,
      std::shared_ptr<BufferPool> buffers = BufferPool::create())
      : buffers_(std::move(buffers)), queue_(options) {}

  void enqueue(Nest item) { queue_.push(std::move(item), {}, /*wait=*/true); }

  void enqueue_now(Nest item) {
    queue_.push(std::move(item), {}, /*wait=*/false);
  }

  // Whether enqueue would not wait if the queue had `uncounted` rows fewer.
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
    const auto dropped = queue_.close(std::move(why));
    changed_.call();
  }

  bool is_closed() const { return queue_.is_closed(); }
  int64_t size() const { return queue_.size(); }
  // Rows that no learner has received: they were queued at close(), or
  // dequeue_many threw.
  int64_t dropped() const { return queue_.counts().dropped; }
  // Rows that dequeue_many has returned. Counted as soon as it takes them from
  // the queue.
  int64_t dequeued() const { return queue_.counts().taken; }
  Counts counts() const { return queue_.counts(); }  // All of one moment.
  // How many threads wait in enqueue or dequeue_many.
  int64_t num_waiting() const { return queue_.num_waiting(); }

  // Calls `fn` whenever dequeue_many has taken items and after close(), in the
  // thread of that call, with no lock held. If the queue is closed, calls `fn`
  // at once. May call `fn` more often than needed. `fn` must not throw, and
  // cannot be removed.
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
