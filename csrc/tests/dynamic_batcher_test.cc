// SPDX-License-Identifier: Apache-2.0

#include "dynamic_batcher.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
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

// The outputs of the model of these tests for a batch of row_nest()s. They are
// [2, rows], so that the rows of a caller are not contiguous.
Nest model(const Nest& inputs) {
  Values outputs;
  for (int64_t factor : {10, 100}) {
    for (int64_t value : values_of(inputs)) outputs.push_back(factor * value);
  }
  const int64_t rows = inputs.leaves[0].shape[1];
  return nest_of(array_of({2, rows}, std::move(outputs)));
}

int64_t num_rows(const Batch& batch) {
  return batch.inputs().leaves[0].shape[1];
}

// The answer to compute(row_nest(values)).
Values expected(const Values& values) {
  return values_of(model(row_nest(values)));
}

// Calls compute() in another thread.
std::future<Values> compute(DynamicBatcher& batcher, Values values) {
  return background([&batcher, values = std::move(values)] {
    return values_of(batcher.compute(row_nest(values)));
  });
}

// Records the calls of a Done.
struct Answer {
  int num_calls = 0;
  Values values;
  std::exception_ptr error;

  DynamicBatcher::Done done() {
    return [this](const Outputs* outputs, std::exception_ptr told) {
      CHECK((outputs == nullptr) == (told != nullptr));
      ++num_calls;
      error = told;
      if (outputs) {
        values = values_of(outputs->copy(*BufferPool::create()));
      }
    };
  }

  void rethrow() const {
    CHECK_EQ(num_calls, 1);
    if (error) std::rethrow_exception(error);
  }
};

}  // namespace

// Answers.

TEST(compute_returns_its_own_rows) {
  DynamicBatcher batcher({.minimum_batch_size = 6});
  auto first = compute(batcher, {1});
  wait_until([&] { return batcher.size() == 1; });
  auto second = compute(batcher, {2, 3, 4});
  wait_until([&] { return batcher.size() == 4; });
  auto third = compute(batcher, {5, 6});
  const auto batch = batcher.get_batch();
  CHECK((values_of(batch->inputs()) == Values{1, 2, 3, 4, 5, 6}));
  wait_until([&] { return batcher.num_waiting() == 3; });
  batch->set_outputs(model(batch->inputs()));
  CHECK((first.get() == Values{10, 100}));
  CHECK((second.get() == Values{20, 30, 40, 200, 300, 400}));
  CHECK((third.get() == Values{50, 60, 500, 600}));
  CHECK_EQ(batcher.num_waiting(), 0);
  CHECK_EQ(batcher.num_batches(), 1);
  CHECK_EQ(batcher.num_rows(), 6);
}

TEST(outputs_know_their_shapes) {
  // Batch dimension 0, 1 and 2 of outputs [5 or rows, 3 or rows, 2 or rows].
  const auto buffers = BufferPool::create();
  for (int64_t batch_dim : {0, 1, 2}) {
    DynamicBatcher batcher({.batch_dim = batch_dim, .minimum_batch_size = 7});
    auto input = [&](int64_t rows) {
      Shape shape(3, 1);
      shape[batch_dim] = rows;
      return nest_of(array_of(shape, Values(rows, 0)));
    };
    Shape shape{5, 3, 2};
    shape[batch_dim] = 7;
    const int64_t size = shape[0] * shape[1] * shape[2];
    Values outputs(size);
    for (int64_t i = 0; i < size; ++i) outputs[i] = i;
    Values got;
    int64_t begin = 0;
    for (int64_t rows : {2, 1, 4}) {
      batcher.compute_async(input(rows), [&, rows, begin](const Outputs* part,
                                                          std::exception_ptr) {
        Shape part_shape = shape;
        part_shape[batch_dim] = rows;
        const Nest copy = part->copy(*buffers);
        CHECK(copy.leaves[0].shape == part_shape);
        // Compares each element with its place in the whole array.
        const Values values = values_of(copy);
        size_t next = 0;
        for (int64_t i = 0; i < part_shape[0]; ++i) {
          for (int64_t j = 0; j < part_shape[1]; ++j) {
            for (int64_t k = 0; k < part_shape[2]; ++k) {
              int64_t at[] = {i, j, k};
              at[batch_dim] += begin;
              CHECK_EQ(values[next++],
                       (at[0] * shape[1] + at[1]) * shape[2] + at[2]);
            }
          }
        }
        got.push_back(rows);
      });
      begin += rows;
    }
    const auto batch = batcher.get_batch();
    batch->set_outputs(nest_of(array_of(shape, outputs)));
    CHECK((got == Values{2, 1, 4}));
  }
}

