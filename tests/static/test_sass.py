# SPDX-License-Identifier: Apache-2.0
"""The budget check can fail: kernels with planted faults, and every rule on its own."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
import sass
import toolchain

PLANTED = """
struct Wide { unsigned x, y, z, w; };
struct __align__(16) Aligned { unsigned x, y, z, w; };
namespace planted { namespace {
template <class T>
__global__ void copy(const T* in, T* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i];
}
__global__ void indexed(const int* at, float* out) {
  float table[32];
  for (int i = 0; i < 32; ++i) table[i] = out[i];
  for (int i = 0; i < 32; ++i) table[at[i] & 31] *= out[i];
  for (int i = 0; i < 32; ++i) out[threadIdx.x + i] = table[i];
}
__global__ void shared_sum(float* out) {
  __shared__ float t[64];
  t[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = t[63 - threadIdx.x];
}
}
void call(Wide* a, Aligned* b, int* c, float* d) {
  copy<<<1, 32>>>(a, a + 1, 1);
  copy<<<1, 32>>>(b, b + 1, 1);
  indexed<<<1, 32>>>(c, d);
  shared_sum<<<1, 64>>>(d);
}
}
"""
GOOD = sass.Kernel("a::kernel", "sm_90a", 40, 0, 0, 0, 100, {"LDG.128": 2})
BUDGET = sass.Budget("a::kernel", "*", 40, uses=("LDG.128",))


@pytest.fixture(scope="module")
def planted(disassembler: None, tmp_path_factory: pytest.TempPathFactory) -> list[sass.Kernel]:
    """Kernels of known faults, compiled for one architecture."""
    nvcc = toolchain.system_nvcc() or (
        toolchain.pip_cuda_root() and str(Path(toolchain.pip_cuda_root(), "bin", "nvcc"))
    )
    if not nvcc:
        pytest.skip("no CUDA compiler on this machine")
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.cu").write_text(PLANTED, "utf-8")
    target = ["-gencode=arch=compute_80,code=sm_80", "-c", "-o", "planted.o"]
    subprocess.run([nvcc, *target, "planted.cu"], cwd=folder, check=True, capture_output=True)
    return sass.read([folder / "planted.o"])


def test_machine_code_is_read(planted: list[sass.Kernel]) -> None:
    found = {kernel.name: kernel for kernel in planted}
    assert set(found) == {
        "planted::copy<Aligned>",
        "planted::copy<Wide>",
        "planted::indexed",
        "planted::shared_sum",
    }
    assert {kernel.arch for kernel in planted} == {"sm_80"}
    assert found["planted::copy<Aligned>"].uses["LDG.128"] == 1
    assert found["planted::copy<Wide>"].uses["LDG.128"] == 0
    assert found["planted::copy<Wide>"].uses["LDG"] == 4
    assert found["planted::indexed"].spills > 0
    assert found["planted::indexed"].stack + found["planted::indexed"].local >= 128
    assert found["planted::shared_sum"].shared == 256
    assert all(k.registers > 2 and k.instructions > 8 for k in planted)


def test_planted_faults_are_reported(planted: list[sass.Kernel]) -> None:
    budgets = [
        sass.Budget("planted::copy<*>", "sm_80", 32, uses=("LDG.128",)),
        sass.Budget("planted::indexed", "*", 255),
        sass.Budget("planted::shared_sum", "*", 1),
    ]
    text = "\n".join(sass.check(planted, budgets))
    assert "planted::copy<Wide> sm_80: no LDG.128" in text
    assert "copy<Aligned>" not in text
    assert "planted::indexed sm_80: " in text and "accesses to local memory" in text
    assert "registers, budget 1" in text
    assert "256 bytes of shared memory, budget 0" in text
    assert sass.table(planted, budgets).count("\n") == len(planted)


def test_what_fits_passes() -> None:
    assert sass.check([GOOD], [BUDGET]) == []


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ({"registers": 41}, "41 registers, budget 40"),
        ({"stack": 8}, "8 bytes of stack or local memory"),
        ({"local": 8}, "8 bytes of stack or local memory"),
        ({"shared": 16}, "16 bytes of shared memory, budget 0"),
        ({"uses": {"LDG": 2}}, "no LDG.128"),
        ({"uses": {"LDG.128": 1, "STL": 1}}, "1 accesses to local memory"),
        (
            {"uses": {"LDG.128": 1, "HGMMA": 12, "WARPGROUP.DEPBAR": 12}},
            "12 waits for 12 wgmma: they run one at a time",
        ),
        ({"name": "a::other"}, "no budget"),
    ],
    ids=["registers", "stack", "local", "shared", "narrow", "spill", "serial", "unknown"],
)
def test_each_rule(kernel: dict[str, object], text: str) -> None:
    problems = sass.check([GOOD, dataclasses.replace(GOOD, **kernel)], [BUDGET])
    assert len(problems) == 1
    assert problems[0].endswith(text)


def test_a_budget_without_a_kernel_is_reported_where_its_architecture_was_built() -> None:
    stale = sass.Budget("a::gone", "sm_90*", 40)
    elsewhere = sass.Budget("a::later", "sm_100*", 40)
    problems = sass.check([GOOD], [BUDGET, stale, elsewhere])
    assert problems == ["a::gone sm_90*: a budget that no kernel needs"]


@pytest.mark.parametrize(
    ("demangled", "name"),
    [
        ("void a::(anonymous namespace)::k<(int)8>(a::P const*, int)", "a::k<(int)8>"),
        ("a::k(void (*)(int))", "a::k"),
        ("void a::k<a::S<(int)8> >(int)", "a::k<a::S<(int)8>>"),
        ("plain", "plain"),
    ],
)
def test_names_lose_their_parameters(demangled: str, name: str) -> None:
    assert sass.plain_name(demangled) == name
