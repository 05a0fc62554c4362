# SPDX-License-Identifier: Apache-2.0
# Decides about CUDA and enables the language.
#
# In:  DSPARK_CUDA   auto    the nvcc of this machine, else the toolchain from PyPI, else an error
#                    off     no CUDA
#                    pip     the toolchain from PyPI (as seen by Python_EXECUTABLE)
#                    system  the nvcc of this machine
#      DSPARK_ARCHS  the list of architectures in CMake's notation
# Out: DSPARK_WITH_CUDA, and the target dspark_cudart (the static runtime and what it needs)

set(DSPARK_CUDA "$ENV{DSPARK_CUDA}" CACHE STRING "CUDA: auto, off, pip or system")
if(DSPARK_CUDA STREQUAL "")
  set(DSPARK_CUDA auto CACHE STRING "CUDA: auto, off, pip or system" FORCE)
endif()
set_property(CACHE DSPARK_CUDA PROPERTY STRINGS auto off pip system)
if(NOT DSPARK_CUDA MATCHES "^(auto|off|pip|system)$")
  message(FATAL_ERROR "DSPARK_CUDA=${DSPARK_CUDA}: expected auto, off, pip or system")
endif()

# 90a: wgmma and setmaxnreg exist there only in the `a` variant. 100-virtual: PTX for what comes
# after. Cubins of one major version run on later minor ones, so 80 serves 86 and 89.
set(DSPARK_ARCHS "80-real;90a-real;100a-real;120-real;100-virtual" CACHE STRING
    "CUDA architectures, in the notation of CMAKE_CUDA_ARCHITECTURES")

set(DSPARK_WITH_CUDA OFF)
if(DSPARK_CUDA STREQUAL "off")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  if(NOT DSPARK_CUDA STREQUAL "pip")
    find_program(DSPARK_SYSTEM_NVCC NAMES $ENV{CUDACXX} nvcc
      HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
  endif()
  if(DSPARK_SYSTEM_NVCC)
    set(CMAKE_CUDA_COMPILER ${DSPARK_SYSTEM_NVCC})
  elseif(NOT DSPARK_CUDA STREQUAL "system")
    find_package(Python COMPONENTS Interpreter)
    if(Python_EXECUTABLE)
      execute_process(
        COMMAND ${Python_EXECUTABLE} -c
          "import sys; sys.path.insert(0, sys.argv[1]); import toolchain; print(toolchain.pip_cuda_root() or '')"
          ${PROJECT_SOURCE_DIR}/_build
        OUTPUT_VARIABLE DSPARK_PIP_CUDA OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
    if(DSPARK_PIP_CUDA)
      set(CMAKE_CUDA_COMPILER ${DSPARK_PIP_CUDA}/bin/nvcc)
    endif()
  endif()
endif()
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR
    "DSPARK_CUDA=${DSPARK_CUDA}: no CUDA compiler was found.\n"
    "For the CPU backend alone, configure with -DDSPARK_CUDA=off (or set DSPARK_CUDA=off in the "
    "environment). For CUDA, install the CUDA 13.0 toolkit, or its packages from PyPI, which are "
    "listed in _build/toolchain.py.")
endif()

# The PyPI packages have their libraries in lib, and nvcc looks in lib64 only. CMake's module
# FindCUDAToolkit does not know that layout either, so the runtime is looked up here.
get_filename_component(DSPARK_CUDA_ROOT ${CMAKE_CUDA_COMPILER} REALPATH)
get_filename_component(DSPARK_CUDA_ROOT ${DSPARK_CUDA_ROOT} DIRECTORY)
get_filename_component(DSPARK_CUDA_ROOT ${DSPARK_CUDA_ROOT} DIRECTORY)
if(EXISTS ${DSPARK_CUDA_ROOT}/lib/libcudart_static.a)
  set(CMAKE_CUDA_FLAGS_INIT "-L\"${DSPARK_CUDA_ROOT}/lib\"")
endif()

set(CMAKE_CUDA_ARCHITECTURES ${DSPARK_ARCHS})
set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # linked below, by its full path
if(DSPARK_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${DSPARK_CCACHE})
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)

find_library(DSPARK_CUDART_STATIC NAMES cudart_static
  HINTS ${DSPARK_CUDA_ROOT}/lib ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} NO_CACHE REQUIRED)
# The C++ compiler links everything. What CMake read from nvcc's own link line is not needed for
# that, and is wrong when the toolkit's path has a blank in it.
set(CMAKE_CUDA_IMPLICIT_LINK_LIBRARIES "")
set(CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES "")

find_package(Threads REQUIRED)
add_library(dspark_cudart INTERFACE)
# Static: the module then imports on a machine without any CUDA library, and lives beside the
# runtime of whatever torch was built with.
target_link_libraries(dspark_cudart INTERFACE
  $<BUILD_INTERFACE:${DSPARK_CUDART_STATIC}> Threads::Threads ${CMAKE_DL_LIBS} rt)
set(DSPARK_WITH_CUDA ON)
