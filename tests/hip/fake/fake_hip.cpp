// The part of the HIP runtime that the backend uses, on `fake_device.hpp`.
#include "fake_device.hpp"

using fake::Runtime;

namespace {

thread_local int current_device = 0;
constexpr uint32_t kStaticShared = 128;  // of each kernel; what a launch asks for comes on top

struct IpcHandle {
    char reserved[64];
};

const char *name_of(int status) {
    switch (status) {
        case fake::kOk:
            return "hipSuccess";
        case fake::kInvalidValue:
            return "hipErrorInvalidValue";
        case fake::kOutOfMemory:
            return "hipErrorOutOfMemory";
        case fake::kInvalidHandle:
            return "hipErrorInvalidHandle";
        case fake::kNotFound:
            return "hipErrorNotFound";
        case fake::kNotReady:
            return "hipErrorNotReady";
        case fake::kAlreadyRegistered:
            return "hipErrorHostMemoryAlreadyRegistered";
        case fake::kNotRegistered:
            return "hipErrorHostMemoryNotRegistered";
        case fake::kTooLarge:
            return "hipErrorCooperativeLaunchTooLarge";
        case fake::kNotSupported:
            return "hipErrorNotSupported";
        case fake::kCapturing:
            return "hipErrorStreamCaptureUnsupported";
        default:
            return nullptr;
    }
}

bool valid_device(int device) { return device >= 0 && device < Runtime::get().devices; }
uint64_t number(const void *pointer) { return reinterpret_cast<uint64_t>(pointer); }
bool known_stream(const void *stream) { return stream == nullptr || Runtime::get().streams.count(number(stream)) != 0; }

}  // namespace

