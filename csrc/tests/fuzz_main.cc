// SPDX-License-Identifier: Apache-2.0
//
// A small stand-in for libFuzzer where the compiler is GCC. It is guided by
// coverage, from -fsanitize-coverage=trace-pc, and takes these of libFuzzer's
// arguments:
//
//   fuzz_wire [-runs=N] [-max_total_time=S] [-seed=N] [-artifact_prefix=PATH]
//             [FOLDER]     the corpus: read at the start, new inputs are added
//   fuzz_wire FILE...      runs these inputs, once each
//
// A child process runs the inputs. So if the child dies or hangs, the parent
// can report the input.

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv);

namespace {

using Clock = std::chrono::steady_clock;
using Bytes = std::vector<uint8_t>;

constexpr size_t kMaxSize = 4096;  // The largest input.
constexpr time_t kHangS = 30;      // The time limit for one input.
constexpr size_t kReportEvery = 1 << 16;

// Memory that the child shares with the parent.
struct Shared {
  std::atomic<uint64_t> runs;
  size_t num_edges;
  size_t corpus_size;
  bool finished;
  size_t size;  // Of the present input.
  std::array<uint8_t, kMaxSize> data;
};

// How often each edge between two basic blocks was taken, modulo 256. Some
// edges share a counter. Threads race on the counters, which makes coverage
// inexact.
constexpr size_t kNumCounters = 1 << 16;
alignas(64) std::array<uint8_t, kNumCounters> counters;
thread_local uintptr_t block_before;

class Coverage {
 public:
  void begin() { counters.fill(0); }

  // Whether the count of an edge was in a class that is new for this edge. The
  // eight classes of counts are 1, 2, 3, 4 to 7, 8 to 15, and so on.
  bool end() {
    bool is_new = false;
    for (size_t i = 0; i < kNumCounters; i += sizeof(uint64_t)) {
      uint64_t eight;
      std::memcpy(&eight, &counters[i], sizeof(eight));
      if (eight == 0) continue;
      for (size_t k = i; k < i + sizeof(eight); ++k) {
        const uint8_t count = counters[k];
        if (count == 0) continue;
        const int bit = count < 4     ? count - 1
                        : count < 8   ? 3
                        : count < 16  ? 4
                        : count < 32  ? 5
                        : count < 128 ? 6
                                      : 7;
        if (seen_[k] & 1 << bit) continue;
        num_edges_ += seen_[k] == 0;
        seen_[k] |= 1 << bit;
        is_new = true;
      }
    }
    return is_new;
  }

  size_t num_edges() const { return num_edges_; }

 private:
  std::array<uint8_t, kNumCounters> seen_ = {};  // The classes of each edge.
  size_t num_edges_ = 0;
};

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  Bytes operator()(const std::vector<Bytes>& corpus) {
    Bytes bytes = pick(corpus);
    for (size_t n = size_t{1} << below(4); n > 0; --n) mutate(bytes, corpus);
    if (bytes.size() > kMaxSize) bytes.resize(kMaxSize);
    return bytes;
  }

 private:
  size_t below(size_t limit) { return random_() % limit; }
  uint8_t byte() { return static_cast<uint8_t>(random_()); }

  // Prefer inputs that were found late.
  const Bytes& pick(const std::vector<Bytes>& corpus) {
    const size_t last = std::min<size_t>(corpus.size(), 16);
    return below(2) ? corpus[below(corpus.size())]
                    : corpus[corpus.size() - 1 - below(last)];
  }

