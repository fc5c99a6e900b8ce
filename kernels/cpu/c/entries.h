/* The arguments of exact scans, and matrices of all kinds as blocks of entries.

   A block is a vector of neighboring states, of arcs any vector of states. An entry is a vector of weights that lead
   into the states of a block, or in a backward scan out of them, and tells which states are at their other ends:

       bands    as far from the block as the band       a contiguous load
       arcs     any, one for each lane                  a gather
       dense    one for all lanes                       a broadcast; entries that are all 0 are left out

   Durations (durations.h) have two parameters: a matrix of segments (terms, terms), in blocks like those of dense
   matrices, and then the durations (terms, D) of these, D = c / terms, a block of one entry for each vector of a row.

   Shapes: v steps, n sequences, c states, `terms` bands, arcs or segments' states. Strides and places count entries. */
#pragma once
#include "split.h"

enum { BANDS, ARCS, DENSE, DURATIONS };

/* A sequence: which it is, its steps, and where its operands and counts begin in their arrays. */
typedef struct { int64_t index, steps, x, p0, weights, counts; } Place;

/* Arcs by one of their ends: rows of arcs of one state, sorted by length, in blocks of LANES rows. A state with more
   arcs than a row may have has several rows; blocks are filled up with arc -1 at state 0. */
typedef struct {
    int64_t blocks, shared; /* the first `shared` blocks have rows of states that have several */
    const int64_t *start;   /* (blocks + 1): first entry of each block */
    const int32_t *state;   /* (blocks, LANES): the state of a row */
    const int32_t *other;   /* (entries, LANES): the state at an arc's other end */
    const int32_t *arc;     /* (entries, LANES): the arc */
} Slices;
/* `order`: arcs by their targets, those of a state from `first` (c + 1); `source` of each arc. */
typedef struct { Slices into, out; const int64_t *first, *order, *source; } Graph;

/* Mirrored by sparse.py, field by field; of dense chains made by recompute.h. */
typedef struct {
    int64_t kind, steps, states, terms, first, last; /* a thread computes places from `first` to before `last` */
    int64_t one_matrix, logarithms, by_log;          /* one for all steps; weights and p0 are; gradients are of */
    const Place *places;                             /* (n): those that share weights are neighbors */
    const void *pattern;                             /* bands: offsets, int64, see structure_paths.h; arcs: Graph */
    Steps x;                                         /* (v, c) of each sequence */
    const operand *weights;                          /* (v - 1 or 1) of (bands, c), (1, arcs), (from, to), or
                                                        both parameters of durations, contiguous */
    int64_t weights_step, weights_outer, weights_inner;
    Steps p0;                                        /* (c) of each sequence */
    real *mantissas, *exponents;                     /* (n, v, whole_vectors(c)): forward messages; or null */
    double *taken;                                   /* (n, v): exponents taken out of these */
    double *log_norm;                                /* (n): log Z */
    const double *weight;                            /* (n): factor of gradients */
    operand *grad_x;                                 /* (n, v, c) or null: posteriors times weight */
    double *counts;                                  /* one matrix: gradients are added to it, contiguous; or null */
    operand *grad_weights;                           /* a matrix a step: likewise, each step's `counts_step` further */
    int64_t counts_step;
    double *grad_p0;                                 /* (n, c) or null */
    operand *log_forward, *log_backward, *filtered;  /* (n, v, c) or null: see exact_step.h */
    int64_t *paths, draws, sequences;                /* (n, v) or (draws, n, v): states, see structure_paths.h */
    int64_t every;                                   /* steps between checkpoints, see structure_paths.h */
    char *scratch;                                   /* null asks for its size, see Scratch */
    const Chain *dense;                              /* of dense chains: layout and further arguments */
} Exact;

#if BITS == 32 /* exact scans of dense chains are in float64 */
INLINE int64_t kind_of(const Exact *a) { return a->kind == BANDS || a->kind == DURATIONS ? a->kind : ARCS; }
#else
INLINE int64_t kind_of(const Exact *a) { return a->kind; }
#endif

/* A matrix of a step, or its transpose. */
typedef struct {
    int64_t blocks;
    int64_t *start;       /* (blocks + 1): first entry of each block */
    int64_t segments, longest, matrix_blocks; /* durations: (segments, longest), and blocks of the matrix */
    Row ends, sums, forward; /* durations: scratch (segments), as is `aligned` */
    real *aligned;
    int64_t *shift;       /* bands: (bands): from a state of the block to the other one */
    int32_t *other;       /* dense, durations: (entries): the other state */
    const Slices *slices; /* arcs */
    Row entries;          /* (entries, LANES) */
    real *linear;         /* arcs, dense, matrix of segments: (entries, LANES): the same, if all are near 1 */
    operand *square;      /* dense: (c, c): scratch for the transpose */
    const operand *of;    /* the weights that are read, or null */
    reals tops;           /* the largest exponents, and of these the largest */
    real top;
    int backward, has_nan, is_near;
    int as_logs;          /* entries.m are finite logarithms, for structure_paths.h, or else `has_nan` */
} BlockMatrix;

