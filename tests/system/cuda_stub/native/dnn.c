/* libcudnn: handles, and a planner of attention and convolution that finds no plan. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

#define CUDNN_VERSION 92000
#define NOT_SUPPORTED 3000

/* Descriptors are made; plans are not. */
__attribute__((visibility("hidden"))) long otherwise(struct call *call, void *first) {
    const int told = called(call);
    if (told) return told;
    if (strncmp(call->name, "cudnnBackend", 12) == 0) return NOT_SUPPORTED;
    if (strncmp(call->name, "cudnnCreate", 11) == 0) *(void **)first = calloc(1, 1024);
    if (strncmp(call->name, "cudnnDestroy", 12) == 0) free(first);
    return 0;
}

size_t cudnnGetVersion(void) {
    CALLED();
    return CUDNN_VERSION;
}

size_t cudnnGetCudartVersion(void) {
    CALLED();
    return 13000;
}

const char *cudnnGetErrorString(int status) {
    CALLED();
    return status == NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED" : status ? "CUDNN_STATUS_INTERNAL_ERROR" : "CUDNN_STATUS_SUCCESS";
}

void cudnnGetLastErrorString(char *text, size_t size) {
    CALLED();
    snprintf(text, size, "the stub plans nothing");
}
