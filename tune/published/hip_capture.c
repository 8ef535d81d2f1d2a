// The few calls of the HIP runtime that a compiler's host code makes, handed to three hooks: a
// program that launches kernels through them can be watched without a GPU.

#include <stddef.h>

typedef int (*LoadHook)(const void*, void**);
typedef int (*FunctionHook)(void*, const char*, void**);
typedef int (*LaunchHook)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          unsigned, void**);

static LoadHook on_load;
static FunctionHook on_function;
static LaunchHook on_launch;

void capture_hooks(LoadHook load, FunctionHook function, LaunchHook launch) {
    on_load = load;
    on_function = function;
    on_launch = launch;
}

int hipModuleLoadData(void** module, const void* image) { return on_load(image, module); }

int hipModuleGetFunction(void** function, void* module, const char* name) {
    return on_function(module, name, function);
}

int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, void* stream, void** arguments, void** extra) {
    (void)stream, (void)extra;
    return on_launch(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes,
                     arguments);
}

int hipGetDevice(int* device) {
    *device = 0;
    return 0;
}

const char* hipGetErrorName(int error) {
    (void)error;
    return "an error of the capture";
}

#define DOES_NOTHING(name)                                                                         \
    int name(void) { return 0; }

DOES_NOTHING(hipDeviceSynchronize)
DOES_NOTHING(hipEventCreateWithFlags)
DOES_NOTHING(hipEventDestroy)
DOES_NOTHING(hipEventRecord)
DOES_NOTHING(hipEventSynchronize)
DOES_NOTHING(hipFree)
DOES_NOTHING(hipGetLastError)
DOES_NOTHING(hipHostGetDevicePointer)
DOES_NOTHING(hipHostRegister)
DOES_NOTHING(hipHostUnregister)
DOES_NOTHING(hipMalloc)
DOES_NOTHING(hipMemcpy)
DOES_NOTHING(hipMemcpyAsync)
DOES_NOTHING(hipMemset)
DOES_NOTHING(hipMemsetD16Async)
DOES_NOTHING(hipMemsetD32Async)
DOES_NOTHING(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor)
DOES_NOTHING(hipModuleUnload)
DOES_NOTHING(hipSetDevice)
DOES_NOTHING(hipStreamCreate)
DOES_NOTHING(hipStreamDestroy)
DOES_NOTHING(hipStreamSynchronize)
DOES_NOTHING(hipStreamWaitEvent)
