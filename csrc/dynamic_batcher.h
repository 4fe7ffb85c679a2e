// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "buffer_pool.h"
#include "errors.h"
#include "interrupt.h"
#include "listeners.h"
#include "nest.h"
#include "row_queue.h"
#include "rows.h"

namespace torchbeast {

// Sizes are numbers of rows: entries along `batch_dim`. The options of the same
// name in QueueOptions mean the same.
struct BatcherOptions {
  int64_t batch_dim = 1;
  int64_t minimum_batch_size = 1;
  int64_t maximum_batch_size = 1024;
  std::optional<int64_t> timeout_ms = 100;
  // Whether outputs must have exactly as many rows as their batch. If not, they
  // may have more, and the rows at the end are ignored: for models that pad.
  bool check_outputs = true;
};

// The rows of a batch's outputs that answer one compute(). Valid only inside
// the call of Done.
struct Outputs {
  const Nest& batch;
  int64_t begin = 0;  // First row.
  int64_t rows = 0;
  int64_t batch_dim = 1;

  // Copies the rows to memory of `buffers`.
  Nest copy(BufferPool& buffers) const;
};

namespace internal {

// Exactly one argument is not null. Must not throw.
using Done =
    std::function<void(const Outputs* outputs, std::exception_ptr error)>;

struct Request {
  Done done;
  int64_t rows;
};

// The requests of batches that were handed out and not answered yet. Shared by
// a batcher and its batches, which may outlive the batcher.
struct InFlight {
  using Batches = std::list<std::vector<Request>>;

  std::mutex mu;
  bool closed = false;                    // Guarded by mu.
  Batches batches;                        // Guarded by mu.
  std::atomic<int64_t> num_computing{0};  // Threads in compute().
};

inline void fail_all(const std::vector<Request>& requests,
                     const std::exception_ptr& error) {
  for (const Request& request : requests) request.done(nullptr, error);
}

}  // namespace internal

// The joined inputs of several compute() calls, which are answered together.
// Thread-safe.
//   inputs       returns the joined inputs. They are a copy that only this
//                batch uses, so a model may write to them.
//   set_outputs  answers each compute with its own rows, in the calling thread.
//                The outputs may have any structure; every leaf must have the
//                batch's number of rows along `batch_dim`. If not, it throws
//                std::invalid_argument, naming the leaf, and can be called
//                again. After it succeeded, it throws std::runtime_error. After
//                the batcher was closed, it does nothing: close() has answered
//                the computes with QueueClosed.
// If the batch is destroyed without outputs, each of its computes throws
// AsyncError.
class Batch {
  struct Private {};

 public:
  Batch(Private, std::shared_ptr<internal::InFlight> in_flight,
        const BatcherOptions& options, int64_t rows)
      : in_flight_(std::move(in_flight)), options_(options), rows_(rows) {}
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  const Nest& inputs() const { return inputs_; }
  void set_outputs(Nest outputs);

 private:
  friend class DynamicBatcher;
  using InFlight = internal::InFlight;

  // Whether computes wait for the outputs. Throws if outputs have been set.
  bool is_awaited_locked() const {
    if (!entry_) {
      throw std::runtime_error(
          "set_outputs called twice: this batch has been answered");
    }
    return !in_flight_->closed;
  }

  void check(const Nest& outputs) const;

  const std::shared_ptr<InFlight> in_flight_;
  const BatcherOptions options_;
  const int64_t rows_;
  Nest inputs_;  // Set before get_batch returns the batch.
  // Guarded by in_flight_->mu. The place of the requests; none once answered.
  std::optional<InFlight::Batches::iterator> entry_;
};

// Joins the inputs of many callers (compute) into batches for a few inference
// threads (get_batch), and returns to each caller its rows of the outputs.
// Thread-safe.
//   compute        waits for the answer or for close(), without a time limit.
//   compute_async  does not wait. Calls `done` exactly once, with no lock held,
//                  in the thread that sets the outputs, drops the batch, or
//                  closes the batcher. `done` must not throw.
//   get_batch      waits for a batch, as BatchingQueue::dequeue_many does.
//                  Returns nullptr after close().
//   close          wakes every waiter. Each compute without an answer throws
//                  QueueClosed. A second call throws std::runtime_error.
//   fail           closes the batcher, as BatchingQueue::fail does.
// compute and compute_async throw std::invalid_argument, naming the leaf, for
// the same inputs as BatchingQueue::enqueue with `check_inputs`, and
// QueueClosed after close(). In both cases `done` is not called.
//
// Batches may be answered in any order, and may outlive the batcher. Callers
// that wait must share its ownership.
class DynamicBatcher {
 public:
  using Done = internal::Done;

