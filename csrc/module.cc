// SPDX-License-Identifier: Apache-2.0
//
// libtorchbeast._C: the core as Python sees it. No other file knows Python.
// _C.pyi has the types and the full documentation.
//
// Who holds the GIL:
// * Calls that can wait give it up around the wait (without_gil) and are marked
//   "Blocks." below. The frames that wait own no Python object: at the end of
//   the interpreter Python ends such threads by unwinding them, without GIL.
// * The core drops arrays in any thread, also in such that must not wait for
//   the GIL. So what keeps a Python object alive (keep) does not let go of it
//   itself: it puts it down with the Undertaker, and the next thread that comes
//   by with the GIL lets go of it.
// * `allocate` takes the GIL, in whichever thread needs memory, until the
//   interpreter is about to end. The core calls it with no lock held.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "actor_pool.h"
#include "array.h"
#include "batching_queue.h"
#include "buffer_pool.h"
#include "dynamic_batcher.h"
#include "errors.h"
#include "interrupt.h"
#include "nest.h"
#include "transport_grpc.h"
#include "wire.h"

namespace py = pybind11;

namespace torchbeast {
namespace {

// ---------------------------------------------------------------------------
// Python objects that C++ keeps alive.

// Takes Python objects from threads without the GIL. Thread-safe.
class Undertaker {
 public:
  void take(PyObject* object) {
    std::lock_guard lock(mu_);
    objects_.push_back(object);
  }

  // Lets go of everything taken. With the GIL.
  void bury() {
    std::vector<PyObject*> objects;
    {
      std::lock_guard lock(mu_);
      objects.swap(objects_);
    }
    for (PyObject* object : objects) Py_DECREF(object);
  }

 private:
  std::mutex mu_;
  std::vector<PyObject*> objects_;  // Guarded by mu_.
};

Undertaker& undertaker() {
  // Never destroyed: threads of the core may outlive main().
  static Undertaker* const undertaker = new Undertaker();
  return *undertaker;
}

// A new reference to `object`, to be dropped by any thread.
std::shared_ptr<void> keep(PyObject* object) {
  return std::shared_ptr<void>(Py_NewRef(object), [](void* kept) {
    undertaker().take(static_cast<PyObject*>(kept));
  });
}

// ---------------------------------------------------------------------------
// Waiting without the GIL.

// A signal came and its Python handler raised; the error is set.
struct Interrupted {};

unsigned long main_thread = 0;  // NOLINT: as PyThread_get_thread_ident has it.

// Ctrl-C must reach a main thread that waits in C++.
void check_signals() {
  const PyGILState_STATE state = PyGILState_Ensure();
  // With an error set no handler may run. Then the work is ending because of
  // it.
  const bool raised = !PyErr_Occurred() && PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  if (raised) throw Interrupted();
}

// Returns work(), run without the GIL. At the end of the interpreter this may
// not return, but unwind or stay for ever: so callers own no Python objects.
template <typename Work>
auto without_gil(const Work& work) {
  using Result = std::invoke_result_t<Work>;
  std::exception_ptr error;
  bool interrupted = false;
  std::optional<Result> result;

  PyThreadState* const thread = PyEval_SaveThread();
  if (PyThread_get_thread_ident() == main_thread) {
    interrupt_check = check_signals;
  }
  try {
    result.emplace(work());
  } catch (const Interrupted&) {
    interrupted = true;
  } catch (...) {
    error = std::current_exception();
  }
  interrupt_check = nullptr;
  PyEval_RestoreThread(thread);

  undertaker().bury();
  // Also if the work ended otherwise meanwhile: the handler's error is still
  // set.
  if (interrupted || PyErr_Occurred()) throw py::error_already_set();
  if (error) std::rethrow_exception(error);
  return std::move(*result);
}

// The same for work that returns nothing.
template <typename Work>
void call_without_gil(const Work& work) {
  without_gil([&work] {
    work();
    return true;
  });
}

// ---------------------------------------------------------------------------
// Arrays in and out: torch tensors and numpy arrays, sharing their memory.

constexpr std::array kDTypes = {
    DType::kBool,   DType::kUInt8,   DType::kInt8,     DType::kUInt16,
    DType::kInt16,  DType::kUInt32,  DType::kInt32,    DType::kUInt64,
    DType::kInt64,  DType::kFloat16, DType::kBFloat16, DType::kFloat32,
    DType::kFloat64};

py::str interned(const char* text) {
  return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(text));
}

// What is used of Python again and again. Never destroyed.
struct Handles {
  // In the order of kDTypes. numpy has no bfloat16: it gets these as int16.
  std::array<py::dtype, kDTypes.size()> numpy_dtypes;

