// Memory that processes of one host share, with nothing left behind when any of them is killed.
//
// The usual way has no name: a sealed memfd that peers open through /proc/PID/fd/FD (same user, same
// pid namespace). Where that way is closed, a file in /dev/shm with a random name, mode 0600, that
// its creator unlinks once all have attached. docs/decisions/0002-memfd-windows.md argues.
#pragma once

#include <cstdint>
#include <string>

namespace uccl_ep {

class SharedMemory {
  public:
    // Zeroed memory of `nbytes` bytes, page-aligned. Throws std::runtime_error with the remedy.
    static SharedMemory create(uint64_t nbytes, bool named);
    // Map another process's memory by its handle().
    static SharedMemory attach(const std::string &handle);

    SharedMemory(SharedMemory &&other) noexcept;
    SharedMemory &operator=(SharedMemory &&) = delete;
    SharedMemory(const SharedMemory &) = delete;
    ~SharedMemory();

    uint64_t pointer() const { return reinterpret_cast<uint64_t>(base_); }
    uint64_t nbytes() const { return nbytes_; }
    const std::string &handle() const { return handle_; }
    bool owner() const { return owner_; }
    bool named() const { return named_; }

    // Remove the name of a named memory; no-op for a nameless one.
    void unlink();
    // Unmap. May be called twice; the pointer is invalid afterwards.
    void close();

  private:
    SharedMemory() = default;
    void map(int fd, uint64_t nbytes);

    void *base_ = nullptr;
    uint64_t nbytes_ = 0;
    uint64_t mapped_ = 0;
    int fd_ = -1;  // the owner's: peers open it through /proc
    bool owner_ = false;
    bool named_ = false;
    std::string name_;
    std::string handle_;
};

}  // namespace uccl_ep