  // Throws std::invalid_argument for bad options.
  explicit DynamicBatcher(
      const BatcherOptions& options,
      std::shared_ptr<BufferPool> buffers = BufferPool::create());

  Nest compute(Nest inputs);  // The answer is a copy in memory of `buffers`.
  void compute_async(Nest inputs, Done done);
  std::shared_ptr<Batch> get_batch();
  void close() { close_with(queue_.close()); }
  void fail(std::exception_ptr why) {
    close_with(queue_.close(std::move(why)));
  }

  bool is_closed() const { return queue_.is_closed(); }
  int64_t size() const { return queue_.size(); }  // Rows queued.
  // How many threads wait in compute or get_batch.
  int64_t num_waiting() const {
    return queue_.num_waiting() + in_flight_->num_computing;
  }
  // How many batches get_batch has returned, and how many rows they had.
  int64_t num_batches() const { return queue_.counts().batches; }
  int64_t num_rows() const { return queue_.counts().taken; }

  // Calls `fn` after close(), in the thread of close(), with no lock held. If
  // the batcher is closed, calls `fn` at once. May call `fn` twice. `fn` must
  // not throw.
  void on_close(std::function<void()> fn) {
    closed_.add(fn);
    if (is_closed()) fn();
  }

  const BatcherOptions& options() const { return options_; }

 private:
  static std::exception_ptr closed_error() {
    return std::make_exception_ptr(
        QueueClosed("The batcher was closed before it answered"));
  }

  void close_with(RowQueue<Done>::Items queued);

