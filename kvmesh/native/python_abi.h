// The functions of Python's stable ABI that are used here, so that no header of Python's need be there.
#pragma once

#include <cstddef>

extern "C" {
struct _object;
typedef struct _object PyObject;
typedef std::ptrdiff_t Py_ssize_t;

PyObject *PyDict_GetItemWithError(PyObject *dict, PyObject *key);  // borrowed; null also without an error
PyObject *PyErr_Occurred(void);
PyObject *PyTuple_GetItem(PyObject *tuple, Py_ssize_t at);  // borrowed
Py_ssize_t PyTuple_Size(PyObject *tuple);
PyObject *PyTuple_Pack(Py_ssize_t size, ...);
int PyDict_SetItem(PyObject *dict, PyObject *key, PyObject *value);
int PyObject_SetItem(PyObject *object, PyObject *key, PyObject *value);
PyObject *PyList_New(Py_ssize_t size);
int PyList_Append(PyObject *list, PyObject *item);
PyObject *PyLong_FromSsize_t(Py_ssize_t value);
Py_ssize_t PyLong_AsSsize_t(PyObject *value);
int PyBytes_AsStringAndSize(PyObject *object, char **raw, Py_ssize_t *size);  // borrowed
PyObject *PyErr_NoMemory(void);
PyObject *PyObject_CallFunctionObjArgs(PyObject *callable, ...);  // ends with a null
PyObject *PyNumber_Or(PyObject *one, PyObject *other);
PyObject *PyNumber_And(PyObject *one, PyObject *other);
int PyObject_IsTrue(PyObject *one);
void Py_IncRef(PyObject *one);
void Py_DecRef(PyObject *one);
}

#define KV_EXPORT extern "C" __attribute__((visibility("default")))
