/* libcublas: a handle has a stream, and every product is work on it. */

#include <stdlib.h>
#include <string.h>

#include "core.h"

#define NOT_INITIALIZED 1
#define CUBLAS_VERSION 130000

struct handle {
    struct stream *stream;
    int math_mode, pointer_mode;
    struct handle *next;
};

static struct handle *handles;

static struct handle *known(const void *handle) {
    struct handle *one = handles;
    while (one && one != handle) one = one->next;
    return one;
}

/* What is neither asked nor set is a product. */
__attribute__((visibility("hidden"))) long otherwise(struct call *call, void *first) {
    const int told = called(call);
    const struct handle *handle = known(first);
    const int is_product = strncmp(call->name, "cublasSet", 9) && strncmp(call->name, "cublasGet", 9);
    if (told || !is_product) return told;
    if (!handle) {
        fault("%s has no handle", call->name);
        return NOT_INITIALIZED;
    }
    submit(handle->stream, (struct work){.what = PRODUCT, .kernel = kernel_named(call->name)});
    return 0;
}

#define HANDLE(name) \
    int told = CALLED(); \
    struct handle *name = known(given); \
    if (told || !name) return told ? told : NOT_INITIALIZED

int cublasCreate_v2(struct handle **handle) {
    int told = CALLED();
    if (told) return told;
    *handle = calloc(1, sizeof **handle);
    (*handle)->next = handles;
    handles = *handle;
    return 0;
}

int cublasDestroy_v2(struct handle *given) {
    HANDLE(handle);
    struct handle **place = &handles;
    while (*place != handle) place = &(*place)->next;
    *place = handle->next;
    free(handle);
    return 0;
}

int cublasSetStream_v2(struct handle *given, struct stream *stream) {
    HANDLE(handle);
    handle->stream = stream;
    return 0;
}

int cublasGetStream_v2(struct handle *given, struct stream **stream) {
    HANDLE(handle);
    *stream = handle->stream;
    return 0;
}

int cublasSetMathMode(struct handle *given, int mode) {
    HANDLE(handle);
    handle->math_mode = mode;
    return 0;
}

int cublasGetMathMode(struct handle *given, int *mode) {
    HANDLE(handle);
    *mode = handle->math_mode;
    return 0;
}

int cublasSetPointerMode_v2(struct handle *given, int mode) {
    HANDLE(handle);
    handle->pointer_mode = mode;
    return 0;
}

int cublasGetPointerMode_v2(struct handle *given, int *mode) {
    HANDLE(handle);
    *mode = handle->pointer_mode;
    return 0;
}

int cublasSetWorkspace_v2(struct handle *given, void *workspace, size_t size) {
    HANDLE(handle);
    if (size && memory_place(workspace, size) != DEVICE) fault("cublasSetWorkspace_v2 gets memory that is not the device's");
    return 0;
}

int cublasGetVersion_v2(struct handle *given, int *version) {
    HANDLE(handle);
    *version = CUBLAS_VERSION;
    return 0;
}

/* One describes a status, the other names it; the provider uses both. */
const char *cublasGetStatusString(int status) {
    CALLED();
    return status == 3 ? "the resource allocation failed" : status ? "an internal operation failed" : "success";
}

const char *cublasGetStatusName(int status) {
    CALLED();
    return status == 3 ? "CUBLAS_STATUS_ALLOC_FAILED" : status ? "CUBLAS_STATUS_INTERNAL_ERROR" : "CUBLAS_STATUS_SUCCESS";
}
