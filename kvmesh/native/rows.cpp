// The formulas of services/conductor/score.py as candidates/bounds.py uses them, row by row: the same operations on doubles
// in the same order, so that both find the same bits (tests/conductor/candidates/test_compiled.py). Called with the GIL held; a call of 1,000 rows takes some microseconds.
#include <cmath>
#include <cstdint>
#include <limits>

#include "python_abi.h"

namespace {

constexpr double INF = std::numeric_limits<double>::infinity();

// Which columns are read. Where each lies is said by name: see `kv_fields`.
#define FIELDS(X)                                                                                                    \
    X(BACKLOG) X(AS_OF) X(REQUESTS) X(CONTEXT) X(RUNNING) X(FREE_BLOCKS) X(FREE_PAGES) X(RESIDENCE) X(EACH)          \
    X(LONG_SHARE) X(LONG_CHUNK) X(PREFILL) X(DECODE) X(PULL) X(TRANSFER) X(FITTED_CHUNK) X(CAPACITY) X(MAX_RUNNING)  \
    X(CHUNK) X(KV_BYTES) X(SENDING) X(ARRIVING) X(COMING)
#define NAME(name) #name " "
#define NUMBER(name) name,
enum Use { FIELDS(NUMBER) USES };

// As numpy's minimum and maximum, but for NaNs, of which there are none.
inline double least(double a, double b) { return a <= b ? a : b; }
inline double most(double a, double b) { return a >= b ? a : b; }

// One request beside all rows. The Python side has the same fields: services/conductor/candidates/compiled.py.
struct Request {
    const double *data;      // columns of `stride` doubles
    std::int64_t stride, count;
    const std::int32_t *at;  // of each Use, its column
    const std::uint8_t *able;
    const double *depth, *sealed;      // blocks
    double *wait, *queue, *short_queue;  // seconds; `short_queue` is `queue` where nobody has long prompts
    const double *yielding;              // null: nothing yields
    double now, prompt, block;           // tokens
    double tail_share, stall_weight, slowest, rounding;
    double ttft_slo, tbt_slo, congestion;
    std::int64_t chunked, running, prefill_bends, decode_bends, pull_bends, beside, tight;
    const double *prefill_fade, *decode_fade, *pull_fade;  // what is left of an old fit; null: not asked for yet
    double *ttft, *cost;                                   // of `count` doubles each, to write in

    const double *column(int use) const { return data + at[use] * stride; }
};

struct Model {
    const double *a, *b, *c, *d, *knee;
    bool bends;

    Model(const Request &r, int use, bool bends_, bool prior = false) : bends(bends_) {
        a = r.column(use) + (prior ? 5 : 0) * r.stride;
        b = a + r.stride, c = b + r.stride, d = c + r.stride, knee = d + r.stride;
    }

    double at(std::int64_t i, double x1, double x2) const { return end(i, a[i], x1, x2); }
    double at(std::int64_t i, double x1, double x2, double n) const { return end(i, a[i] * n, x1, x2); }

  private:
    double end(std::int64_t i, double each, double x1, double x2) const {
        double seconds = each + b[i] * x1 + c[i] * x2;
        return bends ? seconds + d[i] * most(0.0, x1 - knee[i]) : seconds;
    }
};

// `score.faded_s`: a fit that says more than its prior fades towards it. `missing`: set where that is needed and not given.
inline double faded(double seconds, double before, const double *fade, std::int64_t i, bool &missing) {
    if (seconds <= before) return seconds;
    if (!fade) {
        missing = true;
        return seconds;
    }
    return most(least(seconds, before), seconds * fade[i]);
}

// One way to compute the prompt, for all rows: see `CostBounds._way`.
struct Way {
    double cached;  // tokens; below 0: what each has
    double usable;  // blocks
    double pushed;  // tokens
    double arriving;
    // Fetching; `blocks` below 0: none.
    double blocks, ahead, holders, read;
};

struct Ways {
    const Request &r;
    const Way &w;
    const Model prefill, decode, prefill_prior, decode_prior, pull, pull_prior;
    const double *kv, *fitted_chunk, *rows, *context, *chunk, *sending, *arriving, *transfer, *residence;
    bool missing = false;

    Ways(const Request &r_, const Way &w_)
        : r(r_), w(w_), prefill(r, PREFILL, r.prefill_bends), decode(r, DECODE, r.decode_bends),
          prefill_prior(r, PREFILL, r.prefill_bends, true), decode_prior(r, DECODE, r.decode_bends, true),
          pull(r, PULL, r.pull_bends), pull_prior(r, PULL, r.pull_bends, true), kv(r.column(KV_BYTES)),
          fitted_chunk(r.column(FITTED_CHUNK)), rows(r.column(RUNNING)), context(r.column(CONTEXT)),
          chunk(r.column(CHUNK)), sending(r.column(SENDING)), arriving(r.column(ARRIVING)),
          transfer(r.column(TRANSFER)), residence(r.column(RESIDENCE)) {}

