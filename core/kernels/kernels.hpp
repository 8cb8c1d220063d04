// All kernels. A backend compiles this one file behind its primitives.hpp.
#pragma once

#include "primitives.hpp"
// The primitives come first: they define UCCL_EP_DEVICE for every header below.
#include "barrier.hpp"
#include "combine.hpp"
#include "dispatch.hpp"
#include "expand.hpp"
#include "ll_combine.hpp"
#include "ll_direct_combine.hpp"
#include "ll_direct_dispatch.hpp"
#include "ll_dispatch.hpp"
#include "notify.hpp"
#include "routing.hpp"
#include "term_order.hpp"