  void mutate(Bytes& bytes, const std::vector<Bytes>& corpus) {
    const size_t at = below(bytes.size() + 1);
    const auto here = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    const size_t left = bytes.size() - at;
    const auto some = static_cast<std::ptrdiff_t>(
        left ? 1 + below(std::min<size_t>(left, 32)) : 0);
    switch (below(9)) {
      case 0:
        if (left) *here ^= static_cast<uint8_t>(1 << below(8));
        break;
      case 1:
        if (left) *here = byte();
        break;
      case 2:  // Add a small number to a byte: a length or a count.
        if (left) *here += static_cast<uint8_t>(below(9) - 4);
        break;
      case 3:
        bytes.insert(here, 1 + below(8), byte());
        break;
      case 4:
        bytes.erase(here, here + some);
        break;
      case 5: {  // Copy a range to another place.
        const Bytes copy(here, here + some);
        const size_t to = below(bytes.size() + 1);
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(to),
                     copy.begin(), copy.end());
        break;
      }
      case 6: {  // Replace the rest by that of another input.
        const Bytes& other = pick(corpus);
        const size_t from = below(other.size() + 1);
        bytes.erase(here, bytes.end());
        bytes.insert(bytes.end(),
                     other.begin() + static_cast<std::ptrdiff_t>(from),
                     other.end());
        break;
      }
      case 7: {
        const Bytes word = below(2) ? tag() : number();
        bytes.insert(here, word.begin(), word.end());
        break;
      }
      case 8: {
        const Bytes word = number();
        std::copy_n(word.begin(), std::min(word.size(), left), here);
        break;
      }
    }
  }

  // A tag of a field, of any wire type.
  Bytes tag() {
    return {static_cast<uint8_t>((1 + below(12)) << 3 | below(8))};
  }

  // A number near a power of two, as a varint or in 8 bytes.
  Bytes number() {
    uint64_t value = (uint64_t{1} << below(64)) + below(3) - 1;
    Bytes bytes;
    if (below(4) == 0) {
      for (int i = 0; i < 8; ++i) {
        bytes.push_back(static_cast<uint8_t>(value >> (8 * i)));
      }
      return bytes;
    }
    for (; value >= 128; value >>= 7) {
      bytes.push_back(static_cast<uint8_t>(value | 128));
    }
    bytes.push_back(static_cast<uint8_t>(value));
    return bytes;
  }

  std::mt19937_64 random_;
};

struct Flags {
  uint64_t runs = ~uint64_t{0};
  double max_total_time = 1e9;  // Seconds.
  uint64_t seed = 1;
  std::string artifact_prefix = "./";
  std::vector<std::filesystem::path> paths;
};

Flags parse_flags(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    const size_t equals = flag.find('=');
    const std::string_view name = flag.substr(0, equals);
    const char* const value = argv[i] + equals + 1;
    if (flag[0] != '-') {
      flags.paths.emplace_back(flag);
    } else if (name == "-runs") {
      flags.runs = std::strtoull(value, nullptr, 10);
    } else if (name == "-max_total_time") {
      flags.max_total_time = std::strtod(value, nullptr);
    } else if (name == "-seed") {
      flags.seed = std::strtoull(value, nullptr, 10);
    } else if (name == "-artifact_prefix") {
      flags.artifact_prefix = value;
    } else {
      std::fprintf(stderr, "%s: unknown flag %s\n", argv[0], argv[i]);
      std::exit(2);
    }
  }
  return flags;
}

Bytes read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    std::exit(2);
  }
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

// FNV-1a, for names of files.
std::string hash(const uint8_t* data, size_t size) {
  uint64_t value = 0xcbf29ce484222325;
  for (size_t i = 0; i < size; ++i) value = (value ^ data[i]) * 0x100000001b3;
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx",
                static_cast<unsigned long long>(value));
  return text;
}

void write_file(const std::filesystem::path& path, const uint8_t* data,
                size_t size) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(data),
             static_cast<std::streamsize>(size));
}

// Runs in the child.
class Fuzzer {
 public:
  Fuzzer(const Flags& flags, Shared& shared)
      : flags_(flags), shared_(shared), mutator_(flags.seed) {}

