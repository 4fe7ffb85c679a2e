// SPDX-License-Identifier: Apache-2.0

#include "wire.h"

#include <random>
#include <string>
#include <vector>

#include "fake_servers.h"
#include "testing.h"
#include "text.h"

using namespace torchbeast;
using wire::DecodeError;

namespace {

// Separate allocations, so that AddressSanitizer detects reads past the end.
Segments segments_of(const std::string& message, size_t chunk) {
  auto parts = std::make_shared<std::vector<std::vector<char>>>();
  for (size_t i = 0; i < message.size(); i += chunk) {
    const auto begin = message.begin() + static_cast<std::ptrdiff_t>(i);
    const size_t size = std::min(chunk, message.size() - i);
    parts->emplace_back(begin, begin + static_cast<std::ptrdiff_t>(size));
    parts->emplace_back();  // Empty parts are allowed.
  }
  Segments segments;
  for (const auto& part : *parts) {
    segments.parts.emplace_back(part.data(), part.size());
  }
  segments.owner = parts;
  return segments;
}

wire::Welcome read_welcome(const std::string& message, size_t chunk = 13) {
  const Segments segments = segments_of(message, chunk);
  const auto [kind, body] = wire::open(segments);
  CHECK(kind == wire::Kind::kWelcome);
  return wire::decode_welcome(segments, body);
}

// A Welcome with one step array.
wire::Welcome read_array(const std::string& array) {
  return read_welcome(fake::bytes(1, fake::bytes(10, array)));
}

const std::vector<wire::ArraySpec>& step_specs() {
  static const auto welcome = read_welcome(fake::welcome({}));
  return welcome.step_arrays;
}

}  // namespace

TEST(a_welcome_is_read_however_it_is_split) {
  fake::WelcomeOptions options;
  options.num_envs = 300;
  options.action_arrays = {fake::array({}, "float32", {2, 129})};
  const std::string message = fake::welcome(options);
  for (size_t chunk = 1; chunk <= message.size(); ++chunk) {
    const wire::Welcome welcome = read_welcome(message, chunk);
    CHECK_EQ(welcome.protocol, 1u);
    CHECK_EQ(welcome.env, "Counting");
    CHECK_EQ(welcome.num_envs, 300u);
    CHECK_EQ(welcome.step_arrays.size(), 9u);
    CHECK_EQ(describe(welcome.step_arrays[0]), "observation.count int64[3]");
    CHECK_EQ(welcome.step_arrays[0].nbytes, 24u);
    CHECK_EQ(describe(welcome.action_arrays.at(0)), "action float32[2,129]");
  }
}

TEST(a_step_is_read_however_it_is_split) {
  const std::string message = fake::step(3, 2, 7, 1234567, {11, 13});
  for (size_t chunk = 1; chunk <= message.size(); ++chunk) {
    const Segments segments = segments_of(message, chunk);
    const auto [kind, body] = wire::open(segments);
    CHECK(kind == wire::Kind::kStep);
    wire::Step step;
    wire::decode_step(segments, body, step_specs(), 2, &step);
    CHECK_EQ(step.seq, 1234567u);
    std::vector<int64_t> count(6);
    wire::copy(segments, step.arrays.at(0),
               reinterpret_cast<char*>(count.data()));
    CHECK(count == (std::vector<int64_t>{3, 7, 1234567, 4, 7, 1234567}));
    std::vector<int64_t> actions(2);
    wire::copy(segments, step.arrays.at(7),
               reinterpret_cast<char*>(actions.data()));
    CHECK(actions == (std::vector<int64_t>{11, 13}));
  }
}

TEST(newest_frames_are_read_however_they_are_split) {
  const std::string message = fake::step(3, 2, 7, 12, {11, 13}, true);
  for (size_t chunk = 1; chunk <= message.size(); ++chunk) {
    const Segments segments = segments_of(message, chunk);
    wire::Step step;
    wire::decode_step(segments, wire::open(segments).body, step_specs(), 2,
                      &step);
    CHECK(step.newest_frames);
    std::string frames(10, '.');
    wire::copy_runs(segments, step.arrays.at(1), 1, 5, frames.data() + 4);
    const std::string expected = "...." + fake::raw(fake::pixel_of(3, 12, 4)) +
                                 "...." + fake::raw(fake::pixel_of(4, 12, 4));
    CHECK_EQ(frames, expected);
  }
}

