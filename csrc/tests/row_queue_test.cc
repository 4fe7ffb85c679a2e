// SPDX-License-Identifier: Apache-2.0
//
// Waiting, waking and closing of RowQueue, by the BatchingQueue that uses it.

#include "row_queue.h"

#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "batching_queue.h"
#include "nests.h"
#include "testing.h"

using namespace torchbeast;
using testing::background;
using testing::wait_until;

using Values = std::vector<int64_t>;

// Time-outs.

TEST(a_timeout_ends_the_wait_for_the_minimum) {
  const auto start = std::chrono::steady_clock::now();
  BatchingQueue queue({.minimum_batch_size = 3, .timeout_ms = 20});
  queue.enqueue(row_nest({1}));
  queue.enqueue(row_nest({2}));
  CHECK((dequeue_values(queue) == Values{1, 2}));
  CHECK(std::chrono::steady_clock::now() - start >=
        std::chrono::milliseconds(20));
}

TEST(a_timeout_of_zero_waits_for_the_first_item_only) {
  BatchingQueue queue({.minimum_batch_size = 3, .timeout_ms = 0});
  auto batch = background([&] { return dequeue_values(queue); });
  wait_until([&] { return queue.num_waiting() == 1; });
  queue.enqueue(row_nest({1}));
  CHECK((batch.get() == Values{1}));
}

TEST(a_timeout_counts_from_the_arrival_of_the_oldest_item) {
  BatchingQueue queue({.minimum_batch_size = 3, .timeout_ms = 20});
  auto consumer = background([&] {
    const Values values = dequeue_values(queue);
    return std::pair(values, std::chrono::steady_clock::now());
  });
  wait_until([&] { return queue.num_waiting() == 1; });
  // The consumer waits already; the timeout counts from this item.
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  const auto arrival = std::chrono::steady_clock::now();
  queue.enqueue(row_nest({1}));
  const auto [values, end] = consumer.get();
  CHECK((values == Values{1}));
  CHECK(end - arrival >= std::chrono::milliseconds(20));
}

TEST(a_full_batch_does_not_wait_for_the_timeout) {
  // A timeout of a year: the watchdog would end the test before.
  BatchingQueue queue({.minimum_batch_size = 2,
                       .timeout_ms = std::numeric_limits<int64_t>::max()});
  auto consumer = background([&] { return dequeue_values(queue); });
  wait_until([&] { return queue.num_waiting() == 1; });
  queue.enqueue(row_nest({1}));
  queue.enqueue(row_nest({2}));
  CHECK((consumer.get() == Values{1, 2}));
}

TEST(somebody_watches_the_time_for_every_item) {
  // Several consumers, and batches that leave items in the queue. Each item
  // must leave the queue.
  BatchingQueue queue(
      {.minimum_batch_size = 5, .maximum_batch_size = 6, .timeout_ms = 5});
  std::vector<std::future<Values>> consumers;
  for (int i = 0; i < 3; ++i) {
    consumers.push_back(background([&] {
      Values values;
      while (auto batch = queue.dequeue_many()) {
        for (int64_t value : values_of(*batch)) values.push_back(value);
      }
      return values;
    }));
  }
  Values expected;
  for (int64_t i = 0; i < 50; ++i) {
    for (int64_t j = 0; j < 4; ++j) expected.push_back(10 * i + j);
    queue.enqueue(row_nest({10 * i, 10 * i + 1}));
    queue.enqueue(row_nest({10 * i + 2, 10 * i + 3}));
    if (i % 5 == 0) wait_until([&] { return queue.size() == 0; });
  }
  wait_until([&] { return queue.size() == 0; });
  queue.close();
  Values got;
  for (auto& consumer : consumers) {
    for (int64_t value : consumer.get()) got.push_back(value);
  }
  std::ranges::sort(got);
  CHECK(got == expected);
}

TEST(who_takes_a_batch_wakes_another_for_the_rest) {
  BatchingQueue queue({.minimum_batch_size = 3, .maximum_batch_size = 4});
  auto first = background([&] { return dequeue_values(queue).size(); });
  auto second = background([&] { return dequeue_values(queue).size(); });
  wait_until([&] { return queue.num_waiting() == 2; });
  queue.enqueue(row_nest({1, 2}));  // Fewer than the minimum.
  queue.enqueue(
      row_nest({3, 4, 5}));  // Wakes one consumer, which takes the first item.
  CHECK_EQ(first.get() + second.get(), 5u);
}

// A full queue.

