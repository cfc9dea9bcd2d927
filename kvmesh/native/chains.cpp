// Walks of a prompt's keys through a dict of masks. Called with the GIL held.
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

// Who holds the leading `keys` (a tuple): a flat list of end, mask, end, mask. Neighbours of which one object is the mask
// are one run; `nothing` is told for a key that is not there. It ends with the first run of that kind whose end is
// beyond `at_least`, of any length, or with the keys.
KV_EXPORT PyObject *kv_chain(PyObject *masks, PyObject *keys, PyObject *nothing, Py_ssize_t at_least) {
    Py_ssize_t size = PyTuple_Size(keys);
    if (size < 0) return nullptr;
    PyObject *list = PyList_New(0);
    if (!list) return nullptr;
    PyObject *last = nullptr;
    for (Py_ssize_t at = 0; at < size; at++) {
        if (at + AHEAD < size) __builtin_prefetch(PyTuple_GetItem(keys, at + AHEAD));
        PyObject *mask = PyDict_GetItemWithError(masks, PyTuple_GetItem(keys, at));
        if (!mask) {
            if (PyErr_Occurred()) return failed(list);
            mask = nothing;
        }
        if (mask != last && last && !append(list, at, last)) return failed(list);
        last = mask;
        if (mask == nothing && at >= at_least) {
            if (!append(list, at + 1, nothing)) return failed(list);
            return list;
        }
    }
    if (last && !append(list, size, last)) return failed(list);
    return list;
}

// The same for keys[position] of each of `positions` (ascending); ends are position + 1, nothing ends it.
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

// How many of `keys` (a tuple) lack `bit`, told by a byte each in `lacks`; -1: an error is set.
KV_EXPORT Py_ssize_t kv_lacking(PyObject *masks, PyObject *keys, PyObject *bit, unsigned char *lacks) {
    Py_ssize_t size = PyTuple_Size(keys), count = 0;
    PyObject *last = nullptr;
    bool lacking = true;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (i + AHEAD < size) __builtin_prefetch(PyTuple_GetItem(keys, i + AHEAD));
        PyObject *mask = PyDict_GetItemWithError(masks, PyTuple_GetItem(keys, i));
        if (!mask) {
            if (PyErr_Occurred()) return -1;
            lacks[i] = 1;
            count++;
            continue;
        }
        if (mask != last) {
            PyObject *both = PyNumber_And(mask, bit);
            if (!both) return -1;
            lacking = !PyObject_IsTrue(both);
            Py_DecRef(both);
            last = mask;
        }
        lacks[i] = lacking;
        count += lacking;
    }
    return count;
}
