// SPDX-License-Identifier: Apache-2.0
//
// The messages of proto/torchbeast.proto, read and written by hand: arrays are
// found in a received message without copying it, and nothing in here trusts
// the other side. The functions are pure and thread-safe.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "array.h"
#include "nest.h"
#include "transport.h"

namespace torchbeast::wire {

inline constexpr uint32_t kProtocol = 1;

// Of a Welcome. More is malformed.
inline constexpr size_t kMaxArrays = 4096;
inline constexpr size_t kMaxDepth = 16;  // Keys of a path.
inline constexpr size_t kMaxRank = 16;
inline constexpr size_t kMaxKeyBytes = 256;  // Of the name of a key.
inline constexpr size_t kMaxOptions = 64;
inline constexpr size_t kMaxOptionBytes = 1024;  // Of its name, or its value.

// The message is malformed; what() says how.
struct DecodeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Hello {
  uint32_t protocol = kProtocol;
  std::string version;
  std::string run_id;
  std::vector<std::string> info_keys;
  uint64_t seed = 0;
  uint64_t first_env_id = 0;
  uint64_t incarnation = 0;
  bool newest_frames = false;
  bool truncation_is_done = false;
};

struct Key {
  bool is_index = false;
  std::string name;
  uint32_t index = 0;

  bool operator==(const Key&) const = default;
};

// One array of a Step or an Action. For all environments: [K, *shape].
struct ArraySpec {
  std::vector<Key> path;
  DType dtype = DType::kUInt8;
  Shape shape;
  size_t nbytes = 0;   // Of one environment.
  bool stack = false;  // Of frames: shape[0] is at least 1.

  size_t frame_nbytes() const { return nbytes / shape[0]; }  // Of a stack.
  bool operator==(const ArraySpec&) const = default;
};
std::string path_name(const ArraySpec& spec);  // "observation.frame", "action"
std::string describe(const ArraySpec& spec);   // "reward float32[]"

// The values that an int64 array of a Step may have: the least and the greatest
// of each of one environment's numbers.
struct ValueRange {
  std::vector<Key> path;
  std::vector<int64_t> low;
  std::vector<int64_t> high;
};

struct Welcome {
  uint32_t protocol = 0;
  std::string version;
  std::string incarnation_id;
  std::string env;
  uint32_t num_envs = 0;
  uint32_t num_streams = 0;
  uint32_t frames_per_step = 0;
  std::vector<ArraySpec> step_arrays;
  std::vector<ArraySpec> action_arrays;
  // How the environments are made: an option's name and its undecoded value.
  std::map<std::string, std::string> options;
};

struct Failure {
  std::string text;
  bool permanent = false;
};

struct Goodbye {
  std::string reason;
};

// A place in a received message.
struct Piece {
  size_t part = 0;    // Where it begins.
  size_t offset = 0;  // In this part.
  size_t size = 0;    // May reach into the next parts.
};

struct Step {
  uint64_t seq = 0;
  std::vector<Piece> arrays;
  bool newest_frames = false;  // Of each stack, only [K, *shape[1:]].
};

// The parts of a ToLearner.
enum class Kind : uint8_t { kWelcome, kStep, kFailure, kGoodbye };
struct ToLearner {
  Kind kind = Kind::kStep;
  Piece body;
};

// All of these throw DecodeError.
ToLearner open(const Segments& message);
Welcome decode_welcome(const Segments& message, Piece body);
Failure decode_failure(const Segments& message, Piece body);
Goodbye decode_goodbye(const Segments& message, Piece body);
// Also checks that the arrays are those of `specs`, for `num_envs`
// environments. `step` is reused, to save its memory.
void decode_step(const Segments& message, Piece body,
                 const std::vector<ArraySpec>& specs, size_t num_envs,
                 Step* step);

// Both throw DecodeError, naming environment, expected and got. The array has
// been checked by decode_step.
void check_range(const Segments& message, Piece piece, const ArraySpec& spec,
                 const ValueRange& range, size_t num_envs);
void check_finite(const Segments& message, Piece piece,  // float32
                  const ArraySpec& spec);

void copy(const Segments& message, Piece piece, char* to);
// The same, into runs of `run` bytes that begin `stride` bytes apart.
void copy_runs(const Segments& message, Piece piece, size_t run, size_t stride,
               char* to);

std::string encode(const Hello& hello);
std::string hello_to_server(const Hello& hello);  // A ToServer.
std::string action_to_server(uint64_t seq,
                             const std::vector<std::string_view>& arrays,
                             bool whole = false);

// How arrays with these paths nest. Throws DecodeError if they cannot.
struct Layout {
  Structure::Ptr structure;
  std::vector<size_t> arrays;  // By leaf of the structure: which array it is.
};
Layout layout(const std::vector<ArraySpec>& specs);

bool is_utf8(std::string_view text);
// At most `limit` bytes of `text`, as UTF-8 without control characters other
// than line ends and tabs; what is not becomes '?'. Whatever comes from afar
// goes through this before anybody reads it.
std::string printable(std::string_view text, size_t limit);

}  // namespace torchbeast::wire
