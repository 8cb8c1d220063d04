#include "bindings.hpp"

namespace py = pybind11;

namespace uccl_ep {

void bind_engine(py::module_ &module) { (void)module; }

}  // namespace uccl_ep
