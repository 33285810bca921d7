"""The tests of run.c: pytest -q test_all.py, or `make test`, which also sets up Python.

Three ways in: the engine's functions through build/run*.so (ctypes), ./run from outside, and the sanitizer build
build/debug. What is right is known independently of run.c: from an oracle in float64, from reference implementations in
Python, or by construction. What must be equal is compared to the bit; a tolerance is explained where it stands.

Tests that need the folder ../shared skip where it is absent; the rest needs no network."""

import ctypes
import fcntl
import functools
import json
import math
import os
import random
import re
import signal
import struct
import subprocess
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent
MODELS = ROOT.parent / "shared" / "models"
TOKENIZERS = ROOT.parent / "shared" / "tokenizers"
needs_shared = pytest.mark.skipif(not MODELS.is_dir(), reason="no ../shared/models")
LLAMA2 = ROOT / "tokenizer.bin"

# Processes and threads share few processors here, and a thread that waits for another must not keep it from running.
PATIENT = dict(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0")
for name, value in PATIENT.items():
    os.environ.setdefault(name, value)

f32, f64, i32, u8 = np.float32, np.float64, np.int32, np.uint8


@pytest.fixture(scope="session", autouse=True)
def build():
    with open(ROOT / "Makefile") as lock:  # one make at a time, whatever the number of test processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", "run", "debug", "library"], cwd=ROOT, check=True)


def run(*arguments, text=None, program="run", timeout=60, **options):
    """./run with these arguments. text: bytes piped to standard input, which is /dev/null otherwise."""
    source = dict(stdin=subprocess.DEVNULL) if text is None else dict(input=text)
    options["env"] = os.environ | options.get("env", {})
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout) | source | options
    return subprocess.run([ROOT / program, *map(str_or_bytes, arguments)], **options)


def str_or_bytes(argument):
    return argument if isinstance(argument, bytes) else str(argument)


