// SPDX-License-Identifier: Apache-2.0
//
// Nests as batches: their rows are the entries along one axis, `batch_dim`.
// Whatever is wrong with a nest is std::invalid_argument, naming the leaf.

#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "buffer_pool.h"
#include "nest.h"

namespace torchbeast {

// "Leaf [0]['frame'] is uint8[1,84,84]: "
inline std::string leaf_is(const Nest& nest, size_t leaf) {
  const std::string path = leaf_path(*nest.structure, leaf);
  return (path.empty() ? "The array" : "Leaf " + path) + " is " +
         nest.leaves[leaf].describe() + ": ";
}

// Axis `batch_dim`, for messages.
inline std::string axis_name(int64_t batch_dim) {
  return "axis " + std::to_string(batch_dim) + " (batch_dim)";
}

inline void check_rank(const Nest& nest, size_t leaf, int64_t batch_dim) {
  if (static_cast<int64_t>(nest.leaves[leaf].shape.size()) <= batch_dim) {
    throw std::invalid_argument(
        leaf_is(nest, leaf) + "expected more than batch_dim (" +
        std::to_string(batch_dim) + ") dimensions, got " +
        std::to_string(nest.leaves[leaf].shape.size()));
  }
}

// Rows of `nest`, at least one. Those of the first leaf, unless `check_all`
// makes sure that all leaves agree.
inline int64_t count_rows(const Nest& nest, int64_t batch_dim, bool check_all) {
  assert(nest.structure && nest.structure->num_leaves == nest.leaves.size());
  if (nest.leaves.empty()) {
    throw std::invalid_argument("Cannot enqueue empty vector of arrays");
  }
  for (size_t i = 0; i < nest.leaves.size(); ++i) {
    check_rank(nest, i, batch_dim);
  }
  const int64_t rows = nest.leaves[0].shape[batch_dim];
  if (rows < 1) {
    throw std::invalid_argument(leaf_is(nest, 0) +
                                "expected at least one row along " +
                                axis_name(batch_dim));
  }
  for (size_t i = 1; check_all && i < nest.leaves.size(); ++i) {
    if (nest.leaves[i].shape[batch_dim] != rows) {
      throw std::invalid_argument(
          leaf_is(nest, i) + "expected " + std::to_string(rows) +
          " rows along " + axis_name(batch_dim) + " like the first leaf, got " +
          std::to_string(nest.leaves[i].shape[batch_dim]));
    }
  }
  return rows;
}

// Throws unless `item` can follow `first` in one batch: the same structure and
// dtypes, and the same shapes but for the rows.
inline void check_alike(const Nest& first, const Nest& item,
                        int64_t batch_dim) {
  if (!equal(*first.structure, *item.structure)) {
    throw std::invalid_argument("Nest is " + describe(*item.structure) +
                                ": expected " + describe(*first.structure) +
                                ", as in the same batch");
  }
  for (size_t i = 0; i < first.leaves.size(); ++i) {
    const Array& a = first.leaves[i];
    const Array& b = item.leaves[i];
    bool alike = a.dtype == b.dtype && a.shape.size() == b.shape.size();
    for (size_t axis = 0; alike && axis < a.shape.size(); ++axis) {
      alike = a.shape[axis] == b.shape[axis] ||
              axis == static_cast<size_t>(batch_dim);
    }
    if (!alike) {
      throw std::invalid_argument(leaf_is(item, i) + "expected " +
                                  a.describe() +
                                  ", as in the same batch, but "
                                  "for " +
                                  axis_name(batch_dim));
    }
  }
}

// How an array lies in memory: `outer` times, `stride` bytes apart, its rows
// of `row` bytes, one after the other.
struct RowLayout {
  RowLayout(const Array& array, int64_t batch_dim)
      : row(itemsize(array.dtype)) {
    for (int64_t axis = 0; axis < batch_dim; ++axis) {
      outer *= array.shape[axis];
    }
    for (size_t axis = batch_dim + 1; axis < array.shape.size(); ++axis) {
      row *= array.shape[axis];
    }
    stride = row * array.shape[batch_dim];
  }

  size_t outer = 1;
  size_t row;
  size_t stride;
};

// Copies between `to`, and `from`, `outer` times `nbytes` that lie `to_stride`
// and `from_stride` bytes apart.
inline void copy_runs(char* to, size_t to_stride, const char* from,
                      size_t from_stride, size_t outer, size_t nbytes) {
  if (nbytes == 0) return;  // Then the pointers may be null.
  for (size_t i = 0; i < outer; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, nbytes);
  }
}

// Joins `items` along `batch_dim`, in memory of `buffers`. Checks that they
// are alike and that their leaves agree in rows, whoever checked it before:
// this is where a mistake would write past the end.
inline Nest concatenate(const std::vector<const Nest*>& items,
                        int64_t batch_dim, BufferPool& buffers) {
  const Nest& first = *items[0];
  int64_t rows = 0;
  for (const Nest* item : items) {
    rows += count_rows(*item, batch_dim, /*check_all=*/true);
    check_alike(first, *item, batch_dim);
  }
  Nest batch{first.structure, {}};
  batch.leaves.reserve(first.leaves.size());
  for (size_t i = 0; i < first.leaves.size(); ++i) {
    Shape shape = first.leaves[i].shape;
    shape[batch_dim] = rows;
    Array joined = buffers.allocate(first.leaves[i].dtype, std::move(shape));
    const RowLayout to(joined, batch_dim);
    char* data = joined.data;
    for (const Nest* item : items) {
      const RowLayout from(item->leaves[i], batch_dim);
      copy_runs(data, to.stride, item->leaves[i].data, from.stride, from.outer,
                from.stride);
      data += from.stride;
    }
    batch.leaves.push_back(std::move(joined));
  }
  return batch;
}

}  // namespace torchbeast