  // Of torch; null if it is not installed.
  py::object tensor_type;
  py::object from_numpy;
  std::array<py::object, kDTypes.size()> torch_dtypes;

  const py::str contiguous = interned("contiguous");
  const py::str data_ptr = interned("data_ptr");
  const py::str detach = interned("detach");
  const py::str dtype = interned("dtype");
  const py::str is_contiguous = interned("is_contiguous");
  const py::str is_cpu = interned("is_cpu");
  const py::str requires_grad = interned("requires_grad");
  const py::str shape = interned("shape");

  Handles() {
    for (size_t i = 0; i < kDTypes.size(); ++i) {
      const bool known = kDTypes[i] != DType::kBFloat16;
      numpy_dtypes[i] =
          py::dtype(std::string(known ? name(kDTypes[i]) : "int16"));
    }
    try {
      const py::module_ torch = py::module_::import("torch");
      tensor_type = torch.attr("Tensor");
      from_numpy = torch.attr("from_numpy");
      for (size_t i = 0; i < kDTypes.size(); ++i) {
        torch_dtypes[i] = torch.attr(std::string(name(kDTypes[i])).c_str());
      }
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_ModuleNotFoundError)) throw;
    }
  }

  bool is_tensor(py::handle object) const {
    return tensor_type && py::isinstance(object, tensor_type);
  }
};

// The first call imports numpy, and torch if it is installed.
const Handles& handles() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Handles> storage;
  return storage.call_once_and_store_result([] { return Handles(); })
      .get_stored();
}

// Where an object is in the nest that it came in. For messages.
struct Place {
  const Place* above = nullptr;
  const std::string* key = nullptr;  // In a dict; otherwise there is an index.
  size_t index = 0;

  // "Leaf [0]['frame']: "
  std::string message() const {
    return (above == nullptr ? "The array" : "Leaf " + path()) + ": ";
  }

 private:
  std::string path() const {
    if (above == nullptr) return "";
    return above->path() +
           (key ? "['" + *key + "']" : "[" + std::to_string(index) + "]");
  }
};

std::string text_of(py::handle object) { return py::str(object); }

Array array_from_tensor(py::object tensor, const Place& place) {
  const Handles& python = handles();
  if (!py::cast<bool>(tensor.attr(python.is_cpu))) {
    throw std::invalid_argument(
        place.message() + "expected a tensor on the CPU, got one on " +
        text_of(tensor.attr("device")) + "; call .cpu() first");
  }
  const py::object dtype = tensor.attr(python.dtype);
  size_t i = 0;
  while (i < kDTypes.size() && !python.torch_dtypes[i].is(dtype)) ++i;
  if (i == kDTypes.size()) {
    throw py::type_error(place.message() +
                         "expected booleans, integers or "
                         "floats, got " +
                         text_of(dtype));
  }
  // The queue must not keep a graph alive.
  if (py::cast<bool>(tensor.attr(python.requires_grad))) {
    tensor = tensor.attr(python.detach)();
  }
  if (!py::cast<bool>(tensor.attr(python.is_contiguous)())) {
    tensor = tensor.attr(python.contiguous)();
  }

  Array array;
  array.dtype = kDTypes[i];
  for (const py::handle axis : py::tuple(tensor.attr(python.shape))) {
    array.shape.push_back(py::cast<int64_t>(axis));
  }
  array.data = reinterpret_cast<char*>(
      py::cast<uintptr_t>(tensor.attr(python.data_ptr)()));
  array.owner = keep(tensor.ptr());
  return array;
}

Array array_from_ndarray(py::array ndarray, const Place& place) {
  const Handles& python = handles();
  const py::dtype dtype = ndarray.dtype();
  size_t i = 0;
  while (i < kDTypes.size() &&
         (kDTypes[i] == DType::kBFloat16 ||
          python.numpy_dtypes[i].kind() != dtype.kind() ||
          python.numpy_dtypes[i].itemsize() != dtype.itemsize())) {
    ++i;
  }
  if (i == kDTypes.size()) {
    throw py::type_error(place.message() +
                         "expected booleans, integers or "
                         "floats, got " +
                         text_of(dtype));
  }
  // A batch of a single item shares its memory, and may be written to: so
  // constants are copied, as well as what is not plain C order.
  using Flags = py::detail::npy_api::constants;
  constexpr int kPlain = Flags::NPY_ARRAY_C_CONTIGUOUS_ |
                         Flags::NPY_ARRAY_ALIGNED_ |
                         Flags::NPY_ARRAY_WRITEABLE_;
  if ((ndarray.flags() & kPlain) != kPlain ||
      dtype.byteorder() != python.numpy_dtypes[i].byteorder()) {
    ndarray =
        py::array::ensure(ndarray.attr("astype")(python.numpy_dtypes[i], "C"));
  }

  Array array;
  array.dtype = kDTypes[i];
  array.shape.assign(ndarray.shape(), ndarray.shape() + ndarray.ndim());
  array.data = static_cast<char*>(ndarray.mutable_data());
  array.owner = keep(ndarray.ptr());
  return array;
}

