// SPDX-License-Identifier: Apache-2.0

#include "nest.h"

#include "testing.h"

using namespace torchbeast;

namespace {

Structure::Ptr example() {
  return Structure::tuple(
      {Structure::dict({{"frame", Structure::leaf()},
                        {"cards", Structure::list({Structure::leaf(),
                                                   Structure::leaf()})}}),
       Structure::leaf()});
}

}  // namespace

TEST(dtypes_are_found_by_their_names) {
  for (int i = 0; i <= static_cast<int>(DType::kFloat64); ++i) {
    const auto dtype = static_cast<DType>(i);
    CHECK(dtype_from_name(name(dtype)) == dtype);
  }
  CHECK(!dtype_from_name("complex64"));
  CHECK_EQ(itemsize(DType::kBool), 1u);
  CHECK_EQ(itemsize(DType::kBFloat16), 2u);
  CHECK_EQ(itemsize(DType::kFloat32), 4u);
  CHECK_EQ(itemsize(DType::kInt64), 8u);
}

TEST(arrays_know_their_size) {
  const Array array{DType::kInt32, {5, 3, 7}, nullptr, nullptr};
  CHECK_EQ(array.num_elements(), 5 * 3 * 7);
  CHECK_EQ(array.nbytes(), 4u * 5 * 3 * 7);
  CHECK_EQ(array.describe(), "int32[5,3,7]");
  const Array scalar{DType::kFloat64, {}, nullptr, nullptr};
  CHECK_EQ(scalar.nbytes(), 8u);
  CHECK_EQ(scalar.describe(), "float64[]");
}

TEST(num_bytes_refuses_what_cannot_be) {
  CHECK_EQ(num_bytes(DType::kInt16, {2, 3}), 12u);
  CHECK_EQ(num_bytes(DType::kInt16, {3, 0, 5}), 0u);
  CHECK_THROWS(std::invalid_argument, "uint8[2,-3] has an axis of negative",
               num_bytes(DType::kUInt8, {2, -3}));
  CHECK_THROWS(std::invalid_argument, "does not fit",
               num_bytes(DType::kUInt16, {int64_t{1} << 62}));
  CHECK_THROWS(std::invalid_argument, "does not fit",
               num_bytes(DType::kUInt8, {int64_t{1} << 32, int64_t{1} << 32}));
  CHECK_THROWS(std::invalid_argument, "does not fit",
               num_bytes(DType::kUInt8, {0, int64_t{1} << 62, 4}));
}

TEST(structures_count_their_leaves) {
  CHECK_EQ(Structure::leaf()->num_leaves, 1u);
  CHECK_EQ(Structure::tuple({})->num_leaves, 0u);
  CHECK_EQ(example()->num_leaves, 4u);
}

TEST(structures_are_described_as_python_writes_them) {
  CHECK_EQ(describe(*example()), "({cards: [*, *], frame: *}, *)");
  CHECK_EQ(describe(*Structure::leaf()), "*");
  CHECK_EQ(describe(*Structure::tuple({Structure::leaf()})), "(*,)");
  CHECK_EQ(describe(*Structure::tuple({})), "()");
}

TEST(leaves_are_named_by_their_path) {
  CHECK_EQ(leaf_path(*example(), 0), "[0]['cards'][0]");
  CHECK_EQ(leaf_path(*example(), 1), "[0]['cards'][1]");
  CHECK_EQ(leaf_path(*example(), 2), "[0]['frame']");
  CHECK_EQ(leaf_path(*example(), 3), "[1]");
  CHECK_EQ(leaf_path(*Structure::leaf(), 0), "");
}

TEST(children_of_a_dict_are_found_with_their_first_leaf) {
  const auto leaf = Structure::leaf();
  const auto dict = Structure::dict({{"a", example()}, {"b", leaf}});
  const Child child = find_child(*dict, "b");
  CHECK(child.structure == leaf);
  CHECK_EQ(child.first_leaf, 4u);
  CHECK(find_child(*dict, "c").structure == nullptr);
}

TEST(structures_are_equal_by_kind_keys_and_nesting) {
  const auto leaf = Structure::leaf();
  CHECK(equal(*example(), *example()));
  CHECK(equal(*Structure::tuple({leaf}),
              *Structure::tuple({leaf}, std::make_shared<int>(3))));
  CHECK(equal(*Structure::tuple({leaf}), *Structure::list({leaf})));
  CHECK(!equal(*Structure::list({leaf}), *Structure::dict({{"a", leaf}})));
  CHECK(!equal(*Structure::tuple({leaf}), *leaf));
  CHECK(!equal(*Structure::tuple({leaf}), *Structure::tuple({leaf, leaf})));
  CHECK(
      !equal(*Structure::dict({{"a", leaf}}), *Structure::dict({{"b", leaf}})));
  CHECK(!equal(*Structure::tuple({leaf, Structure::tuple({leaf, leaf})}),
               *Structure::tuple({Structure::tuple({leaf, leaf}), leaf})));
}
