// SPDX-License-Identifier: Apache-2.0

#include "wire.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

namespace torchbeast::wire {
namespace {

constexpr int kVarint = 0;
constexpr int kFixed64 = 1;
constexpr int kBytes = 2;
constexpr int kFixed32 = 5;

constexpr size_t kMaxVarintBytes = 10;

struct Tag {
  uint32_t field = 0;
  int type = 0;
};

// Reads the fields of a message, which may be spread over several parts.
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

  // What a field of ours must have.
  static void expect(int type, const Tag& tag) {
    if (tag.type != type) {
      throw DecodeError("field " + std::to_string(tag.field) +
                        " has wire type " + std::to_string(tag.type) +
                        ", expected " + std::to_string(type));
    }
  }

 private:
  // Moves from the end of a part to the first byte of the next.
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

uint32_t to_uint32(uint64_t value, const char* what) {
  if (value > std::numeric_limits<uint32_t>::max()) {
    throw DecodeError(std::string(what) + " is " + std::to_string(value) +
                      ", too large");
  }
  return static_cast<uint32_t>(value);
}

uint32_t read_uint32(Reader& reader, const Tag& tag, const char* what) {
  Reader::expect(kVarint, tag);
  return to_uint32(reader.varint(), what);
}

bool read_bool(Reader& reader, const Tag& tag) {
  Reader::expect(kVarint, tag);
  return reader.varint() != 0;
}

std::string read_text(Reader& reader, const Tag& tag, const char* what) {
  Reader::expect(kBytes, tag);
  std::string text = reader.string();
  if (!is_utf8(text)) throw DecodeError(std::string(what) + " is not UTF-8");
  return text;
}

Key decode_key(const Segments& message, Piece body) {
  Key key;
  bool found = false;
  Reader reader(message, body);
  while (!reader.at_end()) {
    const Tag tag = reader.tag();
    if (tag.field == 1) {
      key = Key();
      key.name = read_text(reader, tag, "a key");
      if (printable(key.name, kMaxKeyBytes) != key.name) {
        throw DecodeError("the key '" + printable(key.name, 40) +
                          "' is too long or has control characters");
      }
      found = true;
    } else if (tag.field == 2) {
      key = Key();
      key.is_index = true;
      key.index = read_uint32(reader, tag, "an index");
      found = true;
    } else {
      reader.skip(tag.type);
    }
  }
  if (!found) throw DecodeError("a path has an empty key");
  return key;
}

// The bytes of one environment's array; checked, as the shape comes from afar.
size_t checked_nbytes(const ArraySpec& spec) {
  int64_t nbytes = static_cast<int64_t>(itemsize(spec.dtype));
  bool empty = false;
  for (const int64_t axis : spec.shape) {
    empty = empty || axis == 0;
    if (__builtin_mul_overflow(nbytes, std::max<int64_t>(axis, 1), &nbytes)) {
      throw DecodeError("array " + path_name(spec) + " is too large");
    }
  }
  return empty ? 0 : static_cast<size_t>(nbytes);
}

void add_axis(ArraySpec& spec, uint64_t axis) {
  if (spec.shape.size() == kMaxRank) {
    throw DecodeError("an array has more than " + std::to_string(kMaxRank) +
                      " axes");
  }
  if (axis > std::numeric_limits<int64_t>::max()) {
    throw DecodeError("an array has an axis of " + std::to_string(axis));
  }
  spec.shape.push_back(static_cast<int64_t>(axis));
}

ArraySpec decode_array(const Segments& message, Piece body) {
  ArraySpec spec;
  std::string dtype;
  Reader reader(message, body);
  while (!reader.at_end()) {
    const Tag tag = reader.tag();
    switch (tag.field) {
      case 1:
        Reader::expect(kBytes, tag);
        if (spec.path.size() == kMaxDepth) {
          throw DecodeError("a path has more than " +
                            std::to_string(kMaxDepth) + " keys");
        }
        spec.path.push_back(decode_key(message, reader.bytes()));
        break;
      case 2:
        dtype = read_text(reader, tag, "a dtype");
        break;
      case 3:
        if (tag.type == kBytes) {  // Packed, as writers do today.
          Reader packed(message, reader.bytes());
          while (!packed.at_end()) add_axis(spec, packed.varint());
        } else {
          Reader::expect(kVarint, tag);
          add_axis(spec, reader.varint());
        }
        break;
      case 4:
        spec.stack = read_bool(reader, tag);
        break;
      default:
        reader.skip(tag.type);
    }
  }
  const std::optional<DType> known = dtype_from_name(dtype);
  if (!known) {
    throw DecodeError("array " + path_name(spec) + " has the unknown dtype '" +
                      printable(dtype, 40) + "'");
  }
  spec.dtype = *known;
  spec.nbytes = checked_nbytes(spec);
  if (spec.stack && (spec.shape.empty() || spec.shape[0] == 0)) {
    throw DecodeError("array " + path_name(spec) +
                      " is a stack, but has no frames");
  }
  return spec;
}

void add_array(const Segments& message, Reader& reader, const Tag& tag,
               std::vector<ArraySpec>& specs) {
  Reader::expect(kBytes, tag);
  if (specs.size() == kMaxArrays) {
    throw DecodeError("it has more than " + std::to_string(kMaxArrays) +
                      " arrays");
  }
  specs.push_back(decode_array(message, reader.bytes()));
}

void add_option(const Segments& message, Reader& reader, const Tag& tag,
                std::map<std::string, std::string>& options) {
  Reader::expect(kBytes, tag);
  std::string name;
  std::string value;
  Reader option(message, reader.bytes());
  while (!option.at_end()) {
    const Tag part = option.tag();
    if (part.field == 1) {
      name = read_text(option, part, "an option's name");
    } else if (part.field == 2) {
      Reader::expect(kBytes, part);
      value = option.string();
    } else {
      option.skip(part.type);
    }
  }
  if (printable(name, kMaxOptionBytes) != name) {
    throw DecodeError("the option '" + printable(name, 40) +
                      "' is too long or has control characters");
  }
  if (value.size() > kMaxOptionBytes) {
    throw DecodeError("the option '" + name + "' has a value of more than " +
                      std::to_string(kMaxOptionBytes) + " bytes");
  }
  if (!options.emplace(name, std::move(value)).second) {
    throw DecodeError("the option '" + name + "' is there twice");
  }
  if (options.size() > kMaxOptions) {
    throw DecodeError("it has more than " + std::to_string(kMaxOptions) +
                      " options");
  }
}

// True if every byte of the piece is 0 or 1.
bool are_bools(const Segments& message, Piece piece) {
  char seen = 0;
  for (size_t part = piece.part, offset = piece.offset, left = piece.size;
       left > 0; ++part, offset = 0) {
    const std::string_view bytes = message.parts[part].substr(offset, left);
    for (const char byte : bytes) seen |= byte;
    left -= bytes.size();
  }
  return (seen & ~1) == 0;
}

void check_array(const Segments& message, Piece piece, const ArraySpec& spec,
                 size_t num_envs, bool newest_frames) {
  const bool is_frame = newest_frames && spec.stack;
  const size_t nbytes =
      num_envs * (is_frame ? spec.frame_nbytes() : spec.nbytes);
  if (piece.size != nbytes) {
    throw DecodeError("array " + path_name(spec) + " has " +
                      std::to_string(piece.size) + " bytes, expected " +
                      std::to_string(nbytes) + " (" + std::to_string(num_envs) +
                      (is_frame ? " newest frames of " : " of ") +
                      describe(spec.dtype, spec.shape) + ")");
  }
  if (spec.dtype == DType::kBool && !are_bools(message, piece)) {
    throw DecodeError("array " + path_name(spec) +
                      " is bool and has a byte other than 0 and 1");
  }
}

// The numbers of an array, until this thread's next call.
template <typename T>
const std::vector<T>& load(const Segments& message, Piece piece) {
  thread_local std::vector<T> values;  // Its memory is used again.
  values.resize(piece.size / sizeof(T));
  copy(message, piece, reinterpret_cast<char*>(values.data()));
  return values;
}

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) {
    out.push_back(static_cast<char>((value & 0x7f) | 0x80));
  }
  out.push_back(static_cast<char>(value));
}