TEST(what_is_said_at_the_end_is_read) {
  Segments segments = segments_of(fake::failure("why", true), 2);
  const wire::Failure failure =
      wire::decode_failure(segments, wire::open(segments).body);
  CHECK_EQ(failure.text, "why");
  CHECK(failure.permanent);
  segments = segments_of(fake::goodbye("so long"), 2);
  CHECK_EQ(wire::decode_goodbye(segments, wire::open(segments).body).reason,
           "so long");
}

TEST(hello_and_action_are_written_as_servers_read_them) {
  wire::Hello hello;
  hello.version = "1.2";
  hello.run_id = "r";
  hello.info_keys = {"a", "b"};
  hello.seed = ~uint64_t{0};
  hello.first_env_id = 300;
  hello.incarnation = 7;
  const auto read = fake::parse_hello(wire::hello_to_server(hello));
  CHECK_EQ(read.version, "1.2");
  CHECK_EQ(read.run_id, "r");
  CHECK(read.info_keys == (std::vector<std::string>{"a", "b"}));
  CHECK_EQ(read.seed, -1);
  CHECK_EQ(read.first_env_id, 300);
  CHECK_EQ(read.incarnation, 7);
  CHECK(!read.newest_frames && !read.truncation_is_done);
  hello.newest_frames = true;
  CHECK(fake::parse_hello(wire::hello_to_server(hello)).newest_frames);
  hello.truncation_is_done = true;
  CHECK(fake::parse_hello(wire::hello_to_server(hello)).truncation_is_done);
  // Encoded by hand, from proto/torchbeast.proto.
  CHECK_EQ(wire::action_to_server(258, {"ab", "c"}),
           std::string("\x12\x10\x09\x02\x01\0\0\0\0\0\0\x12\x02"
                       "ab\x12\x01"
                       "c",
                       18));
  CHECK_EQ(wire::action_to_server(0, {"c"}, true),
           std::string("\x12\x0e\x09\0\0\0\0\0\0\0\0\x12\x01"
                       "c\x18\x01",
                       16));
  const std::string large(300, 'x');
  const auto fields = fake::parse(wire::action_to_server(1, {large}));
  CHECK_EQ(fake::parse(fields.at(0).bytes).at(1).bytes, large);
}

TEST(what_is_unknown_is_skipped) {
  const std::string future = fake::number(100, 5) + fake::bytes(101, "new") +
                             fake::fixed64(102, 7) +
                             std::string("\xbd\x06\1\2\3\4");  // fixed32
  const wire::Welcome welcome = read_welcome(
      future + fake::bytes(1, future + fake::number(5, 3)) + future);
  CHECK_EQ(welcome.num_envs, 3u);
}

TEST(shapes_may_be_packed_or_not) {
  const std::string array = fake::bytes(1, fake::bytes(1, "x")) +
                            fake::bytes(2, "uint8") + fake::number(3, 5) +
                            fake::number(3, 7);
  CHECK_EQ(describe(read_array(array).step_arrays.at(0)), "x uint8[5,7]");
}

TEST(welcomes_have_limits) {
  std::string arrays;
  for (size_t i = 0; i < wire::kMaxArrays; ++i) {
    arrays += fake::bytes(10, fake::array({"x"}, "bool"));
  }
  CHECK_EQ(read_welcome(fake::bytes(1, arrays)).step_arrays.size(),
           wire::kMaxArrays);
  arrays += fake::bytes(10, fake::array({"x"}, "bool"));
  CHECK_THROWS(DecodeError, "more than 4096 arrays",
               read_welcome(fake::bytes(1, arrays)));
  read_array(fake::array(std::vector<std::string>(16, "k"), "bool"));
  CHECK_THROWS(
      DecodeError, "more than 16 keys",
      read_array(fake::array(std::vector<std::string>(17, "k"), "bool")));
  read_array(fake::array({"x"}, "bool", std::vector<uint64_t>(16, 1)));
  CHECK_THROWS(
      DecodeError, "more than 16 axes",
      read_array(fake::array({"x"}, "bool", std::vector<uint64_t>(17, 1))));
  const uint64_t large = uint64_t{1} << 32;
  CHECK_THROWS(DecodeError, "array x is too large",
               read_array(fake::array({"x"}, "bool", {large, large})));
  CHECK_THROWS(DecodeError, "array x is too large",
               read_array(fake::array({"x"}, "bool", {0, large, large})));
  CHECK_THROWS(DecodeError, "array x is too large",
               read_array(fake::array({"x"}, "float64", {uint64_t{1} << 60})));
  CHECK_THROWS(DecodeError, "has an axis of 18446744073709551615",
               read_array(fake::array({"x"}, "bool", {~uint64_t{0}})));
  CHECK_EQ(read_array(fake::array({"x"}, "bool", {0, 5})).step_arrays[0].nbytes,
           0u);
}

