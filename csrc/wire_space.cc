// SPDX-License-Identifier: Apache-2.0

#include "wire_space.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "array.h"
#include "wire.h"

namespace torchbeast::wire {
namespace {

// Kinds of spaces, by their fields in Space.
enum SpaceKind : uint32_t { kBox = 1, kDiscrete = 2, kDict = 5, kTuple = 6 };

// No kind of space has a field with a larger number.
constexpr uint32_t kLastField = 4;

std::string decode_space_at(const Segments& message, Piece body, size_t depth,
                            size_t& values);

// Reads the tag of the next field, and counts the field.
Tag next_tag(Reader& reader, size_t& values) {
  if (++values > kMaxValues) {
    throw DecodeError("its spaces have more than " +
                      std::to_string(kMaxValues) + " values");
  }
  return reader.tag();
}

// The bounds of a Box: one number if all are the same.
std::string short_bounds(const std::string& bounds, const std::string& dtype) {
  const std::optional<DType> known = dtype_from_name(dtype);
  const size_t size = known ? itemsize(*known) : 0;
  if (size == 0 || bounds.size() <= size || bounds.size() % size != 0) {
    return bounds;
  }
  const std::string_view all = bounds;
  const bool are_same = all.substr(size) == all.substr(0, all.size() - size);
  return are_same ? bounds.substr(0, size) : bounds;
}

// Adds an Entry of a Dict: the key and its space.
void add_entry(const Segments& message, Piece body, size_t depth,
               size_t& values, std::map<std::string, std::string>& entries) {
  std::string key;
  std::string space;
  Reader entry(message, body);
  while (!entry.at_end()) {
    const Tag tag = next_tag(entry, values);
    if (tag.field == 1) {
      Reader::expect(kBytes, tag);
      key = entry.string();
    } else if (tag.field == 2) {
      Reader::expect(kBytes, tag);
      space = decode_space_at(message, entry.bytes(), depth, values);
    } else {
      entry.skip(tag.type);
    }
  }
  entries[key] = std::move(space);
}

// Returns the space of this kind in the encoding of Welcome::observation.
std::string decode_kind(const Segments& message, Piece body, uint32_t kind,
                        size_t depth, size_t& values) {
  std::map<uint32_t, std::string> fields;
  std::map<std::string, std::string> entries;  // Of a Dict.
  Reader reader(message, body);
  while (!reader.at_end()) {
    const Tag tag = next_tag(reader, values);
    if (tag.field > kLastField) {
      reader.skip(tag.type);
    } else if (tag.type == kVarint) {
      const uint64_t value = reader.varint();
      // A Discrete has single numbers: 0 may also be left out. All other
      // numbers are repeated: packed or not.
      if (kind != kDiscrete || value != 0) {
        put_varint(fields[tag.field], value);
      }
    } else if (tag.type != kBytes) {
      reader.skip(tag.type);
    } else if (kind == kTuple && tag.field == 1) {
      put_bytes(fields[1], 1,
                decode_space_at(message, reader.bytes(), depth + 1, values));
    } else if (kind == kDict && tag.field == 1) {
      add_entry(message, reader.bytes(), depth + 1, values, entries);
    } else {
      fields[tag.field] += reader.string();
    }
  }
  if (kind == kBox) {
    for (const uint32_t bounds : {3, 4}) {
      fields[bounds] = short_bounds(fields[bounds], fields[1]);
    }
  }
  std::string out;
  put_number(out, 1, kind);
  for (const auto& [field, bytes] : fields) {
    put_number(out, 2, field);
    put_bytes(out, 3, bytes);
  }
  for (const auto& [key, space] : entries) {
    put_bytes(out, 4, key);
    put_bytes(out, 5, space);
  }
  return out;
}

// As decode_space. `depth` is 0 for the outermost space.
std::string decode_space_at(const Segments& message, Piece body, size_t depth,
                            size_t& values) {
  if (depth > kMaxDepth) throw DecodeError("a space is nested too deeply");
  std::string out;
  Reader reader(message, body);
  while (!reader.at_end()) {
    const Tag tag = next_tag(reader, values);
    if (tag.field > kTuple) {
      reader.skip(tag.type);
    } else {
      Reader::expect(kBytes, tag);
      out = decode_kind(message, reader.bytes(), tag.field, depth, values);
    }
  }
  return out;
}

}  // namespace

std::string decode_space(const Segments& message, Piece body, size_t& values) {
  return decode_space_at(message, body, 0, values);
}

}  // namespace torchbeast::wire
