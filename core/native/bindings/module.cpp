#include "bindings.hpp"

PYBIND11_MODULE(_native, module) {
    module.doc() = "Native core of uccl_ep: layout, shared memory, channel, engine, verdicts.";
    uccl_ep::bind_layout(module);
    uccl_ep::bind_memory(module);
    uccl_ep::bind_engine(module);
    uccl_ep::bind_python_ops(module);
    uccl_ep::bind_benchmarks(module);
    uccl_ep::bind_kernels(module);
    uccl_ep::bind_tracing(module);
}