TEST(enqueue_waits_while_the_queue_is_full) {
  BatchingQueue queue({.maximum_batch_size = 1, .maximum_queue_size = 1});
  CHECK(queue.has_room());
  queue.enqueue(row_nest({1}));
  CHECK(!queue.has_room());
  auto producer = background([&] { queue.enqueue(row_nest({2})); });
  wait_until([&] { return queue.num_waiting() == 1; });
  CHECK_EQ(queue.size(), 1);
  CHECK((dequeue_values(queue) == Values{1}));
  producer.get();
  CHECK((dequeue_values(queue) == Values{2}));
}

TEST(enqueue_now_does_not_wait) {
  BatchingQueue queue({.maximum_batch_size = 2, .maximum_queue_size = 2});
  queue.enqueue(row_nest({1, 2}));
  queue.enqueue_now(row_nest({3}));
  CHECK_EQ(queue.size(), 3);
}

TEST(room_for_several_wakes_several) {
  BatchingQueue queue({.maximum_batch_size = 3, .maximum_queue_size = 3});
  queue.enqueue(row_nest({1, 2, 3}));
  std::vector<std::future<void>> producers;
  for (int64_t i = 0; i < 3; ++i) {
    producers.push_back(background([&, i] { queue.enqueue(row_nest({i})); }));
  }
  wait_until([&] { return queue.num_waiting() == 3; });
  CHECK_EQ(dequeue_values(queue).size(), 3u);
  for (auto& producer : producers) producer.get();
  CHECK_EQ(queue.size(), 3);
}

TEST(a_bad_item_that_had_to_wait_does_not_cost_others_their_turn) {
  BatchingQueue queue({.maximum_batch_size = 1, .maximum_queue_size = 1});
  queue.enqueue(row_nest({1}));
  queue.enqueue_now(row_nest({2}));
  auto bad =
      background([&] { queue.enqueue(nest_of(array_of({2, 1}, {0, 1}))); });
  auto good = background([&] { queue.enqueue(row_nest({3})); });
  wait_until([&] { return queue.num_waiting() == 2; });
  CHECK((dequeue_values(queue) == Values{1}));
  CHECK((dequeue_values(queue) == Values{2}));
  // Either item may have come first, and an empty queue accepts both.
  auto rest = background([&] {
    int64_t sum = 0;
    while (auto batch = queue.dequeue_many()) sum += values_of(*batch)[0];
    return sum;
  });
  good.get();
  try {
    bad.get();
  } catch (const std::invalid_argument&) {
  }
  wait_until([&] { return queue.size() == 0; });
  queue.close();
  CHECK_EQ(rest.get(), 3);
}

TEST(listeners_hear_of_room_and_of_closing) {
  BatchingQueue queue({.maximum_batch_size = 1, .maximum_queue_size = 1});
  int rooms = 0;
  int closings = 0;
  queue.on_change([&] {
    ++(queue.is_closed() ? closings : rooms);  // No lock is held.
  });
  queue.enqueue(row_nest({1}));
  CHECK_EQ(rooms, 0);
  dequeue_values(queue);
  CHECK_EQ(rooms, 1);
  queue.close();
  CHECK_EQ(closings, 1);
  queue.on_change([&] { closings += 10; });
  CHECK_EQ(closings, 11);
}

// Ctrl-C.

TEST(interrupted_waits_end_alone) {
  BatchingQueue queue({.maximum_batch_size = 1, .maximum_queue_size = 1});
  auto consume = [&] { return dequeue_values(queue); };
  auto produce = [&] { queue.enqueue(row_nest({1})); };
  auto interrupted = [](auto fn) {
    return background([fn] {
      interrupt_check = [] { throw std::runtime_error("interrupted"); };
      fn();
    });
  };
  auto consumer = background(consume);
  auto interrupted_consumer = interrupted(consume);
  CHECK_THROWS(std::runtime_error, "interrupted", interrupted_consumer.get());
  wait_until([&] { return queue.num_waiting() == 1; });
  produce();
  CHECK((consumer.get() == Values{1}));
  produce();
  auto producer = background(produce);
  auto interrupted_producer = interrupted(produce);
  CHECK_THROWS(std::runtime_error, "interrupted", interrupted_producer.get());
  wait_until([&] { return queue.num_waiting() == 1; });
  CHECK((consume() == Values{1}));
  producer.get();
  CHECK((consume() == Values{1}));
}

