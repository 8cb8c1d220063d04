#include "uccl_ep/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace uccl_ep {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = uint64_t{2} << 20;
constexpr char kMemfdName[] = "uccl_ep_window";
constexpr uint64_t kMagic = 0x554343'4c45'505748;  // "UCCLEPWH": a handle of this library

// The handle, and (cookie only) the last page of the file. The cookie comes last in the file, so that
// the caller's memory starts at the file's start, where huge pages can back it.
struct Handle {
    uint64_t magic;
    uint64_t nbytes;
    int32_t pid;
    int32_t fd;
    unsigned char cookie[16];
    char name[40];  // of the file in /dev/shm, empty for a memfd
};
static_assert(sizeof(Handle) == 80);

std::string words(const std::string &what) { return what + ": " + std::strerror(errno); }

uint64_t file_bytes(uint64_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage + kPage; }

void fill_random(void *out, size_t bytes) {
    size_t done = 0;
    while (done < bytes) {
        const ssize_t got = getrandom(static_cast<char *>(out) + done, bytes - done, 0);
        if (got < 0 && errno != EINTR) {
            throw std::runtime_error(words("getrandom"));
        }
        done += got > 0 ? static_cast<size_t>(got) : 0;
    }
}

struct Descriptor {
    int fd = -1;
    ~Descriptor() {
        if (fd >= 0) {
            ::close(fd);
        }
    }
    int release() { return std::exchange(fd, -1); }
};

}  // namespace

void SharedMemory::map(int fd, uint64_t nbytes) {
    const uint64_t total = file_bytes(nbytes);
    void *base = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        throw std::runtime_error(words("cannot map " + std::to_string(nbytes) + " bytes of shared memory"));
    }
    base_ = base;
    nbytes_ = nbytes;
    mapped_ = total;
    if (nbytes >= 2 * kHugePage) {
        (void)madvise(base, nbytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // advice: refusal changes only speed
    }
}

SharedMemory SharedMemory::create(uint64_t nbytes, bool named) {
    if (nbytes == 0) {
        throw std::invalid_argument("shared memory of 0 bytes: ask for at least 1");
    }
    SharedMemory memory;
    memory.owner_ = true;
    memory.named_ = named;
    Handle handle{};
    handle.magic = kMagic;
    handle.nbytes = nbytes;
    handle.pid = static_cast<int32_t>(getpid());
    fill_random(handle.cookie, sizeof(handle.cookie));

    Descriptor file;
    if (named) {
        static const char digits[] = "0123456789abcdef";
        std::string name = "/uccl_ep_";
        for (const unsigned char byte : handle.cookie) {
            name += digits[byte >> 4];
        }
        file.fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (file.fd < 0) {
            throw std::runtime_error(words("cannot create /dev/shm" + name));
        }
        std::memcpy(handle.name, name.c_str(), name.size() + 1);
        memory.name_ = name;
    } else {
        file.fd = memfd_create(kMemfdName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (file.fd < 0) {
            throw std::runtime_error(words("memfd_create failed (a kernel from 3.17 on has it)"));
        }
    }
    if (fchmod(file.fd, 0600) != 0) {
        throw std::runtime_error(words("fchmod of shared memory"));
    }
    if (ftruncate(file.fd, static_cast<off_t>(file_bytes(nbytes))) != 0) {
        throw std::runtime_error(words("cannot size shared memory to " + std::to_string(nbytes) + " bytes"));
    }
    if (named) {
        // /dev/shm may be smaller than the memory (containers: 64 MiB by default). Reserve now: a
        // later SIGBUS could not be reported.
        const int error = posix_fallocate(file.fd, 0, static_cast<off_t>(file_bytes(nbytes)));
        if (error != 0) {
            memory.unlink();
            throw std::runtime_error("/dev/shm has no room for " + std::to_string(nbytes) +
                                     " bytes: " + std::strerror(error) +
                                     "; mount it larger (docker: --shm-size) or share the pid namespace (--pid)");
        }
    } else {
        // No peer may shrink it under our feet (SIGBUS).
        (void)fcntl(file.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    }
    handle.fd = file.fd;
    memory.map(file.fd, nbytes);
    std::memcpy(static_cast<char *>(memory.base_) + memory.mapped_ - kPage, handle.cookie, sizeof(handle.cookie));
    memory.fd_ = file.release();
    memory.handle_.assign(reinterpret_cast<const char *>(&handle), sizeof(handle));
    return memory;
}

SharedMemory SharedMemory::attach(const std::string &bytes) {
    Handle handle;
    if (bytes.size() != sizeof(handle)) {
        throw std::invalid_argument("a shared-memory handle has " + std::to_string(sizeof(handle)) + " bytes, not " +
                                    std::to_string(bytes.size()));
    }
    std::memcpy(&handle, bytes.data(), sizeof(handle));
    handle.name[sizeof(handle.name) - 1] = 0;
    if (handle.magic != kMagic || handle.nbytes == 0) {
        throw std::invalid_argument("these bytes are no shared-memory handle of this library");
    }
    SharedMemory memory;
    memory.named_ = handle.name[0] != 0;
    memory.handle_ = bytes;

    Descriptor file;
    std::string where;
    if (memory.named_) {
        memory.name_ = handle.name;
        where = "/dev/shm" + memory.name_;
        file.fd = shm_open(handle.name, O_RDWR | O_CLOEXEC, 0);
    } else {
        where = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
        // In another pid namespace this names some other process's file. Opening a pipe or a device
        // could block or do harm, so look at the link first.
        char link[64] = {};
        const ssize_t length = readlink(where.c_str(), link, sizeof(link) - 1);
        if (length < 0) {
            throw std::runtime_error(words("cannot see " + where) +
                                     "; the owner must run, as the same user and in the same pid namespace");
        }
        const std::string expected = std::string("/memfd:") + kMemfdName;
        if (std::strncmp(link, expected.c_str(), expected.size()) != 0) {
            throw std::runtime_error(where + " is not the memory meant: the owner is in another pid namespace");
        }
        file.fd = open(where.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
    }
    if (file.fd < 0) {
        throw std::runtime_error(words("cannot open " + where));
    }
    struct stat status{};
    if (fstat(file.fd, &status) != 0 || static_cast<uint64_t>(status.st_size) != file_bytes(handle.nbytes)) {
        throw std::runtime_error(where + " has another size than the memory meant");
    }
    memory.map(file.fd, handle.nbytes);
    const char *cookie = static_cast<const char *>(memory.base_) + memory.mapped_ - kPage;
    if (std::memcmp(cookie, handle.cookie, sizeof(handle.cookie)) != 0) {
        throw std::runtime_error(where + " carries another cookie: it is not the memory meant");
    }
    return memory;
}

SharedMemory::SharedMemory(SharedMemory &&other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      nbytes_(other.nbytes_),
      mapped_(other.mapped_),
      fd_(std::exchange(other.fd_, -1)),
      owner_(std::exchange(other.owner_, false)),
      named_(other.named_),
      name_(std::move(other.name_)),
      handle_(std::move(other.handle_)) {}

SharedMemory::~SharedMemory() { close(); }

void SharedMemory::unlink() {
    if (owner_ && !name_.empty()) {
        shm_unlink(name_.c_str());
        name_.clear();
    }
}

void SharedMemory::close() {
    unlink();
    if (base_ != nullptr) {
        munmap(base_, mapped_);
        base_ = nullptr;
    }
    if (fd_ >= 0) {
        ::close(fd_);
        fd_ = -1;
    }
}

}  // namespace uccl_ep
