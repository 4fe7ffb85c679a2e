// SPDX-License-Identifier: Apache-2.0
//
// Functions for nests as batches. A row is one entry along the axis
// `batch_dim`. The functions that check throw std::invalid_argument, naming the
// leaf.

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

// "axis 1 (batch_dim)"
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

// Returns the number of rows of the first leaf, which must be at least one.
// With `check_all` all other leaves must have the same number.
inline int64_t count_rows(const Nest& nest, int64_t batch_dim, bool check_all) {
  assert(nest.structure && nest.structure->num_leaves == nest.leaves.size());
  if (nest.leaves.empty()) {
    throw std::invalid_argument("Cannot enqueue empty nest " +
                                describe(*nest.structure) +
                                ": expected at least one array");
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

// Throws unless `item` and `first` fit into one batch: they have the same
// structure and dtypes, and their shapes differ in the number of rows only.
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

// The place of an array's rows in memory. There are `outer` groups of rows,
// which begin `stride` bytes apart. The rows of a group follow each other; each
// has `row` bytes.
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

// Copies `outer` runs of `nbytes` bytes. The runs begin `from_stride` bytes
// apart in `from`, and `to_stride` bytes apart in `to`.
inline void copy_runs(char* to, size_t to_stride, const char* from,
                      size_t from_stride, size_t outer, size_t nbytes) {
  if (nbytes == 0) return;  // The pointers may be null then.
  for (size_t i = 0; i < outer; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, nbytes);
  }
}

// Joins `items` along `batch_dim` into memory of `buffers`. Checks that the
// items fit together even if a caller has checked it: otherwise a mistake of a
// caller would write past the end of the memory.
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
