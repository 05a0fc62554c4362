# SPDX-License-Identifier: Apache-2.0
"""Verification: target logits and drafts in, tokens out, the target's law unchanged."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark_ext import _C, _backend
from dspark_ext._arrays import (
    FLOATS,
    INTS,
    Checker,
    View,
    full,
    is_integer,
    is_torch,
    shape_of,
    to_numpy,
    view,
)
from dspark_ext.results import Verification

__all__ = ["RULES", "rejection_sample"]

#: Name of a rule -> its code in ``rule`` arrays.
RULES = {"greedy": 0, "token": 1, "block": 2, "match": 3, "synthetic": 4}
MAX_TOP_LOGPROBS = 128
_SMALLEST_TEMPERATURE = np.float32(1e-3)
_MAX_POSITION = 1 << 32
_DTYPE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def rejection_sample(
    target_logits: Any,
    draft_tokens: Any,
    *,
    draft_len: Any,
    cu_seqlens: Any,
    seed: Any,
    position: Any,
    target_logit: Any = None,
    target_lse: Any = None,
    target_lse_raw: Any = None,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    logit_bias: Any = None,
    token_mask: Any = None,
    repetition_penalty: Any = None,
    presence_penalty: Any = None,
    frequency_penalty: Any = None,
    output_counts: Any = None,
    prompt_mask: Any = None,
    min_tokens_left: Any = None,
    draft_logit: Any = None,
    draft_lse: Any = None,
    draft_logits: Any = None,
    support_ids: Any = None,
    support_logits: Any = None,
    draft_temperature: Any = None,
    rule: Any = "token",
    synthetic_acceptance: Any = None,
    anchor: Any = None,
    draft_to_target: Any = None,
    stop_ids: Any = None,
    max_new_tokens: Any = None,
    active: Any = None,
    vocab_size: int | None = None,
    top_logprobs: int = 0,
    debug_uniform: Any = None,
    out: Verification | None = None,
    strict: bool = False,
    backend: str | None = None,
) -> Verification:
    """Verify the drafts of every request and emit its tokens, losslessly.

    Row ``i`` of a request verifies draft ``i + 1`` and decides position ``n + i + 1``; row ``l`` is
    the bonus row. With the rule ``token`` a draft ``x`` is accepted iff ``u < p(x) / q(x)``; the
    first rejection emits one token of ``max(0, p - q)``, and when all ``l`` drafts are accepted the
    bonus comes from ``p_l``. So the emitted tokens follow the target's law (DSpark section 2.1;
    Leviathan et al. 2023; Chen et al. 2023).

    Parameters
    ----------
    target_logits : array, shape (B, V_pad), float32, bfloat16 or float16
        Rows in ``cu_seqlens`` order, any row stride. Columns behind ``vocab_size`` are not read.
    draft_tokens : array, shape (R, gamma), int32 or int64
        Target ids. An id outside [0, V) is a placeholder and ends the prefix.
    draft_len : array, shape (R,), int
        Scheduled drafts ``l`` of each request, 0..gamma.
    cu_seqlens : array, shape (R + 1,), int
        First row of each request; it owns ``1 + l`` rows (0 if inactive).
    seed, position : array, shape (R,), uint64 and int64
        Seed, and absolute position ``n`` of the anchor, as in :func:`markov_loop`.
    target_logit, target_lse, target_lse_raw : array, shape (B,), float32, optional
        From an LM head that computes them beside the logits: z of the draft that the row verifies,
        ``log sum exp(z / T)`` of the row, and the same at T = 1 (for ``logprob_raw``, which is NaN
        where it is missing and T is not 1). A row is then read only if a token is drawn from it.
        Used under the rule ``token`` at T > 0 without other processors and ``top_logprobs``, and
        where both are finite; elsewhere the row is read. They must belong to these logits.
    temperature : array (R,) or scalar, float32, optional
        0 or None is greedy; else >= 1e-3.
    top_k, top_p, min_p : array (R,) or scalar, optional
        Truncations of the target's law; off at <= 0, 1 and 0. Applied as min-p, top-k, top-p, the
        last on the mass that is left, crossing id kept; ties go to the lower id.
    logit_bias : array, shape (R, V), float32, optional
        Added to every row of the request.
    token_mask : array, shape (B, W) or (R, gamma + 1, W), int32 or uint32, optional
        Packed bits, W >= ceil(V / 32); bit ``id & 31`` of word ``id >> 5`` set: allowed.
    repetition_penalty, presence_penalty, frequency_penalty : array (R,) or scalar, optional
        Off at 1, 0 and 0. Ids of the prompt or the output: a positive logit is divided by the
        repetition penalty, another one multiplied; then ``frequency * count + presence`` is taken
        from ids of the output. Row ``i`` counts drafts ``1..i`` of this round too.
    output_counts : array, shape (R, V), int32, optional
        How often each id is in the output so far, without the anchor if ``anchor`` is given.
    prompt_mask : array, shape (R, W), int32 or uint32, optional
        Packed bits as in ``token_mask``: the ids of the prompt.
    min_tokens_left : array (R,) or scalar, int, optional
        Tokens that must come before a stop id: rows ``i < min_tokens_left`` cannot emit one.
    draft_logit, draft_lse : array, shape (R, gamma), float32, optional
        With ``draft_logits``: ``log q(x) = logit / T - lse`` of every draft.
    draft_logits : array, shape (R, gamma, >= V_d), float32, bfloat16 or float16, optional
        The stored law. Without a law the draft is one-hot: accepted with probability ``p(x)``.
    support_ids, support_logits : array, shape (R, gamma, M), int32 and a float dtype, optional
        In place of ``draft_logits``: the law as a list of M target ids in ascending order, negative
        behind the last, and their logits; every other id has q = 0. ``markov_loop`` with
        ``topk_support`` returns them. ``draft_to_target`` is not looked at: these are target ids.
    draft_temperature : array (R,) or scalar, optional
        T of the draft, by default ``temperature``; 0 means one-hot, and no law is read.
    rule : str or array of codes (R,)
        ``"greedy"``, ``"token"``, ``"block"`` or ``"match"`` (:data:`RULES`). ``block`` decides
        over all drafts together (Sun et al. 2024): it accepts at least as many, and reads all rows.
        ``match`` samples ``y_i`` from ``p_i`` and accepts while it equals the draft. Requests at
        temperature 0 are greedy. ``"synthetic"``, for benchmarks only, accepts drafts whatever they
        are: the output is not the target's, and ``Status.SYNTHETIC`` says so.
    synthetic_acceptance : array (R,) or scalar, optional
        For the rule ``synthetic``: the tokens a round emits on average when all gamma drafts are
        scheduled, 1..gamma + 1. The drafts accepted are that minus 1, rounded down or up.
    anchor : array, shape (R,), int, optional
        The anchors, where penalties shall count them as output on top of ``output_counts``; -1: not
        this one. Nothing else reads them.
    draft_to_target : array, shape (V_d,), int, optional
        Strictly increasing target ids of the columns of ``draft_logits``.
    stop_ids : array, shape (S,) or (R, S), int, optional
        Emitting one ends the round behind it; -1 is no id.
    max_new_tokens : array (R,) or scalar, int, optional
        Tokens this round may emit; 0: the request takes no part and emits nothing.
    active : array, shape (R,), bool or uint8, optional
        0 marks padded requests, which are neither read nor written.
    vocab_size : int, optional
        V, by default the number of columns of ``target_logits``.
    top_logprobs : int
        n in 0..128: list the n likeliest ids of every emitted token's row.
    debug_uniform : array, shape (R, gamma + 1), uint64, optional
        Tests only: 53-bit integers in place of the accept and inner draws of a row, with equal
        segment noise.
    out : Verification, optional
        Preallocated results.
    strict : bool
        Synchronise and raise :class:`dspark_ext.StatusError` when a status bit reports trouble.
    backend : {None, "cpu", "cuda", "reference", "simt"}
        Forces one; by default the device of the arrays decides.

    Returns
    -------
    Verification
        ``tokens`` (R, gamma + 1) int32, -1 behind ``num_emitted``; ``logprob`` under the processed
        law and ``logprob_raw`` under the unprocessed row at T = 1; ``accepted`` (R, gamma) int8: 1,
        0, -1 behind a rejection, -2 not scheduled, behind a stop, or at and behind a placeholder.
        With ``top_logprobs`` = n: ``top_ids`` and ``top_logprob`` (R, gamma + 1, n) under p,
        ``top_ids_raw`` and ``top_logprob_raw`` under the unprocessed row, likeliest first, lower id
        first among equals; -1 and -inf behind the last id with mass.

    Raises
    ------
    ArgumentError
        Lists every argument whose shape, dtype or range is wrong; nothing has been written.

    Notes
    -----
    What only the data shows sets bits of ``status`` (:class:`dspark_ext.Status`). A NaN in the
    stored law of a draft refuses that draft, and so do ``support_ids`` out of order or out of range
    (``BAD_DRAFT_ID``). A ``draft_len`` outside 0..gamma or beyond the
    request's rows is clamped and sets ``BAD_PARAM``. A row is read once, and rows behind the first
    rejection are never touched. The token depends on the seed, the position and the logits alone,
    not on the batch, its order, padding, threads or SIMD level.

    Examples
    --------
    >>> import numpy as np
    >>> from dspark_ext import rejection_sample
    >>> logits = np.log(np.array([[0.1, 0.9], [0.9, 0.1]], dtype=np.float32))
    >>> result = rejection_sample(logits, np.array([[1]]), draft_len=[1], cu_seqlens=[0, 2],
    ...                           seed=[7], position=[5])
    >>> result.tokens.tolist(), result.num_accepted.tolist(), result.accepted.tolist()
    ([[1, 0]], [1], [[1]])
    """
    given = locals()
    call = _Call(given)
    call.rows()
    call.sampling()
    call.penalties()
    call.law()
    call.results(out)
    backend = _backend.resolve(call.check, backend)
    call.check.done()
    result = call.result
    if backend == "reference":
        call.run_reference()
    else:
        _backend.run("rejection_sampler", call.params(), backend, call.check.like)
    _backend.raise_on_trouble("rejection_sample", result.status, strict)
    return result


class _Call:
    """Checked arguments of one call."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.check = Checker("rejection_sample")
        self.views: dict[str, View | None] = {"rule": None}
        self.outputs: dict[str, View] = {}
        self.requests, self.gamma, self.vocab = 0, 1, 1

    def rows(self) -> None:
        """Logits, drafts and the map between them."""
        check, given = self.check, self.given
        target = check.array("target_logits", given["target_logits"], ("B", "V_pad"))
        self.views["target_logits"] = target
        drafts = check.array("draft_tokens", given["draft_tokens"], ("R", "gamma"), INTS)
        self.requests, self.gamma = check.sizes.get("R", 0), check.sizes.get("gamma", 1)
        check.require(1 <= self.gamma <= 16, "gamma", str(self.gamma), "1..16")
        self.views["draft_tokens"] = None if drafts is None else _narrow(drafts)
        columns = check.sizes.get("V_pad", 1)
        size = given["vocab_size"]
        whole = size is None or bool(is_integer(size) and 1 <= size <= columns)
        check.require(whole, "vocab_size", str(size), f"1..{columns} (V_pad)")
        self.vocab = int(size) if size is not None and whole else columns
        for name in ("target_logit", "target_lse", "target_lse_raw"):
            self.views[name] = check.array(
                name, given[name], ("B",), ("float32",), optional=True, contiguous=True
            )
        told = [given[name] is not None for name in ("target_logit", "target_lse")]
        both = all(told) or not (any(told) or given["target_lse_raw"] is not None)
        check.require(both, "target_logit, target_lse", "one of them", "both or none")
        self._per_request("draft_len", "int32", optional=False)
        self._cu_seqlens(given["cu_seqlens"])
        self._per_request("seed", "uint64", optional=False)
        position = self._per_request("position", "int64", optional=False)
        limit = _MAX_POSITION - self.gamma - 1
        self._range("position", position, lambda n: (n >= 0) & (n < limit), f"0..{limit - 1}")
        self._per_request("anchor", "int32")
        self._per_request("active", "uint8")

    def _per_request(self, name: str, dtype: str, optional: bool = True) -> View | None:
        value = self.given[name]
        self.views[name] = self.check.per_request(
            name, value, self.requests, dtype, optional=optional
        )
        return self.views[name]

    def _range(self, name: str, v: View | None, good: Any, expected: str) -> None:
        if v is None:
            return
        values = self.check.values(v)
        bad = values[~good(values)]
        if bad.size:
            self.check.fail(name, ", ".join(str(x) for x in bad[:4].tolist()), expected)

    def _cu_seqlens(self, value: Any) -> None:
        shape = shape_of(value)
        wanted = (self.requests + 1,)
        v = None
        if self.check.require(shape == wanted, "cu_seqlens", f"shape {shape}", f"{wanted}"):
            v = self.check.per_request("cu_seqlens", value, wanted[0], "int32", optional=False)
        self.views["cu_seqlens"] = v

    def sampling(self) -> None:
        """Per-request sampling parameters, bias, mask, stops."""
        check, given = self.check, self.given
        temperature = "0 (greedy) or finite values >= 0.001"
        for name in ("temperature", "draft_temperature"):
            self._range(name, self._per_request(name, "float32"), _good_temperature, temperature)
        self._per_request("top_k", "int32")
        top_p = self._per_request("top_p", "float32")
        self._range("top_p", top_p, lambda x: (x > 0) & (x <= 1), "values in (0, 1]")
        min_p = self._per_request("min_p", "float32")
        self._range("min_p", min_p, lambda x: (x >= 0) & (x <= 1), "values in [0, 1]")
        cap = self._per_request("max_new_tokens", "int32")
        self._range("max_new_tokens", cap, lambda n: n >= 0, "values >= 0")
        self._rules(given["rule"])
        self.views["logit_bias"] = check.array(
            "logit_bias", given["logit_bias"], ("R", self.vocab), ("float32",), optional=True
        )
        self._mask(given["token_mask"])
        self._stops(given["stop_ids"])
        shape = ("R", self.gamma + 1)
        self.views["debug_uniform"] = check.array(
            "debug_uniform",
            given["debug_uniform"],
            shape,
            ("uint64", "int64"),
            optional=True,
            contiguous=True,
        )

    def penalties(self) -> None:
        """Penalties, what they count, and the floor under the number of tokens."""
        check, given = self.check, self.given
        factor = self._per_request("repetition_penalty", "float32")
        self._range(
            "repetition_penalty", factor, lambda x: np.isfinite(x) & (x > 0), "finite values > 0"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            self._range(name, self._per_request(name, "float32"), np.isfinite, "finite values")
        least = self._per_request("min_tokens_left", "int32")
        self._range("min_tokens_left", least, lambda n: n >= 0, "values >= 0")
        self.views["output_counts"] = check.array(
            "output_counts", given["output_counts"], ("R", self.vocab), ("int32",), optional=True
        )
        words = -(-self.vocab // 32)
        v = check.array(
            "prompt_mask", given["prompt_mask"], ("R", None), ("int32", "uint32"), optional=True
        )
        if v is not None and v.shape[-1] < words:
            check.fail("prompt_mask", f"{v.shape[-1]} words a row", f">= {words}")
        self.views["prompt_mask"] = v
        n = given["top_logprobs"]
        whole = is_integer(n) and bool(0 <= n <= MAX_TOP_LOGPROBS)
        check.require(whole, "top_logprobs", str(n), f"an integer in 0..{MAX_TOP_LOGPROBS}")
        self.top = int(n) if whole else 0

    def _rules(self, rule: Any) -> None:
        check = self.check
        if isinstance(rule, str):
            if rule == "token":  # what no array stands for
                self.views["rule"] = None
            elif check.require(rule in RULES, "rule", repr(rule), f"one of {list(RULES)}"):
                codes = np.full(self.requests, RULES[rule], np.int32)
                self.views["rule"] = view(check.like_kind(codes))
        else:
            v = check.per_request("rule", rule, self.requests, "int32", optional=False)
            self._range("rule", v, lambda x: np.isin(x, list(RULES.values())), f"codes of {RULES}")
            self.views["rule"] = v
        mean = self._per_request("synthetic_acceptance", "float32")
        most = self.gamma + 1
        within = f"values in 1..{most} (gamma + 1)"
        self._range("synthetic_acceptance", mean, lambda x: (x >= 1) & (x <= most), within)
        if mean is None and RULES["synthetic"] in check.values(self.views["rule"]):
            check.fail("synthetic_acceptance", "None", f"{within} with the rule 'synthetic'")

    def _mask(self, mask: Any) -> None:
        words = -(-self.vocab // 32)
        padded = len(getattr(mask, "shape", ())) == 3
        shape = ("R", self.gamma + 1, None) if padded else ("B", None)
        v = self.check.array("token_mask", mask, shape, ("int32", "uint32"), optional=True)
        if v is not None and v.shape[-1] < words:
            self.check.fail("token_mask", f"{v.shape[-1]} words a row", f">= {words}")
        if v is not None and padded and v.strides[0] <= 0:
            v = view(v.array.copy() if isinstance(v.array, np.ndarray) else v.array.contiguous())
        self.views["token_mask"] = v

    def _stops(self, stops: Any) -> None:
        self.views["stop_ids"] = None
        if stops is None:
            return
        if not (is_torch(stops) or isinstance(stops, np.ndarray)):
            ids = np.atleast_1d(np.asarray(stops, dtype=object))
            if not all(isinstance(i, (int, np.integer)) for i in ids.reshape(-1)):
                self.check.fail("stop_ids", repr(stops)[:80], "ids")
                return
            stops = self.check.like_kind(ids.clip(-1, 2**31 - 1).astype(np.int64))
        shape = ("S",) if stops.ndim == 1 else ("R", "S")
        v = self.check.array("stop_ids", stops, shape, INTS)
        self.views["stop_ids"] = None if v is None else _narrow(v)

    def law(self) -> None:
        """The law of the drafts: a full row, a list of ids, or neither."""
        check, given = self.check, self.given
        names = ["draft_logit", "draft_lse", "draft_logits"]
        top_m = given["support_ids"] is not None or given["support_logits"] is not None
        if top_m:
            names[2:] = ["support_ids", "support_logits"]
            got = given["draft_logits"]
            check.require(got is None, "draft_logits", got, "None beside support_ids: one law")
        present = [name for name in names if given[name] is not None]
        if present and len(present) < len(names):
            expected = "all four or none" if top_m else "all three or none"
            check.fail(", ".join(names), f"only {', '.join(present)}", expected)
        for name in names[:2]:
            self.views[name] = check.array(
                name,
                given[name],
                ("R", "gamma"),
                ("float32",),
                optional=True,
                contiguous=True,
            )
        self.draft_vocab = self.vocab
        self.views["draft_to_target"] = self._draft_ids(given["draft_to_target"])
        v = check.array("draft_logits", given["draft_logits"], ("R", "gamma", None), optional=True)
        if v is not None and v.shape[2] < self.draft_vocab:
            check.fail("draft_logits", f"{v.shape[2]} columns", f">= {self.draft_vocab} (V_d)")
        self.views["draft_logits"] = v
        shape = ("R", "gamma", "M")
        for name, dtypes in (("support_ids", ("int32",)), ("support_logits", FLOATS)):
            self.views[name] = check.array(
                name, given[name], shape, dtypes, optional=True, contiguous=True
            )
        if top_m:
            size = check.sizes.get("M", 1)
            check.require(size >= 1, "support_ids", f"{size} ids a slot", "at least 1")

    def _draft_ids(self, ids: Any) -> View | None:
        v = self.check.array("draft_to_target", ids, ("V_d",), INTS, optional=True)
        if v is None:
            return None
        values = to_numpy(v.array)
        self.draft_vocab = len(values)
        ok = values.size > 0 and bool(np.all(values[1:] > values[:-1]))
        ok = ok and values[0] >= 0 and int(values[-1]) < self.vocab
        expected = f"strictly increasing ids in [0, {self.vocab})"
        self.check.require(ok, "draft_to_target", "other values", expected)
        return _narrow(v)

    def results(self, out: Verification | None) -> None:
        """Output arrays; freshly made ones hold defined values for requests that take no part."""
        tokens = (self.requests, self.gamma + 1)
        one = (self.requests,)
        layout: dict[str, tuple[tuple[int, ...], str, int]] = {
            "num_accepted": (one, "int32", 0),
            "num_emitted": (one, "int32", 0),
            "tokens": (tokens, "int32", -1),
            "next_anchor": (one, "int32", -1),
            "logprob": (tokens, "float32", 0),
            "logprob_raw": (tokens, "float32", 0),
            "accepted": ((self.requests, self.gamma), "int8", -2),
            "finish": (one, "int32", 0),
            "status": (one, "int32", 0),
        }
        if self.top:
            listed = (*tokens, self.top)
            layout |= {
                "top_ids": (listed, "int32", -1),
                "top_logprob": (listed, "float32", 0),
                "top_ids_raw": (listed, "int32", -1),
                "top_logprob_raw": (listed, "float32", 0),
            }
        out = self.check.results(out, Verification)
        for name, (shape, dtype, value) in layout.items():
            if out is None and self.views["active"] is not None and self.check.like is not None:
                v: View | None = view(full(shape, value, dtype, self.check.like))
            else:
                given = None if out is None else getattr(out, name)
                v = self.check.output(f"out.{name}", given, shape, dtype)
            if v is not None:
                self.outputs[name] = v

    @property
    def result(self) -> Verification:
        """The arrays that are being filled."""
        return Verification(**{name: v.array for name, v in self.outputs.items()})

    def params(self) -> Any:
        """Fill the C struct."""
        v = self.views
        target, drafts = v["target_logits"], v["draft_tokens"]
        assert target is not None and drafts is not None
        p = _C.RejectionSamplerParams()
        p.num_requests, p.gamma, p.vocab_size = self.requests, self.gamma, self.vocab
        p.draft_vocab_size = self.draft_vocab
        p.num_rows, p.num_threads = target.shape[0], _backend.num_threads()
        p.target_dtype, p.target_stride = target.code, target.strides[0]
        p.draft_tokens_stride = drafts.strides[0]
        for name, array in (*v.items(), *self.outputs.items()):
            if array is not None:
                setattr(p, name, array.ptr)
        p.top_logprobs = self.top
        counts, prompt = v["output_counts"], v["prompt_mask"]
        p.output_counts_stride = 0 if counts is None else counts.strides[0]
        p.prompt_mask_stride = 0 if prompt is None else prompt.strides[0]
        mask, bias, law, stops = (
            v[name] for name in ("token_mask", "logit_bias", "draft_logits", "stop_ids")
        )
        if mask is not None:
            p.mask_row_stride = mask.strides[-2]
            p.mask_request_stride = mask.strides[0] if len(mask.shape) == 3 else 0
        if bias is not None:
            p.logit_bias_stride = bias.strides[0]
        support = v["support_logits"]
        if support is not None:
            p.draft_dtype, p.support_size = support.code, support.shape[2]
        if law is not None:
            p.draft_dtype = law.code
            p.draft_request_stride, p.draft_slot_stride = law.strides[0], law.strides[1]
        if stops is not None:
            p.num_stop_ids = stops.shape[-1]
            p.stop_ids_stride = stops.strides[0] if len(stops.shape) == 2 else 0
        return p

    def run_reference(self) -> None:
        """Answer with the float64 reference."""
        values = {
            name: None if v is None else to_numpy(v.array)
            for name, v in self.views.items()
            if name not in ("target_logits", "draft_tokens")
        }
        target, law = self.views["target_logits"], self.views["draft_logits"]
        support = self.views["support_logits"]
        drafts = self.views["draft_tokens"]
        assert target is not None and drafts is not None
        if law is not None:
            values["draft_logits"] = to_numpy(law.array)[:, :, : self.draft_vocab]
        law = support if law is None else law
        answer = _backend.reference("rejection_sampler", "rejection_sample")(
            to_numpy(target.array),
            to_numpy(drafts.array),
            **values,
            vocab_size=self.vocab,
            top_logprobs=self.top,
            dtype=_DTYPE[target.dtype],
            draft_dtype="f32" if law is None else _DTYPE[law.dtype],
        )
        active = self.views["active"]
        keep = None if active is None else to_numpy(active.array) != 0
        for name, v in self.outputs.items():
            _backend.copy_into(v, getattr(answer, name), keep)


def _good_temperature(t: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    good: np.ndarray[Any, Any] = (t == 0) | (np.isfinite(t) & (t >= _SMALLEST_TEMPERATURE))
    return good


def _narrow(v: View) -> View:
    """Ids as int32; what does not fit stays out of range instead of wrapping around."""
    if v.dtype == "int32":
        return v
    x, limit = v.array, 2**31 - 1
    if is_torch(x):
        return view(x.clamp(-1, limit).to(sys.modules["torch"].int32))
    return view(np.clip(x, -1, limit).astype(np.int32))
