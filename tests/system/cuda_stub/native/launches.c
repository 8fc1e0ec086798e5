/* libcudart: kernels, which are checked, counted and not run. */

#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "device.h"
#include "runtime.h"

struct size3 {
    unsigned x, y, z;
};

struct configuration {
    struct size3 grid, block;
    size_t dynamic_bytes;
    struct stream *stream;
    void *attributes;
    unsigned num_attributes;
};

#define MAX_DEPTH 16
static __thread struct configuration pushed[MAX_DEPTH];
static __thread int depth;

/* A library's binaries are the memory of nobody: a handle is all it takes. */
void **__cudaRegisterFatBinary(void *binary) {
    CALLED();
    void **handle = malloc(sizeof *handle);
    *handle = binary;
    return handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {
    CALLED();
    (void)handle;
}

void __cudaUnregisterFatBinary(void **handle) {
    CALLED();
    free(handle);
}

void __cudaRegisterFunction(void **handle, const char *host, char *function, const char *name, int limit, void *thread, void *block,
                            void *block_size, void *grid_size, int *warp_size) {
    CALLED();
    (void)handle, (void)function, (void)limit, (void)thread, (void)block, (void)block_size, (void)grid_size, (void)warp_size;
    kernel_register(host, name);
}

unsigned __cudaPushCallConfiguration(struct size3 grid, struct size3 block, size_t dynamic_bytes, struct stream *stream) {
    CALLED();
    if (depth == MAX_DEPTH) return 1;
    pushed[depth++] = (struct configuration){grid, block, dynamic_bytes, stream, NULL, 0};
    return 0;
}

int __cudaPopCallConfiguration(struct size3 *grid, struct size3 *block, size_t *dynamic_bytes, void *stream) {
    CALLED();
    if (!depth) return done(INVALID_CONFIGURATION);
    const struct configuration *top = &pushed[--depth];
    *grid = top->grid;
    *block = top->block;
    *dynamic_bytes = top->dynamic_bytes;
    *(struct stream **)stream = top->stream;
    return SUCCESS;
}

/* The device refuses what it has no room for, and nothing at all to do. */
static int launch(const void *host, const struct configuration *how) {
    struct kernel *kernel = kernel_find(host);
    if (!kernel) {
        fault("a kernel is launched that nobody has registered");
        return done(INVALID_DEVICE_FUNCTION);
    }
    const struct size3 grid = how->grid, block = how->block;
    const size_t num_threads = (size_t)block.x * block.y * block.z;
    const int is_empty = !grid.x || !grid.y || !grid.z || !num_threads;
    if (is_empty || num_threads > MAX_THREADS || block.z > 64 || grid.y > 65535 || grid.z > 65535) {
        fault("%s is launched with %u×%u×%u blocks of %u×%u×%u threads", kernel->name, grid.x, grid.y, grid.z, block.x, block.y,
              block.z);
        return done(INVALID_CONFIGURATION);
    }
    if (how->dynamic_bytes > (size_t)kernel->max_dynamic_bytes) {
        fault("%s is launched with %zu bytes of shared memory, and may have %d", kernel->name, how->dynamic_bytes,
              kernel->max_dynamic_bytes);
        return done(INVALID_VALUE);
    }
    return done(submit(how->stream, (struct work){.what = KERNEL, .kernel = kernel}));
}

int cudaLaunchKernel(const void *host, struct size3 grid, struct size3 block, void **arguments, size_t bytes, struct stream *stream) {
    TOLD();
    (void)arguments;
    return launch(host, &(struct configuration){grid, block, bytes, stream, NULL, 0});
}

int cudaLaunchCooperativeKernel(
    const void *host, struct size3 grid, struct size3 block, void **arguments, size_t bytes, struct stream *stream) {
    TOLD();
    (void)arguments;
    return launch(host, &(struct configuration){grid, block, bytes, stream, NULL, 0});
}

int cudaLaunchKernelExC(const struct configuration *how, const void *host, void **arguments) {
    TOLD();
    (void)arguments;
    return launch(host, how);
}

/* A kernel's handle is its host's address. */
int __cudaGetKernel(const void **kernel, const void *host) {
    CALLED();
    *kernel = host;
    return SUCCESS;
}

int __cudaLaunchKernel(
    const void *host, struct size3 grid, struct size3 block, void **arguments, size_t bytes, struct stream *stream) {
    TOLD();
    (void)arguments;
    return launch(host, &(struct configuration){grid, block, bytes, stream, NULL, 0});
}

/* What is asked of kernels. */

int cudaFuncGetAttributes(void *found, const void *host) {
    TOLD();
    const struct kernel *kernel = kernel_find(host);
    if (!kernel) return done(INVALID_DEVICE_FUNCTION);
    struct {
        size_t shared_bytes, constant_bytes, local_bytes;
        int max_threads, num_registers, ptx_version, binary_version, cache_mode, max_dynamic_bytes, rest[24];
    } all = {0};
    all.max_threads = MAX_THREADS;
    all.num_registers = 64;
    all.ptx_version = all.binary_version = 10 * MAJOR + MINOR;
    all.max_dynamic_bytes = kernel->max_dynamic_bytes;
    memcpy(found, &all, sizeof all);
    return SUCCESS;
}

int cudaFuncSetAttribute(const void *host, int attribute, int value) {
    TOLD();
    struct kernel *kernel = kernel_find(host);
    if (!kernel) return done(INVALID_DEVICE_FUNCTION);
    if (attribute == 8) { /* cudaFuncAttributeMaxDynamicSharedMemorySize */
        if (value < 0 || value > SHARED_BYTES_OPTIN) return done(INVALID_VALUE);
        kernel->max_dynamic_bytes = value;
    }
    return SUCCESS;
}

static int blocks_at_once(int *count, int num_threads, size_t dynamic_bytes) {
    if (num_threads <= 0 || num_threads > MAX_THREADS) return done(INVALID_VALUE);
    *count = 2048 / num_threads < 32 ? 2048 / num_threads : 32;
    const int by_memory = SHARED_BYTES_PROCESSOR / (int)(dynamic_bytes + 1024);
    if (by_memory < *count) *count = by_memory;
    return SUCCESS;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *host, int num_threads, size_t dynamic_bytes) {
    TOLD();
    (void)host;
    return blocks_at_once(count, num_threads, dynamic_bytes);
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *count, const void *host, int num_threads, size_t dynamic_bytes, unsigned flags) {
    TOLD();
    (void)host, (void)flags;
    return blocks_at_once(count, num_threads, dynamic_bytes);
}

int cudaOccupancyMaxPotentialClusterSize(int *size, const void *host, const struct configuration *how) {
    TOLD();
    (void)host, (void)how;
    *size = 8;
    return SUCCESS;
}

int cudaOccupancyMaxActiveClusters(int *count, const void *host, const struct configuration *how) {
    TOLD();
    (void)host, (void)how;
    *count = NUM_PROCESSORS / 2;
    return SUCCESS;
}