Array to_array(py::handle object, const Place& place) {
  if (handles().is_tensor(object)) {
    return array_from_tensor(py::reinterpret_borrow<py::object>(object), place);
  }
  if (py::isinstance<py::array>(object)) {
    return array_from_ndarray(py::reinterpret_borrow<py::array>(object), place);
  }
  throw py::type_error(place.message() +
                       "expected a torch.Tensor or a numpy.ndarray, got " +
                       Py_TYPE(object.ptr())->tp_name);
}

// A tensor, or an ndarray where torch is not installed, in the memory of
// `array`.
py::object to_python(const Array& array) {
  const Handles& python = handles();
  const auto i = static_cast<size_t>(array.dtype);
  // Python holds the owner through this capsule.
  auto owner = std::make_unique<std::shared_ptr<void>>(array.owner);
  const py::capsule capsule(owner.get(), [](void* owner) {
    delete static_cast<std::shared_ptr<void>*>(owner);
    undertaker().bury();
  });
  owner.release();
  py::array ndarray(python.numpy_dtypes[i], array.shape, {}, array.data,
                    capsule);
  const bool is_bfloat16 = array.dtype == DType::kBFloat16;
  if (!python.from_numpy) {
    if (is_bfloat16) throw py::type_error("bfloat16 arrays need torch");
    return ndarray;
  }
  py::object tensor = python.from_numpy(ndarray);
  return is_bfloat16 ? tensor.attr("view")(python.torch_dtypes[i]) : tensor;
}

// ---------------------------------------------------------------------------
// Nests in and out.

// Reads a nest; the leaves end up in `leaves`, in order.
Structure::Ptr read_nest(py::handle object, const Place& place,
                         std::vector<Array>* leaves) {
  const bool is_tuple = PyTuple_Check(object.ptr());
  const bool is_dict = PyDict_Check(object.ptr());
  if (!is_tuple && !is_dict && !PyList_Check(object.ptr())) {
    leaves->push_back(to_array(object, place));
    return Structure::leaf();
  }
  // A list may hold itself.
  if (Py_EnterRecursiveCall(" in a nest")) throw py::error_already_set();
  struct Leave {
    ~Leave() { Py_LeaveRecursiveCall(); }
  } leave;

  if (is_dict) {
    std::map<std::string, py::object> values;  // Sorted, as the core wants it.
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(object)) {
      if (!PyUnicode_Check(key.ptr())) {
        throw py::type_error(place.message() +
                             "expected a dict with strings "
                             "as keys, got the key " +
                             std::string(py::repr(key)));
      }
      values.emplace(py::cast<std::string>(key),
                     py::reinterpret_borrow<py::object>(value));
    }
    std::map<std::string, Structure::Ptr> children;
    for (const auto& [key, value] : values) {
      children.emplace(key, read_nest(value, {&place, &key}, leaves));
    }
    return Structure::dict(std::move(children));
  }

  std::vector<Structure::Ptr> children;
  for (const py::handle child : py::reinterpret_borrow<py::sequence>(object)) {
    children.push_back(
        read_nest(child, {&place, nullptr, children.size()}, leaves));
  }
  if (!is_tuple) return Structure::list(std::move(children));
  const bool is_namedtuple =
      !PyTuple_CheckExact(object.ptr()) && py::hasattr(object, "_make");
  return Structure::tuple(
      std::move(children),
      is_namedtuple ? keep(py::type::handle_of(object).ptr()) : nullptr);
}

Nest to_nest(py::handle object) {
  Nest nest;
  nest.structure = read_nest(object, Place(), &nest.leaves);
  return nest;
}

