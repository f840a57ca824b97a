/* A libcuda.so.1 for machines without a GPU: one device whose memory is host memory, and streams that are always done.
 * kvikio runs its real code over it. Build: cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 cuda.c
 * Its dma-bufs hold no memory but what was asked for: first byte and size. -DDMA_BUF_SUPPORTED=0: it has none.
 * Allocate and free device memory only while nothing is read or written. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef DMA_BUF_SUPPORTED
#define DMA_BUF_SUPPORTED 1
#endif

typedef int Result;
typedef unsigned long long Address;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801 };
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_DEVICE_ORDINAL = 9 };
enum { DEVICE_ATTRIBUTE_DMA_BUF = 124, HANDLE_DMA_BUF_FD = 1 };
enum { MEMORY_OF_DEVICE = 2, ALLOCATIONS = 64, PAGE = 4096 };

static struct { char *start; size_t size; } allocations[ALLOCATIONS];
static char context, stream;
static _Thread_local void *current;

static int allocation_of(Address address) {
    for (int i = 0; i < ALLOCATIONS; i++) {
        Address start = (Address)allocations[i].start;
        if (start && start <= address && address < start + allocations[i].size) return i;
    }
    return -1;
}

static void *pages(size_t size) {
    void *start = NULL;
    return posix_memalign(&start, PAGE, size) ? NULL : start;
}

Result cuMemAlloc_v2(Address *address, size_t size) {
    for (int i = 0; i < ALLOCATIONS; i++) {
        if (allocations[i].start) continue;
        char *start = pages(size);
        if (!start) return OUT_OF_MEMORY;
        allocations[i].size = size;
        allocations[i].start = start;
        *address = (Address)start;
        return SUCCESS;
    }
    return OUT_OF_MEMORY;
}

Result cuMemFree_v2(Address address) {
    int i = allocation_of(address);
    if (i < 0) return INVALID_VALUE;
    free(allocations[i].start);
    allocations[i].start = NULL;
    return SUCCESS;
}

Result cuPointerGetAttribute(void *value, int attribute, Address address) {
    if (allocation_of(address) < 0) return INVALID_VALUE; /* memory that CUDA does not know: the host's */
    switch (attribute) {
    case ATTRIBUTE_CONTEXT: *(void **)value = &context; return SUCCESS;
    case ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = MEMORY_OF_DEVICE; return SUCCESS;
    case ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = 0; return SUCCESS;
    default: return INVALID_VALUE;
    }
}

/* As the real one: of memory that CUDA does not know every attribute is zero. */
Result cuPointerGetAttributes(unsigned count, int *attributes, void **values, Address address) {
    for (unsigned i = 0; i < count; i++) {
        if (attributes[i] == ATTRIBUTE_CONTEXT) *(void **)values[i] = NULL;
        else *(unsigned *)values[i] = 0;
        cuPointerGetAttribute(values[i], attributes[i], address);
    }
    return SUCCESS;
}

Result cuMemGetAddressRange_v2(Address *start, size_t *size, Address address) {
    int i = allocation_of(address);
    if (i < 0) return INVALID_VALUE;
    if (start) *start = (Address)allocations[i].start;
    if (size) *size = allocations[i].size;
    return SUCCESS;
}

/* As the real one: whole pages, all within one allocation. */
Result cuMemGetHandleForAddressRange(void *handle, Address start, size_t size, int kind, unsigned long long flags) {
    int i = allocation_of(start);
    if (kind != HANDLE_DMA_BUF_FD || flags || i < 0 || start % PAGE || size % PAGE || !size) return INVALID_VALUE;
    if (start + size > (Address)allocations[i].start + allocations[i].size) return INVALID_VALUE;
    unsigned long long asked[2] = {start, size};
    int fd = memfd_create("dma-buf of a stub", MFD_CLOEXEC);
    if (fd < 0) return OUT_OF_MEMORY;
    if (write(fd, asked, sizeof asked) != sizeof asked) {
        close(fd);
        return OUT_OF_MEMORY;
    }
    *(int *)handle = fd;
    return SUCCESS;
}

static Result copy(Address target, Address source, size_t size) {
    memcpy((void *)target, (void *)source, size);
    return SUCCESS;
}
Result cuMemcpyAsync(Address target, Address source, size_t size, void *on) { return copy(target, source, size); }
Result cuMemcpyHtoDAsync_v2(Address target, Address source, size_t size, void *on) { return copy(target, source, size); }
Result cuMemcpyDtoHAsync_v2(Address target, Address source, size_t size, void *on) { return copy(target, source, size); }
Result cuMemcpyHtoD_v2(Address target, Address source, size_t size) { return copy(target, source, size); }
Result cuMemcpyDtoH_v2(Address target, Address source, size_t size) { return copy(target, source, size); }

Result cuMemHostAlloc(void **start, size_t size, unsigned flags) {
    *start = pages(size);
    return *start ? SUCCESS : OUT_OF_MEMORY;
}
Result cuMemFreeHost(void *start) { free(start); return SUCCESS; }
Result cuMemHostRegister_v2(void *start, size_t size, unsigned flags) { return SUCCESS; }
Result cuMemHostUnregister(void *start) { return SUCCESS; }

Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { *version = 12000; return SUCCESS; }
Result cuGetErrorName(Result result, const char **name) { *name = "STUB"; return SUCCESS; }
Result cuGetErrorString(Result result, const char **text) { *text = "the stub says no"; return SUCCESS; }
Result cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? INVALID_VALUE : SUCCESS; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == DEVICE_ATTRIBUTE_DMA_BUF ? DMA_BUF_SUPPORTED : 0;
    return SUCCESS;
}
Result cuDevicePrimaryCtxRetain(void **made, int device) { *made = &context; return SUCCESS; }
Result cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
Result cuCtxCreate_v4(void **made, void *parameters, unsigned flags, int device) { *made = &context; return SUCCESS; }
Result cuCtxDestroy_v2(void *made) { return SUCCESS; }
Result cuCtxSetCurrent(void *made) { current = made; return SUCCESS; }
Result cuCtxGetCurrent(void **made) { *made = current; return SUCCESS; }
Result cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
Result cuCtxPushCurrent_v2(void *made) { current = made; return SUCCESS; }
Result cuCtxPopCurrent_v2(void **made) { if (made) *made = current; current = NULL; return SUCCESS; }
Result cuStreamCreate(void **made, unsigned flags) { *made = &stream; return SUCCESS; }
Result cuStreamSynchronize(void *on) { return SUCCESS; }
Result cuStreamDestroy_v2(void *made) { return SUCCESS; }

Result cuEventCreate(void **made, unsigned flags) { return NOT_SUPPORTED; }
Result cuEventDestroy_v2(void *event) { return NOT_SUPPORTED; }
Result cuEventRecord(void *event, void *on) { return NOT_SUPPORTED; }
Result cuEventQuery(void *event) { return NOT_SUPPORTED; }
Result cuEventSynchronize(void *event) { return NOT_SUPPORTED; }
Result cuLaunchHostFunc(void *on, void *function, void *argument) { return NOT_SUPPORTED; }
