// SPDX-License-Identifier: Apache-2.0

#include "text.h"

#include <algorithm>
#include <cstdint>

namespace torchbeast {
namespace {

// The number of bytes of the UTF-8 character at the front of `text`; 0 if the
// front is not UTF-8.
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
    // Control characters are those of ASCII and U+0080 to U+009F: terminals
    // interpret some of the latter, too.
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

}  // namespace torchbeast
