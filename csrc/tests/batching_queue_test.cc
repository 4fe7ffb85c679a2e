// SPDX-License-Identifier: Apache-2.0

#include "batching_queue.h"

#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "nests.h"
#include "testing.h"

using namespace torchbeast;
using testing::background;
using testing::wait_until;

using Values = std::vector<int64_t>;

namespace {

// An array [shape] with the values start, start + 1, ...
Array counting(Shape shape, int64_t start) {
  int64_t size = 1;
  for (int64_t axis : shape) size *= axis;
  Values values(size);
  std::iota(values.begin(), values.end(), start);
  return array_of(std::move(shape), std::move(values));
}

// The result of joining `arrays`, computed element by element.
Values joined(const std::vector<Array>& arrays, size_t batch_dim) {
  Values result;
  int64_t outer = 1;
  for (size_t axis = 0; axis < batch_dim; ++axis) {
    outer *= arrays[0].shape[axis];
  }
  for (int64_t i = 0; i < outer; ++i) {
    for (const Array& array : arrays) {
      const Values values = values_of(array);
      const size_t part = values.size() / outer;
      for (size_t j = 0; j < part; ++j) result.push_back(values[i * part + j]);
    }
  }
  return result;
}

Nest named(std::map<std::string, Array> arrays) {
  std::map<std::string, Structure::Ptr> children;
  Nest nest;
  for (auto& [key, array] : arrays) {
    children[key] = Structure::leaf();
    nest.leaves.push_back(std::move(array));
  }
  nest.structure = Structure::dict(std::move(children));
  return nest;
}

}  // namespace

// Options.

TEST(bad_options_are_refused) {
  auto make = [](QueueOptions options) { BatchingQueue queue(options); };
  using Error = std::invalid_argument;
  CHECK_THROWS(Error, "Min batch size must be >= 1, got 0",
               make({.minimum_batch_size = 0}));
  CHECK_THROWS(Error, "Max batch size must be >= min batch size (5), got 3",
               make({.minimum_batch_size = 5, .maximum_batch_size = 3}));
  CHECK_THROWS(Error, "Timeout must be >= 0 ms, got -1",
               make({.timeout_ms = -1}));
  CHECK_THROWS(Error, "Max queue size must be >= max batch size (3), got 2",
               make({.maximum_batch_size = 3, .maximum_queue_size = 2}));
  CHECK_THROWS(Error, "Batch dim must be >= 0, got -1",
               make({.batch_dim = -1}));
}

// Batches.

TEST(items_are_joined_in_order) {
  BatchingQueue queue({.minimum_batch_size = 3});
  for (int64_t i = 0; i < 3; ++i) queue.enqueue(row_nest({i}));
  CHECK_EQ(queue.size(), 3);
  const auto batch = queue.dequeue_many();
  CHECK_EQ(batch->leaves[0].describe(), "int64[1,3]");
  CHECK((values_of(*batch) == Values{0, 1, 2}));
  CHECK_EQ(queue.size(), 0);
  CHECK_EQ(queue.dequeued(), 3);
}

TEST(a_batch_has_at_most_the_maximum) {
  BatchingQueue queue({.minimum_batch_size = 2, .maximum_batch_size = 3});
  for (int64_t i = 0; i < 5; ++i) queue.enqueue(row_nest({i}));
  CHECK((dequeue_values(queue) == Values{0, 1, 2}));
  CHECK((dequeue_values(queue) == Values{3, 4}));
}

TEST(a_batch_waits_for_the_minimum) {
  BatchingQueue queue({.minimum_batch_size = 3});
  auto consumer = background([&] { return dequeue_values(queue); });
  wait_until([&] { return queue.num_waiting() == 1; });
  queue.enqueue(row_nest({1}));
  queue.enqueue(row_nest({2}));
  CHECK_EQ(queue.num_waiting(), 1);
  CHECK_EQ(queue.size(), 2);
  queue.enqueue(row_nest({3}));
  CHECK((consumer.get() == Values{1, 2, 3}));
}

TEST(sizes_count_rows) {
  BatchingQueue queue({.minimum_batch_size = 5, .maximum_batch_size = 7});
  queue.enqueue(row_nest({1, 2, 3}));
  CHECK_EQ(queue.size(), 3);
  queue.enqueue(row_nest({4, 5}));
  queue.enqueue(row_nest({6, 7, 8}));
  CHECK_EQ(queue.size(), 8);
  CHECK((dequeue_values(queue) == Values{1, 2, 3, 4, 5}));
  CHECK_EQ(queue.size(), 3);
  CHECK_EQ(queue.dequeued(), 5);
}

