// Shared memory: reach, refusal, and nothing left behind.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "check.hpp"
#include "uccl_ep/shared_memory.hpp"

using namespace uccl_ep;

TEST(another_process_maps_the_same_bytes) {
    for (const bool named : {false, true}) {
        SharedMemory memory = SharedMemory::create(10'000'000, named);
        CHECK_EQ(memory.pointer() % 4096, 0u);
        auto *bytes = reinterpret_cast<volatile unsigned char *>(memory.pointer());
        CHECK_EQ(static_cast<int>(bytes[9'999'999]), 0);
        bytes[0] = 42;
        const pid_t pid = fork();
        if (pid == 0) {
            SharedMemory other = SharedMemory::attach(memory.handle());
            auto *seen = reinterpret_cast<volatile unsigned char *>(other.pointer());
            const bool right = seen[0] == 42;
            seen[9'999'999] = 7;
            _exit(right ? 0 : 1);
        }
        int status = -1;
        waitpid(pid, &status, 0);
        CHECK_EQ(status, 0);
        CHECK_EQ(static_cast<int>(bytes[9'999'999]), 7);
    }
}

TEST(a_forged_or_stale_handle_is_refused) {
    SharedMemory memory = SharedMemory::create(4096, false);
    const std::string handle = memory.handle();
    for (size_t at = 0; at < 40; ++at) {  // magic, size, pid, descriptor, cookie
        std::string forged = handle;
        forged[at] = static_cast<char>(forged[at] ^ 1);
        CHECK_THROWS(SharedMemory::attach(forged));
    }
    CHECK_THROWS(SharedMemory::attach("short"));
    memory.close();
    memory.close();
    CHECK_EQ(memory.pointer(), 0u);
    CHECK_THROWS(SharedMemory::attach(handle));
    CHECK_THROWS(SharedMemory::create(0, false));
}

TEST(a_peer_cannot_shrink_it) {
    SharedMemory memory = SharedMemory::create(8192, false);
    int32_t fd = -1;
    std::memcpy(&fd, memory.handle().data() + 20, sizeof(fd));
    struct stat status{};
    CHECK_EQ(fstat(fd, &status), 0);
    CHECK_EQ(status.st_mode & 0777u, 0600u);
    CHECK(ftruncate(fd, 0) != 0);
}

TEST(a_name_goes_with_unlink) {
    SharedMemory memory = SharedMemory::create(4096, true);
    const std::string path = std::string("/dev/shm") + (memory.handle().data() + 40);
    CHECK_EQ(access(path.c_str(), F_OK), 0);
    SharedMemory other = SharedMemory::attach(memory.handle());
    memory.unlink();
    CHECK(access(path.c_str(), F_OK) != 0);
    *reinterpret_cast<char *>(memory.pointer()) = 5;
    CHECK_EQ(static_cast<int>(*reinterpret_cast<char *>(other.pointer())), 5);
}

CHECK_MAIN()