    struct One {
        double computed, pairs, steps, alone, slower, prefill, queue, fetch, tail, ttft, cost;
    };

    double fetch(std::int64_t i) {
        double pulled = w.blocks * r.block * kv[i];
        double nbytes = pulled + most(w.ahead, least(pulled, arriving[i]));
        double seconds = pull.at(i, nbytes, w.holders), before = pull_prior.at(i, nbytes, w.holders);
        return w.read + r.congestion * faded(seconds, before, r.pull_fade, i, missing);
    }

    One at(std::int64_t i) {
        One o;
        double cached = w.cached >= 0 ? w.cached : least(r.depth[i], w.usable) * r.block;
        o.computed = r.prompt - cached;
        o.pairs = o.computed * (o.computed + 2 * cached) / 2;
        if (r.chunked) {
            o.steps = most(1.0, std::ceil(o.computed / fitted_chunk[i]));
            o.alone = prefill.at(i, o.computed, o.pairs, o.steps);
        } else {
            o.alone = prefill.at(i, o.computed, o.pairs);
        }
        o.prefill = o.alone, o.slower = 0.0;
        double stall = 0.0;
        if (r.running) {
            double chunks = most(1.0, std::ceil(o.computed / chunk[i]));
            double step = decode.at(i, rows[i], context[i]);
            o.slower = rows[i] > 0 ? chunks * step : 0.0, stall = rows[i] * o.alone;
            o.prefill = o.alone + o.slower;
        }
        o.queue = r.short_queue != r.queue && o.computed <= fitted_chunk[i] ? r.short_queue[i] : r.queue[i];
        o.fetch = 0.0;
        if (w.blocks >= 0) {
            o.fetch = fetch(i);
            o.ttft = most(o.queue, o.fetch) + o.prefill;
        } else {
            o.ttft = o.queue + o.prefill;
        }
        o.tail = 0.0;
        if (w.pushed > 0) {
            double sent = w.pushed * kv[i];
            double whole = (sent + least(sent, most(sending[i], w.arriving))) / transfer[i];
            o.tail = most(whole - o.prefill, whole * r.tail_share);
            o.ttft += o.tail;
        }
        o.cost = r.running ? o.ttft + r.stall_weight * stall : o.ttft;
        return o;
    }

    // By what it is judged, and whether it passes.
    double judged(std::int64_t i, const One &o, double slo, bool &passes, bool &drains) {
        double seconds = o.alone;
        double before = r.chunked ? prefill_prior.at(i, o.computed, o.pairs, o.steps)
                                  : prefill_prior.at(i, o.computed, o.pairs);
        double prompt = faded(seconds, before, r.prefill_fade, i, missing);
        double yielding = r.yielding ? r.yielding[i] : 0.0;
        double start = most(o.queue - least(yielding, o.queue), o.fetch);
        double found = start + (r.running ? prompt + o.slower : prompt);
        if (w.pushed > 0) found = found + o.tail;
        passes = found <= slo + r.rounding;
        if (r.tight && passes && rows[i] > 0) {
            double chunks = most(1.0, std::ceil(o.computed / chunk[i]));
            double step = faded(decode.at(i, rows[i], context[i]), decode_prior.at(i, rows[i], context[i]),
                                r.decode_fade, i, missing);
            double share = least(1.0, most(0.0, r.wait[i] + o.alone) / most(r.slowest * residence[i], 1e-9));
            passes = step + prompt / chunks * share <= r.tbt_slo + r.rounding;
        }
        drains = found - slo <= start - o.fetch + r.rounding;
        return found;
    }
};

}  // namespace

KV_EXPORT const char *kv_fields() { return FIELDS(NAME); }

KV_EXPORT std::int64_t kv_request_bytes() { return sizeof(Request); }

// Writes `values`, `fields` for each of `rows`, into the first columns of a table (see `Request`).
KV_EXPORT void kv_fill(double *data, std::int64_t stride, const std::int64_t *rows, std::int64_t count,
                       std::int64_t fields, const double *values) {
    for (std::int64_t k = 0; k < count; k++)
        for (std::int64_t field = 0; field < fields; field++) data[field * stride + rows[k]] = *values++;
}

// What waits at each row.
KV_EXPORT void kv_wait(const Request *r) {
    const double *backlog = r->column(BACKLOG), *as_of = r->column(AS_OF);
    for (std::int64_t i = 0; i < r->count; i++)
        r->wait[i] = most(0.0, backlog[i] - most(0.0, r->now - as_of[i]));
}

