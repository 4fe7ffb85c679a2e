// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "clock.h"

namespace torchbeast {

// Counts times in logarithmic buckets: eight per doubling, from 1 us on. So a
// quantile is within 10 % of the true one. Not thread-safe.
class Histogram {
 public:
  void add(Clock::duration time) {
    const double us = std::chrono::duration<double, std::micro>(time).count();
    total_s_ += 1e-6 * us;
    const double bucket = us > 1 ? kPerDoubling * std::log2(us) : 0;
    ++counts_[std::min(static_cast<size_t>(bucket), counts_.size() - 1)];
  }

  void add(const Histogram& other) {
    for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
    total_s_ += other.total_s_;
  }

  double total_s() const { return total_s_; }

  // The time that the fraction `part` of all times does not exceed; 0 if there
  // are no times.
  double quantile_ms(double part) const {
    int64_t total = 0;
    for (const int64_t count : counts_) total += count;
    if (total == 0) return 0;
    auto left = static_cast<int64_t>(std::ceil(part * total));
    size_t bucket = 0;
    while (left > counts_[bucket]) left -= counts_[bucket++];
    return 1e-3 * std::exp2((bucket + 0.5) / kPerDoubling);
  }

 private:
  static constexpr double kPerDoubling = 8;
  std::array<int64_t, 256> counts_ = {};
  double total_s_ = 0;
};

}  // namespace torchbeast