  const BatcherOptions options_;
  const std::shared_ptr<BufferPool> buffers_;
  const std::shared_ptr<internal::InFlight> in_flight_;
  Listeners closed_;
  RowQueue<Done> queue_;
};

inline Nest Outputs::copy(BufferPool& buffers) const {
  Nest nest{batch.structure, {}};
  nest.leaves.reserve(batch.leaves.size());
  for (const Array& array : batch.leaves) {
    Shape shape = array.shape;
    shape[batch_dim] = rows;
    nest.leaves.push_back(buffers.allocate(array.dtype, std::move(shape)));
    const RowLayout from(array, batch_dim);
    const size_t nbytes = from.row * rows;
    copy_runs(nest.leaves.back().data, nbytes, array.data + from.row * begin,
              from.stride, from.outer, nbytes);
  }
  return nest;
}

inline void Batch::check(const Nest& outputs) const {
  const int64_t batch_dim = options_.batch_dim;
  if (outputs.leaves.empty()) {
    throw std::invalid_argument(
        "Cannot set empty nest " + describe(*outputs.structure) +
        " as outputs: expected at least one array, with " +
        std::to_string(rows_) + " rows along " + axis_name(batch_dim));
  }
  for (size_t i = 0; i < outputs.leaves.size(); ++i) {
    check_rank(outputs, i, batch_dim);
    const int64_t rows = outputs.leaves[i].shape[batch_dim];
    if (options_.check_outputs ? rows != rows_ : rows < rows_) {
      throw std::invalid_argument(
          leaf_is(outputs, i) + "expected " + std::to_string(rows_) +
          " rows, the batch size, along " + axis_name(batch_dim) + ", got " +
          std::to_string(rows));
    }
  }
}

inline void Batch::set_outputs(Nest outputs) {
  {
    std::lock_guard lock(in_flight_->mu);
    if (!is_awaited_locked()) return;
  }
  check(outputs);
  InFlight::Batches answered;
  {
    std::lock_guard lock(in_flight_->mu);
    if (!is_awaited_locked()) return;
    answered.splice(answered.end(), in_flight_->batches, *entry_);
    entry_.reset();
  }
  Outputs part{outputs, 0, 0, options_.batch_dim};
  for (const internal::Request& request : answered.front()) {
    part.rows = request.rows;
    request.done(&part, nullptr);
    part.begin += request.rows;
  }
}

inline Batch::~Batch() {
  InFlight::Batches dropped;
  {
    std::lock_guard lock(in_flight_->mu);
    if (in_flight_->closed || !entry_) return;
    dropped.splice(dropped.end(), in_flight_->batches, *entry_);
  }
  internal::fail_all(dropped.front(),
                     std::make_exception_ptr(AsyncError(
                         "A batch of " + std::to_string(rows_) +
                         " rows was dropped without set_outputs: did the "
                         "inference thread fail?")));
}

inline DynamicBatcher::DynamicBatcher(const BatcherOptions& options,
                                      std::shared_ptr<BufferPool> buffers)
    : options_(options),
      buffers_(std::move(buffers)),
      in_flight_(std::make_shared<internal::InFlight>()),
      queue_({.batch_dim = options.batch_dim,
              .minimum_batch_size = options.minimum_batch_size,
              .maximum_batch_size = options.maximum_batch_size,
              .timeout_ms = options.timeout_ms,
              .check_inputs = true,
              .maximum_queue_size = std::nullopt}) {}

inline void DynamicBatcher::compute_async(Nest inputs, Done done) {
  queue_.push(std::move(inputs), std::move(done), /*wait=*/false);
}

inline Nest DynamicBatcher::compute(Nest inputs) {
  auto answer = std::make_shared<std::promise<Nest>>();
  auto future = answer->get_future();
  compute_async(std::move(inputs),
                [answer, buffers = buffers_](const Outputs* outputs,
                                             std::exception_ptr error) {
                  if (error) return answer->set_exception(error);
                  try {
                    answer->set_value(outputs->copy(*buffers));
                  } catch (...) {  // No memory.
                    answer->set_exception(std::current_exception());
                  }
                });
  struct Leave {
    std::atomic<int64_t>& num_computing;
    ~Leave() { --num_computing; }
  };
  ++in_flight_->num_computing;
  const Leave leave{in_flight_->num_computing};
  wait_interruptibly(future);
  return future.get();
}

inline std::shared_ptr<Batch> DynamicBatcher::get_batch() {
  auto items = queue_.take();
  if (items.empty()) return nullptr;
  std::vector<const Nest*> nests;
  std::vector<internal::Request> requests;
  int64_t rows = 0;
  for (auto& item : items) {
    nests.push_back(&item.nest);
    requests.push_back({std::move(item.payload), item.rows});
    rows += item.rows;
  }
  auto batch =
      std::make_shared<Batch>(Batch::Private(), in_flight_, options_, rows);
  internal::InFlight::Batches entry;
  entry.push_back(std::move(requests));
  {
    std::lock_guard lock(in_flight_->mu);
    if (!in_flight_->closed) {
      batch->entry_ = entry.begin();
      in_flight_->batches.splice(in_flight_->batches.end(), entry);
    }
  }
  if (!entry.empty()) {  // Closed since take().
    internal::fail_all(entry.front(), closed_error());
    return nullptr;
  }
  // If there is no memory, this throws. The batch is then dropped, and its
  // computes throw AsyncError.
  batch->inputs_ = concatenate(nests, options_.batch_dim, *buffers_);
  return batch;
}

inline void DynamicBatcher::close_with(RowQueue<Done>::Items queued) {
  internal::InFlight::Batches handed_out;
  {
    std::lock_guard lock(in_flight_->mu);
    in_flight_->closed = true;
    handed_out.swap(in_flight_->batches);
  }
  const auto error = closed_error();
  for (const auto& requests : handed_out) internal::fail_all(requests, error);
  for (const auto& item : queued) item.payload(nullptr, error);
  closed_.call();
}

}  // namespace torchbeast
