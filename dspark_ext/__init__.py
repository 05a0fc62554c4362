# SPDX-License-Identifier: Apache-2.0
"""The operators of DSpark speculative decoding (arXiv 2607.05147), without a framework.

Six families, one function or two each; ``decode_round`` composes them. Arrays may be torch tensors
or NumPy arrays; importing this package does not import torch.
"""

from __future__ import annotations

try:
    from dspark_ext import _C as _C
except ImportError as error:
    raise ImportError(
        f"dspark_ext: no compiled module _C in {__path__[0]}. In the source tree that is normal: "
        "run Python from another folder to use the installed package, or build it there with "
        "`make dev`"
    ) from error

from dspark_ext._arrays import ArgumentError
from dspark_ext._backend import StatusError
from dspark_ext._C import __version__
from dspark_ext.decode_round import Round, decode_round, prefill
from dspark_ext.fairness import Ageing
from dspark_ext.gate import Gate
from dspark_ext.info import info
from dspark_ext.interfaces import DraftHead
from dspark_ext.ops.confidence import confidence
from dspark_ext.ops.markov_loop import markov_loop
from dspark_ext.ops.paged_kv import paged_kv_append, paged_kv_commit
from dspark_ext.ops.prefix_scheduler import prefix_schedule
from dspark_ext.ops.rejection_sampler import rejection_sample
from dspark_ext.ops.rope import Rope
from dspark_ext.ops.verify_attention import verify_attention
from dspark_ext.pages import CapacityError
from dspark_ext.quantize import quantize_rows
from dspark_ext.results import Confidence, Draft, Plan, Verification
from dspark_ext.sampling import SamplingParams, mix_seed
from dspark_ext.scheduler import Scheduler
from dspark_ext.scheduling import CostTable, FingerprintError, LaggedSurvival
from dspark_ext.state import RoundState
from dspark_ext.status import Status

__all__ = [
    "Ageing",
    "ArgumentError",
    "CapacityError",
    "Confidence",
    "CostTable",
    "Draft",
    "DraftHead",
    "FingerprintError",
    "Gate",
    "LaggedSurvival",
    "Plan",
    "Rope",
    "Round",
    "RoundState",
    "SamplingParams",
    "Scheduler",
    "Status",
    "StatusError",
    "Verification",
    "__version__",
    "confidence",
    "decode_round",
    "info",
    "markov_loop",
    "mix_seed",
    "paged_kv_append",
    "paged_kv_commit",
    "prefill",
    "prefix_schedule",
    "quantize_rows",
    "rejection_sample",
    "verify_attention",
]