void put_tag(std::string& out, int field, int type) {
  put_varint(out, static_cast<uint64_t>(field << 3 | type));
}

void put_number(std::string& out, int field, uint64_t value) {
  put_tag(out, field, kVarint);
  put_varint(out, value);
}

void put_bytes(std::string& out, int field, std::string_view bytes) {
  put_tag(out, field, kBytes);
  put_varint(out, bytes.size());
  out.append(bytes);
}

size_t varint_size(uint64_t value) {
  size_t size = 1;
  for (; value >= 0x80; value >>= 7) ++size;
  return size;
}

// The structure of the arrays `members` below their first `depth` keys, which
// they share. Appends them to `order` as its leaves.
Structure::Ptr nest_arrays(const std::vector<ArraySpec>& specs,
                           const std::vector<size_t>& members, size_t depth,
                           std::vector<size_t>& order) {
  for (const size_t member : members) {
    if (specs[member].path.size() > depth) continue;
    if (members.size() > 1) {
      throw DecodeError("array " + path_name(specs[member]) +
                        " stands where another one does");
    }
    order.push_back(member);
    return Structure::leaf();
  }

  const bool is_tuple = specs[members[0]].path[depth].is_index;
  std::map<std::string, std::vector<size_t>> by_name;
  std::map<uint32_t, std::vector<size_t>> by_index;
  for (const size_t member : members) {
    const Key& key = specs[member].path[depth];
    if (key.is_index != is_tuple) {
      throw DecodeError("array " + path_name(specs[member]) +
                        " makes a dict and a tuple of the same place");
    }
    if (is_tuple) {
      by_index[key.index].push_back(member);
    } else {
      by_name[key.name].push_back(member);
    }
  }

  if (is_tuple) {
    std::vector<Structure::Ptr> children;
    for (const auto& [index, group] : by_index) {
      if (index != children.size()) {
        throw DecodeError("array " + path_name(specs[group[0]]) +
                          " has no neighbour with index " +
                          std::to_string(children.size()));
      }
      children.push_back(nest_arrays(specs, group, depth + 1, order));
    }
    return Structure::tuple(std::move(children));
  }
  std::map<std::string, Structure::Ptr> children;
  for (const auto& [name, group] : by_name) {
    children[name] = nest_arrays(specs, group, depth + 1, order);
  }
  return Structure::dict(std::move(children));
}

