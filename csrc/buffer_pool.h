// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "array.h"
#include "errors.h"

namespace torchbeast {

// Memory that is valid for as long as `owner` lives.
struct Block {
  char* data = nullptr;
  std::shared_ptr<void> owner;
};

// Allocates at least `nbytes` of memory. May be slow, may take the GIL, and may
// throw.
using Allocate = std::function<Block(size_t nbytes)>;

// Memory from the heap, aligned to 64 bytes; from one page (4096 bytes) on,
// aligned to pages.
Block allocate_from_heap(size_t nbytes);

// Recycles the memory of arrays. Thread-safe.
//   allocate  returns an uninitialised array. When the array's last owner drops
//             it, in whichever thread, its memory returns to the pool, and a
//             later array of about the same size gets it.
// So a program that has allocated each of its sizes once does not call
// `Allocate` again. Arrays may outlive the pool; then their memory is freed.
// The pool calls `Allocate`, and frees memory, with no lock held.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
  struct Private {};

 public:
  static std::shared_ptr<BufferPool> create(Allocate allocate = nullptr) {
    return std::make_shared<BufferPool>(Private(), std::move(allocate));
  }

  BufferPool(Private, Allocate allocate)
      : allocate_(allocate ? std::move(allocate) : allocate_from_heap) {}

  // How many forks there were between the first process and this one. In a
  // child the lock of a pool may be held for ever, by a thread that only the
  // parent has. So no memory returns to the parent's pools: it is freed.
  inline static std::atomic<int> num_forks{0};

  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // Throws what `Allocate` throws, but OutOfMemory for std::bad_alloc, and
  // std::invalid_argument for a shape with a negative axis or one that is too
  // large.
  Array allocate(DType dtype, Shape shape);

  // How many blocks `Allocate` has made so far.
  size_t num_allocated() const {
    std::lock_guard lock(mu_);
    return num_allocated_;
  }

 private:
  // Sizes are rounded up to classes, four per doubling, so that batches of
  // slightly different sizes share memory: 64, 80, 96, 112, 128, 160, ...
  static constexpr size_t kSmallest = 64;
  static constexpr size_t kNumClasses = 1 + 4 * 57;  // The last is 2^63 bytes.

  struct SizeClass {
    size_t num_blocks = 0;    // All of this class, in use or free.
    std::vector<Block> free;  // Its capacity is at least num_blocks.
  };

  // Deleter of an array: returns its block to the pool.
  struct Return {
    std::weak_ptr<BufferPool> pool;
    size_t size_class;
    Block block;

    void operator()(void*) noexcept {
      Block returned = std::move(block);  // Freed here if the pool is gone.
      const auto alive = pool.lock();
      if (alive && alive->num_forks_before_ == num_forks) {
        alive->give_back(size_class, std::move(returned));
      }
    }
  };

  static size_t class_of(size_t nbytes) {
    if (nbytes <= kSmallest) return 0;
    // nbytes is above `half`, a power of two, and at most twice that.
    const size_t half = std::bit_floor(nbytes - 1);
    const size_t quarters = (nbytes - half + half / 4 - 1) / (half / 4);
    return 4 * (std::bit_width(half / kSmallest) - 1) + quarters;
  }

  static size_t class_size(size_t size_class) {
    if (size_class == 0) return kSmallest;
    const size_t half = kSmallest << ((size_class - 1) / 4);
    return half + half / 4 * ((size_class - 1) % 4 + 1);
  }

  Block take(size_t size_class) {
    std::lock_guard lock(mu_);
    auto& free = classes_[size_class].free;
    if (free.empty()) return {};
    Block block =
        std::move(free.back());  // The most recent is likely in the CPU cache.
    free.pop_back();
    return block;
  }

  Block make(size_t size_class) {
    const size_t nbytes = class_size(size_class);
    Block block = allocate_(nbytes);
    std::lock_guard lock(mu_);
    SizeClass& sizes = classes_[size_class];
    ++sizes.num_blocks;
    if (sizes.free.capacity() < sizes.num_blocks) {
      sizes.free.reserve(2 * sizes.num_blocks);  // give_back must not throw.
    }
    ++num_allocated_;
    return block;
  }

  void give_back(size_t size_class, Block block) noexcept {
    std::lock_guard lock(mu_);
    classes_[size_class].free.push_back(std::move(block));
  }

  const Allocate allocate_;
  const int num_forks_before_ = num_forks;
  mutable std::mutex mu_;
  std::array<SizeClass, kNumClasses> classes_;  // Guarded by mu_.
  size_t num_allocated_ = 0;                    // Guarded by mu_.
};

inline Block allocate_from_heap(size_t nbytes) {
  constexpr size_t kPage = 4096;
  const auto alignment = std::align_val_t(nbytes >= kPage ? kPage : 64);
  std::shared_ptr<void> owner(
      ::operator new(nbytes, alignment),
      [alignment](void* data) { ::operator delete(data, alignment); });
  return {static_cast<char*>(owner.get()), owner};
}

inline Array BufferPool::allocate(DType dtype, Shape shape) {
  const size_t nbytes = num_bytes(dtype, shape);
  const size_t size_class = class_of(nbytes);
  Block block = take(size_class);
  if (block.data == nullptr) {
    try {
      block = make(size_class);
    } catch (const std::bad_alloc&) {
      throw OutOfMemory("no memory for an array " + describe(dtype, shape) +
                        " of " + std::to_string(nbytes) +
                        " bytes; choose a smaller batch size, unroll length, "
                        "queue or number of environments");
    }
  }
  char* const data = block.data;
  std::shared_ptr<void> owner(
      data, Return{weak_from_this(), size_class, std::move(block)});
  return {dtype, std::move(shape), data, std::move(owner)};
}

}  // namespace torchbeast
