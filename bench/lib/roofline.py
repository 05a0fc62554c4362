# SPDX-License-Identifier: Apache-2.0
"""Floors and predictions of the kernels on a GPU: every constant named, every formula visible.

    python bench/lib/roofline.py        the tables for an H200

A prediction is a model, not a measurement. ``bench/constants`` measures what ``Device`` assumes;
give :func:`loop` another ``Device`` to see what a measured constant changes.

The loop over gamma tokens of R requests reads per step the projection W2 (V r elements, whatever R)
and one row of base logits U a request, and ends with one exchange of the winner through the whole
grid. W2 can stay on the chip between steps, U cannot: it is another row at each step.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "H200",
    "Device",
    "Resident",
    "Terms",
    "built",
    "floor",
    "loop",
    "resident",
    "schedule",
    "step",
    "stock",
    "support_floor",
    "verification",
    "verification_floor",
    "visited",
]


@dataclass(frozen=True)
class Device:
    """Constants of one GPU, in bytes, seconds and operations per second.

    ``measured`` and ``data sheet`` say where a default comes from; ``assumed`` waits for a
    measurement.
    """

    multiprocessors: int = 132
    clock: float = 1.755e9  # data sheet
    memory: float = 4.3e12  # bytes/s; measured with a copy, read and written bytes counted
    tensor: float = 790e12  # bf16 multiply-adds x 2; measured on random data. 8 bits: twice that
    l2: float = 6.0e12  # bytes/s from L2 to the multiprocessors; assumed
    l2_resident: float = 44e6  # bytes of its 60 MB that stay when a set is read again; assumed
    shared: float = 0.8 * 33e12  # bytes/s of all shared memories; data sheet x assumed efficiency
    shared_for_w2: float = 200e3  # bytes of a multiprocessor's 227 KB that can hold W2; assumed
    registers_for_w2: float = 128e3  # bytes of its 256 KB; assumed, and only for few requests
    special: float = 16.0  # exp2 or log2 a clock and multiprocessor; data sheet
    lanes: float = 128.0  # fp32 operations a clock and multiprocessor; data sheet
    exchange: float = 1.2e-6  # one grid-wide maximum, and W1's row from L2; assumed
    cluster: float = 0.6e-6  # a reduction over the CTAs of a cluster; assumed
    latency: float = 0.8e-6  # the first bytes of a pass out of memory, or out of L2 twice; assumed
    launch: float = 1.0e-6  # a kernel node of a graph that does next to nothing; assumed
    kernel: float = 1.5e-6  # the shortest kernel of a graph that does something; assumed


H200 = Device()
SCHEDULE_THREADS = 512
SCHEDULE_STEP = 30e-9  # a barrier of the block and a look into shared memory; assumed
SCHEDULE_PASS_STEPS = 5  # histogram, two levels of a scan, scatter
SCHEDULE_OTHER_STEPS = 10
SCHEDULE_SORT_CYCLES = 16.0  # a candidate and thread in one pass; assumed
SCHEDULE_PRICE_CYCLES = 60.0  # a division in float64, and the layout; assumed
SCHEDULE_LOAD = 0.8e-6  # the first answer of the memory; assumed
FEW_REQUESTS = 64  # up to here the accumulators leave registers for W2
MIN_TENSOR_REQUESTS = 8  # below, the tensor cores are padded: W2's bytes decide, not arithmetic
OPERATIONS = 12  # fp32 operations a logit in the epilogue
SPECIALS = 1  # exponentials a logit
# What was built, for bf16 W2 on sm_90a: boxes of 128 ids by 64 columns that a multiprocessor keeps,
# by requests (csrc/cuda/markov_loop/config_wgmma.h), and its epilogue, whose exponential is the
# arithmetic that all backends share.
BOX = 16384
BOXES = ((1, 13), (16, 12), (32, 10), (64, 9), (128, 7))
BUILT_OPERATIONS = 35
BUILT_REQUESTS = 128  # of one launch
OVERLAP_REQUESTS = 33  # from here on the epilogue runs beside the products of the next tile
# Verification as it was built (csrc/cuda/rejection_sampler): instructions a logit and lane of the
# pass over a row of bf16, read off the machine code for sm_90a, and what a temperature adds.
VERIFY_OPERATIONS = 23
VERIFY_OPERATIONS_T = 16
VERIFY_RESIDENT = 2  # CTAs of a multiprocessor
VERIFY_TEAM = 8  # CTAs of a request at most
# What one thread decides of a row while the others wait: an exponential, a coin, two
# log-probabilities in float64, and two barriers; assumed, about 400 cycles.
VERIFY_DECISION = 0.25e-6
STOCK_KERNELS = 9  # of a step of the composed chain: embed, product, add, noise, argmax, copies
STOCK_PASSES = 4  # over [R, V] of 16 bits: bias written, U read, sum written, sum read


@dataclass(frozen=True)
class Resident:
    """Where the bytes of W2 are when a step begins, from the second step on."""

    chip: float
    l2: float
    memory: float


@dataclass(frozen=True)
class Terms:
    """Seconds that one step needs of each resource; the largest decides."""

    memory: float
    l2: float
    shared: float
    tensor: float
    special: float
    alu: float

    @property
    def bound(self) -> float:
        """The largest term."""
        return max(self.memory, self.l2, self.shared, self.tensor, self.special, self.alu)

    @property
    def w2_resident(self) -> float:
        """What W2 alone would need; set apart from the logits by :func:`step` with no U."""
        return max(self.memory, self.l2, self.shared)


def w2_bytes(vocab: int, rank: int = 256, width: int = 2) -> float:
    """Bytes of W2 [V, r]."""
    return float(vocab * rank * width)


def resident(
    requests: int, vocab: int, rank: int = 256, width: int = 2, device: Device = H200
) -> Resident:
    """Return how W2 is spread: shared memory and registers first, then L2, the rest in memory."""
    total = w2_bytes(vocab, rank, width)
    registers = device.registers_for_w2 if requests <= FEW_REQUESTS else 0.0
    chip = min(total, device.multiprocessors * (device.shared_for_w2 + registers))
    l2 = min(total - chip, device.l2_resident)
    return Resident(chip, l2, total - chip - l2)


def step(
    requests: int,
    vocab: int,
    *,
    rank: int = 256,
    width: int = 2,
    base_width: int = 2,
    written: int = 0,
    first: bool = False,
    device: Device = H200,
) -> Terms:
    """Return the terms of one step.

    ``width`` and ``base_width`` are bytes of an element of W2 and U, ``written`` the bytes stored
    per logit; at the ``first`` step all of W2 comes from memory.
    """
    w2 = resident(requests, vocab, rank, width, device)
    if first:
        w2 = Resident(0.0, 0.0, w2_bytes(vocab, rank, width))
    logits = requests * vocab
    u = float(logits * (base_width + written))
    cycles = device.multiprocessors * device.clock
    products = 2.0 * logits * rank / (device.tensor * (2 if width == 1 else 1))
    return Terms(
        memory=(w2.memory + u) / device.memory,
        l2=(w2.l2 + u) / device.l2,
        shared=w2.chip / device.shared,
        tensor=products if requests >= MIN_TENSOR_REQUESTS else 0.0,
        special=SPECIALS * logits / (device.special * cycles),
        alu=OPERATIONS * logits / (device.lanes * cycles),
    )


def loop(
    requests: int,
    vocab: int,
    *,
    gamma: int = 7,
    rank: int = 256,
    width: int = 2,
    base_width: int = 2,
    written: int = 0,
    device: Device = H200,
) -> float:
    """Return the seconds of the design: every step its bound and one exchange."""

    def seconds(first: bool) -> float:
        terms = step(
            requests,
            vocab,
            rank=rank,
            width=width,
            base_width=base_width,
            written=written,
            first=first,
            device=device,
        )
        return terms.bound + device.exchange

    return seconds(True) + (gamma - 1) * seconds(False)


def built(
    requests: int, vocab: int, *, gamma: int = 7, rank: int = 256, device: Device = H200
) -> float:
    """Return the seconds that the kernel in the tree should take, bf16 W2 on sm_90a.

    It differs from the design of :func:`loop` in two ways: registers hold no W2, and below
    ``OVERLAP_REQUESTS`` the epilogue runs beside the stream of W2 only, not beside the products.
    """
    if requests > BUILT_REQUESTS:
        launches = -(-requests // BUILT_REQUESTS)
        part = -(-requests // launches)
        return launches * built(part, vocab, gamma=gamma, rank=rank, device=device)
    kept = next(boxes for most, boxes in BOXES if requests <= most)
    segments = -(-vocab // 128)
    owned = -(-segments // device.multiprocessors) * (rank // 64)
    streamed = max(owned - kept, 0) * BOX * device.multiprocessors
    shared = owned * BOX * device.multiprocessors / device.shared
    l2 = min(streamed, device.l2_resident)
    logits = requests * vocab
    products = 2.0 * logits * rank / device.tensor
    cycles = device.multiprocessors * device.clock
    epilogue = BUILT_OPERATIONS * logits / (device.lanes * cycles)
    overlaps = requests >= OVERLAP_REQUESTS
    work = max(products, epilogue) if overlaps else products + epilogue
    u = 2.0 * logits

    def seconds(from_l2: float, from_memory: float) -> float:
        read = max((from_l2 + from_memory + u) / device.l2, (from_memory + u) / device.memory)
        return max(read, work, shared) + device.exchange

    first = seconds(0.0, w2_bytes(vocab, rank))
    return first + (gamma - 1) * seconds(l2, streamed - l2)


def floor(
    requests: int,
    vocab: int,
    *,
    gamma: int = 7,
    rank: int = 256,
    width: int = 2,
    base_width: int = 2,
    device: Device = H200,
) -> float:
    """Return the seconds below which nothing can be: W2 and U once from memory, or the products."""
    traffic = w2_bytes(vocab, rank, width) + gamma * requests * vocab * base_width
    products = 2.0 * gamma * requests * vocab * rank
    return max(traffic / device.memory, products / (device.tensor * (2 if width == 1 else 1)))


def support_floor(
    requests: int, vocab: int, *, gamma: int = 7, base_width: int = 2, device: Device = H200
) -> float:
    """Return the seconds that a law over the M largest U needs: U once; W2 is hardly touched."""
    return gamma * requests * vocab * base_width / device.memory


def verification_floor(rows: int, vocab: int, width: int = 2, device: Device = H200) -> float:
    """Return the seconds that reading rows of target logits once needs: verification's floor."""
    return rows * vocab * width / device.memory