/* Entries that are counted while they are summed: S P T / Z times 2^lift, without the mantissas of P. `shift`: what
   exponents lack; `share`: weight / Z. */
typedef struct { Row forward; real shift, share, lift, *counts; } Counting;

/* A row to be multiplied by a matrix: the row, also aligned to 2^e, or null; where the sums go; what is counted, or
   null; the number of blocks where the aligned row was not right. */
typedef struct { Row row, to; const real *aligned; real e; const Counting *counting; int64_t failed; } RowProduct;

INLINE reals count_factor(const Counting *n, Split forward, reals e) {
    return forward.m * bounded_power((forward.e + e) + (n->shift + n->lift)) * n->share;
}
INLINE void count_term(reals factor, reals part, real *count) { store(count, load(count) + part * factor); }

/* The sum of up to 8 products of numbers and weights, near 2^LIFT. Each is counted, unless `n` is null, with the
   forward messages of the block: without 2^e and its weight's mantissa. */
INLINE Split sum_of_terms(const int terms, const Split *from, const Split *weight, const Counting *n, Split forward,
                          real *counts) {
    Split sum = {{0}, from[0].e + weight[0].e};
    reals e[8], parts[8];
    UNROLL for (int t = 0; t < terms; t++) e[t] = from[t].e + weight[t].e, sum.e = larger(e[t], sum.e);
    sum.e -= LIFT;
    UNROLL for (int t = 0; t < terms; t++) parts[t] = from[t].m * power(e[t] - sum.e), sum.m += parts[t] * weight[t].m;
    reals factor = n ? count_factor(n, forward, sum.e) : sum.m;
    UNROLL for (int t = 0; t < terms && n; t++) count_term(factor, parts[t], counts + t * LANES);
    return sum;
}

INLINE Row take_row(Scratch *scratch, int64_t width) {
    real *mantissas = take_reals(scratch, width);
    return (Row){mantissas, take_reals(scratch, width)};
}

/* Where the weights of an entry are: lane l, from `first` to before `stop`, at place + l step, or at arc[l] step. */
typedef struct { int64_t place, step, first, stop; const int32_t *arc; } Lanes;

INLINE Lanes lanes_of_durations(const BlockMatrix *m, int64_t block, int64_t entry) {
    int64_t c = m->segments, j = block * LANES, k = m->other[entry], vectors = vectors_of(m->longest);
    if (block < m->matrix_blocks) {
        int64_t left = smaller_of(c - j, LANES);
        return m->backward ? (Lanes){j * c + k, c, 0, left, 0} : (Lanes){k * c + j, 1, 0, left, 0};
    }
    int64_t r = (block - m->matrix_blocks) % vectors * LANES, state = (block - m->matrix_blocks) / vectors;
    return (Lanes){c * c + state * m->longest + r, 1, 0, smaller_of(m->longest - r, LANES), 0};
}

INLINE Lanes lanes_of(const Exact *a, const BlockMatrix *m, int64_t block, int64_t entry, int64_t outer,
                      int64_t inner) {
    int64_t j = block * LANES, left = smaller_of(a->states - j, LANES);
    if (kind_of(a) == DURATIONS) return lanes_of_durations(m, block, entry);
    if (kind_of(a) == ARCS) return (Lanes){0, inner, 0, LANES, m->slices->arc + entry * LANES};
    if (kind_of(a) == DENSE) return (Lanes){m->other[entry] * outer + j * inner, inner, 0, left, 0};
    int64_t band = entry - m->start[block], shift = m->shift[band], to = m->backward ? j + shift : j;
    if (band >= a->terms) left = 0;
    return (Lanes){band * outer + to * inner, inner, larger_of(0, -j - shift),
                   larger_of(0, smaller_of(left, a->states - j - shift)), 0};
}
INLINE int64_t place_of_lane(const Lanes *at, int64_t l) {
    if (at->arc) return at->arc[l] < 0 ? -1 : at->arc[l] * at->step;
    return l < at->first || l >= at->stop ? -1 : at->place + l * at->step;
}
INLINE reals read_lanes(const operand *from, Lanes at, real fill) {
    if (!at.arc && at.first == 0) return read_some(from + at.place, at.step, at.stop, fill);
    reals a = splat(fill);
    UNROLL for (int l = 0; l < LANES; l++) {
        int64_t place = place_of_lane(&at, l);
        if (place >= 0) a[l] = (real)from[place];
    }
    return a;
}