// Bytes of the UTF-8 character at the front of `text`; 0 if it is none.
size_t utf8_size(std::string_view text) {
  const auto byte = [&](size_t i) -> uint32_t {
    return i < text.size() ? static_cast<uint8_t>(text[i]) : 0;
  };
  const auto tail = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
  const uint32_t first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first < 0xe0) return tail(1) ? 2 : 0;
  if (first >= 0xe0 && first < 0xf0) {
    const bool overlong = first == 0xe0 && byte(1) < 0xa0;
    const bool surrogate = first == 0xed && byte(1) >= 0xa0;
    return tail(1) && tail(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (first >= 0xf0 && first < 0xf5) {
    const bool overlong = first == 0xf0 && byte(1) < 0x90;
    const bool too_large = first == 0xf4 && byte(1) >= 0x90;
    return tail(1) && tail(2) && tail(3) && !overlong && !too_large ? 4 : 0;
  }
  return 0;
}

}  // namespace

std::string path_name(const ArraySpec& spec) {
  std::string text;
  for (const Key& key : spec.path) {
    if (key.is_index) {
      text += "[" + std::to_string(key.index) + "]";
    } else {
      if (!text.empty()) text += ".";
      text += printable(key.name, 100);
    }
  }
  return text.empty() ? "action" : text;  // Only an action's may be empty.
}

std::string describe(const ArraySpec& spec) {
  return path_name(spec) + " " + torchbeast::describe(spec.dtype, spec.shape) +
         (spec.stack ? " (a stack of frames)" : "");
}

