// SPDX-License-Identifier: Apache-2.0
//
// The headers are C11, and a program without any C++ of its own links the library.
#include <dspark/dspark.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  const float probability[6] = {0.5f, 0.5f, 0.5f, 2.0f, -1.0f, 0.5f};  // [2, 3]
  const float expected[6] = {0.5f, 0.25f, 0.125f, 1.0f, 0.0f, 0.0f};
  float conditional[6], survival[6];
  int32_t status[2];
  dspark_confidence_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.num_requests = 2;
  p.gamma = 3;
  p.probability = probability;
  p.probability_stride = 3;
  p.conditional = conditional;
  p.survival = survival;
  p.status = status;
  const dspark_workspace none = {NULL, 0};
  const dspark_status answer = dspark_confidence(DSPARK_CPU, &p, none, NULL);
  if (answer.code != DSPARK_OK) {
    printf("%s:%d: %s\n", answer.file, answer.line, answer.message);
    return 1;
  }
  for (int i = 0; i < 6; ++i) {
    if (survival[i] != expected[i]) {
      printf("survival[%d]: got %g, expected %g\n", i, survival[i], expected[i]);
      return 1;
    }
  }
  printf("dspark %s from C\n", dspark_version());
  return 0;
}
