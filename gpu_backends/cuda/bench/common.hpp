// What the programs of this folder share: errors that end the program, median times, a table.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        const cudaError_t status_ = (call);                                                                  \
        if (status_ != cudaSuccess) {                                                                        \
            std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
            std::exit(1);                                                                                    \
        }                                                                                                    \
    } while (0)

inline constexpr uint32_t kStagingOfLaunch = 192 << 10;  // as in native/staging.hpp for 9.0

// Median microseconds of `repeats` calls of `run`, each between two events of one stream.
inline double median_us(cudaStream_t stream, int repeats, const std::function<void()> &run) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < repeats + 3; ++i) {
        CHECK(cudaEventRecord(begin, stream));
        run();
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        float milliseconds;
        CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
        if (i >= 3) times.push_back(milliseconds * 1000);  // the first calls warm up
    }
    std::sort(times.begin(), times.end());
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    return times[times.size() / 2];
}
