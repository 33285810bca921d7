#!/usr/bin/env python3
"""Trains the model in the box, models/stories.flat.gguf: a small Llama that tells stories for children.

    python3 models/train.py [--data ../shared/corpora] [--out build/stories] [--minutes 58] [--resume]
    python3 export.py models/stories.flat.gguf --from build/stories --dtype q8

OUT becomes a Hugging Face directory (config.json, model.safetensors, tokenizer.json); beside these lie heldout.txt,
which the model never saw, log.csv and checkpoint.pt. Needs: pip install torch==2.13.0 tokenizers safetensors numpy

Time is the budget, and the learning rate follows it, so that a run always ends annealed however fast the machine is.
What counts is processor time over threads, so that a pause (SIGSTOP) or a busy machine costs nothing; --resume goes on
from the last checkpoint.
"""

import argparse
import csv
import ctypes
import json
import math
import os
import re
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that wait by spinning starve one another
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

VOCAB_SIZE, DIM, HIDDEN_DIM, N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM, N_CTX = 2048, 192, 512, 6, 6, 2, 32, 512
UNKNOWN, BOS, EOS = 0, 1, 2
EPS, ROPE_BASE = 1e-5, 10000.0
HELD_OUT = 14  # every 14th story of the file that marks its stories: 5% of all TinyStories text
STORIES, TALES = ["tinystories_toyrnn_2.1MB.txt", "tinystories_val_yuninxia_0.8MB.txt"], [
    "fairy_gutenberg.txt", "grimm_hunt.txt", "aesop4children.txt"]  # fmt: skip

# --- the text ----------------------------------------------------------------------------------------------
#
# Two files of TinyStories, the style to imitate, and public-domain fairy tales for breadth. All are brought to one
# form: plain quotes and dashes, a paragraph on one line, a blank line between paragraphs.

TYPOGRAPHY = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "…": "...", "_": "", "*": "",
                            "\ufeff": "", "\u00a0": " "})  # fmt: skip
OPENING = re.compile(r"Once (upon a time|there)|There once|One day, (a|an|two|three) |(Lily|Tom|Tim|Ben|Sara) and \w+ ")


def paragraphs_of(text, separator):
    """The paragraphs of a text, each on one line."""
    parts = re.split(separator, text.translate(TYPOGRAPHY).replace("\r", ""))
    return [" ".join(part.split()) for part in parts if part.strip()]


def read_stories(data):
    """TinyStories: those to learn from, and those held out."""
    marked, unmarked = [(data / name).read_text(encoding="utf-8", errors="ignore") for name in STORIES]
    stories = ["\n\n".join(paragraphs_of(story, r"\n")) for story in marked.split("<|endoftext|>")[:-1]]
    held_out = stories[HELD_OUT - 1 :: HELD_OUT]
    stories = [story for i, story in enumerate(stories) if (i + 1) % HELD_OUT and story not in held_out]
    story = []
    for paragraph in paragraphs_of(unmarked, r"\n\n"):  # this file does not say where a story begins: openings tell
        if OPENING.match(paragraph) and story:
            stories.append("\n\n".join(story))
            story = []
        story.append(paragraph)
    return stories, held_out


def read_tales(data):
    """Fairy tales in portions of about 2,000 characters; headings, lists, verse and notes are left out."""
    tales = []
    for name in TALES:
        text = (data / name).read_text(encoding="utf-8", errors="ignore")
        portion, size = [], 0
        for paragraph in paragraphs_of(text, r"\n\n+" if name.startswith("fairy") else r"\n+"):
            if len(paragraph) < 60 and '"' not in paragraph or re.search(r"[\[\]{}|=]|Gutenberg|http", paragraph):
                continue
            portion.append(paragraph)
            size += len(paragraph)
            if size > 2000:
                tales.append("\n\n".join(portion))
                portion, size = [], 0
    return tales


# --- the vocabulary ----------------------------------------------------------------------------------------


def train_tokenizer(texts):
    """BPE in the style of Llama 2: a space is U+2581 and goes in front, unknown characters become bytes."""
    t = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    prefix = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.normalizer = prefix
    t.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?[A-Za-z]+|▁?[0-9]|\n+|▁?[^▁A-Za-z0-9\n]+|▁"), "isolated")
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    t.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, limit_alphabet=90, show_progress=False))  # fmt: skip
    state = json.loads(t.to_str())  # the split was for learning: no merge crosses it, so that none is needed to encode
    state["pre_tokenizer"] = None
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are ordinary pieces
    t = Tokenizer.from_str(json.dumps(state))
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])  # fmt: skip
    return t


