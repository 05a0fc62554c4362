// SPDX-License-Identifier: Apache-2.0
//
// What an engine builder writes: CPU results, the errors' texts, and what a device call answers.
#include <dspark/dspark.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

int failures = 0;

void expect(bool condition, const char* what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what);
  ++failures;
}

void check_confidence() {
  const float logit[] = {-2.0f, 1.25f};  // [1, 2]
  float conditional[2] = {}, survival[2] = {};
  int32_t status = -1;
  dspark_confidence_params p{};
  p.struct_size = sizeof p;
  p.num_requests = 1;
  p.gamma = 2;
  p.logit = logit;
  p.logit_stride = 2;
  p.conditional = conditional;
  p.survival = survival;
  p.status = &status;
  size_t bytes = 1;
  dspark_status answer = dspark_confidence_workspace(DSPARK_CPU, &p, &bytes);
  expect(answer.code == DSPARK_OK, answer.message);
  std::vector<unsigned char> scratch(bytes + 256);
  answer = dspark_confidence(DSPARK_CPU, &p, {scratch.data(), bytes}, nullptr);
  expect(answer.code == DSPARK_OK, answer.message);
  expect(status == 0, "status is 0");
  expect(std::fabs(survival[1] - 0.119203f * 0.777300f) < 1e-6f, "survival of two slots");

  p.gamma = 99;
  p.status = nullptr;
  answer = dspark_confidence(DSPARK_CPU, &p, {}, nullptr);
  expect(answer.code == DSPARK_INVALID_ARGUMENT, "two wrong arguments are refused");
  expect(std::strstr(answer.message, "gamma") != nullptr, "the message names gamma");
  expect(std::strstr(answer.message, "status") != nullptr, "the message names status");

  p.gamma = 2;
  p.status = &status;
  answer = dspark_confidence(DSPARK_CUDA, &p, {}, nullptr);
  dspark_cuda_info cuda{};
  cuda.struct_size = sizeof cuda;
  dspark_cuda_query(&cuda);
  if (cuda.usable == 0) {
    const int32_t code = cuda.compiled != 0 ? DSPARK_CUDA_ERROR : DSPARK_UNSUPPORTED;
    expect(answer.code == code, "a kernel without a device answers with a status");
  }
}

void check_device(bool with_cuda) {
  dspark_cuda_info info{};
  expect(dspark_cuda_query(&info).code == DSPARK_INVALID_ARGUMENT, "a zero struct_size is refused");
  expect(dspark_cuda_query(nullptr).code == DSPARK_INVALID_ARGUMENT, "NULL is refused");
  info.struct_size = sizeof info;
  expect(dspark_cuda_query(&info).code == DSPARK_OK, "the query never fails");
  expect((info.compiled != 0) == with_cuda, "built as find_package says");
  expect((info.usable == 0) == (info.reason[0] != '\0'), "a reason exactly when it is not usable");
  std::printf("cuda: %s\n", info.usable != 0 ? "usable" : info.reason);

  const dspark_status probe = dspark_cuda_probe(0);
  const int expected = !with_cuda         ? DSPARK_UNSUPPORTED
                       : info.usable != 0 ? DSPARK_OK
                                          : DSPARK_CUDA_ERROR;
  expect(probe.code == expected, probe.message);
  expect((probe.code == DSPARK_OK) == (probe.message[0] == '\0'), "a text for every failure");
}

}  // namespace

int main(int argc, char** argv) {
  check_confidence();
  check_device(argc > 1 && std::strcmp(argv[1], "cuda") == 0);
  expect(std::strcmp(dspark_status_name(DSPARK_BAD_PAGE), "BAD_PAGE") == 0, "names of bits");
  std::printf("dspark %s, %s: %d failures\n", dspark_version(), dspark_cpu_level(), failures);
  return failures == 0 ? 0 : 1;
}
