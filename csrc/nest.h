// SPDX-License-Identifier: Apache-2.0
//
// Nests: tuples, lists and dicts of arrays, any way into each other.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "array.h"

namespace torchbeast {

// How leaves are nested. Immutable, so that nests of one kind share one.
struct Structure {
  using Ptr = std::shared_ptr<const Structure>;
  enum class Kind : uint8_t { kLeaf, kTuple, kList, kDict };

  Kind kind = Kind::kLeaf;
  std::vector<std::string> keys;  // Of a dict: sorted, one for each child.
  std::vector<Ptr> children;
  // A namedtuple's class, for whoever made the structure; not looked at here,
  // and not part of what makes two structures equal.
  std::shared_ptr<void> type;
  size_t num_leaves = 1;  // Here and below.

  static Ptr leaf();
  static Ptr tuple(std::vector<Ptr> children,
                   std::shared_ptr<void> type = nullptr);
  static Ptr list(std::vector<Ptr> children);
  static Ptr dict(std::map<std::string, Ptr> children);
};

// The kinds, keys and nesting; a tuple equals a list, as in Python's `nest`.
// Not the arrays, and not `type`.
bool equal(const Structure& a, const Structure& b);

std::string describe(const Structure& structure);  // "({a: *, b: *}, *)"

// How Python would reach leaf number `leaf`, for messages: "[0]['frame']".
// Empty if the nest is this leaf.
std::string leaf_path(const Structure& structure, size_t leaf);

// A structure and its leaves, in order: depth first, dicts by sorted key.
struct Nest {
  Structure::Ptr structure;
  std::vector<Array> leaves;  // As many as structure->num_leaves.
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
    default:  // A tuple of one needs its comma.
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

}  // namespace torchbeast
