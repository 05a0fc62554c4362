# SPDX-License-Identifier: Apache-2.0
"""The sequential stage: gamma dependent draft tokens per request."""

from __future__ import annotations

import math
import sys
from dataclasses import fields
from typing import Any

import numpy as np

from dspark_ext import _C, _backend
from dspark_ext._arrays import (
    FLOATS,
    Checker,
    View,
    is_integer,
    is_torch,
    on_device,
    shape_of,
    to_numpy,
    view,
)
from dspark_ext.results import Draft

__all__ = ["markov_loop"]

HEADS = ("vanilla", "gated", "rnn")
MIN_TEMPERATURE = np.float32(1e-3)
MAX_POSITION = 2**32
MAX_SUPPORT = 1024  # DSPARK_MAX_SUPPORT


class _Call:
    """Arguments of one call: checked, as views, with the sizes they agree on."""

    def __init__(self, arguments: dict[str, Any], out: Draft | None, backend: str | None) -> None:
        self.check = check = Checker("markov_loop")
        a = arguments
        self.head = a["head"]
        self.base = check.array("base_logits", a["base_logits"], ("R", "gamma", None))
        self.w1 = check.array("w1", a["w1"], (None, "r"))
        self.w2 = check.array("w2", a["w2"], (None, "r"), (*FLOATS, "int8"))
        self.requests = check.sizes.get("R", 0)
        self.gamma = check.sizes.get("gamma", 1)
        self.rank = check.sizes.get("r", 1)
        check.require(1 <= self.gamma <= 16, "gamma", str(self.gamma), "1..16")
        check.require(self.rank >= 1, "w1", f"rank {self.rank}", "rank >= 1")
        self._vocabulary(a["draft_to_target"], a["vocab_size"], a["w2_scale"])
        self._head(a["head_weight"], a["head_bias"], a["hidden"])
        self._confidence(a["confidence_weight"], a["confidence_bias"])
        self._requests(a)
        self._screen(a)
        self._outputs(out, a["store_logits"])
        self.backend = _backend.resolve(check, backend)
        check.done()

    def _vocabulary(self, draft_to_target: Any, vocab_size: Any, w2_scale: Any) -> None:
        check = self.check
        rows = 0 if self.w1 is None else self.w1.shape[0]
        self.vocab = rows
        if vocab_size is not None:
            ok = is_integer(vocab_size) and 1 <= int(vocab_size) <= rows
            if check.require(ok, "vocab_size", str(vocab_size), f"1..{rows}, the rows of w1"):
                self.vocab = int(vocab_size)
        self.d2t: View | None = None
        self.columns = self.vocab
        if draft_to_target is not None:
            count = math.prod(shape_of(draft_to_target) or (0,))
            self.d2t = check.per_request("draft_to_target", draft_to_target, count, "int32")
            self.columns = count
            expected = f"strictly increasing ids < V = {self.vocab}"
            check.require(count > 0, "draft_to_target", "no ids", expected)
            ids = check.values(self.d2t)
            if len(ids) > 0:
                ok = bool(np.all(np.diff(ids) > 0)) and ids[0] >= 0 and ids[-1] < self.vocab
                got = f"ids {ids[:3].tolist()}...{ids[-1:].tolist()}"
                check.require(ok, "draft_to_target", got, expected)
        if self.w2 is not None:
            n = self.w2.shape[0]
            padded = vocab_size is not None and draft_to_target is None
            ok = n >= self.columns if padded else n == self.columns
            least = "at least " if padded else ""
            check.require(ok, "w2", f"{n} rows", f"{least}V_d = {self.columns} rows")
            int8 = self.w2.dtype == "int8"
            has = "scales" if w2_scale is not None else "None"
            expected = "[V_d] float32 with an int8 w2" if int8 else "None unless w2 is int8"
            check.require(int8 == (w2_scale is not None), "w2_scale", has, expected)
        self.scale = check.array(
            "w2_scale", w2_scale, (None,), ("float32",), optional=True, contiguous=True
        )
        if self.scale is not None:
            n = self.scale.shape[0]
            check.require(n >= self.columns, "w2_scale", f"{n} scales", f"V_d = {self.columns}")
        if self.base is not None:
            n = self.base.shape[2]
            check.require(
                n >= self.columns, "base_logits", f"{n} columns", f"at least V_d = {self.columns}"
            )

    def _float32(self, name: str, x: Any, shape: tuple[int | str, ...]) -> View | None:
        """A contiguous float32 view of an array of any accepted dtype, copied when necessary."""
        v = self.check.array(name, x, shape)
        return None if v is None else _as_float32(v)

    def _head(self, weight: Any, bias: Any, hidden: Any) -> None:
        check = self.check
        self.hidden = self.weight = self.bias = None
        self.has_hidden = hidden is not None
        if hidden is not None:
            v = check.array("hidden", hidden, ("R", "gamma", "d"))
            self.hidden = v if v is None or v.dtype == "float32" else _as_float32(v)
        if not check.choice("head", self.head, HEADS):
            return
        d = self.check.sizes.get("d", 0)
        if self.head == "vanilla":
            for name, x in (("head_weight", weight), ("head_bias", bias)):
                check.require(x is None, name, x, "None with the vanilla head")
            return
        check.require(hidden is not None, "hidden", "None", f"[R, gamma, d] with head {self.head}")
        r = self.rank
        outputs, inputs = (r, d + r) if self.head == "gated" else (3 * r, 2 * r + d)
        self.weight = self._float32("head_weight", weight, (outputs, inputs if d else "inputs"))
        self.bias = self._float32("head_bias", bias, (outputs,))

    def _confidence(self, weight: Any, bias: Any) -> None:
        check = self.check
        self.confidence: View | None = None
        self.confidence_bias = 0.0
        if bias is not None:
            host = not on_device(bias)
            known = "a number of the host: reading a device waits for it"
            check.require(host, "confidence_bias", bias, known)
            try:
                self.confidence_bias = float(bias) if host else 0.0
            except (TypeError, ValueError):
                check.fail("confidence_bias", type(bias).__name__, "a scalar")
            check.require(
                weight is not None, "confidence_bias", "a bias", "confidence_weight with it"
            )
        if weight is None:
            return
        expected = "[R, gamma, d] with confidence_weight"
        check.require(self.has_hidden, "hidden", "None", expected)
        self.confidence = self._float32("confidence_weight", weight, ("confidence inputs",))
        d = check.sizes.get("d", 0)
        if self.confidence is not None and self.hidden is not None:
            n = self.confidence.shape[0]
            sizes = f"d + r = {d + self.rank} or d = {d} values"
            check.require(n in (d, d + self.rank), "confidence_weight", f"{n} values", sizes)

    def _requests(self, a: dict[str, Any]) -> None:
        check, n = self.check, self.requests
        self.anchor = check.per_request("anchor", a["anchor"], n, "int32", optional=False)
        self.seed = check.per_request("seed", a["seed"], n, "uint64", optional=False)
        self.position = check.per_request("position", a["position"], n, "int64", optional=False)
        self.temperature = check.per_request("temperature", a["temperature"], n, "float32")
        self.top_k = check.per_request("top_k", a["top_k"], n, "int32")
        self.top_p = check.per_request("top_p", a["top_p"], n, "float32")
        self.active = check.per_request("active", a["active"], n, "uint8")
        known = self.active is not None and not on_device(self.active.array)
        self.keep = check.values(self.active) != 0 if known else None
        self._range(
            "position",
            self.position,
            "0 <= position < 2^32 - gamma",
            lambda x: (x >= 0) & (x < MAX_POSITION - self.gamma),
        )
        self._range(
            "temperature",
            self.temperature,
            "0 (greedy) or finite values >= 0.001",
            lambda t: (t == 0) | (np.isfinite(t) & (t >= MIN_TEMPERATURE)),
        )
        self._range("top_p", self.top_p, "0 < p <= 1", lambda p: (p > 0) & (p <= 1))
        self._uniform(a["debug_uniform"], n)
        m = a["topk_support"]
        ok = is_integer(m) and 0 <= int(m) <= MAX_SUPPORT
        check.require(ok, "topk_support", str(m), f"an integer in 0..{MAX_SUPPORT}")
        self.support = int(m) if ok else 0

    def _uniform(self, uniform: Any, n: int) -> None:
        check = self.check
        self.uniform: View | None = None
        if uniform is not None:
            fits = shape_of(uniform) == (n, self.gamma)
            values = np.asarray(to_numpy(uniform)) if fits else np.zeros(0)
            fits = fits and values.dtype.kind in "iu"
            if check.require(fits, "debug_uniform", uniform, f"[{n}, {self.gamma}] integers"):
                values = np.ascontiguousarray(values.astype(np.uint64))
                top = int(values.max(initial=0))
                check.require(top < 2**53, "debug_uniform", str(top), "53-bit integers")
                self.uniform = view(values)
                if self.base is not None and on_device(self.base.array):
                    torch = sys.modules["torch"]
                    self.uniform = view(torch.from_numpy(values).to(self.base.array.device))

    def _screen(self, a: dict[str, Any]) -> None:
        """The bytes of a screened greedy call, and that it is one."""
        check, given = self.check, a["w2_screen"] is not None
        self.screen = check.array(
            "w2_screen", a["w2_screen"], (None, "r"), ("int8",), optional=True
        )
        self.screen_scale = check.array(
            "screen_scale", a["screen_scale"], (None,), ("float32",), optional=True, contiguous=True
        )
        both = given == (a["screen_scale"] is not None)
        check.require(both, "w2_screen, screen_scale", "one of them", "both or none")
        if not given:
            return
        for name, v in (("w2_screen", self.screen), ("screen_scale", self.screen_scale)):
            rows = self.columns if v is None else v.shape[0]
            check.require(rows >= self.columns, name, f"{rows} rows", f"V_d = {self.columns}")
        dtype = "bfloat16" if self.w2 is None else self.w2.dtype
        check.require(dtype == "bfloat16", "w2_screen", f"bytes for a {dtype} w2", "a bfloat16 w2")
        t = check.values(self.temperature)
        known = self.temperature is None or len(t) == self.requests
        got = f"temperature {t[:4].tolist()}" if known else "temperatures on a device"
        check.require(known and not t.any(), "w2_screen", got, "a greedy call, temperature None")
        self.temperature = None
        check.require(not a["store_logits"], "w2_screen", "store_logits", "neither with the other")
        check.require(not self.support, "w2_screen", "topk_support", "neither with the other")

    def _range(self, name: str, v: View | None, expected: str, rule: Any) -> None:
        """Report a per-request argument whose active values break a rule."""
        values = self.check.values(v)
        if self.keep is not None and len(values):
            values = values[self.keep]
        with np.errstate(invalid="ignore"):
            bad = values[~rule(values)]
        self.check.require(len(bad) == 0, name, str(bad[:4].tolist()), expected)

    def _outputs(self, out: Draft | None, store_logits: bool) -> None:
        check, shape = self.check, (self.requests, self.gamma)
        out = check.results(out, Draft)
        self.out_tokens = check.output("out.tokens", out and out.tokens, shape, "int32")
        self.out_logit = check.output("out.logit", out and out.logit, shape, "float32")
        self.out_lse = None
        if self.screen is None:
            self.out_lse = check.output("out.lse", out and out.lse, shape, "float32")
        self.out_status = check.output("out.status", out and out.status, shape[:1], "int32")
        self.out_confidence = self.out_logits = None
        if self.confidence is not None:
            given = out and out.confidence_logit
            self.out_confidence = check.output("out.confidence_logit", given, shape, "float32")
        if store_logits and self.base is not None:
            given, full = out and out.logits, (*shape, self.columns)
            self.out_logits = check.output("out.logits", given, full, self.base.dtype)
        self.out_ids = self.out_support = None
        if self.support and self.base is not None:
            ids, values = out and out.support_ids, out and out.support_logits
            among = (*shape, self.support)
            self.out_ids = check.output("out.support_ids", ids, among, "int32")
            self.out_support = check.output("out.support_logits", values, among, self.base.dtype)

    def result(self) -> Draft:
        """The outputs as the caller sees them."""

        def array(v: View | None) -> Any:
            return None if v is None else v.array

        return Draft(
            tokens=array(self.out_tokens),
            logit=array(self.out_logit),
            lse=array(self.out_lse),
            confidence_logit=array(self.out_confidence),
            logits=array(self.out_logits),
            support_ids=array(self.out_ids),
            support_logits=array(self.out_support),
            status=array(self.out_status),
        )


