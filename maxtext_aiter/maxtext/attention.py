"""MaxText's `AttentionOp.apply_attention` for `attention=aiter_flash`.

q is [batch, seq, heads, head_dim] with the softmax scale already in it; causality is in buffer
coordinates; segment id 0 is padding, which attends to padding. Whatever this file does not know is an
error that names the key: an attention that is silently a different one trains to a different model.
"""

import functools

import jax

from maxtext_aiter.maxtext import compat
from maxtext_aiter.ops.attention import flash_attention

KERNEL_NAMES = ("aiter_flash", "jax_aiter_flash")  # the second is the name in AMD's fork

_AUTOREGRESSIVE = "autoregressive"


def apply_attention(stock, op, arguments):
    """Serves a call of `AttentionOp.apply_attention`; returns (out, max, sum), the last two None."""
    if op.attention_kernel not in KERNEL_NAMES:
        return stock(*arguments.args, **arguments.kwargs)
    call = arguments.arguments
    if call["model_mode"] == _AUTOREGRESSIVE:
        _say_decode(op.attention_kernel)
        return compat.dot_product(op, arguments)
    _refuse_unsupported(op, call)
    segment_ids = call["decoder_segment_ids"]
    operands = [call["query"], call["key"], call["value"]]
    arrays, segments = compat.mesh_axes(op)
    _check_divisible(op, operands, arrays)
    specs = [arrays] * 3
    if segment_ids is not None:
        operands.append(segment_ids)
        specs.append(segments)
    attend = functools.partial(_attend, _settings(op, packed=segment_ids is not None))
    # A kernel sees local arrays: under automatic partitioning XLA would gather the operands of a custom call.
    out = jax.shard_map(attend, mesh=op.mesh, in_specs=tuple(specs), out_specs=arrays, check_vma=False)(*operands)
    return out, None, None


def _attend(settings, q, k, v, segment_ids=None):
    return flash_attention(q, k, v, segment_ids=segment_ids, **settings)


def _settings(op, packed):
    provider = getattr(op.config, "aiter_attention_provider", "auto")
    settings = {"causal": True, "scale": 1.0, "provider": None if provider == "auto" else provider}
    if packed and op.config.max_segments_per_seq > 0:
        settings["max_segments"] = op.config.max_segments_per_seq
    return settings


@functools.cache
def _say_decode(kernel):
    from maxtext.utils import max_logging

    max_logging.log(f"attention={kernel} serves training and prefill; decoding uses MaxText's dot_product.")


def _refuse_unsupported(op, call):
    """Raises a ValueError that names the key, its value and what works, for what is not computed here."""
    config = op.config
    attention_type = op.attention_type.value
    unsupported = {
        f"attention_type={attention_type}": attention_type != "global",
        f"attn_logits_soft_cap={op.attn_logits_soft_cap}": bool(op.attn_logits_soft_cap),
        f"dropout_rate={op.dropout_rate}": op.dropout_rate > 0,
        "attention sinks (attention_sink=true)": call["sinks"] is not None,
        "moba=true": config.moba,
        "an indexer mask (use_indexer=true)": call["indexer_mask"] is not None,
        "a compressed-attention mask": call["compressed_mask"] is not None,
        "bidirectional blocks (use_multimodal=true)": call["bidirectional_mask"] is not None,
        "recorded maximal logits (use_qk_clip=true)": call["record_max_logits"],
        "chunked prefill (use_chunked_prefill=true)": call["previous_chunk"] is not None,
        "a quantized key/value cache (quantize_kvcache=true)": not isinstance(call["key"], jax.Array),
        "separate segment ids of keys": call["decoder_segment_ids_kv"] is not None,
        f"context parallelism over {config.context_sharding} "
        f"(ici_{config.context_sharding}_parallelism, dcn_{config.context_sharding}_parallelism)": (
            compat.context_parallel_size(op) > 1
        ),
    }
    for what, present in unsupported.items():
        if present:
            raise ValueError(
                f"attention={op.attention_kernel} does not support {what}; use attention=dot_product, "
                "or the key's default"
            )


def _check_divisible(op, operands, arrays):
    """MaxText shards heads over the tensor axes: every device must get whole key/value heads."""
    axes = arrays[2] or ()
    axes = (axes,) if isinstance(axes, str) else axes
    devices = 1
    for axis in axes:
        devices *= op.mesh.shape[axis]
    for name, x in zip(("query", "key/value"), operands):
        if x.shape[2] % devices:
            raise ValueError(
                f"attention={op.attention_kernel}: {x.shape[2]} {name} heads cannot be split over {devices} "
                f"devices (mesh axes {', '.join(axes)}); lower ici_tensor_parallelism or use attention=dot_product"
            )