// Offers one way to those of `among` whose depth is `local` (below 0: whatever it is); `instead` of what was there.
// `kept`: least cost, least TTFT, and the same of those that drain, one after the other. `rooms`: a room for each row,
// or null for `room`. 1: something fades, and it was not given how much; nothing was done.
KV_EXPORT int kv_offer(const Request *request, const Way *way, const std::uint8_t *among, double local, double room,
                       const double *rooms, int instead, double *kept) {
    const Request &r = *request;
    Ways ways(r, *way);
    bool judge = r.tight, all = local < 0;
    auto here = [&](std::int64_t i) { return among[i] && (all || r.depth[i] == local); };
    for (std::int64_t i = 0; i < r.count; i++) {
        if (!here(i)) continue;
        Ways::One one = ways.at(i);
        r.ttft[i] = one.ttft, r.cost[i] = one.cost;
        judge |= r.able[i] && one.ttft > r.ttft_slo - (rooms ? rooms[i] : room);
    }
    if (ways.missing) return 1;
    double *cost = kept, *soonest = kept + r.count, *draining = kept + 2 * r.count;
    if (!judge) {
        for (std::int64_t i = 0; i < r.count; i++) {
            if (!here(i)) continue;
            if (instead) cost[i] = soonest[i] = draining[i] = INF;
            cost[i] = least(cost[i], r.cost[i]), soonest[i] = least(soonest[i], r.ttft[i]);
        }
        return 0;
    }
    for (int write = 0; write < 2; write++) {
        for (std::int64_t i = 0; i < r.count; i++) {
            if (!here(i)) continue;
            bool passes, drains;
            Ways::One one = ways.at(i);
            double found = ways.judged(i, one, r.ttft_slo - (rooms ? rooms[i] : room), passes, drains);
            if (!write) continue;
            if (instead) cost[i] = soonest[i] = draining[i] = INF;
            cost[i] = least(cost[i], passes ? one.cost : INF), soonest[i] = least(soonest[i], found);
            if (drains) draining[i] = least(draining[i], found);
        }
        if (ways.missing) return 1;
    }
    return 0;
}

// Those `here` may have a way that costs no less than this one, in time whatever is asked.
KV_EXPORT void kv_free(const Request *request, const Way *way, const std::uint8_t *here, double *kept) {
    const Request &r = *request;
    Ways ways(r, *way);
    for (std::int64_t i = 0; i < r.count; i++)
        if (here[i]) {
            kept[i] = least(kept[i], ways.at(i).cost);
            kept[r.count + i] = -INF;
        }
}

// How an answer would be served: see `CostBounds.answers`. `blocks`, `whole`: of the prompt and of all; `alone`:
// nothing lands. `out`: TBT, landing, slot, tail, all of them together; `lacks`: who has not the pages for all of it.
KV_EXPORT void kv_answers(const Request *request, double blocks, double whole, int alone, double bytes_per_s,
                          double *out, std::uint8_t *lacks) {
    const Request &r = *request;
    const Model decode(r, DECODE, r.decode_bends), prefill(r, PREFILL, r.prefill_bends);
    const double *requests = r.column(REQUESTS), *limits = r.column(MAX_RUNNING), *stay = r.column(RESIDENCE);
    const double *contexts = r.column(CONTEXT), *chunk = r.column(CHUNK), *fitted_chunk = r.column(FITTED_CHUNK);
    const double *free = r.column(FREE_BLOCKS), *capacity = r.column(CAPACITY), *pages = r.column(FREE_PAGES);
    const double *each = r.column(EACH), *kv = r.column(KV_BYTES), *arriving = r.column(ARRIVING);
    const double *coming = r.column(COMING);
    for (std::int64_t i = 0; i < r.count; i++) {
        double size = requests[i] + 1, context = contexts[i] + r.prompt, slot = 0.0;
        double too_many = most(0.0, size - limits[i]);
        if (too_many > 0) {
            slot = stay[i] * too_many / most(1.0, requests[i]);
            context = context * (limits[i] / size);
            size = least(size, limits[i]);
        }
        double tbt = decode.at(i, size, context);
        if (r.beside) {
            double steps = most(1.0, std::ceil(chunk[i] / fitted_chunk[i]));
            double chunk_s = prefill.at(i, chunk[i], chunk[i] * chunk[i] / 2, steps);
            double busy = most(0.0, r.wait[i] + coming[i] * stay[i]);
            double share = least(1.0, busy / most(r.slowest * stay[i], 1e-9));
            tbt = tbt + chunk_s * share;
        }
        double landing = 0.0, lacking = blocks - (alone ? pages[i] : free[i]);
        if (lacking > 0) {
            double leavers = most(1.0, lacking / most(1.0, each[i] > 0 ? each[i] : blocks));
            landing = stay[i] * leavers / most(1.0, requests[i]);
        }
        double tail = 0.0;
        if (!alone) {
            double sent = most(0.0, r.prompt - r.sealed[i] * r.block) * kv[i];
            double seem = sent + least(sent, arriving[i]);
            tail = seem / bytes_per_s * r.tail_share;
        }
        out[i] = tbt, out[r.count + i] = landing, out[2 * r.count + i] = slot, out[3 * r.count + i] = tail;
        out[4 * r.count + i] = tbt + landing + slot + tail;
        lacks[i] = free[i] < least(whole, capacity[i]);
    }
}

