// A walk of a prompt's marks through a dict of masks. Called with the GIL held.
#include "python_abi.h"

namespace {

constexpr Py_ssize_t AHEAD = 16;  // keys whose hashes are fetched into the cache meanwhile

// Appends [end, mask] to a flat list; a null mask is told as `none`.
bool append(PyObject *list, Py_ssize_t end, PyObject *mask) {
    PyObject *number = PyLong_FromSsize_t(end);
    if (!number) return false;
    bool done = PyList_Append(list, number) == 0 && PyList_Append(list, mask) == 0;
    Py_DecRef(number);
    return done;
}

PyObject *failed(PyObject *list) {
    Py_DecRef(list);
    return nullptr;
}

}  // namespace

// Who has keys[position] of each of `positions` (ascending): a flat list of position + 1, mask, of which the last one of
// neighbours whose mask is one object stands for them all; `nothing` is told for a key that is not there.
KV_EXPORT PyObject *kv_marks(PyObject *masks, PyObject *keys, PyObject *nothing, PyObject *positions) {
    Py_ssize_t size = PyTuple_Size(positions);
    if (size < 0) return nullptr;
    PyObject *list = PyList_New(0);
    if (!list) return nullptr;
    PyObject *last = nullptr;
    Py_ssize_t end = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (i + AHEAD < size)
            __builtin_prefetch(PyTuple_GetItem(keys, PyLong_AsSsize_t(PyTuple_GetItem(positions, i + AHEAD))));
        Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GetItem(positions, i));
        PyObject *key = PyTuple_GetItem(keys, at);
        if (!key) return failed(list);
        PyObject *mask = PyDict_GetItemWithError(masks, key);
        if (!mask) {
            if (PyErr_Occurred()) return failed(list);
            mask = nothing;
        }
        if (mask != last && last && !append(list, end, last)) return failed(list);
        last = mask;
        end = at + 1;
    }
    if (last && !append(list, end, last)) return failed(list);
    return list;
}