TEST(items_are_never_split) {
  // No sum of these is between minimum and maximum.
  BatchingQueue queue({.minimum_batch_size = 4, .maximum_batch_size = 5});
  queue.enqueue(row_nest({1, 2, 3}));
  queue.enqueue(row_nest({4, 5, 6}));
  CHECK((dequeue_values(queue) == Values{1, 2, 3}));
  CHECK_EQ(queue.size(), 3);
}

TEST(a_single_item_is_not_copied) {
  auto buffers = BufferPool::create();
  BatchingQueue queue({}, buffers);
  Nest item = row_nest({1, 2, 3});
  const char* const data = item.leaves[0].data;
  queue.enqueue(std::move(item));
  CHECK(queue.dequeue_many()->leaves[0].data == data);
  CHECK_EQ(buffers->num_allocated(), 0u);
}

TEST(batches_recycle_memory) {
  auto buffers = BufferPool::create();
  BatchingQueue queue({.minimum_batch_size = 2}, buffers);
  for (int64_t i = 0; i < 10; ++i) {
    queue.enqueue(row_nest({i}));
    queue.enqueue(row_nest({-i}));
    CHECK((dequeue_values(queue) == Values{i, -i}));
  }
  CHECK_EQ(buffers->num_allocated(), 1u);
}

TEST(items_are_joined_along_any_axis) {
  for (size_t batch_dim : {0, 1, 2}) {
    BatchingQueue queue({.batch_dim = static_cast<int64_t>(batch_dim),
                         .minimum_batch_size = 6});
    std::vector<Array> arrays;
    for (int64_t rows : {1, 3, 2}) {
      Shape shape{5, 7, 11};
      shape[batch_dim] = rows;
      arrays.push_back(counting(shape, 1000 * rows));
      queue.enqueue(nest_of(arrays.back()));
    }
    const auto batch = queue.dequeue_many();
    Shape expected{5, 7, 11};
    expected[batch_dim] = 6;
    CHECK(batch->leaves[0].shape == expected);
    CHECK(values_of(*batch) == joined(arrays, batch_dim));
  }
}

TEST(recurrent_states_are_interleaved_layer_by_layer) {
  // [L, K, H]: two layers, K environments, H units.
  BatchingQueue queue({.minimum_batch_size = 3});
  queue.enqueue(nest_of(array_of({2, 1, 2}, {10, 11, 20, 21})));
  queue.enqueue(nest_of(array_of({2, 2, 2}, {12, 13, 14, 15, 22, 23, 24, 25})));
  const auto batch = queue.dequeue_many();
  CHECK_EQ(batch->leaves[0].describe(), "int64[2,3,2]");
  CHECK((values_of(*batch) ==
         Values{10, 11, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25}));
}

TEST(every_leaf_is_joined_with_its_own_shape_and_dtype) {
  auto item = [](int64_t id) {
    auto flags = std::make_shared<std::vector<char>>(3, char(id % 2));
    Array done{DType::kBool, {3, 1}, flags->data(), flags};
    return named({{"done", done},
                  {"frame", counting({3, 1, 5}, 100 * id)},
                  {"nothing", counting({3, 1, 0}, 0)}});
  };
  BatchingQueue queue({.minimum_batch_size = 2});
  queue.enqueue(item(1));
  queue.enqueue(item(2));
  const auto batch = queue.dequeue_many();
  CHECK_EQ(describe(*batch->structure), "{done: *, frame: *, nothing: *}");
  CHECK_EQ(batch->leaves[0].describe(), "bool[3,2]");
  CHECK(std::string(batch->leaves[0].data, 6) ==
        std::string("\1\0\1\0\1\0", 6));
  CHECK_EQ(batch->leaves[1].describe(), "int64[3,2,5]");
  CHECK(values_of(batch->leaves[1]) ==
        joined({item(1).leaves[1], item(2).leaves[1]}, 1));
  CHECK_EQ(batch->leaves[2].describe(), "int64[3,2,0]");
}

// Bad items.

