// The part of the CUDA driver that the backend uses, on `fake_device.hpp`.
#include "../../hip/fake/fake_device.hpp"

using fake::Runtime;

namespace {

// One primary context a device; calls apply to the one on top of the calling thread's stack.
char contexts[16];
thread_local std::vector<void *> context_stack;

struct IpcHandle {
    char reserved[64];
};

bool valid_device(int device) { return device >= 0 && device < Runtime::get().devices; }
void *current_context() { return context_stack.empty() ? nullptr : context_stack.back(); }
int current_device() { return static_cast<int>(static_cast<char *>(current_context()) - contexts); }
uint64_t number(const void *pointer) { return reinterpret_cast<uint64_t>(pointer); }
bool known_stream(const void *stream) { return stream == nullptr || Runtime::get().streams.count(number(stream)) != 0; }
constexpr int kNoContext = 201;

}  // namespace

#define ENTER(name)                                         \
    Runtime &runtime = Runtime::get();                      \
    const std::lock_guard<std::mutex> guard(runtime.mutex); \
    if (const int status = runtime.enter(#name); status != fake::kOk) return status
#define ENTER_CONTEXT(name) \
    ENTER(name);            \
    if (current_context() == nullptr) return kNoContext

FAKE_EXPORT int cuInit(unsigned flags) {
    Runtime::get().max_shared = 227 << 10;
    return flags == 0 ? fake::kOk : fake::kInvalidValue;
}
FAKE_EXPORT int cuDriverGetVersion(int *version) { return *version = 13000, fake::kOk; }
FAKE_EXPORT int cuGetErrorName(int status, const char **out) {
    *out = status == fake::kInvalidValue ? "CUDA_ERROR_INVALID_VALUE"
           : status == fake::kNotFound   ? "CUDA_ERROR_NOT_FOUND"
                                         : nullptr;
    return *out != nullptr ? fake::kOk : fake::kInvalidValue;
}
FAKE_EXPORT int cuGetErrorString(int status, const char **out) {
    *out = status == fake::kInvalidValue ? "invalid argument" : "said by the fake driver";
    return fake::kOk;
}
FAKE_EXPORT int cuDeviceGetCount(int *count) {
    ENTER(cuDeviceGetCount);
    return *count = runtime.devices, fake::kOk;
}
FAKE_EXPORT int cuDeviceGet(int *device, int ordinal) {
    return *device = ordinal, valid_device(ordinal) ? fake::kOk : 101;
}
FAKE_EXPORT int cuDeviceGetName(char *out, int length, int device) {
    std::snprintf(out, static_cast<size_t>(length), "Fake H200");
    return valid_device(device) ? fake::kOk : 101;
}
FAKE_EXPORT int cuDeviceGetUuid_v2(void *uuid, int device) {
    if (!valid_device(device)) return 101;
    std::memset(uuid, 0x10 + device, 16);
    return fake::kOk;
}
FAKE_EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    Runtime &runtime = Runtime::get();
    if (!valid_device(device)) return 101;
    switch (attribute) {
        case 1:
            *value = fake::kMaxThreads;
            return fake::kOk;
        case 10:
            *value = runtime.warp_size;
            return fake::kOk;
        case 16:
            *value = fake::kMultiprocessors;
            return fake::kOk;
        case 75:
            *value = 9;
            return fake::kOk;
        case 76:
            *value = 0;
            return fake::kOk;
        case 95:
            *value = runtime.cooperative;
            return fake::kOk;
        case 97:
            *value = 227 << 10;
            return fake::kOk;
        case 124:
            *value = 1;
            return fake::kOk;
        default:
            return fake::kInvalidValue;
    }
}
FAKE_EXPORT int cuDeviceGetPCIBusId(char *out, int length, int device) {
    if (!valid_device(device) || length < 13) return fake::kInvalidValue;
    std::snprintf(out, static_cast<size_t>(length), "0000:%02x:00.0", device + 1);
    return fake::kOk;
}
FAKE_EXPORT int cuDeviceCanAccessPeer(int *able, int device, int peer) {
    if (!valid_device(device) || !valid_device(peer)) return 101;
    *able = device != peer && Runtime::get().peer_access;
    return fake::kOk;
}
FAKE_EXPORT int cuDevicePrimaryCtxRetain(void **out, int device) {
    ENTER(cuDevicePrimaryCtxRetain);
    if (!valid_device(device)) return 101;
    *out = contexts + device;
    return fake::kOk;
}
FAKE_EXPORT int cuCtxGetCurrent(void **out) { return *out = current_context(), fake::kOk; }
FAKE_EXPORT int cuCtxPushCurrent_v2(void *context) {
    const auto *place = static_cast<char *>(context);
    if (place < contexts || place >= contexts + Runtime::get().devices) return kNoContext;
    context_stack.push_back(context);
    return fake::kOk;
}
FAKE_EXPORT int cuCtxPopCurrent_v2(void **out) {
    if (context_stack.empty()) return kNoContext;
    *out = context_stack.back();
    context_stack.pop_back();
    return fake::kOk;
}
FAKE_EXPORT int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return current_context() == nullptr ? kNoContext : fake::kOk;
}

