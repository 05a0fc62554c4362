# SPDX-License-Identifier: Apache-2.0
"""Everything that lives longer than a round: lengths, seeds, parameters, pages, history."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_ext._arrays import Checker
from dspark_ext.interfaces import Cache, NewFeatures
from dspark_ext.pages import CapacityError, PageTable
from dspark_ext.sampling import RULES, SamplingParams, distinct_seed

__all__ = ["HostState", "RoundState"]

_SERIALS = itertools.count(1)

#: name -> dtype, value of a free slot. One entry per slot each.
_FIELDS: dict[str, tuple[str, float]] = {
    "active": ("uint8", 0),
    "drafting": ("uint8", 0),
    "starved": ("int32", 0),
    "due": ("int32", 0),
    "explored": ("uint8", 0),
    "kv_len": ("int32", 0),
    "position": ("int64", 0),
    "anchor": ("int32", 0),
    "temperature": ("float32", 0),
    "draft_temperature": ("float32", 0),
    "top_k": ("int32", 0),
    "top_p": ("float32", 1),
    "min_p": ("float32", 0),
    "repetition_penalty": ("float32", 1),
    "presence_penalty": ("float32", 0),
    "frequency_penalty": ("float32", 0),
    "min_tokens": ("int32", 0),
    "rule": ("int32", RULES["token"]),
    "synthetic_acceptance": ("float32", 1),
    "left": ("int32", 0),
    "max_draft": ("int32", 0),
    "min_draft": ("int32", 0),
    "weight": ("float32", 1),
}


class HostState:
    """NumPy views of the state's memory: one row per slot, see :class:`RoundState`."""

    active: NDArray[np.uint8]
    drafting: NDArray[np.uint8]  # takes part in the draft of the present round
    starved: NDArray[np.int32]  # rounds in a row that drafted and verified nothing
    due: NDArray[np.int32]  # drafts of the present round that are verified whatever they promise
    explored: NDArray[np.uint8]  # whether a monitor asked for them
    kv_len: NDArray[np.int32]
    position: NDArray[np.int64]
    anchor: NDArray[np.int32]
    temperature: NDArray[np.float32]
    draft_temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    repetition_penalty: NDArray[np.float32]
    presence_penalty: NDArray[np.float32]
    frequency_penalty: NDArray[np.float32]
    min_tokens: NDArray[np.int32]  # tokens due before a stop id
    rule: NDArray[np.int32]
    synthetic_acceptance: NDArray[np.float32]
    left: NDArray[np.int32]
    max_draft: NDArray[np.int32]
    min_draft: NDArray[np.int32]
    weight: NDArray[np.float32]
    seed: NDArray[np.uint64]
    stop_ids: NDArray[np.int32]

    def __init__(self, max_requests: int, max_stop_ids: int) -> None:
        for name, (dtype, value) in _FIELDS.items():
            setattr(self, name, np.full(max_requests, value, dtype=dtype))
        self.seed = np.zeros(max_requests, dtype=np.uint64)
        self.stop_ids = np.full((max_requests, max_stop_ids), -1, dtype=np.int32)

    def clear(self, slot: int) -> None:
        """Put the values of a free slot."""
        for name, (_, value) in _FIELDS.items():
            getattr(self, name)[slot] = value
        self.stop_ids[slot] = -1


