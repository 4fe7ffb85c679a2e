// SPDX-License-Identifier: Apache-2.0

#include "buffer_pool.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#include "testing.h"

using namespace torchbeast;

namespace {

// Heap memory. Counts the blocks that are in use.
struct CountedHeap {
  std::atomic<int> num_alive{0};

  Allocate allocate() {
    return [this](size_t nbytes) {
      ++num_alive;
      Block block = allocate_from_heap(nbytes);
      char* data = block.data;
      return Block{
          data, std::shared_ptr<void>(
                    data, [this, owner = block.owner](void*) { --num_alive; })};
    };
  }
};

bool is_aligned(const Array& array, uintptr_t alignment) {
  return reinterpret_cast<uintptr_t>(array.data) % alignment == 0;
}

}  // namespace

TEST(arrays_have_what_was_asked_for) {
  auto pool = BufferPool::create();
  const Array array = pool->allocate(DType::kInt32, {5, 3});
  CHECK_EQ(array.describe(), "int32[5,3]");
  CHECK(array.owner != nullptr);
  CHECK(is_aligned(array, 64));
  CHECK(is_aligned(pool->allocate(DType::kUInt8, {4096}), 4096));
  std::memset(array.data, 1, array.nbytes());  // AddressSanitizer checks this.
}

TEST(every_size_fits_its_block) {
  auto pool = BufferPool::create();
  std::vector<Array> arrays;
  for (int64_t nbytes = 0; nbytes < 3000; ++nbytes) {
    arrays.push_back(pool->allocate(DType::kUInt8, {nbytes}));
    CHECK(arrays.back().data != nullptr);
    std::memset(arrays.back().data, 1, nbytes);
  }
}

TEST(size_classes_are_four_per_doubling) {
  size_t got = 0;
  auto pool = BufferPool::create([&](size_t nbytes) {
    got = nbytes;
    return Block{reinterpret_cast<char*>(&got), nullptr};
  });
  for (int shift = 6; shift < 62; ++shift) {
    const int64_t power = int64_t{1} << shift;
    for (int64_t quarter = 1; quarter <= 4; ++quarter) {
      const int64_t size = power + power / 4 * quarter;
      const auto above = pool->allocate(DType::kUInt8, {size - power / 4 + 1});
      CHECK_EQ(got, static_cast<size_t>(size));
      got = 0;
      const auto exact = pool->allocate(DType::kUInt8, {size});
      CHECK_EQ(got, static_cast<size_t>(size));
    }
  }
}

TEST(memory_returns_with_the_last_owner) {
  auto pool = BufferPool::create();
  Array first = pool->allocate(DType::kUInt8, {1000});
  char* const data = first.data;
  Array view = first;  // A copy shares the memory.
  first = {};
  Array second = pool->allocate(DType::kUInt8, {1000});
  CHECK(second.data != data);
  view = {};
  const Array third = pool->allocate(DType::kFloat32, {250});
  CHECK(third.data == data);
  CHECK_EQ(pool->num_allocated(), 2u);
}

TEST(nothing_is_allocated_once_the_sizes_are_known) {
  CountedHeap heap;
  auto pool = BufferPool::create(heap.allocate());
  for (int round = 0; round < 10; ++round) {
    std::vector<Array> arrays;
    for (int64_t size : {7, 700, 70000, 700, 7}) {
      arrays.push_back(pool->allocate(DType::kFloat32, {size}));
    }
    CHECK_EQ(pool->num_allocated(), 5u);
    CHECK_EQ(heap.num_alive, 5);
  }
}

TEST(sizes_of_one_class_share_memory) {
  auto pool = BufferPool::create();
  for (int64_t nbytes = 1025; nbytes <= 1280; ++nbytes) {
    pool->allocate(DType::kUInt8, {nbytes});
  }
  CHECK_EQ(pool->num_allocated(), 1u);
  pool->allocate(DType::kUInt8, {1281});
  CHECK_EQ(pool->num_allocated(), 2u);
}

