// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <chrono>

namespace torchbeast {

using Clock =
    std::chrono::steady_clock;  // Not the wall clock, which may be set.

inline Clock::duration seconds(double s) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(s));
}

}  // namespace torchbeast
