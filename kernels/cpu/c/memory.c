/* What a compiler may call for structs and arrays even where there is no C library: to[i] = from[i], to[i] = byte. */
#include <stddef.h>

void *memcpy(void *restrict to, const void *restrict from, size_t size) {
    char *out = to;
    const char *in = from;
    for (size_t i = 0; i < size; i++) out[i] = in[i];
    return to;
}

void *memset(void *to, int byte, size_t size) {
    char *out = to;
    for (size_t i = 0; i < size; i++) out[i] = (char)byte;
    return to;
}

/* The two may overlap: the end that would be overwritten goes first. */
void *memmove(void *to, const void *from, size_t size) {
    char *out = to;
    const char *in = from;
    if (out < in) {
        for (size_t i = 0; i < size; i++) out[i] = in[i];
    } else {
        for (size_t i = size; i-- > 0;) out[i] = in[i];
    }
    return to;
}

/* What macOS has for memset(to, 0, size), under either name. */
void bzero(void *to, size_t size) {
    char *out = to;
    for (size_t i = 0; i < size; i++) out[i] = 0;
}

void __bzero(void *to, size_t size) { bzero(to, size); }
