"""MaxText's `AttentionOp` with our kernel against its own `dot_product`, call by call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxtext.common.common_types import AttentionType
from maxtext.configs import pyconfig
from maxtext.layers.attention_op import AttentionOp
from maxtext.utils import maxtext_utils

from maxtext_aiter.maxtext import plugin
from tests.maxtext.conftest import MAXTEXT, TINY
from tests.reference import error

plugin.install()

HEADS, KV_HEADS, DIM, LENGTH, BATCH = 4, 2, 16, 96, 2


@pytest.fixture(scope="module")
def config():
    keys = ("vocab_size=256", "dataset_type=synthetic", "dtype=float32", "attention=aiter_flash", "max_segments_per_seq=4")
    return pyconfig.initialize(["test", str(MAXTEXT / "configs" / "base.yml"), *TINY, *keys])


def _op(config, kernel="aiter_flash", **kwargs):
    devices = maxtext_utils.create_device_mesh(config, devices=jax.devices()[:1])
    mesh = jax.sharding.Mesh(devices, config.mesh_axes)
    settings = dict(
        config=config, mesh=mesh, attention_kernel=kernel, max_target_length=LENGTH, num_query_heads=HEADS,
        num_kv_heads=KV_HEADS, dtype=jnp.float32, float32_logits=True, rngs=nnx.Rngs(0),
    )
    return AttentionOp(**{**settings, **kwargs})


def _arrays(rng):
    shape = lambda heads: (BATCH, LENGTH, heads, DIM)
    q, k, v = (jnp.asarray(rng.standard_normal(shape(h)), jnp.float32) for h in (HEADS, KV_HEADS, KV_HEADS))
    return q * DIM**-0.5, k, v  # MaxText scales the query before this call


def _run(op, q, k, v, ids, mode="train", **kwargs):
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    out, maximum, total = op.apply_attention(
        q, k, v, ids, positions, None, mode,
        qk_product_einsum=op.AqtEinsum_0, wv_product_einsum=op.AqtEinsum_1, **kwargs,
    )
    return out if total is None else out / total


def _packed(*lengths):
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)


PACKINGS = {
    "unpacked": None,
    "one document": [_packed(LENGTH)] * 2,
    "packed": [_packed(30, 1, 65), _packed(50, 46)],
    "padded": [np.r_[_packed(30, 20), np.zeros(46)], np.r_[_packed(7), np.zeros(89)]],
    "more documents than max_segments_per_seq": [_packed(*[8] * 12), _packed(LENGTH)],
    "not in runs": [np.resize([1, 2, 1, 3], LENGTH), np.resize([3, 3, 0, 1, 2], LENGTH)],
}


@pytest.mark.parametrize("mode", ("train", "prefill"))
@pytest.mark.parametrize("packing", PACKINGS)
def test_as_dot_product(config, packing, mode, rng):
    q, k, v = _arrays(rng)
    ids = PACKINGS[packing]
    ids = None if ids is None else jnp.asarray(np.stack(ids), jnp.int32)
    cotangent = jnp.asarray(rng.standard_normal(q.shape), jnp.float32)

    def gradients(kernel):
        op = _op(config, kernel)
        out, vjp = jax.vjp(lambda q, k, v: _run(op, q, k, v, ids, mode), q, k, v)
        return out, *vjp(cotangent)

    for ours, theirs in zip(gradients("aiter_flash"), gradients("dot_product")):
        assert error(ours, theirs) < 1e-5


def test_decoding_is_dot_product(config, rng, caplog):
    q, k, v = _arrays(rng)
    ids = jnp.ones((BATCH, LENGTH), jnp.int32)
    ours, theirs = (_run(_op(config, kernel), q[:, :1], k, v, ids, "autoregressive") for kernel in ("aiter_flash", "dot_product"))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("op_kwargs", "call_kwargs", "message"),
    (
        ({"attn_logits_soft_cap": 30.0}, {}, "attn_logits_soft_cap=30.0"),
        ({"dropout_rate": 0.1}, {}, "dropout_rate=0.1"),
        ({"attention_type": AttentionType.LOCAL_SLIDING, "sliding_window_size": 8}, {}, "attention_type=local_sliding"),
        ({"attention_type": AttentionType.CHUNK, "chunk_attn_window_size": 8}, {}, "attention_type=chunk"),
        ({"attention_type": AttentionType.FULL}, {}, "attention_type=full"),
        ({"attention_type": AttentionType.MLA}, {}, "attention_type=mla"),
        ({}, {"sinks": jnp.zeros(HEADS)}, "attention_sink=true"),
        ({}, {"indexer_mask": jnp.zeros((BATCH, LENGTH, LENGTH))}, "use_indexer=true"),
        ({}, {"bidirectional_mask": jnp.zeros((BATCH, LENGTH), bool)}, "use_multimodal=true"),
        ({}, {"record_max_logits": True}, "use_qk_clip=true"),
        ({}, {"previous_chunk": jnp.zeros((1, 4))}, "use_chunked_prefill=true"),
        ({}, {"compressed_mask": jnp.zeros((BATCH, LENGTH, LENGTH))}, "compressed"),
        ({}, {"decoder_segment_ids_kv": jnp.ones((BATCH, LENGTH), jnp.int32)}, "segment ids of keys"),
    ),
    ids=lambda x: next(iter(x), None) if isinstance(x, dict) else None,
)
def test_what_is_not_supported_is_an_error(config, op_kwargs, call_kwargs, message, rng):
    q, k, v = _arrays(rng)
    with pytest.raises(ValueError, match=message) as caught:
        _run(_op(config, **op_kwargs), q, k, v, jnp.ones((BATCH, LENGTH), jnp.int32), **call_kwargs)
    assert "attention=dot_product" in str(caught.value) and "\n" not in str(caught.value)


def test_other_kernels_are_left_alone(config, rng):
    q, k, v = _arrays(rng)
    with pytest.raises(ValueError, match="Unexpected attention kernel"):
        _run(_op(config, "no_such_kernel"), q, k, v, None)
