/* Exact recomputation of the flagged sequences of dense chains, in float64; kept messages are logarithms. */
#pragma once
#include "exact.h"

/* Runs `scan` on the sequences of a thread that have a bit of `mask` in `flagged`: 1 forward, 3 forward or backward; of
   the latter on those with gradients. */
static int64_t recompute(const Chain *a, int mask, int backward, int gradients, void scan(Scan *)) {
    Scratch scratch = {.begin = a->scratch};
    Place *places = take(&scratch, larger_of(a->last - a->first, 1) * (int64_t)sizeof(Place));
    Exact e = {.kind = DENSE, .steps = a->steps, .states = a->states, .places = places, .dense = a};
    e.one_matrix = a->one_matrix, e.logarithms = a->logarithms, e.by_log = a->by_log;
    e.x = (Steps){a->x.data, a->x.step}, e.p0 = (Steps){a->p0.data, a->p0.step};
    e.weights = a->bulk.data, e.weights_step = a->bulk.step;
    e.weights_outer = a->bulk.from, e.weights_inner = a->bulk.to, e.scratch = rest_of(&scratch);
    e.log_forward = a->out.log_forward, e.log_backward = a->out.log_backward, e.filtered = a->out.filtered;
    if (gradients) {
        e.log_norm = a->log_norm, e.weight = a->weight, e.grad_p0 = a->grad_p0, e.grad_x = a->out.grad_x;
        e.counts = a->counts, e.grad_weights = a->grad_bulk.data, e.counts_step = a->grad_bulk.step;
    }
    for (int64_t place = a->first; place < a->last && a->scratch; place++) {
        int64_t q = sequence_in(a, place), set = q / a->members, counts = 0;
        if (!(a->flagged[q] & mask) || (gradients && !has_gradient(a, q))) continue;
        if (a->counts) counts = set * a->states * a->states;
        else if (a->grad_bulk.data) counts = a->grad_bulk.at[set];
        places[e.last++] = (Place){q, steps_of(a, q), 0, p0_at(a, q) - a->p0.data, a->bulk.at[set], counts};
    }
    int64_t bytes = scan_all(&e, backward, scan);
    return a->scratch ? 0 : scratch.bytes + bytes;
}

/* Forward: values, and kept messages. */
EXPORT int64_t EXPORTED(logchain_recompute_forward)(const Chain *a) { return recompute(a, 1, 0, 0, scan_forward); }

/* Backward: gradients, written or added to those that sequences share. */
EXPORT int64_t EXPORTED(logchain_recompute_backward)(const Chain *a) { return recompute(a, 3, 1, 1, scan_backward); }

/* Messages in logarithms, forward and backward. */
EXPORT int64_t EXPORTED(logchain_recompute_messages)(const Chain *a) {
    int64_t forward = recompute(a, 1, 0, 0, scan_forward), backward = recompute(a, 1, 1, 0, scan_backward);
    return larger_of(forward, backward);
}
