// A test harness in a page: TEST(name) { CHECK(...); CHECK_EQ(a, b); } and a main() per executable.
#pragma once

#include <cstdint>
#include <exception>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Case {
    const char *name;
    void (*body)();
};
inline std::vector<Case> &cases() {
    static std::vector<Case> list;
    return list;
}
struct Register {
    Register(const char *name, void (*body)()) { cases().push_back(Case{name, body}); }
};

inline void fail(const char *file, int line, const std::string &words) {
    throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + words);
}

template <class A, class B>
void equal(const A &a, const B &b, const char *words, const char *file, int line) {
    if (!(a == b)) {
        std::ostringstream text;
        text << words << ": " << a << " is not " << b;
        fail(file, line, text.str());
    }
}

// A small generator, the same on every machine (xorshift64*).
struct Random {
    uint64_t state;
    explicit Random(uint64_t seed) : state(seed * 2685821657736338717u + 88172645463325252u) {}
    uint64_t next() {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        return state * 2685821657736338717u;
    }
    uint64_t below(uint64_t n) { return (next() >> 16) % n; }
};

// All cases, or those whose name contains `only`.
inline int run_all(const std::string &only) {
    size_t run = 0;
    size_t failed = 0;
    for (const Case &one : cases()) {
        if (std::string(one.name).find(only) == std::string::npos) {
            continue;
        }
        ++run;
        try {
            one.body();
            std::cout << "ok    " << one.name << std::endl;
        } catch (const std::exception &error) {
            ++failed;
            std::cout << "FAIL  " << one.name << "\n      " << error.what() << std::endl;
        }
    }
    std::cout << run - failed << " of " << run << " passed" << std::endl;
    return failed == 0 && run != 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                                    \
    static void test_##name();                                        \
    static const check::Register register_##name(#name, test_##name); \
    static void test_##name()
#define CHECK(condition)                                 \
    do {                                                 \
        if (!(condition)) {                              \
            check::fail(__FILE__, __LINE__, #condition); \
        }                                                \
    } while (false)
#define CHECK_EQ(a, b) check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_THROWS(expression)                                            \
    do {                                                                    \
        bool thrown = false;                                                \
        try {                                                               \
            (void)(expression);                                             \
        } catch (const std::exception &) {                                  \
            thrown = true;                                                  \
        }                                                                   \
        if (!thrown) {                                                      \
            check::fail(__FILE__, __LINE__, #expression " raised nothing"); \
        }                                                                   \
    } while (false)
#define CHECK_MAIN() \
    int main(int argc, char **argv) { return check::run_all(argc > 1 ? argv[1] : ""); }