TEST(options_are_kept_by_name_and_have_limits) {
  const auto read = [](const std::vector<std::string>& given) {
    fake::WelcomeOptions welcome;
    welcome.options = given;
    return read_welcome(fake::welcome(welcome)).options;
  };
  const auto options = read({fake::option("skip", 8), fake::bytes(1, "x")});
  CHECK_EQ(options.size(), 2u);
  CHECK_EQ(options.at("skip"), fake::number(2, 16));
  CHECK_EQ(options.at("x"), "");
  CHECK_THROWS(DecodeError, "the option 'skip' is there twice",
               read({fake::option("skip", 8), fake::option("skip", 4)}));
  CHECK_THROWS(DecodeError, "the option '?[2J' is too long or has control",
               read({fake::option("[2J", 1)}));
  CHECK_THROWS(DecodeError, "is too long or has control characters",
               read({fake::option(std::string(1025, 'x'), 1)}));
  CHECK_THROWS(
      DecodeError, "the option 'x' has a value of more than 1024 bytes",
      read({fake::bytes(1, "x") + fake::bytes(2, std::string(1025, 'v'))}));
  std::vector<std::string> many;
  for (size_t i = 0; i < wire::kMaxOptions; ++i) {
    many.push_back(fake::option(std::to_string(i), i));
  }
  CHECK_EQ(read(many).size(), wire::kMaxOptions);
  many.push_back(fake::option("one more", 1));
  CHECK_THROWS(DecodeError, "more than 64 options", read(many));
}

TEST(spaces_compare_however_they_are_written) {
  using fake::bytes;
  using fake::number;
  const auto read = [](const std::string& space) {
    fake::WelcomeOptions welcome;
    welcome.action = space;
    return read_welcome(fake::welcome(welcome)).action;
  };
  // Of uint8 [2]: dtype, shape, low, high.
  const auto box = [](const std::string& shape, const std::string& low,
                      const std::string& high) {
    return bytes(1, bytes(1, "uint8") + shape + bytes(3, low) + bytes(4, high));
  };
  const std::string packed = bytes(2, "\2");
  CHECK_EQ(read(box(packed, "a", "z")), read(box(packed, "aa", "zz")));
  CHECK_EQ(read(box(packed, "a", "z")), read(box(number(2, 2), "a", "z")));
  CHECK(read(box(packed, "a", "z")) != read(box(packed, "a", "zy")));
  CHECK(read(box(packed, "a", "z")) != read(box(packed, "b", "z")));
  CHECK(read(box(packed, "a", "z")) != read(box(bytes(2, "\3"), "a", "z")));

  const std::string two = bytes(2, number(1, 4));
  const std::string three = bytes(2, number(1, 6));
  CHECK_EQ(read(two), read(bytes(2, number(1, 4) + number(2, 0))));
  CHECK(read(two) != read(bytes(2, number(1, 4) + number(2, 2))));
  CHECK(read(two) != read(three));
  CHECK(read(bytes(4, bytes(1, "\2"))) != read(bytes(3, bytes(1, "\2"))));
  CHECK_EQ(read(bytes(4, number(1, 2) + number(1, 3))),
           read(bytes(4, bytes(1, "\2\3"))));

  const auto entry = [](const std::string& key, const std::string& space) {
    return bytes(1, bytes(1, key) + bytes(2, space));
  };
  CHECK_EQ(read(bytes(5, entry("a", two) + entry("b", three))),
           read(bytes(5, entry("b", three) + entry("a", two))));
  CHECK(read(bytes(5, entry("a", two) + entry("b", three))) !=
        read(bytes(5, entry("a", three) + entry("b", two))));
  CHECK(read(bytes(6, bytes(1, two) + bytes(1, three))) !=
        read(bytes(6, bytes(1, three) + bytes(1, two))));

  std::string deep = two;
  for (size_t i = 0; i < wire::kMaxDepth; ++i) deep = bytes(6, bytes(1, deep));
  CHECK(!read(deep).empty());
  CHECK_THROWS(DecodeError, "a space is nested too deeply",
               read(bytes(6, bytes(1, deep))));
}

