"""Backward without atomics: dq over blocks of query rows, then dk and dv over blocks of keys.

Rows, intervals, ranges and order are those of `attention_fwd.py`; for a block of keys they are the
intervals of query tokens that see each key. The dq kernel also writes, for the second kernel, each row's
LSE in powers of two and delta = Σ dout · out - dlse, both [tokens, heads].
"""

import triton
import triton.language as tl

from maxtext_aiter.kernels import tiles


@triton.jit
def _probs_and_derivative(scores, visible, lse, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, MASKED: tl.constexpr):
    """exp(score - lse), and the derivative of the capped score by the uncapped one."""
    TO_LOG2: tl.constexpr = tiles.to_log2(SCALE, SOFT_CAP)
    slope = 1.0
    if SOFT_CAP > 0:
        scores = tiles.soft_cap(scores, SCALE, SOFT_CAP)
        slope = 1.0 - (scores / SOFT_CAP) * (scores / SOFT_CAP)
    probs = tl.exp2(scores * TO_LOG2 - lse)
    if MASKED:
        probs = tl.where(visible, probs, 0.0)
    return probs, slope


@triton.jit
def _dq_step(
    q, dout, dq, lse, delta, k_start, k_lo, k_hi, id_q, token, head,
    K, V, IDS, DROPOUT_KEY, tokens_k,
    MASKED: tl.constexpr, CHECK_IDS: tl.constexpr,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, DROPOUT: tl.constexpr,
    STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    CHUNKS_QK: tl.constexpr, CHUNKS_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_N)
    key = k_start + column
    inside = key < tokens_k
    k = tiles.load(K + tl.cast(k_start, tl.int64) * STRIDE_K, column * STRIDE_K, inside, MASKED, DIM_QK, CHUNKS_QK)
    v = tiles.load(V + tl.cast(k_start, tl.int64) * STRIDE_V, column * STRIDE_V, inside, MASKED, DIM_V, CHUNKS_V)
    scores = tiles.times_transposed(q, k, CHUNKS_QK)
    dprobs = tiles.times_transposed(dout, v, CHUNKS_V)
    visible = None
    if MASKED:
        visible = (key[None, :] >= k_lo[:, None]) & (key[None, :] < k_hi[:, None])
        if CHECK_IDS:
            visible = visible & (id_q[:, None] == tl.load(IDS + key, mask=inside, other=-1)[None, :])
    probs, slope = _probs_and_derivative(scores, visible, lse[:, None], SCALE, SOFT_CAP, MASKED)
    if DROPOUT > 0:
        keep = tiles.kept(DROPOUT_KEY, head[:, None], token[:, None], key[None, :], DROPOUT)
        dprobs = tl.where(keep, dprobs * (1.0 / (1.0 - DROPOUT)), 0.0)
    dscores = probs * (dprobs - delta[:, None]) * slope
    return tiles.add_times(dq, dscores, k, CHUNKS_QK)


