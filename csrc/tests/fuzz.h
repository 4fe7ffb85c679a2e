// SPDX-License-Identifier: Apache-2.0
//
// Helpers of fuzz targets. A target is a file fuzz_*.cc with
// LLVMFuzzerTestOneInput, which feeds bytes to the code under test and aborts
// if a requirement is violated. The Makefile's target `fuzz` runs them.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text.h"
#include "transport.h"

// Aborts if the condition does not hold. `text` says what was found.
#define REQUIRE(condition, text)                                              \
  do {                                                                        \
    if (!(condition)) {                                                       \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, \
                   std::string(text).c_str());                                \
      std::abort();                                                           \
    }                                                                         \
  } while (false)

// A few bytes must not make the learner allocate much memory.
extern "C" [[gnu::used]] inline const char* __asan_default_options() {
  return "max_allocation_size_mb=64:hard_rss_limit_mb=2048";
}

namespace fuzz {

// Reads an input from its front. Zeros follow its end.
class Input {
 public:
  Input(const uint8_t* data, size_t size)
      : left_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return left_.empty(); }

  uint8_t byte() {
    const std::string_view one = bytes(1);
    return one.empty() ? 0 : static_cast<uint8_t>(one[0]);
  }

  size_t number() {  // Of two bytes.
    const size_t low = byte();
    return low | static_cast<size_t>(byte()) << 8;
  }

  std::string_view bytes(size_t size) {
    const std::string_view taken = left_.substr(0, size);
    left_.remove_prefix(taken.size());
    return taken;
  }

 private:
  std::string_view left_;
};

// The message in parts of `chunk` bytes, each a separate allocation, so that
// AddressSanitizer detects reads past the end.
inline torchbeast::Segments segments_of(std::string_view message,
                                        size_t chunk) {
  auto parts = std::make_shared<std::vector<std::vector<char>>>();
  for (size_t i = 0; i < message.size(); i += chunk) {
    const std::string_view part = message.substr(i, chunk);
    parts->emplace_back(part.begin(), part.end());
  }
  torchbeast::Segments segments;
  for (const auto& part : *parts) {
    segments.parts.emplace_back(part.data(), part.size());
  }
  segments.owner = parts;
  return segments;
}

// Text that is shown must not have control characters, and must not be long.
inline void require_printable(std::string_view text) {
  constexpr size_t kMaxText = 64 << 10;
  REQUIRE(text.size() <= kMaxText, std::to_string(text.size()) + " bytes");
  REQUIRE(torchbeast::printable(text, kMaxText) == text, text);
}

// Begins a corpus: writes `seeds` to the folder among the arguments, if the
// folder is empty.
inline void write_seeds(int argc, char** argv,
                        const std::vector<std::string>& seeds) {
  for (int i = 1; i < argc; ++i) {
    const std::filesystem::path folder = argv[i];
    if (!is_directory(folder) || !is_empty(folder)) continue;
    for (size_t k = 0; k < seeds.size(); ++k) {
      std::ofstream(folder / ("seed-" + std::to_string(k)), std::ios::binary)
          << seeds[k];
    }
  }
}

}  // namespace fuzz