TEST(fields_that_no_space_has_are_skipped) {
  const auto read = [](const std::string& space) {
    return read_welcome(fake::bytes(1, fake::bytes(8, space))).observation;
  };
  const std::string two = fake::number(1, 2);
  const std::string later = fake::number(5, 1) + fake::bytes(100, "new");
  CHECK_EQ(read(fake::bytes(2, two + later)), read(fake::bytes(2, two)));
}

TEST(the_two_spaces_of_a_welcome_have_few_values) {
  const auto read = [](size_t observation_keys, size_t action_keys) {
    std::string spaces;
    for (const auto& [field, n] :
         {std::pair{8, observation_keys}, std::pair{9, action_keys}}) {
      std::string entries;
      for (size_t i = 0; i < n; ++i) entries += fake::bytes(1, "");
      spaces += fake::bytes(field, fake::bytes(5, entries));
    }
    const std::string message = fake::bytes(1, spaces);
    return read_welcome(message, message.size());
  };
  // Each space has a field that says that it is a Dict.
  const size_t half = wire::kMaxValues / 2 - 1;
  CHECK(!read(half, half).action.empty());
  CHECK_THROWS(DecodeError, "its spaces have more than 1048576 values",
               read(half, half + 1));
}

TEST(values_of_options_are_described_as_python_writes_them) {
  const auto number = [](double value) {
    return fake::varint(3 << 3 | 1) + fake::raw(value);
  };
  CHECK_EQ(wire::describe_value(fake::number(1, 1)), "True");
  CHECK_EQ(wire::describe_value(fake::number(1, 0)), "False");
  CHECK_EQ(wire::describe_value(fake::number(2, 8)), "4");
  CHECK_EQ(wire::describe_value(fake::number(2, 7)), "-4");
  CHECK_EQ(wire::describe_value(fake::number(2, ~uint64_t{0})),
           "-9223372036854775808");
  CHECK_EQ(wire::describe_value(number(0.25)), "0.25");
  CHECK_EQ(wire::describe_value(number(-1e-300)), "-1e-300");
  CHECK_EQ(wire::describe_value(number(4)), "4.0");
  CHECK_EQ(wire::describe_value(fake::bytes(4, "a\x1b[2J")), "'a?[2J'");
  CHECK_EQ(wire::describe_value(""), "nothing");
  CHECK_EQ(wire::describe_value(number(0.25).substr(0, 5)), "unreadable");
  CHECK_EQ(wire::describe_value(fake::number(4, 1)), "unreadable");
}

TEST(malformed_fields_are_refused) {
  CHECK_THROWS(DecodeError, "unknown dtype 'object'",
               read_array(fake::array({"x"}, "object")));
  CHECK_THROWS(DecodeError, "unknown dtype ''",
               read_array(fake::bytes(1, fake::bytes(1, "x"))));
  CHECK_THROWS(DecodeError, "empty key", read_array(fake::bytes(1, "")));
  CHECK_THROWS(DecodeError, "array x is a stack, but has no frames",
               read_array(fake::array({"x"}, "bool", {}, true)));
  CHECK_THROWS(DecodeError, "array x is a stack, but has no frames",
               read_array(fake::array({"x"}, "bool", {0, 5}, true)));
  CHECK_THROWS(DecodeError, "a key is not UTF-8",
               read_array(fake::array({"\xc0\x80"}, "bool")));
  CHECK_THROWS(DecodeError, "the key '?[2J' is too long or has control",
               read_array(fake::array({"\x1b[2J"}, "bool")));
  CHECK_THROWS(DecodeError, "is too long or has control characters",
               read_array(fake::array({std::string(257, 'k')}, "bool")));
  CHECK_THROWS(DecodeError, "field 5 has wire type 2, expected 0",
               read_welcome(fake::bytes(1, fake::bytes(5, "text"))));
  CHECK_THROWS(
      DecodeError, "num_envs is 4294967296, too large",
      read_welcome(fake::bytes(1, fake::number(5, uint64_t{1} << 32))));
  CHECK_THROWS(DecodeError, "does not fit into 64 bits",
               read_welcome(fake::bytes(
                   1, fake::varint(8) + std::string(10, '\xff') + "\x01")));
  CHECK_THROWS(DecodeError, "field number 0",
               read_welcome(fake::bytes(1, std::string(2, '\0'))));
  CHECK_THROWS(DecodeError, "wire type 3 is unknown",
               read_welcome(fake::bytes(1, "\x6b")));
  CHECK_THROWS(DecodeError, "a field of 100 bytes has only 1 left",
               read_welcome(fake::bytes(1, "\x22\x64x")));
}

