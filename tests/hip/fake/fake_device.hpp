// A device made of host memory, behind which tests put a vendor's calls. It keeps an account of every
// handle and refuses what a driver would refuse: unknown or freed handles, memory that is registered
// twice, launches that do not fit, kernels that the code object lacks. Work runs inside the call.
#pragma once

#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace fake {

enum Status {
    kOk = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kInvalidHandle = 400,
    kNotFound = 500,
    kNotReady = 600,
    kAlreadyRegistered = 712,
    kNotRegistered = 713,
    kTooLarge = 720,
    kNotSupported = 801,
    kCapturing = 900
};

// What tests give for a kernel: called with the bytes the launch passed.
using Launcher = int (*)(const char *kernel, const void *parameters, uint32_t blocks, uint32_t threads, uint32_t shared,
                         int cooperative);

constexpr uint64_t kPage = 4096;
constexpr uint32_t kMultiprocessors = 4, kMaxThreads = 1024;

struct Allocation {
    uint64_t bytes;
    int device;
    int fd;         // -1: mapped from another process
    uint32_t kind;  // as the vendor's call asked for it
};
struct Registration {
    uint64_t bytes;
    uint8_t *alias;  // the address kernels use, unlike the host's
};
struct Module {
    std::string image;
    std::set<std::string *> functions;
};

class Runtime {
  public:
    static Runtime &get() {
        static Runtime runtime;
        return runtime;
    }

    std::mutex mutex;
    int devices = 2;
    bool peer_access = true;
    bool cooperative = true;
    bool capturing = false;
    int not_ready = 0;         // queries that still answer "not ready"
    std::string failing;       // the next call of this name fails, once
    int failing_status = kOk;
    int warp_size = 64;
    uint32_t max_shared = 64 << 10;
    std::string architecture = "gfx942:sramecc+:xnack-";
    Launcher launcher = nullptr;
    std::string journal;       // a line a call
    uint64_t launches = 0;

    std::map<uint64_t, Allocation> allocations;
    std::map<uint64_t, Registration> registrations;
    std::set<uint64_t> streams, events;
    std::map<uint64_t, Module *> modules;
    std::set<uint64_t> functions;

    // Notes the call; not kOk where the test wants it to fail.
    int enter(const char *name) {
        journal += name;
        journal += '\n';
        if (failing != name) return kOk;
        failing.clear();
        return failing_status;
    }

    int allocate(uint64_t bytes, int device, uint32_t kind, uint64_t *out) {
        if (bytes == 0) return kInvalidValue;
        const int fd = memfd_create("fake device memory", MFD_CLOEXEC);
        const uint64_t rounded = (bytes + kPage - 1) / kPage * kPage;
        if (fd < 0 || ftruncate(fd, static_cast<off_t>(rounded)) != 0) return kOutOfMemory;
        void *memory = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (memory == MAP_FAILED) return kOutOfMemory;
        std::memset(memory, 0xa5, rounded);  // a driver's memory is not zeroed
        *out = reinterpret_cast<uint64_t>(memory);
        allocations[*out] = {bytes, device, fd, kind};
        return kOk;
    }

    int release(uint64_t pointer, bool imported) {
        const auto found = allocations.find(pointer);
        if (found == allocations.end() || (found->second.fd < 0) != imported) return kInvalidValue;
        munmap(reinterpret_cast<void *>(pointer), (found->second.bytes + kPage - 1) / kPage * kPage);
        if (found->second.fd >= 0) close(found->second.fd);
        allocations.erase(found);
        return kOk;
    }

    // Whether [pointer, pointer + bytes) lies in one allocation or registered range, by its device address.
    bool reaches(uint64_t pointer, uint64_t bytes) const {
        for (const auto &[base, allocation] : allocations) {
            if (pointer >= base && pointer + bytes <= base + allocation.bytes) return true;
        }
        for (const auto &[base, registration] : registrations) {
            const auto alias = reinterpret_cast<uint64_t>(registration.alias);
            if (pointer >= alias && pointer + bytes <= alias + registration.bytes) return true;
        }
        return false;
    }

    struct Handle {
        char magic[16];
        int pid, fd, device;
        uint32_t kind;
        uint64_t bytes;
    };
    static_assert(sizeof(Handle) <= 64);

    int export_memory(uint64_t pointer, void *out) {
        const auto found = allocations.find(pointer);
        if (found == allocations.end() || found->second.fd < 0) return kInvalidValue;
        Handle handle{"fake ipc handle",    getpid(),           found->second.fd,
                      found->second.device, found->second.kind, found->second.bytes};
        std::memset(out, 0, 64);
        std::memcpy(out, &handle, sizeof(handle));
        return kOk;
    }