TEST(bad_items_are_refused_by_name) {
  BatchingQueue queue({.maximum_batch_size = 3});
  using Error = std::invalid_argument;
  const auto frame = counting({1, 2, 5}, 0);
  const auto reward = counting({1, 2}, 0);
  CHECK_THROWS(Error, "Cannot enqueue empty nest (): expected at least one",
               queue.enqueue({Structure::tuple({}), {}}));
  CHECK_THROWS(Error,
               "The array is int64[2]: expected more than batch_dim (1) "
               "dimensions, got 1",
               queue.enqueue(nest_of(counting({2}, 0))));
  CHECK_THROWS(
      Error, "Leaf ['reward'] is int64[]",
      queue.enqueue(named({{"frame", frame}, {"reward", counting({}, 0)}})));
  CHECK_THROWS(Error, "expected at least one row",
               queue.enqueue(nest_of(counting({1, 0}, 0))));
  CHECK_THROWS(Error, "expected at most 3 rows (maximum batch size)",
               queue.enqueue(row_nest({1, 2, 3, 4})));
  CHECK_THROWS(Error,
               "Leaf ['reward'] is int64[1,3]: expected 2 rows along axis 1 "
               "(batch_dim) like the first leaf, got 3",
               queue.enqueue(
                   named({{"frame", frame}, {"reward", counting({1, 3}, 0)}})));
  CHECK_EQ(queue.size(), 0);
}

TEST(items_that_differ_from_what_is_queued_are_refused) {
  BatchingQueue queue({});
  using Error = std::invalid_argument;
  const auto frame = counting({1, 2, 5}, 0);
  const auto reward = counting({1, 2}, 0);
  queue.enqueue(named({{"frame", frame}, {"reward", reward}}));
  CHECK_THROWS(Error,
               "Nest is {frame: *, rewards: *}: expected {frame: *, reward: *}",
               queue.enqueue(named({{"frame", frame}, {"rewards", reward}})));
  CHECK_THROWS(Error, "Leaf ['frame'] is int64[1,2,7]: expected int64[1,2,5]",
               queue.enqueue(named(
                   {{"frame", counting({1, 2, 7}, 0)}, {"reward", reward}})));
  CHECK_THROWS(Error, "Leaf ['frame'] is int64[1,2]: expected int64[1,2,5]",
               queue.enqueue(named(
                   {{"frame", counting({1, 2}, 0)}, {"reward", reward}})));
  Array wrong = reward;
  wrong.dtype = DType::kFloat64;
  CHECK_THROWS(Error, "Leaf ['reward'] is float64[1,2]: expected int64[1,2]",
               queue.enqueue(named({{"frame", frame}, {"reward", wrong}})));
  // The queue still works, and when empty it accepts another structure.
  queue.enqueue(named({{"frame", frame}, {"reward", reward}}));
  CHECK_EQ(queue.dequeue_many()->leaves[0].describe(), "int64[1,4,5]");
  queue.enqueue(row_nest({1}));
}

TEST(unchecked_items_cannot_corrupt_memory) {
  BatchingQueue queue({.minimum_batch_size = 2, .check_inputs = false});
  using Error = std::invalid_argument;
  const auto small = counting({1, 1, 5}, 0);
  auto batch_of = [&](Nest a, Nest b) {
    queue.enqueue(std::move(a));
    queue.enqueue(std::move(b));
    queue.dequeue_many();
  };
  CHECK_THROWS(Error, "expected int64[1,1,5]",
               batch_of(nest_of(small), nest_of(counting({1, 1, 500}, 0))));
  CHECK_THROWS(Error, "expected {a: *}",
               batch_of(named({{"a", small}}), nest_of(small)));
  CHECK_THROWS(Error, "expected 1 rows",
               batch_of(named({{"a", small}, {"b", small}}),
                        named({{"a", small}, {"b", counting({1, 9, 5}, 0)}})));
  CHECK_THROWS(Error, "expected more than batch_dim",
               queue.enqueue(nest_of(counting({3}, 0))));
  CHECK_EQ(queue.dropped(), 6);
  CHECK_EQ(queue.dequeued(), 0);
  CHECK_EQ(queue.size(), 0);
}

TEST(rows_that_find_no_memory_are_counted_as_dropped) {
  bool fail = true;
  BatchingQueue queue({.minimum_batch_size = 2},
                      BufferPool::create([&](size_t nbytes) {
                        if (fail) throw std::runtime_error("no memory");
                        return allocate_from_heap(nbytes);
                      }));
  for (int64_t i = 0; i < 4; ++i) queue.enqueue(row_nest({i}));
  CHECK_THROWS(std::runtime_error, "no memory", queue.dequeue_many());
  CHECK_EQ(queue.dropped(), 4);
  fail = false;
  queue.enqueue(row_nest({5, 6}));
  CHECK((dequeue_values(queue) == Values{5, 6}));
  CHECK_EQ(queue.dequeued(), 2);
}