TEST(outputs_may_have_any_structure) {
  DynamicBatcher batcher({.minimum_batch_size = 2});
  auto ask = [&] { return batcher.compute(row_nest({0})); };
  auto first = background(ask);
  auto second = background(ask);
  const auto batch = batcher.get_batch();
  const auto leaf = Structure::leaf();
  batch->set_outputs(
      {Structure::tuple({Structure::dict({{"action", leaf}, {"value", leaf}}),
                         Structure::list({leaf})}),
       {array_of({1, 2}, {1, 2}), array_of({1, 2, 2}, {3, 4, 5, 6}),
        array_of({2, 2, 1}, {7, 8, 9, 10})}});
  Nest a = first.get();
  Nest b = second.get();
  if (values_of(a)[0] == 2) std::swap(a, b);
  CHECK_EQ(describe(*a.structure), "({action: *, value: *}, [*])");
  CHECK_EQ(a.leaves[2].describe(), "int64[2,1,1]");
  CHECK((values_of(a.leaves[0]) == Values{1}));
  CHECK((values_of(a.leaves[1]) == Values{3, 4}));
  CHECK((values_of(a.leaves[2]) == Values{7, 9}));
  CHECK((values_of(b.leaves[0]) == Values{2}));
  CHECK((values_of(b.leaves[1]) == Values{5, 6}));
  CHECK((values_of(b.leaves[2]) == Values{8, 10}));
}

TEST(batches_may_finish_out_of_order) {
  DynamicBatcher batcher({.maximum_batch_size = 2});
  std::vector<std::future<Values>> answers;
  std::vector<std::shared_ptr<Batch>> batches;
  for (int64_t i = 0; i < 3; ++i) {
    answers.push_back(compute(batcher, {2 * i, 2 * i + 1}));
    batches.push_back(batcher.get_batch());
  }
  for (int i : {1, 2, 0}) {
    batches[i]->set_outputs(model(batches[i]->inputs()));
    CHECK(answers[i].get() == expected({2 * i, 2 * i + 1}));
  }
}

TEST(several_threads_answer_at_once) {
  DynamicBatcher batcher(
      {.minimum_batch_size = 2, .maximum_batch_size = 5, .timeout_ms = 1});
  std::vector<std::future<void>> models;
  for (int i = 0; i < 2; ++i) {
    models.push_back(background([&] {
      while (auto batch = batcher.get_batch()) {
        CHECK(num_rows(*batch) <= 5);
        batch->set_outputs(model(batch->inputs()));
      }
    }));
  }
  std::vector<std::future<void>> callers;
  for (int64_t id = 0; id < 4; ++id) {
    callers.push_back(background([&, id] {
      for (int64_t i = 0; i < 200; ++i) {
        Values question(1 + i % 3, 1000 * id + i);
        const Nest answer = batcher.compute(row_nest(question));
        CHECK(values_of(answer) == expected(question));
      }
    }));
  }
  for (auto& caller : callers) caller.get();
  CHECK_EQ(batcher.size(), 0);
  batcher.close();
  for (auto& done : models) done.get();
  int64_t rows = 0;
  for (int64_t i = 0; i < 200; ++i) rows += 4 * (1 + i % 3);
  CHECK_EQ(batcher.num_rows(), rows);
}

TEST(a_model_that_writes_to_a_batch_of_one_request_changes_only_the_batch) {
  DynamicBatcher batcher({});
  Nest inputs = row_nest({1, 2});
  const Nest before = inputs;  // The same memory.
  Answer answer;
  batcher.compute_async(std::move(inputs), answer.done());
  const auto batch = batcher.get_batch();
  const Array& leaf = batch->inputs().leaves[0];
  std::memset(leaf.data, 0xff, leaf.nbytes());
  CHECK(values_of(before) == (Values{1, 2}));
}

