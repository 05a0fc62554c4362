# SPDX-License-Identifier: Apache-2.0
"""Target and drafter on the paged operators, against their dense forms and in whole rounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dspark_ext as dx  # noqa: E402
from dspark.drafters.config import DrafterConfig  # noqa: E402
from dspark.drafters.dspark import DSparkDrafter  # noqa: E402
from dspark.drafters.modeling import Drafter  # noqa: E402
from dspark.targets.dense import DecodeAttention, PrefillAttention, SlotCache  # noqa: E402
from dspark.targets.llama import Llama  # noqa: E402
from dspark.targets.paged import PagedAttention, PagedLlama, new_pages  # noqa: E402
from dspark_ext.interfaces import NewFeatures  # noqa: E402

# Float32 through four layers; the operators sum in another order than torch.
TOLERANCE = 2e-4


def make_drafter(
    llama: Llama, head: str = "vanilla", qk_norm: bool = False, reduced: bool = True
) -> Drafter:
    c = llama.config
    config = DrafterConfig(
        architecture="Qwen3DSparkModel" if qk_norm else "LlamaDSparkModel",
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        block_size=3,
        target_layer_ids=llama.taps,
        mask_token_id=1,
        num_target_layers=c.num_hidden_layers,
        markov_rank=5,
        markov_head_type=head,
        draft_vocab_size=25 if reduced else None,
    )
    torch.manual_seed(11)
    drafter = Drafter(config, torch.arange(2, 27) if reduced else None)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3)
    return drafter.attach(llama.embedding, llama.head_weight)


def dense_greedy(llama: Llama, prompt: list[int], count: int) -> list[int]:
    cache, ids = SlotCache(llama.config, 1, 96), list(prompt)
    hidden, _ = llama.hidden(
        torch.tensor(prompt), torch.arange(len(prompt)), PrefillAttention(cache, 0)
    )
    while len(ids) < len(prompt) + count:
        ids.append(int(llama.logits(hidden[-1:]).argmax()))
        position = torch.tensor([len(ids) - 1])
        hidden, _ = llama.hidden(torch.tensor(ids[-1:]), position, DecodeAttention(cache, position))
    return ids[len(prompt) :]


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_prefill_equals_dense(framework: str, tiny_llama: Callable[..., Llama]) -> None:
    llama = tiny_llama(seed=1, taps=(0, 2))
    prompts = [[3, 9, 21, 4, 4], [8], [30, 2, 17]]
    state = dx.RoundState.create(3, gamma=3, page_size=4, max_len=64, framework=framework)
    target = PagedLlama(llama)
    for prompt in prompts:
        state.add(prompt, dx.SamplingParams(max_new_tokens=4))
    first = dx.prefill(target, state)
    for slot, prompt in enumerate(prompts):
        assert int(first.tokens[slot, 0]) == dense_greedy(llama, prompt, 1)[0]
    features = state.pending_features()
    cache = SlotCache(llama.config, 1, 16)
    _, expected = llama.hidden(
        torch.tensor(prompts[0]), torch.arange(5), PrefillAttention(cache, 0)
    )
    assert np.allclose(np.asarray(features.rows)[:5], expected.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_block_equals_the_module(
    head: str, qk_norm: bool, tiny_llama: Callable[..., Llama], rng: np.random.Generator
) -> None:
    """Two requests of different length whose contexts arrive in two pieces."""
    llama = tiny_llama(seed=2, taps=(0, 2))
    module = make_drafter(llama, head, qk_norm)
    drafter = DSparkDrafter(module, llama)
    state = dx.RoundState.create(3, gamma=3, page_size=4, max_len=64, framework="torch")
    for slot, prompt in enumerate(([1] * 6, [1] * 2, [1] * 4)):
        assert state.add(prompt, dx.SamplingParams(max_new_tokens=20)) == slot
    state.host.active[:] = [1, 0, 1]
    state.host.position[:] = [6, 0, 4]
    state.host.kv_len[:] = [6, 0, 4]
    state.host.anchor[:] = [7, 0, 12]
    state.reserve()
    state.drafter_pages = drafter.new_cache(state.num_pages, state.page_size)
    features = [torch.from_numpy(rng.normal(size=(9, 48)).astype(np.float32)) for _ in range(2)]
    pieces = [(0, [6, 4]), (1, [2, 1])]  # committed tokens a call, then two and one more
    for call, counts in pieces:
        if call:
            for slot, more in ((0, 2), (2, 1)):
                state.host.position[slot] += more
                state.host.kv_len[slot] += more
            state.reserve()
        # Rows behind the valid ones belong to rejected drafts: garbage on purpose.
        starts = [0, 0] if call == 0 else [6, 4]
        rows, cu = [], [0]
        for slot, feature, begin, count in zip((0, 2), features, starts, counts, strict=True):
            rows += [feature[begin : begin + count], torch.full((2, 48), 1e3)]
            cu += [cu[-1] + count + 2] if slot == 0 else [cu[-1], cu[-1] + count + 2]
        new = NewFeatures(
            torch.cat(rows),
            np.array(cu, np.int32),
            np.array([counts[0], 0, counts[1]], np.int32),
        )
        for _ in range(2):  # an aborted round repeats the call
            base, hidden = drafter.draft(state.anchor, state.position, new, state)
    assert base.shape == (3, 3, 25) and hidden.shape == (3, 3, 24)
    assert float(base[1].abs().max()) == 0
    for row, (slot, anchor, position) in enumerate(((0, 7, 8), (2, 12, 5))):
        context = module.context(features[row][None, :position])
        expected = module.blocks(torch.tensor([[anchor]]), torch.tensor([[position]]), context)
        assert (hidden[slot] - expected[0, 0]).abs().max() < TOLERANCE
        logits = expected[0, 0] @ module.lm_head.T
        assert (base[slot] - logits).abs().max() < TOLERANCE * 10


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_rounds_emit_what_plain_decoding_emits(head: str, tiny_llama: Callable[..., Llama]) -> None:
    llama = tiny_llama(seed=3, taps=(0, 2))
    target = PagedLlama(llama)
    drafter = DSparkDrafter(make_drafter(llama, head), llama)
    prompts = [[3, 9, 21, 4, 4], [8], [30, 2, 17]]
    state = dx.RoundState.create(3, gamma=3, page_size=4, max_len=64, framework="torch")
    for prompt in prompts:
        state.add(prompt, dx.SamplingParams(max_new_tokens=24))
    rounds = [dx.prefill(target, state)]
    while state.active_slots():
        rounds.append(dx.decode_round(target, drafter, state))
    for slot, prompt in enumerate(prompts):
        emitted = [t for r in rounds for t in r.tokens[slot, : r.num_emitted[slot]].tolist()]
        assert emitted == dense_greedy(llama, prompt, 24)
    harmless = int(dx.Status.FORCED_REJECT) | int(dx.Status.STOPPED)
    assert all(not np.any(np.asarray(r.status) & ~harmless) for r in rounds)


def test_head_of_a_round_equals_teacher_forcing(tiny_llama: Callable[..., Llama]) -> None:
    """Draft tokens and confidence logits of the loop against the module with those tokens."""
    llama = tiny_llama(seed=4, taps=(0, 2))
    module = make_drafter(llama)
    drafter = DSparkDrafter(module, llama)
    target, prompt = PagedLlama(llama), [5, 6, 7, 8]
    state = dx.RoundState.create(1, gamma=3, page_size=4, max_len=64, framework="torch")
    state.add(prompt, dx.SamplingParams(max_new_tokens=9))
    dx.prefill(target, state)
    anchor, position = int(state.host.anchor[0]), int(state.host.position[0])
    features = torch.as_tensor(state.pending_features().rows)[None].clone()
    draft = dx.decode_round(target, drafter, state).draft
    assert draft is not None and draft.confidence_logit is not None
    hidden = module.blocks(
        torch.tensor([[anchor]]), torch.tensor([[position]]), module.context(features)
    )
    tokens = torch.as_tensor(draft.tokens)[0].long()
    previous = torch.tensor([anchor, *tokens[:-1].tolist()])
    logits, confidence = module.logits(hidden[0, 0], previous)
    assert module.d2t is not None and confidence is not None
    assert torch.equal(module.d2t.long()[logits.argmax(-1)], tokens)
    difference = torch.as_tensor(draft.confidence_logit)[0] - confidence
    assert float(difference.detach().abs().max()) < TOLERANCE * 10


def test_bfloat16_stays_close(tiny_llama: Callable[..., Llama]) -> None:
    exact, rounded = tiny_llama(seed=5), tiny_llama(seed=5, dtype=torch.bfloat16)
    ids, where = torch.tensor([3, 9, 21, 4]), torch.arange(4)
    outs = []
    for llama in (exact, rounded):
        c = llama.config
        pages = new_pages(c.num_hidden_layers, 1, 8, c.num_key_value_heads, c.head_dim, llama.dtype)
        table = np.zeros((1, 1), np.int32)
        attention = PagedAttention(
            pages, table, np.zeros(1, np.int32), np.full(1, 4, np.int32),
            np.array([0, 4], np.int32), 4,
        )  # fmt: skip
        outs.append(llama.logits(llama.hidden(ids, where, attention)[0]))
    assert outs[1].dtype == torch.float32
    # Eight bits of mantissa through four layers with a residual stream: a few per cent.
    assert (outs[0] - outs[1]).abs().max() < 0.08 * outs[0].abs().max()


def test_refuses_a_drafter_of_another_target(tiny_llama: Callable[..., Llama]) -> None:
    llama = tiny_llama(taps=(0, 2))
    module = make_drafter(llama)
    with pytest.raises(ValueError, match=r"target_layer_ids: drafter \(0, 2\), target \(1,\)"):
        DSparkDrafter(module, tiny_llama(taps=(1,)))
