/* A stand-in for the arguments of every loop: one pointer to this struct is the whole interface. */
#pragma once
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    int64_t size;
    const void *entering;
    void *leaving;
} Chain;
