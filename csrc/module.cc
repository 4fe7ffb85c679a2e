// SPDX-License-Identifier: Apache-2.0
//
// The bindings: libtorchbeast._C, the core as Python sees it. Only this file
// and py_*.{h,cc} know Python. _C.pyi has the types and the full documentation.
//
// Methods that release the GIL while they wait are marked "Blocks."; py_gil.h
// has the rules.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "actor_pool.h"
#include "batching_queue.h"
#include "buffer_pool.h"
#include "dynamic_batcher.h"
#include "errors.h"
#include "nest.h"
#include "py_gil.h"
#include "py_memory.h"
#include "py_nest.h"
#include "transport_grpc.h"
#include "transport_local.h"
#include "wire.h"

namespace py = pybind11;

namespace torchbeast {
namespace {

// --- The actor pool ----------------------------------------------------------

// All pools that exist. Needs the GIL.
std::vector<std::weak_ptr<ActorPool>>& pools() {
  static auto* const pools = new std::vector<std::weak_ptr<ActorPool>>();
  return *pools;
}

bool was_forked = false;  // Guarded by the GIL.

// Runs in a child process after os.fork(). The child has none of the threads of
// its parent's pools, so it must not wait for them: it never stops or destroys
// these pools.
void after_fork_in_child() {
  was_forked = true;
  ++BufferPool::num_forks;
  forget_dropped();
  set_main_thread();
  static auto* const leaked = new std::vector<std::shared_ptr<ActorPool>>();
  for (const auto& weak : std::exchange(pools(), {})) {
    if (auto pool = weak.lock()) leaked->push_back(std::move(pool));
  }
}

// Runs at exit of the interpreter: ends all threads of the core that may call
// Python. Queues and batchers stay open, as later exit handlers may use them.
void end() {
  for (const auto& weak : std::exchange(pools(), {})) {
    if (const auto pool = weak.lock()) {
      call_without_gil([&pool] { pool->stop(); });
    }
  }
  // In a forked child it would wait for calls that only the parent's threads
  // could end.
  if (!was_forked) call_without_gil([] { end_allocations(); });
}

// The paths of ca.pem, cert.pem and key.pem.
using PemFiles = std::tuple<std::string, std::string, std::string>;

std::optional<Tls> to_tls(std::optional<PemFiles> files) {
  if (!files) return std::nullopt;
  auto& [ca, cert, key] = *files;
  return Tls{std::move(ca), std::move(cert), std::move(key)};
}

// (path, low, high): see wire::ValueRange.
using PyValueRange =
    std::tuple<std::vector<std::variant<uint32_t, std::string>>,
               std::vector<int64_t>, std::vector<int64_t>>;

wire::ValueRange to_value_range(const PyValueRange& range) {
  const auto& [path, low, high] = range;
  wire::ValueRange result{{}, low, high};
  for (const auto& key : path) {
    const auto* index = std::get_if<uint32_t>(&key);
    result.path.push_back(index ? wire::Key{true, "", *index}
                                : wire::Key{false, std::get<1>(key), 0});
  }
  if (low.empty() || low.size() != high.size()) {
    throw std::invalid_argument(
        "value_ranges has " + std::to_string(low.size()) + " least and " +
        std::to_string(high.size()) + " greatest values for " +
        wire::path_name({.path = result.path}) +
        ", expected as many of both, and at least one");
  }
  return result;
}

// None if there are no bytes.
std::optional<wire::Welcome> to_welcome(const std::string& bytes) {
  if (bytes.empty()) return std::nullopt;
  Segments message;
  message.parts.emplace_back(bytes);
  try {
    return wire::decode_welcome(message, {.size = bytes.size()});
  } catch (const wire::DecodeError& error) {
    throw std::invalid_argument("welcome is malformed: " +
                                std::string(error.what()));
  }
}

// The parameters are those of the Python class.
std::shared_ptr<ActorPool> make_actor_pool(
    int64_t unroll_length, std::shared_ptr<BatchingQueue> learner_queue,
    std::shared_ptr<DynamicBatcher> inference_batcher,
    std::vector<std::string> env_server_addresses,
    const py::object& initial_agent_state, bool named_rows,
    std::vector<std::string> inference_keys, std::vector<std::string> info_keys,
    uint64_t seed, std::string run_id, uint64_t first_incarnation,
    int max_failures, double step_timeout_s, double keepalive_s,
    int num_threads, std::optional<PemFiles> tls,
    const std::vector<PyValueRange>& value_ranges,
    std::vector<size_t> mask_sizes, size_t max_streams, int64_t num_envs,
    const std::string& welcome, bool servers_may_change) {
  for (const auto& address : env_server_addresses) check_address(address);
  PoolOptions options;
  options.unroll_length = unroll_length;
  options.learner_queue = std::move(learner_queue);
  options.inference_batcher = std::move(inference_batcher);
  options.addresses = std::move(env_server_addresses);
  options.max_streams = max_streams;
  options.num_envs = num_envs;
  options.welcome = to_welcome(welcome);
  options.servers_may_change = servers_may_change;
  options.initial_agent_state = to_nest(initial_agent_state);
  options.named_rows = named_rows;
  options.inference_keys = std::move(inference_keys);
  options.info_keys = std::move(info_keys);
  for (const PyValueRange& range : value_ranges) {
    options.value_ranges.push_back(to_value_range(range));
  }
  options.mask_sizes = std::move(mask_sizes);
  options.seed = seed;
  options.run_id = std::move(run_id);
  options.version = TORCHBEAST_VERSION;
  options.first_incarnation = first_incarnation;
  options.max_failures = max_failures;
  options.step_timeout_s = step_timeout_s;
  // The binding of run() holds a reference. So when the pool is destroyed,
  // run() has ended, and the destructor does not wait for threads that may need
  // the GIL.
  const auto pool = std::make_shared<ActorPool>(
      std::move(options),
      make_local_transport(num_threads,
                           make_grpc_transport(num_threads, keepalive_s,
                                               to_tls(std::move(tls)))));
  std::erase_if(pools(), [](const auto& weak) { return weak.expired(); });
  pools().push_back(pool);
  return pool;
}

py::dict to_python(const PoolStats& stats) {
  py::dict by_address;
  for (const AddressStats& address : stats.addresses) {
    py::dict entry;
    entry["streams"] = address.streams;
    entry["connected"] = address.connected;
    entry["steps"] = address.steps;
    entry["p50_ms"] = address.p50_ms;
    entry["p99_ms"] = address.p99_ms;
    entry["env_s"] = address.env_s;
    by_address[py::str(address.address)] = entry;
  }
  py::list states;
  for (const StreamState state : stats.states) states.append(name(state));
  py::dict result;
  result["connected"] = stats.connected;
  result["connects"] = stats.connects;
  result["reconnects"] = stats.reconnects;
  result["failures"] = stats.failures;
  result["received"] = stats.received;
  result["dequeued"] = stats.dequeued;
  result["discarded"] = stats.discarded;
  result["in_flight"] = stats.in_flight;
  result["batch_fill"] = stats.batch_fill;
  result["env_s"] = stats.env_s;
  result["states"] = states;
  result["waiting_s"] = stats.waiting_s;
  result["stream_addresses"] = stats.stream_addresses;
  result["addresses"] = by_address;
  return result;
}

// Blocks.
py::bytes describe_server(const std::string& address,
                          std::vector<std::string> info_keys,
                          std::string run_id, double timeout_s,
                          std::optional<PemFiles> pem_files) {
  const std::optional<Tls> tls = to_tls(std::move(pem_files));
  wire::Hello hello;
  hello.version = TORCHBEAST_VERSION;
  hello.run_id = std::move(run_id);
  hello.info_keys = std::move(info_keys);
  return py::bytes(without_gil(
      [&] { return describe(address, wire::encode(hello), timeout_s, tls); }));
}

// --- The module --------------------------------------------------------------

py::object self_of(py::object self) { return self; }

void bind_batching_queue(py::module_& m) {
  using Queue = std::shared_ptr<BatchingQueue>;
  py::class_<BatchingQueue, Queue>(
      m, "BatchingQueue",
      "FIFO of nests of arrays, which leave it joined into batches.")
      .def(py::init([](int64_t batch_dim, int64_t minimum_batch_size,
                       int64_t maximum_batch_size,
                       std::optional<int64_t> timeout_ms, bool check_inputs,
                       std::optional<int64_t> maximum_queue_size,
                       const py::object& allocate) {
             return std::make_shared<BatchingQueue>(
                 QueueOptions{batch_dim, minimum_batch_size, maximum_batch_size,
                              timeout_ms, check_inputs, maximum_queue_size},
                 make_pool(allocate));
           }),
           py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024,
           py::arg("timeout_ms") = py::none(), py::arg("check_inputs") = true,
           py::arg("maximum_queue_size") = py::none(),
           py::arg("allocate") = py::none())
      .def(
          "enqueue",  // Blocks.
          [](const Queue& self, py::handle nest) {
            Nest item = to_nest(nest);
            call_without_gil([&] { self->enqueue(std::move(item)); });
          },
          py::arg("nest"), "Add a nest. Blocks while the queue is full.")
      .def(
          "close",
          [](const Queue& self) { call_without_gil([&] { self->close(); }); },
          "Wake every waiter and drop what is queued. Does not block.")
      .def("size", &BatchingQueue::size, "Rows queued. Does not block.")
      .def("is_closed", &BatchingQueue::is_closed, "Does not block.")
      .def("dropped", &BatchingQueue::dropped,
           "Rows that nobody will see. Does not block.")
      .def("dequeued", &BatchingQueue::dequeued,
           "Rows handed out so far. Does not block.")
      .def("num_waiting", &BatchingQueue::num_waiting,
           "Threads that wait here. Does not block.")
      .def("__iter__", &self_of)
      .def(
          "__next__",  // Blocks.
          [](const Queue& self) {
            const auto batch =
                without_gil([&] { return self->dequeue_many(); });
            if (!batch) throw py::stop_iteration();
            return to_python(*batch);
          },
          "Return a batch; StopIteration after close(). Blocks.");
}

void bind_dynamic_batcher(py::module_& m) {
  using Batcher = std::shared_ptr<DynamicBatcher>;
  py::class_<Batch, std::shared_ptr<Batch>>(
      m, "Batch", "Joined inputs that wait for outputs.")
      .def(
          "get_inputs",
          [](const Batch& self) { return to_python(self.inputs()); },
          "Return the joined inputs. Does not block.")
      .def(
          "set_outputs",
          [](const std::shared_ptr<Batch>& self, py::handle nest) {
            Nest outputs = to_nest(nest);
            call_without_gil([&] { self->set_outputs(std::move(outputs)); });
          },
          py::arg("outputs"), "Hand each caller its rows. Does not block.");

  py::class_<DynamicBatcher, Batcher>(
      m, "DynamicBatcher",
      "Joins the inputs of many callers; hands each its part of the outputs.")
      .def(py::init([](int64_t batch_dim, int64_t minimum_batch_size,
                       int64_t maximum_batch_size,
                       std::optional<int64_t> timeout_ms, bool check_outputs,
                       const py::object& allocate) {
             return std::make_shared<DynamicBatcher>(
                 BatcherOptions{batch_dim, minimum_batch_size,
                                maximum_batch_size, timeout_ms, check_outputs},
                 make_pool(allocate));
           }),
           py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = 100,
           py::arg("check_outputs") = true, py::arg("allocate") = py::none())
      .def(
          "compute",  // Blocks.
          [](const Batcher& self, py::handle nest) {
            Nest inputs = to_nest(nest);
            const Nest outputs =
                without_gil([&] { return self->compute(std::move(inputs)); });
            return to_python(outputs);
          },
          py::arg("nest"),
          "Return the outputs for these inputs. Blocks until there are some.")
      .def(
          "close",
          [](const Batcher& self) { call_without_gil([&] { self->close(); }); },
          "Wake every waiter. Does not block.")
      .def("size", &DynamicBatcher::size, "Rows queued. Does not block.")
      .def("is_closed", &DynamicBatcher::is_closed, "Does not block.")
      .def("num_batches", &DynamicBatcher::num_batches,
           "Batches handed out so far. Does not block.")
      .def("num_rows", &DynamicBatcher::num_rows,
           "Rows handed out so far. Does not block.")
      .def("num_waiting", &DynamicBatcher::num_waiting,
           "Threads that wait here. Does not block.")
      .def("__iter__", &self_of)
      .def(
          "__next__",  // Blocks.
          [](const Batcher& self) {
            auto batch = without_gil([&] { return self->get_batch(); });
            if (!batch) throw py::stop_iteration();
            return batch;
          },
          "Return a Batch; StopIteration after close(). Blocks.");
}

void bind_actor_pool(py::module_& m) {
  using Pool = std::shared_ptr<ActorPool>;
  py::class_<ActorPool, Pool>(m, "ActorPool",
                              "Plays on environment servers, without Python.")
      .def(py::init(&make_actor_pool), py::arg("unroll_length"),
           py::arg("learner_queue").none(false),
           py::arg("inference_batcher").none(false),
           py::arg("env_server_addresses"), py::arg("initial_agent_state"),
           py::kw_only(), py::arg("named_rows") = false,
           py::arg("inference_keys") = py::tuple(),
           py::arg("info_keys") = py::tuple(), py::arg("seed") = 0,
           py::arg("run_id") = "", py::arg("first_incarnation") = 0,
           py::arg("max_failures") = 5, py::arg("step_timeout_s") = 0.0,
           py::arg("keepalive_s") = kDefaultKeepaliveS,
           py::arg("num_threads") = 1, py::arg("tls") = py::none(),
           py::arg("value_ranges") = py::tuple(),
           py::arg("mask_sizes") = py::tuple(), py::arg("max_streams") = 0,
           py::arg("num_envs") = 1, py::arg("welcome") = py::bytes(),
           py::arg("servers_may_change") = false)
      .def(
          "run",  // Blocks.
          [](const Pool& self) { call_without_gil([&] { self->run(); }); },
          "Play until stop(), or until a queue is closed. Blocks.")
      .def(
          "stop",  // Blocks.
          [](const Pool& self) { call_without_gil([&] { self->stop(); }); },
          "End run(). Blocks until it has ended.")
      .def(
          "set_addresses",
          [](const Pool& self, const std::vector<std::string>& addresses) {
            for (const auto& address : addresses) check_address(address);
            return without_gil([&] { return self->set_addresses(addresses); });
          },
          py::arg("env_server_addresses"),
          "Replace the list of addresses. Does not block.")
      .def("count", &ActorPool::count, "Steps received. Does not block.")
      .def(
          "stats",
          [](const ActorPool& self) { return to_python(self.stats()); },
          "Return what happened so far. Does not block.")
      .def("take_events", &ActorPool::take_events,
           "Return lines about failures since the last call. Does not block.");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  set_main_thread();

  py::register_exception<QueueClosed>(m, "ClosedBatchingQueue",
                                      PyExc_RuntimeError);
  py::register_exception<AsyncError>(m, "AsyncError", PyExc_RuntimeError);
  const auto actor_error = py::register_exception<ActorError>(
      m, "ActorError", PyExc_ConnectionError);
  py::register_exception<ServerMismatch>(m, "ServerMismatch", actor_error);
  py::register_exception<ServerUnavailable>(m, "ServerUnavailable",
                                            actor_error);
  bind_batching_queue(m);
  bind_dynamic_batcher(m);
  bind_actor_pool(m);
  py::module_::import("atexit").attr("register")(py::cpp_function(&end));
  py::module_::import("os").attr("register_at_fork")(
      py::arg("after_in_child") = py::cpp_function(&after_fork_in_child));
  m.def("describe", &describe_server,  // Blocks.
        py::arg("address"), py::kw_only(), py::arg("info_keys") = py::tuple(),
        py::arg("run_id") = "", py::arg("timeout_s") = 10.0,
        py::arg("tls") = py::none(),
        "Return the Welcome of the server at this address, as bytes. Blocks.");
  for (const py::handle name : py::list(m.attr("__dict__").attr("keys")())) {
    const py::object value = m.attr(name);
    if (py::isinstance<py::type>(value)) {
      value.attr("__module__") = "libtorchbeast";
    }
  }
}

}  // namespace torchbeast