def output(*arguments, **options):
    """What it prints on standard output; it must succeed."""
    result = run(*arguments, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(code, *arguments, naming=(), **options):
    """It must end with this code, print nothing on standard output and one line with these words on standard error."""
    result = run(*arguments, **options)
    message = result.stderr.decode()
    assert result.returncode == code, (result.returncode, message)
    assert not result.stdout
    assert message.startswith("run: ") and message.endswith("\n") and message.count("\n") == 1, message
    for word in naming:
        assert str(word) in message, message
    return message

# ---- llama2.c checkpoints: versions 0, 1 and 2, byte for byte as llama2.c's export.py lays them out ----


class Config(NamedTuple):
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    tied: bool


def layout(version, c):
    """[(name, shape)] in file order; tensors of one kind lie layer after layer."""
    head_dim, L = c.dim // c.n_heads, c.n_layers
    kv_dim = head_dim * c.n_kv_heads
    shape = dict(
        tok_embeddings=(c.vocab_size, c.dim), output=(c.vocab_size, c.dim),
        attention_norm=(L, c.dim), ffn_norm=(L, c.dim), norm=(c.dim,),
        wq=(L, c.dim, c.dim), wk=(L, kv_dim, c.dim), wv=(L, kv_dim, c.dim), wo=(L, c.dim, c.dim),
        w1=(L, c.hidden_dim, c.dim), w2=(L, c.dim, c.hidden_dim), w3=(L, c.hidden_dim, c.dim),
        freqs_cos=(c.seq_len, head_dim // 2), freqs_sin=(c.seq_len, head_dim // 2),
    )  # fmt: skip
    if version == 0:
        names = "tok_embeddings attention_norm wq wk wv wo ffn_norm w1 w2 w3 norm freqs_cos freqs_sin"
    else:
        names = "attention_norm ffn_norm norm tok_embeddings wq wk wv wo w1 w2 w3"
    names = names.split() + ([] if c.tied else ["output"])
    return [(name, shape[name]) for name in names]


def group_size_for(c):
    """llama2.c's back-off: 64, halved until it divides dim (hidden_dim is not looked at)."""
    group = 64
    while c.dim % group:
        group //= 2
    return group


def quantise(w, group):
    """q int8 [n/group, group], scale float32 [n/group]; an all-zero group has scale 0 and quants 0."""
    w = w.reshape(-1, group)
    scale = np.abs(w).max(1) / f32(127)
    return np.rint(w / np.where(scale > 0, scale, 1)[:, None]).astype(np.int8), scale


def write_checkpoint(path, version, c, tensors, group=None):
    """tensors: {name: float32 array shaped as layout() says}; group: of version 2, llama2.c's choice by default."""
    sizes = c[:5] + (-c.vocab_size if version == 0 and not c.tied else c.vocab_size, c.seq_len)
    with open(path, "wb") as file:
        if version > 0:
            file.write(struct.pack("<Ii", 0x616B3432, version))
        file.write(struct.pack("<7i", *sizes))
        if version > 0:
            file.write(struct.pack("<B", c.tied))
            if version == 2:
                file.write(struct.pack("<i", group or group_size_for(c)))
            file.write(b"\0" * (256 - file.tell()))
        for name, _ in layout(version, c):
            if version < 2 or "norm" in name:
                file.write(tensors[name].astype("<f4").tobytes())
                continue
            w = tensors[name]
            for matrix in w if w.ndim == 3 else [w]:
                q, scale = quantise(matrix, group or group_size_for(c))
                file.write(q.tobytes() + scale.astype("<f4").tobytes())


def read_checkpoint(path):
    """(Config, tensors) of a version 0 or 1 file."""
    data = path.read_bytes()
    version = 1 if data[:4] == b"24ka" else 0
    *sizes, vocab_size, seq_len = struct.unpack_from("<7i", data, 8 * version)
    tied = bool(data[36]) if version else vocab_size > 0
    c = Config(*sizes, abs(vocab_size), seq_len, tied)
    flat, at, tensors = np.frombuffer(data, "<f4", offset=256 if version else 28), 0, {}
    for name, shape in layout(version, c):
        tensors[name] = flat[at : at + math.prod(shape)].reshape(shape)
        at += math.prod(shape)
    assert at == len(flat)
    return c, tensors


def random_tensors(c):
    """Gains above 1 give sharp attention and gates that are far from linear; embeddings as small as sqrt(eps)
    make the epsilon matter. One embedding is zero: an all-zero row of activations."""
    rng = np.random.default_rng(zlib.crc32(repr(c).encode()))
    gain = dict(wq=2.0, wk=2.0, w1=2.0)
    tensors = {}
    for name, shape in layout(1, c) + layout(0, c)[-3:]:
        w = rng.standard_normal(shape)
        if name == "tok_embeddings":
            w *= 0.003
            w[5] = 0
        elif "norm" in name:
            w = 1 + 0.4 * w
        else:
            w *= gain.get(name, 1.0) / math.sqrt(shape[-1])
        tensors[name] = w.astype(f32)
    head_dim = c.dim // c.n_heads
    angle = np.arange(c.seq_len)[:, None] / 1e4 ** (np.arange(0, head_dim, 2) / head_dim)
    tensors["freqs_cos"], tensors["freqs_sin"] = np.cos(angle).astype(f32), np.sin(angle).astype(f32)
    return tensors


# ---- the oracle: the forward pass in float64, all positions at once, no cache ----


def rounded(x):
    """Activations as an int8 matrix sees them: groups of 32 columns, the last one may be shorter. x: [n, cols]"""
    out = np.empty(x.shape, f64)
    for k in range(0, x.shape[1], 32):
        q, scale = quantise_activations(x[:, k : k + 32])
        out[:, k : k + 32] = q * scale.astype(f64)
    return out


def quantise_activations(x):
    """One group: q int [n, group], scale float32 [n, 1]"""
    x = x.astype(f32)
    peak = np.abs(x).max(1, keepdims=True)
    inverse = np.where(peak > 0, f32(127) / np.where(peak > 0, peak, 1), f32(0))
    return np.rint(x * inverse).astype(int), peak / f32(127)


def as_stored(version, c, tensors, group=None):
    """{name: (float64 values, are activations rounded?)}: what a file of that version says."""
    stored = {}
    group = group or group_size_for(c)
    for name, shape in layout(version, c):
        w, rounds = tensors[name].astype(f64), False
        if version == 2 and "norm" not in name:
            q, scale = quantise(tensors[name], group)  # matrices are a multiple of the group: all layers in one go
            w = (q * scale.astype(f64)[:, None]).reshape(shape)
            rounds = shape[-1] % group == 0 and group % 16 == 0
        stored[name] = w, rounds
    return stored


def oracle(c, stored, tokens, eps=1e-5, base=1e4, halves=False, round_activations=True):
    """Logits [len(tokens), vocab_size] of one sequence. Keyword parameters are there to be set wrong."""
    T, head_dim, n_rep = len(tokens), c.dim // c.n_heads, c.n_heads // c.n_kv_heads
    angle = np.arange(T)[:, None] / base ** (np.arange(0, head_dim, 2) / head_dim)
    turn = np.exp(1j * angle)[:, None]  # [T, 1, head_dim/2]
    future = np.triu(np.full((T, T), -np.inf), 1)

    def rmsnorm(x, weight):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight

    def rope(x):  # [T, heads, head_dim]: pairs (2i, 2i+1) turn by pos·base^(-2i/head_dim)
        if halves:
            x = x.reshape(*x.shape[:2], 2, -1).swapaxes(2, 3).reshape(x.shape)
        return ((x[..., 0::2] + 1j * x[..., 1::2]) * turn).view(f64)

    def linear(x, name, layer=None):
        w, rounds = stored[name]
        x = rounded(x) if rounds and round_activations else x
        return x @ (w if layer is None else w[layer]).T

    x = stored["tok_embeddings"][0][tokens]
    for l in range(c.n_layers):
        h = rmsnorm(x, stored["attention_norm"][0][l])
        q = rope(linear(h, "wq", l).reshape(T, c.n_heads, head_dim))
        k = rope(linear(h, "wk", l).reshape(T, c.n_kv_heads, head_dim))
        v = linear(h, "wv", l).reshape(T, c.n_kv_heads, head_dim)
        out = np.empty((T, c.n_heads, head_dim))
        for i in range(c.n_heads):
            score = q[:, i] @ k[:, i // n_rep].T / np.sqrt(head_dim) + future
            weight = np.exp(score - score.max(-1, keepdims=True))
            out[:, i] = weight / weight.sum(-1, keepdims=True) @ v[:, i // n_rep]
        x = x + linear(out.reshape(T, c.dim), "wo", l)
        h = rmsnorm(x, stored["ffn_norm"][0][l])
        gate = linear(h, "w1", l)
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, "w3", l), "w2", l)
    return linear(rmsnorm(x, stored["norm"][0]), "tok_embeddings" if c.tied else "output")


def error(got, want):
    """Largest deviation, in units of the rms of what is right."""
    return np.abs(got - want).max() / np.sqrt(np.mean(want * want))


@needs_shared
@pytest.mark.parametrize("version, name", [(0, "stories260K.bin"), (1, "stories260K_v1.bin")])
def test_oracle_tells_the_story(version, name):
    ids = json.loads((MODELS / "stories260K.greedy199.json").read_text())
    c, tensors = read_checkpoint(MODELS / name)
    logits = oracle(c, as_stored(version, c, tensors), [1] + ids[:-1])
    assert logits.argmax(1).tolist() == ids


@needs_shared
@pytest.mark.parametrize("version, name", [(0, "stories260K.bin"), (1, "stories260K_v1.bin")])
def test_writer_repeats_the_exporter(version, name, tmp_path):
    c, tensors = read_checkpoint(MODELS / name)
    write_checkpoint(tmp_path / "copy.bin", version, c, tensors)
    assert (tmp_path / "copy.bin").read_bytes() == (MODELS / name).read_bytes()


# ---- the engine, through build/run*.so ----


def pointer(dtype):
    return np.ctypeslib.ndpointer(dtype, flags="C")


class Engine:
    """One build of run.c."""

    def __init__(self, path):
        lib = self.lib = ctypes.CDLL(str(path))
        void, int_ = ctypes.c_void_p, ctypes.c_int32
        lib.lib_model.restype, lib.lib_model.argtypes = void, [ctypes.c_char_p, int_]
        lib.lib_model_free.restype, lib.lib_model_free.argtypes = None, [void]
        lib.lib_vocab_size.restype, lib.lib_vocab_size.argtypes = int_, [void]
        lib.lib_session.restype, lib.lib_session.argtypes = void, [void] + [int_] * 4
        lib.lib_session_free.restype, lib.lib_session_free.argtypes = None, [void]
        lib.lib_forward.restype = None
        lib.lib_forward.argtypes = [void, int_] + [pointer(i32)] * 3 + [pointer(u8), pointer(f32)]
        lib.lib_matmul.restype = None
        lib.lib_matmul.argtypes = [int_] * 4 + [void, void, pointer(f32), int_, pointer(f32), int_, void]

    @contextmanager
    def session(self, checkpoint, n_ctx=128, n_seqs=1, max_rows=128, threads=1):
        """Yields forward(tokens, pos, seq, want=None) -> logits [wanted rows, vocab_size]; want: all by default."""
        model = self.lib.lib_model(str(checkpoint).encode(), threads)
        session = self.lib.lib_session(model, n_ctx, n_seqs, max_rows, threads)
        vocab_size = self.lib.lib_vocab_size(model)

        def forward(tokens, pos, seq=0, want=None):
            n = len(tokens)
            want = np.ones(n, u8) if want is None else np.asarray(want, u8)
            logits = np.full((int(want.sum()), vocab_size), np.nan, f32)
            rows = [np.ascontiguousarray(np.broadcast_to(a, n), i32) for a in (tokens, pos, seq)]
            self.lib.lib_forward(session, n, *rows, want, logits)
            return logits

        yield forward
        self.lib.lib_session_free(session)
        self.lib.lib_model_free(model)

    def logits(self, checkpoint, tokens, chunk=128, **options):
        """[len(tokens), vocab_size]: one sequence, chunk rows a call."""
        with self.session(checkpoint, **options) as forward:
            calls = [slice(at, at + chunk) for at in range(0, len(tokens), chunk)]
            return np.concatenate([forward(tokens[s], np.arange(len(tokens))[s]) for s in calls])

    def matmul(self, w, x, scale=None, threads=1):
        """y [n, rows] = x [n, cols]·wᵀ; w: [rows, cols] float32, or int8 with scale [rows, cols/group]."""
        (rows, cols), n = w.shape, len(x)
        y = np.full((n, rows), np.nan, f32)
        group, scale_at = (0, None) if scale is None else (cols // scale.shape[1], scale.ctypes.data)
        self.lib.lib_matmul(0, rows, cols, group, w.ctypes.data, scale_at, x, n, y, threads, None)
        return y


BUILDS = ["run", "run-avx2", "run-plain"]


@pytest.fixture(scope="session")
def engine():
    """engine(name): that build; skips where the processor cannot run it."""
    @functools.cache
    def load(name="run"):
        cpuinfo = Path("/proc/cpuinfo")
        if name == "run-avx2" and not (cpuinfo.exists() and " avx2 " in cpuinfo.read_text()):
            pytest.skip("no AVX2 here")
        return Engine(ROOT / "build" / f"{name}.so")

    return load


#                dim hidden  L  H  KV  vocab  seq  tied      head_dim, group of version 2, where groups cross rows
SHAPES = dict(
    even=Config(64, 192, 2, 4, 2, 131, 128, False),        # 16, 64, none
    ragged=Config(64, 172, 2, 4, 4, 131, 160, True),       # 16, 64, w2
    pairs=Config(44, 100, 2, 22, 1, 97, 128, False),       # 2, 4: too small for int8
    six=Config(48, 33, 3, 8, 2, 97, 128, True),            # 6, 16, w2
    eighteen=Config(72, 100, 2, 4, 1, 97, 128, True),      # 18, 8: too small for int8, and w2
    shorter=Config(48, 80, 2, 3, 1, 33, 128, False),       # 16, 16, none; the last group of activations is short
    twenty_two=Config(44, 172, 3, 2, 2, 131, 128, True),   # 22, 4: too small for int8
    halves=Config(96, 160, 2, 6, 3, 97, 128, True),        # 16, 32, none
    one_head=Config(128, 172, 1, 1, 1, 97, 128, False),    # 128, 64, w2
)  # fmt: skip
N_ROWS = 96


class Case(NamedTuple):
    path: Path
    config: Config
    stored: dict
    tokens: np.ndarray


@pytest.fixture(scope="session")
def case(tmp_path_factory):
    """case(shape, version, group=None): a random checkpoint and a sequence to run on it."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def make(shape, version, group=None):
        c = SHAPES[shape]
        tensors = random_tensors(c)
        path = folder / f"{shape}-v{version}-{group}.bin"
        write_checkpoint(path, version, c, tensors, group)
        tokens = np.random.default_rng(1).integers(0, c.vocab_size, N_ROWS).astype(i32)
        tokens[:9] = [1, 5, 5, 7, 5, 8, 8, 8, c.vocab_size - 1]  # 5 is the all-zero embedding
        return Case(path, c, as_stored(version, c, tensors, group), tokens)

    return make


# ---- forward against the oracle ----


# float32 against float64: a unit of rounding is 6e-8; a few hundred of them, through sharp attention, make 3e-5 of the
# rms in the worst of 12,000 logits. The wrong maths below are at 1 and above.
F32_TOLERANCE = 1e-4

# int8: rounding activations erases float32 noise, so a row is right to 3e-7 of the rms. But where a value lies on the
# edge between two quants (about one in 10,000) the two sides round it apart, by one step of 1/127 of its group's peak,
# and through attention every later row of the text feels it. In texts of 8 tokens few rows are hit: the typical row
# is near. In a long text no row is far. Activations that are not rounded make the typical row wrong by 0.02.
INT8_TYPICAL, INT8_WORST = 1e-5, 0.15


def row_errors(got, want):
    """Per row: rms deviation in units of the rms of all that is right."""
    return np.sqrt(np.mean((got - want) ** 2, 1) / np.mean(want * want))


def short_texts_oracle(case, **wrong):
    """Logits [96, vocab_size] of the case's tokens as twelve texts of 8"""
    return np.concatenate([oracle(case.config, case.stored, text, **wrong) for text in case.tokens.reshape(12, 8)])


def check_int8(engine, case):
    with engine().session(case.path, n_seqs=12, threads=2) as forward:
        short_texts = forward(case.tokens, np.tile(np.arange(8), 12), np.repeat(np.arange(12), 8))
    assert np.median(row_errors(short_texts, short_texts_oracle(case))) < INT8_TYPICAL
    long_text = engine().logits(case.path, case.tokens, threads=2)
    assert row_errors(long_text, oracle(case.config, case.stored, case.tokens)).max() < INT8_WORST


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("version", [0, 1, 2])
def test_forward_equals_oracle(engine, case, shape, version):
    this = case(shape, version)
    if any(rounds for _, rounds in this.stored.values()):
        check_int8(engine, this)
    else:
        got = engine().logits(this.path, this.tokens, threads=2)
        assert error(got, oracle(this.config, this.stored, this.tokens)) < F32_TOLERANCE


OTHER_GROUPS = [("even", 16), ("even", 32), ("halves", 16), ("shorter", 48), ("one_head", 128)]


@pytest.mark.parametrize("shape, group", OTHER_GROUPS)
def test_forward_with_other_groups(engine, case, shape, group):
    """llama2.c's exporter would not choose them, but a file may hold them."""
    check_int8(engine, case(shape, 2, group))


WRONG = [dict(eps=1e-6), dict(base=5e5), dict(halves=True), dict(round_activations=False)]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_tolerances_see_wrong_maths(case, wrong):
    if "round_activations" not in wrong:
        _, c, stored, tokens = case("even", 0)
        assert error(oracle(c, stored, tokens, **wrong), oracle(c, stored, tokens)) > 1000 * F32_TOLERANCE
    int8 = case("even", 2)
    assert np.median(row_errors(short_texts_oracle(int8, **wrong), short_texts_oracle(int8))) > 1000 * INT8_TYPICAL


@needs_shared
@pytest.mark.parametrize("name", ["stories260K.bin", "stories260K_v1.bin"])
def test_engine_tells_the_story(engine, name):
    ids = json.loads((MODELS / "stories260K.greedy199.json").read_text())
    logits = engine().logits(MODELS / name, [1] + ids[:-1], n_ctx=256, chunk=50, threads=2)
    assert logits.argmax(1).tolist() == ids


# ---- the same bits however they are computed ----


def same(a, b):
    """Equal to the last bit (so that NaN equals NaN, and 0 is not -0)."""
    return a.dtype == b.dtype == f32 and np.array_equal(a.view(i32), b.view(i32))


KINDS = [("even", 0), ("six", 1), ("even", 2), ("shorter", 2), ("ragged", 2)]  # float32, int8, both in one file
every_kind = pytest.mark.parametrize("shape, version", KINDS)


@pytest.fixture(scope="session")
def alone(engine, case):
    """alone(shape, version): the logits that every other way must repeat: one thread, all rows in one call."""
    return functools.cache(lambda *key: engine().logits(case(*key).path, case(*key).tokens))


@every_kind
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 7, N_ROWS])
def test_chunks_and_threads(engine, case, alone, shape, version, threads, chunk):
    path, _, _, tokens = case(shape, version)
    assert same(engine().logits(path, tokens, chunk=chunk, threads=threads), alone(shape, version))


@every_kind
def test_room_does_not_matter(engine, case, alone, shape, version):
    path, _, _, tokens = case(shape, version)
    assert same(engine().logits(path, tokens, n_ctx=N_ROWS, max_rows=N_ROWS), alone(shape, version))


@every_kind
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("chunk", [1, 5, N_ROWS])
def test_builds(engine, case, alone, shape, version, build, chunk):
    path, _, _, tokens = case(shape, version)
    assert same(engine(build).logits(path, tokens, chunk=chunk, threads=2), alone(shape, version))


@every_kind
@pytest.mark.parametrize("threads", [1, 2])
def test_sequences_in_one_call(engine, case, shape, version, threads):
    """Thirteen sequences of unequal length whose rows come in a random order, 11 a call, each row somewhere after its
    past; then a call may hold a whole prompt of one sequence and one token of another."""
    path, c, _, _ = case(shape, version)
    rng = np.random.default_rng(2)
    lengths = [40, 61, *rng.integers(1, 40, 11)]
    sequences = [rng.integers(0, c.vocab_size, n).astype(i32) for n in lengths]
    want = [engine().logits(path, tokens) for tokens in sequences]
    seq = rng.permutation(np.repeat(np.arange(13), lengths))
    pos = np.empty_like(seq)
    for s, n in enumerate(lengths):
        pos[seq == s] = np.arange(n)
    tokens = np.array([sequences[s][p] for s, p in zip(seq, pos)])
    with engine().session(path, n_seqs=13, max_rows=11, threads=threads) as forward:
        for at in range(0, len(seq), 11):
            rows = rng.permutation(np.arange(at, min(at + 11, len(seq))))  # within a call, order is free
            got = forward(tokens[rows], pos[rows], seq[rows])
            assert same(got, np.array([want[s][p] for s, p in zip(seq[rows], pos[rows])]))
    with engine().session(path, n_seqs=2, threads=threads) as forward:
        forward(sequences[0][:39], np.arange(39), 0)
        got = forward(np.append(sequences[1], sequences[0][39]), np.append(np.arange(61), 39), [1] * 61 + [0])
        assert same(got, np.concatenate([want[1], want[0][39:]]))


@every_kind
def test_only_wanted_logits(engine, case, alone, shape, version):
    path, _, _, tokens = case(shape, version)
    rng = np.random.default_rng(3)
    for share in (0, 0.1, 0.5, 0.9):
        want = rng.random(N_ROWS) < share
        with engine().session(path, threads=2) as forward:
            assert same(forward(tokens, np.arange(N_ROWS), want=want), alone(shape, version)[want])
    with engine().session(path) as forward:
        last = np.arange(N_ROWS) == N_ROWS - 1
        assert same(forward(tokens, np.arange(N_ROWS), want=last), alone(shape, version)[-1:])


@every_kind
def test_the_past_can_be_rewritten(engine, case, alone, shape, version):
    path, _, _, tokens = case(shape, version)
    with engine().session(path, threads=2) as forward:
        forward(tokens[::-1], np.arange(N_ROWS))  # another text
        forward(tokens[:20], np.arange(20))
        forward(tokens[50:60], np.arange(20, 30))  # a draft that is thrown away
        assert same(forward(tokens[20:], np.arange(20, N_ROWS)), alone(shape, version)[20:])


@pytest.mark.parametrize("version", [0, 2])
def test_long_text(engine, tmp_path, version):
    """500 positions: many blocks of attention, whatever their length."""
    c = Config(32, 64, 1, 2, 1, 40, 512, True)
    tensors, path = random_tensors(c), tmp_path / "long.bin"
    write_checkpoint(path, version, c, tensors)
    tokens = np.random.default_rng(6).integers(0, c.vocab_size, 500).astype(i32)
    whole = engine().logits(path, tokens, n_ctx=512, max_rows=500, chunk=500)
    errors = row_errors(whole, oracle(c, as_stored(version, c, tensors), tokens))
    assert errors.max() < (F32_TOLERANCE if version == 0 else INT8_WORST)
    for chunk in (1, 7, 100, 128):
        for build in ("run", "run-plain"):
            assert same(engine(build).logits(path, tokens, n_ctx=512, chunk=chunk, threads=2), whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_version_0_and_1_say_the_same(engine, case, alone, shape):
    assert same(alone(shape, 0), alone(shape, 1))


# ---- kernels ----


def fma(a, b, c):
    """float32 a·b + c rounded once. The product is exact in double; the sum is rounded to odd there, which a second
    rounding to float32 cannot spoil (Boldo & Melquiond 2008)."""
    p, c = a.astype(f64) * b, np.asarray(c, f64)
    s = p + c
    t = s - p
    rest = (p - (s - t)) + (c - t)  # s + rest = p + c exactly (Knuth's two-sum)
    even = s.view(np.int64) % 2 == 0
    s = np.where((rest != 0) & even, np.nextafter(s, np.copysign(np.inf, rest)), s)
    return s.astype(f32)


def matmul_f32(w, x):
    """What every build must give: k ascends, one fused multiply-add each."""
    y = np.zeros((len(x), len(w)), f32)
    for k in range(w.shape[1]):
        y = fma(x[:, k, None], w[None, :, k], y)
    return y


def matmul_int8(w, scale, x):
    """Blocks as long as weights and activations (32) share a scale; integers are exact, blocks ascend, one fused
    multiply-add each."""
    y = np.zeros((len(x), len(w)), f32)
    group = w.shape[1] // scale.shape[1]
    step = math.gcd(group, 32)
    for k in range(0, w.shape[1], step):
        q, x_scale = quantise_activations(x[:, k // 32 * 32 : k // 32 * 32 + 32])
        dot = q[:, k % 32 : k % 32 + step] @ w[:, k : k + step].T.astype(int)
        y = fma(dot.astype(f32), x_scale * scale[None, :, k // group], y)
    return y


F32_SHAPES = [(rows, cols) for rows in (1, 2, 15, 16, 17, 31, 32, 33, 48, 50) for cols in (1, 2, 3, 7, 16, 44, 129)]
F32_SHAPES += [(rows, 1 + rows * 37 % 150) for rows in range(1, 51)] + [(128, 512), (100, 1000), (7, 2048)]


@pytest.mark.parametrize("build", BUILDS)
def test_matmul_f32(engine, build):
    rng = np.random.default_rng(4)
    for rows, cols in F32_SHAPES:
        w = rng.standard_normal((rows, cols)).astype(f32)
        x = rng.standard_normal((20, cols)).astype(f32)
        want = matmul_f32(w, x)
        # cols roundings, each at most 2^-24 of a partial sum, which the sum of magnitudes bounds
        bound = cols * 2.0**-23 * (np.abs(x).astype(f64) @ np.abs(w).T.astype(f64))
        assert (np.abs(want - x.astype(f64) @ w.T.astype(f64)) <= bound).all()
        for n in range(1, 21):
            got = engine(build).matmul(w, x[:n].copy(), threads=1 + n % 3)
            assert same(got, want[:n]), (rows, cols, n)


INT8_SHAPES = [(rows, cols) for rows in (1, 2, 15, 16, 17, 33, 50) for cols in (16, 32, 48, 80, 96, 128, 192, 208)]
INT8_SHAPES += [(rows, 192) for rows in range(1, 51)] + [(64, 512), (7, 2048)]


def int8_operands(rng, rows, cols, group):
    w = rng.integers(-128, 128, (rows, cols)).astype(np.int8)
    scale = np.exp(rng.standard_normal((rows, cols // group))).astype(f32) / f32(127)
    x = (rng.standard_normal((20, cols)) * np.exp(rng.standard_normal((20, 1)))).astype(f32)
    x[3] = 0
    x[4:, :32] = 0  # all-zero groups
    w[0, :group] = 0
    scale[0, 0] = 0
    return w, scale, x


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("group", [16, 32, 48, 64])
def test_matmul_int8(engine, build, group):
    rng = np.random.default_rng(5)
    for rows, cols in [shape for shape in INT8_SHAPES if shape[1] % group == 0]:
        w, scale, x = int8_operands(rng, rows, cols, group)
        want = matmul_int8(w, scale, x)
        exact = rounded(x) @ (w * np.repeat(scale.astype(f64), group, 1)).T
        # two roundings a block, and one for the product of the scales
        bound = (cols / 16 + 2) * 2.0**-23 * (np.abs(rounded(x)) @ np.abs(w * np.repeat(scale.astype(f64), group, 1)).T)
        assert (np.abs(want - exact) <= bound).all()
        for n in range(1, 21):
            got = engine(build).matmul(w, x[:n].copy(), scale, threads=1 + n % 3)
            assert (np.abs(got - exact[:n]) <= bound[:n]).all(), (rows, cols, n)
            assert same(got, want[:n]), (rows, cols, n)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("value", [-128, 127])
@pytest.mark.parametrize("sign", [-1, 1])
def test_matmul_int8_extremes(engine, build, value, sign):
    """Every product at its largest: sums in 16 bits would overflow here if anywhere."""
    w = np.full((17, 64), value, np.int8)
    scale = np.ones((17, 2), f32)
    x = np.full((9, 64), 127 * sign, f32)
    x[1::2, ::2] *= -1
    got = engine(build).matmul(w, x, scale)
    assert np.array_equal(got, x @ w.T.astype(f32))


@pytest.mark.parametrize("build", BUILDS)
def test_activations_round_to_even(engine, build):
    """The peak is 127, so that the scale is 1 and halves are halves."""
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5] + [0] * 24], f32)
    got = engine(build).matmul(np.eye(32, dtype=np.int8), x, np.ones((32, 1), f32))
    assert got[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@pytest.mark.parametrize("build", BUILDS)
def test_matmul_int8_hides_no_nan(engine, build):
    """NaN must reach the logits, where the sampler looks for it; a group too small to be scaled counts as zero."""
    x = np.zeros((4, 64), f32)
    x[0, 40], x[1, 40], x[2, 40], x[3, 40] = np.nan, np.inf, 1e-40, 1
    got = engine(build).matmul(np.ones((17, 64), np.int8), x, np.ones((17, 2), f32))
    assert not np.isfinite(got[:2]).any()
    assert (got[2] == 0).all() and np.allclose(got[3], 1, rtol=1e-6)

# ---- vocabularies ----

SPECIAL = [b"<unk>", b"\n<s>\n", b"\n</s>\n"]
BYTES = [b"<0x%02X>" % i for i in range(256)]
BOS, EOS = 1, 2


def write_tokenizer(path, pieces, scores):
    parts = [struct.pack("<fi", score, len(piece)) + piece for piece, score in zip(pieces, scores)]
    path.write_bytes(struct.pack("<i", max(map(len, pieces))) + b"".join(parts))


def read_tokenizer(path):
    data, at, pieces, scores = path.read_bytes(), 4, [], []
    while at < len(data):
        score, size = struct.unpack_from("<fi", data, at)
        at += 8 + size
        pieces.append(data[at - size : at])
        scores.append(score)
    return pieces, scores


def code_points(text):
    """Invalid UTF-8 falls into single bytes."""
    return [c.encode("utf-8", "surrogateescape") for c in text.decode("utf-8", "surrogateescape")]


class Reference:
    """The tokenizer as its definition reads: of all neighbours that join to a piece, join the best, the leftmost of
    equals, until there are none."""

    def __init__(self, pieces, scores):
        self.pieces, self.scores = pieces, scores
        self.byte = {int(p[3:5], 16): i for i, p in enumerate(pieces) if re.fullmatch(rb"<0x[0-9A-F]{2}>", p)}
        self.text = {p: i for i, p in enumerate(pieces) if i > EOS and i not in self.byte.values()}

    def encode(self, text, bos=True):
        symbols = code_points(text)
        if text and b" " in self.text:
            symbols.insert(0, b" ")
        while True:
            joined = [self.text.get(a + b) for a, b in zip(symbols, symbols[1:])]
            found = [i for i, id in enumerate(joined) if id is not None]
            if not found:
                break
            i = max(found, key=lambda i: (self.scores[joined[i]], -i))
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        ids = [BOS] if bos else []
        for symbol in symbols:
            ids += [self.text[symbol]] if symbol in self.text else [self.byte.get(b, 0) for b in symbol]
        return ids

    def decode(self, ids):
        """Of ids that begin with BOS."""
        byte = {id: bytes([b]) for b, id in self.byte.items()}
        pieces = [byte.get(id, self.pieces[id]) for id in ids[1:]]
        if b" " in self.text and pieces and ids[1] not in byte and pieces[0][:1] == b" ":
            pieces[0] = pieces[0][1:]
        return b"".join(pieces)


class Library:
    """Tokenizer and sampler of one build of run.c."""

    def __init__(self, path):
        c, void, int_, real = ctypes.CDLL(str(path)), ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
        self.c = c
        state = ctypes.POINTER(ctypes.c_uint64)
        c.lib_tokenizer.restype, c.lib_tokenizer.argtypes = void, [ctypes.c_char_p]
        c.lib_tokenizer_free.restype, c.lib_tokenizer_free.argtypes = None, [void]
        c.lib_encode.restype, c.lib_encode.argtypes = int_, [void, ctypes.c_char_p, int_, int_, void]
        c.lib_decode.restype, c.lib_decode.argtypes = int_, [void, void, int_, void]
        c.lib_seed.restype, c.lib_seed.argtypes = None, [ctypes.c_uint64, state]
        c.lib_sample.restype = int_
        c.lib_sample.argtypes = [void, int_, real, real, int_, real, real, void, int_, state]

    def seed(self, seed):
        state = ctypes.c_uint64()
        self.c.lib_seed(seed, state)
        return state

    def sample(self, logits, state, temperature=1.0, top_p=0.0, top_k=0, min_p=0.0, penalty=1.0, history=()):
        logits = np.array(logits, np.float32)
        history = np.array(history, np.int32)
        where = logits.ctypes.data, len(logits)
        return self.c.lib_sample(
            *where, temperature, top_p, top_k, min_p, penalty, history.ctypes.data, len(history), state
        )

    def tokenizer(self, path):
        return Tokenizer(self.c, path)


class Tokenizer:
    def __init__(self, c, path):
        self.c, self.handle = c, c.lib_tokenizer(str(path).encode())
        self.longest = struct.unpack("<i", path.read_bytes()[:4])[0]

    def __del__(self):
        self.c.lib_tokenizer_free(self.handle)

    def encode(self, text, bos=True):
        ids = np.empty(len(text) + 2, np.int32)
        return ids[: self.c.lib_encode(self.handle, text, len(text), bos, ids.ctypes.data)].tolist()

    def decode(self, ids):
        ids, out = np.array(ids, np.int32), np.empty(len(ids) * self.longest + 16, np.uint8)
        return out[: self.c.lib_decode(self.handle, ids.ctypes.data, len(ids), out.ctypes.data)].tobytes()


@pytest.fixture(scope="session")
def library():
    return Library(ROOT / "build" / "run.so")


@pytest.fixture(scope="session")
def llama2(library):
    return library.tokenizer(LLAMA2)


@functools.cache
def llama2_reference():
    return Reference(*read_tokenizer(LLAMA2))


# ---- the tokenizer: text to ids ----

KNOWN = {
    "𒎗𓐍": "29871 243 149 145 154 243 150 147 144",
    "Lets try ö & 株式会社": "365 1691 1018 3963 669 29871 31409 30607 30437 30564",
    "": "",
    "Hello world": "15043 3186",
}


def known_strings():
    yield from KNOWN.items()
    if TOKENIZERS.is_dir():
        name = TOKENIZERS / "ggml-vocab-llama-spm.gguf"
        texts = Path(f"{name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1]
        ids = Path(f"{name}.out").read_text().split("\n")[:-1]
        assert len(texts) == len(ids) == 46
        yield from zip(texts, ids)


def test_known_ids(llama2, tmp_path):
    """Through the library, the command line and the reference, which so is known to be right."""
    for text, ids in known_strings():
        ids, text = ids.split(), text.encode()
        assert list(map(str, llama2.encode(text, bos=False))) == ids
        assert list(map(str, llama2_reference().encode(text, bos=False))) == ids
        assert llama2.encode(text) == [BOS, *map(int, ids)]
        (tmp_path / "text").write_bytes(text)
        printed = output("-m", "tokenize", "-z", LLAMA2, "-f", tmp_path / "text", "--no-bos")
        assert printed.decode() == " ".join(ids) + "\n"


@pytest.mark.parametrize("text", ["<s>", "</s>", "<unk>", "\n<s>\n", "\n</s>\n", "<0x41>", "<|im_start|>user", "a</s>b"])
def test_no_text_is_a_control_token(llama2, text):
    ids = llama2.encode(text.encode(), bos=False)
    assert min(ids) > EOS
    assert llama2.decode([BOS, *ids]) == text.encode()  # so none of it is the byte 0x41 either


texts = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40).map(str.encode),
    st.text("aehintT  .\n", max_size=60).map(str.encode),
    st.text(["é", "日", "😀", "𒎗", " ", "e", "\x00"], max_size=20).map(str.encode),
    st.lists(st.sampled_from([b"\xe6\xad", b"\xff", b"\xf0\x9f", b"\xc0\x80", b"\xed\xa0\x80", b" a"])).map(b"".join),
)


@settings(deadline=None, max_examples=400, derandomize=True, database=None)
@given(texts)
def test_encode_equals_reference(llama2, text):
    ids = llama2.encode(text)
    assert ids == llama2_reference().encode(text)
    assert llama2.decode(ids) == text


@st.composite
def vocabularies(draw):
    """Few characters and few scores, so that pieces overlap and tie; pieces whose parts are no pieces; without the space,
    or without some bytes or all."""
    words = st.text(["a", "b", "c", " ", "é", "日"], min_size=1, max_size=5).map(str.encode)
    words = draw(st.lists(words, unique=True, max_size=30))
    if draw(st.booleans()):
        words = [w for w in words if w != b" "]
    n_bytes = draw(st.sampled_from([0, 98, 256, 256]))
    pieces = SPECIAL + BYTES[:n_bytes] + words
    scores = draw(st.lists(st.integers(-3, 0), min_size=len(words), max_size=len(words)))
    return pieces, [0.0] * (3 + n_bytes) + scores


@settings(deadline=None, max_examples=300, derandomize=True, database=None)
@given(vocabularies(), st.lists(st.text("abc é日😀", max_size=24).map(str.encode), min_size=3, max_size=8))
def test_encode_equals_reference_with_any_vocabulary(library, scratch, vocabulary, texts):
    write_tokenizer(scratch / "any.bin", *vocabulary)
    tokenizer, reference = library.tokenizer(scratch / "any.bin"), Reference(*vocabulary)
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        if 0 not in ids:
            assert tokenizer.decode(ids) == reference.decode(ids)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


def test_the_leftmost_of_equals_joins_first(library, tmp_path):
    pieces = SPECIAL + [b"a", b"aa", b"ab", b"b", b"ba", b"aaa"]
    write_tokenizer(tmp_path / "t.bin", pieces, [0] * 3 + [-1] * 6)
    encode = library.tokenizer(tmp_path / "t.bin").encode
    assert [pieces[id] for id in encode(b"aaaaa", bos=False)] == [b"aaa", b"aa"]
    assert [pieces[id] for id in encode(b"aba", bos=False)] == [b"ab", b"a"]
    assert [pieces[id] for id in encode(b"baab", bos=False)] == [b"ba", b"ab"]


def test_vocabulary_without_bytes_gives_unknown(library, tmp_path):
    write_tokenizer(tmp_path / "t.bin", SPECIAL + [b"a"], [0.0] * 4)
    assert library.tokenizer(tmp_path / "t.bin").encode(b"aza") == [BOS, 3, 0, 3]
    assert output("-m", "tokenize", "-z", tmp_path / "t.bin", "-i", "aza") == b"1 3 0 3\n"


@pytest.mark.parametrize("kind", ["words", "one letter", "spaces", "newlines", "emoji", "bytes"])
def test_a_megabyte(llama2, tmp_path, kind):
    """Quadratic merges would take hours."""
    choice = random.Random(1).choice
    text = {
        "words": lambda: "".join(choice("etaoinshrdlu    ,.\n") for _ in range(1_000_000)).encode(),
        "one letter": lambda: b"a" * 1_000_000,
        "spaces": lambda: b" " * 1_000_000,
        "newlines": lambda: b"\n" * 1_000_000,
        "emoji": lambda: "".join(choice("😀日é𒎗") for _ in range(350_000)).encode(),
        "bytes": lambda: random.Random(1).randbytes(1_000_000),
    }[kind]()
    (tmp_path / "text").write_bytes(text)
    ids = list(map(int, output("-m", "tokenize", "-z", LLAMA2, "-f", tmp_path / "text").split()))
    assert ids[0] == BOS
    assert llama2.decode(ids) == text


# ---- the tokenizer: ids to text ----


def test_decoder_keeps_incomplete_code_points_at_the_end(llama2):
    for text in [b"\xf0\x9f\x98", b"a\xe6\xad", b"\xc3", "日本".encode()[:-1]]:
        assert llama2.decode(llama2.encode(text)) == text


def test_only_the_piece_after_bos_loses_a_space(llama2):
    hello = llama2_reference().text[b" Hello"]
    assert llama2.decode([BOS, hello, hello]) == b"Hello Hello"
    assert llama2.decode([hello]) == b" Hello"
    spaces = llama2_reference().text[b"    "]
    assert llama2.decode([BOS, spaces]) == b"   "


# ---- the sampler against a reference ----

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # in place of the state zero, which xorshift never leaves


def next_state(state):
    state ^= state >> 12
    state ^= state << 25 & MASK
    return state ^ state >> 27


def coin_of(state):
    return ((state * 0x2545F4914F6CDD1D & MASK) >> 40) / 2**24


def candidates(logits, coin, top_p=0.0, slack=1e-5, **options):
    """The ids that are right for this coin: one, or two where float32 may round to either side."""
    if 0 < top_p < 1:
        cuts = {top_p - slack / 10, top_p + slack / 10}
        return set().union(*(reference_sample(logits, coin, cut, slack, **options) for cut in cuts))
    return reference_sample(logits, coin, top_p, slack, **options)


def reference_sample(logits, coin, top_p, slack, temperature=1.0, top_k=0, min_p=0.0, penalty=1.0, history=()):
    """In float64."""
    x = np.array(logits, np.float64)
    for id in set(history):
        x[id] = x[id] / penalty if x[id] > 0 else x[id] * penalty
    if temperature == 0:
        return {int(np.argmax(x))}
    falling = np.lexsort((np.arange(len(x)), -x))
    x /= temperature
    ids = falling[: top_k or None]
    p = np.exp(x[ids] - x[ids[0]])
    p /= p.sum()
    if top_k == 0 and min_p == 0 and top_p in (0, 1):
        rising = np.argsort(ids)
        ids, p = ids[rising], p[rising]
    kept = p >= min_p * p.max()
    ids, p = ids[kept], p[kept]
    if 0 < top_p < 1:
        n = 1 + np.searchsorted(np.cumsum(p), top_p, side="right")  # the one that crosses top_p is in
        ids, p = ids[:n], p[:n]
    end = np.cumsum(p)
    r = coin * end[-1]
    return set(ids[(end - p - slack <= r) & (r < end + slack)].tolist())


SETTINGS = [
    dict(temperature=0.0),
    dict(temperature=0.0, penalty=1.5),
    dict(),
    dict(temperature=0.5),
    dict(temperature=2.0, top_p=1.0),
    dict(top_p=0.9),
    dict(top_p=0.3),
    dict(temperature=1.7, top_p=0.6),
    dict(top_k=1),
    dict(top_k=3),
    dict(top_k=40, top_p=0.8),
    dict(min_p=0.05),
    dict(min_p=0.2, temperature=1.5, top_p=0.9),
    dict(penalty=1.3),
    dict(penalty=0.7, top_p=0.9),
    dict(temperature=0.9, top_k=20, top_p=0.95, min_p=0.02, penalty=1.1),
]


@pytest.mark.parametrize("n, options", [(n, o) for n in [2, 5, 97, 1000] for o in SETTINGS if o.get("top_k", 0) < n])
def test_sample_equals_reference(library, n, options):
    rng = np.random.default_rng(n)
    state, expected = library.seed(n), n
    options = dict(options)
    undecided = 0
    for _ in range(200):
        logits = (rng.normal(0, rng.uniform(0.5, 4), n)).astype(np.float32)
        if "penalty" in options:
            options["history"] = rng.integers(0, n, 30)  # with repetitions
        if options.get("temperature") != 0:
            expected = next_state(expected)
        right = candidates(logits, coin_of(expected), **options)
        undecided += len(right) > 1
        assert library.sample(logits, state, **options) in right
        assert state.value == expected  # one draw a token, none when greedy
    assert undecided < 20


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_sample_breaks_ties_by_lower_id(library, options):
    """Few different logits, many equal: which of the equals survive, and in which order, decides nearly every draw."""
    rng = np.random.default_rng(3)
    state, expected = library.seed(3), 3
    options = dict(options) | (dict(history=[0, 3, 3, 7]) if "penalty" in options else {})
    for _ in range(200):
        logits = rng.integers(-2, 3, 64).astype(np.float32)
        if options.get("temperature") != 0:
            expected = next_state(expected)
        assert library.sample(logits, state, **options) in candidates(logits, coin_of(expected), **options)


@pytest.mark.parametrize("seed", [1, 42, 0, 2**32 + 42, 2**63 + 5, MASK])
def test_generator(library, seed):
    """Of 65536 equal logits, the token drawn is the coin's first 16 bits."""
    state, expected = library.seed(seed), seed or GOLDEN
    assert state.value == expected
    logits = np.zeros(65536, np.float32)
    for _ in range(20):
        expected = next_state(expected)
        assert library.sample(logits, state) == int(coin_of(expected) * 65536)
        assert state.value == expected


def drawn(library, logits, n=400, **options):
    state = library.seed(1)
    return {library.sample(logits, state, **options) for _ in range(n)}


def test_which_tokens_survive(library):
    p = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))  # falling: ids 1 3 2 0
    equal = np.zeros(8, np.float32)
    assert drawn(library, p) == {0, 1, 2, 3}
    assert drawn(library, p, top_k=2) == {1, 3}
    assert drawn(library, p, top_p=0.35) == {1}
    assert drawn(library, p, top_p=0.45) == {1, 3}
    assert drawn(library, p, min_p=0.6) == {1, 3}
    assert drawn(library, p, top_p=1.0) == drawn(library, p, top_p=0.0) == {0, 1, 2, 3}
    assert drawn(library, equal, top_p=0.5) == {0, 1, 2, 3, 4}  # a sum of exactly 0.5 does not exceed it
    assert drawn(library, equal, top_k=3) == {0, 1, 2}
    assert drawn(library, equal, min_p=1.0) == set(range(8))  # p = min_p·p_max stays


def test_order_of_the_stages(library):
    p = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # Penalty first: it may change which is the largest.
    assert drawn(library, [2.0, 1.9, -9, -9], top_k=1, penalty=1.5, history=[0]) == {1}
    # Temperature before all the rest: 4 makes 0.29 0.27 0.24 0.20 of p, 0.25 makes 0.72 0.23 0.05 0.00.
    assert drawn(library, p, temperature=4.0, top_p=0.6) == {0, 1, 2}
    assert drawn(library, p, temperature=0.25, top_p=0.45) == {0}
    assert drawn(library, p, temperature=4.0, min_p=0.6) == {0, 1, 2, 3}
    # top-k before softmax: of two, the first has 0.57 and exceeds 0.55 alone.
    assert drawn(library, p, top_k=2, top_p=0.55) == {0}
    # No second softmax between min-p and top-p: 0.4 + 0.3 do not exceed 0.72.
    assert drawn(library, p, min_p=0.45, top_p=0.72) == {0, 1, 2}
    assert drawn(library, p, min_p=0.45, top_p=0.65) == {0, 1}


def test_penalty_counts_each_token_once_and_lowers_negative_logits(library):
    sample = functools.partial(library.sample, state=library.seed(1), temperature=0.0, penalty=2.0)
    assert sample([4.0, 1.5, 0], history=[0, 0, 0]) == 0
    assert sample([4.0, 2.5, 0], history=[0]) == 1
    assert sample([-1.0, -1.5, -9], history=[0]) == 1
    assert sample([1.0, 1.0, 1.0], history=[]) == 0


# ---- small checkpoints whose every logit is chosen ----

WORDS = [*" abcdefghijklmnopqrstuvwxyz", *" t|he|the| the| c|ca|at|cat| cat|an| a|in|  |.|é|日|😀|it".split("|")]
WORDS = [word.encode() for word in WORDS]
PIECES = SPECIAL + BYTES + WORDS
SCORES = [0.0] * 259 + [-float(i) for i in range(len(WORDS))]
SMALL = Reference(PIECES, SCORES)
V = len(PIECES)  # 304: 19 heads of 16


def write_table(path, table, seq_len=64, version=1):
    """A model whose logits after token t are table[t], whatever came before: attention and feed-forward add nothing,
    and the embeddings are the unit vectors."""
    c = Config(V, 16, 1, V // 16, 1, V, seq_len, False)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in layout(0, c)}
    tensors["tok_embeddings"] = 100 * np.eye(V, dtype=np.float32)
    tensors["norm"] += np.float32(V**-0.5)
    tensors["attention_norm"] += 1
    tensors["ffn_norm"] += 1
    tensors["output"] = np.ascontiguousarray(table.T, np.float32)
    write_checkpoint(path, version, c, tensors)
    return path


def chain(followers):
    """The table in which followers(piece) follows a piece, all but surely."""
    table = np.zeros((V, V), np.float32)
    for id, piece in enumerate(PIECES):
        table[id, PIECES.index(followers(piece))] = 30
    return table


def alphabet(piece):
    """After a letter the next one; after z, BOS and all else an a."""
    last = piece[-1:]
    return bytes([last[0] + 1]) if b"a" <= last < b"z" and piece[:1] != b"<" else b"a"


LETTERS = "abcdefghijklmnopqrstuvwxyz" * 10


class Small:
    """Checkpoints and their tokenizer in one folder."""

    def __init__(self, folder):
        self.folder, self.tokenizer = folder, folder / "small.bin"
        write_tokenizer(self.tokenizer, PIECES, SCORES)
        self.alphabet = self.table("alphabet", chain(alphabet))
        noise = np.random.default_rng(5).normal(0, 2, (V, V))
        noise[:, :3] = -40  # it never stops
        self.noise_table = noise.astype(np.float32)
        self.noise = self.table("noise", self.noise_table)

    def table(self, name, table, **options):
        return write_table(self.folder / f"{name}.model", table, **options)

    def chain(self, *cycle):
        """The pieces of cycle, again and again; BOS is followed by the first."""
        follower = dict(zip(cycle, cycle[1:] + cycle[:1]))
        return self.table("chain", chain(lambda piece: follower.get(piece, cycle[0])))

    def random(self, version=1, tied=False, seq_len=64):
        """Here attention and feed-forward do matter."""
        c = Config(32, 48, 2, 4, 2, V, seq_len, tied)
        path = self.folder / f"random-{version}-{tied}-{seq_len}.model"
        tensors = random_tensors(c)
        if not tied:
            tensors["output"] *= 3
        write_checkpoint(path, version, c, tensors)
        return path

    def __call__(self, *arguments, **options):
        return output(*self.arguments(*arguments), **options)

    def arguments(self, model, *arguments):
        return model, "-z", self.tokenizer, *arguments

    def greedy(self, *arguments, **options):
        return self(*arguments, "-t", 0, **options)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    return Small(tmp_path_factory.mktemp("small"))


# ---- generate ----


@needs_shared
@pytest.mark.parametrize("name", ["stories260K.bin", "stories260K_v1.bin"])
def test_story(name):
    story = (MODELS / "stories260K.expected200.txt").read_bytes()
    arguments = [MODELS / name, "-z", MODELS / "tok512.bin", "-n", 200]
    assert output(*arguments, "-t", 0) == story + b"\n"


@needs_shared
def test_sampled_story():
    story = (MODELS / "stories260K.sample_t1.0_p0.9_s42.txt").read_bytes()
    arguments = [MODELS / "stories260K.bin", "-z", MODELS / "tok512.bin", "-n", 200]
    assert output(*arguments, "-t", "1.0", "-p", "0.9", "-s", 42) == story  # its newline is the final one


def test_steps_count_the_prompt(small):
    assert small.greedy(small.alphabet, "-n", 5) == b"abcde\n"
    assert SMALL.encode(b"it be") == [BOS] + [PIECES.index(p) for p in [b" ", b"it", b" ", b"b", b"e"]]
    assert small.greedy(small.alphabet, "-n", 8, "-i", "it be") == b"it befgh\n"


def test_steps_stop_at_the_context(small):
    everything = LETTERS[:64].encode() + b"\n"
    assert small.greedy(small.alphabet, "-n", 0) == everything
    assert small.greedy(small.alphabet, "-n", 1000) == everything
    assert small.greedy(small.alphabet) == everything  # 256 by default
    assert small.greedy(small.alphabet, "-c", 16, "-n", 0) == LETTERS[:16].encode() + b"\n"
    assert small.greedy(small.alphabet, "-c", 16, "-n", 20) == LETTERS[:16].encode() + b"\n"


def test_prompt_longer_than_the_context(small):
    """BOS and the dummy prefix count: 62 letters make 64 ids."""
    assert small.greedy(small.alphabet, "-i", "q" * 62, "-n", 0) == b"q" * 62 + b"r\n"
    arguments = small.arguments(small.alphabet, "-i", "q" * 63)
    refused(1, *arguments, naming=[65, 64])
    refused(1, *small.arguments(small.alphabet, "-c", 9, "-i", "q" * 20), naming=[22, 9])


@pytest.mark.parametrize("stop", [BOS, EOS])
def test_stop_ids(small, stop):
    table = chain(alphabet)
    table[PIECES.index(b"e")] = 0
    table[PIECES.index(b"e"), stop] = 30
    assert small.greedy(small.table("stops", table), "-n", 50) == b"abcde\n"


@pytest.mark.parametrize(
    "stops, printed",
    [
        (["d"], "abc"),
        (["de"], "abc"),  # across tokens
        (["cdefgh"], "ab"),
        (["dx"], LETTERS[:40]),  # held back, and released
        (["dx", "efx", "gh"], "abcdef"),
        (["hi", "gh"], "abcdef"),  # the earliest, not the first named
        (["mn", "lmno"], "abcdefghijkl"),  # ends there as soon as one is complete
        (["nop", "kl"], "abcdefghij"),
        (["a"], ""),
        ([LETTERS[36:42]], LETTERS[:10]),
    ],
)
def test_stop_strings(small, stops, printed):
    flags = [flag for stop in stops for flag in ("--stop", stop)]
    assert small.greedy(small.alphabet, "-n", 40, *flags) == printed.encode() + b"\n"


def test_stop_string_is_not_sought_in_the_prompt(small):
    prompt = small.alphabet, "-n", 60, "-i", "ab", "--stop"
    assert small.greedy(*prompt, "ab") == LETTERS[:26].encode() + b"\n"
    assert small.greedy(*prompt, "bc") == LETTERS[:27].encode() + b"\n"  # nor where prompt and continuation meet
    assert small.greedy(small.alphabet, "-n", 4, "--stop", "de") == b"abcd\n"  # the half of a stop string is text


def test_no_leading_space(small):
    model = small.chain(b" the", b" cat")
    assert small.greedy(model, "-n", 4) == b"the cat the cat\n"
    assert small.greedy(model, "-n", 3, "-i", " ") == b"  the cat\n"


def test_code_points_are_written_whole(small):
    """A reader finds whole emoji, however small the pieces it gets; broken bytes come out as they are."""
    emoji = small.chain(*[b"<0x%02X>" % b for b in "😀".encode()])
    command = [ROOT / "run", *map(str, small.arguments(emoji, "-t", 0, "-n", 64))]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0) as process:
        chunks = list(iter(lambda: process.stdout.read(65536), b""))
    assert "".join(chunk.decode() for chunk in chunks) == "😀" * 16 + "\n"
    assert small.greedy(emoji, "-n", 6) == "😀".encode() + b"\xf0\x9f\n"
    assert small.greedy(small.chain(b"<0xE6>", b"a", b"<0xFF>", b"b"), "-n", 8) == b"\xe6a\xffb\xe6a\xffb\n"


@needs_shared
def test_prompt_is_echoed():
    model = MODELS / "stories260K.bin", "-z", MODELS / "tok512.bin", "-t", 0, "-n", 60
    for prompt in ["hi 😀 龘".encode(), b"\xe6\xad \xff\x80", b" two  spaces", b"<s> <0x41>", b"a\nb\n"]:
        assert output(*model, "-i", prompt).startswith(prompt)


# ---- where the prompt comes from ----


def test_prompt_sources_agree(small, tmp_path):
    (tmp_path / "prompt").write_text("the cat")
    model = small.random(seq_len=64), "-n", 30
    wanted = small.greedy(*model, "-i", "the cat")
    assert wanted.startswith(b"the cat") and len(wanted) > 20
    assert small.greedy(*model, "-f", tmp_path / "prompt") == wanted
    assert small.greedy(*model, "-f", "-", text=b"the cat") == wanted
    assert small.greedy(*model, text=b"the cat") == wanted
    with open(tmp_path / "prompt") as file:
        assert small.greedy(*model, stdin=file) == wanted
    assert small.greedy(*model, "-i", "the cat", text=b"other") == wanted
    assert small.greedy(*model, text=b"") == small.greedy(*model) == small.greedy(*model, "-i", "")
    refused(2, *small.arguments(*model, "-i", "a", "-f", tmp_path / "prompt"), naming=["--prompt", "--file"])


def test_one_final_newline_of_a_file_is_dropped(small, tmp_path):
    def echo(prompt, *flags, **options):
        (tmp_path / "prompt").write_bytes(prompt)
        flags = [tmp_path / "prompt" if flag == "FILE" else flag for flag in flags]
        return small.greedy(small.alphabet, "-n", 9, *flags, **options)

    assert echo(b"ab\n", "-f", "FILE").startswith(b"abcdef")
    assert echo(b"ab\n\n", "-f", "FILE").startswith(b"ab\nabc")
    assert echo(b"", "-f", "-", text=b"ab\n").startswith(b"abcdef")
    assert echo(b"", text=b"ab\n").startswith(b"abcdef")
    assert echo(b"", "-i", "ab\n").startswith(b"ab\nabc")  # what is typed stays


def test_tokenize_takes_every_byte(small, tmp_path):
    tokenize = "-m", "tokenize", "-z", small.tokenizer
    for text in [b"ab\n", b"ab\n\n", b"\n", b"", b"a\x00b", b"\xff\xe6\xad", "日 é😀".encode()]:
        wanted = " ".join(map(str, SMALL.encode(text))).encode() + b"\n"
        bare = " ".join(map(str, SMALL.encode(text, bos=False))).encode() + b"\n"
        (tmp_path / "text").write_bytes(text)
        assert output(*tokenize, "-f", tmp_path / "text") == wanted
        assert output(*tokenize, "-f", "-", text=text) == wanted
        assert output(*tokenize, text=text) == wanted
        assert output(*tokenize, "--no-bos", "-f", tmp_path / "text") == bare
        if b"\x00" not in text:
            assert output(*tokenize, "-i", text) == wanted


def test_tokenizer_bin_is_the_default(small, tmp_path):
    (tmp_path / "tokenizer.bin").write_bytes(small.tokenizer.read_bytes())
    assert output(small.alphabet, "-t", 0, "-n", 3, cwd=tmp_path) == b"abc\n"
    assert output("-m", "tokenize", "-i", "the cat", cwd=tmp_path).split() == [
        str(id).encode() for id in SMALL.encode(b"the cat")
    ]


# ---- sampling from the command line ----


@pytest.mark.parametrize(
    "flags, options",
    [
        (["-t", 1, "-p", 0], dict()),
        ([], dict(top_p=0.9)),  # the defaults
        (["-t", "0.7", "-p", "0.8"], dict(temperature=0.7, top_p=0.8)),
        (["-p1", "-k", 7], dict(top_k=7)),
        (["-p1", "--min-p", "0.3"], dict(min_p=0.3)),
        (["--repeat-penalty", "1.8", "--top-p=0"], dict(penalty=1.8)),
        (["-t", 0, "--repeat-penalty=1.8"], dict(temperature=0.0, penalty=1.8)),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 7, 2**32 + 7, MASK])
def test_generate_equals_reference(small, flags, options, seed):
    ids, state = SMALL.encode(b"the cat"), seed or GOLDEN
    while len(ids) < 41:
        if options.get("temperature") != 0:
            state = next_state(state)
        history = dict(history=ids) if "penalty" in options else {}
        right = candidates(small.noise_table[ids[-1]], coin_of(state), slack=0, **options, **history)
        assert len(right) == 1
        ids += right
    printed = small(small.noise, "-i", "the cat", "-n", 40, "-s", seed, *flags)
    assert printed == SMALL.decode(ids) + b"\n"


def test_seeds(small):
    def sampled(*flags):
        return run(*small.arguments(small.noise, "-n", 60, *flags))

    assert sampled("-s", 7).stdout == sampled("--seed=7").stdout
    assert len({sampled("-s", seed).stdout for seed in [0, 7, 2**32, 2**32 + 7, MASK]}) == 5
    # Without a seed there is a new one every time, and --stats shows it.
    first, second = sampled("--stats"), sampled("--stats")
    assert first.stdout != second.stdout
    seed = re.search(r"seed\D*(\d+)", first.stderr.decode())[1]
    assert sampled("-s", seed).stdout == first.stdout


@pytest.mark.parametrize("flags", [["-t", 1], ["-t", 0], ["-k", 5], ["--min-p", "0.1"]], ids=str)
@pytest.mark.parametrize("bad", ["nan", "inf", "all -inf"])
def test_logits_that_are_no_numbers(small, bad, flags):
    table = small.noise_table.copy()
    if bad == "nan":
        table[:, 200] = np.nan
    elif bad == "inf":
        table[:, 200] = 3e38
    else:
        table[:] = -3e38
    path = small.table(f"{bad}-{flags}", table)
    if bad != "nan":
        data = bytearray(path.read_bytes())  # a final norm of 10 takes them over the edge
        at = 256 + 4 * 2 * V
        data[at : at + 4 * V] = np.full(V, 10, "<f4").tobytes()
        path.write_bytes(data)
    result = run(*small.arguments(path, "-n", 5, *flags))
    assert result.returncode == 1
    assert re.fullmatch(r"run: .*\n", result.stderr.decode().lstrip("\n")), result.stderr


def test_one_impossible_token_is_no_error(small):
    """-inf is how a token is forbidden."""
    table = np.zeros((V, V), np.float32)
    table[:, : V - 1] = -3e38
    path = small.table("forbidden", table)
    data = bytearray(path.read_bytes())
    data[256 + 8 * V : 256 + 12 * V] = np.full(V, 10, "<f4").tobytes()
    path.write_bytes(data)
    assert small(path, "-n", 3) == PIECES[-1] * 3 + b"\n"


# ---- the same answer, however it is computed ----


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_threads_and_chunks_do_not_matter(small, version, tied):
    model = small.random(version, tied), "-n", 60, "-s", 3, "-i", "the cat is in the hat and it ate"
    wanted = small(*model)
    assert len(wanted) > 40
    for flags in [["-j", 1], ["-j", 3], ["--threads=2", "--chunk", 1], ["--chunk=7"]]:
        assert small(*model, *flags) == wanted


def test_no_bos(small):
    model = small.random(), "-n", 40, "-t", 0, "-i", "the cat"
    assert small(*model, "--no-bos").lstrip()[:30] != small(*model)[:30]


# ---- flags ----

FLAGS = """-t --temperature, -p --top-p, -k --top-k, --min-p, --repeat-penalty, -s --seed, -n --tokens, -i --prompt,
-f --file, -z --tokenizer, -m --mode, -c --context, -j --threads, --stop, --no-bos, --stats, --window,
--stride, --chunk, -h --help, --version""".replace("\n", " ")


def test_help_and_version(small):
    for flag in ["-h", "--help"]:
        shown = output(flag).decode()
        for name in re.split(r",? ", FLAGS):
            assert re.search(rf"(?<![\w-]){name}(?![\w-])", shown), name
    assert re.search(r"\d", output("--version").decode())
    assert output("--version").count(b"\n") == 1


def test_spellings_of_a_value(small):
    outputs = {
        small(small.noise, *flags)
        for flags in [
            ["-n", 9, "-s", 4, "-k", 5],
            ["-n9", "-s4", "-k5"],
            ["--tokens", 9, "--seed", 4, "--top-k", 5],
            ["--tokens=9", "--seed=4", "--top-k=5"],
            ["--temperature=1.0", "-n", 9, "--seed=4", "-k5", "-p0.9"],
        ]
    }
    assert len(outputs) == 1
    assert output("-n9", "-s4", "-k5", "-z", small.tokenizer, small.noise) in outputs


NO_NUMBER = ["abc", "nan", "1x", "", "x1", "1 ", "1,5"]
BAD_VALUES = {
    ("-t", "--temperature"): NO_NUMBER + ["-1", "inf", "-0.1", "1e999"],
    ("-p", "--top-p"): NO_NUMBER + ["-0.1", "1.1", "inf"],
    ("-k", "--top-k"): NO_NUMBER + ["-1", "1.5", "99999999999"],
    ("--min-p",): NO_NUMBER + ["-0.1", "1.01"],
    ("--repeat-penalty",): NO_NUMBER + ["0", "-1", "inf"],
    ("-s", "--seed"): NO_NUMBER + ["-1", "1.5", "18446744073709551616", "1e3"],
    ("-n", "--tokens"): NO_NUMBER + ["-1", "1.5", "99999999999999999999"],
    ("-c", "--context"): NO_NUMBER + ["-1", "99999999999"],
    ("-j", "--threads"): NO_NUMBER + ["-1", "99999999999"],
    ("-m", "--mode"): ["", "generat", "sing"],
}


@pytest.mark.parametrize("names", BAD_VALUES, ids=lambda names: names[-1])
def test_bad_values(small, names):
    for name in names:
        for value in BAD_VALUES[names]:
            message = refused(2, *small.arguments(small.alphabet, name, value))
            assert any(n in message for n in names) and value.strip() in message, message


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("--temprature", "--temperature"),
        ("--temprature=1", "--temperature"),
        ("--sed", "--seed"),
        ("--tokeniser", "--tokenizer"),
        ("--promt", "--prompt"),
        ("--repeat_penalty", "--repeat-penalty"),
        ("--top_k=4", "--top-k"),
        ("--hlep", "--help"),
        ("--thread", "--threads"),
    ],
)
def test_mistyped_option(small, typed, meant):
    refused(2, *small.arguments(small.alphabet, typed, "1"), naming=[typed.split("=")[0], meant])


@pytest.mark.parametrize(
    "flags, word",
    [
        ([], "checkpoint"),
        (["-t"], "-t"),
        (["--seed"], "--seed"),
        (["MODEL", "-Q"], "-Q"),
        (["MODEL", "second.bin"], "second.bin"),
        (["MODEL", "--stats=yes"], "--stats"),
    ],
    ids=str,
)
def test_bad_usage(small, flags, word):
    flags = [small.alphabet if flag == "MODEL" else flag for flag in flags]
    refused(2, *flags, naming=[word])


def test_stats(small):
    arguments = small.arguments(small.noise, "-n", 40, "-s", 2**40 + 5)
    plain, stats = run(*arguments), run(*arguments, "--stats")
    assert stats.returncode == 0 and stats.stdout == plain.stdout and plain.stderr == b""
    shown = stats.stderr.decode().lower()
    for word in [str(2**40 + 5), "first token", "prefill", "decode", "tok", "median", "p99", "gb/s", "load", "peak"]:
        assert word in shown, word


# ---- what cannot be opened or written ----


@pytest.mark.parametrize("version", [0, 1, 2])
def test_size_of_the_vocabulary(small, library, tmp_path, version):
    write_tokenizer(tmp_path / "short.bin", PIECES[:300], SCORES)
    for flags in [[], ["-i", "a"]]:
        refused(1, small.random(version), "-z", tmp_path / "short.bin", *flags, naming=[300, V])
    refused(1, small.random(version), "-z", LLAMA2, naming=[32000, V])


def test_files_that_are_none(small, tmp_path):
    good, tokenizer, empty = small.alphabet, small.tokenizer, tmp_path / "empty"
    empty.write_bytes(b"")
    for bad in [tmp_path / "missing", tmp_path, empty]:
        for mode in ["generate", "info"]:
            refused(1, bad, "-z", tokenizer, "-m", mode, naming=[bad])
        refused(1, good, "-z", bad, naming=[bad])
        refused(1, "-m", "tokenize", "-z", bad, "-i", "a", naming=[bad])
        if bad != empty:
            refused(1, good, "-z", tokenizer, "-f", bad, naming=[bad])
            refused(1, "-m", "tokenize", "-z", tokenizer, "-f", bad, naming=[bad])


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(100), "GGUF"),
        ("zip", b"PK\x03\x04" + bytes(300), "zip"),
        ("version", struct.pack("<Ii", 0x616B3432, 99) + bytes(300), "99"),
        ("noise", random.Random(2).randbytes(5000), "format|checkpoint|llama2.c"),
        ("letter", b"Once upon a time, there was a little girl named Lily." * 9, "format|checkpoint|llama2.c"),
        ("swapped", struct.pack(">Ii7i", 0x616B3432, 1, *[32] * 7) + bytes(300), "format|checkpoint|llama2.c"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_format_unknown(small, tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    message = refused(1, tmp_path / name, "-z", small.tokenizer, naming=[tmp_path / name])
    assert re.search(words, message.replace(str(tmp_path / name), "")), message


@pytest.mark.parametrize("version", [0, 1, 2])
def test_exact_size(small, tmp_path, version):
    data = small.random(version).read_bytes()
    for wrong in [data[:-1], data[:-4], data + b"\0", data + data]:
        (tmp_path / "wrong").write_bytes(wrong)
        refused(1, tmp_path / "wrong", "-z", small.tokenizer, naming=[tmp_path / "wrong", len(data), len(wrong)])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_disk(small, tmp_path):
    (tmp_path / "text").write_text("the cat " * 9)
    for arguments in [
        small.arguments(small.alphabet, "-n", 20),
        small.arguments(small.alphabet, "-m", "info"),
        small.arguments(small.alphabet, "-m", "perplexity", "-f", tmp_path / "text"),
        ("-m", "tokenize", "-z", small.tokenizer, "-i", "the cat"),
        ("--help",),
    ]:
        with open("/dev/full", "wb") as full:
            result = run(*arguments, stdout=full)
        assert result.returncode == 1, arguments
        assert result.stderr.startswith(b"run: ") and result.stderr.count(b"\n") == 1


def test_interrupt(small):
    """A generation that would take hours."""
    model = small.table("endless", chain(alphabet), seq_len=1_000_000)
    command = [ROOT / "run", *map(str, small.arguments(model, "-c", 1_000_000, "-n", 0, "-t", 0))]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    with subprocess.Popen(command, **pipes) as process:
        begun = process.stdout.read(10)  # unbuffered, so that communicate() gets all the rest
        process.send_signal(signal.SIGINT)
        try:
            rest, message = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130
    printed = (begun + rest).decode().rstrip("\n")
    assert printed and printed == (LETTERS[:26] * (len(printed) // 26 + 1))[: len(printed)]
    assert message == b""


# ---- perplexity ----


def scored(engine, model, ids, window, stride):
    """-log p of every token of ids, each in the first window that reaches it."""
    nll = []
    with engine.session(model, n_ctx=window) as forward:
        for begin in range(0, len(ids), stride):
            inputs = [BOS] + ids[begin : begin + window - 1]
            x = forward(np.array(inputs, np.int32), np.arange(len(inputs))).astype(np.float64)
            p = x - x.max(1, keepdims=True)
            p -= np.log(np.exp(p).sum(1, keepdims=True))
            nll += [-p[i, ids[begin + i]] for i in range(len(nll) - begin, len(inputs) - 1)]
            if begin + window - 1 >= len(ids):
                return np.array(nll)


TEXT = ("the cat is in the hat. it ate a rat and then it sat. " * 3 + "é 日 😀\n").encode()


def perplexity(line):
    """The figures in what -m perplexity prints."""
    assert line.count("\n") == 1
    found = re.search(r"perplexity ([\d.]+) ± ([\d.]+)", line)
    return float(found[1]), float(found[2]), [float(x) for x in re.findall(r"\d+\.?\d*", line)]


@pytest.mark.parametrize("window, stride", [(64, 63), (64, 20), (16, 15), (16, 1), (2, 1), (64, 64 - 8)])
@pytest.mark.parametrize("version", [1, 2])
def test_perplexity(small, tmp_path, window, stride, version):
    (tmp_path / "text").write_bytes(TEXT)
    model, ids = small.random(version, tied=False), SMALL.encode(TEXT, bos=False)
    nll = scored(Engine(ROOT / "build" / "run.so"), model, ids, window, stride)
    assert len(nll) == len(ids) > 64
    flags = "-m", "perplexity", "-f", tmp_path / "text", "--window", window, "--stride", stride
    value, deviation, figures = perplexity(small(model, *flags).decode())
    wanted = math.exp(nll.mean())
    assert value == pytest.approx(wanted, rel=2e-4)
    assert deviation == pytest.approx(wanted * nll.std() / math.sqrt(len(nll)), rel=0.01)
    assert pytest.approx(nll.sum() / math.log(2) / len(TEXT), rel=1e-3) in figures
    assert len(ids) in figures


def test_perplexity_of_knowing_nothing(small, tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    model = small.table("uniform", np.zeros((V, V), np.float32))
    value, deviation, _ = perplexity(small(model, "-m", "perplexity", "-f", tmp_path / "text").decode())
    assert (value, deviation) == (V, 0)


def test_perplexity_needs_a_text_and_a_stride_without_gaps(small, tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    measure = small.arguments(small.alphabet, "-m", "perplexity")
    refused(2, *measure)
    refused(2, *measure, "-f", tmp_path / "text", "--window", 16, "--stride", 16, naming=["stride"])
    refused(2, *measure, "-f", tmp_path / "text", "--stride", 0, naming=["stride"])
    refused(2, *measure, "-f", tmp_path / "text", "--window", 1, naming=["window"])
    (tmp_path / "text").write_bytes(b"")
    refused(1, *measure, "-f", tmp_path / "text", naming=["text"])


# ---- info ----


@pytest.mark.parametrize("version", [0, 1, 2])
def test_info(small, version):
    c = Config(48, 80, 3, 3, 1, V, 8192, False)
    path = small.folder / f"info-{version}.model"
    write_checkpoint(path, version, c, random_tensors(c))
    shown = output(path, "-m", "info", "-c", 8192).decode()  # it needs no tokenizer
    for name, figure in zip(Config._fields, c):
        if name not in ("seq_len", "tied"):
            assert re.search(rf"{name}\s+{figure}\b", shown), name
    assert re.search(r"head_dim\s+16\b", shown) and "8192" in shown
    per_token = 2 * 3 * 1 * 16 * 4  # k and v, layers, kv heads, head_dim, bytes of a float
    assert f"{per_token} bytes per token" in shown
    assert f"{per_token * 8192 / 2**20:.1f} MiB" in shown


# ---- hostile files, on the sanitizer build ----

SANITIZERS = dict(
    ASAN_OPTIONS="exitcode=99:allocator_may_return_null=1",
    UBSAN_OPTIONS="exitcode=99:halt_on_error=1",
)
EXTREMES = [0, -1, 1, 2**31 - 1, -(2**31)]


def survives(small, tmp_path, cases, arguments):
    """cases: [(what was done, bytes, the exit codes allowed)]; arguments(path): the command line.
    Whatever the bytes, the program ends by itself, with a message if it fails."""

    def attempt(case):
        number, (what, data, codes) = case
        path = tmp_path / f"{number}"
        path.write_bytes(data)
        result = run(*arguments(path), program="build/debug", env=SANITIZERS, timeout=30)
        path.unlink()
        message = result.stderr.decode(errors="replace")
        fine = result.returncode in codes and "Sanitizer" not in message and "runtime error" not in message
        said = re.fullmatch(r"run: .+\n", message) if result.returncode else True
        return None if fine and said else (what, result.returncode, message[-2000:])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [failure for failure in pool.map(attempt, enumerate(cases)) if failure]
    assert not failures, f"{len(failures)} of {len(cases)}, first: {failures[0]}"


def generate(small):
    return lambda path: small.arguments(path, "-n", 5, "-i", "the", "-s", 1, "-j", 1)


def header_size(version):
    return 256 if version else 28


@pytest.mark.parametrize("version", [0, 1, 2])
def test_truncated_checkpoint(small, tmp_path, version):
    data, header = small.random(version, tied=False).read_bytes(), header_size(version)
    body = random.Random(version).sample(range(header, len(data)), 40)
    cuts = [*range(header + 1), *body, len(data) - 1]
    survives(small, tmp_path, [(f"cut at {cut}", data[:cut], {1}) for cut in cuts], generate(small))


@pytest.mark.parametrize("version", [0, 1, 2])
def test_extreme_checkpoint_fields(small, tmp_path, version):
    cases = []
    for tied in [True, False]:
        data = small.random(version, tied).read_bytes()
        assert run(*generate(small)(small.random(version, tied)), program="build/debug").returncode == 0
        fields = range(0, 28, 4) if version == 0 else [*range(0, 40, 4), 37]  # 36 is the byte `tied`, 37 the group size
        for at in fields:
            (value,) = struct.unpack_from("<i", data, at)
            for new in EXTREMES + [value + 1, value - 1, 2 * value, -value, 65536, 2**30]:
                new = (new + 2**31) % 2**32 - 2**31
                changed = data[:at] + struct.pack("<i", new) + data[at + 4 :]
                cases.append((f"int {at} = {new}, tied {tied}", changed, {0, 1}))
    survives(small, tmp_path, cases, generate(small))


@pytest.mark.parametrize("version", [0, 1, 2])
def test_random_checkpoint_bytes(small, tmp_path, version):
    """A few bytes of the header, or a run of the body, replaced."""
    rng, cases = random.Random(version), []
    data, header = small.random(version, tied=False).read_bytes(), header_size(version)
    for i in range(100):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(8 if version and i % 4 else 0, min(header, 45))  # mostly past the magic
            changed[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        if i % 5 == 0:
            at = rng.randrange(header, len(data) - 64)
            changed = bytearray(data)
            changed[at : at + 64] = rng.randbytes(64)
        cases.append((f"random {i}: {bytes(changed[:45]).hex()}", bytes(changed), {0, 1}))
    survives(small, tmp_path, cases, generate(small))


def test_hostile_tokenizer(small, tmp_path):
    data, rng, cases = small.tokenizer.read_bytes(), random.Random(0), []
    cuts = [*range(64), *rng.sample(range(64, len(data)), 60), len(data) - 1]
    cases += [(f"cut at {cut}", data[:cut], {1}) for cut in cuts]
    entry = [4]  # offset of every piece
    for piece in PIECES[:-1]:
        entry.append(entry[-1] + 8 + len(piece))
    for at in [0] + [entry[i] + offset for i in [0, 1, 3, 150, 270, V - 1] for offset in (0, 4)]:
        for new in EXTREMES + [2, 100, 65536, 0x7FC00000]:  # the last is a NaN
            cases.append((f"int {at} = {new}", data[:at] + struct.pack("<i", new) + data[at + 4 :], {0, 1}))
    for i in range(60):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 5)):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        cases.append((f"random {i}", bytes(changed), {0, 1}))
    cases.append(("one byte more", data + b"x", {1}))
    model = small.random(1)
    survives(small, tmp_path, cases, lambda path: (model, "-z", path, "-n", 9, "-i", "the cat 日 q", "-j", 1))
    whole_pieces = {*entry, len(data)}
    tokenize = [(what, d, {0, 1} if len(d) in whole_pieces else codes) for what, d, codes in cases]
    survives(small, tmp_path, tokenize, lambda path: ("-m", "tokenize", "-z", path, "-i", "the cat 日 q"))


@pytest.mark.parametrize("version", [0, 1, 2])
def test_sanitizers_find_nothing_in_ordinary_use(small, tmp_path, version):
    """Leaks included."""
    (tmp_path / "text").write_bytes(TEXT)
    env = dict(UBSAN_OPTIONS="halt_on_error=1")
    for tied in [True, False]:
        model = small.random(version, tied)
        for flags in [
            ["-n", 40, "-i", "the cat", "--stop", "zz", "--stats"],
            ["-n", 64, "-k", 5, "--min-p", "0.01", "--repeat-penalty", "1.1", "--chunk", 7, "-f", tmp_path / "empty"],
            ["-m", "info"],
            ["-m", "perplexity", "-f", tmp_path / "text", "--window", 32, "--stride", 8],
            ["-m", "tokenize", "-f", tmp_path / "text"],
        ]:
            (tmp_path / "empty").write_bytes(b"")
            result = run(*small.arguments(model, *flags), program="build/debug", env=env)
            assert result.returncode == 0 and b"Sanitizer" not in result.stderr, result.stderr
