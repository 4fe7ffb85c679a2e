// SPDX-License-Identifier: Apache-2.0

#include "same_env.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "errors.h"
#include "text.h"

namespace torchbeast {
namespace {

// These return the first difference; nothing if there is none.

std::string difference(const std::string& what,
                       const std::vector<wire::ArraySpec>& expected,
                       const std::vector<wire::ArraySpec>& got) {
  for (size_t i = 0; i < std::max(expected.size(), got.size()); ++i) {
    if (i < expected.size() && i < got.size() && expected[i] == got[i]) {
      continue;
    }
    return what + " " + std::to_string(i) + " is " +
           (i < got.size() ? wire::describe(got[i]) : "missing") +
           ", expected " +
           (i < expected.size() ? wire::describe(expected[i]) : "none");
  }
  return "";
}

std::string difference(const std::map<std::string, std::string>& expected,
                       const std::map<std::string, std::string>& got) {
  auto a = expected.begin();
  auto b = got.begin();
  while (a != expected.end() && b != got.end() && *a == *b) {
    ++a;
    ++b;
  }
  if (a == expected.end() && b == got.end()) return "";
  const bool only_got =
      a == expected.end() || (b != got.end() && b->first < a->first);
  const bool only_expected =
      b == got.end() || (a != expected.end() && a->first < b->first);
  return "option '" + (only_got ? b : a)->first + "' of the environment is " +
         (only_expected ? "missing" : wire::describe_value(b->second)) +
         ", expected " + (only_got ? "none" : wire::describe_value(a->second)) +
         "; start all servers with the same flags";
}

std::string difference(const wire::Welcome& expected,
                       const wire::Welcome& got) {
  if (got.env != expected.env) {
    return "env is '" + printable(got.env, 100) + "', expected '" +
           printable(expected.env, 100) + "'";
  }
  std::string text =
      difference("step array", expected.step_arrays, got.step_arrays);
  if (text.empty()) {
    text =
        difference("action array", expected.action_arrays, got.action_arrays);
  }
  if (text.empty()) text = difference(expected.options, got.options);
  if (!text.empty()) return text;
  if (got.frames_per_step != expected.frames_per_step) {
    return "frames_per_step is " + std::to_string(got.frames_per_step) +
           ", expected " + std::to_string(expected.frames_per_step);
  }
  if (got.observation != expected.observation) {
    return "its observation space has other bounds or another number of values";
  }
  if (got.action != expected.action) {
    return "its action space has other bounds or another number of values";
  }
  return "";
}

}  // namespace

void check_same(const EnvSpec& spec, const wire::Welcome& welcome) {
  const std::string text = difference(spec.welcome, welcome);
  if (text.empty()) return;
  throw ActorError("this server differs from " + spec.address + ": " + text);
}

}  // namespace torchbeast