// `leaf` is moved on past the leaves of `structure`.
py::object write_nest(const Structure& structure, const Array** leaf) {
  if (structure.kind == Structure::Kind::kLeaf) return to_python(*(*leaf)++);
  if (structure.kind == Structure::Kind::kDict) {
    py::dict dict;
    for (size_t i = 0; i < structure.keys.size(); ++i) {
      dict[py::str(structure.keys[i])] =
          write_nest(*structure.children[i], leaf);
    }
    return dict;
  }
  py::list list;
  for (const auto& child : structure.children) {
    list.append(write_nest(*child, leaf));
  }
  if (structure.kind == Structure::Kind::kList) return list;
  if (!structure.type) return py::tuple(list);
  return py::handle(static_cast<PyObject*>(structure.type.get()))
      .attr("_make")(list);
}

py::object to_python(const Nest& nest) {
  const Array* leaf = nest.leaves.data();
  return write_nest(*nest.structure, &leaf);
}

// ---------------------------------------------------------------------------
// Memory from Python.

// `memory` as a Block of at least `nbytes`.
Block to_block(py::object memory, size_t nbytes) {
  constexpr uintptr_t kAlignment = 16;  // malloc's; enough for every dtype.
  if (!handles().is_tensor(memory)) {
    memory = py::module_::import("numpy").attr("frombuffer")(memory, "uint8");
    if (!py::cast<py::array>(memory).writeable()) {
      throw std::invalid_argument("expected memory to write to");
    }
  }
  const Array array = to_array(memory, Place());
  if (array.nbytes() < nbytes) {
    throw std::invalid_argument("expected at least as many bytes, got " +
                                std::to_string(array.nbytes()));
  }
  if (reinterpret_cast<uintptr_t>(array.data) % kAlignment != 0) {
    throw std::invalid_argument("expected memory aligned to " +
                                std::to_string(kAlignment) + " bytes");
  }
  return {array.data, array.owner};
}

// Calls of `allocate` stop before the interpreter ends: Python would end a
// thread that wants the GIL by unwinding it, and the core must not be unwound
// like that. Thread-safe.
class Allocations {
 public:
  // While one exists, the interpreter does not end. Throws when it is about to.
  class Guard {
   public:
    explicit Guard(Allocations* allocations) : allocations_(allocations) {
      std::lock_guard lock(allocations_->mu_);
      if (allocations_->ended_) {
        throw std::runtime_error("the Python interpreter is ending");
      }
      ++allocations_->running_;
    }
    ~Guard() {
      std::lock_guard lock(allocations_->mu_);
      if (--allocations_->running_ == 0) allocations_->finished_.notify_all();
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    Allocations* const allocations_;
  };