#define ENTER(name)                                         \
    Runtime &runtime = Runtime::get();                      \
    const std::lock_guard<std::mutex> guard(runtime.mutex); \
    if (const int status = runtime.enter(#name); status != fake::kOk) return status

FAKE_EXPORT int hipInit(unsigned flags) { return flags == 0 ? fake::kOk : fake::kInvalidValue; }
FAKE_EXPORT int hipRuntimeGetVersion(int *version) { return *version = 70125424, fake::kOk; }
FAKE_EXPORT int hipDrvGetErrorName(int status, const char **out) {
    *out = name_of(status);
    return *out != nullptr ? fake::kOk : fake::kInvalidValue;
}
FAKE_EXPORT int hipDrvGetErrorString(int status, const char **out) {
    *out = status == fake::kInvalidValue ? "invalid argument" : "said by the fake runtime";
    return fake::kOk;
}
FAKE_EXPORT int hipGetDeviceCount(int *count) {
    ENTER(hipGetDeviceCount);
    *count = runtime.devices;
    return *count > 0 ? fake::kOk : 100;
}
FAKE_EXPORT int hipGetDevice(int *device) { return *device = current_device, fake::kOk; }
FAKE_EXPORT int hipSetDevice(int device) {
    if (!valid_device(device)) return 101;
    current_device = device;
    return fake::kOk;
}
FAKE_EXPORT int hipGetDevicePropertiesR0600(void *properties, int device) {
    ENTER(hipGetDevicePropertiesR0600);
    if (!valid_device(device)) return 101;
    auto *bytes = static_cast<char *>(properties);
    std::memset(bytes, 0x5a, 1472);  // the size of the struct: a caller with less room would notice
    std::snprintf(bytes, 256, "Fake Instinct");
    std::snprintf(bytes + 1160, 256, "%s", runtime.architecture.c_str());
    return fake::kOk;
}
FAKE_EXPORT int hipDeviceGetUuid(void *uuid, int device) {
    if (!valid_device(device)) return 101;
    std::memset(uuid, 0x10 + device, 16);
    return fake::kOk;
}
FAKE_EXPORT int hipDeviceGetAttribute(int *value, int attribute, int device) {
    Runtime &runtime = Runtime::get();
    if (!valid_device(device)) return 101;
    switch (attribute) {
        case 10:
            *value = runtime.cooperative;
            return fake::kOk;
        case 56:
            *value = fake::kMaxThreads;
            return fake::kOk;
        case 63:
            *value = fake::kMultiprocessors;
            return fake::kOk;
        case 74:
            *value = static_cast<int>(runtime.max_shared);
            return fake::kOk;
        case 87:
            *value = runtime.warp_size;
            return fake::kOk;
        default:
            return fake::kInvalidValue;
    }
}
FAKE_EXPORT int hipDeviceGetPCIBusId(char *out, int length, int device) {
    if (!valid_device(device) || length < 13) return fake::kInvalidValue;
    std::snprintf(out, static_cast<size_t>(length), "0000:%02x:00.0", device + 1);
    return fake::kOk;
}
FAKE_EXPORT int hipDeviceCanAccessPeer(int *able, int device, int peer) {
    if (!valid_device(device) || !valid_device(peer)) return 101;
    *able = device != peer && Runtime::get().peer_access;
    return fake::kOk;
}
FAKE_EXPORT int hipDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 1, *greatest = -1, fake::kOk;
}

FAKE_EXPORT int hipMalloc(void **out, size_t bytes) {
    ENTER(hipMalloc);
    return runtime.allocate(bytes, current_device, 0, reinterpret_cast<uint64_t *>(out));
}
FAKE_EXPORT int hipExtMallocWithFlags(void **out, size_t bytes, unsigned flags) {
    ENTER(hipExtMallocWithFlags);
    if (flags != 1 && flags != 3) return fake::kInvalidValue;
    return runtime.allocate(bytes, current_device, flags, reinterpret_cast<uint64_t *>(out));
}
FAKE_EXPORT int hipFree(void *pointer) {
    ENTER(hipFree);
    return runtime.release(number(pointer), false);
}
FAKE_EXPORT int hipMemsetAsync(void *pointer, int value, size_t bytes, void *stream) {
    ENTER(hipMemsetAsync);
    if (!known_stream(stream) || stream == nullptr) return fake::kInvalidHandle;
    if (!runtime.reaches(number(pointer), bytes)) return fake::kInvalidValue;
    std::memset(pointer, value, bytes);
    return fake::kOk;
}
FAKE_EXPORT int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    ENTER(hipMemcpyAsync);
    if (!known_stream(stream) || stream == nullptr) return fake::kInvalidHandle;
    const bool to_device = kind == 1, to_host = kind == 2;
    if (!to_device && !to_host) return fake::kInvalidValue;
    if (!runtime.reaches(number(to_device ? to : from), bytes)) return fake::kInvalidValue;
    std::memcpy(to, from, bytes);
    return fake::kOk;
}
FAKE_EXPORT int hipHostRegister(void *pointer, size_t bytes, unsigned flags) {
    ENTER(hipHostRegister);
    return flags != 3 ? fake::kInvalidValue : runtime.register_host(number(pointer), bytes);
}
FAKE_EXPORT int hipHostUnregister(void *pointer) {
    ENTER(hipHostUnregister);
    return runtime.unregister_host(number(pointer));
}
FAKE_EXPORT int hipHostGetDevicePointer(void **out, void *pointer, unsigned flags) {
    ENTER(hipHostGetDevicePointer);
    const auto found = runtime.registrations.find(number(pointer));
    if (flags != 0 || found == runtime.registrations.end()) return fake::kInvalidValue;
    *out = found->second.alias;
    return fake::kOk;
}
FAKE_EXPORT int hipIpcGetMemHandle(IpcHandle *out, void *pointer) {
    ENTER(hipIpcGetMemHandle);
    return runtime.export_memory(number(pointer), out);
}
FAKE_EXPORT int hipIpcOpenMemHandle(void **out, IpcHandle handle, unsigned flags) {
    ENTER(hipIpcOpenMemHandle);
    if (flags != 1) return fake::kInvalidValue;
    return runtime.import_memory(&handle, current_device, reinterpret_cast<uint64_t *>(out));
}
FAKE_EXPORT int hipIpcCloseMemHandle(void *pointer) {
    ENTER(hipIpcCloseMemHandle);
    return runtime.release(number(pointer), true);
}

