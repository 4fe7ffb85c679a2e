// SPDX-License-Identifier: Apache-2.0

#include "wire.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>

#include "text.h"
#include "wire_format.h"
#include "wire_space.h"

namespace torchbeast::wire {
namespace {

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

// The size of one environment's array in bytes.
size_t checked_nbytes(const ArraySpec& spec) {
  try {
    return num_bytes(spec.dtype, spec.shape);
  } catch (const std::invalid_argument& error) {
    throw DecodeError("array " + path_name(spec) +
                      " is too large: " + error.what());
  }
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
        if (tag.type == kBytes) {  // Packed, the usual encoding.
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

// Returns the elements of an array. Valid until this thread's next call.
template <typename T>
const std::vector<T>& load(const Segments& message, Piece piece) {
  thread_local std::vector<T> values;  // Keeps its memory between calls.
  values.resize(piece.size / sizeof(T));
  copy(message, piece, reinterpret_cast<char*>(values.data()));
  return values;
}

bool is_zero(const char* bytes, DType dtype) {
  const size_t size = itemsize(dtype);
  for (size_t i = 0; i + 1 < size; ++i) {
    if (bytes[i] != 0) return false;
  }
  // Little endian: the sign of a float is in the last byte, and -0.0 is 0.
  return (bytes[size - 1] & (dtype >= DType::kFloat16 ? 0x7f : 0xff)) == 0;
}

// Returns the structure of the arrays `members`, whose paths agree in their
// first `depth` keys. Appends the arrays to `order`, in the order of the
// leaves.
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
  return text.empty() ? "action"
                      : text;  // Only the path of an action may be empty.
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
  size_t values = 0;  // Of both spaces.
  Reader reader(message, body);
  while (!reader.at_end()) {
    const Tag tag = reader.tag();
    switch (tag.field) {
      case 1:
        welcome.protocol = read_uint32(reader, tag, "protocol");
        break;
      case 4:
        welcome.env = read_text(reader, tag, "env");
        break;
      case 5:
        welcome.num_envs = read_uint32(reader, tag, "num_envs");
        break;
      case 7:
        welcome.frames_per_step = read_uint32(reader, tag, "frames_per_step");
        break;
      case 8:
        Reader::expect(kBytes, tag);
        welcome.observation = decode_space(message, reader.bytes(), values);
        break;
      case 9:
        Reader::expect(kBytes, tag);
        welcome.action = decode_space(message, reader.bytes(), values);
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
      default:
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

std::string describe_value(const std::string& value) {
  std::string text = "nothing";
  Segments message;
  message.parts.emplace_back(value);
  Reader reader(message, Piece{0, 0, value.size()});
  try {
    while (!reader.at_end()) {
      const Tag tag = reader.tag();
      if (tag.field == 1) {
        text = read_bool(reader, tag) ? "True" : "False";
      } else if (tag.field == 2) {
        Reader::expect(kVarint, tag);
        const uint64_t n = reader.varint();  // ZigZag: 0, -1, 1, -2...
        text = std::to_string(static_cast<int64_t>((n >> 1) ^ (~(n & 1) + 1)));
      } else if (tag.field == 3) {
        Reader::expect(kFixed64, tag);
        std::array<char, 32> digits;  // As few as tell the number from others.
        const auto number = std::bit_cast<double>(reader.fixed64());
        const auto end = std::to_chars(digits.begin(), digits.end(), number);
        text.assign(digits.begin(), end.ptr);
        const bool is_whole = text.find_first_of(".en") == std::string::npos;
        if (is_whole) text += ".0";
      } else if (tag.field == 4) {
        text = "'" + printable(read_text(reader, tag, "a text"), 100) + "'";
      } else {
        reader.skip(tag.type);
      }
    }
  } catch (const DecodeError&) {
    return "unreadable";
  }
  return text;
}

void check_range(const Segments& message, Piece piece, const ArraySpec& spec,
                 const ValueRange& range, size_t num_envs) {
  const auto& values = load<int64_t>(message, piece);
  const size_t n = values.size() / num_envs;
  // If the array is the newest frame of a stack, its ranges are the last ones.
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

void check_mask(const Segments& message, const Step& step,
                const std::vector<ArraySpec>& specs, const Mask& mask,
                size_t num_envs) {
  const size_t entries = mask.num_entries();
  thread_local std::string allowed;  // [K, entries]; keeps its memory.
  allowed.resize(num_envs * entries);
  size_t column = 0;
  for (const size_t i : mask.arrays) {
    const DType dtype = specs[i].dtype;
    const size_t n = specs[i].nbytes / itemsize(dtype);
    const auto& bytes = load<char>(message, step.arrays[i]);
    for (size_t j = 0; j < num_envs * n; ++j) {
      const char* at = bytes.data() + j * itemsize(dtype);
      allowed[j / n * entries + column + j % n] = !is_zero(at, dtype);
    }
    column += n;
  }
  auto at = allowed.begin();
  for (size_t k = 0; k < num_envs; ++k) {
    for (size_t choice = 0; choice < mask.sizes.size(); ++choice) {
      const auto begin = at;
      at += static_cast<ptrdiff_t>(mask.sizes[choice]);
      if (std::find(begin, at, '\1') != at) continue;
      if (mask.truncated &&
          load<char>(message, step.arrays[*mask.truncated])[k] != 0) {
        continue;
      }
      throw DecodeError("array observation.action_mask of environment " +
                        std::to_string(k) + " in this stream allows none of " +
                        std::to_string(mask.sizes[choice]) +
                        " values of choice " + std::to_string(choice) +
                        ", expected at least one; end the episode before");
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
  std::string body;
  put_tag(body, 1, kFixed64);
  for (int i = 0; i < 8; ++i) body.push_back(static_cast<char>(seq >> (8 * i)));
  for (const std::string_view array : arrays) put_bytes(body, 2, array);
  if (whole) put_number(body, 3, 1);
  std::string out;
  put_bytes(out, 2, body);
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

}  // namespace torchbeast::wire
