"""Does run.c compute what the reference libraries compute? transformers says what a model answers, tokenizers which
ids a text has. `make conformance` runs this file; it is not part of `make test`, because of the size of torch.

    pytest testdata/conformance.py
    python testdata/conformance.py --golden     writes the golden files beside it: *.flat.gguf, golden.npz

Models are small and random, with a tokenizer trained on the spot. Each goes the whole way: transformers saves it,
export.py turns the directory into a flat checkpoint, run.c reads that. PyTorch's checkpoints are read here, too."""

import functools
import json
import random
import sys
import tempfile
import unicodedata
import zlib
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from test_all import (  # noqa: E402
    Config, Engine, Flat, Library, export, needs_same_logits, output, random_tensors, write_checkpoint,
)  # fmt: skip

HERE = ROOT / "testdata"
NPM = ROOT / ".venv-conformance" / "npm"
SMOLLM2 = ROOT / "models" / "smollm2-135m-instruct.q4_1.gguf"
SHARED = ROOT.parent / "shared" / "tokenizers"

TOLERANCE = 1e-4  # of a log-probability; without what a family is here for, some are off by more than SEEN
SEEN = 0.01
N_PROMPT, N_GREEDY = 160, 32

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


# ---- models ----


class Family(NamedTuple):
    """A model: its class in transformers, what its config says, and the way it is saved."""

    name: str
    config: dict
    without: dict = {}  # config with which its feature is gone, or a little wrong; "name.": value resets parameters
    tokenizer: str = "sentencepiece"
    dtype: torch.dtype = torch.float32
    shard: str = "1GB"


def sizes(dim, hidden_dim, n_heads, n_kv_heads, head_dim=None, tied=False, base=10000.0, n_layers=2, **more):
    head_dim = {} if head_dim is None else dict(head_dim=head_dim)
    return dict(
        hidden_size=dim, intermediate_size=hidden_dim, num_attention_heads=n_heads, num_key_value_heads=n_kv_heads,
        tie_word_embeddings=tied, rope_theta=base, num_hidden_layers=n_layers, max_position_embeddings=256,
    ) | head_dim | more  # fmt: skip


def rope(kind, factor, before=32, **more):
    more |= {} if kind == "linear" else dict(original_max_position_embeddings=before)
    return dict(rope_type=kind, factor=factor, **more)


def llama3(factor, before=32):
    return rope("llama3", factor, before, low_freq_factor=1.0, high_freq_factor=4.0)


PLAIN = dict(rope_scaling=None)
SMALLER = rope("yarn", 8.0, attention_factor=1.0)  # YaRN without its factor for queries and keys
BIASES = {"_proj.bias.": 0.0}
NORMS = {"q_norm.weight.": 1.0, "k_norm.weight.": 1.0}
MODELS = dict(
    llama1=Family("Llama", sizes(44, 75, 2, 2, rms_norm_eps=1e-6)),
    llama2=Family("Llama", sizes(60, 81, 6, 2, rms_norm_eps=1e-5)),
    llama3=Family("Llama", sizes(64, 96, 4, 1, base=500000.0), dict(rope_theta=10000.0), "llama-bpe"),
    llama31=Family("Llama", sizes(60, 99, 6, 3, rope_scaling=llama3(8.0)), PLAIN, "llama-bpe"),
    llama32=Family(
        "Llama", sizes(72, 67, 2, 1, tied=True, base=500000.0, rope_scaling=llama3(32.0, 8192)), PLAIN, "llama-bpe"
    ),
    tinyllama=Family("Llama", sizes(64, 88, 16, 2)),
    codellama=Family("Llama", sizes(48, 66, 3, 3, base=1e6), dict(rope_theta=10000.0)),
    smollm2=Family("Llama", sizes(36, 96, 9, 3, tied=True, base=100000.0), dict(rope_theta=10000.0), "smollm"),
    yi=Family("Llama", sizes(56, 77, 7, 1, base=5e6), dict(rope_theta=10000.0)),
    biases=Family("Llama", sizes(40, 50, 4, 2, attention_bias=True), BIASES),
    own_head_dim=Family("Llama", sizes(42, 54, 3, 1, head_dim=18)),
    linear=Family("Llama", sizes(52, 60, 2, 1, rope_scaling=rope("linear", 4.0)), PLAIN),
    yarn=Family("Llama", sizes(64, 60, 2, 2, rope_scaling=rope("yarn", 8.0)), dict(rope_scaling=SMALLER)),
    mistral=Family("Mistral", sizes(48, 72, 6, 2, head_dim=12, sliding_window=24), dict(sliding_window=25)),
    nemo=Family("Mistral", sizes(40, 72, 4, 2, head_dim=14, base=1e6, sliding_window=None), tokenizer="tekken"),
    qwen2=Family("Qwen2", sizes(56, 76, 4, 2, tied=True, base=1e6), BIASES, "qwen2"),
    qwen25=Family("Qwen2", sizes(45, 64, 5, 5, head_dim=None, base=1e6) | dict(hidden_size=50), BIASES, "qwen2"),
    qwen2_yarn=Family("Qwen2", sizes(64, 64, 4, 1, rope_scaling=rope("yarn", 4.0, 64)), PLAIN, "qwen2"),
    qwen2_window=Family(
        "Qwen2",
        sizes(48, 64, 4, 2, use_sliding_window=True, sliding_window=17, max_window_layers=0),
        dict(sliding_window=18),
        "qwen2",
    ),
    qwen3=Family("Qwen3", sizes(48, 70, 4, 2, head_dim=20, tied=True, base=1e6), NORMS, "qwen2"),
    qwen3_shards=Family(
        "Qwen3", sizes(40, 51, 6, 1, head_dim=16, base=1e6), NORMS, "qwen2", torch.bfloat16, shard="20KB"
    ),
    qwen3_biases=Family("Qwen3", sizes(44, 60, 4, 4, head_dim=8, attention_bias=True), BIASES, "qwen2"),
)