def _as_float32(v: View) -> View:
    x = v.array
    if is_torch(x):
        return view(x.detach().float().contiguous())
    return view(np.ascontiguousarray(x, dtype=np.float32))


def _run_native(call: _Call) -> None:
    p = _C.MarkovLoopParams()
    ptr = _backend.ptr
    assert call.base is not None and call.w1 is not None and call.w2 is not None
    p.num_requests, p.gamma, p.num_threads = call.requests, call.gamma, _backend.num_threads()
    p.vocab_size, p.draft_vocab_size, p.rank = call.vocab, call.columns, call.rank
    p.head, p.topk_support = HEADS.index(call.head), call.support
    p.base_logits, p.base_dtype = call.base.ptr, call.base.code
    p.base_request_stride, p.base_slot_stride = call.base.strides[:2]
    p.w1, p.w1_dtype, p.w1_stride = call.w1.ptr, call.w1.code, call.w1.strides[0]
    p.w2, p.w2_dtype, p.w2_stride = call.w2.ptr, call.w2.code, call.w2.strides[0]
    p.w2_scale, p.head_weight, p.head_bias = ptr(call.scale), ptr(call.weight), ptr(call.bias)
    if call.screen is not None:
        p.w2_screen, p.w2_screen_stride = call.screen.ptr, call.screen.strides[0]
        p.screen_scale = ptr(call.screen_scale)
    if call.hidden is not None:
        p.hidden, p.hidden_size = call.hidden.ptr, call.hidden.shape[2]
        p.hidden_request_stride, p.hidden_slot_stride = call.hidden.strides[:2]
    if call.confidence is not None:
        p.confidence_weight, p.confidence_size = call.confidence.ptr, call.confidence.shape[0]
        p.confidence_bias = call.confidence_bias
    p.anchor, p.seed, p.position = ptr(call.anchor), ptr(call.seed), ptr(call.position)
    p.temperature, p.top_k, p.top_p = ptr(call.temperature), ptr(call.top_k), ptr(call.top_p)
    p.draft_to_target, p.active = ptr(call.d2t), ptr(call.active)
    p.debug_uniform = ptr(call.uniform)
    p.tokens, p.logit, p.lse = ptr(call.out_tokens), ptr(call.out_logit), ptr(call.out_lse)
    p.confidence_logit, p.status = ptr(call.out_confidence), ptr(call.out_status)
    if call.out_logits is not None:
        p.logits = call.out_logits.ptr
        p.logits_request_stride, p.logits_slot_stride = call.out_logits.strides[:2]
    p.support_ids, p.support_logits = ptr(call.out_ids), ptr(call.out_support)
    _backend.run("markov_loop", p, call.backend, call.base.array)


