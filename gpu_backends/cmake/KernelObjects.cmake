# Objects of the GPU kernels as package data. Always optional: without a compiler the manifest is empty
# and the backend compiles at first use. An editable install skips it, since its sources change.
set(UCCL_EP_KERNEL_OBJECTS "AUTO" CACHE STRING "Compile kernel objects into the package: AUTO, ON or OFF")

# Further arguments: the architectures to compile for, where they are not all that the backend lists.
function(uccl_ep_kernel_objects package folder)
  if(NOT SKBUILD OR UCCL_EP_KERNEL_OBJECTS STREQUAL "OFF")
    return()
  endif()
  if(UCCL_EP_KERNEL_OBJECTS STREQUAL "AUTO" AND SKBUILD_STATE STREQUAL "editable")
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/native/*.hpp ${CMAKE_SOURCE_DIR}/core/kernels/*.hpp
       ${CMAKE_SOURCE_DIR}/core/native/include/uccl_ep/*.hpp ${folder}/${package}/*.py)
  set(objects ${CMAKE_CURRENT_BINARY_DIR}/objects)
  if(UCCL_EP_KERNEL_OBJECTS STREQUAL "AUTO")
    set(optional --optional)
  endif()
  add_custom_command(
    OUTPUT ${objects}/manifest.json
    COMMAND ${CMAKE_COMMAND} -E env "PYTHONPATH=${CMAKE_SOURCE_DIR}/core:${folder}" ${Python_EXECUTABLE} -m
            uccl_ep_core.device_runtime.build_objects ${optional} ${package} ${objects} ${ARGN}
    DEPENDS ${sources}
    COMMENT "Kernel objects of ${package}"
    VERBATIM)
  add_custom_target(${package}_objects ALL DEPENDS ${objects}/manifest.json)
  install(DIRECTORY ${objects}/ DESTINATION ${package}/objects)
endfunction()
