// The shipped ring (uccl_ep/ring.hpp, command.hpp) under Relacy, a checker for the C++11 memory model.
//
//   ring_relacy CONFIGURATION MUTATION SEARCH LIMIT
//
// SEARCH is full, bound:N (at most N preemptions) or random; LIMIT is a number of executions (0: none).
// Prints one line "verdict=... executions=..." and, for a failure, Relacy's word for it.
//
// Checked in every execution: each command is popped exactly once, in the order of its tickets, with
// all fields of one and the same command; the staged bytes it names are visible; a slot is refilled and
// staged bytes are overwritten only with a happens-before edge from their last use; nobody waits for ever.
#include <cstring>
#include <iostream>
#include <string>

#include "warp_test.hpp"

namespace {

using namespace ring_model;

using Test = bool (*)(rl::test_params &);

struct Configuration {
    const char *name;
    Test test;
};

const Configuration kConfigurations[] = {
    // groups of words, producers, capacity, commands of each, staging buffers of each, batch
    {"spsc_small", &rl::simulate<RingTest<4, 1, 1, 2, 2, 1>>},
    {"spsc_staging", &rl::simulate<RingTest<4, 1, 2, 3, 1, 1>>},
    {"mpsc_small", &rl::simulate<RingTest<4, 2, 1, 1, 1, 1>>},
    {"mpsc_medium", &rl::simulate<RingTest<4, 2, 2, 2, 2, 1>>},
    {"spsc", &rl::simulate<RingTest<4, 1, 2, 4, 2, 2>>},
    {"mpsc", &rl::simulate<RingTest<4, 2, 2, 3, 2, 1>>},
    // groups of words, capacity, rounds
    {"warp", &rl::simulate<WarpTest<4, 2, 3>>},
    {"warp_small", &rl::simulate<WarpTest<4, 2, 2>>},
};

int usage() {
    std::cerr << "usage: ring_relacy CONFIGURATION MUTATION full|bound:N|random LIMIT\n";
    return 2;
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 5) {
        return usage();
    }
    Test test = nullptr;
    for (const Configuration &configuration : kConfigurations) {
        test = std::strcmp(configuration.name, argv[1]) == 0 ? configuration.test : test;
    }
    bool known = false;
    for (size_t i = 0; i < sizeof kNames / sizeof *kNames; ++i) {
        if (std::strcmp(kNames[i], argv[2]) == 0) {
            mutation = static_cast<Mutation>(i);
            known = true;
        }
    }
    const std::string search = argv[3];
    if (test == nullptr || !known) {
        return usage();
    }
    rl::test_params params;
    params.output_stream = &std::cerr;  // for a failure: the execution, step by step
    params.progress_stream = &std::cerr;
    params.execution_depth_limit = 4000;
    const uint64_t limit = std::stoull(argv[4]);
    params.iteration_count = limit == 0 ? ~rl::iteration_t{0} >> 1 : limit;
    if (search == "full") {
        params.search_type = rl::sched_full;
    } else if (search == "random") {
        params.search_type = rl::sched_random;
    } else if (search.rfind("bound:", 0) == 0) {
        params.search_type = rl::sched_bound;
        params.context_bound = std::stoul(search.substr(6));
    } else {
        return usage();
    }
    const bool passed = test(params);
    std::cout << "verdict=" << (passed ? "pass" : "fail") << " executions=" << params.stop_iteration << " reason='"
              << rl::test_result_str(params.test_result) << "'\n";
    return 0;
}