def _run_reference(call: _Call) -> None:
    def array(v: View | None) -> Any:
        return None if v is None else to_numpy(v.array)

    assert call.base is not None and call.w2 is not None
    dtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[call.base.dtype]
    with np.errstate(all="ignore"):
        answer = _backend.reference("markov_loop", "markov_loop")(
            array(call.base),
            array(call.w1),
            array(call.w2)[: call.columns],
            anchor=array(call.anchor),
            seed=array(call.seed),
            position=array(call.position),
            temperature=array(call.temperature),
            head=call.head,
            head_weight=array(call.weight),
            head_bias=array(call.bias),
            hidden=array(call.hidden),
            confidence_weight=array(call.confidence),
            confidence_bias=call.confidence_bias,
            w2_scale=None if call.scale is None else array(call.scale)[: call.columns],
            w2_screen=array(call.screen),
            screen_scale=array(call.screen_scale),
            topk_support=call.support,
            top_k=array(call.top_k),
            top_p=array(call.top_p),
            draft_to_target=array(call.d2t),
            vocab_size=call.vocab,
            active=array(call.active),
            store_logits=call.out_logits is not None,
            debug_uniform=array(call.uniform),
            dtype=dtype,
        )
    result = call.result()
    for name in (field.name for field in fields(Draft)):
        if getattr(result, name) is not None:
            _backend.copy_into(view(getattr(result, name)), getattr(answer, name), call.keep)