def visited(gamma: int = 7, accepted: float = 0.75) -> float:
    """Return the rows that rule ``token`` visits on average when drafts are accepted so often."""
    return (1 - accepted ** (gamma + 1)) / (1 - accepted)


def verification(
    requests: int,
    vocab: int,
    *,
    gamma: int = 7,
    rows: float | None = None,
    width: int = 2,
    sampled: bool = False,
    device: Device = H200,
) -> float:
    """Return the seconds that the verification in the tree should take, without a stored law.

    ``rows`` a request are visited (default: :func:`visited`); ``sampled`` is a temperature other
    than 1. Few requests have all of their rows scanned at once, and then decided by a second launch
    that starts early; others walk row by row, with two reductions over the team and a decision a
    row, of which the other CTA of a multiprocessor hides half.
    """
    every = requests * (gamma + 1)
    places = VERIFY_RESIDENT * device.multiprocessors
    at_once = 4 * every <= places
    count = every if at_once else requests
    team = 1
    while team < VERIFY_TEAM and 2 * team * count <= places:
        team *= 2
    lanes = min(count * team, device.multiprocessors) * device.lanes * device.clock
    seen = visited(gamma) if rows is None else rows
    scanned = every if at_once else requests * seen
    operations = VERIFY_OPERATIONS + (VERIFY_OPERATIONS_T if sampled else 0)
    pass_over = max(
        verification_floor(scanned, vocab, width, device),
        scanned * vocab * operations / lanes,
    )
    # Keys over the team; out of L2 the segments' numbers and the winner's logits, into it results.
    draw = device.cluster + 1.5 * device.latency
    if at_once:  # the edge between the launches is half a launch; records come out of L2 together
        scan = device.launch + device.latency + pass_over + 2 * device.cluster
        decide = device.launch / 2 + device.latency / 2 + seen * VERIFY_DECISION
        return scan + decide + draw
    row = (2 * device.cluster + VERIFY_DECISION) / VERIFY_RESIDENT
    return device.launch + device.latency + pass_over + seen * row + draw


