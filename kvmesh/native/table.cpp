// A table of 16-byte keys and masks (Python ints), of which one may be shared by many keys: in place of a dict whose keys
// are objects. A key lies in its slot, and whose slots are needed next is known: they are fetched into the cache ahead
// of the walk. Called with the GIL held; no callback may come back to the table that calls it.
//
// Open addressing. Slots are ordered by hash but for collisions, so that a table of another size is written in one pass.
// What is taken out is closed up (no tombstones): every key lies between its own slot and the next empty one.
#include "python_abi.h"

extern "C" {
void *calloc(std::size_t count, std::size_t size);
void free(void *memory);
void *memcpy(void *to, const void *from, std::size_t size);
}

namespace {

typedef unsigned long long Word;

constexpr Py_ssize_t KEY = 16, LEAST = 64;
constexpr Py_ssize_t SLOTS_AHEAD = 24;  // of a walk
constexpr Py_ssize_t RING = 32;         // a power of two above that

struct Key {
    Word one, two;
    bool operator==(const Key &other) const { return one == other.one && two == other.two; }
};

struct Slot {
    Key key;
    PyObject *mask;  // null: empty
};

struct Table {
    Slot *slots;
    Py_ssize_t size, count;
    Word salt;

    Py_ssize_t home(const Key &key) const {
        Word mixed = (key.two ^ salt ^ (key.one << 32 | key.one >> 32)) * 0x9e3779b97f4a7c15ull;
        mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93ull;
        return static_cast<Py_ssize_t>(static_cast<unsigned __int128>(mixed) * static_cast<Word>(size) >> 64);
    }

    void fetch(const Key &key) const { __builtin_prefetch(slots + home(key)); }

    // Where it is, or the empty slot where it belongs.
    Slot *find(const Key &key) const { return find(key, slots + home(key)); }

    Slot *find(const Key &key, Slot *slot) const {
        Slot *end = slots + size;
        while (slot->mask && !(slot->key == key))
            if (++slot == end) slot = slots;
        return slot;
    }

    PyObject *get(const Key &key) const { return find(key)->mask; }

    bool resize(Py_ssize_t wanted) {
        Slot *old = slots;
        Py_ssize_t before = size;
        Slot *made = static_cast<Slot *>(calloc(wanted, sizeof(Slot)));
        if (!made) return PyErr_NoMemory(), false;
        slots = made, size = wanted;
        for (Py_ssize_t i = 0; i < before; i++)
            if (old[i].mask) *find(old[i].key) = old[i];
        free(old);
        return true;
    }

    // At most three quarters are taken.
    bool put(Slot *empty, const Key &key, PyObject *mask) {
        if (4 * (count + 1) > 3 * size) {
            if (!resize(size + size / 2)) return false;
            empty = find(key);
        }
        Py_IncRef(mask);
        empty->key = key, empty->mask = mask;
        count++;
        return true;
    }

    void take(Slot *hole) {
        Py_DecRef(hole->mask);
        hole->mask = nullptr;
        count--;
        Py_ssize_t empty = hole - slots, at = empty;
        for (;;) {
            if (++at == size) at = 0;
            if (!slots[at].mask) return;
            Py_ssize_t from = home(slots[at].key);
            bool stays = empty <= at ? empty < from && from <= at : empty < from || from <= at;
            if (stays) continue;
            slots[empty] = slots[at];
            slots[at].mask = nullptr;
            empty = at;
        }
    }
};

Key key_at(const char *raw) {
    Key key;
    memcpy(&key, raw, KEY);
    return key;
}

// The key that an object is. 0: bytes of another length, which no table has; -1: an error is set.
int key_of(PyObject *object, Key &key) {
    char *raw;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(object, &raw, &size) < 0) return -1;
    if (size != KEY) return 0;
    key = key_at(raw);
    return 1;
}

