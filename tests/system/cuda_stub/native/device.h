/* What the stub device says of itself: a device of compute capability 9.0. */

#ifndef GPU_STUB_DEVICE_H
#define GPU_STUB_DEVICE_H

#define CUDA_VERSION 13000
#define DEVICE_NAME "Stub GPU"
#define MAJOR 9
#define MINOR 0
#define NUM_PROCESSORS 132
#define MAX_THREADS 1024
#define SHARED_BYTES 49152
#define SHARED_BYTES_OPTIN 232448
#define SHARED_BYTES_PROCESSOR 233472
#define REGISTERS 65536

/* Fill in CUDA 13's cudaDeviceProp. */
void device_describe(void *properties);
/* The value of a cudaDeviceAttr; 0 for what nobody asks for. */
int device_attribute(int attribute);

#endif