TEST(blocks_are_freed_with_the_pool_or_after_it) {
  CountedHeap heap;
  auto pool = BufferPool::create(heap.allocate());
  Array kept = pool->allocate(DType::kUInt8, {100});
  pool->allocate(DType::kUInt8, {100});
  CHECK_EQ(heap.num_alive, 2);
  pool.reset();
  CHECK_EQ(heap.num_alive, 1);
  std::memset(kept.data, 1, 100);
  kept = {};
  CHECK_EQ(heap.num_alive, 0);
}

TEST(in_a_forked_child_no_memory_returns_to_the_pools_of_its_parent) {
  CountedHeap heap;
  const auto pool = BufferPool::create(heap.allocate());
  Array array = pool->allocate(DType::kUInt8, {3});
  ++BufferPool::num_forks;
  const auto made_after = BufferPool::create(heap.allocate());
  array = {};
  CHECK_EQ(heap.num_alive, 0);
  for (int i = 0; i < 2; ++i) made_after->allocate(DType::kUInt8, {3});
  CHECK_EQ(made_after->num_allocated(), 1u);
}

TEST(a_failed_allocation_leaves_the_pool_usable) {
  bool fail = true;
  auto pool = BufferPool::create([&](size_t nbytes) {
    if (fail) throw std::runtime_error("out of pinned memory");
    return allocate_from_heap(nbytes);
  });
  CHECK_THROWS(std::runtime_error, "out of pinned memory",
               pool->allocate(DType::kUInt8, {8}));
  CHECK_EQ(pool->num_allocated(), 0u);
  fail = false;
  CHECK(pool->allocate(DType::kUInt8, {8}).data != nullptr);
}

TEST(out_of_memory_names_the_array) {
  auto pool =
      BufferPool::create([](size_t) -> Block { throw std::bad_alloc(); });
  CHECK_THROWS(std::bad_alloc,
               "no memory for an array float32[5,3] of 60 bytes; choose",
               pool->allocate(DType::kFloat32, {5, 3}));
}

TEST(impossible_shapes_are_refused) {
  auto pool = BufferPool::create();
  CHECK_THROWS(std::invalid_argument, "negative",
               pool->allocate(DType::kUInt8, {-1}));
  CHECK_THROWS(std::invalid_argument, "does not fit",
               pool->allocate(DType::kFloat64, {int64_t{1} << 62}));
}

TEST(allocate_is_called_without_the_lock) {
  // `Allocate` may wait for the GIL while the thread that holds the GIL waits
  // for the lock.
  std::shared_ptr<BufferPool> pool;
  pool = BufferPool::create([&](size_t nbytes) {
    CHECK_EQ(pool->num_allocated(), 0u);
    return allocate_from_heap(nbytes);
  });
  pool->allocate(DType::kUInt8, {8});
  CHECK_EQ(pool->num_allocated(), 1u);
}

TEST(threads_never_share_a_block) {
  auto pool = BufferPool::create();
  auto worker = [&](int id) {
    for (int round = 0; round < 300; ++round) {
      std::vector<Array> arrays;
      for (int i = 0; i < 5; ++i) {
        arrays.push_back(pool->allocate(DType::kUInt8, {100 + round % 50}));
        std::memset(arrays.back().data, id, arrays.back().nbytes());
      }
      for (const Array& array : arrays) {
        for (size_t i = 0; i < array.nbytes(); ++i) {
          CHECK_EQ(array.data[i], id);
        }
      }
    }
  };
  std::vector<std::future<void>> workers;
  for (int id = 1; id <= 3; ++id) {
    workers.push_back(testing::background([&, id] { worker(id); }));
  }
  for (auto& done : workers) done.get();
  CHECK(pool->num_allocated() <= 3u * 5 * 3);
}

TEST(arrays_may_be_dropped_by_another_thread_than_the_pools_last_user) {
  for (int round = 0; round < 100; ++round) {
    CountedHeap heap;
    auto pool = BufferPool::create(heap.allocate());
    auto array = std::make_unique<Array>(pool->allocate(DType::kUInt8, {100}));
    auto dropper = testing::background([&] { array.reset(); });
    pool.reset();
    dropper.get();
    CHECK_EQ(heap.num_alive, 0);
  }
}