class RoundState:
    """The requests in flight. Create one with :meth:`create` and keep it for the engine's life.

    Attributes
    ----------
    host : HostState
        NumPy arrays, one entry per slot: ``active`` (takes part in the next round), ``kv_len``,
        ``position`` and ``anchor`` (of the last committed token: always ``kv_len == position``
        between rounds), ``left`` (tokens the request may still emit), seeds and sampling
        parameters.
    kv_len, position, anchor, active, page_table : array
        The same memory as arrays of the state's kind (torch or NumPy), for the models.
    target_pages, drafter_pages
        What ``new_cache(num_pages, page_size)`` of the models returned.

    Notes
    -----
    A slot is free, waiting for :func:`dspark_ext.prefill`, active, or finished. ``add`` and
    ``remove`` are legal between rounds only: a decision taken inside a round could depend on the
    drafted tokens and bend the law of what is emitted (contract, section 3).

    Examples
    --------
    >>> state = RoundState.create(2, gamma=3)
    >>> slot = state.add([5, 6, 7], SamplingParams(seed=1, max_new_tokens=4))
    >>> slot, state.waiting(), state.host.left.tolist()
    (0, [0], [4, 0])
    >>> state.remove(slot)
    """

    def __init__(
        self, max_requests: int, gamma: int, page_size: int, max_len: int, num_pages: int | None,
        max_stop_ids: int, framework: str,
    ) -> None:  # fmt: skip
        self.max_requests, self.gamma, self.max_len = max_requests, gamma, max_len
        self.framework = framework
        columns = -(-(max_len + gamma) // page_size)
        total = max_requests * columns if num_pages is None else num_pages
        self.pages = PageTable(max_requests, columns, total, page_size)
        self.host = HostState(max_requests, max_stop_ids)
        self.kv_len, self.position = self.array(self.host.kv_len), self.array(self.host.position)
        self.anchor, self.active = self.array(self.host.anchor), self.array(self.host.active)
        self.page_table = self.array(self.pages.table)
        self.stop_ids = self.array(self.host.stop_ids)
        self.no_survival = self.array(np.zeros((max_requests, gamma), dtype=np.float32))
        self.no_drafts = self.array(np.zeros((max_requests, gamma), dtype=np.int32))
        self.prompts: list[NDArray[np.int32] | None] = [None] * max_requests
        self.finish: NDArray[np.int32] = np.zeros(max_requests, dtype=np.int32)
        self.target_pages: Any = None
        self.drafter_pages: Any = None
        self.rounds = 0
        #: number of the request in each slot, no other in this process has it; 0 = none so far
        self.serial: NDArray[np.int64] = np.zeros(max_requests, dtype=np.int64)
        self.output_counts: NDArray[np.int32] | None = None  # [R, V], when penalties need it
        self.prompt_mask: NDArray[np.int32] | None = None  # [R, ceil(V / 32)] packed
        self._features: list[NewFeatures] = []
        from dspark_ext.scheduler import History

        self.history = History(max_requests, gamma)

    @classmethod
    def create(
        cls,
        max_requests: int,
        gamma: int,
        *,
        page_size: int = 16,
        max_len: int = 2048,
        num_pages: int | None = None,
        max_stop_ids: int = 8,
        framework: str = "numpy",
        device: str = "cpu",
    ) -> RoundState:
        """Allocate the state of at most ``max_requests`` concurrent requests.

        Parameters
        ----------
        max_requests : int
            R, number of slots.
        gamma : int
            Draft tokens per round, 1..16; must be the drafter's.
        page_size : int
            Tokens in a KV page.
        max_len : int
            Most tokens of one request, prompt and answer together.
        num_pages : int, optional
            Pages in the caches; enough for every slot at ``max_len`` when absent.
        max_stop_ids : int
            Most stop ids of one request.
        framework : {"numpy", "torch"}
            Kind of the arrays handed to the models.
        device : str
            ``"cpu"``.

        Raises
        ------
        ArgumentError
            Listing every argument out of range.
        NotImplementedError
            For another device: this release keeps the state in host memory.

        Examples
        --------
        >>> RoundState.create(4, gamma=7, page_size=32, max_len=100).page_table.shape
        (4, 4)
        """
        check = Checker("RoundState.create")
        check.require(1 <= gamma <= 16, "gamma", str(gamma), "1..16")
        for name, value in (("max_requests", max_requests), ("page_size", page_size),
                            ("max_len", max_len), ("max_stop_ids", max_stop_ids)):  # fmt: skip
            check.require(value >= 1, name, str(value), "at least 1")
        if num_pages is not None:
            check.require(num_pages >= 1, "num_pages", str(num_pages), "at least 1, or None")
        known = framework in ("numpy", "torch")
        check.require(known, "framework", repr(framework), "'numpy' or 'torch'")
        check.done()
        if str(device) != "cpu":
            raise NotImplementedError(
                f"RoundState.create: device={str(device)!r}: a state in device memory comes with "
                "the CUDA kernels; this release has 'cpu'"
            )
        return cls(max_requests, gamma, page_size, max_len, num_pages, max_stop_ids, framework)

    @property
    def page_size(self) -> int:
        """Tokens in a KV page."""
        return self.pages.page_size

    @property
    def num_pages(self) -> int:
        """Pages in the caches."""
        return self.pages.num_pages

    def array(self, x: NDArray[Any]) -> Any:
        """Return the same memory as an array of the state's kind."""
        return importlib.import_module("torch").from_numpy(x) if self.framework == "torch" else x

    # ---- requests ------------------------------------------------------------------------------

    def free_slots(self) -> list[int]:
        """Slots that :meth:`add` can use."""
        return [r for r, prompt in enumerate(self.prompts) if prompt is None]

    def waiting(self) -> list[int]:
        """Slots added and not prefilled yet."""
        return [
            r
            for r, prompt in enumerate(self.prompts)
            if prompt is not None and not self.host.active[r] and not self.finish[r]
        ]

    def active_slots(self) -> list[int]:
        """Slots that take part in the next round."""
        slots: list[int] = np.flatnonzero(self.host.active).tolist()
        return slots

    def add(self, prompt: Sequence[int] | Any, params: SamplingParams | None = None) -> int:
        """Admit a request; :func:`dspark_ext.prefill` makes it active.

        Parameters
        ----------
        prompt : sequence of int
            Token ids, at least one.
        params : SamplingParams, optional
            Greedy by default.

        Returns
        -------
        int
            The slot.

        Raises
        ------
        ArgumentError
            For an empty or misshapen prompt, or parameters that do not fit the state.
        CapacityError
            When no slot is free or the prompt's pages are not.
        """
        params = SamplingParams() if params is None else params
        ids = self._check(prompt, params)
        free = self.free_slots()
        if not free:
            raise CapacityError(f"add: all {self.max_requests} slots are taken")
        slot = free[0]
        self.pages.reserve({slot: len(ids)})
        host = self.host
        # Also covers finished requests that are still in their slots: their history is alive.
        used = {int(host.seed[r]) for r, p in enumerate(self.prompts) if p is not None}
        seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed
        host.seed[slot] = np.uint64(distinct_seed(seed, used))
        self.prompts[slot] = ids
        host.position[slot], host.anchor[slot] = len(ids) - 1, ids[-1]
        draft = params.draft_temperature
        host.temperature[slot] = params.temperature
        host.draft_temperature[slot] = params.temperature if draft is None else draft
        host.top_k[slot], host.top_p[slot], host.min_p[slot] = (
            params.top_k, params.top_p, params.min_p,
        )  # fmt: skip
        host.repetition_penalty[slot] = params.repetition_penalty
        host.presence_penalty[slot] = params.presence_penalty
        host.frequency_penalty[slot] = params.frequency_penalty
        host.min_tokens[slot] = params.min_tokens
        mean = params.synthetic_acceptance
        host.synthetic_acceptance[slot] = 1 if mean is None else mean
        host.rule[slot], host.left[slot] = RULES[params.rule], params.max_new_tokens
        host.stop_ids[slot, : len(params.stop_ids)] = params.stop_ids
        host.max_draft[slot] = self.gamma if params.max_draft is None else params.max_draft
        host.min_draft[slot], host.weight[slot] = params.min_draft, params.weight
        self.serial[slot] = next(_SERIALS)
        self.history.reset(slot)
        return slot

    def _check(self, prompt: Any, params: SamplingParams) -> NDArray[np.int32]:
        check = Checker("RoundState.add")
        ids = np.asarray(prompt)
        shape_ok = ids.ndim == 1 and ids.size > 0 and ids.dtype.kind in "iu"
        check.require(shape_ok, "prompt", f"{ids.dtype} {list(ids.shape)}", "token ids, 1 or more")
        if shape_ok:
            in_range = int(ids.min()) >= 0 and int(ids.max()) < 2**31
            check.require(in_range, "prompt", f"ids {ids.min()}..{ids.max()}", "ids >= 0")
        length = ids.size + params.max_new_tokens
        check.require(
            length <= self.max_len,
            "prompt, max_new_tokens",
            f"{ids.size} + {params.max_new_tokens} tokens",
            f"at most max_len = {self.max_len}",
        )
        most = self.host.stop_ids.shape[1]
        count = len(params.stop_ids)
        check.require(count <= most, "stop_ids", f"{count} ids", f"at most {most}")
        cap = self.gamma if params.max_draft is None else params.max_draft
        mean = params.synthetic_acceptance
        mean_ok = mean is None or mean <= self.gamma + 1
        check.require(
            mean_ok, "synthetic_acceptance", str(mean), f"at most gamma + 1 = {self.gamma + 1}"
        )
        check.require(cap <= self.gamma, "max_draft", str(cap), f"at most gamma = {self.gamma}")
        floor_ok = params.min_draft <= cap
        check.require(floor_ok, "min_draft", str(params.min_draft), f"at most max_draft = {cap}")
        check.done()
        return ids.astype(np.int32)

    def remove(self, slot: int) -> None:
        """Free a slot, whatever it was doing; its pages go back, its history is forgotten.

        Raises
        ------
        ArgumentError
            When the slot holds no request.
        """
        check = Checker("RoundState.remove")
        taken = 0 <= slot < self.max_requests and self.prompts[slot] is not None
        check.require(taken, "slot", str(slot), "a slot that add returned")
        check.done()
        self.prompts[slot] = None
        self.finish[slot] = 0
        self.host.clear(slot)
        self.pages.release(slot)
        self.history.reset(slot)
        # Features of the old request must not be taken for those of the slot's next one.
        for chunk in self._features:
            chunk.num_new[slot] = 0

    # ---- what decode_round needs ---------------------------------------------------------------

    def reserve(self) -> None:
        """Reserve pages for 1 + gamma tokens beyond the present of every active request.

        Before drafting, so that nothing drafted can decide who gets a page.
        """
        ahead = 1 + self.gamma
        owned = self.pages.owned * self.page_size
        short = np.flatnonzero((self.host.active != 0) & (owned < self.host.kv_len + ahead))
        if short.size:
            self.pages.reserve({int(r): int(self.host.kv_len[r]) + ahead for r in short})

    def cache(self, pages: Any, rows: NDArray[Any], max_q_len: int) -> Cache:
        """Describe a forward pass of ``rows`` [R] new tokens per slot."""
        after = (np.where(rows > 0, self.host.kv_len, 0) + rows).astype(np.int32)
        return Cache(
            pages, self.page_table, self.kv_len, self.array(after), max_q_len, self.page_size
        )

    def sampled_drafts(self) -> NDArray[np.bool_]:
        """Active slots [R] whose drafts are sampled and verified against the law they come from."""
        host = self.host
        drawn = (host.active != 0) & (host.temperature > 0) & (host.draft_temperature > 0)
        found: NDArray[np.bool_] = drawn & np.isin(host.rule, (RULES["token"], RULES["block"]))
        return found

    def _penalised(self) -> NDArray[np.bool_]:
        host = self.host
        off = (host.presence_penalty == 0) & (host.frequency_penalty == 0)
        on: NDArray[np.bool_] = (host.repetition_penalty != 1) | ~off
        return on

    def start_counting(self, slots: Sequence[int], vocab_size: int) -> None:
        """Note the prompts of requests that are about to emit their first token."""
        if self.output_counts is None or self.prompt_mask is None:
            if not np.any(self._penalised()[list(slots)]):
                return
            words = -(-vocab_size // 32)
            self.output_counts = np.zeros((self.max_requests, vocab_size), dtype=np.int32)
            self.prompt_mask = np.zeros((self.max_requests, words), dtype=np.int32)
        for r in slots:
            prompt = self.prompts[r]
            seen = np.zeros(32 * self.prompt_mask.shape[1], dtype=bool)
            if prompt is not None:
                seen[prompt[prompt < vocab_size]] = True
            packed = np.packbits(seen, bitorder="little")
            self.prompt_mask[r] = packed.view(np.dtype("<i4"))
            self.output_counts[r] = 0

    def count_output(self, slots: NDArray[Any], tokens: NDArray[Any]) -> None:
        """Count what a round emitted: ``tokens`` [len(slots), gamma + 1], -1 padded."""
        if self.output_counts is None:
            return
        rows = np.repeat(slots, tokens.shape[1])[tokens.reshape(-1) >= 0]
        np.add.at(self.output_counts, (rows, tokens[tokens >= 0]), 1)

    def penalties(self) -> dict[str, Any]:
        """Arguments of ``rejection_sample``; nothing while no request asks for it."""
        host, given = self.host, {}
        if np.any(host.min_tokens > 0):
            given["min_tokens_left"] = host.min_tokens
        counts, prompt = self.output_counts, self.prompt_mask
        if counts is None or prompt is None or not np.any(self._penalised()):
            return given
        # The counts hold every emitted token, the anchor too, so `anchor` is not given.
        return given | {
            "repetition_penalty": host.repetition_penalty,
            "presence_penalty": host.presence_penalty,
            "frequency_penalty": host.frequency_penalty,
            "output_counts": self.array(counts),
            "prompt_mask": self.array(prompt),
        }

    def hand_over(self, features: NewFeatures) -> None:
        """Keep target features until the drafter is called next."""
        self._features.append(features)

    def pending_features(self, slots: NDArray[Any] | None = None) -> NewFeatures:
        """Return everything handed over since :meth:`features_taken`, joined per request.

        ``slots`` [R], when given, says whose: the rows of the others stay pending.
        """
        if len(self._features) > 1:
            self._features = [_join(self._features)]
        if not self._features:
            raise RuntimeError("the drafter has no features: prefill with a target that has taps")
        found = self._features[0]
        if slots is None:
            return found
        return found._replace(num_new=np.where(slots, found.num_new, 0).astype(np.int32))

    def features_taken(self, slots: NDArray[Any] | None = None) -> None:
        """Forget the pending features of slots [R] (all when absent): a round used them."""
        if slots is None:
            self._features = []
            return
        for chunk in self._features:
            chunk.num_new[np.asarray(slots) != 0] = 0
        self._features = [c for c in self._features if c.num_new.any()]

    @contextmanager
    def only(self, slots: NDArray[Any]) -> Generator[None]:
        """Inside, ``active`` shows these slots [R] alone: the drafter leaves out the others."""
        active = self.host.active.copy()
        self.host.active[...] = slots
        try:
            yield
        finally:
            self.host.active[...] = active


def _join(chunks: list[NewFeatures]) -> NewFeatures:
    """Concatenate the valid rows of several hand-overs, request by request, oldest first."""
    requests = len(chunks[0].num_new)
    starts = np.cumsum([0] + [len(c.rows) for c in chunks])
    picks: list[NDArray[np.int64]] = []
    num_new = np.zeros(requests, dtype=np.int32)
    for r in range(requests):
        for chunk, start in zip(chunks, starts[:-1], strict=True):
            first, count = int(chunk.cu_seqlens[r]), int(chunk.num_new[r])
            picks.append(np.arange(start + first, start + first + count))
            num_new[r] += count
    cu_seqlens = np.concatenate(([0], np.cumsum(num_new))).astype(np.int32)
    order = np.concatenate(picks)
    rows = chunks[0].rows
    if isinstance(rows, np.ndarray):
        joined = np.concatenate([c.rows for c in chunks])[order]
    else:
        torch = importlib.import_module("torch")
        joined = torch.cat([c.rows for c in chunks])[torch.from_numpy(order)]
    return NewFeatures(joined, cu_seqlens, num_new)
