// SPDX-License-Identifier: Apache-2.0
//
// The learner's decoders. They throw only DecodeError and ActorError, and
// decode a message to the same result however it is split into parts.
//
// An input is: the bytes per part (0: one part); the size of the first message,
// in two bytes; the first message; the second message. If the first one is a
// Welcome, a Step in the second one is decoded by it.

#include <algorithm>
#include <optional>
#include <string>

#include "env_spec.h"
#include "errors.h"
#include "fake_servers.h"
#include "fuzz.h"
#include "same_env.h"
#include "text.h"
#include "wire.h"

using namespace torchbeast;

namespace {

// The contents of a message as text, to compare.
std::string text_of(const wire::Welcome& welcome) {
  std::string text = welcome.env + "|" + std::to_string(welcome.protocol) +
                     "|" + std::to_string(welcome.num_envs);
  for (const auto* specs : {&welcome.step_arrays, &welcome.action_arrays}) {
    for (const wire::ArraySpec& spec : *specs) {
      text += "|" + wire::describe(spec) + std::to_string(spec.nbytes);
    }
  }
  return text;
}

std::optional<EnvSpec> spec_of(const wire::Welcome& welcome, size_t nbytes) {
  if (welcome.num_envs < 1 || welcome.num_envs > 1000) {
    return std::nullopt;  // The pool has compared K with its own.
  }
  static const auto buffers = BufferPool::create();
  SpecOptions options;
  options.initial_agent_state.structure = Structure::tuple({});
  options.named_rows = true;
  options.columns = welcome.num_envs;
  try {
    EnvSpec spec = make_env_spec("address", welcome, nbytes, options, *buffers);
    check_same(spec, spec.welcome);
    return spec;
  } catch (const ActorError& error) {
    fuzz::require_printable(error.what());
  }
  return std::nullopt;
}

std::string text_of(const Segments& message, const wire::Step& step) {
  std::string text = std::to_string(step.seq) + (step.newest_frames ? "+" : "");
  for (const wire::Piece& piece : step.arrays) {
    const auto copy = std::make_unique<char[]>(
        piece.size);  // Of the exact size, for AddressSanitizer.
    wire::copy(message, piece, copy.get());
    text += "|" + std::string(copy.get(), piece.size);
  }
  return text;
}

// The contents of a message as text, or the error. A Welcome sets `spec`; a
// Step is decoded by `spec`.
std::string read(const Segments& message, std::optional<EnvSpec>& spec) {
  try {
    const auto [kind, body] = wire::open(message);
    switch (kind) {
      case wire::Kind::kWelcome: {
        const wire::Welcome welcome = wire::decode_welcome(message, body);
        spec = spec_of(welcome, message.size());
        return text_of(welcome);
      }
      case wire::Kind::kStep: {
        if (!spec) return "";
        static wire::Step step;  // Reused, as in the pool.
        wire::decode_step(message, body, spec->welcome.step_arrays,
                          static_cast<size_t>(spec->num_envs), &step);
        check_values(*spec, message, step);
        return text_of(message, step);
      }
      case wire::Kind::kFailure: {
        const wire::Failure failure = wire::decode_failure(message, body);
        fuzz::require_printable(printable(failure.text, 1000));
        return failure.text + (failure.permanent ? "!" : ".");
      }
      case wire::Kind::kGoodbye:
        return wire::decode_goodbye(message, body).reason;
    }
  } catch (const wire::DecodeError& error) {
    fuzz::require_printable(error.what());
    return error.what();
  }
  return "";
}

std::string two_messages(uint8_t chunk, const std::string& first,
                         const std::string& second = "") {
  return std::string{static_cast<char>(chunk), static_cast<char>(first.size()),
                     static_cast<char>(first.size() >> 8)} +
         first + second;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  fake::WelcomeOptions nested;
  nested.num_envs = 2;
  nested.step_arrays[0] = fake::bytes(1, fake::bytes(1, "observation")) +
                          fake::bytes(1, fake::number(2, 0)) +
                          fake::bytes(2, "int64") + fake::number(3, 3);
  nested.step_arrays[1] = fake::bytes(1, fake::bytes(1, "observation")) +
                          fake::bytes(1, fake::number(2, 1)) +
                          fake::bytes(2, "uint8") + fake::number(3, 5);
  const std::string step = fake::step(0, 1, 0, 1, {0});
  fuzz::write_seeds(
      *argc, *argv,
      {two_messages(0, fake::welcome({}), step),
       two_messages(7, fake::welcome(nested), fake::step(0, 2, 0, 1, {0, 1})),
       two_messages(2, fake::welcome({}), fake::step(0, 1, 0, 1, {0}, true)),
       two_messages(1, fake::failure("why", true)),
       two_messages(3, fake::goodbye("so long")),
       two_messages(5, step + fake::number(100, 5) + fake::fixed64(102, 7))});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const size_t chunk = input.byte();
  const std::string_view first = input.bytes(input.number());
  const std::string_view second = input.bytes(size);
  std::optional<EnvSpec> spec, spec_of_whole;
  for (const std::string_view message : {first, second}) {
    const size_t whole = std::max<size_t>(message.size(), 1);
    const std::string text =
        read(fuzz::segments_of(message, chunk ? chunk : whole), spec);
    const std::string text_of_whole =
        read(fuzz::segments_of(message, whole), spec_of_whole);
    REQUIRE(text == text_of_whole, text + " and " + text_of_whole);
  }
  return 0;
}