TEST(batches_and_answers_recycle_memory) {
  auto buffers = BufferPool::create();
  DynamicBatcher batcher({.minimum_batch_size = 2}, buffers);
  for (int64_t i = 0; i < 10; ++i) {
    auto first = compute(batcher, {i});
    auto second = compute(batcher, {i});
    const auto batch = batcher.get_batch();
    batch->set_outputs(model(batch->inputs()));
    first.get();
    second.get();
  }
  CHECK(buffers->num_allocated() <= 3);  // A batch and two answers.
}

TEST(inputs_are_freed_once_they_are_joined) {
  DynamicBatcher batcher({.minimum_batch_size = 2});
  Answer answers[2];
  std::weak_ptr<void> memory[2];
  for (int64_t i = 0; i < 2; ++i) {
    Nest inputs = row_nest({i});
    memory[i] = inputs.leaves[0].owner;
    batcher.compute_async(std::move(inputs), answers[i].done());
    CHECK(!memory[i].expired());
  }
  const auto batch = batcher.get_batch();
  CHECK(memory[0].expired() && memory[1].expired());
  batcher.close();
}

// When a batch is complete. More tests are in row_queue_test.cc.

TEST(a_batch_waits_for_the_minimum) {
  DynamicBatcher batcher({.minimum_batch_size = 2, .timeout_ms = std::nullopt});
  auto consumer = background([&] { return num_rows(*batcher.get_batch()); });
  wait_until([&] { return batcher.num_waiting() == 1; });
  Answer answers[2];
  batcher.compute_async(row_nest({1}), answers[0].done());
  CHECK_EQ(batcher.num_waiting(), 1);
  CHECK_EQ(batcher.size(), 1);
  batcher.compute_async(row_nest({2}), answers[1].done());
  CHECK_EQ(consumer.get(), 2);
}

TEST(a_timeout_ends_the_wait_for_the_minimum) {
  const auto start = std::chrono::steady_clock::now();
  DynamicBatcher batcher({.minimum_batch_size = 3, .timeout_ms = 20});
  Answer answer;
  batcher.compute_async(row_nest({1, 2}), answer.done());
  CHECK_EQ(num_rows(*batcher.get_batch()), 2);
  CHECK(std::chrono::steady_clock::now() - start >=
        std::chrono::milliseconds(20));
}

TEST(bad_options_are_refused) {
  auto make = [](BatcherOptions options) { DynamicBatcher batcher(options); };
  using Error = std::invalid_argument;
  CHECK_THROWS(Error, "Min batch size must be >= 1",
               make({.minimum_batch_size = 0}));
  CHECK_THROWS(Error, "Max batch size must be >= min batch size",
               make({.minimum_batch_size = 5, .maximum_batch_size = 3}));
  CHECK_THROWS(Error, "Timeout must be >= 0 ms", make({.timeout_ms = -1}));
}

// Bad inputs and outputs.

TEST(one_bad_input_fails_alone) {
  DynamicBatcher batcher({.minimum_batch_size = 2, .maximum_batch_size = 3});
  using Error = std::invalid_argument;
  auto first = compute(batcher, {1});
  wait_until([&] { return batcher.size() == 1; });
  CHECK_THROWS(Error, "The array is int64[1,1,1]: expected int64[1,1]",
               batcher.compute(nest_of(array_of({1, 1, 1}, {0}))));
  CHECK_THROWS(Error, "expected more than batch_dim (1) dimensions",
               batcher.compute(nest_of(array_of({1}, {0}))));
  CHECK_THROWS(Error, "empty", batcher.compute({Structure::tuple({}), {}}));
  Answer answer;
  CHECK_THROWS(Error, "expected at most 3 rows",
               batcher.compute_async(row_nest({1, 2, 3, 4}), answer.done()));
  CHECK_EQ(answer.num_calls, 0);
  auto second = compute(batcher, {2});
  const auto batch = batcher.get_batch();
  CHECK((values_of(batch->inputs()) == Values{1, 2}));
  batch->set_outputs(model(batch->inputs()));
  CHECK(first.get() == expected({1}));
  CHECK(second.get() == expected({2}));
}