TEST(steps_must_be_what_the_welcome_said) {
  const auto read = [](const std::string& message, size_t num_envs) {
    const Segments segments = segments_of(message, 5);
    wire::Step step;
    wire::decode_step(segments, wire::open(segments).body, step_specs(),
                      num_envs, &step);
  };
  const std::string right = fake::step(0, 1, 0, 1, {0});
  read(right, 1);
  CHECK_THROWS(DecodeError, "24 bytes, expected 48 (2 of int64[3])",
               read(right, 2));
  const std::string inner = fake::parse(right).at(0).bytes;
  CHECK_THROWS(DecodeError, "more than the expected 9 arrays",
               read(fake::bytes(2, inner + fake::bytes(2, "")), 1));
  std::string two = inner;
  two[two.find(fake::bytes(2, fake::raw(true))) == std::string::npos
          ? two.find(fake::bytes(2, fake::raw(false))) + 2
          : two.find(fake::bytes(2, fake::raw(true))) + 2] = 2;
  CHECK_THROWS(DecodeError, "is bool and has a byte other than 0 and 1",
               read(fake::bytes(2, two), 1));
}

TEST(a_newest_frame_has_the_range_of_the_last_frame) {
  const wire::ArraySpec spec = {
      {{false, "x"}}, DType::kInt64, {2, 3}, 48, true};
  const wire::ValueRange range = {
      spec.path, {0, 0, 0, 10, 20, 30}, {1, 2, 3, 14, 25, 36}};
  const auto check = [&](const std::string& values) {
    const Segments segments = segments_of(values, 7);
    wire::check_range(segments, {0, 0, values.size()}, spec, range, 2);
  };
  const auto first = [](int64_t x) {
    return fake::raw(int64_t{14}, x, int64_t{36});
  };
  const auto whole = [&](int64_t x) {
    return fake::raw(int64_t{1}, int64_t{2}, int64_t{3}) + first(x);
  };
  check(first(25) + first(20));
  check(whole(25) + whole(20));
  for (const std::string& values :
       {first(25) + first(19), whole(25) + whole(19)}) {
    CHECK_THROWS(DecodeError,
                 "array x of environment 1 in this stream has 19, expected 20 "
                 "to 25",
                 check(values));
  }
}

TEST(a_mask_must_allow_a_value_of_each_choice_unless_the_row_is_truncated) {
  const std::vector<wire::ArraySpec> specs = {
      {{{false, "truncated"}}, DType::kBool, {}, 1, false},
      {{{false, "legs"}}, DType::kFloat32, {2}, 8, false},
      {{{false, "toes"}}, DType::kInt16, {3}, 6, false}};
  const wire::Mask mask = {{1, 2}, {3, 2}, 0};
  const auto check = [&](bool truncated, float leg, int16_t toe, int16_t last) {
    const auto flags = fake::raw(false, truncated);
    const auto legs = fake::raw(0.5f, 0.0f, -0.0f, leg);
    const auto toes = fake::raw(int16_t{0}, int16_t{0}, int16_t{256}) +
                      fake::raw(toe, int16_t{0}, last);
    const std::string bytes = flags + legs + toes;
    const Segments segments = segments_of(bytes, bytes.size());
    const size_t at = flags.size() + legs.size();
    const wire::Step step = {
        0, {{0, 0, 2}, {0, 2, legs.size()}, {0, at, toes.size()}}, false};
    wire::check_mask(segments, step, specs, mask, 2);
  };
  check(false, 1.0f, 0, 1);
  check(false, 0.0f, -1, 1);
  check(true, 0.0f, 0, 0);
  CHECK_THROWS(DecodeError,
               "observation.action_mask of environment 1 in this stream allows "
               "none of 3 values of choice 0, expected at least one",
               check(false, -0.0f, 0, 1));
  CHECK_THROWS(DecodeError, "allows none of 2 values of choice 1",
               check(false, 1.0f, 1, 0));
}