FAKE_EXPORT int cuMemAlloc_v2(uint64_t *out, size_t bytes) {
    ENTER_CONTEXT(cuMemAlloc_v2);
    return runtime.allocate(bytes, current_device(), 0, out);
}
FAKE_EXPORT int cuMemFree_v2(uint64_t pointer) {
    ENTER_CONTEXT(cuMemFree_v2);
    return runtime.release(pointer, false);
}
FAKE_EXPORT int cuMemsetD8Async(uint64_t pointer, unsigned char value, size_t bytes, void *stream) {
    ENTER_CONTEXT(cuMemsetD8Async);
    if (!known_stream(stream) || stream == nullptr) return fake::kInvalidHandle;
    if (!runtime.reaches(pointer, bytes)) return fake::kInvalidValue;
    std::memset(reinterpret_cast<void *>(pointer), value, bytes);
    return fake::kOk;
}
FAKE_EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    ENTER_CONTEXT(cuMemcpyDtoHAsync_v2);
    if (!known_stream(stream) || stream == nullptr) return fake::kInvalidHandle;
    if (!runtime.reaches(from, bytes)) return fake::kInvalidValue;
    std::memcpy(to, reinterpret_cast<void *>(from), bytes);
    return fake::kOk;
}
FAKE_EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    ENTER_CONTEXT(cuMemcpyHtoDAsync_v2);
    if (!known_stream(stream) || stream == nullptr) return fake::kInvalidHandle;
    if (!runtime.reaches(to, bytes)) return fake::kInvalidValue;
    std::memcpy(reinterpret_cast<void *>(to), from, bytes);
    return fake::kOk;
}
FAKE_EXPORT int cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags) {
    ENTER_CONTEXT(cuMemHostRegister_v2);
    return flags != 3 ? fake::kInvalidValue : runtime.register_host(number(pointer), bytes);
}
FAKE_EXPORT int cuMemHostUnregister(void *pointer) {
    ENTER_CONTEXT(cuMemHostUnregister);
    return runtime.unregister_host(number(pointer));
}
FAKE_EXPORT int cuMemHostGetDevicePointer_v2(uint64_t *out, void *pointer, unsigned flags) {
    ENTER_CONTEXT(cuMemHostGetDevicePointer_v2);
    const auto found = runtime.registrations.find(number(pointer));
    if (flags != 0 || found == runtime.registrations.end()) return fake::kInvalidValue;
    *out = number(found->second.alias);
    return fake::kOk;
}
FAKE_EXPORT int cuPointerSetAttribute(const void *value, int attribute, uint64_t pointer) {
    ENTER_CONTEXT(cuPointerSetAttribute);
    return attribute == 6 && *static_cast<const unsigned *>(value) == 1 && runtime.reaches(pointer, 1)
               ? fake::kOk
               : fake::kInvalidValue;
}
FAKE_EXPORT int cuIpcGetMemHandle(IpcHandle *out, uint64_t pointer) {
    ENTER_CONTEXT(cuIpcGetMemHandle);
    return runtime.export_memory(pointer, out);
}
FAKE_EXPORT int cuIpcOpenMemHandle_v2(uint64_t *out, IpcHandle handle, unsigned flags) {
    ENTER_CONTEXT(cuIpcOpenMemHandle_v2);
    return flags != 1 ? fake::kInvalidValue : runtime.import_memory(&handle, current_device(), out);
}
FAKE_EXPORT int cuIpcCloseMemHandle(uint64_t pointer) {
    ENTER_CONTEXT(cuIpcCloseMemHandle);
    return runtime.release(pointer, true);
}
FAKE_EXPORT int cuMemGetHandleForAddressRange(void *out, uint64_t pointer, size_t bytes, int type,
                                              unsigned long long flags) {
    ENTER_CONTEXT(cuMemGetHandleForAddressRange);
    const auto found = runtime.allocations.find(pointer);
    if (type != 1 || flags != 0 || bytes % fake::kPage != 0 || found == runtime.allocations.end())
        return fake::kInvalidValue;
    *static_cast<int *>(out) = dup(found->second.fd);
    return fake::kOk;
}

