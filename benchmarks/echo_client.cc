// SPDX-License-Identifier: Apache-2.0
//
// The bare transport: answers each message of each stream with a short one, and
// looks at nothing. benchmarks/transport.py compiles it.
//
//     echo_client SECONDS STREAMS ADDRESS
//
// prints "begin" after a warm-up of a second, and then how many messages came
// in how many seconds, and the CPU seconds this took here.

#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../csrc/transport_grpc.h"

namespace {

std::atomic<int64_t> num_messages{0};

struct Echo : torchbeast::StreamEvents {
  std::shared_ptr<torchbeast::Stream> stream;

  void on_connected() override {}
  void on_message(torchbeast::Segments) override {
    num_messages.fetch_add(1, std::memory_order_relaxed);
    stream->send("an action");
  }
  void on_closed(const std::string& reason, bool) override {
    if (!ending) {
      std::fprintf(stderr, "echo_client: %s\n", reason.c_str());
      std::_Exit(1);
    }
  }

  static inline std::atomic<bool> ending{false};
};

double cpu_seconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return t.tv_sec + 1e-6 * t.tv_usec;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const double seconds = std::atof(argv[1]);
  const auto transport = torchbeast::make_grpc_transport();
  std::vector<std::unique_ptr<Echo>> echoes;
  for (int i = 0; i < std::atoi(argv[2]); ++i) {
    echoes.push_back(std::make_unique<Echo>());
    echoes.back()->stream = transport->connect(argv[3], echoes.back().get(),
                                               torchbeast::kMaxMessageBytes);
    echoes.back()->stream->start("hello");
  }
  std::this_thread::sleep_for(std::chrono::seconds(1));
  std::puts("begin");
  std::fflush(stdout);
  const auto begin = std::chrono::steady_clock::now();
  const double cpu = cpu_seconds();
  const int64_t messages = num_messages;
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  const std::chrono::duration<double> wall =
      std::chrono::steady_clock::now() - begin;
  std::printf("%lld %f %f\n", static_cast<long long>(num_messages - messages),
              wall.count(), cpu_seconds() - cpu);
  Echo::ending = true;
  transport->shutdown();
}