TEST(an_interrupted_consumer_hands_on_what_it_was_woken_for) {
  // One of two consumers is interrupted while items come. Each item must leave
  // the queue.
  BatchingQueue queue({.maximum_batch_size = 1});
  for (int round = 0; round < 5; ++round) {
    auto interrupted = background([&] {
      interrupt_check = [] { throw std::runtime_error("interrupted"); };
      interrupt_check_due = Clock::now() + kInterruptInterval;
      try {
        while (queue.dequeue_many()) {
        }
      } catch (const std::runtime_error&) {
      }
    });
    auto consumer = background([&] { dequeue_values(queue); });
    while (interrupted.wait_for(std::chrono::milliseconds(1)) !=
           std::future_status::ready) {
      if (queue.num_waiting() < 2) continue;
      queue.enqueue(row_nest({1}));
    }
    queue.enqueue(row_nest({1}));
    consumer.get();
  }
}

// Closing.

TEST(closing_before_each_call_refuses_it) {
  BatchingQueue queue({});
  queue.close();
  CHECK(queue.is_closed());
  CHECK_THROWS(QueueClosed, "closed", queue.enqueue(row_nest({1})));
  CHECK_THROWS(QueueClosed, "closed", queue.enqueue_now(row_nest({1})));
  CHECK(!queue.dequeue_many());
}

TEST(closing_twice_is_an_error) {
  BatchingQueue queue({});
  queue.close();
  CHECK_THROWS(std::runtime_error, "Queue was closed already", queue.close());
}

TEST(close_wakes_waiting_consumers) {
  BatchingQueue queue({.minimum_batch_size = 2});
  std::vector<std::future<bool>> consumers;
  for (int i = 0; i < 3; ++i) {
    consumers.push_back(
        background([&] { return queue.dequeue_many().has_value(); }));
  }
  wait_until([&] { return queue.num_waiting() == 3; });
  queue.enqueue(row_nest({1}));
  queue.close();
  for (auto& consumer : consumers) CHECK(!consumer.get());
  CHECK_EQ(queue.num_waiting(), 0);
}

TEST(close_wakes_consumers_that_wait_for_a_timeout) {
  BatchingQueue queue({.minimum_batch_size = 2, .timeout_ms = 1000000});
  queue.enqueue(row_nest({1}));
  auto consumer = background([&] { return queue.dequeue_many().has_value(); });
  wait_until([&] { return queue.num_waiting() == 1; });
  queue.close();
  CHECK(!consumer.get());
}

TEST(close_wakes_waiting_producers) {
  BatchingQueue queue({.maximum_batch_size = 1, .maximum_queue_size = 1});
  queue.enqueue(row_nest({1}));
  std::vector<std::future<void>> producers;
  for (int i = 0; i < 3; ++i) {
    producers.push_back(background([&] { queue.enqueue(row_nest({2})); }));
  }
  wait_until([&] { return queue.num_waiting() == 3; });
  queue.close();
  for (auto& producer : producers)
    CHECK_THROWS(QueueClosed, "", producer.get());
}

TEST(a_queue_that_failed_says_why_to_who_asks_for_its_size) {
  const auto why = std::make_exception_ptr(ActorError("no server"));
  BatchingQueue queue({});
  queue.enqueue(row_nest({1}));
  queue.fail(why);
  CHECK_EQ(queue.dropped(), 1);
  CHECK(!queue.dequeue_many());
  CHECK_THROWS(QueueClosed, "closed", queue.enqueue(row_nest({2})));
  CHECK_THROWS(ActorError, "no server", queue.size());
  queue.close();
  CHECK_THROWS(ActorError, "no server", queue.size());
  BatchingQueue closed({});
  closed.close();
  closed.fail(why);
  CHECK_EQ(closed.size(), 0);
}

TEST(close_drops_and_counts_what_is_queued) {
  BatchingQueue queue({});
  Nest item = row_nest({1, 2});
  std::weak_ptr<void> memory = item.leaves[0].owner;
  queue.enqueue(std::move(item));
  queue.enqueue(row_nest({3}));
  queue.close();
  CHECK_EQ(queue.dropped(), 3);
  CHECK_EQ(queue.size(), 0);
  CHECK(memory.expired());
}

TEST(items_are_destroyed_without_the_lock) {
  // The memory may belong to Python objects: the thread that frees it may wait
  // for the GIL.
  BatchingQueue queue({.maximum_batch_size = 1});
  int freed = 0;
  auto item = [&] {
    Nest nest = row_nest({1});
    nest.leaves[0].owner = std::shared_ptr<void>(
        nest.leaves[0].data, [&, owner = nest.leaves[0].owner](void*) {
          queue.size();  // Takes the lock.
          ++freed;
        });
    return nest;
  };
  queue.enqueue(item());
  queue.enqueue(item());
  queue.dequeue_many();
  CHECK_EQ(freed, 1);
  Nest bad = item();
  bad.leaves[0].shape = {1, 1, 1};
  CHECK_THROWS(std::invalid_argument, "", queue.enqueue(std::move(bad)));
  queue.close();
  CHECK_EQ(freed, 3);
  CHECK_THROWS(QueueClosed, "", queue.enqueue(item()));
  CHECK_EQ(freed, 4);
}

