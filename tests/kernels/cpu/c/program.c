/* One function of the C library on operands from stdin, its buffers to stdout: for machines that only an emulator has.

   stdin: the function's name (64 bytes), the size of its struct, the number of buffers; for each buffer the offset of
   its pointer in the struct and its size in bytes; the struct; the buffers. stdout: the buffers. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EACH(of) \
    of(forward) of(backward) of(recompute_forward) of(recompute_backward) of(messages) of(viterbi) of(topk_paths) \
    of(sample)
#define DECLARED(name)                       \
    int64_t logchain_##name##32(const void *); \
    int64_t logchain_##name##64(const void *);
#define LISTED(name) {#name "32", logchain_##name##32}, {#name "64", logchain_##name##64},
EACH(DECLARED)

static const struct {
    const char *name;
    int64_t (*function)(const void *);
} FUNCTIONS[] = {EACH(LISTED)};

enum { BUFFERS = 64, ALIGNMENT = 64 };

static char *read_bytes(int64_t size) {
    char *bytes = aligned_alloc(ALIGNMENT, (size_t)(size / ALIGNMENT + 1) * ALIGNMENT);
    if (!bytes || fread(bytes, 1, (size_t)size, stdin) != (size_t)size) exit(1);
    return bytes;
}

int main(void) {
    const char *name = read_bytes(64);
    const int64_t *counts = (int64_t *)read_bytes(2 * sizeof(int64_t));
    const int64_t size = counts[0], buffers = counts[1];
    if (buffers > BUFFERS) return 1;
    const int64_t *places = (int64_t *)read_bytes(2 * buffers * (int64_t)sizeof(int64_t));
    char *argument = read_bytes(size), *found[BUFFERS];
    for (int64_t i = 0; i < buffers; i++) {
        found[i] = read_bytes(places[2 * i + 1]);
        memcpy(argument + places[2 * i], &found[i], sizeof found[i]);
    }
    for (size_t f = 0; f < sizeof FUNCTIONS / sizeof FUNCTIONS[0]; f++) {
        if (strcmp(FUNCTIONS[f].name, name)) continue;
        FUNCTIONS[f].function(argument);
        for (int64_t i = 0; i < buffers; i++) fwrite(found[i], 1, (size_t)places[2 * i + 1], stdout);
        return 0;
    }
    return 1;
}