ToLearner open(const Segments& message) {
  static constexpr std::array kKinds = {Kind::kWelcome, Kind::kStep,
                                        Kind::kFailure, Kind::kGoodbye};
  std::optional<ToLearner> found;
  Reader reader(message, {.size = message.size()});
  while (!reader.at_end()) {
    const Tag tag = reader.tag();
    if (tag.field > kKinds.size()) {
      reader.skip(tag.type);
      continue;
    }
    Reader::expect(kBytes, tag);
    if (found) throw DecodeError("it holds two messages");
    found = {kKinds[tag.field - 1], reader.bytes()};
  }
  if (!found) throw DecodeError("it holds no message known here");
  return *found;
}

Welcome decode_welcome(const Segments& message, Piece body) {
  Welcome welcome;
  Reader reader(message, body);
  while (!reader.at_end()) {
    const Tag tag = reader.tag();
    switch (tag.field) {
      case 1:
        welcome.protocol = read_uint32(reader, tag, "protocol");
        break;
      case 2:
        welcome.version = read_text(reader, tag, "version");
        break;
      case 3:
        Reader::expect(kBytes, tag);
        welcome.incarnation_id = reader.string();
        break;
      case 4:
        welcome.env = read_text(reader, tag, "env");
        break;
      case 5:
        welcome.num_envs = read_uint32(reader, tag, "num_envs");
        break;
      case 6:
        welcome.num_streams = read_uint32(reader, tag, "num_streams");
        break;
      case 7:
        welcome.frames_per_step = read_uint32(reader, tag, "frames_per_step");
        break;
      case 10:
        add_array(message, reader, tag, welcome.step_arrays);
        break;
      case 11:
        add_array(message, reader, tag, welcome.action_arrays);
        break;
      case 12:
        add_option(message, reader, tag, welcome.options);
        break;
      default:  // Also the spaces: they are for whoever makes the model.
        reader.skip(tag.type);
    }
  }
  return welcome;
}

Failure decode_failure(const Segments& message, Piece body) {
  Failure failure;
  Reader reader(message, body);
  while (!reader.at_end()) {
    const Tag tag = reader.tag();
    if (tag.field == 1) {
      Reader::expect(kBytes, tag);
      failure.text = reader.string();
    } else if (tag.field == 2) {
      failure.permanent = read_bool(reader, tag);
    } else {
      reader.skip(tag.type);
    }
  }
  return failure;
}

Goodbye decode_goodbye(const Segments& message, Piece body) {
  Goodbye goodbye;
  Reader reader(message, body);
  while (!reader.at_end()) {
    const Tag tag = reader.tag();
    if (tag.field == 1) {
      Reader::expect(kBytes, tag);
      goodbye.reason = reader.string();
    } else {
      reader.skip(tag.type);
    }
  }
  return goodbye;
}

void decode_step(const Segments& message, Piece body,
                 const std::vector<ArraySpec>& specs, size_t num_envs,
                 Step* step) {
  step->seq = 0;
  step->arrays.clear();
  step->newest_frames = false;
  Reader reader(message, body);
  while (!reader.at_end()) {
    const Tag tag = reader.tag();
    if (tag.field == 1) {
      Reader::expect(kFixed64, tag);
      step->seq = reader.fixed64();
    } else if (tag.field == 2) {
      Reader::expect(kBytes, tag);
      const size_t i = step->arrays.size();
      if (i == specs.size()) {
        throw DecodeError("it has more than the expected " +
                          std::to_string(specs.size()) + " arrays");
      }
      step->arrays.push_back(reader.bytes());
    } else if (tag.field == 3) {
      step->newest_frames = read_bool(reader, tag);
    } else {
      reader.skip(tag.type);
    }
  }
  if (step->arrays.size() != specs.size()) {
    throw DecodeError("it has " + std::to_string(step->arrays.size()) +
                      " arrays, expected " + std::to_string(specs.size()));
  }
  for (size_t i = 0; i < specs.size(); ++i) {
    check_array(message, step->arrays[i], specs[i], num_envs,
                step->newest_frames);
  }
}

