/* One function of the C library on operands from stdin, its buffers to stdout: for machines that only an emulator has.

   stdin: the function's name (64 bytes), the size of its struct, the number of buffers; for each buffer the offset of
   its pointer in the struct and its size in bytes; the struct; the buffers. stdout: the buffers. No C library is
   needed: three system calls of Linux do. */
#include <stdint.h>

#define OF_BOTH(name)                        \
    int64_t logchain_##name##32(const void *); \
    int64_t logchain_##name##64(const void *);
OF_BOTH(forward)
OF_BOTH(backward)
OF_BOTH(redo_forward)
OF_BOTH(sample)
OF_BOTH(topk_paths)
OF_BOTH(viterbi)
OF_BOTH(redo_backward)
OF_BOTH(messages)

static const struct {
    char name[64];
    int64_t (*function)(const void *);
} FUNCTIONS[] = {
    {"forward32", logchain_forward32},
    {"forward64", logchain_forward64},
    {"backward32", logchain_backward32},
    {"backward64", logchain_backward64},
    {"viterbi32", logchain_viterbi32},
    {"viterbi64", logchain_viterbi64},
    {"topk_paths32", logchain_topk_paths32},
    {"topk_paths64", logchain_topk_paths64},
    {"sample32", logchain_sample32},
    {"sample64", logchain_sample64},
    {"redo_forward32", logchain_redo_forward32},
    {"redo_forward64", logchain_redo_forward64},
    {"redo_backward32", logchain_redo_backward32},
    {"redo_backward64", logchain_redo_backward64},
    {"messages32", logchain_messages32},
    {"messages64", logchain_messages64},
};

enum { BUFFERS = 64, ALIGNMENT = 64, ROOM = 1 << 26 };

#if defined(__x86_64__)
enum { READ = 0, WRITE = 1, EXIT = 60 };
__asm__(".globl _start\n_start: and $-16, %rsp\n call run\n");
static int64_t call(int64_t number, int64_t first, void *second, int64_t third) {
    int64_t result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(first), "S"(second), "d"(third)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
enum { READ = 63, WRITE = 64, EXIT = 93 };
__asm__(".globl _start\n_start: bl run\n");
static int64_t call(int64_t number, int64_t first, void *second, int64_t third) {
    register int64_t x8 __asm__("x8") = number;
    register int64_t x0 __asm__("x0") = first;
    register void *x1 __asm__("x1") = second;
    register int64_t x2 __asm__("x2") = third;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
    return x0;
}
#endif

static int same(const char *a, const char *b) {
    while (*a && *a == *b) a++, b++;
    return *a == *b;
}

static void finish(int64_t code) {
    for (;;) call(EXIT, code, 0, 0);
}

/* All bytes, in as many calls as it takes; the exit code says which direction failed. */
static void move(int64_t number, int64_t file, char *bytes, int64_t size) {
    while (size > 0) {
        int64_t moved = call(number, file, bytes, size);
        if (moved <= 0) finish(2 + number);
        bytes += moved;
        size -= moved;
    }
}

static char room[ROOM] __attribute__((aligned(ALIGNMENT)));
static int64_t taken;

static char *take(int64_t size) {
    char *found = room + taken;
    taken += (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (taken > ROOM) finish(1);
    return found;
}

__attribute__((used)) void run(void) {
    struct {
        char name[64];
        int64_t size, buffers;
    } call_of;
    struct {
        int64_t offset, size;
    } buffer[BUFFERS];
    char *found[BUFFERS];
    move(READ, 0, (char *)&call_of, sizeof call_of);
    if (call_of.buffers > BUFFERS) finish(1);
    move(READ, 0, (char *)buffer, call_of.buffers * (int64_t)sizeof buffer[0]);
    char *argument = take(call_of.size);
    move(READ, 0, argument, call_of.size);
    for (int64_t i = 0; i < call_of.buffers; i++) {
        found[i] = take(buffer[i].size);
        move(READ, 0, found[i], buffer[i].size);
        __builtin_memcpy(argument + buffer[i].offset, &found[i], sizeof found[i]);
    }
    for (uint64_t f = 0; f < sizeof FUNCTIONS / sizeof FUNCTIONS[0]; f++) {
        if (!same(FUNCTIONS[f].name, call_of.name)) continue;
        FUNCTIONS[f].function(argument);
        for (int64_t i = 0; i < call_of.buffers; i++) move(WRITE, 1, found[i], buffer[i].size);
        finish(0);
    }
    finish(1);
}