def encode(tokenizer, texts):
    """Each text as ids, from <s> to </s>."""
    return [np.array(encoding.ids + [EOS], np.int64) for encoding in tokenizer.encode_batch(texts)]


class Stream:
    """Texts one after the other without end, in a new order each time around."""

    def __init__(self, texts, rng):
        self.texts, self.rng, self.left, self.epochs = texts, rng, np.empty(0, np.int64), 0

    def take(self, n):
        while len(self.left) < n:
            self.left = np.concatenate([self.left] + [self.texts[i] for i in self.rng.permutation(len(self.texts))])
            self.epochs += 1
        taken, self.left = self.left[:n], self.left[n:]
        return taken


# --- the model ---------------------------------------------------------------------------------------------
#
# Llama. B: rows of a batch, T: tokens in a row. q, k, v lie in one matrix here, gate and up in another: fewer, larger
# products are faster. save() takes them apart.


def rmsnorm(x, weight):
    return F.rms_norm(x, (DIM,), weight, EPS)


def rope(x, cos, sin):
    """x: [B, n_heads, T, head_dim]; the pairs that turn are (i, i + head_dim / 2), as in Hugging Face's Llama."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.ones(DIM))
        self.qkv = nn.Linear(DIM, (N_HEADS + 2 * N_KV_HEADS) * HEAD_DIM, bias=False)
        self.o = nn.Linear(N_HEADS * HEAD_DIM, DIM, bias=False)
        self.gate_up = nn.Linear(DIM, 2 * HIDDEN_DIM, bias=False)
        self.down = nn.Linear(HIDDEN_DIM, DIM, bias=False)

    def forward(self, x, cos, sin, dropout):
        B, T, _ = x.shape
        qkv = self.qkv(rmsnorm(x, self.attn_norm)).view(B, T, -1, HEAD_DIM).transpose(1, 2)
        q, k, v = qkv.split([N_HEADS, N_KV_HEADS, N_KV_HEADS], 1)
        k, v = (part.repeat_interleave(N_HEADS // N_KV_HEADS, 1) for part in (rope(k, cos, sin), v))
        mixed = F.scaled_dot_product_attention(rope(q, cos, sin), k, v, is_causal=True)
        x = x + F.dropout(self.o(mixed.transpose(1, 2).reshape(B, T, -1)), dropout, self.training)
        gate, up = self.gate_up(rmsnorm(x, self.ffn_norm)).chunk(2, -1)
        return x + F.dropout(self.down(F.silu(gate) * up), dropout, self.training)


class Llama(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout
        self.embed, self.norm = nn.Embedding(VOCAB_SIZE, DIM), nn.Parameter(torch.ones(DIM))
        self.layers = nn.ModuleList(Layer() for _ in range(N_LAYERS))
        angles = torch.outer(torch.arange(N_CTX), ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                narrow = name.endswith(("o.weight", "down.weight"))  # what is added to x, 2 * n_layers times
                nn.init.normal_(weight, std=0.04 / math.sqrt(2 * N_LAYERS) if narrow else 0.04)

    def forward(self, tokens, targets):
        """tokens, targets: [B, T] -> -log p of each target, [B * T], 0 where it is -1; without targets the logits."""
        T = tokens.shape[1]
        cos, sin = self.cos[:T], self.sin[:T]
        x = F.dropout(self.embed(tokens), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x, cos, sin, self.dropout)
        logits = F.linear(rmsnorm(x, self.norm), self.embed.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, VOCAB_SIZE), targets.reshape(-1), ignore_index=-1, reduction="none")


# --- learning ----------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal: every direction moves equally far, those that are seldom seen too.
    So a small model learns more from a token than with AdamW. Ref: Jordan et al. 2024; the scale, which gives updates
    the size of AdamW's: Liu et al. 2025. Matrices of one shape are worked on together, in bf16."""

    def __init__(self, weights, lr, momentum=0.95, decay=0.1):
        groups = [[w for w in weights if w.shape == shape] for shape in sorted({w.shape for w in weights})]
        super().__init__([dict(params=group) for group in groups], dict(lr=lr, momentum=momentum, decay=decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            weights, state = group["params"], self.state[group["params"][0]]
            gradient = torch.stack([w.grad for w in weights])
            average = state.setdefault("average", torch.zeros_like(gradient))
            average.lerp_(gradient, 1 - group["momentum"])
            x = gradient.lerp_(average, group["momentum"]).bfloat16()
            tall = x.shape[-2] > x.shape[-1]
            x = x.mT.contiguous() if tall else x
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(5):  # Newton and Schulz: all singular values towards 1
                a = x @ x.mT
                x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
            update = (x.mT if tall else x).float() * 0.2 * max(x.shape[-2:]) ** 0.5
            for w, u in zip(weights, update):
                w.mul_(1 - group["lr"] * group["decay"]).sub_(u, alpha=group["lr"])


def keep_memory():
    """Asks glibc to keep freed memory: to hand it back and fault it in again at each step takes ten times the work."""
    M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
    for option, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 1 << 28)):
        ctypes.CDLL(None).mallopt(option, value)


