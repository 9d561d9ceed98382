"""Launching and compiling Triton kernels: every line that depends on the versions of triton and jax-triton.

Works with triton 3.6 and jax-triton 0.3, and with triton 3.7 or later and jax-triton 0.4. Under
TRITON_INTERPRET=1 kernels run on the CPU in Triton's interpreter: for tests.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import json
import os
import pathlib
import tempfile
import threading
from typing import Any

import jax
import numpy as np

# Read once, and before jax-triton is imported, which clears the first of them.
_CACHE_DIR = pathlib.Path(os.environ.get("TRITON_CACHE_DIR") or pathlib.Path.home() / ".triton" / "cache")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def why_missing(platform: str) -> str | None:
    """Why no kernel can be launched on `platform`, in words, or None."""
    if platform == "cpu":
        if not INTERPRETED:
            return "Triton has no CPU backend"
        return None if importlib.util.find_spec("triton") else "triton is not installed"
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}; `pip install jax-triton triton`" if missing else None


# --- launching ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """One launch: arrays (or their abstract values) and integers, then outputs, then constants by name."""

    kernel: Any
    args: tuple
    out_shape: tuple
    grid: int
    num_warps: int
    num_stages: int
    constants: dict


_recording: list | None = None
_recorded_arch: str | None = None


def call(kernel, *args, out_shape, grid, num_warps, num_stages, **constants):
    """Launches `kernel` on `args`; returns a tuple of results, one for each of `out_shape`."""
    this = Call(kernel, args, tuple(out_shape), grid, num_warps, num_stages, constants)
    if _recording is not None:
        _recording.append(this)
        return tuple(jax.numpy.zeros(s.shape, s.dtype) for s in out_shape)
    if INTERPRETED:
        return _interpret(this)
    import jax_triton

    _keep_on_disk()
    out = "out_type" if "out_type" in inspect.signature(jax_triton.triton_call).parameters else "out_shape"
    return jax_triton.triton_call(
        *args, kernel=kernel, grid=(grid,), num_warps=num_warps, num_stages=num_stages, **{out: this.out_shape}, **constants
    )


def arch() -> str:
    """The architecture that is launched on: "sm_90", "gfx942", …, or "interpreter"."""
    if _recorded_arch is not None:
        return _recorded_arch
    if INTERPRETED:
        return "interpreter"
    capability = str(jax.local_devices()[0].compute_capability)
    return capability.split(":")[0] if capability.startswith("gfx") else "sm_" + capability.replace(".", "")


# --- interpreter ----------------------------------------------------------------------------------------

_interpreter_lock = threading.Lock()  # the interpreter keeps the program id in a global


class _Memory:
    """A NumPy array in the shape of the tensor that Triton's interpreter expects, without torch."""

    device = "cpu"

    def __init__(self, array, dtype=None):
        self.array = array
        self.dtype = dtype or array.dtype.name

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return _Memory(None, self.dtype)

    def set_(self, storage, *_):
        self.array = storage.array
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(s // self.array.itemsize for s in self.array.strides)

    def copy_(self, other):
        """The memory is shared already."""

    def is_contiguous(self):
        return True


def _interpret(this: Call):
    arrays = [x for x in this.args if not isinstance(x, int)]
    # The interpreter would multiply bfloat16 as the integers that hold its bits.
    memory_type = lambda x: np.dtype("float32") if x.dtype == jax.numpy.bfloat16 else x.dtype

    def run(*values):
        values = iter([np.array(x, memory_type(x)) for x in values])
        args = [x if isinstance(x, int) else _Memory(next(values)) for x in this.args]
        outputs = [np.empty(s.shape, memory_type(s)) for s in this.out_shape]
        for x in outputs:
            x.view(np.uint8)[...] = 0xFF  # NaN, so that what is not written shows
        with _interpreter_lock:
            this.kernel[(this.grid,)](*args, *map(_Memory, outputs), **this.constants)
        return tuple(x.astype(s.dtype) for x, s in zip(outputs, this.out_shape))

    return jax.pure_callback(run, this.out_shape, *arrays)


# --- compiling ------------------------------------------------------------------------------------------


@functools.cache
def _keep_on_disk():
    """Makes jax-triton look for a kernel on disk before it compiles it.

    What is compiled goes to Triton's cache folder under the hash of its Triton IR, so that processes and
    runs share it, and a code object that an executable names by its path is still there the next time.
    """
    import jax_triton.triton_lib as library

    compile_ttir = library.compile_ttir_inplace

    def lookup(ttir, backend, options, *rest, **kwargs):
        return _compile_or_read(ttir, backend, options, lambda: compile_ttir(ttir, backend, options, *rest, **kwargs))

    library.compile_ttir_inplace = lookup


def _compile_or_read(ttir, backend, options, compile_ttir):
    import jax_triton.triton_lib as library
    import triton

    ingredients = (str(ttir), str(backend.target), options.num_warps, options.num_stages, triton.__version__)
    name = hashlib.sha256(repr(ingredients).encode()).hexdigest()
    folder = _CACHE_DIR / "maxtext_aiter"
    binary, fields = folder / f"{name}.bin", folder / f"{name}.json"
    is_path = backend.target.backend == "hip"  # jaxlib reads the code object itself
    if not fields.exists():
        result = compile_ttir()
        folder.mkdir(parents=True, exist_ok=True)
        code = pathlib.Path(result.binary).read_bytes() if is_path else result.binary.encode()
        described = dataclasses.asdict(result) | {"binary": None, "ttgir": "", "llir": ""}
        _write(binary, code)
        _write(fields, json.dumps(described).encode())
    described = json.loads(fields.read_text())
    described["binary"] = str(binary) if is_path else binary.read_text()
    return library.CompilationResult(**described)


def _write(path, content: bytes):
    """In one step, since a thousand processes may do so at the same time."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


@contextlib.contextmanager
def _record(arch):
    global _recording, _recorded_arch
    _recording, _recorded_arch = [], arch
    try:
        yield _recording
    finally:
        _recording = _recorded_arch = None


def recorded(arch: str, function, *args) -> list[Call]:
    """The launches that `function` makes on `arch` for arguments like `args`; launches nothing."""
    with _record(arch) as calls:
        jax.eval_shape(function, *args)
    return calls


def _target(arch):
    from triton.backends.compiler import GPUTarget

    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def _source(this: Call, backend):
    """The kernel with the types of the call's arguments, as jax-triton passes it to Triton."""
    from triton.compiler import ASTSource

    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "uint32": "u32"}
    params = [p.name for p in this.kernel.params]
    arguments = (*this.args, *this.out_shape)
    signature, constants, attributes = {}, dict(this.constants), {}
    for i, (name, x) in enumerate(zip(params, arguments)):
        if isinstance(x, int):
            signature[name] = "i32"
            if x == 1:
                constants[name] = 1
        else:
            signature[name] = "*" + names[x.dtype.name]
            attributes[(i,)] = backend.parse_attr("D")  # XLA aligns its buffers
    for name in constants:
        signature[name] = "constexpr"
    return ASTSource(this.kernel, signature, constants, attributes)


