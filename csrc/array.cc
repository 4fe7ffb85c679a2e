// SPDX-License-Identifier: Apache-2.0

#include "array.h"

#include <array>
#include <stdexcept>

namespace torchbeast {
namespace {

struct DTypeInfo {
  std::string_view name;
  size_t itemsize;
};

constexpr std::array<DTypeInfo, kNumDTypes> kDTypes = {{
    {"bool", 1},
    {"uint8", 1},
    {"int8", 1},
    {"uint16", 2},
    {"int16", 2},
    {"uint32", 4},
    {"int32", 4},
    {"uint64", 8},
    {"int64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
}};
static_assert(static_cast<size_t>(DType::kFloat64) + 1 == kNumDTypes);

}  // namespace

size_t itemsize(DType dtype) {
  return kDTypes[static_cast<size_t>(dtype)].itemsize;
}

std::string_view name(DType dtype) {
  return kDTypes[static_cast<size_t>(dtype)].name;
}

std::optional<DType> dtype_from_name(std::string_view name) {
  for (size_t i = 0; i < kDTypes.size(); ++i) {
    if (kDTypes[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

size_t num_bytes(DType dtype, const Shape& shape) {
  int64_t bytes = static_cast<int64_t>(itemsize(dtype));
  bool empty = false;
  for (int64_t size : shape) {
    if (size < 0) {
      throw std::invalid_argument(describe(dtype, shape) +
                                  " has an axis of negative size");
    }
    if (size == 0) {  // The other axes are checked nevertheless.
      empty = true;
    } else if (__builtin_mul_overflow(bytes, size, &bytes)) {
      throw std::invalid_argument(describe(dtype, shape) +
                                  " does not fit into memory");
    }
  }
  return empty ? 0 : static_cast<size_t>(bytes);
}

std::string describe(DType dtype, const Shape& shape) {
  std::string text(name(dtype));
  text += '[';
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ',';
    text += std::to_string(shape[i]);
  }
  return text + ']';
}

int64_t Array::num_elements() const {
  int64_t product = 1;
  for (int64_t size : shape) product *= size;
  return product;
}

size_t Array::nbytes() const {
  return static_cast<size_t>(num_elements()) * itemsize(dtype);
}

std::string Array::describe() const {
  return torchbeast::describe(dtype, shape);
}

}  // namespace torchbeast