FAKE_EXPORT int hipStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    ENTER(hipStreamCreateWithPriority);
    if (flags != 1 || priority < -1 || priority > 1) return fake::kInvalidValue;
    *out = reinterpret_cast<void *>(runtime.add(&runtime.streams));
    return fake::kOk;
}
FAKE_EXPORT int hipStreamDestroy(void *stream) {
    ENTER(hipStreamDestroy);
    return runtime.remove(&runtime.streams, number(stream));
}
FAKE_EXPORT int hipStreamQuery(void *stream) {
    ENTER(hipStreamQuery);
    return runtime.query(known_stream(stream));
}
FAKE_EXPORT int hipStreamSynchronize(void *stream) { return known_stream(stream) ? fake::kOk : fake::kInvalidHandle; }
FAKE_EXPORT int hipStreamIsCapturing(void *stream, int *out) {
    if (!known_stream(stream)) return fake::kInvalidHandle;
    *out = Runtime::get().capturing;
    return fake::kOk;
}
FAKE_EXPORT int hipThreadExchangeStreamCaptureMode(int *mode) {
    thread_local int current = 0;
    if (*mode < 0 || *mode > 2) return fake::kInvalidValue;
    std::swap(current, *mode);
    return fake::kOk;
}
FAKE_EXPORT int hipStreamWaitEvent(void *stream, void *event, unsigned flags) {
    ENTER(hipStreamWaitEvent);
    if (!known_stream(stream) || runtime.events.count(number(event)) == 0) return fake::kInvalidHandle;
    return flags == 0 ? fake::kOk : fake::kInvalidValue;
}
FAKE_EXPORT int hipEventCreateWithFlags(void **out, unsigned flags) {
    ENTER(hipEventCreateWithFlags);
    if (flags != 2) return fake::kInvalidValue;
    *out = reinterpret_cast<void *>(runtime.add(&runtime.events));
    return fake::kOk;
}
FAKE_EXPORT int hipEventDestroy(void *event) {
    ENTER(hipEventDestroy);
    return runtime.remove(&runtime.events, number(event));
}
FAKE_EXPORT int hipEventRecord(void *event, void *stream) {
    ENTER(hipEventRecord);
    return known_stream(stream) && runtime.events.count(number(event)) != 0 ? fake::kOk : fake::kInvalidHandle;
}
FAKE_EXPORT int hipEventQuery(void *event) {
    ENTER(hipEventQuery);
    return runtime.query(runtime.events.count(number(event)) != 0);
}

FAKE_EXPORT int hipModuleLoadData(void **out, const void *image) {
    ENTER(hipModuleLoadData);
    if (runtime.capturing) return fake::kCapturing;
    return runtime.load(image, reinterpret_cast<uint64_t *>(out));
}
FAKE_EXPORT int hipModuleUnload(void *module) {
    ENTER(hipModuleUnload);
    return runtime.unload(number(module));
}
FAKE_EXPORT int hipModuleGetFunction(void **out, void *module, const char *name) {
    ENTER(hipModuleGetFunction);
    return runtime.find_function(number(module), name, std::string(name) + ".kd", reinterpret_cast<uint64_t *>(out));
}
FAKE_EXPORT int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *out, void *function, int threads,
                                                                   size_t shared) {
    ENTER(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor);
    if (runtime.functions.count(number(function)) == 0) return fake::kInvalidHandle;
    *out = shared + kStaticShared <= runtime.max_shared && threads <= static_cast<int>(fake::kMaxThreads) ? 1 : 0;
    return fake::kOk;
}

namespace {
int launch(const char *call, void *function, const uint32_t *grid, const uint32_t *block, unsigned shared, void *stream,
           void **parameters, bool together) {
    Runtime &runtime = Runtime::get();
    {
        const std::lock_guard<std::mutex> guard(runtime.mutex);
        if (const int status = runtime.enter(call); status != fake::kOk) return status;
        if (shared > runtime.max_shared - kStaticShared) return fake::kInvalidValue;
    }
    return runtime.launch(number(function), grid, block, shared, number(stream), parameters, together);
}
}  // namespace

FAKE_EXPORT int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                      unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
    const uint32_t grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    if (extra != nullptr) return fake::kInvalidValue;
    return launch("hipModuleLaunchKernel", function, grid, block, shared, stream, parameters, false);
}
FAKE_EXPORT int hipModuleLaunchCooperativeKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                                 unsigned by, unsigned bz, unsigned shared, void *stream,
                                                 void **parameters) {
    const uint32_t grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    return launch("hipModuleLaunchCooperativeKernel", function, grid, block, shared, stream, parameters, true);
}