TEST(bad_outputs_are_refused_by_name_and_may_be_repeated) {
  DynamicBatcher batcher({});
  auto answer = compute(batcher, {1, 2});
  const auto batch = batcher.get_batch();
  using Error = std::invalid_argument;
  const auto leaf = Structure::leaf();
  const auto good = array_of({1, 2}, {1, 2});
  for (const int64_t rows : {1, 3}) {
    CHECK_THROWS(Error,
                 "Leaf ['value'] is int64[1," + std::to_string(rows) +
                     "]: expected 2 rows, the batch size, along axis 1 "
                     "(batch_dim), got " +
                     std::to_string(rows),
                 batch->set_outputs(
                     {Structure::dict({{"action", leaf}, {"value", leaf}}),
                      {good, array_of({1, rows}, Values(rows))}}));
  }
  CHECK_THROWS(Error,
               "Leaf [1] is int64[2]: expected more than batch_dim (1) "
               "dimensions, got 1",
               batch->set_outputs({Structure::tuple({leaf, leaf}),
                                   {good, array_of({2}, {1, 2})}}));
  CHECK_THROWS(Error, "empty", batch->set_outputs({Structure::tuple({}), {}}));
  wait_until([&] { return batcher.num_waiting() == 1; });
  batch->set_outputs(model(batch->inputs()));
  CHECK(answer.get() == expected({1, 2}));
}

TEST(unchecked_outputs_may_be_padded_but_not_short) {
  DynamicBatcher batcher({.check_outputs = false});
  auto answer = compute(batcher, {1, 2});
  const auto batch = batcher.get_batch();
  CHECK_THROWS(std::invalid_argument, "expected 2 rows",
               batch->set_outputs(row_nest({1})));
  batch->set_outputs(nest_of(array_of({2, 3}, {1, 2, 3, 4, 5, 6})));
  CHECK((answer.get() == Values{1, 2, 4, 5}));
}

TEST(setting_outputs_twice_is_an_error) {
  DynamicBatcher batcher({});
  auto answer = compute(batcher, {1});
  const auto batch = batcher.get_batch();
  batch->set_outputs(model(batch->inputs()));
  CHECK_THROWS(std::runtime_error, "set_outputs called twice",
               batch->set_outputs(model(batch->inputs())));
  CHECK(answer.get() == expected({1}));
}

TEST(a_dropped_batch_fails_its_computes_only) {
  DynamicBatcher batcher({.minimum_batch_size = 2, .maximum_batch_size = 2});
  auto first = compute(batcher, {1});
  auto second = compute(batcher, {2});
  auto dropped = batcher.get_batch();
  auto third = compute(batcher, {3, 4});
  const auto batch = batcher.get_batch();
  dropped.reset();
  CHECK_THROWS(AsyncError, "2 rows was dropped", first.get());
  CHECK_THROWS(AsyncError, "2 rows was dropped", second.get());
  batch->set_outputs(model(batch->inputs()));
  CHECK(third.get() == expected({3, 4}));
}

TEST(a_batch_dropped_after_bad_outputs_fails_its_computes) {
  DynamicBatcher batcher({});
  auto answer = compute(batcher, {1, 2});
  auto batch = batcher.get_batch();
  CHECK_THROWS(std::invalid_argument, "expected 2 rows",
               batch->set_outputs(row_nest({1})));
  batch.reset();
  CHECK_THROWS(AsyncError, "dropped", answer.get());
}

TEST(a_batch_that_finds_no_memory_fails_its_computes) {
  bool fail = true;
  DynamicBatcher batcher({.minimum_batch_size = 2},
                         BufferPool::create([&](size_t nbytes) {
                           if (fail) throw std::runtime_error("no memory");
                           return allocate_from_heap(nbytes);
                         }));
  Answer answers[3];
  batcher.compute_async(row_nest({1}), answers[0].done());
  batcher.compute_async(row_nest({2}), answers[1].done());
  CHECK_THROWS(std::runtime_error, "no memory", batcher.get_batch());
  CHECK_THROWS(AsyncError, "dropped", answers[0].rethrow());
  CHECK_THROWS(AsyncError, "dropped", answers[1].rethrow());
  fail = false;
  batcher.compute_async(row_nest({3, 4}), answers[2].done());
  auto batch = batcher.get_batch();
  batch->set_outputs(model(batch->inputs()));
  CHECK(answers[2].values == expected({3, 4}));
}

