// The table of host kernels.
#pragma once

#include <cstddef>

namespace uccl_ep::host {

struct Kernel {
    const char *name;
    size_t parameter_bytes;  // size of its parameter struct, checked at launch
    void (*run)(const void *parameters);
};

// Null: no kernel of that name.
const Kernel *find_kernel(const char *name);

}  // namespace uccl_ep::host
