// SPDX-License-Identifier: Apache-2.0
//
// A small test framework. Include it in one .cc file per program: it defines
// main().
//
// A failed check throws; the future of background() rethrows the exception. A
// test that takes longer than kDeadline ends the program and prints its name.
// To run some tests only, give their names as arguments.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace testing {

// Far more than any test takes, on a busy machine and under a sanitizer.
constexpr std::chrono::seconds kDeadline{60};

inline std::vector<std::pair<std::string, void (*)()>> tests;

template <typename... Parts>
[[noreturn]] void fail(const char* where, int line, const Parts&... parts) {
  std::ostringstream text;
  ((text << where << ":" << line << ": ") << ... << parts);
  std::fprintf(stderr, "%s\n",
               text.str().c_str());  // The exception may get lost in a thread.
  throw std::logic_error(text.str());
}

template <typename A, typename B>
void check_equal(const char* where, int line, const char* what, const A& got,
                 const B& expected) {
  if (!(got == expected)) {
    fail(where, line, what, " is ", got, ", expected ", expected);
  }
}

template <typename Error, typename Fn>
void check_throws(const char* where, int line, const char* what,
                  const std::string& text, Fn fn) {
  std::string got = "nothing";
  try {
    fn();
  } catch (const Error& error) {
    got = error.what();
    if (got.find(text) != std::string::npos) return;
  } catch (const std::exception& error) {
    got = std::string("another type: ") + error.what();
  }
  fail(where, line, what, " threw ", got, "; expected: ", text);
}

// Runs `fn` in a thread of its own; the future's destructor waits for it.
template <typename Fn>
auto background(Fn fn) {
  return std::async(std::launch::async, std::move(fn));
}

// Waits until `reached()`. The watchdog ends the test after kDeadline.
template <typename Condition>
void wait_until(Condition reached) {
  while (!reached()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

inline bool passes(const std::string& name, void (*test)()) {
  std::promise<void> finished;
  auto watchdog = background([&name, done = finished.get_future()] {
    if (done.wait_for(kDeadline) == std::future_status::ready) return;
    std::fprintf(stderr, "%s takes too long\n", name.c_str());
    std::abort();
  });
  bool passed = true;
  try {
    test();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED %s: %s\n", name.c_str(), error.what());
    passed = false;
  }
  finished.set_value();
  return passed;
}

}  // namespace testing

#define TEST(name)                                      \
  static void name();                                   \
  static const bool name##_is_a_test =                  \
      (testing::tests.emplace_back(#name, name), true); \
  static void name()

#define CHECK(condition) \
  ((condition) ? void() : testing::fail(__FILE__, __LINE__, #condition))

#define CHECK_EQ(got, expected) \
  testing::check_equal(__FILE__, __LINE__, #got, got, expected)

// `text` is a part of what() of the error.
#define CHECK_THROWS(Error, text, ...)                                 \
  testing::check_throws<Error>(__FILE__, __LINE__, #__VA_ARGS__, text, \
                               [&] { (void)(__VA_ARGS__); })

int main(int argc, char** argv) {
  const std::vector<std::string> chosen(argv + 1, argv + argc);
  int num_run = 0;
  int num_failed = 0;
  for (const auto& [name, test] : testing::tests) {
    if (argc > 1 && std::ranges::find(chosen, name) == chosen.end()) continue;
    ++num_run;
    num_failed += !testing::passes(name, test);
  }
  std::printf("%s: %d tests, %d failed\n", argv[0], num_run, num_failed);
  return num_run == 0 || num_failed > 0;
}
