# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` gives an engine builder: the headers, the static library, a CMake package
# (find_package(dspark), target dspark::dspark) and a pkg-config file. Component `dev`; the Python
# extension is the component `python`.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# A linker driven by a C compiler does not add the C++ runtime by itself.
foreach(library stdc++ c++)
  if(library IN_LIST CMAKE_CXX_IMPLICIT_LINK_LIBRARIES)
    target_link_libraries(dspark INTERFACE $<INSTALL_INTERFACE:${library}>)
    string(APPEND DSPARK_PC_LIBS " -l${library}")
  endif()
endforeach()
if(OpenMP_CXX_FOUND)
  string(APPEND DSPARK_PC_LIBS " ${OpenMP_CXX_FLAGS}")
endif()
if(DSPARK_WITH_CUDA)
  get_filename_component(DSPARK_CUDART_FOLDER ${DSPARK_CUDART_STATIC} DIRECTORY)
  string(APPEND DSPARK_PC_LIBS " -L\"${DSPARK_CUDART_FOLDER}\" -lcudart_static -lpthread -ldl -lrt")
endif()
string(APPEND DSPARK_PC_LIBS " -lm")
target_link_libraries(dspark INTERFACE $<INSTALL_INTERFACE:m>)

set(DSPARK_CMAKE_FOLDER ${CMAKE_INSTALL_LIBDIR}/cmake/dspark)
install(TARGETS dspark EXPORT dsparkTargets COMPONENT dev
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY csrc/include/dspark DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT dev
  FILES_MATCHING PATTERN "*.h")
install(EXPORT dsparkTargets NAMESPACE dspark:: DESTINATION ${DSPARK_CMAKE_FOLDER} COMPONENT dev)

configure_package_config_file(cmake/dsparkConfig.cmake.in
  ${PROJECT_BINARY_DIR}/cmake/dsparkConfig.cmake INSTALL_DESTINATION ${DSPARK_CMAKE_FOLDER})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/dsparkConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cmake/dsparkConfig.cmake
  ${PROJECT_BINARY_DIR}/cmake/dsparkConfigVersion.cmake
  DESTINATION ${DSPARK_CMAKE_FOLDER} COMPONENT dev)

configure_file(cmake/dspark.pc.in ${PROJECT_BINARY_DIR}/cmake/dspark.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cmake/dspark.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT dev)