INLINE void read_entry(const Exact *a, BlockMatrix *m, int64_t entry, reals weights) {
    if (m->as_logs) {
        if (!a->logarithms) weights = logarithms(weights);
        m->has_nan |= any(~(weights < INFINITE)), store(m->entries.m + entry * LANES, weights);
        return;
    }
    Split weight = weight_split(weights, (int)a->logarithms);
    m->has_nan |= any(is_no_weight(weights, (int)a->logarithms));
    store_split(m->entries, entry * LANES, weight), m->tops = larger(weight.e, m->tops);
    if (kind_of(a) == BANDS || (kind_of(a) == DURATIONS && entry >= m->start[m->matrix_blocks])) return;
    m->is_near &= !any((weight.e > -INFINITE) & ((weight.e < -SMALL) | (weight.e > LARGE)));
    store(m->linear + entry * LANES, weight.m * power(smaller(weight.e, splat(LARGE))));
}

/* A matrix (c, c) in rows of the states that a backward scan sums over: by tiles, which stay in the cache. */
static const operand *transposed_square(const Exact *a, const operand *from, operand *to) {
    enum { TILE = 16 };
    int64_t c = a->states, outer = a->weights_outer, inner = a->weights_inner;
    for (int64_t j = 0; j < c; j += TILE)
        for (int64_t k = 0; k < c; k++)
            for (int64_t i = j; i < j + TILE && i < c; i++) to[k * c + i] = from[i * outer + k * inner];
    return to;
}

/* Reads the matrix into a step, unless it is there. */
static void read_matrix(const Exact *a, BlockMatrix *m, const Place *place, int64_t step) {
    const operand *from = a->weights + place->weights + (a->one_matrix ? 0 : step - 1) * a->weights_step;
    int64_t outer = a->weights_outer, inner = a->weights_inner;
    real zero = a->logarithms ? -INFINITE : 0, unit = a->logarithms ? 0 : 1;
    if (m->of == from) return;
    m->of = from, m->has_nan = 0, m->is_near = kind_of(a) != BANDS, m->tops = splat(-INFINITE);
    if (kind_of(a) == DENSE && m->backward) from = transposed_square(a, from, m->square), outer = a->states, inner = 1;
    for (int64_t block = 0, entry = 0; block < m->blocks; block++) {
        for (int64_t k = 0; k < a->states && kind_of(a) == DENSE; k++) {
            m->other[entry] = (int32_t)k;
            reals weights = read_lanes(from, lanes_of(a, m, block, entry, outer, inner), zero);
            if (any(weights != zero)) read_entry(a, m, entry++, weights);
        }
        if (kind_of(a) == DENSE) m->start[block + 1] = entry;
        /* lanes without states of segments have sums that do not look as if they had underflowed */
        real fill = block < m->matrix_blocks ? unit : zero;
        for (; entry < m->start[block + 1]; entry++)
            read_entry(a, m, entry, read_lanes(from, lanes_of(a, m, block, entry, outer, inner), fill));
    }
    m->top = largest(m->tops);
    /* of products of both parameters, at most, and of segments that last */
    if (kind_of(a) == DURATIONS) m->top = m->top > 0 ? 2 * m->top : 0;
}

/* Counts of the entries of a matrix times 2^lift: of some steps, and if all share it, of those before. */
typedef struct { int64_t entries, steps; real lift, *recent; double *total; } EntryCounts;

static void clear_counts(EntryCounts *n) {
    for (int64_t k = 0; k < n->entries * LANES; k++) n->recent[k] = 0;
    for (int64_t k = 0; k < n->entries * LANES && n->total; k++) n->total[k] = 0;
    n->steps = 0;
}
static void add_recent(EntryCounts *n) {
    for (int64_t k = 0; k < n->entries * LANES; k++) n->total[k] += (double)n->recent[k], n->recent[k] = 0;
    n->steps = 0;
}

/* Gradients of an entry: its counts over the weights, unless they are those of logarithms; 0 at weight 0. */
INLINE reals gradient_of(const Exact *a, Split weight, reals count, real lift) {
    Split value = {count, -lift - weight.e};
    if (a->logarithms || a->by_log) value = (Split){count * weight.m, splat(-lift)};
    return where((weight.e > -INFINITE) & (count != 0), value_of_split(value), splat(0));
}

