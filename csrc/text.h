// SPDX-License-Identifier: Apache-2.0
//
// Functions for text that came over the network.

#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace torchbeast {

bool is_utf8(std::string_view text);

// Returns at most `limit` bytes of `text`, safe to show on a terminal: '?'
// takes the place of control characters (other than line ends and tabs) and of
// bytes that are not UTF-8. Use it for every text from the network before it is
// logged or shown.
std::string printable(std::string_view text, size_t limit);

}  // namespace torchbeast
