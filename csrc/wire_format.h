// SPDX-License-Identifier: Apache-2.0
//
// Reads and writes the fields of protobuf messages. wire.h has the messages of
// proto/torchbeast.proto.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "transport.h"

namespace torchbeast::wire {

// The message is malformed; what() says why.
struct DecodeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A range of bytes of a received message.
struct Piece {
  size_t part = 0;    // The part in which the range begins.
  size_t offset = 0;  // The first byte within this part.
  size_t size = 0;    // The range may reach into the next parts.
};

// Copies the piece to runs of `run` bytes, which begin `stride` bytes apart.
inline void copy_runs(const Segments& message, Piece piece, size_t run,
                      size_t stride, char* to) {
  size_t done = 0;  // Bytes of the present run.
  for (size_t part = piece.part, offset = piece.offset, left = piece.size;
       left > 0; ++part, offset = 0) {
    std::string_view bytes = message.parts[part].substr(offset, left);
    left -= bytes.size();
    while (!bytes.empty()) {
      const size_t size = std::min(bytes.size(), run - done);
      std::memcpy(to + done, bytes.data(), size);
      bytes.remove_prefix(size);
      done += size;
      if (done == run) {
        done = 0;
        to += stride;
      }
    }
  }
}

inline void copy(const Segments& message, Piece piece, char* to) {
  copy_runs(message, piece, piece.size, piece.size, to);
}

// Wire types.
inline constexpr int kVarint = 0;
inline constexpr int kFixed64 = 1;
inline constexpr int kBytes = 2;
inline constexpr int kFixed32 = 5;

inline constexpr size_t kMaxVarintBytes = 10;

struct Tag {
  uint32_t field = 0;
  int type = 0;
};

// Reads the fields of a message, whose bytes may be spread over several parts.
// The methods throw DecodeError. Not thread-safe.
class Reader {
 public:
  Reader(const Segments& message, Piece piece)
      : message_(message),
        part_(piece.part),
        offset_(piece.offset),
        left_(piece.size) {}

  bool at_end() const { return left_ == 0; }

  Tag tag() {
    const uint64_t value = varint();
    const uint64_t field = value >> 3;
    if (field == 0 || field > (uint64_t{1} << 29) - 1) {
      throw DecodeError("field number " + std::to_string(field) +
                        " is impossible");
    }
    return {static_cast<uint32_t>(field), static_cast<int>(value & 7)};
  }

  uint64_t varint() {
    uint64_t value = 0;
    for (size_t i = 0; i < kMaxVarintBytes; ++i) {
      const auto byte = static_cast<uint8_t>(next());
      if (i == kMaxVarintBytes - 1 && byte > 1) break;  // Over 64 bits.
      value |= uint64_t{byte & 0x7fu} << (7 * i);
      if (byte < 0x80) return value;
    }
    throw DecodeError("a number does not fit into 64 bits");
  }

  uint64_t fixed64() {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) {
      value |= uint64_t{static_cast<uint8_t>(next())} << (8 * i);
    }
    return value;
  }

  Piece bytes() {
    const uint64_t size = varint();
    if (size > left_) {
      throw DecodeError("a field of " + std::to_string(size) +
                        " bytes has only " + std::to_string(left_) + " left");
    }
    find_part();
    const Piece piece{part_, offset_, static_cast<size_t>(size)};
    advance(piece.size);
    return piece;
  }

  std::string string() {
    const Piece piece = bytes();
    std::string text(piece.size, '\0');
    copy(message_, piece, text.data());
    return text;
  }

  void skip(int type) {
    switch (type) {
      case kVarint:
        varint();
        return;
      case kFixed64:
        advance_checked(8);
        return;
      case kBytes:
        bytes();
        return;
      case kFixed32:
        advance_checked(4);
        return;
      default:
        throw DecodeError("wire type " + std::to_string(type) + " is unknown");
    }
  }

  // Checks the wire type of a field.
  static void expect(int type, const Tag& tag) {
    if (tag.type != type) {
      throw DecodeError("field " + std::to_string(tag.field) +
                        " has wire type " + std::to_string(tag.type) +
                        ", expected " + std::to_string(type));
    }
  }

 private:
  // If the present part has ended, goes to the first byte of the next one.
  void find_part() {
    while (part_ < message_.parts.size() &&
           offset_ == message_.parts[part_].size()) {
      ++part_;
      offset_ = 0;
    }
  }

  char next() {
    if (left_ == 0) throw DecodeError("it ends in the middle of a field");
    find_part();
    --left_;
    return message_.parts[part_][offset_++];
  }

  void advance_checked(size_t size) {
    if (size > left_) throw DecodeError("it ends in the middle of a field");
    advance(size);
  }

  void advance(size_t size) {
    left_ -= size;
    while (size > 0) {
      find_part();
      const size_t step =
          std::min(size, message_.parts[part_].size() - offset_);
      offset_ += step;
      size -= step;
    }
  }

  const Segments& message_;
  size_t part_;
  size_t offset_;
  size_t left_;
};

inline void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) {
    out.push_back(static_cast<char>((value & 0x7f) | 0x80));
  }
  out.push_back(static_cast<char>(value));
}

inline void put_tag(std::string& out, int field, int type) {
  put_varint(out, static_cast<uint64_t>(field << 3 | type));
}

inline void put_number(std::string& out, int field, uint64_t value) {
  put_tag(out, field, kVarint);
  put_varint(out, value);
}

inline void put_bytes(std::string& out, int field, std::string_view bytes) {
  put_tag(out, field, kBytes);
  put_varint(out, bytes.size());
  out.append(bytes);
}

}  // namespace torchbeast::wire