/* Adds gradients of the matrix into a step to those of the caller, and clears the counts. */
static void write_entry_counts(const Exact *a, const BlockMatrix *m, const Place *place, int64_t step, EntryCounts *n) {
    int64_t c = a->states, outer = kind_of(a) == ARCS ? 0 : kind_of(a) == DENSE ? 1 : c;
    int64_t inner = kind_of(a) == DENSE ? c : 1, at = place->counts + (a->one_matrix ? 0 : (step - 1) * a->counts_step);
    if (n->total) add_recent(n);
    for (int64_t block = 0; block < m->blocks; block++)
        for (int64_t entry = m->start[block]; entry < m->start[block + 1]; entry++) {
            reals count = load(n->recent + entry * LANES);
            if (n->total) UNROLL for (int l = 0; l < LANES; l++) count[l] = (real)n->total[entry * LANES + l];
            reals gradient = gradient_of(a, load_split(m->entries, entry * LANES), count, n->lift);
            Lanes lanes = lanes_of(a, m, block, entry, outer, inner);
            UNROLL for (int l = 0; l < LANES; l++) {
                int64_t to = place_of_lane(&lanes, l);
                if (to >= 0 && a->counts) a->counts[at + to] += (double)gradient[l];
                if (to >= 0 && !a->counts) a->grad_weights[at + to] += (operand)gradient[l];
            }
        }
    clear_counts(n);
}

/* Bands that are summed together are held in registers: 8 of them, or all if they are fewer. */
INLINE int64_t held_bands(const Exact *a) { return a->terms < 8 ? a->terms : (a->terms + 7) / 8 * 8; }

/* Entries that a matrix may have. */
INLINE int64_t entries_of(const Exact *a, const BlockMatrix *m) {
    if (kind_of(a) == ARCS) return m->slices->start[m->blocks];
    if (kind_of(a) == DURATIONS) return m->blocks + m->matrix_blocks * (m->segments - 1);
    return m->blocks * (kind_of(a) == BANDS ? held_bands(a) : a->states);
}

static BlockMatrix begin_durations(BlockMatrix m) {
    for (int64_t block = 0; block <= m.blocks; block++)
        m.start[block] = block + smaller_of(block, m.matrix_blocks) * (m.segments - 1);
    for (int64_t entry = 0; entry < m.start[m.blocks]; entry++)
        m.other[entry] = entry < m.start[m.matrix_blocks] ? (int32_t)(entry % m.segments) : 0;
    clear_row(m.matrix_blocks * LANES, m.ends), clear_row(m.matrix_blocks * LANES, m.forward);
    return m;
}

/* A matrix, of which nothing is read yet. */
static BlockMatrix new_matrix(const Exact *a, int backward, Scratch *scratch) {
    int64_t held = kind_of(a) == BANDS ? held_bands(a) : 0, dense = kind_of(a) == DENSE, c = a->terms;
    BlockMatrix m = {.blocks = whole_vectors(a->states) / LANES, .backward = backward};
    if (kind_of(a) == ARCS) {
        const Graph *graph = a->pattern;
        m.slices = backward ? &graph->out : &graph->into, m.blocks = m.slices->blocks;
        m.start = (int64_t *)m.slices->start;
    } else {
        if (kind_of(a) == DURATIONS) {
            m.segments = c, m.longest = a->states / c, m.matrix_blocks = vectors_of(c);
            m.blocks = m.matrix_blocks + c * vectors_of(m.longest);
            int64_t width = m.matrix_blocks * LANES;
            m.ends = take_row(scratch, width), m.sums = take_row(scratch, width);
            m.forward = take_row(scratch, width), m.aligned = take_reals(scratch, width);
        }
        m.start = take(scratch, (m.blocks + 1) * 8);
    }
    int64_t entries = entries_of(a, &m);
    m.entries = take_row(scratch, entries * LANES);
    m.linear = take_reals(scratch, kind_of(a) == BANDS ? 0 : entries * LANES);
    m.shift = take(scratch, held * 8), m.other = take(scratch, (dense || m.segments) * (entries + 1) * 4);
    m.square = take(scratch, dense * backward * a->states * a->states * (int64_t)sizeof(operand));
    if (!scratch->begin) return m;
    if (kind_of(a) == DURATIONS) return begin_durations(m);
    for (int64_t block = 0; block <= m.blocks && kind_of(a) != ARCS; block++) m.start[block] = block * held;
    for (int64_t d = 0; d < held; d++) {
        int64_t offset = d < a->terms ? ((const int64_t *)a->pattern)[d] : 0;
        m.shift[d] = backward ? offset : -offset;
    }
    return m;
}
