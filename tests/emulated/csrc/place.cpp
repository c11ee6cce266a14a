#include "place.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>

#include <c10/util/Type.h>

#include <cstring>
#include <mutex>
#include <typeinfo>
#include <unordered_map>
#include <vector>

namespace emu {
namespace {

struct Key {
  const char* op = nullptr;
  const char* node = nullptr; // mangled type name of the autograd node that runs, if any
  PyCodeObject* code = nullptr; // kept alive by the table
  int lasti = -1;

  bool operator==(const Key& o) const {
    return op == o.op && node == o.node && code == o.code && lasti == o.lasti;
  }
};

struct KeyHash {
  size_t operator()(const Key& k) const {
    size_t h = std::hash<const void*>()(k.op);
    h = h * 31 + std::hash<const void*>()(k.node);
    h = h * 31 + std::hash<const void*>()(k.code);
    return h * 31 + static_cast<size_t>(k.lasti);
  }
};

// Leaked: worker threads and late destructors may outlive static destruction.
struct Table {
  std::mutex mutex;
  std::unordered_map<Key, Place, KeyHash> ids;
  std::vector<Key> keys{Key{}};
  std::unordered_map<PyCodeObject*, bool> in_torch; // guarded by the GIL
};

Table& table() {
  static Table* t = new Table;
  return *t;
}

bool interpreter_usable() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

// torch's own frames, and those of this device's Python face, say little about the program; their caller does.
bool inside_torch(PyCodeObject* code) {
  auto& cache = table().in_torch;
  auto found = cache.find(code);
  if (found != cache.end()) {
    return found->second;
  }
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  if (file == nullptr) {
    PyErr_Clear();
    return false;
  }
  const bool inside = std::strstr(file, "/site-packages/torch/") != nullptr ||
      std::strstr(file, "/dist-packages/torch/") != nullptr ||
      std::strstr(file, "/emulated/accelerator.py") != nullptr;
  Py_INCREF(code);
  cache.emplace(code, inside);
  return inside;
}

void note_frame(Key& key) {
  PyThreadState* state = PyThreadState_Get();
  PyFrameObject* frame = PyThreadState_GetFrame(state);
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const bool inside = inside_torch(code); // the cache holds a reference from here on
    Py_DECREF(code);
    if (!inside || key.code == nullptr) {
      key.code = code;
      key.lasti = PyFrame_GetLasti(frame);
    }
    if (!inside) {
      Py_DECREF(frame);
      return;
    }
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
}

PyObject* race_error = nullptr;
thread_local Place hint = 0;

} // namespace

Place here(const char* op, bool may_take_gil) {
  if (hint != 0) {
    return hint;
  }
  Key key;
  key.op = op;
  if (auto node = torch::autograd::get_current_node()) {
    key.node = typeid(*node).name();
  }
  if (interpreter_usable() && PyGILState_GetThisThreadState() != nullptr) {
    if (PyGILState_Check()) {
      note_frame(key);
    } else if (may_take_gil) {
      PyGILState_STATE gil = PyGILState_Ensure();
      note_frame(key);
      PyGILState_Release(gil);
    }
  }
  auto& t = table();
  std::lock_guard<std::mutex> guard(t.mutex);
  auto [it, fresh] = t.ids.emplace(key, static_cast<Place>(t.keys.size()));
  if (fresh) {
    t.keys.push_back(key);
  }
  return it->second;
}

PlaceHint::PlaceHint(Place place) : before_(std::exchange(hint, place)) {}

PlaceHint::~PlaceHint() {
  hint = before_;
}

std::string describe(Place place) {
  Key key;
  {
    auto& t = table();
    std::lock_guard<std::mutex> guard(t.mutex);
    key = t.keys.at(place);
  }
  std::string text = key.op != nullptr ? key.op : "unknown";
  if (key.code != nullptr && interpreter_usable()) {
    PyGILState_STATE gil = PyGILState_Ensure();
    const char* file = PyUnicode_AsUTF8(key.code->co_filename);
    const char* name = PyUnicode_AsUTF8(key.code->co_name);
    text += std::string(" at ") + (file ? file : "?") + ":" +
        std::to_string(PyCode_Addr2Line(key.code, key.lasti)) + " in " + (name ? name : "?");
    PyGILState_Release(gil);
  }
  if (key.node != nullptr) {
    text += " (in " + c10::demangle(key.node) + ")";
  }
  return text;
}

void set_race_error(PyObject* type) {
  Py_XINCREF(type);
  Py_XDECREF(race_error);
  race_error = type;
}

void throw_race(const std::string& message) {
  if (!interpreter_usable()) {
    TORCH_CHECK(false, message);
  }
  PyGILState_STATE gil = PyGILState_Ensure();
  PyErr_SetString(race_error != nullptr ? race_error : PyExc_RuntimeError, message.c_str());
  python_error error;
  error.persist();
  PyGILState_Release(gil);
  throw error; // NOLINT: python_error carries the Python exception through torch to the caller
}

WithoutGil::WithoutGil()
    : saved_(interpreter_usable() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}

WithoutGil::~WithoutGil() {
  if (saved_ != nullptr) {
    PyEval_RestoreThread(saved_);
  }
}

} // namespace emu