TEST(an_answer_that_finds_no_memory_fails_its_compute) {
  bool fail = false;
  DynamicBatcher batcher({}, BufferPool::create([&](size_t nbytes) {
                           if (fail) throw std::runtime_error("no memory");
                           return allocate_from_heap(nbytes);
                         }));
  auto answer = compute(batcher, {1});
  const auto batch = batcher.get_batch();
  fail = true;
  batch->set_outputs(model(batch->inputs()));
  CHECK_THROWS(std::runtime_error, "no memory", answer.get());
}

// Callbacks.

TEST(a_done_may_ask_again) {
  // No lock is held in a Done: each one calls compute_async again.
  DynamicBatcher batcher({});
  Values seen;
  std::function<void(int64_t)> ask = [&](int64_t value) {
    batcher.compute_async(row_nest({value}), [&, value](const Outputs* outputs,
                                                        std::exception_ptr) {
      seen.push_back(value);
      if (outputs && value < 5) ask(value + 1);
    });
  };
  ask(1);
  for (int i = 0; i < 5; ++i) {
    const auto batch = batcher.get_batch();
    batch->set_outputs(model(batch->inputs()));
  }
  CHECK((seen == Values{1, 2, 3, 4, 5}));
  CHECK_EQ(batcher.size(), 0);
}

TEST(a_done_may_look_at_the_batcher_when_it_closes) {
  DynamicBatcher batcher({});
  int64_t size = -1;
  batcher.compute_async(
      row_nest({1}), [&](const Outputs*, std::exception_ptr told) {
        CHECK(told && batcher.is_closed());
        CHECK_THROWS(QueueClosed, "closed", batcher.compute(row_nest({1})));
        size = batcher.size();
      });
  batcher.close();
  CHECK_EQ(size, 0);
}

// Ctrl-C.

TEST(an_interrupted_compute_ends_alone) {
  DynamicBatcher batcher({.minimum_batch_size = 2, .timeout_ms = std::nullopt});
  auto interrupted = background([&] {
    interrupt_check = [] { throw std::runtime_error("interrupted"); };
    batcher.compute(row_nest({1}));
  });
  CHECK_THROWS(std::runtime_error, "interrupted", interrupted.get());
  CHECK_EQ(batcher.num_waiting(), 0);
  auto answer = compute(batcher, {2});
  const auto batch = batcher.get_batch();
  CHECK((values_of(batch->inputs()) == Values{1, 2}));
  batch->set_outputs(model(batch->inputs()));
  CHECK(answer.get() == expected({2}));
}

// Closing.

TEST(closing_before_each_call_refuses_it) {
  DynamicBatcher batcher({});
  batcher.close();
  CHECK(batcher.is_closed());
  Answer answer;
  CHECK_THROWS(QueueClosed, "closed", batcher.compute(row_nest({1})));
  CHECK_THROWS(QueueClosed, "closed",
               batcher.compute_async(row_nest({1}), answer.done()));
  CHECK_EQ(answer.num_calls, 0);
  CHECK(batcher.get_batch() == nullptr);
  CHECK_THROWS(std::runtime_error, "closed already", batcher.close());
}

TEST(close_wakes_waiting_model_threads) {
  DynamicBatcher batcher({});
  auto first = background([&] { return batcher.get_batch(); });
  auto second = background([&] { return batcher.get_batch(); });
  wait_until([&] { return batcher.num_waiting() == 2; });
  batcher.close();
  CHECK(first.get() == nullptr);
  CHECK(second.get() == nullptr);
}

TEST(close_wakes_computes_queued_and_handed_out) {
  DynamicBatcher batcher({});
  auto handed_out = compute(batcher, {1});
  const auto batch = batcher.get_batch();
  auto queued = compute(batcher, {2});
  wait_until([&] { return batcher.num_waiting() == 2; });
  CHECK_EQ(batcher.size(), 1);
  batcher.close();
  CHECK_THROWS(QueueClosed, "closed", handed_out.get());
  CHECK_THROWS(QueueClosed, "closed", queued.get());
  CHECK_EQ(batcher.size(), 0);
}