def batch_of(stories, tales, share, T, n_tokens, rng):
    """tokens, targets: [B, T]. Each row comes from the stories (so many in a hundred are `share`) or from the tales."""
    rows = [(stories if rng.random() < share else tales).take(T + 1) for _ in range(n_tokens // T)]
    block = torch.from_numpy(np.stack(rows))
    return block[:, :-1], block[:, 1:].masked_fill(block[:, 1:] == BOS, -1)  # what follows a story is no one's guess


@torch.no_grad()
def bits_per_byte(model, texts, n_bytes):
    """As `run -m perplexity` scores each text by itself: behind BOS, in windows of 512 every 256, without </s>."""
    model.eval()
    rows = []
    for ids in texts:
        body = ids[1:-1]
        for start in range(0, max(1, len(body) - N_CTX + 257), 256):
            window = body[start : start + N_CTX - 1]
            first = 0 if start == 0 else N_CTX - 1 - 256  # scored before
            rows.append((np.concatenate([[BOS], window[:-1]]), np.where(np.arange(len(window)) >= first, window, -1)))
    rows.sort(key=lambda row: len(row[0]))
    nats = 0.0
    for i in range(0, len(rows), 16):
        n = max(len(tokens) for tokens, _ in rows[i : i + 16])
        tokens, targets = (
            torch.tensor(np.array([np.pad(r[k], (0, n - len(r[k])), constant_values=-k) for r in rows[i : i + 16]]))
            for k in range(2)  # tokens are filled up with 0, targets with -1
        )
        with torch.autocast("cpu", torch.bfloat16):
            nats += model(tokens, targets).double().sum().item()
    model.train()
    return nats / math.log(2) / n_bytes


@torch.no_grad()
def sample(model, tokenizer, n, temperature=0.8, top_p=0.9):
    model.eval()
    ids = torch.full((n, 1), BOS)
    for _ in range(300):
        logits = model(ids, None)[:, -1].float() / temperature
        p, order = logits.softmax(-1).sort(descending=True)
        p[p.cumsum(-1) - p > top_p] = 0
        ids = torch.cat([ids, order.gather(1, torch.multinomial(p, 1))], 1)
    model.train()
    texts = [row[1 : row.index(EOS) if EOS in row else None] for row in ids.tolist()]
    return [tokenizer.decode(text, skip_special_tokens=False) for text in texts]


def save(model, tokenizer, out):
    """The directory of Hugging Face that export.py reads."""
    tensors = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm}
    for i, layer in enumerate(model.layers):
        q, k, v = layer.qkv.weight.split([N_HEADS * HEAD_DIM, N_KV_HEADS * HEAD_DIM, N_KV_HEADS * HEAD_DIM])
        gate, up = layer.gate_up.weight.chunk(2)
        tensors |= {f"model.layers.{i}.{name}.weight": weight for name, weight in [
            ("input_layernorm", layer.attn_norm), ("post_attention_layernorm", layer.ffn_norm), ("self_attn.q_proj", q),
            ("self_attn.k_proj", k), ("self_attn.v_proj", v), ("self_attn.o_proj", layer.o.weight),
            ("mlp.gate_proj", gate), ("mlp.up_proj", up), ("mlp.down_proj", layer.down.weight)]}  # fmt: skip
    save_file({name: weight.detach().clone() for name, weight in tensors.items()}, out / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", hidden_size=DIM,
        intermediate_size=HIDDEN_DIM, num_hidden_layers=N_LAYERS, num_attention_heads=N_HEADS,
        num_key_value_heads=N_KV_HEADS, head_dim=HEAD_DIM, vocab_size=VOCAB_SIZE, rms_norm_eps=EPS,
        max_position_embeddings=N_CTX, rope_theta=ROPE_BASE, rope_scaling=None, tie_word_embeddings=True,
        attention_bias=False, mlp_bias=False, torch_dtype="float32", bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))


