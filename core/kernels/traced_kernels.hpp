// All kernels with what they do recorded (spans.hpp), and the one that compares clocks. A backend compiles this file
// instead of kernels.hpp where kernels are traced.
#pragma once

#define UCCL_EP_TRACE_KERNELS
#include "kernels.hpp"
// After the primitives, which kernels.hpp includes.
#include "clock.hpp"
