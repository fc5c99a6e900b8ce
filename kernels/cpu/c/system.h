/* What compiled code may call although there is no C library. For structs and arrays: to[i] = from[i], to[i] = byte. */
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

/* Windows grows a stack by one page, when that is touched: before a frame of rax bytes, more than a page, a compiler
   calls this, which touches page after page and changes no register. Other systems need nothing. */
#if defined(_WIN32)
__attribute__((naked)) void ___chkstk_ms(void) {
    __asm__("push %rax\n"
            "push %rcx\n"
            "lea 24(%rsp), %rcx\n" /* the stack before the call and the two above */
            "1: cmp $4096, %rax\n"
            "jbe 2f\n"
            "sub $4096, %rcx\n"
            "orq $0, (%rcx)\n"
            "sub $4096, %rax\n"
            "jmp 1b\n"
            "2: sub %rax, %rcx\n"
            "orq $0, (%rcx)\n"
            "pop %rcx\n"
            "pop %rax\n"
            "ret\n");
}
#endif