# --- the run -----------------------------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains the model in the box.")
    parser.add_argument("--data", type=Path, default=Path("../shared/corpora"), help="the folder with the texts")
    parser.add_argument("--out", type=Path, default=Path("build/stories"))
    parser.add_argument("--minutes", type=float, default=58, help="processor time over threads")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--decay", type=float, default=0.1, help="of weights, per step and unit of learning rate")
    parser.add_argument("--batch", type=int, default=4096, help="tokens per step")
    parser.add_argument("--shares", type=float, nargs=2, default=(0.35, 0.85), help="of stories, at start and end")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def read_data(o):
    """The tokenizer; stories, tales and held-out stories as ids; the held-out bytes."""
    stories, held_out = read_stories(o.data)
    tales = read_tales(o.data)
    (o.out / "heldout.txt").write_text("\n<|endoftext|>\n".join(held_out), encoding="utf-8")
    saved = o.out / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(saved)) if o.resume else train_tokenizer(stories + tales[::20])
    parts = [encode(tokenizer, texts) for texts in (stories, tales, held_out)]
    for name, part in zip(("stories", "tales", "held out"), parts):
        print(f"{name}: {len(part)} texts, {sum(map(len, part)):,} tokens", flush=True)
    return tokenizer, *parts, sum(len(text.encode()) for text in held_out)


def learn(model, optimizers, batch, rate):
    """One step; the loss."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*batch).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main():
    o = parse_arguments()
    keep_memory()
    torch.set_num_threads(o.threads)
    torch.manual_seed(1)
    o.out.mkdir(parents=True, exist_ok=True)
    tokenizer, stories, tales, held_out, n_bytes = read_data(o)

    model = Llama(o.dropout)
    matrices = [w for w in model.layers.parameters() if w.dim() == 2]
    others = [model.embed.weight, *(w for w in model.parameters() if w.dim() == 1)]
    optimizers = [Muon(matrices, o.lr, decay=o.decay), torch.optim.AdamW(others, o.lr, (0.9, 0.98), weight_decay=0.0)]
    print(f"{sum(w.numel() for w in model.parameters()):,} parameters; held out: {n_bytes:,} bytes", flush=True)
    seconds, step = 0.0, 0
    if o.resume:
        state = torch.load(o.out / "checkpoint.pt")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        seconds, step = state["seconds"], state["step"]
    rng = np.random.default_rng(step)
    story_stream, tale_stream = Stream(stories, rng), Stream(tales, rng)

    def checkpoint():
        states = [optimizer.state_dict() for optimizer in optimizers]
        state = dict(model=model.state_dict(), optimizers=states, seconds=seconds, step=step)
        torch.save(state, o.out / "checkpoint.partial")
        (o.out / "checkpoint.partial").replace(o.out / "checkpoint.pt")
        save(model, tokenizer, o.out)

    log = csv.writer(open(o.out / "log.csv", "a" if o.resume else "w", buffering=1, newline=""))
    if not o.resume:
        log.writerow(["step", "tokens", "seconds", "train_loss", "heldout_bits_per_byte"])
    budget, losses, next_check, next_save = 60 * o.minutes, [], seconds + 60, seconds + 300
    before = time.process_time()
    while seconds < budget:
        progress = seconds / budget
        rate = o.lr * min(1, step / 100) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
        share = o.shares[0] + (o.shares[1] - o.shares[0]) * max(0, (progress - 0.4) / 0.6)
        T = 256 if progress < 0.6 else N_CTX
        losses.append(learn(model, optimizers, batch_of(story_stream, tale_stream, share, T, o.batch, rng), rate))
        step += 1
        now = time.process_time()
        seconds, before = seconds + (now - before) / o.threads, now
        if seconds > next_check or seconds >= budget:
            bits = bits_per_byte(model, held_out, n_bytes)
            log.writerow([step, step * o.batch, round(seconds), round(np.mean(losses), 4), round(bits, 4)])
            print(f"{seconds / 60:5.1f} min  step {step}  loss {np.mean(losses):.3f}  held out {bits:.4f} bits per byte"
                  f"  stories x{story_stream.epochs} tales x{tale_stream.epochs}", flush=True)  # fmt: skip
            losses, next_check = [], seconds + 120
        if seconds > next_save:
            checkpoint()
            next_save = seconds + 300
    checkpoint()
    samples = "\n\n---\n\n".join(sample(model, tokenizer, 10))
    (o.out / "samples.txt").write_text(samples + "\n", encoding="utf-8")
    print(samples)


if __name__ == "__main__":
    main()
