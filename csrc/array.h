// SPDX-License-Identifier: Apache-2.0
//
// The array type of the core: rows of environments, outputs of agents and
// learner batches are made of these.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torchbeast {

enum class DType : uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
};
inline constexpr size_t kNumDTypes = 13;

size_t itemsize(DType dtype);
std::string_view name(DType dtype);  // The name in numpy and torch: "float32".
std::optional<DType> dtype_from_name(std::string_view name);

using Shape = std::vector<int64_t>;

// The size of an array in bytes. Throws std::invalid_argument if an axis is
// negative or the size does not fit into an int64.
size_t num_bytes(DType dtype, const Shape& shape);

// "uint8[4,84,84]"
std::string describe(DType dtype, const Shape& shape);

// Elements of one dtype, contiguous in C order. A copy of an Array shares its
// memory.
struct Array {
  DType dtype = DType::kUInt8;
  Shape shape;
  char* data = nullptr;
  std::shared_ptr<void> owner;  // Keeps `data` valid. Others may share it.

  int64_t num_elements() const;
  size_t nbytes() const;
  std::string describe() const;  // "uint8[4,84,84]"
};

}  // namespace torchbeast
