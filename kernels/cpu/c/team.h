/* Calls that are shared by the threads of a team. */
#include <stdint.h>

typedef struct {
    int64_t (*function)(const void *);
    const char *arguments; /* of `count` calls, `size` bytes each */
    int64_t size, count;
    int64_t *results;      /* (count): what calls have returned */
    int64_t taken;         /* the number of calls that a thread has made or is making */
} Calls;

/* Makes calls that no thread has made yet, until there are none. */
__attribute__((visibility("default"))) void logchain_share(void *data) {
    Calls *calls = data;
    for (int64_t i; (i = __atomic_fetch_add(&calls->taken, 1, __ATOMIC_RELAXED)) < calls->count;)
        calls->results[i] = calls->function(calls->arguments + i * calls->size);
}