TEST(layout_nests_arrays_by_their_paths) {
  const auto name = [](const std::string& text) {
    wire::Key key;
    key.name = text;
    return key;
  };
  const auto index = [](uint32_t number) {
    wire::Key key;
    key.is_index = true;
    key.index = number;
    return key;
  };
  const auto layout = [](const std::vector<std::vector<wire::Key>>& paths) {
    std::vector<wire::ArraySpec> specs;
    for (const auto& path : paths) specs.emplace_back().path = path;
    return wire::layout(specs);
  };
  // The keys are sorted, whatever the order of the arrays.
  const auto both = layout(
      {{name("b"), index(1)}, {name("a")}, {name("b"), index(0), name("z")}});
  CHECK_EQ(describe(*both.structure), "{a: *, b: ({z: *}, *)}");
  CHECK(both.arrays == (std::vector<size_t>{1, 2, 0}));
  CHECK(layout({{}}).structure->kind == Structure::Kind::kLeaf);
  CHECK_THROWS(DecodeError, "no arrays", layout({}));
  CHECK_THROWS(DecodeError, "where another one does",
               layout({{name("a")}, {name("a")}}));
  CHECK_THROWS(DecodeError, "where another one does",
               layout({{name("a"), name("b")}, {name("a")}}));
  CHECK_THROWS(DecodeError, "a dict and a tuple",
               layout({{name("a")}, {index(0)}}));
  CHECK_THROWS(DecodeError, "no neighbour with index 1",
               layout({{index(0)}, {index(2)}}));
}

TEST(text_from_afar_is_made_printable) {
  CHECK_EQ(printable("a\tb\n\x1b[0m \xc3\xa9 \xff", 100),
           "a\tb\n?[0m \xc3\xa9 ?");
  CHECK_EQ(printable("\xc2\x9b\x32J \xc2\xa0", 100), "?2J \xc2\xa0");
  CHECK_EQ(printable("\xc3\xa9\xc3\xa9", 3), "\xc3\xa9");
  CHECK(is_utf8("\xf0\x9f\xa6\x81"));
  CHECK(!is_utf8("\xed\xa0\x80"));      // A surrogate.
  CHECK(!is_utf8("\xf4\x90\x80\x80"));  // Over U+10FFFF.
  CHECK(!is_utf8("\xe0\x80\x80"));      // An overlong encoding.
  CHECK(!is_utf8("\xc3"));
}

TEST(random_changes_are_read_or_refused) {
  std::minstd_rand random(5);
  const std::vector<std::string> seeds = {
      fake::welcome({}), fake::step(0, 1, 0, 1, {0}), fake::failure("why"),
      fake::goodbye("so long")};
  int refused = 0;
  constexpr int kTries = 20000;
  for (int i = 0; i < kTries; ++i) {
    std::string message = seeds[random() % seeds.size()];
    for (size_t changes = 1 + random() % 4; changes > 0; --changes) {
      const size_t at = random() % message.size();
      switch (random() % 4) {
        case 0:
          message[at] = static_cast<char>(random());
          break;
        case 1:
          message[at] = '\xff';
          break;
        case 2:
          message.resize(at + 1);
          break;
        case 3:
          message.insert(at, message.substr(random() % message.size()));
          break;
      }
    }
    const Segments segments = segments_of(message, 1 + random() % 40);
    try {
      const auto [kind, body] = wire::open(segments);
      if (kind == wire::Kind::kWelcome) {
        const auto welcome = wire::decode_welcome(segments, body);
        wire::layout(welcome.step_arrays);
      } else if (kind == wire::Kind::kStep) {
        wire::Step step;
        wire::decode_step(segments, body, step_specs(), 1, &step);
        std::vector<char> to(24);
        for (size_t k = 0; k < step.arrays.size(); ++k) {
          wire::copy(segments, step.arrays[k], to.data());
        }
      } else if (kind == wire::Kind::kFailure) {
        wire::decode_failure(segments, body);
      } else {
        wire::decode_goodbye(segments, body);
      }
    } catch (const DecodeError&) {
      ++refused;
    }
  }
  CHECK(refused > kTries / 4);
  CHECK(refused < kTries);
}
