// SPDX-License-Identifier: Apache-2.0
//
// Nests: tuples, lists and dicts of arrays, nested to any depth.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "array.h"

namespace torchbeast {

// The shape of a nest without its arrays. Immutable, so that many nests share
// one Structure.
struct Structure {
  using Ptr = std::shared_ptr<const Structure>;
  enum class Kind : uint8_t { kLeaf, kTuple, kList, kDict };

  Kind kind = Kind::kLeaf;
  std::vector<std::string> keys;  // Only of a dict: sorted, one for each child.
  std::vector<Ptr> children;
  // Only of a namedtuple: its Python class. The core does not use it, and
  // equal() ignores it.
  std::shared_ptr<void> type;
  size_t num_leaves = 1;  // Of this structure and all its children.

  static Ptr leaf();
  static Ptr tuple(std::vector<Ptr> children,
                   std::shared_ptr<void> type = nullptr);
  static Ptr list(std::vector<Ptr> children);
  static Ptr dict(std::map<std::string, Ptr> children);
};

// Whether kinds, keys and nesting are equal. A tuple equals a list, as in
// Python's `nest`. Ignores `type`.
bool equal(const Structure& a, const Structure& b);

std::string describe(const Structure& structure);  // "({a: *, b: *}, *)"

// The path of leaf number `leaf` as Python writes it: "[0]['frame']". For
// messages. Empty if the structure is a single leaf.
std::string leaf_path(const Structure& structure, size_t leaf);

// A child of a dict, and the index of its first leaf in the dict.
struct Child {
  Structure::Ptr structure;
  size_t first_leaf = 0;
};
// If the dict has no such key, the child's `structure` is null.
Child find_child(const Structure& dict, std::string_view key);

// A structure and its leaves. The order of the leaves is depth first, and the
// keys of a dict are sorted.
struct Nest {
  Structure::Ptr structure;
  std::vector<Array> leaves;  // Their number is structure->num_leaves.
};

namespace internal {

inline Structure::Ptr make_structure(Structure structure) {
  structure.num_leaves = 0;
  for (const auto& child : structure.children) {
    structure.num_leaves += child->num_leaves;
  }
  return std::make_shared<const Structure>(std::move(structure));
}

}  // namespace internal

inline Structure::Ptr Structure::leaf() {
  static const Ptr leaf = std::make_shared<const Structure>();
  return leaf;
}

inline Structure::Ptr Structure::tuple(std::vector<Ptr> children,
                                       std::shared_ptr<void> type) {
  Structure structure;
  structure.kind = Kind::kTuple;
  structure.children = std::move(children);
  structure.type = std::move(type);
  return internal::make_structure(std::move(structure));
}

inline Structure::Ptr Structure::list(std::vector<Ptr> children) {
  Structure structure;
  structure.kind = Kind::kList;
  structure.children = std::move(children);
  return internal::make_structure(std::move(structure));
}

inline Structure::Ptr Structure::dict(std::map<std::string, Ptr> children) {
  Structure structure;
  structure.kind = Kind::kDict;
  for (auto& [key, child] : children) {
    structure.keys.push_back(key);
    structure.children.push_back(std::move(child));
  }
  return internal::make_structure(std::move(structure));
}

inline bool equal(const Structure& a, const Structure& b) {
  using Kind = Structure::Kind;
  const auto kind = [](const Structure& structure) {
    return structure.kind == Kind::kList ? Kind::kTuple : structure.kind;
  };
  if (&a == &b) return true;
  if (kind(a) != kind(b) || a.keys != b.keys ||
      a.children.size() != b.children.size()) {
    return false;
  }
  for (size_t i = 0; i < a.children.size(); ++i) {
    if (!equal(*a.children[i], *b.children[i])) return false;
  }
  return true;
}

inline std::string describe(const Structure& structure) {
  using Kind = Structure::Kind;
  if (structure.kind == Kind::kLeaf) return "*";
  std::string text;
  for (size_t i = 0; i < structure.children.size(); ++i) {
    if (i > 0) text += ", ";
    if (structure.kind == Kind::kDict) text += structure.keys[i] + ": ";
    text += describe(*structure.children[i]);
  }
  switch (structure.kind) {
    case Kind::kDict:
      return "{" + text + "}";
    case Kind::kList:
      return "[" + text + "]";
    default:  // Python writes a tuple of one element with a comma.
      return "(" + text + (structure.children.size() == 1 ? ",)" : ")");
  }
}

inline std::string leaf_path(const Structure& structure, size_t leaf) {
  for (size_t i = 0; i < structure.children.size(); ++i) {
    const Structure& child = *structure.children[i];
    if (leaf < child.num_leaves) {
      const std::string index = structure.kind == Structure::Kind::kDict
                                    ? "'" + structure.keys[i] + "'"
                                    : std::to_string(i);
      return "[" + index + "]" + leaf_path(child, leaf);
    }
    leaf -= child.num_leaves;
  }
  return "";
}

inline Child find_child(const Structure& dict, std::string_view key) {
  size_t first_leaf = 0;
  for (size_t i = 0; i < dict.children.size(); ++i) {
    if (dict.keys[i] == key) return {dict.children[i], first_leaf};
    first_leaf += dict.children[i]->num_leaves;
  }
  return {};
}

}  // namespace torchbeast