// Mask after mask of packed keys; null for one that is not there. Slots are fetched into the cache ahead, and each key is
// hashed once. The table stays as it is meanwhile.
struct Walk {
    const Table &table;
    const char *packed;
    Py_ssize_t size, at = 0;
    Slot *homes[RING];

    Walk(const Table &some, const char *keys, Py_ssize_t count) : table(some), packed(keys), size(count) {
        for (Py_ssize_t i = 0; i < size && i < SLOTS_AHEAD; i++) ahead(i);
    }

    void ahead(Py_ssize_t i) {
        Slot *home = homes[i & (RING - 1)] = table.slots + table.home(key_at(packed + KEY * i));
        __builtin_prefetch(home);
    }

    // False: the end.
    bool next(PyObject **mask) {
        if (at == size) return false;
        if (at + SLOTS_AHEAD < size) ahead(at + SLOTS_AHEAD);
        *mask = table.find(key_at(packed + KEY * at), homes[at & (RING - 1)])->mask;
        at++;
        return true;
    }
};

bool append(PyObject *list, Py_ssize_t number, PyObject *mask) {
    PyObject *told = PyLong_FromSsize_t(number);
    if (!told) return false;
    bool done = PyList_Append(list, told) == 0 && PyList_Append(list, mask) == 0;
    Py_DecRef(told);
    return done;
}

PyObject *without(PyObject *list) {
    Py_DecRef(list);
    return nullptr;
}

// Whether masks have a bit, asked once for neighbours with the same one.
struct Has {
    PyObject *bit, *last = nullptr;
    int found = 0;

    int of(PyObject *mask) {  // -1: an error is set
        if (!mask) return 0;
        if (mask != last) {
            PyObject *both = PyNumber_And(mask, bit);
            if (!both) return -1;
            found = PyObject_IsTrue(both);
            Py_DecRef(both);
            last = mask;
        }
        return found;
    }
};

}  // namespace

KV_EXPORT Table *kv_table_new(Word salt) {
    Table *table = static_cast<Table *>(calloc(1, sizeof(Table)));
    if (!table) return nullptr;
    table->salt = salt;
    if (table->resize(LEAST)) return table;
    free(table);
    return nullptr;
}

KV_EXPORT void kv_table_free(Table *table) {
    for (Py_ssize_t i = 0; i < table->size; i++)
        if (table->slots[i].mask) Py_DecRef(table->slots[i].mask);
    free(table->slots);
    free(table);
}

KV_EXPORT Py_ssize_t kv_table_count(const Table *table) { return table->count; }

KV_EXPORT Py_ssize_t kv_table_bytes(const Table *table) { return sizeof(Table) + table->size * sizeof(Slot); }

// The mask of `key`, or `nothing`.
KV_EXPORT PyObject *kv_table_get(const Table *table, PyObject *key, PyObject *nothing) {
    Key wanted;
    int found = key_of(key, wanted);
    if (found < 0) return nullptr;
    PyObject *mask = found ? table->get(wanted) : nullptr;
    mask = mask ? mask : nothing;
    Py_IncRef(mask);
    return mask;
}

// A list of all masks, one for each key.
KV_EXPORT PyObject *kv_table_masks(const Table *table) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < table->size; i++)
        if (table->slots[i].mask && PyList_Append(list, table->slots[i].mask) < 0) return without(list);
    return list;
}

