// A run-time compiler with the usual interface, under the prefix that PREFIX gives and with CODE for
// machine code. It "compiles" to the file named by $FAKE_COMPILER_IMAGE, and misbehaves as $FAKE_COMPILER_MODE
// says: refuse, crash, hang.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define FUNCTION(name) extern "C" __attribute__((visibility("default"))) int JOIN(PREFIX, name)

struct Program {
    std::string source, log, image;
};

static std::string mode() {
    const char *value = std::getenv("FAKE_COMPILER_MODE");
    return value == nullptr ? "" : value;
}

extern "C" __attribute__((visibility("default"))) const char *JOIN(PREFIX, GetErrorString)(int status) {
    return status == 6 ? "compilation failed" : "another failure";
}
FUNCTION(CreateProgram)(Program **out, const char *source, const char *, int count, const char *const *,
                        const char *const *names) {
    *out = new Program{source, "", ""};
    for (int i = 0; i < count; ++i) (*out)->log += std::string("header ") + names[i] + "\n";
    return 0;
}
FUNCTION(CompileProgram)(Program *program, int count, const char *const *options) {
    if (mode() == "crash") std::abort();
    if (mode() == "hang") pause();
    for (int i = 0; i < count; ++i) program->log += std::string("option ") + options[i] + "\n";
    if (mode() == "refuse") {
        program->log += "line 1: error: refused by request\n";
        return 6;
    }
    const char *counter = std::getenv("FAKE_COMPILER_COUNTER");
    if (counter != nullptr) {
        std::FILE *file = std::fopen(counter, "a");
        std::fputs("compiled\n", file);
        std::fclose(file);
        usleep(200000);  // long enough that ranks which start together meet in here if nothing keeps them apart
    }
    std::FILE *file = std::fopen(std::getenv("FAKE_COMPILER_IMAGE"), "rb");
    if (file == nullptr) return 6;
    char buffer[4096];
    for (size_t got; (got = std::fread(buffer, 1, sizeof(buffer), file)) != 0;) program->image.append(buffer, got);
    std::fclose(file);
    return 0;
}
FUNCTION(GetProgramLogSize)(Program *program, size_t *size) { return *size = program->log.size() + 1, 0; }
FUNCTION(GetProgramLog)(Program *program, char *out) {
    std::memcpy(out, program->log.c_str(), program->log.size() + 1);
    return 0;
}
FUNCTION(JOIN(Get, JOIN(CODE, Size)))(Program *program, size_t *size) { return *size = program->image.size(), 0; }
FUNCTION(JOIN(Get, CODE))(Program *program, char *out) {
    std::memcpy(out, program->image.data(), program->image.size());
    return 0;
}
