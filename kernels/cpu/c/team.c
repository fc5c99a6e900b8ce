/* Calls that the threads of a team share out among themselves. */
#include <stdint.h>

typedef struct {
    int64_t (*function)(const void *);
    const char *arguments; /* of `count` calls, `size` bytes each */
    int64_t size, count;
    int64_t *results;      /* what each has returned */
    int64_t taken;
} Calls;

/* Every thread makes the next call that none has made yet, until there is none. */
__attribute__((visibility("default"))) void logchain_share(void *data) {
    Calls *calls = data;
    for (int64_t i; (i = __atomic_fetch_add(&calls->taken, 1, __ATOMIC_RELAXED)) < calls->count;)
        calls->results[i] = calls->function(calls->arguments + i * calls->size);
}