// Takes out every one of `size` packed keys (`adds` 0) whose mask `turned(mask)` is 0, and gives the others that mask;
// one object that comes back as it was is left, and so is a key that is not there, unless it is given `fresh` (`adds`
// 1). `turned` is asked once for neighbours with the same mask. What was changed is written to `changed`, packed;
// returns how many, -1: an error is set. `tally`: a list that gets, for each mask that was turned: keys, before, after.
KV_EXPORT Py_ssize_t kv_table_change(
    Table *table, const char *packed, Py_ssize_t size, PyObject *fresh, int adds, PyObject *turned, PyObject *tally, char *changed
) {
    PyObject *before = nullptr, *after = nullptr;  // owned by `tally`, or `after` is `before`
    Py_ssize_t count = 0, same = 0;
    for (Py_ssize_t i = 0; i < size && i < SLOTS_AHEAD; i++) table->fetch(key_at(packed + KEY * i));
    for (Py_ssize_t i = 0; i < size; i++) {
        if (i + SLOTS_AHEAD < size) table->fetch(key_at(packed + KEY * (i + SLOTS_AHEAD)));
        Key key = key_at(packed + KEY * i);
        Slot *slot = table->find(key);
        if (!slot->mask) {
            if (!adds) continue;
            if (!table->put(slot, key, fresh)) return -1;
        } else {
            if (slot->mask != before) {
                if (same && !append(tally, same, before)) return -1;
                if (same && PyList_Append(tally, after) < 0) return -1;
                same = 0;
                PyObject *held = slot->mask;
                PyObject *made = PyObject_CallFunctionObjArgs(turned, held, nullptr);
                if (!made) return -1;
                // Both live as long as the tally, so that no other mask can have the address of `before`.
                bool kept = append(tally, 0, held) && PyList_Append(tally, made) == 0;
                Py_DecRef(made);
                if (!kept) return -1;
                before = held, after = made;
            }
            if (after == before) continue;
            int left = adds ? 1 : PyObject_IsTrue(after);
            if (left < 0) return -1;
            same++;
            if (left) {
                Py_IncRef(after);
                Py_DecRef(slot->mask);
                slot->mask = after;
            } else {
                table->take(slot);
            }
        }
        memcpy(changed + KEY * count++, packed + KEY * i, KEY);
    }
    if (same && (!append(tally, same, before) || PyList_Append(tally, after) < 0)) return -1;
    if (8 * table->count < table->size && table->size > 2 * LEAST)
        if (!table->resize(2 * table->count > LEAST ? 2 * table->count : LEAST)) return -1;
    return count;
}

// Those of `size` packed keys whose mask has `bit`, packed, in `found`; returns how many, -1: an error is set.
KV_EXPORT Py_ssize_t kv_table_held(const Table *table, const char *packed, Py_ssize_t size, PyObject *bit, char *found) {
    Has has{bit};
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (i + SLOTS_AHEAD < size) table->fetch(key_at(packed + KEY * (i + SLOTS_AHEAD)));
        int there = has.of(table->get(key_at(packed + KEY * i)));
        if (there < 0) return -1;
        if (there) memcpy(found + KEY * count++, packed + KEY * i, KEY);
    }
    return count;
}

// Who holds the leading ones of `size` packed keys: a flat list of end, mask, end, mask. Neighbours of which one object is
// the mask are one run; `nothing` is told for a key that is not there. It ends with the first key of that kind at
// `at_least` or beyond, or with the keys.
KV_EXPORT PyObject *kv_table_chain(
    const Table *table, const char *packed, Py_ssize_t size, PyObject *nothing, Py_ssize_t at_least
) {
    Walk walk(*table, packed, size);
    PyObject *list = PyList_New(0), *mask = nullptr, *last = nullptr;
    if (!list) return nullptr;
    while (walk.next(&mask)) {
        if (!mask) mask = nothing;
        if (mask != last && last && !append(list, walk.at - 1, last)) return without(list);
        last = mask;
        if (mask == nothing && walk.at > at_least) break;
    }
    if (last && !append(list, walk.at, last)) return without(list);
    return list;
}

// How many of `size` packed keys lack `bit`, told by a byte each in `lacks`; -1: an error is set.
KV_EXPORT Py_ssize_t kv_table_lacking(
    const Table *table, const char *packed, Py_ssize_t size, PyObject *bit, unsigned char *lacks
) {
    Walk walk(*table, packed, size);
    Has has{bit};
    Py_ssize_t count = 0;
    PyObject *mask = nullptr;
    while (walk.next(&mask)) {
        int there = has.of(mask);
        if (there < 0) return -1;
        lacks[walk.at - 1] = !there;
        count += !there;
    }
    return count;
}