  // Waits for the running ones, which need the GIL: without it.
  void end() {
    std::unique_lock lock(mu_);
    ended_ = true;
    finished_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  std::mutex mu_;
  std::condition_variable finished_;
  int running_ = 0;     // Guarded by mu_.
  bool ended_ = false;  // Guarded by mu_.
};

Allocations& allocations() {
  static auto* const allocations = new Allocations();  // As the undertaker.
  return *allocations;
}

// A pool whose memory comes from `allocate`, a callable or None.
std::shared_ptr<BufferPool> make_pool(const py::object& allocate) {
  if (allocate.is_none()) return BufferPool::create();
  const std::shared_ptr<void> function = keep(allocate.ptr());
  return BufferPool::create([function](size_t nbytes) {
    const Allocations::Guard guard(&allocations());
    const py::gil_scoped_acquire gil;
    try {
      const py::handle allocate(static_cast<PyObject*>(function.get()));
      return to_block(allocate(nbytes), nbytes);
    } catch (const std::exception& error) {
      // Nothing of Python may leave here: who catches it has no GIL.
      throw std::runtime_error("allocate(" + std::to_string(nbytes) +
                               ") failed: " + error.what());
    }
  });
}

// ---------------------------------------------------------------------------
// The actor pool.

// Live pools. With the GIL.
std::vector<std::weak_ptr<ActorPool>>& pools() {
  static auto* const pools = new std::vector<std::weak_ptr<ActorPool>>();
  return *pools;
}

bool was_forked = false;  // With the GIL.

// For a process that was forked: it has none of the pools' threads, so nobody
// may wait for them. The pools are never destroyed there.
void after_fork_in_child() {
  was_forked = true;
  static auto* const forgotten = new std::vector<std::shared_ptr<ActorPool>>();
  for (const auto& weak : std::exchange(pools(), {})) {
    if (auto pool = weak.lock()) forgotten->push_back(std::move(pool));
  }
}

// For atexit: what calls Python from threads of the core ends now. Queues and
// batchers go on, as later exit handlers may want to use them.
void end() {
  if (was_forked) return;
  for (const auto& weak : std::exchange(pools(), {})) {
    if (const auto pool = weak.lock()) {
      call_without_gil([&pool] { pool->stop(); });
    }
  }
  call_without_gil([] { allocations().end(); });
}

// core.tls.Credentials: the contents of ca.pem, cert.pem and key.pem.
using PemFiles = std::tuple<std::string, std::string, std::string>;

std::optional<Tls> to_tls(std::optional<PemFiles> files) {
  if (!files) return std::nullopt;
  auto& [ca, cert, key] = *files;
  return Tls{std::move(ca), std::move(cert), std::move(key)};
}

// (path, low, high)
using PyValueRange =
    std::tuple<std::vector<std::variant<uint32_t, std::string>>,
               std::vector<int64_t>, std::vector<int64_t>>;

wire::ValueRange to_value_range(const PyValueRange& range) {
  const auto& [path, low, high] = range;
  if (low.empty() || low.size() != high.size()) {
    throw std::invalid_argument("value_ranges has " +
                                std::to_string(low.size()) + " least and " +
                                std::to_string(high.size()) +
                                " greatest values, expected as many of both");
  }
  wire::ValueRange result{{}, low, high};
  for (const auto& key : path) {
    const auto* index = std::get_if<uint32_t>(&key);
    result.path.push_back(index ? wire::Key{true, "", *index}
                                : wire::Key{false, std::get<1>(key), 0});
  }
  return result;
}

std::shared_ptr<ActorPool> make_actor_pool(
    int64_t unroll_length, std::shared_ptr<BatchingQueue> learner_queue,
    std::shared_ptr<DynamicBatcher> inference_batcher,
    std::vector<std::string> env_server_addresses,
    const py::object& initial_agent_state, bool named_rows,
    std::vector<std::string> inference_keys, std::vector<std::string> info_keys,
    uint64_t seed, std::string run_id, uint64_t first_incarnation,
    int max_failures, double step_timeout_s, double keepalive_s,
    int num_threads, std::optional<PemFiles> tls,
    const std::vector<PyValueRange>& value_ranges) {
  for (const auto& address : env_server_addresses) check_address(address);
  PoolOptions options;
  options.unroll_length = unroll_length;
  options.learner_queue = std::move(learner_queue);
  options.inference_batcher = std::move(inference_batcher);
  options.addresses = std::move(env_server_addresses);
  options.initial_agent_state = to_nest(initial_agent_state);
  options.named_rows = named_rows;
  options.inference_keys = std::move(inference_keys);
  options.info_keys = std::move(info_keys);
  for (const PyValueRange& range : value_ranges) {
    options.value_ranges.push_back(to_value_range(range));
  }
  options.seed = seed;
  options.run_id = std::move(run_id);
  options.version = TORCHBEAST_VERSION;
  options.first_incarnation = first_incarnation;
  options.max_failures = max_failures;
  options.step_timeout_s = step_timeout_s;
  // run() holds a reference: none of its threads, which may want the GIL, is
  // left to be waited for when the pool is destroyed.
  const auto pool = std::make_shared<ActorPool>(
      std::move(options),
      make_grpc_transport(num_threads, keepalive_s, to_tls(std::move(tls))));
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
  result["waiting_for_room"] = stats.waiting_for_room;
  result["slabs_open"] = stats.slabs_open;
  result["batch_fill"] = stats.batch_fill;
  result["states"] = states;
  result["waiting_s"] = stats.waiting_s;
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

// ---------------------------------------------------------------------------
// The module.

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
           py::arg("value_ranges") = py::tuple())
      .def(
          "run",  // Blocks.
          [](const Pool& self) { call_without_gil([&] { self->run(); }); },
          "Play until stop(), or until a queue is closed. Blocks.")
      .def(
          "stop",  // Blocks.
          [](const Pool& self) { call_without_gil([&] { self->stop(); }); },
          "End run(). Blocks until it has ended.")
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
  main_thread = py::cast<unsigned long>(  // NOLINT: as Python has it.
      py::module_::import("threading").attr("main_thread")().attr("ident"));

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
  m.def("describe", &describe_server, py::arg("address"),
        py::kw_only(),  // Blocks.
        py::arg("info_keys") = py::tuple(), py::arg("run_id") = "",
        py::arg("timeout_s") = 10.0, py::arg("tls") = py::none(),
        "Return the Welcome of the server at this address, as bytes. Blocks.");
  for (const py::handle name : py::list(m.attr("__dict__").attr("keys")())) {
    const py::object value = m.attr(name);
    if (py::isinstance<py::type>(value)) {
      value.attr("__module__") = "libtorchbeast";
    }
  }
}

}  // namespace torchbeast
