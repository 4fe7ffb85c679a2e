// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace torchbeast {

// Functions to call when something has happened. Thread-safe; they run in the
// thread that calls call(), with no lock held. They must not throw.
class Listeners {
 public:
  using Functions = std::vector<std::function<void()>>;

  void add(std::function<void()> fn) {
    std::lock_guard lock(mu_);
    auto functions = std::make_shared<Functions>(*functions_);
    functions->push_back(std::move(fn));
    functions_ = std::move(functions);
  }

  void call() const {
    std::shared_ptr<const Functions> functions;
    {
      std::lock_guard lock(mu_);
      functions = functions_;
    }
    for (const auto& fn : *functions) fn();
  }

 private:
  mutable std::mutex mu_;
  // Guarded by mu_. Replaced, never changed.
  std::shared_ptr<const Functions> functions_ = std::make_shared<Functions>();
};

}  // namespace torchbeast