def compiled(this: Call, arch: str):
    """The launch's kernel as Triton compiles it for `arch`: assembly and metadata, to look at."""
    import triton
    from triton.compiler import make_backend

    target = _target(arch)
    options = {"num_warps": this.num_warps, "num_stages": this.num_stages}
    return triton.compile(_source(this, make_backend(target)), target=target, options=options)


def compile_ahead(arch: str, function, *args) -> int:
    """Compiles to disk all kernels that `function` launches on `arch`; needs no GPU. Returns how many."""
    import jax_triton.triton_lib as library
    from triton._C import libtriton
    from triton.compiler import make_backend

    calls = recorded(arch, function, *args)
    target = _target(arch)
    backend = make_backend(target)
    rest = (target.arch, {"cuda": "cuda", "hip": "rocm"}[target.backend])
    if len(inspect.signature(library.compile_ttir_inplace).parameters) == 4:
        rest = (target,)
    for this in calls:
        options = backend.parse_options({"num_warps": this.num_warps, "num_stages": this.num_stages, "num_ctas": 1})
        context = libtriton.ir.context()
        libtriton.ir.load_dialects(context)
        backend.load_dialects(context)
        code_generators = backend.get_codegen_implementation(options)
        ttir = _source(this, backend).make_ir(target, options, code_generators, backend.get_module_map(), context)
        _compile_or_read(ttir, backend, options, lambda: library.compile_ttir_inplace(ttir, backend, options, *rest))
    return len(calls)
