// Walks of a prompt's marks through a dict of masks: who has them, and noting who will. Called with the GIL held.
#include "python_abi.h"

namespace {

bool append(PyObject *list, PyObject *end, PyObject *mask) {
    return PyList_Append(list, end) == 0 && PyList_Append(list, mask) == 0;
}

PyObject *failed(PyObject *list) {
    Py_DecRef(list);
    return nullptr;
}

// One reference, given back in the end.
struct Owned {
    PyObject *object = nullptr;

    void keep(PyObject *one) {  // which is the caller's to give
        if (object) Py_DecRef(object);
        object = one;
    }
    void share(PyObject *one) {
        if (one) Py_IncRef(one);
        keep(one);
    }
    ~Owned() { keep(nullptr); }
};

}  // namespace

// Who has each of `keys`: a flat list of end, mask, of which the last one of neighbours whose mask is one object stands
// for them all; `ends` says what each key ends with, `nothing` is told for one that is not there.
KV_EXPORT PyObject *kv_marks(PyObject *masks, PyObject *keys, PyObject *nothing, PyObject *ends) {
    Py_ssize_t size = PyTuple_Size(keys);
    if (size < 0 || PyTuple_Size(ends) != size) return nullptr;
    PyObject *list = PyList_New(0);
    if (!list) return nullptr;
    PyObject *last = nullptr, *end = nullptr;
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *mask = PyDict_GetItemWithError(masks, PyTuple_GetItem(keys, i));
        if (!mask) {
            if (PyErr_Occurred()) return failed(list);
            mask = nothing;
        }
        if (mask != last && last && !append(list, end, last)) return failed(list);
        last = mask;
        end = PyTuple_GetItem(ends, i);
    }
    if (last && !append(list, end, last)) return failed(list);
    return list;
}

// Notes that `owner` brings marks to a slot: pending.Pending.put. Of `keys` those that it lacks (`lacks`: a byte each;
// null: all) get (owner, span) in `held`, and `bit` in `masks`; of those that are there `move` alone is called. All the
// leading ones that `room` blocks have space for, the last one first. Returns the blocks of the new ones; -1: an error
// is set.
KV_EXPORT Py_ssize_t kv_promise(PyObject *held, PyObject *move, PyObject *masks, PyObject *keys, PyObject *spans,
                                const char *lacks, Py_ssize_t room, PyObject *bit, PyObject *owner) {
    Py_ssize_t size = PyTuple_Size(keys), fit = 0, added = 0;
    if (size < 0 || PyTuple_Size(spans) != size) return -1;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (lacks && !lacks[i]) continue;
        room -= PyLong_AsSsize_t(PyTuple_GetItem(spans, i));
        if (room < 0) break;
        fit = i + 1;
    }
    Owned before, after, value;  // neighbours share the int that is made, and the pair
    PyObject *span = nullptr;
    after.share(bit);
    for (Py_ssize_t i = fit - 1; i >= 0; i--) {
        if (lacks && !lacks[i]) continue;
        PyObject *key = PyTuple_GetItem(keys, i);
        if (PyDict_GetItemWithError(held, key)) {
            PyObject *none = PyObject_CallFunctionObjArgs(move, key, nullptr);
            if (!none) return -1;
            Py_DecRef(none);
            continue;
        }
        if (PyErr_Occurred()) return -1;
        if (PyTuple_GetItem(spans, i) != span) {
            span = PyTuple_GetItem(spans, i);
            value.keep(PyTuple_Pack(2, owner, span));
        }
        if (!value.object || PyObject_SetItem(held, key, value.object) < 0) return -1;
        added += PyLong_AsSsize_t(span);
        PyObject *mask = PyDict_GetItemWithError(masks, key);
        if (!mask && PyErr_Occurred()) return -1;
        if (mask != before.object) {
            before.share(mask);
            if (mask)
                after.keep(PyNumber_Or(mask, bit));
            else
                after.share(bit);
        }
        if (!after.object || PyDict_SetItem(masks, key, after.object) < 0) return -1;
    }
    return added;
}
