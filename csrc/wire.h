// SPDX-License-Identifier: Apache-2.0
//
// Encodes and decodes the messages of proto/torchbeast.proto. Written by hand,
// because generated code would copy each observation once more: here a decoded
// Step refers to its arrays inside the received message. Every received byte is
// checked before use. The functions are thread-safe.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "array.h"
#include "nest.h"
#include "transport.h"
#include "wire_format.h"

namespace torchbeast::wire {

inline constexpr uint32_t kProtocol = 1;

// Limits of a Welcome. A Welcome that exceeds one is malformed.
inline constexpr size_t kMaxArrays = 4096;
inline constexpr size_t kMaxValues = 1 << 20;  // Fields in its two spaces.
inline constexpr size_t kMaxDepth = 16;        // Keys of a path; nested spaces.
inline constexpr size_t kMaxRank = 16;
inline constexpr size_t kMaxKeyBytes = 256;  // Of one key.
inline constexpr size_t kMaxOptions = 64;
inline constexpr size_t kMaxOptionBytes =
    1024;  // Of an option's name, and of its value.

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

// The specification of one array of a Step or an Action. The message holds the
// array of all K environments: [K, *shape].
struct ArraySpec {
  std::vector<Key> path;
  DType dtype = DType::kUInt8;
  Shape shape;
  size_t nbytes = 0;   // For one environment.
  bool stack = false;  // A stack of frames along axis 0; shape[0] >= 1.

  size_t frame_nbytes() const { return nbytes / shape[0]; }  // Only of a stack.
  bool operator==(const ArraySpec&) const = default;
};
std::string path_name(const ArraySpec& spec);  // "observation.frame", "action"
std::string describe(const ArraySpec& spec);   // "reward float32[]"

// The values that an int64 array of a Step may have: the least and the greatest
// value of each element, for one environment.
struct ValueRange {
  std::vector<Key> path;
  std::vector<int64_t> low;
  std::vector<int64_t> high;
};

// The masks of a Step, which say which values of an action's Discrete choices
// are allowed: an entry that is not 0 for each value that is.
struct Mask {
  std::vector<size_t> arrays;       // In the order of their entries.
  std::vector<size_t> sizes;        // The number of values of each choice.
  std::optional<size_t> truncated;  // The array that says which rows are.

  size_t num_entries() const {
    return std::accumulate(sizes.begin(), sizes.end(), size_t{0});
  }
};

// What the pool needs of a Welcome. Python reads the rest.
struct Welcome {
  uint32_t protocol = 0;
  std::string env;
  uint32_t num_envs = 0;
  uint32_t frames_per_step = 0;
  // The spaces, in an encoding that is the same for the same space: messages of
  // different servers may differ. Only for comparison.
  std::string observation;
  std::string action;
  std::vector<ArraySpec> step_arrays;
  std::vector<ArraySpec> action_arrays;
  // Options of the environments: name and encoded value.
  std::map<std::string, std::string> options;
};

struct Failure {
  std::string text;
  bool permanent = false;
};

struct Goodbye {
  std::string reason;
};

struct Step {
  uint64_t seq = 0;
  std::vector<Piece> arrays;
  // The arrays of stacks hold the newest frame only: [K, *shape[1:]].
  bool newest_frames = false;
};

// The messages that a ToLearner may hold.
enum class Kind : uint8_t { kWelcome, kStep, kFailure, kGoodbye };
struct ToLearner {
  Kind kind = Kind::kStep;
  Piece body;
};

// The functions from here to check_mask throw DecodeError, except
// describe_value.
ToLearner open(const Segments& message);
Welcome decode_welcome(const Segments& message, Piece body);
Failure decode_failure(const Segments& message, Piece body);
Goodbye decode_goodbye(const Segments& message, Piece body);
// Also checks that the arrays have the sizes that `specs` says, for `num_envs`
// environments. Overwrites `step`, so that its memory is reused.
void decode_step(const Segments& message, Piece body,
                 const std::vector<ArraySpec>& specs, size_t num_envs,
                 Step* step);

// The value of an option as Python writes it: True, 4, 0.25, 'text'.
std::string describe_value(const std::string& value);

// Check the values of an array. The message of the error names the environment
// and says what was expected and got. decode_step has checked the size.
void check_range(const Segments& message, Piece piece, const ArraySpec& spec,
                 const ValueRange& range, size_t num_envs);
void check_finite(const Segments& message, Piece piece,  // float32
                  const ArraySpec& spec);
// Each choice must have a value that is allowed. Not where a row is truncated:
// no action is executed there.
void check_mask(const Segments& message, const Step& step,
                const std::vector<ArraySpec>& specs, const Mask& mask,
                size_t num_envs);

std::string encode(const Hello& hello);
std::string hello_to_server(const Hello& hello);  // Inside a ToServer.
std::string action_to_server(uint64_t seq,
                             const std::vector<std::string_view>& arrays,
                             bool whole = false);

// How arrays nest, by their paths. layout() throws DecodeError if they cannot.
struct Layout {
  Structure::Ptr structure;
  std::vector<size_t>
      arrays;  // For each leaf of the structure: the index of its array.
};
Layout layout(const std::vector<ArraySpec>& specs);

}  // namespace torchbeast::wire