def weights(model, seed):
    """Fills a model. Gains above 1 give sharp attention and gates that are far from linear; much larger ones would
    magnify the rounding of float32, in transformers as here, above the tolerance."""
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    gain = {"q_proj.weight": 1.4, "k_proj.weight": 1.4, "gate_proj.weight": 2.0}
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            w = rng.standard_normal(parameter.shape)
            if "norm" in name:
                w = 1 + 0.4 * w
            elif name.endswith("bias"):
                w *= 0.5
            elif "embed" in name:
                w *= 0.3
            else:
                w *= gain.get(".".join(name.split(".")[-2:]), 1.0) / w.shape[1] ** 0.5
            parameter.copy_(torch.from_numpy(w))
    return model


def create(family, **config):
    """The transformers model of a family, its weights not yet set."""
    settings = transformers.AutoConfig.for_model(family.name.lower(), **family.config | config)
    settings.bos_token_id = settings.eos_token_id = settings.pad_token_id = None
    return transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation="eager")


def build(name, family, vocab_size):
    """In float32, with weights that family.dtype can hold. (model.to would round the frequencies of RoPE as well.)"""
    model = weights(create(family, vocab_size=vocab_size), name)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(family.dtype).to(torch.float32)
    return model


def plainer(family, model):
    """The model without what its family is here for."""
    config = {key: value for key, value in family.without.items() if not key.endswith(".")}
    other = create(family, vocab_size=model.config.vocab_size, **config)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            for key in set(family.without) - set(config):
                if f"{name}.".endswith(key):
                    parameter.fill_(family.without[key])
    return other


