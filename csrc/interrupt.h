// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <optional>

#include "clock.h"

namespace torchbeast {

// Lets a signal such as Ctrl-C end a wait. If a thread has set its
// `interrupt_check`, its waits call this function every kInterruptInterval,
// with no lock held. An exception of the function ends the wait.
inline thread_local void (*interrupt_check)() = nullptr;

// When the thread's next call of interrupt_check is due. The thread keeps this
// from one wait to the next: each of its waits may be shorter than the
// interval.
inline thread_local Clock::time_point interrupt_check_due;

// Short for a person who presses Ctrl-C, and rare enough to cost no CPU time.
inline constexpr std::chrono::milliseconds kInterruptInterval{100};

// Waits for `changed`, at most until `deadline`. May return early, as every
// wait for a condition variable. If it throws, it has notified another waiter
// of `changed` first, and holds the lock.
inline void wait_interruptibly(
    std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
    std::optional<Clock::time_point> deadline = std::nullopt) {
  std::optional<Clock::time_point> until = deadline;
  if (interrupt_check) {
    until =
        std::min(deadline.value_or(interrupt_check_due), interrupt_check_due);
  }
  if (!until) return changed.wait(lock);
  changed.wait_until(lock, *until);
  if (!interrupt_check) return;
  const auto now = Clock::now();
  if (now < interrupt_check_due) return;
  interrupt_check_due = now + kInterruptInterval;
  lock.unlock();
  try {
    interrupt_check();
  } catch (...) {
    lock.lock();
    changed.notify_one();
    throw;
  }
  lock.lock();
}

// Waits until `future` is ready.
template <typename T>
void wait_interruptibly(const std::future<T>& future) {
  if (!interrupt_check) return future.wait();
  while (future.wait_for(kInterruptInterval) != std::future_status::ready) {
    interrupt_check();
  }
}

}  // namespace torchbeast
