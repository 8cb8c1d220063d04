// Fixed-width integers in every compiler that sees these headers. Run-time compilers (NVRTC, hipRTC)
// and bare device compilation have no <cstdint>.
#pragma once

#if defined(__CUDACC_RTC__) || defined(__HIPCC_RTC__) || defined(UCCL_EP_NO_STANDARD_HEADERS)
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
using size_t = decltype(sizeof(0));
static_assert(sizeof(int64_t) == 8, "this compiler's long is not 64 bits");
#else
#include <cstddef>
#include <cstdint>
#endif
