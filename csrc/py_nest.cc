// SPDX-License-Identifier: Apache-2.0

#include "py_nest.h"

#include <pybind11/numpy.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "py_gil.h"

namespace py = pybind11;

namespace torchbeast {
namespace {

py::str interned(const char* text) {
  return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(text));
}

// Python objects that conversions use again and again. Never destroyed.
struct Handles {
  // By DType. numpy has no bfloat16; int16 takes its place.
  std::array<py::dtype, kNumDTypes> numpy_dtypes;

  // From torch; null if torch is not installed.
  py::object tensor_type;
  py::object from_numpy;
  std::array<py::object, kNumDTypes> torch_dtypes;  // By DType.

  const py::str contiguous = interned("contiguous");
  const py::str data_ptr = interned("data_ptr");
  const py::str detach = interned("detach");
  const py::str dtype = interned("dtype");
  const py::str is_contiguous = interned("is_contiguous");
  const py::str is_cpu = interned("is_cpu");
  const py::str requires_grad = interned("requires_grad");
  const py::str shape = interned("shape");

  Handles() {
    // Before pybind11 imports it: pybind11 would deadlock if a signal handler
    // converted an array during that import.
    py::module_::import("numpy");
    for (size_t i = 0; i < kNumDTypes; ++i) {
      const auto dtype = static_cast<DType>(i);
      const bool known = dtype != DType::kBFloat16;
      numpy_dtypes[i] = py::dtype(std::string(known ? name(dtype) : "int16"));
    }
    try {
      const py::module_ torch = py::module_::import("torch");
      tensor_type = torch.attr("Tensor");
      from_numpy = torch.attr("from_numpy");
      for (size_t i = 0; i < kNumDTypes; ++i) {
        const auto dtype = static_cast<DType>(i);
        torch_dtypes[i] = torch.attr(std::string(name(dtype)).c_str());
      }
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_ModuleNotFoundError)) throw;
      // The missing module may be another one, which torch needs.
      const py::object missing = error.value().attr("name");
      if (!missing.equal(py::str("torch"))) throw;
    }
  }

  bool is_tensor(py::handle object) const {
    return tensor_type && py::isinstance(object, tensor_type);
  }
};

// The first call imports numpy, and torch if torch is installed. Does not use
// std::call_once, which would deadlock: a signal handler that runs during the
// imports may call handles() in the same thread.
const Handles& handles() {
  static const Handles* shared = nullptr;  // Guarded by the GIL.
  if (shared == nullptr) {
    auto made = std::make_unique<const Handles>();
    if (shared == nullptr) shared = made.release();
  }
  return *shared;
}

// The place of an object in its nest. For messages.
struct Place {
  const Place* above = nullptr;
  const std::string* key = nullptr;  // Only in a dict; otherwise see index.
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
  while (i < kNumDTypes && !python.torch_dtypes[i].is(dtype)) ++i;
  if (i == kNumDTypes) {
    throw py::type_error(place.message() +
                         "expected booleans, integers or "
                         "floats, got " +
                         text_of(dtype));
  }
  // An array in a queue must not keep an autograd graph alive.
  if (py::cast<bool>(tensor.attr(python.requires_grad))) {
    tensor = tensor.attr(python.detach)();
  }
  if (!py::cast<bool>(tensor.attr(python.is_contiguous)())) {
    tensor = tensor.attr(python.contiguous)();
  }

  Array array;
  array.dtype = static_cast<DType>(i);
  for (const py::handle axis : py::tuple(tensor.attr(python.shape))) {
    array.shape.push_back(py::cast<int64_t>(axis));
  }
  array.data = reinterpret_cast<char*>(
      py::cast<uintptr_t>(tensor.attr(python.data_ptr)()));
  array.owner = keep_alive(tensor.ptr());
  return array;
}

Array array_from_ndarray(py::array ndarray, const Place& place) {
  const Handles& python = handles();
  const py::dtype dtype = ndarray.dtype();
  size_t i = 0;
  while (i < kNumDTypes &&
         (static_cast<DType>(i) == DType::kBFloat16 ||
          python.numpy_dtypes[i].kind() != dtype.kind() ||
          python.numpy_dtypes[i].itemsize() != dtype.itemsize())) {
    ++i;
  }
  if (i == kNumDTypes) {
    throw py::type_error(place.message() +
                         "expected booleans, integers or "
                         "floats, got " +
                         text_of(dtype));
  }
  // Learners may write to a batch, and a batch of one item shares its memory.
  // So read-only arrays are copied, like those that are not in plain C order.
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
  array.dtype = static_cast<DType>(i);
  array.shape.assign(ndarray.shape(), ndarray.shape() + ndarray.ndim());
  array.data = static_cast<char*>(ndarray.mutable_data());
  array.owner = keep_alive(ndarray.ptr());
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

// Returns the structure of a nest, and appends its leaves to `leaves`.
Structure::Ptr read_nest(py::handle object, const Place& place,
                         std::vector<Array>* leaves) {
  const bool is_tuple = PyTuple_Check(object.ptr());
  const bool is_dict = PyDict_Check(object.ptr());
  if (!is_tuple && !is_dict && !PyList_Check(object.ptr())) {
    leaves->push_back(to_array(object, place));
    return Structure::leaf();
  }
  // Limits the depth: a list may contain itself.
  if (Py_EnterRecursiveCall(" in a nest")) throw py::error_already_set();
  struct Leave {
    ~Leave() { Py_LeaveRecursiveCall(); }
  } leave;

  if (is_dict) {
    std::map<std::string, py::object> values;  // Sorted, as in Structure.
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
  // Owned: a subclass of list may make a new object for each access.
  for (const py::object child : py::reinterpret_borrow<py::sequence>(object)) {
    children.push_back(
        read_nest(child, {&place, nullptr, children.size()}, leaves));
  }
  if (!is_tuple) return Structure::list(std::move(children));
  const bool is_namedtuple =
      !PyTuple_CheckExact(object.ptr()) && py::hasattr(object, "_make");
  return Structure::tuple(
      std::move(children),
      is_namedtuple ? keep_alive(py::type::handle_of(object).ptr()) : nullptr);
}

// Advances `leaf` past the leaves of `structure`.
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

}  // namespace

Array to_array(py::handle object) { return to_array(object, Place()); }

Nest to_nest(py::handle object) {
  Nest nest;
  nest.structure = read_nest(object, Place(), &nest.leaves);
  return nest;
}

bool is_tensor(py::handle object) { return handles().is_tensor(object); }

py::object to_python(const Array& array) {
  const Handles& python = handles();
  const auto i = static_cast<size_t>(array.dtype);
  // The capsule lets Python own the array's owner.
  auto owner = std::make_unique<std::shared_ptr<void>>(array.owner);
  const py::capsule capsule(owner.get(), [](void* owner) {
    delete static_cast<std::shared_ptr<void>*>(owner);
    release_dropped();
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

py::object to_python(const Nest& nest) {
  const Array* leaf = nest.leaves.data();
  return write_nest(*nest.structure, &leaf);
}

}  // namespace torchbeast
