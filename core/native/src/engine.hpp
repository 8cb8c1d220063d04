// The engine: one proxy thread per lane between a channel and a transport.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "proxy.hpp"

namespace uccl_ep {

class Engine {
  public:
    // Throws std::invalid_argument, naming what would do.
    explicit Engine(std::shared_ptr<EngineShared> shared);
    ~Engine();
    Engine(const Engine &) = delete;

    void start();
    // Send what was pushed, say goodbye, end the threads. False: they did not end within the limit (a
    // transport that blocks, against its contract); they are left behind and own what they use.
    bool stop(double timeout_s);
    // What kernels did, for the trace that stop() writes.
    void add_to_trace(KernelEvents kernels) { kernels_ = std::move(kernels); }
    bool running() const;
    std::string error() const;
    // After stop() said false: which proxy stayed, and where.
    const std::string &stop_error() const { return stop_error_; }
    const std::vector<std::shared_ptr<Proxy>> &proxies() const { return proxies_; }
    const EngineShared &shared() const { return *shared_; }

  private:
    uint64_t passes() const;

    struct Ends {
        std::mutex mutex;
        std::condition_variable changed;
        uint32_t running = 0;
    };

    std::shared_ptr<EngineShared> shared_;
    std::vector<std::shared_ptr<Proxy>> proxies_;
    std::shared_ptr<Ends> ends_;
    std::vector<std::thread> threads_;
    std::string stop_error_;
    std::string trace_error_;
    KernelEvents kernels_;
};

// Check what every rank must have right, and size what the proxies share.
void prepare(EngineShared &shared);

}  // namespace uccl_ep
