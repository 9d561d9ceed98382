"""Attention on this CPU: `maxtext_aiter` beside plain JAX and, where installed, PyTorch, in one run.

    python bench/attention_cpu.py [--repeats 7] [--output FILE.json]

Prints milliseconds (median) of the forward and of forward and backward together, the ratio to each peer,
the floor (FLOPs over the speed of XLA's own float32 matrix product, measured first), and the peak memory
that one forward and backward adds at 8192 tokens, each in a process of its own.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from maxtext_aiter import flash_attention, flash_attention_varlen

HEADS, DIM = 8, 64
# name, dtype, tokens, length of each document (None: one), required speed-up over plain JAX
PROBLEMS = (
    ("dense", "float32", 2048, None, 4.5),
    ("dense", "bfloat16", 2048, None, 3.5),
    ("packed", "float32", 4096, 256, 40.0),
)
MEMORY_TOKENS = 8192


def plain(q, k, v, segment_ids):
    """What a user writes: a masked softmax, in the dtype of q, k, v."""
    length = q.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool)) & (segment_ids[:, None] == segment_ids[None, :])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * DIM**-0.5
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", probs.astype(v.dtype), v)


def ours(q, k, v, document):
    if document is None:
        return flash_attention(q, k, v, causal=True)
    length = q.shape[1]
    cu = jnp.arange(0, length + 1, document, dtype=jnp.int32)
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    return flash_attention_varlen(*flat, cu, cu, document, document, causal=True).reshape(q.shape)


def median_ms(function, repeats):
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def time_jax(attention, arrays, repeats):
    forward = jax.jit(attention)
    both = jax.jit(lambda q, k, v, dout: jax.vjp(attention, q, k, v)[1](dout))
    *qkv, _ = arrays
    return tuple(
        median_ms(lambda: jax.block_until_ready(f(*x)), repeats) for f, x in ((forward, qkv), (both, arrays))
    )


def time_torch(arrays, document, repeats):
    """PyTorch's CPU flash attention, documents split by hand into a batch; None if it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    dtype = getattr(torch, arrays[0].dtype.name)
    rows = lambda x: x.astype(jnp.float32).reshape(-1, document or x.shape[1], HEADS, DIM).swapaxes(1, 2)
    *qkv, dout = (torch.tensor(np.asarray(rows(x)), dtype=dtype) for x in arrays)
    attention = lambda: torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
    forward = median_ms(attention, repeats)
    for x in qkv:
        x.requires_grad_()
    return forward, median_ms(lambda: torch.autograd.grad(attention(), qkv, dout), repeats)


def matmul_gflops(repeats):
    a = jnp.asarray(np.random.default_rng(0).standard_normal((2048, 2048)), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    return 2 * 2048**3 / median_ms(lambda: product(a).block_until_ready(), repeats) / 1e6


def make_arrays(tokens, dtype):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((1, tokens, HEADS, DIM)), dtype) for _ in range(4)]


def added_memory_mib(which):
    """The peak resident memory that one forward and backward adds to a process that holds its inputs."""
    arrays = make_arrays(MEMORY_TOKENS, "float32")
    ids = jnp.zeros(MEMORY_TOKENS, jnp.int32)
    attention = (lambda *x: ours(*x, None)) if which == "ours" else (lambda *x: plain(*x, ids))
    both = jax.jit(lambda q, k, v, dout: jax.vjp(attention, q, k, v)[1](dout)).lower(*arrays).compile()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    jax.block_until_ready(both(*arrays))
    gradients = 3 * arrays[0].nbytes / 2**20  # what the caller asked for
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10 - gradients


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", help="write the figures as JSON")
    parser.add_argument("--memory-of", choices=("ours", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(added_memory_mib(options.memory_of))
        return

    gflops = matmul_gflops(options.repeats)
    table = Table(title=f"{platform.machine()}, XLA float32 matrix product {gflops:.0f} GFLOP/s; ms forward / both")
    for column in ("problem", "floor", "maxtext-aiter", "plain JAX", "PyTorch", "over plain JAX", "needed", "over PyTorch"):
        table.add_column(column, justify="right")
    results = []
    for name, dtype, tokens, document, needed in PROBLEMS:
        arrays = make_arrays(tokens, dtype)
        length = document or tokens
        ids = jnp.arange(tokens, dtype=jnp.int32) // length
        flops = 4 * (tokens // length) * (length * (length + 1) / 2) * HEADS * DIM
        floor = (flops / gflops / 1e6, 3.5 * flops / gflops / 1e6)
        torch_ms = time_torch(arrays, document, options.repeats)
        ours_ms = time_jax(lambda *x: ours(*x, document), arrays, options.repeats)
        plain_ms = time_jax(lambda *x: plain(*x, ids), arrays, max(3, options.repeats // 2))
        pair = lambda x: "–" if x is None else f"{x[0]:.1f} / {x[1]:.1f}"
        ratio = lambda x: None if x is None else tuple(a / b for a, b in zip(x, ours_ms))
        table.add_row(
            f"{name} {dtype} S{tokens}" + (f" documents of {document}" if document else ""),
            *map(pair, (floor, ours_ms, plain_ms, torch_ms, ratio(plain_ms))), f"{needed}", pair(ratio(torch_ms)),
        )
        results.append(
            {"problem": name, "dtype": dtype, "tokens": tokens, "document": document, "floor_ms": floor,
             "ours_ms": ours_ms, "plain_ms": plain_ms, "torch_ms": torch_ms}
        )
    memory = {
        which: float(subprocess.check_output([sys.executable, __file__, "--memory-of", which]))
        for which in ("ours", "plain")
    }
    Console(width=150).print(table)
    print(
        f"peak memory added at S{MEMORY_TOKENS} float32, forward and backward: ours {memory['ours']:.0f} MiB, "
        f"plain JAX {memory['plain']:.0f} MiB: 1/{memory['plain'] / memory['ours']:.0f}"
    )
    if options.output:
        with open(options.output, "w") as file:
            json.dump({"gflops": gflops, "problems": results, "memory_mib": memory}, file, indent=1)


if __name__ == "__main__":
    main()
