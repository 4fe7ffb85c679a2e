// SPDX-License-Identifier: Apache-2.0
//
// Nests for tests.

#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include "array.h"
#include "batching_queue.h"
#include "nest.h"

namespace torchbeast {

// A new array with `values` in C order.
inline Array array_of(Shape shape, std::vector<int64_t> values) {
  auto owner = std::make_shared<std::vector<int64_t>>(std::move(values));
  return {DType::kInt64, std::move(shape),
          reinterpret_cast<char*>(owner->data()), owner};
}

inline std::vector<int64_t> values_of(const Array& array) {
  std::vector<int64_t> values(array.num_elements());
  if (!values.empty()) {
    std::memcpy(values.data(), array.data, array.nbytes());
  }
  return values;
}

inline Nest nest_of(Array array) {
  return {Structure::leaf(), {std::move(array)}};
}

// One array [1, values.size()]: rows along axis 1, as an actor sends them.
inline Nest row_nest(std::vector<int64_t> values) {
  const auto rows = static_cast<int64_t>(values.size());
  return nest_of(array_of({1, rows}, std::move(values)));
}

// The values of a row_nest.
inline std::vector<int64_t> values_of(const Nest& nest) {
  return values_of(nest.leaves.at(0));
}

// The values of the next batch of a queue of row_nest()s.
inline std::vector<int64_t> dequeue_values(BatchingQueue& queue) {
  return values_of(queue.dequeue_many().value());
}

}  // namespace torchbeast