TEST(outputs_set_after_close_go_nowhere) {
  DynamicBatcher batcher({});
  Answer answer;
  batcher.compute_async(row_nest({1}), answer.done());
  auto batch = batcher.get_batch();
  batcher.close();
  CHECK_THROWS(QueueClosed, "closed", answer.rethrow());
  batch->set_outputs(model(batch->inputs()));
  batch->set_outputs(row_nest({1, 2, 3}));
  batch.reset();
  CHECK_EQ(answer.num_calls, 1);
}

TEST(answers_given_before_close_stand) {
  DynamicBatcher batcher({});
  auto answer = compute(batcher, {1});
  const auto batch = batcher.get_batch();
  batch->set_outputs(model(batch->inputs()));
  batcher.close();
  CHECK(answer.get() == expected({1}));
  CHECK_THROWS(std::runtime_error, "called twice",
               batch->set_outputs(model(batch->inputs())));
}

TEST(listeners_hear_of_closing) {
  DynamicBatcher batcher({});
  int before = 0;
  int after = 0;
  batcher.on_close([&] { before += batcher.is_closed(); });
  CHECK_EQ(before, 0);
  batcher.close();
  CHECK_EQ(before, 1);
  batcher.on_close([&] { ++after; });
  CHECK_EQ(after, 1);
}

TEST(closing_at_any_moment_answers_everybody_once) {
  for (int64_t round = 0; round < 30; ++round) {
    DynamicBatcher batcher(
        {.minimum_batch_size = 2, .maximum_batch_size = 3, .timeout_ms = 1});
    std::vector<std::future<void>> models;
    for (int i = 0; i < 2; ++i) {
      models.push_back(background([&] {
        while (auto batch = batcher.get_batch()) {
          if (num_rows(*batch) == 2) continue;  // Dropped.
          batch->set_outputs(model(batch->inputs()));
        }
      }));
    }
    std::atomic<int64_t> num_accepted = 0;
    std::atomic<int64_t> num_answers = 0;
    auto asynchronous = background([&] {
      try {
        for (;;) {
          // Counted first: the answer may come before the call returns.
          ++num_accepted;
          batcher.compute_async(
              row_nest({1}),
              [&](const Outputs*, std::exception_ptr) { ++num_answers; });
          wait_until([&] { return batcher.size() < 10; });
        }
      } catch (const QueueClosed&) {
        --num_accepted;
      }
    });
    auto blocking = background([&] {
      for (int64_t i = 0;; ++i) {
        try {
          CHECK(values_of(batcher.compute(row_nest({i}))) == expected({i}));
        } catch (const AsyncError&) {
        } catch (const QueueClosed&) {
          return;
        }
      }
    });
    wait_until([&] { return batcher.num_rows() > 5 * round; });
    batcher.close();
    asynchronous.get();
    blocking.get();
    for (auto& done : models) done.get();
    CHECK_EQ(num_answers, num_accepted);
    CHECK_EQ(batcher.num_waiting(), 0);
  }
}

TEST(batches_outlive_the_batcher) {
  auto batcher = std::make_unique<DynamicBatcher>(BatcherOptions{});
  Answer answer;
  batcher->compute_async(row_nest({1}), answer.done());
  auto batch = batcher->get_batch();
  batcher.reset();
  batch->set_outputs(model(batch->inputs()));
  CHECK(answer.values == expected({1}));
}

TEST(closing_and_answering_at_once_agree) {
  for (int round = 0; round < 200; ++round) {
    DynamicBatcher batcher({});
    std::atomic<int> num_answers = 0;
    batcher.compute_async(
        row_nest({1}),
        [&](const Outputs*, std::exception_ptr) { ++num_answers; });
    auto batch = batcher.get_batch();
    const Nest outputs = model(batch->inputs());
    auto answering = background([&] { batch->set_outputs(outputs); });
    batcher.close();
    answering.get();
    CHECK_EQ(num_answers, 1);
  }
}