// Which of `ends` (ascending, all that there are) are depths of one of `among`.
KV_EXPORT void kv_depths(const double *depth, const std::uint8_t *among, std::int64_t count, const double *ends,
                         std::int64_t size, std::uint8_t *found) {
    std::int64_t last = 0;
    for (std::int64_t i = 0; i < count; i++) {
        if (!among[i]) continue;
        if (depth[i] != ends[last])
            for (last = 0; last < size - 1 && ends[last] != depth[i];) last++;
        found[last] = 1;
    }
}

// Which leading blocks each row has: see prefix_holders.py. `runs` of a survey end at `ends`; `sealed`, `coming`: their masks of
// `bytes` and `coming_bytes` each; `lower`: slots that stand for lower tiers; `row_of`, `row_of_coming`: the row of each
// slot, or a negative number. Of the runs `limit` are told apart. `levels`: how many leading runs each has, in memory or
// coming, then in memory alone; room to work in. `reached`: whether anybody has just so many; zero at first, as the three
// that are told: blocks that each has, that it has in memory, and the end of the last run of which it has anything.
KV_EXPORT void kv_held(std::int64_t runs, std::int64_t limit, const double *ends, const std::uint8_t *sealed,
                       std::int64_t bytes, const std::uint8_t *coming, std::int64_t coming_bytes,
                       const std::uint8_t *lower, const std::int64_t *row_of, const std::int64_t *row_of_coming,
                       std::int64_t count, std::int32_t *levels, double *depth, double *in_memory, double *last,
                       std::uint8_t *reached) {
    std::int32_t *all = levels, *memory = levels + count;
    for (std::int64_t i = 0; i < 2 * count; i++) levels[i] = 0;
    for (std::int64_t k = 0; k < runs; k++) {
        const std::uint8_t *mask = sealed + k * bytes, *soon = coming + k * coming_bytes;
        for (std::int64_t byte = 0; byte < bytes; byte++)
            for (unsigned bits = mask[byte]; bits; bits &= bits - 1) {
                int bit = __builtin_ctz(bits);
                std::int64_t row = row_of[8 * byte + bit];
                if (row < 0 || row >= count) continue;
                last[row] = ends[k];
                if (k >= limit || lower[byte] >> bit & 1) continue;
                if (memory[row] == k) memory[row] = static_cast<std::int32_t>(k + 1), in_memory[row] = ends[k];
                if (all[row] == k) all[row] = static_cast<std::int32_t>(k + 1), depth[row] = ends[k];
            }
        if (k >= limit) continue;
        for (std::int64_t byte = 0; byte < coming_bytes; byte++)
            for (unsigned bits = soon[byte]; bits; bits &= bits - 1) {
                std::int64_t row = row_of_coming[8 * byte + __builtin_ctz(bits)];
                if (row < 0 || row >= count) continue;
                if (all[row] == k) all[row] = static_cast<std::int32_t>(k + 1), depth[row] = ends[k];
            }
    }
    for (std::int64_t i = 0; i < count; i++) reached[all[i]] = 1;
}

// The next to weigh (select.py): `low` is the least bound, `until` what is as good; -1 when that is no better than
// `best`. Else how many rows have a bound of at most `until` and the least crowd of all these; they are told in `rows`.
KV_EXPORT std::int64_t kv_fewest(const double *bound, const double *crowd, std::int64_t count, double best,
                                 double share, double floor, double cap, double *low, std::int32_t *rows) {
    double lowest = INF;
    for (std::int64_t i = 0; i < count; i++) lowest = bound[i] < lowest ? bound[i] : lowest;
    *low = lowest;
    double until = lowest + least(cap, most(floor, share * lowest));
    if (!(lowest < INF && best > until)) return -1;
    double fewest = INF;
    std::int64_t size = 0;
    for (std::int64_t i = 0; i < count; i++) {
        if (bound[i] > until || crowd[i] > fewest) continue;
        if (crowd[i] < fewest) fewest = crowd[i], size = 0;
        rows[size++] = static_cast<std::int32_t>(i);
    }
    return size;
}