def markov_loop(
    base_logits: Any,
    w1: Any,
    w2: Any,
    *,
    anchor: Any,
    seed: Any,
    position: Any,
    temperature: Any = None,
    head: str = "vanilla",
    head_weight: Any = None,
    head_bias: Any = None,
    hidden: Any = None,
    confidence_weight: Any = None,
    confidence_bias: Any = None,
    w2_scale: Any = None,
    w2_screen: Any = None,
    screen_scale: Any = None,
    topk_support: int = 0,
    top_k: Any = None,
    top_p: Any = None,
    draft_to_target: Any = None,
    vocab_size: int | None = None,
    active: Any = None,
    store_logits: bool = False,
    out: Draft | None = None,
    strict: bool = False,
    backend: str | None = None,
    debug_uniform: Any = None,
) -> Draft:
    """Draw ``gamma`` draft tokens per request, each from a law that knows the token before it.

    ``x_k ~ softmax((U_k + B_k) / T)`` for k = 1..gamma, where the transition bias ``B_k`` depends
    on ``x_{k-1}`` and ``x_0`` is the anchor (DSpark eq. 4). With ``e = W1[x_{k-1}]``:

    ======== ================================================================================
    head     bias
    ======== ================================================================================
    vanilla  ``B = W2 e`` (eq. 5)
    gated    ``B = W2 (sigmoid(G [h_k; e] + g) * e)``
    rnn      ``B = W2 tanh(o)`` with gate, candidate and output ``o`` from one linear layer over
             ``[s; e; h_k]``; ``s' = sigmoid(gate) s + (1 - sigmoid(gate)) tanh(candidate)``,
             ``s_0 = 0`` (eq. 6)
    ======== ================================================================================

    Parameters
    ----------
    base_logits : array, shape (R, gamma, V_pad), float32, bfloat16 or float16
        Base logits U of every slot. Columns from V_d on are padding and never win.
    w1 : array, shape (V, r), float32, bfloat16 or float16
        Markov embedding, rows are target ids.
    w2 : array, shape (V_d, r), float32, bfloat16, float16 or int8
        Markov projection, rows are draft columns. int8 needs ``w2_scale``.
    anchor : array, shape (R,), int
        The last committed token of every request (a target id).
    seed : array, shape (R,), uint64
        Seeds of the requests; signed 64-bit arrays are taken bit by bit.
    position : array, shape (R,), int64
        Absolute position of the anchor, 0 <= position < 2^32 - gamma.
    temperature : array, shape (R,), float32, or scalar, optional
        T >= 0.001, or 0 for greedy; None means all greedy.
    head : {"vanilla", "gated", "rnn"}
        Which transition bias.
    head_weight, head_bias : arrays
        gated: (r, d + r) over ``[h; e]`` and (r,). rnn: (3r, 2r + d) over ``[s; e; h]``, rows in
        the order gate, candidate, output, and (3r,). Floats of any width; used as float32.
    hidden : array, shape (R, gamma, d)
        Final-norm hidden states h_k; needed by gated, rnn and the confidence logit.
    confidence_weight : array, shape (d + r,) or (d,), optional
        Weights of the confidence logit over ``[h_k; e]``, or over ``h_k``.
    confidence_bias : float, optional
        Its bias, 0 when absent.
    w2_scale : array, shape (V_d,), float32
        Row scales of an int8 ``w2``; nothing else takes them. The bias is then exact in integers:
        the r-vector x becomes ``q = rint(x / s)``, s the smallest power of two >= 2^-100 with
        ``max|x| <= 32512 s``, and ``B[v] = float32(q . w2[v]) * (s * w2_scale[v])`` in float32
        (contract, "An int8 W2"). See :func:`quantize_rows`.
    w2_screen, screen_scale : arrays, shape (V_d, r) int8 and (V_d,) float32, optional
        :func:`quantize_rows` of a bfloat16 ``w2``: an exact shortcut for calls that are greedy
        throughout. A backend bounds every logit from the bytes and computes from ``w2`` only what
        can be the argmax, so tokens and logits are those of ``w2`` at half its traffic (the CPU
        backend computes all of ``w2``). ``lse`` is None then; no ``store_logits``, no
        ``topk_support``.
    topk_support : int
        M in 1..1024: the law of slot k runs over the M largest base logits ``U_k`` only (ties:
        lowest id; NaN as -inf; all columns when V_d < M), and only their rows of ``w2`` are read.
        ``top_k`` and ``top_p`` then cut among the M. 0: all V_d columns.
    top_k : array, shape (R,), int32, or scalar, optional
        Keep the k most probable columns of the draft law; <= 0 is off.
    top_p : array, shape (R,), float32, or scalar, optional
        Then keep the most probable columns until their mass reaches p, 0 < p <= 1. The order is
        total: probability descending, id ascending. Greedy rows ignore both.
    draft_to_target : array, shape (V_d,), int, optional
        Strictly increasing target ids of a reduced draft vocabulary. Without it V_d = V.
    vocab_size : int, optional
        V when ``w1`` (and ``w2``) have padding rows; default: the rows of ``w1``.
    active : array, shape (R,), bool or uint8, optional
        0 marks padded rows, which are neither read nor written.
    store_logits : bool
        Also return the corrected logits z, with -inf at truncated columns.
    out : Draft, optional
        Preallocated results.
    strict : bool
        Synchronise and raise :class:`dspark_ext.StatusError` when a status bit reports trouble.
    backend : {None, "cpu", "cuda", "reference", "simt"}
        Forces one; by default the device of the arrays decides.
    debug_uniform : array, shape (R, gamma), 53-bit integers, optional
        Replace the draw inside the winning segment and make the noise of all segments equal, so
        that tests can force a draw. Never a way to sample.

    Returns
    -------
    Draft
        ``tokens`` (R, gamma) int32 target ids; ``logit`` and ``lse`` (R, gamma) float32 with
        ``log q(x) = logit / T - lse`` (T = 1 on greedy rows, whose law is one-hot);
        ``confidence_logit`` (R, gamma) float32 or None; ``logits`` (R, gamma, V_d) in the dtype of
        ``base_logits`` or None; with ``topk_support`` = M ``support_ids`` (R, gamma, M) int32, the
        target ids of the support in ascending order, and ``support_logits`` (R, gamma, M) their z
        in the dtype of ``base_logits`` (-1 and -inf behind the last column, -inf where truncated);
        ``status`` (R,) int32.

    Raises
    ------
    ArgumentError
        Lists every argument whose shape, dtype, device or range is wrong; nothing has been written.
    NotImplementedError
        ``backend="cuda"`` while the library has no kernel for it.

    Notes
    -----
    z = U + B is formed in float32 and rounded once to the dtype of ``base_logits``. That value
    decides the argmax, the draw, ``logit`` and ``lse``, so a verifier that uses them sees the law
    the token was drawn from: the condition for losslessness. That holds for a law restricted by
    ``topk_support`` too: ``lse`` sums over the support, and the stored ``logits`` are -inf outside.
    :func:`rejection_sample` takes such a draft as ``support_ids`` and ``support_logits``.

    The draw is a function of (seed, position, z) alone: batch slot, batch size, padding, threads
    and SIMD width do not change a token (contract, section 5). The confidence logit of slot k
    reads h_k and x_{k-1}, never x_k.

    Status bits: ``NAN_DRAFT`` (a NaN logit counts as -inf; with ``topk_support`` any NaN in U_k),
    ``BAD_DRAFT_ID`` (an anchor outside [0, V): its embedding counts as 0), ``EMPTY_SUPPORT`` (no
    logit above -inf: the lowest id, with logit and lse -inf). +inf counts as the largest finite
    value of the dtype.

    Examples
    --------
    >>> import numpy as np
    >>> u = np.array([[[0.25, -1.0, 2.0]]], dtype=np.float32)  # R = 1, gamma = 1, V = 3
    >>> w1 = np.array([[0, 0], [2, -1], [0, 0]], dtype=np.float32)
    >>> w2 = np.array([[1, 0.5], [-2, 1], [0.25, -0.75]], dtype=np.float32)
    >>> draft = markov_loop(u, w1, w2, anchor=[1], seed=[7], position=[10], store_logits=True)
    >>> draft.tokens.tolist(), draft.logits.tolist()
    ([[2]], [[[1.75, -6.0, 3.25]]])
    """
    arguments = {k: v for k, v in locals().items() if k not in ("out", "strict", "backend")}
    call = _Call(arguments, out, backend)
    if call.backend == "reference":
        _run_reference(call)
    else:
        _run_native(call)
    result = call.result()
    _backend.raise_on_trouble("markov_loop", result.status, strict)
    return result
