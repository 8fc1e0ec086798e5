/* See device.h. Places within cudaDeviceProp are those of CUDA 13;
   a test has cuda-bindings read them where that is installed. */

#include "device.h"

#include <string.h>

#include "core.h"

#define PROPERTIES_BYTES 1008

static void put(char *properties, int place, long long value, int size) { memcpy(properties + place, &value, size); }

void device_describe(void *into) {
    char *all = into;
    size_t free_bytes, total_bytes;
    memory_info(&free_bytes, &total_bytes);
    memset(all, 0, PROPERTIES_BYTES);
    strcpy(all, DEVICE_NAME);
    put(all, 288, (long long)total_bytes, 8);
    put(all, 296, SHARED_BYTES, 8);
    put(all, 304, REGISTERS, 4);   /* a block */
    put(all, 308, 32, 4);          /* threads of a warp */
    put(all, 312, 0x7fffffff, 8);  /* largest pitch */
    put(all, 320, MAX_THREADS, 4); /* of a block */
    for (int axis = 0; axis < 3; axis++) {
        put(all, 324 + 4 * axis, axis == 2 ? 64 : 1024, 4);
        put(all, 336 + 4 * axis, axis == 0 ? 0x7fffffff : 65535, 4);
    }
    put(all, 352, 65536, 8); /* constants */
    put(all, 360, MAJOR, 4);
    put(all, 364, MINOR, 4);
    put(all, 384, NUM_PROCESSORS, 4);
    put(all, 392, 1, 4);                       /* maps host memory */
    put(all, 560, 1, 4);                       /* concurrent kernels */
    put(all, 568, 1, 4);                       /* PCI bus */
    put(all, 584, 3, 4);                       /* copy engines */
    put(all, 588, 1, 4);                       /* one address space */
    put(all, 592, 5120, 4);                    /* width of the memory bus */
    put(all, 596, 50 << 20, 4);                /* L2 */
    put(all, 604, 2048, 4);                    /* threads of a processor */
    put(all, 624, SHARED_BYTES_PROCESSOR, 8);
    put(all, 632, REGISTERS, 4);
    put(all, 636, 1, 4);                       /* managed memory */
    put(all, 668, 1, 4);                       /* cooperative launches */
    put(all, 672, SHARED_BYTES_OPTIN, 8);
    put(all, 688, 32, 4);                      /* blocks of a processor */
    put(all, 696, 1024, 8);                    /* shared memory that is kept back */
    put(all, 720, 1, 4);                       /* memory pools */
}

int device_attribute(int attribute) {
    switch (attribute) {
        case 1: case 2: case 3: return attribute == 3 ? 64 : MAX_THREADS;
        case 5: return 0x7fffffff;
        case 6: case 7: return 65535;
        case 8: return SHARED_BYTES;
        case 10: return 32;
        case 11: return 0x7fffffff;
        case 12: return REGISTERS;
        case 13: return 1755000; /* kHz */
        case 14: return 512;
        case 16: return NUM_PROCESSORS;
        case 36: return 2619000; /* kHz of the memory */
        case 37: return 5120;
        case 38: return 50 << 20;
        case 39: return 2048;
        case 40: return 3;
        case 75: return MAJOR;
        case 76: return MINOR;
        case 81: return SHARED_BYTES_PROCESSOR;
        case 82: return REGISTERS;
        case 97: return SHARED_BYTES_OPTIN;
        case 106: return 32;
        case 111: return 1024;
        /* What a device of this kind can do. */
        case 15: case 19: case 31: case 41: case 78: case 79: case 80: case 83: case 89: case 90: case 91: case 95: case 115:
        case 120: return 1;
        default: return 0;
    }
}