void check_range(const Segments& message, Piece piece, const ArraySpec& spec,
                 const ValueRange& range, size_t num_envs) {
  const auto& values = load<int64_t>(message, piece);
  const size_t n = values.size() / num_envs;
  // Of a stack that may be the newest frame alone, which is the last one.
  const size_t first = range.low.size() - n;
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t low = range.low[first + i % n];
    const int64_t high = range.high[first + i % n];
    if (low <= values[i] && values[i] <= high) continue;
    throw DecodeError("array " + path_name(spec) + " of environment " +
                      std::to_string(i / n) + " in this stream has " +
                      std::to_string(values[i]) + ", expected " +
                      std::to_string(low) + " to " + std::to_string(high));
  }
}

void check_finite(const Segments& message, Piece piece, const ArraySpec& spec) {
  const auto& values = load<float>(message, piece);
  for (size_t k = 0; k < values.size(); ++k) {
    if (std::isfinite(values[k])) continue;
    throw DecodeError("array " + path_name(spec) + " of environment " +
                      std::to_string(k) + " in this stream has " +
                      std::to_string(values[k]) + ", expected a finite number");
  }
}

void copy(const Segments& message, Piece piece, char* to) {
  copy_runs(message, piece, piece.size, piece.size, to);
}

void copy_runs(const Segments& message, Piece piece, size_t run, size_t stride,
               char* to) {
  size_t done = 0;  // Of a run.
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

std::string encode(const Hello& hello) {
  std::string out;
  put_number(out, 1, hello.protocol);
  put_bytes(out, 2, hello.version);
  put_bytes(out, 3, hello.run_id);
  for (const std::string& key : hello.info_keys) put_bytes(out, 4, key);
  put_number(out, 5, hello.seed);
  put_number(out, 6, hello.first_env_id);
  put_number(out, 7, hello.incarnation);
  put_number(out, 8, hello.newest_frames);
  put_number(out, 9, hello.truncation_is_done);
  return out;
}

std::string hello_to_server(const Hello& hello) {
  std::string out;
  put_bytes(out, 1, encode(hello));
  return out;
}

std::string action_to_server(uint64_t seq,
                             const std::vector<std::string_view>& arrays,
                             bool whole) {
  size_t size = 1 + 8 + (whole ? 2 : 0);
  for (const std::string_view array : arrays) {
    size += 1 + varint_size(array.size()) + array.size();
  }
  std::string out;
  out.reserve(1 + varint_size(size) + size);
  put_tag(out, 2, kBytes);
  put_varint(out, size);
  put_tag(out, 1, kFixed64);
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(seq >> (8 * i)));
  for (const std::string_view array : arrays) put_bytes(out, 2, array);
  if (whole) put_number(out, 3, 1);
  return out;
}

Layout layout(const std::vector<ArraySpec>& specs) {
  if (specs.empty()) throw DecodeError("there are no arrays");
  std::vector<size_t> members(specs.size());
  std::iota(members.begin(), members.end(), size_t{0});
  Layout result;
  result.structure = nest_arrays(specs, members, 0, result.arrays);
  return result;
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t size = utf8_size(text);
    if (size == 0) return false;
    text.remove_prefix(size);
  }
  return true;
}

std::string printable(std::string_view text, size_t limit) {
  std::string out;
  while (!text.empty()) {
    const size_t size = utf8_size(text);
    const std::string_view character =
        text.substr(0, std::max<size_t>(size, 1));
    if (out.size() + character.size() > limit) break;
    const auto first = static_cast<uint8_t>(character[0]);
    // Those of ASCII; and U+0080 to U+009F, of which terminals obey some.
    const bool control =
        (first < 0x20 && first != '\n' && first != '\t') || first == 0x7f ||
        (first == 0xc2 && static_cast<uint8_t>(character.back()) < 0xa0);
    if (size == 0 || control) {
      out.push_back('?');
    } else {
      out.append(character);
    }
    text.remove_prefix(character.size());
  }
  return out;
}

}  // namespace torchbeast::wire
