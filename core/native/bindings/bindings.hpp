// The parts of uccl_ep_core._native, a function each.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "../src/engine_types.hpp"

namespace uccl_ep {

void bind_layout(pybind11::module_ &module);
void bind_memory(pybind11::module_ &module);
void bind_engine(pybind11::module_ &module);
void bind_python_ops(pybind11::module_ &module);
void bind_benchmarks(pybind11::module_ &module);
void bind_kernels(pybind11::module_ &module);
void bind_tracing(pybind11::module_ &module);

// Throws std::invalid_argument, naming what would do.
PlanKind plan_kind(const std::string &name);

}  // namespace uccl_ep