  void run() {
    const auto deadline =
        Clock::now() +
        std::chrono::duration_cast<Clock::duration>(
            std::chrono::duration<double>(flags_.max_total_time));
    if (!flags_.paths.empty()) {
      folder_ = flags_.paths[0];
      std::vector<std::filesystem::path> files(
          std::filesystem::directory_iterator(folder_), {});
      std::sort(files.begin(), files.end());
      for (const auto& file : files) try_input(read_file(file), false);
    }
    if (corpus_.empty()) corpus_.emplace_back();
    while (shared_.runs < flags_.runs && Clock::now() < deadline) {
      try_input(mutator_(corpus_), true);
      if (shared_.runs % kReportEvery == 0) report("pulse");
    }
    report("DONE");
  }

 private:
  void try_input(const Bytes& input, bool keep) {
    shared_.size = std::min(input.size(), kMaxSize);
    std::copy_n(input.begin(), shared_.size, shared_.data.begin());
    // A separate allocation, so that AddressSanitizer detects reads past the
    // end.
    const Bytes copy(input.begin(),
                     input.begin() + static_cast<std::ptrdiff_t>(shared_.size));
    coverage_.begin();
    LLVMFuzzerTestOneInput(copy.data(), copy.size());
    ++shared_.runs;
    if (!coverage_.end()) return;
    corpus_.push_back(copy);
    if (keep && !folder_.empty()) {
      write_file(folder_ / hash(copy.data(), copy.size()), copy.data(),
                 copy.size());
    }
  }

  void report(const char* what) const {
    std::fprintf(stderr, "#%llu %s cov: %zu corp: %zu\n",
                 static_cast<unsigned long long>(shared_.runs.load()), what,
                 coverage_.num_edges(), corpus_.size());
  }

  const Flags& flags_;
  Shared& shared_;
  Mutator mutator_;
  Coverage coverage_;
  std::filesystem::path folder_;
  std::vector<Bytes> corpus_;
};

// Runs in the parent: waits for the child's end. Returns the status; -1 if the
// child hung.
int wait_for(pid_t child, const Shared& shared) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGCHLD);
  bool hangs = false;
  int status = 0;
  for (uint64_t before = 0; waitpid(child, &status, WNOHANG) == 0;) {
    const timespec limit = {kHangS, 0};
    if (sigtimedwait(&signals, nullptr, &limit) >= 0) continue;
    if (shared.runs == before) {
      hangs = true;
      kill(child, SIGKILL);
    }
    before = shared.runs;
  }
  return hangs ? -1 : status;
}

}  // namespace

// Called by the instrumented code at the begin of each basic block.
extern "C" void __sanitizer_cov_trace_pc() {
  const auto block = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  ++counters[(block ^ block_before) % kNumCounters];
  block_before = block >> 1;
}

int main(int argc, char** argv) {
  const Flags flags = parse_flags(argc, argv);
  if (!flags.paths.empty() && !is_directory(flags.paths[0])) {
    for (const auto& path : flags.paths) {
      const Bytes input = read_file(path);
      std::fprintf(stderr, "Running: %s\n", path.c_str());
      LLVMFuzzerTestOneInput(input.data(), input.size());
    }
    return 0;
  }
  LLVMFuzzerInitialize(&argc, &argv);
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    return 1;
  }
  auto& shared = *static_cast<Shared*>(memory);  // Zeros.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGCHLD);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  const pid_t child = fork();
  if (child < 0) {
    std::perror("fork");
    return 1;
  }
  if (child == 0) {
    Fuzzer(flags, shared).run();
    shared.finished = true;
    return 0;  // LeakSanitizer reports after this.
  }
  const int status = wait_for(child, shared);
  if (status == 0) return 0;
  if (shared.finished) {
    std::fprintf(stderr, "%s: leaks, of which inputs is not known\n", argv[0]);
    return 1;
  }
  const std::string path = flags.artifact_prefix +
                           (status == -1 ? "hang-" : "crash-") +
                           hash(shared.data.data(), shared.size);
  write_file(path, shared.data.data(), shared.size);
  std::fprintf(stderr, "#%llu: %s. To see it again:\n  %s %s\n",
               static_cast<unsigned long long>(shared.runs.load()),
               status == -1 ? "this input takes too long"
                            : "this input ends the program",
               argv[0], path.c_str());
  return 1;
}
