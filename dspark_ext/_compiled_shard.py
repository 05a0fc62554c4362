# SPDX-License-Identifier: Apache-2.0
"""One rank of a split vocabulary through the C functions of dspark/vocab_parallel.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dspark_ext import _C, _backend, _simt
from dspark_ext._arrays import is_torch, to_numpy, view
from dspark_ext._shards import Shard
from dspark_ext.results import Verification

__all__ = ["DRAW", "SCAN", "CompiledShard"]

#: ``dspark_shard_scan`` and ``dspark_shard_draw``.
SCAN = np.dtype(
    [("mass", "f8"), ("raw_mass", "f8"), ("key", "u8"), ("top", "f4"), ("raw_top", "f4"),
     ("draft", "f4"), ("draft_raw", "f4"), ("token", "i4"), ("token_logit", "f4"),
     ("token_raw", "f4"), ("best", "i4"), ("best_raw", "f4"), ("lowest", "i4"),
     ("lowest_raw", "f4"), ("nan", "i4")]
)  # fmt: skip
DRAW = np.dtype([("key", "u8", 2), ("token", "i4", 2), ("logit", "f4", 2), ("raw", "f4", 2)])

_PER_REQUEST = {
    "draft_len": np.int32, "seed": np.uint64, "position": np.int64, "temperature": np.float32,
    "max_new_tokens": np.int32, "active": np.uint8,
}  # fmt: skip


class CompiledShard:
    """The side of one rank; the arguments were checked."""

    def __init__(self, shard: Shard, rule: int, given: Mapping[str, Any], backend: str) -> None:
        self.backend = backend
        self.call = _C.RejectionSamplerParams()
        self.params = _C.VocabParallelParams()
        self.alive: list[Any] = []  # what the params point to
        drafts = to_numpy(given["draft_tokens"])
        drafts = np.clip(drafts, -1, 2**31 - 1).astype(np.int32)
        self.requests, self.gamma = drafts.shape
        c = self.call
        c.num_requests, c.gamma, c.vocab_size = self.requests, self.gamma, shard.size
        c.draft_vocab_size, c.num_threads = shard.size, _backend.num_threads()
        c.draft_tokens, c.draft_tokens_stride = self._keep(drafts), self.gamma
        c.rule = self._keep(np.full(self.requests, rule, np.int32))
        for name, dtype in _PER_REQUEST.items():
            if given[name] is not None:
                values = np.broadcast_to(to_numpy(given[name]).astype(dtype), self.requests)
                setattr(c, name, self._keep(np.ascontiguousarray(values)))
        c.cu_seqlens = self._keep(to_numpy(given["cu_seqlens"]).astype(np.int32))
        stops = np.asarray(given["stop_ids"], np.int64).clip(-1, 2**31 - 1).astype(np.int32)
        c.stop_ids, c.num_stop_ids = self._keep(stops), len(stops)
        self._rows(given)
        self._law(given)
        p = self.params
        p.num_ranks, p.rank = len(shard.sizes), shard.rank
        p.shard_sizes = self._keep(np.array(shard.sizes, np.int32))
        self.ranks = len(shard.sizes)

    def _keep(self, array: Any) -> int:
        """Address of an array that lives as long as this object."""
        self.alive.append(array)
        return view(array).ptr

    def _rows(self, given: Mapping[str, Any]) -> None:
        c, target = self.call, view(given["target_logits"])
        self.alive.append(target)
        self.rows = c.num_rows = target.shape[0]
        c.target_logits, c.target_dtype = target.ptr, target.code
        c.target_stride = target.strides[0]
        if given["logit_bias"] is not None:
            bias = view(given["logit_bias"])
            c.logit_bias, c.logit_bias_stride = self._keep(bias.array), bias.strides[0]
        if given["token_mask"] is not None:
            mask = view(given["token_mask"])
            c.token_mask, c.mask_row_stride = self._keep(mask.array), mask.strides[0]

    def _law(self, given: Mapping[str, Any]) -> None:
        c = self.call
        full, listed = given["draft_logits"], given["support_logits"]
        if full is None and listed is None:
            return
        for name in ("draft_logit", "draft_lse"):
            setattr(c, name, self._keep(np.ascontiguousarray(to_numpy(given[name]))))
        if full is not None:
            law = view(full)
            c.draft_logits, c.draft_dtype = self._keep(law.array), law.code
            c.draft_request_stride, c.draft_slot_stride = law.strides[0], law.strides[1]
            return
        compact = listed.contiguous() if is_torch(listed) else np.ascontiguousarray(listed)
        law = view(compact)
        c.support_logits, c.draft_dtype = self._keep(law.array), law.code
        ids = np.ascontiguousarray(to_numpy(given["support_ids"]), dtype=np.int32)
        c.support_ids, c.support_size = self._keep(ids), law.shape[2]

    def _run(self, function: str) -> None:
        self.params.call = self.call
        if self.backend == "simt":
            _simt.run(function, self.params, "vocab_parallel")
            return
        needed = _C.vocab_parallel_workspace(_C.CPU, self.params)
        getattr(_C, function)(_C.CPU, self.params, _backend.scratch(needed), needed, 0)

    def _outputs(self) -> Verification:
        tokens, one = (self.requests, self.gamma + 1), self.requests
        out = Verification(
            np.zeros(one, np.int32), np.zeros(one, np.int32), np.full(tokens, -1, np.int32),
            np.full(one, -1, np.int32), np.zeros(tokens, np.float32),
            np.zeros(tokens, np.float32), np.full((one, self.gamma), -2, np.int8),
            np.zeros(one, np.int32), np.zeros(one, np.int32),
        )  # fmt: skip
        for name, array in vars(out).items():
            if array is not None:
                setattr(self.call, name, view(array).ptr)
        return out

    def scan(self) -> Any:
        """Fill SCAN [B]; rows that belong to no active request are zeros."""
        out = np.zeros(self.rows, SCAN)
        self.results = self._outputs()
        self.params.scan = view(out).ptr
        self._run("vocab_parallel_scan")
        return out

    def draw(self, scans: Sequence[Any]) -> Any:
        """Read every rank's SCAN, fill DRAW [R]."""
        self.scans = np.ascontiguousarray(np.stack(list(scans)))
        out = np.zeros(self.requests, DRAW)
        self.results = self._outputs()
        self.params.scans, self.params.draw = view(self.scans).ptr, view(out).ptr
        self._run("vocab_parallel_draw")
        return out

    def finish(self, draws: Sequence[Any]) -> Verification:
        """Read every rank's DRAW and write the results."""
        every = np.ascontiguousarray(np.stack(list(draws)))
        self.results = self._outputs()
        self.params.draws = view(every).ptr
        self._run("vocab_parallel_finish")
        return self.results
