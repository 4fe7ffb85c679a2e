// SPDX-License-Identifier: Apache-2.0

#include "histogram.h"

#include <cmath>

#include "testing.h"

using namespace torchbeast;

namespace {

bool is_near(double got, double expected) {
  return std::abs(got - expected) <= 0.1 * expected;
}

}  // namespace

TEST(quantiles_are_within_ten_percent) {
  Histogram times;
  for (int ms = 1; ms <= 1000; ++ms) times.add(seconds(1e-3 * ms));
  CHECK(is_near(times.quantile_ms(0.001), 1));
  CHECK(is_near(times.quantile_ms(0.50), 500));
  CHECK(is_near(times.quantile_ms(0.99), 990));
  CHECK(is_near(times.total_s(), 500.5));
}

TEST(histograms_add_up) {
  Histogram fast, slow;
  fast.add(seconds(0.001));
  slow.add(seconds(0.1));
  slow.add(seconds(0.1));
  fast.add(slow);
  CHECK(is_near(fast.quantile_ms(0.3), 1));
  CHECK(is_near(fast.quantile_ms(0.5), 100));
  CHECK(is_near(fast.total_s(), 0.201));
}

TEST(a_histogram_takes_any_time) {
  Histogram times;
  CHECK_EQ(times.quantile_ms(0.5), 0);
  times.add(Clock::duration(0));
  CHECK(times.quantile_ms(1) < 0.002);
  times.add(seconds(1e9));  // Longer than the last bucket.
  CHECK(times.quantile_ms(1) > 1e6);
}