// Identity: (producer, sequence) of every item arrives once and in order.

namespace {

void check_identity(QueueOptions options, int num_producers, int num_consumers,
                    int64_t num_items) {
  BatchingQueue queue(options);
  std::vector<std::future<void>> producers;
  for (int64_t id = 0; id < num_producers; ++id) {
    producers.push_back(background([&, id] {
      for (int64_t i = 0; i < num_items; ++i) {
        // [2, rows]: the same values twice, to detect torn rows.
        Values values;
        const int64_t rows = 1 + i % 3;
        for (int64_t k = 0; k < 2 * rows; ++k) values.push_back(1000 * id + i);
        queue.enqueue(nest_of(array_of({2, rows}, std::move(values))));
      }
    }));
  }
  std::vector<std::future<Values>> consumers;
  for (int i = 0; i < num_consumers; ++i) {
    consumers.push_back(background([&] {
      Values seen;
      while (auto batch = queue.dequeue_many()) {
        const Values values = values_of(*batch);
        const size_t rows = values.size() / 2;
        CHECK(static_cast<int64_t>(rows) <= options.maximum_batch_size);
        for (size_t k = 0; k < rows; ++k) {
          CHECK_EQ(values[k], values[rows + k]);
          seen.push_back(values[k]);
        }
      }
      return seen;
    }));
  }
  for (auto& producer : producers) producer.get();
  wait_until([&] { return queue.size() < options.minimum_batch_size; });
  queue.close();
  std::map<int64_t, int64_t> counts;
  int64_t num_rows = 0;
  for (auto& consumer : consumers) {
    std::map<int64_t, int64_t> last;  // By producer.
    for (int64_t value : consumer.get()) {
      ++counts[value];
      ++num_rows;
      CHECK(value % 1000 >= last[value / 1000]);
      last[value / 1000] = value % 1000;
    }
  }
  CHECK_EQ(num_rows, queue.dequeued());
  int64_t missing = 0;
  for (int64_t id = 0; id < num_producers; ++id) {
    for (int64_t i = 0; i < num_items; ++i) {
      const int64_t count = counts[1000 * id + i];
      CHECK(count <= 1 + i % 3);
      missing += 1 + i % 3 - count;
    }
  }
  CHECK_EQ(missing, queue.dropped());
}

}  // namespace

TEST(every_item_arrives_once_and_in_order) {
  check_identity({.maximum_batch_size = 7}, 3, 1, 300);
}

TEST(every_item_arrives_once_at_several_consumers) {
  // Each consumer still sees each producer's items in order.
  check_identity({.minimum_batch_size = 4, .maximum_batch_size = 7}, 3, 3, 300);
}

TEST(every_item_arrives_once_through_a_queue_of_three) {
  check_identity({.maximum_batch_size = 3, .maximum_queue_size = 3}, 3, 2, 200);
}

TEST(every_item_arrives_once_with_timeouts) {
  check_identity({.minimum_batch_size = 5,
                  .maximum_batch_size = 6,
                  .timeout_ms = 1,
                  .maximum_queue_size = 6},
                 3, 3, 200);
}

TEST(closing_at_any_moment_loses_no_row_of_the_count) {
  for (int round = 0; round < 30; ++round) {
    BatchingQueue queue({.minimum_batch_size = 2,
                         .maximum_batch_size = 3,
                         .maximum_queue_size = 3});
    auto producer = background([&] {
      int64_t rows = 0;
      try {
        for (;; ++rows) queue.enqueue(row_nest({rows}));
      } catch (const QueueClosed&) {
      }
      return rows;
    });
    auto consumer = background([&] {
      int64_t rows = 0;
      while (auto batch = queue.dequeue_many())
        rows += values_of(*batch).size();
      return rows;
    });
    wait_until([&] { return queue.dequeued() > 20 * round; });
    queue.close();
    const int64_t enqueued = producer.get();
    CHECK_EQ(queue.dequeued(), consumer.get());
    CHECK_EQ(queue.dequeued() + queue.dropped(), enqueued);
  }
}