def load(folder):
    options = dict(dtype=torch.float32, attn_implementation="eager", local_files_only=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def log_probabilities(logits):
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def difference(logits, others):
    return np.abs(log_probabilities(logits) - log_probabilities(others)).max()


def greedy(logits_after, tokens, n):
    """n tokens, each the likeliest after those before it; and the smallest margin by which one won."""
    tokens, margin = list(tokens), np.inf
    for _ in range(n):
        second, first = np.sort(logits := logits_after(tokens))[-2:]
        margin = min(margin, first - second)
        tokens.append(int(logits.argmax()))
    return tokens[len(tokens) - n :], margin


@functools.cache
def engine():
    return Engine(ROOT / "build" / "run.so")


def engine_greedy(checkpoint, tokens, n):
    """One position at a time, but for the prompt."""
    ids = list(tokens)
    with engine().session(checkpoint, n_ctx=256, max_rows=len(tokens)) as forward:
        logits = forward(ids, np.arange(len(ids)))[-1]
        while len(ids) < len(tokens) + n:
            ids.append(int(logits.argmax()))
            (logits,) = forward(ids[-1:], [len(ids) - 1])
    return ids[len(tokens) :]


class Case(NamedTuple):
    family: Family
    model: object
    tokenizer: object
    folder: Path  # as transformers saved it
    flat: Path
    tokens: list  # random ids
    logits: np.ndarray


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    @functools.cache
    def make(name):
        family, folder = MODELS[name], tmp_path_factory.mktemp(name)
        tokenizer = small_tokenizer(family.tokenizer)
        vocab_size = tokenizer.get_vocab_size() + 3  # more embeddings than pieces, as models often have
        model = build(name, family, vocab_size)
        save(model, family, tokenizer, folder / "hf")
        export(folder / "model.flat.gguf", "--from", folder / "hf", "--dtype", "f32")
        tokens = np.random.default_rng(1).integers(vocab_size, size=N_PROMPT).tolist()
        logits = logits_of(model, tokens)
        return Case(family, model, tokenizer, folder / "hf", folder / "model.flat.gguf", tokens, logits)

    return make


def save(model, family, tokenizer, folder):
    """As its makers would publish it."""
    stored = create(family, vocab_size=model.config.vocab_size).to(family.dtype)
    stored.load_state_dict(model.state_dict())
    stored.save_pretrained(folder, max_shard_size=family.shard)
    if tokenizer:
        names = dict(bos_token="<s>", eos_token="</s>")
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities(case, name):
    c = case(name)
    got = engine().logits(c.flat, c.tokens, n_ctx=256, chunk=N_PROMPT, max_rows=N_PROMPT)
    assert difference(got, c.logits) < TOLERANCE
    assert (len(list(c.folder.glob("*.safetensors"))) > 1) == (c.family.shard != "1GB")


@pytest.mark.parametrize("name", MODELS)
def test_greedy(case, name):
    c = case(name)
    wanted, margin = greedy(lambda tokens: logits_of(c.model, tokens)[-1], c.tokens[:128], N_GREEDY)
    assert margin > 2 * TOLERANCE  # no tie that rounding decides
    assert engine_greedy(c.flat, c.tokens[:128], N_GREEDY) == wanted


@pytest.mark.parametrize("name", [name for name, family in MODELS.items() if family.without])
def test_the_tolerance_sees_what_the_family_is_here_for(case, name):
    c = case(name)
    assert difference(logits_of(plainer(c.family, c.model), c.tokens), c.logits) > SEEN


@pytest.mark.parametrize("name", MODELS)
def test_text_in_text_out(case, name):
    c = case(name)
    prompt = "Permission is hereby granted, free of charge"
    ids = c.tokenizer.encode(prompt).ids
    wanted, margin = greedy(lambda tokens: logits_of(c.model, tokens)[-1], ids, N_GREEDY)
    assert margin > 2 * TOLERANCE
    pieces = [written(c.tokenizer, id) for id in wanted]
    stop = wanted.index(EOS) if EOS in wanted else len(wanted)
    printed = output(c.flat, "-i", prompt, "-t", 0, "-n", N_GREEDY, "--kv", "f32")
    assert printed == prompt.encode() + b"".join(pieces[:stop]) + b"\n"
    assert output(c.flat, "-m", "tokenize", "-i", prompt).split() == [b"%d" % id for id in ids]


@pytest.mark.parametrize("name", MODELS)
def test_gguf_and_back(case, name, tmp_path):
    """directory -> GGUF: run.c has the same logits. -> directory: transformers has."""
    c = case(name)
    export(tmp_path / "model.gguf", "--from", c.folder, "--dtype", "f32")
    options = dict(n_ctx=256, chunk=N_PROMPT, max_rows=N_PROMPT)
    flat = engine().logits(c.flat, c.tokens, **options)
    assert np.array_equal(engine().logits(tmp_path / "model.gguf", c.tokens, **options), flat)
    text = "Permission is hereby granted, free of charge"
    tokenize = "-m", "tokenize", "-i", text
    assert output(tmp_path / "model.gguf", *tokenize) == output(c.flat, *tokenize)
    # A GGUF file has Llama 3's divisors, not what they were made from: only Meta's own numbers can be found again.
    source = c.folder if name == "llama31" else tmp_path / "model.gguf"
    export(tmp_path / "back", "--from", source, "--dtype", "f32")
    assert np.array_equal(logits_of(load(tmp_path / "back"), c.tokens), c.logits)


# ---- tokenizers ----

BOS, EOS = 1, 2
SPECIAL = ["<unk>", "<s>", "</s>"]
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "llama-bpe": rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{TAIL}",
    "qwen2": rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{TAIL}",
    "tekken": TEKKEN,
}