FAKE_EXPORT int cuStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    ENTER_CONTEXT(cuStreamCreateWithPriority);
    if (flags != 1 || priority < -5 || priority > 0) return fake::kInvalidValue;
    *out = reinterpret_cast<void *>(runtime.add(&runtime.streams));
    return fake::kOk;
}
FAKE_EXPORT int cuStreamDestroy_v2(void *stream) {
    ENTER_CONTEXT(cuStreamDestroy_v2);
    return runtime.remove(&runtime.streams, number(stream));
}
FAKE_EXPORT int cuStreamQuery(void *stream) {
    ENTER_CONTEXT(cuStreamQuery);
    return runtime.query(known_stream(stream));
}
FAKE_EXPORT int cuStreamSynchronize(void *stream) { return known_stream(stream) ? fake::kOk : fake::kInvalidHandle; }
FAKE_EXPORT int cuStreamIsCapturing(void *stream, int *out) {
    if (!known_stream(stream)) return fake::kInvalidHandle;
    *out = Runtime::get().capturing;
    return fake::kOk;
}
FAKE_EXPORT int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    ENTER_CONTEXT(cuStreamWaitEvent);
    if (!known_stream(stream) || runtime.events.count(number(event)) == 0) return fake::kInvalidHandle;
    return flags == 0 ? fake::kOk : fake::kInvalidValue;
}
FAKE_EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
    thread_local int current = 0;
    if (*mode < 0 || *mode > 2) return fake::kInvalidValue;
    std::swap(current, *mode);
    return fake::kOk;
}
FAKE_EXPORT int cuEventCreate(void **out, unsigned flags) {
    ENTER_CONTEXT(cuEventCreate);
    if (flags != 2) return fake::kInvalidValue;
    *out = reinterpret_cast<void *>(runtime.add(&runtime.events));
    return fake::kOk;
}
FAKE_EXPORT int cuEventDestroy_v2(void *event) {
    ENTER_CONTEXT(cuEventDestroy_v2);
    return runtime.remove(&runtime.events, number(event));
}
FAKE_EXPORT int cuEventRecord(void *event, void *stream) {
    ENTER_CONTEXT(cuEventRecord);
    return known_stream(stream) && runtime.events.count(number(event)) != 0 ? fake::kOk : fake::kInvalidHandle;
}
FAKE_EXPORT int cuEventQuery(void *event) {
    ENTER_CONTEXT(cuEventQuery);
    return runtime.query(runtime.events.count(number(event)) != 0);
}

FAKE_EXPORT int cuModuleLoadData(void **out, const void *image) {
    ENTER_CONTEXT(cuModuleLoadData);
    if (runtime.capturing) return fake::kCapturing;
    return runtime.load(image, reinterpret_cast<uint64_t *>(out));
}
FAKE_EXPORT int cuModuleUnload(void *module) {
    ENTER_CONTEXT(cuModuleUnload);
    return runtime.unload(number(module));
}
FAKE_EXPORT int cuModuleGetFunction(void **out, void *module, const char *name) {
    ENTER_CONTEXT(cuModuleGetFunction);
    return runtime.find_function(number(module), name, name, reinterpret_cast<uint64_t *>(out));
}
FAKE_EXPORT int cuFuncSetAttribute(void *function, int attribute, int value) {
    ENTER_CONTEXT(cuFuncSetAttribute);
    if (runtime.functions.count(number(function)) == 0) return fake::kInvalidHandle;
    return attribute == 8 && value <= 227 << 10 ? fake::kOk : fake::kInvalidValue;
}
FAKE_EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, void *function, int threads, size_t shared) {
    ENTER_CONTEXT(cuOccupancyMaxActiveBlocksPerMultiprocessor);
    if (runtime.functions.count(number(function)) == 0) return fake::kInvalidHandle;
    *out = shared <= 227u << 10 && threads <= static_cast<int>(fake::kMaxThreads) ? 1 : 0;
    return fake::kOk;
}

namespace {
int launch(const char *call, void *function, const uint32_t *grid, const uint32_t *block, unsigned shared, void *stream,
           void **parameters, bool together) {
    Runtime &runtime = Runtime::get();
    {
        const std::lock_guard<std::mutex> guard(runtime.mutex);
        if (const int status = runtime.enter(call); status != fake::kOk) return status;
    }
    if (current_context() == nullptr) return kNoContext;
    return runtime.launch(number(function), grid, block, shared, number(stream), parameters, together);
}
}  // namespace

FAKE_EXPORT int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
    const uint32_t grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    if (extra != nullptr) return fake::kInvalidValue;
    return launch("cuLaunchKernel", function, grid, block, shared, stream, parameters, false);
}
FAKE_EXPORT int cuLaunchCooperativeKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                          unsigned by, unsigned bz, unsigned shared, void *stream, void **parameters) {
    const uint32_t grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    return launch("cuLaunchCooperativeKernel", function, grid, block, shared, stream, parameters, true);
}
