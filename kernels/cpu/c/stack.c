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
