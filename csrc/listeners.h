// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace torchbeast {

// A list of callbacks. Thread-safe.
//   add   adds a callback. It cannot be removed, and must not throw.
//   call  calls all of them, in the thread of the caller, with no lock held.
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
  // Guarded by mu_. add() replaces the list, so call() can use the old one
  // without the lock.
  std::shared_ptr<const Functions> functions_ = std::make_shared<Functions>();
};

}  // namespace torchbeast
