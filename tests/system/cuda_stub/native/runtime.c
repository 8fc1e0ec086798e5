/* libcudart: errors and the device. What nobody has written succeeds and does nothing, see bed.py. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "core.h"
#include "device.h"
#include "runtime.h"

static __thread int last_error;

int done(int status) {
    if (status) last_error = status;
    return status;
}

/* Errors. */

int cudaGetLastError(void) {
    CALLED();
    int status = last_error;
    last_error = SUCCESS;
    return status;
}

int cudaPeekAtLastError(void) {
    CALLED();
    return last_error;
}

static const struct { int status; const char *name, *text; } errors[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {MEMORY_ALLOCATION, "cudaErrorMemoryAllocation", "out of memory"},
    {INVALID_CONFIGURATION, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {INVALID_DEVICE_FUNCTION, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {CAPTURE_UNMATCHED, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
};

const char *cudaGetErrorName(int status) {
    CALLED();
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].status == status) return errors[i].name;
    return "cudaErrorUnknown";
}

const char *cudaGetErrorString(int status) {
    CALLED();
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].status == status) return errors[i].text;
    return "unknown error";
}

/* The device. */

int cudaGetDeviceCount(int *count) {
    TOLD();
    *count = 1;
    return SUCCESS;
}

int cudaSetDevice(int device) {
    TOLD();
    return done(device == 0 ? SUCCESS : INVALID_DEVICE);
}

int cudaGetDevice(int *device) {
    TOLD();
    *device = 0;
    return SUCCESS;
}

int cudaGetDeviceProperties(void *properties, int device) {
    TOLD();
    if (device) return done(INVALID_DEVICE);
    device_describe(properties);
    return SUCCESS;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    TOLD();
    if (device) return done(INVALID_DEVICE);
    *value = device_attribute(attribute);
    return SUCCESS;
}

int cudaDriverGetVersion(int *version) {
    TOLD();
    *version = CUDA_VERSION;
    return SUCCESS;
}

int cudaRuntimeGetVersion(int *version) {
    TOLD();
    *version = CUDA_VERSION;
    return SUCCESS;
}

int cudaDeviceGetPCIBusId(char *text, int size, int device) {
    TOLD();
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return SUCCESS;
}

int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    TOLD();
    *can = device == peer;
    return SUCCESS;
}

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    TOLD();
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

int cudaDeviceGetLimit(size_t *value, int limit) {
    TOLD();
    (void)limit;
    *value = 1024;
    return SUCCESS;
}

/* The driver's own functions, by name. */
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *status) {
    TOLD();
    (void)version, (void)flags;
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    *function = driver ? dlsym(driver, name) : NULL;
    if (status) *status = *function ? 0 : 1; /* cudaDriverEntryPointSymbolNotFound */
    if (!*function) fault("the driver has no %s", name);
    return SUCCESS;
}

int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDA_VERSION, flags, status);
}

int cudaDeviceSynchronize(void) {
    TOLD();
    return done(unsafe(__func__));
}