@triton.jit
def attention_bwd_dq(
    Q, K, V, OUT, LSE, DOUT, DLSE, K_LO, K_HI, IDS, RANGES, ORDER, DROPOUT_KEY, tokens_q, tokens_k, row_tokens,
    DQ, LSE2, DELTA,
    HEADS_Q: tl.constexpr, HEADS_KV: tl.constexpr, PACK: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    CHUNKS_QK: tl.constexpr, CHUNKS_V: tl.constexpr, SCALE: tl.constexpr, SEGMENTS: tl.constexpr,
    SOFT_CAP: tl.constexpr, HAS_DLSE: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    STRIDE_K: tl.constexpr = HEADS_KV * DIM_QK
    STRIDE_V: tl.constexpr = HEADS_KV * DIM_V
    block = tl.load(ORDER + tl.program_id(0) // (HEADS_Q // PACK))
    head_0 = tl.program_id(0) % (HEADS_Q // PACK) * PACK
    head_kv = head_0 // (HEADS_Q // HEADS_KV)
    token_0 = block * (BLOCK_M // PACK)
    row = tl.arange(0, BLOCK_M)
    token = token_0 + row // PACK
    head = head_0 + row % PACK
    inside = token < tokens_q
    k_lo = tl.load(K_LO + token, mask=inside, other=0)
    k_hi = tl.load(K_HI + token, mask=inside, other=0)
    q_offset = row // PACK * (HEADS_Q * DIM_QK) + head * DIM_QK
    out_offset = row // PACK * (HEADS_Q * DIM_V) + head * DIM_V
    q_start = token_0.to(tl.int64) * (HEADS_Q * DIM_QK)
    out_start = token_0.to(tl.int64) * (HEADS_Q * DIM_V)
    dout = tiles.load(DOUT + out_start, out_offset, inside, True, DIM_V, CHUNKS_V)
    out = tiles.load(OUT + out_start, out_offset, inside, True, DIM_V, CHUNKS_V)
    delta = tl.zeros([BLOCK_M], tl.float32)
    for c in tl.static_range(len(CHUNKS_V)):
        delta += tl.sum(out[c].to(tl.float32) * dout[c].to(tl.float32), 1)
    # LSE and DLSE are [batch, heads, row_tokens].
    lse_offset = (token // row_tokens * HEADS_Q + head).to(tl.int64) * row_tokens + token % row_tokens
    lse = tl.load(LSE + lse_offset, mask=inside, other=0.0) * tiles.LOG2_E
    sees = lse > -float("inf")
    if HAS_DLSE:
        delta -= tl.where(sees, tl.load(DLSE + lse_offset, mask=inside, other=0.0), 0.0)
    lse = tl.where(sees, lse, 0.0)
    row_offset = token.to(tl.int64) * HEADS_Q + head
    tl.store(LSE2 + row_offset, lse, mask=inside)
    tl.store(DELTA + row_offset, delta, mask=inside)

    q = tiles.load(Q + q_start, q_offset, inside, True, DIM_QK, CHUNKS_QK)
    k_base = K + head_kv * DIM_QK
    v_base = V + head_kv * DIM_V
    id_q = k_lo
    ranges = RANGES + block * 6
    seen_lo = tl.load(ranges)
    full_lo = tl.load(ranges + 1)
    full_hi = tl.load(ranges + 2)
    seen_hi = tl.load(ranges + 3)
    dq = tiles.zeros(BLOCK_M, CHUNKS_QK)
    if SEGMENTS:  # ids that come in several runs: every tile compares ids, and the other loops are empty
        id_q = tl.load(IDS + token, mask=inside, other=-1)
        for k_start in range(tl.load(ranges + 4), tl.load(ranges + 5), BLOCK_N):
            dq = _dq_step(
                q, dout, dq, lse, delta, k_start, k_lo, k_hi, id_q, token, head, k_base, v_base, IDS, DROPOUT_KEY,
                tokens_k, True, True, SCALE, SOFT_CAP, DROPOUT, STRIDE_K, STRIDE_V, DIM_QK, DIM_V,
                CHUNKS_QK, CHUNKS_V, BLOCK_N,
            )  # fmt: skip
    num_left = (full_lo - seen_lo) // BLOCK_N
    num_masked = num_left + tl.cdiv(seen_hi - full_hi, BLOCK_N)
    for i in range(num_masked):
        k_start = tl.where(i < num_left, seen_lo + i * BLOCK_N, full_hi + (i - num_left) * BLOCK_N)
        dq = _dq_step(
            q, dout, dq, lse, delta, k_start, k_lo, k_hi, id_q, token, head, k_base, v_base, IDS, DROPOUT_KEY,
            tokens_k, True, False, SCALE, SOFT_CAP, DROPOUT, STRIDE_K, STRIDE_V, DIM_QK, DIM_V,
            CHUNKS_QK, CHUNKS_V, BLOCK_N,
        )  # fmt: skip
    for k_start in range(full_lo, full_hi, BLOCK_N):
        dq = _dq_step(
            q, dout, dq, lse, delta, k_start, k_lo, k_hi, id_q, token, head, k_base, v_base, IDS, DROPOUT_KEY,
            tokens_k, False, False, SCALE, SOFT_CAP, DROPOUT, STRIDE_K, STRIDE_V, DIM_QK, DIM_V,
            CHUNKS_QK, CHUNKS_V, BLOCK_N,
        )  # fmt: skip
    factor = tl.where(k_lo < k_hi, SCALE, 0.0)
    tiles.store(DQ + q_start, q_offset, inside, dq, factor, DIM_QK, CHUNKS_QK)


@triton.jit
def _dkdv_step(
    k, v, dk, dv, q_start, head_0, q_lo, q_hi, id_k, key,
    Q, DOUT, LSE2, DELTA, IDS, DROPOUT_KEY, tokens_q,
    MASKED: tl.constexpr, CHECK_IDS: tl.constexpr,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, DROPOUT: tl.constexpr,
    HEADS_Q: tl.constexpr, PACK: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    CHUNKS_QK: tl.constexpr, CHUNKS_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One tile of query rows; scores are transposed, [keys, rows]."""
    row = tl.arange(0, BLOCK_M)
    token = q_start + row // PACK
    head = head_0 + row % PACK
    inside = token < tokens_q
    token_0 = tl.cast(q_start, tl.int64)
    q_offset = row // PACK * (HEADS_Q * DIM_QK) + head * DIM_QK
    q = tiles.load(Q + token_0 * (HEADS_Q * DIM_QK), q_offset, inside, MASKED, DIM_QK, CHUNKS_QK)
    dout_offset = row // PACK * (HEADS_Q * DIM_V) + head * DIM_V
    dout = tiles.load(DOUT + token_0 * (HEADS_Q * DIM_V), dout_offset, inside, MASKED, DIM_V, CHUNKS_V)
    row_offset = row // PACK * HEADS_Q + head
    if MASKED:
        lse = tl.load(LSE2 + token_0 * HEADS_Q + row_offset, mask=inside, other=0.0)
        delta = tl.load(DELTA + token_0 * HEADS_Q + row_offset, mask=inside, other=0.0)
    else:
        lse = tl.load(LSE2 + token_0 * HEADS_Q + row_offset)
        delta = tl.load(DELTA + token_0 * HEADS_Q + row_offset)
    scores = tiles.times_transposed(k, q, CHUNKS_QK)
    dprobs = tiles.times_transposed(v, dout, CHUNKS_V)
    visible = None
    if MASKED:
        visible = (token[None, :] >= q_lo[:, None]) & (token[None, :] < q_hi[:, None])
        if CHECK_IDS:
            visible = visible & (id_k[:, None] == tl.load(IDS + token, mask=inside, other=-1)[None, :])
    probs, slope = _probs_and_derivative(scores, visible, lse[None, :], SCALE, SOFT_CAP, MASKED)
    dropped = probs
    if DROPOUT > 0:
        keep = tiles.kept(DROPOUT_KEY, head[None, :], token[None, :], key[:, None], DROPOUT)
        dropped = tl.where(keep, probs * (1.0 / (1.0 - DROPOUT)), 0.0)
        dprobs = tl.where(keep, dprobs * (1.0 / (1.0 - DROPOUT)), 0.0)
    dv = tiles.add_times(dv, dropped, dout, CHUNKS_V)
    dscores = probs * (dprobs - delta[None, :]) * slope
    dk = tiles.add_times(dk, dscores, q, CHUNKS_QK)
    return dk, dv


@triton.jit
def attention_bwd_dkdv(
    Q, K, V, DOUT, LSE2, DELTA, Q_LO, Q_HI, IDS, RANGES, ORDER, DROPOUT_KEY, tokens_q, tokens_k,
    DK, DV,
    HEADS_Q: tl.constexpr, HEADS_KV: tl.constexpr, PACK: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    CHUNKS_QK: tl.constexpr, CHUNKS_V: tl.constexpr, SCALE: tl.constexpr, SEGMENTS: tl.constexpr,
    SOFT_CAP: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = BLOCK_M // PACK  # tokens in a tile of query rows
    GROUP: tl.constexpr = HEADS_Q // HEADS_KV
    block = tl.load(ORDER + tl.program_id(0) // HEADS_KV)
    head_kv = tl.program_id(0) % HEADS_KV
    column = tl.arange(0, BLOCK_N)
    key = block * BLOCK_N + column
    inside = key < tokens_k
    q_lo = tl.load(Q_LO + key, mask=inside, other=0)
    q_hi = tl.load(Q_HI + key, mask=inside, other=0)
    k_offset = column * (HEADS_KV * DIM_QK) + head_kv * DIM_QK
    v_offset = column * (HEADS_KV * DIM_V) + head_kv * DIM_V
    k_start = (block * BLOCK_N).to(tl.int64) * (HEADS_KV * DIM_QK)
    v_start = (block * BLOCK_N).to(tl.int64) * (HEADS_KV * DIM_V)
    k = tiles.load(K + k_start, k_offset, inside, True, DIM_QK, CHUNKS_QK)
    v = tiles.load(V + v_start, v_offset, inside, True, DIM_V, CHUNKS_V)
    id_k = q_lo
    ranges = RANGES + block * 6
    seen_lo = tl.load(ranges)
    full_lo = tl.load(ranges + 1)
    full_hi = tl.load(ranges + 2)
    seen_hi = tl.load(ranges + 3)
    num_left = (full_lo - seen_lo) // STEP
    num_masked = num_left + tl.cdiv(seen_hi - full_hi, STEP)
    dk = tiles.zeros(BLOCK_N, CHUNKS_QK)
    dv = tiles.zeros(BLOCK_N, CHUNKS_V)
    for part in range(GROUP // PACK):
        head_0 = head_kv * GROUP + part * PACK
        if SEGMENTS:  # ids that come in several runs: every tile compares ids, and the other loops are empty
            id_k = tl.load(IDS + key, mask=inside, other=-2)
            for q_start in range(tl.load(ranges + 4), tl.load(ranges + 5), STEP):
                dk, dv = _dkdv_step(
                    k, v, dk, dv, q_start, head_0, q_lo, q_hi, id_k, key, Q, DOUT, LSE2, DELTA, IDS, DROPOUT_KEY,
                    tokens_q, True, True, SCALE, SOFT_CAP, DROPOUT, HEADS_Q, PACK, DIM_QK, DIM_V,
                    CHUNKS_QK, CHUNKS_V, BLOCK_M,
                )  # fmt: skip
        for i in range(num_masked):
            q_start = tl.where(i < num_left, seen_lo + i * STEP, full_hi + (i - num_left) * STEP)
            dk, dv = _dkdv_step(
                k, v, dk, dv, q_start, head_0, q_lo, q_hi, id_k, key, Q, DOUT, LSE2, DELTA, IDS, DROPOUT_KEY,
                tokens_q, True, False, SCALE, SOFT_CAP, DROPOUT, HEADS_Q, PACK, DIM_QK, DIM_V,
                CHUNKS_QK, CHUNKS_V, BLOCK_M,
            )  # fmt: skip
        for q_start in range(full_lo, full_hi, STEP):
            dk, dv = _dkdv_step(
                k, v, dk, dv, q_start, head_0, q_lo, q_hi, id_k, key, Q, DOUT, LSE2, DELTA, IDS, DROPOUT_KEY,
                tokens_q, False, False, SCALE, SOFT_CAP, DROPOUT, HEADS_Q, PACK, DIM_QK, DIM_V,
                CHUNKS_QK, CHUNKS_V, BLOCK_M,
            )  # fmt: skip
    seen = q_lo < q_hi
    tiles.store(DK + k_start, k_offset, inside, dk, tl.where(seen, SCALE, 0.0), DIM_QK, CHUNKS_QK)
    tiles.store(DV + v_start, v_offset, inside, dv, tl.where(seen, 1.0, 0.0), DIM_V, CHUNKS_V)