def stock(
    requests: int, vocab: int, *, gamma: int = 7, rank: int = 256, device: Device = H200
) -> float:
    """Return the seconds of a chain of kernels in a graph, as engines write the loop.

    A W2 larger than L2 is read from memory at every step: passes over more than a cache holds
    evict what the next pass would have found.
    """
    w2 = w2_bytes(vocab, rank)
    cached = w2 if w2 < device.l2_resident else 0.0
    traffic = (w2 - cached) + requests * vocab * 2 * STOCK_PASSES
    read = traffic / device.memory + cached / device.l2
    products = 2.0 * requests * vocab * rank / device.tensor
    busy = max(read, products) + STOCK_KERNELS * device.launch
    return gamma * max(busy, STOCK_KERNELS * device.kernel)


def schedule(requests: int, gamma: int, two_phase: bool = False, *, device: Device = H200) -> float:
    """Return the seconds of the prefix scheduler: latencies of one block, no traffic to speak of.

    The block loads the survivals once, sorts every candidate in four passes (twice for a budget
    that is searched), scans tau, prices every prefix in float64 and writes the layout.
    """
    each = -(-requests * gamma // SCHEDULE_THREADS)  # candidates of a thread
    cycle = 1.0 / device.clock
    one_pass = SCHEDULE_PASS_STEPS * SCHEDULE_STEP + each * SCHEDULE_SORT_CYCLES * cycle
    rest = SCHEDULE_OTHER_STEPS * SCHEDULE_STEP + each * SCHEDULE_PRICE_CYCLES * cycle
    return device.kernel + SCHEDULE_LOAD + (2 if two_phase else 1) * (4 * one_pass + rest)


def main() -> None:
    """Print the tables."""
    shapes = [(r, v) for r in (1, 8, 32, 128, 256) for v in (49152, 129280, 151936, 262144)]
    print("one step, microseconds (bf16)")
    print("   R       V  tensor      U  special   ALU  W2 memory  W2 resident  bound + exchange")
    for r, v in shapes:
        t, w2 = step(r, v), step(r, v, base_width=0).w2_resident
        products = 2.0 * r * v * 256 / H200.tensor
        u, once = 2.0 * r * v / H200.memory, w2_bytes(v) / H200.memory
        cells = [products, u, t.special, t.alu, once, w2, t.bound + H200.exchange]
        print(f"{r:4} {v:7}  " + "  ".join(f"{1e6 * x:8.2f}" for x in cells))
    print("\nverification, gamma = 7, bf16, microseconds")
    print("   R       V  all rows once  visited once  T = 1  T = 0.7  T = 1, all visited")
    for r, v in (*shapes, (512, 151936)):
        once = [verification_floor(r * n, v) for n in (8, visited())]
        built_for = ({}, {"sampled": True}, {"rows": 8.0})
        cells = [*once, *(verification(r, v, **options) for options in built_for)]
        print(f"{r:4} {v:7}  " + "  ".join(f"{1e6 * x:10.1f}" for x in cells))
    print("\ngamma = 7, microseconds")
    print("   R       V     floor  design bf16  built bf16  design 8 bit  chain in a graph")
    for r, v in shapes:
        cells = [floor(r, v), loop(r, v), built(r, v), loop(r, v, width=1), stock(r, v)]
        print(f"{r:4} {v:7}  " + "  ".join(f"{1e6 * x:10.1f}" for x in cells))
    print("\nprefix scheduler, microseconds")
    print("   R  gamma    causal  two_phase")
    for r, gamma in ((1, 7), (128, 7), (64, 16), (512, 16)):
        cells = [schedule(r, gamma), schedule(r, gamma, two_phase=True)]
        print(f"{r:4} {gamma:6}  " + "  ".join(f"{1e6 * x:8.1f}" for x in cells))


if __name__ == "__main__":
    main()