    int import_memory(const void *in, int device, uint64_t *out) {
        Handle handle;
        std::memcpy(&handle, in, sizeof(handle));
        if (std::memcmp(handle.magic, "fake ipc handle", 16) != 0) return kInvalidHandle;
        if (handle.pid == getpid()) return kInvalidValue;  // a driver refuses its own process
        if (handle.device != device && !peer_access) return kNotSupported;
        char path[64];
        std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.pid, handle.fd);
        const int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0) return kInvalidHandle;
        const uint64_t rounded = (handle.bytes + kPage - 1) / kPage * kPage;
        void *memory = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (memory == MAP_FAILED) return kOutOfMemory;
        *out = reinterpret_cast<uint64_t>(memory);
        allocations[*out] = {handle.bytes, handle.device, -1, handle.kind};
        return kOk;
    }

    int register_host(uint64_t pointer, uint64_t bytes) {
        if (pointer == 0 || bytes == 0 || pointer % kPage != 0) return kInvalidValue;
        for (const auto &[base, registration] : registrations) {
            if (pointer < base + registration.bytes && base < pointer + bytes) return kAlreadyRegistered;
        }
        // A second mapping of the same shared pages, so that a host address given to a kernel is found out.
        void *alias = mremap(reinterpret_cast<void *>(pointer), 0, bytes, MREMAP_MAYMOVE);
        if (alias == MAP_FAILED) return kInvalidValue;
        registrations[pointer] = {bytes, static_cast<uint8_t *>(alias)};
        return kOk;
    }

    int unregister_host(uint64_t pointer) {
        const auto found = registrations.find(pointer);
        if (found == registrations.end()) return kNotRegistered;
        munmap(found->second.alias, found->second.bytes);
        registrations.erase(found);
        return kOk;
    }

    int load(const void *image, uint64_t *out) {
        Elf64_Ehdr header;
        std::memcpy(&header, image, sizeof(header));
        if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return kInvalidValue;
        const uint64_t bytes = header.e_shoff + uint64_t{header.e_shnum} * header.e_shentsize;
        auto *module = new Module{std::string(static_cast<const char *>(image), bytes), {}};
        *out = reinterpret_cast<uint64_t>(module);
        modules[*out] = module;
        return kOk;
    }

    int unload(uint64_t handle) {
        const auto found = modules.find(handle);
        if (found == modules.end()) return kInvalidHandle;
        for (std::string *function : found->second->functions) {
            functions.erase(reinterpret_cast<uint64_t>(function));
            delete function;
        }
        delete found->second;
        modules.erase(found);
        return kOk;
    }

    // `symbol` is what the code object calls the kernel.
    int find_function(uint64_t handle, const char *name, const std::string &symbol, uint64_t *out) {
        const auto found = modules.find(handle);
        if (found == modules.end()) return kInvalidHandle;
        if (found->second->image.find('\0' + symbol + '\0') == std::string::npos) return kNotFound;
        auto *function = new std::string(name);
        found->second->functions.insert(function);
        *out = reinterpret_cast<uint64_t>(function);
        functions.insert(*out);
        return kOk;
    }

    int launch(uint64_t function, const uint32_t *grid, const uint32_t *block, uint32_t shared, uint64_t stream,
               void **parameters, bool together) {
        if (functions.count(function) == 0 || (stream != 0 && streams.count(stream) == 0)) return kInvalidHandle;
        if (parameters == nullptr || parameters[0] == nullptr || grid[0] == 0 || grid[1] != 1 || grid[2] != 1 ||
            block[1] != 1 || block[2] != 1) {
            return kInvalidValue;
        }
        if (block[0] == 0 || block[0] > kMaxThreads || block[0] % warp_size != 0 || shared > max_shared)
            return kInvalidValue;
        if (together && !cooperative) return kNotSupported;
        if (together && grid[0] > kMultiprocessors) return kTooLarge;
        ++launches;
        if (launcher == nullptr) return kOk;
        return launcher(reinterpret_cast<std::string *>(function)->c_str(), parameters[0], grid[0], block[0], shared,
                        together);
    }

    int query(bool known) {
        if (!known) return kInvalidHandle;
        if (not_ready == 0) return kOk;
        --not_ready;
        return kNotReady;
    }

    uint64_t add(std::set<uint64_t> *handles) {
        const auto handle = reinterpret_cast<uint64_t>(new char[1]);
        handles->insert(handle);
        return handle;
    }
    int remove(std::set<uint64_t> *handles, uint64_t handle) {
        if (handles->erase(handle) == 0) return kInvalidHandle;
        delete[] reinterpret_cast<char *>(handle);
        return kOk;
    }
};

}  // namespace fake

// ---- for the tests ----
#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

FAKE_EXPORT void fake_configure(int devices, int peer_access, int cooperative, int warp_size,
                                const char *architecture) {
    auto &runtime = fake::Runtime::get();
    runtime.devices = devices;
    runtime.peer_access = peer_access != 0;
    runtime.cooperative = cooperative != 0;
    runtime.warp_size = warp_size;
    runtime.architecture = architecture;
}
FAKE_EXPORT void fake_set_launcher(fake::Launcher launcher) { fake::Runtime::get().launcher = launcher; }
FAKE_EXPORT void fake_set_not_ready(int queries) { fake::Runtime::get().not_ready = queries; }
FAKE_EXPORT void fake_set_capturing(int capturing) { fake::Runtime::get().capturing = capturing != 0; }
FAKE_EXPORT void fake_fail_next(const char *call, int status) {
    fake::Runtime::get().failing = call;
    fake::Runtime::get().failing_status = status;
}
FAKE_EXPORT uint64_t fake_count(const char *what) {
    auto &runtime = fake::Runtime::get();
    const std::string name = what;
    if (name == "allocations") return runtime.allocations.size();
    if (name == "registrations") return runtime.registrations.size();
    if (name == "streams") return runtime.streams.size();
    if (name == "events") return runtime.events.size();
    if (name == "modules") return runtime.modules.size();
    if (name == "launches") return runtime.launches;
    return ~uint64_t{0};
}
FAKE_EXPORT uint32_t fake_kind(uint64_t pointer) {
    auto &runtime = fake::Runtime::get();
    const auto found = runtime.allocations.find(pointer);
    return found == runtime.allocations.end() ? ~0u : found->second.kind;
}
FAKE_EXPORT int fake_reaches(uint64_t pointer, uint64_t bytes) { return fake::Runtime::get().reaches(pointer, bytes); }
FAKE_EXPORT const char *fake_journal() { return fake::Runtime::get().journal.c_str(); }
FAKE_EXPORT void fake_clear_journal() { fake::Runtime::get().journal.clear(); }