def byte_level(pre, texts, n_pieces):
    """A byte-level tokenizer as the families have it, trained on these texts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in PATTERNS)
    first = {"smollm": [pre_tokenizers.Digits(individual_digits=True)], "gpt-2": []}.get(pre)
    if first is None:
        first = [pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pre]), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, level]) if first else level
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=n_pieces, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in ("llama-bpe", "tekken"):
        tokenizer.post_processor = begins_with_bos()
    return tokenizer


def begins_with_bos():
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])


def sentencepiece(texts, n_pieces, metaspace=False):
    """As a converted sentencepiece model looks: any two pieces merge whose union is one, in the order of the unions."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=n_pieces - 259, show_progress=False))
    learnt = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece, _ in learnt)]
    id_of = {piece: id for id, piece in enumerate(pieces)}
    merges = []
    for piece in pieces[259:]:
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [(left, right) for left, right in pairs if left in id_of and right in id_of]
        merges += sorted(pairs, key=lambda pair: (id_of[pair[0]], id_of[pair[1]]))
    model = models.BPE(vocab=id_of, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = begins_with_bos()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


@functools.cache
def small_tokenizer(kind):
    texts = (ROOT / "LICENSE").read_text().splitlines()
    return sentencepiece(texts, 330) if kind == "sentencepiece" else byte_level(kind, texts, 300)


def written(tokenizer, id):
    """What run.c prints for an id in the middle of a text."""
    piece = tokenizer.id_to_token(id)
    if piece is None:
        return b"[PAD%d]" % id
    if piece in SPECIAL:  # of these only an unknown piece shows; no byte-level vocabulary has one
        return b"<unk>" if piece == "<unk>" and tokenizer.model.unk_token else b""
    if piece.startswith("<0x") and len(piece) == 6:
        return bytes([int(piece[3:5], 16)])
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        byte_of = {character: i for i, character in enumerate(byte_characters())}
        return bytes(byte_of[character] for character in piece)
    return piece.replace("▁", " ").encode()


def byte_characters():
    """The character that byte-level vocabularies write for each byte, by GPT-2's rule."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]


BLOCKS = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x400), (0x400, 0x500), (0x590, 0x600), (0x600, 0x700)]
BLOCKS += [(0x900, 0x980), (0xE00, 0xE80), (0x1100, 0x1200), (0x1E00, 0x1F00), (0x2000, 0x2070), (0x2150, 0x2190)]
BLOCKS += [(0x3040, 0x3100), (0x4E00, 0x5000), (0xAC00, 0xAE00), (0xFF00, 0xFF60), (0x1D400, 0x1D500)]
BLOCKS += [(0x1F300, 0x1F700), (0, 0x110000)]
PARTS = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\u00a0", "\u3000", "\u200d", "\u2581", "'s", "'LL", "n't"]
PARTS += ["'Re", "the", " of", " and", "Hello", "world", "ing", "1", "23", "456", "7890", "!", "...", "();", "//", "<|"]


def random_strings(n, seed):
    """Words, spaces, numbers, signs and letters of many scripts, in NFC."""
    rng = random.Random(seed)

    def letters():
        low, high = rng.choice(BLOCKS)
        drawn = [chr(rng.randrange(low, high)) for _ in range(rng.randint(1, 6))]
        return "".join(c for c in drawn if unicodedata.category(c) not in ("Cs", "Cn", "Co"))

    for _ in range(n):
        parts = [rng.choice(PARTS) if rng.random() < 0.5 else letters() for _ in range(rng.randint(1, 20))]
        yield unicodedata.normalize("NFC", "".join(parts))


def known_strings():
    path = SHARED / "ggml-vocab-llama-bpe.gguf.inp"
    return path.read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1] if path.exists() else []


def npm_tokenizer(name):
    path = NPM / name / "package" / "models" / "tokenizer.json"
    if not path.exists():
        pytest.skip(f"no {path}: npm was not there to fetch it")
    return tokenizers.Tokenizer.from_file(str(path))


def gguf_tokenizer(path):
    """The vocabulary of a GGUF file of SmolLM2 as the tokenizers library has it."""
    if not path.exists():
        pytest.skip("no SmolLM2: make smollm2")
    fields = gguf.GGUFReader(path).fields
    pieces, merges, types = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type"))
    vocab = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    digits, level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    tokenizer.add_special_tokens([piece for piece, type in zip(pieces, types) if type == 3])
    return tokenizer


def big_texts():
    return (ROOT / "run.c").read_text().splitlines() + list(random_strings(2000, 7))


VOCABULARIES = {
    "llama 3.1": lambda: npm_tokenizer("llama3_1"),
    "qwen 3": lambda: npm_tokenizer("qwen3"),
    "smollm2": lambda: gguf_tokenizer(SMOLLM2),
    "sentencepiece, a prefix": lambda: sentencepiece(big_texts(), 3000),
    "sentencepiece, metaspace": lambda: sentencepiece(big_texts(), 3000, metaspace=True),
    "gpt-2": lambda: byte_level("gpt-2", big_texts(), 3000),
    "tekken": lambda: byte_level("tekken", big_texts(), 3000),
}


@pytest.fixture(scope="module")
def library():
    return Library(ROOT / "build" / "run.so")


def ids_by(library, path):
    tokenizer = library.tokenizer(path)
    return lambda text: tokenizer.encode(text.encode(), bos=False)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids(library, name, tmp_path):
    """From the same directory, through both kinds of .gguf."""
    reference = VOCABULARIES[name]()
    family = Family("Llama", sizes(2, 2, 1, 1, n_layers=1))
    (tmp_path / "hf").mkdir()
    save(build(name, family, reference.get_vocab_size()), family, None, tmp_path / "hf")
    reference.save(str(tmp_path / "hf" / "tokenizer.json"))
    for out in ("model.flat.gguf", "model.gguf"):
        export(tmp_path / out, "--from", tmp_path / "hf")
        ids = ids_by(library, tmp_path / out)
        for text in [*known_strings(), *random_strings(2000, 1)]:
            if "metaspace" in name and out == "model.gguf" and text[:1] in (" ", "▁"):
                continue  # Metaspace puts no space in front of a space, sentencepiece does: GGUF has no key for that
            assert ids(text) == reference.encode(text, add_special_tokens=False).ids, (out, text)


@pytest.mark.skipif(not SMOLLM2.exists(), reason="no SmolLM2: make smollm2")
def test_ids_of_smollm2_in_both_files(library, tmp_path):
    export(tmp_path / "model.flat.gguf", "--from", SMOLLM2)
    of_gguf, of_flat = ids_by(library, SMOLLM2), ids_by(library, tmp_path / "model.flat.gguf")
    reference = gguf_tokenizer(SMOLLM2)
    for text in [*known_strings(), *random_strings(2000, 2)]:
        wanted = reference.encode(text, add_special_tokens=False).ids
        assert of_gguf(text) == wanted and of_flat(text) == wanted, text


# ---- PyTorch's checkpoints ----


def test_pytorch_checkpoints(tmp_path):
    """llama2.c's .pt; Meta's shards, the embedding cut along its columns or its rows."""
    c = Config(64, 96, 2, 4, 2, 80, 64, False)
    tensors = random_tensors(c)
    write_checkpoint(tmp_path / "want.bin", 0, c, tensors)
    parts = dict(wq="attention.wq", wk="attention.wk", wv="attention.wv", wo="attention.wo", w1="feed_forward.w1",
                 w2="feed_forward.w2", w3="feed_forward.w3")  # fmt: skip
    parts |= dict(attention_norm="attention_norm", ffn_norm="ffn_norm")
    state = {f"{name}.weight": torch.tensor(tensors[name]) for name in ("tok_embeddings", "norm", "output")}
    for ours, theirs in parts.items():
        state |= {f"layers.{l}.{theirs}.weight": torch.tensor(tensors[ours][l]) for l in range(2)}
    sizes = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2)
    checkpoint = dict(model={f"_orig_mod.{name}": w for name, w in state.items()})
    checkpoint["model_args"] = sizes | dict(vocab_size=80, max_seq_len=64)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    export(tmp_path / "m.bin", "--from", tmp_path / "ckpt.pt", "--version", 0)
    assert (tmp_path / "m.bin").read_bytes() == (tmp_path / "want.bin").read_bytes()
    for axis in (0, 1):
        folder = tmp_path / f"meta-{axis}"
        folder.mkdir()
        (folder / "params.json").write_text(json.dumps(sizes | dict(norm_eps=1e-5, vocab_size=-1)))
        for shard in (0, 1):
            cut = {"tok_embeddings.weight": axis}
            cut |= {name: 1 for name in state if name.endswith(("wo.weight", "w2.weight"))}
            part = {
                name: w if w.dim() == 1 else w.chunk(2, cut.get(name, 0))[shard].clone() for name, w in state.items()
            }
            torch.save(part, folder / f"consolidated.0{shard}.pth")
        export(tmp_path / f"{axis}.flat.gguf", "--from", folder)
        needs_same_logits(engine, tmp_path / "want.bin", tmp_path / f"{axis}.flat.gguf")
    (folder / "params.json").write_text(json.dumps(sizes | dict(norm_eps=1e-5, rope_theta=5e5, use_scaled_rope=True)))
    export(tmp_path / "n.flat.gguf", "--from", folder, code=2, naming=["--rope-factor"])
    export(tmp_path / "n.flat.gguf", "--from", folder, "--rope-factor", 8)
    divisors = Flat(tmp_path / "n.flat.gguf").tensors["rope_freqs.weight"]
    assert divisors.shape == (8,) and divisors[0] == 1 and divisors[-1] == 8


# ---- golden files: the same without torch, for `make test` ----

GOLDEN = dict(
    llama=Family("Llama", sizes(32, 44, 4, 2, rope_scaling=llama3(8.0)), PLAIN, dtype=torch.float16),
    mistral=Family("Mistral", sizes(24, 26, 3, 1, head_dim=10, sliding_window=19), dict(sliding_window=20)),
    qwen2=Family("Qwen2", sizes(32, 44, 4, 2, tied=True, base=1e6), BIASES, "qwen2", torch.float16),
    qwen3=Family("Qwen3", sizes(32, 38, 4, 2, head_dim=10, tied=True, base=1e6), NORMS, dtype=torch.float16),
    yarn=Family(
        "Llama", sizes(32, 44, 2, 1, rope_scaling=rope("yarn", 8.0)), dict(rope_scaling=SMALLER), dtype=torch.float16
    ),
)
GOLDEN_TEXT = "Permission is hereby granted, free of charge"


def write_golden():
    """One file with a tokenizer, the others without: it is the same code for all."""
    arrays = {}
    for name, family in GOLDEN.items():
        tokenizer = small_tokenizer(family.tokenizer) if family.tokenizer == "qwen2" else None
        vocab_size = tokenizer.get_vocab_size() if tokenizer else 79
        model = build(f"golden {name}", family, vocab_size)
        n = 64 if tokenizer else 96
        tokens = np.random.default_rng(1).integers(vocab_size, size=n).tolist()
        following, margin = greedy(lambda tokens: logits_of(model, tokens)[-1], tokens, N_GREEDY)
        assert margin > 2 * TOLERANCE
        assert difference(logits_of(plainer(family, model), tokens), logits_of(model, tokens)) > SEEN
        with tempfile.TemporaryDirectory() as folder:
            save(model, family, tokenizer, Path(folder) / "hf")
            dtype = "f16" if family.dtype == torch.float16 else "f32"
            out = HERE / f"{name}.flat.gguf"
            export(out, "--from", Path(folder) / "hf", "--dtype", dtype, "--name", f"golden {name}")
        arrays[f"{name}_tokens"] = np.array(tokens, np.int32)
        arrays[f"{name}_greedy"] = np.array(following, np.int32)
        arrays[f"{name}_log_probabilities"] = log_probabilities(logits_of(model, tokens)).astype(np.float32)
        if tokenizer:
            ids = tokenizer.encode(GOLDEN_TEXT).ids
            following, margin = greedy(lambda tokens: logits_of(model, tokens)[-1], ids, N_GREEDY)
            assert margin > 2 * TOLERANCE and EOS not in following
            text = GOLDEN_TEXT.encode() + b"".join(written(tokenizer, id) for id in following)
            arrays[f"{name}_text"] = np.frombuffer(text, np.uint8)
            arrays[f"{name}_text_ids"] = np.array(ids, np.int32)
    np.savez_compressed(HERE / "golden.npz", **arrays)


if __name__ == "__main__":
    if sys.argv[1:] != ["--golden"]:
        sys.exit("usage: conformance.py --golden")
    write_golden()
